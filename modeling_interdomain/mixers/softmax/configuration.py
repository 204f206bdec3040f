"""What a configuration says of the mask that fades keys of attention layers, and these of themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...layers.configuration import HEADS, ModelFields
from ..configuration import MixerSpecification

# Of a head with a bias: kernels want sizes that are multiples of 8, and the same of keys and values.
BIAS_COLUMNS = 8


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


class SoftmaxSpecification(MixerSpecification):
    """Keys and values of all tokens, or of a window of them."""

    layer_type = "full_attention"
    takes_dynamic_mask = True
    shared_groups = "num_key_value_heads"

    @classmethod
    def why_not_shardable(cls, config, processes: int) -> str | None:
        if config.dynamic_mask == "value":
            return 'dynamic_mask = "value" makes the bias of a head of the values of all'
        return super().why_not_shardable(config, processes)

    @classmethod
    def head_plan(cls, config) -> dict[str, str]:
        masks = {} if config.dynamic_mask is None else {"dynamic_mask": HEADS}
        return {"": HEADS, "q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"} | masks

    @classmethod
    def rotated_dims(cls, config) -> set[int]:
        return {config.head_dim}

    @classmethod
    def kept_dim(cls, config) -> int:
        """The numbers of a key, and of a value, that a cache holds a head."""
        return config.head_dim + (BIAS_COLUMNS if config.dynamic_mask == "value" else 0)

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        kept = min(context_length, config.dynamic_mask_window or context_length)
        return {"keys_values": 2 * config.num_key_value_heads * cls.kept_dim(config) * kept}
