"""Sparse attention in blocks: nowhere are all pairs of tokens formed, nor a query's keys gathered for it alone.

Every set is a pass of its own over blocks of C queries and tiles of W keys, and no key counts in two of them; sums of
several passes add up once they have the same maximum. The best keys: a block sees those before it, and its own. The
latest of a bin: sorted by bin, the keys of a query lie side by side, and those of a block in a few tiles, at most
k / W + 2 a block and one for every tile of keys, whatever the bins.
"""

import math
from typing import Any

import torch

from .op_common import without_autocast
from .op_sparse_expiry import Selection, selection
from .op_sparse_passes import BLOCK, HIDDEN, Pass, Run, passes_of, tokens_at_once
from .op_sparse_stream import Stream

# Tokens of heads that are worked on together: memory of this size is used again, and needs no new pages.
_TOKENS = 1 << 17


def blocks(stream: Stream) -> torch.Tensor:
    """`[N, T, D]`; rows that see no key are zero."""
    best = None if stream.scores is None else selection(stream, BLOCK)
    heads, length = stream.query.shape[:2]
    step = heads if torch.compiler.is_compiling() else max(1, _TOKENS // length)
    parts = [slice(start, start + step) for start in range(0, heads, step)]
    outputs = [_blocks(stream.of_heads(part), None if best is None else best.of_heads(part)) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _blocks(stream: Stream, best: Selection | None) -> torch.Tensor:
    passes = passes_of(stream, best)
    # Powers of 2, because those of e take many times as long on a CPU where nothing is left of them.
    query = stream.query * math.log2(math.e)
    inputs = query.flatten(0, 1), stream.key.flatten(0, 1), stream.value.flatten(0, 1)
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if differentiated and not torch.compiler.is_compiling():
        output: Any = _Attention.apply(*inputs, passes)
    else:
        output, _ = _attend(*inputs, passes)
    return output.view(*stream.query.shape[:2], -1)


class _Attention(torch.autograd.Function):
    """Keeps the logarithms of the sums, and forms the weights again backwards."""

    @staticmethod
    def forward(ctx, query, key, value, passes):
        output, log_sums = _attend(query, key, value, passes)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.passes = passes
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        query, key, value, output, log_sums = ctx.saved_tensors
        grad = grad.contiguous()
        gradients = tuple(torch.zeros_like(x) for x in (query, key, value))
        with without_autocast(query.device):
            dots = (grad * output).sum(-1)
            for one in ctx.passes:
                for run in one.runs:
                    _add_gradients(one, run, query, key, value, grad, dots, log_sums, gradients)
        of_query, of_key, of_value = gradients
        return of_query * math.log(2), of_key * math.log(2), of_value, None


def _attend(query, key, value, passes: list[Pass]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[N T, D]`, and the logarithm of the sum of every row, infinite where there is nothing to sum."""
    sums = [_sums(one, query, key, value) for one in passes]
    if torch.compiler.is_compiling():  # a number of parts is fixed in a graph, and with it the length
        return _merged([_in_order(one, x, slice(None)) for one, x in zip(passes, sums, strict=True)])
    tokens, step = query.shape[0], tokens_at_once(value)
    output, log_sums = value.new_empty(tokens, value.shape[1]), value.new_empty(tokens)
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        output[part], log_sums[part] = _merged([_in_order(one, x, part) for one, x in zip(passes, sums, strict=True)])
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
    output = value.new_zeros(*shape, value.shape[1])
    for run in one.runs:
        block, keys = one.block_of(run), one.keys[run.rows]
        asked = _rows(query, one.queries[run.blocks])
        logits = one.hide((asked if block is None else asked[block]) @ _rows(key, keys).mT, run)
        largest = logits.detach().amax(-1)
        if block is not None:
            index = block[:, None].expand_as(largest)
            largest = largest.new_full(asked.shape[:2], HIDDEN).scatter_reduce_(0, index, largest, "amax")
        largest = largest.clamp(min=HIDDEN)
        weights = logits.sub_((largest if block is None else largest[block])[..., None]).exp2_()
        most[run.blocks] = largest
        if block is None:
            total[run.blocks], output[run.blocks] = weights.sum(-1), weights @ _rows(value, keys)
        else:
            total[run.blocks].index_add_(0, block, weights.sum(-1))
            output[run.blocks].index_add_(0, block, weights @ _rows(value, keys))
    return most.flatten(), total.flatten(), output.flatten(0, 1)


def _add_gradients(one: Pass, run: Run, query, key, value, grad, dots, log_sums, gradients) -> None:
    of_query, of_key, of_value = gradients
    block, tokens, keys = one.block_of(run), one.queries[run.blocks], one.keys[run.rows]
    rows = [_rows(x, tokens) for x in (query, grad, dots, log_sums)]
    asked, grads, dot, log_sum = rows if block is None else [x[block] for x in rows]
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
