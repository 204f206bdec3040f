"""The two-pass identity as batched matrix products over chunks, as one opaque operator of `torch.library`.

The mathematics is in `ops/interdomain/chunk_call.py`; `ops/interdomain/chunk_narrow.py` is the same for bfloat16
tokens.
"""

import torch

from ..common.common import Kept, without_autocast
from ..common.launch import namespace
from ..diagonal.mixing import mixing_gradient
from .chunk_call import AttentionCall
from .chunk_narrow import NarrowCall


def chunk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None,
    product: str,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    chunk_size: int,
    output_final_state: bool,
    kept: Kept | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `interdomain_attention`; training keeps the inputs alone.

    Everything is in one real dtype, or query, key and value in bfloat16 and the rest in float32.

    Args:
        chunk_size: the largest number of tokens in a chunk.
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
    return _forward(*arguments, kept)


_NAMESPACE = namespace(__name__)


def _call(query: torch.Tensor, *arguments) -> AttentionCall:
    return (NarrowCall if query.dtype == torch.bfloat16 else AttentionCall)(query, *arguments)


@torch.library.custom_op(f"{_NAMESPACE}::attention", mutates_args=())
def _operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    product: str,
    chunk_size: int,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # A backward pass inside autocast would otherwise multiply in its dtype, and a compiled one always.
    with without_autocast(query.device):
        return _forward(
            query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, cu_seqlens, lengths,
            product, chunk_size, output_final_state,
        )  # fmt: skip


def _forward(
    query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, cu_seqlens, lengths, product,
    chunk_size, output_final_state, kept=None,
):  # fmt: skip
    call = _call(
        query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, cu_seqlens, lengths,
        product, chunk_size, output_final_state, kept,
    )  # fmt: skip
    if not output_final_state:
        return call.forward(None), log_decay.new_empty(0)
    final = log_decay.new_zeros(state_shape(query, key, value, log_decay, cu_seqlens))
    if initial_state is not None:
        final.copy_(initial_state)
    return call.forward(final), final


@_operator.register_fake
def _(
    query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, cu_seqlens, lengths, product,
    chunk_size, output_final_state,
):  # fmt: skip
    output = query.new_empty((*query.shape[:3], value.shape[3]))
    shape = state_shape(query, key, value, log_decay, cu_seqlens) if output_final_state else (0,)
    return output, log_decay.new_empty(shape)


def state_shape(query, key, value, log_decay, cu_seqlens) -> tuple[int, ...]:
    rows = query.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return rows, key.shape[2], 2, log_decay.shape[1], key.shape[3] + value.shape[3]


@torch.library.custom_op(f"{_NAMESPACE}::attention_backward", mutates_args=())
def _operator_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    product: str,
    chunk_size: int,
    want_coefficients: bool,
    grad_output: torch.Tensor,
    grad_final: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    with without_autocast(query.device):
        call = _call(
            query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, cu_seqlens, lengths,
            product, chunk_size, grad_final is not None,
        )  # fmt: skip
        *grads, mixing, initial = call.backward(grad_output, grad_final, want_coefficients)
        coefficients = mixing_gradient(coefficient_matrix, product, mixing) if want_coefficients else query.new_empty(0)
        return *grads, coefficients, query.new_empty(0) if initial is None else initial


@_operator_backward.register_fake
def _(
    query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, cu_seqlens, lengths, product,
    chunk_size, want_coefficients, grad_output, grad_final,
):  # fmt: skip
    def like(x):
        return query.new_empty(0) if x is None else x.new_empty(x.shape)

    coefficients = like(coefficient_matrix if want_coefficients else None)
    return *(like(x) for x in (query, key, value, log_decay, input_matrix)), coefficients, like(initial_state)


def _keep_inputs(ctx, inputs, output):
    *tensors, ctx.product, ctx.chunk_size, ctx.output_final_state = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_output, grad_final):
    saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor a single time
    query, _, value, _, _, coefficients, initial, *_ = saved
    if grad_output is None:
        grad_output = value.new_zeros((*query.shape[:3], value.shape[3]))
    if not ctx.output_final_state:
        grad_final = None
    want_coefficients = coefficients is not None and ctx.needs_input_grad[5]
    *grads, of_coefficients, of_initial = _operator_backward(
        *saved, ctx.product, ctx.chunk_size, want_coefficients, grad_output, grad_final
    )
    of_coefficients = of_coefficients if want_coefficients else None
    return *grads, of_coefficients, None if initial is None else of_initial, None, None, None, None, None


_operator.register_autograd(_differentiate, setup_context=_keep_inputs)
