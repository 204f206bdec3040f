"""The small parameters of a selective scan: rates, the bias of the steps, and what skips the state."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from ...layers.common import DecodeTables, Float32Module, at_least_float32, backend_of, begun_with
from ...layers.operators import Operators
from ...ops.common.launch import STEP_BACKENDS
from ...ops.selective_scan.entry import SCAN_BACKENDS, selective_scan, take_scan_step


class SelectiveScanRecurrence(Float32Module, DecodeTables):
    """`A_log` `[N, E]`, `D` and `dt_bias` `[E]`; the operator called with them.

    A module of its own, because it stays in float32 whatever the model's dtype, see `InterdomainRecurrence`.
    """

    operators = Operators.of(selective_scan, take_scan_step)

    def __init__(self, config, channels: int):
        super().__init__()
        self.config = config
        self.A_log = nn.Parameter(torch.empty(config.scan_state_size, channels, dtype=at_least_float32()))
        self.D = nn.Parameter(torch.empty(channels, dtype=at_least_float32()))
        self.dt_bias = nn.Parameter(torch.empty(channels, dtype=at_least_float32()))
        self.start_parameters(config)

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        """S4D-Real: number n of a state keeps `exp(-(n + 1) dt)`; steps are spread as the configuration says."""
        size, channels = self.A_log.shape
        rates = torch.arange(1, size + 1, device=self.A_log.device).float().log()
        init.copy_(self.A_log, rates[:, None].expand(-1, channels))
        init.ones_(self.D)
        low, high = math.log(config.time_step_min), math.log(config.time_step_max)
        step = torch.empty_like(self.dt_bias).uniform_(low, high).exp()
        init.copy_(self.dt_bias, step + torch.log(-torch.expm1(-step)))  # softplus of it is the step

    def forward(self, *tokens: torch.Tensor, transition: bool = False, step: bool = False, **arguments: Any):
        """`selective_scan` of C and B `[B, T, N]`, x and the raw dt `[B, T, E]`; the output is `[B, T, 1, E]`.

        With `transition=True` what `steps_of` and the scan need alone, of which `initial_state` may be a function. With
        `step=True` it is one token that moves `state` in place. All of it happens inside, see `InterdomainRecurrence`.
        """
        if not (step or torch.compiler.is_compiling()) and tokens[0].shape[1] > 1:
            self.doubt_tables()
        moves = self._transition()
        if transition:
            return moves
        rate, bias = moves
        query, key, value, dt = tokens
        steps = steps_of(dt, bias)
        if step:
            return self._step(query, key, value, steps, rate, **arguments)
        arguments["initial_state"] = begun_with(arguments.get("initial_state"), rate, bias)
        output, state = self.operators.selective_scan(
            query,
            key,
            value,
            steps,
            rate,
            skip=self.D,
            chunk_size=self.config.chunk_size,
            backend=backend_of(self.config, SCAN_BACKENDS),
            **arguments,
        )
        return output[:, :, None], state

    def _step(self, query, key, value, steps, rate, *, state, mask=None, state_indices=None) -> torch.Tensor:
        """`selective_scan_step` of tokens with an axis of the one token; `[B, 1, E]`."""
        query, key, value, steps = (x.squeeze(1) for x in (query, key, value, steps))
        backend = backend_of(self.config, STEP_BACKENDS)
        arguments = state, self.D, mask, backend, state_indices
        return self.operators.take_scan_step(query, key, value, steps, rate, *arguments)[:, None]

    def _transition(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rates `[N, E]` and biases `[E]`."""
        kept = self._tables.of((self.A_log, self.dt_bias))
        if kept is None:
            return self._rates()
        if not kept:
            kept["rates"] = self._rates()
        return kept["rates"]

    def _rates(self) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(self.A_log.dtype, torch.float32)
        bias = self.dt_bias.to(wide).clone()  # what shards this module frees its parameters after the call
        return -self.A_log.to(wide).exp(), bias


def steps_of(dt: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The steps `[B, T, E]` for `selective_scan`, in at least float32, of dt as projected and the bias `[E]`."""
    return F.softplus(dt.to(torch.promote_types(dt.dtype, bias.dtype)) + bias)
