"""The feature maps xi that queries and keys share."""

import torch
from torch.nn import functional as F


def silu_l2(x: torch.Tensor) -> torch.Tensor:
    """`SiLU(x) / ||SiLU(x)||_2` over the last axis, in at least float32 (eq. 10)."""
    return F.normalize(F.silu(x if x.dtype == torch.float64 else x.float()), dim=-1)


FEATURE_MAPS = {"silu_l2": silu_l2}
