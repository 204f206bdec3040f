"""The times at which keys leave the sets, found without comparing all pairs of keys."""

from typing import NamedTuple

import torch

from .stream import Bins, Stream


class Selection(NamedTuple):
    """The best keys in time.

    Attributes:
        expiry: `[N, L + 1]`, e_j; 0 for what cannot be selected and for the key L, which stands for none.
        best: `[N, chunks, k]`, the best keys before each chunk of queries, L for none.
    """

    expiry: torch.Tensor
    best: torch.Tensor


def selection(stream: Stream, size: int) -> Selection:
    """The best keys before chunks of `size` queries.

    Once there are k keys, every token drives out the worst of these and itself. Picture k cells in a row: each holds
    the best key that has come to it and hands on the other. A running minimum of ranks does a cell for all tokens at
    once; what the last cell hands on leaves the set.
    """
    heads, length = stream.scores.shape
    k, past = stream.selected_keys, stream.past
    order = _order(stream)
    times = torch.arange(length, device=order.device).expand_as(order)
    rank = torch.empty_like(order, dtype=torch.int32).scatter_(1, order, times.int())
    chunks, best = -(-(length - past) // size), []
    coming = torch.cat([rank.new_full((heads, k), length), rank], dim=1)
    for cell in range(k):
        held = coming.cummin(1).values
        best.append(held[:, past + k - 1 - cell :: size][:, :chunks])
        coming = torch.maximum(held[:, :-1], coming[:, 1:])
    order = torch.cat([order, order.new_full((heads, 1), length)], dim=1)
    expiry = torch.full_like(order, length).scatter_(1, order.gather(1, coming.long()), times)
    if stream.ends is not None:
        expiry[:, :length] = torch.minimum(expiry[:, :length], stream.ends)
    expiry[:, :length].masked_fill_(stream.scores == -torch.inf, 0)
    expiry[:, -1] = 0
    ranks = torch.stack(best, dim=2).long()
    return Selection(expiry, order.gather(1, ranks.flatten(1)).view_as(ranks))


def _order(stream: Stream) -> torch.Tensor:
    """The keys by rank, the best first: later documents before earlier ones, earlier keys before equal later ones."""
    order = stream.scores.argsort(dim=1, descending=True, stable=True)
    if stream.ends is None:
        return order
    return order.gather(1, stream.ends[order].argsort(dim=1, descending=True, stable=True))


class Sorted(NamedTuple):
    """Queries and keys sorted by head, document, bin and arrival, so that the keys of a query lie side by side, and so
    do the queries that see a key.

    Attributes:
        queries: `[N T]`, the queries in this order.
        keys: `[N L + 1]`, the keys in this order, and one more that no query sees.
        arrives: `[N L]`, the first sorted query of its bin that is not before the sorted key.
        first, last: `[N L + 1]`, the range of sorted queries that see it, without `last`.
        query_groups, key_groups: `[N T]` and `[N L]`, a number for each head, document and bin, unsorted.
        expiry: `[N L]`, l_j of every key, unsorted.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    arrives: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    query_groups: torch.Tensor
    key_groups: torch.Tensor
    expiry: torch.Tensor


def by_bins(part: Bins, stream: Stream, best: Selection | None) -> Sorted:
    """The queries and keys of a part; as long as a key is among the best, it counts there and not here."""
    length, asking = part.key.shape[1], part.query.shape[1]
    key_groups, query_groups = _groups(part, stream)
    # Stable: within a bin by arrival.
    groups, keys = key_groups.sort(stable=True)
    found, queries = query_groups.sort(stable=True)
    asked, time = found * length + queries % asking + stream.past, keys % length
    start = groups * length
    arrives, end = torch.searchsorted(asked, start + time), torch.searchsorted(asked, start + length)
    same = groups[part.keys :] == groups[: -part.keys]
    leaves, last = torch.full_like(time, length), end
    leaves[: -part.keys] = torch.where(same, time[part.keys :], length)
    last[: -part.keys] = torch.where(same, arrives[part.keys :], last[: -part.keys])
    first = arrives
    if best is not None:
        until = best.expiry[:, :length].reshape(-1)[keys]
        first = torch.searchsorted(asked, start + torch.maximum(time, until))
    expiry = torch.empty_like(leaves).scatter_(0, keys, leaves)
    keys, first, last = (torch.cat([x, x.new_zeros(1)]) for x in (keys, first, last))
    return Sorted(queries, keys, arrives, first, last, query_groups, key_groups, expiry)


def _groups(part: Bins, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
    """The groups of keys `[N L]` and queries `[N T]`; those without a bin have groups that match no other."""
    heads, length = part.key.shape
    scope = torch.arange(heads, device=part.key.device)[:, None]
    if stream.ends is not None:
        scope = scope * (length + 1) + stream.ends
    key_scope, query_scope = scope, scope if stream.ends is None else scope[:, stream.past :]
    keys = torch.where(part.key < 0, part.number, part.key) + key_scope * (part.number + 2)
    queries = torch.where(part.query < 0, part.number + 1, part.query) + query_scope * (part.number + 2)
    return keys.flatten(), queries.flatten()
