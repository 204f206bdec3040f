"""The outputs of the fused backend, one program for each chunk and head.

A program reads the tokens, the states before the chunk and tables that stay in the second-level cache, and writes
nothing M-wide. The kernel is launched once for factored and once for skewed groups (`ops/diagonal/triton_tiles.py`);
each launch skips the others.

With operands in float32 the mixed rows lie in memory between the two passes, `[tokens, heads, 2, M]`: a tile that three
matrix products read has a layout for each, each of two terms, which is more than the registers hold. So BM modes at a
time are loaded for every product, from the nearest cache, here and in the backward pass. `mixed` holds the rows that
read a chunk: p for a skewed group, otherwise `p conj(lambda^(t+1))`, which reads the state as well.
"""

from typing import Any, NamedTuple

from ..common.launch import tl, triton
from ..common.tiles import as_operand, dot, load_tokens, locate, narrow, store_tokens
from ..diagonal.triton_tiles import (
    add_weights,
    left_before,
    load_left,
    load_pair,
    mixing_of_group,
    ordered_weights,
    pull_and_mix,
    push,
    readers,
    times_conj_powers,
)


class Operands(NamedTuple):
    """Query a `[tokens, heads, A]`, key b `[tokens, groups, A]`, value c `[tokens, groups, C]`; in the backward pass f
    `[tokens, heads, C]`, the gradient of the output.
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
    mixed, intra, left, start, length, stride, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    SKEWED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """The w of `readers`."""
    w = tl.zeros([C, C], tl.float32)
    for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=1):
        x_re, x_im = load_modes(mixed, start, length, stride, m, C, M, BM)
        w = add_weights(w, x_re, x_im, intra, m, C, M, BM, MATH)
    return ordered_weights(w, left, C, SKEWED, MATH)


@triton.jit
def load_readers(
    mixed, powers, start, length, stride, m, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, SKEWED: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """The rows that read the state, for the modes m .. m + BM, from the stored ones, which read the chunk."""
    e_re, e_im = load_modes(mixed, start, length, stride, m, C, M, BM)
    if SKEWED:
        x_re, x_im = times_conj_powers(e_re.to(tl.float32), e_im.to(tl.float32), powers, m, C, M, BM)
        e_re = as_operand(x_re, MATH)
        e_im = as_operand(x_im, MATH)
    return e_re, e_im


@triton.jit
def push_stored(
    w, mixed, c, state, powers, out, left, start, length, stride, c_stride, out_stride, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, SKEWED: tl.constexpr,
    MATH: tl.constexpr, f=None,
):  # fmt: skip
    """What w reads of the tokens c `[., WIDTH]` of their chunk, and readers of the state `[2, M, PADDED]`; to `out`.

    Of f, tokens like those of `out`, gives the products `[C]` with these.
    """
    products = tl.zeros([C], tl.float32)
    for d in tl.range(0, PADDED, BD, num_stages=1, loop_unroll_factor=1):
        c_tile = load_tokens(c, start, length, d, c_stride, WIDTH, C, BD)
        tile = tl.zeros([C, BD], tl.float32)
        if left is None:
            tile = dot(w, c_tile, tile, MATH)
        for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=1):
            e_re, e_im = load_readers(mixed, powers, start, length, stride, m, C, M, BM, SKEWED, MATH)
            s_re, s_im = load_pair(state, m + tl.arange(0, BM), d + tl.arange(0, BD), PADDED, M * PADDED)
            tile = dot(e_re, s_re, tile, MATH)
            tile = dot(e_im, s_im, tile, MATH)
        if left is not None:
            tile = dot(w, c_tile, left_before(tile, left), MATH)
        store_tokens(out, tile, start, length, d, out_stride, WIDTH, C, BD, MATH)
        if f is not None:
            products += tl.sum(tile * load_tokens(f, start, length, d, out_stride, WIDTH, C, BD).to(tl.float32), 1)
    return products


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def attend(
    tokens, out, mixed, states, tables, documents, count, per_row, row_length, heads, groups,
    WIDTHS: tl.constexpr, SIZES: tl.constexpr, MIXING: tl.constexpr, SKEWED: tl.constexpr, PACKED: tl.constexpr,
    MATH: tl.constexpr, EDGE: tl.constexpr = 32, gates=None,
):  # fmt: skip
    """`out = push(mix(pull(a; b)); c)` for one chunk and head; grid [chunks, heads].

    tokens: `Operands`; out: as c, but by heads; mixed: None, or room for what lies in memory between the two moves,
    `[tokens, heads, 2, M]`; states: `ChunkStates`; tables: `KernelTables`;
    documents: `Documents`; gates: `GateSums` or None; EDGE: of the tiles of the mixing matrix where there are FEW
    modes. Small tiles leave registers for another block, large ones make fewer and longer products.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    BM: tl.constexpr = min(SIZES.BM, EDGE)
    BN: tl.constexpr = min(M, EDGE) if SIZES.FEW else M
    BD: tl.constexpr = min(SIZES.BD, 32)  # of more columns an A100 spills registers
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
        mixing = mixing_of_group(tables.mixing, group, M, MIXING)
        at = (slot * groups + group) * 2 * M
        left = load_left(gates, start, length, group, groups, C) if gates is not None else None
        p_re, p_im = pull_and_mix(
            tokens.a + head * WIDTHS.A, tokens.b + group * WIDTHS.A, states.b + at * A_PADDED, intra, powers, mixing,
            left, start, length, heads * WIDTHS.A, groups * WIDTHS.A, WIDTHS.A, A_PADDED, SIZES, BM, BN, MIXING, SKEWED,
            MATH,
        )  # fmt: skip
        c = tokens.c + group * WIDTHS.C
        out += head * WIDTHS.C
        if mixed is None:
            e_re, e_im, w = readers(p_re, p_im, powers, intra, left, C, M, BN, SKEWED, MATH)
            push(
                e_re, e_im, w, c, states.c + at * C_PADDED, out, left, start, length, groups * WIDTHS.C,
                heads * WIDTHS.C, WIDTHS.C, C_PADDED, BD, C, M, BN, MATH,
            )  # fmt: skip
        else:
            mixed += head * 2 * M
            stride = heads * 2 * M
            for n in tl.static_range(0, M, BN):
                x_re = p_re[n // BN]
                x_im = p_im[n // BN]
                if not SKEWED:
                    x_re, x_im = times_conj_powers(x_re, x_im, powers, n, C, M, BN)
                store_modes(mixed, x_re, x_im, start, length, stride, n, C, M, BN, MATH)
            tl.debug_barrier()  # other threads read what these wrote
            w = stored_weights(mixed, intra, left, start, length, stride, C, M, SIZES.BM, SKEWED, MATH)
            push_stored(
                w, mixed, c, states.c + at * C_PADDED, powers, out, left, start, length, stride, groups * WIDTHS.C,
                heads * WIDTHS.C, WIDTHS.C, C_PADDED, SIZES.BD, C, M, SIZES.BM, SKEWED, MATH,
            )  # fmt: skip
