"""Projections back into the residual stream."""

from typing import Any

from torch import nn


def residual_projection(in_features: int, out_features: int) -> nn.Linear:
    """A linear layer that starts with a smaller standard deviation: there are 2 N of them, and they add up.

    It is marked rather than of a class of its own, because quantizers and adapters may look for `nn.Linear` exactly.
    """
    linear: Any = nn.Linear(in_features, out_features, bias=False)
    linear.adds_to_residual = True
    return linear
