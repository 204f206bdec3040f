"""Gates of time and of the write in the fused kernels: the running sums of the first, and what both receive.

With c_t the sum of a chunk's `log_gate` up to token t, the kernels of the plain operator multiply scores and weights
within a chunk by exp(c_t - c_i) and rows that read the state before it by exp(c_t), and the walk over the states leaves
exp(c) of a state and exp(c - c_i) of a token, c the last sum. Differences are taken first and are never positive, and a
gate of 0 counts as exp(-1000), so that nothing can overflow. Sums are made in float64 and kept as two numbers of
float32: their differences are then exact to float32, however much is forgotten before.

Query, key and value enter an output, or a state, linearly and with one such difference. So c_t receives
`2 <q_t, dq_t> - <k_t, dk_t> - <v_t, dv_t>` (twice, for the query reads through both passes), and the last sum of a
chunk `<S, dS>` besides, with S the state after it. The kernels that make these gradients leave the products; both are
summed chunk by chunk, for over a whole sequence they would cancel.

A gate of the write is a factor of the same scores, weights and tokens, so that it takes no rounding and no pass of its
own. It receives `(<k_t, dk_t> + <v_t, dv_t>) / w_t`, for which one of 0 counts as 1e-20.
"""

from typing import Any, NamedTuple

import torch

from ..common.custom_op import differentiable
from ..common.decay import LEAST, finite
from ..common.launch import on_device, tl, triton
from ..common.tiles import locate
from ..diagonal.triton_tables import Parameters
from .triton import Plan, attention_plan, output_shapes, run_backward, run_forward, triton_attention


class GateSums(NamedTuple):
    """What kernels know of the gates of time; float32, and none of them None: Triton 3.6 cannot compare such a tuple.

    Attributes:
        high, low: `[tokens, groups]`, the running sums within the chunks, each the sum of two numbers.
        write: `[tokens, groups]`, the gates of the write, none of them 0.
        read: `[tokens, heads]`, written in the backward pass: `<q_t, dq_t>`.
        written, last: `[tokens, blocks, groups]`, written there too, of each block of columns that walks the states
            back: `<x_t, dx_t>` of its keys or values; and, at the last token of a chunk alone, `<S, dS>`.
    """

    high: Any
    low: Any
    write: Any
    read: Any
    written: Any
    last: Any


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def gate_sums(
    log_gate, gates, documents, count, per_row, row_length, groups,
    C: tl.constexpr, LOWEST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The running sums of `log_gate` `[tokens, groups]`; grid [chunks, groups]."""
    start, length, _ = locate(tl.program_id(0), documents, count, per_row, row_length, C, PACKED)
    rows = tl.arange(0, C)
    at = (start + rows) * groups + tl.program_id(1)
    x = tl.load(log_gate + at, mask=rows < length, other=0.0)
    sums = tl.cumsum(tl.maximum(x, LOWEST).to(tl.float64), 0)
    high = sums.to(tl.float32)
    tl.store(gates.high + at, high, mask=rows < length)
    tl.store(gates.low + at, (sums - high.to(tl.float64)).to(tl.float32), mask=rows < length)


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def gate_gradients(
    log_gate, gates, grad, grad_write, documents, count, per_row, row_length, heads, groups, blocks,
    C: tl.constexpr, LOWEST: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The gradients of `log_gate`, and of the gates of the write or None; grid [chunks, groups]."""
    group = tl.program_id(1)
    start, length, _ = locate(tl.program_id(0), documents, count, per_row, row_length, C, PACKED)
    rows = tl.arange(0, C)
    inside = rows < length
    at_last = rows == length - 1
    of_sums = tl.zeros([C], tl.float32)
    of_tokens = tl.zeros([C], tl.float32)
    per_group = heads // groups
    for head in range(group * per_group, (group + 1) * per_group):
        of_sums += 2 * tl.load(gates.read + (start + rows) * heads + head, mask=inside, other=0.0)
    for block in range(blocks):
        at = ((start + rows) * blocks + block) * groups + group
        of_tokens += tl.load(gates.written + at, mask=inside, other=0.0)
        of_sums += tl.load(gates.last + at, mask=at_last, other=0.0)
    found = tl.cumsum(of_sums - of_tokens, 0, reverse=True)
    at = (start + rows) * groups + group
    if grad_write is not None:
        tl.store(grad_write + at, of_tokens / tl.load(gates.write + at, mask=inside, other=1.0), mask=inside)
    x = tl.load(log_gate + at, mask=inside, other=0.0)
    tl.store(grad + at, tl.where(x < LOWEST, 0.0, found), mask=inside)


_gate_sums, _gate_gradients = gate_sums, gate_gradients

_LEAST_WRITTEN = 1e-20


def _with_gates(plan: Plan, log_gate: torch.Tensor, write_gate: torch.Tensor | None) -> Plan:
    """The plan of a call with gates `[B, T, G]`, contiguous and in float32."""
    write = torch.ones_like(log_gate) if write_gate is None else write_gate
    write = torch.where(write.abs() < _LEAST_WRITTEN, _LEAST_WRITTEN, write)
    high = torch.empty_like(log_gate)
    gates = GateSums(high, torch.empty_like(log_gate), write, high, high, high)
    _gate_sums[(plan.chunks, plan.groups)](
        log_gate, gates, *plan.places, plan.groups, C=plan.chunk, LOWEST=LEAST, PACKED=plan.packed
    )
    return plan._replace(gates=gates, gate_ends=_ends(plan, log_gate) if plan.segments > 1 else None)


def _ends(plan: Plan, log_gate: torch.Tensor) -> torch.Tensor:
    """The sums from the beginning of a row or document to where its segments begin and end, `[rows, segments + 1, G]`.

    Of documents those from the beginning of the first: what counts are differences.
    """
    batch, length, _ = log_gate.shape
    sums = torch.nn.functional.pad(finite(log_gate).cumsum(1), (0, 0, 1, 0)).flatten(0, 1)
    ends: torch.Tensor = plan.segment_ends(log_gate.device)
    if batch > 1:
        ends = ends + torch.arange(batch, device=ends.device)[:, None] * (length + 1)
    elif plan.packed:
        ends = ends + plan.documents.starts[:, None]
    return sums[ends]


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficients: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    log_gate: torch.Tensor,
    write_gate: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    product: str,
    chunk: int,
    wide: bool,
    want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, parameters = (query, key, value), Parameters(log_decay, input_matrix, coefficients)
    plan = attention_plan(*tokens, parameters, product, chunk, initial_state is not None, cu_seqlens, lengths)
    with on_device(query):
        plan = _with_gates(plan, log_gate, write_gate)
        return run_forward(plan, tokens, parameters, initial_state, product, wide, want_final)


def _outputs(query, key, value, log_decay, input_matrix, coefficients, initial_state, log_gate, write_gate, *options):
    return output_shapes(query, key, value, log_decay, input_matrix, coefficients, initial_state, *options)


def _backward(inputs, grads, needs):
    *tokens, log_decay, input_matrix, coefficients, initial_state, log_gate, write_gate = inputs[:9]
    cu_seqlens, lengths, product, chunk, *_ = inputs[9:]
    parameters = Parameters(log_decay, input_matrix, coefficients)
    plan = attention_plan(*tokens, parameters, product, chunk, initial_state is not None, cu_seqlens, lengths)
    of_gates = [None if x is None else plan.like_tokens(x) for x in (log_gate, write_gate)]
    batch, length, groups = log_gate.shape
    blocks = sum(padded // plan.block for padded in plan.padded)
    with on_device(log_gate):
        plan = _with_gates(plan, log_gate, write_gate)
        room = (log_gate.new_empty(batch, length, blocks, groups) for _ in range(2))
        gates = GateSums(*plan.gates[:3], log_gate.new_empty(batch, length, plan.shape[2]), *room)
        plan = plan._replace(gates=gates)
        found = run_backward(plan, tokens, parameters, initial_state, product, grads, needs[5])
        _gate_gradients[(plan.chunks, groups)](
            log_gate, gates, *of_gates, *plan.places, plan.shape[2], groups, blocks, C=plan.chunk, LOWEST=LEAST,
            PACKED=plan.packed,
        )  # fmt: skip
    return [*found, *of_gates]


gated_operator = differentiable(
    __name__,
    "gated_attention",
    _forward,
    _outputs,
    _backward,
    count=9,
    grad_dtype=lambda query, key, value, *_: value.dtype,  # the output may be wider
)


def gated_triton_attention(*arguments, log_gate: torch.Tensor | None, write_gate: torch.Tensor | None, **options):
    """`triton_attention` with the first two `Gates`, of which one is there."""
    if log_gate is None:
        log_gate = torch.zeros_like(write_gate)  # type: ignore[arg-type]
    return triton_attention(*arguments, **options | {"operator": gated_operator, "gates": (log_gate, write_gate)})
