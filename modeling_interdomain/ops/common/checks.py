"""Refusals of arguments that do not fit, one sentence each."""

from typing import Any

import torch


def check_documents(
    cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None, x: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Refuse `cu_seqlens` or `lengths` that do not fit tokens `[B, T, ...]`; a graph does not look at their values.

    Returns:
        Both, as int32 or int64.
    """
    batch, length = x.shape[:2]
    if lengths is not None:
        if cu_seqlens is not None:
            raise ValueError("lengths and cu_seqlens exclude each other: documents have no pads to leave out.")
        if not _are_integers(lengths) or lengths.shape != (batch,):
            raise ValueError(f"lengths must be integers of shape [B] = [{batch}], got {_described(lengths)}.")
        lengths = signed(lengths)
        if not torch.compiler.is_compiling() and bool(((lengths < 0) | (lengths > length)).any()):
            raise ValueError(f"lengths must lie between 0 and T = {length}, got {lengths.tolist()}.")
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens packs the documents into one row, so query must have B = 1, got B = {batch}.")
    return check_ends(cu_seqlens, length), lengths


def check_ends(cu_seqlens: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Refuse `cu_seqlens` that do not divide `length` tokens into documents; as int32 or int64."""
    if cu_seqlens is None:
        return None
    if not _are_integers(cu_seqlens) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must be integers of shape [S + 1] with S >= 1, got {_described(cu_seqlens)}.")
    cu_seqlens = signed(cu_seqlens)
    if torch.compiler.is_compiling():
        return cu_seqlens
    first, last, falling = torch.stack([cu_seqlens[0], cu_seqlens[-1], (cu_seqlens.diff() < 0).any()]).tolist()
    if first != 0 or last != length:
        raise ValueError(f"cu_seqlens must run from 0 to T = {length}, got {first} to {last}.")
    if falling:
        raise ValueError("cu_seqlens must never decrease: every document begins where the one before it ends.")
    return cu_seqlens


def _are_integers(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def signed(x: torch.Tensor) -> torch.Tensor:
    """As int32 or int64: unsigned integers have no negative differences and support few operations."""
    return x if x.dtype in (torch.int32, torch.int64) else x.long()


def check_how(backend: str, backends: tuple[str, ...], chunk_size: int) -> None:
    """Refuse a backend that an operator does not have, and a chunk that holds no token."""
    if backend not in backends:
        raise ValueError(f"backend must be one of {', '.join(backends)}, got {backend!r}.")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}.")


def check_tensors(*arguments: tuple[str, Any, str], integers: tuple[str, ...] = ()) -> dict[str, int]:
    """Refuse what is no floating-point tensor of the named axes on the device of the first one.

    Args:
        arguments: names, tensors and axes, as ("key", key, "B, T, G, R"). An axis has the same size in all of them, at
            least 1; a number stands for that size.
        integers: the names of those that hold integers instead.

    Returns:
        The sizes of the axes.
    """
    sizes: dict[str, int] = {}
    for name, x, axes in arguments:
        names = axes.split(", ")
        if not isinstance(x, torch.Tensor) or x.ndim != len(names):
            raise ValueError(f"{name} must have shape [{axes}], got {shape_of(x)}.")
        for axis, size in zip(names, x.shape):
            if size != (int(axis) if axis.isdigit() else sizes.setdefault(axis, size)):
                known = ", ".join([str(sizes.get(other, other)) for other in names])
                raise ValueError(f"{name} must have shape [{axes}] = [{known}], got {list(x.shape)}.")
            if size == 0:  # no chunk, block or grid of a kernel has a size for it
                what = {"B": "row", "T": "token"}.get(axis, "number")
                raise ValueError(f"{name} must hold at least one {what}, got {axis} = 0.")
        _check_kind(name, x, name in integers, arguments[0][1].device, arguments[0][0])
    return sizes


def check_floats(name: str, x: torch.Tensor, device: torch.device, beside: str = "query") -> None:
    """Refuse what is no real floating-point tensor on the device of the argument `beside` it."""
    _check_kind(name, x, False, device, beside)


def _check_kind(name: str, x: torch.Tensor, integers: bool, device: torch.device, beside: str) -> None:
    if not (_are_integers(x) if integers else x.is_floating_point()):
        raise ValueError(f"{name} must be {'integers' if integers else 'a floating-point tensor'}, got {x.dtype}.")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but {beside} is on {device}; move it there.")


def check_range(name: str, x: torch.Tensor, least: int, most: int) -> None:
    """Refuse integers that are out of range; on a CPU alone, since looking would wait for a GPU or break a graph."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(n) for n in x.aminmax())
        if low < least or high > most:
            raise ValueError(f"{name} must lie between {least} and {most}, got {low if low < least else high}.")


def check_state(
    name: str, state: Any, shape: tuple[int, ...], axes: str, device: torch.device, beside: str = "query"
) -> None:
    """Refuse a state of another shape than `[rows, *axes]`, one row for each batch row or document."""
    if not isinstance(state, torch.Tensor) or state.shape != shape:
        raise ValueError(
            f"{name} must have shape [rows, {axes}] = {list(shape)}, with one row a batch row or document, got "
            f"{shape_of(state)}."
        )
    check_floats(name, state, device, beside)


def real_tokens(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """The mask of a step, checked, as the kernels read it: contiguous bool."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape != (query.shape[0],):
        raise ValueError(f"mask must have shape [B] = [{query.shape[0]}], got {shape_of(mask)}.")
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"mask must be bool or integers, zero for a pad, got {mask.dtype}.")
    if mask.device != query.device:
        raise ValueError(f"mask is on {mask.device}, but query is on {query.device}; move it there.")
    return (mask != 0).contiguous()


def shape_of(x: Any) -> list[int] | str:
    """The shape of a tensor, or the type of anything else, for an error message."""
    return list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__


def _described(x: Any) -> str:
    return f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
