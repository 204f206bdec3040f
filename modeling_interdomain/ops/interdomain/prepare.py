"""From projections to the inputs of the operator in one kernel: convolutions, feature map, RoPE, norms, biases."""

from collections.abc import Sequence

import torch

from ..common.launch import fused

_MAX_KERNEL = 4


def fused_inputs(
    backend: str,
    projected: Sequence[torch.Tensor],
    conv_weight: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor] | None,
    eps: float,
    heads: tuple[int, int],
    *,
    conv_state: Sequence[torch.Tensor] | None = None,
    write_conv_state: bool = False,
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None,
    rope_placement: str | None = None,
    lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]] | None:
    """Query features, keys and values of `interdomain_attention`, and the new conv state; None where no kernel runs.

    Args:
        projected: query `[B, T, H R]`, key `[B, T, G R]` and value `[B, T, G D]`, before the convolutions.
        conv_weight: of the convolutions of query and key, `[H R, kernel]` and `[G R, kernel]`.
        norms: weights of the key's and the value's RMSNorm, `[R]` and `[D]`, and their biases, `[G, R]` and `[G, D]`.
        heads: H and G.
        conv_state: `[B, H R, kernel - 1]` and `[B, G R, kernel - 1]`, inputs before the first token; None means zeros.
        cos_sin: `[B, T, R]` each, for a rotation "before" or "after" the feature map.
        lengths: `[B]`, the real tokens of each row.
        cu_seqlens, documents: `[S + 1]` and `[T]`, packed documents (B = 1).
    """
    if backend not in ("auto", "triton") or conv_weight[0].shape[1] > _MAX_KERNEL:
        return None
    if any(w.requires_grad for w in conv_state or ()):
        return None
    query, key, value = projected

    def run():
        from .triton_prepare import triton_prepare

        numbers = None if documents is None else documents.int()
        ends = None if cu_seqlens is None else cu_seqlens.int()
        arguments = conv_state, cos_sin, numbers, ends, *heads, rope_placement
        return triton_prepare(query, key, value, conv_weight, norms, *arguments, eps, write_conv_state, lengths=lengths)

    widths = query.shape[-1] // heads[0], value.shape[-1] // heads[1]
    return fused(backend, (query, key, value), widths, run, "preparation")
