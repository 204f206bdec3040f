"""What others would choose, as token mixers of the studies: Gated DeltaNet, and softmax with a short convolution.

They read whole rows without pads and without a cache, which is what the studies train and measure; anything else they
refuse. `equal_width` gives the width of the feed-forward layers with which a model has as many parameters as another.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3NextConfig
from transformers import initialization as init
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, TokenMixer, register_token_mixer
from modeling_interdomain.layers.convolution import CausalConv1d, causal_conv
from modeling_interdomain.mixers.softmax.mixer import SoftmaxMixer
from modeling_interdomain.ops.interdomain.unit_triangular import inverses

GATED_DELTANET = {"token_mixers": "gated_deltanet"}
GATED_DELTANET_SPREAD = {"token_mixers": "gated_deltanet_spread"}
SOFTMAX_CONVOLUTION = {"token_mixers": "softmax_convolution"}


def _whole_rows_only(name: str, cache: Any, masked: Any) -> None:
    if cache is not None or masked is not None:
        raise ValueError(f'"{name}" is a peer in studies and reads whole rows: pass neither a cache nor pads.')


class GatedDeltaNet(TokenMixer):
    """The layer of Qwen3-Next (arXiv 2412.06464) as it stands in Transformers, with a head for each of ours.

    Keys have R + D numbers and values 2 M, so that a head's state has as many numbers as that of an Interdomain head
    with as many modes: 64 x 64 for M = R = D = 32. Its linear maps start as those of all models here, its convolution
    as Transformers starts one, small, and the rest as it is made.
    """

    layer_type = "linear_attention"

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

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        init.normal_(self.layer.conv1d.weight, std=config.initializer_range)

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        heads, key, value = cls._sizes(config)
        return {"recurrent": heads * key * value, "convolution": heads * (2 * key + value) * (config.conv_kernel - 1)}

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, packing=None, **kwargs):
        _whole_rows_only("gated_deltanet", past_key_values, attention_mask if packing is None else packing)
        return self.layer(hidden_states), None


class GatedDeltaNetSpread(GatedDeltaNet):
    """With steps that start as those of Mamba-2, spread over `time_step_min` to `time_step_max`.

    Transformers, which loads trained weights, leaves them at 1.3, with which nine heads of ten keep less than a tenth
    of their state after one token.
    """

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        super().start_parameters(config)
        low, high = math.log(config.time_step_min), math.log(config.time_step_max)
        step = torch.empty_like(self.layer.dt_bias).uniform_(low, high).exp()
        init.copy_(self.layer.dt_bias, step + torch.log(-torch.expm1(-step)))  # its softplus is the step


class UnitSolve(torch.autograd.Function):
    """`(I + system)^-1 right` for the strictly lower part of system `[N, C, C]` and right `[N, C, W]`, float32."""

    @staticmethod
    def forward(ctx, system, right):
        inverse = inverses(system)
        found = torch.bmm(inverse, right)
        ctx.save_for_backward(inverse, found)
        return found

    @staticmethod
    def backward(ctx, of_found):
        inverse, found = ctx.saved_tensors
        of_right = torch.bmm(inverse.mT, of_found)
        return -torch.bmm(of_right, found.mT).tril(-1), of_right


def gated_delta_rule(query, key, value, g, beta, chunk_size: int = 64, **options):
    """What Transformers computes of whole rows from an empty state, in fewer and faster kernels for a GPU.

    Its triangular systems are solved by products of matrices, where a batched solver takes most of a step, and only
    the state goes from chunk to chunk. Shapes and names are those of Transformers; the last state is not returned.
    """
    if options.get("initial_state") is not None or options.get("output_final_state"):
        raise ValueError("Whole rows from an empty state alone are computed here: pass no state and ask for none.")
    if key.shape[2] != value.shape[2] or not options.get("use_qk_l2norm_in_kernel"):
        raise ValueError("Keys of length 1, a head of them for each head of values, are computed here: pass such.")
    dtype, (batch, length, heads, width) = query.dtype, value.shape
    query, key = (qwen3_next.l2norm(x.float(), dim=-1, eps=1e-6) for x in (query, key))
    tokens = [query * query.shape[-1] ** -0.5, key, value.float(), g.float()[..., None], beta.float()[..., None]]
    tokens = [F.pad(x, (0, 0, 0, 0, 0, -length % chunk_size)).transpose(1, 2) for x in tokens]
    query, key, value, g, beta = (x.reshape(batch * heads, -1, chunk_size, x.shape[-1]) for x in tokens)
    log_decay = g.cumsum(2)
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=g.device).triu(1)
    between = (log_decay - log_decay.mT).masked_fill(later, -torch.inf).exp()
    system = ((beta * key) @ key.mT * between).float()
    with torch.autocast(g.device.type, enabled=False):
        right = torch.cat([beta * value, beta * log_decay.exp() * key], -1)
        solved = UnitSolve.apply(system.flatten(0, 1), right.flatten(0, 1)).view_as(right)
    written, reads = solved.split([width, key.shape[-1]], -1)
    left = (log_decay[:, :, -1:] - log_decay).exp() * key
    after = log_decay[:, :, -1:].exp()
    state = key.new_zeros(batch * heads, key.shape[-1], width)
    states, updates = [], []
    for new, read, late, decay in zip(written.unbind(1), reads.unbind(1), left.mT.unbind(1), after.unbind(1)):
        states.append(state)
        updates.append(new - read @ state)
        state = decay * state + late @ updates[-1]
    inside = (query @ key.mT * between) @ torch.stack(updates, 1)
    output = inside + (query * log_decay.exp()) @ torch.stack(states, 1)
    return output.view(batch, heads, -1, width)[:, :, :length].transpose(1, 2).to(dtype), None


def quicken() -> None:
    """Let the layers of Transformers take `gated_delta_rule`."""
    qwen3_next.torch_chunk_gated_delta_rule = gated_delta_rule


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


register_token_mixer("gated_deltanet", GatedDeltaNet)
register_token_mixer("gated_deltanet_spread", GatedDeltaNetSpread)
register_token_mixer("softmax_convolution", SoftmaxConvolution)


def count(fields: dict) -> int:
    """The parameters of a model with these fields, which is not made."""
    with torch.device("meta"):
        return InterdomainForCausalLM(InterdomainConfig(**fields)).num_parameters()


def equal_width(fields: dict, wanted: int) -> int:
    """The `intermediate_size` with which a model of these fields comes nearest to so many parameters."""
    narrow, wider = (count(fields | {"intermediate_size": width}) for width in (1, 2))
    return 1 + max(0, round((wanted - narrow) / (wider - narrow)))
