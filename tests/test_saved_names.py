"""Checkpoints that were saved before still load: no weight changes its name, and a missing one starts anew."""

import pytest
import torch

from modeling_interdomain import InterdomainForCausalLM
from tests.conftest import MIXERS, VARIANTS

# As version 0.1 saved them, for the first Interdomain or S4D layer of each arrangement.
SOFTMAX = {f"{name}_proj.weight" for name in "qkvo"}
RECURRENCE = {f"recurrence.{name}" for name in ("log_dt", "log_a_real", "a_imag", "B", "C")}
NORMS = {"k_bias", "v_bias", "k_norm.weight", "v_norm.weight"}
BARE = SOFTMAX | RECURRENCE | {"q_conv.weight", "k_conv.weight"}
PLAIN = BARE | NORMS
S4D = PLAIN - {"q_proj.weight", "q_conv.weight"} | {"v_conv.weight", "recurrence.readout"}
FOURIER = {"feature_map.frequencies", "feature_map.weights"}
SSD = SOFTMAX | {"dt_proj.weight", "recurrence.A_log", "recurrence.D", "recurrence.dt_bias"}
SCAN = {f"{name}_proj.weight" for name in ("v", "x", "dt", "g", "o")} | {"v_conv.weight", "v_conv.bias"}
BIASES = {f"{name}_proj.bias" for name in "qkvo"}
POINTS = {f"recurrence.point_{name}" for name in ("keys", "values", "bias", "log_scale")}
WINDOW = SOFTMAX | RECURRENCE - {"recurrence.C"} | POINTS | {f"{name}_map" for name in "qkv"}
WINDOW |= {"share_proj.weight", "share_proj.bias", "memory_gate", "write_gate", "write_bias", "point_weight"}


def linear(*names):
    """Maps with a bias."""
    return {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}


NAMES = dict.fromkeys([*MIXERS, *VARIANTS], PLAIN) | {
    "softmax": SOFTMAX,
    "identity": PLAIN - {"recurrence.C"},
    "s4d": S4D,
    "s4d-grouped": S4D | {"g_proj.weight"},
    "s4d-rope": S4D,
    "single-input": PLAIN | {"v_conv.weight"},
    "linear-readout": S4D - {"v_conv.weight"},
    "fourier": BARE | FOURIER,
    "fourier-shifted": PLAIN | FOURIER | {"feature_map.phases"},
    "ssd": SSD,
    "cheems": SSD,
    "mamba2": SSD
    | {f"{name}_conv.{kind}" for name in "qkv" for kind in ("weight", "bias")}
    | {"g_proj.weight", "norm.weight"},
    "selective-scan": SCAN | {"recurrence.A_log", "recurrence.D", "recurrence.dt_bias"},
    "window": WINDOW | BIASES,
    "window-alone": SOFTMAX,
    "gated": BARE | {"g_proj.weight", "o_norm.weight"},
    "forget-gates": PLAIN | linear("forget_proj", "write_proj"),
    "delta-rule": PLAIN | linear("forget_proj", "write_proj", "delta_proj"),
    "warped-time": PLAIN | linear("warp_proj", "write_proj"),
}
NORMS_OF_A_LAYER = {"input_layernorm.weight", "post_attention_layernorm.weight"}
EXPERTS = {f"expert_{name}" for name in ("keys", "down", "up")}
FEED_FORWARD = {
    "mlp": {f"{name}_proj.weight" for name in ("gate", "up", "down")},
    "cdmoe": EXPERTS | {f"{name}_proj.weight" for name in ("query", "up", "down")},
}
ATTENTION = {
    "softmax": SOFTMAX,
    "inner_function": SOFTMAX - {"v_proj.weight"}
    | {f"inner_function.{name}" for name in ("query_proj.weight", "keys", "values")},
}
SPARSE = {f"{name}.weight" for name in ("q_proj", "k_proj", "q_conv", "k_conv", "gate")} | {"hash.H"}
SPARSE |= {f"scorer.{name}_{i}" for name in ("weight", "bias") for i in range(3)}
MASKS = {None: set(), "position": {"dynamic_mask.table"}, "value": {"dynamic_mask.A", "dynamic_mask.dt_proj.weight"}}


def names_of(prefix: str, names: set[str]) -> set[str]:
    return {prefix + name for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_names_stay(name, make_config):
    config = make_config(name)
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i, mixer in enumerate(config.mixers_per_layer):
        feed_forward = config.feed_forwards_per_layer[i]
        bare = feed_forward == "none"
        expected |= names_of(f"model.layers.{i}.", {"input_layernorm.weight"} if bare else NORMS_OF_A_LAYER)
        expected |= names_of(f"model.layers.{i}.mlp.", set() if bare else FEED_FORWARD[feed_forward])
        own = ATTENTION[mixer] | MASKS[config.dynamic_mask] if mixer in ATTENTION else NAMES[name]
        if config.sparse_per_layer[i] == "hax":
            own = own | names_of("sparse.", SPARSE)
        expected |= names_of(f"model.layers.{i}.token_mixer.", own)
    assert set(InterdomainForCausalLM(config).state_dict()) == expected


START = {
    "recurrence.readout": lambda x: 0.005 < x.std() < 0.05,
    "recurrence.log_dt": lambda x: bool((x < -2).all()),
    "k_bias": lambda x: bool((x == 0).all()),
    "k_norm.weight": lambda x: bool((x == 1).all()),
    "feature_map.weights": lambda x: bool((x == 0).all()),
    "feature_map.phases": lambda x: bool(((x >= 0) & (x <= 2 * torch.pi)).all()) and x.std() > 1,
}


@pytest.mark.parametrize("missing", START)
def test_one_missing_weight_starts_as_its_class_says(missing, make_config, tmp_path):
    model = InterdomainForCausalLM(make_config("s4d" if "readout" in missing else "fourier-shifted"))
    state = {name: torch.full_like(x, 7.0) for name, x in model.state_dict().items() if not name.endswith(missing)}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded, report = InterdomainForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {name.split("token_mixer.")[1] for name in report["missing_keys"]} == {missing}
    for name, x in loaded.named_parameters():
        assert START[missing](x) if name.endswith(missing) else (x == 7).all(), name
