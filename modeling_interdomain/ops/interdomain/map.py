"""The attention map: the weights with which an output of Interdomain attention adds up the values."""

from collections.abc import Callable

import torch

from ..common.checks import check_documents
from ..common.cpu import compute_dtype, without_autocast
from ..common.decay import as_complex, by_age, decay_powers
from ..common.packing import within_documents
from ..diagonal.step import grouped_coefficients
from .entry import check_inputs
from .readout import pull_back


def interdomain_attention_map(
    query: torch.Tensor,
    key: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None = None,
    *,
    product: str = "bilinear",
    normalize: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""The exact matrix A with `o_t = sum_{j <= t} A_tj value_j`, for `interdomain_attention` without a past.

        y_t[n] = sum_{i <= t} (query_t . key_i) lambda_n^(t-i) beta_n,   p_t = W y_t
        A_tj   = Re( sum_n conj(p_t[n]) lambda_n^(t-j) beta_n )

    Weights have either sign and do not sum to one, except with `normalize`. For inspection alone: it takes O(T^2 M)
    operations and T^2 numbers a head, of which the layer needs neither.

    Args:
        query: `[B, T, H, R]`, key: `[B, T, G, R]`, log_decay, input_matrix: `[G, M, 2]`, coefficient_matrix, product,
            normalize, cu_seqlens: as in `interdomain_attention`.

    Returns:
        `[B, H, T, T]`, real, zero above the diagonal, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name.
    """
    check_inputs((query, key), log_decay, input_matrix, coefficient_matrix, product)
    cu_seqlens, _ = check_documents(cu_seqlens, None, query)
    parameters = log_decay, input_matrix, coefficient_matrix, product
    with without_autocast(query.device):
        weights = map_weights(query, key, *parameters, lambda x: within_documents(x, cu_seqlens))
    weights = weights.transpose(0, 1).flatten(1, 2)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights


def map_weights(
    query, key, log_decay, input_matrix, coefficient_matrix, product: str, seen: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """`[G, B, H / G, T, T]`; `seen` is applied to sums `[..., T, T]` over what earlier tokens wrote, twice."""
    length, groups = query.shape[1], key.shape[2]
    compute = compute_dtype(query, key)
    query, key, input_matrix = (x.to(compute) for x in (query, key, input_matrix))
    coefficients = grouped_coefficients(coefficient_matrix, compute)
    ages, beta = torch.arange(length, device=query.device), as_complex(input_matrix)
    kernel = decay_powers(log_decay, ages).to(beta.dtype) * beta[:, None]  # [G, T, M], by age
    kernel = kernel[:, None, None]
    scores = seen(torch.einsum("btghr,bigr->gbhti", query.unflatten(2, (groups, -1)), key))
    y = by_age(scores).to(beta.dtype) @ kernel  # [G, B, H / G, T, M]
    p = pull_back(coefficients, y, product)
    return seen(by_age((p.conj() @ kernel.mT).real))  # back to (t, i)
