"""The versions of Transformers that this code was tested with, and what they call a cache.

Up to 5.23 it is `past_key_values` (in Mambas `cache_params`), from 5.24 on `cache`: in arguments, in outputs, and in
what `generate()` hands on. Which one it is, is decided here alone; whoever calls a model or a mixer may use any.
"""

import inspect
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging

logger = logging.get_logger(__name__)

TESTED = ((5, 21), (5, 24))  # the first and the last

CACHE_NAMES = ("past_key_values", "cache", "cache_params")
# That of the library which is installed.
CACHE_NAME = "past_key_values" if "past_key_values" in BaseModelOutputWithPast.__dataclass_fields__ else "cache"


def takes_cache(function: Callable) -> Callable:
    """Let a function or method take its cache by any of the names; its signature shows the library's.

    One that has no argument of such a name but takes keywords gets it by the library's.

    Raises:
        TypeError: of the function, when it is called with two caches.
    """
    signature = inspect.signature(function)
    own = next((name for name in signature.parameters if name in CACHE_NAMES), CACHE_NAME)
    others = [name for name in CACHE_NAMES if name != own]

    @wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        for name in others:
            if name in kwargs:
                cache = kwargs.pop(name)
                if kwargs.get(own) is None:
                    kwargs[own] = cache
                elif cache is not None:
                    raise TypeError(f"{own} and {name} are two names of one argument, the cache: give one of them.")
        return function(*args, **kwargs)

    shown = [x.replace(name=CACHE_NAME) if name == own else x for name, x in signature.parameters.items()]
    renamed.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return renamed


def warn_if_untested(version: str) -> None:
    """Say once that nobody has tried this code with a version of Transformers."""
    if not TESTED[0] <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= TESTED[1]:
        first, last = (f"{major}.{minor}" for major, minor in TESTED)
        logger.warning_once(
            f"This code was tested with Transformers {first} to {last}, and {version} is installed: install one of "
            "these, or compare what the model writes with what it writes there."
        )


warn_if_untested(transformers.__version__)
