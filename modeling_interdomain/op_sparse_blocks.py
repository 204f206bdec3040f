"""Sparse attention in blocks: nowhere are all pairs of tokens formed, nor a query's keys gathered for it alone.

Every set is a pass of its own over blocks of C queries and tiles of W keys, and no key counts in two of them; sums of
several passes add up once they have the same maximum. The best keys: a block sees those before it, and its own. The
latest of a bin: sorted by bin, the keys of a query lie side by side, and those of a block in a few tiles, at most
k / W + 2 a block and one for every tile of keys, whatever the bins.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .op_common import without_autocast
from .op_sparse_expiry import Selection, selection
from .op_sparse_passes import BLOCK, HIDDEN, Pass, Run, passes_of, tokens_at_once
from .op_sparse_stream import Stream

# Tokens of heads that are worked on together: memory of this size is used again, and needs no new pages.
_TOKENS = 1 << 15

# Some of the heads, and their passes.
Part = tuple[slice, list[Pass]]


def blocks(stream: Stream) -> torch.Tensor:
    """`[N, T, D]`; rows that see no key are zero."""
    best = None if stream.scores is None else selection(stream, BLOCK)
    # Powers of 2, because those of e take many times as long on a CPU where nothing is left of them.
    inputs = stream.query * math.log2(math.e), stream.key, stream.value
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if differentiated and not torch.compiler.is_compiling():
        output: Any = _Attention.apply(*inputs, list(_parts(stream, best)))
    else:
        output, _ = _attend(*inputs, _parts(stream, best))
    return output


def _parts(stream: Stream, best: Selection | None) -> Iterator[Part]:
    heads, length = stream.query.shape[:2]
    step = heads if torch.compiler.is_compiling() else max(1, _TOKENS // length)
    for start in range(0, heads, step):
        part = slice(start, start + step)
        yield part, passes_of(stream.of_heads(part), None if best is None else best.of_heads(part))


class _Attention(torch.autograd.Function):
    """Keeps the logarithms of the sums, and forms the weights again backwards."""

    @staticmethod
    def forward(ctx, query, key, value, parts):
        output, log_sums = _attend(query, key, value, parts)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.parts = parts
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        query, key, value, output, log_sums = ctx.saved_tensors
        dots = (grad * output).sum(-1)
        gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        with without_autocast(query.device):
            for part, passes in ctx.parts:
                tensors = _of_heads(part, query, key, value, grad, dots, log_sums)
                into = _of_heads(part, *gradients)
                for one in passes:
                    for run in one.runs:
                        _add_gradients(one, run, *tensors, into)
        of_query, of_key, of_value = gradients
        return of_query.mul_(math.log(2)), of_key.mul_(math.log(2)), of_value, None


def _of_heads(part: slice, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Of `[N, T, ...]` those heads, one after the other."""
    return [x[part].flatten(0, 1) for x in tensors]


def _attend(query, key, value, parts: Iterable[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[N, T, D]`, and the logarithm of the sum of every row, infinite where there is nothing to sum."""
    output, log_sums = value.new_empty(*query.shape[:2], value.shape[2]), value.new_empty(query.shape[:2])
    for part, passes in parts:
        inputs, (into, logarithms) = _of_heads(part, query, key, value), _of_heads(part, output, log_sums)
        sums = [_sums(one, *inputs) for one in passes]
        if torch.compiler.is_compiling():  # a number of steps is fixed in a graph, and with it the length
            into[:], logarithms[:] = _merged(
                [_in_order(one, x, slice(None)) for one, x in zip(passes, sums, strict=True)]
            )
            continue
        step = tokens_at_once(value)
        for start in range(0, len(into), step):
            some = slice(start, min(start + step, len(into)))
            merged = _merged([_in_order(one, x, some) for one, x in zip(passes, sums, strict=True)])
            into[some], logarithms[some] = merged
    return output, log_sums


def _in_order(one: Pass, sums: tuple[torch.Tensor, ...], part: slice) -> list[torch.Tensor]:
    return [x[part] if one.places is None else x.index_select(0, one.places[part]) for x in sums]


def _merged(sums: list[list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    most = sums[0][0]
    for other, *_ in sums[1:]:
        most = torch.maximum(most, other)
    shares = [(m - most).exp2() for m, _, _ in sums]
    total = torch.stack([share * s for share, (_, s, _) in zip(shares, sums, strict=True)]).sum(0)
    empty: torch.Tensor = total == 0
    total = total.masked_fill(empty, 1)
    output = sums[0][2] * (shares[0] / total)[:, None]
    for share, (_, _, more) in zip(shares[1:], sums[1:], strict=True):
        output = output.addcmul(more, (share / total)[:, None])
    return output, (most + total.log2()).masked_fill(empty, torch.inf)


def _sums(one: Pass, query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In the order of the places: the largest logit, and over the keys the sum of the weights relative to it and that
    of the weighted values."""
    shape = one.queries.shape
    most, total = query.new_empty(shape), query.new_zeros(shape)
    output = (value.new_empty if one.blocks is None else value.new_zeros)((*shape, value.shape[1]))
    for run in one.runs:
        block, keys = one.block_of(run), one.keys[run.rows]
        asked = _rows(query, one.queries[run.blocks])
        logits = one.hide(torch.bmm(asked if block is None else _rows(asked, block), _rows(key, keys).mT), run)
        largest = logits.detach().amax(-1)
        if block is not None:
            index = block[:, None].expand_as(largest)
            largest = largest.new_full(asked.shape[:2], HIDDEN).scatter_reduce_(0, index, largest, "amax")
        largest = largest.clamp(min=HIDDEN)
        weights = logits.sub_((largest if block is None else _rows(largest, block))[..., None]).exp2_()
        most[run.blocks] = largest
        sums, values = weights.sum(-1), torch.bmm(weights, _rows(value, keys))
        if block is None:
            total[run.blocks], output[run.blocks] = sums, values
        else:
            total[run.blocks].index_add_(0, block, sums)
            output[run.blocks].index_add_(0, block, values)
    return most.flatten(), total.flatten(), output.flatten(0, 1)


def _add_gradients(one: Pass, run: Run, query, key, value, grad, dots, log_sums, gradients) -> None:
    of_query, of_key, of_value = gradients
    block, tokens, keys = one.block_of(run), one.queries[run.blocks], one.keys[run.rows]
    rows = [_rows(x, tokens) for x in (query, grad, dots, log_sums)]
    asked, grads, dot, log_sum = rows if block is None else [_rows(x, block) for x in rows]
    k, v = _rows(key, keys), _rows(value, keys)
    weights = one.hide(asked @ k.mT, run).sub_(log_sum[..., None]).exp2_()
    of_value.index_add_(0, keys.flatten(), (weights.mT @ grads).flatten(0, 1))
    of_logits = (grads @ v.mT).sub_(dot[..., None]).mul_(weights)
    of_key.index_add_(0, keys.flatten(), (of_logits.mT @ asked).flatten(0, 1))
    back = of_logits @ k
    if block is not None:
        back = back.new_zeros(rows[0].shape).index_add_(0, block, back)
    # Places without a query repeat one, and see nothing.
    of_query.index_add_(0, tokens.flatten(), back.flatten(0, 1))


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])
