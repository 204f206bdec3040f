"""Modules that keep their numbers in float32 when the model around them is converted to half precision."""

import torch
from torch import nn


class Float32Module(nn.Module):
    """`.to(torch.bfloat16)` and `.half()` move parameters and buffers of this module without rounding them."""

    def _apply(self, fn, recurse=True):
        def move(x: torch.Tensor) -> torch.Tensor:
            moved = fn(x)
            return x.to(moved.device) if moved.dtype in (torch.bfloat16, torch.float16) else moved

        return super()._apply(move, recurse)
