"""The fused backend: `chunk_attention` as a few kernels behind one opaque operator of `torch.library`.

Forward: two passes over the tokens leave the state before every chunk (keys, values), then one program a chunk and head
computes its outputs. Backward stores nothing but its inputs: it makes the chunk states again, finds what each chunk
contributes on its own (twice the same kernel, with the roles of query, key, value and the gradient of the output
exchanged, see `op_interdomain_triton_attend`), and walks the chunks back. Sums over chunks are taken in a fixed order,
so that gradients repeat bit for bit. Which tokens are real is read by the kernels alone, never by the host.
"""

from typing import NamedTuple

import torch

from .op_common_launch import interpreted, multiprocessors, namespace, on_device, power_of_two, tuned
from .op_interdomain_triton_attend import (
    ChunkGradients,
    ChunkStates,
    Operands,
    Widths,
    attend,
    attend_backward,
    mixing_backward,
)
from .op_interdomain_triton_carry import carry, carry_back, segment_ends
from .op_interdomain_triton_states import Columns, LaterGradients, chunk_states, chunk_states_backward
from .op_interdomain_triton_tables import KernelTables, make_tables
from .op_interdomain_triton_tiles import Arithmetic, Documents, Sizes

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_KIND = ("SIZES", "FULL", "MATH")
_attend = tuned(attend, _KIND)
_attend_backward = tuned(attend_backward, (*_KIND, "ROWS"))
_mixing_backward = tuned(mixing_backward, _KIND)
_chunk_states = tuned(chunk_states, ("C", "M", "BM", "BW", "STORE", "TWO_TERMS", "MATH"))
_chunk_states_backward = tuned(chunk_states_backward, ("C", "M", "BW", "EMIT", "MATH"))
# Hardly ever at work, so not worth the compilations of a choice.
_attend_skewed, _attend_backward_skewed, _mixing_backward_skewed = attend, attend_backward, mixing_backward


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
    lengths: torch.Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `chunk_attention`, for tokens in bfloat16, float16 or float32; parameters and states are float32.

    Args:
        cu_seqlens: `[S + 1]` from 0 to T, non-decreasing, not checked here; an empty document keeps its initial state.
        chunk_size: rounded down to a power of two from 16 to what the chip holds: 64 tokens, fewer for M above 64.
        wide: give the output in float32 instead of the dtype of the tokens.
        lengths: `[B]` integers from 0 to T, not checked here: the real tokens of a row, in front of its pads, which
            are not read; outputs and gradients at pads are zero.
        output_final_state: without it, no memory is taken for states of documents (many of which may be empty).
    """
    chunk = _chunk_tokens(chunk_size, log_decay.shape[1], query.shape[1])
    tables = make_tables(log_decay.float(), input_matrix.float(), coefficient_matrix, product, chunk)
    output, final = _operator(
        *(x.contiguous() for x in (query, key, value)),
        log_decay.float().contiguous(),
        *tables,
        None if initial_state is None else initial_state.float().contiguous(),
        *(None if x is None else x.to(torch.int32).contiguous() for x in (cu_seqlens, lengths)),
        coefficient_matrix is not None and coefficient_matrix.requires_grad,
        wide,
        output_final_state,
    )
    return output, final if output_final_state else None


def _chunk_tokens(chunk_size: int, size: int, length: int) -> int:
    """Tokens a chunk; lengths are only compared, so that a compiled graph serves all above 32."""
    largest = max(16, min(chunk_size, 4096 // power_of_two(size)))
    chunk = 1 << (largest.bit_length() - 1)
    while chunk > 16 and chunk // 2 >= length:
        chunk //= 2
    return chunk


class _Plan(NamedTuple):
    """Sizes of one call, and what its kernels share."""

    shape: torch.Size  # [B, T, H, R] of the query
    groups: int
    widths: tuple[int, ...]  # R and D
    padded: tuple[int, ...]
    size: int  # M
    modes: int  # M, padded
    chunk: int  # C
    rows: int  # batch rows or documents
    segments: int  # of a row, for the chunk states
    chunks: int  # an upper bound where there are documents
    slots: int  # for the states before chunks
    documents: Documents
    full: bool  # the coefficient matrix
    math: Arithmetic

    @property
    def packed(self) -> bool:
        return self.documents.starts is not None

    @property
    def storage(self) -> torch.dtype:
        """The dtype of states between kernels, and of the operands of matrix products."""
        return torch.bfloat16 if tl.bfloat16 == self.math.DTYPE else torch.float32

    @property
    def row(self) -> tuple[int, int]:
        """Chunks and tokens of a full row."""
        return -(-self.shape[1] // self.chunk), self.shape[1]

    @property
    def options(self) -> dict:
        return {"FULL": self.full, "PACKED": self.packed, "MATH": self.math}

    def sizes(self, side: int) -> dict:
        """What the kernels of a pass are compiled for; its c are the keys (side 0) or the values (side 1)."""
        limit = 64 if self.modes <= 64 else 32
        if self.storage == torch.float32:
            limit //= 2
        a, c = (self.widths[1 - side], self.padded[1 - side]), (self.widths[side], self.padded[side])
        return {
            "WIDTHS": Widths(a[0], c[0], a[1], c[1]),
            "SIZES": Sizes(self.chunk, self.modes, min(self.modes, 32), min(a[1], limit), min(c[1], limit)),
        }

    def columns(self, side: int) -> Columns:
        """Those of the keys (side 0) or the values (side 1) in the state."""
        offset = self.widths[0] * side
        return Columns(self.widths[side], self.padded[side], self.size, sum(self.widths), offset)

    def segment_ends(self, device: torch.device) -> torch.Tensor:
        if self.packed:
            lengths = self.documents.ends - self.documents.starts
        else:
            lengths = torch.full((self.rows,), self.shape[1], device=device)
        return segment_ends(lengths, self.chunk, self.segments)

    def lanes(self, device: torch.device, blocks: int = 1) -> int:
        """How many programs share the chunks of a head: enough to fill the device a few times."""
        wanted = 2 if interpreted() else -(-4 * multiprocessors(device) // (self.shape[2] * blocks))
        return min(max(wanted, 1), self.chunks)

    def like_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Room for what kernels write at real tokens; where there may be pads, zeros."""
        return torch.zeros_like(x) if self.packed else torch.empty_like(x)


def _plan(query, key, value, tables: KernelTables, has_initial: bool, cu_seqlens, lengths) -> _Plan:
    batch, length, _, width = query.shape
    chunk, size = tables.intra.shape[1], tables.intra.shape[3]
    documents = _documents(batch, length, chunk, has_initial, cu_seqlens, lengths)
    rows = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    chunks = slots = rows * -(-length // chunk)
    if cu_seqlens is not None:
        chunks = length // chunk + min(rows, length)
    if documents.starts is not None:
        slots = batch * length // chunk + (rows if has_initial else 1)
    widths = (width, value.shape[3])
    return _Plan(
        query.shape, key.shape[2], widths, tuple(power_of_two(w) for w in widths), size, power_of_two(size), chunk,
        rows, _segments(rows * key.shape[2], chunks // rows, query.device), chunks, slots, documents,
        tables.mixing.ndim == 5, _arithmetic(value.dtype),
    )  # fmt: skip


def _documents(batch, length, chunk, has_initial, cu_seqlens, lengths) -> Documents:
    if cu_seqlens is not None:
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    elif lengths is not None:
        starts = torch.arange(0, batch * length, length, dtype=torch.int32, device=lengths.device)
        ends = starts + lengths
    else:
        return Documents()
    counts = (ends - starts + chunk - 1) // chunk
    first_chunks = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    # Without initial states the first chunks of all documents begin with zeros, for which one slot will do.
    first_slots = torch.full_like(starts, batch * length // chunk)
    if has_initial:
        first_slots += torch.arange(starts.shape[0], dtype=torch.int32, device=starts.device)
    return Documents(starts, ends, first_chunks, first_slots)


def _segments(lanes: int, chunks: int, device: torch.device) -> int:
    """Into how many segments to cut a row: as many as fill the device, where a segment keeps at least 8 chunks.

    A lane, one row and group, is walked by about 8 programs. Two passes cost twice, so cut in no fewer than 3.
    """
    wanted = min(2 * multiprocessors(device) // (8 * lanes), chunks // 8)
    return wanted if wanted > 2 else 1


def _walkers(segments: int, programs: int, device: torch.device) -> int:
    """How many lanes walk the segments back: all at once, up to what fills the device several times over."""
    return min(segments, max(128, 8 * multiprocessors(device) // programs))


def _arithmetic(dtype: torch.dtype) -> Arithmetic:
    """Operands of the matrix units, and how float32 is multiplied.

    float16 would overflow where a state or a readout passes 65,504; tf32 has its precision and the range of float32.
    """
    if dtype == torch.bfloat16:
        return Arithmetic(tl.bfloat16, "interpreted" if interpreted() else "tf32")
    if torch.version.hip is not None or interpreted():
        return Arithmetic(tl.float32, "ieee")
    fast = dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest"
    return Arithmetic(tl.float32, "tf32" if fast else "tf32x3")


def _padded(plan: _Plan, tables: KernelTables) -> KernelTables:
    """Modes filled up with zeros to a power of two, operands of matrix products in the dtype of the matrix units."""
    missing = plan.modes - plan.size
    powers, inputs, intra = (torch.nn.functional.pad(x, (0, missing)) for x in tables[1:4])
    mixing = torch.nn.functional.pad(tables.mixing, (0, missing) * (2 if plan.full else 1))
    mixing = mixing.to(plan.storage) if plan.full else mixing
    return KernelTables(tables.skewed, powers, inputs, intra.to(plan.storage), mixing.contiguous())


def _states(plan: _Plan, key, value, tables: KernelTables, initial_state, want_final: bool):
    """The states before every chunk, `[slots, G, 2, M, padded width]` of keys and of values, and the last ones.

    Rows that are cut into segments are walked twice: once for what each segment leaves, once from where it begins.
    """
    segments = plan.segments
    shape = (plan.rows * segments, plan.groups, 2, plan.size, sum(plan.widths))
    if segments > 1:
        alone = key.new_empty(shape, dtype=torch.float32)
        for side, x in enumerate((key, value)):
            _states_of_side(plan, x, side, tables, None, None, alone)
        first = torch.zeros_like(alone[: plan.rows]) if initial_state is None else initial_state
        sources = torch.cat([first[:, None], alone.unflatten(0, (-1, segments))[:, :-1]], dim=1)
        begins = plan.segment_ends(key.device)[:, :-1]
        initial_state = carry(tables.powers[..., : plan.size], sources, begins, begins).flatten(0, 1)
    final = key.new_empty(shape, dtype=torch.float32) if want_final else None
    states = tuple(
        x.new_empty((plan.slots, plan.groups, 2, plan.modes, padded), dtype=plan.storage)
        for x, padded in zip((key, value), plan.padded, strict=True)
    )
    for side, x in enumerate((key, value)):
        _states_of_side(plan, x, side, tables, initial_state, states[side], final)
    return states, final.unflatten(0, (-1, segments))[:, -1].contiguous() if want_final else None


def _states_of_side(plan: _Plan, x, side: int, tables: KernelTables, initial_state, states, final) -> None:
    """Keys (side 0) or values (side 1); with `states` None only what is left at the end."""
    padded = plan.padded[side]
    block_modes, block_width = min(plan.modes, 32), min(padded, 32)
    grid = (plan.rows * plan.segments, plan.groups, (plan.modes // block_modes) * (padded // block_width))
    _chunk_states[grid](
        x, tables, initial_state, states, final, plan.documents, *plan.row, plan.groups, plan.columns(side),
        C=plan.chunk, M=plan.modes, BM=block_modes, BW=block_width, STORE=states is not None, SEGMENTS=plan.segments,
        PACKED=plan.packed, TWO_TERMS=plan.storage == torch.bfloat16, MATH=plan.math,
    )  # fmt: skip


def _forward(query, key, value, tables: KernelTables, initial_state, cu_seqlens, lengths, wide, want_final):
    plan = _plan(query, key, value, tables, initial_state is not None, cu_seqlens, lengths)
    tables = _padded(plan, tables)
    shape, dtype = (*query.shape[:3], plan.widths[1]), torch.float32 if wide else value.dtype
    output = value.new_zeros(shape, dtype=dtype) if plan.packed else value.new_empty(shape, dtype=dtype)
    with on_device(query):
        states, final = _states(plan, key, value, tables, initial_state, want_final)
        for skewed, kernel in enumerate((_attend, _attend_skewed)):
            kernel[(plan.chunks, plan.shape[2])](
                Operands(query, key, value), output, ChunkStates(*states), tables, plan.documents, plan.rows, *plan.row,
                plan.shape[2], plan.groups, **plan.sizes(1), SKEWED=skewed, **plan.options,
            )  # fmt: skip
    return output, query.new_empty(0, dtype=torch.float32) if final is None else final


def _backward(
    query, key, value, tables: KernelTables, initial_state, cu_seqlens, lengths, want_mixing, grad_output, grad_final
):
    plan = _plan(query, key, value, tables, initial_state is not None, cu_seqlens, lengths)
    tables = _padded(plan, tables)
    transposed = tables.mixing.transpose(1, 2)
    transposed = (transposed.transpose(3, 4) if plan.full else transposed).contiguous()
    grads = [plan.like_tokens(x) for x in (query, key, value)]
    grad_initial = None if initial_state is None else torch.empty_like(initial_state)
    grad_mixing = torch.zeros_like(tables.mixing, dtype=torch.float32)
    with on_device(query):
        states, _ = _states(plan, key, value, tables, initial_state, want_final=False)
        keys = _side(
            plan, 0, Operands(grad_output, value, key, query), ChunkStates(*states[::-1]),
            tables._replace(mixing=transposed), grads[0], grads[1], grad_initial, grad_final,
        )  # fmt: skip
        values = _side(
            plan, 1, Operands(query, key, value, grad_output), ChunkStates(*states), tables, grads[0], grads[2],
            grad_initial, grad_final,
        )  # fmt: skip
        if want_mixing:
            grad_mixing = _mixing_gradient(plan, Operands(query, key, value, grad_output), ChunkStates(*states), tables)
    intra, inputs, log_decay = ((a + b)[..., : plan.size].contiguous() for a, b in zip(keys, values, strict=True))
    index = (..., slice(plan.size), slice(plan.size)) if plan.full else (..., slice(plan.size))
    initial = query.new_empty(0, dtype=torch.float32) if grad_initial is None else grad_initial
    return *grads, log_decay.mT.contiguous(), inputs, intra, grad_mixing[index].contiguous(), initial


def _side(plan, side, tokens: Operands, states: ChunkStates, tables, grad_query, grad_c, grad_initial, grad_final):
    """Gradients that enter through the keys (side 0, which also gives that of the query) or the values (side 1).

    Args:
        tokens: see `attend_backward`; states: those that b and c wrote.

    Returns:
        The gradients of `KernelTables.intra`, `KernelTables.inputs` and log(lambda).
    """
    heads, device = plan.shape[2], grad_c.device
    width, padded = plan.widths[side], plan.padded[side]

    def empty(*shape, dtype=torch.float32):
        return grad_c.new_empty(shape, dtype=dtype)

    lanes = plan.lanes(device)
    grads = ChunkGradients(
        c=empty(*plan.shape[:3], width, dtype=plan.storage),
        states=empty(plan.slots, heads, 2, plan.modes, padded, dtype=plan.storage),
        intra=empty(lanes, heads, plan.chunk, 2, plan.modes),
        # Where there are documents, some chunks at the end belong to none.
        log_decay=grad_c.new_zeros((plan.chunks, heads, 2, plan.modes), dtype=torch.float32),
    )
    for skewed, kernel in enumerate((_attend_backward, _attend_backward_skewed)):
        kernel[(lanes, heads)](
            tokens, grad_query, grads, states, tables, plan.documents, plan.rows, *plan.row, heads, plan.groups,
            plan.chunks, **plan.sizes(side), ROWS=side == 0, SKEWED=skewed, **plan.options,
        )  # fmt: skip

    block, segments = min(padded, 32), plan.rows * plan.segments
    walkers = _walkers(segments, plan.groups * (padded // block), device)
    programs = (walkers, plan.groups, padded // block)
    walked_inputs = empty(*programs, plan.chunk, 2, plan.modes)
    walked_decay = empty(*programs, 2, plan.modes)

    def walk(entering, leaving, emit: bool) -> None:
        _chunk_states_backward[programs](
            tokens.c, tables, states.c, entering, grads, LaterGradients(grad_c, leaving, walked_inputs, walked_decay),
            plan.documents, segments, *plan.row, heads, plan.groups, plan.columns(side), C=plan.chunk, M=plan.modes,
            BW=block, EMIT=emit, SEGMENTS=plan.segments, PACKED=plan.packed, MATH=plan.math,
        )  # fmt: skip

    if plan.segments > 1:
        shape = (plan.groups, 2, plan.size, sum(plan.widths))
        alone = grad_c.new_zeros((segments, *shape), dtype=torch.float32)
        walk(None, alone, emit=False)
        last = grad_c.new_zeros((plan.rows, *shape), dtype=torch.float32) if grad_final is None else grad_final
        ends = plan.segment_ends(device)[:, 1:]
        sources = torch.cat([alone.unflatten(0, (-1, plan.segments))[:, 1:], last[:, None]], dim=1)
        grad_final = carry_back(tables.powers[..., : plan.size], sources, ends, ends).flatten(0, 1)
        walk(grad_final, None if grad_initial is None else alone, emit=True)
        if grad_initial is not None:
            offset = plan.columns(side).offset
            columns = slice(offset, offset + width)
            grad_initial[..., columns] = alone.unflatten(0, (-1, plan.segments))[:, 0, ..., columns]
    else:
        walk(grad_final, grad_initial, emit=True)
    intra, log_decay = (x.sum(0).unflatten(0, (plan.groups, -1)).sum(1) for x in (grads.intra, grads.log_decay))
    return intra, walked_inputs.sum((0, 2)), log_decay + walked_decay.sum((0, 2))


def _mixing_gradient(plan, tokens: Operands, states: ChunkStates, tables: KernelTables) -> torch.Tensor:
    heads = plan.shape[2]
    rows = min(plan.modes, 64 if plan.full else 32)
    columns = min(plan.modes, 32)
    blocks = (plan.modes // rows) * (plan.modes // columns) if plan.full else plan.modes // rows
    lanes = plan.lanes(tokens.a.device, blocks)
    shape = (plan.modes, plan.modes) if plan.full else (plan.modes,)
    partial = tokens.a.new_empty((lanes, heads, 2, 2, *shape), dtype=torch.float32)
    sizes = plan.sizes(1)
    sizes["SIZES"] = sizes["SIZES"]._replace(BM=rows)
    for skewed, kernel in enumerate((_mixing_backward, _mixing_backward_skewed)):
        kernel[(lanes, heads, blocks)](
            tokens, partial, states, tables, plan.documents, plan.rows, *plan.row, heads, plan.groups, plan.chunks,
            BN=columns, SKEWED=skewed, **sizes, **plan.options,
        )  # fmt: skip
    return partial.sum(0).unflatten(0, (plan.groups, -1)).sum(1)


_NAMESPACE = namespace(__name__)


@torch.library.custom_op(f"{_NAMESPACE}::attention", mutates_args=())
def _operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    skewed: torch.Tensor,
    powers: torch.Tensor,
    inputs: torch.Tensor,
    intra: torch.Tensor,
    mixing: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    want_mixing: bool,
    wide: bool,
    want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    tables = KernelTables(skewed, powers, inputs, intra, mixing)
    return _forward(query, key, value, tables, initial_state, cu_seqlens, lengths, wide, want_final)


@_operator.register_fake
def _(
    query, key, value, log_decay, skewed, powers, inputs, intra, mixing, initial_state, cu_seqlens, lengths,
    want_mixing, wide, want_final,
):  # fmt: skip
    output = value.new_empty((*query.shape[:3], value.shape[3]), dtype=torch.float32 if wide else value.dtype)
    rows = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (rows, key.shape[2], 2, intra.shape[3], key.shape[3] + value.shape[3]) if want_final else (0,)
    return output, query.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::attention_backward", mutates_args=())
def _operator_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    skewed: torch.Tensor,
    powers: torch.Tensor,
    inputs: torch.Tensor,
    intra: torch.Tensor,
    mixing: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    want_mixing: bool,
    grad_output: torch.Tensor,
    grad_final: torch.Tensor | None,
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
    tables = KernelTables(skewed, powers, inputs, intra, mixing)
    return _backward(
        query, key, value, tables, initial_state, cu_seqlens, lengths, want_mixing, grad_output, grad_final
    )


@_operator_backward.register_fake
def _(
    query, key, value, skewed, powers, inputs, intra, mixing, initial_state, cu_seqlens, lengths, want_mixing,
    grad_output, grad_final,
):  # fmt: skip
    tokens = (torch.empty_like(x) for x in (query, key, value))
    log_decay = inputs.new_empty((inputs.shape[0], inputs.shape[3], 2))
    initial = inputs.new_empty(0) if initial_state is None else torch.empty_like(initial_state)
    return *tokens, log_decay, *(torch.empty_like(x) for x in (inputs, intra, mixing)), initial


def _keep_inputs(ctx, inputs, output):
    query, key, value, _, *tensors, want_mixing, _, want_final = inputs
    ctx.save_for_backward(query, key, value, *tensors)
    ctx.want_mixing, ctx.want_final = want_mixing, want_final


def _differentiate(ctx, grad_output, grad_final):
    saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor a single time
    query, _, value, *_, initial_state, _, _ = saved
    if grad_output is None:
        grad_output = value.new_zeros((*query.shape[:3], value.shape[3]))
    grad_final = grad_final.float().contiguous() if ctx.want_final and grad_final is not None else None
    grad_output = grad_output.to(value.dtype).contiguous()
    *grads, inputs, intra, mixing, initial = _operator_backward(*saved, ctx.want_mixing, grad_output, grad_final)
    initial = None if initial_state is None else initial
    return *grads, None, None, inputs, intra, mixing, initial, *(None,) * 5


_operator.register_autograd(_differentiate, setup_context=_keep_inputs)
