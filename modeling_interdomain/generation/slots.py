"""Rows of one cache that requests occupy one after the other.

A request in flight is one row of all that the layers keep. A state has one size whatever it has read, so there is
nothing to page. Keys and values stand at the right end, as in a padded batch, and a mask hides what is to the left of
them; they take the room of the longest request in flight.
"""

from typing import Any

import torch
from torch.nn import functional as F

from ..model_cache.cache import InterdomainCache, kind_of


class Slots:
    """The cache of a batch of a model, whose rows begin and end at different times.

    Attributes:
        lengths: how many tokens each row has read.
    """

    def __init__(self, model: Any):
        self.model = model
        self.cache = InterdomainCache(model.config)
        self.kinds = [kind_of(layer) for layer in self.cache.layers]
        self.lengths: list[int] = []

    def change(self, kept: list[int], new: list[InterdomainCache]) -> None:
        """Hold only these rows, in this order, and behind them `new` ones, each in a cache that has read a prompt."""
        if not new and kept == list(range(len(self.lengths))):
            return
        parts = [(self._rows(kept), self._width())] if kept else []
        parts += [(cache.named_tensors(), int(cache.get_seq_length())) for cache in new]
        self.lengths = [self.lengths[row] for row in kept] + [width for _, width in parts[len(parts) - len(new) :]]
        self.cache = InterdomainCache(self.model.config)
        if parts:
            self.cache.restore(self._joined(parts, self._width()), self._width(), self.model)

    def step(self, tokens: list[int]) -> torch.Tensor:
        """Logits `[rows, vocab]` after one more token of each row."""
        ids, places = (torch.tensor(x, device=self.model.device)[:, None] for x in (tokens, self.lengths))
        inputs = {"attention_mask": self._mask(places), "position_ids": places, "past_key_values": self.cache}
        logits = self.model(ids, use_cache=True, **inputs).logits[:, -1]
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    def take(self, row: int) -> dict[str, torch.Tensor]:
        """The `named_tensors` of a cache of this row alone."""
        return self._joined([(self._rows([row]), self._width())], self.lengths[row])

    def _width(self) -> int:
        return max(self.lengths, default=0)

    def _mask(self, places: torch.Tensor) -> torch.Tensor | None:
        """`[rows, width + 1]`, where there are keys to hide."""
        width = self._width()
        if "keys_values" not in self.kinds or min(self.lengths) == width:
            return None
        return (torch.arange(width + 1, device=places.device) >= width - places).long()

    def _rows(self, rows: list[int]) -> dict[str, torch.Tensor]:
        return {name: x[rows] for name, x in self.cache.named_tensors().items()}

    def _joined(self, parts: list[tuple[dict[str, torch.Tensor], int]], width: int) -> dict[str, torch.Tensor]:
        """The rows of several caches, each given with its width, as rows of one cache of this width."""
        joined = {}
        for name in parts[0][0]:
            tensors = [tensors[name] for tensors, _ in parts]
            layer, _, what = name.partition(".")
            if self.kinds[int(layer)] == "keys_values":
                tensors = [_at_the_right(x, width) for x in tensors]
            elif self.kinds[int(layer)] == "window":
                from ..ops.common.window import NO_DOCUMENT

                if what == "places":  # along this cache, whose next tokens stand at its width
                    tensors = [x + width - before for x, (_, before) in zip(tensors, parts, strict=True)]
                count = max(x.shape[2] for x in tensors)
                tensors = [_at_the_right(x, count, NO_DOCUMENT if what == "documents" else 0) for x in tensors]
            joined[name] = torch.cat(tensors)
        return joined


def _at_the_right(x: torch.Tensor, count: int, fill: int = 0) -> torch.Tensor:
    """`[B, G, count, ...]`: the last `count` tokens, padded on the left with what the mask hides."""
    return F.pad(x, (*(0, 0) * (x.ndim - 3), count - x.shape[2], 0), value=fill)
