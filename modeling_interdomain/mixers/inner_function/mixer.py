"""Inner-function attention ("Wonderful Matrices", arXiv 2407.16958): softmax attention without a value projection."""

import torch
from torch import nn
from transformers import initialization as init

from ...ops.common.cpu import without_autocast
from ..softmax.mixer import SoftmaxMixer
from .configuration import InnerFunctionSpecification


class InnerFunction(nn.Module):
    """`x * sum_{i in I} w_i E_i`: I are the `inner_values_per_token` best of `inner_values` learned vectors for x.

    They are found by `g = (x W_vQ) theta_vK^T`, and w is the softmax of g over all of them. The paper's equation 3 has
    g there, its steps and its listing nothing: then, with `inner_value_weights="one"`, neither `W_vQ` nor `theta_vK`
    would ever learn.
    """

    def __init__(self, config):
        super().__init__()
        count, width, dim = config.inner_values, config.hidden_size, config.inner_value_dim
        self.chosen = config.inner_values_per_token
        self.weighted = config.inner_value_weights == "softmax"
        self.query_proj = nn.Linear(width, dim, bias=False)
        self.keys = nn.Parameter(torch.empty(count, dim))
        self.values = nn.Parameter(torch.empty(count, width))

    def start_parameters(self, config) -> None:
        """Keys of length 1, so that not all tokens choose alike; values of size 1, as what they multiply."""
        init.normal_(self.keys, std=config.inner_value_dim**-0.5)
        init.normal_(self.values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, hidden_size]` to the same. Scores are at least float32: a choice should not flip by rounding."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device):
            scores = self.query_proj(x.to(self.keys.dtype)).to(wide) @ self.keys.to(wide).mT
        best = scores.topk(self.chosen, dim=-1).indices
        weights = scores.softmax(-1) if self.weighted else torch.ones_like(scores)
        # A product over all, though few are chosen: they are few in all, and its gradient is deterministic.
        weights = torch.zeros_like(weights).scatter(-1, best, weights.gather(-1, best))
        return x * (weights.to(x.dtype) @ self.values.to(x.dtype))


class InnerFunctionMixer(InnerFunctionSpecification, SoftmaxMixer):
    """Attention over values that are the layer's own input, each number scaled by what the token chooses."""

    def make_value(self, config) -> None:
        self.inner_function = InnerFunction(config)

    def value(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.inner_function(hidden_states)
