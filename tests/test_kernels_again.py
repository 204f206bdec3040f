"""A kernel that is timed runs many times on the same tensors before its results are read: it must write the same."""

import importlib

import pytest
import torch

from modeling_interdomain.ops.s4d.entry import s4d_attention
from tests import test_op_s4d, test_op_selective_scan, test_op_ssd
from tests.operator_checks import cast, everything
from tests.test_op_interdomain_gates import KINDS, gated
from tests.test_op_sparse import _arguments
from tests.test_op_sparse_triton_passes import everything as everything_sparse
from tests.test_op_sparse_triton_passes import placed

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
pytestmark = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILES = (
    "interdomain.triton", "interdomain.triton_gates", "interdomain.triton_delta", "diagonal.triton_tables",
    "ssd.triton", "s4d.triton", "selective_scan.triton", "sparse.triton",
)  # fmt: skip


class Twice:
    """Stands for a kernel and launches it twice."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            for _ in range(2):
                self.kernel[grid](*arguments, **options)
            self.launches.append(self.kernel)

        return launch


def _function_of(kernel):
    while isinstance(kernel, triton.runtime.KernelInterface):
        kernel = kernel.fn
    return kernel


def _on_device(leaves):
    return {name: x.detach().to(DEVICE).requires_grad_() for name, x in cast(leaves, torch.float32).items()}


def _interdomain(kind):
    leaves = _on_device(gated((2, 20, 2, 1, 4, 5, 6), KINDS.get(kind, ())))
    return lambda: everything(leaves, product="hermitian", chunk_size=16, backend="triton").values()


def _ssd():
    leaves = _on_device(test_op_ssd.arguments((1, 20, 2, 1, 3, 5)))
    return lambda: test_op_ssd.everything(leaves, chunk_size=16, backend="triton").values()


def _s4d():
    leaves = _on_device(test_op_s4d.arguments((1, 20, 2, 1, 4, 4, 4)))
    options = {"output_final_state": True, "chunk_size": 16, "backend": "triton"}
    return lambda: test_op_s4d.with_gradients(s4d_attention(**leaves, **options), leaves)


def _selective_scan():
    leaves = _on_device(test_op_selective_scan.arguments((1, 5, 3, 2)))
    return lambda: test_op_selective_scan.everything(leaves, backend="triton").values()


def _sparse():
    tokens, options = _arguments("three-parts")
    tokens = [x.detach().float().to(DEVICE).requires_grad_() for x in tokens]
    return lambda: everything_sparse(tokens, "triton", **placed(options))


OPERATORS = {
    "plain": lambda: _interdomain("plain"),
    "gates": lambda: _interdomain("gates"),
    "delta": lambda: _interdomain("all"),
    "ssd": _ssd,
    "s4d": _s4d,
    "selective scan": _selective_scan,
    "sparse": _sparse,
}


# The delta rule has the kernels of the gates too.
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x == "gates")) for x in OPERATORS])
def test_a_launch_may_be_repeated(name, monkeypatch):
    operator, launches = OPERATORS[name](), []
    once = [x.detach().clone() for x in operator()]
    for file in FILES:
        module = importlib.import_module(f"modeling_interdomain.ops.{file}")
        for kernel_name, kernel in list(vars(module).items()):
            launched = kernel_name.startswith("_") and isinstance(kernel, triton.runtime.KernelInterface)
            if launched and not _function_of(kernel).__name__.startswith("_"):  # others are called within kernels
                monkeypatch.setattr(module, kernel_name, Twice(kernel, launches))
    twice = list(operator())
    assert len(launches) > 1
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
