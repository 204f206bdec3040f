"""Sparse attention by its definition: the times at which keys leave the sets, a mask of all pairs, one softmax.

The pattern needs a few integers for each key (HAX, arXiv 2507.00449, eqs. 8, 9, 13 and 19, in another form): key j is
among the best until `e_j`, the first query by whose time enough keys beat it, and among the latest of its bin until
`l_j`, the arrival of the last of enough later ones. Query i sees it when

    j <= i  and  (i < e_j  or, for any of the parts,  bin of query i = bin of key j and i < l_j).
"""

import torch

from .stream import Bins, Stream, heads_first


def dense(stream: Stream) -> torch.Tensor:
    """`[B, T, S, D]`; rows that see no key are zero."""
    query, key, value = map(heads_first, (stream.query, stream.key, stream.value))
    seen = visible(stream)
    logits = (query @ key.mT).masked_fill(~seen, torch.finfo(query.dtype).min)
    weights = logits.softmax(dim=-1).masked_fill(~seen, 0)
    return (weights @ value).unflatten(0, (stream.query.shape[0], -1)).transpose(1, 2)


def visible(stream: Stream) -> torch.Tensor:
    """`[N, T, L]` bool: which keys a query sees."""
    length = stream.key.shape[1]
    j = torch.arange(length, device=stream.key.device)
    i = j[stream.past :, None]
    seen = j.new_zeros(stream.places.shape[0], length - stream.past, length, dtype=torch.bool)
    if stream.scores is not None:
        seen = i < selection_expiry(stream)[:, None]
    for part in stream.bins:
        same = (part.query[..., None] == part.key[:, None]) & (part.key >= 0)[:, None]
        seen = seen | (same & (i < bin_expiry(part, stream)[:, None]))
    return seen & (j <= i)


def selection_expiry(stream: Stream) -> torch.Tensor:
    """`[N, L]`, e_j; 0 for keys that cannot be selected, L for those that are never beaten."""
    scores, length = stream.scores, stream.key.shape[1]
    x, rival = scores[..., None], scores[:, None]
    j = torch.arange(length, device=scores.device)
    beaten = (rival > x) | ((rival == x) & (j < j[:, None]))
    if stream.ends is not None:
        beaten = beaten & (stream.ends == stream.ends[:, None])
    beaters = beaten.cumsum(-1, dtype=torch.int32)  # by time; a rival that comes first beats from the start
    expiry = (beaters < stream.selected_keys).sum(-1)
    return _within(expiry, stream).masked_fill(scores == -torch.inf, 0)


def bin_expiry(part: Bins, stream: Stream) -> torch.Tensor:
    """`[N, L]`, l_j; L for keys that never leave."""
    j = torch.arange(stream.key.shape[1], device=part.key.device)
    later = (part.key[..., None] == part.key[:, None]) & (j > j[:, None])
    if stream.ends is not None:
        later = later & (stream.ends == stream.ends[:, None])
    return _within((later.cumsum(-1, dtype=torch.int32) < part.keys).sum(-1), stream)


def _within(expiry: torch.Tensor, stream: Stream) -> torch.Tensor:
    """No key outlives its document."""
    return expiry if stream.ends is None else torch.minimum(expiry, stream.ends)
