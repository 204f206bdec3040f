"""Inverses of many small unit triangular matrices, as products over all of them at once."""

import torch

_BLOCK = 8


def inverses(x: torch.Tensor) -> torch.Tensor:
    """`(I + x)^-1` for the strictly lower part of x `[N, C, C]`; what is above is not read.

    Blocks on the diagonal by substitution, row by row, and then two by two, with
    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]: what substitution computes, and as exact.
    """
    size, beyond = x.shape[-1], -x.shape[-1] % _BLOCK
    if beyond:
        x = torch.nn.functional.pad(x, (0, beyond, 0, beyond))
    out = torch.zeros_like(x)
    _diagonal(out).copy_(_invert_blocks(_diagonal(x)))
    half = _BLOCK
    while half < size:
        for start in range(0, size - half, 2 * half):
            first, second = slice(start, start + half), slice(start + half, start + 2 * half)
            found = torch.bmm(torch.bmm(out[:, second, second], x[:, second, first]), out[:, first, first])
            torch.neg(found, out=out[:, second, first])
        half *= 2
    return out[:, :size, :size].contiguous()


def _diagonal(x: torch.Tensor) -> torch.Tensor:
    """The blocks on the diagonal of x, `[size, size, N, C / size]`, a view."""
    count = x.shape[-1] // _BLOCK
    return x.view(-1, count, _BLOCK, count, _BLOCK).diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3)


def _invert_blocks(x: torch.Tensor) -> torch.Tensor:
    """The inverses of blocks, with the batch as the last axes."""
    x = x.contiguous()
    out = torch.zeros_like(x)
    out.diagonal(dim1=0, dim2=1).fill_(1)
    for row in range(_BLOCK - 1):
        out[row + 1 :].addcmul_(x[row + 1 :, row, None], out[row], value=-1)
    return out
