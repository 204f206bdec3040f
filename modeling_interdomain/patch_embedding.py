"""Images as sequences: one linear map a patch."""

import torch
from torch import nn


class PatchEmbedding(nn.Module):
    """`[B, channels, height, width]` to `[B, tokens, hidden_size]`, patches row by row; `patch_size` 1 means pixels."""

    def __init__(self, config):
        super().__init__()
        self.channels, self.patch_size = config.num_channels, config.patch_size
        self.proj = nn.Linear(self.channels * self.patch_size**2, config.hidden_size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.channels:
            raise ValueError(
                f"pixel_values must have shape [B, {self.channels}, height, width], got {list(pixel_values.shape)}."
            )
        if any(size % self.patch_size for size in pixel_values.shape[2:]):
            raise ValueError(
                f"pixel_values of {list(pixel_values.shape[2:])} pixels cannot be cut into patches of "
                f"{self.patch_size}; resize the images to a multiple of it."
            )
        patches = nn.functional.unfold(pixel_values, self.patch_size, stride=self.patch_size)
        return self.proj(patches.mT.to(self.proj.weight.dtype))
