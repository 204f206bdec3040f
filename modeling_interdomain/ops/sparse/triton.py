"""Sparse attention as fused kernels behind one opaque operator of `torch.library` (`ops/sparse/triton_passes.py`).

PyTorch finds which slots lie beside which queries (`ops/sparse/expiry.py`), with sizes that do not depend on values, so
that the host waits for nothing. Backward keeps the output and the logs of the sums, and forms the weights again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..common.custom_op import differentiable
from ..common.launch import on_device, power_of_two, tuned
from ..common.tiles import arithmetic, chunk_tokens
from .expiry import Selection, Sorted, by_bins, selection
from .stream import Stream
from .triton_passes import (
    Ahead,
    Earlier,
    Extent,
    Sizes,
    Slots,
    Sums,
    Tokens,
    attend,
    of_keys,
    of_queries,
    of_slots,
)

_KIND = ("EXTENT", "MATH")
_attend, _of_queries = tuned(attend, _KIND), tuned(of_queries, _KIND)
_of_slots = tuned(of_slots, (*_KIND, "SEVERAL"))
_of_keys = of_keys


def triton_sparse(stream: Stream) -> torch.Tensor:
    """As `blocks`, for tokens in bfloat16, float16 or float32; `[B, T, S, D]` in the dtype of the values.

    Products are in the dtype of the query, sums in float32.
    """
    widest = max(stream.key.shape[3], stream.value.shape[3])
    tile = 8192 if stream.query.dtype == torch.bfloat16 else 4096
    chunk = chunk_tokens(min(64, tile // power_of_two(widest)), stream.query.shape[1])
    best = None if stream.scores is None else selection(stream, chunk)
    tables: list[torch.Tensor] = [] if best is None else [*_best_slots(stream, best, chunk)]
    for part in stream.bins:
        this = by_bins(part, stream, best)
        groups = part.key.shape[0] * (part.key.shape[1] + 1) * (part.number + 2)
        earlier = _narrowed((this.query_groups, this.key_groups, this.expiry), groups)
        tables += [*_bin_slots(this, chunk), *earlier]
    tokens = (x.contiguous() for x in (stream.query, stream.key, stream.value))
    return _operator(*tokens, tables, best is not None, stream.past, chunk)[0]


def _best_slots(stream: Stream, best: Selection, chunk: int) -> Slots:
    """A block of queries sees the best before it, and its own."""
    (heads, chunks, k), device = best.best.shape, stream.key.device
    length, keys = stream.query.shape[1], stream.key.shape[1]
    begins = torch.arange(0, chunks * chunk, chunk, device=device)[:, None]
    own = stream.past + begins + torch.arange(chunk, device=device)
    number = torch.cat([best.best, own.expand(heads, -1, -1)], dim=2).clamp(max=keys)
    until = best.expiry.gather(1, number.flatten(1)).view_as(number)
    first = torch.maximum(number - stream.past, begins)
    last = torch.minimum(until - stream.past, (begins + chunk).clamp(max=length))
    of_head = torch.arange(heads, device=device)[:, None, None]
    slots = torch.arange(0, number.numel(), k + chunk, device=device)
    queries = torch.arange(heads * length, device=device)
    number = number.clamp(max=keys - 1) + of_head * keys
    seen = number, first + of_head * length, last + of_head * length
    tables = queries, *(x.flatten() for x in seen), slots, torch.full_like(slots, k + chunk)
    return Slots(*_narrowed(tables, max(queries.numel(), number.numel())))


def _bin_slots(this: Sorted, chunk: int) -> Slots:
    """A block of sorted queries sees a range of sorted keys."""
    begins = torch.arange(0, len(this.queries), chunk, device=this.queries.device)
    begin = torch.searchsorted(this.last[:-1], begins, right=True)
    count = (torch.searchsorted(this.arrives, begins + chunk) - begin).clamp(min=0)
    tables = this.queries, this.keys[:-1], this.first[:-1], this.last[:-1], begin, count
    return Slots(*_narrowed(tables, max(len(this.queries), len(this.keys))))


def _narrowed(tables: Sequence[torch.Tensor], largest: int) -> list[torch.Tensor]:
    """In 32 bits where the largest number is within them."""
    return [x.to(torch.int32 if largest < 1 << 31 else torch.int64) for x in tables]


class _Set(NamedTuple):
    """One set of keys, and the earlier sets, whose keys do not count here; `rows` of `length` queries each."""

    of: Slots
    earlier: tuple[Earlier, ...]
    rows: int
    length: int
    several: bool

    def grid(self, chunk: int) -> tuple[tuple[int], int, int]:
        """Blocks, those of a row, and its length."""
        per_row = -(-self.length // chunk)
        return (self.rows * per_row,), per_row, self.length


class _Plan(NamedTuple):
    """What the kernels of one call share."""

    tokens: Tokens
    sets: tuple[_Set, ...]
    sizes: Sizes
    extent: Extent
    options: dict

    def options_of(self, queries: int, slots: int) -> dict:
        """With smaller tiles where operands are float32, so that they fit into the registers."""
        if self.options["MATH"].terms == 1:
            return self.options
        return self.options | {"EXTENT": self.extent._replace(C=queries, W=slots, BLOCK=32)}

    def sums(self) -> Sums:
        value, count = self.tokens.value, len(self.sets[0].of.queries)
        most, total = (value.new_empty(count, dtype=torch.float32) for _ in range(2))
        return Sums(most, total, value.new_empty(count, value.shape[3], dtype=torch.float32))


def _plan(query, key, value, tables: Sequence[torch.Tensor], selects: bool, past: int, chunk: int) -> _Plan:
    (batch, length, heads, width), value_width = query.shape, value.shape[3]
    tables, sets = list(tables), []
    earlier: list[Earlier] = []
    if selects:
        sets.append(_Set(Slots(*tables[:6]), (), batch * heads, length, True))
        tables = tables[6:]
    for first in range(0, len(tables), 9):
        of = Slots(*tables[first : first + 6])
        sets.append(_Set(of, tuple(earlier), 1, batch * heads * length, False))
        earlier.append(Earlier(*tables[first + 6 : first + 9]))
    padded = power_of_two(width), power_of_two(value_width)
    extent = Extent(chunk, chunk, 64, width, value_width, *padded)
    sizes = Sizes(heads, length, key.shape[1], past)
    options = {"EXTENT": extent, "MATH": arithmetic(query.dtype)}
    return _Plan(Tokens(query, key, value), tuple(sets), sizes, extent, options)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tables: Sequence[torch.Tensor], selects: bool,
    past: int, chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output, and of every query the log (of 2) of its sum of powers `[N T]`.

    tables: `Slots` of every set, the best keys first if it `selects`; those of bins are followed by `Earlier`.
    """
    plan = _plan(query, key, value, tables, selects, past, chunk)
    output = value.new_empty(*query.shape[:3], value.shape[3])
    level = value.new_empty(query.shape[:3].numel(), dtype=torch.float32)
    before = None
    with on_device(query):
        for this in plan.sets:
            grid, *rows = this.grid(chunk)
            final = this is plan.sets[-1]
            after = None if final else plan.sums()
            ends = (output, level) if final else (None, None)
            _attend[grid](
                plan.tokens, this.of, this.earlier, before, after, *ends, *rows, plan.sizes, **plan.options
            )  # fmt: skip
            before = after
    return output, level


def _outputs(query, key, value, *_):
    output = value.new_empty(*query.shape[:3], value.shape[3])
    return output, value.new_empty(query.shape[0] * query.shape[1] * query.shape[2], dtype=torch.float32)


def _backward(inputs, grads, needs):
    *given, output, level = inputs
    plan, query, chunk = _plan(*given), given[0], given[-1]
    ahead = Ahead(output, grads[0], level, torch.empty_like(level))
    of_query = of_others = None
    with on_device(query):
        for this in plan.sets:
            dtype = None if this is plan.sets[-1] else torch.float32
            grid, *rows = this.grid(chunk)
            after = torch.empty_like(query, dtype=dtype)
            _of_queries[grid](
                plan.tokens, ahead, this.of, this.earlier, of_query, after, *rows, plan.sizes,
                **plan.options_of(chunk, 16),
            )  # fmt: skip
            of_query = after
            of_others = _of_others(plan, this, ahead, of_others, dtype)
    return of_query, *of_others


def _of_others(plan: _Plan, this: _Set, ahead: Ahead, before, dtype: torch.dtype | None):
    """The gradients of keys and values after one set more."""
    slots = len(this.of.keys)
    after = tuple(torch.empty_like(x, dtype=dtype) for x in plan.tokens[1:])
    here = tuple(x.new_empty(slots, x.shape[3], dtype=torch.float32) for x in after) if this.several else after
    options = plan.options_of(16, 64)
    _of_slots[(-(-slots // options["EXTENT"].W),)](
        plan.tokens, ahead, this.of, this.earlier, before, here, slots, plan.sizes, SEVERAL=this.several, **options,
    )  # fmt: skip
    if this.several:
        count = plan.tokens.key.shape[:3].numel()
        held = torch.where(this.of.first < this.of.last, this.of.keys, count)
        found, order = held.sort(stable=True)
        starts = torch.searchsorted(found, torch.arange(count + 1, device=found.device))
        _of_keys[(-(-count // 16),)](here, order, starts, after, count, plan.sizes, BLOCK=16, **plan.options)
    return after


_operator = differentiable(__name__, "attention", _forward, _outputs, _backward, count=3, kept=(0, 1))
