"""The small parameters of state space duality: how a token's step becomes a decay and scales its input."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from ...layers.common import Float32Module, at_least_float32, backend_of, begun_with
from ...layers.operators import Operators
from ...ops.common.launch import STEP_BACKENDS
from ...ops.ssd.entry import SSD_BACKENDS, ssd_attention, take_ssd_step
from ...ops.ssd.map import ssd_attention_map


class SSDRecurrence(Float32Module):
    """`A_log`, `D` and `dt_bias`, `[H]` each, the last two or None; the operator called with them.

    A module of its own, because it stays in float32 whatever the model's dtype, see `InterdomainRecurrence`.
    """

    operators = Operators.of(ssd_attention, take_ssd_step, ssd_attention_map)

    def __init__(self, config, heads: int):
        super().__init__()
        self.config = config
        self.limit = config.ssd_dt_limit
        dtype = at_least_float32()
        self.A_log = nn.Parameter(torch.empty(heads, dtype=dtype))
        self.D = nn.Parameter(torch.empty(heads, dtype=dtype)) if config.ssd_skip else None
        self.dt_bias = None if config.ssd_dt_bias is None else nn.Parameter(torch.empty(heads, dtype=dtype))
        self.start_parameters(config)

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        """Head h keeps `exp(-(h + 1) dt)` of its state (Mamba-2)."""
        init.copy_(self.A_log, torch.arange(1, len(self.A_log) + 1, device=self.A_log.device).float().log())
        if self.D is not None:
            init.ones_(self.D)
        if config.ssd_dt_bias == "zero":
            init.zeros_(self.dt_bias)
        elif self.dt_bias is not None:
            low, high = math.log(config.time_step_min), math.log(config.time_step_max)
            step = torch.empty_like(self.dt_bias).uniform_(low, high).exp()
            init.copy_(self.dt_bias, step + torch.log(-torch.expm1(-step)))  # its softplus is the step

    def forward(
        self,
        *tokens: torch.Tensor,
        transition: bool = False,
        step: bool = False,
        mapped: bool = False,
        **arguments: Any,
    ):
        """`ssd_attention` of C `[B, T, G, N]`, B `[B, T, G, N]`, x `[B, T, H, P]` and the raw dt `[B, T, H]`.

        With `transition=True` what `discretized` needs alone, of which `initial_state` may be a function. With
        `step=True` it is one token that moves `state` in place, with `mapped=True` the map of which token answered. All
        of it happens inside, see `InterdomainRecurrence`.
        """
        if transition:
            return tuple(x.clone() for x in self._transition())  # parameters may be freed after the call
        if mapped:
            return self._map(*tokens, **arguments)
        query, key, value, dt = tokens
        moves = self._transition()
        inputs, log_decay = discretized(value, dt, *moves)
        if step:
            return self._step(query, key, value, inputs, log_decay, **arguments)
        arguments["initial_state"] = begun_with(arguments.get("initial_state"), *moves)
        output, state = self.operators.ssd_attention(
            query,
            key,
            inputs,
            log_decay,
            chunk_size=self.config.chunk_size,
            backend=backend_of(self.config, SSD_BACKENDS),
            **arguments,
        )
        return self._skipped(output, value), state

    def _map(self, query, key, value, dt, *, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """The map of which x made which output, `[B, H, T, T]`: that of `ssd_attention_map` with `dt` and `D`."""
        step, log_decay = discretized(torch.ones_like(value[..., :1]), dt, *self._transition())
        weights = self.operators.ssd_attention_map(query, key, log_decay, cu_seqlens=cu_seqlens)
        weights = weights * step.permute(0, 2, 3, 1).to(weights)
        if self.D is None:
            return weights
        return weights + torch.diag_embed(self.D.to(weights)[:, None].expand(-1, weights.shape[-1]))

    def _step(self, *tokens: torch.Tensor, state: torch.Tensor, mask=None, state_indices=None) -> torch.Tensor:
        """`ssd_step` of tokens with an axis of the one token; `[B, H, P]`."""
        query, key, value, inputs, log_decay = (x.squeeze(1) for x in tokens)
        with torch.no_grad():
            backend = backend_of(self.config, STEP_BACKENDS)
            output = self.operators.take_ssd_step(query, key, inputs, log_decay, state, mask, backend, state_indices)
            output = self._skipped(output, value)
        if state_indices is not None:
            mask = state_indices >= 0 if mask is None else mask & (state_indices >= 0)
        return output if mask is None else output.where(mask[:, None, None], 0)

    def _skipped(self, output: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return output if self.D is None else torch.addcmul(output, value.to(output.dtype), self.D[:, None].to(output))

    def _transition(self) -> tuple[torch.Tensor, ...]:
        """Rates and biases of the heads, and where dt has limits these."""
        wide = torch.promote_types(self.A_log.dtype, torch.float32)
        rate = -self.A_log.to(wide).exp()
        bias = torch.zeros_like(rate) if self.dt_bias is None else self.dt_bias.to(wide)
        if self.limit is None:
            return rate, bias
        return rate, bias, torch.stack([rate.new_full((), x) for x in self.limit])  # on the device where it is used


def discretized(
    value: torch.Tensor, dt: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor, limit: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs `dt x` `[B, T, H, P]` and log decays `dt a` `[B, T, H]` for `ssd_attention`, in at least float32.

    Args:
        value: x, `[B, T, H, P]`.
        dt: as projected, `[B, T, H]`; its softplus after the bias is the step.
        rate, bias: a and the bias, `[H]`.
        limit: `[2]`, between which a step is kept. Default: None.
    """
    wide = torch.promote_types(torch.promote_types(value.dtype, rate.dtype), torch.float32)
    step = F.softplus(dt.to(wide) + bias.to(wide))
    if limit is not None:
        step = step.clamp(min=limit[0], max=limit[1])
    return value.to(wide) * step[..., None], step * rate.to(wide)
