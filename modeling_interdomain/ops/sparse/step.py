"""One token of sparse attention: its key enters the memory in place, and its query reads the memory."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ..common.checks import real_tokens
from ..common.cpu import autocasts, without_autocast
from ..common.launch import check_step_backend, fused
from .entry import check_memory, check_sets, check_values
from .stream import Bins, Ring, SparseMemory


def sparse_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    memory: SparseMemory,
    scores: torch.Tensor | None = None,
    bins: Sequence[Bins] = (),
    mask: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One token of `sparse_attention` with the memory updated in place; all sizes are fixed.

    Args:
        query, key, value: `[B, S, d]` and `[B, S, D]`, or with an axis of the one token, `[B, 1, S, d]`.
        memory: overwritten.
        scores: `[B, S]` or `[B, 1, S]` in the dtype of those in the memory; as in `sparse_attention`.
        bins: of each part, with query and key `[B, S]` or `[B, 1, S]`.
        mask: `[B]` bool or integers, zero for a pad: it leaves the memory as it was, and its output is zero.
        backend: "triton" (a fused kernel for each set of keys on a GPU), "recurrent" (PyTorch) or "auto" (the kernels
            where they can run). Default: "auto".

    Returns:
        `[B, S, D]` in the dtype of `value`.

    Raises:
        ValueError: when an argument has a wrong shape, device or value, before the memory is touched.
    """
    check_sets(query, key, value, scores, bins, rows="B, 1" if getattr(query, "ndim", 3) == 4 else "B")
    kept = getattr(memory, "scores", None)
    keys = 0 if scores is None else 1 if kept is None else kept.shape[-1]
    check_memory("memory", memory, key, value, keys, bins)
    check_values(scores, bins, None)
    check_step_backend(backend, memory.seen)
    mask = real_tokens(mask, memory.seen)
    return take_sparse_step(query, key, value, memory=memory, scores=scores, bins=bins, mask=mask, backend=backend)


def take_sparse_step(
    query, key, value, *, memory: SparseMemory, scores=None, bins: Sequence[Bins] = (), mask=None, backend: str = "auto"
) -> torch.Tensor:
    """`sparse_step` for a caller whose arguments fit; `mask` `[B]` is bool."""
    if torch.is_grad_enabled() or autocasts(query.device):
        with torch.no_grad(), without_autocast(query.device):
            return take_sparse_step(
                query, key, value, memory=memory, scores=scores, bins=bins, mask=mask, backend=backend
            )
    shape = value.shape[0], *value.shape[-2:]
    query = query.reshape(-1, 1, query.shape[-1])
    entry = torch.cat([key, value], dim=-1).view(query.shape[0], -1)
    if backend == "triton" or (backend == "auto" and query.device.type != "cpu" and _contiguous(memory)):
        output = _fused(backend, query[:, 0], entry, memory, scores, bins, mask)
        if output is not None:
            return output.view(shape).to(value.dtype)
    kept = memory.rings[0].entries if memory.entries is None else memory.entries
    if entry.dtype != kept.dtype:
        entry = entry.to(kept.dtype)
    slots = _slots_for(query.shape[0], memory)
    if torch.compiler.is_compiling():
        weights, values = _remember_and_find(query, entry, memory, scores, bins, mask, slots)
    else:
        with torch.inference_mode():  # a tenth faster: such small calls without tracking of views
            weights, values = _remember_and_find(query, entry, memory, scores, bins, mask, slots)
    output = torch.bmm(weights[0], values[0])
    for of_set, among in zip(weights[1:], values[1:], strict=True):
        output.baddbmm_(of_set, among)
    output = output.view(shape)
    if mask is not None:
        output = output.where(mask[:, None, None], 0)
    return output if output.dtype == value.dtype else output.to(value.dtype)


def _contiguous(memory: SparseMemory) -> bool:
    kept = [memory.entries, memory.scores, memory.places, *(x for ring in memory.rings for x in ring)]
    return all(x is None or x.is_contiguous() for x in kept)


def _fused(backend, query, entry, memory: SparseMemory, scores, bins: Sequence[Bins], mask) -> torch.Tensor | None:
    def run():
        from .triton_step import triton_sparse_step

        return triton_sparse_step(query, entry, memory, scores, tuple(bins), mask)

    kept = [memory.entries, *(ring.entries for ring in memory.rings)]
    return fused(backend, (query, entry, *kept), entry.shape[1], run, "a step of sparse attention")


class _Slots(NamedTuple):
    """Index tensors that depend on sizes alone, which every layer needs at every token.

    Attributes:
        none: minus infinity, less than all scores.
        numbers: `[keys]`, the slots of the best keys.
        first, behind: `[N, keys]`, the first `keys` of `keys + 1` slots of each of N heads, and the slots behind these.
        starts: of every ring `[N]`, the first bin of each head.
    """

    none: torch.Tensor
    numbers: torch.Tensor
    first: torch.Tensor
    behind: torch.Tensor
    starts: tuple[torch.Tensor, ...]


def _slots_for(rows: int, memory: SparseMemory) -> _Slots:
    keys = 0 if memory.scores is None else memory.scores.shape[2]
    sizes = rows, keys, *[ring.places.shape[2] for ring in memory.rings]
    like = memory.seen
    if torch.compiler.is_compiling() or type(like) is not torch.Tensor or like.device.type != "cpu":
        return _slots(*sizes, device=like.device)
    return _kept_slots(*sizes)


@lru_cache(maxsize=64)
def _kept_slots(*sizes: int) -> _Slots:
    return _slots(*sizes, device=torch.device("cpu"))


def _slots(rows: int, keys: int, *bins: int, device: torch.device) -> _Slots:
    numbers, heads = torch.arange(keys, device=device), torch.arange(rows, device=device)
    first = heads[:, None] * (keys + 1) + numbers
    none = torch.full((), -torch.inf, device=device)
    return _Slots(none, numbers, first, first + 1, tuple([heads * number for number in bins]))


def _remember_and_find(query, entry, memory: SparseMemory, scores, bins: Sequence[Bins], mask, slots: _Slots):
    """For every set the weights `[N, 1, keys]` of queries `[N, 1, d]`, and the values `[N, keys, D]` they weigh."""
    seen = memory.seen.add_(1 if mask is None else mask.long())
    batch, rows = seen.shape[0], entry.shape[0]
    heads = rows // batch
    place = seen.expand(rows, 1) if batch == 1 else seen[:, None].expand(-1, heads).reshape(-1, 1)
    real = None if mask is None else mask[:, None].expand(-1, heads).reshape(-1)
    found, known, hidden = [], [], []
    if memory.entries is not None:
        best = _compete(memory, entry, scores.reshape(-1, 1), place, real, slots)
        found, known, hidden = [best.entries], [best.places], [best.places == 0]
    for i, (ring, part, starts) in enumerate(zip(memory.rings, bins, slots.starts, strict=True), start=1):
        own = _push_and_ask(ring, part, entry, place, starts, real)
        hide = own.places == 0
        for earlier in known:  # a key that is in two sets counts once
            hide.logical_or_(_among(earlier, own.places))
        if i < len(memory.rings):
            known.append(own.places.sort(1).values)
        found.append(own.entries)
        hidden.append(hide)
    return _weights(query, found, hidden, always=memory.entries is not None)


def _push_and_ask(ring: Ring, part: Bins, entry, place, starts, real) -> Ring:
    """Write the key over the oldest one of its bin, or to an empty slot.

    Returns:
        Entries `[N, keys, d + D]` and places `[N, keys]` of the bin that each query asks for.
    """
    number, keys, width = ring.entries.shape[2:]
    places, own = ring.places.view(-1, keys), part.key.flatten()
    valid = real if part.complete else (own >= 0 if real is None else (own >= 0) & real)
    row = starts + (own if valid is None else own.clamp(min=0))
    slot = torch.add(places.index_select(0, row).argmin(1), row, alpha=keys)
    for kept, new in ((ring.entries.view(-1, width), entry), (ring.places.view(-1, 1), place)):
        if valid is not None:
            new = torch.where(valid[:, None], new, kept.index_select(0, slot))
        kept.index_copy_(0, slot, new)

    entries, asked = ring.entries.view(-1, keys, width), part.query.flatten()
    if number > 1:
        row = starts + (asked if part.complete else asked.clamp(min=0))
        entries, places = entries.index_select(0, row), places.index_select(0, row)
    return Ring(entries, places if part.complete else places.masked_fill((asked < 0)[:, None], 0))


def _compete(memory: SparseMemory, entry, score, place, real, slots: _Slots) -> Ring:
    """Drop the worst of the best keys and the new one, of equals the latest; the others stay in their order.

    Returns:
        Views `[N, keys, d + D]` and `[N, keys]` of the entries and places after that.
    """
    rows, width = entry.shape
    keys = memory.scores.shape[2]
    scores, places, kept = memory.scores.view(rows, keys), memory.places.view(rows, keys), memory.entries
    kept = kept.view(rows, keys, width)
    entries = torch.cat([kept, entry.unsqueeze(1)], dim=1)
    of_all, places_of_all = torch.cat([scores, score.to(scores.dtype)], dim=1), torch.cat([places, place], dim=1)
    # Of equal numbers the least so far is the latest.
    worst = torch.where(places_of_all == 0, slots.none, of_all).cummin(1)[1].narrow(1, keys, 1)
    if real is not None:
        worst = worst.where(real[:, None], keys)
    stay = torch.where(slots.numbers >= worst, slots.behind, slots.first)
    torch.take(of_all, stay, out=scores)
    torch.take(places_of_all, stay, out=places)
    torch.index_select(entries.view(-1, width), 0, stay.view(-1), out=kept.view(-1, width))
    return Ring(kept, places)


def _weights(query, found: list[torch.Tensor], hidden: list[torch.Tensor], always: bool):
    """One softmax over all sets; `always`: every query sees a key."""
    dtype = found[0].dtype
    if dtype not in (torch.float32, torch.float64):
        dtype, found = torch.float32, [x.float() for x in found]
    if query.dtype != dtype:
        query = query.to(dtype)
    width = query.shape[2]
    sizes = [width, found[0].shape[2] - width]
    keys, values = zip(*[x.split_with_sizes(sizes, dim=2) for x in found])
    logits = _joined([torch.bmm(query, x.mT) for x in keys], dim=2)
    hide = _joined(hidden, dim=1).unsqueeze(1)
    weights = logits.masked_fill_(hide, torch.finfo(dtype).min).softmax(-1)
    weights = weights if always else weights.masked_fill_(hide, 0)
    return weights.split_with_sizes([x.shape[1] for x in values], dim=2), values


def _joined(sets: list[torch.Tensor], dim: int) -> torch.Tensor:
    return sets[0] if len(sets) == 1 else torch.cat(sets, dim=dim)


def _among(places: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Which of the wanted are among the ascending `places` of their row."""
    return torch.searchsorted(places, wanted) != torch.searchsorted(places, wanted, right=True)
