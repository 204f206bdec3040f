"""The recurrence of what has left a window, and what stands in its place where nothing is kept of that."""

from types import SimpleNamespace

import torch
from torch import nn

from ..interdomain.recurrence import InterdomainRecurrence


class WindowRecurrence(InterdomainRecurrence):
    """That of Interdomain layers with the hermitian product, which starts with groups that see further and further.

    Phases of the fastest group resolve 2M tokens and fade over as many, those of the slowest 16 times that; the others
    lie evenly between, so that three groups are a factor of 4 apart. C is the inverse Gramian of the modes.
    """

    def __init__(self, config):
        super().__init__(config)
        self.product, self.normalize = "hermitian", False

    def start_parameters(self, config) -> None:
        step = 1 / config.state_size
        start = SimpleNamespace(
            time_step_min=step / 16,
            time_step_max=step,
            time_step_spacing="even",
            modes="s4d_lin",
            input_matrix_init="unit_variance",
            coefficient_init="posterior",
            coefficient_init_noise=1e-3,
            output_init_rms=None,
        )
        super().start_parameters(start)


class NoRecurrence(nn.Module):
    """Moves nothing on: its state `[B, G, 2, 0, R + D]` has no modes."""

    def __init__(self, config):
        super().__init__()
        self.shape = config.num_key_value_heads, 2, 0, config.feature_dim + config.head_dim

    def forward(self, query: torch.Tensor, *tokens, transition: bool = False, step: bool = False, **arguments):
        if transition:
            return ()
        return query[:, 0] if step else (query, query.new_zeros(query.shape[0], *self.shape))
