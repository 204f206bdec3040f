"""Projections back into the residual stream."""

from torch import nn


class ResidualProjection(nn.Linear):
    """A linear layer that starts with a smaller standard deviation: there are 2 N of them, and they add up."""
