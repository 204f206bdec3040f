"""Where layers find their operators: in this package, or in a kernel of the Hub that `use_kernel` has named."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from .common import DecodeTables

# Raised when an operator that layers call changes its arguments, results or meaning; on the Hub: the branch "v1".
KERNEL_VERSION = 1


class Operators(SimpleNamespace):
    """The operators that a class of layers calls, by name: its attribute `operators`, which an instance may replace."""

    @classmethod
    def of(cls, *functions: Callable, beside: "Operators | None" = None) -> "Operators":
        """Functions under their own names, `beside` those of a base class."""
        return cls(**({} if beside is None else vars(beside)), **{each.__name__: each for each in functions})


def use_kernel(
    model: nn.Module,
    name: str | os.PathLike | None,
    revision: str | None = None,
    trust_remote_code: bool | list[str] = False,
) -> None:
    """Let the layers of a model call the operators of a kernel, as `examples/publish_kernel.py` writes one.

    Args:
        name: a folder, or `user/name` on the Hub; None goes back to the operators of this package.
        revision: of the repository on the Hub. Default: None, the branch of this version of the operators.
        trust_remote_code: load it although its publisher is not one that the Hub trusts with kernels. Default: False.

    Raises:
        ImportError: without the library kernels.
        ValueError: when no layer has an operator, or the kernel does not load, lacks one or is of another version. The
            model is then as it was.
    """
    parts: list[Any] = [part for part in model.modules() if isinstance(getattr(part, "operators", None), Operators)]
    own = {operator: each for part in parts for operator, each in vars(type(part).operators).items()}
    if not own:
        raise ValueError("use_kernel finds no layer in this model that calls an operator of this package.")
    found = own
    if name is not None:
        kernel = _load(name, revision, trust_remote_code)
        found = {operator: _counterpart(kernel, name, each) for operator, each in own.items()}
    for part in parts:
        part.operators = Operators(**{operator: found[operator] for operator in vars(type(part).operators)})
        if isinstance(part, DecodeTables):  # which were made by other operators
            part.forget_tables()


def _load(name: str | os.PathLike, revision: str | None, trust_remote_code: bool | list[str]) -> ModuleType:
    try:
        import kernels
    except ImportError as error:
        raise ImportError("use_kernel needs the library that loads kernels: pip install kernels.") from error
    try:
        if os.path.isdir(name):
            kernel = kernels.get_local_kernel(Path(name))
        else:
            version: dict[str, Any] = {"version": KERNEL_VERSION} if revision is None else {"revision": revision}
            kernel = kernels.get_kernel(str(name), **version, trust_remote_code=trust_remote_code)
    except Exception as error:  # a repository, its metadata or its code can raise any of these
        raise ValueError(f"The kernel {name} does not load: {' '.join(str(error).split())}") from error
    if getattr(kernel, "VERSION", None) != KERNEL_VERSION:
        raise ValueError(
            f"The kernel {name} has operators of version {getattr(kernel, 'VERSION', None)}, and these layers call "
            f"version {KERNEL_VERSION}: take another revision, or write it with this package's publish_kernel."
        )
    return kernel


def _counterpart(kernel: ModuleType, name: str | os.PathLike, own: Callable) -> Callable:
    """The operator of a kernel that takes the arguments of one of this package."""
    found = getattr(kernel, own.__name__, None)
    if found is None:
        raise ValueError(f"The kernel {name} has no operator {own.__name__}, which a layer of this model calls.")
    if _arguments(found) != _arguments(own):
        raise ValueError(
            f"The operator {own.__name__} of the kernel {name} takes other arguments than that of this package: it is "
            "of another version."
        )
    return found


def _arguments(function: Callable) -> list[tuple]:
    return [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]
