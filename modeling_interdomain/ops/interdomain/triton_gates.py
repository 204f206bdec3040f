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
from .gates import Gates
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


@triton.jit
def _of_blocks(gates, start, rows, length, group, groups, blocks, of_tokens, of_sums):
    """Add what the walks left to what the gates of tokens and the sums receive."""
    for block in range(blocks):
        at = ((start + rows) * blocks + block) * groups + group
        of_tokens += tl.load(gates.written + at, mask=rows < length, other=0.0)
        of_sums += tl.load(gates.last + at, mask=rows == length - 1, other=0.0)
    return of_tokens, of_sums


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def gate_gradients(
    log_gate, gates, grad, grad_write, documents, count, per_row, row_length, heads, groups, blocks,
    C: tl.constexpr, LOWEST: tl.constexpr, PACKED: tl.constexpr, own=None, own_blocks=0, delta=None, grad_delta=None,
):  # fmt: skip
    """The gradients of `log_gate`, of the gates of the write or None, and of delta, `[tokens, groups]`; grid [chunks,
    groups]. own: None, or `GateSums` with what keys read and what `own_blocks` of values left.
    """
    group = tl.program_id(1)
    start, length, _ = locate(tl.program_id(0), documents, count, per_row, row_length, C, PACKED)
    rows = tl.arange(0, C)
    inside = rows < length
    of_sums = tl.zeros([C], tl.float32)
    of_tokens = tl.zeros([C], tl.float32)
    per_group = heads // groups
    for head in range(group * per_group, (group + 1) * per_group):
        of_sums += 2 * tl.load(gates.read + (start + rows) * heads + head, mask=inside, other=0.0)
    of_tokens, of_sums = _of_blocks(gates, start, rows, length, group, groups, blocks, of_tokens, of_sums)
    at = (start + rows) * groups + group
    if own is not None:
        read = tl.load(own.read + at, mask=inside, other=0.0)
        of_tokens, of_sums = _of_blocks(own, start, rows, length, group, groups, own_blocks, of_tokens, of_sums)
        of_sums += 2 * read
        tl.store(grad_delta + at, read / tl.load(delta + at, mask=inside, other=1.0), mask=inside)
    found = tl.cumsum(of_sums - of_tokens, 0, reverse=True)
    if grad_write is not None:
        tl.store(grad_write + at, of_tokens / tl.load(gates.write + at, mask=inside, other=1.0), mask=inside)
    x = tl.load(log_gate + at, mask=inside, other=0.0)
    tl.store(grad + at, tl.where(x < LOWEST, 0.0, found), mask=inside)


_gate_sums, _gate_gradients = gate_sums, gate_gradients

_LEAST = 1e-20


def not_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < _LEAST, _LEAST, x)


def with_gates(plan: Plan, log_gate: torch.Tensor, write_gate: torch.Tensor | None) -> Plan:
    """The plan of a call with gates `[B, T, G]`, contiguous and in float32."""
    write = not_zero(torch.ones_like(log_gate) if write_gate is None else write_gate)
    high = torch.empty_like(log_gate)
    gates = GateSums(high, torch.empty_like(log_gate), write, high, high, high)
    _gate_sums[(plan.chunks, plan.groups)](
        log_gate, gates, *plan.places, plan.groups, C=plan.chunk, LOWEST=LEAST, PACKED=plan.packed
    )
    return plan._replace(gates=gates, gate_ends=_ends(plan, log_gate) if plan.segments > 1 else None)


def with_products(gates: GateSums, heads: int, blocks: int) -> GateSums:
    """The same with room for what the backward pass leaves."""
    batch, length, groups = gates.high.shape
    shapes = (batch, length, heads), (batch, length, blocks, groups), (batch, length, blocks, groups)
    return GateSums(*gates[:3], *map(gates.high.new_empty, shapes))


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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, input_matrix: torch.Tensor,
    coefficients: torch.Tensor | None, initial_state: torch.Tensor | None, log_gate: torch.Tensor,
    write_gate: torch.Tensor | None, cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None, product: str,
    chunk: int, wide: bool, want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    tokens, parameters = (query, key, value), Parameters(log_decay, input_matrix, coefficients)
    plan = attention_plan(*tokens, parameters, product, chunk, initial_state is not None, cu_seqlens, lengths)
    with on_device(query):
        plan = with_gates(plan, log_gate, write_gate)
        return run_forward(plan, tokens, parameters, initial_state, product, wide, want_final)


def _outputs(query, key, value, log_decay, input_matrix, coefficients, initial_state, log_gate, write_gate, *options):
    return output_shapes(query, key, value, log_decay, input_matrix, coefficients, initial_state, *options)


def _backward(inputs, grads, needs):
    *tokens, log_decay, input_matrix, coefficients, initial_state, log_gate, write_gate = inputs[:9]
    cu_seqlens, lengths, product, chunk, *_ = inputs[9:]
    parameters = Parameters(log_decay, input_matrix, coefficients)
    plan = attention_plan(*tokens, parameters, product, chunk, initial_state is not None, cu_seqlens, lengths)
    of_gates = [None if x is None else plan.like_tokens(x) for x in (log_gate, write_gate)]
    blocks = sum(padded // plan.block for padded in plan.padded)
    with on_device(log_gate):
        plan = with_gates(plan, log_gate, write_gate)
        plan = plan._replace(gates=with_products(plan.gates, plan.shape[2], blocks))
        found = run_backward(plan, tokens, parameters, initial_state, product, grads, needs[5])
        find_gate_gradients(plan, log_gate, of_gates, blocks)
    return [*found, *of_gates]


def find_gate_gradients(plan: Plan, log_gate: torch.Tensor, of_gates: list, blocks: int, **of_delta) -> None:
    """Write the gradients of both gates from what the other kernels left; of_delta: see `gate_gradients`."""
    _gate_gradients[(plan.chunks, plan.groups)](
        log_gate, plan.gates, *of_gates, *plan.places, plan.shape[2], plan.groups, blocks, C=plan.chunk, LOWEST=LEAST,
        PACKED=plan.packed, **of_delta,
    )  # fmt: skip


gated_operator = differentiable(
    __name__,
    "gated_attention",
    _forward,
    _outputs,
    _backward,
    count=9,
    grad_dtype=lambda query, key, value, *_: value.dtype,  # the output may be wider
)


def gated_triton_attention(*arguments, gates: Gates, **options):
    """`triton_attention` with `Gates` of the state or of what is written."""
    return triton_attention(*arguments, **options | {"operator": gated_operator, "gates": with_log_gate(gates)[:2]})


def with_log_gate(gates: Gates) -> Gates:
    """With one that leaves the state as it is where none is given."""
    if gates.log_gate is not None:
        return gates
    there = gates.write_gate if gates.delta is None else gates.delta
    return gates._replace(log_gate=torch.zeros_like(there))  # type: ignore[arg-type]
