"""Interdomain attention whose tokens forget, write and correct as `gates.py` says: what of the layer that changes."""

from collections.abc import Sequence
from typing import Any

import torch

from ...ops.interdomain.few import MAX_DRAFT
from ...ops.interdomain.gates import Gates, decay_gated_state, total_gated_decay
from ...ops.interdomain.gates_map import gated_attention_map
from ..recurrent import RecurrentMixer
from .gates import gate_tokens, mean_key_size, operator_gates, replay_gated, what_keys_find
from .mixer import InterdomainMixer
from .recurrence import InterdomainRecurrence


class GatedRecurrence(InterdomainRecurrence):
    """Called with query, key, value and the gates of `gate_tokens`."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_names = config.gate_names

    def forward(self, *tokens: torch.Tensor, **arguments: Any):
        if len(tokens) > 3:
            if not torch.compiler.is_compiling() and tokens[0].shape[1] > MAX_DRAFT:
                self.doubt_tables()  # as the operator will, but before the answers are those of it
            arguments |= operator_gates(self.gate_names, tokens[3:], self.answers())._asdict()
        return super().forward(*tokens[:3], **arguments)

    def answers(self) -> tuple[torch.Tensor, ...]:
        """Of `what_keys_find`, nothing without the delta rule."""
        if "delta" not in self.gate_names:
            return ()
        return self._per_version("answers", lambda _: what_keys_find(*self.parameters_of_operator()))

    def _step(self, *tokens: Any, **arguments: Any) -> torch.Tensor:
        gates = Gates(*(arguments.pop(name) for name in Gates._fields))
        return super()._step(*tokens, gates=gates, **arguments)

    def _map(  # type: ignore[override]
        self, *tokens: torch.Tensor, cu_seqlens: torch.Tensor | None, **gates: Any
    ) -> torch.Tensor:
        query, key, _ = tokens
        return gated_attention_map(
            query, key, *self.parameters_of_operator(), product=self.product, cu_seqlens=cu_seqlens, **gates
        )

    def _transition(self, kept: bool) -> tuple[torch.Tensor, ...]:
        """With the delta rule also what reads the state, see `replay_gated`."""
        if "delta" not in self.gate_names:
            return super()._transition(kept)
        log_decay, *read = self.parameters_of_operator()
        return log_decay, read[0].clone(), *self.answers(), *(x.clone() for x in read[1:] if x is not None)


class GatedInterdomainMixer(InterdomainMixer):
    """Beside query, key and value a token has one number a group, a linear map, for each of `config.gate_names`."""

    recurrence_class = GatedRecurrence

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.gate_names, self.widths = config.gate_names, self.widths[:3]

    @property
    def passes_state(self) -> bool:  # type: ignore[override]
        """With the delta rule what a token writes depends on the state before it: states of pieces have no sum."""
        return "delta" not in self.gate_names

    def _convolutions(self):
        return super()._convolutions()[:3]

    def _inputs(self, projected, conv_state, cos_sin, packing, keep: bool):
        tokens, after = super()._inputs(projected[:3], conv_state, cos_sin, packing, keep)
        size = None
        if "delta" in self.gate_names:
            weights = self._weights(projected[0].device)
            size = (
                self._key_size() if weights is None else self._tables.get("size", weights, lambda _: self._key_size())
            )
        return (*tokens, *gate_tokens(self.gate_names, projected[3:], tokens[1], size)), after

    def _key_size(self) -> torch.Tensor:
        """`mean_key_size`; what the norm makes of ones is its weight, wherever that is kept."""
        return mean_key_size(self.k_norm(torch.ones_like(self.k_bias[None, :1])), self.k_bias)

    def _recorded(self, tokens):
        return tokens[1:]

    def _written(self, tokens):
        return tokens[2]

    def _steps(self, tokens: Sequence[torch.Tensor], state: torch.Tensor, move: bool) -> torch.Tensor:
        return RecurrentMixer._steps(self, tokens, state, move)

    def _verifies(self, layer, hidden_states, packing) -> bool:
        return False

    @staticmethod
    def replay_state(operators, state, *arguments):
        return replay_gated(state, *arguments)

    def total_decay(self, mask, *arguments):  # type: ignore[override]
        return total_gated_decay(mask, arguments[2])  # behind key and value

    def decay_state(self, state, total_decay, log_decay, *transition):
        return decay_gated_state(state, total_decay, log_decay)
