"""State space duality as a mixer: its start, its controls, what it refuses, and what only its layers have."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from modeling_interdomain.mixers.ssd.mixer import SSDMixer
from modeling_interdomain.ops.ssd.entry import ssd_attention
from tests.conftest import ROPE
from tests.decay_checks import check_control

CHEEMS_320M = {
    "vocab_size": 50_288,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "token_mixers": "ssd",
    "rope_parameters": ROPE,
    "rope_placement": "after",
}


def _mixer(model, layer: int = 0) -> SSDMixer:
    return model.model.layers[layer].token_mixer


@pytest.mark.parametrize(
    ("changes", "parameters", "recurrent"),
    [
        ({}, 1_385_508, 12 * 64 * 128),
        ({"ssd_dt_bias": None}, 1_385_508 - 12, 12 * 64 * 128),
        ({"hidden_size": 2048, "num_attention_heads": 32}, 8_978_528, 32 * 64 * 128),
    ],
)
def test_parameters_and_state_are_those_of_the_formula(changes, parameters, recurrent):
    """2 d H P + 2 d G N + d H + 3 H, and H P N numbers a layer."""
    config = InterdomainConfig(**CHEEMS_320M | {"num_hidden_layers": 2} | changes)
    with torch.device("meta"):
        model = InterdomainForCausalLM(config)
    assert sum(p.numel() for p in _mixer(model).parameters()) == parameters
    assert config.state_sizes(8192) == {"recurrent": 2 * recurrent, "convolution": 0, "keys_values": 0}
    assert config.layer_types == ["linear_attention"] * 2 and config.rotated_dims == [128]


def test_the_start(make_config):
    recurrence = _mixer(InterdomainForCausalLM(make_config("ssd", ssd_dt_bias="zero"))).recurrence
    torch.testing.assert_close(recurrence.A_log.exp(), torch.arange(1.0, 5.0))
    assert (recurrence.D == 1).all() and (recurrence.dt_bias == 0).all()
    config = make_config("ssd", ssd_dt_bias="time_step", time_step_min=0.01, time_step_max=0.02)
    step = torch.nn.functional.softplus(_mixer(InterdomainForCausalLM(config)).recurrence.dt_bias)
    assert ((step > 0.0099) & (step < 0.0201)).all() and step.std() > 0


def test_the_output_is_that_of_the_equations(make_model, random_ids):
    """Cheems' layer written out, rotations in complex numbers: what is rotated meets by the distance alone."""
    model = make_model("ssd", ssd_groups=2)
    mixer, x = _mixer(model), torch.randn(1, 11, 32, dtype=torch.float64)
    positions = torch.arange(11)[None]
    cos_sin = model.model.rotary_embs["6"](x, positions)
    found = mixer(x, position_embeddings={6: cos_sin})[0]

    rates = 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turns = torch.polar(torch.ones(11, 3, dtype=torch.float64), positions[0][:, None] * rates)
    c, b = (p(x)[0].unflatten(-1, (2, 2, 3)) for p in (mixer.q_proj, mixer.k_proj))
    c, b = (torch.complex(y[:, :, 0], y[:, :, 1]) * turns[:, None] for y in (c, b))
    scores = (c[:, None] * b.conj()).real.sum(-1).repeat_interleave(2, dim=-1)  # [t, i, H]
    recurrence = mixer.recurrence
    step = torch.nn.functional.softplus(mixer.dt_proj(x)[0] + recurrence.dt_bias)
    sums = (-step * recurrence.A_log.exp()).cumsum(0)
    weights = scores * (sums[:, None] - sums).exp() * step
    weights = weights.where(torch.ones(11, 11).tril().bool()[..., None], 0)
    v = mixer.v_proj(x)[0].unflatten(-1, (4, 8))
    y = torch.einsum("tih,ihp->thp", weights, v) + recurrence.D[:, None] * v
    torch.testing.assert_close(found[0], mixer.o_proj(y.flatten(1)))


CONTROLS = {
    "decay alone": ({"rope_parameters": None, "rope_placement": None, "ssd_skip": False}, {"D"}),
    "Conv1d + D": ({"rope_parameters": None, "rope_placement": None, "ssd_conv_kernel": 4}, set()),
    "no bias of dt": ({"ssd_dt_bias": None}, {"dt_bias"}),
    "norm before the gate": ({"ssd_norm": "before_gate", "use_output_gate": True, "ssd_groups": 4}, set()),
    "norm without a gate": ({"ssd_norm": "after_gate", "use_output_norm": True}, set()),
    "biases": ({"ssd_bias": True, "ssd_heads": 3, "ssd_head_dim": 5}, set()),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_decodes_rolls_back_and_knows_no_pads(name, make_model, random_ids, assert_same):
    changes, missing = CONTROLS[name]
    model = make_model("ssd", **changes)
    parameters = {name for name, _ in _mixer(model).recurrence.named_parameters()}
    assert parameters == {"A_log", "D", "dt_bias"} - missing
    check_control(model, make_model("ssd", backend="recurrent", **changes), random_ids(2, 20), assert_same)


def test_the_pads_on_the_right_that_leak_into_a_mamba(random_ids, make_model):
    """Transformers' Mamba-2 keeps the pads behind a row in the window of its convolution; here they are not there."""
    torch.manual_seed(0)
    ids, mask = random_ids(1, 9), torch.ones(1, 9, dtype=torch.long)
    mask[:, 6:] = 0
    after = torch.nn.functional.pad(mask, (0, 1), value=1)

    def difference(model, name, cache=None) -> float:
        with torch.no_grad():
            alone = model(torch.cat([ids[:, :6], ids[:, :1]], dim=1)).logits[:, -1]
            given = {} if cache is None else {name: cache}
            kept = model(ids, attention_mask=mask, use_cache=True, **given)[name]
            found = model(ids[:, :1], attention_mask=after, use_cache=True, **{name: kept}).logits[:, -1]
        return ((found - alone).norm() / alone.norm()).item()

    shape = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "vocab_size": 48}
    mamba = Mamba2ForCausalLM(Mamba2Config(**shape, num_hidden_layers=2)).eval()
    assert difference(mamba, "cache_params") > 1e-3
    assert difference(make_model("mamba2"), "past_key_values") < 1e-9


def test_the_norm_of_groups_is_that_of_mamba2(make_model):
    mixer = _mixer(make_model("mamba2"))
    theirs = MambaRMSNormGated(40, group_size=20, eps=mixer.config.rms_norm_eps)
    theirs.weight.data.copy_(mixer.norm.weight)
    x, output = torch.randn(2, 3, 32).double(), torch.randn(2, 3, 40).double()
    expected = theirs(output.float(), mixer.g_proj(x).float())
    torch.testing.assert_close(mixer._way_out(output, x).float(), expected)


def test_limits_of_the_step(make_model):
    recurrence = _mixer(make_model("mamba2", ssd_dt_limit=[0.1, 0.1])).recurrence
    query, key, value = (torch.randn(1, 9, 2, 5), torch.randn(1, 9, 2, 5), torch.randn(1, 9, 4, 10))
    query, key, value = (x.double() for x in (query, key, value))
    found, _ = recurrence(query, key, value, 100 * torch.randn(1, 9, 4).double())
    decays = (-0.1 * recurrence.A_log.exp()).expand(1, 9, 4)
    expected, _ = ssd_attention(query, key, 0.1 * value, decays)
    torch.testing.assert_close(found, expected + recurrence.D[:, None] * value)


def test_a_residual_stream_in_float32(make_model, random_ids):
    """What the layers add to it is rounded, the stream itself is not."""
    ids = random_ids(2, 15)
    exact = make_model("mamba2", dtype=torch.float32, state_dtype="float32")(ids, output_hidden_states=True)
    streams = []
    for wide in (True, False):
        model = make_model("mamba2", dtype=torch.bfloat16, state_dtype="float32", residual_in_fp32=wide)
        found = model(ids, output_hidden_states=True)
        assert found.logits.dtype == torch.bfloat16
        streams.append(found.hidden_states[1])
        assert (found.logits - exact.logits).norm() / exact.logits.norm() < 0.05
    assert [x.dtype for x in streams] == [torch.float32, torch.bfloat16]


MISTAKES = {
    "groups": ({"ssd_groups": 3}, 'ssd_groups = 3 must divide the 4 heads of "ssd" layers'),
    "odd": ({"ssd_state_size": 7}, "with rope_placement ssd_state_size must be even, got 7"),
    "length": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        'rope_type "dynamic" changes its angles with the length',
    ),
    "long": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "short_factor": [1.0] * 3,
                "long_factor": [2.0] * 3,
                "original_max_position_embeddings": 16,
            }
        },
        'rope_type "longrope" changes its angles with the length',
    ),
    "heads": ({"ssd_heads": 0}, "ssd_heads must be a positive integer or None, got 0"),
    "activation": ({"ssd_activation": "soft"}, "ssd_activation must be None or an activation of Transformers"),
    "limit": ({"ssd_dt_limit": [0.2, 0.1]}, "ssd_dt_limit must be None or"),
    "bias": ({"ssd_dt_bias": "one"}, "ssd_dt_bias must be one of None, zero, time_step; got 'one'"),
    "kernel": ({"ssd_conv_kernel": 0}, "ssd_conv_kernel must be a positive integer, got 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name, make_config):
    changes, message = MISTAKES[name]
    with pytest.raises(StrictDataclassError) as error:
        make_config("ssd", **changes)
    said = str(error.value.__cause__ or error.value)
    assert message in said and said.count("\n") <= 1
    if name in ("groups", "odd", "length"):  # nobody else's concern
        make_config("interdomain", **changes)
