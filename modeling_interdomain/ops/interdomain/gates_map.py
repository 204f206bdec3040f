"""The attention map of layers with gates and the delta rule."""

import torch

from ..common.checks import check_documents
from ..common.cpu import compute_dtype, without_autocast
from ..common.decay import finite
from ..common.packing import within_documents
from .entry import check_inputs
from .gates import checked_gates
from .map import map_weights


def gated_attention_map(
    query: torch.Tensor,
    key: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None = None,
    *,
    product: str = "bilinear",
    cu_seqlens: torch.Tensor | None = None,
    log_gate: torch.Tensor | None = None,
    write_gate: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""`interdomain_attention_map` with gates, of which each is a factor of what it weighs:

        y_t[n] = sum_{i <= t} s_ti (query_t . key_i) lambda_n^(t-i) beta_n,   p_t = W y_t
        A_tj   = s_tj Re( sum_n conj(p_t[n]) lambda_n^(t-j) beta_n ),   s_ti = exp(log_gate_(i+1) + .. + log_gate_t) w_i

    With the delta rule tokens write `u = value - delta A' u`, A' the same of keys that ask before they are written, and
    the map is `A (1 + delta A')^-1`.

    Args:
        query to cu_seqlens: as in `interdomain_attention_map`.
        log_gate, write_gate, delta: `[B, T, G]` each or None, as in `interdomain_attention`; w is the second.

    Returns:
        `[B, H, T, T]`, as there.

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name.
    """
    check_inputs((query, key), log_decay, input_matrix, coefficient_matrix, product)
    cu_seqlens, _ = check_documents(cu_seqlens, None, query)
    checked_gates(key, (log_gate, write_gate, delta), False, "auto")
    compute = compute_dtype(query, key)
    left = within_documents(_left(log_gate, write_gate, key, compute), cu_seqlens)
    parameters = log_decay, input_matrix, coefficient_matrix, product
    with without_autocast(query.device):
        weights = map_weights(query, key, *parameters, lambda x: left * x)
        if delta is not None:
            before = left.tril(-1)
            answers = map_weights(key, key, *parameters, lambda x: before * x)
            system = delta.to(compute).movedim(2, 0)[:, :, None, :, None] * answers
            weights = torch.linalg.solve_triangular(system, weights, upper=False, left=False, unitriangular=True)
    return weights.transpose(0, 1).flatten(1, 2)


def _left(log_gate, write_gate, key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is left at token t of what token i wrote, beside its decay: `[G, B, 1, T, T]`."""
    written = torch.ones_like(key[..., 0], dtype=dtype) if write_gate is None else write_gate.to(dtype)
    left = written.movedim(2, 0)[:, :, None].expand(-1, -1, key.shape[1], -1).tril()
    if log_gate is not None:
        total = finite(log_gate).cumsum(1).movedim(2, 0)  # [G, B, T]
        left = left * (total[..., None] - total[:, :, None]).tril().exp().to(dtype)
    return left[:, :, None]
