"""The chunks of the fused backend: outputs, and what a chunk contributes to every gradient.

One program works on one chunk of one head (gradients of tables: on many chunks, one after the other). What it reads is
the tokens, the states before the chunk and tables that stay in the second-level cache; nothing M-wide is written but
the gradient of the states. Each kernel is launched for both kinds of groups (`op_interdomain_triton_tiles`) and leaves
the others alone.
"""

from .op_interdomain_triton_tiles import (
    collect,
    dot,
    load_pair,
    load_tokens,
    locate,
    narrow,
    near_scores,
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


@triton.jit(do_not_specialize=["documents", "per_row", "row_length"])
def attend(
    a, b, c, out, read_states, written_states, table, powers, mixing, exact, cu_seqlens, first_chunks,
    documents, per_row, row_length, heads, groups,
    A_WIDTH: tl.constexpr, C_WIDTH: tl.constexpr, A_PADDED: tl.constexpr, C_PADDED: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    FULL: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`out = push(mix(pull(a; b)); c)` for one chunk and head; grid [chunks, heads].

    a: `[tokens, heads, A_WIDTH]`; b: `[tokens, groups, A_WIDTH]`; c: `[tokens, groups, C_WIDTH]`; out as c, but by
    heads; states before each chunk `[chunks, groups, 2, M, A_PADDED or C_PADDED]`; table, powers `[groups, C, 2, M]`;
    exact `[groups]`.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    group = head // (heads // groups)
    if tl.load(exact + group) != EXACT:
        return
    start, length = locate(chunk, cu_seqlens, first_chunks, documents, per_row, row_length, C, PACKED)
    if length > 0:
        table += group * C * 2 * M
        powers += group * C * 2 * M
        mixing += group * 4 * M * (M if FULL else 1)
        at = (chunk.to(tl.int64) * groups + group) * 2 * M
        written = written_states + at * C_PADDED
        p_re, p_im = pull_and_mix(
            a + head * A_WIDTH, b + group * A_WIDTH, read_states + at * A_PADDED, table, powers, mixing,
            start, length, heads * A_WIDTH, groups * A_WIDTH, A_WIDTH, A_PADDED,
            C, M, BM, BR, FULL, EXACT, DTYPE, PRECISION,
        )  # fmt: skip
        e_re, e_im, _, _, w = readers(p_re, p_im, powers, table, C, M, EXACT, DTYPE, PRECISION)
        for d in tl.static_range(0, C_PADDED, BD):
            c_tile = load_tokens(c + group * C_WIDTH, start, length, d, groups * C_WIDTH, C_WIDTH, C, BD)
            s_re, s_im = load_pair(written, tl.arange(0, M), d + tl.arange(0, BD), C_PADDED, M * C_PADDED)
            tile = dot(w, c_tile, tl.zeros([C, BD], tl.float32), DTYPE, PRECISION)
            tile = dot(e_re, s_re, tile, DTYPE, PRECISION)
            tile = dot(e_im, s_im, tile, DTYPE, PRECISION)
            store_tokens(out + head * C_WIDTH, tile, start, length, d, heads * C_WIDTH, C_WIDTH, C, BD, PRECISION)


@triton.jit(do_not_specialize=["documents", "per_row", "row_length", "chunks"])
def attend_backward(
    a, b, c, f, out, grad_c, grad_states, grad_table, grad_log_decay,
    read_states, written_states, table, powers, mixing, exact, cu_seqlens, first_chunks,
    documents, per_row, row_length, heads, groups, chunks,
    A_WIDTH: tl.constexpr, C_WIDTH: tl.constexpr, A_PADDED: tl.constexpr, C_PADDED: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
    FULL: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients around `p = mix(pull(a; b))` when f `[tokens, heads, C_WIDTH]` is what `push(p; c)` was read with.

    With (a, b, c, f) = (query, key, value, grad of output), p reads the values and the gradients are those of value;
    with (grad of output, value, key, query) and the transposed mixing they are those of key, and `push(p; c)` (ROWS) is
    the gradient of the query. Grid [lanes, heads]; lane l works on chunks l, l + lanes, ... and sums over them the
    gradient of the table, grad_table `[lanes, heads, C, 2, M]`. For each head, without what comes through later chunks:
    grad_c `[tokens, heads, C_WIDTH]`, grad_states `[chunks, heads, 2, M, C_PADDED]`, and grad_log_decay `[chunks,
    heads, 2, M]`, the gradient of log(lambda) through the powers.
    """
    lane = tl.program_id(0)
    head = tl.program_id(1)
    group = head // (heads // groups)
    if tl.load(exact + group) != EXACT:
        return
    table += group * C * 2 * M
    powers += group * C * 2 * M
    mixing += group * 4 * M * (M if FULL else 1)
    f += head * C_WIDTH
    modes = tl.arange(0, M)
    ages = (1 + tl.arange(0, C))[:, None].to(tl.float32)
    dt_re = tl.zeros([C, M], tl.float32)
    dt_im = tl.zeros([C, M], tl.float32)
    for chunk in range(lane, chunks, tl.num_programs(0)):
        start, length = locate(chunk, cu_seqlens, first_chunks, documents, per_row, row_length, C, PACKED)
        if length > 0:
            at = (tl.cast(chunk, tl.int64) * groups + group) * 2 * M
            at_head = (tl.cast(chunk, tl.int64) * heads + head) * 2 * M
            written = written_states + at * C_PADDED
            p_re, p_im = pull_and_mix(
                a + head * A_WIDTH, b + group * A_WIDTH, read_states + at * A_PADDED, table, powers, mixing,
                start, length, heads * A_WIDTH, groups * A_WIDTH, A_WIDTH, A_PADDED,
                C, M, BM, BR, FULL, EXACT, DTYPE, PRECISION,
            )  # fmt: skip
            e_re, e_im, x_re, x_im, w = readers(p_re, p_im, powers, table, C, M, EXACT, DTYPE, PRECISION)
            for d in tl.static_range(0, C_PADDED, BD):
                columns = d + tl.arange(0, BD)
                f_tile = load_tokens(f, start, length, d, heads * C_WIDTH, C_WIDTH, C, BD)
                if ROWS:
                    c_tile = load_tokens(c + group * C_WIDTH, start, length, d, groups * C_WIDTH, C_WIDTH, C, BD)
                    s_re, s_im = load_pair(written, modes, columns, C_PADDED, M * C_PADDED)
                    tile = dot(w, c_tile, tl.zeros([C, BD], tl.float32), DTYPE, PRECISION)
                    tile = dot(e_re, s_re, tile, DTYPE, PRECISION)
                    tile = dot(e_im, s_im, tile, DTYPE, PRECISION)
                    store_tokens(
                        out + head * C_WIDTH, tile, start, length, d, heads * C_WIDTH, C_WIDTH, C, BD, PRECISION
                    )
                tile = dot(tl.trans(w), f_tile, tl.zeros([C, BD], tl.float32), DTYPE, PRECISION)
                store_tokens(
                    grad_c + head * C_WIDTH, tile, start, length, d, heads * C_WIDTH, C_WIDTH, C, BD, PRECISION
                )
                states = grad_states + at_head * C_PADDED + modes[:, None] * C_PADDED + columns[None, :]
                tile = dot(tl.trans(e_re), f_tile, tl.zeros([M, BD], tl.float32), DTYPE, PRECISION)
                tl.store(states, narrow(tile, states.dtype.element_ty, PRECISION))
                tile = dot(tl.trans(e_im), f_tile, tl.zeros([M, BD], tl.float32), DTYPE, PRECISION)
                tl.store(states + M * C_PADDED, narrow(tile, states.dtype.element_ty, PRECISION))
            near = near_scores(
                f, c + group * C_WIDTH, start, length, heads * C_WIDTH, groups * C_WIDTH, C_WIDTH, C_PADDED,
                C, BD, EXACT, DTYPE, PRECISION,
            )  # fmt: skip
            dt_re = dot(tl.trans(near), x_re, dt_re, DTYPE, PRECISION)
            dt_im = dot(tl.trans(near), x_im, dt_im, DTYPE, PRECISION)
            z_re, z_im = collect(
                near, f, written, table, start, length, heads * C_WIDTH, 0, C_WIDTH, C_PADDED,
                C, M, M, BD, EXACT, DTYPE, PRECISION,
            )  # fmt: skip
            z_re, z_im = times_conj(e_re.to(tl.float32), e_im.to(tl.float32), z_re, z_im)
            tl.store(grad_log_decay + at_head + modes, tl.sum(ages * z_re, 0))
            tl.store(grad_log_decay + at_head + M + modes, tl.sum(ages * z_im, 0))
    grad_table += (lane * heads + head) * C * 2 * M + tl.arange(0, C)[:, None] * 2 * M + modes[None, :]
    tl.store(grad_table, dt_re)
    tl.store(grad_table + M, dt_im)


@triton.jit(do_not_specialize=["documents", "per_row", "row_length", "chunks"])
def mixing_backward(
    query, key, value, grad_output, key_states, value_states, table, powers, grad_mixing, exact,
    cu_seqlens, first_chunks, documents, per_row, row_length, heads, groups, chunks,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    FULL: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`grad of mixing[i, j] = y_i^T x_j`, y pulled from (query; key) and x from (grad of output; value).

    Grid [lanes, heads, blocks]: a block is BM x BN modes, or BM = BN of the diagonal unless FULL. grad_mixing
    `[lanes, heads, 2, 2, M, M]` or `[lanes, heads, 2, 2, M]`.
    """
    lane = tl.program_id(0)
    head = tl.program_id(1)
    block = tl.program_id(2)
    group = head // (heads // groups)
    if tl.load(exact + group) != EXACT:
        return
    m = (block // (M // BN)) * BM if FULL else block * BM
    n = (block % (M // BN)) * BN if FULL else m
    table += group * C * 2 * M
    powers += group * C * 2 * M
    query += head * KEY_WIDTH
    grad_output += head * VALUE_WIDTH
    SHAPE: tl.constexpr = [BM, BN] if FULL else [BM]
    w_00 = tl.zeros(SHAPE, tl.float32)
    w_01 = tl.zeros(SHAPE, tl.float32)
    w_10 = tl.zeros(SHAPE, tl.float32)
    w_11 = tl.zeros(SHAPE, tl.float32)
    for chunk in range(lane, chunks, tl.num_programs(0)):
        start, length = locate(chunk, cu_seqlens, first_chunks, documents, per_row, row_length, C, PACKED)
        if length > 0:
            at = (tl.cast(chunk, tl.int64) * groups + group) * 2 * M
            near = near_scores(
                query, key + group * KEY_WIDTH, start, length, heads * KEY_WIDTH, groups * KEY_WIDTH,
                KEY_WIDTH, KEY_PADDED, C, BR, EXACT, DTYPE, PRECISION,
            )  # fmt: skip
            y_re, y_im = pull(
                near, query, key_states + at * KEY_PADDED, table, powers, start, length, heads * KEY_WIDTH,
                m, KEY_WIDTH, KEY_PADDED, C, M, BM, BR, EXACT, DTYPE, PRECISION,
            )  # fmt: skip
            if FULL:
                y_re = tl.trans(narrow(y_re, DTYPE, PRECISION))
                y_im = tl.trans(narrow(y_im, DTYPE, PRECISION))
            near = near_scores(
                grad_output, value + group * VALUE_WIDTH, start, length, heads * VALUE_WIDTH, groups * VALUE_WIDTH,
                VALUE_WIDTH, VALUE_PADDED, C, BD, EXACT, DTYPE, PRECISION,
            )  # fmt: skip
            x_re, x_im = pull(
                near, grad_output, value_states + at * VALUE_PADDED, table, powers, start, length, heads * VALUE_WIDTH,
                n, VALUE_WIDTH, VALUE_PADDED, C, M, BN, BD, EXACT, DTYPE, PRECISION,
            )  # fmt: skip
            if FULL:
                w_00 = dot(y_re, x_re, w_00, DTYPE, PRECISION)
                w_01 = dot(y_re, x_im, w_01, DTYPE, PRECISION)
                w_10 = dot(y_im, x_re, w_10, DTYPE, PRECISION)
                w_11 = dot(y_im, x_im, w_11, DTYPE, PRECISION)
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
