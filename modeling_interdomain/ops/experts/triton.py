"""Products with gathered rows of a table, and sums of them, without a copy of any row.

A program has a few experts of a token, or some columns of a bag, so that even one decoding token fills many programs.
Sums are in float32 and in the order of the entries, so that they repeat bit for bit.
"""

import torch

from ..common.launch import on_device, tl, triton


@triton.jit
def products(x, table, ids, out, count, width, BK: tl.constexpr, BD: tl.constexpr):
    """`out[t, j] = x[t] . table[ids[t, j]]`; grid [tokens, blocks of entries].

    x `[tokens, width]`; table `[experts, width]`; ids and out `[tokens, count]`.
    """
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BK + tl.arange(0, BK)
    rows = tl.load(ids + token * count + j, mask=j < count, other=0).to(tl.int64)
    found = tl.zeros([BK], tl.float32)
    for first in range(0, width, BD):
        d = first + tl.arange(0, BD)
        inside = (j < count)[:, None] & (d < width)[None, :]
        gathered = tl.load(table + rows[:, None] * width + d[None, :], mask=inside, other=0.0).to(tl.float32)
        here = tl.load(x + token * width + d, mask=d < width, other=0.0).to(tl.float32)
        found += tl.sum(gathered * here[None, :], 1)
    tl.store(out + token * count + j, found.to(out.dtype.element_ty), mask=j < count)


@triton.jit
def bags(weights, table, ids, starts, out, count, width, BK: tl.constexpr, BD: tl.constexpr):
    """`out[b] = sum_i weights[i] table[ids[i]]` over the entries of a bag; grid [bags, blocks of columns].

    A bag has `count` entries, or those from `starts[b]` to `starts[b + 1]`; table `[rows, width]`; out `[bags, width]`.
    """
    bag = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    if starts is None:
        begin = bag * count
        end = begin + count
    else:
        begin = tl.load(starts + bag)
        end = tl.load(starts + bag + 1)
    found = tl.zeros([BD], tl.float32)
    for first in range(begin, end, BK):
        i = first + tl.arange(0, BK)
        rows = tl.load(ids + i, mask=i < end, other=0).to(tl.int64)
        by = tl.load(weights + i, mask=i < end, other=0.0).to(tl.float32)
        inside = (i < end)[:, None] & (d < width)[None, :]
        gathered = tl.load(table + rows[:, None] * width + d[None, :], mask=inside, other=0.0).to(tl.float32)
        found += tl.sum(gathered * by[:, None], 0)
    tl.store(out + bag * width + d, found.to(out.dtype.element_ty), mask=d < width)


_products, _bags = products, bags


def triton_products(x: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`x[t] . table[ids[t, j]]` of x `[T, d]` and ids `[T, k]`, in the dtype of x."""
    x, table, ids = (tensor.contiguous() for tensor in (x, table, ids))
    (tokens, count), width = ids.shape, x.shape[1]
    out = x.new_empty(ids.shape)
    with on_device(x):
        _products[(tokens, triton.cdiv(count, 4))](x, table, ids, out, count, width, BK=4, BD=256, num_warps=4)
    return out


def triton_bags(
    weights: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """`sum_i weights[i] table[ids[i]]` in the dtype of the table.

    Args:
        weights, ids: `[T, k]`, a bag a row; or with `starts` entries of any number.
        starts: `[bags + 1]`, where the entries of a bag begin, and their number. Default: None.
    """
    weights, table, ids = (tensor.contiguous() for tensor in (weights, table, ids))
    count = ids.shape[0] if starts is None else starts.numel() - 1
    out = table.new_empty(count, table.shape[1])
    with on_device(table):
        _bags[(count, triton.cdiv(table.shape[1], 128))](
            weights, table, ids, starts, out, ids.shape[-1], table.shape[1], BK=8, BD=128, num_warps=4
        )
    return out
