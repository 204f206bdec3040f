"""One token at a time with the state updated in place: what decoding runs."""

import torch

from .op_common import as_complex
from .op_interdomain_readout import pull_back


def advance_state(
    state: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """`X <- diag(lambda) X + beta (x) [k; v]` in place (eq. 11).

    Args:
        state: `[B, G, 2, M, R + D]`.
        key, value: `[B, G, R]` and `[B, G, D]`; with the normalised readout the caller has appended the constant 1.
        log_decay, input_matrix: `[G, M, 2]`.
        mask: `[B]` bool, False where the token is a pad: that row keeps its state.
    """
    inputs = torch.cat([key, value], dim=-1).to(state.dtype)[:, :, None, None]
    decay = torch.exp(as_complex(log_decay))
    decay_real, decay_imag = decay.real.to(state.dtype)[..., None], decay.imag.to(state.dtype)[..., None]
    beta = input_matrix.to(state.dtype).movedim(-1, 1)[..., None]  # [G, 2, M, 1]
    before = state.clone()
    state.mul_(decay_real[:, None])
    state[:, :, 0].addcmul_(before[:, :, 1], decay_imag, value=-1)
    state[:, :, 1].addcmul_(before[:, :, 0], decay_imag)
    state.addcmul_(beta, inputs)
    if mask is not None:
        state.copy_(torch.where(mask[:, None, None, None, None], state, before))


def read_state(
    query: torch.Tensor, state: torch.Tensor, coefficient_matrix: torch.Tensor | None, product: str
) -> torch.Tensor:
    """Read the output of eq. 13 from a state, at a cost of M (R + D) + M^2 a head.

    Args:
        query: `[B, H, R]`.
        state: `[B, G, 2, M, R + D]`.
        coefficient_matrix: `[G, M, M, 2]`, `[G, M, 2]` or None.

    Returns:
        `[B, H, D]` in the dtype of the state.
    """
    batch, heads, feature_dim = query.shape
    groups, size, width = state.shape[1], state.shape[3], state.shape[4]
    rows = query.to(state.dtype).view(batch, groups, heads // groups, feature_dim)
    flat = state.view(batch, groups, 2 * size, width)
    pairs = rows @ flat[..., :feature_dim].mT
    y = torch.complex(pairs[..., :size], pairs[..., size:])
    p = pull_back(grouped_coefficients(coefficient_matrix, state.dtype), y.transpose(0, 1), product).transpose(0, 1)
    output = torch.cat([p.real, p.imag], dim=-1) @ flat[..., feature_dim:]
    return output.flatten(1, 2)


def grouped_coefficients(coefficient_matrix: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Real pairs `[G, M, M, 2]` or `[G, M, 2]` to the complex `[G, M, M]` or `[G, 1, M]` of the readout functions."""
    if coefficient_matrix is None:
        return None
    coefficients = as_complex(coefficient_matrix.to(dtype))
    return coefficients[:, None] if coefficients.ndim == 2 else coefficients
