"""Attention to the keys of the largest bias among those so far: which are seen, and which need not be kept.

Key j is seen by token t when fewer than `window` keys up to t, of the same document, are better: of a larger bias, or
of the same and later. That number only grows with t, so a key that has left never returns, and what later tokens can
see is among the `window` best so far.
"""

from typing import NamedTuple

import torch

# A key of no document is seen by nobody; pads have documents of their own, below it.
NO_DOCUMENT = -1


class Keys(NamedTuple):
    """Keys and values of some tokens; heads may have kept different ones.

    Attributes:
        key: `[B, G, n, size]`.
        value: `[B, G, n, size]`.
        bias: `[B, G, n]`, or anything that orders the keys as it does.
        places: `[B, G, n]`, where along the sequence each stands, ascending from left to right.
        documents: `[B, G, n]`, never falling along the sequence but for pads, which have a negative number each.
    """

    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor
    places: torch.Tensor
    documents: torch.Tensor

    def then(self, other: "Keys") -> "Keys":
        """These, and behind them others."""
        pairs = zip(self, other, strict=True)
        return Keys(*(torch.cat(pair, dim=2) for pair in pairs))

    def take(self, indices: torch.Tensor) -> "Keys":
        """Of every head those of `indices` `[B, G, m]`."""
        key, value = (x.gather(2, indices[..., None].expand(*indices.shape, x.shape[-1])) for x in self[:2])
        return Keys(key, value, *(x.gather(2, indices) for x in self[2:]))


def token_documents(real: torch.Tensor | None, documents: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    """The document of each token, `[B, T]`, from a mask of real tokens and documents of that shape, or neither."""
    documents = torch.zeros_like(places) if documents is None else documents
    return documents if real is None else torch.where(real, documents, NO_DOCUMENT - 1 - places)


def seen(keys: Keys, tokens: int, window: int) -> torch.Tensor:
    """`[B, G, tokens, n]` bool: which keys each of the last `tokens` of them sees; a pad sees itself."""
    held = keys.bias.shape[2] - tokens
    ranks = _ranks(keys.bias)
    same = keys.documents[..., held:, None] == keys.documents[..., None, :]
    earlier = keys.places[..., held:, None] >= keys.places[..., None, :]
    better = same & (ranks[..., held:, None] > ranks[..., None, :])
    count = better.cumsum(dim=2, dtype=torch.int32)
    if held:
        count = count + _better_held(keys.documents, ranks, held)[..., None, :]
    return same & earlier & (count < window)


def best(keys: Keys, window: int, last: int = 0) -> Keys:
    """What tokens to come can see: the `window` best of the last document, and all of the `last` tokens.

    Their number is fixed by the sizes alone: where there are fewer, others stay and belong to no document.
    """
    size = min(keys.bias.shape[2], window + last)
    current = keys.documents.amax(2, keepdim=True).clamp(min=0)
    valid = keys.documents == current
    recent = keys.places > keys.places[..., -1:] - last
    ranks = torch.where(valid, _ranks(keys.bias), -1)
    indices = torch.where(recent, keys.bias.shape[2], ranks).topk(size, dim=2).indices.sort(dim=2).values
    documents = torch.where(valid, keys.documents, NO_DOCUMENT)
    return keys._replace(documents=documents).take(indices)


def _ranks(bias: torch.Tensor) -> torch.Tensor:
    """`[B, G, n]`: the place of each along its head's ascending biases, of equal ones the later higher."""
    order = bias.argsort(dim=2, stable=True)
    numbers = torch.arange(bias.shape[2], device=bias.device).expand_as(order)
    return torch.empty_like(order).scatter_(2, order, numbers)


def _better_held(documents: torch.Tensor, ranks: torch.Tensor, held: int) -> torch.Tensor:
    """`[B, G, n]`: how many of the first `held` keys, all of one document, are better than each of it."""
    document = documents[..., :held].amax(2, keepdim=True)
    counted = (documents[..., :held] == document) & (document != NO_DOCUMENT)
    ordered = torch.zeros_like(ranks).scatter(2, ranks[..., :held], counted.to(ranks.dtype))
    above = ordered.sum(2, keepdim=True) - ordered.cumsum(2)
    return torch.where(documents == document, above.gather(2, ranks), 0)
