"""The sequential scan of `ops/interdomain/scan.py` as Triton kernels: one program walks the tokens of a document with
its state in registers.

Keys and values are the same walk over `X_t = lambda X_{t-1} + beta (x) u_t`. That of the keys contracts columns with
the query, `s_t = X_t w_t` (rows from columns); that of the values contracts modes with the pulled query, `w_t =
Re(s_t^H X_t)` (columns from rows); in both, the gradient of X_t receives `s_t (x) w_t`.

One state is kept every K tokens, and backward walks each segment in reverse by the inverse recurrence. Where that would
multiply rounding errors by more than `LARGEST_AMPLIFICATION`, K shrinks until it does not, if need be to one.
"""

import math
from typing import Any, NamedTuple

import torch

from ..common.decay import as_complex
from ..common.launch import on_device, power_of_two, tl, triton
from ..common.once import differentiable_once
from ..diagonal.step import grouped_coefficients
from .readout import pull_back
from .scan import LARGEST_AMPLIFICATION


class Tokens(NamedTuple):
    """rows `[tokens, G, P, 2, M]`, columns `[tokens, G, P, W]` and the inputs of the state `[tokens, G, W]`.

    One of rows and columns is the output: rows as one such tensor for each block of columns, to be summed.
    """

    rows: Any
    columns: Any
    inputs: Any


class Transition(NamedTuple):
    """The decay and beta, `[G, 2, M]`."""

    decay: Any
    beta: Any


class States(NamedTuple):
    """first and final `[documents, G, 2, M, W]`; kept `[segments, G, 2, M, W]`, those before every segment, or None."""

    first: Any
    kept: Any
    final: Any


class Walks(NamedTuple):
    """Where the documents begin, how long they are, and which of the kept states is their first; `[documents]`."""

    starts: Any
    lengths: Any
    kept_starts: Any


@triton.jit
def _load_pair(pointer, rows, inside):
    """Complex numbers of which the imaginary parts lie behind all real ones; rows counts the real ones."""
    return tl.load(pointer, mask=inside, other=0.0), tl.load(pointer + rows, mask=inside, other=0.0)


@triton.jit
def walk(
    tokens, transition, states, walks, count, groups, size, width, every,
    P: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr, TO_ROWS: tl.constexpr,
):  # fmt: skip
    """Forward over `count` tokens; grid [documents, groups, blocks of columns]. TO_ROWS: rows are written."""
    document, group, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, w = tl.arange(0, BM), block * BW + tl.arange(0, BW)
    mode, column = m < size, w < width
    tile, plane = m[:, None] * width + w[None, :], size * width
    inside = mode[:, None] & column[None, :]
    d_re, d_im = _load_pair(transition.decay + group * 2 * size + m, size, mode)
    b_re, b_im = _load_pair(transition.beta + group * 2 * size + m, size, mode)
    at = (document.to(tl.int64) * groups + group) * 2 * plane
    x_re, x_im = _load_pair(states.first + at + tile, plane, inside)
    start, length = tl.load(walks.starts + document).to(tl.int64), tl.load(walks.lengths + document)
    segment = tl.load(walks.kept_starts + document).to(tl.int64)
    for t in range(length):
        if states.kept is not None and t % every == 0:
            before = states.kept + ((segment + t // every) * groups + group) * 2 * plane + tile
            tl.store(before, x_re, mask=inside)
            tl.store(before + plane, x_im, mask=inside)
        token = (start + t) * groups + group
        u = tl.load(tokens.inputs + token * width + w, mask=column, other=0.0)
        x_re, x_im = (
            d_re[:, None] * x_re - d_im[:, None] * x_im + b_re[:, None] * u[None, :],
            d_re[:, None] * x_im + d_im[:, None] * x_re + b_im[:, None] * u[None, :],
        )
        for p in tl.static_range(P):
            r = tokens.rows + (token * P + p) * 2 * size + m
            c = tokens.columns + (token * P + p) * width + w
            if TO_ROWS:
                r += block.to(tl.int64) * count * groups * P * 2 * size
                q = tl.load(c, mask=column, other=0.0)
                tl.store(r, tl.sum(x_re * q[None, :], axis=1), mask=mode)
                tl.store(r + size, tl.sum(x_im * q[None, :], axis=1), mask=mode)
            else:
                r_re, r_im = _load_pair(r, size, mode)
                tl.store(c, tl.sum(r_re[:, None] * x_re + r_im[:, None] * x_im, axis=0), mask=column)
    tl.store(states.final + at + tile, x_re, mask=inside)
    tl.store(states.final + at + plane + tile, x_im, mask=inside)


@triton.jit
def walk_back(
    tokens, transition, states, d_tokens, d_transition, d_states, walks, count, groups, size, width, every,
    P: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr, TO_ROWS: tl.constexpr,
):  # fmt: skip
    """Backward of `walk`. The one of rows and columns that forward wrote now holds its gradient; that of the other is
    written to `d_tokens`. d_transition `[documents, blocks, G, 2, M]` is to be summed; of d_states, final is read.
    """
    document, group, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, w = tl.arange(0, BM), block * BW + tl.arange(0, BW)
    mode, column = m < size, w < width
    tile, plane = m[:, None] * width + w[None, :], size * width
    inside = mode[:, None] & column[None, :]
    d_re, d_im = _load_pair(transition.decay + group * 2 * size + m, size, mode)
    b_re, b_im = _load_pair(transition.beta + group * 2 * size + m, size, mode)
    magnitude = d_re * d_re + d_im * d_im
    magnitude = tl.where(magnitude > 0, magnitude, 1.0)  # a mode that is gone at once is never inverted
    i_re, i_im = d_re / magnitude, -d_im / magnitude  # 1 / lambda
    at = (document.to(tl.int64) * groups + group) * 2 * plane
    x_re, x_im = _load_pair(states.final + at + tile, plane, inside)
    g_re, g_im = _load_pair(d_states.final + at + tile, plane, inside)
    start, length = tl.load(walks.starts + document).to(tl.int64), tl.load(walks.lengths + document)
    segment = tl.load(walks.kept_starts + document).to(tl.int64)
    dd_re, dd_im = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    db_re, db_im = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for back in range(length):
        t = length - 1 - back
        token = (start + t) * groups + group
        for p in tl.static_range(P):
            r = tokens.rows + (token * P + p) * 2 * size + m
            r_re, r_im = _load_pair(r, size, mode)
            c = tl.load(tokens.columns + (token * P + p) * width + w, mask=column, other=0.0)
            if TO_ROWS:
                d = tl.sum(r_re[:, None] * x_re + r_im[:, None] * x_im, axis=0)
                tl.store(d_tokens.columns + (token * P + p) * width + w, d, mask=column)
            else:
                d = d_tokens.rows + (block.to(tl.int64) * count * groups * P + token * P + p) * 2 * size + m
                tl.store(d, tl.sum(x_re * c[None, :], axis=1), mask=mode)
                tl.store(d + size, tl.sum(x_im * c[None, :], axis=1), mask=mode)
            g_re += r_re[:, None] * c[None, :]
            g_im += r_im[:, None] * c[None, :]
        u = tl.load(tokens.inputs + token * width + w, mask=column, other=0.0)
        d = tl.sum(b_re[:, None] * g_re + b_im[:, None] * g_im, axis=0)
        tl.store(d_tokens.inputs + token * width + w, d, mask=column)
        db_re += tl.sum(g_re * u[None, :], axis=1)
        db_im += tl.sum(g_im * u[None, :], axis=1)
        if t % every == 0:  # the state before a segment is kept: no error is carried on
            before = states.kept + ((segment + t // every) * groups + group) * 2 * plane + tile
            x_re, x_im = _load_pair(before, plane, inside)
        else:
            x_re, x_im = x_re - b_re[:, None] * u[None, :], x_im - b_im[:, None] * u[None, :]
            x_re, x_im = (
                i_re[:, None] * x_re - i_im[:, None] * x_im,
                i_re[:, None] * x_im + i_im[:, None] * x_re,
            )
        dd_re += tl.sum(x_re * g_re + x_im * g_im, axis=1)
        dd_im += tl.sum(x_re * g_im - x_im * g_re, axis=1)
        g_re, g_im = (
            d_re[:, None] * g_re + d_im[:, None] * g_im,
            d_re[:, None] * g_im - d_im[:, None] * g_re,
        )
    tl.store(d_states.first + at + tile, g_re, mask=inside)
    tl.store(d_states.first + at + plane + tile, g_im, mask=inside)
    at = ((document.to(tl.int64) * tl.num_programs(2) + block) * groups + group) * 2 * size + m
    tl.store(d_transition.decay + at, dd_re, mask=mode)
    tl.store(d_transition.decay + at + size, dd_im, mask=mode)
    tl.store(d_transition.beta + at, db_re, mask=mode)
    tl.store(d_transition.beta + at + size, db_im, mask=mode)


_walk, _walk_back = walk, walk_back


class _Walk(torch.autograd.Function):
    """`walk` of contiguous tensors with gradients. Of rows and columns, the one that is None is the output."""

    @staticmethod
    def forward(ctx, rows, columns, inputs, decay, beta, first, starts, lengths, every):
        tokens, groups, width = inputs.shape
        size, to_rows = decay.shape[-1], rows is None
        per_group = (columns if to_rows else rows).shape[2]
        blocks, block_sizes = _blocks(size, width)
        segments = (lengths + every - 1) // every
        kept_starts = segments.cumsum(0) - segments
        grads = any(ctx.needs_input_grad)
        kept = first.new_empty(int(segments.sum()), groups, 2, size, width) if grads else None
        if to_rows:
            output = rows = first.new_empty(blocks, tokens, groups, per_group, 2, size)
        else:
            output = columns = first.new_empty(tokens, groups, per_group, width)
        final = torch.empty_like(first)
        walks = Walks(starts, lengths, kept_starts)
        with on_device(inputs):
            _walk[(len(starts), groups, blocks)](
                Tokens(rows, columns, inputs), Transition(decay, beta), States(first, kept, final), walks,
                tokens, groups, size, width, every, P=per_group, **block_sizes, TO_ROWS=to_rows,
            )  # fmt: skip
        ctx.save_for_backward(None if to_rows else rows, columns if to_rows else None, inputs, decay, beta, kept, final)
        ctx.walks, ctx.every, ctx.per_group = walks, every, per_group
        return output.sum(0) if to_rows else output, final

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad_output, grad_final):
        rows, columns, inputs, decay, beta, kept, final = saved
        tokens, groups, width = inputs.shape
        size, to_rows = decay.shape[-1], rows is None
        blocks, block_sizes = _blocks(size, width)
        grad_output = grad_output.contiguous()
        d_rows = d_columns = None
        if to_rows:
            rows, d_columns = grad_output, torch.empty_like(columns)
        else:
            columns, d_rows = grad_output, rows.new_empty(blocks, *rows.shape)
        d_inputs, d_first = torch.empty_like(inputs), torch.empty_like(final)
        d_decay, d_beta = (decay.new_empty(len(ctx.walks.starts), blocks, *decay.shape) for _ in range(2))
        with on_device(inputs):
            _walk_back[(len(ctx.walks.starts), groups, blocks)](
                Tokens(rows, columns, inputs), Transition(decay, beta), States(None, kept, final),
                Tokens(d_rows, d_columns, d_inputs), Transition(d_decay, d_beta),
                States(d_first, None, grad_final.contiguous()), ctx.walks,
                tokens, groups, size, width, ctx.every, P=ctx.per_group, **block_sizes, TO_ROWS=to_rows,
                num_warps=8,  # a state and its gradient: with 4 they fill the registers, and some spill
            )  # fmt: skip
        d_rows = None if d_rows is None else d_rows.sum(0)
        return d_rows, d_columns, d_inputs, d_decay.sum((0, 1)), d_beta.sum((0, 1)), d_first, None, None, None


def _blocks(size: int, width: int) -> tuple[int, dict[str, int]]:
    """A program holds all modes and as many columns as leave it about 2,048 complex numbers."""
    modes = power_of_two(size)
    columns = min(power_of_two(width), max(8, 2048 // modes))
    return -(-width // columns), {"BM": modes, "BW": columns}


def triton_scan_attention(
    query, key, value, log_decay, input_matrix, coefficient_matrix, product: str, initial_state, boundaries: list[int],
    every: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `scan_attention`, in float32."""
    batch, length, heads, feature_dim = query.shape
    groups, size = key.shape[2], log_decay.shape[1]
    ends = [batch_row * length + end for batch_row in range(batch) for end in boundaries[1:]]
    starts = torch.tensor([0, *ends[:-1]], device=query.device)
    lengths = torch.tensor(ends, device=query.device) - starts
    fastest = float(-log_decay.detach()[..., 0].amin())
    if fastest > 0:
        every = max(1, min(every, int(math.log(LARGEST_AMPLIFICATION) / fastest)))
    decay = as_complex(log_decay).exp()
    decay, beta = torch.stack([decay.real, decay.imag], dim=1), input_matrix.movedim(-1, 1)
    if initial_state is None:
        state = query.new_zeros(len(ends), groups, 2, size, feature_dim + value.shape[-1])
    else:
        state = initial_state
    first = state.split([feature_dim, value.shape[-1]], dim=-1)
    tokens = query.flatten(0, 1).unflatten(1, (groups, heads // groups))
    walked = starts, lengths, every
    tokens, key, value, decay, beta, *first = (
        x.contiguous() for x in (tokens, key.flatten(0, 1), value.flatten(0, 1), decay, beta, *first)
    )
    pulled, key_state = _Walk.apply(None, tokens, key, decay, beta, first[0], *walked)
    y = torch.complex(pulled[..., 0, :], pulled[..., 1, :]).movedim(1, 0)  # [G, B T, P, M]
    p = pull_back(grouped_coefficients(coefficient_matrix, query.dtype), y, product).movedim(0, 1)
    rows = torch.stack([p.real, p.imag], dim=-2)
    output, value_state = _Walk.apply(rows, None, value, decay, beta, first[1], *walked)
    output = output.flatten(1, 2).unflatten(0, (batch, length))
    return output, torch.cat([key_state, value_state], dim=-1)
