"""Softmax attention with rotary embeddings, through Transformers' attention interface."""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...cache.window import StaticWindowLayer, WindowLayer
from ...layers.common import residual_projection
from ...layers.rotary import rotate
from ...ops.common.cpu import autocasts
from ...ops.common.packing import Packing
from ...ops.common.window import Keys, best, seen, token_documents
from ..base import TokenMixer
from .configuration import SoftmaxSpecification
from .dynamic_mask import bias_order, make_dynamic_mask

# Tokens that attend together to a window of keys, at least: the mask is made anew for each piece.
_PIECE = 256


class SoftmaxMixer(SoftmaxSpecification, TokenMixer):
    """Grouped-query attention, causal unless `config.bidirectional`; any `attn_implementation` of the library."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = not config.bidirectional
        self.window = config.dynamic_mask_window
        self.key_heads = config.num_key_value_heads
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.make_value(config)
        self.dynamic_mask = make_dynamic_mask(config)
        self.o_proj = residual_projection(queries, config.hidden_size, config.attention_bias)

    def make_value(self, config) -> None:
        """The modules of `value`."""
        values = config.num_key_value_heads * config.head_dim
        self.v_proj = nn.Linear(config.hidden_size, values, bias=config.attention_bias)

    def value(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, T, hidden_size]` to the values of all heads, one behind the other."""
        return self.v_proj(hidden_states)

    @classmethod
    def make_cache_layer(cls, config, max_cache_len: int | None = None):
        if config.dynamic_mask_window is None:
            return super().make_cache_layer(config, max_cache_len)
        arguments = {"window": config.dynamic_mask_window, "max_rollback": config.max_rollback}
        return WindowLayer(**arguments) if max_cache_len is None else StaticWindowLayer(max_cache_len, **arguments)

    def cache_shapes(self, batch: int) -> list[list[int]]:
        """Batch, heads and head size of the keys a cache of this layer holds."""
        return [[batch, self.key_heads, self.kept_dim(self.config)]]

    def share_heads(self, processes: int) -> None:
        self.key_heads //= processes

    def select_mask(self, masks: dict):
        """With a window it makes its own, of the real tokens, which come as a `Packing` or, for a step, `[B, 1]`."""
        return masks.get(self.layer_type if self.window is None else "linear_attention")

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
            for projection in (self.q_proj, self.k_proj, self.value)
        )
        if position_embeddings is not None:
            cos_sin = position_embeddings[self.head_dim]
            query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
        if self.dynamic_mask is not None:
            query, key, value = self.dynamic_mask(query, key, value, kwargs["position_ids"])
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if self.window is not None:
            layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
            new = _new_keys(key, value, 0 if layer is None else layer.get_seq_length(), attention_mask, packing)
            output, weights = self._attend_in_window(query, new, layer, **kwargs)
        else:
            if past_key_values is not None:
                layers, here = past_key_values.layers, self.layer_idx
                # The library's own cache may make a layer when it is first filled.
                if here < len(layers) and layers[here].is_initialized and layers[here].keys.dtype != key.dtype:
                    _go_on_as(layers[here], key, value)
                key, value = past_key_values.update(key, value, self.layer_idx)
            output, weights = self._attend(query, key, value, attention_mask, **kwargs)
        output = output[..., : self.head_dim]  # without the columns of a bias
        return self.o_proj(output.reshape(*shape, -1).contiguous()), weights

    def _attend(self, query, key, value, mask, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        return attend(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **kwargs)

    def _attend_in_window(self, query, new: Keys, layer: WindowLayer | None, **kwargs):
        """`[B, H, T, size]` over what the layer of a cache holds and new keys: a piece of them after the other.

        A piece attends to itself and to the window before it, so time and memory grow with T as with the window.
        """
        length, eager = query.shape[2], self.config._attn_implementation == "eager"
        # In one piece where weights are returned, and in a graph, which cannot have a varying number of pieces.
        together = eager or torch.compiler.is_compiling()
        size = max(self.window, _PIECE)
        pieces = [(0, length)] if together else [(i, min(i + size, length)) for i in range(0, length, size)]
        held, last = (None, 0) if layer is None else (_held(layer, new), layer.to_keep(length))
        outputs, weights, whole = [], None, True
        for start, stop in pieces:
            tokens = Keys(*(x[:, :, start:stop] for x in new))
            keys = tokens if held is None else held.then(tokens)
            mask = seen(keys, stop - start, self.window).repeat_interleave(self.num_key_value_groups, dim=1)
            if eager:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
            output, weights = self._attend(query[:, :, start:stop], keys.key, keys.value, mask, **kwargs)
            outputs.append(output)
            if layer is not None or stop < length:
                held = best(keys, self.window, max(0, last - (length - stop)))
                whole = whole and held.bias.shape == keys.bias.shape
        if layer is not None:
            layer.store(held, length, last, whole)
        return torch.cat(outputs, dim=1), weights


def _go_on_as(layer, key: torch.Tensor, value: torch.Tensor) -> None:
    """Keep keys and values in the dtype of new ones, since the model was cast; under autocast any are attended to."""
    if not autocasts(key.device):
        layer.keys, layer.values = layer.keys.to(key.dtype), layer.values.to(value.dtype)
        layer.dtype = key.dtype


def _held(layer: WindowLayer, new: Keys) -> Keys | None:
    """What a layer holds, in the dtypes of new keys, which are others where the model or the cache was cast."""
    held = layer.held()
    alike = held is None or (held.key.dtype, held.bias.dtype) == (new.key.dtype, new.bias.dtype)
    if not alike and not autocasts(new.key.device):
        layer.bias = bias_order(held.key.to(new.bias.dtype))
        _go_on_as(layer, new.key, new.value)
        held = layer.held()
    return held


def _new_keys(key, value, before, mask: torch.Tensor | None, packing: Packing | None) -> Keys:
    """The keys of this forward, after `before` tokens, with their documents and pads."""
    batch, groups, length = key.shape[:3]
    places = (torch.arange(length, device=key.device) + before).expand(batch, length)
    documents = None
    if packing is not None:
        mask = packing.mask
        documents = None if packing.documents is None else packing.unpack(packing.documents.view(1, -1))
    documents = token_documents(None if mask is None else mask.bool(), documents, places)
    places, documents = (x[:, None].expand(batch, groups, length) for x in (places, documents))
    return Keys(key, value, bias_order(key), places, documents)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention written out, for `attn_implementation="eager"`: the one that returns its weights."""
    repeats = module.num_key_value_groups
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        hidden = attention_mask.dtype == torch.bool
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~attention_mask, lowest) if hidden else scores + attention_mask
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = nn.functional.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights
