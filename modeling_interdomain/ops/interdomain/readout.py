"""The readout of a query that was pulled through the keys: coefficient matrix and product.

With y[n] = q . X^k[n] the readout of eq. 13 is o = Re(sum_m (C y)[m] * (C X^v)[m]) for the bilinear product. Each
product is linear in X^v, so there is a p(y) with o = Re(sum_n conj(p[n]) X^v[n]): the M x D coefficients Gamma are
never formed, and neither is U. `pull_back` is that map; it is linear over the reals.
"""

import torch

PRODUCTS = ("bilinear", "hermitian", "real")


def apply_coefficients(coefficients: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """`C x` over the last axis of x.

    Args:
        coefficients: complex `[G, M, M]` (full), `[G, 1, M]` (diagonal) or None (identity).
        x: complex `[G, ..., M]`.
    """
    if coefficients is None:
        return x
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    found = rows * coefficients if coefficients.shape[1] == 1 else rows @ coefficients.mT
    return found.view(x.shape)


def pull_back(coefficients: torch.Tensor | None, y: torch.Tensor, product: str) -> torch.Tensor:
    """The vector p with `o = Re(sum_n conj(p[n]) X^v[n])`.

    Args:
        coefficients: as in `apply_coefficients`.
        y: complex `[G, ..., M]`, the query contracted with the key state.
        product: "bilinear" (eq. 13, U^T Gamma), "hermitian" (U^T conj(Gamma)) or "real" (the S4D convention: both
            coefficients are twice the real part of C X).
    """
    u = apply_coefficients(coefficients, y)
    if product == "hermitian":
        u = u.conj()
    elif product == "real":
        u = (4 * u.real).to(u.dtype)
    transposed = coefficients if coefficients is None or coefficients.shape[1] == 1 else coefficients.mT
    return apply_coefficients(transposed, u).conj()


def combine(u: torch.Tensor, gamma: torch.Tensor, product: str) -> torch.Tensor:
    """The product itself, as the definition writes it: `[..., M, R]` and `[..., M, D]` to real `[..., R, D]`."""
    if product == "bilinear":
        return (u.mT @ gamma).real
    if product == "hermitian":
        return (u.mT @ gamma.conj()).real
    return (2 * u.real).mT @ (2 * gamma.real)
