"""What an operator may do where it runs (instructions of a CPU, reading values, autocast), and how it is registered."""

import contextlib

import torch

# Asked once, for a graph cannot ask.
_INSTRUCTIONS = tuple(name for name, has in torch.cpu.get_capabilities().items() if has)


def multiplies_bf16(x: torch.Tensor) -> bool:
    """Whether x is bfloat16 on a CPU that has instructions for it; without them it is faster to compute in float32."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and _has_bfloat16_instructions()


def multiplies_in_tiles(x: torch.Tensor) -> bool:
    """Whether x is bfloat16 on a CPU that multiplies matrices in tiles (AMX): made for many rows, not for one."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and "amx_bf16" in _INSTRUCTIONS


def autocast_operands(*tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query, key and value in the dtype of CPU autocast, where that is bfloat16 and the CPU multiplies it faster."""
    device = tokens[0].device.type
    if device != "cpu" or not torch.is_autocast_enabled(device) or any(x.dtype == torch.float64 for x in tokens):
        return tokens
    cast = torch.get_autocast_dtype(device) == torch.bfloat16 and _has_bfloat16_instructions()
    return tuple(x.to(torch.bfloat16) for x in tokens) if cast else tokens


def _has_bfloat16_instructions() -> bool:
    return "avx512_bf16" in _INSTRUCTIONS or "amx_bf16" in _INSTRUCTIONS


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """What these are computed in, float32 at least."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether there may be a backward pass to any of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def in_graph() -> bool:
    """Whether a graph is compiled, exported or traced, which must serve other values and sizes than these."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def values_at_hand(x: torch.Tensor) -> bool:
    """Whether to branch by values of x: not where it waits for a GPU, breaks a graph, or stands for many (vmap)."""
    return x.device.type == "cpu" and not in_graph() and not torch._C._are_functorch_transforms_active()


def all_real(mask: torch.Tensor) -> bool:
    """Whether no token is a pad; False where looking would wait for a GPU or break a graph."""
    return values_at_hand(mask) and bool(mask.all())


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on; PyTorch cannot be asked for "meta", where models run to be counted."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device):
    """Switch autocast off where it is on; the context manager costs more than a small operation."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else contextlib.nullcontext()


def namespace(module: str) -> str:
    """The namespace in which a module registers its operators: a checkpoint's own copy of a file has one of its own."""
    return "".join(c if c.isalnum() else "_" for c in module)
