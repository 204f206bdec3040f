"""State space duality as a token mixer: with rotary embeddings that of Cheems, with a convolution Mamba-2."""

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ...layers.common import InterdomainRMSNorm
from ...layers.operators import Operators
from ...layers.rotary import rotate
from ...ops.ssd.entry import ssd_state_after
from ..recurrent import RecurrentMixer, placed_map
from .configuration import SSDSpecification
from .recurrence import SSDRecurrence, discretized


class GroupedRMSNorm(InterdomainRMSNorm):
    """RMSNorm over each of `groups` equal parts of the last axis, with a weight a number."""

    def __init__(self, size: int, groups: int, eps: float):
        super().__init__(size, eps)
        self.width = size // groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (-1, self.width))
        return self.weight * F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2)


class SSDMixer(SSDSpecification, RecurrentMixer):
    """`S_t = exp(dt a) S_{t-1} + dt x B^T`, `y_t = S_t C + D x` ("Wonderful Matrices", arXiv 2407.16958; Mamba-2).

    `q_proj` makes C, `k_proj` B, `v_proj` x and `dt_proj` the step of each head, which is not convolved. With
    `rope_placement` B and C are rotated. Mamba-2 is `ssd_conv_kernel=4`, `ssd_activation="silu"`, `use_output_gate` and
    `ssd_norm="after_gate"`, without feed-forward layers.
    """

    passes_state = True
    operators = Operators.of(ssd_state_after)

    def __init__(self, config, layer_idx: int):
        self.size, width = config.ssd_state_size, self.head_width(config)
        super().__init__(config, layer_idx, width)
        self.activation = None if config.ssd_activation is None else ACT2FN[config.ssd_activation]
        self.norm_after_gate = config.ssd_norm == "after_gate"
        outputs = self.output_heads(config) * width
        self.norm = None
        if config.ssd_norm is not None:
            self.norm = GroupedRMSNorm(outputs, config.ssd_groups, config.rms_norm_eps)
        self.recurrence = SSDRecurrence(config, self.output_heads(config))

    def _tokens(self, projections, cos_sin):
        *convolved, dt = projections
        if self.activation is not None:
            convolved = [self.activation(x) for x in convolved]
        query, key, value = convolved
        query, key = (x.unflatten(-1, (-1, self.size)) for x in (query, key))
        if cos_sin is not None:
            query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
        return query, key, value.unflatten(-1, (dt.shape[-1], -1)), dt

    def attention_map(self, tokens, packing):
        ends = None if packing is None else packing.cu_seqlens
        return placed_map(self.recurrence(*tokens, mapped=True, cu_seqlens=ends), packing)

    def _written(self, tokens):
        return tokens[2]

    def _recorded(self, tokens):
        return tokens[1:]

    @staticmethod
    def replay_state(operators, state, key, value, dt, mask, *transition):
        inputs, log_decay = discretized(value, dt, *transition)
        return operators.ssd_state_after(state, key, inputs, log_decay, mask)

    @staticmethod
    def total_decay(mask, key, value, dt, *transition):
        log_decay = discretized(value[..., :0], dt, *transition)[1]  # of the steps alone
        return torch.where(mask[..., None], log_decay, 0).double().sum(1)

    def decay_state(self, state, total_decay, *transition):
        return total_decay.exp()[..., None, None].to(state.dtype) * state

    def _way_out(self, output, hidden_states):
        if self.norm is None:
            return super()._way_out(output, hidden_states)
        if not self.norm_after_gate:
            output = self.norm(output)
        if self.g_proj is not None:
            wide = torch.promote_types(hidden_states.dtype, torch.float32)
            output = output * F.silu(self.g_proj(hidden_states).to(wide))
        if self.norm_after_gate:
            output = self.norm(output)
        return output.to(hidden_states.dtype)
