"""The fused step of sparse attention in Triton's interpreter against the same step in PyTorch, in float64."""

import pytest
import torch
from torch.utils._pytree import tree_map_only

from modeling_interdomain.ops.sparse.step import sparse_step
from modeling_interdomain.ops.sparse.stream import Bins, empty_memory
from tests.operator_checks import relative_error

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
pytestmark = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, DIM, WIDTH = 2, 3, 5
CASES = {
    # name: selected keys, (number of bins, keys) of every part
    "selected": (3, []),
    "bins": (0, [(3, 2)]),
    "three_sets": (2, [(2, 3), (1, 20)]),
}


def placed(tensors, dtype, device="cpu"):
    """Copies, floating-point numbers in another dtype."""

    def copy(x):
        return x.to(device, dtype if x.is_floating_point() else None, copy=True)

    return tree_map_only(torch.Tensor, copy, tensors)


def flattened(memory):
    return [x for x in (*memory[:4], *(y for ring in memory.rings for y in ring)) if x is not None]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in CASES), ("three_sets", torch.bfloat16)]
)
def test_a_step_is_that_of_pytorch(name, dtype):
    """Scores with many equals, tokens of no bin, pads, a key in several sets; the memories are the same keys."""
    selected, parts = CASES[name]
    generator = torch.Generator().manual_seed(0)
    like = torch.zeros(2, 1, HEADS, DIM)
    expected_memory = placed(empty_memory(2, HEADS, DIM, WIDTH, selected, parts, like), torch.float64)
    memory = placed(expected_memory, torch.float32, DEVICE)
    for t in range(6):
        query, key = (torch.randn(2, HEADS, DIM, generator=generator).to(dtype) for _ in range(2))
        value = torch.randn(2, HEADS, WIDTH, generator=generator).to(dtype)
        scores = torch.randint(0, 3, (2, HEADS), generator=generator).float() if selected else None
        bins = [
            Bins(*(torch.randint(-1, n, (2, HEADS), generator=generator) for _ in range(2)), n, keys)
            for n, keys in parts
        ]
        mask = None if t % 2 else torch.tensor([True, t != 2])
        wide = [x.double() for x in (query, key, value)]
        options = {"scores": None if scores is None else scores.double(), "mask": mask}
        expected = sparse_step(*wide, memory=expected_memory, bins=bins, **options, backend="recurrent")
        there = [part._replace(query=part.query.to(DEVICE), key=part.key.to(DEVICE)) for part in bins]
        options = {name: None if x is None else x.to(DEVICE) for name, x in (("scores", scores), ("mask", mask))}
        tokens = [x.to(DEVICE) for x in (query, key, value)]
        found = sparse_step(*tokens, memory=memory, bins=there, **options, backend="triton")
        assert found.dtype == dtype
        assert relative_error(found.cpu(), expected) < (1e-6 if dtype == torch.float32 else 5e-3)
        for a, b in zip(flattened(memory), flattened(expected_memory), strict=True):
            assert torch.equal(a.cpu().double(), b.double())


def test_a_step_in_float64_is_refused_before_the_memory_is_touched():
    like = torch.zeros(1, 1, HEADS, DIM, dtype=torch.float64, device=DEVICE)
    memory = empty_memory(1, HEADS, DIM, WIDTH, 2, [], like)
    token = [torch.randn(1, HEADS, n, dtype=torch.float64, device=DEVICE) for n in (DIM, DIM, WIDTH)]
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .*float64"):
        sparse_step(*token, memory=memory, scores=torch.ones(1, HEADS).to(like), backend="triton")
    assert not any(x.any() for x in flattened(memory))
