"""The states around the chunks, forward and backward: what carries information from one chunk to the next.

One program owns a part of the state of one segment and group, and walks its chunks with that part on the chip, so
that a chunk costs one read of its tokens and one write of its state. Tokens of a partial chunk are shifted to the end
of the tile, where their distances to the end of the chunk are those of a full one.

A row (or document) is one segment where rows and groups are enough to fill the device. Otherwise it is cut into
several: a first pass finds what each leaves at its end on its own, `carry` joins them, and the pass proper starts from
there.
"""

from typing import Any, NamedTuple

import torch

from ..common.launch import tl, triton
from ..common.tiles import as_operand, dot, left_over, narrow, segment_of
from .triton_tiles import load_pair, times, times_conj


class Columns(NamedTuple):
    """Which part of the whole state `[., groups, 2, modes, state_width]` the tokens of one side write: `width` columns
    from `offset`; in the states before chunks there are `padded` columns.
    """

    width: int
    padded: int
    modes: int
    state_width: int
    offset: int


class LaterGradients(NamedTuple):
    """What `chunk_states_backward` gives of the inputs of `chunk_states`; see there."""

    x: Any
    initial: Any
    sums: Any


@triton.jit
def _left_after(gates, start, inside, count, group, groups):
    """After a chunk of `count` tokens, what gates leave of the state before it and of those that are `inside`."""
    last = (start + count - 1) * groups + group
    at = (start + inside) * groups + group
    high = tl.load(gates.high + last)
    apart = high - tl.load(gates.high + at, mask=inside >= 0, other=0.0)
    apart += tl.load(gates.low + last) - tl.load(gates.low + at, mask=inside >= 0, other=0.0)
    return tl.exp(high), tl.exp(tl.minimum(apart, 0.0)) * tl.load(gates.write + at, mask=inside >= 0, other=0.0)


@triton.jit
def _load_readers(readers, token, inside, group, groups, m, M: tl.constexpr):
    """The readers of tokens for the modes m, both of which are aranges with one more axis; zero unless inside."""
    at = (token * groups + group) * 2 * M + m
    return tl.load(readers + at, mask=inside, other=0.0), tl.load(readers + M + at, mask=inside, other=0.0)


@triton.jit
def _walk(
    x, tables, gates, readers, written, initial, states, final, segment, part, start, length, slot, next_slot, groups,
    columns, C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr, PACKED: tl.constexpr,
    TWO_TERMS: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """One part of what one side moves; see `chunk_states`."""
    group = tl.program_id(1)
    m = (part % (M // BM)) * BM
    begin = (part // (M // BM)) * BW
    modes = m + tl.arange(0, BM)
    column = begin + tl.arange(0, BW)
    tokens = tl.arange(0, C)
    powers = tables.powers + group * C * 2 * M
    x += group * columns.width
    if written is not None:
        written += group * columns.width
    t_re, t_im = load_pair(tables.inputs + group * C * 2 * M, C - 1 - tokens, modes, 2 * M, M)
    t_re = tl.trans(t_re)
    t_im = tl.trans(t_im)
    rest_re = left_over(t_re, MATH)
    rest_im = left_over(t_im, MATH)

    plane = columns.modes * columns.state_width
    at = (segment.to(tl.int64) * groups + group) * 2 * columns.modes * columns.state_width
    at = at + modes[:, None] * columns.state_width + (columns.offset + column)[None, :]
    used = (modes < columns.modes)[:, None] & (column < columns.width)[None, :]
    if initial is not None:
        s_re = tl.load(initial + at, mask=used, other=0.0)
        s_im = tl.load(initial + plane + at, mask=used, other=0.0)
    else:
        s_re = tl.zeros([BM, BW], tl.float32)
        s_im = tl.zeros([BM, BW], tl.float32)
    stride = groups * 2 * M * columns.padded
    jump = (next_slot - slot) * stride
    if states is not None:
        states += (slot * groups + group) * 2 * M * columns.padded + modes[:, None] * columns.padded + column[None, :]
    for done in range(0, length, C):
        if states is not None:
            tl.store(states, narrow(s_re, states.dtype.element_ty, MATH))
            tl.store(states + M * columns.padded, narrow(s_im, states.dtype.element_ty, MATH))
            if PACKED:
                states += jump
                jump = tl.cast(stride, tl.int64)
            else:
                states += stride
        count = tl.minimum(length - done, C)
        inside = tokens - (C - count)
        address = (start + done + inside)[:, None] * (groups * columns.width) + column[None, :]
        valid = (inside >= 0)[:, None] & (column < columns.width)[None, :]
        x_tile = tl.load(x + address, mask=valid, other=0.0)
        if written is not None:
            real = (inside >= 0)[:, None] & (modes >= 0)[None, :]
            r_re, r_im = _load_readers(
                readers, (start + done + inside)[:, None], real, group, groups, modes[None, :], M
            )  # fmt: skip
            found = dot(r_im, s_im, dot(r_re, s_re, tl.zeros([C, BW], tl.float32), MATH), MATH)
            x_tile = narrow(x_tile.to(tl.float32) - found, written.dtype.element_ty, MATH)
            tl.store(written + address, x_tile, mask=valid)
        d_re = tl.load(powers + (count - 1) * 2 * M + modes)[:, None]
        d_im = tl.load(powers + (count - 1) * 2 * M + M + modes)[:, None]
        if gates is not None:
            across, after = _left_after(gates, start + done, inside, count, group, groups)
            d_re *= across
            d_im *= across
            x_tile = x_tile.to(tl.float32) * after[:, None]
        s_re, s_im = times(d_re, d_im, s_re, s_im)
        s_re = dot(t_re, x_tile, s_re, MATH)
        s_im = dot(t_im, x_tile, s_im, MATH)
        if TWO_TERMS:
            s_re = dot(rest_re, x_tile, s_re, MATH)
            s_im = dot(rest_im, x_tile, s_im, MATH)
            if gates is not None:
                s_re = dot(t_re, left_over(x_tile, MATH), s_re, MATH)
                s_im = dot(t_im, left_over(x_tile, MATH), s_im, MATH)
    if final is not None:
        tl.store(final + at, s_re, mask=used)
        tl.store(final + plane + at, s_im, mask=used)


@triton.jit(do_not_specialize=["per_row", "row_length"])
def chunk_states(
    x, tables, initial, states, final, documents, per_row, row_length, groups, columns,
    C: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BW: tl.constexpr,
    SEGMENTS: tl.constexpr, PACKED: tl.constexpr, TWO_TERMS: tl.constexpr, MATH: tl.constexpr, gates=None,
    readers=None, written=None,
):  # fmt: skip
    """`S <- lambda^C S + sum_i lambda^(C-1-i) beta x_i`; grid [segments, groups, slices of all sides].

    x: `[tokens, groups, width]` of every side (keys and values, or what else moves the state); tables: `KernelTables`;
    columns: `Columns` of each; initial, final (either may be None): `[segments, groups, 2, modes, state_width]`; states
    before each chunk, `[slots, groups, 2, M, padded]` of each side, or None of each. TWO_TERMS: the table of inputs is
    rounded to two numbers of MATH.DTYPE instead of one, so that the state keeps the accuracy of float32 when x is exact
    in MATH.DTYPE. gates: `GateSums` or None.

    With readers `[tokens, groups, 2, M]`, of one segment a row and BM = M, tokens enter without what these read of the
    state before their chunk, the real parts of the products alone; this is also `written`, `[tokens, groups, width]`.
    """
    segment = tl.program_id(0)
    part = tl.program_id(2)
    start, length, slot, next_slot = segment_of(segment, documents, per_row, row_length, C, SEGMENTS, PACKED)
    wanted = length > 0 if final is None else length >= 0
    for side in tl.static_range(len(x)):
        slices = (M // BM) * (columns[side].padded // BW)
        if wanted & (part >= 0) & (part < slices):
            _walk(
                x[side], tables, gates, readers, written, initial, states[side], final, segment, part, start, length,
                slot, next_slot, groups, columns[side], C, M, BM, BW, PACKED, TWO_TERMS, MATH,
            )  # fmt: skip
        part -= slices


@triton.jit
def _walk_back(
    x, tables, gates, readers, others, states, grad_final, grads, later_x, later_initial, sums, documents, segments,
    per_row, row_length, heads, groups, columns, block, C: tl.constexpr, M: tl.constexpr, BW: tl.constexpr,
    EMIT: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """One block of the columns of one side; see `chunk_states_backward`."""
    group = tl.program_id(1)
    modes = tl.arange(0, M)
    column = block * BW + tl.arange(0, BW)
    tokens = tl.arange(0, C)
    powers = tables.powers + group * C * 2 * M
    t_re, t_im = load_pair(tables.inputs + group * C * 2 * M, C - 1 - tokens, modes, 2 * M, M)
    t_re = as_operand(t_re, MATH)
    t_im = as_operand(t_im, MATH)
    plane = columns.modes * columns.state_width
    used = (modes < columns.modes)[:, None] & (column < columns.width)[None, :]
    FEW: tl.constexpr = 16  # the products of all tokens at once would not fit on the chip
    decay_re = tl.zeros([M], tl.float32)
    decay_im = tl.zeros([M], tl.float32)
    beta_re = tl.zeros([M], tl.float32)
    beta_im = tl.zeros([M], tl.float32)
    aged_re = tl.zeros([M], tl.float32)
    aged_im = tl.zeros([M], tl.float32)
    per_group = heads // groups
    tile = modes[:, None] * columns.padded + column[None, :]
    for segment in range(tl.program_id(0), segments, tl.num_programs(0)):
        start, length, slot, next_slot = segment_of(segment, documents, per_row, row_length, C, SEGMENTS, PACKED)
        at = (tl.cast(segment, tl.int64) * groups + group) * 2 * columns.modes * columns.state_width
        at = at + modes[:, None] * columns.state_width + (columns.offset + column)[None, :]
        if grad_final is not None:
            g_re = tl.load(grad_final + at, mask=used, other=0.0)
            g_im = tl.load(grad_final + plane + at, mask=used, other=0.0)
        else:
            g_re = tl.zeros([M, BW], tl.float32)
            g_im = tl.zeros([M, BW], tl.float32)
        chunks = tl.cdiv(length, C)
        for back in range(0, chunks):
            c = chunks - 1 - back
            here = tl.where(c == 0, slot, next_slot + c - 1)
            count = tl.minimum(length - c * C, C)
            inside = tokens - (C - count)
            token = start + c * C + inside
            valid = (inside >= 0)[:, None] & (column < columns.width)[None, :]
            d_re = tl.load(powers + (count - 1) * 2 * M + modes)
            d_im = tl.load(powers + (count - 1) * 2 * M + M + modes)
            if gates is not None:
                across, after = _left_after(gates, start + c * C, inside, count, group, groups)
                d_re *= across
                d_im *= across
            if EMIT:
                before = states + (here * groups + group) * 2 * M * columns.padded + tile
                s_re = tl.load(before).to(tl.float32)
                s_im = tl.load(before + M * columns.padded).to(tl.float32)
                step_re, step_im = times_conj(g_re, g_im, s_re, s_im)
                step_re, step_im = times_conj(tl.sum(step_re, 1), tl.sum(step_im, 1), d_re, d_im)
                decay_re += count * step_re
                decay_im += count * step_im
                address = token[:, None] * (groups * columns.width) + group * columns.width + column[None, :]
                if C >= 64:  # the rows of a matrix instruction
                    dx = dot(t_re, g_re, tl.zeros([C, BW], tl.float32), MATH)
                    dx = dot(t_im, g_im, dx, MATH)
                else:  # turned round, the table is the side of the product that not every warp holds
                    dx = dot(tl.trans(g_re), tl.trans(t_re), tl.zeros([BW, C], tl.float32), MATH)
                    dx = tl.trans(dot(tl.trans(g_im), tl.trans(t_im), dx, MATH))
                if gates is not None:
                    dx *= after[:, None]
                    x_tile = tl.load(x + address, mask=valid, other=0.0).to(tl.float32)
                    of_last = tl.sum(step_re, 0) + tl.sum(tl.sum(dx * x_tile, 1), 0)
                for h in tl.range(0, C, FEW, num_stages=1, loop_unroll_factor=1):
                    at_h = h + tl.arange(0, FEW)
                    age = C - 1 - at_h
                    real = at_h >= C - count
                    address_h = (start + c * C + at_h - (C - count))[None, :] * (groups * columns.width)
                    address_h = address_h + group * columns.width + column[:, None]
                    x_h = tl.load(x + address_h, mask=real[None, :] & (column < columns.width)[:, None], other=0.0)
                    if gates is not None:
                        left_h = _left_after(gates, start + c * C, at_h - (C - count), count, group, groups)
                        x_h = x_h.to(tl.float32) * left_h[1][None, :]
                    i_re = dot(g_re, x_h, tl.zeros([M, FEW], tl.float32), MATH)
                    i_im = dot(g_im, x_h, tl.zeros([M, FEW], tl.float32), MATH)
                    # lambda^age is the power one step younger; where there is none, it is 1.
                    younger = (age - 1)[None, :] * 2 * M + modes[:, None]
                    older = (age > 0)[None, :] & (modes >= 0)[:, None]
                    u_re = tl.load(powers + younger, mask=older, other=1.0)
                    u_im = tl.load(powers + M + younger, mask=older, other=0.0)
                    i_re, i_im = times_conj(i_re, i_im, u_re, u_im)
                    beta_re += tl.sum(i_re, 1)
                    beta_im += tl.sum(i_im, 1)
                    aged_re += tl.sum(age[None, :].to(tl.float32) * i_re, 1)
                    aged_im += tl.sum(age[None, :].to(tl.float32) * i_im, 1)
                for head in range(group * per_group, (group + 1) * per_group):
                    direct = token[:, None] * (heads * columns.width) + head * columns.width + column[None, :]
                    dx += tl.load(grads.tokens + direct, mask=valid, other=0.0).to(tl.float32)
                if others is not None:
                    dx += tl.load(others.tokens + address, mask=valid, other=0.0).to(tl.float32)
                    of_rows = tl.load(others.rows + address, mask=valid, other=0.0).to(tl.float32)
                    tl.store(later_x + address, narrow(dx + of_rows, later_x.dtype.element_ty, MATH), mask=valid)
                else:
                    tl.store(later_x + address, narrow(dx, later_x.dtype.element_ty, MATH), mask=valid)
                if gates is not None:
                    at_token = (token * tl.num_programs(2) + tl.program_id(2)) * groups + group
                    if readers is None:
                        tl.store(gates.written + at_token, tl.sum(dx * x_tile, 1), mask=inside >= 0)
                    tl.store(gates.last + at_token, of_last + tl.zeros([C], tl.float32), mask=tokens == C - 1)
            g_re, g_im = times_conj(g_re, g_im, d_re[:, None], d_im[:, None])
            for head in range(group * per_group, (group + 1) * per_group):
                local = grads.states + (here * heads + head) * 2 * M * columns.padded + tile
                g_re += tl.load(local).to(tl.float32)
                g_im += tl.load(local + M * columns.padded).to(tl.float32)
            if others is not None:
                local = others.states + (here * groups + group) * 2 * M * columns.padded + tile
                g_re += tl.load(local).to(tl.float32)
                g_im += tl.load(local + M * columns.padded).to(tl.float32)
            if readers is not None:
                real = (inside >= 0)[:, None] & (modes >= 0)[None, :]
                r_re, r_im = _load_readers(readers, token[:, None], real, group, groups, modes[None, :], M)
                g_re -= dot(tl.trans(r_re), dx, tl.zeros([M, BW], tl.float32), MATH)
                g_im -= dot(tl.trans(r_im), dx, tl.zeros([M, BW], tl.float32), MATH)
        if later_initial is not None:
            tl.store(later_initial + at, g_re, mask=used)
            tl.store(later_initial + plane + at, g_im, mask=used)
    if EMIT:
        tl.store(sums + modes, decay_re)
        tl.store(sums + M + modes, decay_im)
        tl.store(sums + 2 * M + modes, beta_re)
        tl.store(sums + 3 * M + modes, beta_im)
        tl.store(sums + 4 * M + modes, aged_re)
        tl.store(sums + 5 * M + modes, aged_im)


@triton.jit(do_not_specialize=["segments", "per_row", "row_length"])
def chunk_states_backward(
    x, tables, states, grad_final, grads, later, documents, segments, per_row, row_length, heads, groups, columns,
    C: tl.constexpr, M: tl.constexpr, BW: tl.constexpr, EMIT: tl.constexpr, SEGMENTS: tl.constexpr,
    PACKED: tl.constexpr, MATH: tl.constexpr, gates=None, readers=None, others=None,
):  # fmt: skip
    """The adjoint of `chunk_states`, last chunk first; grid [lanes, groups, column blocks of all sides].

    Lane l works on segments l, l + lanes, ... grads: `ChunkGradients` of each side, summed over the heads of the group.
    Written, `later`: x `[tokens, groups, width]` of each side; initial like `initial` of `chunk_states` (or None); and
    what each program leaves to be summed, `[lanes, blocks, groups, 3, 2, M]`, see `Partial`; with gates, `written` and
    `last` of `GateSums`. Without EMIT, initial alone. others: `KeyGradients` of triton_delta.py or None.

    With readers, as in `chunk_states`, x is what enters the state, and the gradient that is written is that of what the
    readers were multiplied for; `written` is left to others.
    """
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
    sums = later.sums + (program * groups + tl.program_id(1)) * 6 * M
    block = tl.program_id(2)
    for side in tl.static_range(len(x)):
        blocks = columns[side].padded // BW
        if (block >= 0) & (block < blocks):
            _walk_back(
                x[side], tables, gates, readers, others, states[side], grad_final, grads[side], later.x[side],
                later.initial, sums, documents, segments, per_row, row_length, heads, groups, columns[side], block, C,
                M, BW, EMIT, SEGMENTS, PACKED, MATH,
            )  # fmt: skip
        block -= blocks


def segment_ends(lengths: torch.Tensor, chunk: int, segments: int) -> torch.Tensor:
    """The ends of the segments of rows of `lengths` `[rows]` tokens, `[rows, segments + 1]`, starting with 0.

    Cut like `segment_of` of `ops/common/tiles.py`: whole chunks, as evenly as they go; the last segments may be empty.
    """
    chunks = (lengths + chunk - 1) // chunk
    each = (chunks + segments - 1) // segments
    ends = each[:, None] * torch.arange(segments + 1, device=lengths.device) * chunk
    return torch.minimum(ends, lengths[:, None])


def _decays(powers: torch.Tensor, distance: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """lambda^distance where `used`, otherwise 0; `[*distance.shape, G, M]`, from powers `[G, C, 2, M]`."""
    chunk, size = powers.shape[1], powers.shape[3]
    table = torch.complex(powers[:, :, 0].double(), powers[:, :, 1].double())  # [G, C, M], lambda^(t+1)
    whole, rest = distance // chunk, distance % chunk
    last = table[:, -1]
    full = torch.polar(last.abs() ** whole[..., None, None], last.angle() * whole[..., None, None])
    ones = torch.ones_like(table[:, :1])
    part = torch.cat([ones, table], dim=1).movedim(1, 0)[rest]
    return torch.where(used[..., None, None], full * part, 0).to(torch.complex64).view(*distance.shape, -1, size)


def carry(
    powers: torch.Tensor, sources: torch.Tensor, at: torch.Tensor, to: torch.Tensor, gates: torch.Tensor | None = None
) -> torch.Tensor:
    """`out[s] = sum_j lambda^(to_s - at_j) sources[j]` over the sources at or before `to_s`.

    Args:
        powers: `[G, C, 2, M]`, lambda^(t+1).
        sources: `[rows, segments, G, 2, M, width]`.
        at, to: `[rows, segments]`, tokens; source j counts for output s where j <= s.
        gates: `[rows, segments, G]`, the sums of gates of time up to there, where `at` is `to`; exp(gates_s - gates_j)
            is a factor besides.

    Returns:
        Like `sources`.
    """
    segments = torch.arange(sources.shape[1], device=sources.device)
    used = (segments[None, :] <= segments[:, None])[None]
    distance = torch.where(used, to[:, :, None] - at[:, None, :], 0)
    decays = _decays(powers, distance, used.expand_as(distance))  # [rows, s, j, G, M]
    if gates is not None:
        left = torch.where(used[..., None], gates[:, :, None] - gates[:, None, :], 0).exp()
        decays = decays * left[..., None].to(torch.float32)
    numbers = torch.complex(sources[:, :, :, 0], sources[:, :, :, 1])
    # One product a mode: [rows, G, M, s, j] times [rows, G, M, j, width].
    joined = decays.permute(0, 3, 4, 1, 2) @ numbers.permute(0, 2, 3, 1, 4)
    joined = joined.permute(0, 3, 1, 2, 4)
    return torch.stack([joined.real, joined.imag], dim=3).contiguous()


def carry_back(
    powers: torch.Tensor, sources: torch.Tensor, at: torch.Tensor, to: torch.Tensor, gates: torch.Tensor | None = None
) -> torch.Tensor:
    """The adjoint road: `out[s] = sum_{j >= s} conj(lambda)^(at_j - to_s) sources[j]`."""
    conjugate = torch.stack([powers[:, :, 0], -powers[:, :, 1]], dim=2)
    gates = None if gates is None else -gates.flip(1)
    return carry(conjugate, sources.flip(1), -at.flip(1), -to.flip(1), gates).flip(1).contiguous()
