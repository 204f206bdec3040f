"""The short causal convolution of queries and keys, which remembers its last inputs."""

import torch
from torch import nn


class CausalConv1d(nn.Conv1d):
    """Depthwise convolution over the last `kernel_size` tokens, without bias; an ordinary `nn.Conv1d` otherwise."""

    def __init__(self, width: int, kernel_size: int):
        super().__init__(width, width, kernel_size, groups=width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, W, L + kernel_size - 1]` to `[B, W, L]`."""
        # A few shifted products keep the memory layout of the tokens; the library's convolution would transpose it.
        length = x.shape[-1] - self.kernel_size[0] + 1
        taps = self.weight[:, 0].split(1, dim=-1)
        y = x[..., :length] * taps[0]
        for shift, tap in enumerate(taps[1:], start=1):
            y = torch.addcmul(y, x[..., shift : shift + length], tap)
        return y


def causal_conv(
    conv: nn.Module, x: torch.Tensor, window: torch.Tensor | None, kernel: int, cu_seqlens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve each row, or each packed document, on from the inputs that went before it.

    Args:
        conv: maps `[B, W, L + kernel - 1]` to `[B, W, L]`.
        x: `[B, T, W]`; with `cu_seqlens`, B = 1.
        window: `[B or S, W, kernel - 1]`, the inputs before the first token; None means zeros.

    Returns:
        `[B, T, W]` and the new window.
    """
    before = kernel - 1
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if window is None:
        window = x.new_zeros(rows, x.shape[2], before)
    window = window.to(x.dtype)
    if cu_seqlens is None:
        extended = torch.cat([window.mT, x], dim=1).mT
        return conv(extended).mT, extended[..., extended.shape[-1] - before :]

    # Put its window in front of every document; what a convolution then mixes across documents is never read.
    lengths = cu_seqlens.diff()
    document = torch.repeat_interleave(torch.arange(rows, device=x.device), lengths)
    slots = torch.arange(x.shape[1], device=x.device) + before * (document + 1)
    offsets = torch.arange(before, device=x.device)
    window_slots = (cu_seqlens[:-1] + before * torch.arange(rows, device=x.device))[:, None] + offsets
    extended = x.new_zeros(x.shape[1] + before * rows, x.shape[2])
    extended = extended.index_copy(0, slots, x[0]).index_copy(0, window_slots.flatten(), window.mT.flatten(0, 1))
    convolved = conv(extended.T[None]).mT.index_select(1, slots - before)
    last = (cu_seqlens[1:] + before * torch.arange(rows, device=x.device))[:, None] + offsets
    return convolved, extended[last.flatten()].view(rows, before, x.shape[2]).mT
