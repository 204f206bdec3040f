"""Documents cut into chunks of C tokens, and the order in which the chunks are worked on.

A document here is whatever has a state of its own: a packed document, a batch row, or the real tokens of a padded row.
Documents are sorted by their number of chunks, the longest first, and a block of them is worked on side by side. Step j
of a block holds chunk j of the documents that still have one, which are the first ones of the block. So the states that
move on to the next step are always a prefix, none is ever reset, and the work is linear in the tokens however many
documents there are. A segment is a run of steps whose intermediates fit into a cache.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

# What a chunk costs beyond its tokens, counted in tokens: a larger chunk may waste that much padding.
_CHUNK_OVERHEAD = 16
_SMALLEST_CHUNK = 16


class Segment(NamedTuple):
    """A run of steps worked on together."""

    block: int  # rank of the first document of its block
    step: int  # its first step, counted within the block
    first: int  # number of its first chunk
    lanes: tuple[int, ...]  # documents that have a chunk at each step, never more than at the step before
    following: int  # documents that go on in the next segment

    @property
    def chunks(self) -> int:
        return sum(self.lanes)

    @property
    def here(self) -> slice:
        """Its chunks among all."""
        return slice(self.first, self.first + self.chunks)

    def moves(self) -> Iterator[tuple[int, int, int]]:
        """For each step: its first chunk within the segment, its documents, and how many of them go on."""
        first = 0
        for lanes, following in zip(self.lanes, (*self.lanes[1:], self.following), strict=True):
            yield first, lanes, following
            first += lanes


class Chunks(NamedTuple):
    """Where the tokens of `[B, T]` lie among the chunks.

    Attributes:
        shape: B and T.
        size: C.
        lanes: documents of a block.
        segments: in the order in which states move through them.
        order: `[S']`, the documents that have a token, by rank; None when document s has rank s.
        tokens: `[N, C]`, the place of each token of each chunk in the flattened batch, B T where a chunk has none; None
            when every row of the batch is a document of T tokens.
        partial: for each chunk, whether it has fewer than C tokens; empty without `tokens`.
        tails: `[S']`, the tokens in the last chunk of each document.
        last_tokens: `[S', C]`, as `tokens`, the last chunk of each document with its tokens moved to the right end.
        full: every token of the batch is in a chunk.
    """

    shape: tuple[int, int]
    size: int
    lanes: int
    segments: list[Segment]
    order: torch.Tensor | None
    tokens: torch.Tensor | None
    partial: list[bool]
    tails: torch.Tensor
    last_tokens: torch.Tensor | None
    full: bool

    @property
    def documents(self) -> int:
        return self.tails.numel()

    def read(self, x: torch.Tensor, segment: Segment, target: torch.Tensor) -> None:
        """Copy tokens `[B, T, G P, W]` to `[G, chunks, P, C, W]`, with zeros where a chunk has no token."""
        if self.tokens is None:
            self._copy(x, segment, target, back=False)
            return
        here = segment.here
        target.copy_(self._gather(x, self.tokens[here], any(self.partial[here]), target.shape[0]))

    def write(self, source: torch.Tensor, segment: Segment, x: torch.Tensor) -> None:
        """The way back, into what `empty` made."""
        if self.tokens is None:
            self._copy(x.view(*self.shape, *x.shape[1:]), segment, source, back=True)
            return
        tokens = self.tokens[segment.here].flatten()
        x.index_copy_(0, tokens, source.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1))

    def read_last(self, x: torch.Tensor, ranks: slice, target: torch.Tensor) -> None:
        """As `read`, of the last chunks of some documents, whose tokens are moved to the right end of the chunk."""
        if self.last_tokens is None:
            tail = _tail(self.shape[1], self.size)
            target[..., : self.size - tail, :] = 0
            last = x[ranks, self.shape[1] - tail :].unflatten(2, target.shape[0:3:2])
            target[..., self.size - tail :, :] = last.permute(2, 0, 3, 1, 4)
        else:
            target.copy_(self._gather(x, self.last_tokens[ranks], True, target.shape[0]))

    def add_last(self, source: torch.Tensor, ranks: slice, x: torch.Tensor) -> None:
        """Add `[G, documents, P, C, W]` to where `read_last` reads."""
        source = source.permute(1, 3, 0, 2, 4).flatten(2, 3)  # [documents, C, G P, W]
        if self.last_tokens is None:
            tail = _tail(self.shape[1], self.size)
            x.view(*self.shape, *x.shape[1:])[ranks, self.shape[1] - tail :] += source[:, self.size - tail :]
        else:
            x.index_add_(0, self.last_tokens[ranks].flatten(), source.flatten(0, 1))

    def empty(self, x: torch.Tensor, heads: int, width: int) -> torch.Tensor:
        """Room for tokens `[B T, heads, width]`, with one row more for what chunks write where they have no token."""
        count = self.shape[0] * self.shape[1]
        if self.tokens is None:
            return x.new_empty(count, heads, width)
        return (x.new_empty if self.full else x.new_zeros)(count + 1, heads, width)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """What `empty` made, as `[B, T, heads, width]`."""
        return x[: self.shape[0] * self.shape[1]].view(*self.shape, *x.shape[1:])

    def _gather(self, x: torch.Tensor, tokens: torch.Tensor, partial: bool, groups: int) -> torch.Tensor:
        chunks, size = tokens.shape
        count = self.shape[0] * self.shape[1]
        flat = x.flatten(2).flatten(0, 1)
        tokens = tokens.flatten()
        if not partial:
            found = flat.index_select(0, tokens)
        else:
            found = flat.index_select(0, tokens.clamp(max=count - 1))
            found.masked_fill_((tokens == count)[:, None], 0)
        return found.view(chunks, size, groups, x.shape[2] // groups, x.shape[3]).permute(2, 0, 3, 1, 4)

    def _copy(self, x: torch.Tensor, segment: Segment, chunks: torch.Tensor, back: bool) -> None:
        """Between a batch whose rows are documents and its chunks, without an index."""
        lanes, steps, size = segment.lanes[0], len(segment.lanes), self.size
        start = segment.step * size
        groups, _, heads, _, width = chunks.shape
        chunks = chunks.view(groups, steps, lanes, heads, size, width)
        x = x[segment.block : segment.block + lanes, start : start + steps * size].unflatten(2, (groups, heads))
        whole, tail = divmod(x.shape[1], size)
        pairs = [(x[:, : whole * size].unflatten(1, (whole, size)), chunks[:, :whole])] if whole else []
        if tail:
            pairs.append((x[:, None, whole * size :], chunks[:, whole:, :, :, :tail]))
            if not back:
                chunks[:, whole:, :, :, tail:] = 0
        for tokens, slots in pairs:
            tokens = tokens.permute(3, 1, 0, 4, 2, 5)
            tokens.copy_(slots) if back else slots.copy_(tokens)


def _tail(length: int, size: int) -> int:
    return length - (length - 1) // size * size


def chunks_of(
    shape: tuple[int, int],
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    largest: int,
    tokens_per_segment: int,
    device: torch.device,
) -> Chunks:
    """Cut a batch `[B, T]` of rows, of packed documents or of rows of different lengths into chunks.

    Args:
        largest: the largest C; where documents are shorter, a smaller one wastes less.
    """
    if cu_seqlens is None and lengths is None:
        return _of_rows(shape, min(largest, shape[1]), tokens_per_segment, device)
    # The one place where the host waits for a GPU: the numbers of chunks decide what is launched.
    if cu_seqlens is None:
        sizes = lengths.to("cpu", torch.long)
        starts = torch.arange(shape[0], device=sizes.device) * shape[1]
    else:
        ends = cu_seqlens.to("cpu", torch.long)
        starts, sizes = ends[:-1], ends.diff()
    return _of_documents(shape, starts, sizes, largest, tokens_per_segment, device)


def later_lanes(shape: tuple[int, int], largest: int, tokens_per_segment: int) -> int:
    """Of a batch whose rows are documents, the sum of `lanes[0]` over the segments that do not begin a block."""
    _, steps, total = _share_out(shape, min(largest, shape[1]), tokens_per_segment)
    return shape[0] * (-(-total // steps) - 1)


def _share_out(shape, size: int, tokens_per_segment: int) -> tuple[int, int, int]:
    """Documents of a block, steps of a segment, and steps of a block."""
    per_segment = max(1, tokens_per_segment // size)
    lanes, total = min(shape[0], per_segment), -(-shape[1] // size)
    # As many in each: batched products share out evenly.
    return lanes, -(-total // -(-total // (per_segment // lanes))), total


def _of_rows(shape, size: int, tokens_per_segment: int, device) -> Chunks:
    batch, length = shape
    lanes, steps, total = _share_out(shape, size, tokens_per_segment)
    segments, first = [], 0
    for block in range(0, batch, lanes):
        side_by_side = min(lanes, batch - block)
        for step in range(0, total, steps):
            taken = min(steps, total - step)
            following = side_by_side if step + taken < total else 0
            segments.append(Segment(block, step, first, (side_by_side,) * taken, following))
            first += segments[-1].chunks
    tails = torch.full((batch,), _tail(length, size), device=device)
    return Chunks(shape, size, lanes, segments, None, None, [], tails, None, True)


def _of_documents(shape, starts, sizes, largest: int, tokens_per_segment: int, device) -> Chunks:
    """From `starts` and `sizes` of the documents, on the CPU; some may be empty."""
    size = _best_size(sizes, largest)
    per_segment = max(1, tokens_per_segment // size)
    counts = (sizes + size - 1) // size
    order = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]
    starts, sizes, counts = starts[order], sizes[order], counts[order]
    rank = torch.repeat_interleave(counts)
    step = torch.arange(rank.numel(), device=rank.device) - (counts.cumsum(0) - counts)[rank]
    lanes = max(1, min(per_segment, order.numel()))
    steps_at_most = int(counts.max()) if counts.numel() else 1
    turns = rank // lanes * steps_at_most + step
    by_turn = turns.argsort(stable=True)
    rank, step = rank[by_turn], step[by_turn]
    slots = torch.arange(size, device=sizes.device)
    tokens = starts[rank, None] + step[:, None] * size + slots
    none, beyond = shape[0] * shape[1], tokens >= (starts + sizes)[rank, None]
    tails = sizes - (counts - 1) * size
    last = (starts + sizes)[:, None] - size + slots
    last = last.masked_fill_(slots < size - tails[:, None], none)
    return Chunks(
        shape,
        size,
        lanes,
        list(_segments(turns[by_turn], steps_at_most, lanes, per_segment)),
        order.to(device),
        tokens.masked_fill_(beyond, none).to(device),
        beyond[:, -1].tolist(),
        tails.to(device),
        last.to(device),
        int(sizes.sum()) == none,
    )


def _best_size(sizes: torch.Tensor, largest: int) -> int:
    """The chunk size with the least work; powers of two below `largest`, or what the longest document needs."""
    largest = min(largest, max(1, int(sizes.max())))
    choices, size = [largest], _SMALLEST_CHUNK
    while size < largest:
        choices.append(size)
        size *= 2
    work = {size: int(((sizes + size - 1) // size).sum()) * (size + _CHUNK_OVERHEAD) for size in choices}
    return min(choices, key=work.__getitem__)


def _segments(turns: torch.Tensor, steps: int, lanes: int, per_segment: int) -> Iterator[Segment]:
    """Segments of chunks in the order of their turns, (block, step) as one number."""
    turns, numbers = (x.tolist() for x in turns.unique_consecutive(return_counts=True))
    taken, first = [], 0
    for index, (turn, number) in enumerate(zip(turns, numbers, strict=True)):
        taken.append(number)
        runs_on = index + 1 < len(turns) and turns[index + 1] // steps == turn // steps
        if not runs_on or sum(taken) + numbers[index + 1] > per_segment:
            following = numbers[index + 1] if runs_on else 0
            block, step = divmod(turn, steps)
            yield Segment(block * lanes, step + 1 - len(taken), first, tuple(taken), following)
            first += sum(taken)
            taken = []
