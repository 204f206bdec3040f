"""Rotary position embeddings."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import initialization as init
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .module_common import Float32Module, is_plain

# Whose frequencies change with the length: what a state holds cannot be rotated again.
LENGTH_DEPENDENT = ("dynamic", "longrope")


class InterdomainRotaryEmbedding(Float32Module):
    """Cosines and sines `[B, T, dim]` for a head of `dim` numbers, by default `config.head_dim`."""

    inv_freq: torch.Tensor

    def __init__(self, config, dim: int | None = None):
        super().__init__()
        self.config = copy.copy(config)
        self.config.head_dim = dim or config.head_dim
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        inv_freq, self.attention_scaling = self.initial_frequencies()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        inv_freq, _ = self.initial_frequencies()
        init.copy_(self.inv_freq, inv_freq)
        init.copy_(self.original_inv_freq, inv_freq)

    def initial_frequencies(self, device=None) -> tuple[torch.Tensor, float]:
        if self.rope_type != "default":
            return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, device)
        return self.compute_default_rope_parameters(self.config, device)

    @staticmethod
    def compute_default_rope_parameters(config, device=None, **kwargs) -> tuple[torch.Tensor, float]:
        dim = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.float, device=device) / dim
        return config.rope_parameters["rope_theta"] ** -exponents, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # In float32 an angle at position 65,536 would be off by some thousandths; MPS has no float64.
        wide = torch.float32 if x.device.type == "mps" else torch.float64
        angles = position_ids[..., None].to(wide) * self.inv_freq.to(x.device, wide)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `dim` numbers of each head `[B, T, heads, head_dim]` by the angles of `[B, T, dim]`."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([rotate(x[..., :dim], cos, sin), x[..., dim:]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    if x.shape[1] > 1 and is_plain(x, x.dtype):  # of one token a call costs more than what it copies
        y, turns = x * cos.unsqueeze(2), sin.unsqueeze(2).chunk(2, dim=-1)
        for half, other, turn, sign in zip(y.chunk(2, dim=-1), (second, first), turns, (-1, 1), strict=True):
            half.addcmul_(other, turn, value=sign)
        return y
    return torch.addcmul(x * cos.unsqueeze(2), torch.cat([-second, first], dim=-1), sin.unsqueeze(2))


def rotate_around(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, cos_sin: Any, placement: str | None
) -> torch.Tensor:
    """`function(x)` with `rotate` "before" or "after" it; with neither where `cos_sin` or `placement` is None."""
    if cos_sin is None or placement is None:
        return function(x)
    return function(rotate(x, *cos_sin)) if placement == "before" else rotate(function(x), *cos_sin)
