"""The chunks of the fused backend: outputs, and what a chunk contributes to every gradient.

One program works on one chunk of one head (gradients of parameters: on many chunks, one after the other). What it
reads is the tokens, the states before the chunk and tables that stay in the second-level cache; nothing M-wide is
written but the gradient of the states. Each kernel is launched for both kinds of groups
(`op_interdomain_triton_tiles`) and leaves the others alone.
"""

from typing import Any, NamedTuple

from .op_interdomain_triton_tiles import (
    collect,
    dot,
    intra_scores,
    load_pair,
    load_tokens,
    locate,
    narrow,
    pull,
    pull_and_mix,
    readers,
    store_tokens,
    times_conj,
)

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


class Operands(NamedTuple):
    """The tokens of one pass: a `[tokens, heads, A]` pulls from b `[tokens, groups, A]`, what it gets reads c `[tokens,
    groups, C]`, and f `[tokens, heads, C]` is what the readout is multiplied with in the loss (backward alone).
    """

    a: Any
    b: Any
    c: Any
    f: Any = None


class Widths(NamedTuple):
    """The columns of a and b and those of c and f, as they are and padded."""

    A: int
    C: int
    A_PADDED: int
    C_PADDED: int


class ChunkStates(NamedTuple):
    """The states before every chunk that b and that c left, `[slots, groups, 2, M, padded width]`."""

    b: Any
    c: Any


class ChunkGradients(NamedTuple):
    """What the chunks contribute to gradients, each on its own and for each head; see `attend_backward`."""

    c: Any
    states: Any
    intra: Any
    log_decay: Any


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def attend(
    tokens, out, states, tables, documents, count, per_row, row_length, heads, groups,
    WIDTHS: tl.constexpr, SIZES: tl.constexpr, FULL: tl.constexpr, SKEWED: tl.constexpr, PACKED: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """`out = push(mix(pull(a; b)); c)` for one chunk and head; grid [chunks, heads].

    tokens: `Operands`; out: as c, but by heads; states: `ChunkStates`; tables: `DecayTables`; documents: `Documents`.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    BD: tl.constexpr = SIZES.BD
    A_PADDED: tl.constexpr = WIDTHS.A_PADDED
    C_PADDED: tl.constexpr = WIDTHS.C_PADDED
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    group = head // (heads // groups)
    if tl.load(tables.skewed + group) != SKEWED:
        return
    start, length, slot = locate(chunk, documents, count, per_row, row_length, C, PACKED)
    if length > 0:
        intra = tables.intra + group * C * 2 * M
        powers = tables.powers + group * C * 2 * M
        mixing = tables.mixing + group * 4 * M * (M if FULL else 1)
        at = (slot * groups + group) * 2 * M
        c_states = states.c + at * C_PADDED
        p_re, p_im = pull_and_mix(
            tokens.a + head * WIDTHS.A, tokens.b + group * WIDTHS.A, states.b + at * A_PADDED, intra, powers, mixing,
            start, length, heads * WIDTHS.A, groups * WIDTHS.A, WIDTHS.A, A_PADDED, SIZES, FULL, SKEWED, MATH,
        )  # fmt: skip
        e_re, e_im, _, _, w = readers(p_re, p_im, powers, intra, C, M, SKEWED, MATH)
        for d in tl.static_range(0, C_PADDED, BD):
            c_tile = load_tokens(tokens.c + group * WIDTHS.C, start, length, d, groups * WIDTHS.C, WIDTHS.C, C, BD)
            s_re, s_im = load_pair(c_states, tl.arange(0, M), d + tl.arange(0, BD), C_PADDED, M * C_PADDED)
            tile = dot(w, c_tile, tl.zeros([C, BD], tl.float32), MATH)
            tile = dot(e_re, s_re, tile, MATH)
            tile = dot(e_im, s_im, tile, MATH)
            store_tokens(out + head * WIDTHS.C, tile, start, length, d, heads * WIDTHS.C, WIDTHS.C, C, BD, MATH)


@triton.jit(do_not_specialize=["count", "per_row", "row_length", "chunks"])
def attend_backward(
    tokens, out, grads, states, tables, documents, count, per_row, row_length, heads, groups, chunks,
    WIDTHS: tl.constexpr, SIZES: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr, SKEWED: tl.constexpr,
    PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The gradients around `p = mix(pull(a; b))` when f is what `push(p; c)` was read with.

    With (a, b, c, f) = (query, key, value, grad of output), p reads the values and the gradients are those of value;
    with (grad of output, value, key, query) and the transposed mixing they are those of key, and `push(p; c)` (ROWS) is
    the gradient of the query. Grid [lanes, heads]; lane l works on chunks l, l + lanes, ... and sums over them the
    gradient of `intra`, grads.intra `[lanes, heads, C, 2, M]`. For each head, without what comes through later chunks:
    grads.c `[tokens, heads, WIDTHS.C]`, grads.states `[slots, heads, 2, M, WIDTHS.C_PADDED]`, and grads.log_decay
    `[chunks, heads, 2, M]`, the gradient of log(lambda) through the powers.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    BD: tl.constexpr = SIZES.BD
    A_PADDED: tl.constexpr = WIDTHS.A_PADDED
    C_PADDED: tl.constexpr = WIDTHS.C_PADDED
    lane = tl.program_id(0)
    head = tl.program_id(1)
    group = head // (heads // groups)
    if tl.load(tables.skewed + group) != SKEWED:
        return
    intra = tables.intra + group * C * 2 * M
    powers = tables.powers + group * C * 2 * M
    mixing = tables.mixing + group * 4 * M * (M if FULL else 1)
    f = tokens.f + head * WIDTHS.C
    modes = tl.arange(0, M)
    ages = (1 + tl.arange(0, C))[:, None].to(tl.float32)
    dt_re = tl.zeros([C, M], tl.float32)
    dt_im = tl.zeros([C, M], tl.float32)
    for chunk in range(lane, chunks, tl.num_programs(0)):
        start, length, slot = locate(chunk, documents, count, per_row, row_length, C, PACKED)
        if length > 0:
            at = (slot * groups + group) * 2 * M
            at_head = (slot * heads + head) * 2 * M
            c_states = states.c + at * C_PADDED
            p_re, p_im = pull_and_mix(
                tokens.a + head * WIDTHS.A, tokens.b + group * WIDTHS.A, states.b + at * A_PADDED, intra, powers,
                mixing, start, length, heads * WIDTHS.A, groups * WIDTHS.A, WIDTHS.A, A_PADDED,
                SIZES, FULL, SKEWED, MATH,
            )  # fmt: skip
            e_re, e_im, x_re, x_im, w = readers(p_re, p_im, powers, intra, C, M, SKEWED, MATH)
            for d in tl.static_range(0, C_PADDED, BD):
                columns = d + tl.arange(0, BD)
                f_tile = load_tokens(f, start, length, d, heads * WIDTHS.C, WIDTHS.C, C, BD)
                if ROWS:
                    c_tile = load_tokens(
                        tokens.c + group * WIDTHS.C, start, length, d, groups * WIDTHS.C, WIDTHS.C, C, BD
                    )
                    s_re, s_im = load_pair(c_states, modes, columns, C_PADDED, M * C_PADDED)
                    tile = dot(w, c_tile, tl.zeros([C, BD], tl.float32), MATH)
                    tile = dot(e_re, s_re, tile, MATH)
                    tile = dot(e_im, s_im, tile, MATH)
                    store_tokens(out + head * WIDTHS.C, tile, start, length, d, heads * WIDTHS.C, WIDTHS.C, C, BD, MATH)
                tile = dot(tl.trans(w), f_tile, tl.zeros([C, BD], tl.float32), MATH)
                store_tokens(grads.c + head * WIDTHS.C, tile, start, length, d, heads * WIDTHS.C, WIDTHS.C, C, BD, MATH)
                grad_states = grads.states + at_head * C_PADDED + modes[:, None] * C_PADDED + columns[None, :]
                tile = dot(tl.trans(e_re), f_tile, tl.zeros([M, BD], tl.float32), MATH)
                tl.store(grad_states, narrow(tile, grad_states.dtype.element_ty, MATH))
                tile = dot(tl.trans(e_im), f_tile, tl.zeros([M, BD], tl.float32), MATH)
                tl.store(grad_states + M * C_PADDED, narrow(tile, grad_states.dtype.element_ty, MATH))
            scores = intra_scores(
                f, tokens.c + group * WIDTHS.C, start, length, heads * WIDTHS.C, groups * WIDTHS.C, WIDTHS.C, C_PADDED,
                BD, C, SKEWED, MATH,
            )  # fmt: skip
            dt_re = dot(tl.trans(scores), x_re, dt_re, MATH)
            dt_im = dot(tl.trans(scores), x_im, dt_im, MATH)
            z_re, z_im = collect(
                scores, f, c_states, intra, start, length, heads * WIDTHS.C, 0, WIDTHS.C, C_PADDED, BD, M,
                C, M, SKEWED, MATH,
            )  # fmt: skip
            z_re, z_im = times_conj(e_re.to(tl.float32), e_im.to(tl.float32), z_re, z_im)
            at_chunk = (tl.cast(chunk, tl.int64) * heads + head) * 2 * M
            tl.store(grads.log_decay + at_chunk + modes, tl.sum(ages * z_re, 0))
            tl.store(grads.log_decay + at_chunk + M + modes, tl.sum(ages * z_im, 0))
    grad_intra = grads.intra + (lane * heads + head) * C * 2 * M + tl.arange(0, C)[:, None] * 2 * M + modes[None, :]
    tl.store(grad_intra, dt_re)
    tl.store(grad_intra + M, dt_im)


@triton.jit(do_not_specialize=["count", "per_row", "row_length", "chunks"])
def mixing_backward(
    tokens, grad_mixing, states, tables, documents, count, per_row, row_length, heads, groups, chunks,
    WIDTHS: tl.constexpr, SIZES: tl.constexpr, BN: tl.constexpr, FULL: tl.constexpr, SKEWED: tl.constexpr,
    PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`grad of mixing[i, j] = y_i^T x_j`, y pulled from (query; key) and x from (grad of output; value).

    tokens: (a, b, c, f) = (query, key, value, grad of output). Grid [lanes, heads, blocks]: a block is BM x BN modes,
    or BM = BN of the diagonal unless FULL. grad_mixing `[lanes, heads, 2, 2, M, M]` or `[lanes, heads, 2, 2, M]`.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    BM: tl.constexpr = SIZES.BM
    lane = tl.program_id(0)
    head = tl.program_id(1)
    block = tl.program_id(2)
    group = head // (heads // groups)
    if tl.load(tables.skewed + group) != SKEWED:
        return
    m = (block // (M // BN)) * BM if FULL else block * BM
    n = (block % (M // BN)) * BN if FULL else m
    intra = tables.intra + group * C * 2 * M
    powers = tables.powers + group * C * 2 * M
    a = tokens.a + head * WIDTHS.A
    b = tokens.b + group * WIDTHS.A
    c = tokens.c + group * WIDTHS.C
    f = tokens.f + head * WIDTHS.C
    SHAPE: tl.constexpr = [BM, BN] if FULL else [BM]
    w_00 = tl.zeros(SHAPE, tl.float32)
    w_01 = tl.zeros(SHAPE, tl.float32)
    w_10 = tl.zeros(SHAPE, tl.float32)
    w_11 = tl.zeros(SHAPE, tl.float32)
    for chunk in range(lane, chunks, tl.num_programs(0)):
        start, length, slot = locate(chunk, documents, count, per_row, row_length, C, PACKED)
        if length > 0:
            at = (slot * groups + group) * 2 * M
            scores = intra_scores(
                a, b, start, length, heads * WIDTHS.A, groups * WIDTHS.A, WIDTHS.A, WIDTHS.A_PADDED, SIZES.BR,
                C, SKEWED, MATH,
            )  # fmt: skip
            y_re, y_im = pull(
                scores, a, states.b + at * WIDTHS.A_PADDED, intra, powers, start, length, heads * WIDTHS.A, m,
                WIDTHS.A, WIDTHS.A_PADDED, SIZES.BR, BM, C, M, SKEWED, MATH,
            )  # fmt: skip
            if FULL:
                y_re = tl.trans(narrow(y_re, MATH.DTYPE, MATH))
                y_im = tl.trans(narrow(y_im, MATH.DTYPE, MATH))
            scores = intra_scores(
                f, c, start, length, heads * WIDTHS.C, groups * WIDTHS.C, WIDTHS.C, WIDTHS.C_PADDED, SIZES.BD,
                C, SKEWED, MATH,
            )  # fmt: skip
            x_re, x_im = pull(
                scores, f, states.c + at * WIDTHS.C_PADDED, intra, powers, start, length, heads * WIDTHS.C, n,
                WIDTHS.C, WIDTHS.C_PADDED, SIZES.BD, BN, C, M, SKEWED, MATH,
            )  # fmt: skip
            if FULL:
                w_00 = dot(y_re, x_re, w_00, MATH)
                w_01 = dot(y_re, x_im, w_01, MATH)
                w_10 = dot(y_im, x_re, w_10, MATH)
                w_11 = dot(y_im, x_im, w_11, MATH)
            else:
                w_00 += tl.sum(y_re * x_re, 0)
                w_01 += tl.sum(y_re * x_im, 0)
                w_10 += tl.sum(y_im * x_re, 0)
                w_11 += tl.sum(y_im * x_im, 0)
    PLANE: tl.constexpr = M * M if FULL else M
    grad_mixing += (lane * heads + head).to(tl.int64) * 4 * PLANE
    if FULL:
        grad_mixing += (m + tl.arange(0, BM))[:, None] * M + n + tl.arange(0, BN)[None, :]
    else:
        grad_mixing += m + tl.arange(0, BM)
    tl.store(grad_mixing, w_00)
    tl.store(grad_mixing + PLANE, w_01)
    tl.store(grad_mixing + 2 * PLANE, w_10)
    tl.store(grad_mixing + 3 * PLANE, w_11)
