"""Softmax attention with rotary embeddings, through Transformers' attention interface."""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .mixer_common import TokenMixer
from .module_common import residual_projection
from .module_rotary import rotate
from .op_common import Packing


class SoftmaxMixer(TokenMixer):
    """Grouped-query attention, causal unless `config.bidirectional`; any `attn_implementation` of the library."""

    layer_type = "full_attention"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = not config.bidirectional
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = residual_projection(queries, config.hidden_size)

    def cache_shapes(self, batch: int) -> list[list[int]]:
        """Batch, heads and head size of the keys a cache of this layer holds."""
        return [[batch, self.config.num_key_value_heads, self.head_dim]]

    @classmethod
    def rotated_dims(cls, config) -> set[int]:
        return {config.head_dim}

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        return {"keys_values": 2 * config.num_key_value_heads * config.head_dim * context_length}

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        packing: Packing | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[B, T, hidden_size]` to the same and the attention weights, if the implementation returns them."""
        shape = hidden_states.shape[:-1]
        query, key, value = (
            projection(hidden_states).view(*shape, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if position_embeddings is not None:
            cos_sin = position_embeddings[self.head_dim]
            query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*shape, -1).contiguous()), weights


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention written out, for `attn_implementation="eager"`: the one that returns its weights."""
    repeats = module.num_key_value_groups
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = nn.functional.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights
