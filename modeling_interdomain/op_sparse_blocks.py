"""Sparse attention in blocks: nowhere are all pairs of tokens formed, nor a query's keys gathered for it alone.

Every set is a pass of its own over blocks of C queries and tiles of W keys, and no key counts in two of them; sums of
several passes add up once they have the same maximum. The best keys: a block sees those before it, and its own. The
latest of a bin: sorted by bin, the keys of a query lie side by side, and those of a block in a few tiles, at most
k / W + 2 a block and one for every tile of keys, whatever the bins.
"""

from typing import Any

import torch

from .op_sparse_passes import Pass, passes_of
from .op_sparse_stream import Stream


def blocks(stream: Stream) -> torch.Tensor:
    """`[N, T, D]`; rows that see no key are zero."""
    passes = passes_of(stream)
    inputs = stream.query.flatten(0, 1), stream.key.flatten(0, 1), stream.value.flatten(0, 1)
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
        dots = (grad * output).sum(-1)
        gradients = tuple(torch.zeros_like(x) for x in (query, key, value))
        for one in ctx.passes:
            _add_gradients(one, query, key, value, grad, dots, log_sums, gradients)
        return *gradients, None


def _attend(query, key, value, passes: list[Pass]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[N T, D]`, and the logarithm of the sum of every row, infinite where there is nothing to sum."""
    sums = [_sums(one, query, key, value) for one in passes]
    if len(sums) == 1:
        (most, total, output) = sums[0]
        most = most.clamp(min=torch.finfo(most.dtype).min)
    else:
        most = torch.stack([m for m, _, _ in sums]).amax(0).clamp(min=torch.finfo(query.dtype).min)
        shares = [(m - most).exp() for m, _, _ in sums]
        total = sum(share * s for share, (_, s, _) in zip(shares, sums, strict=True))
        output = sum(share[:, None] * o for share, (_, _, o) in zip(shares, sums, strict=True))
    empty = total == 0
    total = total.masked_fill(empty, 1)
    return output / total[:, None], torch.where(empty, torch.inf, most + total.log())


def _sums(one: Pass, query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The largest logit of each row, and over its keys the sum of the weights relative to it, and of the values."""
    parts = []
    for run in one.runs:
        block = one.block_of(run)
        count = run.blocks.stop - run.blocks.start
        asked = _rows(query, one.queries[run.blocks])
        keys = one.keys[run.rows]
        logits = (asked if block is None else asked[block]) @ _rows(key, keys).mT
        logits = logits.masked_fill_(~one.mask(run), -torch.inf)
        most = logits.detach().amax(-1)
        if block is not None:
            index = block[:, None].expand_as(most)
            most = most.new_full((count, most.shape[1]), -torch.inf).scatter_reduce_(0, index, most, "amax")
        floor = most.clamp(min=torch.finfo(most.dtype).min)
        weights = (logits - (floor if block is None else floor[block])[..., None]).exp_()
        total, output = weights.sum(-1), weights @ _rows(value, keys)
        if block is not None:
            total = total.new_zeros(most.shape).index_add(0, block, total)
            output = output.new_zeros(*most.shape, output.shape[2]).index_add(0, block, output)
        parts.append((most.flatten(), total.flatten(), output.flatten(0, 1)))
    joined = parts[0] if len(parts) == 1 else [torch.cat(x) for x in zip(*parts, strict=True)]
    most, total, output = (x if one.places is None else x.index_select(0, one.places) for x in joined)
    return most, total, output


def _add_gradients(one: Pass, query, key, value, grad, dots, log_sums, gradients) -> None:
    of_query, of_key, of_value = gradients
    for run in one.runs:
        block = one.block_of(run)
        tokens, keys = one.queries[run.blocks], one.keys[run.rows]
        rows = [_rows(x, tokens) for x in (query, grad, dots, log_sums)]
        asked, grads, dot, log_sum = rows if block is None else [x[block] for x in rows]
        k, v = _rows(key, keys), _rows(value, keys)
        weights = asked @ k.mT
        weights -= log_sum[..., None]
        weights = weights.exp_().masked_fill_(~one.mask(run), 0)
        of_value.index_add_(0, keys.flatten(), (weights.mT @ grads).flatten(0, 1))
        of_logits = grads @ v.mT
        of_logits -= dot[..., None]
        of_logits *= weights
        of_key.index_add_(0, keys.flatten(), (of_logits.mT @ asked).flatten(0, 1))
        back = of_logits @ k
        if block is not None:
            back = back.new_zeros(rows[0].shape).index_add_(0, block, back)
        # Places without a query repeat one, and see nothing.
        of_query.index_add_(0, tokens.flatten(), back.flatten(0, 1))


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])
