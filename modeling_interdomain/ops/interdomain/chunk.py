"""The chunked operator, opaque to graphs (`torch.library`): the mathematics is in `ops/interdomain/chunk_call.py`, and
that of bfloat16 tokens in `ops/interdomain/chunk_bf16.py`.
"""

from collections.abc import Hashable
from typing import Any

import torch

from ..common.custom_op import differentiable
from ..common.packing import state_rows
from ..common.states import final_states
from ..diagonal.mixing import mixing_gradient
from .chunk_bf16 import Bf16Call
from .chunk_call import AttentionCall


def chunk_attention(
    query, key, value, log_decay, input_matrix, coefficient_matrix, product: str, initial_state, cu_seqlens, lengths,
    chunk_size: int, output_final_state: bool, kept: dict[Hashable, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `interdomain_attention`, in one real dtype, or with query, key and value in bfloat16 and the rest in float32.

    Args:
        kept: tables of an earlier call; not used where something may be differentiated, or is compiled.

    Returns:
        output `[B, T, H, D]`, and the final states, empty unless `output_final_state`.
    """
    arguments = (
        query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, cu_seqlens, lengths, product,
        chunk_size, output_final_state,
    )  # fmt: skip
    if kept is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _operator(*arguments)
    return _computed(kept, *arguments)


def _call(query: torch.Tensor, *arguments) -> AttentionCall:
    return (Bf16Call if query.dtype == torch.bfloat16 else AttentionCall)(query, *arguments)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None, initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None, product: str, chunk_size: int, output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _computed(
        None, query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, cu_seqlens, lengths,
        product, chunk_size, output_final_state,
    )  # fmt: skip


def _computed(kept: dict[Hashable, Any] | None, *inputs):
    query, key, value, log_decay, _, _, initial_state, cu_seqlens, *_, output_final_state = inputs
    shape = state_shape(query, key, value, log_decay, cu_seqlens)
    final = final_states(log_decay, shape, output_final_state, initial_state)
    return _call(*inputs, kept).forward(final if output_final_state else None), final


def _outputs(query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, cu_seqlens, *rest):
    output = query.new_empty((*query.shape[:3], value.shape[3]))
    shape = state_shape(query, key, value, log_decay, cu_seqlens) if rest[-1] else (0,)
    return output, log_decay.new_empty(shape)


def state_shape(query, key, value, log_decay, cu_seqlens) -> tuple[int, ...]:
    return state_rows(query, cu_seqlens), key.shape[2], 2, log_decay.shape[1], key.shape[3] + value.shape[3]


def _backward(inputs, grads, needs):
    call = _call(*inputs[:-1], grads[1] is not None)
    *found, mixing, initial = call.backward(*grads, needs[5])
    coefficients, product = inputs[5], inputs[9]
    return *found, mixing_gradient(coefficients, product, mixing) if needs[5] else None, initial


_operator = differentiable(__name__, "attention", _forward, _outputs, _backward, count=7)
