"""The fused backend: `chunk_attention` as a few kernels behind one opaque operator of `torch.library`.

Forward: two scans leave the state before every chunk (keys, values), then one program a chunk and head computes its
outputs. Backward stores nothing but its inputs: it scans again, finds what each chunk contributes on its own (twice the
same kernel, with the roles of query, key, value and the gradient of the output exchanged, see
`op_interdomain_triton_attend`), and walks the chunks back. Sums over chunks are taken in a fixed order, so that
gradients repeat bit for bit.
"""

from typing import NamedTuple

import torch

from .op_common_launch import interpreted, multiprocessors, namespace, on_device, power_of_two, tuned
from .op_interdomain_triton_attend import attend, attend_backward, mixing_backward
from .op_interdomain_triton_carry import carry, carry_back, segment_ends
from .op_interdomain_triton_states import scan, scan_backward
from .op_interdomain_triton_tables import Tables, make_tables

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_KIND = ("C", "M", "BR", "BD", "FULL", "DTYPE", "PRECISION")
_attend = tuned(attend, _KIND)
_attend_backward = tuned(attend_backward, (*_KIND, "ROWS"))
_mixing_backward = tuned(mixing_backward, _KIND)
_scan = tuned(scan, ("C", "M", "BM", "BW", "STORE", "EXACT", "DTYPE", "PRECISION"))
_scan_backward = tuned(scan_backward, ("C", "M", "BW", "EMIT", "DTYPE", "PRECISION"))
# Hardly ever at work, so not worth the compilations of a choice.
_attend_exact, _attend_backward_exact, _mixing_backward_exact = attend, attend_backward, mixing_backward


def triton_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None,
    product: str,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `chunk_attention`, for tokens in bfloat16, float16 or float32; parameters and states are float32.

    Args:
        chunk_size: rounded down to a power of two from 16 to what the chip holds: 64 tokens, fewer for M above 64.
        wide: give the output in float32 instead of the dtype of the tokens.
    """
    largest = min(chunk_size, 4096 // power_of_two(log_decay.shape[1]), power_of_two(query.shape[1]))
    chunk = max(16, 1 << (largest.bit_length() - 1))
    tables = make_tables(log_decay.float(), input_matrix.float(), coefficient_matrix, product, chunk)
    return _operator(
        *(x.contiguous() for x in (query, key, value)),
        log_decay.float().contiguous(),
        *tables,
        None if initial_state is None else initial_state.float().contiguous(),
        None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous(),
        coefficient_matrix is not None and coefficient_matrix.requires_grad,
        wide,
    )


class _Plan(NamedTuple):
    """Sizes of one call, and the arguments that every kernel shares."""

    shape: torch.Size  # [B, T, H, R] of the query
    groups: int
    widths: tuple[int, ...]  # R and D
    padded: tuple[int, ...]
    size: int  # M
    modes: int  # M, padded
    chunk: int  # C
    rows: int  # batch rows or documents
    segments: int  # of a row, for the scans
    chunks: int  # an upper bound where documents are packed
    places: tuple  # cu_seqlens, first_chunks, documents, chunks and tokens of a row
    options: dict

    @property
    def storage(self) -> torch.dtype:
        """The dtype of states between kernels, and of the operands of matrix products."""
        return torch.bfloat16 if self.options["DTYPE"] == tl.bfloat16 else torch.float32

    def blocks(self) -> dict:
        limit = 64 if self.modes <= 64 else 32
        if self.storage == torch.float32:
            limit //= 2
        return {"BM": min(self.modes, 32), "BR": min(self.padded[0], limit), "BD": min(self.padded[1], limit)}

    def swapped(self) -> "_Plan":
        return self._replace(widths=self.widths[::-1], padded=self.padded[::-1])

    def segment_ends(self, device: torch.device) -> torch.Tensor:
        cu_seqlens, _, _, _, length = self.places
        lengths = torch.full((self.rows,), length, device=device) if cu_seqlens is None else cu_seqlens.diff()
        return segment_ends(lengths, self.chunk, self.segments)

    def lanes(self, device: torch.device, blocks: int = 1) -> int:
        """How many programs share the chunks of a head: enough to fill the device a few times."""
        wanted = 2 if interpreted() else -(-4 * multiprocessors(device) // (self.shape[2] * blocks))
        return min(max(wanted, 1), self.chunks)


def _plan(query, key, value, tables: Tables, cu_seqlens) -> _Plan:
    batch, length, _, width = query.shape
    chunk, size = tables.table.shape[1], tables.table.shape[3]
    if cu_seqlens is None:
        rows, per_row, first_chunks = batch, -(-length // chunk), None
        chunks = rows * per_row
    else:
        rows, per_row = cu_seqlens.numel() - 1, 0
        counts = (cu_seqlens.diff() + chunk - 1) // chunk
        first_chunks = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        chunks = length // chunk + rows
    dtype, precision = _arithmetic(value.dtype)
    options = {
        "C": chunk, "M": power_of_two(size), "FULL": tables.mixing.ndim == 5, "PACKED": cu_seqlens is not None,
        "DTYPE": dtype, "PRECISION": precision,
    }  # fmt: skip
    widths = (width, value.shape[3])
    return _Plan(
        query.shape, key.shape[2], widths, tuple(power_of_two(w) for w in widths), size, options["M"], chunk, rows,
        _segments(rows * key.shape[2], chunks // rows, query.device), chunks,
        (cu_seqlens, first_chunks, rows, per_row, length), options,
    )  # fmt: skip


def _segments(lanes: int, chunks: int, device: torch.device) -> int:
    """Into how many segments to cut a row: as many as fill the device, where a segment keeps at least 8 chunks.

    A lane, one row and group, is walked by about 8 programs. Two passes cost twice, so cut in no fewer than 3.
    """
    wanted = min(2 * multiprocessors(device) // (8 * lanes), chunks // 8)
    return wanted if wanted > 2 else 1


def _arithmetic(dtype: torch.dtype):
    """Operands of the matrix units, and how float32 is multiplied.

    float16 would overflow where a state or a readout passes 65,504; tf32 has its precision and the range of float32.
    """
    if dtype == torch.bfloat16:
        return tl.bfloat16, "interpreted" if interpreted() else "tf32"
    if torch.version.hip is not None or interpreted():
        return tl.float32, "ieee"
    fast = dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest"
    return tl.float32, "tf32" if fast else "tf32x3"


def _padded(plan: _Plan, tables: Tables) -> Tables:
    """Modes filled up with zeros to a power of two, operands of matrix products in the dtype of the matrix units."""
    missing = plan.modes - plan.size
    powers, inputs, table = (torch.nn.functional.pad(x, (0, missing)) for x in tables[1:4])
    mixing = torch.nn.functional.pad(tables.mixing, (0, missing) * (2 if plan.options["FULL"] else 1))
    mixing = mixing.to(plan.storage) if plan.options["FULL"] else mixing
    return Tables(tables.exact, powers, inputs, table.to(plan.storage), mixing.contiguous())


def _scan_arguments(plan: _Plan, side: int, state_width: int) -> tuple:
    """The sizes of one side (0: keys, 1: values) as the scans take them."""
    offset = 0 if side == 0 else plan.widths[0]
    return plan.widths[side], plan.padded[side], plan.size, state_width, offset


def _states(plan: _Plan, key, value, tables: Tables, initial_state):
    """The states before every chunk, `[chunks, G, 2, M, padded width]` of keys and of values, and the last ones.

    Rows that are cut into segments are scanned twice: once for what each segment leaves, once from where it begins.
    """
    segments = plan.segments
    shape = (plan.rows * segments, plan.groups, 2, plan.size, sum(plan.widths))
    final = key.new_empty(shape, dtype=torch.float32)
    if segments > 1:
        for side, x in enumerate((key, value)):
            _scan_side(plan, x, side, tables, None, None, final)
        first = torch.zeros_like(final[: plan.rows]) if initial_state is None else initial_state
        sources = torch.cat([first[:, None], final.unflatten(0, (-1, segments))[:, :-1]], dim=1)
        begins = plan.segment_ends(key.device)[:, :-1]
        initial_state = carry(tables.powers[..., : plan.size], sources, begins, begins).flatten(0, 1)
        final = torch.empty_like(final)
    states = tuple(
        x.new_empty((plan.chunks, plan.groups, 2, plan.modes, padded), dtype=plan.storage)
        for x, padded in zip((key, value), plan.padded, strict=True)
    )
    for side, x in enumerate((key, value)):
        _scan_side(plan, x, side, tables, initial_state, states[side], final)
    return states, final.unflatten(0, (-1, segments))[:, -1].contiguous()


def _scan_side(plan: _Plan, x, side: int, tables: Tables, initial_state, states, final) -> None:
    """Keys (side 0) or values (side 1); with `states` None only what is left at the end."""
    padded = plan.padded[side]
    block_modes, block_width = min(plan.modes, 32), min(padded, 32)
    grid = (plan.rows * plan.segments, plan.groups, (plan.modes // block_modes) * (padded // block_width))
    options = {k: v for k, v in plan.options.items() if k != "FULL"}
    cu_seqlens, first_chunks, _, per_row, length = plan.places
    _scan[grid](
        x, tables.inputs, tables.powers, initial_state, states, final, cu_seqlens, first_chunks, per_row, length,
        plan.groups, *_scan_arguments(plan, side, final.shape[-1]), BM=block_modes, BW=block_width,
        HAS_INITIAL=initial_state is not None, STORE=states is not None, SEGMENTS=plan.segments,
        EXACT=plan.storage == torch.bfloat16, **options,
    )  # fmt: skip


def _forward(query, key, value, tables: Tables, initial_state, cu_seqlens, wide):
    plan = _plan(query, key, value, tables, cu_seqlens)
    tables = _padded(plan, tables)
    output = value.new_empty((*query.shape[:3], plan.widths[1]), dtype=torch.float32 if wide else value.dtype)
    with on_device(query):
        states, final = _states(plan, key, value, tables, initial_state)
        for exact, kernel in enumerate((_attend, _attend_exact)):
            kernel[(plan.chunks, plan.shape[2])](
                query, key, value, output, *states, tables.table, tables.powers, tables.mixing, tables.exact,
                *plan.places, plan.shape[2], plan.groups, *plan.widths, *plan.padded, EXACT=exact, **plan.blocks(),
                **plan.options,
            )  # fmt: skip
    return output, final


def _backward(query, key, value, tables: Tables, initial_state, cu_seqlens, want_mixing, grad_output, grad_final):
    plan = _plan(query, key, value, tables, cu_seqlens)
    tables = _padded(plan, tables)
    transposed = tables.mixing.transpose(1, 2)
    transposed = (transposed.transpose(3, 4) if plan.options["FULL"] else transposed).contiguous()
    grads = [torch.empty_like(x) for x in (query, key, value)]
    grad_initial, grad_mixing = torch.empty_like(grad_final), torch.zeros_like(tables.mixing, dtype=torch.float32)
    with on_device(query):
        states, _ = _states(plan, key, value, tables, initial_state)
        common = (grads[0], grad_initial, grad_final)
        keys = _side(
            plan.swapped(), 0, (grad_output, value, key, query), grads[1], states[::-1],
            tables._replace(mixing=transposed), _scan_arguments(plan, 0, grad_final.shape[-1]), *common,
        )  # fmt: skip
        values = _side(
            plan, 1, (query, key, value, grad_output), grads[2], states,
            tables, _scan_arguments(plan, 1, grad_final.shape[-1]), *common,
        )  # fmt: skip
        if want_mixing:
            grad_mixing = _mixing_gradient(plan, query, key, value, grad_output, states, tables)
    table, inputs, log_decay = ((a + b)[..., : plan.size].contiguous() for a, b in zip(keys, values, strict=True))
    index = (..., slice(plan.size), slice(plan.size)) if plan.options["FULL"] else (..., slice(plan.size))
    initial = grad_initial if initial_state is not None else grad_initial.new_empty(0)
    return *grads, log_decay.mT.contiguous(), inputs, table, grad_mixing[index].contiguous(), initial


def _side(plan, side, tokens, grad_c, states, tables, scan_arguments, grad_query, grad_initial, grad_final):
    """Gradients that enter through the keys (side 0, which also gives that of the query) or the values (side 1).

    Args:
        tokens: (a, b, c, f) of `attend_backward`; states: those that b and c wrote.

    Returns:
        The gradients of `Tables.table`, `Tables.inputs` and log(lambda).
    """
    *_, c, f = tokens
    heads, device = plan.shape[2], f.device
    width, padded = plan.widths[1], plan.padded[1]
    direct = f.new_empty((*plan.shape[:3], width), dtype=plan.storage)
    local = f.new_empty((plan.chunks, heads, 2, plan.modes, padded), dtype=plan.storage)
    lanes = plan.lanes(device)
    grad_table = grad_final.new_empty((lanes, heads, plan.chunk, 2, plan.modes))
    # Where documents are packed, some chunks at the end belong to none.
    grad_decay = grad_final.new_zeros((plan.chunks, heads, 2, plan.modes))
    for exact, kernel in enumerate((_attend_backward, _attend_backward_exact)):
        kernel[(lanes, heads)](
            *tokens, grad_query, direct, local, grad_table, grad_decay, *states, tables.table, tables.powers,
            tables.mixing, tables.exact, *plan.places, heads, plan.groups, plan.chunks, *plan.widths, *plan.padded,
            **plan.blocks(), ROWS=side == 0, EXACT=exact, **plan.options,
        )  # fmt: skip

    block = min(padded, 32)
    programs = (plan.rows * plan.segments, plan.groups, padded // block)
    walked_inputs = grad_final.new_empty((*programs, plan.chunk, 2, plan.modes))
    walked_decay = grad_final.new_empty((*programs, 2, plan.modes))
    options = {k: v for k, v in plan.options.items() if k != "FULL"}
    cu_seqlens, first_chunks, _, per_row, length = plan.places

    def walk(entering, leaving, emit: bool) -> None:
        _scan_backward[programs](
            c, tables.inputs, tables.powers, states[1], entering, local, direct, grad_c, leaving, walked_inputs,
            walked_decay, cu_seqlens, first_chunks, per_row, length, heads, plan.groups, *scan_arguments, BW=block,
            HAS_FINAL=entering is not None, EMIT=emit, SEGMENTS=plan.segments, **options,
        )  # fmt: skip

    if plan.segments > 1:
        alone = grad_final.new_zeros((programs[0], *grad_final.shape[1:]))
        walk(None, alone, emit=False)
        ends = plan.segment_ends(device)[:, 1:]
        sources = torch.cat([alone.unflatten(0, (-1, plan.segments))[:, 1:], grad_final[:, None]], dim=1)
        grad_final = carry_back(tables.powers[..., : plan.size], sources, ends, ends).flatten(0, 1)
        walk(grad_final, alone, emit=True)
        columns = slice(scan_arguments[-1], scan_arguments[-1] + width)
        grad_initial[..., columns] = alone.unflatten(0, (-1, plan.segments))[:, 0, ..., columns]
    else:
        walk(grad_final, grad_initial, emit=True)
    grad_table, grad_decay = (x.sum(0).unflatten(0, (plan.groups, -1)).sum(1) for x in (grad_table, grad_decay))
    return grad_table, walked_inputs.sum((0, 2)), grad_decay + walked_decay.sum((0, 2))


def _mixing_gradient(plan, query, key, value, grad_output, states, tables: Tables) -> torch.Tensor:
    heads, full = plan.shape[2], plan.options["FULL"]
    rows = min(plan.modes, 64 if full else 32)
    columns = min(plan.modes, 32)
    blocks = (plan.modes // rows) * (plan.modes // columns) if full else plan.modes // rows
    lanes = plan.lanes(query.device, blocks)
    shape = (plan.modes, plan.modes) if full else (plan.modes,)
    partial = query.new_empty((lanes, heads, 2, 2, *shape), dtype=torch.float32)
    for exact, kernel in enumerate((_mixing_backward, _mixing_backward_exact)):
        kernel[(lanes, heads, blocks)](
            query, key, value, grad_output, *states, tables.table, tables.powers, partial, tables.exact,
            *plan.places, heads, plan.groups, plan.chunks, *plan.widths, *plan.padded, BN=columns,
            **(plan.blocks() | {"BM": rows}), EXACT=exact, **plan.options,
        )  # fmt: skip
    return partial.sum(0).unflatten(0, (plan.groups, -1)).sum(1)


_NAMESPACE = namespace(__name__)


@torch.library.custom_op(f"{_NAMESPACE}::attention", mutates_args=())
def _operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    exact: torch.Tensor,
    powers: torch.Tensor,
    inputs: torch.Tensor,
    table: torch.Tensor,
    mixing: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    want_mixing: bool,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _forward(query, key, value, Tables(exact, powers, inputs, table, mixing), initial_state, cu_seqlens, wide)


@_operator.register_fake
def _(
    query, key, value, log_decay, exact, powers, inputs, table, mixing, initial_state, cu_seqlens, want_mixing, wide
):  # fmt: skip
    output = value.new_empty((*query.shape[:3], value.shape[3]), dtype=torch.float32 if wide else value.dtype)
    return output, query.new_empty(_state_shape(query, key, value, table, cu_seqlens), dtype=torch.float32)


def _state_shape(query, key, value, table, cu_seqlens) -> tuple[int, ...]:
    rows = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return rows, key.shape[2], 2, table.shape[3], key.shape[3] + value.shape[3]


@torch.library.custom_op(f"{_NAMESPACE}::attention_backward", mutates_args=())
def _operator_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    exact: torch.Tensor,
    powers: torch.Tensor,
    inputs: torch.Tensor,
    table: torch.Tensor,
    mixing: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    want_mixing: bool,
    grad_output: torch.Tensor,
    grad_final: torch.Tensor,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    tables = Tables(exact, powers, inputs, table, mixing)
    return _backward(query, key, value, tables, initial_state, cu_seqlens, want_mixing, grad_output, grad_final)


@_operator_backward.register_fake
def _(
    query, key, value, exact, powers, inputs, table, mixing, initial_state, cu_seqlens, want_mixing, grad_output,
    grad_final,
):  # fmt: skip
    tokens = (torch.empty_like(x) for x in (query, key, value))
    log_decay = inputs.new_empty((inputs.shape[0], inputs.shape[3], 2))
    initial = grad_final.new_empty(0) if initial_state is None else torch.empty_like(grad_final)
    return *tokens, log_decay, *(torch.empty_like(x) for x in (inputs, table, mixing)), initial


def _keep_inputs(ctx, inputs, output):
    query, key, value, _, *tensors, want_mixing, _ = inputs
    ctx.save_for_backward(query, key, value, *tensors)
    ctx.want_mixing = want_mixing


def _differentiate(ctx, grad_output, grad_final):
    saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor a single time
    query, key, value, _, _, _, table, _, initial_state, cu_seqlens = saved
    if grad_output is None:
        grad_output = value.new_zeros((*query.shape[:3], value.shape[3]))
    if grad_final is None:
        grad_final = query.new_zeros(_state_shape(query, key, value, table, cu_seqlens), dtype=torch.float32)
    grad_output, grad_final = grad_output.to(value.dtype).contiguous(), grad_final.float().contiguous()
    *grads, inputs, table, mixing, initial = _operator_backward(*saved, ctx.want_mixing, grad_output, grad_final)
    initial = None if initial_state is None else initial
    return *grads, None, None, inputs, table, mixing, initial, None, None, None


_operator.register_autograd(_differentiate, setup_context=_keep_inputs)
