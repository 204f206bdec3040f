"""Quantised weights in vLLM's linear layers, as "compressed-tensors" lays them out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from tests.conftest import EXPERTS, ROPE
from tests.vllm.engines import engine, start

# In units that the kernels of a CPU multiply: 32 numbers.
HYBRID = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "token_mixers": ["interdomain", "window", "softmax", "ssd", "s4d"],
    "feed_forwards": ["mlp", "mlp", "cdmoe", "mlp", "none"],
    "num_attention_heads": 2,
    "rope_parameters": ROPE,
    "ssd_state_size": 32,
    **EXPERTS,
    "expert_key_dim": 32,
}
WEIGHTS = {
    8: {"num_bits": 8, "strategy": "channel", "group_size": None},
    4: {"num_bits": 4, "strategy": "group", "group_size": 32},
}
INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
LARGEST = {8: 127, 4: 7}


def quantize(model, folder, bits: int) -> None:
    """The linear maps of a saved model but those that are too narrow, and of the model here: what they stand for."""
    file, ignored = folder / "model.safetensors", ["lm_head"]
    tensors = load_file(file)
    for name, linear in model.named_modules():
        if not isinstance(linear, nn.Linear) or name == "lm_head":
            continue
        weight = linear.weight.detach().float()
        if weight.shape[0] % 32 or weight.shape[1] % 32:
            ignored.append(name)
            continue
        groups = weight.unflatten(1, (-1, 32)) if bits == 4 else weight[:, None]
        scale = (groups.abs().amax(2, keepdim=True) / LARGEST[bits]).to(linear.weight.dtype)
        found = (groups / scale).round().clamp(-LARGEST[bits], LARGEST[bits])
        linear.weight.data = (found * scale).flatten(1).to(linear.weight.dtype)
        tensors[f"{name}.weight_scale"] = scale[..., 0]
        if bits == 8:
            tensors[f"{name}.weight"] = found.flatten(1).to(torch.int8)
            linear.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
        else:
            del tensors[f"{name}.weight"]
            digits = (found.flatten(1).int() + 8).unflatten(1, (-1, 8)) << 4 * torch.arange(8, dtype=torch.int32)
            tensors[f"{name}.weight_packed"] = digits.sum(2, dtype=torch.int32)
            tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
    save_file(tensors, file, metadata={"format": "pt"})
    group = {"targets": ["Linear"], "weights": WEIGHTS[bits] | {"type": "int", "symmetric": True, "dynamic": False}}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {"group_0": group | {"input_activations": INPUTS if bits == 8 else None}},
    }
    (folder / "config.json").write_text(json.dumps(config))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """A token's numbers as 8 bits hold them."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return ((x / scale).round() * scale).to(x.dtype)


@pytest.mark.parametrize(
    "bits, dtype, tolerance",
    [(8, torch.float32, 0.02), (8, torch.bfloat16, 0.15), (4, torch.bfloat16, 0.15)],
    ids=["8 bits", "8 bits, bfloat16", "4 bits"],
)
def test_quantized_weights(make_folder, random_ids, bits, dtype, tolerance):
    """Log-probabilities are those of a model with the numbers that the weights, and at 8 bits the inputs, stand for.

    But for inputs that lie between two of 8 bits, which a sum in another order rounds to the other, or the rounding of
    bfloat16.
    """
    if (bits, dtype) == (8, torch.float32) and torch.cpu._is_amx_tile_supported():
        pytest.skip("On a CPU with AMX vLLM multiplies 8 bits in bfloat16 alone.")
    model, folder = make_folder("interdomain", model_dtype=dtype, **HYBRID)
    asked = {f"text {i}": random_ids(1, length, seed=i)[0].tolist() for i, length in enumerate((23, 1, 40, 9))}
    ids = torch.tensor([asked["text 2"]])
    exact = model(ids).logits.float().log_softmax(-1)
    quantize(model, folder, bits)
    assert (model(ids).logits.float().log_softmax(-1) - exact).abs().max() > 2 * tolerance
    with engine(folder, dtype=str(dtype).removeprefix("torch.")) as served:
        for text, prompt in asked.items():
            served.ask(text, prompt, 3)
            served.step()
        answers = served.finish()
    for text, prompt in asked.items():
        found = answers[text]
        rows = model(torch.tensor([prompt + found.tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
        for logprobs, row in zip(found.logprobs, F.log_softmax(rows, dim=-1), strict=True):
            assert max(abs(value - row[token].item()) for token, value in logprobs.items()) < tolerance


NORM, MAP = "model.layers.0.input_layernorm.weight", "model.layers.0.token_mixer.q_proj.weight"


@pytest.mark.parametrize(
    "bits, lost, sentence",
    [
        (8, NORM, f"lacks {NORM}"),
        (4, NORM, f"lacks {NORM}"),
        (8, f"{MAP}_scale", f"has {MAP} in I8 and no scale for it"),
        (4, f"{MAP}_scale", f"lacks {MAP}"),
    ],
)
def test_quantized_weights_that_lack_a_part(make_folder, bits, lost, sentence):
    """vLLM itself does not notice, and would serve what its memory held before."""
    model, folder = make_folder("interdomain", model_dtype=torch.bfloat16, **HYBRID)
    quantize(model, folder, bits)
    start(folder, dtype="bfloat16")
    file = folder / "model.safetensors"
    save_file({key: x for key, x in load_file(file).items() if key != lost}, file)
    with pytest.raises(ValueError, match=sentence):
        start(folder, dtype="bfloat16")


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_that_no_kernel_multiplies_in_float32(make_folder, bits, monkeypatch):
    model, folder = make_folder("interdomain", **HYBRID)
    quantize(model, folder, bits)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: bits == 8)
    with pytest.raises(ValueError, match='in bfloat16 alone, so set dtype = "bfloat16"'):
        start(folder)


def test_quantized_maps_with_biases(make_folder):
    model, folder = make_folder("interdomain", model_dtype=torch.bfloat16, **HYBRID | {"attention_bias": True})
    quantize(model, folder, 4)
    start(folder, dtype="bfloat16")
    file, name = folder / "model.safetensors", "model.layers.1.token_mixer.q_proj.bias"
    save_file({key: x for key, x in load_file(file).items() if key != name}, file)
    with pytest.raises(ValueError, match=f"lacks {name}"):
        start(folder, dtype="bfloat16")
