"""The selective scan as fused kernels behind one opaque operator of `torch.library`.

Every channel and state number has a decay of its own, so no matrix product joins tokens. A program holds the states of
some channels of a row or document and goes through its chunks; within a chunk of C tokens the states are a parallel
prefix of the pairs (decay, input). Forward keeps nothing: backward walks once more to keep the states before the chunks
and goes back from the last one, with the states before the tokens as one prefix and their gradients as another, so that
nothing is divided by a decay. Sums over channels and rows have a fixed order. No length is read by the host.
"""

from typing import Any, NamedTuple

import torch

from ..common.custom_op import differentiable
from ..common.launch import contiguous, on_device, power_of_two, tl, triton, tuned
from ..common.packing import state_rows

# Tokens of a chunk, and numbers of a tile (tokens x channels x state numbers), of which a backward program holds ten.
_CHUNK, _TILE = 32, 4096


class Tokens(NamedTuple):
    """query and key `[tokens, N]`, value and step `[tokens, E]`: those of the operator, or their gradients, of which
    query and key have one such tensor a block of channels in front.
    """

    query: Any
    key: Any
    value: Any
    step: Any


class Rows(NamedTuple):
    """Of rows or documents `[S]`: the first token, the end, and where the state before its first chunk is kept."""

    starts: Any
    ends: Any
    slots: Any


class Extent(NamedTuple):
    """What a kernel is compiled for: tokens of a chunk, N as it is and padded, and channels a program."""

    C: int
    N: int
    PADDED: int
    BE: int


@triton.jit
def _compose(decay, inputs, later_decay, later_inputs):
    return decay * later_decay, later_decay * inputs + later_inputs


@triton.jit
def _channels(x, start, first, least, length, channels, e, C: tl.constexpr):
    """`[C, BE]` in float32 of the tokens first, first + 1, ... of a row; zero before `least` and past the row's end."""
    token = first + tl.arange(0, C)
    at = (start + token).to(tl.int64)[:, None] * channels + e[None, :]
    inside = ((token >= least) & (token < length))[:, None] & (e < channels)[None, :]
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _numbers(x, start, first, least, length, EXTENT: tl.constexpr):
    """The same of state numbers, `[C, N]`."""
    token = first + tl.arange(0, EXTENT.C)
    n = tl.arange(0, EXTENT.PADDED)
    at = (start + token).to(tl.int64)[:, None] * EXTENT.N + n[None, :]
    inside = ((token >= least) & (token < length))[:, None] & (n < EXTENT.N)[None, :]
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _row(rows, channels, EXTENT: tl.constexpr):
    """Of a program's row: first token, length and slot; its channels, and where its `[BE, N]` lie in `[N, E]`."""
    row = tl.program_id(0)
    start = tl.load(rows.starts + row).to(tl.int64)
    length = (tl.load(rows.ends + row) - start).to(tl.int32)
    e = tl.program_id(1) * EXTENT.BE + tl.arange(0, EXTENT.BE)
    n = tl.arange(0, EXTENT.PADDED)
    inside = (e < channels)[:, None] & (n < EXTENT.N)[None, :]
    return start, length, tl.load(rows.slots + row).to(tl.int64), e, n[None, :] * channels + e[:, None], inside


@triton.jit
def scan(tokens, rate, first, out, kept, last, rows, channels, EXTENT: tl.constexpr):
    """`h_t = exp(step_t rate) h_{t-1} + step_t value_t key_t`, `out_t = query_t . h_t`; grid [rows, channel blocks].

    rate `[N, E]`; first, last `[rows, N, E]`, the states around a row; out `[tokens, E]`; kept `[slots, N, E]`, the
    states before the chunks. Of these last four each may be None, out together with the query.
    """
    BE: tl.constexpr = EXTENT.BE
    PADDED: tl.constexpr = EXTENT.PADDED
    C: tl.constexpr = EXTENT.C
    start, length, slot, e, at, inside = _row(rows, channels, EXTENT)
    plane = tl.cast(channels, tl.int64) * EXTENT.N
    whole = tl.program_id(0) * plane + at
    rates = tl.load(rate + at, mask=inside, other=0.0)[None]
    state = tl.zeros([BE, PADDED], tl.float32)
    if first is not None:
        state += tl.load(first + whole, mask=inside, other=0.0)
    t = tl.arange(0, C)
    for done in range(0, length, C):
        if kept is not None:
            tl.store(kept + slot * plane + at, state, mask=inside)
            slot += 1
        step = _channels(tokens.step, start, done, 0, length, channels, e, C)
        value = _channels(tokens.value, start, done, 0, length, channels, e, C)
        key = _numbers(tokens.key, start, done, 0, length, EXTENT)
        decay = tl.exp(step[:, :, None] * rates)
        inputs = (step * value)[:, :, None] * key[:, None, :]
        inputs += tl.where((t == 0)[:, None, None], decay * state[None], 0.0)
        _, states = tl.associative_scan((decay, inputs), 0, _compose)
        if out is not None:
            query = _numbers(tokens.query, start, done, 0, length, EXTENT)
            token = (start + done + t)[:, None].to(tl.int64) * channels + e[None, :]
            real = (done + t < length)[:, None] & (e < channels)[None, :]
            tl.store(out + token, tl.sum(states * query[:, None, :], 2), mask=real)
        state = tl.sum(tl.where((t == C - 1)[:, None, None], states, 0.0), 0)  # slots without a token keep it
    if last is not None:
        tl.store(last + whole, state, mask=inside)


@triton.jit(do_not_specialize=["total"])
def scan_backward(
    tokens, rate, kept, grad, grad_last, found, of_rate, of_first, rows, channels, total, EXTENT: tl.constexpr
):
    """The adjoint of `scan`, from the last chunk to the first; the same grid.

    grad `[tokens, E]`; grad_last and of_first `[rows, N, E]` or None; found: `Tokens` of gradients; of_rate `[rows, N,
    E]`, to be summed over rows. total: tokens of the call.
    """
    BE: tl.constexpr = EXTENT.BE
    PADDED: tl.constexpr = EXTENT.PADDED
    C: tl.constexpr = EXTENT.C
    start, length, slot, e, at, inside = _row(rows, channels, EXTENT)
    plane = tl.cast(channels, tl.int64) * EXTENT.N
    whole = tl.program_id(0) * plane + at
    rates = tl.load(rate + at, mask=inside, other=0.0)[None]
    later = tl.zeros([BE, PADDED], tl.float32)  # of the state after a chunk
    if grad_last is not None:
        later += tl.load(grad_last + whole, mask=inside, other=0.0)
    of_rates = tl.zeros([BE, PADDED], tl.float32)
    t = tl.arange(0, C)
    n = tl.arange(0, EXTENT.PADDED)
    numbers = tl.program_id(1).to(tl.int64) * total * EXTENT.N
    chunks = tl.cdiv(length, C)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        done = chunk * C
        # The states before the tokens: what the tokens one place earlier leave, the first of which is kept.
        step = _channels(tokens.step, start, done - 1, done, length, channels, e, C)
        value = _channels(tokens.value, start, done - 1, done, length, channels, e, C)
        key = _numbers(tokens.key, start, done - 1, done, length, EXTENT)
        entry = tl.load(kept + (slot + chunk) * plane + at, mask=inside, other=0.0)
        inputs = (step * value)[:, :, None] * key[:, None, :]
        inputs += tl.where((t == 0)[:, None, None], entry[None], 0.0)
        _, before = tl.associative_scan((tl.exp(step[:, :, None] * rates), inputs), 0, _compose)

        step = _channels(tokens.step, start, done, 0, length, channels, e, C)
        value = _channels(tokens.value, start, done, 0, length, channels, e, C)
        key = _numbers(tokens.key, start, done, 0, length, EXTENT)
        query = _numbers(tokens.query, start, done, 0, length, EXTENT)
        g = _channels(grad, start, done, 0, length, channels, e, C)
        decayed = tl.exp(step[:, :, None] * rates) * before
        states = decayed + (step * value)[:, :, None] * key[:, None, :]
        # The decay of the next token takes its gradient to this one; after the chunk it is in `later` already.
        following = _channels(tokens.step, start, done + 1, 0, tl.minimum(length, done + C), channels, e, C)
        of_states = query[:, None, :] * g[:, :, None]
        of_states += tl.where((t == C - 1)[:, None, None], later[None], 0.0)
        _, of_states = tl.associative_scan(
            (tl.exp(following[:, :, None] * rates), of_states), 0, _compose, reverse=True
        )  # fmt: skip

        of_inputs = tl.sum(of_states * key[:, None, :], 2)
        of_exponents = of_states * decayed
        of_rates += tl.sum(of_exponents * step[:, :, None], 0)
        of_step = tl.sum(of_exponents * rates, 2) + value * of_inputs
        real = done + t < length
        place = (start + done + t).to(tl.int64)
        wide = real[:, None] & (e < channels)[None, :]
        token = place[:, None] * channels + e[None, :]
        tl.store(found.value + token, (step * of_inputs).to(found.value.dtype.element_ty), mask=wide)
        tl.store(found.step + token, of_step.to(found.step.dtype.element_ty), mask=wide)
        narrow = real[:, None] & (n < EXTENT.N)[None, :]
        token = numbers + place[:, None] * EXTENT.N + n[None, :]
        tl.store(found.query + token, tl.sum(states * g[:, :, None], 1), mask=narrow)
        tl.store(found.key + token, tl.sum(of_states * (step * value)[:, :, None], 1), mask=narrow)
        decay = tl.exp(step[:, :, None] * rates)
        later = tl.sum(tl.where((t == 0)[:, None, None], decay * of_states, 0.0), 0)
    tl.store(of_rate + whole, of_rates, mask=inside)
    if of_first is not None:
        tl.store(of_first + whole, later, mask=inside)


_KIND = ("EXTENT",)
_CONFIGURATIONS = ((4, 1), (8, 1))
_scan, _scan_backward = (tuned(x, _KIND, _CONFIGURATIONS) for x in (scan, scan_backward))


def triton_scan(
    query, key, value, step, rate, initial_state, cu_seqlens, lengths, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `chunk_scan`, for tokens in bfloat16, float16 or float32; rates, states and the output are float32.

    Args:
        cu_seqlens, lengths: not checked here; an empty document keeps its initial state, and pads are not read.
    """
    return _operator(
        *contiguous(query, key, value, step),
        *contiguous(rate, initial_state, dtype=torch.float32),
        *contiguous(cu_seqlens, lengths, dtype=torch.int32),
        output_final_state,
    )


def _rows(value: torch.Tensor, cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None) -> Rows:
    """A row never needs more slots than whole chunks begin between its first token and the next row's, and one."""
    batch, length = value.shape[:2]
    if cu_seqlens is not None:
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    else:
        starts = torch.arange(batch, dtype=torch.int32, device=value.device) * length
        ends = starts + (length if lengths is None else lengths)
    return Rows(starts, ends, starts // _CHUNK + torch.arange(len(starts), dtype=torch.int32, device=value.device))


def _extent(rate: torch.Tensor) -> tuple[Extent, int]:
    """What the kernels are compiled for, and how many blocks the channels make."""
    size, channels = rate.shape
    padded = power_of_two(size, least=1)
    each = min(max(1, _TILE // (_CHUNK * padded)), power_of_two(channels, least=1))
    return Extent(_CHUNK, size, padded, each), -(-channels // each)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: torch.Tensor, rate: torch.Tensor,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None, want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    (extent, blocks), rows = _extent(rate), _rows(value, cu_seqlens, lengths)
    make = value.new_empty if lengths is None else value.new_zeros
    output = make(value.shape, dtype=torch.float32)
    count = len(rows.starts)
    final = rate.new_empty((count, *rate.shape) if want_final else 0)
    with on_device(value):
        _scan[(count, blocks)](
            Tokens(query, key, value, step), rate, initial_state, output, None, final if want_final else None, rows,
            value.shape[2], EXTENT=extent,
        )  # fmt: skip
    return output, final


def _outputs(query, key, value, step, rate, initial_state, cu_seqlens, lengths, want_final):
    final = rate.new_empty((state_rows(value, cu_seqlens), *rate.shape) if want_final else (0,))
    return value.new_empty(value.shape, dtype=torch.float32), final


def _backward(inputs, grads, needs):
    (query, key, value, step, rate, initial_state, cu_seqlens, lengths, _), (grad_output, grad_final) = inputs, grads
    (extent, blocks), rows = _extent(rate), _rows(value, cu_seqlens, lengths)
    (batch, length, channels), count = value.shape, len(rows.starts)
    tokens = Tokens(query, key, value, step)
    make = rate.new_empty if lengths is None else rate.new_zeros
    found = Tokens(
        *(make(blocks, *x.shape) for x in (query, key)),
        *(make(x.shape, dtype=x.dtype) for x in (value, step)),
    )
    of_rate = rate.new_empty(count, *rate.shape)
    of_initial = None if initial_state is None else torch.empty_like(initial_state)
    kept = rate.new_empty(batch * length // _CHUNK + count, *rate.shape)
    with on_device(value):
        _scan[(count, blocks)](tokens, rate, initial_state, None, kept, None, rows, channels, EXTENT=extent)
        _scan_backward[(count, blocks)](
            tokens, rate, kept, grad_output, grad_final, found, of_rate, of_initial, rows, channels, batch * length,
            EXTENT=extent,
        )  # fmt: skip
    of_query, of_key = (x.sum(0).to(y.dtype) for x, y in ((found.query, query), (found.key, key)))
    return of_query, of_key, found.value, found.step, of_rate.sum(0), of_initial


_operator = differentiable(__name__, "scan", _forward, _outputs, _backward, count=6)
