"""Joining states, and taking spans out of them, where one decay serves all tokens ("interdomain" and "s4d" layers).

With `X_t = lambda X_(t-1) + beta (x) [k_t ; v_t]` a state is a sum over tokens, each weighted by its age alone. So the
state of two documents one after the other, and that of a text without a span, are sums of known states. All functions
here are exact, up to rounding, for the keys and values that made the states.

Through the layers of a model they are approximations, except in a first layer without convolutions: the keys and values
of later layers, and of the first tokens after a joint, depend on what came before, and these functions leave them as
they were.
"""

import torch

from .checks import check_tensors
from .decay import decay_powers, decayed


def join_states(
    first: torch.Tensor, second: torch.Tensor, length: int | torch.Tensor, log_decay: torch.Tensor
) -> torch.Tensor:
    """The state of two documents, one after the other: `lambda^length X_first + X_second`.

    Args:
        first, second: `[B, G, 2, M, W]`; the second began from zero.
        length: tokens of the second document, one number or `[B]`.
        log_decay: `[G, M, 2]`, as in `interdomain_attention`.

    Returns:
        A new state.

    Raises:
        ValueError: when shapes do not fit, or a length is negative.
    """
    _check(log_decay, length, first=first, second=second)
    return decay_state(first, length, log_decay) + second


def mask_span(
    state: torch.Tensor, span: torch.Tensor, since: int | torch.Tensor, log_decay: torch.Tensor
) -> torch.Tensor:
    """The state of a text with the keys and values of a span at zero: `X - lambda^since X_span`.

    Args:
        state: `[B, G, 2, M, W]`, after the text.
        span: the same of the span alone, begun from zero.
        since: tokens of the text after the span, one number or `[B]`.
        log_decay: `[G, M, 2]`.

    Returns:
        A new state.

    Raises:
        ValueError: when shapes do not fit, or a length is negative.
    """
    _check(log_decay, since, state=state, span=span)
    return state - decay_state(span, since, log_decay)


def remove_span(
    state: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    since: int | torch.Tensor,
    log_decay: torch.Tensor,
) -> torch.Tensor:
    """The state of a text without the tokens of a span: `X + lambda^since (X_before - X_after)`.

    Args:
        state: `[B, G, 2, M, W]`, after the text.
        before, after: the states of the same text where the span begins and where it ends.
        since: tokens of the text after the span, one number or `[B]`.
        log_decay: `[G, M, 2]`.

    Returns:
        A new state.

    Raises:
        ValueError: when shapes do not fit, or a length is negative.
    """
    _check(log_decay, since, state=state, before=before, after=after)
    return state + decay_state(before - after, since, log_decay)


def decay_state(state: torch.Tensor, tokens: int | torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """`lambda^tokens X` of a state `[B, G, 2, M, W]`, for one number of tokens or `[B]`; nothing is checked."""
    ages = torch.as_tensor(tokens, device=state.device).reshape(-1)
    powers = decay_powers(log_decay, ages).transpose(0, 1)[..., None]  # [1 or B, G, M, 1]
    decay = powers.to(torch.complex128 if state.dtype == torch.float64 else torch.complex64)
    return decayed(state, decay).to(state.dtype)


def _check(log_decay: torch.Tensor, tokens: int | torch.Tensor, **states: torch.Tensor) -> None:
    named = [(name, x, "B, G, 2, M, R + D") for name, x in states.items()]
    rows = check_tensors(("log_decay", log_decay, "G, M, 2"), *named)["B"]
    ages = torch.tensor(-1) if tokens is None else torch.as_tensor(tokens)
    fits = ages.ndim == 0 or ages.shape == (rows,)
    odd = ages.dtype == torch.bool or ages.is_floating_point() or ages.is_complex()
    if not fits or odd or bool((ages < 0).any()):
        raise ValueError(
            f"A number of tokens must be whole and at least 0, one for all or [B] = [{rows}], got {tokens!r}."
        )
