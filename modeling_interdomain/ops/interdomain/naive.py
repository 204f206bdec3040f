"""The definition, token by token (eqs. 11 and 13). Every other backend is compared with this one in float64."""

from itertools import pairwise

import torch

from ..common.decay import as_complex
from .readout import combine


def recurrent_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None,
    product: str,
    initial_state: torch.Tensor | None,
    boundaries: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Form U_t = C X^k_t and Gamma_t = C X^v_t explicitly at every token.

    Shapes as in `interdomain_attention`, all of one real dtype. `boundaries` are the ends of the documents along T,
    starting with 0; several documents mean B = 1, and states then have one row a document instead of one a batch row.

    Returns:
        output `[B, T, H, D]`, states `[B or documents, G, 2, M, R + D]`.
    """
    batch, _, heads, feature_dim = query.shape
    groups, value_dim = key.shape[2], value.shape[-1]
    query = query.unflatten(2, (groups, heads // groups))
    decay = as_complex(log_decay).exp()[..., None]
    beta = as_complex(input_matrix)[..., None]
    coefficients = None if coefficient_matrix is None else as_complex(coefficient_matrix)

    inputs = torch.cat([key, value], dim=-1)
    outputs, finals = [], []
    for document, (start, end) in enumerate(pairwise(boundaries)):
        if initial_state is None:
            state = torch.zeros(
                batch, groups, log_decay.shape[1], inputs.shape[-1], dtype=decay.dtype, device=query.device
            )
        else:
            rows = initial_state[document : document + batch]
            state = torch.complex(rows[:, :, 0], rows[:, :, 1])
        for t in range(start, end):
            state = decay * state + beta * inputs[:, t, :, None, :]
            projected = project(coefficients, state)
            u, gamma = projected.split([feature_dim, value_dim], dim=-1)
            outputs.append(query[:, t] @ combine(u, gamma, product))
        finals.append(torch.stack([state.real, state.imag], dim=2))
    output = torch.stack(outputs, dim=1).flatten(2, 3)
    return output, torch.cat(finals)


def project(coefficients: torch.Tensor | None, state: torch.Tensor) -> torch.Tensor:
    if coefficients is None:
        return state
    if coefficients.ndim == 2:
        return coefficients[..., None] * state
    return coefficients @ state
