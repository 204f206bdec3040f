"""The inputs of sparse attention: queries, the keys that they may see in the order of arrival, and a bounded memory of
the keys before.

Scores are fixed and rivals are only added, so a key that has left a set never returns. The best keys, and the latest of
every bin, are therefore all that later queries can see.
"""

from typing import NamedTuple

import torch


class Bins(NamedTuple):
    """A query sees the latest `keys` keys of its own bin.

    Attributes:
        query, key: `[B, T, S]`, the bin of every token, -1 for none.
        number: the bins are 0 to `number - 1`.
        keys: how many of a bin are seen.
        complete: every token has a bin; saves a step some work.
    """

    query: torch.Tensor
    key: torch.Tensor
    number: int
    keys: int
    complete: bool = False


class Ring(NamedTuple):
    """The latest keys of every bin: `entries` `[B, S, bins, keys, d + D]`, keys beside values, and their `places`.

    The slots of a bin are in any order: a step writes over the oldest key and moves none.
    """

    entries: torch.Tensor
    places: torch.Tensor


class SparseMemory(NamedTuple):
    """The keys that later queries may see, beside their values. All zeros is an empty memory.

    Attributes:
        seen: `[B]`, the tokens so far without pads. Places are counted from 1; place 0 is an empty slot, and holds
            zeros.
        entries: `[B, S, selected_keys, d + D]`, the best keys beside their values, in the order of their places; None
            without selection.
        scores, places: `[B, S, selected_keys]` of these.
        rings: one for each of the bins.
    """

    seen: torch.Tensor
    entries: torch.Tensor | None
    scores: torch.Tensor | None
    places: torch.Tensor | None
    rings: tuple[Ring, ...]

    def to(self, dtype: torch.dtype) -> "SparseMemory":
        """With entries in another dtype."""
        rings = tuple(ring._replace(entries=ring.entries.to(dtype)) for ring in self.rings)
        return self._replace(entries=None if self.entries is None else self.entries.to(dtype), rings=rings)


class Stream(NamedTuple):
    """Queries `[N, T]` and keys `[N, L]` of N = B S heads; key `past + i` arrives with query i.

    Attributes:
        query, key, value: `[B, T, S, d]`, `[B, L, S, d]`, `[B, L, S, D]`, not copied: new memory is dear on a CPU.
        scores: `[N, L]`, -inf for what no query may select; None without selection.
        selected_keys: how many of the best a query sees.
        bins: query `[N, T]` and key `[N, L]`.
        ends: `[L]`, where the packed document of every key ends; None for rows.
        places: `[N, L]`, as in the memory.
        past: the keys before the first query.
        heads: `[N]`, their numbers among the B S.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scores: torch.Tensor | None
    selected_keys: int
    bins: tuple[Bins, ...]
    ends: torch.Tensor | None
    places: torch.Tensor
    past: int
    heads: torch.Tensor

    def of_heads(self, part: slice) -> "Stream":
        """Some of the N heads, of the same tensors."""
        return self._replace(
            scores=None if self.scores is None else self.scores[part],
            bins=tuple(bins._replace(query=bins.query[part], key=bins.key[part]) for bins in self.bins),
            places=self.places[part],
            heads=self.heads[part],
        )

    def rows(self, length: int) -> torch.Tensor:
        """`[N, length]`, the index of each token of each head in a flattened `[B, length, S]`."""
        heads = self.key.shape[2]
        first = self.heads // heads * (length * heads) + self.heads % heads
        return first[:, None] + heads * torch.arange(length, device=self.key.device)


def stream_of(query, key, value, scores, selected_keys, bins, real, ends, memory) -> Stream:
    """The stream of new tokens, behind the keys of the memory; pads (`real` `[B, T]` is False) are zero, in no set."""
    batch, length, heads = key.shape[:3]
    if real is not None:
        query, key, value = (torch.where(real[..., None, None], x, 0) for x in (query, key, value))
        scores = None if scores is None else torch.where(real[..., None], scores, -torch.inf)
        bins = [
            part._replace(query=part.query.where(real[..., None], -1), key=part.key.where(real[..., None], -1))
            for part in bins
        ]
    scores = None if scores is None else heads_first(scores)
    bins = tuple(part._replace(query=heads_first(part.query.long()), key=heads_first(part.key.long())) for part in bins)
    places = torch.arange(1, length + 1, device=key.device).expand(batch * heads, length)
    if real is not None:
        places = real.cumsum(1).repeat_interleave(heads, dim=0)
    if memory is not None:
        places = places + memory.seen.repeat_interleave(heads)[:, None]
    numbers = torch.arange(batch * heads, device=key.device)
    new = Stream(query, key, value, scores, selected_keys, bins, ends, places, 0, numbers)
    return new if memory is None else _after_memory(new, memory)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """`[B, T, S, ...]` to `[N, T, ...]`."""
    return x.transpose(1, 2).contiguous().flatten(0, 1)


def _after_memory(new: Stream, memory: SparseMemory) -> Stream:
    """The stream with the keys of the memory in front, each once even if it is in several sets."""
    entries, places, scores, bins = _kept(memory)
    places, order = places.sort(dim=1, stable=True)
    entries = entries.gather(1, order[..., None].expand_as(entries)).to(new.key.dtype)
    copies = torch.zeros_like(places, dtype=torch.bool)
    copies[:, 1:] = places[:, 1:] == places[:, :-1]
    gone = copies | (places == 0)

    def merged(x: torch.Tensor, nothing: float) -> torch.Tensor:
        """The largest of what the copies of a key hold, at the first of them."""
        x = x.gather(1, order)
        for _ in bins:  # a key has at most one copy in each ring, and one among the best
            later = torch.where(copies[:, 1:], x[:, 1:], nothing)
            x = torch.cat([torch.maximum(x[:, :-1], later), x[:, -1:]], dim=1)
        return x.masked_fill(gone, nothing)

    width = new.key.shape[-1]
    kept_bins = [merged(x, -1) for x in bins]
    entries = entries.unflatten(0, (new.key.shape[0], -1)).transpose(1, 2)
    return new._replace(
        key=torch.cat([entries[..., :width], new.key], dim=1),
        value=torch.cat([entries[..., width:], new.value], dim=1),
        scores=None if new.scores is None else torch.cat([merged(scores, -torch.inf).to(new.scores), new.scores], 1),
        bins=tuple(part._replace(key=torch.cat([kept, part.key], dim=1)) for part, kept in zip(new.bins, kept_bins)),
        places=torch.cat([places.masked_fill(gone, 0), new.places], dim=1),
        past=places.shape[1],
    )


def _kept(memory: SparseMemory):
    """All slots of the memory side by side: entries, places, scores, and for every part the bins."""
    rings = [Ring(ring.entries.flatten(0, 1).flatten(1, 2), ring.places.flatten(0, 1)) for ring in memory.rings]
    entries, places = [ring.entries for ring in rings], [ring.places.flatten(1) for ring in rings]
    scores = [torch.full_like(x, -torch.inf, dtype=torch.float32) for x in places]
    if memory.entries is not None:
        entries, places = [memory.entries.flatten(0, 1), *entries], [memory.places.flatten(0, 1), *places]
        scores = [memory.scores.flatten(0, 1), *scores]
    bins: list[torch.Tensor] = []
    for ring in rings:
        number, keys = ring.places.shape[1:]
        own = torch.arange(number, device=places[0].device).repeat_interleave(keys).expand(len(places[0]), -1)
        of_none = [torch.full_like(x, -1) for x in places]
        of_none[len(places) - len(rings) + len(bins)] = own
        bins.append(torch.cat(of_none, 1))
    return torch.cat(entries, 1), torch.cat(places, 1), torch.cat(scores, 1), bins


def memory_after(stream: Stream, batch: int, counts: torch.Tensor, before: SparseMemory | None) -> SparseMemory:
    """The memory after `counts` `[B]` more tokens: the best keys of the stream, and the latest of every bin."""
    seen = counts if before is None else before.seen + counts
    entries = scores = places = None
    if stream.scores is not None:
        k = stream.selected_keys
        # Stable: of equal scores the earlier is better.
        found = stream.scores.sort(dim=1, descending=True, stable=True)
        best, valid = found.indices[:, :k], found.values[:, :k] > -torch.inf
        order = torch.where(valid, best, -1).argsort(dim=1)
        best, valid, scores = (x.gather(1, order) for x in (best, valid, found.values[:, :k]))
        fill = k - best.shape[1]
        entries = _rows(_taken(stream, best, valid), fill, batch)
        scores = _rows(scores.masked_fill(~valid, 0), fill, batch)
        places = _rows(stream.places.gather(1, best).masked_fill(~valid, 0), fill, batch)
    rings = tuple(_ring_after(stream, part, batch) for part in stream.bins)
    return SparseMemory(seen, entries, scores, places, rings)


def memory_of(key, value, scores, selected_keys, bins, real: torch.Tensor, before: SparseMemory) -> SparseMemory:
    """The memory after more tokens, without outputs; `real` `[B, T]` is False for pads, which may stand anywhere."""
    stream = stream_of(key, key, value, scores, selected_keys, bins, real, None, before)
    return memory_after(stream, real.shape[0], real.sum(1), before)


def _ring_after(stream: Stream, part: Bins, batch: int) -> Ring:
    heads, length = part.key.shape
    # By bin, and within a bin by arrival; those of no bin come first.
    bins, order = part.key.sort(dim=1, stable=True)
    numbers = torch.arange(part.number, device=bins.device).expand(heads, -1).contiguous()
    ends = torch.searchsorted(bins, numbers, right=True)
    starts = torch.searchsorted(bins, numbers)
    slots = ends[..., None] - part.keys + torch.arange(part.keys, device=bins.device)
    valid = slots >= starts[..., None]
    index = order.gather(1, slots.clamp(0, length - 1).flatten(1))
    entries = _taken(stream, index, valid.flatten(1)).unflatten(1, (part.number, part.keys))
    places = stream.places.gather(1, index).unflatten(1, (part.number, part.keys)).masked_fill(~valid, 0)
    return Ring(entries.unflatten(0, (batch, -1)), places.unflatten(0, (batch, -1)))


def _taken(stream: Stream, index: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """`[N, k, d + D]`, the keys at `index` beside their values."""
    rows = stream.rows(stream.key.shape[1]).gather(1, index)
    taken = [x.flatten(0, 2).index_select(0, rows.flatten()) for x in (stream.key, stream.value)]
    return torch.where(valid[..., None], torch.cat(taken, dim=1).view(*rows.shape, -1), 0)


def _rows(x: torch.Tensor, fill: int, batch: int) -> torch.Tensor:
    """`[N, k, ...]` after `fill` empty slots, as `[B, S, fill + k, ...]`."""
    x = torch.cat([x.new_zeros(x.shape[0], fill, *x.shape[2:]), x], dim=1)
    return x.unflatten(0, (batch, -1))


def empty_memory(batch, heads, key_width, value_width, selected_keys, bins, like: torch.Tensor) -> SparseMemory:
    """The memory before any token; `bins` are (number, keys) of every part."""

    def zeros(*shape: int, dtype=None) -> torch.Tensor:
        return like.new_zeros(batch, *shape, dtype=dtype)

    width, slots, whole = key_width + value_width, selected_keys, torch.long
    rings = (Ring(zeros(heads, n, k, width), zeros(heads, n, k, dtype=whole)) for n, k in bins)
    if not selected_keys:
        return SparseMemory(zeros(dtype=whole), None, None, None, tuple(rings))
    scores = zeros(heads, slots, dtype=torch.promote_types(like.dtype, torch.float32))
    chosen = zeros(heads, slots, width), scores, zeros(heads, slots, dtype=whole)
    return SparseMemory(zeros(dtype=whole), *chosen, tuple(rings))
