"""What the layers add to the loss of training, where the loss is made outside of the model."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)


def add_layer_loss(compute_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A `compute_loss_func` of the library's `Trainer` that also adds what the layers of the model add to the loss.

    The Trainer then leaves the labels to this function, so that the model cannot add it (`outputs.layer_loss`) itself.
    A batch of several that make one step adds its part: the tokens that count in it, of all that do. Smoothed labels,
    in place of `label_smoothing_factor`:

        >>> from functools import partial
        >>> from transformers.trainer_pt_utils import LabelSmoother
        >>> Trainer(..., compute_loss_func=add_layer_loss(partial(LabelSmoother(0.1), shift_labels=True)))

    Args:
        compute_loss: gives the loss of `(outputs, labels, num_items_in_batch=None)`.
    """

    def loss(outputs: Any, labels: torch.Tensor | None, num_items_in_batch: torch.Tensor | int | None = None):
        own = compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        return together(own, outputs.get("layer_loss"), *share_of_step(labels, None, num_items_in_batch))

    return loss


def share_of_step(labels, shift_labels, items: torch.Tensor | int | None) -> tuple[Any, Any]:
    """The tokens of this batch and of the whole step, where a step has several batches (gradient accumulation).

    `labels` are `[B, T]`, not shifted, or `[B]`, one of each row.
    """
    if labels is None or items is None:
        return 1, 1
    return count_asked(labels, shift_labels), at_least_one(items)


def count_asked(labels: torch.Tensor, shift_labels: torch.Tensor | None, ignored: int = -100) -> torch.Tensor:
    """How many of the labels count, given as for `share_of_step`."""
    if shift_labels is None:
        shift_labels = labels[:, 1:] if labels.ndim > 1 else labels
    return (shift_labels != ignored).sum()


def at_least_one(items):
    """What a sum over so many is divided by: of none, the sum is 0."""
    return items + (items == 0)


def together(loss: torch.Tensor | None, layer_loss: torch.Tensor | None, part=1, whole=1) -> torch.Tensor | None:
    """The loss with what the layers add to it."""
    if loss is None or layer_loss is None:
        return loss
    return loss + layer_loss.to(loss.device) * part / whole


def warn_if_left_out(hidden_states: torch.Tensor, layer_loss: torch.Tensor | None) -> None:
    """Say once when a backward pass comes to the last hidden states and has not come by `layer_loss`, made after them.

    Whoever makes the loss: the Trainer's `compute_loss_func` and smoothed labels, another trainer, a loop of one's own.
    """
    if layer_loss is None or torch.compiler.is_compiling() or hidden_states.device != layer_loss.device:
        return
    if not (hidden_states.requires_grad and layer_loss.requires_grad):
        return
    found: list[bool] = []

    def note(_: torch.Tensor) -> None:
        found.append(True)

    def look(_: torch.Tensor) -> None:
        if not found:
            logger.warning_once(
                "The loss of this training is made of the logits alone, without what the layers add to it (the balance "
                "of experts, the ranking of keys), and what that alone trains stays as it is: add outputs.layer_loss; "
                "in the Trainer, compute_loss_func=add_layer_loss(your_loss) of modeling_interdomain does."
            )

    layer_loss.register_hook(note)
    hidden_states.register_hook(look)


class _Alongside(torch.autograd.Function):
    """A tensor as it is: a backward pass that comes to it goes on to the loss as well, with 1."""

    @staticmethod
    def forward(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not torch.compiler.is_compiling():
            logger.warning_once(
                "The loss of this training is made of hidden states, past the head of the model: what the layers add "
                "to it (the balance of experts, the ranking of keys) is trained along, with the weight 1 in every "
                "backward pass, whatever that loss is multiplied with. Where several batches make one step, divide "
                "config.aux_loss_coef and config.ranking_loss_coef by their number; with 0 nothing is added."
            )
        return gradients[0], torch.ones_like(ctx.saved_tensors[0])


def trained_along(hidden_states: torch.Tensor, layer_loss: torch.Tensor | None) -> torch.Tensor:
    """The hidden states, with whose gradient `layer_loss` gets its own: for whoever makes a loss of these alone."""
    if layer_loss is None or not layer_loss.requires_grad:
        return hidden_states
    return _Alongside.apply(hidden_states, layer_loss.to(hidden_states.device))
