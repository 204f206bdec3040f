"""The cache: recurrent layers hold a state of fixed size, softmax layers their keys and values."""

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)

from .op_interdomain import state_after


class Inputs(NamedTuple):
    """What the tokens of one forward put into a recurrent layer, kept only while the cache records.

    `convolved` are the inputs of the convolutions, `[B, T, W]` each, `key` `[B, T, G, R]`, `value` `[B, T, G, D]` (with
    its constant column, if the readout is normalised) and `mask` `[B, T]` bool, False for pads.
    """

    convolved: tuple[torch.Tensor, ...]
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor

    def between(self, start: int, stop: int) -> "Inputs":
        return self.map(lambda x: x[:, start:stop])

    def then(self, later: "Inputs") -> "Inputs":
        first, second = [*self.convolved, *self[1:]], [*later.convolved, *later[1:]]
        *convolved, key, value, mask = (torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
        return Inputs(tuple(convolved), key, value, mask)

    def map(self, function) -> "Inputs":
        return Inputs(tuple(map(function, self.convolved)), *map(function, self[1:]))


class Recurrence(NamedTuple):
    """What moves a state forward: `log_decay` and `input_matrix`, `[G, M, 2]` each, as in `interdomain_attention`."""

    log_decay: torch.Tensor
    input_matrix: torch.Tensor


class InterdomainLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """One recurrent layer: `recurrent_states[0]` `[B, G, 2, M, R + D]`, `conv_states[i]` `[B, W, kernel - 1]` and the
    number of tokens seen.

    The tensors are made by the first forward and then overwritten in place, so their addresses stay. While recording
    (`activate_past_recording`), the layer also keeps what the last `max_rollback` tokens put in, and the state before
    them: `crop(-n)` then replays all but the last n.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    cumulative_length: Any

    def __init__(
        self, window_size: int = 3, max_rollback: int = 64, state_dtype: torch.dtype = torch.float32, **kwargs
    ):
        CacheLayerMixin.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=1)
        self.conv_states: dict[int, torch.Tensor] = {}
        self.cumulative_length = 0
        self.window_size = window_size
        self.max_rollback = max_rollback
        self.state_dtype = state_dtype
        self.recorded: Inputs | None = None
        self.base: tuple[list[torch.Tensor], torch.Tensor] | None = None
        self.recurrence: Recurrence | None = None

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    # What the mixer reads and writes.

    def lazy_initialization(self, windows: list[torch.Tensor], state: torch.Tensor) -> None:
        """Make zero tensors shaped like these, in place from now on."""
        self.device, self.dtype = state.device, self.state_dtype
        self.batch_size = state.shape[0]
        self.conv_states = {
            i: torch.zeros_like(w, memory_format=torch.contiguous_format) for i, w in enumerate(windows)
        }
        self.recurrent_states = {
            0: torch.zeros_like(state, dtype=self.state_dtype, memory_format=torch.contiguous_format)
        }
        self.is_conv_states_initialized = dict.fromkeys(self.conv_states, True)
        self.is_recurrent_states_initialized = {0: True}
        self.is_initialized = True
        if not torch.compiler.is_compiling():
            for tensor in self._tensors():
                torch._dynamo.mark_static_address(tensor)

    @property
    def windows(self) -> list[torch.Tensor] | None:
        return list(self.conv_states.values()) if self.is_initialized else None

    @property
    def state(self) -> torch.Tensor | None:
        return self.recurrent_states[0] if self.is_initialized else None

    def write(self, windows: list[torch.Tensor], state: torch.Tensor, tokens: int) -> None:
        """Overwrite windows and state after `tokens` more tokens."""
        if not self.is_initialized:
            self.lazy_initialization(windows, state)
        for i, window in enumerate(windows):
            self.conv_states[i] = _store(self.conv_states[i], window)
        self.recurrent_states[0] = _store(self.recurrent_states[0], state)
        self.saw(tokens)

    def thaw(self) -> None:
        """Replace tensors made in inference mode, which cannot be changed outside of it."""
        if self.is_initialized and not torch.compiler.is_compiling() and _is_frozen(self.state):
            self._map(torch.clone)

    def held(self) -> list[torch.Tensor]:
        """The windows and the state."""
        return [*self.windows, self.state]

    def saw(self, tokens: int) -> None:
        self.cumulative_length += tokens
        self.has_previous_state[0] = True

    # Positions and masks.

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def update(self, key_states, value_states, *args, **kwargs):
        # `DynamicCache` is rebuilt from (None, None) pairs when processes gather their outputs.
        if key_states is None and value_states is None:
            return None, None
        raise ValueError("An interdomain layer keeps a recurrent state, not keys and values; use `write`.")

    def update_conv_state(self, conv_states, state_idx=0, **kwargs):
        raise ValueError("An interdomain layer writes its windows and state together; use `write`.")

    def update_recurrent_state(self, recurrent_states, state_idx=0, **kwargs):
        raise ValueError("An interdomain layer writes its windows and state together; use `write`.")

    # Taking tokens back.

    def record(self, inputs: Inputs, recurrence: Recurrence) -> None:
        """Note what a forward is about to put in; called before `write`."""
        inputs = inputs.map(torch.Tensor.detach)
        self.recurrence = Recurrence(*(p.detach() for p in recurrence))
        if self.recorded is None:
            if self.is_initialized:
                self.base = ([w.detach().clone() for w in self.windows], self.state.detach().clone())
            self.recorded = inputs
        else:
            self.recorded = self.recorded.then(inputs)
        # All of a short forward can be taken back, of the prompt only its end.
        kept = max(self.max_rollback, inputs.key.shape[1] if self.is_initialized else 0)
        excess = self.recorded.key.shape[1] - kept
        if excess > 0:
            self.base = self._replay(self.recorded.between(0, excess))
            self.recorded = self.recorded.between(excess, excess + kept).map(torch.clone)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise if `crop` with this argument cannot be done, before anything is changed."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes 0 or a negative number of tokens for a recurrent state, got {tokens_to_remove}; pass -n "
                "to take the last n back."
            )
        if tokens_to_remove == 0:
            return
        if not self.record_past:
            raise ValueError(
                "crop needs the past: call activate_past_recording() on the cache before the first forward."
            )
        available = 0 if self.recorded is None else self.recorded.key.shape[1]
        if -tokens_to_remove > available:
            raise ValueError(
                f"crop can take back the last {available} tokens, got {-tokens_to_remove}; raise max_rollback in the "
                "configuration."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens (0 takes none), as the library's caches count them."""
        self.check_crop(tokens_to_remove)
        if tokens_to_remove == 0:
            return
        self.thaw()
        kept = self.recorded.between(0, self.recorded.key.shape[1] + tokens_to_remove)
        windows, state = self._replay(kept)
        for i, window in enumerate(windows):
            self.conv_states[i] = _store(self.conv_states[i], window)
        self.recurrent_states[0] = _store(self.recurrent_states[0], state)
        self.recorded = kept
        self.cumulative_length += tokens_to_remove

    def _replay(self, inputs: Inputs) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Windows and state after `inputs`, starting from `base`."""
        windows, state = (None, None) if self.base is None else self.base
        if windows is None:
            windows = [x.new_zeros(x.shape[0], x.shape[2], self.window_size) for x in inputs.convolved]
        windows = [_last_inputs(w, x, inputs.mask) for w, x in zip(windows, inputs.convolved, strict=True)]
        return windows, state_after(
            inputs.key, inputs.value, self.recurrence[0], self.recurrence[1], state, inputs.mask
        )

    # Rows: beams, several sequences a prompt, selections.

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._map_rows(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def reset(self) -> None:
        self.thaw()
        for tensor in self._tensors():
            tensor.zero_()
        self.recorded = self.base = None
        self.has_previous_state[0] = False
        self.cumulative_length *= 0

    # Devices and dtypes.

    def to(self, device=None, dtype: torch.dtype | None = None) -> None:
        if dtype is not None:
            self.state_dtype = self.dtype = dtype
        if not self.is_initialized:
            return
        self._map(lambda x: x.to(device))
        self.device = self.state.device
        if dtype is not None:
            self.recurrent_states[0] = self.recurrent_states[0].to(dtype)
            self.conv_states = {i: w.to(dtype) for i, w in self.conv_states.items()}

    def offload(self) -> None:
        device = self.device
        self.to("cpu")
        self.device = device

    def prefetch(self) -> None:
        self.to(self.device)

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.conv_states.values(), self.recurrent_states[0]] if self.is_initialized else []

    def _map(self, function) -> None:
        if not self.is_initialized:
            return
        self.conv_states = {i: function(w) for i, w in self.conv_states.items()}
        self.recurrent_states[0] = function(self.recurrent_states[0])
        if self.recorded is not None:
            self.recorded = self.recorded.map(function)
        if self.base is not None:
            self.base = ([function(w) for w in self.base[0]], function(self.base[1]))

    def _map_rows(self, function) -> None:
        """Apply to every tensor with a batch axis; in place where the number of rows stays, so that addresses stay."""
        if not self.is_initialized:
            return
        self.thaw()
        tensors = dict(self.conv_states), self.recurrent_states[0]
        self._map(function)
        if self.state.shape[0] == tensors[1].shape[0]:
            self.conv_states = {i: _store(tensors[0][i], w) for i, w in self.conv_states.items()}
            self.recurrent_states[0] = _store(tensors[1], self.state)
        self.batch_size = self.state.shape[0]


class InterdomainStaticLayer(InterdomainLayer):
    """The same with the token count as a tensor: a compiled decode step need not be compiled again as it grows."""

    is_compileable = True

    def __init__(self, max_cache_len: int, **kwargs):
        super().__init__(**kwargs)
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.tensor(0, dtype=torch.long)

    def lazy_initialization(self, windows: list[torch.Tensor], state: torch.Tensor) -> None:
        self.cumulative_length = self.cumulative_length.to(state.device)
        super().lazy_initialization(windows, state)

    def _tensors(self) -> list[torch.Tensor]:
        return [*super()._tensors(), self.cumulative_length] if self.is_initialized else []

    def saw(self, tokens: int) -> None:
        self.cumulative_length.add_(tokens)
        self.has_previous_state[0] = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def to(self, device=None, dtype: torch.dtype | None = None) -> None:
        super().to(device, dtype)
        if self.is_initialized:
            self.cumulative_length = self.cumulative_length.to(device)


class _InterdomainCacheMixin:
    """What both caches share."""

    layers: list

    def allow_rollback(self, tokens: int) -> None:
        """Let recurrent layers take back at least so many tokens from now on."""
        for layer in self.layers:
            if isinstance(layer, InterdomainLayer):
                layer.max_rollback = max(layer.max_rollback, tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens in all layers, or in none if one cannot."""
        recurrent = [layer for layer in self.layers if isinstance(layer, InterdomainLayer)]
        for layer in recurrent:
            layer.check_crop(tokens_to_remove)
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    def to(self, device=None, dtype: torch.dtype | None = None):
        """Move every layer to a device, and its states to a dtype; returns the cache."""
        for layer in self.layers:
            if isinstance(layer, InterdomainLayer):
                layer.to(device, dtype)
            elif layer.is_initialized:
                layer.keys, layer.values = layer.keys.to(device, dtype), layer.values.to(device, dtype)
                layer.device, layer.dtype = layer.keys.device, layer.keys.dtype
                if isinstance(layer, StaticLayer):
                    layer.cumulative_length = layer.cumulative_length.to(device)
        return self

    def state_bytes(self) -> int:
        """Bytes of the recurrent states and convolution windows: the part of the cache that does not grow."""
        tensors = [x for layer in self.layers if isinstance(layer, InterdomainLayer) for x in layer._tensors()]
        return sum(x.numel() * x.element_size() for x in tensors)


class InterdomainCache(_InterdomainCacheMixin, DynamicCache):
    """The cache of an Interdomain model: what `generate()` and a forward with `use_cache=True` make.

    Args:
        config: the model's `InterdomainConfig`.

    Example:

        >>> from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainForCausalLM
        >>> config = InterdomainConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        >>> model = InterdomainForCausalLM(config).eval()
        >>> cache = InterdomainCache(config)
        >>> output = model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> cache.get_seq_length()
        3
    """

    def __init__(self, config):
        recurrent = _recurrent_arguments(config)
        Cache.__init__(
            self,
            layers=[
                InterdomainLayer(**recurrent) if kind == "linear_attention" else DynamicLayer()
                for kind in config.layer_types
            ],
        )


class InterdomainStaticCache(_InterdomainCacheMixin, StaticCache):
    """The same with fixed addresses everywhere, for a compiled or captured decode step.

    Args:
        config: the model's `InterdomainConfig`.
        max_cache_len: tokens that softmax layers can hold; recurrent layers have no limit.
    """

    def __init__(self, config, max_cache_len: int):
        recurrent = _recurrent_arguments(config)
        Cache.__init__(
            self,
            layers=[
                InterdomainStaticLayer(max_cache_len=max_cache_len, **recurrent)
                if kind == "linear_attention"
                else StaticLayer(max_cache_len=max_cache_len)
                for kind in config.layer_types
            ],
        )


def _recurrent_arguments(config) -> dict:
    return {
        "window_size": config.conv_kernel - 1,
        "max_rollback": config.max_rollback,
        "state_dtype": getattr(torch, config.state_dtype),
    }


def _store(buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Copy in place where that is possible; otherwise a tensor to use instead of the buffer."""
    if new is buffer:
        return buffer
    if torch.is_grad_enabled() and new.requires_grad:
        return new.to(buffer.dtype)  # the caller differentiates through the cache
    if not torch.compiler.is_compiling() and (buffer.requires_grad or _is_frozen(buffer)):
        return new.to(buffer.dtype).clone()
    return buffer.copy_(new)


def _is_frozen(tensor: torch.Tensor) -> bool:
    return tensor.is_inference() and not torch.is_inference_mode_enabled()


def _last_inputs(window: torch.Tensor, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The window `[B, W, kernel - 1]` after `inputs` `[B, T, W]`, pads left out."""
    together = torch.cat([window.to(inputs.dtype), inputs.mT], dim=-1)
    size = window.shape[-1]
    if mask.all():
        return together[..., together.shape[-1] - size :]
    real = torch.cat([mask.new_ones(mask.shape[0], size), mask], dim=1)
    # A stable sort brings the real inputs to the end in their order.
    order = real.long().sort(dim=1, stable=True).indices[:, real.shape[1] - size :]
    return together.gather(2, order[:, None].expand(-1, together.shape[1], -1))
