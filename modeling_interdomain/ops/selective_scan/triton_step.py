"""One decoding token of the selective scan in one launch: a program reads and writes the states of some channels once.

Nothing is read back by the host, so that a CUDA graph can hold the step.
"""

import torch

from ..common.cpu import namespace
from ..common.launch import multiprocessors, on_device, power_of_two, tl, triton
from ..common.tiles import slots_of, state_of


@triton.jit
def scan_step(
    query, key, value, step, rate, skip, state, mask, output, channels, size, BE: tl.constexpr, BN: tl.constexpr,
    slots=None, slot_size=0,
):  # fmt: skip
    """`h <- exp(step rate) h + step value key`, `output = query . h + skip value`; grid [batch, blocks of channels].

    query, key `[batch, N]`; value, step, output `[batch, E]`; rate `[N, E]`; skip `[E]` or None; state `[batch, N, E]`;
    mask, slots and slot_size: see `state_of`.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    n = tl.arange(0, BN)
    at = n[:, None] * channels + e[None, :]
    inside = (n < size)[:, None] & (e < channels)[None, :]
    here, real_token = state_of(state, 0, 1, size * channels, mask, slots, slot_size)
    here += at
    x = tl.load(value + row * channels + e, mask=e < channels, other=0.0).to(tl.float32)
    dt = tl.load(step + row * channels + e, mask=e < channels, other=0.0).to(tl.float32)
    k = tl.load(key + row * size + n, mask=n < size, other=0.0).to(tl.float32)
    q = tl.load(query + row * size + n, mask=n < size, other=0.0).to(tl.float32)
    rates = tl.load(rate + at, mask=inside, other=0.0).to(tl.float32)
    h = tl.load(here, mask=inside, other=0.0).to(tl.float32) * tl.exp(dt[None, :] * rates)
    h += k[:, None] * (dt * x)[None, :]
    read = tl.sum(h * q[:, None], 0)
    if skip is not None:
        read += tl.load(skip + e, mask=e < channels, other=0.0).to(tl.float32) * x
    if real_token > 0:
        tl.store(here, h.to(state.dtype.element_ty), mask=inside)
    else:
        read = tl.zeros_like(read)
    tl.store(output + row * channels + e, read.to(output.dtype.element_ty), mask=e < channels)


_scan_step = scan_step


@torch.library.custom_op(f"{namespace(__name__)}::step", mutates_args=("state",))
def triton_scan_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: torch.Tensor, rate: torch.Tensor,
    state: torch.Tensor, skip: torch.Tensor | None, mask: torch.Tensor | None, slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `take_scan_step`; the state, which is contiguous, or with slots `[B]` each slot of it, may be in any
    floating-point dtype.
    """
    (batch, channels), size = value.shape, key.shape[1]
    output = value.new_empty(value.shape)
    query, key, value, step, rate = (x.contiguous() for x in (query, key, value, step, rate))
    skip = None if skip is None else skip.contiguous()
    mask = None if mask is None else mask.contiguous().view(torch.uint8)
    # Many channels a program where rows alone fill the device.
    many = batch * channels * size >= 8192 * multiprocessors(query.device)
    numbers = power_of_two(size, least=1)
    each = min(power_of_two(channels), max(16, (4096 if many else 1024) // numbers))
    with on_device(query):
        _scan_step[(batch, triton.cdiv(channels, each))](
            query, key, value, step, rate, skip, state, mask, output, channels, size, BE=each, BN=numbers,
            **slots_of(state, slots), num_warps=4,
        )  # fmt: skip
    return output


@triton_scan_step.register_fake
def _(query, key, value, step, rate, state, skip, mask, slots=None):
    return torch.empty_like(value, memory_format=torch.contiguous_format)
