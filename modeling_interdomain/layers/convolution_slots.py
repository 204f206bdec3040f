"""The short causal convolution of rows whose last inputs are in slots of a pool."""

from collections.abc import Sequence

import torch

from ..ops.common.slots import read_slots, write_slots
from .convolution import convolve_few


def convolve_slots(
    inputs: Sequence[torch.Tensor],
    conv_states: Sequence[torch.Tensor],
    conv_weight: torch.Tensor,
    state_indices: torch.Tensor,
) -> torch.Tensor:
    """`convolve_few` of rows whose convolution states are in slots of pools, as those of `interdomain_step` may be.

    Args:
        inputs: `[B, T, W]` each.
        conv_states: pools `[N, W, kernel - 1]`, of which row b moves slot state_indices[b] on in place.
        conv_weight: `[kernel, sum of all W]`.
        state_indices: `[B]` int32 or int64, no two the same; a row below 0 is a pad: no slot changes, its output is 0.

    Returns:
        `[B, T, sum of all W]`.
    """
    before = [read_slots(pool, state_indices) for pool in conv_states]
    output, after = convolve_few(inputs, before, conv_weight)
    for pool, rows in zip(conv_states, after, strict=True):
        write_slots(pool, state_indices, rows)
    return output.where((state_indices >= 0)[:, None, None], 0)
