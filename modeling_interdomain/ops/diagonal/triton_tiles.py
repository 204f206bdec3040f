"""What the fused kernels do with one chunk of C tokens while it is on the chip.

The two passes of the identity are the same two moves, and so are their gradients:

    pull   y_t = sum_{i<=t} (a_t . b_i) lambda^(t-i) beta + lambda^(t+1) (a_t . S_b)       a vector of M modes a token
    push   o_t = sum_{j<=t} Re(conj(p_t) lambda^(t-j) beta) c_j + Re(conj(p_t) lambda^(t+1) S_c)

with S the state before the chunk. Forward is `push(mix(pull(query; key)); value)`; the gradient of the query is
`push(mix^T(pull(grad of output; value)); key)`.

Weights within a chunk come in two ways, chosen for each group by its fastest mode (`ops/diagonal/triton_tables.py`):
- factored: lambda^(t-i) = lambda^(t+1) lambda^(-i-1). One factor belongs to the reader, one to the table, and the
  tokens of the chunk and the state before it are read by the same numbers. The table grows, but for these groups by no
  more than e^60 in a chunk.
- SKEWED: scores are re-indexed from (t, i) to (t, t - i), so that a table of decaying powers serves every row. It holds
  for any decay; moving the scores costs about as much again as the rest.

Gates of time multiply what token t takes from token i by exp(c_t - c_i), c their running sum, and what it takes from
the state by exp(c_t); gates of the write multiply what is taken from token i. `left` is c as two numbers of float32
each, `[C]`, and the gates of the write if there are any; None where there are no gates.

A complex tile is two real ones; pointers are to the first element of what the names say, rows contiguous.
"""

from typing import NamedTuple

from ..common.launch import tl, triton
from ..common.tiles import as_operand, causal, dot, left_over, load_tokens, store_tokens


class Sizes(NamedTuple):
    """What a kernel is compiled for: tokens of a chunk, modes (padded), and how many modes and columns it takes at a
    time: of the tokens that are pulled (BR) and of those that are pushed (BD). FEW: there are so few modes that they
    may come one after the other in the program, not in a loop, for which there must be registers.
    """

    C: int
    M: int
    BM: int
    BR: int
    BD: int
    FEW: bool


class Mixing(NamedTuple):
    """How the mixing matrix is written down.

    FULL: whether it mixes modes, not only the two parts of each. SIGN: 1 where it multiplies y by a complex matrix
    A + iB, -1 where it multiplies the conjugate of y; there are then 3 PLANES, A - B, SIGN (A + B) and B. Otherwise
    SIGN is 0, and there are 4, the blocks of a real matrix: `[M, M]`, or unless FULL their diagonals `[M]`. TERMS: 2
    where bfloat16 holds a full matrix: what its rounding takes away follows as planes of their own.
    """

    FULL: bool
    SIGN: int
    PLANES: int
    TERMS: int


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
def load_pair(x, rows, columns, row_stride, plane):
    """Two tiles `[rows, columns]`, the imaginary one `plane` elements after the real one."""
    at = rows[:, None] * row_stride + columns[None, :]
    return tl.load(x + at), tl.load(x + plane + at)


@triton.jit
def times_conj_powers(x_re, x_im, powers, m, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr):
    """`x conj(lambda^(t+1))` for the modes m .. m + BM."""
    d_re, d_im = load_pair(powers, tl.arange(0, C), m + tl.arange(0, BM), 2 * M, M)
    return times_conj(x_re, x_im, d_re, d_im)


@triton.jit
def load_left(gates, start, length, group, groups, C: tl.constexpr):
    """`left` of the tokens of a chunk; gates: `GateSums` of ops/interdomain/triton_gates.py."""
    rows = tl.arange(0, C)
    at = (start + rows) * groups + group
    inside = rows < length
    high, low = tl.load(gates.high + at, mask=inside, other=0.0), tl.load(gates.low + at, mask=inside, other=0.0)
    return high, low, tl.load(gates.write + at, mask=inside, other=0.0)


@triton.jit
def left_within(x, left):
    """Scores or weights by (t, i), of which those of later tokens count for nothing."""
    if left is not None:
        apart = (left[0][:, None] - left[0][None, :]) + (left[1][:, None] - left[1][None, :])
        x *= tl.exp(tl.minimum(apart, 0.0)) * left[2][None, :]
    return x


@triton.jit
def left_before(x, left):
    """Rows of tokens that read the state before the chunk."""
    if left is not None:
        x *= tl.exp(left[0])[:, None]
    return x


@triton.jit
def ordered(scores, C: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr):
    """Scores or weights by (t, i) without those of later tokens, SKEWED by (t, t - i), `[C, C]` in MATH.DTYPE."""
    scores = as_operand(scores, MATH)
    return skew(scores, C) if SKEWED else causal(scores, C)


@triton.jit
def earlier(x, C: tl.constexpr, SKEWED: tl.constexpr):
    """Scores or weights, `ordered`, of earlier tokens alone: with the delta rule no key meets its own token."""
    rows = tl.arange(0, C)
    apart = rows[None, :] if SKEWED else rows[:, None] - rows[None, :]
    return tl.where(apart > 0, x, tl.zeros_like(x))


@triton.jit
def intra_scores(
    a, b, start, length, a_stride, b_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    left, C: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`a_t . b_i` within the chunk by (t, i), SKEWED by (t, t - i), `[C, C]` in MATH.DTYPE.

    a, b: tokens `[., WIDTH]` of a head and of its group.
    """
    scores = tl.zeros([C, C], tl.float32)
    for r in tl.range(0, PADDED, BLOCK, num_stages=1, loop_unroll_factor=1):
        a_tile = load_tokens(a, start, length, r, a_stride, WIDTH, C, BLOCK)
        b_tile = load_tokens(b, start, length, r, b_stride, WIDTH, C, BLOCK)
        scores = dot(a_tile, tl.trans(b_tile), scores, MATH)
    return ordered(left_within(scores, left), C, SKEWED, MATH)


@triton.jit
def collect(
    scores, a, state, intra, left, start, length, a_stride, m, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, M: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """What lambda^(t+1) multiplies: `a_t . S`, and unless SKEWED the tokens of the chunk too; two tiles `[C, BM]`."""
    modes = m + tl.arange(0, BM)
    z_re = tl.zeros([C, BM], tl.float32)
    z_im = tl.zeros([C, BM], tl.float32)
    for r in tl.range(0, PADDED, BLOCK, num_stages=1, loop_unroll_factor=1):
        a_tile = load_tokens(a, start, length, r, a_stride, WIDTH, C, BLOCK)
        s_re, s_im = load_pair(state, modes, r + tl.arange(0, BLOCK), PADDED, M * PADDED)
        z_re = dot(a_tile, tl.trans(s_re), z_re, MATH)
        z_im = dot(a_tile, tl.trans(s_im), z_im, MATH)
    z_re = left_before(z_re, left)
    z_im = left_before(z_im, left)
    if not SKEWED:
        t_re, t_im = load_pair(intra, tl.arange(0, C), modes, 2 * M, M)
        z_re = dot(scores, t_re, z_re, MATH)
        z_im = dot(scores, t_im, z_im, MATH)
    return z_re, z_im


@triton.jit
def pull(
    scores, a, state, intra, powers, left, start, length, a_stride, m, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, M: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`y` for the modes m .. m + BM, two tiles `[C, BM]` in float32.

    scores: of `intra_scores`; state: `[2, M, PADDED]`; intra and powers: of the group, see `KernelTables`.
    """
    z_re, z_im = collect(
        scores, a, state, intra, left, start, length, a_stride, m, WIDTH, PADDED, BLOCK, BM, C, M, SKEWED, MATH
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
def mixing_of_group(mixing, group, M: tl.constexpr, MIXING: tl.constexpr):
    """Where the mixing matrix of a group begins."""
    return mixing + group * MIXING.TERMS * MIXING.PLANES * M * (M if MIXING.FULL else 1)


@triton.jit
def dot_plane(a, mixing, plane, acc, M: tl.constexpr, MIXING: tl.constexpr, MATH: tl.constexpr):
    """a times a tile of one plane of a full mixing matrix, in all its terms; mixing: where the tile lies in the first.

    The matrix is not rounded to bfloat16, but multiplied in two terms: where C is the inverse of a Gramian (the
    posterior start), y is up to a hundred times what the matrix leaves of it.
    """
    if MIXING.TERMS == 2:
        acc = dot(a, tl.load(mixing + (MIXING.PLANES + plane) * M * M), acc, MATH)
    return dot(a, tl.load(mixing + plane * M * M), acc, MATH)


@triton.jit
def mix_rows(
    y_re, y_im, mixing, m, n, p_re, p_im, M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MIXING: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """Add what BM rows and BN columns of a full mixing matrix, from m and n on, make of the modes m .. m + BM of y, in
    MATH.DTYPE.

    Of a complex matrix A + iB, by which y or (SIGN -1) its conjugate is multiplied, three products do the work of four:

        y_re A - y_im B = y_re (A - B) + k,    y_re B + y_im A = y_im (A + B) + k,    k = (y_re - y_im) B

    The difference has two terms as the matrix has: rounded to one, it is no more that of what the other products take,
    and nothing is left of the outputs of the posterior start.
    """
    mixing += (m + tl.arange(0, BM))[:, None] * M + n + tl.arange(0, BN)[None, :]
    if MIXING.SIGN == 0:
        p_re = dot_plane(y_re, mixing, 0, p_re, M, MIXING, MATH)
        p_im = dot_plane(y_re, mixing, 1, p_im, M, MIXING, MATH)
        p_re = dot_plane(y_im, mixing, 2, p_re, M, MIXING, MATH)
        p_im = dot_plane(y_im, mixing, 3, p_im, M, MIXING, MATH)
    else:
        both = y_re.to(tl.float32) - MIXING.SIGN * y_im.to(tl.float32)
        k = dot(left_over(both, MATH), tl.load(mixing + 2 * M * M), tl.zeros_like(p_re), MATH)
        k = dot_plane(both, mixing, 2, k, M, MIXING, MATH)
        p_re = dot_plane(y_re, mixing, 0, p_re + k, M, MIXING, MATH)
        p_im = dot_plane(y_im, mixing, 1, p_im + k, M, MIXING, MATH)
    return p_re, p_im


@triton.jit
def mix_alone(y_re, y_im, mixing, n, M: tl.constexpr, BN: tl.constexpr):
    """What a diagonal mixing matrix makes of the modes n .. n + BN."""
    mixing += n + tl.arange(0, BN)[None, :]
    p_re = y_re * tl.load(mixing) + y_im * tl.load(mixing + 2 * M)
    p_im = y_re * tl.load(mixing + M) + y_im * tl.load(mixing + 3 * M)
    return p_re, p_im


@triton.jit
def pull_and_mix(
    a, b, state, intra, powers, mixing, left, start, length, a_stride, b_stride, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, SIZES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, MIXING: tl.constexpr,
    SKEWED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The pull-back of `ops/interdomain/readout.py`, `p = mix(y)`: two tuples of tiles `[C, BN]` in float32.

    mixing: of the group, see `KernelTables`. A full matrix is applied BM of its rows and BN of its columns at a time;
    BM of y are pulled once for all columns. The rows come in a loop: unrolled, all their loads come first and take the
    registers that a second block needs.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    scores = intra_scores(a, b, start, length, a_stride, b_stride, WIDTH, PADDED, SIZES.BR, left, C, SKEWED, MATH)
    p_re = ()
    p_im = ()
    if MIXING.FULL:
        for _ in tl.static_range(0, M, BN):
            p_re += (tl.zeros([C, BN], tl.float32),)
            p_im += (tl.zeros([C, BN], tl.float32),)
        for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=1):
            y_re, y_im = pull(
                scores, a, state, intra, powers, left, start, length, a_stride, m, WIDTH, PADDED,
                SIZES.BR, BM, C, M, SKEWED, MATH,
            )  # fmt: skip
            y_re = as_operand(y_re, MATH)
            y_im = as_operand(y_im, MATH)
            sum_re = ()
            sum_im = ()
            for n in tl.static_range(0, M, BN):
                x_re, x_im = mix_rows(y_re, y_im, mixing, m, n, p_re[n // BN], p_im[n // BN], M, BM, BN, MIXING, MATH)
                sum_re += (x_re,)
                sum_im += (x_im,)
            p_re = sum_re
            p_im = sum_im
    else:
        for n in tl.static_range(0, M, BN):
            y_re, y_im = pull(
                scores, a, state, intra, powers, left, start, length, a_stride, n, WIDTH, PADDED,
                SIZES.BR, BN, C, M, SKEWED, MATH,
            )  # fmt: skip
            x_re, x_im = mix_alone(y_re, y_im, mixing, n, M, BN)
            p_re += (x_re,)
            p_im += (x_im,)
    return p_re, p_im


@triton.jit
def add_weights(w, x_re, x_im, intra, m, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, MATH: tl.constexpr):
    """Add to w what the modes m .. m + BM of x, in MATH.DTYPE, give to the w of `readers`, before it is `ordered`."""
    t_re, t_im = load_pair(intra, tl.arange(0, C), m + tl.arange(0, BM), 2 * M, M)
    w = dot(x_re, tl.trans(t_re), w, MATH)
    return dot(x_im, tl.trans(t_im), w, MATH)


@triton.jit
def ordered_weights(w, left, C: tl.constexpr, SKEWED: tl.constexpr, MATH: tl.constexpr):
    """Weights of `add_weights` as they read the tokens of their chunk: by (t, i), in MATH.DTYPE."""
    if left is None:
        w = ordered(w, C, SKEWED, MATH)
    else:
        w = as_operand(left_within(skew(w, C) if SKEWED else causal(w, C), left), MATH)
    return w


@triton.jit
def readers(
    p_re, p_im, powers, intra, left, C: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, SKEWED: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """How a token reads: the state by `e = p conj(lambda^(t+1))`, two tuples of tiles `[C, BN]`, and its chunk by
    `w[t, j] = Re(conj(p_t) lambda^(t-j) beta)`, `[C, C]`; all in MATH.DTYPE.

    p: as `pull_and_mix` gives it. The table of the chunk is read by p where SKEWED, otherwise by e.
    """
    w = tl.zeros([C, C], tl.float32)
    e_re = ()
    e_im = ()
    for n in tl.static_range(0, M, BN):
        x_re, x_im = times_conj_powers(p_re[n // BN], p_im[n // BN], powers, n, C, M, BN)
        x_re = as_operand(x_re, MATH)
        x_im = as_operand(x_im, MATH)
        e_re += (x_re,)
        e_im += (x_im,)
        if SKEWED:
            x_re = as_operand(p_re[n // BN], MATH)
            x_im = as_operand(p_im[n // BN], MATH)
        w = add_weights(w, x_re, x_im, intra, n, C, M, BN, MATH)
    return e_re, e_im, ordered_weights(w, left, C, SKEWED, MATH)


@triton.jit
def push(
    e_re, e_im, w, c, state, out, left, start, length, c_stride, out_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    BD: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """What `readers` read of the tokens c `[., WIDTH]` of their chunk and of the state `[2, M, PADDED]`, into `out`."""
    for d in tl.range(0, PADDED, BD, num_stages=1, loop_unroll_factor=1):
        c_tile = load_tokens(c, start, length, d, c_stride, WIDTH, C, BD)
        tile = tl.zeros([C, BD], tl.float32)
        if left is None:
            tile = dot(w, c_tile, tile, MATH)
        for n in tl.static_range(0, M, BN):
            s_re, s_im = load_pair(state, n + tl.arange(0, BN), d + tl.arange(0, BD), PADDED, M * PADDED)
            tile = dot(e_re[n // BN], s_re, tile, MATH)
            tile = dot(e_im[n // BN], s_im, tile, MATH)
        if left is not None:
            tile = dot(w, c_tile, left_before(tile, left), MATH)
        store_tokens(out, tile, start, length, d, out_stride, WIDTH, C, BD, MATH)
