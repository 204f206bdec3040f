"""Sparse attention as kernels: blocks of queries beside the slots that they may see, one set of keys after the other.

A slot is a key together with the range of queries, in the order of its set, that see it. Queries go on from their sums
over the sets before, and gradients of keys from what those sets gave, so that no two programs write to one place and
gradients repeat bit for bit. Products are in MATH.DTYPE, sums and weights in float32.

    attend      o_i = sum_j p_ij v_j,  p_ij = exp(q_i . k_j - level_i),  level_i the log of the sum of the powers
    of_queries  dq_i = sum_j s_ij k_j,  s_ij = p_ij (g_i . v_j - g_i . o_i) with g the gradient of the output
    of_slots    dk_j = sum_i s_ij q_i,  dv_j = sum_i p_ij g_i
    of_keys     sums over the slots of a key, where it may have several

Queries and keys are numbered head by head; in memory, heads lie within tokens.
"""

from typing import Any, NamedTuple

from ..common.launch import tl, triton
from ..common.tiles import dot, locate, narrow


class Tokens(NamedTuple):
    """query `[B, T, S, d]`, key `[B, L, S, d]` and value `[B, L, S, D]`."""

    query: Any
    key: Any
    value: Any


class Slots(NamedTuple):
    """One set of keys.

    Attributes:
        queries: `[N T]`, the numbers of the queries in the order of the set.
        keys: `[slots]`, the number of the key in each slot.
        first, last: `[slots]`, the places in `queries` that see it, without `last`; none where first >= last.
        begin, count: `[blocks]`, the slots beside a block of C queries.
    """

    queries: Any
    keys: Any
    first: Any
    last: Any
    begin: Any
    count: Any


class Earlier(NamedTuple):
    """A set of bins whose keys do not count again: `[N T]` and `[N L]`, a query's and a key's bin, and the time when a
    key leaves it.
    """

    queries: Any
    keys: Any
    until: Any


class Sums(NamedTuple):
    """The sums of a query over the sets so far, in float32: the largest logit and the sum of powers of 2 relative to it
    `[N T]`, and the weighted sum of values `[N T, D]`.
    """

    most: Any
    total: Any
    read: Any


class Ahead(NamedTuple):
    """output and its gradient `[B, T, S, D]`; level and product `[N T]`, the logs (of 2) of the sums of powers and `g .
    o`.
    """

    output: Any
    grad: Any
    level: Any
    product: Any


class Sizes(NamedTuple):
    """S, T, L, and how many keys are older than the first query."""

    heads: int
    queries: int
    keys: int
    past: int


class Extent(NamedTuple):
    """What a kernel is compiled for: queries of a block, slots of a tile, columns that `_products` takes at a time, d
    and D, both padded.
    """

    C: int
    W: int
    BLOCK: int
    KEY: int
    VALUE: int
    KEY_PADDED: int
    VALUE_PADDED: int


_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row(number, heads, length):
    """The row of a numbered token in a flattened `[B, length, S]`."""
    head = number // length
    return (head // heads * length + number % length) * heads + head % heads


@triton.jit
def _load_rows(x, rows, used, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    return tl.load(x + at, mask=used[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _store_rows(x, tile, rows, used, WIDTH: tl.constexpr, PADDED: tl.constexpr, MATH: tl.constexpr):
    columns = tl.arange(0, PADDED)
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(x + at, narrow(tile, x.dtype.element_ty, MATH), mask=used[:, None] & (columns < WIDTH)[None, :])


@triton.jit
def _products(
    a, rows_of_a, used_a, b, rows_of_b, used_b,
    A: tl.constexpr, B: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, LARGEST: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """Products of all rows of a with all rows of b, `[A, B]`, some columns at a time to spare registers."""
    BLOCK: tl.constexpr = min(PADDED, LARGEST)
    found = tl.zeros([A, B], tl.float32)
    for first in tl.range(0, PADDED, BLOCK, num_stages=1, loop_unroll_factor=1):
        columns = first + tl.arange(0, BLOCK)
        within = columns < WIDTH
        at_a = rows_of_a.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        at_b = rows_of_b.to(tl.int64)[None, :] * WIDTH + columns[:, None]
        of_a = tl.load(a + at_a, mask=used_a[:, None] & within[None, :], other=0.0)
        of_b = tl.load(b + at_b, mask=used_b[None, :] & within[:, None], other=0.0)
        found = dot(of_a, of_b, found, MATH)
    return found


@triton.jit
def _load_slots(of, begin, end, W: tl.constexpr):
    """Numbers of the keys and the ranges that see them, empty ones from `end` on."""
    slots = begin + tl.arange(0, W)
    inside = slots < end
    number = tl.load(of.keys + slots, mask=inside, other=0)
    return number, tl.load(of.first + slots, mask=inside, other=0), tl.load(of.last + slots, mask=inside, other=0)


@triton.jit
def _seen(place, asking, first, last, number, earlier, sizes):
    """Which queries (`asking` at `place` of the set) see which slots; either lie along an axis of their own."""
    seen = (place >= first) & (place < last)
    time = sizes.past + asking % sizes.queries
    for i in tl.static_range(len(earlier)):
        same = tl.load(earlier[i].queries + asking) == tl.load(earlier[i].keys + number)
        seen = seen & ~(same & (time < tl.load(earlier[i].until + number)))
    return seen


@triton.jit
def _query_block(tokens, of, per_row, row_length, sizes, EXTENT: tl.constexpr):
    """A block of queries: their places in the set, which of them are there, numbers, rows and vectors; and the slots
    from `begin` to `end` beside them.
    """
    block = tl.program_id(0)
    start, length, _ = locate(block, None, 0, per_row, row_length, EXTENT.C, False)
    used = tl.arange(0, EXTENT.C) < length
    place = (start + tl.arange(0, EXTENT.C)).to(of.first.dtype.element_ty)
    number = tl.load(of.queries + place, mask=used, other=0)
    rows = _row(number, sizes.heads, sizes.queries)
    query = _load_rows(tokens.query, rows, used, EXTENT.KEY, EXTENT.KEY_PADDED)
    begin = tl.load(of.begin + block)
    return place, used, number, rows, query, begin, begin + tl.load(of.count + block)


@triton.jit
def _key_tile(tokens, of, slot, end, place, asking, query, earlier, sizes, EXTENT: tl.constexpr, MATH: tl.constexpr):
    """A tile of slots: which of them anyone sees, where their keys are, these, and the logits `[C, W]` (for powers of
    2), -inf where a query does not see the slot.
    """
    C: tl.constexpr = EXTENT.C
    W: tl.constexpr = EXTENT.W
    number, first, last = _load_slots(of, slot, end, EXTENT.W)
    held = first < last
    rows = _row(number, sizes.heads, sizes.keys)
    key = _load_rows(tokens.key, rows, held, EXTENT.KEY, EXTENT.KEY_PADDED)
    seen = _seen(place[:, None], asking[:, None], first[None, :], last[None, :], number[None, :], earlier, sizes)
    logits = dot(query, tl.trans(key), tl.zeros([C, W], tl.float32), MATH) * _LOG2E
    return held, rows, key, tl.where(seen, logits, -float("inf"))


_LENGTHS = ["per_row", "row_length"]


@triton.jit(do_not_specialize=_LENGTHS)
def attend(
    tokens, of, earlier, before, after, out, level, per_row, row_length, sizes,
    EXTENT: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """A block of queries reads one set; grid [blocks], `per_row` for every `row_length` queries.

    before, after: `Sums`, None for the first set and after the last, which writes `out` `[B, T, S, D]` (zero where
    nothing is seen) and `level` `[N T]`.
    """
    VALUE_PADDED: tl.constexpr = EXTENT.VALUE_PADDED
    C: tl.constexpr = EXTENT.C
    place, used, asking, rows, query, begin, end = _query_block(tokens, of, per_row, row_length, sizes, EXTENT)
    if before is None:
        most = tl.full([C], -float("inf"), tl.float32)
        total = tl.zeros([C], tl.float32)
        read = tl.zeros([C, VALUE_PADDED], tl.float32)
    else:
        most = tl.load(before.most + asking, mask=used, other=0.0)
        total = tl.load(before.total + asking, mask=used, other=0.0)
        read = _load_rows(before.read, asking, used, EXTENT.VALUE, EXTENT.VALUE_PADDED)
    for slot in range(begin, end, EXTENT.W):
        held, rows_of_keys, _, logits = _key_tile(
            tokens, of, slot, end, place, asking, query, earlier, sizes, EXTENT, MATH
        )
        larger = tl.maximum(most, tl.max(logits, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)  # until something is seen
        scale = tl.exp2(most - base)
        powers = tl.exp2(logits - base[:, None])
        total = total * scale + tl.sum(powers, 1)
        value = _load_rows(tokens.value, rows_of_keys, held, EXTENT.VALUE, EXTENT.VALUE_PADDED)
        read = dot(powers, value, read * scale[:, None], MATH)
        most = larger
    if out is None:
        tl.store(after.most + asking, most, mask=used)
        tl.store(after.total + asking, total, mask=used)
        _store_rows(after.read, read, asking, used, EXTENT.VALUE, EXTENT.VALUE_PADDED, MATH)
    else:
        some = total > 0
        total = tl.where(some, total, 1.0)
        read = tl.where(some[:, None], read / total[:, None], 0.0)
        _store_rows(out, read, rows, used, EXTENT.VALUE, EXTENT.VALUE_PADDED, MATH)
        tl.store(level + asking, tl.where(some, most + tl.log2(total), float("inf")), mask=used)


@triton.jit(do_not_specialize=_LENGTHS)
def of_queries(
    tokens, ahead, of, earlier, before, after, per_row, row_length, sizes, EXTENT: tl.constexpr, MATH: tl.constexpr
):
    """The gradient of the queries, `before` (None for the first set) and `after` `[B, T, S, d]`; grid as in `attend`.

    The first set writes `ahead.product`.
    """
    KEY_PADDED: tl.constexpr = EXTENT.KEY_PADDED
    W: tl.constexpr = EXTENT.W
    C: tl.constexpr = EXTENT.C
    place, used, asking, rows, query, begin, end = _query_block(tokens, of, per_row, row_length, sizes, EXTENT)
    level = tl.load(ahead.level + asking, mask=used, other=float("inf"))
    if before is None:
        grad = _load_rows(ahead.grad, rows, used, EXTENT.VALUE, EXTENT.VALUE_PADDED)
        output = _load_rows(ahead.output, rows, used, EXTENT.VALUE, EXTENT.VALUE_PADDED)
        product = tl.sum(grad.to(tl.float32) * output.to(tl.float32), 1)
        tl.store(ahead.product + asking, product, mask=used)
        found = tl.zeros([C, KEY_PADDED], tl.float32)
    else:
        product = tl.load(ahead.product + asking, mask=used, other=0.0)
        found = _load_rows(before, rows, used, EXTENT.KEY, EXTENT.KEY_PADDED)
    for slot in range(begin, end, EXTENT.W):
        held, rows_of_keys, key, logits = _key_tile(
            tokens, of, slot, end, place, asking, query, earlier, sizes, EXTENT, MATH
        )
        weights = tl.exp2(logits - level[:, None])
        of_weights = _products(
            ahead.grad, rows, used, tokens.value, rows_of_keys, held, C, W, EXTENT.VALUE, EXTENT.VALUE_PADDED,
            EXTENT.BLOCK, MATH,
        )  # fmt: skip
        found = dot(weights * (of_weights - product[:, None]), key, found, MATH)
    _store_rows(after, found, rows, used, EXTENT.KEY, EXTENT.KEY_PADDED, MATH)


@triton.jit(do_not_specialize=["slots"])
def of_slots(
    tokens, ahead, of, earlier, before, after, slots, sizes,
    SEVERAL: tl.constexpr, EXTENT: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values; grid [tiles of slots].

    before, after: pairs `[B, L, S, d]` and `[B, L, S, D]`; before is None for the first set. SEVERAL: a key may have
    more than one slot, and after is by slots, `[slots, d]` and `[slots, D]`.
    """
    KEY_PADDED: tl.constexpr = EXTENT.KEY_PADDED
    VALUE_PADDED: tl.constexpr = EXTENT.VALUE_PADDED
    C: tl.constexpr = EXTENT.C
    W: tl.constexpr = EXTENT.W
    slot = tl.program_id(0) * W
    number, first, last = _load_slots(of, slot, slots, W)
    held = first < last
    rows = _row(number, sizes.heads, sizes.keys)
    inside = slot + tl.arange(0, W) < slots
    if before is None:
        of_key = tl.zeros([W, KEY_PADDED], tl.float32)
        of_value = tl.zeros([W, VALUE_PADDED], tl.float32)
    else:
        of_key = _load_rows(before[0], rows, inside, EXTENT.KEY, EXTENT.KEY_PADDED)
        of_value = _load_rows(before[1], rows, inside, EXTENT.VALUE, EXTENT.VALUE_PADDED)
    end = tl.max(tl.where(held, last, 0), 0)
    begin = tl.min(tl.where(held, first, end), 0)
    for start in range(begin, end, C):
        place = start + tl.arange(0, C)
        used = place < end
        asking = tl.load(of.queries + place, mask=used, other=0)
        rows_of_queries = _row(asking, sizes.heads, sizes.queries)
        level = tl.load(ahead.level + asking, mask=used, other=float("inf"))
        product = tl.load(ahead.product + asking, mask=used, other=0.0)
        seen = _seen(
            place[None, :], asking[None, :], first[:, None], last[:, None], number[:, None], earlier, sizes
        )  # fmt: skip
        logits = _products(
            tokens.key, rows, held, tokens.query, rows_of_queries, used, W, C, EXTENT.KEY, EXTENT.KEY_PADDED,
            EXTENT.BLOCK, MATH,
        )  # fmt: skip
        weights = tl.exp2(tl.where(seen, logits * _LOG2E - level[None, :], -float("inf")))
        grad = _load_rows(ahead.grad, rows_of_queries, used, EXTENT.VALUE, EXTENT.VALUE_PADDED)
        of_value = dot(weights, grad, of_value, MATH)
        of_weights = _products(
            tokens.value, rows, held, ahead.grad, rows_of_queries, used, W, C, EXTENT.VALUE, EXTENT.VALUE_PADDED,
            EXTENT.BLOCK, MATH,
        )  # fmt: skip
        query = _load_rows(tokens.query, rows_of_queries, used, EXTENT.KEY, EXTENT.KEY_PADDED)
        of_key = dot(weights * (of_weights - product[None, :]), query, of_key, MATH)
    if SEVERAL:
        rows = slot + tl.arange(0, W)
    _store_rows(after[0], of_key, rows, inside, EXTENT.KEY, EXTENT.KEY_PADDED, MATH)
    _store_rows(after[1], of_value, rows, inside, EXTENT.VALUE, EXTENT.VALUE_PADDED, MATH)


@triton.jit(do_not_specialize=["count"])
def of_keys(of_slot, order, starts, after, count, sizes, BLOCK: tl.constexpr, EXTENT: tl.constexpr, MATH: tl.constexpr):
    """The sums of what the slots of a key have, in the order of the slots; grid [blocks of keys].

    of_slot: a pair `[slots, d]` and `[slots, D]`; order: slots, those of key j from `starts[j]` to `starts[j + 1]`;
    after: as in `of_slots`, of `count` keys.
    """
    KEY_PADDED: tl.constexpr = EXTENT.KEY_PADDED
    VALUE_PADDED: tl.constexpr = EXTENT.VALUE_PADDED
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = number < count
    begin = tl.load(starts + number, mask=inside, other=0)
    end = tl.load(starts + number + 1, mask=inside, other=0)
    of_key = tl.zeros([BLOCK, KEY_PADDED], tl.float32)
    of_value = tl.zeros([BLOCK, VALUE_PADDED], tl.float32)
    for i in range(0, tl.max(end - begin, 0)):
        used = begin + i < end
        slot = tl.load(order + begin + i, mask=used, other=0)
        of_key += _load_rows(of_slot[0], slot, used, EXTENT.KEY, EXTENT.KEY_PADDED)
        of_value += _load_rows(of_slot[1], slot, used, EXTENT.VALUE, EXTENT.VALUE_PADDED)
    rows = _row(number, sizes.heads, sizes.keys)
    _store_rows(after[0], of_key, rows, inside, EXTENT.KEY, EXTENT.KEY_PADDED, MATH)
    _store_rows(after[1], of_value, rows, inside, EXTENT.VALUE, EXTENT.VALUE_PADDED, MATH)
