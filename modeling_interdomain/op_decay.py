"""Powers of the diagonal decay lambda = exp(log_decay), the only transcendental numbers the recurrence needs."""

import torch


def decay_powers(log_decay: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """`lambda ** exponents`, computed in float64 whatever the dtype of the parameters.

    A phase of 128 rad a token over 64 tokens is 8,192 rad: float32 would keep only three digits of the angle. Exponents
    are non-negative, so that every power of a stable decay stays within [0, 1] and no chunk length, step size or decay
    rate can overflow; the fused kernels alone ask for negative ones, where they know that the result is finite.

    Args:
        log_decay: `[G, M, 2]`, Delta A as (real, imaginary) pairs; the imaginary part in radians per token.
        exponents: `[E]`, integers.

    Returns:
        `[G, E, M]`, complex128.
    """
    exponents = exponents.to(torch.float64)[:, None]
    rate, phase = log_decay.to(torch.float64)[:, None].unbind(-1)
    return torch.polar((rate * exponents).exp(), phase * exponents)


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """View real pairs `[..., 2]` as complex numbers `[...]`, in the nearest dtype that has a complex partner."""
    if pairs.dtype not in (torch.float32, torch.float64):
        pairs = pairs.float()
    return torch.view_as_complex(pairs.contiguous())
