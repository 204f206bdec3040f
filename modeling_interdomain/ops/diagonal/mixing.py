"""`pull_back` of `ops/interdomain/readout.py` as a real symmetric matrix, and its gradient.

With `[C] = [[Re C, -Im C], [Im C, Re C]]` the real form of the coefficients, every product reads `p = [C]^T D [C] y`,
where D weighs the real and the imaginary part of `C y`. Complex numbers are interleaved pairs.
"""

import torch

# The diagonal of D, for the real and the imaginary part of C y.
SIGNS = {"bilinear": (1, -1), "hermitian": (1, 1), "real": (4, 0)}


def mixing_matrix(
    coefficient_matrix: torch.Tensor | None, product: str, groups: int, size: int, like: torch.Tensor
) -> torch.Tensor:
    """`[G, 2M, 2M]` with `p_row = y_row @ matrix`.

    Args:
        coefficient_matrix: `[G, M, M, 2]`, `[G, M, 2]` or None.
        like: gives dtype and device.
    """
    if coefficient_matrix is None:
        diagonal = torch.eye(2 * size, dtype=like.dtype, device=like.device) * _weights(product, like).repeat(size)
        return diagonal.expand(groups, -1, -1).contiguous()
    matrix = real_form(coefficient_matrix)
    mixing = matrix.mT @ (_weighted(matrix, product) * matrix)
    if coefficient_matrix.ndim == 4:
        return mixing
    # One 2 x 2 block a mode, on the diagonal.
    same = torch.eye(size, dtype=like.dtype, device=like.device)[:, None, :, None]
    return (mixing[:, :, :, None] * same).reshape(groups, 2 * size, 2 * size)


def mixing_factors(coefficient_matrix: torch.Tensor, product: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The same product as two factors, `[C]^T D` and `[C]`, `[G, 2M, 2M]` each, for rows of all real parts and then all
    imaginary parts.

    Args:
        coefficient_matrix: `[G, M, M, 2]`.
    """
    real, imaginary = coefficient_matrix.unbind(-1)
    matrix = torch.cat([torch.cat([real, -imaginary], dim=-1), torch.cat([imaginary, real], dim=-1)], dim=-2)
    return matrix.mT * _weights(product, matrix).repeat_interleave(real.shape[-1]), matrix


def mixing_gradient(coefficient_matrix: torch.Tensor, product: str, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of the coefficients from that of the mixing matrix, `[G, 2M, 2M]`."""
    groups, size = coefficient_matrix.shape[:2]
    full = coefficient_matrix.ndim == 4
    if not full:
        grad = grad.view(groups, size, 2, size, 2).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    matrix = real_form(coefficient_matrix)
    of_matrix = _weighted(matrix, product) * (matrix @ (grad + grad.mT))
    if full:
        of_matrix = of_matrix.view(groups, size, 2, size, 2).transpose(2, 3)
    real = of_matrix[..., 0, 0] + of_matrix[..., 1, 1]
    imaginary = of_matrix[..., 1, 0] - of_matrix[..., 0, 1]
    return torch.stack([real, imaginary], dim=-1)


def real_form(coefficients: torch.Tensor) -> torch.Tensor:
    """`[G, 2M, 2M]` of a full matrix, `[G, M, 2, 2]` of a diagonal one."""
    real, imaginary = coefficients.unbind(-1)
    blocks = torch.stack([real, -imaginary, imaginary, real], dim=-1).unflatten(-1, (2, 2))
    if coefficients.ndim == 3:
        return blocks
    return blocks.transpose(2, 3).flatten(3).flatten(1, 2)


def _weights(product: str, like: torch.Tensor) -> torch.Tensor:
    # Filled on the device: a copy from the host could not be captured in a CUDA graph.
    return torch.stack([like.new_full((), sign) for sign in SIGNS[product]])


def _weighted(matrix: torch.Tensor, product: str) -> torch.Tensor:
    """The diagonal of D as a column for the rows of a real form."""
    return _weights(product, matrix).repeat(matrix.shape[-2] // 2)[:, None]
