"""A backward pass that has no gradient of its own, and says so."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .custom_op import refuse_second


def differentiable_once(backward: Callable[..., tuple[torch.Tensor | None, ...]]) -> Callable[..., Any]:
    """As `torch.autograd.function.once_differentiable`, which stays silent where `torch.autograd.grad` is told inputs:
    its error stands on no way to them. Here it stands between the gradients and all that they are made of.

    Args:
        backward: called with the context, what it has saved and the gradients; what is saved and has a gradient must be
            inputs of the function as they came.
    """

    @functools.wraps(backward)
    def wrapped(ctx, *gradients: torch.Tensor):
        saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor a single time
        with torch.no_grad():
            found = backward(ctx, saved, *gradients)
        sources = [x for x in (*saved, *gradients) if x is not None and x.requires_grad]
        if not torch.is_grad_enabled() or not sources:
            return found
        given = [x for x in found if x is not None]
        marked = iter(_Refusing.apply(backward.__qualname__, len(given), *given, *sources))
        return tuple(None if x is None else next(marked) for x in found)

    return wrapped


class _Refusing(torch.autograd.Function):
    """The first `count` tensors, which hang on all of them; `name` gave them."""

    @staticmethod
    def forward(ctx, name: str, count: int, *tensors: torch.Tensor):
        ctx.name = name
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        refuse_second(ctx.name)
