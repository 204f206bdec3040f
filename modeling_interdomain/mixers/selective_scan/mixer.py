"""Mamba's layer as a token mixer: a selective scan of channels whose steps, inputs and readouts they choose alone."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...layers.operators import Operators
from ...ops.selective_scan.entry import scan_state_after
from ..recurrent import Biases, Projection, RecurrentMixer
from .recurrence import SelectiveScanRecurrence, steps_of


class SelectiveScanMixer(RecurrentMixer):
    """`h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t`, `y_t = C_t h_t + D x_t` (Mamba, arXiv 2312.00752, section 3.4).

    `v_proj` and a convolution with SiLU make x, `x_proj` of it the low-rank step, B and C, `dt_proj` the step of every
    channel; `g_proj` makes the gate z. Mamba is this without feed-forward layers. All channels are one head.
    """

    passes_state = True
    operators = Operators.of(scan_state_after)

    def __init__(self, config, layer_idx: int):
        channels = self.channels(config)
        super().__init__(config, layer_idx, channels)
        self.rope_placement = None
        self.sizes = [self.step_rank(config), config.scan_state_size, config.scan_state_size]
        self.x_proj = nn.Linear(channels, sum(self.sizes), bias=False)
        self.dt_proj: Any = nn.Linear(self.sizes[0], channels, bias=False)
        self.dt_proj.start_std = (3 * self.sizes[0]) ** -0.5  # of Mamba's uniform start, whatever the rank
        self.recurrence = SelectiveScanRecurrence(config, channels)

    @classmethod
    def check_config(cls, config) -> None:
        config.check_scan()

    @classmethod
    def why_not_shardable(cls, config, processes: int) -> str | None:
        return '"selective_scan" layers have one head, whose channels choose its steps together'

    @classmethod
    def channels(cls, config) -> int:
        """E."""
        return 2 * config.hidden_size if config.scan_channels is None else config.scan_channels

    @classmethod
    def step_rank(cls, config) -> int:
        return -(-config.hidden_size // 16) if config.scan_step_rank is None else config.scan_step_rank

    @classmethod
    def output_heads(cls, config) -> int:
        return 1

    @classmethod
    def biases(cls, config) -> Biases:
        return Biases(config.scan_bias, config.scan_conv_bias)

    @classmethod
    def gated(cls, config) -> bool:
        return True

    @classmethod
    def rotated_dims(cls, config) -> set[int]:
        return set()

    @classmethod
    def projections(cls, config) -> list[Projection]:
        return [Projection("v", 1, cls.channels(config), True)]

    @classmethod
    def state_shape(cls, config) -> tuple[int, ...]:
        return config.scan_state_size, cls.channels(config)

    @classmethod
    def written_shape(cls, config) -> tuple[int, int]:
        """Heads and width of what the recurrence writes."""
        return 1, cls.channels(config)

    def _written(self, tokens: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return tokens[2][:, :, None]

    def _tokens(self, projections, cos_sin):
        value = F.silu(projections[0])
        dt, key, query = self.x_proj(value).split(self.sizes, dim=-1)
        return query, key, value, self.dt_proj(dt)

    def _recorded(self, tokens):
        return tokens[1:]

    @staticmethod
    def replay_state(operators, state, key, value, dt, mask, rate, bias):
        return operators.scan_state_after(state, key, value, steps_of(dt, bias), rate, mask)

    @staticmethod
    def total_decay(mask, key, value, dt, rate, bias):
        return torch.where(mask[..., None], steps_of(dt, bias), 0).double().sum(1)

    def decay_state(self, state, total_decay, rate, bias):
        return (total_decay[:, None] * rate).exp().to(state.dtype) * state
