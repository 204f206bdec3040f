"""Sparse attention in blocks of C queries, without all pairs of tokens and without gathering keys for each query.

Every key counts in one set, so the sums of the sets add up. Of the best keys, a block sees those before it and its own.
Of the latest of a bin, with queries and keys sorted by bin, it sees a range of keys: k, and those that arrive in its
time.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch

from ..common.cpu import values_at_hand, wants_gradient, without_autocast
from ..common.once import differentiable_once
from .passes import HIDDEN, Run, ranges, rows_of, runs_of
from .stream import Stream

# Powers of logits up to this size neither overflow nor vanish. Beyond it, weights are relative to the largest logit of
# each query.
_SAFE = 40.0
# Rows that elementwise work takes at a time: new memory is dear on a CPU.
_PIECE = 1 << 13


def blocks(stream: Stream) -> torch.Tensor:
    """`[B, T, S, D]`; rows that see no key are zero."""
    runs = runs_of(stream)
    query, key, value = (x.flatten(0, 2) for x in (stream.query, stream.key, stream.value))
    differentiated = wants_gradient(query, key, value)
    # Compiled, and inside `torch.func`, PyTorch differentiates the sums itself, which keeps all weights.
    if differentiated and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
        output: Any = _Attention.apply(query, key, value, list(runs))
    else:
        output, *_ = _attend(query, key, value, runs)
    return output.unflatten(0, stream.query.shape[:3])


class _Attention(torch.autograd.Function):
    """Keeps the sums; backward forms the weights again."""

    @staticmethod
    def forward(ctx, query, key, value, runs):
        output, shares, most = _attend(query, key, value, runs)
        ctx.save_for_backward(query, key, value, output, shares, most)
        ctx.runs = runs
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx, saved, grad):
        query, key, value, output, shares, most = saved
        gradients = [torch.zeros_like(x) for x in (query, key, value)]
        with without_autocast(query.device):
            pieces = zip(*(x.split(_PIECE) for x in (grad, output)), strict=True)
            dots = torch.cat([(x * y).sum(1) for x, y in pieces])
            table = ranges(query)
            for run in ctx.runs:
                _add_gradients(run, table, query, key, value, grad, dots, shares, most, gradients)
        return *gradients, None


def _attend(query, key, value, runs: Iterable[Run]):
    """Output `[B T S, D]`; the inverse of the sum of weights `[B T S]`, 0 where there are none; and the logits to which
    the weights are relative, or None."""
    table, most = ranges(query), None
    if not (values_at_hand(query) and _small(query, key)):
        runs = list(runs)
        most = _largest(query.detach(), key.detach(), runs, table)
    output, total = value.new_zeros(len(query), value.shape[1]), value.new_zeros(len(query))
    for run in runs:
        weights = _weights(run, table, run.of_block(query), rows_of(key, run.keys), most)
        _add(run, total, weights.sum(1))
        _add(run, output, torch.bmm(weights.mT, rows_of(value, run.keys)))
    shares = total.where(total > 0, torch.inf).reciprocal_()
    return output.mul_(shares[:, None]), shares, most


def _small(query, key) -> bool:
    """Whether no logit can be above `_SAFE` or below `-_SAFE`."""
    query, key = (torch.linalg.vector_norm(x.detach(), dim=1).amax() for x in (query, key))
    return bool(query * key < _SAFE)


def _largest(query, key, runs: Iterable[Run], table) -> torch.Tensor:
    most = query.new_full(query.shape[:1], HIDDEN)
    for run in runs:
        largest = _logits(run, table, run.of_block(query), rows_of(key, run.keys)).amax(1)
        most.scatter_reduce_(0, run.asking().flatten(), largest.flatten(), "amax")
    return most


def _logits(run: Run, table, asked, found) -> torch.Tensor:
    """`[rows, W, C]` from queries `[rows, C, d]` and keys `[rows, W, d]`, for powers of 2: on a CPU, `exp` of
    very small logits takes many times as long."""
    return run.hidden(table).baddbmm_(found, asked.mT, alpha=math.log2(math.e))


def _weights(run: Run, table, asked, found, most) -> torch.Tensor:
    logits = _logits(run, table, asked, found)
    if most is not None:
        logits = logits.sub_(run.of_block(most)[:, None])
    return logits.exp2_()


def _add(run: Run, to: torch.Tensor, x: torch.Tensor) -> None:
    """Add x `[rows, C, ...]` to the rows of its queries in `[B T S, ...]`."""
    to.index_add_(0, run.asking().flatten(), x.flatten(0, 1))


def _add_gradients(run: Run, table, query, key, value, grad, dots, shares, most, gradients) -> None:
    of_query, of_key, of_value = gradients
    query, grad, dots, shares = map(run.of_block, (query, grad, dots, shares))
    keys = run.keys.flatten()
    key, value = rows_of(key, run.keys), rows_of(value, run.keys)
    weights = _weights(run, table, query, key, most).mul_(shares[:, None])
    of_value.index_add_(0, keys, torch.bmm(weights, grad).flatten(0, 1))
    of_logits = torch.bmm(value, grad.mT).sub_(dots[:, None]).mul_(weights)
    of_key.index_add_(0, keys, torch.bmm(of_logits, query).flatten(0, 1))
    _add(run, of_query, torch.bmm(of_logits.mT, key))
