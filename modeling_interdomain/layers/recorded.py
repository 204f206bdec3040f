"""Modules through which a layer hands a value to the model, which records their outputs by their class."""

import torch
from torch import nn


class _Recorded(nn.Module):
    """Returns its input."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


class AuxiliaryLoss(_Recorded):
    """Passes on what a layer wants added to the training loss; the model finds it by this module's class.

    A layer calls it with a scalar in every forward; in training, `config.aux_loss_coef` times the sum over all layers
    joins the loss of the model.
    """


class RankingLoss(_Recorded):
    """Hands on the ranking loss of a sparse branch; in training, `config.ranking_loss_coef` times the sum joins."""


class ChosenExperts(_Recorded):
    """Hands on which experts were chosen, `[B, T, h, k]`: a forward hook here sees a retrieval that collapses.

    A forward with `output_chosen_experts=True` returns them, one tensor for each layer that has experts.
    """
