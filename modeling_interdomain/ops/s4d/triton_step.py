"""One decoding token of the S4D control in one launch: a program reads and writes some columns of a state once.

Nothing is read back by the host, so that a CUDA graph can hold the step.
"""

import torch

from ..common.cpu import namespace
from ..common.launch import multiprocessors, on_device, power_of_two, tl, triton
from ..common.tiles import slots_of, state_of
from ..diagonal.triton_tiles import times


@triton.jit
def s4d_step(
    x, decay, turn, beta, rows, state, mask, output, groups, per_group, size, width,
    BM: tl.constexpr, BW: tl.constexpr, slots=None, slot_size=0,
):  # fmt: skip
    """`S <- lambda S + beta x`, `output = rows S`; grid [batch, groups, blocks of columns].

    x `[batch, groups, W]`; decay, turn `[groups, M]`; beta `[groups, 2, M]`; rows `[groups, per_group, 2 M]`; state
    `[batch, groups, 2, M, W]`; output `[batch, groups, per_group, W]`; mask, slots and slot_size: see `state_of`.
    """
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * groups + group
    modes = tl.arange(0, BM)
    columns = tl.program_id(2) * BW + tl.arange(0, BW)
    mode = modes < size
    column = columns < width
    inside = mode[:, None] & column[None, :]
    here, real_token = state_of(state, group, groups, 2 * size * width, mask, slots, slot_size)
    at = here + modes[:, None] * width + columns[None, :]
    s_re = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    s_im = tl.load(at + size * width, mask=inside, other=0.0).to(tl.float32)
    d_re = tl.load(decay + group * size + modes, mask=mode, other=0.0)[:, None]
    d_im = tl.load(turn + group * size + modes, mask=mode, other=0.0)[:, None]
    b_re = tl.load(beta + group * 2 * size + modes, mask=mode, other=0.0)[:, None]
    b_im = tl.load(beta + group * 2 * size + size + modes, mask=mode, other=0.0)[:, None]
    token = tl.load(x + row * width + columns, mask=column, other=0.0).to(tl.float32)[None, :]
    s_re, s_im = times(d_re, d_im, s_re, s_im)
    s_re += b_re * token
    s_im += b_im * token
    if real_token > 0:
        tl.store(at, s_re.to(state.dtype.element_ty), mask=inside)
        tl.store(at + size * width, s_im.to(state.dtype.element_ty), mask=inside)
    for head in range(per_group):
        weights = rows + (group * per_group + head) * 2 * size + modes
        r_re = tl.load(weights, mask=mode, other=0.0)[:, None]
        r_im = tl.load(weights + size, mask=mode, other=0.0)[:, None]
        read = tl.sum(r_re * s_re + r_im * s_im, 0)
        if real_token == 0:
            read = tl.zeros_like(read)
        tl.store(output + (row * per_group + head) * width + columns, read.to(output.dtype.element_ty), mask=column)


_s4d_step = s4d_step


@torch.library.custom_op(f"{namespace(__name__)}::step", mutates_args=("state",))
def triton_s4d_step(
    inputs: torch.Tensor, decay: torch.Tensor, turn: torch.Tensor, beta: torch.Tensor, rows: torch.Tensor,
    state: torch.Tensor, mask: torch.Tensor | None, slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `take_s4d_step`, for inputs `[B, G, W]` and what `s4d_tables` gives in float32; `[B, H, W]`.

    The state, which is contiguous, or with slots `[B]` each slot of it, may be in any floating-point dtype.
    """
    (batch, groups, width), per_group, size = inputs.shape, rows.shape[1], state.shape[3]
    output = inputs.new_empty(batch, groups * per_group, width)
    tables = (x.contiguous() for x in (decay, turn, beta, rows))
    mask = None if mask is None else mask.contiguous().view(torch.uint8)
    # Many columns a program where rows and groups alone fill the device.
    many = batch * groups >= 2 * multiprocessors(inputs.device)
    modes = power_of_two(size)
    columns = min(power_of_two(width), max(16, (4096 if many else 1024) // modes))
    with on_device(inputs):
        _s4d_step[(batch, groups, triton.cdiv(width, columns))](
            inputs.contiguous(), *tables, state, mask, output, groups, per_group, size, width, BM=modes, BW=columns,
            **slots_of(state, slots), num_warps=4,
        )  # fmt: skip
    return output


@triton_s4d_step.register_fake
def _(inputs, decay, turn, beta, rows, state, mask, slots=None):
    return inputs.new_empty(inputs.shape[0], inputs.shape[1] * rows.shape[1], inputs.shape[2])
