"""One token at a time with the state updated in place: what decoding runs.

All of it is real arithmetic in few calls: at batch 1 a call costs more than what it computes, and exported graphs know
no complex numbers. What depends on the parameters alone is in `StepTables`, made once for many steps.
"""

from collections.abc import Callable
from itertools import repeat
from typing import Any, NamedTuple

import torch

from ..common.cpu import in_graph
from ..common.decay import as_complex
from .mixing import SIGNS, mixing_factors

_ROWS_BYTES = 3 << 19  # of a state, that stay in the caches of two cores while a step goes over them five times


class StepTables(NamedTuple):
    """What one token does to a state `[B, G, 2, M, R + D]`, and how the state is read.

    Attributes:
        decay, turn: `[G, M, 1]`, the real and the imaginary part of lambda.
        beta: `[G, 2, M, 1]`.
        matrices: real `[G, 2M, 2M]`; with `y = [Re y; Im y]` the query pulled through the keys, `p = y @ matrices[0]
            @ ...` reads the values. One matrix is `[C]^T D [C]`, two are its factors.
        scale, cross: `[G, 1, 2M]` or None, the same product for a C without mixing: `p = scale y + cross (Im y, Re y)`.
    """

    decay: torch.Tensor
    turn: torch.Tensor
    beta: torch.Tensor
    matrices: tuple[torch.Tensor, ...] = ()
    scale: torch.Tensor | None = None
    cross: torch.Tensor | None = None


class StepParameters:
    """The parameters of a step, for its kernels, and the tables that PyTorch makes of them when it first needs these.

    Args:
        make: `step_tables`, or what else makes tables of these parameters and a dtype.
    """

    def __init__(self, make: Callable[..., Any], *parameters: Any):
        self.parameters, self._make = parameters, make
        self._tables: dict[torch.dtype, Any] = {}

    def tables(self, dtype: torch.dtype) -> Any:
        """In the dtype of the state."""
        if dtype not in self._tables:
            self._tables[dtype] = self._make(*self.parameters, dtype)
        return self._tables[dtype]


def step_tables(
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None,
    product: str,
    dtype: torch.dtype,
    reused: bool = False,
) -> StepTables:
    """The tables of `advance_state` and `read_state`.

    Args:
        log_decay, input_matrix: `[G, M, 2]`.
        coefficient_matrix: `[G, M, M, 2]`, `[G, M, 2]` or None.
        dtype: that of the state, float32 or float64.
        reused: multiply the two factors now, which costs as much as M steps.
    """
    moves = transition_tables(log_decay, input_matrix, dtype)
    if coefficient_matrix is None or coefficient_matrix.ndim == 3:
        return moves._replace(**_without_mixing(coefficient_matrix, product, moves.beta))
    left, right = mixing_factors(coefficient_matrix.to(dtype), product)
    return moves._replace(matrices=(left @ right,) if reused else (left, right))


def transition_tables(log_decay: torch.Tensor, input_matrix: torch.Tensor, dtype: torch.dtype) -> StepTables:
    """The tables of `advance_state` alone."""
    wide = log_decay.to(torch.promote_types(log_decay.dtype, torch.float32))
    magnitude, phase = wide[..., 0].exp(), wide[..., 1]
    decay, turn = (x.to(dtype)[..., None] for x in (magnitude * phase.cos(), magnitude * phase.sin()))
    return StepTables(decay, turn, input_matrix.to(dtype).mT.contiguous()[..., None])


def _without_mixing(coefficients: torch.Tensor | None, product: str, like: torch.Tensor) -> dict:
    """`scale` and `cross` of a diagonal C, or of the identity."""
    first, second = SIGNS[product]
    groups, _, size, _ = like.shape
    if coefficients is None:
        if first == second == 1:
            return {}
        signs = like.new_tensor([first, second])
        return {"scale": signs.repeat_interleave(size).expand(groups, 1, -1)}
    real, imag = coefficients.to(like.dtype).unbind(-1)
    scale = torch.cat([first * real**2 + second * imag**2, first * imag**2 + second * real**2], dim=-1)
    cross = (second - first) * real * imag
    return {"scale": scale[:, None], "cross": torch.cat([cross, cross], dim=-1)[:, None]}


def advance_state(
    state: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tables: StepTables, mask: torch.Tensor | None = None
) -> None:
    """`X <- diag(lambda) X + beta (x) [k; v]` in place (eq. 11).

    Args:
        state: `[B, G, 2, M, R + D]`, float32 or float64.
        key, value: `[B, G, R]` and `[B, G, D]`, or with an axis of the one token, `[B, 1, G, R]`; with the normalised
            readout the caller has appended the constant 1.
        tables: of `step_tables` or `transition_tables`, in the dtype of the state.
        mask: `[B]` bool, False where the token is a pad: that row keeps its state.
    """
    inputs = torch.cat([key, value], dim=-1).to(state.dtype).view(*state.shape[:2], 1, 1, -1)
    decay, turn, beta = tables[:3]
    if mask is not None:  # a pad decays by 1 and puts in 0
        here = mask[:, None, None, None]
        decay, turn, inputs = decay.where(here, 1), turn.where(here, 0), inputs.where(here[..., None], 0)
    turn_state(state, decay, turn, beta, inputs)


def turn_state(state: torch.Tensor, decay, turn, beta=None, inputs=None) -> None:
    """`X <- lambda X` in place, with inputs `+ beta (x) inputs`, a few rows at a time; lambda `[G or B G, M, 1]`."""
    if state.shape[0] > 1 and not in_graph() and state.device.type == "cpu" and state.nbytes > 2 * _ROWS_BYTES:
        count = max(1, _ROWS_BYTES // state[0].nbytes)
        each = (repeat(x) if x is None or x.ndim < 4 else x.split(count) for x in (decay, turn, inputs))
        for part, own_decay, own_turn, own in zip(state.split(count), *each):
            turn_state(part, own_decay, own_turn, beta, own)
        return
    real, imag = state.unbind(2)
    before = real.clone()
    real.mul_(decay).addcmul_(imag, turn, value=-1)
    imag.mul_(decay).addcmul_(before, turn)
    if inputs is not None:
        state.addcmul_(beta, inputs)


def advance_by(
    state: torch.Tensor, inputs: torch.Tensor, decay: torch.Tensor, turn: torch.Tensor, beta: torch.Tensor
) -> None:
    """`X <- lambda^T X + sum_i lambda^(T-i) beta (x) [k_i; v_i]` in place, i from 1.

    Args:
        state: `[B, G, 2, M, R + D]`.
        inputs: `[B, G, T, R + D]`, all real, in its dtype.
        decay, turn: `[G, M, 1]`, the real and the imaginary part of `lambda^T`.
        beta: `[G, 2M, T]`, `lambda^(T-i) beta`, the real parts before the imaginary ones.
    """
    batch, groups, _, size, width = state.shape
    turn_state(state, decay, turn)
    if batch > 1:
        beta = beta.repeat(batch, 1, 1)
    state.view(batch * groups, 2 * size, width).baddbmm_(beta, inputs.flatten(0, 1))


def read_state(query: torch.Tensor, state: torch.Tensor, tables: StepTables) -> torch.Tensor:
    """Read the output of eq. 13 from a state, at a cost of M (R + D) + M^2 a head.

    Args:
        query: `[B, H, R]` or `[B, 1, H, R]`.
        state: `[B, G, 2, M, R + D]`.
        tables: of `step_tables`, in the dtype of the state.

    Returns:
        `[B, H, D]` in the dtype of the state.
    """
    batch, groups, _, size, width = state.shape
    heads, feature_dim = query.shape[-2:]
    rows = query.to(state.dtype).reshape(batch * groups, heads // groups, feature_dim)
    keys, values = state.reshape(batch * groups, 2 * size, width).split_with_sizes(
        [feature_dim, width - feature_dim], dim=-1
    )
    pulled = mix_rows(torch.bmm(rows, keys.mT), batch, tables)
    return torch.bmm(pulled, values).view(batch, heads, width - feature_dim)


def mix_rows(y: torch.Tensor, batch: int, tables: StepTables) -> torch.Tensor:
    """Rows p with `o = p [Re X; Im X]` from rows y, `[B G, H / G, 2M]` each."""
    if tables.matrices:
        # All rows of a batch are multiplied by the matrices of their group at once.
        rows = y if batch == 1 else y.unflatten(0, (batch, -1)).transpose(0, 1).flatten(1, 2)  # [G, B P, 2M]
        for matrix in tables.matrices:
            rows = torch.bmm(rows, matrix)
        return rows if batch == 1 else rows.unflatten(1, (batch, -1)).transpose(0, 1).flatten(0, 1)
    if tables.scale is None:
        return y
    by_row = y.view(batch, -1, *y.shape[1:])
    p = by_row * tables.scale
    if tables.cross is not None:
        p = torch.addcmul(p, by_row.roll(y.shape[-1] // 2, -1), tables.cross)
    return p.view(y.shape)


def grouped_coefficients(coefficient_matrix: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Real pairs `[G, M, M, 2]` or `[G, M, 2]` to the complex `[G, M, M]` or `[G, 1, M]` of the readout functions."""
    if coefficient_matrix is None:
        return None
    coefficients = as_complex(coefficient_matrix.to(dtype))
    return coefficients[:, None] if coefficients.ndim == 2 else coefficients
