"""Attention to the `window` keys of the largest bias so far: which keys a token sees, and which a cache may drop.

Key j is seen by token t when fewer than `window` keys up to t, of the same document, are better: of a larger bias, or
of the same and later. That number only grows with t, so a key that has left never returns, and what later tokens can
see is among the `window` best so far.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

# The bits of a rank in a compiled graph: up to a million keys.
_MOST_BITS = 20
# The document of keys that no token sees; pads have numbers below it, each its own.
NO_DOCUMENT = -1


class Keys(NamedTuple):
    """Keys and values of some tokens; heads may have kept different ones.

    Attributes:
        key: `[B, G, n, size]`.
        value: `[B, G, n, size]`.
        bias: `[B, G, n]`, or anything that orders the keys as it does.
        places: `[B, G, n]`, the position of each in the sequence, ascending.
        documents: `[B, G, n]`, never falling along the sequence, but for the negative numbers of pads.
    """

    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor
    places: torch.Tensor
    documents: torch.Tensor

    def then(self, other: "Keys") -> "Keys":
        """These with others behind them."""
        pairs = zip(self, other, strict=True)
        return Keys(*(torch.cat(pair, dim=2) for pair in pairs))

    def take(self, indices: torch.Tensor) -> "Keys":
        """The keys at `indices` `[B, G, m]` of each head."""
        rows, count = indices.shape[0] * indices.shape[1], self.bias.shape[2]
        heads = torch.arange(rows, device=indices.device).view(*indices.shape[:2], 1)
        places = (heads * count + indices).flatten()
        return Keys(*(x.flatten(0, 2).index_select(0, places).unflatten(0, indices.shape) for x in self))


def token_documents(real: torch.Tensor | None, documents: torch.Tensor | None, places: torch.Tensor) -> torch.Tensor:
    """The document of each token, `[B, T]`, from a mask of real tokens and documents of that shape, or neither."""
    documents = torch.zeros_like(places) if documents is None else documents
    return documents if real is None else torch.where(real, documents, NO_DOCUMENT - 1 - places)


def seen(keys: Keys, tokens: int, window: int) -> torch.Tensor:
    """`[B, G, tokens, n]` bool: which keys each of the last `tokens` of them sees; a pad sees itself."""
    held, ranks = keys.bias.shape[2] - tokens, _ranks(keys)
    documents = keys.documents[..., held:, None]
    same = documents == keys.documents[..., None, :]
    earlier = keys.places[..., held:, None] >= keys.places[..., None, :]
    begin = _begins(keys.documents)[..., held:]
    end = torch.arange(held + 1, held + 1 + tokens, device=begin.device).expand_as(begin)
    lowest = _largest_of(ranks, begin, end, (end - begin).clamp(max=window) - 1)[..., None]
    return same & earlier & ((ranks[..., None, :] >= lowest) | (documents < NO_DOCUMENT))


def best(keys: Keys, window: int, last: int = 0) -> Keys:
    """What later tokens can see: the `window` best keys of the last document, and those of the `last` tokens.

    Their number depends on sizes alone: where there are fewer, other keys fill up and belong to no document.
    """
    count = keys.bias.shape[2]
    size = min(count, window + last)
    current = keys.documents.amax(2, keepdim=True).clamp(min=0)
    valid = keys.documents == current
    recent = keys.places > keys.places[..., -1:] - last
    order = (_ranks(keys) + count * valid + 2 * count * recent).argsort(dim=2)
    indices = order[..., count - size :].sort(dim=2).values
    return keys._replace(documents=torch.where(valid, keys.documents, NO_DOCUMENT)).take(indices)


def _ranks(keys: Keys) -> torch.Tensor:
    """`[B, G, n]`: the rank of each key by its bias within its head; of equal ones the later is higher, pads lowest."""
    order = torch.where(keys.documents < 0, -torch.inf, keys.bias).argsort(dim=2, stable=True)
    numbers = torch.arange(keys.bias.shape[2], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(2, order, numbers)


def _begins(documents: torch.Tensor) -> torch.Tensor:
    """`[B, G, n]`: where the document of each key, or of the last one before a pad, begins."""
    running = documents.cummax(dim=2).values
    starts = F.pad(running.diff(dim=2) != 0, (1, 0))
    numbers = torch.arange(documents.shape[2], device=documents.device)
    return torch.where(starts, numbers, 0).cummax(dim=2).values


def _largest_of(ranks: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The k-th largest (from 0) of `ranks[begin:end]`, for all of `[B, G, T]` at once, of ranks `[B, G, n]` below n.

    A wavelet matrix (Claude and Navarro, 2012): bit by bit, from the highest, ranks are parted stably by it, and of the
    range we follow the half that holds the answer. O((n + T) log n), where comparing all pairs would be O(n T).
    """
    count = ranks.shape[2]
    numbers = torch.arange(count, device=ranks.device)
    if begin.shape[2] == 1:  # a step of a decoder: one range
        inside = (numbers >= begin) & (numbers < end)
        return torch.where(inside, ranks, -1).sort(dim=2, descending=True).values.gather(2, k)
    found = torch.zeros_like(begin)
    # A graph holds for every length, so there the number of bits must not depend on it.
    for bit in reversed(range(_MOST_BITS if torch.compiler.is_compiling() else max(count - 1, 1).bit_length())):
        high = (ranks >> bit) & 1
        before = F.pad(high.cumsum(2), (1, 0))  # ones left of each place
        zeros = count - before[..., -1:]
        first, last = before.gather(2, begin), before.gather(2, end)
        above = last - first
        up = k < above
        found = found + (up.long() << bit)
        k = torch.where(up, k, k - above)
        begin, end = torch.where(up, zeros + first, begin - first), torch.where(up, zeros + last, end - last)
        left = before[..., :-1]
        ranks = torch.empty_like(ranks).scatter_(2, torch.where(high == 1, zeros + left, numbers - left), ranks)
    return found
