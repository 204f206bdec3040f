"""The gated feed-forward layer."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ..layers.common import (
    FULL_PRECISION,
    activation,
    is_plain,
    is_untouched,
    project,
    project_all,
    residual_projection,
)
from ..ops.common.cpu import multiplies_in_tiles

# Numbers of the hidden layer that are made at a time: few enough to stay in a cache that cores share, many enough that
# packing the weights for each product does not count.
NUMBERS_AT_ONCE = 1 << 21
# With tiles more: some products in bfloat16 take twice as long a row with 640 to 1,280 rows as with 2,048.
_NUMBERS_IN_TILES = 1 << 22
# Numbers of tokens for which calls count more than memory.
_FEW = 1 << 15
# Transformers has a class of its own for "silu", and uses PyTorch's for "swish".
_SILU = {type(ACT2FN[name]) for name in ("silu", "swish")}


class InterdomainMLP(nn.Module):
    """SwiGLU with the default activation: `down(act(gate(x)) * up(x))`."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = residual_projection(config.intermediate_size, config.hidden_size)
        self.act_fn = activation(config.hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states
        # A graph is to hold for any size of x, so that it asks for none.
        if not torch.compiler.is_compiling() and x.numel() > _FEW and self._is_plain(x):
            return self._by_pieces(x.reshape(-1, x.shape[-1])).view(x.shape)
        gate, up = project_all((self.gate_proj, self.up_proj), x)
        return project(self.down_proj, self.act_fn(gate) * up)

    def _is_plain(self, x: torch.Tensor) -> bool:
        own, kind = (self.gate_proj, self.up_proj, self.down_proj), type(self.act_fn)
        if not is_plain(x, x.dtype) or kind not in _SILU or not is_untouched(self.act_fn, kind, x.device):
            return False
        # Products into given memory do not heed autocast.
        if x.dtype not in (*FULL_PRECISION, torch.bfloat16) or torch.is_autocast_enabled(x.device.type):
            return False
        return all(is_untouched(p, nn.Linear, x.device) and p.bias is None and p.weight.dtype == x.dtype for p in own)

    def _by_pieces(self, x: torch.Tensor) -> torch.Tensor:
        """`[N, hidden_size]`, some tokens at a time in the same memory: fresh memory costs as much as an activation."""
        gate, up, down = (p.weight.mT for p in (self.gate_proj, self.up_proj, self.down_proj))
        numbers = _NUMBERS_IN_TILES if multiplies_in_tiles(x) else NUMBERS_AT_ONCE
        size = min(max(1, numbers // gate.shape[1]), x.shape[0])
        between, output = x.new_empty(2, size, gate.shape[1]), torch.empty_like(x)
        for piece, into in zip(x.split(size), output.split(size), strict=True):
            opened, values = between[:, : piece.shape[0]].unbind()
            F.silu(torch.mm(piece, gate, out=opened), inplace=True).mul_(torch.mm(piece, up, out=values))
            torch.mm(opened, down, out=into)
        return output
