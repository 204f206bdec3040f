"""What a configuration says of "window" layers, and these of themselves."""

import math
from dataclasses import dataclass

from ...layers.configuration import LENGTH_DEPENDENT, ModelFields
from ..configuration import Biases, Projection, RecurrentSpecification


@dataclass(kw_only=True, repr=False)
class WindowFields(ModelFields):
    """Fields of "window" layers, whose state has `state_size` modes, is always hermitian, and starts in its own way.

    Args:
        attention_window: "window": the last tokens that a query sees by softmax, its own included, W. Default: 64.
        attention_sinks: "window": the first tokens of a text, which it always sees, S; with 0 none. Default: 4.
        window_memory: "window": keep a state of the tokens that have left the window. Default: True.
        window_share: "window": what the state weighs: as one more key of the softmax, more with each token up to W,
            "counted"; in older checkpoints always as much, "softmax", or by itself, "sigmoid". Default: "sigmoid".
        window_write_gate: "window": a token's key and value say how strongly it enters the state. Default: False.
        window_points: "window": read the memory by softmax at so many points of the past; 0, as a sum. Default: 0.
    """

    _positive = ["attention_window"]
    _choices = {"window_share": ("sigmoid", "softmax", "counted")}

    attention_window: int = 64
    attention_sinks: int = 4
    window_memory: bool = True
    window_share: str = "sigmoid"
    window_write_gate: bool = False
    window_points: int = 0


class WindowSpecification(RecurrentSpecification):
    """Keys and values of a window and of sinks, and a state of the tokens between, where there is a memory."""

    can_branch = False
    shared_groups = "num_key_value_heads"

    @classmethod
    def check_config(cls, config) -> None:
        for name in ("attention_sinks", "window_points"):
            if getattr(config, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(config, name)}.")
        kind = (config.rope_parameters or {}).get("rope_type")
        if kind in LENGTH_DEPENDENT:
            raise ValueError(
                f'rope_type "{kind}" changes its angles with the length, and "window" layers see no length beyond '
                'their window: choose another, such as "default" or "llama3".'
            )

    @classmethod
    def projections(cls, config) -> list[Projection]:
        groups, dim = config.num_key_value_heads, config.head_dim
        share = [Projection("share", config.num_attention_heads, 1, False, bias=True)] if config.window_memory else []
        return [
            Projection("q", config.num_attention_heads, dim, False),
            Projection("k", groups, dim, False),
            Projection("v", groups, dim, False),
            *share,
        ]

    @classmethod
    def biases(cls, config) -> Biases:
        return Biases(projections=config.attention_bias)

    @classmethod
    def gated(cls, config) -> bool:
        return False

    @classmethod
    def rotated_dims(cls, config) -> set[int]:
        return set()  # by positions of the model, which a window does without

    @classmethod
    def state_shape(cls, config) -> tuple[int, ...]:
        size = config.state_size if config.window_memory else 0
        return config.num_key_value_heads, 2, size, config.feature_dim + config.head_dim

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        kept = config.attention_window + config.attention_sinks
        state = math.prod(cls.state_shape(config))
        return {"recurrent": state, "keys_values": 2 * config.num_key_value_heads * config.head_dim * kept + 1}
