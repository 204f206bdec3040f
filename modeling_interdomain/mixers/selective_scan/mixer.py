"""Mamba's layer as a token mixer: a selective scan of channels whose steps, inputs and readouts they choose alone."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...layers.convolution import convolve_all
from ...layers.operators import Operators
from ...ops.selective_scan.entry import scan_state_after
from ..recurrent import RecurrentMixer
from .configuration import SelectiveScanSpecification
from .recurrence import SelectiveScanRecurrence, steps_of


class SelectiveScanMixer(SelectiveScanSpecification, RecurrentMixer):
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

    def _written(self, tokens: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return tokens[2][:, :, None]

    def _inputs(self, projected, conv_state, cos_sin, packing, keep: bool):
        projections, after = convolve_all(self._convolutions(), projected, conv_state, self.kernel, packing)
        value = F.silu(projections[0])
        # Adapters, which may differ by row, need the rows of the batch here too.
        by_row = packing is not None and any(type(x) is not nn.Linear for x in (self.x_proj, self.dt_proj))
        low = self.x_proj(packing.unpack(value) if by_row else value)
        dt, key, query = low.split(self.sizes, dim=-1)
        found = query, key, self.dt_proj(dt)
        query, key, dt = (packing.pack(x) for x in found) if by_row else found
        return (query, key, value, dt), after

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
