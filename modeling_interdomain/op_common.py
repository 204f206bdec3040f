"""What all operators share: powers of a decay, which tokens belong to which document, and the checks of both."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch


def decay_powers(log_decay: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """`lambda ** exponents`, computed in float64 whatever the dtype of the parameters.

    A phase of 128 rad a token over 64 tokens is 8,192 rad: float32 would keep only three digits of the angle. Exponents
    are non-negative, so that every power of a stable decay stays within [0, 1] and no chunk length, step size or decay
    rate can overflow; the fused kernels alone ask for negative ones, where they know that the result is finite.

    Args:
        log_decay: `[G, M, 2]`, Delta A as (real, imaginary) pairs; the imaginary part in radians per token.
        exponents: `[E]`, integers.

    Returns:
        `[G, E, M]`, complex128.
    """
    exponents = exponents.to(torch.float64)[:, None]
    rate, phase = log_decay[:, None].unbind(-1)
    size, angle = (finite(rate) * exponents).exp(), phase.to(torch.float64) * exponents
    # `torch.polar` divides by the size in its gradient, where nothing is left of a denormal one.
    return torch.complex(size * angle.cos(), size * angle.sin())


def finite(log_decay: torch.Tensor) -> torch.Tensor:
    """In float64, and -inf as a number whose exp is 0 as well: zero times it is zero, and sums of it have differences.

    It is small enough besides for what is added to it to keep its digits.
    """
    return log_decay.to(torch.float64).clamp(min=-1000.0)


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """Real pairs `[..., 2]` as complex numbers `[...]`, in the nearest dtype that has a complex partner.

    A copy: a view would need an even storage offset, which a parameter in a flat buffer need not have.
    """
    return torch.complex(*pairs.to(torch.promote_types(pairs.dtype, torch.float32)).unbind(-1))


def multiplies_narrow(x: torch.Tensor) -> bool:
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


class Kept:
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


class Packing(NamedTuple):
    """What a recurrent layer works on, when the batch is not simply B rows of T real tokens.

    Pads go to the end: a mask brings the real tokens of every row to its front, in their order, and packed documents
    become one row whose pads, if there are any, are one more document behind the last. The sizes are those of the batch
    whatever the values are, so that a compiled graph holds for every mask; but for texts that fork, whose common
    beginnings stand in the document of each (`packing_from_forks`).

    Attributes:
        shape: B and T of the batch.
        mask: `[B, T]` bool, False for pads; None when there are none.
        tokens: `[B T]`, where in the flattened batch each packed token comes from; None when all stay in place.
        places: `[B T]`, the inverse of `tokens`: where each token of the batch stands first.
        lengths: `[B]`, the real tokens of every row; None with packed documents.
        cu_seqlens: `[S + 1]`, ends of the documents along the packed row, starting with 0; None for rows.
        documents: `[B T]`, the document of every packed token; None for rows.
    """

    shape: tuple[int, int]
    mask: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    places: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, ...]` to the same with pads at the ends of rows, or to one row `[1, B T, ...]` of documents."""
        flat = x.flatten(0, 1)
        if self.tokens is not None:
            flat = flat.index_select(0, self.tokens)
        return flat.unflatten(0, self.shape) if self.cu_seqlens is None else flat[None]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Back to `[B, T, ...]`, with zeros at the pads."""
        flat = x.flatten(0, 1)
        if self.places is not None:
            flat = flat.index_select(0, self.places)
        if self.mask is not None:
            flat = torch.where(self.mask.flatten().view(-1, *[1] * (flat.ndim - 1)), flat, 0)
        return flat.unflatten(0, self.shape)

    @property
    def starts(self) -> torch.Tensor | None:
        """`[B, T]` bool: the tokens of the batch that begin a packed document; None for rows."""
        if self.documents is None:
            return None
        return self.unpack(torch.nn.functional.pad(self.documents.diff() != 0, (1, 0), value=True)[None])


def packing_from_mask(mask: torch.Tensor) -> Packing:
    """Rows of a `[B, T]` mask, their pads at the end wherever they stood."""
    mask = mask.bool()
    places, tokens = _real_tokens_first(mask)
    return Packing((mask.shape[0], mask.shape[1]), mask, tokens, places, lengths=mask.sum(dim=1))


def packing_from_documents(cu_seqlens: torch.Tensor, mask: torch.Tensor | None, shape: tuple[int, int]) -> Packing:
    """Documents along the flattened `[B, T]` batch, without the pads that a mask marks in them."""
    cu_seqlens = cu_seqlens.long()
    if mask is None:
        return Packing(shape, cu_seqlens=cu_seqlens, documents=document_of_tokens(cu_seqlens, shape[0] * shape[1]))
    mask = mask.bool()
    flat = mask.flatten()
    places, tokens = _real_tokens_first(flat[None])
    counted = torch.nn.functional.pad(flat.long().cumsum(0), (1, 0))
    ends = torch.nn.functional.pad(counted[cu_seqlens], (0, 1), value=flat.shape[0])
    documents = document_of_tokens(ends, flat.shape[0])
    return Packing(shape, mask, tokens, places, cu_seqlens=ends, documents=documents)


def packing_from_forks(seen: torch.Tensor) -> Packing | None:
    """The texts of a batch that fork, for a `[B, T, T]` bool mask of which tokens each token sees.

    A state reads one token after the other, so whatever a token sees must itself see what that token sees up to there.
    Every way through the fork is a document; tokens that do not see themselves are pads. None for all other masks.
    """
    batch, length = seen.shape[:2]
    real = seen.diagonal(dim1=1, dim2=2)
    seen = seen & real[..., None]
    counts = seen.to(torch.float32)
    shared = counts @ counts.mT
    if bool((seen & ((shared != counts.sum(2)[:, None]) | (shared != counts.cumsum(2)))).any()):
        return None
    rows, ends = (real & (seen.sum(1) == 1)).nonzero().unbind(1)  # whom no other token sees
    ways, pads = seen[rows, ends], (~real).flatten().nonzero()[:, 0]
    numbers = torch.arange(length, device=seen.device) + length * rows[:, None]
    tokens = torch.cat([numbers[ways], pads])
    lengths = [ways.sum(1), *([pads.new_full((1,), len(pads))] if len(pads) else [])]
    cu_seqlens = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    order = torch.arange(len(tokens), device=seen.device)
    places = order.new_zeros(batch * length).scatter_reduce(0, tokens, order, "amin", include_self=False)
    documents = document_of_tokens(cu_seqlens, len(tokens))
    mask = real if len(pads) else None
    return Packing((batch, length), mask, tokens, places, cu_seqlens=cu_seqlens, documents=documents)


def _real_tokens_first(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where every token of a `[B, T]` mask goes, and where each of these places comes from, both `[B T]`."""
    rows, length = mask.shape
    real, pads = mask.long().cumsum(1), (~mask).long().cumsum(1)
    places = torch.where(mask, real, real[:, -1:] + pads) - 1
    places = (places + length * torch.arange(rows, device=mask.device)[:, None]).flatten()
    numbers = torch.arange(rows * length, device=mask.device)
    return places, torch.zeros_like(places).scatter(0, places, numbers)


def cu_seqlens_from_positions(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Documents start wherever `position_ids` `[B, T]` do not go up; None when every row is one document.

    In a graph, where no size may depend on values, the answer always has `B T + 1` entries: empty documents follow the
    last one.
    """
    return _ends_before(position_ids[:, 1:] <= position_ids[:, :-1])  # unsigned numbers have no negative difference


def cu_seqlens_from_numbers(documents: torch.Tensor) -> torch.Tensor | None:
    """The same, where the number of its document is known of each token, `[B, T]`."""
    return _ends_before(documents[:, 1:] != documents[:, :-1])


def _ends_before(later: torch.Tensor) -> torch.Tensor | None:
    """`later` `[B, T - 1]`: whether the second and later tokens of a row start a document."""
    starts = torch.nn.functional.pad(later, (1, 0), value=True).flatten()
    count = starts.shape[0]
    if in_graph():
        numbers = torch.arange(1, count + 2, device=starts.device)
        return torch.searchsorted(starts.long().cumsum(0), numbers)
    begins = starts.nonzero()[:, 0]
    if begins.shape[0] == later.shape[0]:
        return None
    return torch.nn.functional.pad(begins, (0, 1), value=count)


def document_of_tokens(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """`[length]`: the number of the document each token belongs to."""
    tokens = torch.arange(length, device=cu_seqlens.device)
    return torch.bucketize(tokens, cu_seqlens[1:-1].to(tokens.dtype), right=True)


def positions_from_cu_seqlens(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """`[B, T]` positions that restart at every document."""
    length = shape[0] * shape[1]
    starts = cu_seqlens.long()[document_of_tokens(cu_seqlens, length)]
    return (torch.arange(length, device=cu_seqlens.device) - starts).view(shape)


def check_documents(
    cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None, x: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Refuse `cu_seqlens` or `lengths` that do not fit tokens `[B, T, ...]`; their values where it costs no graph.

    Returns:
        Both, in a dtype that has differences.
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
    """The same of documents along `length` tokens."""
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
    """Numbers without a sign have no negative difference, and few operations."""
    return x if x.dtype in (torch.int32, torch.int64) else x.long()


def check_how(backend: str, backends: tuple[str, ...], chunk_size: int) -> None:
    """Refuse a backend that an operator does not have, and a chunk that holds no token."""
    if backend not in backends:
        raise ValueError(f"backend must be one of {', '.join(backends)}, got {backend!r}.")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}.")


def check_tensors(*arguments: tuple[str, Any, str], integers: tuple[str, ...] = ()) -> dict[str, int]:
    """Refuse what is no floating-point tensor of its axes, beside the first one.

    Args:
        arguments: names, tensors and axes, as ("key", key, "B, T, G, R"). An axis has one size, at least 1, in all of
            them; one that is called by a number has that size.
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
    """Refuse integers that are out of range, where looking costs no wait for a device and no graph."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(n) for n in x.aminmax())
        if low < least or high > most:
            raise ValueError(f"{name} must lie between {least} and {most}, got {low if low < least else high}.")


def check_state(
    name: str, state: Any, shape: tuple[int, ...], axes: str, device: torch.device, beside: str = "query"
) -> None:
    """Refuse a state that has not one row of the named axes for each row of the batch, or document."""
    if not isinstance(state, torch.Tensor) or state.shape != shape:
        raise ValueError(
            f"{name} must have shape [rows, {axes}] = {list(shape)}, with one row a batch row or document, got "
            f"{shape_of(state)}."
        )
    check_floats(name, state, device, beside)


def shape_of(x: Any) -> list[int] | str:
    """What an argument is, in the words of a refusal."""
    return list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__


def _described(x: Any) -> str:
    return f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
