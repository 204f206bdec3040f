"""From projections to the inputs of the operator in one kernel: convolutions, feature map, rotation, norms, biases."""

from collections.abc import Sequence

import torch

from ..common.launch import fused

_MOST_TAPS = 4


def fused_inputs(
    backend: str,
    projected: Sequence[torch.Tensor],
    taps: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor] | None,
    eps: float,
    heads: tuple[int, int],
    *,
    windows: Sequence[torch.Tensor] | None = None,
    write_windows: bool = False,
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None,
    rope_placement: str | None = None,
    lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]] | None:
    """Query features, keys and values of `interdomain_attention`, and the new windows; None where no kernel runs.

    Args:
        projected: query `[B, T, H R]`, key `[B, T, G R]` and value `[B, T, G D]`, before the convolutions.
        taps: of the convolutions of query and key, `[H R, kernel]` and `[G R, kernel]`.
        norms: weights of the key's and the value's RMSNorm, `[R]` and `[D]`, and their biases, `[G, R]` and `[G, D]`.
        heads: H and G.
        windows: `[B, H R, kernel - 1]` and `[B, G R, kernel - 1]`, the inputs before the first token; None means zeros.
        cos_sin: `[B, T, R]` each, for a rotation "before" or "after" the feature map.
        lengths: `[B]`, the real tokens of each row.
        cu_seqlens, documents: `[S + 1]` and `[T]`, packed documents (B = 1).
    """
    if backend not in ("auto", "triton") or taps[0].shape[1] > _MOST_TAPS:
        return None
    if any(w.requires_grad for w in windows or ()):
        return None
    query, key, value = projected

    def run():
        from .triton_prepare import triton_prepare

        numbers = None if documents is None else documents.int()
        ends = None if cu_seqlens is None else cu_seqlens.int()
        arguments = windows, cos_sin, numbers, ends, *heads, rope_placement
        return triton_prepare(query, key, value, taps, norms, *arguments, eps, write_windows, lengths=lengths)

    widths = query.shape[-1] // heads[0], value.shape[-1] // heads[1]
    return fused(backend, (query, key, value), widths, run, "preparation")
