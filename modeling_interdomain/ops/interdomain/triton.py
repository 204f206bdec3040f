"""The fused backend: `chunk_attention` as a few kernels behind one opaque operator of `torch.library`.

Forward makes the tables of the parameters, walks keys and values for the state before every chunk, and then computes
the outputs, one program for each chunk and head. Backward keeps the inputs alone: it makes tables and states again,
finds what each chunk contributes on its own (`ops/interdomain/triton_attend_backward.py`), walks the chunks back, and
sums the gradients of the parameters in a last launch. Sums over chunks have a fixed order, so that gradients repeat bit
for bit. Lengths are read by the kernels alone, never by the host.
"""

import itertools
from typing import Any, NamedTuple

import torch

from ..common.custom_op import differentiable
from ..common.launch import CONFIGURATIONS, contiguous, interpreted, multiprocessors, on_device, power_of_two, tuned
from ..common.packing import state_rows
from ..common.tiles import Arithmetic, Documents, arithmetic, chunk_tokens, layout_of
from ..diagonal.triton_states import (
    Columns,
    LaterGradients,
    carry,
    carry_back,
    chunk_states,
    chunk_states_backward,
    segment_ends,
)
from ..diagonal.triton_tables import KernelTables, Parameters, Partial, make_tables, mixing_of, table_gradients
from ..diagonal.triton_tiles import Mixing, Sizes
from .triton_attend import ChunkStates, Operands, Widths, attend
from .triton_attend_backward import (
    ChunkGradients,
    Pulled,
    mix,
    mixing_backward,
    pull_both,
    push_both,
)

# Up to here a program holds all modes of y, as a diagonal coefficient matrix needs them.
_LARGEST_DIAGONAL = 64

_KIND = ("SIZES", "MATH")
_attend = tuned(attend, (*_KIND, "MIXING"))
# Three blocks of small tiles fit on a multiprocessor of an H100, or two of large ones: timing chooses.
_attend_few = tuned(attend, (*_KIND, "MIXING"), [(4, 1, {"EDGE": 16}), *CONFIGURATIONS])
_pull_both = tuned(pull_both, _KIND)
_mix = tuned(mix, (*_KIND, "MIXING"))
_mixing_backward = tuned(mixing_backward, (*_KIND, "FULL"))
_push_both = tuned(push_both, _KIND)
_chunk_states = tuned(chunk_states, ("C", "M", "BM", "BW", "TWO_TERMS", "MATH"))
_chunk_states_backward = tuned(chunk_states_backward, ("C", "M", "BW", "EMIT", "MATH"))
# With the delta rule all modes are in one program.
_delta_states = tuned(chunk_states, ("C", "M", "BW", "TWO_TERMS", "MATH"))
_delta_states_backward = tuned(chunk_states_backward, ("C", "M", "BW", "MATH"))
# Hardly ever used, so not worth several compilations: each has the number of warps that spills no register.
_attend_skewed = tuned(attend, _KIND, [(8, 1, {"EDGE": 16})])
_pull_both_skewed, _push_both_skewed = tuned(pull_both, _KIND, [(4, 1)]), tuned(push_both, _KIND, [(8, 1)])


def triton_attention(
    query, key, value, log_decay, input_matrix, coefficient_matrix, product: str, initial_state, cu_seqlens,
    chunk_size: int, wide: bool = False, lengths=None, output_final_state: bool = True, operator=None, gates=(),
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """As `chunk_attention`, for tokens in bfloat16, float16 or float32; parameters and states are float32.

    Args:
        cu_seqlens: `[S + 1]` from 0 to T, non-decreasing, not checked here; an empty document keeps its initial state.
        chunk_size: rounded down to a power of two from 16 to what the chip holds: 64 tokens, fewer for M above 64
            and half as many with operands in float32.
        wide: give the output in float32 instead of the dtype of the tokens.
        lengths: `[B]` integers from 0 to T, not checked here: the real tokens of a row, in front of its pads, which
            are not read; outputs and gradients at pads are zero.
        output_final_state: without it, no memory is taken for states of documents (many of which may be empty).
        operator: with arguments of its own behind `initial_state`, `gates`, and maybe with more outputs.
    """
    if log_decay.shape[1] > _LARGEST_DIAGONAL:
        coefficient_matrix = _in_full(coefficient_matrix, log_decay)
    output, final, *_ = (operator or _operator)(
        *contiguous(query, key, value),
        *contiguous(log_decay, input_matrix, coefficient_matrix, initial_state, *gates, dtype=torch.float32),
        *contiguous(cu_seqlens, lengths, dtype=torch.int32),
        product,
        chunk_tokens(min(chunk_size, _largest_chunk(value.dtype, log_decay.shape[1])), query.shape[1]),
        wide,
        output_final_state,
    )
    return output, final if output_final_state else None


def _largest_chunk(dtype: torch.dtype, size: int) -> int:
    """Tokens whose modes, as operands of matrix products (see `arithmetic`), fit on the chip."""
    return (4096 if dtype == torch.bfloat16 else 2048) // power_of_two(size)


def _in_full(coefficients: torch.Tensor | None, log_decay: torch.Tensor) -> torch.Tensor:
    """`[G, M, M, 2]`: a full matrix is applied in blocks of modes, with more products but hardly a register spill."""
    if coefficients is None:
        groups, size = log_decay.shape[:2]
        identity = torch.eye(size, dtype=torch.complex64, device=log_decay.device)
        return torch.view_as_real(identity).expand(groups, size, size, 2)
    return coefficients if coefficients.ndim == 4 else torch.diag_embed(coefficients.movedim(2, 1)).movedim(1, 3)


class Plan(NamedTuple):
    """Sizes of one call, and what its kernels share."""

    shape: torch.Size  # [B, T, H, R] of the query
    groups: int
    widths: tuple[int, ...]  # R and D, or what else the sides of the state have
    padded: tuple[int, ...]
    size: int  # M
    modes: int  # M, padded
    chunk: int  # C
    rows: int  # batch rows or documents
    segments: int  # of a row, for the chunk states
    chunks: int  # an upper bound where there are documents
    slots: int  # for the states before chunks
    documents: Documents
    mixing: Mixing | None  # without a readout none is needed
    math: Arithmetic
    gates: Any = None  # see `ops/interdomain/triton_gates.py`
    gate_ends: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.documents.starts is not None

    @property
    def storage(self) -> torch.dtype:
        return self.math.storage

    @property
    def row(self) -> tuple[int, int]:
        """Chunks and tokens of a full row."""
        return -(-self.shape[1] // self.chunk), self.shape[1]

    @property
    def options(self) -> dict:
        return {"PACKED": self.packed, "MATH": self.math}

    @property
    def places(self) -> tuple:
        """The arguments from which a kernel finds the tokens of a chunk."""
        return self.documents, self.rows, *self.row

    @property
    def sizes(self) -> dict:
        """What the kernels are compiled for."""
        columns = 64 if self.modes <= 64 else 32 if self.modes <= 128 else 16
        return self._sizes(32 if self.few else 16, max(columns // self.math.terms, 16))

    @property
    def sizes_of_stored(self) -> dict:
        """The same for a kernel that loads its operands again for each product."""
        return self._sizes(64 // self.math.terms, 64 if self.few else 32)

    def _sizes(self, modes: int, columns: int) -> dict:
        pulled, pushed = (min(padded, columns) for padded in self.padded)
        sizes = Sizes(self.chunk, self.modes, min(self.modes, modes), pulled, pushed, self.few)
        return {"WIDTHS": Widths(*self.widths, *self.padded), "SIZES": sizes}

    @property
    def few(self) -> bool:
        """See `Sizes`."""
        return self.modes <= 64 and self.math.terms == 1

    @property
    def columns(self) -> tuple[Columns, ...]:
        """Those of every side in the state."""
        offsets = itertools.accumulate(self.widths, initial=0)
        sides = zip(self.widths, self.padded, offsets)
        return tuple(Columns(width, padded, self.size, sum(self.widths), offset) for width, padded, offset in sides)

    @property
    def block(self) -> int:
        """Columns of the state that one program holds, with all modes, in its registers."""
        return min(*self.padded, 16)

    def segment_ends(self, device: torch.device) -> torch.Tensor:
        if self.packed:
            lengths = self.documents.ends - self.documents.starts
        else:
            lengths = torch.full((self.rows,), self.shape[1], device=device)
        return segment_ends(lengths, self.chunk, self.segments)

    def lanes(self, device: torch.device, blocks: int = 1) -> int:
        """The number of programs that share the chunks of a head: enough to fill the device a few times."""
        wanted = 2 if interpreted() else -(-4 * multiprocessors(device) // (self.shape[2] * blocks))
        return min(max(wanted, 1), self.chunks)

    def of_modes(self, x: torch.Tensor) -> torch.Tensor:
        """Room for what the chunks pull or mix, on the device of x."""
        return x.new_empty((*self.shape[:3], 2, self.modes), dtype=self.storage)

    def room_for_states(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Before every chunk, `[slots, G, 2, M, padded width]` of each side."""
        shape = self.slots, self.groups, 2, self.modes
        return tuple(x.new_empty((*shape, padded), dtype=self.storage) for padded in self.padded)

    def like_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Room for what kernels write at real tokens; where there may be pads, zeros."""
        return torch.zeros_like(x) if self.packed else torch.empty_like(x)


def attention_plan(
    query, key, value, parameters: Parameters, product, chunk, has_initial: bool, cu_seqlens, lengths
) -> Plan:
    widths, size = (query.shape[3], value.shape[3]), parameters.log_decay.shape[1]
    mixing = mixing_of(product, parameters.full, arithmetic(value.dtype))
    return plan_of(query.shape, value, widths, size, chunk, has_initial, cu_seqlens, lengths, mixing)


def plan_of(
    shape: torch.Size, x: torch.Tensor, widths: tuple[int, ...], size: int, chunk: int, has_initial: bool, cu_seqlens,
    lengths, mixing: Mixing | None = None,
) -> Plan:  # fmt: skip
    """For outputs of `shape`, by head, that read a state of `widths`, and inputs x `[B, T, G, W]` that enter it."""
    groups = x.shape[2]
    rows, chunks, slots, documents = layout_of(shape[0], shape[1], chunk, has_initial, cu_seqlens, lengths)
    padded = tuple(power_of_two(w) for w in widths)
    return Plan(
        shape, groups, widths, padded, size, power_of_two(size), chunk,
        rows, _segments(rows * groups, chunks // rows, x.device), chunks, slots, documents, mixing, arithmetic(x.dtype),
    )  # fmt: skip


def _segments(lanes: int, chunks: int, device: torch.device) -> int:
    """The number of segments of a row: as many as fill the device, of at least 8 chunks each.

    A lane, one row and group, is walked by about 8 programs. Segments are walked twice, so fewer than 3 do not pay.
    """
    wanted = min(2 * multiprocessors(device) // (8 * lanes), chunks // 8)
    return wanted if wanted > 2 else 1


def _walkers(segments: int, programs: int, device: torch.device) -> int:
    """The number of lanes that walk the segments back: one a segment, up to what fills the device several times."""
    return min(segments, max(128, 8 * multiprocessors(device) // programs))


def states_before(plan: Plan, sides: tuple, tables: KernelTables, initial_state, want_final: bool):
    """The states before every chunk, `[slots, G, 2, M, padded width]` of each side, and the last ones.

    The last states are as accurate as float32; those before chunks are rounded to the operands of products. Rows that
    are cut into segments are walked twice: once for what each segment adds, once from the state where it begins.

    Args:
        sides: keys and values, or what else enters the state, `[B, T, G, width]`.
    """
    segments = plan.segments
    shape = (plan.rows * segments, plan.groups, 2, plan.size, sum(plan.widths))
    if segments > 1:
        alone = sides[0].new_empty(shape, dtype=torch.float32)
        walk_states(plan, sides, tables, None, (None,) * len(sides), alone, want_final)
        first = torch.zeros_like(alone[: plan.rows]) if initial_state is None else initial_state
        sources = torch.cat([first[:, None], alone.unflatten(0, (-1, segments))[:, :-1]], dim=1)
        begins = plan.segment_ends(sides[0].device)[:, :-1]
        gates = None if plan.gate_ends is None else plan.gate_ends[:, :-1]
        initial_state = carry(tables.powers[..., : plan.size], sources, begins, begins, gates).flatten(0, 1)
    final = sides[0].new_empty(shape, dtype=torch.float32) if want_final else None
    states = plan.room_for_states(sides[0])
    walk_states(plan, sides, tables, initial_state, states, final, want_final)
    return states, final.unflatten(0, (-1, segments))[:, -1].contiguous() if want_final else None


def walk_states(
    plan: Plan, sides: tuple, tables: KernelTables, initial_state, states: tuple, final, exact: bool, columns=None,
    readers=None, written=None,
) -> None:  # fmt: skip
    """Walk all sides, or those of some `columns`; where their `states` are None, for the last states alone.

    Args:
        readers, written: with the delta rule, see `chunk_states`.
    """
    columns, block_width = columns or plan.columns, plan.block
    # 64 rows are what the matrix instructions of a Hopper or Blackwell GPU multiply at a time.
    block_modes = min(plan.modes, 64 // plan.math.terms) if readers is None else plan.modes
    slices = sum((plan.modes // block_modes) * (side.padded // block_width) for side in columns)
    kernel = _chunk_states if readers is None else _delta_states
    kernel[(plan.rows * plan.segments, plan.groups, slices)](
        sides, tables, initial_state, states, final, plan.documents, *plan.row, plan.groups, columns,
        C=plan.chunk, M=plan.modes, BM=block_modes, BW=block_width, SEGMENTS=plan.segments, PACKED=plan.packed,
        TWO_TERMS=exact and plan.storage == torch.bfloat16, MATH=plan.math, gates=plan.gates, readers=readers,
        written=written,
    )  # fmt: skip


def tables_of(plan: Plan, parameters: Parameters, product: str) -> KernelTables:
    return make_tables(parameters, product, plan.chunk, plan.storage, plan.math)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, input_matrix: torch.Tensor,
    coefficients: torch.Tensor | None, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None, product: str, chunk: int, wide: bool, want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    parameters = Parameters(log_decay, input_matrix, coefficients)
    plan = attention_plan(query, key, value, parameters, product, chunk, initial_state is not None, cu_seqlens, lengths)
    return run_forward(plan, (query, key, value), parameters, initial_state, product, wide, want_final)


def run_forward(
    plan: Plan, tokens: tuple, parameters: Parameters, initial_state, product: str, wide: bool, want_final: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the final states."""
    query, key, value = tokens
    shape, dtype = (*query.shape[:3], plan.widths[1]), torch.float32 if wide else value.dtype
    output = value.new_zeros(shape, dtype=dtype) if plan.packed else value.new_empty(shape, dtype=dtype)
    with on_device(query):
        tables = tables_of(plan, parameters, product)
        states, final = states_before(plan, (key, value), tables, initial_state, want_final)
        read_chunks(plan, Operands(query, key, value), ChunkStates(*states), tables, output)
    return output, query.new_empty(0, dtype=torch.float32) if final is None else final


def read_chunks(plan: Plan, tokens: Operands, states: ChunkStates, tables: KernelTables, output) -> None:
    """Write the output, when the states before all chunks are known."""
    mixed = None if plan.math.terms == 1 else plan.of_modes(tokens.c)
    for skewed, kernel in enumerate((_attend_few if plan.few else _attend, _attend_skewed)):
        kernel[(plan.chunks, plan.shape[2])](
            tokens, output, mixed, states, tables, *plan.places, plan.shape[2], plan.groups, **plan.sizes,
            MIXING=plan.mixing, SKEWED=skewed, gates=plan.gates, **plan.options,
        )  # fmt: skip


def output_shapes(
    query, key, value, log_decay, input_matrix, coefficients, initial_state, cu_seqlens, lengths, product, chunk, wide,
    want_final,
):  # fmt: skip
    output = value.new_empty((*query.shape[:3], value.shape[3]), dtype=torch.float32 if wide else value.dtype)
    shape = state_rows(query, cu_seqlens), key.shape[2], 2, log_decay.shape[1], key.shape[3] + value.shape[3]
    return output, query.new_empty(shape if want_final else 0, dtype=torch.float32)


def _backward(inputs, grads, needs):
    query, key, value, *rest, initial_state, cu_seqlens, lengths, product, chunk, _, _ = inputs
    parameters, tokens = Parameters(*rest), (query, key, value)
    plan = attention_plan(*tokens, parameters, product, chunk, initial_state is not None, cu_seqlens, lengths)
    return run_backward(plan, tokens, parameters, initial_state, product, grads, needs[5])


def run_backward(
    plan: Plan, tokens: tuple, parameters: Parameters, initial_state, product: str, grads: tuple, want_mixing: bool
) -> list[torch.Tensor | None]:
    """The gradients of tokens, parameters and initial states; grads: of the output and of the final states."""
    (query, key, value), (grad_output, grad_final) = tokens, grads
    found: list[torch.Tensor | None] = [plan.like_tokens(x) for x in (query, key, value)]
    grad_initial = None if initial_state is None else torch.empty_like(initial_state)
    with on_device(query):
        tables = tables_of(plan, parameters, product)
        states, _ = states_before(plan, (key, value), tables, initial_state, want_final=False)
        operands = Operands(query, key, value, grad_output)
        mixing, chunk_sums, direct = of_chunks(plan, operands, ChunkStates(*states), tables, found[0], want_mixing)
        walked = walk_back(plan, (key, value), states, tables, direct, tuple(found[1:]), grad_initial, grad_final)
        found += table_gradients(parameters, Partial(chunk_sums, walked, mixing), product, plan.shape[2])
    return [*found, grad_initial]


def pull_and_mix(
    plan: Plan, tokens: Operands, states: ChunkStates, tables: KernelTables, sides: int = 2, chunk_sums=None,
    strict: bool = False,
) -> tuple[tuple[Pulled, ...], tuple[torch.Tensor, ...]]:  # fmt: skip
    """What both sides pull, and what is mixed of it; see the kernels. Of one side, that of the keys stands for both."""
    modes = [plan.of_modes(tokens.a) for _ in range(2 * sides)]
    scores = [tokens.a.new_empty((*plan.shape[:3], plan.chunk), dtype=plan.storage) for _ in range(sides)]
    pulled, mixed = tuple(map(Pulled, modes[:sides], scores)) * (2 // sides), tuple(modes[sides:]) * (2 // sides)
    shared, sizes, grid = (*plan.places, plan.shape[2], plan.groups), plan.sizes, (plan.chunks, plan.shape[2], sides)
    for skewed, kernel in enumerate((_pull_both, _pull_both_skewed)):
        kernel[grid](
            tokens, pulled, states, tables, *shared, **sizes, SKEWED=skewed, gates=plan.gates, STRICT=strict,
            **plan.options,
        )  # fmt: skip
    _mix[grid](
        pulled, mixed, chunk_sums, tables, *shared, SIZES=sizes["SIZES"], MIXING=plan.mixing,
        **plan.options,
    )  # fmt: skip
    return pulled, mixed


def of_chunks(
    plan: Plan, tokens: Operands, states: ChunkStates, tables: KernelTables, grad_query, want_mixing: bool,
    strict: bool = False,
):  # fmt: skip
    """What the chunks contribute on their own.

    Args:
        tokens: query, key, value and the gradient of the output.
        strict: see `push_both`.

    Returns:
        The gradient of the mixing matrix or None, `Partial.chunks`, and `ChunkGradients` of keys and of values; with
        `strict` of keys alone.
    """
    heads = plan.shape[2]
    grid = plan.chunks, heads, 2

    def empty(*shape, dtype=plan.storage):
        return grad_query.new_empty(shape, dtype=dtype)

    chunk_sums = empty(plan.chunks, heads, 2, 3, 2, plan.modes, dtype=torch.float32)
    given = 1 if strict else 2
    direct = tuple(
        ChunkGradients(empty(*plan.shape[:3], width), empty(plan.slots, heads, 2, plan.modes, padded))
        for width, padded in zip(plan.widths[:given], plan.padded[:given], strict=True)
    ) * (2 // given)
    pulled, mixed = pull_and_mix(plan, tokens, states, tables, 2, chunk_sums, strict)
    mixing = _mixing_gradient(plan, pulled) if want_mixing else None
    for skewed, kernel in enumerate((_push_both, _push_both_skewed)):
        kernel[grid](
            tokens, pulled, mixed, grad_query, direct, chunk_sums, states, tables, *plan.places, heads, plan.groups,
            **plan.sizes_of_stored, SKEWED=skewed, gates=plan.gates, STRICT=strict, **plan.options,
        )  # fmt: skip
    return mixing, chunk_sums, direct


def walk_back(
    plan: Plan, sides: tuple, states: tuple, tables, direct: tuple, grads: tuple, grad_initial, grad_final,
    columns=None, readers=None, others=None,
) -> torch.Tensor:  # fmt: skip
    """Write the gradients of the sides to `grads`, those of their own chunks and of later ones; the `Partial.walked`.

    Args:
        sides: as in `states_before`; states, direct, grads: the states, `ChunkGradients` and gradients of each.
        columns, readers: as in `walk_states`; others: see `chunk_states_backward`.
    """
    x, block, segments, columns = grads[0], plan.block, plan.rows * plan.segments, columns or plan.columns
    blocks = sum(side.padded // block for side in columns)
    kernel = _chunk_states_backward if readers is None else _delta_states_backward
    walkers = _walkers(segments, plan.groups * blocks, x.device)
    sums = x.new_empty((walkers, blocks, plan.groups, 3, 2, plan.modes), dtype=torch.float32)

    def walk(entering, leaving, emit: bool) -> None:
        kernel[(walkers, plan.groups, blocks)](
            sides, tables, states, entering, direct, LaterGradients(grads, leaving, sums),
            plan.documents, segments, *plan.row, plan.shape[2], plan.groups, columns, C=plan.chunk,
            M=plan.modes, BW=block, EMIT=emit, SEGMENTS=plan.segments, PACKED=plan.packed, MATH=plan.math,
            gates=plan.gates, readers=readers, others=others,
        )  # fmt: skip

    if plan.segments > 1:
        shape = (plan.groups, 2, plan.size, sum(plan.widths))
        alone = x.new_zeros((segments, *shape), dtype=torch.float32)
        walk(None, alone, emit=False)
        last = x.new_zeros((plan.rows, *shape), dtype=torch.float32) if grad_final is None else grad_final
        ends = plan.segment_ends(x.device)[:, 1:]
        sources = torch.cat([alone.unflatten(0, (-1, plan.segments))[:, 1:], last[:, None]], dim=1)
        gates = None if plan.gate_ends is None else plan.gate_ends[:, 1:]
        grad_final = carry_back(tables.powers[..., : plan.size], sources, ends, ends, gates).flatten(0, 1)
        walk(grad_final, None if grad_initial is None else alone, emit=True)
        if grad_initial is not None:
            grad_initial.copy_(alone.unflatten(0, (-1, plan.segments))[:, 0])
    else:
        walk(grad_final, grad_initial, emit=True)
    return sums.flatten(0, 1)


def _mixing_gradient(plan: Plan, pulled: tuple[Pulled, ...]) -> torch.Tensor:
    heads = plan.shape[2]
    rows = min(plan.modes, 64 if plan.mixing.FULL else 32)
    columns = min(plan.modes, 32)
    blocks = (plan.modes // rows) * (plan.modes // columns) if plan.mixing.FULL else plan.modes // rows
    lanes = plan.lanes(pulled[0].modes.device, blocks)
    shape = (plan.modes, plan.modes) if plan.mixing.FULL else (plan.modes,)
    partial = pulled[0].modes.new_empty((lanes, heads, 2, 2, *shape), dtype=torch.float32)
    _mixing_backward[(lanes, heads, blocks)](
        pulled, partial, *plan.places, heads, plan.chunks, SIZES=plan.sizes["SIZES"]._replace(BM=rows),
        BN=columns, FULL=plan.mixing.FULL, **plan.options,
    )  # fmt: skip
    return partial.unflatten(1, (plan.groups, -1)).sum((0, 2))


_operator = differentiable(
    __name__,
    "attention",
    _forward,
    output_shapes,
    _backward,
    count=7,
    grad_dtype=lambda query, key, value, *_: value.dtype,  # the output may be wider
)
