"""What a token mixer says of itself, so that the model, its caches and its configuration need not know it."""

from typing import ClassVar

import torch
from torch import nn
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer

from ..cache.recurrent import RecurrentLayer, StaticRecurrentLayer
from ..layers.versions import takes_cache


def groups_not_shardable(config, processes: int) -> str | None:
    """`TokenMixer.why_not_shardable` of mixers whose states, or keys and values, are those of `num_key_value_heads`
    groups.
    """
    groups = config.num_key_value_heads
    return f"it does not divide num_key_value_heads = {groups}" if groups % processes else None


class TokenMixer(nn.Module):
    """The base of all token mixers, the defaults those of a mixer with one recurrent state.

    Attributes:
        layer_type: what Transformers calls such a layer: "linear_attention" (it keeps a state in `layers[layer_idx]` of
            the cache, and gets pads and packed documents as a `Packing`), "full_attention" (it updates keys and values
            there, and gets a mask), or "hybrid" (both). Its `forward` may call the cache `past_key_values`, `cache` or
            `cache_params`.
        takes_dynamic_mask: whether it heeds `dynamic_mask` of the configuration.
        can_branch: a sparse branch can stand beside it; its class then has `written_shape(config)`.
        passes_state: it goes on from what other processes hold of a row, see `sequence_group` of the model.
        reads_forks: it goes on from any earlier token of a row that a `Packing` names, where texts fork.
        can_start_to_recall: `start="recall"` of the configuration has something to start in it.
        exact_states: names of the states that keep their dtype in a cache, whatever its `state_dtype`.
    """

    layer_type: ClassVar[str] = "linear_attention"
    takes_dynamic_mask: ClassVar[bool] = False
    can_branch: ClassVar[bool] = False
    passes_state: ClassVar[bool] = False
    reads_forks: ClassVar[bool] = False
    can_start_to_recall: ClassVar[bool] = False
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
    def check_config(cls, config) -> None:
        """Raise a ValueError, one sentence, where such a layer cannot be made from a configuration."""

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

    @classmethod
    def why_not_shardable(cls, config, processes: int) -> str | None:
        """Why the heads cannot be shared out over so many processes of tensor parallelism; None where they can."""
        return f"{cls.__name__} layers do not say how to share theirs"

    @classmethod
    def head_plan(cls, config) -> dict[str, str]:
        """Where they can: styles of the library's tensor parallelism by module or parameter, "" the mixer itself."""
        raise NotImplementedError(f"{cls.__name__} does not say how its heads are divided: write head_plan.")

    def share_heads(self, processes: int) -> None:
        """Hold one part in so many of the heads from now on, of which the parameters are given by then."""
        raise NotImplementedError(f"{type(self).__name__} does not know its part of the heads: write share_heads.")

    def select_mask(self, masks: dict):
        """Of the masks of a forward, by kind of layer, the one it is called with; of a "hybrid" layer, all."""
        return masks if self.layer_type == "hybrid" else masks.get(self.layer_type)

    @classmethod
    def written_shape(cls, config) -> tuple[int, int]:
        """Groups and numbers a group of what a recurrence writes, which a sparse branch reads a second time."""
        raise NotImplementedError(f"{cls.__name__} does not say what it writes: write written_shape.")

    @classmethod
    def rotated_dims(cls, config) -> set[int]:
        """The head sizes for which it reads `position_embeddings`."""
        return set()

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        """The numbers that it keeps of one sequence, as `InterdomainConfig.state_sizes` sums them up."""
        raise ValueError(
            f"state_sizes does not know {cls.__name__} layers; state_bytes() of a cache counts what is kept."
        )
