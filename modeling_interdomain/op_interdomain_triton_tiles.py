"""What the fused kernels do with one chunk of C tokens while it is on the chip.

The two passes of the identity are the same two moves, and so are their gradients:

    pull   y_t = sum_{i<=t} (a_t . b_i) lambda^(t-i) beta + lambda^(t+1) (a_t . S_b)       a vector of M modes a token
    push   o_t = sum_{j<=t} Re(conj(p_t) lambda^(t-j) beta) c_j + Re(conj(p_t) lambda^(t+1) S_c)

with S the state before the chunk. Forward is `push(mix(pull(query; key)); value)`; the gradient of the query is
`push(mix^T(pull(grad of output; value)); key)`.

Weights within a chunk come in two ways, chosen for each group by its fastest mode (`op_interdomain_triton_tables`):
- anchored: lambda^(t-i) = lambda^(t+1) lambda^(-i-1). One factor belongs to the reader, one to the table, and near
tokens
  and the state are read by the same numbers. The table grows, but for these groups by no more than e^60 in a chunk.
- EXACT: scores are re-indexed from (t, i) to (t, t - i), so that a table of decaying powers serves every row. It holds
for
  any decay; moving the scores costs about as much again as the rest.

A complex tile is two real ones; pointers are to the first element of what the names say, rows contiguous.
"""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


@triton.jit
def by_distance(scores, C: tl.constexpr):
    """`out[t, d] = scores[t, t - d]`, zero for d > t. It is its own inverse, and its own adjoint."""
    rows = tl.arange(0, C)
    distance = rows[:, None] - rows[None, :]
    moved = tl.gather(scores, tl.maximum(distance, 0), 1)
    return tl.where(distance >= 0, moved, tl.zeros_like(moved))


@triton.jit
def times(a_re, a_im, b_re, b_im):
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def times_conj(a_re, a_im, b_re, b_im):
    """`a conj(b)`."""
    return a_re * b_re + a_im * b_im, a_im * b_re - a_re * b_im


@triton.jit
def narrow(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """`x.to(DTYPE)`, to the nearest in the interpreter too, which would cut bfloat16 off."""
    if PRECISION == "interpreted" and tl.bfloat16 == DTYPE:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A matrix product with operands in DTYPE, accumulated in float32."""
    a = narrow(a, DTYPE, PRECISION)
    b = narrow(b, DTYPE, PRECISION)
    if PRECISION == "interpreted":  # the interpreter would multiply the bit patterns of bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_pair(x, rows, columns, row_stride, plane):
    """Two tiles `[rows, columns]`, the imaginary one `plane` elements after the real one."""
    at = rows[:, None] * row_stride + columns[None, :]
    return tl.load(x + at), tl.load(x + plane + at)


@triton.jit
def load_tokens(x, start, length, first, stride, width, C: tl.constexpr, BLOCK: tl.constexpr):
    """`[C, BLOCK]`: tokens from `start`, columns from `first`; zero past the chunk's length or the head's width."""
    rows = tl.arange(0, C)
    columns = first + tl.arange(0, BLOCK)
    at = (start + rows)[:, None].to(tl.int64) * stride + columns[None, :]
    return tl.load(x + at, mask=(rows < length)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def store_tokens(
    x, tile, start, length, first, stride, width, C: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr
):
    rows = tl.arange(0, C)
    columns = first + tl.arange(0, BLOCK)
    at = (start + rows)[:, None].to(tl.int64) * stride + columns[None, :]
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    tl.store(x + at, narrow(tile, x.dtype.element_ty, PRECISION), mask=inside)


@triton.jit
def locate(chunk, cu_seqlens, first_chunks, documents, per_row, row_length, C: tl.constexpr, PACKED: tl.constexpr):
    """The first token of a chunk and how many it has; 0 for a chunk that no document uses.

    Packed: `first_chunks` `[documents + 1]` counts the chunks of the documents before. Otherwise every row has
    `per_row`.
    """
    if PACKED:
        # Few documents against many chunks: a binary search without a table of all chunks.
        low = 0
        high = documents
        while low < high:
            middle = (low + high) // 2
            if tl.load(first_chunks + middle + 1) <= chunk:
                low = middle + 1
            else:
                high = middle
        used = low < documents
        document = tl.minimum(low, documents - 1)
        start = tl.load(cu_seqlens + document).to(tl.int64)
        end = tl.load(cu_seqlens + document + 1).to(tl.int64)
        start += (chunk - tl.load(first_chunks + document)).to(tl.int64) * C
        length = tl.where(used, tl.minimum(end - start, C), 0).to(tl.int32)
    else:
        inside = (chunk % per_row) * C
        start = (chunk // per_row).to(tl.int64) * row_length + inside
        length = tl.minimum(row_length - inside, C)
    return start, length


@triton.jit
def causal(scores, C: tl.constexpr):
    rows = tl.arange(0, C)
    return tl.where(rows[:, None] >= rows[None, :], scores, tl.zeros_like(scores))


@triton.jit
def near_scores(
    a, b, start, length, a_stride, b_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    C: tl.constexpr, BR: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`a_t . b_i` within the chunk by (t, i), EXACT by (t, t - i), `[C, C]` in DTYPE.

    a, b: tokens `[., WIDTH]` of a head and of its group.
    """
    scores = tl.zeros([C, C], tl.float32)
    for r in tl.static_range(0, PADDED, BR):
        a_tile = load_tokens(a, start, length, r, a_stride, WIDTH, C, BR)
        b_tile = load_tokens(b, start, length, r, b_stride, WIDTH, C, BR)
        scores = dot(a_tile, tl.trans(b_tile), scores, DTYPE, PRECISION)
    scores = narrow(scores, DTYPE, PRECISION)
    return by_distance(scores, C) if EXACT else causal(scores, C)


@triton.jit
def collect(
    near, a, state, table, start, length, a_stride, m, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    EXACT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the powers lambda^(t+1) multiply: `a_t . S`, and unless EXACT the near tokens too; two tiles `[C, BM]`."""
    modes = m + tl.arange(0, BM)
    z_re = tl.zeros([C, BM], tl.float32)
    z_im = tl.zeros([C, BM], tl.float32)
    for r in tl.static_range(0, PADDED, BR):
        a_tile = load_tokens(a, start, length, r, a_stride, WIDTH, C, BR)
        s_re, s_im = load_pair(state, modes, r + tl.arange(0, BR), PADDED, M * PADDED)
        z_re = dot(a_tile, tl.trans(s_re), z_re, DTYPE, PRECISION)
        z_im = dot(a_tile, tl.trans(s_im), z_im, DTYPE, PRECISION)
    if not EXACT:
        t_re, t_im = load_pair(table, tl.arange(0, C), modes, 2 * M, M)
        z_re = dot(near, t_re, z_re, DTYPE, PRECISION)
        z_im = dot(near, t_im, z_im, DTYPE, PRECISION)
    return z_re, z_im


@triton.jit
def pull(
    near, a, state, table, powers, start, length, a_stride, m, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    EXACT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`y` for the modes m .. m + BM, two tiles `[C, BM]` in float32.

    near: of `near_scores`; state: `[2, M, PADDED]`; table: `[C, 2, M]`, lambda^(-i-1) beta, EXACT lambda^d beta;
    powers: `[C, 2, M]`, lambda^(t+1).
    """
    z_re, z_im = collect(
        near, a, state, table, start, length, a_stride, m, WIDTH, PADDED, C, M, BM, BR, EXACT, DTYPE, PRECISION
    )
    modes = m + tl.arange(0, BM)
    p_re, p_im = load_pair(powers, tl.arange(0, C), modes, 2 * M, M)
    y_re, y_im = times(p_re, p_im, z_re, z_im)
    if EXACT:
        t_re, t_im = load_pair(table, tl.arange(0, C), modes, 2 * M, M)
        y_re = dot(near, t_re, y_re, DTYPE, PRECISION)
        y_im = dot(near, t_im, y_im, DTYPE, PRECISION)
    return y_re, y_im


@triton.jit
def pull_and_mix(
    a, b, state, table, powers, mixing, start, length, a_stride, b_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    FULL: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The pull-back of `op_interdomain_readout`: `p_j = sum_i y_i mixing[i, j]`, two tiles `[C, M]` in float32.

    mixing: `[2, 2, M, M]`, or unless FULL `[2, 2, M]`. A full matrix is applied BM of its rows at a time.
    """
    near = near_scores(a, b, start, length, a_stride, b_stride, WIDTH, PADDED, C, BR, EXACT, DTYPE, PRECISION)
    if FULL:
        p_re = tl.zeros([C, M], tl.float32)
        p_im = tl.zeros([C, M], tl.float32)
        for m in tl.static_range(0, M, BM):
            y_re, y_im = pull(
                near, a, state, table, powers, start, length, a_stride, m, WIDTH, PADDED,
                C, M, BM, BR, EXACT, DTYPE, PRECISION,
            )  # fmt: skip
            y_re = narrow(y_re, DTYPE, PRECISION)
            y_im = narrow(y_im, DTYPE, PRECISION)
            at = (m + tl.arange(0, BM))[:, None] * M + tl.arange(0, M)[None, :]
            p_re = dot(y_re, tl.load(mixing + at), p_re, DTYPE, PRECISION)
            p_im = dot(y_re, tl.load(mixing + M * M + at), p_im, DTYPE, PRECISION)
            p_re = dot(y_im, tl.load(mixing + 2 * M * M + at), p_re, DTYPE, PRECISION)
            p_im = dot(y_im, tl.load(mixing + 3 * M * M + at), p_im, DTYPE, PRECISION)
    else:
        y_re, y_im = pull(
            near, a, state, table, powers, start, length, a_stride, 0, WIDTH, PADDED,
            C, M, M, BR, EXACT, DTYPE, PRECISION,
        )  # fmt: skip
        modes = tl.arange(0, M)[None, :]
        p_re = y_re * tl.load(mixing + modes) + y_im * tl.load(mixing + 2 * M + modes)
        p_im = y_re * tl.load(mixing + M + modes) + y_im * tl.load(mixing + 3 * M + modes)
    return p_re, p_im


@triton.jit
def readers(
    p_re, p_im, powers, table, C: tl.constexpr, M: tl.constexpr,
    EXACT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """How a token reads: the state by `e = p conj(lambda^(t+1))`, the tokens of its chunk by
    `w[t, j] = Re(conj(p_t) lambda^(t-j) beta)`; and x, by which the table is read. e, x: two `[C, M]`, w `[C, C]`, in
    DTYPE.
    """
    rows = tl.arange(0, C)
    modes = tl.arange(0, M)
    d_re, d_im = load_pair(powers, rows, modes, 2 * M, M)
    e_re, e_im = times_conj(p_re, p_im, d_re, d_im)
    e_re = narrow(e_re, DTYPE, PRECISION)
    e_im = narrow(e_im, DTYPE, PRECISION)
    x_re = narrow(p_re, DTYPE, PRECISION) if EXACT else e_re
    x_im = narrow(p_im, DTYPE, PRECISION) if EXACT else e_im
    t_re, t_im = load_pair(table, rows, modes, 2 * M, M)
    w = dot(x_re, tl.trans(t_re), tl.zeros([C, C], tl.float32), DTYPE, PRECISION)
    w = narrow(dot(x_im, tl.trans(t_im), w, DTYPE, PRECISION), DTYPE, PRECISION)
    w = by_distance(w, C) if EXACT else causal(w, C)
    return e_re, e_im, x_re, x_im, w
