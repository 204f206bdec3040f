"""The gated feed-forward layer."""

import torch
from torch import nn
from transformers.activations import ACT2FN

from .module_common import residual_projection


class InterdomainMLP(nn.Module):
    """SwiGLU with the default activation: `down(act(gate(x)) * up(x))`."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = residual_projection(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
