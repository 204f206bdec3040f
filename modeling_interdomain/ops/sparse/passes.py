"""The blocks of queries and keys that sparse attention multiplies, and which of them see each other.

In a block's order of queries, those that see a key are always a range: from its arrival until it leaves.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..common.cpu import values_at_hand
from .expiry import Selection, Sorted, by_bins, selection
from .stream import Stream

BLOCK = 32
# Logits of one run, which on a CPU should stay in a cache.
_LOGITS = {"cpu": 1 << 18, "other": 1 << 26}
# Tokens of the heads that are sorted together on a CPU, for the same reason.
_TOKENS = 1 << 16
# Below all logits of visible keys, and above those of hidden ones.
HIDDEN = -1e25


class Run(NamedTuple):
    """Blocks of C queries and rows of W keys that are worked on together.

    Attributes:
        queries: `[blocks, C]`, rows of B T S; a missing query is any, and sees nothing.
        keys: `[rows, W]`, rows of B L S; a missing key is any, and is seen by none.
        seen: `[rows, W]`, the range of queries in the block that see the key, as a row of `ranges`.
        block: `[rows]`, the block of each row; None for one row a block.
        others: for each part before, the bin of the query and its time, the bin of the key and when it leaves that.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    seen: torch.Tensor
    block: torch.Tensor | None = None
    others: tuple[tuple[torch.Tensor, ...], ...] = ()

    def of_block(self, x: torch.Tensor) -> torch.Tensor:
        """The queries' rows of x `[B T S, ...]`, `[blocks, C, ...]` or `[rows, C, ...]`."""
        x = rows_of(x, self.queries)
        return x if self.block is None else x.index_select(0, self.block)

    def asking(self) -> torch.Tensor:
        """`[rows, C]`, the queries beside each row."""
        return self.queries if self.block is None else self.queries[self.block]

    def hidden(self, ranges: torch.Tensor) -> torch.Tensor:
        """`[rows, W, C]`, far below zero where the query does not see the key, zero elsewhere."""
        hidden = rows_of(ranges, self.seen)
        for of_query, time, of_key, until in self.others:
            of_query, time = (x if self.block is None else x[self.block] for x in (of_query, time))
            twice = (of_query[:, None] == of_key[..., None]) & (time[:, None] < until[..., None])
            hidden = hidden.masked_fill_(twice, 4 * HIDDEN)
        return hidden


def rows_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


def ranges(like: torch.Tensor) -> torch.Tensor:
    """`[(C + 1)^2, C]`: zero in the range from a to b without b, row a (C + 1) + b, and far below it elsewhere."""
    numbers = torch.arange(BLOCK + 1, device=like.device)
    inside = (numbers[:-1] >= numbers[:, None, None]) & (numbers[:-1] < numbers[:, None])
    return torch.where(inside, 0, like.new_full((), 4 * HIDDEN)).flatten(0, 1)


def _range(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The row of `ranges` for queries `first` to `last` of the block."""
    return first.clamp(0, BLOCK) * (BLOCK + 1) + last.clamp(0, BLOCK)


def runs_of(stream: Stream) -> Iterator[Run]:
    heads, length = stream.places.shape
    step = max(1, _TOKENS // length) if values_at_hand(stream.key) else heads
    for start in range(0, heads, step):
        yield from _runs_of_heads(stream.of_heads(slice(start, start + step)))


def _runs_of_heads(stream: Stream) -> Iterator[Run]:
    best = None if stream.scores is None else selection(stream, BLOCK)
    if best is not None:
        yield from _best_runs(stream, best)
    parts: list[Sorted] = []
    for part in stream.bins:
        parts.append(by_bins(part, stream, best))
        yield from _bin_runs(stream, parts, part.keys)


def _best_runs(stream: Stream, best: Selection) -> Iterator[Run]:
    """Blocks of queries beside the best keys before each, and its own."""
    heads, chunks, k = best.best.shape
    length, past, device = stream.key.shape[1], stream.past, stream.key.device
    tokens = torch.arange(chunks * BLOCK, device=device).view(chunks, BLOCK)
    queries = stream.rows(length - past)[:, tokens.clamp(max=length - past - 1)].flatten(0, 1)
    starts = past + tokens[:, :1]
    keys = torch.cat([best.best, (tokens + past).expand(heads, -1, -1)], dim=2)
    until = best.expiry.gather(1, keys.clamp(max=length).flatten(1)).view_as(keys)
    seen = _range(keys - starts, until - starts).flatten(0, 1)
    keys = stream.rows(length).gather(1, keys.clamp(max=length - 1).flatten(1)).view(-1, k + BLOCK)
    step = len(keys) if torch.compiler.is_compiling() else _at_once(k + BLOCK, device)
    for start in range(0, len(keys), step):
        part = slice(start, start + step)
        yield Run(queries[part], keys[part], seen[part])


def _at_once(width: int, device: torch.device) -> int:
    return max(1, _LOGITS["cpu" if device.type == "cpu" else "other"] // (BLOCK * width))


def _bin_runs(stream: Stream, parts: list[Sorted], keys: int) -> Iterator[Run]:
    """Blocks of sorted queries beside ranges of sorted keys, for the last of the parts."""
    this = parts[-1]
    rows = stream.rows(stream.query.shape[1]).flatten(), stream.rows(stream.key.shape[1]).flatten()
    # Always filled up to whole blocks: whether that is needed would be a branch of a graph.
    places = torch.arange(-(-len(this.queries) // BLOCK) * BLOCK, device=this.queries.device)
    queries = this.queries[places.clamp(max=len(this.queries) - 1)].view(-1, BLOCK)
    starts = torch.arange(0, queries.numel(), BLOCK, device=queries.device)
    begin = torch.searchsorted(this.last[:-1], starts, right=True)
    counts = (torch.searchsorted(this.arrives, starts + BLOCK) - begin).clamp(min=0)
    if values_at_hand(queries):
        widths, order = counts.sort(descending=True)
        start = 0
        while start < len(widths) and (width := int(widths[start])):
            some = order[start : start + _at_once(width, queries.device)]
            slots = begin[some, None] + torch.arange(width, device=begin.device)
            yield _bin_run(stream, parts, rows, queries[some], slots, starts[some])
            start += len(some)
        return
    # As many tiles as there can be.
    tile = begin // BLOCK
    tiles = torch.where(counts > 0, (begin + counts - 1) // BLOCK + 1 - tile, 0)
    ends = tiles.cumsum(0)
    number = torch.arange(len(starts) * (keys // BLOCK + 2) + len(this.keys) // BLOCK + 1, device=queries.device)
    block = torch.searchsorted(ends, number, right=True).clamp(max=len(starts) - 1)
    # Tiles beyond the last lie behind all keys that the last block sees.
    slots = (tile + tiles - ends)[block] + number
    slots = slots[:, None] * BLOCK + torch.arange(BLOCK, device=queries.device)
    yield _bin_run(stream, parts, rows, queries, slots, starts, block)


def _bin_run(stream: Stream, parts: list[Sorted], rows, queries, slots, starts, block=None) -> Run:
    """Blocks of queries that start at sorted query `starts`, beside the sorted keys `slots` `[rows, W]`; `rows` says
    where queries and keys are."""
    this = parts[-1]
    slots = slots.clamp(max=len(this.keys) - 1)
    start = (starts if block is None else starts[block])[:, None]
    keys, seen = this.keys[slots], _range(this.first[slots] - start, this.last[slots] - start)
    time = queries % stream.query.shape[1] + stream.past
    others = tuple((x.query_groups[queries], time, x.key_groups[keys], x.expiry[keys]) for x in parts[:-1])
    return Run(rows[0][queries], rows[1][keys], seen, block, others)
