"""What a chunk pulled and mixed, where it lies in memory, `[tokens, heads, 2, M]`: how it gets there and is read again.

The backward pass keeps it from kernel to kernel. It is also the way of the forward pass with operands in float32: a
tile that three matrix products read has a layout for each, and every layout has two terms, so that kept on the chip it
would take more registers than there are. BM modes at a time are loaded for every product, from the nearest cache.

`mixed` is what reads a chunk: p for a skewed group, otherwise `p conj(lambda^(t+1))`, which reads the state as well.
"""

from ..common.launch import tl, triton
from ..common.tiles import dot, load_tokens, narrow, store_tokens
from ..diagonal.triton_tiles import add_weights, load_pair, ordered, times_conj_powers


@triton.jit
def load_modes(x, start, length, stride, first, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr):
    """BM modes from `first` of the tokens of a chunk, two tiles `[C, BM]`; zero past its end."""
    rows = tl.arange(0, C)
    at = (start + rows)[:, None].to(tl.int64) * stride + (first + tl.arange(0, BM))[None, :]
    inside = (rows < length)[:, None] & (tl.arange(0, BM) >= 0)[None, :]
    return tl.load(x + at, mask=inside, other=0.0), tl.load(x + M + at, mask=inside, other=0.0)


@triton.jit
def store_modes(
    x, re, im, start, length, stride, first, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, MATH: tl.constexpr
):
    rows = tl.arange(0, C)
    at = (start + rows)[:, None].to(tl.int64) * stride + (first + tl.arange(0, BM))[None, :]
    inside = (rows < length)[:, None] & (tl.arange(0, BM) >= 0)[None, :]
    tl.store(x + at, narrow(re, x.dtype.element_ty, MATH), mask=inside)
    tl.store(x + M + at, narrow(im, x.dtype.element_ty, MATH), mask=inside)


@triton.jit
def stored_weights(
    mixed, intra, start, length, stride, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, SKEWED: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """The w of `readers`."""
    w = tl.zeros([C, C], tl.float32)
    for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=1):
        x_re, x_im = load_modes(mixed, start, length, stride, m, C, M, BM)
        w = add_weights(w, x_re, x_im, intra, m, C, M, BM, MATH)
    return ordered(w, C, SKEWED, MATH)


@triton.jit
def load_readers(
    mixed, powers, start, length, stride, m, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, SKEWED: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """What reads the state, for the modes m .. m + BM: made of what reads the chunk, which is stored."""
    e_re, e_im = load_modes(mixed, start, length, stride, m, C, M, BM)
    if SKEWED:
        x_re, x_im = times_conj_powers(e_re.to(tl.float32), e_im.to(tl.float32), powers, m, C, M, BM)
        e_re = narrow(x_re, MATH.DTYPE, MATH)
        e_im = narrow(x_im, MATH.DTYPE, MATH)
    return e_re, e_im


@triton.jit
def push_stored(
    w, mixed, c, state, powers, out, start, length, stride, c_stride, out_stride, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, SKEWED: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """What w reads of the tokens c `[., WIDTH]` of their chunk, and readers of the state `[2, M, PADDED]`; to `out`."""
    for d in tl.range(0, PADDED, BD, num_stages=1, loop_unroll_factor=1):
        c_tile = load_tokens(c, start, length, d, c_stride, WIDTH, C, BD)
        tile = dot(w, c_tile, tl.zeros([C, BD], tl.float32), MATH)
        for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=1):
            e_re, e_im = load_readers(mixed, powers, start, length, stride, m, C, M, BM, SKEWED, MATH)
            s_re, s_im = load_pair(state, m + tl.arange(0, BM), d + tl.arange(0, BD), PADDED, M * PADDED)
            tile = dot(e_re, s_re, tile, MATH)
            tile = dot(e_im, s_im, tile, MATH)
        store_tokens(out, tile, start, length, d, out_stride, WIDTH, C, BD, MATH)
