"""The kernels far from the beginning of what they read and write, where offsets need 64 bits.

Memory that is never touched is free, so tensors are as long as they must be, and the kernels work on their last rows.
Other kernels show this beside their other tests (`test_op_ssd_triton`, `test_op_sparse_triton_passes`).
"""

import importlib

import pytest
import torch

from modeling_interdomain import interdomain_attention, interdomain_step
from modeling_interdomain.ops.s4d.entry import s4d_attention
from modeling_interdomain.ops.selective_scan.entry import selective_scan
from tests.operator_checks import inputs, relative_error
from tests.test_op_interdomain_gates import KINDS, gated

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="Memory that is never touched is free on the host alone."),
]
FEW, WIDTH = 20, 16
LONG = (1 << 27) + 37
LOW = 2e-2  # states and products in bfloat16; a wrong address is wrong by all of it


def module(name: str):
    return importlib.import_module(f"modeling_interdomain.{name}")


def far(few: torch.Tensor, total: int = LONG, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Room for `[1, total, ...]`, the last tokens those of `few` `[1, few, ...]`."""
    x = torch.empty(1, total, *few.shape[2:], dtype=dtype or few.dtype)
    assert x.numel() > 1 << 31
    x[:, -few.shape[1] :] = few
    return x


@pytest.fixture
def untouched(monkeypatch):
    """From its call on, what kernels write to is not filled before, and two chunks are all that there are."""
    operator, other = module("ops.interdomain.triton"), module("ops.s4d.triton")  # both before one of them is changed
    whole = operator.plan_of

    def last_chunks(*arguments, **options):
        return whole(*arguments, **options)._replace(chunks=2)

    def begin() -> None:
        for name in ("new_empty", "new_zeros"):
            monkeypatch.setattr(torch.Tensor, name, torch._C.TensorBase.new_empty)
        monkeypatch.setattr(torch, "empty_like", torch._C._VariableFunctions.empty_like)
        monkeypatch.setattr(operator.Plan, "like_tokens", lambda self, x: torch.Tensor.new_empty(x, x.shape))
        for one in (operator, other):
            monkeypatch.setattr(one, "plan_of", last_chunks)

    return begin


def last_document(total: int = LONG) -> torch.Tensor:
    return torch.tensor([total - FEW, total], dtype=torch.int32)


def check(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a[:, -b.shape[1] :] if a.numel() > 1 << 31 else a, b) < LOW


def defined(leaves):
    """Tokens in bfloat16, weights of a loss, and output, final state and gradients by the definition in float64.

    The tokens among the leaves are made those in bfloat16, and there is no initial state.
    """
    del leaves["initial_state"]
    tokens = [x.detach().bfloat16() for x in list(leaves.values())[:3]]
    leaves |= {n: x.double().requires_grad_() for n, x in zip(("query", "key", "value"), tokens, strict=True)}
    expected = interdomain_attention(**leaves, output_final_state=True, backend="recurrent")
    weights = [torch.randn_like(x).bfloat16() for x in expected]
    grads = torch.autograd.grad(expected, list(leaves.values()), [x.double() for x in weights])
    return tokens, weights, expected, grads


def test_interdomain_attention(untouched):
    operator = module("ops.interdomain.triton")
    leaves = inputs((1, FEW, 1, 1, WIDTH, WIDTH, WIDTH))
    tokens, weights, expected, grads = defined(leaves)
    given = *(far(x) for x in tokens), *(x.detach().float() for x in list(leaves.values())[3:])
    given += None, last_document(), None, "bilinear", WIDTH, False, True
    untouched()
    check(operator._forward(*given), expected)
    found = operator._backward(given, (far(weights[0]), weights[1].float()), [True] * 7)
    check(found[:6], grads)


def test_gates_and_the_delta_rule(untouched):
    operator = module("ops.interdomain.triton_delta")
    leaves = gated((1, FEW, 1, 1, WIDTH, WIDTH, WIDTH), KINDS["all"])
    tokens, weights, expected, grads = defined(leaves)
    parameters, gates = ([x.detach().float() for x in list(leaves.values())[i]] for i in (slice(3, 6), slice(6, 9)))
    gates = [torch.empty(1, LONG, 1).index_copy_(1, torch.arange(LONG - FEW, LONG), x) for x in gates]
    given = *(far(x) for x in tokens), *parameters, None, *gates
    given += last_document(), None, "bilinear", WIDTH, False, True
    untouched()
    output, final, written = operator._forward(*given)
    check((output, final), expected)
    found = operator._backward((*given, written), (far(weights[0]), weights[1].float()), [True] * 10)
    check([*found[:6], *(x[:, -FEW:] for x in found[7:])], grads)


def test_s4d_attention(untouched):
    operator = module("ops.s4d.triton")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, FEW, 1, WIDTH, generator=generator).bfloat16()
    decay, beta, rows = (torch.randn(1, WIDTH, 2, generator=generator) for _ in range(3))
    decay[..., 0] = -decay[..., 0].abs()
    leaves = [y.double().requires_grad_() for y in (x, decay, beta, rows)]
    halves = leaves[0].split(WIDTH // 2, dim=-1)
    expected, state = s4d_attention(*halves, *leaves[1:], output_final_state=True, backend="chunk")
    weights = [torch.randn(y.shape, generator=generator).bfloat16() for y in (expected, state)]
    grads = torch.autograd.grad((expected, state), leaves[:1], [y.double() for y in weights])
    kernel, reads = operator._responses(decay, beta, rows, WIDTH)
    given = far(x), decay, beta, kernel, reads, None, last_document(), None, True
    untouched()
    check(operator._forward(*given), (expected, state))
    check(operator._backward(given, (far(weights[0]), weights[1].float()), [True] * 6)[:1], grads)


def test_selective_scan():
    operator = module("ops.selective_scan.triton")
    channels, total = 8, (1 << 28) + 37
    generator = torch.Generator().manual_seed(0)
    small = [torch.randn(1, FEW, n, generator=generator).bfloat16() for n in (WIDTH, WIDTH, channels, channels)]
    small[3] = small[3].abs()
    rate = -torch.rand(WIDTH, channels, generator=generator)
    leaves = [x.double().requires_grad_() for x in (*small, rate)]
    expected, _ = selective_scan(*leaves, backend="recurrent")
    weight = torch.randn(expected.shape, generator=generator)
    grads = torch.autograd.grad(expected, leaves, weight.double())
    tokens, slot = operator.Tokens(*(far(x, total) for x in small)), (1 << 24) + 5
    rows = operator.Rows(*(torch.tensor([n], dtype=torch.int32) for n in (total - FEW, total, slot)))
    options = {"EXTENT": operator._extent(rate)[0]}
    out, kept = far(torch.zeros_like(weight), total), torch.empty(slot + 1, WIDTH, channels)
    assert kept.numel() > 1 << 31
    operator.scan[1, 1](tokens, rate, None, out, kept, None, rows, channels, **options)
    check([out], [expected])
    found = operator.Tokens(*(far(torch.zeros_like(x), total, torch.float32) for x in small))
    of_rate = torch.empty(1, WIDTH, channels)
    operator.scan_backward[1, 1](
        tokens, rate, kept, far(weight, total), None, found, of_rate, None, rows, channels, total, **options
    )
    check([*found, of_rate[0]], grads)


@pytest.fixture
def last_program(monkeypatch):
    """`last_program(n)`: the programs of a launch are those from n on, of rows of the batch or runs of tokens."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    own = interpreter.InterpreterBuilder.create_get_program_id

    def begin(first: int) -> None:
        def create_get_program_id(self, axis):
            handle = own(self, axis)
            handle.data = handle.data + (first if axis == 0 else 0)
            return handle

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", create_get_program_id)

    return begin


def test_steps(last_program):
    """The last row of a batch whose states pass 2^31 elements."""
    step, row = module("ops.interdomain.triton_step"), (1 << 22) + 5
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, WIDTH, generator=generator) for _ in range(3))
    decay, beta = (-torch.rand(1, WIDTH, 2, generator=generator) for _ in range(2))
    state = far(torch.randn(1, 1, 1, 2, WIDTH, 2 * WIDTH, generator=generator), row + 1)
    before = state[0, -1:].double()
    tokens = [torch.empty(row + 1, WIDTH).index_copy_(0, torch.tensor([row]), x) for x in (query, key, value)]
    pulled, output = torch.empty(row + 1, 1, 1, 2, WIDTH), torch.empty(row + 1, WIDTH)
    last_program(row)
    sizes, gates = (1, 1, WIDTH, WIDTH, 2 * WIDTH), step.StepGates(None, None, None)
    step.step_keys[1, 1, 1](*tokens[:2], decay, beta, gates, state, None, pulled, *sizes, BM=WIDTH, BR=WIDTH)
    step.step_values[1, 1, 1](
        tokens[2], decay, beta, None, gates, state, None, pulled, output, *sizes, WIDTH,
        M=WIDTH, BK=4, BD=WIDTH, C="identity", PRODUCT="bilinear",
    )  # fmt: skip
    wide = [x[:, None].double() for x in (query, key, value)]
    expected = interdomain_step(*wide, decay.double(), beta.double(), None, state=before, backend="recurrent")
    assert relative_error(output[row], expected[0, 0]) < 1e-5 and relative_error(state[0, -1:], before) < 1e-5


@pytest.mark.parametrize("name", ["interdomain", "ssd", "s4d", "selective_scan"])
def test_steps_of_slots(name):
    """The last slot of a pool that passes 2^31 elements."""
    one_token = importlib.import_module(f"tests.test_op_{name}").one_token
    step, state = one_token(1, dtype=torch.float32)
    slots = (1 << 31) // state.numel() + 2
    pool, expected_state = torch.empty(slots, *state.shape[1:]), state.clone()
    pool[-1] = state[0]
    expected = step(state=expected_state)
    found = step(state=pool, state_indices=torch.tensor([slots - 1], dtype=torch.int32), backend="triton")
    assert relative_error(found, expected) < 1e-5 and relative_error(pool[-1], expected_state[0]) < 1e-5


@pytest.mark.slow
def test_preparation(last_program, monkeypatch):
    """The last run of tokens, of a text that was all zeros before, is what it is alone."""
    prepare = module("ops.interdomain.triton_prepare")
    run, generator = 16, torch.Generator().manual_seed(0)
    monkeypatch.setattr(prepare, "_RUN", run)
    total = LONG // run * run + run
    taps, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((WIDTH, 4), (WIDTH,), (1, WIDTH)))
    small = [torch.randn(1, run, WIDTH, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    weights = [torch.randn(1, run, 1, WIDTH, generator=generator).bfloat16() for _ in range(3)]
    norms = weight, weight, bias, bias
    how = (taps, taps), norms, None, None, None, None, 1, 1, None, 1e-6, False
    expected, _ = prepare.triton_prepare(*small, *how)
    grads = torch.autograd.grad(expected, small, weights)
    x, given = [far(y.detach(), total) for y in small], [far(y, total) for y in weights]
    out, of_x = ([torch.empty(y.shape, dtype=y.dtype) for y in x] for _ in range(2))
    (_, blocks), shared, options = prepare._launch(x[0], x[2], taps, None, None, None, None, None, 1, 1, "none", 1e-6)
    grid, moved, normed = (1, blocks), (taps, None), (weight, bias)
    last_program(total // run - 1)
    prepare.prepare[grid](
        prepare.Projection(x[0], out[0], *moved), prepare.Projection(x[1], out[1], *moved, None, *normed),
        prepare.Projection(x[2], out[2], None, None, None, *normed), *shared, **options,
    )  # fmt: skip
    sizes = prepare._sizes_of_sums(*x, taps)
    partial = torch.empty(total // run, sum(sizes)).split(sizes, dim=1)
    prepare.prepare_backward[grid](
        prepare.ProjectionBackward(x[0], given[0], of_x[0], partial[0], *moved),
        prepare.ProjectionBackward(x[1], given[1], of_x[1], partial[1], *moved, weight),
        prepare.ProjectionBackward(x[2], given[2], of_x[2], partial[2], None, None, weight),
        *shared, sum(sizes), **options,
    )  # fmt: skip
    for found, right in zip((*out, *of_x), (*expected, *grads), strict=True):
        assert relative_error(found[:, -run:].flatten(), right.flatten()) < 1e-5
