"""The S4D control in chunks of C tokens on the chip: a convolution within the chunk, the state before it for the rest.

A head treats all chunks alike: `kernel[d]` is the weight of a token d tokens later, and `reads` the rows by which a
token reads the state before the chunk. Both are tables of the parameters; their gradients are sums over the chunks.
"""

from typing import Any, NamedTuple

from ..common.launch import tl, triton
from ..common.tiles import as_operand, dot, load_tokens, locate, narrow, store_tokens
from ..diagonal.triton_tiles import load_pair


class Responses(NamedTuple):
    """kernel `[H, C]`; reads `[H, C, 2, M]`, the real rows by which the real and the imaginary part of a state are
    multiplied, M padded with zeros; float32.
    """

    kernel: Any
    reads: Any


class Extent(NamedTuple):
    """What a kernel is compiled for: tokens of a chunk, modes (padded), the width as it is and padded, and how much of
    it is taken at once.
    """

    C: int
    M: int
    W: int
    PADDED: int
    BW: int


@triton.jit
def _toeplitz(kernel, C: tl.constexpr, MATH: tl.constexpr):
    """`kernel[t - j]` by (t, j), zero above the diagonal, in MATH.DTYPE."""
    rows = tl.arange(0, C)
    distance = rows[:, None] - rows[None, :]
    return as_operand(tl.load(kernel + distance, mask=distance >= 0, other=0.0), MATH)


@triton.jit
def _reads(responses, head, C: tl.constexpr, M: tl.constexpr):
    return load_pair(responses.reads + head * C * 2 * M, tl.arange(0, C), tl.arange(0, M), 2 * M, M)


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def read(
    x, out, states, responses, documents, count, per_row, row_length, heads, groups,
    EXTENT: tl.constexpr, PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """`out_t = sum_j kernel[t - j] x_j + reads_t S`; grid [chunks, heads, blocks of columns].

    x `[tokens, groups, W]`; out `[tokens, heads, W]`; states `[slots, groups, 2, M, padded W]`.
    """
    BW: tl.constexpr = EXTENT.BW
    C: tl.constexpr = EXTENT.C
    M: tl.constexpr = EXTENT.M
    head = tl.program_id(1)
    group = head // (heads // groups)
    w = tl.program_id(2) * EXTENT.BW
    start, length, slot = locate(tl.program_id(0), documents, count, per_row, row_length, C, PACKED)
    if length > 0:
        state = states + (slot * groups + group) * 2 * M * EXTENT.PADDED
        s_re, s_im = load_pair(state, tl.arange(0, M), w + tl.arange(0, EXTENT.BW), EXTENT.PADDED, M * EXTENT.PADDED)
        x_tile = load_tokens(x + group * EXTENT.W, start, length, w, groups * EXTENT.W, EXTENT.W, C, EXTENT.BW)
        r_re, r_im = _reads(responses, head, C, M)
        tile = dot(_toeplitz(responses.kernel + head * C, C, MATH), x_tile, tl.zeros([C, BW], tl.float32), MATH)
        tile = dot(r_re, s_re, tile, MATH)
        tile = dot(r_im, s_im, tile, MATH)
        store_tokens(out + head * EXTENT.W, tile, start, length, w, heads * EXTENT.W, EXTENT.W, C, EXTENT.BW, MATH)


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def read_backward(
    grad, found, responses, documents, count, per_row, row_length, heads, groups,
    EXTENT: tl.constexpr, PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """What the chunks give to x and to the states, `found`: `ChunkGradients`; the grid of `read`, grad as its out."""
    BW: tl.constexpr = EXTENT.BW
    C: tl.constexpr = EXTENT.C
    M: tl.constexpr = EXTENT.M
    head = tl.program_id(1)
    w = tl.program_id(2) * EXTENT.BW
    start, length, slot = locate(tl.program_id(0), documents, count, per_row, row_length, C, PACKED)
    if length > 0:
        g = load_tokens(grad + head * EXTENT.W, start, length, w, heads * EXTENT.W, EXTENT.W, C, EXTENT.BW)
        weights = tl.trans(_toeplitz(responses.kernel + head * C, C, MATH))
        tile = dot(weights, g, tl.zeros([C, BW], tl.float32), MATH)
        store_tokens(
            found.tokens + head * EXTENT.W, tile, start, length, w, heads * EXTENT.W, EXTENT.W, C, EXTENT.BW, MATH
        )
        r_re, r_im = _reads(responses, head, C, M)
        columns = w + tl.arange(0, EXTENT.BW)
        at = (slot * heads + head) * 2 * M * EXTENT.PADDED
        at = at + tl.arange(0, M)[:, None] * EXTENT.PADDED + columns[None, :]
        s_re = dot(tl.trans(r_re), g, tl.zeros([M, BW], tl.float32), MATH)
        s_im = dot(tl.trans(r_im), g, tl.zeros([M, BW], tl.float32), MATH)
        tl.store(found.states + at, narrow(s_re, found.states.dtype.element_ty, MATH))
        tl.store(found.states + M * EXTENT.PADDED + at, narrow(s_im, found.states.dtype.element_ty, MATH))


@triton.jit(do_not_specialize=["chunks", "count", "per_row", "row_length"])
def responses_backward(
    x, grad, states, pairs, reads, documents, chunks, count, per_row, row_length, heads, groups,
    EXTENT: tl.constexpr, PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """What the chunks give to `Responses`; grid [lanes, heads]: a lane has every so manieth chunk.

    Written, to be summed over the lanes: pairs `[lanes, heads, C, C]`, whose sums over equal t - j are the gradient of
    the kernel, and reads `[lanes, heads, C, 2, M]`.
    """
    PADDED: tl.constexpr = EXTENT.PADDED
    BW: tl.constexpr = EXTENT.BW
    C: tl.constexpr = EXTENT.C
    M: tl.constexpr = EXTENT.M
    head = tl.program_id(1)
    group = head // (heads // groups)
    rows = tl.arange(0, C)
    modes = tl.arange(0, M)
    p = tl.zeros([C, C], tl.float32)
    r_re = tl.zeros([C, M], tl.float32)
    r_im = tl.zeros([C, M], tl.float32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        start, length, slot = locate(chunk, documents, count, per_row, row_length, C, PACKED)
        if length > 0:
            state = states + (slot * groups + group) * 2 * M * EXTENT.PADDED
            for w in tl.range(0, PADDED, BW, num_stages=1, loop_unroll_factor=1):
                g = load_tokens(grad + head * EXTENT.W, start, length, w, heads * EXTENT.W, EXTENT.W, C, EXTENT.BW)
                x_tile = load_tokens(x + group * EXTENT.W, start, length, w, groups * EXTENT.W, EXTENT.W, C, EXTENT.BW)
                s_re, s_im = load_pair(state, modes, w + tl.arange(0, EXTENT.BW), EXTENT.PADDED, M * EXTENT.PADDED)
                p = dot(g, tl.trans(x_tile), p, MATH)
                r_re = dot(g, tl.trans(s_re), r_re, MATH)
                r_im = dot(g, tl.trans(s_im), r_im, MATH)
    lane = tl.program_id(0).to(tl.int64) * heads + head
    tl.store(pairs + lane * C * C + rows[:, None] * C + rows[None, :], p)
    at = lane * C * 2 * M + rows[:, None] * 2 * M + modes[None, :]
    tl.store(reads + at, r_re)
    tl.store(reads + M + at, r_im)
