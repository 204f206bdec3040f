"""Bounded sparse attention: a query sees a few keys, chosen by content, out of a memory that does not grow.

Source: HAX, "Overcoming Long-Context Limitations of State-Space Models via Context-Dependent Sparse Attention"
(arXiv 2507.00449), eqs. 8, 9, 13 and 19.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..common.checks import check_documents, check_range, check_tensors, shape_of
from ..common.cpu import compute_dtype, without_autocast
from ..common.launch import fused
from ..common.packing import document_of_tokens, mask_from_lengths
from .chunk import blocks
from .naive import dense
from .stream import Bins, SparseMemory, Stream, memory_after, stream_of

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
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name. Whether a
            score is NaN, or a bin out of range, is seen on a CPU alone. Also when "triton" is asked for and cannot run
            here.
    """
    _check(query, key, value, scores, selected_keys, bins, initial_state, backend)
    cu_seqlens, lengths = check_documents(cu_seqlens, lengths, key)
    if cu_seqlens is not None and (initial_state is not None or output_final_state):
        raise ValueError("Packed documents begin and end within T: leave initial_state and output_final_state out.")
    batch, length = key.shape[:2]
    compute = compute_dtype(query, value)
    real = None if lengths is None else mask_from_lengths(lengths, key)
    check_values(scores, bins, real)
    ends = None
    if cu_seqlens is not None:
        if documents is None:
            documents = document_of_tokens(cu_seqlens, length)
        elif not isinstance(documents, torch.Tensor) or documents.shape != (length,):
            raise ValueError(f"documents must be None or have shape [T] = [{length}], got {shape_of(documents)}.")
        ends = cu_seqlens.long()[documents + 1]
    with without_autocast(query.device):
        scores = None if scores is None else scores.detach()
        others = scores, selected_keys, bins, real, ends, initial_state
        found = None
        exporting = torch.compiler.is_exporting()  # an exported graph serves any number of blocks
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
    """The output and the stream of the kernels, in the dtype of the tokens or, if it is wider, of the memory."""
    memory = others[-1]
    kept = [] if memory is None else [x.entries for x in (memory, *memory.rings) if x.entries is not None]

    def run():
        from .triton import triton_sparse

        wide = [functools.reduce(torch.promote_types, (y.dtype for y in kept), x.dtype) for x in (key, value)]
        stream = stream_of(query, key.to(wide[0]), value.to(wide[1]), *others)
        return triton_sparse(stream), stream

    widths = key.shape[3], value.shape[3]
    return fused(backend, (query, key, value, *kept), widths, run, "sparse attention")


def _check(query, key, value, scores, selected_keys, bins, memory, backend) -> None:
    if backend not in SPARSE_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(SPARSE_BACKENDS)}; got {backend!r}.")
    check_sets(query, key, value, scores, bins)
    if not isinstance(selected_keys, int) or (scores is None) != (selected_keys == 0) or selected_keys < 0:
        raise ValueError(f"scores and a positive selected_keys go together, got selected_keys = {selected_keys}.")
    if memory is not None:
        check_memory("initial_state", memory, key, value, selected_keys, bins)


def _is_a(kind: Any, x: Any) -> bool:
    """Whether x has the fields of a named tuple; remote code has a copy of the class of its own."""
    return getattr(x, "_fields", None) == kind._fields


def check_sets(query, key, value, scores, bins, rows: str = "B, T") -> None:
    """Check shapes, dtypes and devices of tokens with these axes in front, and of scores and bins."""
    tokens = ("query", query, f"{rows}, S, d"), ("key", key, f"{rows}, S, d"), ("value", value, f"{rows}, S, D")
    if not isinstance(bins, Sequence) or not all(_is_a(Bins, part) for part in bins):
        raise ValueError(f"bins must be a list of Bins, got {type(bins).__name__}.")
    parts = [(f"bins.{name}", x, f"{rows}, S") for part in bins for name, x in zip(("query", "key"), part[:2])]
    of_scores = [] if scores is None else [("scores", scores, f"{rows}, S")]
    check_tensors(*tokens, *of_scores, *parts, integers=("bins.query", "bins.key"))
    if scores is None and not bins:
        raise ValueError("Nothing says which keys are seen: give scores with selected_keys, or bins.")
    for part in bins:
        if not all(isinstance(x, int) and x > 0 for x in (part.number, part.keys)):
            raise ValueError(f"bins need a positive number and keys, got {part.number} and {part.keys}.")


def check_memory(name: str, memory, key, value, selected_keys: int, bins: Sequence[Bins]) -> None:
    """Refuse a memory that has other sets than these tokens."""
    if not _is_a(SparseMemory, memory):
        raise ValueError(f"{name} must be a SparseMemory, got {type(memory).__name__}.")
    batch, heads, width = key.shape[0], key.shape[-2], key.shape[-1] + value.shape[-1]
    expected: list[list[int]] = [[batch]]
    for slots in [[selected_keys]] * bool(selected_keys) + [[part.number, part.keys] for part in bins]:
        expected += [[batch, heads, *slots, width], [batch, heads, *slots]]
    best = [] if memory.entries is None else [memory.entries, memory.places]
    found = [memory.seen, *best, *(x for ring in memory.rings for x in ring)]
    if [shape_of(x) for x in found] != expected or (best and shape_of(memory.scores) != shape_of(memory.places)):
        raise ValueError(
            f"{name} holds entries of shape {[shape_of(x) for x in found[1::2]]}, but these heads, budgets and bins "
            f"need {expected[1::2]}; it belongs to another layer or batch."
        )


def check_values(scores, bins: Sequence[Bins], real: torch.Tensor | None) -> None:
    """Refuse real tokens whose score is NaN or whose bin is out of range; on a CPU outside graphs alone."""
    if torch.compiler.is_compiling() or (scores if scores is not None else bins[0].key).device.type != "cpu":
        return
    if scores is not None:
        unknown = scores.isnan() if real is None else scores.isnan() & real[..., None]
        if bool(unknown.any()):
            raise ValueError("scores hold NaN, which is neither better nor worse than any other.")
    for part in bins:
        for name, x in zip(("bins.query", "bins.key"), part[:2]):
            check_range(name, x if real is None else x.where(real[..., None], -1), -1, part.number - 1)
