"""Methods of a model for its states (learned, joined, cut), and for operators of a kernel from the Hub."""

from importlib import import_module
from typing import Any

import torch
from torch import nn


class StateMethods:
    """Mixin of a model with these methods; each is documented where it is implemented."""

    def add_learned_state(self: Any) -> list[nn.Parameter]:
        """Let every recurrent layer begin with a learned state, see `model_cache/state_tuning.py`."""
        from .state_tuning import add_learned_state

        return add_learned_state(self)

    def save_learned_state(self: Any, path) -> None:
        """Save the learned state alone."""
        from .state_tuning import save_learned_state

        save_learned_state(self, path)

    def load_learned_state(self: Any, path) -> list[nn.Parameter]:
        """Begin with the learned state of a file."""
        from .state_tuning import load_learned_state

        return load_learned_state(self, path)

    def use_kernel(self: Any, name, revision: str | None = None, trust_remote_code: bool | list[str] = False) -> None:
        """Call the operators of a kernel, a folder or `user/name` on the Hub, see `layers/operators.py`."""
        from ..layers.operators import use_kernel

        use_kernel(self, name, revision, trust_remote_code)

    def join_caches(self: Any, first, second, lengths: torch.Tensor | None = None) -> Any:
        """The cache of two documents, each read alone, one after the other, see `examples/joined_states.py`."""
        return join_caches(first, second, self, lengths)

    def cut_cache(self: Any, cache, before, after, since: torch.Tensor | None = None) -> Any:
        """The cache of a text without a span, see `examples/joined_states.py`."""
        return cut_cache(cache, before, after, self, since)


def join_caches(*arguments, **options) -> Any:
    """The cache of two documents, each read alone; `examples/joined_states.py` tells the arguments."""
    return _joined_states().join_caches(*arguments, **options)


def cut_cache(*arguments, **options) -> Any:
    """The cache of a text without a span; `examples/joined_states.py` tells the arguments."""
    return _joined_states().cut_cache(*arguments, **options)


def _joined_states() -> Any:
    try:
        return import_module("examples.joined_states")
    except ImportError as error:
        raise ImportError(
            "Joining and cutting caches is a program beside the package, examples/joined_states.py of its repository: "
            "run from the root of a checkout, or copy that file."
        ) from error
