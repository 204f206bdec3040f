"""The sequential scan with segmented checkpointing and the inverse recurrence (the paper's appendix A.1).

Forward keeps one state every K tokens. Backward takes these segments in reverse and gets the states inside from the
end of each by `X_{t-1} = (X_t - beta u_t) / lambda`, without storing them or a second forward. Every such step
multiplies rounding errors by 1/|lambda|, e^(K rate) over a segment; where that would exceed `LARGEST_AMPLIFICATION`,
the segment is computed forward from its beginning instead.
"""

from itertools import pairwise

import torch

from ..common.decay import as_complex
from ..common.once import differentiable_once
from ..diagonal.step import grouped_coefficients
from .readout import pull_back

LARGEST_AMPLIFICATION = 16.0


def scan_attention(
    query, key, value, log_decay, input_matrix, coefficient_matrix, product: str, initial_state, boundaries: list[int],
    every: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `recurrent_attention`; `every` is K, the tokens between two states that are kept."""
    batch, groups = query.shape[0], key.shape[2]
    decay, beta = as_complex(log_decay).exp(), as_complex(input_matrix)
    coefficients = grouped_coefficients(coefficient_matrix, query.dtype)
    inputs = torch.cat([key, value], dim=-1)
    outputs, finals = [], []
    for document, (start, end) in enumerate(pairwise(boundaries)):
        if initial_state is None:
            state = decay.new_zeros(batch, groups, decay.shape[1], inputs.shape[-1])
        else:
            state = as_complex(initial_state[document : document + batch].movedim(2, -1))
        tokens = query[:, start:end].unflatten(2, (groups, -1))
        output, state = _Scan.apply(
            tokens, inputs[:, start:end], decay, beta, coefficients, state, product, every, key.shape[-1]
        )
        outputs.append(output.flatten(2, 3))
        finals.append(torch.stack([state.real, state.imag], dim=2))
    return torch.cat(outputs, dim=1), torch.cat(finals)


def _read(query, states, coefficients, product: str, feature_dim: int) -> torch.Tensor:
    """Outputs `[B, K, G, P, D]` of queries `[B, K, G, P, R]` from the states after their tokens `[B, K, G, M, W]`."""
    y = torch.einsum("bkgpr,bkgmr->gbkpm", query.to(states.dtype), states[..., :feature_dim])
    p = pull_back(coefficients, y, product)
    return torch.einsum("gbkpm,bkgmd->bkgpd", p.conj(), states[..., feature_dim:]).real


def forward_states(state, inputs, decay, beta) -> torch.Tensor:
    """The states `[B, K, G, M, W]` after each of K tokens, from the one before."""
    states = []
    for u in inputs.unbind(1):
        state = decay[..., None] * state + beta[..., None] * u[:, :, None]
        states.append(state)
    return torch.stack(states, dim=1)


def inverse_states(state, inputs, decay, beta) -> torch.Tensor:
    """The same from the state after the last of them."""
    states = [state]
    for u in inputs[:, 1:].flip(1).unbind(1):
        state = (state - beta[..., None] * u[:, :, None]) / decay[..., None]
        states.append(state)
    return torch.stack(states[::-1], dim=1)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, inputs, decay, beta, coefficients, state, product, every, feature_dim):
        outputs, kept = [], [state]
        for q, u in zip(query.split(every, dim=1), inputs.split(every, dim=1), strict=True):
            states = forward_states(state, u, decay, beta)
            outputs.append(_read(q, states, coefficients, product, feature_dim))
            state = states[:, -1].clone()  # a view would keep all states of the segment
            kept.append(state)
        ctx.save_for_backward(query, inputs, decay, beta, coefficients, *kept)
        ctx.product, ctx.every, ctx.feature_dim = product, every, feature_dim
        return torch.cat(outputs, dim=1), state

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad_output, grad_state):
        query, inputs, decay, beta, coefficients, *kept = saved
        invertible = decay.abs().amin() ** ctx.every * LARGEST_AMPLIFICATION >= 1
        grads = [torch.empty_like(query), torch.empty_like(inputs), torch.zeros_like(decay), torch.zeros_like(beta)]
        grad_coefficients = None if coefficients is None else torch.zeros_like(coefficients)
        ends = [*range(0, query.shape[1], ctx.every), query.shape[1]]
        for segment in reversed(range(len(ends) - 1)):
            here = slice(ends[segment], ends[segment + 1])
            u = inputs[:, here]
            before, after = kept[segment], kept[segment + 1]
            states = inverse_states(after, u, decay, beta) if invertible else forward_states(before, u, decay, beta)
            leaves = [query[:, here].detach(), states.detach()]
            leaves += [] if coefficients is None else [coefficients.detach()]
            leaves = [x.requires_grad_() for x in leaves]
            with torch.enable_grad():
                output = _read(*leaves[:2], leaves[2] if len(leaves) > 2 else None, ctx.product, ctx.feature_dim)
            grads[0][:, here], grad_states, *rest = torch.autograd.grad(output, leaves, grad_output[:, here])
            for grad in rest:
                grad_coefficients += grad
            previous = torch.cat([before[:, None], states[:, :-1]], dim=1)
            for t in reversed(range(u.shape[1])):
                grad_state = grad_state + grad_states[:, t]
                grads[1][:, here.start + t] = (grad_state * beta.conj()[..., None]).real.sum(2)
                grads[2] += (grad_state * previous[:, t].conj()).sum((0, 3))
                grads[3] += (grad_state * u[:, t, :, None]).sum((0, 3))
                grad_state = decay.conj()[..., None] * grad_state
        return *grads, grad_coefficients, grad_state, None, None, None
