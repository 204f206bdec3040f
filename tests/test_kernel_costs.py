"""What is counted of the kernels is what a small case says by hand."""

import json

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
tl = pytest.importorskip("triton.language")

from benchmarks import harness, kernel_costs  # noqa: E402
from benchmarks.chips import CHIPS, blocks_a_multiprocessor  # noqa: E402
from modeling_interdomain.ops.common.launch import interpreted  # noqa: E402
from modeling_interdomain.ops.interdomain.triton import triton_attention  # noqa: E402

pytestmark = pytest.mark.skipif(not interpreted(), reason="Counting needs TRITON_INTERPRET=1.")


@triton.jit
def product(a, b, out, N: tl.constexpr, K: tl.constexpr):
    """`out = 2 a @ b` for a block of 16 rows of a `[rows, K]`."""
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    k, n = tl.arange(0, K), tl.arange(0, N)
    x = tl.load(a + rows[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + rows[:, None] * N + n[None, :], 2.0 * tl.dot(x, y))


def test_a_matrix_product_is_counted_as_by_hand():
    from benchmarks.kernel_counts import Work, count

    a, b, out = torch.randn(48, 32), torch.randn(32, 16), torch.empty(48, 16)
    found = count(lambda: product[(3,)](a, b, out, N=16, K=32))
    assert torch.allclose(out, 2 * a @ b, atol=1e-5)
    read, written = 4 * (a.numel() + b.numel()), 4 * out.numel()
    moved = read + written + 2 * 4 * b.numel()  # each program reads b
    assert found == {"product": Work(1, 2 * 48 * 32 * 16, 48 * 16, read, written, moved)}


def test_operators_of_pytorch_are_launches_and_views_are_not():
    from benchmarks.kernel_counts import count

    x = torch.randn(4, 8)
    found = count(lambda: x.T.reshape(8, 4).unflatten(0, (2, 4)).sum() + torch.empty(4).view(2, 2).shape[0])
    assert {name: work.launches for name, work in found.items()} == {"aten.sum": 1, "aten.add": 1}
    assert found["aten.sum"].read == 4 * 32 and found["aten.sum"].written == 4
    several, others = [torch.empty(3), torch.empty(5)], [torch.ones(3), torch.ones(5)]
    found = count(lambda: (torch._foreach_copy_(several, others), torch.zeros(0)))
    assert {name: work.launches for name, work in found.items()} == {"aten._foreach_copy_": 1}
    assert found["aten._foreach_copy_"].written == 4 * 8


def test_the_interpreter_is_left_as_it_was():
    from triton.runtime import interpreter

    from benchmarks.kernel_counts import count

    before = dict(vars(interpreter.InterpreterBuilder)), interpreter.GridExecutor.__call__, interpreter.ReduceOps.sum
    with pytest.raises(ZeroDivisionError):
        count(lambda: 1 / 0)
    after = dict(vars(interpreter.InterpreterBuilder)), interpreter.GridExecutor.__call__, interpreter.ReduceOps.sum
    assert before == after


def test_attend_is_counted_as_its_formula_says():
    """A chunk of C tokens with M = R = D = C: see `attend` for what is multiplied with what, and what is read."""
    from benchmarks.kernel_counts import Work, count

    size, tokens = 16, 32
    query, key, value = (torch.randn(1, tokens, 1, size, dtype=torch.bfloat16) for _ in range(3))
    parameters = torch.rand(1, size, 2) - 1, torch.randn(1, size, 2), torch.randn(1, size, size, 2)
    found = count(lambda: triton_attention(query, key, value, *parameters, "bilinear", None, None, size))["attend"]
    # Scores, state, chunk; three matrices in two terms, one of them also with a second term of y; weights, rest.
    pulled, mixed, pushed = 1 + 2 + 2, 2 * 3 + 1, 2 + 1 + 2
    assert found.matrix == (pulled + mixed + pushed) * 2 * size * size * tokens
    states = 2 * 2 * size * size * 2 * (tokens // size)  # both sides, two planes, bfloat16, before each chunk
    tables = 4 * 2 * size * size + 2 * 2 * size * size + 4 * 3 * size * size  # powers, within the chunk, mixing
    assert found.written == 2 * size * tokens
    ways = 2 * 32  # a sector that says which way the group goes, read by either launch
    assert found.read == 3 * 2 * size * tokens + states + tables + ways
    assert found.launches == 2 and isinstance(found, Work)


@pytest.mark.slow
def test_a_layer_is_counted_and_its_table_says_so():
    counts = json.loads(kernel_costs.counted(16, 16, 2))
    sums = {part: kernel_costs.sums(counts[part]) for part in kernel_costs.PARTS}
    record = {"counts": counts, "sums": sums, "width": 16, "chunk": 16, "machine": harness.machine()}
    text = kernel_costs.table(record | {"before": {**sums, "commit": "abc"}})
    assert {"attend", "prepare"} <= set(counts["forward"]) and "step_values" in counts["step"]
    assert [sums[part]["launches"] for part in kernel_costs.PARTS] == [11, 23, 4]
    for part in kernel_costs.PARTS:
        assert f"| {part} | all | {sums[part]['launches']:.0f} |" in text
        assert all(
            sum(row[name] for row in counts[part].values()) == pytest.approx(sums[part][name]) for name in sums[part]
        )
    assert "Predicted, not measured" in text and record["machine"]["torch"] in text


def test_a_linear_attention_is_counted_as_by_hand():
    """The products of one chunk of 2 tokens of width 3, one after the other."""
    width, chunk = 3, 2
    state = width * chunk * width  # keys times values, or queries times the state, multiplications
    local = chunk * width * chunk
    counts = kernel_costs.linear_attention(width, chunk)
    assert counts["forward"] * chunk == 2 * (2 * state + 2 * local)
    assert counts["training"] * chunk == 2 * (7 * state + 7 * local)
    assert kernel_costs.flash_attention(8, 4) == {"forward": 64.0, "training": 224.0}
    anchor = kernel_costs.ANCHORS[0]
    seconds = kernel_costs.linear_attention(128, 64)["training"] * 8192 * 96 / kernel_costs.pace(anchor)["operations"]
    assert seconds == pytest.approx(anchor.training / 1e3)


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "blocks"), [(168, 4, 0, 3), (161, 8, 0, 1), (32, 4, 100 * 1024, 2), (16, 1, 0, 32)]
)
def test_blocks_of_a_multiprocessor(registers, warps, shared, blocks):
    row = {"target": "sm_90", "registers": registers, "warps": warps, "shared_bytes": shared}
    assert blocks_a_multiprocessor(row, CHIPS["sm_90"]) == blocks
