"""The caches of a model: one layer for each of its token mixers, which say themselves what they keep."""

from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticCache, StaticLayer

from .cache_recurrent import RecurrentLayer
from .cache_window import WindowLayer
from .registry_interdomain import TOKEN_MIXERS


class _InterdomainCacheMixin:
    """What both caches share."""

    layers: list

    def recurrent_layers(self) -> list[RecurrentLayer]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def allow_rollback(self, tokens: int) -> None:
        """Let layers of a fixed size take back at least so many tokens from now on."""
        for layer in self.layers:
            if hasattr(layer, "max_rollback"):
                layer.max_rollback = max(layer.max_rollback, tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens in all layers, or in none if one cannot."""
        if tokens_to_remove and not all(hasattr(layer, "crop") for layer in self.layers):
            raise ValueError(
                "A static cache of keys and values cannot take tokens back: use InterdomainCache for that."
            )
        for layer in self.layers:
            if hasattr(layer, "check_crop"):
                layer.check_crop(tokens_to_remove)
        for layer in self.layers if tokens_to_remove else ():
            layer.crop(tokens_to_remove)

    def to(self, device=None, dtype: torch.dtype | None = None):
        """Move every layer to a device, and its states to a dtype; returns the cache."""
        for layer in self.layers:
            if isinstance(layer, (RecurrentLayer, WindowLayer)):
                layer.to(device, dtype)
            elif layer.is_initialized:
                layer.keys, layer.values = layer.keys.to(device, dtype), layer.values.to(device, dtype)
                layer.device, layer.dtype = layer.keys.device, layer.keys.dtype
                if isinstance(layer, StaticLayer):
                    layer.cumulative_length = layer.cumulative_length.to(device)
        return self

    def state_bytes(self) -> int:
        """Bytes of the recurrent states, of the windows of convolutions and of keys: the part that does not grow."""
        fixed = [layer for layer in self.layers if isinstance(layer, (RecurrentLayer, WindowLayer))]
        return sum(x.numel() * x.element_size() for layer in fixed for x in layer.tensors())


class InterdomainCache(_InterdomainCacheMixin, DynamicCache):
    """The cache of an Interdomain model: what `generate()` and a forward with `use_cache=True` make.

    Args:
        config: the model's `InterdomainConfig`.
        offloading: of the library's caches; a state of fixed size cannot be offloaded, so only False is possible.

    Raises:
        ValueError: when offloading is asked for, or `config` is not of this family of models.

    Example:

        >>> from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainForCausalLM
        >>> config = InterdomainConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        >>> model = InterdomainForCausalLM(config).eval()
        >>> cache = InterdomainCache(config)
        >>> output = model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> cache.get_seq_length()
        3
    """

    def __init__(self, config, offloading: bool = False, **kwargs):
        _check_arguments(config, offloading)
        Cache.__init__(self, layers=[TOKEN_MIXERS[name].make_cache_layer(config) for name in config.mixers_per_layer])


class InterdomainStaticCache(_InterdomainCacheMixin, StaticCache):
    """The same with fixed addresses everywhere, for a compiled or captured decode step.

    Args:
        config: the model's `InterdomainConfig`.
        max_cache_len: tokens that softmax layers can hold; recurrent layers have no limit.
        offloading: as in `InterdomainCache`.
    """

    def __init__(self, config, max_cache_len: int, offloading: bool = False, **kwargs):
        _check_arguments(config, offloading)
        names = config.mixers_per_layer
        Cache.__init__(self, layers=[TOKEN_MIXERS[name].make_cache_layer(config, max_cache_len) for name in names])


def ready_to_step(cache: Cache) -> bool:
    """Whether every recurrent layer already has what a single token updates in place."""
    return all(layer.is_initialized for layer in cache.layers if isinstance(layer, RecurrentLayer))


def kind_of(layer) -> str:
    """What a layer of any cache holds: "recurrent", "window", "keys_values" or "other"."""
    if isinstance(layer, RecurrentLayer):
        return "recurrent"
    if isinstance(layer, WindowLayer):
        return "window"
    return "keys_values" if hasattr(layer, "keys") and not hasattr(layer, "recurrent_states") else "other"


class Held(NamedTuple):
    """What a layer of any cache holds, once it holds anything: shapes, and the device of a state."""

    shapes: list[list[int]] | None = None
    device: torch.device | None = None


def look_into(layer) -> Held:
    """Shapes are as `cache_shapes` of a mixer gives them; of keys and values batch, heads and head size."""
    if isinstance(layer, RecurrentLayer):
        held = layer.held()
        return Held([list(x.shape) for x in held], held[-1].device) if held else Held()
    keys = getattr(layer, "keys", None)
    if keys is None or not layer.is_initialized or keys.ndim != 4:
        return Held()
    return Held([[*keys.shape[:2], keys.shape[3]]])


def _check_arguments(config, offloading: bool) -> None:
    if not hasattr(config, "mixers_per_layer"):
        raise ValueError(
            f"This cache is made for the config of an Interdomain model, got {type(config).__name__}; the library's "
            "DynamicCache and StaticCache are for other models."
        )
    if offloading:
        raise ValueError("A state of fixed size is needed at every token and is not offloaded: leave offloading=False.")
