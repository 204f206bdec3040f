"""What one recurrent layer keeps between forwards: tensors of fixed size, written in place."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .rollback import Piece, Record, Snapshot, check_recorded, copied, detached, map_states, own_constants


class FixedSize:
    """What cache layers of a fixed size share: rows, masks, devices. A mixer writes such a layer as a whole."""

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    what: str
    device: Any = None
    cumulative_length: Any

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply to every tensor with a batch axis."""
        raise NotImplementedError

    def to(self, device=None, dtype: torch.dtype | None = None) -> None:
        raise NotImplementedError

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_rows(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

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
        raise ValueError(f"This layer keeps {self.what}, not all keys and values: its mixer writes it as a whole.")

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise if `crop` with this argument cannot be done, before anything is changed."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes 0 or a negative number of tokens for {self.what}, got {tokens_to_remove}; pass -n to take "
                "the last n back."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens (0 takes none), as the library's caches count them."""
        self.check_crop(tokens_to_remove)
        if tokens_to_remove:
            self._take_back(-tokens_to_remove)

    def _take_back(self, tokens: int) -> None:
        raise NotImplementedError

    def offload(self) -> None:
        device = self.device
        self.to("cpu")
        self.device = device

    def prefetch(self) -> None:
        self.to(self.device)


def _committed(name: str) -> Any:
    """The library's name for these tensors, which cannot be read while inputs are pending."""

    def read(layer):
        if layer.pending:
            raise ValueError(
                f"The last {layer.pending} tokens of a draft are pending, and this state does not know them: call "
                "commit() of the layer, or of its cache, before reading it."
            )
        return getattr(layer, name)

    return property(read, lambda layer, tensors: setattr(layer, name, tensors))


class RecurrentLayer(FixedSize, LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """The last inputs of the convolutions, `conv_states` `[B, W, kernel - 1]`, the `states` by name, `[B, ...]` each,
    and how many tokens were read.

    The tensors are made by the first forward and then overwritten in place, so their addresses stay. While recording
    (`activate_past_recording`), the layer also keeps the inputs of at least the last `2 * max_rollback` tokens and what
    it held before them (`Record`): `crop(-n)` replays all but the last n of them, with the parameters that they were
    read with. After `max_rollback` tokens were taken back, as many more can be.

    A forward of a few tokens usually verifies a draft, of which most is then taken back. So its inputs are recorded and
    left pending: the states move when `commit()` replays those that remain. Whoever reads a state calls `commit()`
    first, except a mixer that verifies a draft from `resting_state` and the pending inputs; it says beforehand which
    constants it reads them with (`commit_unless`).
    """

    kind, what = "recurrent", "a recurrent state"
    conv_states = _committed("_conv_states")
    recurrent_states = _committed("_recurrent_states")
    _conv_states: dict[int, torch.Tensor]
    _recurrent_states: dict[int, torch.Tensor]
    paused = False  # recording goes on later
    torn = False  # being written, or left so by a forward that was broken off
    pending = 0  # how many of the last recorded tokens are pending
    _may_defer = False  # whether the mixer that records promises to commit before it reads
    # What moves the state on: as it was given last, and a record's own copies.
    _constants: tuple[tuple[torch.Tensor, ...] | None, tuple[torch.Tensor, ...]] = None, ()

    def __init__(
        self,
        max_rollback: int = 64,
        state_dtype: torch.dtype = torch.float32,
        exact_states: tuple[str, ...] = (),
        **kwargs,
    ):
        CacheLayerMixin.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=1)
        self.conv_states = {}
        self.state_names: tuple[str, ...] = ()
        self.kept_shapes: list[tuple[int, ...]] | None = None  # of conv state and states, without the rows
        self.cumulative_length = 0
        self.max_rollback = max_rollback
        self.state_dtype = state_dtype
        self.exact_states = exact_states
        self.recorded: Record | None = None
        self.kept = max_rollback

    @property
    def record_past(self) -> bool:
        return self._record_past and not self.paused

    @record_past.setter
    def record_past(self, recorded: bool) -> None:
        self._record_past, self.paused = recorded, False

    @property
    def is_croppable(self) -> bool:
        return self._record_past  # also while it is paused: there is nothing to take back then

    def _stored(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Conv state and states, without the pending inputs."""
        return list(self._conv_states.values()), dict(zip(self.state_names, self._recurrent_states.values()))

    # Pending inputs.

    def commit(self) -> None:
        """Let conv state and states take in the pending inputs."""
        if self.pending:
            found = self.recorded.after_last(self.pending, *self._stored())
            self.pending = 0
            self._store_all(*found)

    def committed(self) -> tuple[list[torch.Tensor] | None, dict[str, torch.Tensor] | None]:
        """Conv state and states after a `commit`; None of a layer that nothing was written to."""
        if self.pending:
            self.commit()
        if not self.is_initialized:
            return None, None
        return list(self._conv_states.values()), dict(zip(self.state_names, self._recurrent_states.values()))

    def commit_unless(self, constants: tuple[torch.Tensor, ...]) -> None:
        """Commit if the pending inputs were read with other constants than these, with which the next forward reads."""
        if self.pending and self._known(constants) is not self.recorded.pieces[-1].constants:
            self.commit()

    def _known(self, constants: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A record's own copies of these, the same objects as long as the values do not change."""
        self._constants = own_constants(constants, self._constants)
        return self._constants[1]

    def defers(self, tokens: int) -> bool:
        """Whether a recorded forward of so many tokens leaves its inputs pending, and conv state and states alone."""
        if not self.record_past or torch.compiler.is_compiling() or not self.has_previous_state[0]:
            return False
        return (tokens > 1 or self.pending > 0) and self.pending + tokens <= self.max_rollback

    @property
    def pads_pending(self) -> bool:
        """Whether a pad is among the pending inputs."""
        return self.pending > 0 and not bool(self.recorded.last(self.pending)[-1].all())

    @property
    def resting_state(self) -> torch.Tensor:
        """The first of the states, without the pending inputs."""
        return self._recurrent_states[0]

    def lookahead_conv_state(self, most: int) -> list[torch.Tensor]:
        """The conv state after the pending inputs, of which no more than `most` stay pending."""
        if self.pending > most:
            self.commit()
        conv_state = list(self._conv_states.values())
        if not self.pending or not conv_state:
            return conv_state
        return self.recorded.after_last(self.pending, conv_state, None)[0]

    def newest(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """`Piece.inputs` of the last `tokens` recorded tokens: at most the pending and the new ones."""
        return self.recorded.last(tokens)

    # What the mixer reads and writes.

    def lazy_initialization(self, conv_state: list[torch.Tensor], states: dict[str, torch.Tensor]) -> None:
        """Make zeros of these shapes, which are written in place from now on."""
        first = next(iter(states.values()))
        self.device, self.dtype, self.batch_size = first.device, self.state_dtype, first.shape[0]
        self.state_names = tuple(states)
        self.kept_shapes = [tuple(x.shape[1:]) for x in (*conv_state, *states.values())]
        # In the memory layout that convolutions give and read.
        self.conv_states = {i: torch.zeros_like(w) for i, w in enumerate(conv_state)}
        self.recurrent_states = {
            i: torch.zeros_like(
                x, dtype=self.state_dtype if self._is_cast(name, x) else None, memory_format=torch.contiguous_format
            )
            for i, (name, x) in enumerate(states.items())
        }
        self.is_conv_states_initialized = dict.fromkeys(self.conv_states, True)
        self.is_recurrent_states_initialized = dict.fromkeys(self.recurrent_states, True)
        self.is_initialized = True
        if not torch.compiler.is_compiling():
            for tensor in self.tensors():
                torch._dynamo.mark_static_address(tensor)

    def _is_cast(self, name: str, x: torch.Tensor) -> bool:
        """Whether a state is kept in `state_dtype`."""
        return x.is_floating_point() and name not in self.exact_states

    @property
    def conv_state(self) -> list[torch.Tensor] | None:
        return list(self.conv_states.values()) if self.is_initialized else None

    @property
    def states(self) -> dict[str, torch.Tensor] | None:
        return dict(zip(self.state_names, self.recurrent_states.values())) if self.is_initialized else None

    @property
    def state(self) -> torch.Tensor | None:
        """The first of the states, for layers that have one."""
        return self.recurrent_states[0] if self.is_initialized else None

    def write(self, conv_state: list[torch.Tensor], states: dict[str, torch.Tensor], tokens: int) -> None:
        """Overwrite conv state and states after `tokens` more tokens, unless these were recorded and stay pending."""
        if not self.is_initialized:
            self.lazy_initialization(conv_state, states)
        self.torn = True
        if not self.record_past:
            self.recorded = None  # the record does not lead up to what comes next
        deferred = self._may_defer and self.defers(tokens)
        if deferred and not any(map(_is_differentiated, (*conv_state, *states.values()))):
            self.pending += tokens
        else:
            self.pending = 0
            self._store_all(conv_state, states)
        self._may_defer = False
        self.cumulative_length += tokens
        self.has_previous_state[0] = True
        if self.recorded is not None:
            self._forget_the_oldest()
        self.torn = False

    def thaw(self) -> None:
        """Outside of inference mode, replace tensors that were made in it and cannot be changed."""
        if not self.is_initialized or torch.compiler.is_compiling():
            return
        if self._recurrent_states[0].is_inference() and not torch.is_inference_mode_enabled():
            self._map(torch.clone)

    def held(self) -> list[torch.Tensor]:
        """Conv state and states as they are stored, without the pending inputs."""
        return [*self._conv_states.values(), *self._recurrent_states.values()] if self.is_initialized else []

    def tensors(self) -> list[torch.Tensor]:
        """All that is written in place."""
        return self.held()

    # What a state file keeps.

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that the next token reads, `[B, ...]` each, by a name that says its place.

        A subclass that keeps more than conv state and states adds it here, and takes it back in `restore`.
        """
        self.commit()
        named = {f"windows.{i}": window for i, window in self.conv_states.items()}
        return named | {
            f"states.{i}.{name}": x for i, (name, x) in enumerate(zip(self.state_names, self.recurrent_states.values()))
        }

    def restore(self, tensors: dict[str, torch.Tensor], tokens: int) -> None:
        """Hold copies of the `named_tensors` of a layer that had seen `tokens` tokens; this one has seen none."""
        places = {tuple(name.split(".", 2)): x for name, x in tensors.items()}
        order = sorted(places, key=lambda place: int(place[1]))
        conv_state = [places[place] for place in order if place[0] == "windows"]
        states = {place[2]: places[place] for place in order if place[0] == "states"}
        self.state_dtype = next((x.dtype for x in states.values() if x.is_floating_point()), self.state_dtype)
        self.pending = 0
        self.lazy_initialization(conv_state, states)
        self._store_all(conv_state, states)
        self.recorded = None  # of a text that was taken back
        self.cumulative_length += tokens
        self.has_previous_state[0] = True

    def _store_all(self, conv_state: list[torch.Tensor], states: dict[str, torch.Tensor]) -> None:
        for i, new in enumerate(_store_together(list(self._conv_states.values()), conv_state)):
            self._conv_states[i] = new
        for i, name in enumerate(self.state_names):
            if states[name] is not self._recurrent_states[i]:  # a step has written into it already
                self._recurrent_states[i] = _store(self._recurrent_states[i], states[name])

    def update_conv_state(self, *args, **kwargs):
        raise ValueError("This layer writes its conv state and its recurrent state together; use `write`.")

    update_recurrent_state = update_conv_state

    # Taking tokens back.

    def set_state(self, state: torch.Tensor) -> None:
        """Overwrite the first of the states, in place."""
        self.recurrent_states[0] = _store(self.recurrent_states[0], state)

    def record(
        self,
        inputs: tuple[torch.Tensor, ...],
        constants: tuple[torch.Tensor, ...],
        replay: Callable,
        first: dict[str, torch.Tensor] | None = None,
        defer: bool = False,
    ) -> None:
        """Record what a forward is about to put in, see `Piece` and `Record`; called before `write`.

        `first` are the states that a text begins with, where they are not zeros. With `defer` the inputs of few tokens
        may stay pending: the mixer promises to call `commit` before it reads a state.
        """
        self.commit_unless(constants)
        piece = Piece(tuple(map(detached, inputs)), self._known(constants))
        count, self._may_defer = piece.tokens, defer
        if self.recorded is None:
            begun = self._copies() if self.has_previous_state[0] else (None, first and map_states(copied, first))
            self.recorded = Record(*begun, [piece], replay)
        else:
            if not (defer and self.defers(count)):
                self.commit()
                if count > 1 or self.recorded.pieces[-1].tokens > 1:
                    latest = Snapshot(*self._copies(), self.recorded.tokens)
                    self.recorded = self.recorded._replace(latest=latest)
            self.recorded = self.recorded.with_next(piece, pending=self.pending > 0)
        # All of a short forward can be taken back, of the prompt only its end.
        self.kept = max(self.max_rollback, count if self.is_initialized else 0)

    def _copies(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Copies of conv state and states as they are now."""
        conv_state, states = self._stored()
        return [copied(x) for x in conv_state], map_states(copied, states)

    def _forget_the_oldest(self) -> None:
        """Drop the oldest tokens of a long record, so rarely that it costs next to nothing a token."""
        if self.recorded.tokens <= 2 * self.kept + self.max_rollback:
            return
        tokens = self.recorded.tokens - self.kept - self.max_rollback  # as many again, after those were taken back
        self.recorded = self.recorded.without_first(tokens, *self._stored())

    def check_crop(self, tokens_to_remove: int) -> None:
        super().check_crop(tokens_to_remove)
        if tokens_to_remove:
            check_recorded(-tokens_to_remove, self.record_past, self.recorded, self.cumulative_length)

    def _take_back(self, tokens: int) -> None:
        kept = self.recorded.tokens - tokens
        if not kept and self.recorded.conv_state is None:
            self.reset()  # the text begins anew, with what a text begins with now
            return
        self.recorded = self.recorded.first(kept)
        if tokens <= self.pending:
            self.pending -= tokens
        else:
            self.pending = 0
            self.thaw()
            self._store_all(*self.recorded.after(kept, *self._stored()))
        self.cumulative_length -= tokens

    def reset(self) -> None:
        self.pending, self.torn = 0, False
        self.thaw()
        if self.is_initialized:
            for stored in (self._conv_states, self._recurrent_states):
                for i, x in stored.items():  # one with a gradient is part of the graph of the forward that wrote it
                    stored[i] = torch.zeros_like(x) if x.requires_grad else x.zero_()
        self.recorded = None
        self.has_previous_state[0] = False
        self.cumulative_length *= 0

    # Devices and dtypes.

    def to(self, device=None, dtype: torch.dtype | None = None) -> None:
        if dtype is not None:
            self.state_dtype = self.dtype = dtype
        if not self.is_initialized:
            return
        self.commit()
        self._map(lambda x: x.to(device))
        if self.recorded is not None:
            self.recorded = self.recorded.with_constants(lambda x: x.to(device))
            self._constants = None, ()
        self.device = self.state.device
        if dtype is not None:
            self.recurrent_states = {
                i: x.to(dtype) if self._is_cast(name, x) else x
                for name, (i, x) in zip(self.state_names, self.recurrent_states.items(), strict=True)
            }
            self.conv_states = {i: w.to(dtype) if w.is_floating_point() else w for i, w in self.conv_states.items()}

    def _map(self, function) -> None:
        """Apply to every tensor with a batch axis; pending inputs stay pending."""
        self._conv_states = {i: function(x) for i, x in self._conv_states.items()}
        self._recurrent_states = {i: function(x) for i, x in self._recurrent_states.items()}
        if self.recorded is not None:
            self.recorded = self.recorded.mapped(function)

    def map_rows(self, function) -> None:
        """Apply after a `commit`, in place where the number of rows stays, so that addresses stay."""
        if not self.is_initialized:
            return
        self.commit()
        self.thaw()
        conv_state, states = self.conv_states, self.recurrent_states
        self._map(function)
        if self.state.shape[0] == states[0].shape[0]:
            self.conv_states = {i: _store(conv_state[i], x) for i, x in self.conv_states.items()}
            self.recurrent_states = {i: _store(states[i], x) for i, x in self.recurrent_states.items()}
        self.batch_size = self.state.shape[0]


class StaticRecurrentLayer(RecurrentLayer):
    """A `RecurrentLayer` whose token count is a tensor, so that a compiled decode step serves every count."""

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return not self._record_past  # a record grows, which no graph allows

    def __init__(self, max_cache_len: int, **kwargs):
        super().__init__(**kwargs)
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.tensor(0, dtype=torch.long, device="cpu")

    def lazy_initialization(self, conv_state: list[torch.Tensor], states: dict[str, torch.Tensor]) -> None:
        self.cumulative_length = self.cumulative_length.to(next(iter(states.values())).device)
        super().lazy_initialization(conv_state, states)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.held(), self.cumulative_length] if self.is_initialized else []

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def to(self, device=None, dtype: torch.dtype | None = None) -> None:
        super().to(device, dtype)
        if self.is_initialized:
            self.cumulative_length = self.cumulative_length.to(device)


def _is_differentiated(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _store_together(buffers: list[torch.Tensor], new: list[torch.Tensor]) -> list[torch.Tensor]:
    """`_store` for each pair, in one launch on a GPU where all are copied."""
    pairs = list(zip(buffers, new, strict=True))
    if not pairs or torch.compiler.is_compiling() or not all(_is_copied(*pair) for pair in pairs):
        return [_store(*pair) for pair in pairs]
    torch._foreach_copy_(buffers, new)
    return buffers


def _store(buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Copy in place where that is possible; otherwise a tensor to use instead of the buffer."""
    if new is buffer:
        return buffer
    if _is_copied(buffer, new):
        return buffer.copy_(new)
    if _is_differentiated(new):
        return new.to(buffer.dtype)  # gradients flow through the cache
    return new.to(buffer.dtype).clone()


def _is_copied(buffer: torch.Tensor, new: torch.Tensor) -> bool:
    if torch.is_grad_enabled() and new.requires_grad:
        return False
    if torch.compiler.is_compiling():
        return True
    frozen = buffer.is_inference() and not torch.is_inference_mode_enabled()
    return not (buffer.requires_grad or frozen)
