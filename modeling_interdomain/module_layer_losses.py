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


def warn_if_left_out(logits: torch.Tensor, layer_loss: torch.Tensor | None) -> None:
    """Say once when a backward pass comes to the logits and has not come by `layer_loss`, which was made after them.

    Whoever makes the loss: the Trainer's `compute_loss_func` and smoothed labels, another trainer, a loop of one's own.
    """
    if layer_loss is None or torch.compiler.is_compiling() or logits.device != layer_loss.device:
        return
    if not (logits.requires_grad and layer_loss.requires_grad):
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
    logits.register_hook(look)
