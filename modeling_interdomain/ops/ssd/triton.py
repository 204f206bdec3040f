"""State space duality as fused kernels behind one opaque operator of `torch.library`.

Forward walks the chunks, one program for each row, head and slice of the state, and leaves the state before each; then
all chunks compute their outputs at once. Backward keeps the inputs alone: it walks forwards and backwards, and the same
kernels in reverse give the gradients of the values and, with one more, those of queries, keys and decays
(`ops/ssd/triton_chunks.py`). Sums over heads and chunks have a fixed order, so that gradients repeat bit for bit.
Lengths are read by the kernels alone, never by the host.
"""

from typing import NamedTuple

import torch

from ..common.custom_op import differentiable
from ..common.launch import contiguous, multiprocessors, on_device, power_of_two, tuned
from ..common.packing import state_rows
from ..common.tiles import Arithmetic, Layout, arithmetic, chunk_tokens, layout_of
from .triton_chunks import Extent, Heads, Operands, attend, contract, walk

_KIND = ("EXTENT", "REVERSE", "MATH")
_walk = tuned(walk, (*_KIND, "TWO_TERMS"))
_attend = tuned(attend, _KIND)
_contract = tuned(contract, _KIND)


def triton_ssd(
    query, key, value, log_decay, initial_state, cu_seqlens, lengths, chunk_size: int, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `chunk_ssd`, for tokens in bfloat16, float16 or float32; log decays and states are float32.

    Products are in the dtype of query and key, which is one; the output in that of value, which may be wider.

    Args:
        cu_seqlens, lengths: not checked here; an empty document keeps its initial state, and pads are not read.
        chunk_size: rounded down to a power of two from 16 to 64, less where N is above 128, in float32 above 64.
    """
    # Numbers of a tile `[C, N]`, of which a program holds two beside the operands of products.
    tile = 8192 if key.dtype == torch.bfloat16 else 4096
    return _operator(
        *contiguous(query, key, value),
        *contiguous(log_decay, initial_state, dtype=torch.float32),
        *contiguous(cu_seqlens, lengths, dtype=torch.int32),
        chunk_tokens(min(chunk_size, 64, tile // power_of_two(key.shape[3])), query.shape[1]),
        output_final_state,
    )


class _Plan(NamedTuple):
    """Sizes of one call, and what its kernels share."""

    shape: torch.Size  # [B, T, G, N]
    heads: int
    extent: Extent
    layout: Layout
    math: Arithmetic

    @property
    def packed(self) -> bool:
        return self.layout.documents.starts is not None

    @property
    def row(self) -> tuple[int, int]:
        """Chunks and tokens of a full row."""
        return -(-self.shape[1] // self.extent.C), self.shape[1]

    def options(self, reverse: bool) -> dict:
        return {"EXTENT": self.extent, "REVERSE": reverse, "PACKED": self.packed, "MATH": self.math}

    def by_group(self, device: torch.device) -> Heads:
        """Blocks of heads that share their scores: as few as fill the device a few times."""
        groups, programs = self.shape[2], self.layout.chunks * self.shape[2]
        per_group = self.heads // groups
        each = max(1, per_group * programs // (4 * multiprocessors(device)))
        each = min(each, per_group)
        return Heads(self.heads, groups, each, -(-per_group // each))

    def like_tokens(self, x: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Room for what kernels write at real tokens; where there may be pads, zeros."""
        make = x.new_zeros if self.packed else x.new_empty
        return make(shape or x.shape, dtype=dtype or x.dtype)


def _plan(key, value, chunk: int, with_ends: bool, cu_seqlens, lengths) -> _Plan:
    """`with_ends`: rows begin, or end in backward, with states of their own."""
    math = arithmetic(key.dtype)
    limit = 64 // math.terms
    (heads, width), size = value.shape[2:], key.shape[3]
    padded = power_of_two(width), power_of_two(size)
    extent = Extent(chunk, width, size, *padded, *(min(x, limit) for x in padded))
    layout = layout_of(key.shape[0], key.shape[1], chunk, with_ends, cu_seqlens, lengths)
    return _Plan(key.shape, heads, extent, layout, math)


def _walked(plan: _Plan, tokens: Operands, first, reverse: bool, want_last: bool, exact: bool = False):
    """What every chunk reads, `[slots, H, P, N]`, both padded; and the states after the walk, `[rows, H, P, N]`."""
    # A small slice of the state each, for there may be few rows and heads.
    extent = plan.extent._replace(BP=min(plan.extent.BP, 32))
    room = plan.layout.slots, plan.heads, extent.P_PADDED, extent.N_PADDED
    states = tokens.x.new_empty(room, dtype=plan.math.storage)
    ends = plan.layout.rows, plan.heads, extent.P, extent.N
    last = tokens.x.new_empty(ends, dtype=torch.float32) if want_last else None
    slices = (extent.P_PADDED // extent.BP) * (extent.N_PADDED // extent.BN)
    _walk[(plan.layout.rows, plan.heads, slices)](
        tokens, first, states, last, plan.layout.documents, *plan.row, Heads(plan.heads, plan.shape[2], 0, 0),
        TWO_TERMS=exact and plan.math.storage == torch.bfloat16, **plan.options(reverse) | {"EXTENT": extent},
    )  # fmt: skip
    return states, last


def _attended(plan: _Plan, tokens: Operands, states, reverse: bool, like: torch.Tensor) -> torch.Tensor:
    out, heads = plan.like_tokens(like), plan.by_group(like.device)
    _attend[(plan.layout.chunks, heads.groups, heads.blocks)](
        tokens, states, out, plan.layout.documents, plan.layout.rows, *plan.row, heads, **plan.options(reverse)
    )
    return out


def _contracted(plan: _Plan, tokens: Operands, states, others, crossing, reverse: bool) -> torch.Tensor:
    """The gradient of the query, or REVERSE of the key; half of that of the log decays is written to `crossing`."""
    like = tokens.a
    heads = plan.by_group(like.device)
    dtype = like.dtype if heads.blocks == 1 else torch.float32
    out = plan.like_tokens(like, heads.blocks, *like.shape, dtype=dtype)
    total = like.shape[0] * like.shape[1]
    # Beside two sums as wide as the state, no more columns than registers are left for.
    extent = plan.extent._replace(BP=min(plan.extent.BP, 32 // plan.math.terms))
    _contract[(plan.layout.chunks, heads.groups, heads.blocks)](
        tokens, states, others, out, crossing, plan.layout.documents, plan.layout.rows, *plan.row, total, heads,
        **plan.options(reverse) | {"EXTENT": extent},
    )  # fmt: skip
    return out[0] if heads.blocks == 1 else out.sum(0).to(like.dtype)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None, chunk: int,
    want_final: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    plan = _plan(key, value, chunk, initial_state is not None, cu_seqlens, lengths)
    tokens = Operands(query, key, value, None, log_decay)
    with on_device(query):
        states, final = _walked(plan, tokens, initial_state, False, want_final, exact=want_final)
        output = _attended(plan, tokens, states, False, value)
    return output, query.new_empty(0, dtype=torch.float32) if final is None else final


def _outputs(query, key, value, log_decay, initial_state, cu_seqlens, lengths, chunk, want_final):
    shape = (state_rows(query, cu_seqlens), *value.shape[2:], key.shape[3]) if want_final else (0,)
    return torch.empty_like(value), query.new_empty(shape, dtype=torch.float32)


def _backward(inputs, grads, needs):
    (query, key, value, log_decay, initial_state, *documents, chunk, _), (grad_output, grad_final) = inputs, grads
    with_ends = initial_state is not None or grad_final is not None
    plan = _plan(key, value, chunk, with_ends, *documents)
    ahead = Operands(query, key, value, grad_output, log_decay)
    back = Operands(key, query, grad_output, value, log_decay)
    crossing = plan.like_tokens(log_decay, 2, *log_decay.shape)
    with on_device(query):
        before, _ = _walked(plan, ahead, initial_state, False, want_last=False)
        after, of_initial = _walked(plan, back, grad_final, True, want_last=initial_state is not None)
        of_value = _attended(plan, back, after, True, value)
        of_query = _contracted(plan, ahead, before, None, crossing[0], False)
        of_key = _contracted(plan, back, after, before, crossing[1], True)
    return of_query, of_key, of_value, crossing.sum(0), of_initial


_operator = differentiable(__name__, "attention", _forward, _outputs, _backward, count=5)
