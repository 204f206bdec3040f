"""How an operator may compute where it runs: what a CPU can do, which values are at hand, whether autocast is on."""

import contextlib
import functools

import torch


def multiplies_bf16(x: torch.Tensor) -> bool:
    """Whether x is bfloat16 on a CPU that has instructions for it; without them it is faster to compute in float32."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and _has_bfloat16_instructions()


def multiplies_in_tiles(x: torch.Tensor) -> bool:
    """Whether x is bfloat16 on a CPU that multiplies matrices in tiles (AMX): made for many rows, not for one."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and _has_bfloat16_tiles()


def autocast_operands(*tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
