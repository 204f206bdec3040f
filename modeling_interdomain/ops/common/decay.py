"""Powers of a decay, matrices by the ages of tokens, and complex numbers of real pairs."""

import torch

# Its exp is 0, also as a float64.
LEAST = -1000.0


def decay_powers(log_decay: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """`lambda ** exponents`, computed in float64 whatever the dtype of the parameters.

    A phase of 128 rad a token over 64 tokens is 8,192 rad: float32 would keep only three digits of the angle. Exponents
    are not negative, so that powers of a stable decay stay within [0, 1] whatever the chunk length and the decay rate;
    only the fused kernels use negative ones, where they know that the result is finite.

    Args:
        log_decay: `[G, M, 2]`, Delta A as (real, imaginary) pairs; the imaginary part in radians per token.
        exponents: `[E]`, integers.

    Returns:
        `[G, E, M]`, complex128.
    """
    exponents = exponents.to(torch.float64)[:, None]
    rate, phase = log_decay[:, None].unbind(-1)
    size, angle = (finite(rate) * exponents).exp(), phase.to(torch.float64) * exponents
    # `torch.polar` divides by the size in its gradient, where nothing is left of a denormal one.
    return torch.complex(size * angle.cos(), size * angle.sin())


def by_age(x: torch.Tensor) -> torch.Tensor:
    """`[..., T, T]` indexed by (t, i) to (t, age), age = t - i, or back; zero where there is no such token."""
    t = torch.arange(x.shape[-1], device=x.device)
    other = t[:, None] - t
    return torch.where(other >= 0, x.gather(-1, other.clamp(min=0).expand_as(x)), 0)


def finite(log_decay: torch.Tensor) -> torch.Tensor:
    """In float64, and at least `LEAST`, whose exp is 0 like that of -inf: with -inf, 0 * x and x - x would be NaN.

    It is not lower, so that what is added to it keeps its digits.
    """
    return log_decay.to(torch.float64).clamp(min=LEAST)


def decayed(state: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """A state `[B, G, 2, M, W]` times complex numbers `[G, M, 1]`, or `[B, G, M, 1]`."""
    real, imag = state.unbind(2)
    return torch.stack([decay.real * real - decay.imag * imag, decay.real * imag + decay.imag * real], dim=2)


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """Real pairs `[..., 2]` as complex numbers `[...]`, in the nearest dtype that has a complex partner.

    A copy: a view would need an even storage offset, which a parameter in a flat buffer need not have.
    """
    return torch.complex(*pairs.to(torch.promote_types(pairs.dtype, torch.float32)).unbind(-1))
