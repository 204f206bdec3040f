"""The delta rule in the fused kernels: what the keys read of their chunk and of the state before it is solved for.

The key of token t reads like one more query of its group, strictly what was written before. With A `[C, C]` its weights
within the chunk, strictly lower triangular, R its readers of the state S before it (both with what gates leave) and
d = delta,

    u_t = v_t - d_t (A u + R S)_t,    U = T V - W S,    T = (I + diag(d) A)^-1,    W = T diag(d) R

in which T and W need keys alone: `solve` makes them for all chunks at once. The walk over the states of values
(`chunk_states`) then takes W S from T V chunk by chunk, and everything else is as without delta, with U for V.

Backward, with g what U receives from the outputs and from the state after its chunk, the values receive T^T g, the
state before the chunk receives -W^T g more, and what the keys read, `-d T^T g`, is the gradient of an output like that
of any head. That of delta is a product that the kernels leave for the gates of time, `<k, dk>` of the key as a reader,
over d: for what is read is linear in the reader. A delta of 0 counts as 1e-20.
"""

from typing import Any, NamedTuple

import torch

from ..common.custom_op import differentiable
from ..common.launch import interpreted, on_device, tl, triton, tuned
from ..common.tiles import as_operand, dot, load_tokens, locate, store_tokens
from ..diagonal.triton_tables import KernelTables, Parameters, Partial, table_gradients
from ..diagonal.triton_tiles import left_before, load_left
from .gates import Gates
from .triton import (
    Plan,
    attention_plan,
    of_chunks,
    output_shapes,
    pull_and_mix,
    read_chunks,
    states_before,
    tables_of,
    triton_attention,
    walk_back,
    walk_states,
)
from .triton_attend import ChunkStates, Operands, load_readers, store_modes, stored_weights
from .triton_gates import find_gate_gradients, not_zero, with_gates, with_log_gate, with_products


class KeyGradients(NamedTuple):
    """What keys that read like one more head of their group give: `tokens` and `states` like `ChunkGradients`, and what
    they receive as such, `rows` `[tokens, groups, width]`.
    """

    tokens: Any
    states: Any
    rows: Any


@triton.jit
def unit_inverse(x, d, start, length, stride, C: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + diag(d) x)^-1` for what is below the diagonal of x, `[C, C]` in float32.

    Blocks on the diagonal are joined two by two, with [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]: what
    substitution computes, and as exact. Of all pairs at once this is `T - T B T`, T the inverse so far. The highest bit
    in which row and column differ says at which size they come together. x lies in memory: beside the operands of the
    products there are no registers for it.
    """
    rows = tl.arange(0, C)
    apart = rows[:, None] ^ rows[None, :]
    below = (rows < length)[:, None] & (rows[:, None] > rows[None, :])
    x += (start + rows)[:, None].to(tl.int64) * stride + rows[None, :]
    found = tl.where(apart == 0, 1.0, 0.0) - d[:, None] * tl.load(x, mask=below & (apart == 1), other=0.0)
    size = 2
    while size < C:
        between = tl.load(x, mask=below & (apart >= size) & (apart < 2 * size), other=0.0).to(tl.float32)
        moved = tl.dot(found, -d[:, None] * between, input_precision=PRECISION)
        found = tl.dot(moved, found, found, input_precision=PRECISION)
        size *= 2
    return found


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def solve(
    mixed, delta, value, reads, inverse, solved, tables, gates, documents, count, per_row, row_length, groups,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SIZES: tl.constexpr, SKEWED: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr, MATH: tl.constexpr,
):  # fmt: skip
    """W and T of every chunk, and `T V` of a value `[tokens, groups, WIDTH]`, or None; grid [chunks, groups].

    mixed: of the keys, `[tokens, groups, 2, M]`, see `mix`; delta: `[tokens, groups]`; written: reads like `mixed`,
    inverse `[tokens, groups, C]`, and `solved` like `value`.
    """
    C: tl.constexpr = SIZES.C
    M: tl.constexpr = SIZES.M
    BM: tl.constexpr = SIZES.BM
    BD: tl.constexpr = SIZES.BD
    group = tl.program_id(1)
    if tl.load(tables.skewed + group) != SKEWED:
        return
    start, length, _ = locate(tl.program_id(0), documents, count, per_row, row_length, C, PACKED)
    if length > 0:
        rows = tl.arange(0, C)
        stride = groups * 2 * M
        powers = tables.powers + group * C * 2 * M
        left = load_left(gates, start, length, group, groups, C)
        mixed += group * 2 * M
        inverse += group * C
        w = stored_weights(mixed, tables.intra + group * C * 2 * M, left, start, length, stride, C, M, BM, SKEWED, MATH)
        store_tokens(inverse, w, start, length, 0, groups * C, C, C, C, MATH)
        tl.debug_barrier()  # other threads read what these wrote
        d = tl.load(delta + (start + rows) * groups + group, mask=rows < length, other=0.0)
        t = unit_inverse(inverse, d, start, length, groups * C, C, PRECISION)
        tl.debug_barrier()
        t = as_operand(t, MATH)
        store_tokens(inverse, t, start, length, 0, groups * C, C, C, C, MATH)
        for m in tl.range(0, M, BM, num_stages=1, loop_unroll_factor=1):
            e_re, e_im = load_readers(mixed, powers, start, length, stride, m, C, M, BM, SKEWED, MATH)
            e_re = left_before(e_re.to(tl.float32) * d[:, None], left)
            e_im = left_before(e_im.to(tl.float32) * d[:, None], left)
            e_re = dot(t, e_re, tl.zeros([C, BM], tl.float32), MATH)
            e_im = dot(t, e_im, tl.zeros([C, BM], tl.float32), MATH)
            store_modes(reads + group * 2 * M, e_re, e_im, start, length, stride, m, C, M, BM, MATH)
        if solved is not None:
            for column in tl.range(0, PADDED, BD, num_stages=1, loop_unroll_factor=1):
                x = load_tokens(value + group * WIDTH, start, length, column, groups * WIDTH, WIDTH, C, BD)
                x = dot(t, x, tl.zeros([C, BD], tl.float32), MATH)
                store_tokens(
                    solved + group * WIDTH, x, start, length, column, groups * WIDTH, WIDTH, C, BD, MATH
                )  # fmt: skip


@triton.jit(do_not_specialize=["count", "per_row", "row_length"])
def solve_backward(
    inverse, grad, written, delta, grad_value, grad_read, gates, documents, count, per_row, row_length, groups,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BW: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    MATH: tl.constexpr,
):  # fmt: skip
    """From the gradient of what was solved, `grad`, to those of values and of what keys read; grid [chunks, groups].

    grad, written (U), grad_value and grad_read are `[tokens, groups, WIDTH]`; gates: `GateSums`, of which `written`
    gets what U and its gradient have in common, of each block of BW columns.
    """
    group = tl.program_id(1)
    start, length, _ = locate(tl.program_id(0), documents, count, per_row, row_length, C, PACKED)
    if length > 0:
        rows = tl.arange(0, C)
        at = (start + rows) * groups + group
        d = tl.load(delta + at, mask=rows < length, other=0.0)
        t = tl.trans(load_tokens(inverse + group * C, start, length, 0, groups * C, C, C, C))
        offset = group * WIDTH
        stride = groups * WIDTH
        for block in tl.range(0, PADDED // BW, num_stages=1, loop_unroll_factor=1):
            x = load_tokens(grad + offset, start, length, block * BW, stride, WIDTH, C, BW)
            x = dot(t, x, tl.zeros([C, BW], tl.float32), MATH)
            store_tokens(grad_value + offset, x, start, length, block * BW, stride, WIDTH, C, BW, MATH)
            store_tokens(grad_read + offset, -d[:, None] * x, start, length, block * BW, stride, WIDTH, C, BW, MATH)
            u = load_tokens(written + offset, start, length, block * BW, stride, WIDTH, C, BW).to(tl.float32)
            at_block = ((start + rows) * (PADDED // BW) + block) * groups + group
            tl.store(gates.written + at_block, tl.sum(u * x, 1), mask=rows < length)


_solve = tuned(solve, ("SIZES", "MATH"), [(8, 1)])  # with fewer warps it spills registers
_solve_backward = tuned(solve_backward, ("C", "PADDED", "MATH"), [(4, 1), (8, 1)])


def _solved(plan: Plan, key, delta, before: torch.Tensor, tables: KernelTables, value=None):
    """W `[B, T, G, 2, M]`, T `[B, T, G, C]`, and `T V` of a value or None.

    Args:
        plan: of the keys as readers.
        before: the states of the keys before the chunks.
    """
    dtype = plan.storage
    same = value if value is not None else key
    tokens, states = Operands(key, key, same, same), ChunkStates(before, before)
    _, (mixed, _) = pull_and_mix(plan, tokens, states, tables, sides=1, strict=True)
    readers = torch.empty_like(mixed)
    solved = None if value is None else torch.empty_like(value, dtype=dtype)
    inverse = key.new_empty((*key.shape[:3], plan.chunk), dtype=dtype)
    sizes = plan.sizes_of_stored
    for skewed in range(2):
        _solve[(plan.chunks, plan.groups)](
            mixed, delta, value, readers, inverse, solved, tables, plan.gates, *plan.places, plan.groups,
            WIDTH=plan.widths[1], PADDED=plan.padded[1], SIZES=sizes["SIZES"], SKEWED=skewed, PRECISION=_precision(),
            **plan.options,
        )  # fmt: skip
    return readers, inverse, solved


def _precision() -> str:
    """Of the inverse, float32 whatever the tokens are: its products are few."""
    return "ieee" if torch.version.hip is not None or interpreted() else "tf32x3"


def _plan(
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor], parameters: Parameters, product: str, chunk: int,
    initial_state, cu_seqlens, lengths,
) -> Plan:  # fmt: skip
    """Of one segment a row: what the second writes hangs on the state after the first."""
    plan = attention_plan(*tokens, parameters, product, chunk, initial_state is not None, cu_seqlens, lengths)
    return plan._replace(segments=1)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, input_matrix: torch.Tensor,
    coefficients: torch.Tensor | None, initial_state: torch.Tensor | None, log_gate: torch.Tensor,
    write_gate: torch.Tensor | None, delta: torch.Tensor, cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None, product: str, chunk: int, wide: bool, want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output, the final states, and what was written."""
    parameters = Parameters(log_decay, input_matrix, coefficients)
    plan = _plan((query, key, value), parameters, product, chunk, initial_state, cu_seqlens, lengths)
    output = (value.new_zeros if plan.packed else value.new_empty)((*query.shape[:3], plan.widths[1]))
    shape = plan.rows, plan.groups, 2, plan.size, sum(plan.widths)
    final = value.new_empty(shape if want_final else 0, dtype=torch.float32)
    into = final if want_final else None
    with on_device(query):
        plan = with_gates(plan, log_gate, write_gate)
        tables = tables_of(plan, parameters, product)
        before = plan.room_for_states(key)
        walk_states(plan, (key,), tables, initial_state, before[:1], into, want_final, plan.columns[:1])
        own = plan._replace(shape=key.shape)
        readers, _, solved = _solved(own, key, not_zero(delta), before[0], tables, value)
        written = torch.empty_like(solved)
        walk_states(
            plan, (solved,), tables, initial_state, before[1:], into, want_final, plan.columns[1:], readers, written
        )
        read_chunks(plan, Operands(query, key, written), ChunkStates(*before), tables, output)
    return output, final, written


def _outputs(
    query, key, value, log_decay, input_matrix, coefficients, initial_state, log_gate, write_gate, delta, *rest
):
    shapes = output_shapes(query, key, value, log_decay, input_matrix, coefficients, initial_state, *rest)
    storage = value.dtype if value.dtype == torch.bfloat16 else torch.float32
    return *shapes, value.new_empty(value.shape, dtype=storage)


def _backward(inputs, grads, needs):
    query, key, value, log_decay, input_matrix, coefficients, initial_state, log_gate, write_gate, delta = inputs[:10]
    cu_seqlens, lengths, product, chunk, _, _, written = inputs[10:]
    parameters = Parameters(log_decay, input_matrix, coefficients)
    plan = _plan((query, key, value), parameters, product, chunk, initial_state, cu_seqlens, lengths)
    of_query, of_key, of_reader, of_value, of_log_gate, of_delta = map(
        plan.like_tokens, (query, key, key, value, log_gate, delta)
    )
    of_gates = [of_log_gate, None if write_gate is None else plan.like_tokens(write_gate)]
    of_initial = None if initial_state is None else torch.empty_like(initial_state)
    of_written, of_read = (torch.empty_like(written) for _ in range(2))
    blocks = [padded // plan.block for padded in plan.padded]
    keys, values = ((column,) for column in plan.columns)
    delta = not_zero(delta)
    with on_device(query):
        plan = with_gates(plan, log_gate, write_gate)
        own = plan._replace(shape=key.shape, gates=with_products(plan.gates, plan.groups, blocks[1]))
        plan = plan._replace(gates=with_products(plan.gates, plan.shape[2], blocks[0]))
        tables = tables_of(plan, parameters, product)
        states, _ = states_before(plan, (key, written), tables, initial_state, want_final=False)
        before = ChunkStates(*states)
        readers, inverse, _ = _solved(own, key, delta, before.b, tables)

        tokens = Operands(query, key, written, grads[0])
        mixing, chunk_sums, direct = of_chunks(plan, tokens, before, tables, of_query, needs[5])
        ends = of_initial, grads[1]
        walked = walk_back(
            plan._replace(gates=own.gates), (written,), states[1:], tables, direct[1:], (of_written,), *ends, values,
            readers,
        )  # fmt: skip
        _solve_backward[(plan.chunks, plan.groups)](
            inverse, of_written, written, delta, of_value, of_read, own.gates, *plan.places, plan.groups,
            WIDTH=plan.widths[1], PADDED=plan.padded[1], BW=plan.block, C=plan.chunk, **plan.options,
        )  # fmt: skip
        tokens = Operands(key, key, written, of_read)
        more, sums, others = of_chunks(own, tokens, before, tables, of_reader, needs[5], strict=True)
        walked = [walked, sums.sum((0, 2))[None]]
        others = KeyGradients(*others[0], of_reader)
        walked.append(walk_back(plan, (key,), states[:1], tables, direct[:1], (of_key,), *ends, keys, others=others))
        mixing = mixing + more if needs[5] else None
        found = table_gradients(parameters, Partial(chunk_sums, torch.cat(walked), mixing), product, plan.shape[2])
        own_gates = {"own": own.gates, "own_blocks": blocks[1], "delta": delta, "grad_delta": of_delta}
        find_gate_gradients(plan, log_gate, of_gates, blocks[0], **own_gates)
    return [of_query, of_key, of_value, *found, of_initial, *of_gates, of_delta]


delta_operator = differentiable(
    __name__,
    "delta_attention",
    _forward,
    _outputs,
    _backward,
    count=10,
    kept=(2,),
    grad_dtype=lambda query, key, value, *_: value.dtype,
)


def delta_triton_attention(*arguments, gates: Gates, **options):
    """`triton_attention` with the delta rule."""
    return triton_attention(*arguments, **options | {"operator": delta_operator, "gates": with_log_gate(gates)})
