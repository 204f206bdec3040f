"""A loss of one's own in the library's `Trainer`, with what the layers add to it."""

from collections.abc import Callable
from typing import Any

import torch

from .layer_losses import add_losses, share_of_step


def add_layer_loss(compute_loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A `compute_loss_func` for the library's `Trainer` that adds what the layers add to the loss.

    With a `compute_loss_func` the model gets no labels, so it cannot add its `layer_loss` itself. Where several batches
    make one step, each adds its part: its labels that count, over all of the step. Smoothed labels, in place of
    `label_smoothing_factor`:

        >>> from functools import partial
        >>> from transformers.trainer_pt_utils import LabelSmoother
        >>> Trainer(..., compute_loss_func=add_layer_loss(partial(LabelSmoother(0.1), shift_labels=True)))

    Args:
        compute_loss: gives the loss of `(outputs, labels, num_items_in_batch=None)`.
    """

    def loss(outputs: Any, labels: torch.Tensor | None, num_items_in_batch: torch.Tensor | int | None = None):
        own = compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        logits = outputs.get("logits")
        as_they_are = labels if logits is not None and logits.ndim < 3 else None  # those of rows are not shifted
        return add_losses(own, outputs.get("layer_loss"), *share_of_step(labels, as_they_are, num_items_in_batch))

    return loss
