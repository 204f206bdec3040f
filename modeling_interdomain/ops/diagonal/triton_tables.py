"""The tables that the fused kernels make of the parameters in one launch, and the parameters' gradients in another.

Angles reach some hundreds of radians a token over 64 tokens, so powers are computed in float64, which costs little
beside the kernels that read the tables.
"""

from typing import Any, NamedTuple

import torch

from ..common.launch import power_of_two, tl, triton
from ..common.tiles import Arithmetic, left_over, narrow
from .mixing import SIGNS
from .triton_tiles import Mixing, mixing_of_group, times, times_conj

# The largest decay in a chunk, as an exponent of e, that is split into a growing and a decaying factor. float32 and
# bfloat16 hold e^88; the rest is room for sums of many large products.
_LARGEST_EXPONENT = 60.0
# Modes whose powers one program makes, and the side of a block of the mixing matrix.
_MODES, _EDGE = 16, 16


class KernelTables(NamedTuple):
    """Complex numbers by planes, `[..., 2, M]`, with M padded by zeros; float32 but for what matrix products take.

    Attributes:
        skewed: `[G]` int32, 1 where a mode decays (or grows) too fast in a chunk for `intra` to hold growing powers.
        powers: `[G, C, 2, M]`, lambda^(t+1).
        units: `[G, C, 2, M]`, lambda^(-i-1), or lambda^d where `skewed`.
        inputs: `[G, C, 2, M]`, lambda^d beta, by which tokens enter the state d tokens later.
        intra: `[G, C, 2, M]`, how tokens enter the readout of their own chunk: `units` times beta; an operand.
        mixing: `[G, planes, M, M]`, operands, or `[G, planes, M]`: the matrix of the pull-back, `p_j = sum_i y_i
            matrix[i, j]`, as `Mixing` says. It is symmetric, so that it is its own transpose for the gradients.
    """

    skewed: torch.Tensor
    powers: torch.Tensor
    units: torch.Tensor
    inputs: torch.Tensor
    intra: torch.Tensor
    mixing: torch.Tensor


class Parameters(NamedTuple):
    """Those of the operator: `[G, M, 2]` twice, and `[G, M, M, 2]`, `[G, M, 2]` or None."""

    log_decay: Any
    input_matrix: Any
    coefficients: Any

    @property
    def full(self) -> bool:
        """Whether C mixes modes."""
        return self.coefficients is not None and self.coefficients.ndim == 4


class Partial(NamedTuple):
    """Parts of the parameters' gradients, which the kernels of the backward pass leave to be summed.

    `[3, 2, M]` are the gradient of log(lambda), that of beta, and one more of log(lambda), to be multiplied by
    conj(beta): the gradient of a table `units * beta` is summed over its ages, as it is and weighted by them.

    Attributes:
        chunks: `[chunks, heads, 2, 3, 2, M]`, a row for either side.
        walked: `[programs, G, 3, 2, M]`, of those that walk the chunks back.
        mixing: the gradient of the mixing matrix, `[G, 2, 2, M, M]` or `[G, 2, 2, M]` in float32, or None.
    """

    chunks: Any
    walked: Any
    mixing: Any


@triton.jit
def _pair(x, at, inside):
    """Real and imaginary parts that lie side by side."""
    return tl.load(x + 2 * at, mask=inside, other=0.0), tl.load(x + 2 * at + 1, mask=inside, other=0.0)


@triton.jit
def _power(rate, phase, exponent):
    """`lambda ** exponent` as two tiles in float32."""
    magnitude = tl.exp(rate * exponent)
    return (magnitude * tl.cos(phase * exponent)).to(tl.float32), (magnitude * tl.sin(phase * exponent)).to(tl.float32)


@triton.jit
def _store_pair(x, at, plane, re, im, MATH: tl.constexpr):
    tl.store(x + at, narrow(re, x.dtype.element_ty, MATH))
    tl.store(x + at + plane, narrow(im, x.dtype.element_ty, MATH))


@triton.jit
def _make_powers(
    parameters, tables, group, block, size, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, LARGEST: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    everyone = tl.arange(0, M)
    rates = tl.load(parameters.log_decay + (group * size + everyone) * 2, mask=everyone < size, other=0.0)
    skewed = (tl.max(tl.abs(rates), 0) * C > LARGEST).to(tl.int32)
    if block == 0:
        tl.store(tables.skewed + group, skewed)
    modes = block * BM + tl.arange(0, BM)
    inside = modes < size
    rate, phase = _pair(parameters.log_decay, group * size + modes, inside)
    beta_re, beta_im = _pair(parameters.input_matrix, group * size + modes, inside)
    rate = tl.where(rate < -1000.0, -1000.0, rate).to(tl.float64)[None, :]  # -inf is 0 with every power but the first
    phase = phase.to(tl.float64)[None, :]
    steps = tl.arange(0, C)
    at = (group * C + steps)[:, None] * 2 * M + modes[None, :]
    used = inside.to(tl.float32)[None, :]
    steps = steps[:, None]
    re, im = _power(rate, phase, (steps + 1).to(tl.float64))
    _store_pair(tables.powers, at, M, re * used, im * used, MATH)
    re, im = _power(rate, phase, steps.to(tl.float64))
    re, im = times(re, im, beta_re[None, :], beta_im[None, :])
    _store_pair(tables.inputs, at, M, re, im, MATH)
    re, im = _power(rate, phase, (skewed * (2 * steps + 1) - steps - 1).to(tl.float64))
    _store_pair(tables.units, at, M, re * used, im * used, MATH)
    re, im = times(re, im, beta_re[None, :], beta_im[None, :])
    _store_pair(tables.intra, at, M, re, im, MATH)


@triton.jit
def _coefficients(x, group, rows, columns, size):
    """A tile of C `[rows, columns]`."""
    inside = (rows < size)[:, None] & (columns < size)[None, :]
    return _pair(x, (group * size + rows)[:, None] * size + columns[None, :], inside)


@triton.jit
def _product(a, b, acc):
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _store_plane(mixing, plane, x, M: tl.constexpr, MIXING: tl.constexpr, MATH: tl.constexpr):
    """All terms of one block of a plane."""
    tl.store(mixing + plane * M * M, narrow(x, mixing.dtype.element_ty, MATH))
    if MIXING.TERMS == 2:
        rest = left_over(x, MATH)
        tl.store(mixing + (MIXING.PLANES + plane) * M * M, narrow(rest, mixing.dtype.element_ty, MATH))


@triton.jit
def _make_mixing(
    x, mixing, group, block, size, first, second, MIXING: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """One block of `[C]^T D [C]`, D of `first` and `second` for the real and the imaginary part of `C y`."""
    row = (block // (M // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    column = (block % (M // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK, BLOCK], tl.float32)
    rr = zero
    ri = zero
    ir = zero
    ii = zero
    for k in range(0, M, BLOCK):
        between = k + tl.arange(0, BLOCK)
        a_re, a_im = _coefficients(x, group, between, row, size)
        b_re, b_im = _coefficients(x, group, between, column, size)
        a_re = tl.trans(a_re)
        a_im = tl.trans(a_im)
        rr = _product(a_re, b_re, rr)
        ri = _product(a_re, b_im, ri)
        ir = _product(a_im, b_re, ir)
        ii = _product(a_im, b_im, ii)
    mixing = mixing_of_group(mixing, group, M, MIXING) + row[:, None] * M + column[None, :]
    a = first * rr + second * ii
    b = second * ir - first * ri
    if MIXING.SIGN == 0:
        _store_plane(mixing, 0, a, M, MIXING, MATH)
        _store_plane(mixing, 1, b, M, MIXING, MATH)
        _store_plane(mixing, 2, second * ri - first * ir, M, MIXING, MATH)
        _store_plane(mixing, 3, first * ii + second * rr, M, MIXING, MATH)
    else:
        _store_plane(mixing, 0, a - b, M, MIXING, MATH)
        _store_plane(mixing, 1, MIXING.SIGN * (a + b), M, MIXING, MATH)
        _store_plane(mixing, 2, b, M, MIXING, MATH)


@triton.jit
def _make_diagonal(x, mixing, group, size, first, second, M: tl.constexpr):
    modes = tl.arange(0, M)
    inside = modes < size
    if x is not None:
        c_re, c_im = _pair(x, group * size + modes, inside)
    else:
        c_re = tl.where(inside, 1.0, 0.0)
        c_im = tl.zeros([M], tl.float32)
    cross = (second - first) * c_re * c_im
    mixing += group * 4 * M + modes
    tl.store(mixing, first * c_re * c_re + second * c_im * c_im)
    tl.store(mixing + M, cross)
    tl.store(mixing + 2 * M, cross)
    tl.store(mixing + 3 * M, first * c_im * c_im + second * c_re * c_re)


@triton.jit
def tables(
    parameters, out, size, first, second,
    C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, MIXING: tl.constexpr,
    LARGEST: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """Grid [groups, blocks]: M / BM blocks of modes for the powers, then those of the mixing matrix.

    parameters: `Parameters`; out: `KernelTables`; first, second: the diagonal of D (`ops/diagonal/mixing.py`).
    """
    group = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < M // BM:
        _make_powers(parameters, out, group, block, size, C, M, BM, LARGEST, MATH)
    elif MIXING.FULL:
        _make_mixing(
            parameters.coefficients, out.mixing, group, block - M // BM, size, first, second, MIXING, M, BLOCK, MATH
        )
    else:
        _make_diagonal(parameters.coefficients, out.mixing, group, size, first, second, M)


@triton.jit
def _summed(x, count, stride, BM: tl.constexpr, ROWS: tl.constexpr):
    """The sum of `count` rows of BM numbers, always in the same order."""
    acc = tl.zeros([ROWS, BM], tl.float32)
    rows = tl.arange(0, ROWS)
    for done in range(0, count, ROWS):
        row = done + rows
        at = row[:, None].to(tl.int64) * stride + tl.arange(0, BM)[None, :]
        acc += tl.load(x + at, mask=(row < count)[:, None] & (tl.arange(0, BM) >= 0)[None, :], other=0.0)
    return tl.sum(acc, 0)


@triton.jit
def _summed_row(x, count, stride, M: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr):
    """The sums of the six numbers of a row of `Partial`."""
    return (
        _summed(x, count, stride, BM, ROWS),
        _summed(x + M, count, stride, BM, ROWS),
        _summed(x + 2 * M, count, stride, BM, ROWS),
        _summed(x + 3 * M, count, stride, BM, ROWS),
        _summed(x + 4 * M, count, stride, BM, ROWS),
        _summed(x + 5 * M, count, stride, BM, ROWS),
    )


@triton.jit
def _decay_gradient(
    parameters, partial, grads, group, block, size, chunks, walkers, heads, groups,
    M: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of log(lambda) and beta for BM modes, from all that `Partial` says of them."""
    at = group * 6 * M + block * BM
    d_re, d_im, b_re, b_im, a_re, a_im = _summed_row(partial.walked + at, walkers, groups * 6 * M, M, BM, ROWS)
    per_group = heads // groups
    for row in range(group * per_group * 2, (group + 1) * per_group * 2):  # heads and sides
        of_chunks = _summed_row(partial.chunks + row * 6 * M + block * BM, chunks, heads * 12 * M, M, BM, ROWS)
        d_re += of_chunks[0]
        d_im += of_chunks[1]
        b_re += of_chunks[2]
        b_im += of_chunks[3]
        a_re += of_chunks[4]
        a_im += of_chunks[5]
    modes = block * BM + tl.arange(0, BM)
    inside = modes < size
    beta_re, beta_im = _pair(parameters.input_matrix, group * size + modes, inside)
    a_re, a_im = times_conj(a_re, a_im, beta_re, beta_im)
    at = (group * size + modes) * 2
    tl.store(grads.log_decay + at, d_re + a_re, mask=inside)
    tl.store(grads.log_decay + at + 1, d_im + a_im, mask=inside)
    tl.store(grads.input_matrix + at, b_re, mask=inside)
    tl.store(grads.input_matrix + at + 1, b_im, mask=inside)


@triton.jit
def _symmetric(grad, rows, columns, A: tl.constexpr, B: tl.constexpr, M: tl.constexpr):
    """A block of the gradient of the mixing matrix plus its transpose, of the parts A and B."""
    here = tl.load(grad + (2 * A + B) * M * M + rows[:, None] * M + columns[None, :])
    there = tl.load(grad + (2 * B + A) * M * M + columns[None, :] * M + rows[:, None])
    return here + there


@triton.jit
def _coefficient_gradient(
    coefficients, mixing, grad, group, block, size, first, second, M: tl.constexpr, BLOCK: tl.constexpr
):
    """As `mixing_gradient` of `ops/diagonal/mixing.py`, one block of C."""
    row = (block // (M // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    column = (block % (M // BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    mixing += group * 4 * M * M
    re = tl.zeros([BLOCK, BLOCK], tl.float32)
    im = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, M, BLOCK):
        between = k + tl.arange(0, BLOCK)
        c_re, c_im = _coefficients(coefficients, group, row, between, size)
        s_00 = _symmetric(mixing, between, column, 0, 0, M)
        s_10 = _symmetric(mixing, between, column, 1, 0, M)
        re = _product(first * c_re, s_00, re)
        re = _product(-first * c_im, s_10, re)
        im = _product(second * c_im, s_00, im)
        im = _product(second * c_re, s_10, im)
        s_01 = _symmetric(mixing, between, column, 0, 1, M)
        s_11 = _symmetric(mixing, between, column, 1, 1, M)
        re = _product(second * c_im, s_01, re)
        re = _product(second * c_re, s_11, re)
        im = _product(-first * c_re, s_01, im)
        im = _product(first * c_im, s_11, im)
    inside = (row < size)[:, None] & (column < size)[None, :]
    at = ((group * size + row)[:, None] * size + column[None, :]) * 2
    tl.store(grad + at, re, mask=inside)
    tl.store(grad + at + 1, im, mask=inside)


@triton.jit
def _diagonal_gradient(coefficients, mixing, grad, group, size, first, second, M: tl.constexpr):
    modes = tl.arange(0, M)
    inside = modes < size
    mixing += group * 4 * M + modes
    s_00 = 2 * tl.load(mixing)
    s_01 = tl.load(mixing + M) + tl.load(mixing + 2 * M)
    s_11 = 2 * tl.load(mixing + 3 * M)
    c_re, c_im = _pair(coefficients, group * size + modes, inside)
    re = first * (c_re * s_00 - c_im * s_01) + second * (c_im * s_01 + c_re * s_11)
    im = second * (c_im * s_00 + c_re * s_01) - first * (c_re * s_01 - c_im * s_11)
    at = (group * size + modes) * 2
    tl.store(grad + at, re, mask=inside)
    tl.store(grad + at + 1, im, mask=inside)


@triton.jit(do_not_specialize=["chunks", "walkers"])
def tables_backward(
    parameters, partial, grads, size, first, second, chunks, walkers, heads, groups,
    M: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The gradients of `Parameters` from `Partial`; the grid of `tables`, or its powers alone."""
    group = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < M // BM:
        _decay_gradient(parameters, partial, grads, group, block, size, chunks, walkers, heads, groups, M, BM, ROWS)
    elif grads.coefficients is not None:
        if FULL:
            _coefficient_gradient(
                parameters.coefficients, partial.mixing, grads.coefficients, group, block - M // BM, size,
                first, second, M, BLOCK,
            )  # fmt: skip
        else:
            _diagonal_gradient(
                parameters.coefficients, partial.mixing, grads.coefficients, group, size, first, second, M
            )


_tables, _tables_backward = tables, tables_backward


def _blocks(size: int, full: bool) -> tuple[int, dict]:
    """Programs a group, and what the kernels are compiled for."""
    modes = power_of_two(size)
    side = min(modes, _EDGE)
    blocks = modes // _MODES + ((modes // side) ** 2 if full else 1)
    return blocks, {"M": modes, "BM": _MODES, "BLOCK": side}


def _signs(product: str) -> tuple[float, float]:
    first, second = SIGNS[product]
    return float(first), float(second)


def mixing_of(product: str, full: bool, math: Arithmetic) -> Mixing:
    """A complex matrix is what weighs the real and the imaginary part of `C y` alike, or by opposite numbers.

    It is not taken as one in float32, whose operands the matrix units round as they like (`mix_rows`).
    """
    first, second = SIGNS[product]
    terms = 2 if full and math.storage == torch.bfloat16 else 1
    sign = first * second if terms == 2 else 0
    return Mixing(full, sign, 3 if sign else 4, terms)


def make_tables(
    parameters: Parameters, product: str, chunk: int, operand: torch.dtype, math: Arithmetic
) -> KernelTables:
    """The tables of contiguous float32 parameters; `operand`: the dtype of the operands of matrix products."""
    groups, size, _ = parameters.log_decay.shape
    blocks, options = _blocks(size, parameters.full)
    modes = options["M"]

    def empty(*shape, dtype=torch.float32):
        return parameters.log_decay.new_empty(shape, dtype=dtype)

    shape, mixing = (groups, chunk, 2, modes), mixing_of(product, parameters.full, math)
    made = KernelTables(
        empty(groups, dtype=torch.int32), empty(*shape), empty(*shape), empty(*shape), empty(*shape, dtype=operand),
        empty(
            groups, mixing.TERMS * mixing.PLANES, *((modes,) * (2 if mixing.FULL else 1)),
            dtype=operand if mixing.FULL else torch.float32,
        ),
    )  # fmt: skip
    _tables[(groups, blocks)](
        parameters, made, size, *_signs(product), C=chunk, MIXING=mixing, LARGEST=_LARGEST_EXPONENT, MATH=math,
        num_warps=8, **options,
    )  # fmt: skip
    return made


def table_gradients(parameters: Parameters, partial: Partial, product: str, heads: int) -> Parameters:
    """The gradients of the parameters; without `partial.mixing` none of the coefficients."""
    groups, size, _ = parameters.log_decay.shape
    blocks, options = _blocks(size, parameters.full)
    if partial.mixing is None:
        blocks = options["M"] // _MODES
    grads = Parameters(
        torch.empty_like(parameters.log_decay),
        torch.empty_like(parameters.input_matrix),
        None if partial.mixing is None else torch.empty_like(parameters.coefficients),
    )
    counts = partial.chunks.shape[0], partial.walked.shape[0]
    _tables_backward[(groups, blocks)](
        parameters, partial, grads, size, *_signs(product), *counts, heads, groups, ROWS=64, FULL=parameters.full,
        **options,
    )  # fmt: skip
    return grads
