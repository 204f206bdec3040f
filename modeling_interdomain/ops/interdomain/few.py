"""A few tokens from a state, in about as many calls as one token takes: what verifying a draft runs.

No states are made between the tokens. The rows `y_t` (token t's query pulled through the keys) and `p_t` (mixed) are
linear in their inputs, to which the state and the new tokens contribute side by side:

    y_t = lambda^t (q_t . K) + sum_{i <= t} (q_t . k_i) lambda^(t-i) beta
    o_t = (lambda^t p_t) . V + sum_{j <= t} (p_t . lambda^(t-j) beta) v_j
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..common.cpu import without_autocast
from ..common.decay import as_complex, decay_powers
from ..diagonal.step import StepTables, advance_by, mix_rows

# The tokens of a usual draft, where this takes half the time of the chunked operator; and the inputs that may be
# pending before the state takes them in, those of the draft included.
MAX_DRAFT, MAX_PENDING = 12, 16


class FewTables(NamedTuple):
    """lambda and beta of the next T tokens, for rows that hold 2M numbers, the real parts before the imaginary ones.

    Attributes:
        cos, sin: `[G, MAX_PENDING, 1, 2M]`: `lambda^t y` is `cos y + sin (Im y, Re y)`, t from 1.
        weights: `[G T, MAX_PENDING, 2M]`, `lambda^(t-i) beta` of input i at token t, 0 for later inputs. The last T
            inputs are those of the tokens themselves, and pending ones lie before.
        decay, turn: `[G, M, 1]`, the real and the imaginary part of `lambda^T`.
        beta: `[G, 2M, T]`, `lambda^(T-i) beta`, how token i enters the state after the last.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    weights: torch.Tensor
    decay: torch.Tensor
    turn: torch.Tensor
    beta: torch.Tensor


def few_tables(log_decay: torch.Tensor, input_matrix: torch.Tensor, dtype: torch.dtype, count: int) -> FewTables:
    """The tables of `take_few` for `count` tokens, from `[G, M, 2]` each, in the dtype of the state."""
    ages = torch.arange(MAX_PENDING + 1, device=log_decay.device)
    powers = decay_powers(log_decay, ages)  # [G, T + 1, M]
    inputs = powers * as_complex(input_matrix.double())[:, None]
    inputs = torch.cat([inputs.real, inputs.imag], dim=-1)
    apart = ages[MAX_PENDING - count : -1, None] - ages[:-1]
    weights = inputs[:, apart.clamp(min=0)].where((apart >= 0)[..., None], 0)
    after = powers[:, 1:, None]
    cos, sin = torch.cat([after.real, after.real], dim=-1), torch.cat([-after.imag, after.imag], dim=-1)
    last = powers[:, count, :, None]
    tables = cos, sin, weights.flatten(0, 1), last.real, last.imag, inputs[:, :count].flip(1).mT
    return FewTables(*(x.to(dtype).contiguous() for x in tables))


def take_few(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    tables: Callable[[torch.dtype], StepTables],
    few: Callable[[torch.dtype, int], FewTables],
    state: torch.Tensor,
    move: bool = True,
) -> torch.Tensor:
    """`interdomain_step` for 2 to MAX_DRAFT real tokens a row, without the normalised readout.

    Args:
        query: `[B, T, H, R]`; key: `[B, P + T, G, R]`; value: `[B, P + T, G, D]`, of which the first P are pending: the
            state has not taken them in. P + T is at most MAX_PENDING, and P is 0 with `move`.
        tables, few: return the tables for a dtype, and for a dtype and a number of tokens.
        state: `[B, G, 2, M, R + D]`, advanced in place with `move`, otherwise left as it was.

    Returns:
        `[B, T, H, D]` in the dtype of `value`. Not differentiable.
    """
    with torch.no_grad(), without_autocast(query.device):
        # A state kept in a lower precision is still advanced in float32.
        working = state if state.dtype in (torch.float32, torch.float64) else state.float()
        inputs = torch.cat([key, value], dim=-1).to(working.dtype).transpose(1, 2)  # [B, G, T, R + D]
        ahead = few(working.dtype, query.shape[1])
        output = _read(query, inputs, working, tables(working.dtype), ahead)
        if move:
            advance_by(working, inputs, ahead.decay, ahead.turn, ahead.beta)
            if working is not state:
                state.copy_(working)
    return output.to(value.dtype)


def _read(query, inputs, state, tables: StepTables, few: FewTables) -> torch.Tensor:
    batch, groups, _, size, width = state.shape
    count, heads, feature_dim = query.shape[1:]
    known = inputs.shape[2]
    shared, modes = heads // groups, 2 * size
    group = batch * groups, count * shared  # rows of a group: its tokens, the heads of each together
    token = batch * groups * count, shared
    each = batch, groups, count, shared
    rows = query.to(state.dtype).view(batch, count, groups, shared, feature_dim).transpose(1, 2)
    rows = rows.reshape(*group, feature_dim)
    parts = [feature_dim, width - feature_dim]
    keys, values = state.view(batch * groups, modes, width).split_with_sizes(parts, dim=-1)
    new_keys, new_values = inputs.flatten(0, 1).split_with_sizes(parts, dim=-1)
    weights = few.weights[:, MAX_PENDING - known :]
    weights = weights if batch == 1 else weights.repeat(batch, 1, 1)
    cos, sin = few.cos[:, known - count : known], few.sin[:, known - count : known]

    y = torch.bmm(rows, keys.mT).view(*each, modes)
    y = torch.addcmul(y * cos, y.roll(size, -1), sin).view(*token, modes)
    y = torch.baddbmm(y, torch.bmm(rows, new_keys.mT).view(*token, known), weights)
    p = mix_rows(y.view(*group, modes), batch, tables)
    seen = torch.bmm(p.reshape(*token, modes), weights.mT).view(*group, known)
    p = p.view(*each, modes)
    p = torch.addcmul(p * cos, p.roll(size, -1), sin, value=-1).view(*group, modes)
    output = torch.baddbmm(torch.bmm(seen, new_values), p, values)
    return output.view(*each, -1).transpose(1, 2).flatten(2, 3)
