"""A kernel reads the weights of small modules only where calling these modules would do nothing else."""

import accelerate
import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from modeling_interdomain import InterdomainCache
from modeling_interdomain.layers.common import InterdomainRMSNorm, is_untouched
from modeling_interdomain.mixers.interdomain import mixer as mixer_interdomain

pytest.importorskip("triton", reason="the kernel needs Triton")


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def offload(model):
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def hook_before(model):
    model.model.layers[0].token_mixer.k_conv.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return model


def hook_after(model):
    model.model.layers[0].token_mixer.feature_map.register_forward_hook(lambda module, args, output: 2 * output)
    return model


@torch.no_grad()
def prune_then_train(model):
    conv = model.model.layers[0].token_mixer.q_conv
    prune.l1_unstructured(conv, "weight", 0.5)
    conv.weight_orig.neg_()
    return model


def parametrized(model):
    parametrize.register_parametrization(model.model.layers[0].token_mixer.k_norm, "weight", Double())
    return model


@torch.no_grad()
def adapted(model):
    model = peft.get_peft_model(model, peft.LNTuningConfig(target_modules=["k_norm"]))
    next(p for name, p in model.named_parameters() if "ln_tuning_layers" in name).mul_(2)
    return model


@pytest.mark.parametrize("touch", [offload, hook_before, hook_after, prune_then_train, parametrized, adapted])
def test_a_touched_module_is_called(touch, make_model, random_ids, monkeypatch):
    operators = mixer_interdomain.InterdomainMixer.operators
    inputs, fused = [], operators.fused_inputs
    monkeypatch.setattr(operators, "fused_inputs", lambda *a, **k: inputs.append(fused(*a, **k)) or inputs[-1])
    arguments = {"dtype": torch.float32, "state_dtype": "float32", "num_hidden_layers": 1}
    model, ids = make_model(**arguments, backend="triton"), random_ids(1, 3)
    with torch.no_grad():
        plain = model(ids).logits
        assert len(inputs) == 1 and inputs[0] is not None
        model = touch(model)
        found = model(ids).logits
        model.config.backend = "chunk"
        expected = model(ids).logits
    assert len(inputs) == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert touch is offload or (found - plain).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["interdomain", "forget-gates", "delta-rule", "hax", "ssd", "window"])
@torch.no_grad()
def test_weights_that_fsdp_has_replaced(name, make_model, random_ids, advance):
    """Within a forward FSDP1 has views of its own as plain attributes where parameters were."""
    model, ids = make_model(name, dtype=torch.float32, state_dtype="float32"), random_ids(2, 9)
    expected = model(ids, use_cache=False).logits
    for module in model.modules():
        for weight, x in [item for item in module._parameters.items() if item[1] is not None]:
            delattr(module, weight)
            setattr(module, weight, x.detach())
    assert not list(model.parameters())
    cache = InterdomainCache(model.config)
    found = [advance(model, cache, piece) for piece in ids.split([5, 1, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_what_counts_as_touched():
    class Quantized(torch.Tensor):
        pass

    cpu, norm = torch.device("cpu"), InterdomainRMSNorm(4)
    assert is_untouched(norm, InterdomainRMSNorm, cpu)
    assert not is_untouched(norm, InterdomainRMSNorm, torch.device("meta"))
    observer = nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    assert not is_untouched(norm, InterdomainRMSNorm, cpu)
    observer.remove()
    norm.weight = nn.Parameter(torch.ones(4).as_subclass(Quantized))
    assert not is_untouched(norm, InterdomainRMSNorm, cpu)
