"""The tokens that a recurrent layer has read lately. To take the last ones back, the ones before them are replayed."""

from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

import torch

# After so many forwards their inputs are joined, because `crop` must be quick and joining many small tensors is not.
_PIECES = 16
_CPU = torch.device("cpu")


class Snapshot(NamedTuple):
    """Copies of the conv state and the states after so many `tokens` of a record."""

    conv_state: list[torch.Tensor]
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
    """What a layer held, and what it has read since. A record is not changed: methods return another.

    Attributes:
        conv_state, states: before the first recorded token. If a text began there, the conv state is None, and the
            states are those that did not begin with zeros.
        pieces: what has been read since, in turn.
        replay: `replay(conv_state, states, inputs, constants)` of the mixer gives both after these inputs; without
            states (None) the conv state alone.
        latest: before the latest forward that was not deferred and had several tokens, or followed several.
    """

    conv_state: list[torch.Tensor] | None
    states: dict[str, torch.Tensor] | None
    pieces: list[Piece]
    replay: Callable
    latest: Snapshot | None = None

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    def with_next(self, piece: Piece, pending: bool) -> "Record":
        """The record with one more piece, joined to the one before if that is pending."""
        pieces = [*self.pieces, piece]
        if pending:
            pieces[-2:] = _joined(pieces[-2:])
        elif len(pieces) % _PIECES == 0:
            pieces = _joined(pieces)
        return self._replace(pieces=pieces)

    def first(self, tokens: int) -> "Record":
        """The record of the first `tokens`."""
        latest = None if self.latest is None or self.latest.tokens > tokens else self.latest
        return self._replace(pieces=_between(self.pieces, 0, tokens), latest=latest)

    def without_first(self, tokens: int, conv_state: list, states: dict) -> "Record":
        """The record without the first `tokens`, see `after`; copied, for a view would keep a long prompt in memory."""
        rest = _joined(_between(self.pieces, tokens, self.tokens))
        rest = [piece._replace(inputs=tuple(x.clone() for x in piece.inputs)) for piece in rest]
        latest = self.latest
        if latest is not None:
            latest = latest._replace(tokens=latest.tokens - tokens) if latest.tokens >= tokens else None
        return Record(*self.after(tokens, conv_state, states), rest, self.replay, latest)

    def after(self, tokens: int, conv_state: list, states: dict) -> tuple[list, dict]:
        """Conv state and states after the first `tokens`, replayed from the nearest ones that are known.

        Those given are what the layer holds, which have the shapes of what begins with zeros.
        """
        start = 0
        if self.latest is not None and self.latest.tokens <= tokens:
            conv_state, states, start = self.latest
        elif self.conv_state is not None and self.states is not None:
            conv_state, states = self.conv_state, self.states
        else:
            conv_state = [torch.zeros_like(x) for x in conv_state]
            states = map_states(torch.zeros_like, states) | (self.states or {})
        with torch.no_grad():
            for piece in _joined(_between(self.pieces, start, tokens)):
                conv_state, states = self.replay(conv_state, states, *piece)
        return conv_state, states

    def last(self, tokens: int) -> tuple[torch.Tensor, ...]:
        """`Piece.inputs` of the last tokens, which are all in the last piece."""
        piece = self.pieces[-1]
        first = piece.tokens - tokens
        return tuple(x[:, first:] for x in piece.inputs) if first else piece.inputs

    @torch.no_grad()
    def after_last(self, tokens: int, conv_state: list, states: dict | None) -> tuple[list, dict | None]:
        """Conv state and states (if they are given) after the last tokens, of those before them."""
        return self.replay(conv_state, states, self.last(tokens), self.pieces[-1].constants)

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Record":
        """The record with a function applied to every tensor that has a batch axis."""

        def each(conv_state: list | None, states: dict | None) -> tuple[Any, Any]:
            mapped = None if conv_state is None else [function(x) for x in conv_state]
            return mapped, None if states is None else map_states(function, states)

        pieces = [piece._replace(inputs=tuple(map(function, piece.inputs))) for piece in self.pieces]
        latest = self.latest and Snapshot(*each(*self.latest[:2]), self.latest.tokens)
        return Record(*each(self.conv_state, self.states), pieces, self.replay, latest)

    def with_constants(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Record":
        """The record with a function applied to the tensors that have no batch axis."""
        pieces = [Piece(piece.inputs, tuple(map(function, piece.constants))) for piece in _joined(self.pieces)]
        return self._replace(pieces=pieces)


def check_recorded(tokens: int, records: bool, record: Record | None, seen) -> None:
    """Raise if a layer that `records` and has `seen` tokens cannot take back this many."""
    if not records:
        raise ValueError(
            "crop needs the past: call activate_past_recording() on the cache before the first forward, and before "
            "generate(), which leaves no record that it was not asked for."
        )
    if record is None and seen:
        raise ValueError(
            "crop can take back nothing: no token was recorded. Call activate_past_recording() before tokens that "
            "are to be taken back; a mixer of one's own calls `layer.record` before `layer.write`."
        )
    available = 0 if record is None else record.tokens
    if tokens > available:
        raise ValueError(
            f"crop can take back the last {available} tokens, got {tokens}; raise max_rollback in the configuration, "
            "and call activate_past_recording() before tokens that are to be taken back."
        )


def own_constants(given: tuple, before: tuple) -> tuple[tuple | None, tuple]:
    """The constants `given`, and a record's own copies of them; `before` is what this returned last.

    The copies are the same objects as long as the values do not change. They are made because parameters, which an
    optimiser overwrites, may be among the constants.
    """
    last, own = before
    if given is not last and not _are_equal(own, given):
        own = tuple(map(copied, given))
    # Constants with a gradient are made anew each time, and a cache that held them could not be copied.
    return given if all(x.grad_fn is None for x in given) else None, own


def _are_equal(own: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    """Whether tensors are known to hold the same numbers; on a GPU, for which the CPU would wait, they are not."""
    if len(own) != len(others) or torch.compiler.is_compiling():
        return False
    return all(x.device == y.device == _CPU and torch.equal(x, y) for x, y in zip(own, others))


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Pieces that follow each other with the same constants joined along the tokens."""
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


def map_states(function, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: function(x) for name, x in states.items()}


def detached(x: torch.Tensor) -> torch.Tensor:
    return x.detach() if x.requires_grad else x


def copied(x: torch.Tensor) -> torch.Tensor:
    return detached(x).clone()
