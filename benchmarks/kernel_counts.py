"""What a call does on a GPU, counted while Triton's interpreter runs its kernels: operations, bytes, launches.

Nothing is estimated: products are counted where the interpreter multiplies, bytes at the addresses that it reads and
writes, launches where a kernel or an operator of PyTorch that computes begins. Memory is counted in sectors of 32
bytes, each once a launch, as it would be with a second-level cache that holds whatever a launch reads twice; `moved`
counts each time, as that cache sees it.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

_SECTOR = 32
# What computes nothing: room, and other views of it. What is not named a view by PyTorch, but is one where it can.
_ROOM = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "detach", "_reshape_alias")


@dataclass
class Work:
    """What one kernel did in all its launches."""

    launches: int = 0
    matrix: int = 0  # operations of matrix units, two a multiplication and addition
    vector: int = 0  # other operations on floating-point numbers
    read: int = 0  # bytes
    written: int = 0
    moved: int = 0  # bytes between the chip's own memories and what lies before

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class _Launch:
    """What is counted while one kernel runs."""

    work: Work = field(default_factory=lambda: Work(launches=1))
    read: list[np.ndarray] = field(default_factory=list)
    written: list[np.ndarray] = field(default_factory=list)

    def touch(self, kind: str, pointers: np.ndarray, mask: np.ndarray, size: int) -> None:
        used = np.broadcast_to(pointers, mask.shape)[mask]
        self.work.moved += used.size * size
        getattr(self, kind).append(np.unique(used // _SECTOR))

    def finish(self) -> Work:
        self.work.read, self.work.written = (
            _SECTOR * len(np.unique(np.concatenate(x))) if x else 0 for x in (self.read, self.written)
        )
        return self.work


def count(function: Callable[[], object]) -> dict[str, Work]:
    """What each kernel of a call does; operators of PyTorch go by their names with `aten.` before."""
    found: dict[str, Work] = {}
    with _operators(found), _kernels(found):
        function()
    return found


@contextlib.contextmanager
def _operators(found: dict[str, Work]) -> Iterator[None]:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            namespace, name = function._schema.name.split("::")
            if namespace != "aten":
                with self:  # the kernels behind one of our operators, and what lies between them
                    return OPDEFS[function._schema.name]._init_fn(*args, **kwargs)
            result = function(*args, **kwargs)
            if _running or function.is_view or name in _ROOM:
                return result
            tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            in_place = result is None and name.startswith("_foreach_")  # one launch for all
            written = torch.utils._pytree.tree_leaves(args[0] if in_place else result)
            results = [x for x in written if isinstance(x, torch.Tensor)]
            if any(x.numel() for x in results):  # nothing is launched for nothing
                read, written = (sum(x.numel() * x.element_size() for x in xs) for xs in (tensors, results))
                work = Work(1, _products(name, tensors), 0, read, written, read + written)
                found[f"aten.{name}"] = found.get(f"aten.{name}", Work()) + work
            return result

    with Mode():
        yield


def _products(name: str, tensors: list[torch.Tensor]) -> int:
    """Operations of a matrix product of PyTorch."""
    if name not in ("mm", "bmm"):
        return 0
    return 2 * tensors[0].numel() * tensors[1].shape[-1]


_running: list[_Launch] = []


@contextlib.contextmanager
def _kernels(found: dict[str, Work]) -> Iterator[None]:
    """The interpreter with counting operations; puts back its own."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    own = {name: getattr(builder, name) for name in ("create_dot", "create_masked_load", "create_masked_store")}
    own |= {name: getattr(builder, name) for name in ("binary_op", "unary_op", "ternary_op")}
    reduce, run = interpreter.ReduceOps.sum, executor.__call__

    def launch(self, *args, **kwargs):
        _running.append(_Launch())
        try:
            run(self, *args, **kwargs)
        finally:
            work = _running.pop().finish()
        found[self.fn.__name__] = found.get(self.fn.__name__, Work()) + work

    def create_dot(self, a, b, *rest):
        _running[-1].work.matrix += 2 * a.data.size * b.data.shape[-1]
        return own["create_dot"](self, a, b, *rest)

    def create_masked_load(self, ptrs, mask, *rest):
        result = own["create_masked_load"](self, ptrs, mask, *rest)
        _running[-1].touch("read", ptrs.data, np.asarray(mask.data), result.data.itemsize)
        return result

    def create_masked_store(self, ptrs, value, mask, *rest):
        _running[-1].touch("written", ptrs.data, np.asarray(mask.data), value.data.itemsize)
        return own["create_masked_store"](self, ptrs, value, mask, *rest)

    def elementwise(name: str):
        def operation(self, first, *rest):
            result = own[name](self, first, *rest)
            if result.dtype.scalar.is_floating() and first.dtype.scalar.is_floating():
                _running[-1].work.vector += result.data.size
            return result

        return operation

    def sum_of(self, x):
        if x.dtype.is_floating():
            _running[-1].work.vector += x.handle.data.size
        return reduce(self, x)

    counting = {"create_dot": create_dot, "create_masked_load": create_masked_load}
    counting |= {"create_masked_store": create_masked_store}
    counting |= {name: elementwise(name) for name in ("binary_op", "unary_op", "ternary_op")}
    for name, operation in counting.items():
        setattr(builder, name, operation)
    executor.__call__, interpreter.ReduceOps.sum = launch, sum_of
    try:
        yield
    finally:
        for name, operation in own.items():
            setattr(builder, name, operation)
        executor.__call__, interpreter.ReduceOps.sum = run, reduce
