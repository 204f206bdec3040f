"""What the chunks of the fused backend contribute to the gradients, each on its own.

`pull_both` pulls the query through the keys (side 0) and the gradient of the output through the values (side 1), `mix`
multiplies both by the mixing matrix, which is symmetric and serves both, and `push_both` pushes them: the mixed side 1
through the keys gives the gradient of the query and, transposed, that of the keys; the mixed side 0 gives that of the
values. Between these kernels both sides lie in memory in the dtype of the matrix units.

Gradients of the decay and of beta are sums over the tokens of a chunk (`Partial` of `ops/diagonal/triton_tables.py`),
so that no program carries a table from chunk to chunk.
"""

from typing import Any, NamedTuple

from ..common.launch import tl, triton
from ..common.tiles import dot, load_tokens, locate, narrow, store_tokens
from ..diagonal.triton_tiles import (
    collect,
    earlier,
    intra_scores,
    left_before,
    load_left,
    load_pair,
    mix_alone,
    mix_rows,
    mixing_of_group,
    pull,
    times_conj,
    times_conj_powers,
)
from .triton_attend import load_modes, load_readers, push_stored, store_modes, stored_weights


class ChunkGradients(NamedTuple):
    """The gradients from each chunk on its own, by head: of keys or values, `tokens` `[tokens, heads, width]`, and of
    the `states` before the chunks, `[slots, heads, 2, M, padded width]`.
    """

    tokens: Any
    states: Any


class Pulled(NamedTuple):
    """y of one side, `modes` `[tokens, heads, 2, M]`, and its `intra_scores`, `[tokens, heads, C]`."""

    modes: Any
    scores: Any


@triton.jit
def _store_sums(x, re, im, M: tl.constexpr):
    modes = tl.arange(0, re.shape[0])
    tl.store(x + modes, re)
    tl.store(x + M + modes, im)


@triton.jit
def _pull_side(
    a, b, state, pulled, intra, powers, left, start, length, head, heads, a_stride, b_stride, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, SIZES: tl.constexpr, SKEWED: tl.constexpr, STRICT: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    BM: tl.constexpr = SIZES.BM
    scores = intra_scores(a, b, start, length, a_stride, b_stride, WIDTH, PADDED, BLOCK, left, C, SKEWED, MATH)
    if STRICT:
        scores = earlier(scores, C, SKEWED)
    store_tokens(pulled.scores + head * C, scores, start, length, 0, heads * C, C, C, C, MATH)
    for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=M // BM if SIZES.FEW else 1):
        y_re, y_im = pull(
            scores, a, state, intra, powers, left, start, length, a_stride, m, WIDTH, PADDED, BLOCK, BM, C, M, SKEWED,
            MATH,
        )  # fmt: skip
        store_modes(pulled.modes + head * 2 * M, y_re, y_im, start, length, heads * 2 * M, m, C, M, BM, MATH)


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def pull_both(
    tokens, pulled, states, tables, documents, count, per_row, row_length, heads, groups,
    WIDTHS: tl.constexpr, SIZES: tl.constexpr, SKEWED: tl.constexpr, PACKED: tl.constexpr, MATH: tl.constexpr,
    gates=None, STRICT: tl.constexpr = False,
):  # fmt: skip
    """The query pulled through the keys and the gradient of the output through the values; grid [chunks, heads, 2], or
    1 for the first alone.

    tokens: `Operands` (query, key, value, gradient of the output); pulled: a pair of `Pulled`. STRICT: through earlier
    tokens only.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    head = tl.program_id(1)
    group = head // (heads // groups)
    if tl.load(tables.skewed + group) != SKEWED:
        return
    start, length, slot = locate(tl.program_id(0), documents, count, per_row, row_length, C, PACKED)
    if length > 0:
        intra = tables.intra + group * C * 2 * M
        powers = tables.powers + group * C * 2 * M
        at = (slot * groups + group) * 2 * M
        left = load_left(gates, start, length, group, groups, C) if gates is not None else None
        if tl.program_id(2) == 0:
            _pull_side(
                tokens.a + head * WIDTHS.A, tokens.b + group * WIDTHS.A, states.b + at * WIDTHS.A_PADDED,
                pulled[0], intra, powers, left, start, length, head, heads, heads * WIDTHS.A, groups * WIDTHS.A,
                WIDTHS.A, WIDTHS.A_PADDED, SIZES.BR, SIZES, SKEWED, STRICT, MATH,
            )  # fmt: skip
        else:
            _pull_side(
                tokens.f + head * WIDTHS.C, tokens.c + group * WIDTHS.C, states.c + at * WIDTHS.C_PADDED,
                pulled[1], intra, powers, left, start, length, head, heads, heads * WIDTHS.C, groups * WIDTHS.C,
                WIDTHS.C, WIDTHS.C_PADDED, SIZES.BD, SIZES, SKEWED, STRICT, MATH,
            )  # fmt: skip


@triton.jit
def _mix_side(
    a, b, out, sums, powers, mixing, start, length, stride, skewed, SIZES: tl.constexpr, MIXING: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """See `mix`; BN modes at a time, for each of which all that was pulled is read again."""
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    BM: tl.constexpr = SIZES.BM
    BN: tl.constexpr = min(M, 32)
    ages = (1 + tl.arange(0, C))[:, None].to(tl.float32)
    for n in tl.range(0, M, BN, num_stages=1, loop_unroll_factor=1):
        if MIXING.FULL:
            p_re = tl.zeros([C, BN], tl.float32)
            p_im = tl.zeros([C, BN], tl.float32)
            for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=M // BM if SIZES.FEW else 1):
                a_re, a_im = load_modes(a, start, length, stride, m, C, M, BM)
                p_re, p_im = mix_rows(a_re, a_im, mixing, m, n, p_re, p_im, M, BM, BN, MIXING, MATH)
        else:
            a_re, a_im = load_modes(a, start, length, stride, n, C, M, BN)
            p_re, p_im = mix_alone(a_re.to(tl.float32), a_im.to(tl.float32), mixing, n, M, BN)
        if skewed == 0:
            if sums is not None:
                b_re, b_im = load_modes(b, start, length, stride, n, C, M, BN)
                z_re, z_im = times_conj(p_re, p_im, b_re.to(tl.float32), b_im.to(tl.float32))
                _store_sums(sums + n, tl.sum(ages * z_re, 0), tl.sum(ages * z_im, 0), M)
            p_re, p_im = times_conj_powers(p_re, p_im, powers, n, C, M, BN)
        store_modes(out, p_re, p_im, start, length, stride, n, C, M, BN, MATH)


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def mix(
    pulled, mixed, chunk_sums, tables, documents, count, per_row, row_length, heads, groups,
    SIZES: tl.constexpr, MIXING: tl.constexpr, PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`p = mix(y)` for what either side has pulled, kept as what reads the chunk (`readers`); grid [chunks, heads, 2],
    or 1 for the first side alone.

    Unless a group is skewed, the gradient of log(lambda) through the powers comes with it: `sum_t (t + 1) p_t
    conj(x_t)` with x what the other side has pulled. pulled: a pair of `Pulled`; mixed: of `[tokens, heads, 2, M]`;
    chunk_sums: see `Partial.chunks`; None where no gradient is asked for.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    side = tl.program_id(2)
    group = head // (heads // groups)
    skewed = tl.load(tables.skewed + group)
    start, length, _ = locate(chunk, documents, count, per_row, row_length, C, PACKED)
    sums = None
    if chunk_sums is not None:
        sums = chunk_sums + ((tl.cast(chunk, tl.int64) * heads + head) * 2 + side) * 6 * M
    powers = tables.powers + group * C * 2 * M
    mixing = mixing_of_group(tables.mixing, group, M, MIXING)
    if length > 0:
        at = head * 2 * M
        if side == 0:
            _mix_side(
                pulled[0].modes + at, pulled[1].modes + at, mixed[0] + at, sums, powers, mixing, start, length,
                heads * 2 * M, skewed, SIZES, MIXING, MATH,
            )  # fmt: skip
        else:
            _mix_side(
                pulled[1].modes + at, pulled[0].modes + at, mixed[1] + at, sums, powers, mixing, start, length,
                heads * 2 * M, skewed, SIZES, MIXING, MATH,
            )  # fmt: skip
    elif skewed == 0:
        zero = tl.zeros([M], tl.float32)
        if sums is not None:
            _store_sums(sums, zero, zero, M)


@triton.jit(do_not_specialize=["count", "per_row", "row_length", "chunks"])
def mixing_backward(
    pulled, grad_mixing, documents, count, per_row, row_length, heads, chunks,
    SIZES: tl.constexpr, BN: tl.constexpr, FULL: tl.constexpr, PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The gradient of the mixing matrix, `y_i^T x_j` of what the sides have pulled; grid [lanes, heads, blocks].

    A block is BM x BN modes, or BM = BN of the diagonal unless FULL; lane l sums over chunks l, l + lanes, ...
    grad_mixing `[lanes, heads, 2, 2, M, M]` or `[lanes, heads, 2, 2, M]`.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    BM: tl.constexpr = SIZES.BM
    lane = tl.program_id(0)
    head = tl.program_id(1)
    block = tl.program_id(2)
    m = (block // (M // BN)) * BM if FULL else block * BM
    n = (block % (M // BN)) * BN if FULL else m
    stride = heads * 2 * M
    SHAPE: tl.constexpr = [BM, BN] if FULL else [BM]
    w_00 = tl.zeros(SHAPE, tl.float32)
    w_01 = tl.zeros(SHAPE, tl.float32)
    w_10 = tl.zeros(SHAPE, tl.float32)
    w_11 = tl.zeros(SHAPE, tl.float32)
    for chunk in range(lane, chunks, tl.num_programs(0)):
        start, length, _ = locate(chunk, documents, count, per_row, row_length, C, PACKED)
        if length > 0:
            y_re, y_im = load_modes(pulled[0].modes + head * 2 * M, start, length, stride, m, C, M, BM)
            x_re, x_im = load_modes(pulled[1].modes + head * 2 * M, start, length, stride, n, C, M, BN)
            if FULL:
                y_re = tl.trans(y_re)
                y_im = tl.trans(y_im)
                w_00 = dot(y_re, x_re, w_00, MATH)
                w_01 = dot(y_re, x_im, w_01, MATH)
                w_10 = dot(y_im, x_re, w_10, MATH)
                w_11 = dot(y_im, x_im, w_11, MATH)
            else:
                y_re = y_re.to(tl.float32)
                y_im = y_im.to(tl.float32)
                w_00 += tl.sum(y_re * x_re.to(tl.float32), 0)
                w_01 += tl.sum(y_re * x_im.to(tl.float32), 0)
                w_10 += tl.sum(y_im * x_re.to(tl.float32), 0)
                w_11 += tl.sum(y_im * x_im.to(tl.float32), 0)
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


@triton.jit
def _give(
    w, mixed, f, tokens, states, powers, left, start, length, stride, f_stride, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, SKEWED: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """The adjoint of `push_stored`: what readers of f give to the tokens of the chunk, and to the state before it."""
    for d in tl.range(0, PADDED, BD, num_stages=1, loop_unroll_factor=1):
        f_tile = load_tokens(f, start, length, d, f_stride, WIDTH, C, BD)
        given = dot(tl.trans(w), f_tile, tl.zeros([C, BD], tl.float32), MATH)
        store_tokens(tokens, given, start, length, d, f_stride, WIDTH, C, BD, MATH)
        if left is not None:
            f_tile = left_before(f_tile.to(tl.float32), left)
        for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=1):
            e_re, e_im = load_readers(mixed, powers, start, length, stride, m, C, M, BM, SKEWED, MATH)
            at = states + (m + tl.arange(0, BM))[:, None] * PADDED + (d + tl.arange(0, BD))[None, :]
            tile = dot(tl.trans(e_re), f_tile, tl.zeros([BM, BD], tl.float32), MATH)
            tl.store(at, narrow(tile, at.dtype.element_ty, MATH))
            tile = dot(tl.trans(e_im), f_tile, tl.zeros([BM, BD], tl.float32), MATH)
            tl.store(at + M * PADDED, narrow(tile, at.dtype.element_ty, MATH))


@triton.jit
def _sum_table_gradient(
    mixed, scores, units, sums, start, length, stride, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    SKEWED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The gradient of the table of the chunk, summed over its rows, as it is and weighted by their ages."""
    rows = tl.arange(0, C)
    ages = (rows if SKEWED else -1 - rows)[:, None].to(tl.float32)
    for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=1):
        x_re, x_im = load_modes(mixed, start, length, stride, m, C, M, BM)
        t_re = dot(tl.trans(scores), x_re, tl.zeros([C, BM], tl.float32), MATH)
        t_im = dot(tl.trans(scores), x_im, tl.zeros([C, BM], tl.float32), MATH)
        u_re, u_im = load_pair(units, rows, m + tl.arange(0, BM), 2 * M, M)
        z_re, z_im = times_conj(t_re, t_im, u_re, u_im)
        _store_sums(sums + 2 * M + m, tl.sum(z_re, 0), tl.sum(z_im, 0), M)
        _store_sums(sums + 4 * M + m, tl.sum(ages * z_re, 0), tl.sum(ages * z_im, 0), M)


@triton.jit
def _push_side(
    c, f, pulled, mixed, grad_f, grads, sums, state, tables, gates, start, length, slot, head, heads, group, groups,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BD: tl.constexpr, SIZES: tl.constexpr, SKEWED: tl.constexpr,
    STRICT: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Tokens c `[tokens, groups, WIDTH]` and f, by which they were pulled; see `push_both`.

    What was mixed is read again for every product, BM modes at a time: kept in the layouts of all of them it would take
    every register, and it lies in the nearest cache.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    BM: tl.constexpr = SIZES.BM
    if length > 0:
        intra = tables.intra + group * C * 2 * M
        powers = tables.powers + group * C * 2 * M
        stride = heads * 2 * M
        f += head * WIDTH
        state += (slot * groups + group) * 2 * M * PADDED
        mixed += head * 2 * M
        left = load_left(gates, start, length, group, groups, C) if gates is not None else None
        w = stored_weights(mixed, intra, left, start, length, stride, C, M, BM, SKEWED, MATH)
        if STRICT:
            w = earlier(w, C, False)
        if grad_f is not None:
            products = push_stored(
                w, mixed, c + group * WIDTH, state, powers, grad_f + head * WIDTH, left, start, length, stride,
                groups * WIDTH, heads * WIDTH, WIDTH, PADDED, BD, C, M, BM, SKEWED, MATH,
                f if gates is not None else None,
            )  # fmt: skip
            if gates is not None:
                rows = tl.arange(0, C)
                tl.store(gates.read + (start + rows) * heads + head, products, mask=rows < length)
        if grad_f is not None or not STRICT:
            _give(
                w, mixed, f, grads.tokens + head * WIDTH, grads.states + (slot * heads + head) * 2 * M * PADDED, powers,
                left, start, length, stride, heads * WIDTH, WIDTH, PADDED, BD, C, M, BM, SKEWED, MATH,
            )  # fmt: skip
        scores = load_tokens(pulled.scores + head * C, start, length, 0, heads * C, C, C, C)
        units = tables.units + group * C * 2 * M
        _sum_table_gradient(mixed, scores, units, sums, start, length, stride, C, M, BM, SKEWED, MATH)
        if SKEWED:
            ages = (1 + tl.arange(0, C))[:, None].to(tl.float32)
            for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=1):
                z_re, z_im = collect(
                    scores, f, state, intra, left, start, length, heads * WIDTH, m, WIDTH, PADDED, BD, BM, C, M, SKEWED,
                    MATH,
                )  # fmt: skip
                e_re, e_im = load_readers(mixed, powers, start, length, stride, m, C, M, BM, SKEWED, MATH)
                z_re, z_im = times_conj(e_re.to(tl.float32), e_im.to(tl.float32), z_re, z_im)
                _store_sums(sums + m, tl.sum(ages * z_re, 0), tl.sum(ages * z_im, 0), M)
    else:
        zero = tl.zeros([M], tl.float32)
        _store_sums(sums + 2 * M, zero, zero, M)
        _store_sums(sums + 4 * M, zero, zero, M)
        if SKEWED:
            _store_sums(sums, zero, zero, M)


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def push_both(
    tokens, pulled, mixed, grad_query, grads, chunk_sums, states, tables, documents, count, per_row, row_length, heads,
    groups, WIDTHS: tl.constexpr, SIZES: tl.constexpr, SKEWED: tl.constexpr, PACKED: tl.constexpr, MATH: tl.constexpr,
    gates=None, STRICT: tl.constexpr = False,
):  # fmt: skip
    """What a chunk contributes to the gradients of its keys and values and of the states before it, and the gradient of
    its queries; grid [chunks, heads, 2].

    Keys are pushed with the query and what side 1 has mixed, values with the gradient of the output and side 0. pulled:
    a pair of `Pulled`; grads: of `ChunkGradients`; states: `ChunkStates`; chunk_sums: see `Partial.chunks`. STRICT:
    what was pulled is of earlier tokens only, and values get nothing here (`ops/interdomain/triton_delta.py`).
    """
    M: tl.constexpr = SIZES.M
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    group = head // (heads // groups)
    if tl.load(tables.skewed + group) != SKEWED:
        return
    start, length, slot = locate(chunk, documents, count, per_row, row_length, SIZES.C, PACKED)
    sums = chunk_sums + (tl.cast(chunk, tl.int64) * heads + head) * 12 * M
    if tl.program_id(2) == 0:
        _push_side(
            tokens.b, tokens.a, pulled[0], mixed[1], grad_query, grads[0], sums + 6 * M, states.b, tables, gates, start,
            length, slot, head, heads, group, groups, WIDTHS.A, WIDTHS.A_PADDED, SIZES.BR, SIZES, SKEWED, STRICT, MATH,
        )  # fmt: skip
    else:
        _push_side(
            tokens.c, tokens.f, pulled[1], mixed[0], None, grads[1], sums, states.c, tables, gates, start,
            length, slot, head, heads, group, groups, WIDTHS.C, WIDTHS.C_PADDED, SIZES.BD, SIZES, SKEWED, STRICT, MATH,
        )  # fmt: skip
