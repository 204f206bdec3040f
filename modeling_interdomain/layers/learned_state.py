"""What a recurrent layer begins with: zeros, or a state that is learned (state tuning)."""

import torch
from torch import nn
from transformers import initialization as init

from .common import Float32Module, at_least_float32


class FirstState(Float32Module):
    """`state`, of the shape of one sequence's, at least in float32; zeros at the start, with which nothing changes.

    It is to a recurrent layer what learned keys and values (prefix tuning) are to attention: what the layer would hold
    after reading some text, found by training instead. It decays like what a text leaves.
    """

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.state = nn.Parameter(torch.zeros(shape, dtype=at_least_float32()))

    def start_parameters(self, config) -> None:
        init.zeros_(self.state)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The state of each of the rows, or documents, along the first axis of any tensor."""
        state = self.state.clone()  # what shards this module frees its parameter after this call
        return state.expand(rows.shape[0], *state.shape)
