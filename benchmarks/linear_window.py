"""What a window with a memory is compared with: linear attention in place of the Interdomain state, of the same size.

The layers are named "linear_window" in a configuration, once this is imported. All else is that of "window" layers:
which token enters the state and when, the share, the norm and the gate of what is read.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import initialization as init

from conversion.carry import carried_weights, convert
from conversion.reading import read_config, read_weights, weight_files
from conversion.writing import tokenizer_files
from modeling_interdomain import InterdomainConfig, register_token_mixer, ssd_attention
from modeling_interdomain.mixers.window.mixer import WindowMixer

NAME = "linear_window"


class LinearRecurrence(nn.Module):
    """`S_t = exp(-exp(log_dt)) S_{t-1} + v_t k_t^T`, read as `S_t q_t`: `log_dt` `[G]`, state `[B, G, D, R]`.

    Groups forget a factor e in as many tokens as the slowest modes of an Interdomain state of `state_size` modes: 4 M
    to 64 M, evenly between.
    """

    def __init__(self, config):
        super().__init__()
        self.log_dt = nn.Parameter(torch.empty(config.num_key_value_heads))
        self.start_parameters(config)

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        slowest = -math.log(64 * config.state_size)
        init.copy_(self.log_dt, torch.linspace(slowest, slowest + math.log(16), len(self.log_dt)))

    def forward(self, query, key, value, initial_state=None, state=None, mask=None, step: bool = False, **extent):
        """Query `[B, T, H, R]`, key `[B, T, G, R]` and value `[B, T, G, D]` to `[B, T, H, D]` and the final state.

        With `step=True` one token moves `state` in place, and the output is `[B, H, D]`.
        """
        if step:
            lengths = None if mask is None else mask.long()
            moved = self(query, key, value, initial_state=state, lengths=lengths, output_final_state=True)
            state.copy_(moved[1])
            return moved[0][:, 0]
        heads = query.shape[2] // key.shape[2]  # that share a key
        key, value = (x.repeat_interleave(heads, dim=2) for x in (key, value))
        log_decay = -self.log_dt.exp().repeat_interleave(heads).expand(query.shape[:3])
        if initial_state is not None:
            initial_state = initial_state.repeat_interleave(heads, dim=1)
        output, final = ssd_attention(query, key, value, log_decay, initial_state=initial_state, **extent)
        return output, None if final is None else final[:, ::heads]


class LinearWindowMixer(WindowMixer):
    """A window with a memory that is linear attention of `feature_dim` features."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.recurrence, self.at_points = LinearRecurrence(config), False

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        """Features start as the numbers of a head, those turned, and both with the other sign, for SiLU keeps half."""
        super().start_parameters(config)
        heads = self.q_map.shape[0] // self.k_map.shape[0]
        turned = _turned(*self.k_map.shape)
        init.copy_(self.k_map, turned.to(self.k_map))
        init.copy_(self.q_map, turned.repeat_interleave(heads, dim=0).to(self.q_map))

    @classmethod
    def state_shape(cls, config) -> tuple[int, ...]:
        return config.num_key_value_heads, config.head_dim, config.feature_dim


def _turned(groups: int, size: int, features: int) -> torch.Tensor:
    """`[G, D, R]`: maps that keep lengths, each beside its negative, the first the identity."""
    generator = torch.Generator().manual_seed(0)
    maps = []
    while len(maps) * 2 * size < features:
        random = torch.randn(groups, size, size, generator=generator)
        maps.append(torch.linalg.qr(random).Q if maps else torch.eye(size).expand(groups, -1, -1))
    return torch.cat([signed for x in maps for signed in (x, -x)], dim=2)[..., :features]


register_token_mixer(NAME, LinearWindowMixer)


def features(config: InterdomainConfig) -> int:
    """Of linear attention whose state is as large as that of a window with a memory."""
    size = config.state_size
    return 2 * size * (config.feature_dim + config.head_dim) // config.head_dim


def with_linear_attention(source: Path, converted: Path, target: Path) -> None:
    """The Llama `source` as `converted` has it, untaught, with linear attention in place of Interdomain states."""
    config, llama = read_config(converted), read_config(source)
    mixers = [NAME if name == "window" else name for name in config.mixers_per_layer]
    fields = {"token_mixers": mixers, "feature_dim": features(config), "layer_types": None, "window_points": 0}
    linear = InterdomainConfig(**config.to_dict() | fields)
    model = convert(linear, carried_weights(read_weights(weight_files(source)), llama), torch.float32)
    model.save_pretrained(target)
    for file in tokenizer_files(converted):
        shutil.copy2(file, target)
