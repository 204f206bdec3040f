"""One token of sparse attention: its key goes into the memory in place, and its query reads what is kept for it."""

from collections.abc import Sequence

import torch

from .op_common import without_autocast
from .op_sparse_stream import Bins, Ring, SparseMemory


@torch.no_grad()
def sparse_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    memory: SparseMemory,
    scores: torch.Tensor | None = None,
    bins: Sequence[Bins] = (),
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of `sparse_attention` with the memory updated in place; all sizes are fixed.

    Args:
        query, key, value: `[B, S, d]` and `[B, S, D]`.
        memory: overwritten.
        scores: `[B, S]` in the dtype of those in the memory; as in `sparse_attention`.
        bins: of each part, with query and key `[B, S]`.
        mask: `[B]` bool, False for a pad: it leaves the memory as it was, and its output is zero.

    Returns:
        `[B, S, D]` in the dtype of `value`.
    """
    with without_autocast(query.device):
        _remember(key, value, memory, scores, bins, mask)
        output = _read(query.flatten(0, 1), memory, bins).view(value.shape)
    return (output if mask is None else output.where(mask[:, None, None], 0)).to(value.dtype)


def _remember(key, value, memory: SparseMemory, scores, bins: Sequence[Bins], mask) -> None:
    heads = key.shape[1]
    entry = torch.cat([key, value], dim=-1).flatten(0, 1)[:, None]
    memory.seen.add_(1 if mask is None else mask.long())
    place = memory.seen[:, None].expand(-1, heads).reshape(-1, 1)
    real = None if mask is None else mask[:, None].expand(-1, heads).reshape(-1)
    if memory.entries is not None:
        _compete(memory, entry.to(memory.entries.dtype), scores.reshape(-1, 1), place, real)
    for ring, part in zip(memory.rings, bins, strict=True):
        own = part.key.flatten()
        valid = real if part.complete else (own >= 0 if real is None else (own >= 0) & real)
        _push(ring, entry.to(ring.entries.dtype), place, own, valid)


def _compete(memory: SparseMemory, entry, score, place, real) -> None:
    """The worst of all makes room, of equals the latest, which may be the new one; the others stay in their order."""
    entries, scores, places = (x.flatten(0, 1) for x in (memory.entries, memory.scores, memory.places))
    k = scores.shape[1]
    rivals = torch.cat([scores.masked_fill(places == 0, -torch.inf), score], dim=1)
    worst = k - rivals.flip(1).argmin(1)
    if real is not None:
        worst = torch.where(real, worst, k)
    slots = torch.arange(k, device=worst.device)
    slots = slots + (slots >= worst[:, None])
    scores.copy_(torch.cat([scores, score], dim=1).gather(1, slots))
    places.copy_(torch.cat([places, place], dim=1).gather(1, slots))
    slots = slots + torch.arange(0, len(slots) * (k + 1), k + 1, device=slots.device)[:, None]
    together = torch.cat([entries, entry], dim=1).flatten(0, 1)
    entries.copy_(together.index_select(0, slots.flatten()).view_as(entries))


def _push(ring: Ring, entry, place, own, valid) -> None:
    """The oldest key of the bin makes room."""
    number, keys = ring.places.shape[2:]
    entries, places = ring.entries.view(-1, keys, entry.shape[2]), ring.places.view(-1, keys)
    if number > 1:
        row = torch.arange(0, len(places), number, device=own.device) + (own if valid is None else own.clamp(min=0))
        kept = entries.index_select(0, row), places.index_select(0, row)
    else:
        row, kept = None, (entries, places)
    for whole, old, new in zip((entries, places), kept, (entry, place), strict=True):
        after = torch.cat([old[:, 1:], new], dim=1)
        if valid is not None:
            after = torch.where(valid.view(-1, *[1] * (after.ndim - 1)), after, old)
        whole.copy_(after) if row is None else whole.index_copy_(0, row, after)


def _read(query: torch.Tensor, memory: SparseMemory, bins: Sequence[Bins]) -> torch.Tensor:
    """`[N, D]` from queries `[N, d]`."""
    count, width = query.shape
    entries, places = [], []
    if memory.entries is not None:
        entries, places = [memory.entries.flatten(0, 1)], [memory.places.flatten(0, 1)]
    for ring, part in zip(memory.rings, bins, strict=True):
        number, keys = ring.places.shape[2:]
        asked = part.query.flatten()
        if number > 1:
            row = (asked if part.complete else asked.clamp(min=0)) + number * torch.arange(count, device=query.device)
            found = ring.entries.view(-1, keys, ring.entries.shape[-1]).index_select(0, row)
            place = ring.places.view(-1, keys).index_select(0, row)
        else:
            found, place = ring.entries.flatten(0, 2), ring.places.flatten(0, 2)
        if not part.complete:
            place = place.masked_fill((asked < 0)[:, None], 0)
        for earlier in places:  # a key in both counts once
            place = place.masked_fill((place[..., None] == earlier[:, None]).any(-1), 0)
        entries.append(found)
        places.append(place)
    together, place = (x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in (entries, places))
    wide = torch.promote_types(together.dtype, torch.float32)
    together, hidden = together.to(wide), place == 0
    logits = (together[..., :width] @ query.to(wide)[..., None])[..., 0]
    weights = logits.masked_fill(hidden, torch.finfo(wide).min).softmax(-1).masked_fill(hidden, 0)
    return (weights[:, None] @ together[..., width:])[:, 0]
