"""The fused kernels of the experts in Triton's interpreter against gathered rows in float64."""

import pytest
import torch

from modeling_interdomain.ops.experts.entry import read_experts, sum_experts
from tests.operator_checks import relative_error

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
pytestmark = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT32 = 1e-6
IDS = {
    "many": torch.randint(11, (1, 3, 9), generator=torch.Generator().manual_seed(0)),
    "one": torch.full((1, 3, 3), 4),
    "a_token": torch.tensor([[[10, 0, 10, 2, 7]]]),
}


def everything(x, table, weights, ids, read, add):
    """Products and sums, and the gradients of x, the table and the weights."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, table, weights)]
    outputs = read(leaves[0], leaves[1], ids), add(leaves[2], leaves[1], ids)
    generator = torch.Generator().manual_seed(5)
    loss = sum((y * torch.randn(y.shape, generator=generator).to(y)).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize(
    ("ids", "width", "dtype", "bound"),
    [("many", 260, torch.float32, FLOAT32), ("one", 6, torch.float32, FLOAT32), ("a_token", 130, torch.bfloat16, 5e-3)],
)
def test_kernels_are_gathered_rows(ids, width, dtype, bound):
    ids, generator = IDS[ids], torch.Generator().manual_seed(1)
    shapes = (*ids.shape[:2], width), (11, width), ids.shape
    low = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    expected = everything(
        *(tensor.double() for tensor in low),
        ids,
        lambda x, table, ids: torch.einsum("btd,btkd->btk", x, table[ids]),
        lambda weights, table, ids: torch.einsum("btk,btkd->btd", weights, table[ids]),
    )
    there = [tensor.to(DEVICE) for tensor in (*low, ids)]
    found, again = (
        everything(
            *there,
            lambda x, table, ids: read_experts(x, table, ids, "triton"),
            lambda weights, table, ids: sum_experts(weights, table, ids, "triton"),
        )
        for _ in range(2)
    )
    for a, b, c in zip(found, expected, again, strict=True):
        assert a.dtype == dtype and relative_error(a.cpu(), b) < bound and torch.equal(a, c)


def test_where_the_kernels_cannot_run():
    x, table = torch.randn(1, 1, 4, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .*float64"):
        read_experts(*(tensor.to(DEVICE) for tensor in (x, table, IDS["a_token"])), "triton")
