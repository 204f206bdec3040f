"""Softmax attention to points of the past, at each of which a state says what key and what value stood there.

Of the state X_t = diag(lambda) X_(t-1) + beta (x) [k_t; v_t] of Interdomain attention (eq. 11) a query reads

    key_n = Re(sum_m conj(keys_nm) X^k_m),   value_n = Re(sum_m conj(values_nm) X^v_m)
    o_t = sum_n softmax_n(score_n) value_n,   score_n = scale q_t . key_n + bias_n

The keys of the points are never formed: with y = X^k q the scores are Re(sum_m conj(keys_nm) y_m), so that this is the
readout in two passes with a softmax between them in the place of C.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..common.checks import check_documents, check_how, check_state, check_tensors
from ..common.cpu import autocasts, compute_dtype, without_autocast
from ..common.launch import say_without_kernels
from ..diagonal.step import StepParameters, StepTables, advance_state, transition_tables
from .chunk import state_shape
from .entry import check_inputs
from .points_chunk import chunked_points

POINT_BACKENDS = ("auto", "recurrent", "chunk")


class Points(NamedTuple):
    """How a state is read at N points by P heads of each of G groups.

    Attributes:
        keys, values: `[G, N, M, 2]`, complex weights of the modes.
        bias: `[G, P, N]`, added to the scores.
        scale: `[G, P]`, which the products of queries and keys are multiplied by.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    scale: torch.Tensor


def point_attention(
    query, key, value, log_decay, input_matrix, points: Points, *, initial_state=None, output_final_state: bool = False,
    cu_seqlens=None, lengths=None, chunk_size: int = 64, backend: str = "auto", kept: dict[Hashable, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`interdomain_attention` that reads its state at points, as ops/interdomain/naive.py defines it.

    Args:
        query: `[B, T, H, R]`, H = G P; key: `[B, T, G, R]`; value: `[B, T, G, D]`.
        log_decay, input_matrix: `[G, M, 2]`.
        backend: "recurrent" (the definition) or "auto" and "chunk" (batched products).
        kept: tables of earlier calls with these parameters, see `chunk_attention`. Default: None.

    Returns:
        `[B, T, H, D + 1]` in at least float32, the output and behind it the logarithm of what the softmax sums up, log
        sum exp of its scores, all zero at pads; and the states `[rows, G, 2, M, R + D]` or None.

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name.
    """
    check_inputs((query, key, value), log_decay, input_matrix, None, "hermitian")
    check_points(points, query, log_decay)
    cu_seqlens, lengths = check_documents(cu_seqlens, lengths, query)
    check_how(backend, POINT_BACKENDS, chunk_size)
    if initial_state is not None:
        shape = state_shape(query, key, value, log_decay, cu_seqlens)
        check_state("initial_state", initial_state, shape, "G, 2, M, R + D", query.device)
    dtype = compute_dtype(query, key, value)
    with without_autocast(query.device):
        given = query, key, value, log_decay, input_matrix, *points, initial_state
        inputs: list[Any] = [None if x is None else x.to(dtype) for x in given]
        tokens, parameters, state = inputs[:3], inputs[3:5], inputs[-1]
        same = Points(*inputs[5:-1])
        documents = state, cu_seqlens, lengths
        if torch.compiler.is_exporting():
            from ..diagonal.export import export_passes

            arguments: Any = partial(_attend, same), *tokens, *parameters, *documents, chunk_size
            output, log_total, state = export_passes(*arguments)
            output = torch.cat([output, log_total], dim=-1)
        elif backend == "recurrent":
            from .naive import recurrent_attention

            arguments = *tokens, *parameters, None, "hermitian", *documents, None, None, None, None, same
            output, state = recurrent_attention(*arguments)
        else:
            if backend == "auto":
                say_without_kernels(query.device, "reading at points has none")
            output, state = chunked_points(*inputs, cu_seqlens, lengths, chunk_size, output_final_state, kept)
    return output, state if output_final_state else None


def check_points(points: Points, query: torch.Tensor, log_decay: torch.Tensor) -> None:
    """Refuse points of other groups, heads or modes."""
    decay = ("log_decay", log_decay, "G, M, 2")
    tables = [(f"points.{name}", x, "G, N, M, 2") for name, x in zip(("keys", "values"), points)]
    tables += [("points.bias", points.bias, "G, P, N"), ("points.scale", points.scale, "G, P")]
    sizes = check_tensors(decay, *tables)
    if sizes["G"] * sizes["P"] != query.shape[-2]:
        raise ValueError(f"points.bias is of {sizes['G'] * sizes['P']} heads, and query has {query.shape[-2]}.")


def _attend(points: Points, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For graphs that leave PyTorch: the p of every y, `[G, P, B, N, C, 2M]`, and the logarithm of the sum."""
    keys, values = (x.flatten(2)[:, None, None, None] for x in points[:2])
    bias, scale = (x[:, :, None, None, None] for x in (points.bias, points.scale[..., None]))
    scores = (y @ keys.mT) * scale + bias
    return scores.softmax(-1) @ values, scores.logsumexp(-1, keepdim=True)


class PointTables(NamedTuple):
    """What one token does to a state, and how it is read: `keys` `[G, 2M, N]` and `values` `[G, N, 2M]`, all real parts
    before the imaginary ones; bias and scale as in `Points`."""

    moves: StepTables
    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    scale: torch.Tensor


def point_tables(log_decay, input_matrix, points: Points, dtype: torch.dtype) -> PointTables:
    """The tables of a step in the dtype of the state."""
    keys, values = (x.to(dtype).transpose(2, 3).flatten(2) for x in points[:2])
    rest = (x.to(dtype) for x in points[2:])
    return PointTables(transition_tables(log_decay, input_matrix, dtype), keys.mT.contiguous(), values, *rest)


def take_point_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parameters: StepParameters,
    *,
    state: torch.Tensor,
    mask: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of `point_attention` with the state updated in place, see `interdomain_step`.

    Args:
        query, key, value: with or without an axis of the one token, `[B, 1, H, R]` or `[B, H, R]`.
        parameters: of which `point_tables` are made.

    Returns:
        The output and behind it the logarithm of the sum, `[B, H, D + 1]` in the dtype of the state, at least float32.
    """
    if torch.is_grad_enabled() or autocasts(query.device):
        with torch.no_grad(), without_autocast(query.device):
            rest: dict[str, Any] = {"mask": mask, "state_indices": state_indices}
            return take_point_step(query, key, value, parameters, state=state, **rest)
    if state_indices is not None:
        from ..common.slots import step_slots

        def step(rows, mask, *tokens):
            return take_point_step(*tokens, parameters, state=rows, mask=mask)

        return step_slots(step, state, state_indices, mask, query, key, value)
    # A state kept in a lower precision is still advanced in float32.
    working = state if state.dtype in (torch.float32, torch.float64) else state.float()
    tables: Any = parameters.tables(working.dtype)
    advance_state(working, key, value, tables.moves, mask)
    if working is not state:
        state.copy_(working)
    batch, groups, _, size, width = state.shape
    rows = query.to(working.dtype).reshape(batch, groups, -1, query.shape[-1])
    widths = [rows.shape[-1], width - rows.shape[-1]]
    keys, values = working.reshape(batch, groups, 2 * size, width).split(widths, dim=-1)
    scores = torch.addcmul(tables.bias, rows @ keys.mT @ tables.keys, tables.scale[..., None])
    read = scores.softmax(-1) @ tables.values @ values
    output = torch.cat([read, scores.logsumexp(-1, keepdim=True)], dim=-1).flatten(1, 2)
    return output if mask is None else output.where(mask[:, None, None], 0)
