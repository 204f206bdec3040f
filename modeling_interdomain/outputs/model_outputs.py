"""What the models return: the library's outputs, with the losses of layers and the experts that were chosen."""

from dataclasses import dataclass

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)


@dataclass
class InterdomainModelOutput(BaseModelOutputWithPast):
    """With `auxiliary_losses` and `ranking_losses`, one scalar for each layer that has one, and `chosen_experts`.

    `chosen_experts` are asked for with `output_chosen_experts=True`: ids `[B, T, h, k]` for each layer with experts.
    """

    auxiliary_losses: tuple[torch.Tensor, ...] | None = None
    ranking_losses: tuple[torch.Tensor, ...] | None = None
    chosen_experts: tuple[torch.Tensor, ...] | None = None


@dataclass
class InterdomainCausalLMOutput(CausalLMOutputWithPast):
    """With `layer_loss`, in training what the layers add to the loss: `config.aux_loss_coef` times `aux_loss`, the sum
    of `auxiliary_losses`, and `config.ranking_loss_coef` times the sum of `ranking_losses`. It is part of `loss`, and a
    loss of one's own, made of the logits, adds it itself: see `add_layer_loss`."""

    layer_loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    auxiliary_losses: tuple[torch.Tensor, ...] | None = None
    ranking_losses: tuple[torch.Tensor, ...] | None = None
    chosen_experts: tuple[torch.Tensor, ...] | None = None


@dataclass
class InterdomainClassifierOutput(SequenceClassifierOutputWithPast):
    """As `InterdomainCausalLMOutput`."""

    layer_loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    auxiliary_losses: tuple[torch.Tensor, ...] | None = None
    ranking_losses: tuple[torch.Tensor, ...] | None = None
    chosen_experts: tuple[torch.Tensor, ...] | None = None
