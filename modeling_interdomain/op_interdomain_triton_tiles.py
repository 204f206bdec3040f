"""What the fused kernels do with one chunk of C tokens while it is on the chip.

The two passes of the identity are the same two moves, and so are their gradients:

    pull   y_t = sum_{i<=t} (a_t . b_i) lambda^(t-i) beta + lambda^(t+1) (a_t . S_b)       a vector of M modes a token
    push   o_t = sum_{j<=t} Re(conj(p_t) lambda^(t-j) beta) c_j + Re(conj(p_t) lambda^(t+1) S_c)

with S the state before the chunk. Forward is `push(mix(pull(query; key)); value)`; the gradient of the query is
`push(mix^T(pull(grad of output; value)); key)`.

Weights within a chunk come in two ways, chosen for each group by its fastest mode (`op_interdomain_triton_tables`):
- factored: lambda^(t-i) = lambda^(t+1) lambda^(-i-1). One factor belongs to the reader, one to the table, and the
  tokens of the chunk and the state before it are read by the same numbers. The table grows, but for these groups by no
  more than e^60 in a chunk.
- SKEWED: scores are re-indexed from (t, i) to (t, t - i), so that a table of decaying powers serves every row. It holds
  for any decay; moving the scores costs about as much again as the rest.

A complex tile is two real ones; pointers are to the first element of what the names say, rows contiguous.
"""

from typing import Any, NamedTuple

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


class Documents(NamedTuple):
    """Where documents, or the real tokens of padded rows, lie among the flattened tokens; integer tensors.

    All None where every row is full: then addresses are computed. Documents do not overlap and may be empty.

    Attributes:
        starts, ends: `[S]`, tokens.
        first_chunks: `[S + 1]`, how many chunks the documents before have.
        first_slots: `[S]`, where the state before a document is kept. Those before its later chunks are kept by the
            whole chunks of tokens up to there, so that many short documents need no more room than one long one.
    """

    starts: Any = None
    ends: Any = None
    first_chunks: Any = None
    first_slots: Any = None


class Sizes(NamedTuple):
    """What a kernel is compiled for: tokens of a chunk, modes (padded), and how many modes and columns it takes at a
    time: of the tokens that are pulled (BR) and of those that are pushed (BD).
    """

    C: int
    M: int
    BM: int
    BR: int
    BD: int


class Arithmetic(NamedTuple):
    """DTYPE of the operands of matrix products, and PRECISION as `tl.dot` takes it, or "interpreted" for bfloat16
    where the interpreter runs.
    """

    DTYPE: Any
    PRECISION: str


@triton.jit
def skew(scores, C: tl.constexpr):
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
def narrow(x, dtype: tl.constexpr, MATH: tl.constexpr):
    """`x.to(dtype)`, to the nearest in the interpreter too, which would cut bfloat16 off."""
    if MATH.PRECISION == "interpreted" and tl.bfloat16 == dtype:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, acc, MATH: tl.constexpr):
    """A matrix product with operands in MATH.DTYPE, accumulated in float32."""
    a = narrow(a, MATH.DTYPE, MATH)
    b = narrow(b, MATH.DTYPE, MATH)
    if MATH.PRECISION == "interpreted":  # the interpreter would multiply the bit patterns of bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=MATH.PRECISION)


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
    x, tile, start, length, first, stride, width, C: tl.constexpr, BLOCK: tl.constexpr, MATH: tl.constexpr
):
    rows = tl.arange(0, C)
    columns = first + tl.arange(0, BLOCK)
    at = (start + rows)[:, None].to(tl.int64) * stride + columns[None, :]
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    tl.store(x + at, narrow(tile, x.dtype.element_ty, MATH), mask=inside)


@triton.jit
def locate(chunk, documents, count, per_row, row_length, C: tl.constexpr, PACKED: tl.constexpr):
    """The first token of a chunk, how many it has (0 for a chunk that no document uses) and the slot of its state.

    PACKED: there are `count` documents. Otherwise every row has `per_row` chunks of `row_length` tokens.
    """
    if PACKED:
        # Few documents against many chunks: a binary search without a table of all chunks.
        used = chunk < tl.load(documents.first_chunks + count)
        low = 0
        high = tl.where(used, count, 0)
        while low < high:
            middle = (low + high) // 2
            if tl.load(documents.first_chunks + middle + 1) <= chunk:
                low = middle + 1
            else:
                high = middle
        begin = tl.load(documents.starts + low).to(tl.int64)
        inside = (chunk - tl.load(documents.first_chunks + low)).to(tl.int64)
        start = begin + inside * C
        length = tl.where(used, tl.minimum(tl.load(documents.ends + low) - start, C), 0).to(tl.int32)
        slot = tl.where(inside == 0, tl.load(documents.first_slots + low).to(tl.int64), begin // C + inside - 1)
    else:
        inside = (chunk % per_row) * C
        start = (chunk // per_row).to(tl.int64) * row_length + inside
        length = tl.minimum(row_length - inside, C)
        slot = tl.cast(chunk, tl.int64)
    return start, length, slot


@triton.jit
def causal(scores, C: tl.constexpr):
    rows = tl.arange(0, C)
    return tl.where(rows[:, None] >= rows[None, :], scores, tl.zeros_like(scores))


@triton.jit
def intra_scores(
    a, b, start, length, a_stride, b_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    C: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`a_t . b_i` within the chunk by (t, i), SKEWED by (t, t - i), `[C, C]` in MATH.DTYPE.

    a, b: tokens `[., WIDTH]` of a head and of its group.
    """
    scores = tl.zeros([C, C], tl.float32)
    for r in tl.static_range(0, PADDED, BLOCK):
        a_tile = load_tokens(a, start, length, r, a_stride, WIDTH, C, BLOCK)
        b_tile = load_tokens(b, start, length, r, b_stride, WIDTH, C, BLOCK)
        scores = dot(a_tile, tl.trans(b_tile), scores, MATH)
    scores = narrow(scores, MATH.DTYPE, MATH)
    return skew(scores, C) if SKEWED else causal(scores, C)


@triton.jit
def collect(
    scores, a, state, intra, start, length, a_stride, m, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, M: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """What lambda^(t+1) multiplies: `a_t . S`, and unless SKEWED the tokens of the chunk too; two tiles `[C, BM]`."""
    modes = m + tl.arange(0, BM)
    z_re = tl.zeros([C, BM], tl.float32)
    z_im = tl.zeros([C, BM], tl.float32)
    for r in tl.static_range(0, PADDED, BLOCK):
        a_tile = load_tokens(a, start, length, r, a_stride, WIDTH, C, BLOCK)
        s_re, s_im = load_pair(state, modes, r + tl.arange(0, BLOCK), PADDED, M * PADDED)
        z_re = dot(a_tile, tl.trans(s_re), z_re, MATH)
        z_im = dot(a_tile, tl.trans(s_im), z_im, MATH)
    if not SKEWED:
        t_re, t_im = load_pair(intra, tl.arange(0, C), modes, 2 * M, M)
        z_re = dot(scores, t_re, z_re, MATH)
        z_im = dot(scores, t_im, z_im, MATH)
    return z_re, z_im


@triton.jit
def pull(
    scores, a, state, intra, powers, start, length, a_stride, m, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, M: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`y` for the modes m .. m + BM, two tiles `[C, BM]` in float32.

    scores: of `intra_scores`; state: `[2, M, PADDED]`; intra and powers: of the group, see `KernelTables`.
    """
    z_re, z_im = collect(
        scores, a, state, intra, start, length, a_stride, m, WIDTH, PADDED, BLOCK, BM, C, M, SKEWED, MATH
    )
    modes = m + tl.arange(0, BM)
    p_re, p_im = load_pair(powers, tl.arange(0, C), modes, 2 * M, M)
    y_re, y_im = times(p_re, p_im, z_re, z_im)
    if SKEWED:
        t_re, t_im = load_pair(intra, tl.arange(0, C), modes, 2 * M, M)
        y_re = dot(scores, t_re, y_re, MATH)
        y_im = dot(scores, t_im, y_im, MATH)
    return y_re, y_im


@triton.jit
def pull_and_mix(
    a, b, state, intra, powers, mixing, start, length, a_stride, b_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    SIZES: tl.constexpr, FULL: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The pull-back of `op_interdomain_readout`: `p_j = sum_i y_i mixing[i, j]`, two tiles `[C, M]` in float32.

    mixing: `[2, 2, M, M]`, or unless FULL `[2, 2, M]`. A full matrix is applied BM of its rows at a time.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    BM: tl.constexpr = SIZES.BM
    scores = intra_scores(a, b, start, length, a_stride, b_stride, WIDTH, PADDED, SIZES.BR, C, SKEWED, MATH)
    if FULL:
        p_re = tl.zeros([C, M], tl.float32)
        p_im = tl.zeros([C, M], tl.float32)
        for m in tl.static_range(0, M, BM):
            y_re, y_im = pull(
                scores, a, state, intra, powers, start, length, a_stride, m, WIDTH, PADDED,
                SIZES.BR, BM, C, M, SKEWED, MATH,
            )  # fmt: skip
            y_re = narrow(y_re, MATH.DTYPE, MATH)
            y_im = narrow(y_im, MATH.DTYPE, MATH)
            at = (m + tl.arange(0, BM))[:, None] * M + tl.arange(0, M)[None, :]
            p_re = dot(y_re, tl.load(mixing + at), p_re, MATH)
            p_im = dot(y_re, tl.load(mixing + M * M + at), p_im, MATH)
            p_re = dot(y_im, tl.load(mixing + 2 * M * M + at), p_re, MATH)
            p_im = dot(y_im, tl.load(mixing + 3 * M * M + at), p_im, MATH)
    else:
        y_re, y_im = pull(
            scores, a, state, intra, powers, start, length, a_stride, 0, WIDTH, PADDED,
            SIZES.BR, M, C, M, SKEWED, MATH,
        )  # fmt: skip
        modes = tl.arange(0, M)[None, :]
        p_re = y_re * tl.load(mixing + modes) + y_im * tl.load(mixing + 2 * M + modes)
        p_im = y_re * tl.load(mixing + M + modes) + y_im * tl.load(mixing + 3 * M + modes)
    return p_re, p_im


@triton.jit
def weights(x_re, x_im, intra, C: tl.constexpr, M: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr):
    """How a token reads those of its chunk, `w[t, j] = Re(conj(p_t) lambda^(t-j) beta)`, `[C, C]` in MATH.DTYPE.

    x: what `intra` is read by, `[C, M]` in MATH.DTYPE: p where SKEWED, otherwise `p conj(lambda^(t+1))`.
    """
    t_re, t_im = load_pair(intra, tl.arange(0, C), tl.arange(0, M), 2 * M, M)
    w = dot(x_re, tl.trans(t_re), tl.zeros([C, C], tl.float32), MATH)
    w = narrow(dot(x_im, tl.trans(t_im), w, MATH), MATH.DTYPE, MATH)
    return skew(w, C) if SKEWED else causal(w, C)


@triton.jit
def readers(p_re, p_im, powers, intra, C: tl.constexpr, M: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr):
    """How a token reads: the state by `e = p conj(lambda^(t+1))`, `[C, M]`, its chunk by the `weights`; MATH.DTYPE."""
    d_re, d_im = load_pair(powers, tl.arange(0, C), tl.arange(0, M), 2 * M, M)
    e_re, e_im = times_conj(p_re, p_im, d_re, d_im)
    e_re = narrow(e_re, MATH.DTYPE, MATH)
    e_im = narrow(e_im, MATH.DTYPE, MATH)
    if SKEWED:
        w = weights(narrow(p_re, MATH.DTYPE, MATH), narrow(p_im, MATH.DTYPE, MATH), intra, C, M, SKEWED, MATH)
    else:
        w = weights(e_re, e_im, intra, C, M, SKEWED, MATH)
    return e_re, e_im, w
