"""The selective scan as a mixer: its start, its size, its equations, and what it refuses."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from modeling_interdomain.mixers.selective_scan.mixer import SelectiveScanMixer
from tests.decay_checks import check_control


def _mixer(model, layer: int = 0) -> SelectiveScanMixer:
    return model.model.layers[layer].token_mixer


def test_parameters_and_state_are_those_of_mamba_130m():
    config = InterdomainConfig(
        vocab_size=50_280, hidden_size=768, num_hidden_layers=24, num_attention_heads=12, token_mixers="selective_scan",
        feed_forwards="none", tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = InterdomainForCausalLM(config)
    assert model.num_parameters() == 129_135_360  # of state-spaces/mamba-130m-hf
    layer = {"recurrent": 1536 * 16, "convolution": 1536 * 3}
    assert config.state_sizes(8192) == {name: 24 * n for name, n in layer.items()} | {"keys_values": 0}
    assert config.layer_types == ["linear_attention"] * 24 and config.rotated_dims == []


def test_the_start(make_config):
    config = make_config("selective-scan", time_step_min=0.01, time_step_max=0.02)
    mixer = _mixer(InterdomainForCausalLM(config))
    recurrence = mixer.recurrence
    torch.testing.assert_close(recurrence.A_log.exp(), torch.arange(1.0, 6.0)[:, None].expand(5, 40))
    assert (recurrence.D == 1).all()
    step = torch.nn.functional.softplus(recurrence.dt_bias)
    assert ((step > 0.0099) & (step < 0.0201)).all() and step.std() > 0
    assert 0.8 < mixer.dt_proj.weight.std() * 9**0.5 < 1.2  # rank 3


def test_the_output_is_that_of_the_equations(make_model):
    mixer, x = _mixer(make_model("selective-scan", scan_bias=True)), torch.randn(1, 11, 32, dtype=torch.float64)
    silu, recurrence = torch.nn.functional.silu, mixer.recurrence
    before = torch.nn.functional.pad(mixer.v_proj(x)[0].T, (3, 0))
    value = silu(torch.nn.functional.conv1d(before, mixer.v_conv.weight, mixer.v_conv.bias, groups=40).T)
    dt, b, c = mixer.x_proj(value).split([3, 5, 5], dim=-1)
    step = (mixer.dt_proj(dt) + recurrence.dt_bias).exp().log1p()
    state, outputs = torch.zeros(40, 5, dtype=torch.float64), []
    for t in range(11):
        decay = (-step[t, :, None] * recurrence.A_log.exp().T).exp()
        state = decay * state + step[t, :, None] * value[t, :, None] * b[t]
        outputs.append(state @ c[t] + recurrence.D * value[t])
    expected = mixer.o_proj(torch.stack(outputs) * silu(mixer.g_proj(x)[0]))
    torch.testing.assert_close(mixer(x)[0][0], expected)


CONTROLS = {
    "biases": {"scan_bias": True, "scan_conv_bias": False},
    "output norm": {"use_output_norm": True, "conv_kernel": 1},
    "beside rotated softmax": {
        "num_hidden_layers": 2,
        "feed_forwards": "mlp",
        "token_mixers": ["softmax", "selective_scan"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_placement": "after",
    },
}


@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_decodes_and_knows_no_pads(name, make_model, random_ids, assert_same):
    model = make_model("selective-scan", **CONTROLS[name])
    definition = make_model("selective-scan", backend="recurrent", **CONTROLS[name])
    check_control(model, definition, random_ids(2, 20), assert_same)


def test_kept_rates_follow_the_parameters(make_model, random_ids):
    model, ids = make_model("selective-scan"), random_ids(1, 8)
    with torch.no_grad():
        before = model(ids).logits
        for layer in range(2):
            _mixer(model, layer).recurrence.A_log += 1
        after = model(ids).logits
    fresh = make_model("selective-scan")
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids).logits, after) and not torch.equal(before, after)


MISTAKES = {
    "channels": ({"scan_channels": 0}, "scan_channels must be a positive integer or None, got 0"),
    "rank": ({"scan_step_rank": -1}, "scan_step_rank must be a positive integer or None, got -1"),
    "size": ({"scan_state_size": 0}, "scan_state_size must be a positive integer, got 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name, make_config):
    changes, message = MISTAKES[name]
    with pytest.raises(StrictDataclassError) as error:
        make_config("selective-scan", **changes)
    said = str(error.value.__cause__ or error.value)
    assert message in said and said.count("\n") <= 1
