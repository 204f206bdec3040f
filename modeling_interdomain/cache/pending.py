"""Inputs that are recorded and that the states have not taken in: those of drafts, which are mostly taken back."""

from typing import NamedTuple

import torch

from .rollback import Record


class Pending(NamedTuple):
    """The last `tokens` of a record, all in its last piece."""

    record: Record
    tokens: int

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Theirs, see `Piece.inputs`."""
        piece = self.record.pieces[-1]
        first = piece.tokens - self.tokens
        return tuple(x[:, first:] for x in piece.inputs) if first else piece.inputs

    @property
    def has_pads(self) -> bool:
        return not bool(self.inputs[-1].all())

    @torch.no_grad()
    def replayed(self, conv_state: list[torch.Tensor], states: dict[str, torch.Tensor] | None):
        """Conv state and states after these tokens; without states the conv state alone."""
        return self.record.replay(conv_state, states, self.inputs, self.record.pieces[-1].constants)
