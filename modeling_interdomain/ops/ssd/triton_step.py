"""One decoding token of state space duality in one launch: a program reads and writes a slice of a head's state once.

Nothing is read back by the host, so that a CUDA graph can hold the step.
"""

import torch

from ..common.cpu import namespace
from ..common.launch import multiprocessors, on_device, power_of_two, tl, triton
from ..common.tiles import slots_of, state_of


@triton.jit
def ssd_step(
    query, key, value, log_decay, state, mask, output, groups, width, size, BP: tl.constexpr, BN: tl.constexpr,
    slots=None, slot_size=0,
):  # fmt: skip
    """`S <- exp(log_decay) S + value key^T`, `output = S query`; grid [batch, heads, blocks of P].

    query, key `[batch, groups, N]`; value, output `[batch, heads, P]`; log_decay `[batch, heads]`; state `[batch,
    heads, P, N]`; mask, slots and slot_size: see `state_of`.
    """
    heads = tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64)
    head = row * heads + tl.program_id(1)
    group = row * groups + tl.program_id(1) // (heads // groups)
    p = tl.program_id(2) * BP + tl.arange(0, BP)
    n = tl.arange(0, BN)
    here, real_token = state_of(state, tl.program_id(1), heads, width * size, mask, slots, slot_size)
    at = here + p[:, None] * size + n[None, :]
    inside = (p < width)[:, None] & (n < size)[None, :]
    u = tl.load(value + head * width + p, mask=p < width, other=0.0).to(tl.float32)
    k = tl.load(key + group * size + n, mask=n < size, other=0.0).to(tl.float32)
    q = tl.load(query + group * size + n, mask=n < size, other=0.0).to(tl.float32)
    s = tl.load(at, mask=inside, other=0.0).to(tl.float32) * tl.exp(tl.load(log_decay + head).to(tl.float32))
    s += u[:, None] * k[None, :]
    read = tl.sum(s * q[None, :], 1)
    if real_token > 0:
        tl.store(at, s.to(state.dtype.element_ty), mask=inside)
    else:
        read = tl.zeros_like(read)
    tl.store(output + head * width + p, read.to(output.dtype.element_ty), mask=p < width)


_ssd_step = ssd_step


@torch.library.custom_op(f"{namespace(__name__)}::step", mutates_args=("state",))
def triton_ssd_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor,
    mask: torch.Tensor | None, slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `take_ssd_step`; the state, which is contiguous, or with slots `[B]` each slot of it, may be in any
    floating-point dtype.
    """
    (batch, heads, width), (groups, size) = value.shape, key.shape[1:]
    output = value.new_empty(value.shape)
    query, key, value, log_decay = (x.contiguous() for x in (query, key, value, log_decay))
    mask = None if mask is None else mask.contiguous().view(torch.uint8)
    # A whole head a program where heads alone fill the device, and at least 4 KiB of state each.
    many = batch * heads >= 2 * multiprocessors(query.device)
    modes = power_of_two(size)
    rows = min(power_of_two(width), max(16, (8192 if many else 1024) // modes))
    with on_device(query):
        _ssd_step[(batch, heads, triton.cdiv(width, rows))](
            query, key, value, log_decay, state, mask, output, groups, width, size, BP=rows, BN=modes,
            **slots_of(state, slots), num_warps=4,
        )  # fmt: skip
    return output


@triton_ssd_step.register_fake
def _(query, key, value, log_decay, state, mask, slots=None):
    return torch.empty_like(value, memory_format=torch.contiguous_format)
