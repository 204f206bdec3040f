"""The attention map: the weights with which an output of state space duality adds up the values."""

import torch

from ..common.checks import check_documents
from ..common.cpu import compute_dtype, without_autocast
from ..common.decay import finite
from ..common.packing import within_documents
from .entry import check_inputs


def ssd_attention_map(
    query: torch.Tensor, key: torch.Tensor, log_decay: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """The exact matrix A with `o_t = sum_{j <= t} A_tj value_j`, for `ssd_attention` without a past.

        A_tj = exp(sum_{i = j + 1}^t log_decay_i) query_t . key_j

    The attention of "Transformers are SSMs" (arXiv 2405.21060): O(T^2 N) operations and T^2 numbers a head.

    Args:
        query, key: `[B, T, G, N]`, log_decay: `[B, T, H]`, cu_seqlens: as in `ssd_attention`.

    Returns:
        `[B, H, T, T]`, zero above the diagonal and between documents, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name.
    """
    check_inputs((query, key), log_decay)
    cu_seqlens, _ = check_documents(cu_seqlens, None, query)
    compute = compute_dtype(query, key)
    with without_autocast(query.device):
        scores = torch.einsum("btgn,bjgn->bgtj", query.to(compute), key.to(compute))
        sums = finite(log_decay).cumsum(1).transpose(1, 2)  # [B, H, T]
        decays = (sums[..., :, None] - sums[..., None, :]).clamp(max=0).exp().to(compute).tril()
        weights = scores.repeat_interleave(log_decay.shape[2] // query.shape[2], dim=1) * decays
    return within_documents(weights, cu_seqlens)
