"""What a configuration says of the mask that fades keys of attention layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...layers.configuration import ModelFields


@dataclass(kw_only=True, repr=False)
class DynamicMaskFields(ModelFields):
    """Fields of the dynamic mask of "softmax" and "inner_function" layers.

    Args:
        dynamic_mask: what fades keys in "softmax" and "inner_function" layers ("Wonderful Matrices"): "position", a
            learned number a head and position, from 1, that multiplies the value; "hard", the same rounded to 0 or 1,
            with the gradient straight through; "value", a bias of the scores that is computed from the value (Doge).
            Default: None.
        dynamic_mask_window: of "value": a head sees only so many of the keys so far, those of the largest bias (of
            equal ones the later), and a cache keeps no more. Default: None, all.
    """

    _choices = {"dynamic_mask": (None, "position", "hard", "value")}

    dynamic_mask: str | None = None
    dynamic_mask_window: int | None = None

    @property
    def longest_text(self) -> int | None:
        """The positions that a mask has numbers for, where it goes by position; otherwise there is no longest text."""
        return self.max_position_embeddings if self.dynamic_mask in ("position", "hard") else None

    def check_dynamic_mask(self, mixers: Mapping[str, Any]) -> None:
        """There are layers that it masks, and a window has a value to go by; `mixers` are the mixers by their names."""
        window = self.dynamic_mask_window
        if window is not None and self.dynamic_mask != "value":
            raise ValueError(
                f'dynamic_mask_window = {window} keeps the keys of the largest bias: it needs dynamic_mask = "value", '
                f"got {self.dynamic_mask!r}."
            )
        if window is not None and window < 1:
            raise ValueError(f"dynamic_mask_window must be positive, or None; got {window}.")
        if window is not None and self.bidirectional:
            raise ValueError("dynamic_mask_window goes by the keys so far: set it to None, or bidirectional to False.")
        names = [self.token_mixers] if isinstance(self.token_mixers, str) else self.token_mixers  # and what is cut off
        if self.dynamic_mask and not any(mixers[name].takes_dynamic_mask for name in names):
            raise ValueError(
                f"dynamic_mask = {self.dynamic_mask!r} masks attention layers, and token_mixers has none: add "
                '"softmax" or "inner_function", or set it to None.'
            )
