"""State space duality in chunks of C tokens on the chip: its output and all its gradients by three kernels.

With s the running sum of a chunk's log decays, L_ij = exp(s_i - s_j) for j <= i, and S the state before it,

    walk      S_next = exp(s_end) S + sum_j exp(s_end - s_j) x_j b_j^T
    attend    o_i = sum_j (a_i . b_j) L_ij x_j + exp(s_i) S a_i
    contract  d_i = sum over the heads of a group of sum_j (y_i . x_j) L_ij b_j + exp(s_i) S^T y_i

With a, b, x, y the query, the key, the value and the gradient of the output these are states, output and gradient of
the query. Read from the last token to the first, with key, query, gradient and value in these places and exp(s_end - s)
where exp(s) was, they are the gradients of the states, of the values and of the keys: that is what REVERSE means.

The gradient of a log decay is all that crosses its token: pairs within the chunk, what comes from the state before it,
what goes to the state after it, and what goes from one to the other: only these are summed (`ops/ssd/chunk.py`).

Decays are summed in float64, and their sums kept as two float32 numbers, so that after a decay of e^-1000 the later
ones still have all their digits. Products are in MATH.DTYPE, their sums and the states in float32. A program has the
heads of a group, or a block of them, one after the other, because their scores `a . b` are the same.
"""

from typing import Any, NamedTuple

from ..common.launch import tl, triton
from ..common.tiles import as_operand, dot, left_over, load_tokens, locate_between, narrow, segment_of, store_tokens


class Operands(NamedTuple):
    """a and b `[tokens, groups, N]`, x and y `[tokens, heads, P]` (y in `contract` alone); log_decay `[tokens, heads]`
    in float32.
    """

    a: Any
    b: Any
    x: Any
    y: Any
    log_decay: Any


class Heads(NamedTuple):
    """All heads, the groups, and how many heads of a group a program has, in how many blocks."""

    heads: int
    groups: int
    each: int
    blocks: int


class Extent(NamedTuple):
    """What a kernel is compiled for: tokens of a chunk, P and N, both padded, and how much of them it takes at once."""

    C: int
    P: int
    N: int
    P_PADDED: int
    N_PADDED: int
    BP: int
    BN: int


@triton.jit
def _running_sums(log_decay, start, length, heads, C: tl.constexpr):
    """s `[C]` and s_end of a head, in float64."""
    rows = tl.arange(0, C)
    each = tl.load(log_decay + (start + rows).to(tl.int64) * heads, mask=rows < length, other=0.0)
    each = tl.where(each < -1000.0, -1000.0, each).to(tl.float64)  # exp of it is zero, and so is exp of less
    return tl.cumsum(each, 0), tl.sum(each, 0)


@triton.jit
def _reach(sums, end, REVERSE: tl.constexpr):
    """What a token has of the state that it reads."""
    return tl.exp((end - sums if REVERSE else sums).to(tl.float32))


@triton.jit
def _within(sums, C: tl.constexpr, REVERSE: tl.constexpr):
    """L by (reader, writer), `[C, C]`."""
    high = sums.to(tl.float32)
    low = (sums - high.to(tl.float64)).to(tl.float32)
    gap = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    rows = tl.arange(0, C)
    if REVERSE:
        return tl.exp(tl.where(rows[:, None] <= rows[None, :], -gap, -float("inf")))
    else:
        return tl.exp(tl.where(rows[:, None] >= rows[None, :], gap, -float("inf")))


@triton.jit
def _scores(a, b, start, length, groups, EXTENT: tl.constexpr, MATH: tl.constexpr):
    """`a_i . b_j`, `[C, C]`."""
    C: tl.constexpr = EXTENT.C
    N_PADDED: tl.constexpr = EXTENT.N_PADDED
    BN: tl.constexpr = EXTENT.BN
    scores = tl.zeros([C, C], tl.float32)
    for n in tl.range(0, N_PADDED, BN, num_stages=1, loop_unroll_factor=1):
        a_tile = load_tokens(a, start, length, n, groups * EXTENT.N, EXTENT.N, EXTENT.C, EXTENT.BN)
        b_tile = load_tokens(b, start, length, n, groups * EXTENT.N, EXTENT.N, EXTENT.C, EXTENT.BN)
        scores = dot(a_tile, tl.trans(b_tile), scores, MATH)
    return scores


@triton.jit(do_not_specialize=["per_row", "row_length"])
def walk(
    tokens, first, states, last, documents, per_row, row_length, heads,
    EXTENT: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, TWO_TERMS: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The state that every chunk reads, `states` `[slots, heads, P, N]`, both padded; grid [rows, heads, slices].

    tokens: `Operands`; first, last: `[rows, heads, P, N]`, the state with which a row begins and ends in the order of
    the walk, either may be None. A reversed walk leaves what a chunk reads in the slot of the next (`locate_between`).
    TWO_TERMS: the weighted x is rounded to two numbers of MATH.DTYPE, so that the state keeps the accuracy of float32.
    """
    BP: tl.constexpr = EXTENT.BP
    BN: tl.constexpr = EXTENT.BN
    C: tl.constexpr = EXTENT.C
    row = tl.program_id(0)
    head = tl.program_id(1)
    group = head // (heads.heads // heads.groups)
    across = EXTENT.N_PADDED // EXTENT.BN
    p = (tl.program_id(2) // across) * EXTENT.BP
    n = (tl.program_id(2) % across) * EXTENT.BN
    start, length, slot, second = segment_of(row, documents, per_row, row_length, C, 1, PACKED)
    ps = p + tl.arange(0, EXTENT.BP)
    ns = n + tl.arange(0, EXTENT.BN)
    whole = ((row.to(tl.int64) * heads.heads + head) * EXTENT.P + ps)[:, None] * EXTENT.N + ns[None, :]
    inside = (ps < EXTENT.P)[:, None] & (ns < EXTENT.N)[None, :]
    state = tl.zeros([BP, BN], tl.float32)
    if first is not None:
        state = tl.load(first + whole, mask=inside, other=0.0)
    tile = (head * EXTENT.P_PADDED + ps)[:, None] * EXTENT.N_PADDED + ns[None, :]
    chunks = tl.cdiv(length, C)
    for step in range(0, chunks):
        chunk = chunks - 1 - step if REVERSE else step
        at = slot * heads.heads * EXTENT.P_PADDED * EXTENT.N_PADDED
        tl.store(states + at + tile, narrow(state, states.dtype.element_ty, MATH))
        slot = second + (chunk - 1 if REVERSE else chunk)
        begin = start + chunk * C
        count = tl.minimum(length - chunk * C, C)
        sums, end = _running_sums(tokens.log_decay + head, begin, count, heads.heads, C)
        x = load_tokens(
            tokens.x + head * EXTENT.P, begin, count, p, heads.heads * EXTENT.P, EXTENT.P, C, EXTENT.BP
        ).to(tl.float32)  # fmt: skip
        b = load_tokens(tokens.b + group * EXTENT.N, begin, count, n, heads.groups * EXTENT.N, EXTENT.N, C, EXTENT.BN)
        x = tl.trans(x * _reach(sums, end, not REVERSE)[:, None])  # what a writer leaves is what a reader has, reversed
        state = dot(x, b, state * tl.exp(end.to(tl.float32)), MATH)
        if TWO_TERMS:
            state = dot(left_over(x, MATH), b, state, MATH)
    if last is not None:
        tl.store(last + whole, state, mask=inside)


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def attend(
    tokens, states, out, documents, count, per_row, row_length, heads,
    EXTENT: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`out` `[tokens, heads, P]` of a chunk; grid [chunks, groups, blocks of heads]. states: what `walk` left."""
    P_PADDED: tl.constexpr = EXTENT.P_PADDED
    BP: tl.constexpr = EXTENT.BP
    N_PADDED: tl.constexpr = EXTENT.N_PADDED
    BN: tl.constexpr = EXTENT.BN
    C: tl.constexpr = EXTENT.C
    start, length, slot, following = locate_between(
        tl.program_id(0), documents, count, per_row, row_length, C, PACKED
    )  # fmt: skip
    group = tl.program_id(1)
    if length > 0:
        a = tokens.a + group * EXTENT.N
        scores = _scores(a, tokens.b + group * EXTENT.N, start, length, heads.groups, EXTENT, MATH)
        per_group = heads.heads // heads.groups
        ns = tl.arange(0, EXTENT.BN)
        for inside in range(tl.program_id(2) * heads.each, tl.minimum((tl.program_id(2) + 1) * heads.each, per_group)):
            head = group * per_group + inside
            sums, end = _running_sums(tokens.log_decay + head, start, length, heads.heads, C)
            weights = as_operand(scores * _within(sums, C, REVERSE), MATH)
            reach = _reach(sums, end, REVERSE)[:, None]
            at = (following if REVERSE else slot) * heads.heads + head
            state = states + at * EXTENT.P_PADDED * EXTENT.N_PADDED
            for p in tl.range(0, P_PADDED, BP, num_stages=1, loop_unroll_factor=1):
                rows = (p + tl.arange(0, EXTENT.BP))[:, None] * EXTENT.N_PADDED
                tile = tl.zeros([C, BP], tl.float32)
                for n in tl.range(0, N_PADDED, BN, num_stages=1, loop_unroll_factor=1):
                    a_tile = load_tokens(a, start, length, n, heads.groups * EXTENT.N, EXTENT.N, C, EXTENT.BN)
                    tile = dot(a_tile, tl.trans(tl.load(state + rows + (n + ns)[None, :])), tile, MATH)
                x = load_tokens(
                    tokens.x + head * EXTENT.P, start, length, p, heads.heads * EXTENT.P, EXTENT.P, C, EXTENT.BP
                )
                tile = dot(weights, x, tile * reach, MATH)
                store_tokens(
                    out + head * EXTENT.P, tile, start, length, p, heads.heads * EXTENT.P, EXTENT.P, C, EXTENT.BP, MATH
                )


@triton.jit(do_not_specialize=["count", "per_row", "row_length", "total"])
def contract(
    tokens, states, others, out, crossing, documents, count, per_row, row_length, total, heads,
    EXTENT: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`out` `[blocks, tokens, groups, N]`, one sum a block of heads; grid [chunks, groups, blocks of heads].

    crossing `[tokens, heads]`: half of the gradient of the log decays. Forwards it is what crosses a token within the
    chunk and from the state before it; REVERSE what goes to the state after it. states: what `walk` left in this
    direction, others: in the other, for REVERSE alone. total: tokens of the call.
    """
    N_PADDED: tl.constexpr = EXTENT.N_PADDED
    P_PADDED: tl.constexpr = EXTENT.P_PADDED
    BP: tl.constexpr = EXTENT.BP
    C: tl.constexpr = EXTENT.C
    start, length, slot, following = locate_between(
        tl.program_id(0), documents, count, per_row, row_length, C, PACKED
    )  # fmt: skip
    group = tl.program_id(1)
    block = tl.program_id(2)
    if length > 0:
        a = tokens.a + group * EXTENT.N
        b = tokens.b + group * EXTENT.N
        columns = tl.arange(0, EXTENT.N_PADDED)
        rows = tl.arange(0, C)
        if not REVERSE:
            scores = _scores(a, b, start, length, heads.groups, EXTENT, MATH)
        of_scores = tl.zeros([C, C], tl.float32)
        found = tl.zeros([C, N_PADDED], tl.float32)
        per_group = heads.heads // heads.groups
        for inside in range(block * heads.each, tl.minimum((block + 1) * heads.each, per_group)):
            head = group * per_group + inside
            sums, end = _running_sums(tokens.log_decay + head, start, length, heads.heads, C)
            reach = _reach(sums, end, REVERSE)[:, None]
            plane: tl.constexpr = EXTENT.P_PADDED * EXTENT.N_PADDED
            read = (following if REVERSE else slot) * heads.heads + head
            pairs = tl.zeros([C, C], tl.float32)
            from_state = tl.zeros([C, N_PADDED], tl.float32)
            through = tl.zeros([N_PADDED], tl.float32)
            for p in tl.range(0, P_PADDED, BP, num_stages=1, loop_unroll_factor=1):
                wide = heads.heads * EXTENT.P
                x = load_tokens(tokens.x + head * EXTENT.P, start, length, p, wide, EXTENT.P, C, EXTENT.BP)
                y = load_tokens(tokens.y + head * EXTENT.P, start, length, p, wide, EXTENT.P, C, EXTENT.BP)
                at = (p + tl.arange(0, EXTENT.BP))[:, None] * EXTENT.N_PADDED + columns[None, :]
                state = tl.load(states + read * plane + at)
                pairs = dot(y, tl.trans(x), pairs, MATH)
                from_state = dot(y.to(tl.float32) * reach, state, from_state, MATH)
                if REVERSE:
                    other = tl.load(others + (slot * heads.heads + head) * plane + at)
                    through += tl.sum(other.to(tl.float32) * state.to(tl.float32), 0)
            pairs *= _within(sums, C, REVERSE)
            of_scores += pairs
            found += from_state
            # Read for every head: kept beside the sums above, it would take the registers of their products.
            a_tile = load_tokens(a, start, length, 0, heads.groups * EXTENT.N, EXTENT.N, C, EXTENT.N_PADDED)
            by_state = tl.sum(a_tile.to(tl.float32) * from_state, 1)
            if REVERSE:
                # Every token has what those before it leave, and what passes the chunk from one state to the next.
                passed = tl.sum(through, 0) * tl.exp(end.to(tl.float32))
                half = tl.sum(tl.where(rows[:, None] > rows[None, :], by_state[None, :], 0.0), 1) + passed
            else:
                # Pairs whose reader is this token or later, and of these the pairs whose writer is before it.
                pairs = tl.cumsum(pairs * scores, 0, True)
                half = tl.sum(tl.where(rows[:, None] > rows[None, :], pairs, 0.0), 1) + tl.cumsum(by_state, 0, True)
            place = crossing + (start + rows).to(tl.int64) * heads.heads + head
            tl.store(place, half, mask=rows < length)
        b_tile = load_tokens(b, start, length, 0, heads.groups * EXTENT.N, EXTENT.N, C, EXTENT.N_PADDED)
        found = dot(of_scores, b_tile, found, MATH)
        out += (block.to(tl.int64) * total * heads.groups + group) * EXTENT.N
        store_tokens(out, found, start, length, 0, heads.groups * EXTENT.N, EXTENT.N, C, EXTENT.N_PADDED, MATH)
