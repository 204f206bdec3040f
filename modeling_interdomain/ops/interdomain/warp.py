"""Warped time: each token says how far time moves with it, as the steps of Mamba do (arXiv 2312.00752):

    X_t = lambda^(tau_t) X_{t-1} + beta (x) [k_t ; v_t]

A control for studies, so it is plain PyTorch in float64, whose gradients are those of autograd on the same sums made a
second time. With s_t the running sum of tau in a chunk, its last one s, the factor lambda^(s_t - s_i) between two
tokens is lambda^(s_t - s), which grows, times lambda^(s - s_i). A token that leaves less than exp(-40) of a mode counts
as if it left that, which float64 cannot add to what the token writes: in 16 tokens nothing is larger than exp(600).
"""

from typing import Any

import torch
from torch.nn import functional as F

from ..common.checks import check_documents, check_how, check_state, check_tensors
from ..common.cpu import compute_dtype, values_at_hand
from ..common.custom_op import differentiable
from ..common.decay import as_complex, decayed
from ..common.launch import say_without_kernels
from ..common.packing import mask_from_lengths, zero_pads
from ..diagonal.step import StepTables, grouped_coefficients, transition_tables
from .chunk import state_shape
from .entry import check_inputs
from .readout import pull_back

_BACKENDS = ("auto", "recurrent", "chunk")
_CHUNK, _LEAST = 16, -40.0


def warped_attention(
    query, key, value, log_decay, input_matrix, coefficient_matrix=None, *, time_step: torch.Tensor,
    product: str = "bilinear", initial_state=None, output_final_state: bool = False, cu_seqlens=None, lengths=None,
    chunk_size: int = 64, backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`interdomain_attention` in warped time, as ops/interdomain/naive.py defines it.

    Args:
        time_step: `[B, T, G]`, at least 0: how far time moves before each token is written.
        backend: "recurrent" (the definition) or "auto" and "chunk" (batched products over at most 16 tokens).

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name.
    """
    check_inputs((query, key, value), log_decay, input_matrix, coefficient_matrix, product)
    cu_seqlens, lengths = check_documents(cu_seqlens, lengths, query)
    check_how(backend, _BACKENDS, chunk_size)
    check_tensors(("key", key, "B, T, G, R"), ("time_step", time_step, "B, T, G"))
    if values_at_hand(time_step) and bool(((time_step < 0) | time_step.isinf()).any()):
        raise ValueError("time_step must be finite and at least 0: time stands still or moves on.")
    if torch.compiler.is_exporting():
        raise ValueError("Exported graphs have no warped time: export a model without it.")
    if initial_state is not None:
        shape = state_shape(query, key, value, log_decay, cu_seqlens)
        check_state("initial_state", initial_state, shape, "G, 2, M, R + D", query.device)
    inputs = query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, time_step
    if backend == "recurrent":
        from .naive import recurrent_attention

        *wide, state, steps = (None if x is None else x.double() for x in inputs)
        arguments: Any = *wide, product, state, cu_seqlens, lengths, None, None, None, steps
        output, state = recurrent_attention(*arguments)
        output, state = output.to(value.dtype), state.to(compute_dtype(query, key, value))
    else:
        if backend == "auto":
            say_without_kernels(query.device, "warped time has none")
        output, state = _operator(*inputs, cu_seqlens, lengths, product, min(chunk_size, _CHUNK))
    return output, state if output_final_state else None


def _logs(time_step: torch.Tensor, log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of `time_step log_decay`, `[..., G, M]` of `[..., G]`, in float64; a decay to 0 is one by 1e30."""
    rate, phase = log_decay.double().unbind(-1)
    steps = time_step.double()[..., None]
    return steps * rate.clamp(min=-1e30), steps * phase


def _chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """`[B, T, G, W]` as `[G, B, N, C, W]`, in the last chunk with zeros, which move and write nothing."""
    count = max(1, -(-x.shape[1] // size))
    return F.pad(x, (0, 0, 0, 0, 0, count * size - x.shape[1])).unflatten(1, (count, size)).permute(3, 0, 1, 2, 4)


def _walk(inputs, time_step, log_decay, input_matrix, initial, size: int):
    """Through the states of rows `[B, T, G, W]`.

    Returns:
        log lambda^(s_t) `[G, B, N, C, M]`, lambda^(s - s_i) beta like it, the states before the chunks
        `[G, B, N, M, W]`, and those after the last, `[B, G, 2, M, W]`; complex but for the last.
    """
    rate, phase = (_chunks(x, size) for x in _logs(time_step, log_decay))
    total = torch.complex(rate.clamp(min=_LEAST), phase).cumsum(3)
    across = total[..., -1:, :]
    left = (across - total).exp() * as_complex(input_matrix.double())[:, None, None, None]
    added = left.mT @ _chunks(inputs.double(), size).to(left.dtype)
    state = torch.zeros_like(added[:, :, 0])
    if initial is not None:
        state = torch.complex(*initial.double().unbind(2)).transpose(0, 1)
    before = []
    for decay, new in zip(across.exp().mT.unbind(2), added.unbind(2), strict=True):
        before.append(state)
        state = decay * state + new
    final = torch.stack([state.real, state.imag], dim=2).transpose(0, 1)
    return total, left, torch.stack(before, dim=2), final


def _rows(query, key, value, time_step, log_decay, input_matrix, coefficients, product, initial, size: int):
    """Outputs and final states of rows, in float64."""
    parameters = log_decay, input_matrix, initial, size
    total, left, before, final = _walk(torch.cat([key, value], dim=-1), time_step, *parameters)
    keys, values = (_chunks(x, size)[:, None] for x in (key, value))
    rows = _chunks(query, size).unflatten(0, (key.shape[2], -1))  # [G, H / G, B, N, C, R]
    total, left, before = (x[:, None] for x in (total, left, before))
    grown, since = (total - total[..., -1:, :]).exp(), total.exp()
    of_keys, of_values = before.split([key.shape[3], value.shape[3]], dim=-1)
    y = grown * ((rows @ keys.mT).tril().to(left.dtype) @ left) + since * (rows.to(left.dtype) @ of_keys.mT)
    p = pull_back(grouped_coefficients(coefficients, torch.float64), y, product).conj()
    output = ((p * grown) @ left.mT).real.tril() @ values + ((p * since) @ of_values).real
    return output.flatten(0, 1).permute(1, 2, 3, 0, 4).flatten(1, 2)[:, : query.shape[1]], final


def _compute(
    query, key, value, log_decay, input_matrix, coefficients, initial, time_step, cu_seqlens, lengths, product, size
):
    """Output and final states in float64; documents that hold a token are made rows."""
    tokens, first = [x.double() for x in (query, key, value, time_step)], initial
    if cu_seqlens is not None:
        sizes = cu_seqlens.diff()
        filled = sizes.nonzero()[:, 0]
        lengths = sizes[filled]
        places = cu_seqlens[filled][:, None] + torch.arange(int(lengths.max()), device=query.device)
        tokens = [x[0, places.clamp(max=query.shape[1] - 1)] for x in tokens]
        first = None if initial is None else initial[filled]
    if lengths is not None:
        tokens = zero_pads(lengths, *tokens)
    output, final = _rows(*tokens, log_decay, input_matrix, coefficients, product, first, size)
    if cu_seqlens is not None:
        output = output[mask_from_lengths(lengths, output)][None]
        rest = final.new_zeros(len(sizes), *final.shape[1:]) if initial is None else initial.double()
        final = rest.index_copy(0, filled, final)
    return output, final


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None, initial_state: torch.Tensor | None, time_step: torch.Tensor,
    cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None, product: str, chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    inputs = query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, time_step
    output, final = _compute(*inputs, cu_seqlens, lengths, product, chunk_size)
    return output.to(value.dtype).contiguous(), final.to(compute_dtype(query, key, value)).contiguous()


def _outputs(query, key, value, log_decay, *others):
    shape = state_shape(query, key, value, log_decay, others[4])
    output = value.new_empty((*query.shape[:3], value.shape[3]))
    return output, value.new_empty(shape, dtype=compute_dtype(query, key, value))


def _backward(inputs, grads, needs):
    wanted = [i for i, need in enumerate(needs) if need]

    def again(*leaves):
        given = dict(zip(wanted, leaves, strict=True))
        return _compute(*(given.get(i, x) for i, x in enumerate(inputs)))

    # Operators run below autograd, where nothing else records.
    found, back = torch.func.vjp(again, *(inputs[i] for i in wanted))
    of_found = tuple(torch.zeros_like(x) if grad is None else grad.to(x.dtype) for x, grad in zip(found, grads))
    made = dict(zip(wanted, back(of_found), strict=True))
    return [made[i].contiguous() if i in made else None for i in range(len(needs))]


_operator = differentiable(__name__, "warped_attention", _forward, _outputs, _backward, count=8)


def warped_tables(kept: StepTables, log_decay, input_matrix, time_step: torch.Tensor) -> StepTables:
    """The tables of a step with the decay of its token, `[B, G, M, 1]`, for a `time_step` `[B, G]`."""
    logs = torch.stack(_logs(time_step, log_decay), dim=-1)
    decay, turn, *_ = transition_tables(logs, input_matrix, kept.decay.dtype)
    return kept._replace(decay=decay, turn=turn)


def warped_state_after(state, key, value, time_step, mask, log_decay, input_matrix) -> torch.Tensor:
    """`state_after` of tokens in warped time, `time_step` `[B, T, G]`; pads stand anywhere."""
    inputs = torch.where(mask[..., None, None], torch.cat([key, value], dim=-1), 0)
    time_step = torch.where(mask[..., None], time_step, 0)
    final = _walk(inputs, time_step, log_decay, input_matrix, state, _CHUNK)[-1]
    return final.to(torch.promote_types(state.dtype, torch.float32))


def decay_warped_state(state: torch.Tensor, time: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """A state `[B, G, 2, M, W]` after tokens that write nothing, with which time moves by `[B, G]` in all."""
    size, angle = _logs(time, log_decay)
    return decayed(state, torch.polar(size.exp(), angle)[..., None]).to(state.dtype)
