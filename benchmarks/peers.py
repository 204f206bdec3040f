"""What others would choose, as token mixers of the studies: Gated DeltaNet, Kimi Delta Attention, and softmax with a
short convolution.

They read whole rows without pads and without a cache, which is what the studies train and measure; anything else they
refuse. `equal_width` gives the width of the feed-forward layers with which a model has as many parameters as another.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import nn
from transformers import KimiLinearConfig, Qwen3NextConfig
from transformers import initialization as init
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from benchmarks.delta_rules import gated_delta_rule, kimi_delta_rule
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, TokenMixer, register_token_mixer
from modeling_interdomain.layers.convolution import CausalConv1d, causal_conv
from modeling_interdomain.mixers.softmax.mixer import SoftmaxMixer

GATED_DELTANET = {"token_mixers": "gated_deltanet"}
GATED_DELTANET_SPREAD = {"token_mixers": "gated_deltanet_spread"}
GATED_DELTANET_EVEN = {"token_mixers": "gated_deltanet_even"}
KIMI_DELTA = {"token_mixers": "kimi_delta"}
SOFTMAX_CONVOLUTION = {"token_mixers": "softmax_convolution"}


def _whole_rows_only(name: str, cache: Any, masked: Any) -> None:
    if cache is not None or masked is not None:
        raise ValueError(f'"{name}" is a peer in studies and reads whole rows: pass neither a cache nor pads.')


def _spread_steps(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Numbers whose softplus, the step, is spread over a range in the logarithm."""
    return _before_softplus(torch.empty_like(like).uniform_(math.log(low), math.log(high)).exp())


def _before_softplus(step: torch.Tensor) -> torch.Tensor:
    """The numbers whose softplus these steps are."""
    return step + torch.log(-torch.expm1(-step))


class DeltaMixer(TokenMixer):
    """A layer of Transformers by the delta rule, in `layer`; `named` is what configurations call the mixer.

    Its linear maps start as those of all models here, its convolution as Transformers starts one, small, and the rest
    as it is made.
    """

    layer_type = "linear_attention"
    named: ClassVar[str]
    layer: nn.Module

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        init.normal_(self.layer.conv1d.weight, std=config.initializer_range)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, packing=None, **kwargs):
        _whole_rows_only(self.named, past_key_values, attention_mask if packing is None else packing)
        return self.layer(hidden_states), None


class GatedDeltaNet(DeltaMixer):
    """The layer of Qwen3-Next (arXiv 2412.06464) as it stands in Transformers, with a head for each of ours.

    Keys have R + D numbers and values 2 M, so that a head's state has as many numbers as that of an Interdomain head
    with as many modes: 64 x 64 for M = R = D = 32.
    """

    named = "gated_deltanet"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        heads, key, value = self._sizes(config)
        self.layer = qwen3_next.Qwen3NextGatedDeltaNet(
            Qwen3NextConfig(
                hidden_size=config.hidden_size,
                num_hidden_layers=config.num_hidden_layers,
                layer_types=["linear_attention"] * config.num_hidden_layers,
                linear_num_key_heads=heads,
                linear_num_value_heads=heads,
                linear_key_head_dim=key,
                linear_value_head_dim=value,
                linear_conv_kernel_dim=config.conv_kernel,
                rms_norm_eps=config.rms_norm_eps,
            ),
            layer_idx,
        )
        setattr(self.layer.out_proj, "adds_to_residual", True)  # noqa: B010, a module takes only such names

    @staticmethod
    def _sizes(config) -> tuple[int, int, int]:
        """Heads, and the numbers of their keys and values."""
        return config.num_attention_heads, config.feature_dim + config.head_dim, 2 * config.state_size

    @property
    def o_proj(self) -> nn.Module:
        return self.layer.out_proj

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        heads, key, value = cls._sizes(config)
        return {"recurrent": heads * key * value, "convolution": heads * (2 * key + value) * (config.conv_kernel - 1)}


class GatedDeltaNetSpread(GatedDeltaNet):
    """With steps that start as those of Mamba-2, spread over `time_step_min` to `time_step_max`.

    Transformers, which loads trained weights, leaves them at 1.3, with which nine heads of ten keep less than a tenth
    of their state after one token.
    """

    named = "gated_deltanet_spread"

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        super().start_parameters(config)
        init.copy_(self.layer.dt_bias, _spread_steps(self.layer.dt_bias, config.time_step_min, config.time_step_max))


class GatedDeltaNetEven(GatedDeltaNet):
    """With decays that no seed draws: steps over the range of Mamba-2, A over 0 to 16, each head in the middle of its
    own part of both, so that every layer has heads that forget at once and others that remember hundreds of tokens.
    """

    named = "gated_deltanet_even"

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        super().start_parameters(config)
        layer, heads = self.layer, len(self.layer.dt_bias)
        parts = (torch.arange(heads, dtype=torch.float32, device=layer.dt_bias.device) + 0.5) / heads
        least, most = math.log(config.time_step_min), math.log(config.time_step_max)
        init.copy_(layer.dt_bias, _before_softplus((least + parts * (most - least)).exp()))
        init.copy_(layer.A_log, (16 * parts).log())


class KimiDelta(DeltaMixer):
    """The layer of Kimi Linear (arXiv 2510.26692) as it stands in Transformers: each number of a key has a decay.

    A head's keys and values have R + D numbers each, 64 for M = R = D = 32, so that its state has as many as that of an
    Interdomain head. Its steps start as Transformers starts them, spread as those of Mamba-2.
    """

    named = "kimi_delta"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        width = config.feature_dim + config.head_dim
        if width != 2 * config.state_size:
            raise ValueError(
                f'"kimi_delta" has keys and values of one width: R + D = {width} must be 2 M, and M is '
                f"{config.state_size}."
            )
        own = KimiLinearConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            layer_types=["linear_attention"] * config.num_hidden_layers,
            linear_num_heads=config.num_attention_heads,
            linear_head_dim=width,
            linear_conv_kernel_dim=config.conv_kernel,
            rms_norm_eps=config.rms_norm_eps,
        )
        self.layer = kimi_linear.KimiLinearDeltaAttention(own, layer_idx)
        setattr(self.layer.o_proj, "adds_to_residual", True)  # noqa: B010, a module takes only such names

    @property
    def o_proj(self) -> nn.Module:
        return self.layer.o_proj

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        super().start_parameters(config)
        gate = self.layer.forget_gate
        init.copy_(gate.A_log, torch.empty_like(gate.A_log).uniform_(1, 16).log())
        init.copy_(gate.dt_bias, _spread_steps(gate.dt_bias, 1e-3, 1e-1))

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        heads, width = config.num_attention_heads, config.feature_dim + config.head_dim
        return {"recurrent": heads * width**2, "convolution": 3 * heads * width * (config.conv_kernel - 1)}


@contextlib.contextmanager
def quickened(on_gpu: bool) -> Iterator[None]:
    """Within, the layers of Transformers take the rules of `delta_rules`: that of Kimi anywhere, the other on a GPU,
    where its own takes most of a step. Afterwards they take their own again."""
    with contextlib.ExitStack() as taken:
        taken.enter_context(patch.object(kimi_linear, "chunk_kimi_delta_attention", kimi_delta_rule))
        if on_gpu:
            taken.enter_context(patch.object(qwen3_next, "torch_chunk_gated_delta_rule", gated_delta_rule))
        yield


class ShortConvolution(CausalConv1d):
    """`[B, T, W]` to the same: every channel of a row over its last tokens, as queries and keys of Interdomain."""

    def __init__(self, width: int, kernel: int):
        super().__init__(width, width, kernel, groups=width, bias=False)

    def start_parameters(self, config) -> None:
        init.normal_(self.weight, std=config.initializer_range)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return causal_conv(super().forward, x, None, self.kernel_size[0])[0]


class SoftmaxConvolution(SoftmaxMixer):
    """Softmax attention whose queries, keys and values pass through a short convolution: the fair softmax.

    Without one it must form over two layers what others have in one, a key that knows the token before. The
    convolutions start as Transformers starts one.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(self, name)
            convolution = ShortConvolution(projection.out_features, config.conv_kernel)
            setattr(self, name, nn.Sequential(projection, convolution))

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        convolution = {"convolution": width * (config.conv_kernel - 1)}
        return super().state_sizes(config, context_length) | convolution

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, packing=None, **kwargs):
        _whole_rows_only("softmax_convolution", past_key_values, attention_mask if packing is None else packing)
        return super().forward(hidden_states, **kwargs)


for mixer in (GatedDeltaNet, GatedDeltaNetSpread, GatedDeltaNetEven, KimiDelta):
    register_token_mixer(mixer.named, mixer)
register_token_mixer("softmax_convolution", SoftmaxConvolution)


def count(fields: dict) -> int:
    """The parameters of a model with these fields, which is not made."""
    with torch.device("meta"):
        return InterdomainForCausalLM(InterdomainConfig(**fields)).num_parameters()


def equal_width(fields: dict, wanted: int) -> int:
    """The `intermediate_size` with which a model of these fields comes nearest to so many parameters."""
    narrow, wider = (count(fields | {"intermediate_size": width}) for width in (1, 2))
    return 1 + max(0, round((wanted - narrow) / (wider - narrow)))
