"""Interdomain attention as a token mixer: what drives the state, and the query that reads it."""

import torch
from torch import nn
from transformers import initialization as init

from .mixer_recurrent import RecurrentMixer, Stream
from .module_common import InterdomainRMSNorm, is_untouched
from .module_convolution import CausalConv1d
from .module_feature_maps import feature_map
from .module_recurrence import InterdomainRecurrence
from .module_rotary import rotate
from .op_interdomain import append_one
from .op_interdomain_prepare import fused_inputs
from .op_interdomain_replay import state_after


class KeyValueMixer(RecurrentMixer):
    """A state driven by two streams, called keys and values, normalised and biased (eq. 12).

    Parameters: `k_norm` (R) and `v_norm` (D), shared by the heads; `k_bias` `[G, R]`, `v_bias` `[G, D]`. With
    `state_input="key_value"` keys are convolved and pass through the feature map, and values are what they are; with
    "generic" the two are alike, linear maps of the token after a convolution: the single-input ablation.
    """

    default_state_input = "key_value"
    recurrence_class = InterdomainRecurrence

    def __init__(self, config, layer_idx: int, output_width: int, weighted: bool):
        """`weighted` says whether a query brings the weights of Fourier features."""
        super().__init__(config, layer_idx, output_width)
        if config.input_norm:
            self.k_norm = InterdomainRMSNorm(config.feature_dim, config.rms_norm_eps)
            self.v_norm = InterdomainRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_bias = nn.Parameter(torch.zeros(config.num_key_value_heads, config.feature_dim))
            self.v_bias = nn.Parameter(torch.zeros(config.num_key_value_heads, config.head_dim))
        self.feature_map = feature_map(config, weighted) if weighted or not self.is_generic(config) else None
        self.recurrence = self.recurrence_class(config)

    def start_parameters(self, config) -> None:
        if config.input_norm:
            init.zeros_(self.k_bias)
            init.zeros_(self.v_bias)

    @classmethod
    def is_generic(cls, config) -> bool:
        return (config.state_input or cls.default_state_input) == "generic"

    @classmethod
    def streams(cls, config) -> list[Stream]:
        groups, generic = config.num_key_value_heads, cls.is_generic(config)
        key_width = config.feature_dim if generic else config.mapped_dim
        return [Stream("k", groups, key_width, True), Stream("v", groups, config.head_dim, generic)]

    @classmethod
    def state_shape(cls, config) -> tuple[int, ...]:
        width = config.feature_dim + config.head_dim + int(config.normalize)
        return config.num_key_value_heads, 2, config.state_size, width

    replay_state = staticmethod(state_after)

    def _tokens(self, streams, cos_sin):
        key, value = (x.unflatten(-1, (self.config.num_key_value_heads, -1)) for x in streams)
        if not self.is_generic(self.config):
            key = self._features(key, cos_sin)
        elif cos_sin is not None:
            key = rotate(key, *cos_sin)
        if self.config.input_norm:
            key = self.k_norm(key) + self.k_bias
            value = self.v_norm(value) + self.v_bias
        return key, value

    def _features(self, x: torch.Tensor, cos_sin, is_query: bool = False) -> torch.Tensor:
        if cos_sin is None:
            return self.feature_map(x, is_query)
        if self.config.rope_placement == "before":
            return self.feature_map(rotate(x, *cos_sin), is_query)
        return rotate(self.feature_map(x, is_query), *cos_sin)

    def _recorded(self, tokens):
        *_, key, value = tokens
        return key, append_one(value) if self.config.normalize else value


class InterdomainMixer(KeyValueMixer):
    """The token mixer of the paper (eqs. 10 to 13): queries join, convolved and passed through the feature map."""

    q_conv: nn.Conv1d
    k_conv: nn.Conv1d

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx, config.head_dim, weighted=True)

    @classmethod
    def streams(cls, config) -> list[Stream]:
        return [Stream("q", config.num_attention_heads, config.mapped_dim, True), *super().streams(config)]

    def _inputs(self, projected, windows, cos_sin, packing, keep: bool):
        """In one kernel where that can run, and nothing hangs on the modules whose weights it would read."""
        found = self._fused_inputs(projected, windows, cos_sin, packing, keep)
        return super()._inputs(projected, windows, cos_sin, packing, keep) if found is None else found

    def _tokens(self, streams, cos_sin):
        query, *rest = streams
        query = query.unflatten(-1, (self.config.num_attention_heads, -1))
        return self._features(query, cos_sin, is_query=True), *super()._tokens(rest, cos_sin)

    def _fused_inputs(self, projected, windows, cos_sin, packing, keep: bool):
        config, device = self.config, projected[0].device
        if self.is_generic(config) or config.feature_map != "silu_l2":
            return None
        modules: list[tuple[nn.Module, type]] = [(self.q_conv, CausalConv1d), (self.k_conv, CausalConv1d)]
        if config.input_norm:
            modules += [(self.k_norm, InterdomainRMSNorm), (self.v_norm, InterdomainRMSNorm)]
        if not all(is_untouched(module, kind, device) for module, kind in modules):
            return None
        norms = None
        if config.input_norm:
            norms = self.k_norm.weight, self.v_norm.weight, self.k_bias, self.v_bias
        places = {}
        if packing is not None:
            places = {
                "lengths": packing.lengths,
                "cu_seqlens": packing.cu_seqlens,
                "documents": packing.documents,
            }
        return fused_inputs(
            config.backend,
            projected,
            (self.q_conv.weight[:, 0], self.k_conv.weight[:, 0]),
            norms,
            config.rms_norm_eps,
            (config.num_attention_heads, config.num_key_value_heads),
            windows=windows,
            write_windows=keep,
            cos_sin=cos_sin,
            rope_placement=config.rope_placement,
            **places,
        )
