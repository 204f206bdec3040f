"""What a configuration says of "window" layers."""

from dataclasses import dataclass

from ...layers.configuration import ModelFields


@dataclass(kw_only=True, repr=False)
class WindowFields(ModelFields):
    """Fields of "window" layers, whose state has `state_size` modes, is always hermitian, and starts in its own way.

    Args:
        attention_window: "window": the last tokens that a query sees by softmax, its own included, W. Default: 64.
        attention_sinks: "window": the first tokens of a text, which it always sees, S; with 0 none. Default: 4.
        window_memory: "window": keep a state of the tokens that have left the window. False is plain window attention.
            Default: True.
        attention_bias: biases in the projections of "window" and "softmax" layers, as in Transformers' Llama.
            Default: False.
    """

    _positive = ["attention_window"]

    attention_window: int = 64
    attention_sinks: int = 4
    window_memory: bool = True
    attention_bias: bool = False

    def check_window(self) -> None:
        """Sinks can be counted, and what a window rotates depends on no length."""
        if self.attention_sinks < 0:
            raise ValueError(f"attention_sinks must not be negative, got {self.attention_sinks}.")
        kind = (self.rope_parameters or {}).get("rope_type")
        if kind in ("dynamic", "longrope"):
            raise ValueError(
                f'rope_type "{kind}" changes its angles with the length, and "window" layers see no length beyond '
                'their window: choose another, such as "default" or "llama3".'
            )
