"""The versions of Transformers that this code was tested with, and what they call a cache.

Up to 5.23 it is `past_key_values` (in Mambas `cache_params`), from 5.24 on `cache`: in arguments, in outputs, and in
what `generate()` passes on. `CACHE_NAME` is that of the installed version; callers of a model or a mixer may use any.
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
CACHE_NAME = "past_key_values" if "past_key_values" in BaseModelOutputWithPast.__dataclass_fields__ else "cache"


def takes_cache(
    function: Callable, others: dict[str, str] | None = None, check: Callable[[Any, dict], None] | None = None
) -> Callable:
    """Let a function or method take its cache by any of the names; its signature shows the library's.

    One that has no argument of such a name but takes keywords gets it by the library's.

    Args:
        others: names of other arguments that are taken too, each with the function's own.
        check: of a method, called first, with `self` and the renamed keywords.

    Raises:
        TypeError: of the function, when it is called with one argument by two names.
    """
    signature = inspect.signature(function)
    own = next((name for name in signature.parameters if name in CACHE_NAMES), CACHE_NAME)
    names = (others or {}) | {name: own for name in CACHE_NAMES if name != own}

    @wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        for name in names:
            if name in kwargs:
                _rename(kwargs, name, names[name])
        if check is not None:
            check(args[0], kwargs)
        return function(*args, **kwargs)

    shown = [x.replace(name=CACHE_NAME) if name in CACHE_NAMES else x for name, x in signature.parameters.items()]
    renamed.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return renamed


def _rename(arguments: dict[str, Any], theirs: str, ours: str) -> None:
    """Call an argument by the other of its two names; where it is None it was not given."""
    value = arguments.pop(theirs)
    if arguments.get(ours) is None:
        arguments[ours] = value
    elif value is not None and ours in CACHE_NAMES:
        raise TypeError(f"{ours} and {theirs} are two names of one argument, the cache: give one of them.")
    elif value is not None:
        raise TypeError(f"{theirs} is another name of {ours}: give one of them.")


def warn_if_untested(version: str) -> None:
    """Warn once where this code was not tested with a version of Transformers."""
    if not TESTED[0] <= tuple(map(int, re.findall(r"\d+", version)[:2])) <= TESTED[1]:
        first, last = (f"{major}.{minor}" for major, minor in TESTED)
        logger.warning_once(
            f"This code was tested with Transformers {first} to {last}, and {version} is installed: install one of "
            "these, or compare what the model writes with what it writes there."
        )


warn_if_untested(transformers.__version__)
