"""The S4D control as fused kernels: the walk along the chunks of `ops/interdomain/triton.py`, read by a convolution.

PyTorch makes what depends on the parameters alone, in float64, and differentiates it: the response of a head within a
chunk, and its rows for the state before the chunk. Sums over chunks have a fixed order, so that gradients repeat bit
for bit, and no length is read by the host.
"""

import torch

from ..common.custom_op import differentiable
from ..common.decay import as_complex, by_age, decay_powers
from ..common.launch import contiguous, on_device, power_of_two, tuned
from ..common.packing import state_rows
from ..common.tiles import chunk_tokens
from ..diagonal.triton_tables import KernelTables, Parameters, Partial, make_tables, table_gradients
from ..interdomain.triton import Plan, plan_of, states_before, walk_back
from ..interdomain.triton_attend_backward import ChunkGradients
from .triton_chunks import Extent, Responses, read, read_backward, responses_backward

_KIND = ("EXTENT", "MATH")
_read, _read_backward = tuned(read, _KIND), tuned(read_backward, _KIND)
_responses_backward = tuned(responses_backward, _KIND)


def triton_s4d(
    inputs, log_decay, input_matrix, readout, initial_state, cu_seqlens, lengths, chunk_size: int,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`s4d_attention` of inputs `[B, T, G, W]` in bfloat16, float16 or float32; parameters and states are float32.

    Args:
        cu_seqlens, lengths: not checked here; an empty document keeps its initial state, and pads are not read.
        chunk_size: as in `triton_attention`.
    """
    size = log_decay.shape[1]
    chunk = chunk_tokens(min(chunk_size, 4096 // power_of_two(size)), inputs.shape[1])
    log_decay, input_matrix = contiguous(log_decay, input_matrix, dtype=torch.float32)
    return _operator(
        inputs.contiguous(),
        log_decay,
        input_matrix,
        *_responses(log_decay, input_matrix, readout, chunk),
        *contiguous(initial_state, dtype=torch.float32),
        *contiguous(cu_seqlens, lengths, dtype=torch.int32),
        output_final_state,
    )


def _responses(log_decay, input_matrix, readout, chunk: int) -> Responses:
    """`2 Re sum_n readout[n] lambda_n^d beta_n`, and by t the rows of `2 Re sum_n readout[n] lambda_n^(t+1) S_n`."""
    groups, size = log_decay.shape[:2]
    powers = decay_powers(log_decay, torch.arange(chunk + 1, device=log_decay.device))[:, None]  # [G, 1, C + 1, M]
    rows = 2 * as_complex(readout.double()).unflatten(0, (groups, -1))[:, :, None]  # [G, P, 1, M]
    kernel = (rows * powers[:, :, :-1] * as_complex(input_matrix.double())[:, None, None]).real.sum(-1)
    reads = rows * powers[:, :, 1:]
    reads = torch.stack([reads.real, -reads.imag], dim=-2).flatten(0, 1)
    reads = torch.nn.functional.pad(reads, (0, power_of_two(size) - size))
    return Responses(kernel.flatten(0, 1).float(), reads.float())


def _plan(inputs, log_decay, kernel, has_initial: bool, cu_seqlens, lengths) -> Plan:
    (batch, length, _, width), (heads, chunk) = inputs.shape, kernel.shape
    shape = torch.Size((batch, length, heads, width))
    return plan_of(shape, inputs, (width,), log_decay.shape[1], chunk, has_initial, cu_seqlens, lengths)


def _options(plan: Plan) -> dict:
    limit = 64 if plan.few else 32
    (width,), (padded,) = plan.widths, plan.padded
    return {"EXTENT": Extent(plan.chunk, plan.modes, width, padded, min(padded, limit)), **plan.options}


def _tables(plan: Plan, log_decay, input_matrix) -> KernelTables:
    """The tables of the walk along the chunks, which needs neither product nor coefficients."""
    parameters = Parameters(log_decay, input_matrix, None)
    return make_tables(parameters, "real", plan.chunk, plan.storage, plan.math)


def _forward(
    inputs: torch.Tensor, log_decay: torch.Tensor, input_matrix: torch.Tensor, kernel: torch.Tensor,
    reads: torch.Tensor, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None, want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    plan = _plan(inputs, log_decay, kernel, initial_state is not None, cu_seqlens, lengths)
    heads, options = plan.shape[2], _options(plan)
    output = (inputs.new_zeros if plan.packed else inputs.new_empty)(plan.shape)
    with on_device(inputs):
        tables = _tables(plan, log_decay, input_matrix)
        (states,), final = states_before(plan, (inputs,), tables, initial_state, want_final)
        _read[(plan.chunks, heads, options["EXTENT"].PADDED // options["EXTENT"].BW)](
            inputs, output, states, Responses(kernel, reads), *plan.places, heads, plan.groups, **options
        )
    return output, inputs.new_empty(0, dtype=torch.float32) if final is None else final


def _outputs(inputs, log_decay, input_matrix, kernel, reads, initial_state, cu_seqlens, lengths, want_final):
    batch, length, groups, width = inputs.shape
    final = (state_rows(inputs, cu_seqlens), groups, 2, log_decay.shape[1], width) if want_final else (0,)
    return inputs.new_empty(batch, length, kernel.shape[0], width), inputs.new_empty(final, dtype=torch.float32)


def _backward(given, grads, needs):
    inputs, *parameters, kernel, reads, initial_state, cu_seqlens, lengths, _ = given
    grad_output, grad_final = grads
    plan = _plan(inputs, parameters[0], kernel, initial_state is not None, cu_seqlens, lengths)
    heads, options = plan.shape[2], _options(plan)
    side, responses, of_inputs = options["EXTENT"], Responses(kernel, reads), plan.like_tokens(inputs)
    of_initial = None if initial_state is None else torch.empty_like(initial_state)
    with on_device(inputs):
        tables = _tables(plan, *parameters)
        (states,), _ = states_before(plan, (inputs,), tables, initial_state, want_final=False)
        direct = ChunkGradients(
            inputs.new_empty(plan.shape, dtype=plan.storage),
            inputs.new_empty((plan.slots, heads, 2, plan.modes, side.PADDED), dtype=plan.storage),
        )
        _read_backward[(plan.chunks, heads, side.PADDED // side.BW)](
            grad_output, direct, responses, *plan.places, heads, plan.groups, **options
        )
        of_responses = _of_responses(plan, inputs, grad_output, states, reads, options)
        walked = walk_back(plan, (inputs,), (states,), tables, (direct,), (of_inputs,), of_initial, grad_final)
        nothing = walked.new_empty((0, heads, 2, *walked.shape[2:]))
        found = table_gradients(Parameters(*parameters, None), Partial(nothing, walked, None), "real", heads)
    return of_inputs, found.log_decay, found.input_matrix, *of_responses, of_initial


def _of_responses(plan: Plan, inputs, grad_output, states, reads, options: dict) -> Responses:
    heads, chunk = plan.shape[2], plan.chunk
    lanes = plan.lanes(inputs.device)
    pairs = reads.new_empty((lanes, heads, chunk, chunk))
    of_reads = reads.new_empty((lanes, *reads.shape))
    _responses_backward[(lanes, heads)](
        inputs, grad_output, states, pairs, of_reads, plan.documents, plan.chunks, *plan.places[1:], heads, plan.groups,
        **options,
    )  # fmt: skip
    return Responses(by_age(pairs.sum(0)).sum(1), of_reads.sum(0))


_operator = differentiable(__name__, "attention", _forward, _outputs, _backward, count=6)
