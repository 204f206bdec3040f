"""Bounded sparse attention: a query sees a few keys, chosen by content, out of a memory that does not grow.

Source: HAX, "Overcoming Long-Context Limitations of State-Space Models via Context-Dependent Sparse Attention"
(arXiv 2507.00449), eqs. 8, 9, 13 and 19.
"""

import functools
from collections.abc import Sequence

import torch

from .op_common import check_documents, check_not_empty, document_of_tokens, without_autocast
from .op_common_launch import fused
from .op_sparse_blocks import blocks
from .op_sparse_dense import dense
from .op_sparse_stream import Bins, SparseMemory, Stream, memory_after, stream_of

BACKENDS = {"dense": dense, "blocks": blocks}
SPARSE_BACKENDS = ("auto", *BACKENDS, "triton")


def sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scores: torch.Tensor | None = None,
    selected_keys: int = 0,
    bins: Sequence[Bins] = (),
    initial_state: SparseMemory | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, SparseMemory | None]:
    """Softmax attention of every token to the union of the best keys so far and the latest keys of its bins.

    Args:
        query, key: `[B, T, S, d]`; logits are their products, not scaled.
        value: `[B, T, S, D]`.
        scores: `[B, T, S]`, how good a key is; of equal ones the earlier is better. No gradient passes through them.
        selected_keys: how many of the best so far a query sees. Default: 0, none.
        bins: of each part, see `Bins`; a key that is in several sets counts once.
        initial_state: the memory of the tokens before. Default: None, there are none.
        output_final_state: also return the memory after the last token.
        cu_seqlens: `[N + 1]`, ends of packed documents along T, starting with 0; B = 1. No memory then.
        lengths: `[B]`, the real tokens of every row; the outputs of the rest are zero.
        documents: `[T]`, the document of every token, where it is known already.
        backend: "dense" (the definition, of all pairs), "blocks" (linear in T), "triton" (fused kernels on a GPU) or
            "auto" ("triton" where it can run, otherwise "blocks").

    Returns:
        `[B, T, S, D]` in the dtype of `value`, zero where a query sees no key, and the memory or None. Everything is
        computed in at least float32; "triton" multiplies in the dtype of `query` and sums in float32.

    Raises:
        ValueError: when shapes do not fit, there is no row or no token, a budget is not positive, the backend is
            unknown, or "triton" is asked for and cannot run here.
    """
    _check(query, key, value, scores, selected_keys, bins, initial_state, backend)
    check_documents(cu_seqlens, lengths, key)
    if cu_seqlens is not None and (initial_state is not None or output_final_state):
        raise ValueError("Packed documents begin and end within T: leave initial_state and output_final_state out.")
    batch, length = key.shape[:2]
    compute = torch.float64 if torch.float64 in (query.dtype, value.dtype) else torch.float32
    real = None if lengths is None else torch.arange(length, device=key.device) < lengths[:, None]
    ends = None
    if cu_seqlens is not None:
        documents = document_of_tokens(cu_seqlens, length) if documents is None else documents
        ends = cu_seqlens.long()[documents + 1]
    with without_autocast(query.device):
        scores = None if scores is None else scores.detach()
        others = scores, selected_keys, bins, real, ends, initial_state
        found = None
        # A graph of any length has no number of chunks.
        exporting = torch.compiler.is_exporting()
        if backend in ("auto", "triton") and not exporting:
            found = _fused(backend, query, key, value, others)
        if found is None:
            stream = stream_of(query.to(compute), key.to(compute), value.to(compute), *others)
            way = BACKENDS.get(backend, dense if exporting else blocks)
            found = way(stream), stream
        output, stream = found
        if real is not None:
            output = torch.where(real[..., None, None], output, 0)
        memory = None
        if output_final_state:
            counts = key.new_full((batch,), length, dtype=torch.long) if lengths is None else lengths.long()
            memory = memory_after(stream, batch, counts, initial_state).to(compute)
    return output.to(value.dtype), memory


def _fused(backend: str, query, key, value, others) -> tuple[torch.Tensor, Stream] | None:
    """The output, and what the kernels worked on: tokens in their own dtype, or in that of the memory before them."""
    memory = others[-1]
    kept = [] if memory is None else [x.entries for x in (memory, *memory.rings) if x.entries is not None]

    def run():
        from .op_sparse_triton import triton_sparse

        wide = [functools.reduce(torch.promote_types, (y.dtype for y in kept), x.dtype) for x in (key, value)]
        stream = stream_of(query, key.to(wide[0]), value.to(wide[1]), *others)
        return triton_sparse(stream), stream

    widths = key.shape[3], value.shape[3]
    return fused(backend, (query, key, value, *kept), widths, run, "sparse attention")


def _check(query, key, value, scores, selected_keys, bins, memory, backend) -> None:
    if backend not in SPARSE_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(SPARSE_BACKENDS)}; got {backend!r}.")
    if query.ndim != 4 or query.shape != key.shape or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            "query and key must have shape [B, T, S, d] and value [B, T, S, D], got "
            f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}."
        )
    check_not_empty(query)
    if (scores is None) != (selected_keys == 0) or selected_keys < 0:
        raise ValueError(f"scores and a positive selected_keys go together, got selected_keys = {selected_keys}.")
    if scores is None and not bins:
        raise ValueError("Nothing says which keys are seen: give scores with selected_keys, or bins.")
    shape = key.shape[:3]
    given = [("scores", scores), *(("bins.query", part.query) for part in bins), *(("bins.key", p.key) for p in bins)]
    for name, x in given:
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must have shape [B, T, S] = {list(shape)}, got {list(x.shape)}.")
    for part in bins:
        if part.keys < 1 or part.number < 1:
            raise ValueError(f"bins need a positive number and keys, got {part.number} and {part.keys}.")
    if memory is not None:
        _check_memory(memory, key, value, selected_keys, bins)


def _check_memory(memory: SparseMemory, key, value, selected_keys: int, bins: Sequence[Bins]) -> None:
    batch, heads, width = key.shape[0], key.shape[2], key.shape[3] + value.shape[3]
    expected: list[tuple[int, ...]] = [(batch, heads, selected_keys, width)] if selected_keys else []
    expected += [(batch, heads, part.number, part.keys, width) for part in bins]
    found: list[tuple[int, ...]] = [] if memory.entries is None else [tuple(memory.entries.shape)]
    found += [tuple(ring.entries.shape) for ring in memory.rings]
    if found != expected:
        raise ValueError(
            f"initial_state holds entries of shape {[list(x) for x in found]}, but these heads, budgets and bins need "
            f"{[list(x) for x in expected]}; it belongs to another layer or batch."
        )
