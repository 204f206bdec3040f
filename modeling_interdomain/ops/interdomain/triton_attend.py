"""The outputs of the fused backend, a chunk and a head at a time.

What a program reads is the tokens, the states before the chunk and tables that stay in the second-level cache; nothing
M-wide is written. The kernel is launched for both kinds of groups (`ops/diagonal/triton_tiles.py`) and leaves the
others alone.
"""

from typing import Any, NamedTuple

from ..common.launch import tl, triton
from ..common.tiles import locate
from ..diagonal.triton_tiles import mixing_of_group, pull_and_mix, push, readers, times_conj_powers
from .triton_stored import push_stored, store_modes, stored_weights


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


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def attend(
    tokens, out, mixed, states, tables, documents, count, per_row, row_length, heads, groups,
    WIDTHS: tl.constexpr, SIZES: tl.constexpr, MIXING: tl.constexpr, SKEWED: tl.constexpr, PACKED: tl.constexpr,
    MATH: tl.constexpr, EDGE: tl.constexpr = 32,
):  # fmt: skip
    """`out = push(mix(pull(a; b)); c)` for one chunk and head; grid [chunks, heads].

    tokens: `Operands`; out: as c, but by heads; mixed: None, or room for what lies in memory between the two moves
    (`ops/interdomain/triton_stored.py`), `[tokens, heads, 2, M]`; states: `ChunkStates`; tables: `KernelTables`;
    documents: `Documents`; EDGE: of the tiles of the mixing matrix where there are FEW modes. Small tiles leave
    registers for another block, large ones make fewer and longer products.
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
        p_re, p_im = pull_and_mix(
            tokens.a + head * WIDTHS.A, tokens.b + group * WIDTHS.A, states.b + at * A_PADDED, intra, powers, mixing,
            start, length, heads * WIDTHS.A, groups * WIDTHS.A, WIDTHS.A, A_PADDED, SIZES, BM, BN, MIXING, SKEWED, MATH,
        )  # fmt: skip
        c = tokens.c + group * WIDTHS.C
        out += head * WIDTHS.C
        if mixed is None:
            e_re, e_im, w = readers(p_re, p_im, powers, intra, C, M, BN, SKEWED, MATH)
            push(
                e_re, e_im, w, c, states.c + at * C_PADDED, out, start, length, groups * WIDTHS.C, heads * WIDTHS.C,
                WIDTHS.C, C_PADDED, BD, C, M, BN, MATH,
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
            w = stored_weights(mixed, intra, start, length, stride, C, M, SIZES.BM, SKEWED, MATH)
            push_stored(
                w, mixed, c, states.c + at * C_PADDED, powers, out, start, length, stride, groups * WIDTHS.C,
                heads * WIDTHS.C, WIDTHS.C, C_PADDED, SIZES.BD, C, M, SIZES.BM, SKEWED, MATH,
            )  # fmt: skip
