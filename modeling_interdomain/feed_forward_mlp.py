"""The gated feed-forward layer."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .module_common import by_pieces, is_plain, is_untouched, project, residual_projection

# Numbers between the projections that are made at a time: few enough that the allocator keeps their memory, many enough
# that packing the weights for each product does not count.
_NUMBERS = 1 << 21


class InterdomainMLP(nn.Module):
    """SwiGLU with the default activation: `down(act(gate(x)) * up(x))`."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = residual_projection(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x, own = hidden_states, (self.gate_proj, self.up_proj, self.down_proj)
        if x.ndim == 3 and is_plain(x, torch.bfloat16) and all(is_untouched(p, nn.Linear, x.device) for p in own):
            tokens = max(1, _NUMBERS // (x.shape[0] * self.gate_proj.out_features))
            return by_pieces(self._in_place, [x], x.dtype, tokens)[0]
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def _in_place(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        gate = project(self.gate_proj, x)  # which nobody else holds
        gate = F.silu(gate, inplace=True) if type(self.act_fn) is nn.SiLU else self.act_fn(gate)
        return (project(self.down_proj, gate.mul_(project(self.up_proj, x))),)
