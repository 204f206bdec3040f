"""The feature maps xi that queries and keys share; each maps `[B, T, heads, input size]` to `[B, T, heads, R]`."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .common import is_plain


def silu_l2(x: torch.Tensor) -> torch.Tensor:
    """`SiLU(x) / ||SiLU(x)||_2` over the last axis, in at least float32; zero for zeros."""
    wide = _wide(x)
    if is_plain(wide, wide.dtype):
        return silu_l2_(wide, inplace=wide is not x)
    x = F.silu(wide)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-12)


def silu_l2_(x: torch.Tensor, inplace: bool = True) -> torch.Tensor:
    """`silu_l2` of a plain tensor, in its dtype and, by default, in place."""
    y = F.silu(x, inplace=inplace)
    return y.div_(torch.linalg.vector_norm(y, dim=-1, keepdim=True).clamp_(min=1e-12))


class SiluL2(nn.Module):
    """`SiLU(x) / ||SiLU(x)||_2` over the last axis, in at least float32 (eq. 10)."""

    def forward(self, x: torch.Tensor, is_query: bool = False) -> torch.Tensor:
        return silu_l2(x)


class FourierFeatures(nn.Module):
    """Fourier features of a learned spectral density (the workshop version of the paper).

    The features of a query and a key meet as `sum_r w[h, r] cos(frequencies[r] . (q - k))`, a stationary kernel whose
    spectrum is the learned `frequencies` `[G, F, input size]` with weights `w = softmax(weights)` `[H, F]`, one
    distribution a query head. The weights act on the query alone, so that heads with kernels of their own can share
    keys and values; where no query reads them (`weighted=False`) there are none. "fourier" has a cosine and a sine for
    each of F = R / 2 frequencies; "fourier_shifted" has R cosines with learned `phases` `[G, R]`, which meet in the
    same kernel only in the mean over uniform phases.
    """

    def __init__(self, config, weighted: bool = True):
        super().__init__()
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.shifted = config.feature_map == "fourier_shifted"
        number = config.feature_dim if self.shifted else config.feature_dim // 2
        self.frequencies = nn.Parameter(torch.empty(groups, number, config.head_dim))
        self.weights = nn.Parameter(torch.empty(heads, number)) if weighted else None
        self.phases = nn.Parameter(torch.empty(groups, number)) if self.shifted else None
        self.start_parameters(config)

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        """The Gaussian kernel that is in softmax attention, as wide: normal frequencies, equal weights, uniform phases.

        `exp(q . k / sqrt(D))` is `exp(-|q - k|^2 / (2 sqrt(D)))` but for the norms. With a kernel of unit
        width no key is near a query: the normaliser is close to zero, outputs explode, and nothing is learned.
        """
        init.normal_(self.frequencies, std=self.frequencies.shape[-1] ** -0.25)
        if self.weights is not None:
            init.zeros_(self.weights)
        if self.phases is not None:
            init.uniform_(self.phases, 0.0, 2 * math.pi)

    def forward(self, x: torch.Tensor, is_query: bool = False) -> torch.Tensor:
        x = _wide(x)
        frequencies = self.frequencies.to(x.dtype)
        grouped = x.unflatten(2, (frequencies.shape[0], -1))  # queries have several heads a group
        angles = torch.einsum("btgpd,gfd->btgpf", grouped, frequencies)
        if self.phases is not None:
            features = math.sqrt(2) * torch.cos(angles + self.phases.to(x.dtype)[:, None])
        else:
            features = torch.cat([angles.cos(), angles.sin()], dim=-1)
        features = features.flatten(2, 3)
        if not is_query:
            return features
        weights = self.weights.to(x.dtype).softmax(dim=-1)
        return features * (weights if self.shifted else torch.cat([weights, weights], dim=-1))


def feature_map(config, has_query: bool = True) -> nn.Module:
    """The map that `config.feature_map` names."""
    return SiluL2() if config.feature_map == "silu_l2" else FourierFeatures(config, weighted=has_query)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
