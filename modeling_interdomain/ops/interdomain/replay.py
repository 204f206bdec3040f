"""The state after some tokens, without outputs: for rolling a cache back, and for handing a state on."""

import torch

from ..common.cpu import all_real, without_autocast
from ..common.decay import as_complex, decay_powers, decayed
from ..diagonal.step import advance_by

# Tokens of one matrix product.
_BLOCK = 1024


def state_after(
    state: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    powers: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """`lambda^n X + sum_i lambda^(n_i) beta (x) [k_i; v_i]`, with n real tokens in all and n_i of them after token i.

    Args:
        state: X, `[B, G, 2, M, R + D]`, left untouched.
        key, value: `[B, T, G, R]` and `[B, T, G, D]`, T may be 0.
        mask: `[B, T]` bool, False for pads.
        log_decay, input_matrix: `[G, M, 2]`, as in `interdomain_attention`.
        powers, inputs: of `replay_tables`, with which a few tokens take few calls and have no gradient.

    Returns:
        A new tensor like `state`, at least float32; differentiable without `powers`.
    """
    wide = torch.promote_types(state.dtype, torch.float32)
    if powers is not None and inputs is not None and powers.dtype == wide:
        count, most = mask.shape[1], inputs.shape[2]
        if count <= most and all_real(mask):
            state = state.to(wide, copy=True)
            tokens = torch.cat([key, value], dim=-1).to(wide).transpose(1, 2)
            advance_by(state, tokens, powers[0, :, count], powers[1, :, count], inputs[:, :, most - count :])
            return state
    state = state.to(wide)
    with without_autocast(state.device):
        beta = as_complex(input_matrix.to(wide))[:, None]
        steps = _powers(log_decay, min(mask.shape[1], _BLOCK)).to(beta.dtype)
        for block in zip(*(x.split(_BLOCK, dim=1) for x in (key, value, mask)), strict=True):
            state = _advance(state, block, steps, steps * beta)
    return state


def replay_tables(log_decay: torch.Tensor, input_matrix: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables with which `state_after` takes up to `most` tokens at once, in the dtype of the parameters.

    Returns:
        `[2, G, most + 1, M, 1]`, the real and the imaginary parts of lambda^0 to lambda^most; `[G, 2M, most]`,
        lambda^i beta with i falling to 0, the real parts before the imaginary ones.
    """
    powers = decay_powers(log_decay, torch.arange(most + 1, device=log_decay.device))
    inputs = (powers[:, :most] * as_complex(input_matrix.double())[:, None]).flip(1)
    both = torch.stack([powers.real, powers.imag])[..., None]
    return both.to(log_decay.dtype), torch.cat([inputs.real, inputs.imag], dim=-1).mT.to(log_decay.dtype)


def _advance(state, block, powers, weights):
    """`powers` and `weights`, lambda^n and lambda^n beta, are `[G, T + 1, M]` or longer."""
    key, value, mask = block
    inputs = torch.cat([key, value], dim=-1).to(state.dtype).transpose(1, 2)  # [B, G, T, W]
    count = mask.shape[1]
    if all_real(mask):  # rows are alike
        weights, decay = weights[:, :count].flip(1), powers[:, count, :, None]  # [G, T, M] and [G, M, 1]
        weights = torch.cat([weights.real, weights.imag], dim=-1).mT
    else:
        after = mask.flip(1).long().cumsum(1).flip(1) - mask.long()
        weights = torch.where(mask[..., None], weights[:, after], 0)  # [G, B, T, M]
        weights = torch.cat([weights.real, weights.imag], dim=-1).movedim(1, 0).mT  # [B, G, 2M, T]
        decay = powers[:, mask.sum(1)].movedim(1, 0)[..., None]  # [B, G, M, 1]
    added = (weights @ inputs).unflatten(2, (2, -1))
    return decayed(state, decay) + added


def _powers(log_decay: torch.Tensor, last: int) -> torch.Tensor:
    """`lambda^0` to `lambda^last`, `[G, last + 1, M]`: every 16th power times the first 16, which saves sines."""
    if last < 16:
        return decay_powers(log_decay, torch.arange(last + 1, device=log_decay.device))
    coarse = decay_powers(log_decay, torch.arange(0, last + 1, 16, device=log_decay.device))
    fine = decay_powers(log_decay, torch.arange(16, device=log_decay.device))
    return (coarse[:, :, None] * fine[:, None]).flatten(1, 2)[:, : last + 1]
