"""What one recurrent layer keeps between forwards: tensors of fixed size, written in place."""

from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

# Forwards that are kept apart: joining many small tensors is slow where it must be quick, in `crop`.
_PIECES = 16
_CPU = torch.device("cpu")


class Kept(NamedTuple):
    """`windows` and `states` after so many `tokens` of a record."""

    windows: list[torch.Tensor]
    states: dict[str, torch.Tensor]
    tokens: int


class Piece(NamedTuple):
    """Tokens of one forward, or of several that were read with the same parameters.

    Attributes:
        inputs: `[B, T, ...]` tensors, the last the `[B, T]` bool mask, False for pads.
        constants: tensors without a batch axis that `replay` needs (a decay, say), as they were then.
    """

    inputs: tuple[torch.Tensor, ...]
    constants: tuple[torch.Tensor, ...]

    @property
    def tokens(self) -> int:
        return self.inputs[-1].shape[1]


class Record(NamedTuple):
    """What moves a layer on from `windows` and `states`, kept so that the last tokens can be taken back.

    Attributes:
        windows, states: before the first recorded token. Where it was the first of all windows are None, and states
            those that did not begin with zeros.
        pieces: what has been read since, in turn.
        replay: the mixer's own way to move on, `replay(windows, states, inputs, constants)` to new ones of both.
        latest: before the latest token that came alone after several, or several too many to wait.
    """

    windows: list[torch.Tensor] | None
    states: dict[str, torch.Tensor] | None
    pieces: list[Piece]
    replay: Callable
    latest: Kept | None = None

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


class ByRow:
    """What beams, several sequences a prompt and selections do to the rows of a layer."""

    def map_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply to every tensor with a batch axis."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map_rows(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map_rows(lambda x: x.repeat_interleave(repeats, dim=0))


class RecurrentLayer(ByRow, LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """The `windows` of a layer's convolutions, `[B, W, kernel - 1]` each, its `states` by name, `[B, ...]` each, and
    how many tokens it has seen.

    The tensors are made by the first forward and then overwritten in place, so their addresses stay. While recording
    (`activate_past_recording`), the layer also keeps what at least the last `2 * max_rollback` tokens put in, and what
    it held before them: `crop(-n)` then replays all but the last n at once, and after `max_rollback` tokens were taken
    back as many can be once more. Of a few tokens together, which are guesses more often than not, only the inputs are
    noted: windows and states take in what is left of them when they are next asked for, and by then most have been
    taken back. A mixer that can read on from `resting_state` and the inputs that wait does not ask; it says beforehand
    what it will read them with (`settle_unless`).

    What was read is replayed with the parameters that it was read with, whatever has become of them.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    cumulative_length: Any
    paused = False  # recording goes on later
    torn = False  # it is being written, or a forward was broken off while it was
    waiting = 0  # of the last recorded tokens those that windows and states have not taken in

    def __init__(
        self,
        max_rollback: int = 64,
        state_dtype: torch.dtype = torch.float32,
        exact_states: tuple[str, ...] = (),
        **kwargs,
    ):
        CacheLayerMixin.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=1)
        self.conv_states: dict[int, torch.Tensor] = {}
        self.state_names: tuple[str, ...] = ()
        self.kept_shapes: list[tuple[int, ...]] | None = None  # of windows and states, without the rows
        self.cumulative_length = 0
        self.max_rollback = max_rollback
        self.state_dtype = state_dtype
        self.exact_states = exact_states
        self.recorded: Record | None = None
        self.kept = max_rollback
        # What moves the state on, as it was given last, and a record's own copies of it.
        self._constants: tuple[tuple[torch.Tensor, ...] | None, tuple[torch.Tensor, ...]] = None, ()

    @property
    def record_past(self) -> bool:
        return self._record_past and not self.paused

    @record_past.setter
    def record_past(self, recorded: bool) -> None:
        self._record_past, self.paused = recorded, False

    @property
    def is_croppable(self) -> bool:
        return self._record_past  # also while it is paused: there is nothing to take back then

    # Inputs that wait.

    @property
    def conv_states(self) -> dict[int, torch.Tensor]:
        self.settle()
        return self._windows

    @conv_states.setter
    def conv_states(self, windows: dict[int, torch.Tensor]) -> None:
        self._windows = windows

    @property
    def recurrent_states(self) -> dict[int, torch.Tensor]:
        self.settle()
        return self._states

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, torch.Tensor]) -> None:
        self._states = states

    def settle(self) -> None:
        """Let windows and states take in the inputs that wait."""
        if not self.waiting:
            return
        states = dict(zip(self.state_names, self._states.values()))
        found = self._replayed(list(self._windows.values()), states)
        self.waiting = 0
        self._store_all(*found)

    def settle_unless(self, constants: tuple[torch.Tensor, ...]) -> None:
        """Do so if the inputs that wait were read with others than these, with which a mixer is about to read."""
        if self.waiting and self._known(constants) is not self.recorded.pieces[-1].constants:
            self.settle()

    def _known(self, constants: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """A record's own of these, the same ones as long as they do not change: copies, as parameters may be there."""
        given, own = self._constants
        if constants is not given and not _are_equal(own, constants):
            own = tuple(map(_copy, constants))
        # What has a gradient is made anew each time, and cannot be copied with the cache.
        self._constants = constants if all(x.grad_fn is None for x in constants) else None, own
        return own

    def _replayed(self, windows, states):
        """These after the inputs that wait; without states the windows alone."""
        with torch.no_grad():
            return self.recorded.replay(windows, states, self.newest(self.waiting), self.recorded.pieces[-1].constants)

    def lets_wait(self, tokens: int) -> bool:
        """Whether a forward of so many tokens, which is recorded, leaves windows and states as they are."""
        if not self.record_past or torch.compiler.is_compiling() or not self.has_previous_state[0]:
            return False
        return (tokens > 1 or self.waiting > 0) and self.waiting + tokens <= self.max_rollback

    @property
    def pads_wait(self) -> bool:
        """Whether a pad is among the inputs that wait."""
        return self.waiting > 0 and not bool(self.newest(self.waiting)[-1].all())

    @property
    def resting_state(self) -> torch.Tensor:
        """The first of the states, without the inputs that wait."""
        return self._states[0]

    def windows_ahead(self, most: int) -> list[torch.Tensor]:
        """The windows with the inputs that wait, of which no more than `most` go on waiting."""
        if self.waiting > most:
            self.settle()
        windows = list(self._windows.values())
        if not self.waiting or not windows:
            return windows
        return self._replayed(windows, None)[0]

    def newest(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """`Piece.inputs` of so many of the tokens recorded last; no more than wait and a forward has added."""
        piece = self.recorded.pieces[-1]
        first = piece.tokens - tokens
        return tuple(x[:, first:] for x in piece.inputs) if first else piece.inputs

    # What the mixer reads and writes.

    def lazy_initialization(self, windows: list[torch.Tensor], states: dict[str, torch.Tensor]) -> None:
        """Make zero tensors shaped like these, in place from now on."""
        first = next(iter(states.values()))
        self.device, self.dtype, self.batch_size = first.device, self.state_dtype, first.shape[0]
        self.state_names = tuple(states)
        self.kept_shapes = [tuple(x.shape[1:]) for x in (*windows, *states.values())]
        # In the order in memory that the convolution gives and likes.
        self.conv_states = {i: torch.zeros_like(w) for i, w in enumerate(windows)}
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
    def windows(self) -> list[torch.Tensor] | None:
        return list(self.conv_states.values()) if self.is_initialized else None

    @property
    def states(self) -> dict[str, torch.Tensor] | None:
        return dict(zip(self.state_names, self.recurrent_states.values())) if self.is_initialized else None

    @property
    def state(self) -> torch.Tensor | None:
        """The first of the states, for layers that have one."""
        return self.recurrent_states[0] if self.is_initialized else None

    def write(self, windows: list[torch.Tensor], states: dict[str, torch.Tensor], tokens: int) -> None:
        """Overwrite windows and states after `tokens` more tokens."""
        if not self.is_initialized:
            self.lazy_initialization(windows, states)
        self.torn = True
        if not self.record_past:
            self.settle()
            self.recorded = None  # what it began with is not what comes next
        noted = self.recorded is not None  # a mixer of one's own may record nothing
        if noted and self.lets_wait(tokens) and not any(map(_is_differentiated, (*windows, *states.values()))):
            self.waiting += tokens
        else:
            self._store_all(windows, states)
        self.cumulative_length += tokens
        self.has_previous_state[0] = True
        self._forget_the_oldest()
        self.torn = False

    def thaw(self) -> None:
        """Replace tensors made in inference mode, which cannot be changed outside of it."""
        if self.is_initialized and not torch.compiler.is_compiling() and _is_frozen(self._states[0]):
            self._map(torch.clone)

    def held(self) -> list[torch.Tensor]:
        """The windows and the states."""
        return [*self.conv_states.values(), *self.recurrent_states.values()] if self.is_initialized else []

    def tensors(self) -> list[torch.Tensor]:
        """All that is written in place."""
        return self.held()

    # What a state file keeps.

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Everything that the next token reads, `[B, ...]` each, by a name that says its place.

        A layer that keeps more than windows and states adds it here, and takes it back in `restore`.
        """
        named = {f"windows.{i}": window for i, window in self.conv_states.items()}
        return named | {
            f"states.{i}.{name}": x for i, (name, x) in enumerate(zip(self.state_names, self.recurrent_states.values()))
        }

    def restore(self, tensors: dict[str, torch.Tensor], tokens: int) -> None:
        """Hold copies of the `named_tensors` of a layer that had seen `tokens` tokens; this one has seen none."""
        places = {tuple(name.split(".", 2)): x for name, x in tensors.items()}
        order = sorted(places, key=lambda place: int(place[1]))
        windows = [places[place] for place in order if place[0] == "windows"]
        states = {place[2]: places[place] for place in order if place[0] == "states"}
        self.state_dtype = next((x.dtype for x in states.values() if x.is_floating_point()), self.state_dtype)
        self.waiting = 0
        self.lazy_initialization(windows, states)
        self._store_all(windows, states)
        self.recorded = None  # of a text that was taken back
        self.cumulative_length += tokens
        self.has_previous_state[0] = True

    def _store_all(self, windows: list[torch.Tensor], states: dict[str, torch.Tensor]) -> None:
        for i, window in enumerate(_store_together(list(self.conv_states.values()), windows)):
            self.conv_states[i] = window
        for i, name in enumerate(self.state_names):
            self.recurrent_states[i] = _store(self.recurrent_states[i], states[name])

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
        raise ValueError("This layer keeps a recurrent state, not keys and values; use `write`.")

    def update_conv_state(self, conv_states, state_idx=0, **kwargs):
        raise ValueError("This layer writes its windows and its recurrent state together; use `write`.")

    def update_recurrent_state(self, recurrent_states, state_idx=0, **kwargs):
        raise ValueError("This layer writes its windows and its recurrent state together; use `write`.")

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
    ) -> None:
        """Note what a forward is about to put in, see `Piece`; called before `write`.

        `first` are the states of a layer that has seen nothing, where they are not zeros.
        """
        self.settle_unless(constants)
        new = Piece(tuple(map(_detached, inputs)), self._known(constants))
        count = new.tokens
        if self.recorded is None:
            before: tuple[Any, Any] = (None, None if first is None else _map_states(_copy, first))
            if self.has_previous_state[0]:
                before = self._copies()
            self.recorded = Record(*before, [new], replay)
        else:
            latest = self.recorded.latest
            if not self.lets_wait(count) and (count > 1 or self.recorded.pieces[-1].tokens > 1):
                latest = Kept(*self._copies(), self.recorded.tokens)
            pieces = [*self.recorded.pieces, new]
            if self.waiting:  # what waits stays together
                pieces[-2:] = _joined(pieces[-2:])
            elif len(pieces) % _PIECES == 0:
                pieces = _joined(pieces)
            self.recorded = self.recorded._replace(pieces=pieces, latest=latest)
        # All of a short forward can be taken back, of the prompt only its end.
        self.kept = max(self.max_rollback, count if self.is_initialized else 0)

    def _copies(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Of the windows and states as they are now."""
        return [_copy(w) for w in self.windows], _map_states(_copy, self.states)

    def _forget_the_oldest(self) -> None:
        """Move the beginning of a long record on, so rarely that it costs next to nothing a token."""
        if self.recorded is None or self.recorded.tokens <= 2 * self.kept + self.max_rollback:
            return
        tokens = self.recorded.tokens - self.kept - self.max_rollback  # as many again, after those were taken back
        rest = _joined(_between(self.recorded.pieces, tokens, self.recorded.tokens))
        rest = [piece._replace(inputs=tuple(x.clone() for x in piece.inputs)) for piece in rest]
        windows, states = self._replay(tokens)
        latest = self.recorded.latest
        if latest is not None:
            latest = latest._replace(tokens=latest.tokens - tokens) if latest.tokens >= tokens else None
        self.recorded = self.recorded._replace(windows=windows, states=states, pieces=rest, latest=latest)

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
                "crop needs the past: call activate_past_recording() on the cache before the first forward, and before "
                "generate(), which leaves no record that it was not asked for."
            )
        if self.recorded is None and self.cumulative_length:
            raise ValueError(
                "crop can take back nothing: no token was recorded. Call activate_past_recording() before tokens that "
                "are to be taken back; a mixer of one's own calls `layer.record` before `layer.write`."
            )
        available = 0 if self.recorded is None else self.recorded.tokens
        if -tokens_to_remove > available:
            raise ValueError(
                f"crop can take back the last {available} tokens, got {-tokens_to_remove}; raise max_rollback in the "
                "configuration, and call activate_past_recording() before tokens that are to be taken back."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens (0 takes none), as the library's caches count them."""
        self.check_crop(tokens_to_remove)
        if tokens_to_remove == 0:
            return
        kept = self.recorded.tokens + tokens_to_remove
        if not kept and self.recorded.windows is None:
            self.reset()  # the text is to begin anew, with what it would begin with now
            return
        latest = self.recorded.latest
        if latest is not None and latest.tokens > kept:
            latest = None
        self.recorded = self.recorded._replace(pieces=_between(self.recorded.pieces, 0, kept), latest=latest)
        if -tokens_to_remove <= self.waiting:
            self.waiting += tokens_to_remove
        else:
            self.waiting = 0
            self.thaw()
            self._store_all(*self._replay(kept))
        self.cumulative_length += tokens_to_remove

    def _replay(self, tokens: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Windows and states after the first `tokens` of the record, from the nearest that are known."""
        record, start = self.recorded, 0
        windows, states = record.windows, record.states
        if record.latest is not None and record.latest.tokens <= tokens:
            windows, states, start = record.latest
        elif windows is None:
            windows = [torch.zeros_like(w) for w in self.windows]
            states = _map_states(torch.zeros_like, self.states) | (states or {})
        with torch.no_grad():
            for piece in _joined(_between(record.pieces, start, tokens)):
                windows, states = record.replay(windows, states, *piece)
        return windows, states

    def reset(self) -> None:
        self.waiting, self.torn = 0, False
        self.thaw()
        if self.is_initialized:
            for kept in (self.conv_states, self.recurrent_states):
                for i, x in kept.items():  # what has a gradient belongs to the forward that wrote it
                    kept[i] = torch.zeros_like(x) if x.requires_grad else x.zero_()
        self.recorded = None
        self.has_previous_state[0] = False
        self.cumulative_length *= 0

    # Devices and dtypes.

    def to(self, device=None, dtype: torch.dtype | None = None) -> None:
        if dtype is not None:
            self.state_dtype = self.dtype = dtype
        if not self.is_initialized:
            return
        self._map(lambda x: x.to(device))
        if self.recorded is not None:
            pieces = [Piece(x.inputs, tuple(c.to(device) for c in x.constants)) for x in _joined(self.recorded.pieces)]
            self.recorded = self.recorded._replace(pieces=pieces)
            self._constants = None, ()
        self.device = self.state.device
        if dtype is not None:
            self.recurrent_states = {
                i: x.to(dtype) if self._is_cast(name, x) else x
                for name, (i, x) in zip(self.state_names, self.recurrent_states.items(), strict=True)
            }
            self.conv_states = {i: w.to(dtype) for i, w in self.conv_states.items()}

    def offload(self) -> None:
        device = self.device
        self.to("cpu")
        self.device = device

    def prefetch(self) -> None:
        self.to(self.device)

    def _map(self, function) -> None:
        """Apply to every tensor with a batch axis."""
        if not self.is_initialized:
            return
        self.conv_states = {i: function(w) for i, w in self.conv_states.items()}
        self.recurrent_states = {i: function(x) for i, x in self.recurrent_states.items()}
        if self.recorded is not None:
            windows, states, pieces, replay, latest = self.recorded
            windows = None if windows is None else [function(w) for w in windows]
            states = None if states is None else _map_states(function, states)
            pieces = [piece._replace(inputs=tuple(map(function, piece.inputs))) for piece in pieces]
            if latest is not None:
                latest = Kept(
                    [function(w) for w in latest.windows], _map_states(function, latest.states), latest.tokens
                )
            self.recorded = Record(windows, states, pieces, replay, latest)

    def map_rows(self, function) -> None:
        """The same, in place where the number of rows stays, so that addresses stay."""
        if not self.is_initialized:
            return
        self.thaw()
        windows, states = self.conv_states, self.recurrent_states
        self._map(function)
        if self.state.shape[0] == states[0].shape[0]:
            self.conv_states = {i: _store(windows[i], w) for i, w in self.conv_states.items()}
            self.recurrent_states = {i: _store(states[i], x) for i, x in self.recurrent_states.items()}
        self.batch_size = self.state.shape[0]


class StaticRecurrentLayer(RecurrentLayer):
    """The same with the token count as a tensor: a compiled decode step need not be compiled again as it grows."""

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return not self._record_past  # a record grows, and no graph holds that

    def __init__(self, max_cache_len: int, **kwargs):
        super().__init__(**kwargs)
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.tensor(0, dtype=torch.long, device="cpu")

    def lazy_initialization(self, windows: list[torch.Tensor], states: dict[str, torch.Tensor]) -> None:
        self.cumulative_length = self.cumulative_length.to(next(iter(states.values())).device)
        super().lazy_initialization(windows, states)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.held(), self.cumulative_length] if self.is_initialized else []

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def to(self, device=None, dtype: torch.dtype | None = None) -> None:
        super().to(device, dtype)
        if self.is_initialized:
            self.cumulative_length = self.cumulative_length.to(device)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Forwards that follow each other with the same constants as one piece, along the tokens."""
    found = []
    for _, run in groupby(pieces, key=lambda piece: id(piece.constants)):
        first, *rest = run
        if rest:
            inputs = zip(first.inputs, *(piece.inputs for piece in rest), strict=True)
            first = first._replace(inputs=tuple(torch.cat(x, dim=1) for x in inputs))
        found.append(first)
    return found


def _between(pieces: list[Piece], start: int, stop: int) -> list[Piece]:
    """The pieces that hold the tokens from `start` to `stop`, cut to them; at least one, which may be empty."""
    found, first = [], 0
    for piece in pieces:
        low, high = max(start - first, 0), min(stop - first, piece.tokens)
        if low < high:
            found.append(_cut(piece, low, high))
        first += piece.tokens
    return found or [_cut(pieces[0], 0, 0)]


def _cut(piece: Piece, start: int, stop: int) -> Piece:
    if (start, stop) == (0, piece.tokens):
        return piece
    return piece._replace(inputs=tuple(x[:, start:stop] for x in piece.inputs))


def _are_equal(own: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    """Whether tensors are known to be the same without waiting for a GPU."""
    if len(own) != len(others) or torch.compiler.is_compiling():
        return False
    return all(x.device == y.device == _CPU and torch.equal(x, y) for x, y in zip(own, others))


def _map_states(function, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: function(x) for name, x in states.items()}


def _detached(x: torch.Tensor) -> torch.Tensor:
    return x.detach() if x.requires_grad else x


def _is_differentiated(x: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _copy(x: torch.Tensor) -> torch.Tensor:
    return _detached(x).clone()


def _store_together(buffers: list[torch.Tensor], new: list[torch.Tensor]) -> list[torch.Tensor]:
    """As `_store` for each, in one launch on a GPU where all are copied."""
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
        return new.to(buffer.dtype)  # the caller differentiates through the cache
    return new.to(buffer.dtype).clone()


def _is_copied(buffer: torch.Tensor, new: torch.Tensor) -> bool:
    if _is_differentiated(new):
        return False
    return torch.compiler.is_compiling() or not (buffer.requires_grad or _is_frozen(buffer))


def _is_frozen(tensor: torch.Tensor) -> bool:
    return tensor.is_inference() and not torch.is_inference_mode_enabled()
