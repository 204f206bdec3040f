"""Interdomain attention in warped time: what of the gated layer that changes. A control for studies."""

from typing import Any

import torch

from ...ops.diagonal.step import StepParameters
from ...ops.interdomain.warp import decay_warped_state, warped_attention, warped_state_after, warped_tables
from .gated import GatedInterdomainMixer
from .recurrence import InterdomainRecurrence


class WarpedRecurrence(InterdomainRecurrence):
    """Called with query, key, value and the steps of time."""

    def forward(self, *tokens: torch.Tensor, **arguments: Any):
        if len(tokens) > 3:
            arguments["time_step"] = tokens[3]
        return super().forward(*tokens[:3], **arguments)

    def _operate(self, *inputs: Any, **arguments: Any):
        config = self.config
        return warped_attention(
            *inputs, product=self.product, chunk_size=config.chunk_size, backend=config.backend, **arguments
        )

    def _step(self, *tokens: Any, time_step, **arguments: Any) -> torch.Tensor:
        log_decay, *others = self.parameters_of_operator()
        known, now = self._per_version("step", self._step_parameters), time_step.flatten(0, -2)

        def make(*parameters):
            return warped_tables(known.tables(parameters[-1]), log_decay, others[0], now)

        parameters = StepParameters(make, log_decay, *others, self.product)
        return self.operators.take_step(*tokens, parameters, normalize=False, backend="recurrent", **arguments)

    def _map(self, *tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:  # type: ignore[override]
        """The outputs of values of which each is of one token alone."""
        query, key, _ = tokens
        one = torch.eye(key.shape[1], dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
        one = one[None, :, None].expand(key.shape[0], -1, key.shape[2], -1)
        parameters = self.parameters_of_operator()
        return warped_attention(query, key, one, *parameters, product=self.product, **arguments)[0].transpose(1, 2)

    def _transition(self, kept: bool) -> tuple[torch.Tensor, ...]:
        return super()._transition(False)  # without tables: tokens differ


class WarpedInterdomainMixer(GatedInterdomainMixer):
    """A token has a step of time in the place of what it leaves of the state."""

    recurrence_class: Any = WarpedRecurrence

    def _inputs(self, *arguments: Any, **options: Any):
        (query, key, value, time_step, write_gate), after = super()._inputs(*arguments, **options)
        return (query, *(x * write_gate[..., None] for x in (key, value)), time_step), after

    @staticmethod
    def replay_state(operators, *arguments):
        return warped_state_after(*arguments)

    def total_decay(self, mask, *arguments):
        return torch.where(mask[..., None], arguments[2], 0).sum(1)  # behind key and value

    def decay_state(self, state, total_decay, log_decay, *transition):
        return decay_warped_state(state, total_decay, log_decay)
