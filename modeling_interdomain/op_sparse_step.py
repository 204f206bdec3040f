"""One token of sparse attention: its key goes into the memory in place, and its query reads what is kept for it."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from .op_common import autocasts, without_autocast
from .op_common_launch import fused
from .op_sparse_stream import Bins, Ring, SparseMemory


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
        mask: `[B]` bool, False for a pad: it leaves the memory as it was, and its output is zero.
        backend: "triton" (a fused kernel for each set of keys on a GPU), "recurrent" (PyTorch) or "auto" (the kernels
            where they can run). Default: "auto".

    Returns:
        `[B, S, D]` in the dtype of `value`.
    """
    if torch.is_grad_enabled() or autocasts(query.device):
        with torch.no_grad(), without_autocast(query.device):
            return sparse_step(query, key, value, memory=memory, scores=scores, bins=bins, mask=mask, backend=backend)
    shape = value.shape[0], *value.shape[-2:]
    query = query.reshape(-1, 1, query.shape[-1])
    entry = torch.cat([key, value], dim=-1).view(query.shape[0], 1, -1)
    if backend == "triton" or (backend == "auto" and query.device.type != "cpu" and _contiguous(memory)):
        output = _fused(backend, query[:, 0], entry[:, 0], memory, scores, bins, mask)
        if output is not None:
            return output.view(shape).to(value.dtype)
    slots = _slots_for(query.shape[0], memory)
    if torch.compiler.is_compiling():
        weights, values = _remember_and_find(query, entry, memory, scores, bins, mask, slots)
    else:
        with torch.inference_mode():  # calls so small are a tenth shorter where no views are tracked
            weights, values = _remember_and_find(query, entry, memory, scores, bins, mask, slots)
    output = torch.bmm(weights, values).view(shape)
    return (output if mask is None else output.where(mask[:, None, None], 0)).to(value.dtype)


def _contiguous(memory: SparseMemory) -> bool:
    kept = [memory.entries, memory.scores, memory.places, *(x for ring in memory.rings for x in ring)]
    return all(x is None or x.is_contiguous() for x in kept)


def _fused(backend, query, entry, memory: SparseMemory, scores, bins: Sequence[Bins], mask) -> torch.Tensor | None:
    def run():
        from .op_sparse_triton_step import triton_sparse_step

        return triton_sparse_step(query, entry, memory, scores, tuple(bins), mask)

    kept = [memory.entries, *(ring.entries for ring in memory.rings)]
    return fused(backend, (query, entry, *kept), entry.shape[1], run, "a step of sparse attention")


class _Slots(NamedTuple):
    """Numbers that depend on sizes alone, which every layer needs at every token.

    Attributes:
        first: `[N, keys]`, the first `keys` of `keys + 1` slots of each of N heads.
        behind: the slots behind these.
        from_end: `[keys]`, how far each is from the last one.
        starts: of every ring `[N]`, the first bin of each head.
    """

    first: torch.Tensor
    behind: torch.Tensor
    from_end: torch.Tensor
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
    slots, heads = torch.arange(keys, device=device), torch.arange(rows, device=device)
    first = heads[:, None] * (keys + 1) + slots
    return _Slots(first, first + 1, keys - slots, tuple([heads * number for number in bins]))


def _remember_and_find(query, entry, memory: SparseMemory, scores, bins: Sequence[Bins], mask, slots: _Slots):
    _remember(entry, memory, scores, bins, mask, slots)
    return _find(query, memory, bins, slots)


def _remember(entry, memory: SparseMemory, scores, bins: Sequence[Bins], mask, slots: _Slots) -> None:
    seen = memory.seen.add_(1 if mask is None else mask.long())
    batch = seen.shape[0]
    heads = entry.shape[0] // batch
    place = seen.expand(heads, 1) if batch == 1 else seen[:, None].expand(-1, heads).reshape(-1, 1)
    real = None if mask is None else mask[:, None].expand(-1, heads).reshape(-1)
    if memory.entries is not None:
        _compete(memory, entry.to(memory.entries.dtype), scores.reshape(-1, 1), place, real, slots)
    for ring, part, starts in zip(memory.rings, bins, slots.starts, strict=True):
        own = part.key.flatten()
        valid = real if part.complete else (own >= 0 if real is None else (own >= 0) & real)
        row = starts + (own if valid is None else own.clamp(min=0))
        _push(ring, entry.to(ring.entries.dtype), place, row, valid)


def _compete(memory: SparseMemory, entry, score, place, real, slots: _Slots) -> None:
    """The worst of all makes room, of equals the latest, which may be the new one; the others stay in their order."""
    rows, _, width = entry.shape
    keys = memory.scores.shape[2]
    scores, places, kept = memory.scores.view(rows, keys), memory.places.view(rows, keys), memory.entries
    entries = torch.cat([kept.view(rows, keys, width), entry], dim=1)
    of_all, places_of_all = torch.cat([scores, score], dim=1), torch.cat([places, place], dim=1)
    worst = of_all.masked_fill(places_of_all == 0, -torch.inf).flip(1).argmin(1, keepdim=True)  # from the end
    if real is not None:
        worst = worst * real[:, None]
    stay = torch.where(worst >= slots.from_end, slots.behind, slots.first)
    torch.take(of_all, stay, out=scores)
    torch.take(places_of_all, stay, out=places)
    torch.index_select(entries.view(-1, width), 0, stay.view(-1), out=kept.view(-1, width))


def _push(ring: Ring, entry, place, row, valid) -> None:
    """The oldest key of the bin makes room, an empty slot before all."""
    keys = ring.places.shape[3]
    slot = torch.add(ring.places.view(-1, keys).index_select(0, row).argmin(1), row, alpha=keys)
    for kept, new in ((ring.entries.view(-1, entry.shape[2]), entry.squeeze(1)), (ring.places.view(-1, 1), place)):
        if valid is not None:
            new = torch.where(valid[:, None], new, kept.index_select(0, slot))
        kept.index_copy_(0, slot, new)


def _find(query: torch.Tensor, memory: SparseMemory, bins: Sequence[Bins], slots: _Slots):
    """Weights `[N, 1, keys]` of queries `[N, 1, d]`, and the values `[N, keys, D]` that they are of."""
    entries, places, known = [], [], []
    if memory.entries is not None:
        entries, known = [memory.entries.flatten(0, 1)], [memory.places.flatten(0, 1)]
        places = [*known]
    for i, (ring, part, starts) in enumerate(zip(memory.rings, bins, slots.starts, strict=True), start=1):
        number, keys = ring.places.shape[2:]
        found, place = ring.entries.view(-1, keys, ring.entries.shape[-1]), ring.places.view(-1, keys)
        asked = part.query.flatten()
        if number > 1:
            row = starts + (asked if part.complete else asked.clamp(min=0))
            found, place = found.index_select(0, row), place.index_select(0, row)
        if not part.complete:
            place = place.masked_fill((asked < 0)[:, None], 0)
        once = place
        for earlier in known:  # a key in both counts once
            once = once * _missing(earlier, place)
        if i < len(memory.rings):
            known.append(place.sort(1).values)
        entries.append(found)
        places.append(once)
    together, place = (entries[0], places[0]) if len(places) == 1 else (torch.cat(entries, 1), torch.cat(places, 1))
    if together.dtype not in (torch.float32, torch.float64):
        together = together.float()
    width = query.shape[2]
    remembered, values = together.split_with_sizes([width, together.shape[2] - width], dim=2)
    hidden = (place == 0).unsqueeze(1)
    logits = torch.bmm(query.to(together.dtype), remembered.mT)
    weights = logits.masked_fill_(hidden, torch.finfo(together.dtype).min).softmax(-1)
    if memory.entries is None:  # otherwise a token sees a key, the first of all if no other
        weights = weights.masked_fill_(hidden, 0)
    return weights, values


def _missing(places: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Which of the wanted are not among the ascending `places` of their row."""
    return torch.searchsorted(places, wanted) == torch.searchsorted(places, wanted, right=True)
