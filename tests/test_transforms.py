"""Gradients by `torch.func`, as whoever wants them sample by sample asks for them."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, vmap

from modeling_interdomain import interdomain_attention
from tests.operator_checks import SHAPES, inputs


def loss_of(model):
    def loss(parameters, ids, mask=None):
        torch.manual_seed(0)  # of what sparse attention draws
        given = {"input_ids": ids, "attention_mask": mask, "labels": ids, "use_cache": False}
        return functional_call(model, parameters, (), given).loss

    return loss


@pytest.fixture
def asked(any_model, random_ids):
    """A model, its parameters, and two rows, the first with pads before them."""
    ids = random_ids(2, 21)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return any_model.train(), {name: p.detach() for name, p in any_model.named_parameters()}, ids, mask


def backward(model, ids, mask=None):
    model.zero_grad()
    loss_of(model)(dict(model.named_parameters()), ids, mask).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, expected):
    """Each parameter's by itself; one that nothing reads has zeros."""
    for name, x in expected.items():
        x = torch.zeros_like(found[name]) if x is None else x
        assert (found[name] - x).abs().max() <= 1e-9 * x.abs().max() + 1e-15, name


def test_a_gradient_of_a_model_is_that_of_backward(asked):
    model, parameters, ids, mask = asked
    expected = backward(model, ids, mask)
    assert_same(grad(loss_of(model))(parameters, ids, mask), expected)


def test_gradients_sample_by_sample_are_those_of_each_alone(asked):
    model, parameters, ids, _ = asked
    if model.config.sparse_attention is not None:
        pytest.skip("which tokens sparse attention reads hangs on values, which vmap has none of")
    found = vmap(grad(loss_of(model)), in_dims=(None, 0))(parameters, ids[:, None])
    for i in range(2):
        assert_same({name: x[i] for name, x in found.items()}, backward(model, ids[i : i + 1]))


@pytest.mark.parametrize("gates", [False, True])
def test_every_argument_of_the_operator_may_be_mapped(gates):
    """Tokens, parameters and states of their own in each sample, along any axis, in float64."""
    given = {name: x.detach() for name, x in inputs(SHAPES["one_group"]).items()}
    if gates:
        shape = given["key"].shape[:3]
        given |= {name: 0.1 * torch.rand(shape, dtype=torch.float64) for name in ("write_gate", "delta")}
    samples = {name: torch.stack([x, 0.9 * x, 0.8 * x], dim=1) for name, x in given.items()}

    def loss(arguments):
        output, state = interdomain_attention(**arguments, backend="chunk", chunk_size=16, output_final_state=True)
        return output.square().sum() + state.sum()

    found = vmap(grad(loss), in_dims=1)(samples)
    for i in range(3):
        expected = grad(loss)({name: x[:, i] for name, x in samples.items()})
        for name, x in expected.items():
            torch.testing.assert_close(found[name][i], x)


def test_a_second_gradient_is_refused():
    given = {name: x.detach() for name, x in inputs(SHAPES["one_group"]).items()}
    value = given.pop("value")

    def first(x):
        return grad(lambda x: interdomain_attention(value=x, **given, backend="chunk")[0].square().sum())(x).sum()

    with pytest.raises(RuntimeError, match="attention_backward has no gradient of its own"):
        grad(first)(value)


def test_a_model_may_be_made_functional(asked):
    """As PyTorch's tools for graphs make it: without operations in place."""
    model, _, ids, _ = asked
    torch.manual_seed(0)
    expected = model(ids, use_cache=False).logits
    torch.manual_seed(0)
    torch.testing.assert_close(functionalize(lambda x: model(x, use_cache=False).logits)(ids), expected)


def tangent(model, ids, enabled):
    """Of the logits, along ones of the embeddings."""
    embedded = model.get_input_embeddings()(ids).detach()
    with torch.set_grad_enabled(enabled), forward_ad.dual_level():
        given = forward_ad.make_dual(embedded, torch.ones_like(embedded))
        return forward_ad.unpack_dual(model(inputs_embeds=given, use_cache=False).logits).tangent


@pytest.mark.parametrize("name", ["interdomain", "mamba2", "gated", "delta-rule"])
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("enabled", [False, True])
def test_forward_mode_of_the_definition_is_reverse_mode(enabled, length, name, make_model, random_ids):
    """With gradients on and off, of which the latter is where a token takes fewer calls."""
    mixers = "ssd" if name == "mamba2" else "interdomain"  # without the softmax layer of some
    model, ids = make_model(name, backend="recurrent", token_mixers=mixers), random_ids(2, length)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    (grad,) = torch.autograd.grad((logits * weights).sum(), embedded)
    torch.testing.assert_close((tangent(model, ids, enabled) * weights).sum(), grad.sum())


@pytest.mark.parametrize("name", ["interdomain", "delta-rule", "mamba2", "s4d", "selective-scan"])
def test_forward_mode_of_fused_steps_is_refused(name, make_model, random_ids):
    """Also where they have run before: they are given addresses, and tangents have others."""
    mixers = {"mamba2": "ssd", "s4d": "s4d", "selective-scan": "selective_scan"}.get(name, "interdomain")
    model, ids = make_model(name, backend="triton", dtype=torch.float32, token_mixers=mixers), random_ids(2, 1)
    with torch.no_grad():
        model(ids, use_cache=False)
    with pytest.raises(ValueError, match="its kernels have no derivative in forward mode .jvp.. backend='auto' would"):
        tangent(model, ids, enabled=False)


@pytest.mark.parametrize("name", ["interdomain", "delta-rule", "mamba2", "s4d", "interdomain, cdmoe"])
@pytest.mark.parametrize("enabled", [False, True])
def test_forward_mode_of_operators_is_refused(enabled, name, make_model, random_ids):
    backend = {"backend": "recurrent"} if "cdmoe" in name else {}
    with pytest.raises(NotImplementedError, match="no derivative in forward mode .jvp.: use torch.autograd.grad, or"):
        tangent(make_model(name, **backend), random_ids(2, 9), enabled)
