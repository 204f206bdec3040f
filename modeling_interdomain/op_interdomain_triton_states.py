"""The states around the chunks, forward and backward: what carries information from one chunk to the next.

One program owns a slice of the state of one segment and group, and walks its chunks with that slice on the
chip, so that a chunk costs one read of its tokens and one write of its state. Tokens of a partial chunk are shifted to
the end of the tile, where their distances to the end of the chunk are those of a full one.

A row (or document) is one segment where rows and groups are enough to fill the device. Otherwise it is cut into
several: a first pass finds what each leaves at its end on its own, `op_interdomain_triton_carry` joins them, and the
pass proper starts from there.
"""

from .op_interdomain_triton_tiles import dot, load_pair, narrow, times, times_conj

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


@triton.jit
def _segment(
    segment, cu_seqlens, first_chunks, per_row, row_length,
    C: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """First token, number of tokens and first chunk of one of the SEGMENTS of a row or document; some may be empty."""
    row = segment // SEGMENTS
    if PACKED:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - start).to(tl.int32)
        chunk = tl.load(first_chunks + row).to(tl.int64)
    else:
        start = row.to(tl.int64) * row_length
        length = row_length
        chunk = row.to(tl.int64) * per_row
    chunks = tl.cdiv(length, C)
    each = tl.cdiv(chunks, SEGMENTS)
    skipped = tl.minimum((segment % SEGMENTS) * each, chunks)
    length = tl.minimum(length - skipped * C, each * C)
    return start + skipped * C, tl.maximum(length, 0), chunk + skipped


@triton.jit(do_not_specialize=["per_row", "row_length"])
def scan(
    x, table, powers, initial, states, final, cu_seqlens, first_chunks,
    per_row, row_length, groups, width, padded_width, modes_used, state_width, offset,
    C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
    HAS_INITIAL: tl.constexpr, STORE: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr,
    EXACT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`S <- lambda^C S + sum_i lambda^(C-1-i) beta x_i`; grid [segments, groups, slices].

    x: `[tokens, groups, width]`; initial, final: `[segments, groups, 2, modes_used, state_width]`, of which this call
    has the columns from `offset`; states before each chunk, if STORE: `[chunks, groups, 2, M, padded_width]`. EXACT:
    the table is rounded to two numbers of DTYPE instead of one, so that the state keeps the accuracy of float32 when x
    is exact in DTYPE.
    """
    segment = tl.program_id(0)
    group = tl.program_id(1)
    m = (tl.program_id(2) % (M // BM)) * BM
    first = (tl.program_id(2) // (M // BM)) * BW
    start, length, chunk = _segment(segment, cu_seqlens, first_chunks, per_row, row_length, C, SEGMENTS, PACKED)
    modes = m + tl.arange(0, BM)
    columns = first + tl.arange(0, BW)
    tokens = tl.arange(0, C)
    table += group * C * 2 * M
    powers += group * C * 2 * M
    x += group * width
    t_re, t_im = load_pair(table, C - 1 - tokens, modes, 2 * M, M)
    t_re = tl.trans(t_re)
    t_im = tl.trans(t_im)
    rest_re = t_re - narrow(t_re, DTYPE, PRECISION).to(tl.float32)
    rest_im = t_im - narrow(t_im, DTYPE, PRECISION).to(tl.float32)

    at = (segment.to(tl.int64) * groups + group) * 2 * modes_used * state_width
    at = at + modes[:, None] * state_width + (offset + columns)[None, :]
    plane = modes_used * state_width
    used = (modes < modes_used)[:, None] & (columns < width)[None, :]
    if HAS_INITIAL:
        s_re = tl.load(initial + at, mask=used, other=0.0)
        s_im = tl.load(initial + plane + at, mask=used, other=0.0)
    else:
        s_re = tl.zeros([BM, BW], tl.float32)
        s_im = tl.zeros([BM, BW], tl.float32)
    if STORE:
        states += (chunk * groups + group) * 2 * M * padded_width + modes[:, None] * padded_width + columns[None, :]
    for done in range(0, length, C):
        if STORE:
            tl.store(states, narrow(s_re, states.dtype.element_ty, PRECISION))
            tl.store(states + M * padded_width, narrow(s_im, states.dtype.element_ty, PRECISION))
            states += groups * 2 * M * padded_width
        count = tl.minimum(length - done, C)
        inside = tokens - (C - count)
        address = (start + done + inside)[:, None] * (groups * width) + columns[None, :]
        x_tile = tl.load(x + address, mask=(inside >= 0)[:, None] & (columns < width)[None, :], other=0.0)
        d_re = tl.load(powers + (count - 1) * 2 * M + modes)[:, None]
        d_im = tl.load(powers + (count - 1) * 2 * M + M + modes)[:, None]
        s_re, s_im = times(d_re, d_im, s_re, s_im)
        s_re = dot(t_re, x_tile, s_re, DTYPE, PRECISION)
        s_im = dot(t_im, x_tile, s_im, DTYPE, PRECISION)
        if EXACT:
            s_re = dot(rest_re, x_tile, s_re, DTYPE, PRECISION)
            s_im = dot(rest_im, x_tile, s_im, DTYPE, PRECISION)
    tl.store(final + at, s_re, mask=used)
    tl.store(final + plane + at, s_im, mask=used)


@triton.jit(do_not_specialize=["per_row", "row_length"])
def scan_backward(
    x, table, powers, states, grad_final, grad_states, grad_direct,
    grad_x, grad_initial, grad_table, grad_log_decay, cu_seqlens, first_chunks,
    per_row, row_length, heads, groups, width, padded_width, modes_used, state_width, offset,
    C: tl.constexpr, M: tl.constexpr, BW: tl.constexpr,
    HAS_FINAL: tl.constexpr, EMIT: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The adjoint of `scan`, from the last chunk to the first; grid [segments, groups, column blocks].

    grad_states `[chunks, heads, 2, M, padded_width]` and grad_direct `[tokens, heads, width]`: what `attend_backward`
    found within the chunks, summed here over the heads of the group. Written: grad_x `[tokens, groups, width]`;
    grad_initial like `initial` of `scan`; and for each program `[segments, groups, blocks]` the gradients of the table
    `[C, 2, M]` and of log(lambda) through the decay from chunk to chunk `[2, M]`. Without EMIT, grad_initial alone.
    """
    segment = tl.program_id(0)
    group = tl.program_id(1)
    block = tl.program_id(2)
    program = (segment.to(tl.int64) * groups + group) * tl.num_programs(2) + block
    start, length, chunk = _segment(segment, cu_seqlens, first_chunks, per_row, row_length, C, SEGMENTS, PACKED)
    modes = tl.arange(0, M)
    columns = block * BW + tl.arange(0, BW)
    tokens = tl.arange(0, C)
    table += group * C * 2 * M
    powers += group * C * 2 * M
    t_re, t_im = load_pair(table, C - 1 - tokens, modes, 2 * M, M)
    t_re = narrow(t_re, DTYPE, PRECISION)
    t_im = narrow(t_im, DTYPE, PRECISION)

    at = (segment.to(tl.int64) * groups + group) * 2 * modes_used * state_width
    at = at + modes[:, None] * state_width + (offset + columns)[None, :]
    plane = modes_used * state_width
    used = (modes < modes_used)[:, None] & (columns < width)[None, :]
    if HAS_FINAL:
        g_re = tl.load(grad_final + at, mask=used, other=0.0)
        g_im = tl.load(grad_final + plane + at, mask=used, other=0.0)
    else:
        g_re = tl.zeros([M, BW], tl.float32)
        g_im = tl.zeros([M, BW], tl.float32)
    dt_re = tl.zeros([C, M], tl.float32)
    dt_im = tl.zeros([C, M], tl.float32)
    dl_re = tl.zeros([M], tl.float32)
    dl_im = tl.zeros([M], tl.float32)
    chunks = tl.cdiv(length, C)
    per_group = heads // groups
    tile = modes[:, None] * padded_width + columns[None, :]
    for back in range(0, chunks):
        c = chunks - 1 - back
        count = tl.minimum(length - c * C, C)
        inside = tokens - (C - count)
        place = start + c * C + inside
        valid = (inside >= 0)[:, None] & (columns < width)[None, :]
        d_re = tl.load(powers + (count - 1) * 2 * M + modes)
        d_im = tl.load(powers + (count - 1) * 2 * M + M + modes)
        if EMIT:
            address = place[:, None] * (groups * width) + group * width + columns[None, :]
            x_tile = tl.load(x + address, mask=valid, other=0.0)
            dx = dot(t_re, g_re, tl.zeros([C, BW], tl.float32), DTYPE, PRECISION)
            dx = dot(t_im, g_im, dx, DTYPE, PRECISION)
            dt_re = dot(x_tile, tl.trans(g_re), dt_re, DTYPE, PRECISION)
            dt_im = dot(x_tile, tl.trans(g_im), dt_im, DTYPE, PRECISION)
            before = states + ((chunk + c) * groups + group) * 2 * M * padded_width + tile
            s_re = tl.load(before).to(tl.float32)
            s_im = tl.load(before + M * padded_width).to(tl.float32)
            step_re, step_im = times_conj(g_re, g_im, s_re, s_im)
            step_re, step_im = times_conj(tl.sum(step_re, 1), tl.sum(step_im, 1), d_re, d_im)
            dl_re += count * step_re
            dl_im += count * step_im
            for head in range(group * per_group, (group + 1) * per_group):
                direct = place[:, None] * (heads * width) + head * width + columns[None, :]
                dx += tl.load(grad_direct + direct, mask=valid, other=0.0).to(tl.float32)
            tl.store(grad_x + address, narrow(dx, grad_x.dtype.element_ty, PRECISION), mask=valid)
        g_re, g_im = times_conj(g_re, g_im, d_re[:, None], d_im[:, None])
        for head in range(group * per_group, (group + 1) * per_group):
            local = grad_states + ((chunk + c) * heads + head) * 2 * M * padded_width + tile
            g_re += tl.load(local).to(tl.float32)
            g_im += tl.load(local + M * padded_width).to(tl.float32)
    tl.store(grad_initial + at, g_re, mask=used)
    tl.store(grad_initial + plane + at, g_im, mask=used)
    if EMIT:
        at_table = program * C * 2 * M + (C - 1 - tokens)[:, None] * 2 * M + modes[None, :]
        tl.store(grad_table + at_table, dt_re)
        tl.store(grad_table + M + at_table, dt_im)
        tl.store(grad_log_decay + program * 2 * M + modes, dl_re)
        tl.store(grad_log_decay + program * 2 * M + M + modes, dl_im)
