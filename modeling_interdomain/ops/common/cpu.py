"""How an operator may compute where it runs: what a CPU can do, which values are at hand, whether autocast is on."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch


def multiplies_bf16(x: torch.Tensor) -> bool:
    """Whether x is bfloat16 on a CPU that has instructions for it; without them it is faster to compute in float32."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and _has_bfloat16_instructions()


def multiplies_in_tiles(x: torch.Tensor) -> bool:
    """Whether x is bfloat16 on a CPU that multiplies matrices in tiles (AMX): made for many rows, not for one."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and _has_bfloat16_tiles()


def narrowed(*tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query, key and value as autocast wants the operands of products on a CPU that multiplies bfloat16 faster."""
    device = tokens[0].device.type
    if device != "cpu" or not torch.is_autocast_enabled(device) or any(x.dtype == torch.float64 for x in tokens):
        return tokens
    cast = torch.get_autocast_dtype(device) == torch.bfloat16 and _has_bfloat16_instructions()
    return tuple(x.to(torch.bfloat16) for x in tokens) if cast else tokens


@functools.cache
def _has_bfloat16_instructions() -> bool:
    return bool(torch.cpu.get_capabilities().get("avx512_bf16")) or _has_bfloat16_tiles()


@functools.cache
def _has_bfloat16_tiles() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


class OperatorCache:
    """The last value that was made of some tensors, kept until what they hold is another; copies and pickles are empty.

    Numbers are compared, so that whatever writes a parameter, and however, is seen. That costs a pass over it: worth it
    for what takes many, of tensors on a CPU.
    """

    def __init__(self) -> None:
        self._kept: tuple[Hashable, list[torch.Tensor | None], Any] | None = None

    def __reduce__(self):
        return type(self), ()

    def forget(self) -> None:
        self._kept = None

    def get(self, name: Hashable, tensors: Sequence[torch.Tensor | None], compute: Callable[[], Any]) -> Any:
        """The value of a name and of these tensors."""
        kept = self._kept
        if kept is None or kept[0] != name or not all(map(_equal, kept[1], tensors)):
            kept = self._kept = name, [None if x is None else x.detach().clone() for x in tensors], compute()
        return kept[2]


def _equal(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.dtype == y.dtype and torch.equal(x, y)


def in_graph() -> bool:
    """Whether what is computed is compiled, exported or traced: for other values, and sizes, than those at hand."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def values_at_hand(x: torch.Tensor) -> bool:
    """Whether sizes and branches may depend on values, which a device would have to hand over, and a graph cannot."""
    return x.device.type == "cpu" and not in_graph()


def all_real(mask: torch.Tensor) -> bool:
    """Whether no token is a pad, where that is known at once: asking a GPU would wait for it."""
    return values_at_hand(mask) and bool(mask.all())


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on; PyTorch cannot be asked for "meta", where models run to be counted."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device):
    """`torch.autocast(device.type, enabled=False)`, which costs more than a small operation, where it is needed."""
    if autocasts(device):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
