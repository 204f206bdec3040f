"""The definition, token by token. Every other backend is compared with this one in float64."""

from itertools import pairwise

import torch

from ..common.decay import as_complex
from .readout import combine


def recurrent_attention(
    query, key, value, log_decay, input_matrix, coefficient_matrix, product: str, initial_state, cu_seqlens, lengths,
    log_gate=None, write_gate=None, delta=None, time_step=None, points=None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    r"""At every token the state decays, then answers the token's key, and then takes in what that answer lacked:

        X'_t = exp(log_gate_t) exp(log_decay) X_(t-1)
        u_t  = value_t - delta_t Re( key_t^T U'_t^T Gamma'_t ),   (U'_t, Gamma'_t) = C X'_t
        X_t  = X'_t + write_gate_t input_matrix (x) [key_t ; u_t]
        o_t  = Re( query_t^T U_t^T Gamma_t ),                     (U_t, Gamma_t) = C X_t

    A gate that is None is neutral; without gates these are eqs. 11 and 13 of the paper. With delta the key is read like
    a query of its group, before its own token is written. With `time_step` the decay is exp(time_step_t log_decay).
    With `points` (`ops/interdomain/points.py`) a query reads the state as these say.

    Shapes as in `interdomain_attention`, all floating-point tensors of one dtype.

    Returns:
        output `[B, T, H, D]`, states `[B or documents, G, 2, M, R + D]`.
    """
    length, heads, feature_dim = query.shape[1:]
    groups, value_dim = key.shape[2], value.shape[-1]
    query = query.unflatten(2, (groups, heads // groups))
    decay = as_complex(log_decay).exp()[..., None]
    rate = torch.cat([log_decay[..., 0].clamp(min=-1e30), log_decay[..., 1]], dim=-1)  # 0 times -inf is NaN
    beta = as_complex(input_matrix)[..., None]
    coefficients = None if coefficient_matrix is None else as_complex(coefficient_matrix)

    def read(rows, state):
        """Answers `[B, G, P, D]` to rows `[B, G, P, R]`."""
        if points is not None:
            return _read_at_points(rows, state, points)
        u, gamma = _project(coefficients, state).split([feature_dim, value_dim], dim=-1)
        return rows @ combine(u, gamma, product)

    outputs, finals = [], []
    for number, (rows, start, end) in enumerate(_documents(length, cu_seqlens, lengths)):
        if initial_state is None:
            count = query[rows].shape[0]
            state = decay.new_zeros(count, groups, log_decay.shape[1], feature_dim + value_dim)
        else:
            pair = initial_state if rows == slice(None) else initial_state[number : number + 1]
            state = torch.complex(pair[:, :, 0], pair[:, :, 1])
        found = []
        for t in range(start, end):
            k, u = key[rows, t, :, None], value[rows, t, :, None]
            if time_step is not None:
                steps = time_step[rows, t, :, None] * rate  # [B, G, 2 M]
                decay = torch.complex(*steps.chunk(2, dim=-1)).exp()[..., None]
            state = decay * state
            if log_gate is not None:
                state = log_gate[rows, t, :, None, None].exp() * state
            if delta is not None:
                u = u - delta[rows, t, :, None, None] * read(k, state)
            inputs = torch.cat([k, u], dim=-1)
            if write_gate is not None:
                inputs = write_gate[rows, t, :, None, None] * inputs
            state = state + beta * inputs
            found.append(read(query[rows, t], state))
        finals.append(torch.stack([state.real, state.imag], dim=2))
        width = value_dim if points is None else value_dim + 1
        output = torch.stack(found, dim=1).flatten(2, 3) if found else value.new_zeros(1, 0, heads, width)
        if lengths is not None:  # pads read nothing
            output = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, length - end))
        outputs.append(output)
    return torch.cat(outputs, dim=0 if cu_seqlens is None else 1), torch.cat(finals)


def _read_at_points(rows: torch.Tensor, state: torch.Tensor, points) -> torch.Tensor:
    """Softmax attention to the key and value that a state `[B, G, M, R + D]` says of each point, and behind it the
    logarithm of what it sums up."""
    width = rows.shape[-1]
    keys, values = (
        torch.einsum("gnm,bgmw->bgnw", as_complex(table).conj(), part).real
        for table, part in zip(points[:2], (state[..., :width], state[..., width:]), strict=True)
    )
    scores = points.scale[..., None] * (rows @ keys.mT) + points.bias
    return torch.cat([scores.softmax(-1) @ values, scores.logsumexp(-1, keepdim=True)], dim=-1)


def _documents(length: int, cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None):
    """Rows of the batch with the first and the end of their tokens; rows of equal length go together."""
    if cu_seqlens is not None:
        return [(slice(0, 1), start, end) for start, end in pairwise(cu_seqlens.tolist())]
    if lengths is not None:
        return [(slice(row, row + 1), 0, end) for row, end in enumerate(lengths.tolist())]
    return [(slice(None), 0, length)]


def _project(coefficients: torch.Tensor | None, state: torch.Tensor) -> torch.Tensor:
    """C X."""
    if coefficients is None:
        return state
    return coefficients[..., None] * state if coefficients.ndim == 2 else coefficients @ state
