"""What a token mixer says of itself, so that the model and its caches need not know it."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer

from ..cache.recurrent import RecurrentLayer, StaticRecurrentLayer
from ..layers.versions import takes_cache
from .configuration import MixerSpecification


def mixers_of(layers: Iterable[Any]) -> "list[TokenMixer]":
    """Those of decoder layers, also where PEFT has wrapped one for a parameter of its own (`target_parameters`)."""
    found = [getattr(layer, "token_mixer", None) for layer in layers]
    if None in found:
        raise NotImplementedError(
            "A part of the layers is in other processes (pp_size), which these models do not know: spread them by "
            "tensor parallelism (tp_plan) or FSDP."
        )
    return [x if isinstance(x, TokenMixer) or not hasattr(x, "get_base_layer") else x.get_base_layer() for x in found]


class TokenMixer(MixerSpecification, nn.Module):
    """The base of all token mixers; what their configuration asks, and more attributes, are in `MixerSpecification`.

    A subclass has its last projection in `o_proj`, and `forward(hidden_states, attention_mask=None, cache=None,
    packing=None, **kwargs)` that returns mixed tokens `[B, T, hidden_size]` and None or attention weights. A layer of
    type "linear_attention" finds real tokens in `packing.mask` `[B, T]`, and in a decode step, which has no packing, in
    `attention_mask` `[B, 1]`. With a cache it calls `thaw()` of `cache.layers[layer_idx]`, reads `state` (None before
    the first tokens), and ends with `write(conv_states, {"state": state}, T)`.

    Attributes:
        passes_state: it goes on from what other processes hold of a row, see `sequence_group` of the model.
        reads_forks: it goes on from any earlier token of a row that a `Packing` names, where texts fork.
        exact_states: names of the states that keep their dtype in a cache, whatever its `state_dtype`.
    """

    passes_state: ClassVar[bool] = False
    reads_forks: ClassVar[bool] = False
    exact_states: ClassVar[tuple[str, ...]] = ()
    o_proj: nn.Module

    def __init_subclass__(cls, **kwargs) -> None:
        """Whichever of the names of a cache its `forward` has, it is called with any of them."""
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            cls.forward = takes_cache(cls.forward)

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx

    @classmethod
    def make_cache_layer(
        cls, config, max_cache_len: int | None = None
    ) -> CacheLayerMixin | LinearAttentionCacheLayerMixin:
        """What a cache holds of such a layer; of fixed addresses, when `max_cache_len` tokens are given."""
        if cls.layer_type == "full_attention":
            return DynamicLayer() if max_cache_len is None else StaticLayer(max_cache_len=max_cache_len)
        arguments = {"max_rollback": config.max_rollback, "state_dtype": getattr(torch, config.state_dtype)}
        arguments["exact_states"] = cls.exact_states
        if max_cache_len is None:
            return RecurrentLayer(**arguments)
        return StaticRecurrentLayer(max_cache_len=max_cache_len, **arguments)

    def cache_shapes(self, batch: int) -> list[list[int]]:
        """The shapes of what a cache holds of this layer: conv state, then states; or `[batch, heads, head size]`."""
        raise NotImplementedError(f"{type(self).__name__} does not say what a cache holds of it: write cache_shapes.")

    def share_heads(self, processes: int) -> None:
        """Hold one part in so many of the heads from now on, of which the parameters are given by then."""
        raise NotImplementedError(f"{type(self).__name__} does not know its part of the heads: write share_heads.")

    def select_mask(self, masks: dict):
        """Of the masks of a forward, by kind of layer, the one it is called with; of a "hybrid" layer, all."""
        return masks if self.layer_type == "hybrid" else masks.get(self.layer_type)
