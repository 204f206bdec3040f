"""Rotary position embeddings."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import initialization as init
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .common import Float32Module, is_plain
from .configuration import LENGTH_DEPENDENT


class InterdomainRotaryEmbedding(Float32Module):
    """Cosines and sines `[B, T, dim]` for a head of `dim` numbers, by default `config.head_dim`.

    Angles that depend on the length go by that of each text, so that neither a neighbour nor an earlier forward changes
    them.
    """

    inv_freq: torch.Tensor
    long_inv_freq: torch.Tensor

    def __init__(self, config, dim: int | None = None):
        super().__init__()
        self.config = copy.copy(config)
        self.config.head_dim = dim or config.head_dim
        self.rope_type = config.rope_parameters["rope_type"]
        for name, (inv_freq, scaling) in self.initial_frequencies().items():
            self.register_buffer(name, inv_freq, persistent=False)
            self.attention_scaling = scaling

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        for name, (inv_freq, _) in self.initial_frequencies().items():
            init.copy_(getattr(self, name), inv_freq)

    def initial_frequencies(self) -> dict[str, tuple[torch.Tensor, float]]:
        """The buffers, each with what multiplies cosines and sines; two of "longrope", of short and of long texts."""
        if self.rope_type == "default":
            rope = self.config.rope_parameters
            dim = int(self.config.head_dim * rope.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
            return {"inv_freq": (rope["rope_theta"] ** -exponents, 1.0)}
        if self.rope_type not in ROPE_INIT_FUNCTIONS:
            names = ", ".join(("default", *ROPE_INIT_FUNCTIONS))
            raise ValueError(f"rope_type must be one of {names}; got {self.rope_type!r}.")
        of_length = ROPE_INIT_FUNCTIONS[self.rope_type]
        found = {"inv_freq": of_length(self.config, None)}
        if self.rope_type == "longrope":
            found["long_inv_freq"] = of_length(self.config, None, seq_len=self._short() + 1)
        return found

    def _short(self) -> int:
        """The longest text of the short frequencies of "longrope"."""
        return self.config.rope_parameters["original_max_position_embeddings"]

    def _frequencies(self, lengths: torch.Tensor) -> torch.Tensor:
        """The frequencies of texts of the lengths `[B, 1 or T]`, where they depend on these."""
        if self.rope_type == "longrope":
            return torch.where(lengths[..., None] > self._short(), self.long_inv_freq, self.inv_freq)
        return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, lengths.device, seq_len=lengths[..., None])[0]

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, documents: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In the dtype of x, at positions `[B or 1, T]`; `documents` `[B, T]` numbers the packed one of each token."""
        # In float32 an angle at position 65,536 would be off by some thousandths; MPS has no float64.
        wide = torch.float32 if x.device.type == "mps" else torch.float64
        inv_freq = self.inv_freq
        if self.rope_type in LENGTH_DEPENDENT:
            inv_freq = self._frequencies(_lengths(position_ids, documents))
        angles = position_ids[..., None].to(wide) * inv_freq.to(x.device, wide)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def _lengths(position_ids: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    """`[B or 1, 1]`, how long each row is by now, or `[B, T]`, the document of each token."""
    if documents is None:
        return position_ids.amax(dim=1, keepdim=True) + 1
    places, numbers = position_ids.expand(documents.shape).flatten(), documents.flatten()
    return torch.zeros_like(places).scatter_reduce(0, numbers, places, "amax")[numbers].view(documents.shape) + 1


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first `dim` numbers of each head `[B, T, heads, head_dim]` by the angles of `[B, T, dim]`."""
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat([rotate(x[..., :dim], cos, sin), x[..., dim:]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    if x.shape[1] > 1 and is_plain(x, x.dtype):  # for one token a call costs more than the copies it saves
        y, turns = x * cos.unsqueeze(2), sin.unsqueeze(2).chunk(2, dim=-1)
        for half, other, turn, sign in zip(y.chunk(2, dim=-1), (second, first), turns, (-1, 1), strict=True):
            half.addcmul_(other, turn, value=sign)
        return y
    return torch.addcmul(x * cos.unsqueeze(2), torch.cat([-second, first], dim=-1), sin.unsqueeze(2))


def rotate_around(
    function: Callable[..., torch.Tensor], x: torch.Tensor, cos_sin: Any, placement: str | None, *arguments: Any
) -> torch.Tensor:
    """`function(x, *arguments)` with `rotate` "before" or "after" it; with neither where `cos_sin` or `placement` is
    None."""
    if cos_sin is None or placement is None:
        return function(x, *arguments)
    if placement == "before":
        return function(rotate(x, *cos_sin), *arguments)
    return rotate(function(x, *arguments), *cos_sin)
