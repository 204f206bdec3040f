"""The gated feed-forward layer."""

import torch
from torch import nn
from transformers.activations import ACT2FN

from .module_common import by_pieces, is_plain, is_untouched, residual_projection


class InterdomainMLP(nn.Module):
    """SwiGLU with the default activation: `down(act(gate(x)) * up(x))`."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = residual_projection(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        if gate.ndim == 3 and gate.shape[1] > 1 and is_plain(gate, torch.bfloat16):
            own = is_untouched(self.gate_proj, nn.Linear, gate.device)  # otherwise others may hold what it gave
            return self.down_proj(by_pieces(self._gated, [gate, up], gate.dtype, [gate] if own else [])[0])
        return self.down_proj(self._gated(gate, up)[0])

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.act_fn(gate) * up,)
