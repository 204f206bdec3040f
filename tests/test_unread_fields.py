"""A setting that no layer reads is named, one that some layer reads is not: each field, with each kind of layer."""

import logging
from dataclasses import fields

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from modeling_interdomain.layers.configuration import ModelFields
from modeling_interdomain.mixers.unread import _READERS
from tests.conftest import ROPE

SIZES = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "state_size": 4}
SIZES |= {"num_attention_heads": 4}
# With what lets the fields of their own show in 12 tokens.
MIXERS = {name: {} for name in ("interdomain", "selective_scan", "softmax")} | {
    "s4d": {"state_input": "key_value"},
    "ssd": {"ssd_conv_kernel": 3},
    "inner_function": {"inner_values_per_token": 3},
    "window": {"attention_window": 4, "attention_sinks": 1},
    "window alone": {"token_mixers": "window", "attention_window": 4, "window_memory": False},
}
# Values where no other follows from the default.
VALUES = {
    "rope_parameters": ROPE,
    "sparse_hash_center": None,
    "ssd_activation": "silu",
    "ssd_dt_limit": [0.1, 0.2],
    "state_input": "generic",
    "scan_channels": 48,
    "scan_step_rank": 3,
    "ssd_heads": 2,
    "ssd_head_dim": 4,
    "sparse_num_heads": 2,
    "num_experts": 9,
    "expert_heads": 2,
    "experts_per_head": 3,
}
# Beside sizes: what says how layers start, how they are computed, or what a classifier or a cache does; and what is
# refused where nothing reads it.
UNNAMED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "conv_kernel", "feature_dim", "state_size", "max_position_embeddings"),
    *("token_mixers", "feed_forwards", "sparse_attention", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
    *("initializer_range", "start", "modes", "input_matrix_init", "coefficient_init", "coefficient_init_scale"),
    *("coefficient_init_noise", "output_init_rms", "query_init", "time_step_min", "time_step_max"),
    *("time_step_spacing", "sparse_gate_init", "sparse_query_init", "product"),
    *("backend", "chunk_size", "residual_in_fp32", "state_dtype", "max_rollback", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cls_token", "patch_size", "num_channels", "aux_loss_coef"),
    *("gates", "delta_rule", "dynamic_mask", "dynamic_mask_window", "rope_placement", "bidirectional"),
}


def _declared() -> dict:
    kinds = [
        kind for kind in InterdomainConfig.__mro__ if issubclass(kind, ModelFields) and kind is not InterdomainConfig
    ]
    return {field.name: field for kind in kinds for field in fields(kind)}


def _another(name: str):
    if name in VALUES:
        return VALUES[name]
    declared = [vars(kind).get("_choices", {}) for kind in InterdomainConfig.__mro__]
    default = _declared()[name].default
    for choices in declared:
        if name in choices:
            return next(x for x in choices[name] if x not in (None, default))
    if isinstance(default, bool):
        return not default
    return default / 2 + 0.25 if isinstance(default, float) else default + 1


def _made(caplog, **options) -> tuple[dict, list[str]]:
    """What there is of a model after a backward pass, and what was said of its fields."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        config = InterdomainConfig(**SIZES | options)
    said = [record.message for record in caplog.records if record.message.startswith("No layer of this")]
    torch.manual_seed(0)
    model = InterdomainForCausalLM(config).train()
    ids = torch.arange(24).view(2, 12) % 7
    found = model(ids, labels=ids)
    found.loss.backward()
    tensors = {name: (x, x.grad) for name, x in model.named_parameters()} | {"found": (found.loss, found.logits)}
    return {name: [x is not None and (x.shape, x.sum().item()) for x in pair] for name, pair in tensors.items()}, said


def test_each_field_is_named_or_has_a_reason_not_to_be():
    assert set(_READERS) | UNNAMED == set(_declared())
    assert not set(_READERS) & UNNAMED


@pytest.fixture(autouse=True)
def heard(monkeypatch):
    """Once a process would be once a test run."""
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.warning)


@pytest.mark.parametrize("mixer", MIXERS)
def test_what_has_no_effect_is_named(mixer, caplog):
    own = {"token_mixers": mixer} | MIXERS[mixer]
    plain, said = _made(caplog, **own)
    assert not said
    for name, value in ((name, _another(name)) for name in _READERS):
        if (name, value) in own.items():
            continue
        try:
            made, said = _made(caplog, **own | {name: value})
        except StrictDataclassError:
            continue  # refused, which says as much
        assert (made == plain) == bool(said), f"{name} in {mixer}: {said}"


@pytest.mark.parametrize("load", [InterdomainConfig.from_pretrained, InterdomainForCausalLM.from_pretrained])
def test_what_has_no_effect_is_named_where_a_folder_is_loaded(load, caplog, tmp_path):
    InterdomainForCausalLM(InterdomainConfig(**SIZES)).save_pretrained(tmp_path)
    for options, wanted in (({}, False), ({"learned_state": True}, False), ({"attention_window": 8}, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(tmp_path, **options)
        assert ("reads attention_window (window would)" in caplog.text) is wanted
