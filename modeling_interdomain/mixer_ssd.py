"""State space duality as a token mixer: with rotary embeddings that of Cheems, with a convolution Mamba-2."""

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .mixer_recurrent import Biases, RecurrentMixer, Stream, placed_map
from .module_common import InterdomainRMSNorm
from .module_operators import Operators
from .module_rotary import rotate
from .module_ssd import SSDRecurrence, discretized
from .module_tensor_parallel import HEADS
from .op_ssd import ssd_state_after


class GroupedRMSNorm(InterdomainRMSNorm):
    """RMSNorm over each of `groups` equal parts of the last axis, with a weight a number."""

    def __init__(self, size: int, groups: int, eps: float):
        super().__init__(size, eps)
        self.width = size // groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.unflatten(-1, (-1, self.width))
        return self.weight * F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(-2)


class SSDMixer(RecurrentMixer):
    """`S_t = exp(dt a) S_{t-1} + dt x B^T`, `y_t = S_t C + D x` ("Wonderful Matrices", arXiv 2407.16958; Mamba-2).

    `q_proj` makes C, `k_proj` B, `v_proj` x and `dt_proj` the step of each head, which is not convolved. With
    `rope_placement` B and C are rotated. Mamba-2 is `ssd_conv_kernel=4`, `ssd_activation="silu"`, `use_output_gate` and
    `ssd_norm="after_gate"`, without feed-forward layers.
    """

    passes_state = True
    operators = Operators.of(ssd_state_after)

    def __init__(self, config, layer_idx: int):
        self.size, width = config.ssd_state_size, self.head_width(config)
        super().__init__(config, layer_idx, width)
        self.activation = None if config.ssd_activation is None else ACT2FN[config.ssd_activation]
        self.norm_after_gate = config.ssd_norm == "after_gate"
        outputs = self.output_heads(config) * width
        self.norm = None
        if config.ssd_norm is not None:
            self.norm = GroupedRMSNorm(outputs, config.ssd_groups, config.rms_norm_eps)
        self.recurrence = SSDRecurrence(config, self.output_heads(config))

    @classmethod
    def check_config(cls, config) -> None:
        heads, size = cls.output_heads(config), config.ssd_state_size
        for name in ("ssd_heads", "ssd_head_dim"):
            if getattr(config, name) is not None and getattr(config, name) < 1:
                raise ValueError(f"{name} must be a positive integer or None, got {getattr(config, name)}.")
        if heads % config.ssd_groups:
            raise ValueError(f'ssd_groups = {config.ssd_groups} must divide the {heads} heads of "ssd" layers.')
        if config.ssd_activation is not None and config.ssd_activation not in ACT2FN:
            raise ValueError(
                f"ssd_activation must be None or an activation of Transformers, got {config.ssd_activation!r}."
            )
        limit = config.ssd_dt_limit
        if limit is not None and not (len(limit) == 2 and 0 <= limit[0] <= limit[1]):
            raise ValueError(f"ssd_dt_limit must be None or [least, largest] with 0 <= least <= largest, got {limit}.")
        if config.rope_placement is not None and size % 2:
            raise ValueError(
                f"Rotary embeddings turn pairs: with rope_placement ssd_state_size must be even, got {size}."
            )

    @classmethod
    def output_heads(cls, config) -> int:
        return config.num_attention_heads if config.ssd_heads is None else config.ssd_heads

    @classmethod
    def head_width(cls, config) -> int:
        """P, the numbers a head."""
        return config.head_dim if config.ssd_head_dim is None else config.ssd_head_dim

    @classmethod
    def kernel_size(cls, config) -> int:
        return config.ssd_conv_kernel

    @classmethod
    def biases(cls, config) -> Biases:
        return Biases(config.ssd_bias, config.ssd_conv_bias)

    @classmethod
    def rotated(cls, config) -> int:
        return config.ssd_state_size

    @classmethod
    def streams(cls, config) -> list[Stream]:
        convolved, size = config.ssd_conv_kernel > 1, config.ssd_state_size
        return [
            Stream("q", config.ssd_groups, size, convolved),
            Stream("k", config.ssd_groups, size, convolved),
            Stream("v", cls.output_heads(config), cls.head_width(config), convolved),
            Stream("dt", cls.output_heads(config), 1, False),
        ]

    @classmethod
    def state_shape(cls, config) -> tuple[int, ...]:
        return cls.output_heads(config), cls.head_width(config), config.ssd_state_size

    def _tokens(self, streams, cos_sin):
        *convolved, dt = streams
        if self.activation is not None:
            convolved = [self.activation(x) for x in convolved]
        query, key, value = convolved
        query, key = (x.unflatten(-1, (-1, self.size)) for x in (query, key))
        if cos_sin is not None:
            query, key = rotate(query, *cos_sin), rotate(key, *cos_sin)
        return query, key, value.unflatten(-1, (dt.shape[-1], -1)), dt

    def attention_map(self, tokens, packing):
        ends = None if packing is None else packing.cu_seqlens
        return placed_map(self.recurrence(*tokens, mapped=True, cu_seqlens=ends), packing)

    @classmethod
    def undivided(cls, config, processes: int) -> str | None:
        groups = config.ssd_groups
        return f"it does not divide ssd_groups = {groups}, what heads share B and C in" if groups % processes else None

    @classmethod
    def head_plan(cls, config) -> dict[str, str]:
        return super().head_plan(config) | ({} if config.ssd_norm is None else {"norm.weight": HEADS})

    @classmethod
    def written_shape(cls, config) -> tuple[int, int]:
        return cls.output_heads(config), cls.head_width(config)

    def _written(self, tokens):
        return tokens[2]

    def _recorded(self, tokens):
        return tokens[1:]

    @staticmethod
    def replay_state(operators, state, key, value, dt, mask, *transition):
        inputs, log_decay = discretized(value, dt, *transition)
        return operators.ssd_state_after(state, key, inputs, log_decay, mask)

    @staticmethod
    def elapsed(mask, key, value, dt, *transition):
        log_decay = discretized(value[..., :0], dt, *transition)[1]  # of the steps alone
        return torch.where(mask[..., None], log_decay, 0).double().sum(1)

    def aged(self, state, elapsed, *transition):
        return elapsed.exp()[..., None, None].to(state.dtype) * state

    def _way_out(self, output, hidden_states):
        if self.norm is None:
            return super()._way_out(output, hidden_states)
        gate = None
        if self.g_proj is not None:
            wide = torch.promote_types(hidden_states.dtype, torch.float32)
            gate = F.silu(self.g_proj(hidden_states).to(wide))
        if not self.norm_after_gate:
            output = self.norm(output)
        if gate is not None:
            output = output * gate
        if self.norm_after_gate:
            output = self.norm(output)
        return output.to(hidden_states.dtype)
