"""What an attention layer with a `dynamic_mask_window` holds between forwards: the keys of the largest biases."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..ops.common.window import NO_DOCUMENT, Keys, best
from .recurrent import FixedSize, _store

_NAMES = ("keys", "values", "bias", "places", "documents")


class WindowLayer(FixedSize, CacheLayerMixin):
    """The `window` keys a head that later tokens can see (`ops.common.window.Keys`), and how many tokens were read.

    While recording (`activate_past_recording`), it also keeps the last `2 * max_rollback` tokens and the keys that the
    first of them saw: `crop(-n)` then drops the last n, and after `max_rollback` tokens were taken back as many more
    can be. Without a record tokens can be taken back until the first key has left.
    """

    kind, what = "window", "a window of keys"
    keys: Any
    values: Any

    def __init__(self, window: int, max_rollback: int = 64):
        super().__init__()
        self.window, self.max_rollback = window, max_rollback
        self.bias: torch.Tensor | None = None
        self.places: torch.Tensor | None = None
        self.documents: torch.Tensor | None = None
        self.record_past = False
        self.cumulative_length = 0
        self.available = 0  # tokens that can be taken back

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    # What the mixer reads and writes.

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def held(self) -> Keys | None:
        return Keys(*self.tensors()) if self.is_initialized else None

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in _NAMES] if self.is_initialized else []

    def to_keep(self, tokens: int) -> int:
        """How many of the last tokens a forward of so many must keep, whatever their bias."""
        if not self.record_past:
            return 0
        together = tokens if self.is_initialized else 0  # all of a short forward, not of a prompt
        return self.max_rollback + max(self.max_rollback, together)

    def store(self, keys: Keys, tokens: int, kept: int, whole: bool) -> None:
        """Hold the keys after `tokens` more: what `best` chose, among it the last `kept`, or the `whole` text."""
        if not self.is_initialized:
            self.lazy_initialization(keys.key, keys.value)
        self.cumulative_length += tokens  # first, so that a forward broken off after it is noticed
        self._set(keys)
        self.available = self.available + tokens if whole else min(self.available + tokens, kept)

    def _set(self, keys: Keys) -> None:
        for name, tensor in zip(_NAMES, keys, strict=True):
            setattr(self, name, tensor)

    # What a state file keeps.

    def named_tensors(self) -> dict[str, torch.Tensor]:
        return dict(zip(_NAMES, self.tensors()))

    def restore(self, tensors: dict[str, torch.Tensor], tokens: int) -> None:
        """Hold what `named_tensors` of a layer gave that had seen `tokens` tokens; this one has seen none."""
        self.store(Keys(*(tensors[name] for name in _NAMES)), tokens, kept=0, whole=False)

    # Taking tokens back.

    def activate_past_recording(self) -> None:
        self.record_past = True

    def check_crop(self, tokens_to_remove: int) -> None:
        super().check_crop(tokens_to_remove)
        if -tokens_to_remove > self.available:
            raise ValueError(
                f"crop can take back the last {self.available} tokens, got {-tokens_to_remove}: the keys before them "
                "have left the window; call activate_past_recording() before the first forward, or raise max_rollback "
                "in the configuration."
            )

    def _take_back(self, tokens: int) -> None:
        self.map_rows(lambda x: x[:, :, :-tokens])
        self.cumulative_length -= tokens
        self.available -= tokens

    def reset(self) -> None:
        for name in _NAMES:
            setattr(self, name, None)
        self.is_initialized = False
        self.cumulative_length = self.available = 0

    # Devices and dtypes.

    def to(self, device=None, dtype: torch.dtype | None = None) -> None:
        if not self.is_initialized:
            return
        for name, x in self.named_tensors().items():
            setattr(self, name, x.to(device))
        if dtype is not None:
            self.keys, self.values, self.dtype = self.keys.to(dtype), self.values.to(dtype), dtype
        self.device = self.keys.device

    def map_rows(self, function) -> None:
        if self.is_initialized:
            self._set(Keys(*(function(x) for x in self.tensors())))


class StaticWindowLayer(WindowLayer):
    """A `WindowLayer` with all its room from the start, written in place, and the token count as a tensor."""

    is_compileable = True

    def __init__(self, max_cache_len: int, **kwargs):
        super().__init__(**kwargs)
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.tensor(0, dtype=torch.long, device="cpu")

    @property
    def is_croppable(self) -> bool:
        return False

    def to_keep(self, tokens: int) -> int:
        return 0

    def make_room(self, keys: Keys) -> None:
        """Make a window of keys of no document, shaped like these, which is written in place from now on."""
        self.lazy_initialization(keys.key, keys.value)
        shape = (*keys.bias.shape[:2], self.window)
        self.keys, self.values = (x.new_zeros(*shape, x.shape[-1]) for x in keys[:2])
        self.bias, self.places = (x.new_zeros(shape) for x in keys[2:4])
        self.documents = keys.documents.new_full(shape, NO_DOCUMENT)
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            for tensor in (*self.tensors(), self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)

    def store(self, keys: Keys, tokens: int, kept: int, whole: bool) -> None:
        if not self.is_initialized:
            self.make_room(keys)
            keys = best(self.held().then(keys), self.window)
        self.cumulative_length.add_(tokens)  # first, as in the base class
        self._set(keys)

    def _set(self, keys: Keys) -> None:
        """In place where the number of rows stays."""
        for name, new in zip(_NAMES, keys, strict=True):
            old = getattr(self, name)
            setattr(self, name, _store(old, new) if old.shape == new.shape else new)

    def check_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "A static cache of a window of keys cannot take tokens back: use InterdomainCache for that."
            )

    def reset(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()
        if self.is_initialized:
            self.documents.fill_(NO_DOCUMENT)
        self.cumulative_length.zero_()

    def to(self, device=None, dtype: torch.dtype | None = None) -> None:
        super().to(device, dtype)
        if self.is_initialized:
            self.cumulative_length = self.cumulative_length.to(device)
