"""Which queries and keys sparse attention brings together, block by block, and which of them see each other."""

from typing import NamedTuple

import torch

from .op_sparse_expiry import Selection, Sorted, by_bins
from .op_sparse_stream import Stream

BLOCK = 32
# Logits of one run: on a CPU what is worked on should stay in a cache.
_LOGITS = {"cpu": 1 << 19, "other": 1 << 26}
# No logit of what is seen is so small, and none of what is hidden so large.
HIDDEN = -1e25
# More than all tokens.
FAR = float(1 << 23)


class Run(NamedTuple):
    """Blocks and their tiles that are worked on together."""

    blocks: slice
    rows: slice


class Pass(NamedTuple):
    """One set of keys; C queries a block and W keys a tile.

    Attributes:
        queries: `[blocks, C]`, the query (of N T) in every place; where there is none, any.
        places: `[N T]`, where each query is; None where they lie in order.
        keys: `[rows, W]`, the key (of N L) in every place; where there is none, any.
        blocks: `[rows]`, the block of each tile, ascending; None for one tile a block.
        runs: what is worked on together.
        time: `[blocks, C]`, when the query arrives.
        until: `[rows, W]`, when the key leaves the best: where that pass ends, and the others begin.
        bounds: `[blocks, C]` each, the first sorted key that the query sees, and the one behind the last; None
            for the best.
        slots: `[rows, W]`, the sorted number of the key.
        others: of the parts before, the bin of the query, the bin of the key, and when the key leaves that bin.

    Times and numbers are floats, exact below 2^23 tokens: a comparison and a mask cost several times an addition.
    """

    queries: torch.Tensor
    places: torch.Tensor | None
    keys: torch.Tensor
    blocks: torch.Tensor | None
    runs: list[Run]
    time: torch.Tensor
    until: torch.Tensor | None
    bounds: tuple[torch.Tensor, torch.Tensor] | None = None
    slots: torch.Tensor | None = None
    others: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...] = ()

    def block_of(self, run: Run) -> torch.Tensor | None:
        return None if self.blocks is None else self.blocks[run.rows] - run.blocks.start

    def hide(self, logits: torch.Tensor, run: Run) -> torch.Tensor:
        """Logits `[rows, C, W]` with what is not seen below `HIDDEN`; overwritten."""
        block = self.block_of(run)

        def asked(x: torch.Tensor) -> torch.Tensor:
            x = x[run.blocks]
            return (x if block is None else x[block])[..., None]

        def found(x: torch.Tensor) -> torch.Tensor:
            return x[run.rows, None]

        # By how much each condition holds: below 0 where it does not.
        if self.bounds is None:
            seen = found(self.until) - asked(self.time + 0.5)
            size = self.queries.shape[1]
            seen[..., -size:] -= torch.full((size, size), 2 * FAR, dtype=seen.dtype, device=seen.device).triu_(1)
        else:
            first, last = self.bounds
            seen = found(self.slots) - asked(first - 0.5)
            torch.minimum(seen, asked(last - 0.5) - found(self.slots), out=seen)
            if self.until is not None:
                torch.minimum(seen, asked(self.time + 0.5) - found(self.until), out=seen)
            for of_query, of_key, until in self.others:
                same = (asked(of_query) == found(of_key)) & (asked(self.time) < found(until))
                seen = seen.masked_fill_(same, -1)
        return logits.add_(seen.clamp_(max=0), alpha=-4 * HIDDEN)


def passes_of(stream: Stream, best: Selection | None) -> list[Pass]:
    passes = [] if best is None else [_best_pass(stream, best)]
    earlier: list[Sorted] = []
    for part in stream.bins:
        earlier.append(by_bins(part, stream))
        passes.append(_bin_pass(stream, earlier, best))
    return passes


def _best_pass(stream: Stream, best: Selection) -> Pass:
    heads, length = stream.scores.shape
    chunks, device = best.best.shape[1], stream.key.device
    tokens = torch.arange(chunks * BLOCK, device=device).view(chunks, BLOCK)
    own = (tokens + stream.past).clamp(max=length)
    keys = torch.cat([best.best, own.expand(heads, -1, -1)], dim=2)
    until = best.expiry.gather(1, keys.flatten(1)).view(-1, keys.shape[2])
    head = torch.arange(heads, device=device)[:, None, None]
    queries = tokens.clamp(max=length - stream.past - 1) + head * (length - stream.past)
    places = None
    if chunks * BLOCK != length - stream.past:
        places = (tokens.flatten()[: length - stream.past] + head[..., 0] * chunks * BLOCK).flatten()
    time = (tokens + stream.past).expand(heads, -1, -1).flatten(0, 1)
    keys = (keys.clamp(max=length - 1) + head * length).flatten(0, 1)
    runs, dtype = _equal_runs(keys), stream.query.dtype
    return Pass(queries.flatten(0, 1), places, keys, None, runs, time.to(dtype), until.to(dtype))


def _equal_runs(keys: torch.Tensor) -> list[Run]:
    rows, width = keys.shape
    if torch.compiler.is_compiling():  # a number of runs is fixed in a graph, and with it the length
        return [Run(slice(0, rows), slice(0, rows))]
    step = _at_once(width, keys.device)
    return [Run(slice(i, min(i + step, rows)), slice(i, min(i + step, rows))) for i in range(0, rows, step)]


def _at_once(width: int, device: torch.device) -> int:
    return max(1, _LOGITS["cpu" if device.type == "cpu" else "other"] // (BLOCK * width))


def tokens_at_once(value: torch.Tensor) -> int:
    return max(1, _LOGITS["cpu" if value.device.type == "cpu" else "other"] // value.shape[1])


def _bin_pass(stream: Stream, parts: list[Sorted], best: Selection | None) -> Pass:
    """The pass of the last of the parts."""
    this, device = parts[-1], stream.key.device
    heads, length = this.keys.shape
    asked = this.queries.shape[1]
    chunks = -(-asked // BLOCK)
    pad = chunks * BLOCK - asked
    order, first, last = (
        _repeat_last(x, pad).view(heads * chunks, BLOCK) for x in (this.queries, this.first, this.last)
    )
    real = torch.arange(chunks * BLOCK, device=device).view(chunks, BLOCK).repeat(heads, 1) < asked
    last = torch.where(real, last, first)  # a place without a query sees nothing
    head = torch.arange(heads, device=device).repeat_interleave(chunks)
    blocks, tiles, runs = _tiles(first, last, part_keys=stream.bins[len(parts) - 1].keys, length=length, heads=heads)
    slots = tiles[:, None] * BLOCK + torch.arange(BLOCK, device=device)
    flat = slots.clamp(max=length - 1) + (head[blocks] * length)[:, None]
    keys = this.keys.flatten()[flat] + (head[blocks] * length)[:, None]
    queries = order + (head * asked)[:, None]
    slot_of = torch.arange(heads * chunks * BLOCK, device=device).view(heads, chunks * BLOCK)[:, :asked]
    places = torch.empty_like(this.queries).scatter_(1, this.queries, slot_of).flatten()
    dtype = stream.query.dtype
    until = None if best is None else best.expiry[:, :length].flatten()[keys].to(dtype)
    others = []
    for part, found in zip(stream.bins, parts[:-1], strict=False):
        others.append((part.query.flatten()[queries], part.key.flatten()[keys], found.expiry.flatten()[keys]))
    time, bounds, slots = (order + stream.past).to(dtype), (first.to(dtype), last.to(dtype)), slots.to(dtype)
    return Pass(queries, places, keys, blocks, runs, time, until, bounds, slots, tuple(others))


def _repeat_last(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([x, x[:, -1:].expand(-1, count)], dim=1) if count else x


def _tiles(first, last, part_keys: int, length: int, heads: int):
    """The block and the tile of every row, and the runs."""
    begin = first[:, 0] // BLOCK
    counts = ((last.amax(1) - 1) // BLOCK + 1 - begin).clamp(min=0) * (last > first).any(1)
    ends = counts.cumsum(0)
    total = len(first)
    if first.device.type == "cpu" and not torch.compiler.is_compiling():
        step = max(1, _at_once(BLOCK, first.device) // 2)
        starts = [*range(0, total, step), total]
        found = [0, *ends[[i - 1 for i in starts[1:]]].tolist()]
        runs = [Run(slice(a, b), slice(c, d)) for a, b, c, d in zip(starts[:-1], starts[1:], found[:-1], found[1:])]
        number = found[-1]
    else:
        # As many as there can be: no size depends on values, which a device would have to hand over first.
        number = total * (part_keys // BLOCK + 2) + heads * -(-length // BLOCK)
        runs = [Run(slice(0, total), slice(0, number))]
    rows = torch.arange(number, device=first.device)
    blocks = torch.searchsorted(ends, rows, right=True).clamp(max=total - 1)
    # Rows beyond the last lie behind all keys, where nothing is seen.
    tiles = begin[blocks] + rows - (ends - counts)[blocks]
    return blocks, tiles, runs
