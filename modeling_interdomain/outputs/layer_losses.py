"""What layers add to the training loss, whoever computes it: a head of ours, a trainer, or a loop of one's own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import ModelOutput, logging

from ..layers.common import AuxiliaryLoss, RankingLoss
from ..layers.versions import CACHE_NAME

logger = logging.get_logger(__name__)

# The losses of layers: the modules that hand them on, and the fields of the configuration that multiply them.
LAYER_LOSSES = {
    "auxiliary_losses": (AuxiliaryLoss, "aux_loss_coef"),
    "ranking_losses": (RankingLoss, "ranking_loss_coef"),
}


@dataclass
class InterdomainModelOutput(BaseModelOutputWithPast):
    """Adds `auxiliary_losses` and `ranking_losses`, one scalar for each layer that has one, and `chosen_experts`.

    `chosen_experts` are asked for with `output_chosen_experts=True`: ids `[B, T, h, k]` for each layer with experts.
    """

    auxiliary_losses: tuple[torch.Tensor, ...] | None = None
    ranking_losses: tuple[torch.Tensor, ...] | None = None
    chosen_experts: tuple[torch.Tensor, ...] | None = None


@dataclass
class HeadOutput(ModelOutput):
    """What heads return beside loss and logits.

    `layer_loss` is what the layers add to `loss` in training: `config.aux_loss_coef` times `aux_loss`, the sum of
    `auxiliary_losses`, and `config.ranking_loss_coef` times the sum of `ranking_losses`. Whoever computes a loss from
    the logits adds it, see `add_layer_loss`.
    """

    layer_loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    auxiliary_losses: tuple[torch.Tensor, ...] | None = None
    ranking_losses: tuple[torch.Tensor, ...] | None = None
    chosen_experts: tuple[torch.Tensor, ...] | None = None


@dataclass
class InterdomainCausalLMOutput(HeadOutput, CausalLMOutputWithPast):
    """The library's output with the fields of `HeadOutput`."""


@dataclass
class InterdomainClassifierOutput(HeadOutput, SequenceClassifierOutputWithPast):
    """The library's output with the fields of `HeadOutput`."""


def share_of_step(labels, shift_labels, items: torch.Tensor | int | None, ignored: int = -100) -> tuple[Any, Any]:
    """The labels that count in this batch and in the whole step, where a step has several (gradient accumulation).

    `labels` are `[B, T]`, not shifted, or `[B]`, one of each row; those that are `ignored` do not count.
    """
    if labels is None or items is None:
        return 1, 1
    return count_labels(labels, shift_labels, ignored), at_least_one(items)


def count_labels(labels: torch.Tensor, shift_labels: torch.Tensor | None, ignored: int = -100) -> torch.Tensor:
    """How many of the labels count, given as for `share_of_step`."""
    if shift_labels is None:
        shift_labels = labels[:, 1:] if labels.ndim > 1 else labels
    return (shift_labels != ignored).sum()


def at_least_one(items):
    """The divisor of a mean over so many; 1 where there are none, whose sum is 0."""
    return items + (items == 0)


def add_losses(loss: torch.Tensor | None, layer_loss: torch.Tensor | None, part=1, whole=1) -> torch.Tensor | None:
    """The loss with `part` of `whole` of what the layers add to it."""
    if loss is None or layer_loss is None:
        return loss
    return loss + layer_loss.to(loss.device) * part / whole


def warn_if_left_out(hidden_states: torch.Tensor, layer_loss: torch.Tensor | None) -> None:
    """Warn once when a backward pass reaches the last hidden states without having passed `layer_loss`.

    The loss was then computed elsewhere: by the Trainer (`compute_loss_func`, smoothed labels) or a loop of one's own.
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
    """Returns the tensor; a backward pass through it also differentiates the loss, with gradient 1."""

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


def check_checkpointing(modules: Iterable[nn.Module]) -> None:
    """Refuse reentrant checkpointing, which backpropagates through the outputs of layers alone, not their losses."""
    for module in modules:
        keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", None)
        reentrant = keywords is not None and keywords.get("use_reentrant", True)  # what PyTorch does unless told
        if reentrant and getattr(module, "gradient_checkpointing", False):
            raise ValueError(
                "The auxiliary losses of the layers get no gradient from reentrant gradient checkpointing: ask for "
                '{"use_reentrant": False}, the default.'
            )


class LayerLosses:
    """The part of a model that collects the losses of its layers."""

    config: Any
    training: bool
    modules: Any

    def _ask_for_losses(self, kwargs: dict[str, Any]) -> None:
        """In training, have the forward hand on what layers add to the loss."""
        for name, (kind, _) in LAYER_LOSSES.items() if self.training else ():
            kwargs[f"output_{name}"] = any(isinstance(x, kind) for x in self.modules()) or ()  # (): asked, for none
            if kwargs[f"output_{name}"]:
                check_checkpointing(self.modules())

    def _counts_labels(self) -> bool:
        """Whether the loss is one of the library's: it takes the number of labels, and without it is NaN for none."""
        return not hasattr(self, "_loss_function")

    def _layer_losses(self, outputs, names=tuple(LAYER_LOSSES)) -> dict[str, torch.Tensor | None]:
        """`layer_loss` and `aux_loss`, see `HeadOutput`."""
        layer_loss, totals = None, {}
        for name in names:
            coefficient, losses = LAYER_LOSSES[name][1], getattr(outputs, name)
            if not losses:
                continue
            totals[name] = total = sum(x.to(losses[-1].device) for x in losses)
            if self.training:
                scaled = getattr(self.config, coefficient) * total
                layer_loss = scaled if layer_loss is None else layer_loss + scaled.to(layer_loss.device)
        return {"layer_loss": layer_loss, "aux_loss": totals.get("auxiliary_losses")}

    def _with_layer_losses(self, outputs, loss: torch.Tensor | None, part=1, whole=1) -> dict[str, Any]:
        """What a head returns beside logits: `loss` with what layers add to it, and what the base model returned."""
        added = self._layer_losses(outputs)
        warn_if_left_out(outputs.last_hidden_state, added["layer_loss"])
        names = *LAYER_LOSSES, "chosen_experts", "hidden_states", "attentions", CACHE_NAME
        returned = {name: outputs.get(name) for name in names}
        return {"loss": add_losses(loss, added["layer_loss"], part, whole), **added, **returned}


def trains_layers(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let the forward of a base model train the losses of its layers along, where the caller does not add them.

    Our heads, and whoever else asks for these losses (`output_auxiliary_losses`, `output_ranking_losses`), add them.
    """

    @wraps(forward)
    def run(self, *args, **kwargs):
        trains = self.training and torch.is_grad_enabled()
        left_out = [name for name in LAYER_LOSSES if trains and kwargs.get(f"output_{name}") in (None, False)]
        if not left_out:
            return forward(self, *args, **kwargs)
        self._ask_for_losses(kwargs)
        named = kwargs.pop("return_dict", self.config.return_dict)
        outputs = forward(self, *args, **kwargs, return_dict=True)
        before, found = outputs.last_hidden_state, self._layer_losses(outputs, left_out)["layer_loss"]
        trained = found is not None and found.requires_grad
        last = _Alongside.apply(before, found.to(before.device)) if trained else before
        kept = {name: x for name, x in outputs.items() if name not in left_out} | {"last_hidden_state": last}
        if outputs.hidden_states:
            kept["hidden_states"] = tuple(last if x is before else x for x in outputs.hidden_states)
        outputs = InterdomainModelOutput(**kept)
        return outputs.to_tuple() if named is False else outputs

    return run
