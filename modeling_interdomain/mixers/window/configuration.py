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
    """

    _positive = ["attention_window"]

    attention_window: int = 64
    attention_sinks: int = 4
    window_memory: bool = True
