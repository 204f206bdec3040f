"""What the helper that registers operators promises, of an operator that multiplies."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from modeling_interdomain.ops.common.custom_op import differentiable

asked: list[list[bool]] = []


def _forward(
    x: torch.Tensor, weight: torch.Tensor | None, tables: list[torch.Tensor], want_sum: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = sum(table.sum() for table in tables)
    output = x @ x.mT * scale if weight is None else x @ weight * scale
    return output, x.sum(0, keepdim=True) if want_sum else x.new_empty(0), x.new_ones(3)


def _outputs(x, weight, tables, want_sum):
    width = x.shape[0] if weight is None else weight.shape[1]
    return x.new_empty(x.shape[0], width), x.new_empty((1, x.shape[1]) if want_sum else 0), x.new_empty(3)


def _backward(inputs, grads, needs):
    x, weight, tables, want_sum, ones = inputs
    asked.append(list(needs))
    assert (ones == 1).all() and grads[0].is_contiguous() and (want_sum or grads[1] is None)
    scale = sum(table.sum() for table in tables)
    of_x = (grads[0] + grads[0].mT) @ x if weight is None else grads[0] @ weight.mT
    of_x = of_x * scale + (0 if grads[1] is None else grads[1])
    return of_x, None if weight is None else x.mT @ grads[0] * scale


multiply = differentiable(__name__, "multiply", _forward, _outputs, _backward, count=2, kept=(2,))


@pytest.fixture
def inputs():
    asked.clear()
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 4, generator=generator).requires_grad_() for n in (3, 4))
    return x, weight, [torch.ones(2), torch.ones(1)]


def grads_of(function, inputs, want_sum=True):
    x, weight, tables = inputs
    output, total, _ = function(x, weight, tables, want_sum)
    leaves = [y for y in (x, weight) if y is not None and y.requires_grad]
    return torch.autograd.grad(output.square().sum() + total.sum(), leaves)


@pytest.mark.parametrize("want_sum", [True, False])
@pytest.mark.parametrize("given", ["both", "x", "weight", "no weight"])
def test_gradients_are_those_of_pytorch(given, want_sum, inputs):
    x, weight, tables = inputs
    if given in ("x", "weight"):
        (weight if given == "x" else x).requires_grad_(False)
    inputs = x, None if given == "no weight" else weight, tables
    for found, expected in zip(grads_of(multiply, inputs, want_sum), grads_of(_forward, inputs, want_sum), strict=True):
        torch.testing.assert_close(found, expected)
    assert asked == [[given != "weight", given in ("both", "weight")]]


def test_a_gradient_of_the_second_output_alone(inputs):
    (found,) = torch.autograd.grad(multiply(*inputs, True)[1].sum(), inputs[0])
    assert torch.equal(found, torch.ones(3, 4))


def test_it_is_sound_in_graphs_checkpoints_and_autocast(inputs):
    tests = "test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"
    torch.library.opcheck(multiply.registered, (*inputs, True), test_utils=tests)
    expected = grads_of(multiply, inputs)
    for one in (
        lambda *x: checkpoint(multiply, *x, use_reentrant=False),
        torch.compile(multiply, fullgraph=True, backend="aot_eager"),
    ):
        assert all(map(torch.equal, grads_of(one, inputs), expected))
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, grads_of(multiply, inputs), expected))


@pytest.mark.parametrize("how", ["functional", "dual"])
def test_a_derivative_in_forward_mode_is_refused(how, inputs):
    x, _, tables = (y.detach() if isinstance(y, torch.Tensor) else y for y in inputs)
    with pytest.raises(NotImplementedError, match="multiply has no derivative in forward mode"):
        if how == "functional":
            torch.func.jvp(lambda x: multiply(x, None, tables, True)[0], (x,), (torch.ones_like(x),))
        else:
            with forward_ad.dual_level():
                multiply(forward_ad.make_dual(x, torch.ones_like(x)), None, tables, True)


def test_a_second_derivative_is_refused(inputs):
    (first,) = torch.autograd.grad(multiply(*inputs, True)[0].square().sum(), inputs[0], create_graph=True)
    first = first + inputs[0].square()  # another way
    for ask in (lambda: first.sum().backward(retain_graph=True), lambda: torch.autograd.grad(first.sum(), inputs[0])):
        with pytest.raises(RuntimeError, match="multiply_backward has no gradient of its own"):
            ask()


def test_transforms_of_an_operator_with_lists_are_refused(inputs):
    x, _, tables = (y.detach() if isinstance(y, torch.Tensor) else y for y in inputs)
    with pytest.raises(NotImplementedError, match="multiply has no derivative in forward mode .jvp., nor any t"):
        torch.func.grad(lambda x: multiply(x, None, tables, True)[0].sum())(x)
