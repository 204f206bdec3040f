"""A few tokens on from a state, in about as many calls as one takes: what checking guesses runs.

No state is made for the tokens in between. With the rows `y_t` with which token t pulls its query through the state and
the rows `p_t` that the mixing makes of them, both linear, the state and the new tokens add their parts:

    y_t = lambda^t (q_t . K) + sum_{i <= t} (q_t . k_i) lambda^(t-i) beta
    o_t = (lambda^t p_t) . V + sum_{j <= t} (p_t . lambda^(t-j) beta) v_j
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from .op_common import without_autocast
from .op_interdomain_step import StepTables, mix_rows, turn_state

# Tokens that the tables have room for: as many as a usual guess, of which an operator for many takes twice the time.
FEW = 12


class FewTables(NamedTuple):
    """lambda and beta of the next FEW tokens, for rows that hold 2M numbers, the real parts before the imaginary ones.

    Attributes:
        cos, sin: `[G, FEW + 1, 1, 2M]`: `lambda^t y` is `cos y + sin (Im y, Re y)`.
        weights: `[G, FEW, FEW, 2M]`, `lambda^(t-i) beta` of token i seen from token t, 0 for later ones.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    weights: torch.Tensor


def few_tables(log_decay: torch.Tensor, input_matrix: torch.Tensor, dtype: torch.dtype) -> FewTables:
    """The tables of `take_few`, from `[G, M, 2]` each, in the dtype of the state."""
    ages = torch.arange(FEW + 1, dtype=torch.float64, device=log_decay.device)[:, None]
    real, imag = log_decay.double()[:, None].unbind(-1)
    powers = torch.polar((real * ages).exp(), imag * ages)  # [G, FEW + 1, M]
    inputs = powers * torch.view_as_complex(input_matrix.double())[:, None]
    apart = torch.arange(FEW)[:, None] - torch.arange(FEW)
    weights = torch.cat([inputs.real, inputs.imag], dim=-1)[:, apart.clamp(min=0)]
    weights = weights.where((apart >= 0)[..., None].to(weights.device), 0)
    cos = torch.cat([powers.real, powers.real], dim=-1)[:, :, None]
    sin = torch.cat([-powers.imag, powers.imag], dim=-1)[:, :, None]
    return FewTables(*(x.to(dtype) for x in (cos, sin, weights)))


def take_few(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    tables: Callable[[torch.dtype], StepTables],
    few: Callable[[torch.dtype], FewTables],
    state: torch.Tensor,
) -> torch.Tensor:
    """`interdomain_step` for 2 to FEW real tokens a row, without the normalised readout.

    Args:
        query: `[B, T, H, R]`; key: `[B, T, G, R]`; value: `[B, T, G, D]`.
        tables, few: give those of the parameters in a dtype.
        state: `[B, G, 2, M, R + D]`, moved in place.

    Returns:
        `[B, T, H, D]` in the dtype of `value`. Not differentiable.
    """
    with torch.no_grad(), without_autocast(query.device):
        # A state kept in a lower precision is still advanced in float32.
        working = state if state.dtype in (torch.float32, torch.float64) else state.float()
        inputs = torch.cat([key, value], dim=-1).to(working.dtype).transpose(1, 2)  # [B, G, T, R + D]
        ahead = few(working.dtype)
        output = _read(query, inputs, working, tables(working.dtype), ahead)
        _advance(working, inputs, ahead)
        if working is not state:
            state.copy_(working)
    return output.to(value.dtype)


def _read(query, inputs, state, tables: StepTables, few: FewTables) -> torch.Tensor:
    batch, groups, _, size, width = state.shape
    count, feature_dim = query.shape[1], query.shape[-1]
    each = batch, groups, count, -1  # rows of a token: the heads of a group
    cos, sin, weights = few.cos[:, 1 : count + 1], few.sin[:, 1 : count + 1], few.weights[:, :count, :count]
    rows = (
        query.to(state.dtype).unflatten(2, (groups, -1)).permute(0, 2, 1, 3, 4).reshape(batch * groups, -1, feature_dim)
    )
    parts = [feature_dim, width - feature_dim]
    keys, values = state.view(batch * groups, 2 * size, width).split_with_sizes(parts, dim=-1)
    new_keys, new_values = inputs.flatten(0, 1).split_with_sizes(parts, dim=-1)

    y = torch.bmm(rows, keys.mT).view(*each, 2 * size)
    y = torch.addcmul(y * cos, y.roll(size, -1), sin)
    y = y + torch.bmm(rows, new_keys.mT).view(*each, count) @ weights
    p = mix_rows(y.flatten(0, 1).flatten(1, 2), batch, tables).view(*each, 2 * size)
    seen = (p @ weights.mT).flatten(0, 1).flatten(1, 2)
    p = torch.addcmul(p * cos, p.roll(size, -1), sin, value=-1).flatten(0, 1).flatten(1, 2)
    output = torch.baddbmm(torch.bmm(seen, new_values), p, values)
    return output.view(*each, width - feature_dim).transpose(1, 2).flatten(2, 3)


def _advance(state, inputs, few: FewTables) -> None:
    """`X <- lambda^T X + sum_i lambda^(T-1-i) beta (x) [k_i; v_i]` in place."""
    batch, groups, _, size, width = state.shape
    count = inputs.shape[2]
    turn_state(state, few.cos[:, count, 0, :size, None], few.sin[:, count, 0, size:, None])
    state.view(batch, groups, 2 * size, width).add_(few.weights[:, count - 1, :count].mT @ inputs)
