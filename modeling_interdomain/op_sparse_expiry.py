"""The times at which keys leave the sets, without comparing all pairs of keys."""

from typing import NamedTuple

import torch

from .op_sparse_stream import Bins, Stream

# Comparisons of one run of chunks: what is worked on should stay in a cache.
_COMPARISONS = {"cpu": 1 << 20, "other": 1 << 27}


class Selection(NamedTuple):
    """The best keys in time.

    Attributes:
        expiry: `[N, L + 1]`, e_j; 0 for what cannot be selected and for the key L, which stands for none.
        best: `[N, chunks, k]`, the best keys before each chunk of queries, L for none.
    """

    expiry: torch.Tensor
    best: torch.Tensor

    def of_heads(self, part: slice) -> "Selection":
        return Selection(self.expiry[part], self.best[part])


def selection(stream: Stream, size: int) -> Selection:
    """For chunks of `size` queries. What can expire in a chunk is its own keys and the best ones before it."""
    length, k = stream.scores.shape[1], stream.selected_keys
    order = _order(stream)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(length, device=order.device).expand_as(order))
    own = _padded(rank[:, stream.past :], size, length + 1)
    own = own.view(len(own), own.shape[1] // size, size)
    best = _best_before(rank[:, : stream.past], own, k, length)
    expiry = rank.new_full((rank.shape[0], length + 1), length)
    order = _extended(order, 2, length)
    keys = order.gather(1, torch.cat([best, own], dim=2).flatten(1))
    starts = stream.past + size * torch.arange(own.shape[1], device=own.device)[:, None]
    leaves = _leaving(own, best, k)
    leaves = torch.where(leaves < size, starts + leaves, length)
    expiry.scatter_reduce_(1, keys, leaves.flatten(1), "amin")
    if stream.ends is not None:
        expiry[:, :length] = torch.minimum(expiry[:, :length], stream.ends)
    expiry[:, :length].masked_fill_(stream.scores == -torch.inf, 0)
    expiry[:, -1] = 0
    return Selection(expiry, order.gather(1, best.flatten(1)).view_as(best))


def _order(stream: Stream) -> torch.Tensor:
    """The keys by rank, the best first: later documents before earlier ones, earlier keys before equal later ones."""
    order = stream.scores.argsort(dim=1, descending=True, stable=True)
    if stream.ends is None:
        return order
    return order.gather(1, stream.ends[order].argsort(dim=1, descending=True, stable=True))


def _best_before(past: torch.Tensor, own: torch.Tensor, k: int, none: int) -> torch.Tensor:
    """The k smallest ranks before each chunk, ascending: running minima, in as many steps as the number has bits."""
    chunks = own.shape[1]
    first = _smallest(past, k, none)[:, None]
    if chunks == 1:
        return first
    if own.device.type == "cpu" and not torch.compiler.is_compiling():
        # One chunk after the other: the least work.
        found = [first[:, 0]]
        for ranks in own[:, :-1].unbind(1):
            found.append(_smallest(torch.cat([found[-1], ranks], dim=1), k, none))
        return torch.stack(found, dim=1)
    lists = torch.cat([first, _smallest(own[:, :-1], k, none)], dim=1)
    step = 1
    while step < chunks:
        joined = torch.cat([lists[:, :-step], lists[:, step:]], dim=2)
        lists = torch.cat([lists[:, :step], _smallest(joined, k, none)], dim=1)
        step *= 2
    return lists


def _smallest(ranks: torch.Tensor, k: int, none: int) -> torch.Tensor:
    """The k smallest of the last axis, ascending."""
    if ranks.shape[-1] < k:
        ranks = _extended(ranks, k - ranks.shape[-1], none)
    return ranks.topk(k, dim=-1, largest=False, sorted=True).values.clamp(max=none)


def _leaving(own: torch.Tensor, best: torch.Tensor, k: int) -> torch.Tensor:
    """By which token of its chunk each of the best keys and of the chunk's own leaves, `[N, chunks, k + size]`."""
    size = own.shape[2]
    better = torch.cat([torch.arange(k, device=own.device).expand_as(best), torch.searchsorted(best, own)], dim=2)
    room = (k - better).flatten(0, 1).float()
    candidates = torch.cat([best, own], dim=2).flatten(0, 1).float()  # ranks are small enough to be exact
    rivals = own.flatten(0, 1).float()
    until = torch.ones(size, size, device=own.device).triu()
    rows = max(1, _COMPARISONS["cpu" if own.device.type == "cpu" else "other"] // (size * candidates.shape[1]))
    leaves = []
    for rival, candidate, free in zip(rivals.split(rows), candidates.split(rows), room.split(rows), strict=True):
        beaten = (candidate[..., None] - rival[:, None]).clamp_(0, 1)  # of whole numbers: 1 where the first is larger
        leaves.append((free[..., None] - beaten @ until).clamp_(0, 1).sum(-1))
    return torch.cat(leaves).long().unflatten(0, own.shape[:2])


def _padded(x: torch.Tensor, size: int, value) -> torch.Tensor:
    """To a whole number of chunks, written so that a graph of any length knows it to be one."""
    return _extended(x, -(-x.shape[1] // size) * size - x.shape[1], value)


def _extended(x: torch.Tensor, count: int, value) -> torch.Tensor:
    """With `count` more on the last axis. A pad of the library takes no length for its value: a graph would fix it."""
    return torch.cat([x, x.new_full((*x.shape[:-1], count), value)], dim=-1)


class Sorted(NamedTuple):
    """Queries and keys by document, bin and arrival: the keys of a query lie side by side.

    Attributes:
        queries: `[N, T]`, the queries in this order; those without a bin come last.
        keys: `[N, L]`, the keys likewise.
        first, last: `[N, T]`, the range of sorted keys that each sorted query sees, without `last`.
        expiry: `[N, L]`, l_j of every key, unsorted.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    expiry: torch.Tensor


def by_bins(part: Bins, stream: Stream) -> Sorted:
    length, past = stream.key.shape[1], stream.past
    j = torch.arange(length, device=part.key.device)
    documents = torch.zeros_like(j) if stream.ends is None else stream.ends
    end = (length + 1) * part.number * length
    keys = torch.where(part.key < 0, end, (part.key + documents * part.number) * length) + j
    asked = (part.query + documents[past:] * part.number) * length
    queries = torch.where(part.query < 0, end, asked) + j[past:]
    keys, queries = keys.sort(dim=1).values, queries.sort(dim=1).values
    # What is in no bin lies behind all bins, and sees nothing.
    last = torch.searchsorted(keys, queries, right=True)
    start = torch.searchsorted(keys, queries - queries % length)
    first = torch.maximum(start, last - part.keys)
    real = torch.searchsorted(keys, keys.new_full((len(keys), 1), end))
    idle = queries >= end
    first, last = torch.where(idle, real, first), torch.where(idle, real, last)
    key_order = keys % length
    return Sorted(queries % length - past, key_order, first, last, _bin_expiry(keys, key_order, part, stream))


def _bin_expiry(keys: torch.Tensor, order: torch.Tensor, part: Bins, stream: Stream) -> torch.Tensor:
    length = keys.shape[1]
    expiry = torch.full_like(order, length)
    if part.keys < length:
        same = keys[:, part.keys :] // length == keys[:, : -part.keys] // length
        expiry[:, : -part.keys] = torch.where(same, order[:, part.keys :], length)
    expiry = torch.empty_like(order).scatter_(1, order, expiry).masked_fill_(part.key < 0, 0)
    return expiry if stream.ends is None else torch.minimum(expiry, stream.ends)
