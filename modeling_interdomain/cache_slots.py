"""Rows of one cache that requests occupy one after the other.

A request in flight is a row of fixed size, whatever it has read, so there is nothing to page: a new request is written
into a row that is free, and the others do not notice.
"""

import torch

from .cache_interdomain import InterdomainCache


class Slots:
    """The cache of a batch of `number` rows that begin and end at different times.

    For models all of whose layers keep a state (`layer_types` "linear_attention").
    """

    def __init__(self, number: int):
        self.number = number
        self.cache: InterdomainCache | None = None

    def admit(self, cache: InterdomainCache, row: int) -> None:
        """Copy a cache of one row, which has read a prompt, into a row here."""
        if self.cache is None:
            cache.batch_repeat_interleave(self.number)
            self.cache = cache
            return
        for mine, theirs in zip(self.cache.layers, cache.layers, strict=True):
            for held, new in zip(mine.held(), theirs.held(), strict=True):
                held[row].copy_(new[0])

    def keep(self, rows: list[int]) -> None:
        """Only these rows, in this order."""
        if self.cache is not None and len(rows) < self.number:
            self.cache.batch_select_indices(torch.tensor(rows))
            self.number = len(rows)
