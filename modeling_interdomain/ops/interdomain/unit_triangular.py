"""Inverses of many small unit triangular matrices, as products over all of them at once."""

import torch

_BLOCK = 8


def inverses(x: torch.Tensor) -> torch.Tensor:
    """`(I + x)^-1` for the strictly lower part of x `[N, C, C]`; what is above is not read.

    Blocks on the diagonal by substitution, row by row, and then two by two, with
    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]: what substitution computes, and as exact.
    """
    size, full = x.shape[-1], _BLOCK
    while full < size:
        full *= 2
    if full > size:
        x = torch.nn.functional.pad(x, (0, full - size, 0, full - size))
    found = _invert_blocks(_diagonal(x, _BLOCK))
    while found.shape[-1] < full:
        found = _join_halves(found, _diagonal(x, 2 * found.shape[-1]))
    return found[:, 0, :size, :size].contiguous() if full > size else found[:, 0]


def _diagonal(x: torch.Tensor, size: int) -> torch.Tensor:
    """The blocks on the diagonal of x, `[N, C / size, size, size]`, a view."""
    count = x.shape[-1] // size
    return x.unflatten(2, (count, size)).unflatten(1, (count, size)).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _invert_blocks(x: torch.Tensor) -> torch.Tensor:
    """The inverses of blocks `[N, n, size, size]`, computed with the batch as the last axes."""
    size = x.shape[-1]
    x = x.permute(2, 3, 0, 1).contiguous()
    out = torch.zeros_like(x)
    out.diagonal(dim1=0, dim2=1).fill_(1)
    for row in range(1, size):
        torch.sum(x[row, :row, None] * out[:row, :row], dim=0, out=out[row, :row]).neg_()
    return out.permute(2, 3, 0, 1).contiguous()


def _join_halves(found: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The inverses of blocks x `[N, n, 2 size, 2 size]` from those of their halves, `[N, 2 n, size, size]`."""
    size = found.shape[-1]
    first, second = found[:, ::2], found[:, 1::2]
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    out[..., :size, :size], out[..., size:, size:] = first, second
    out[..., size:, :size] = (second @ x[..., size:, :size] @ first).neg_()
    return out
