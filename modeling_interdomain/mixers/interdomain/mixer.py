"""Interdomain attention as a token mixer: what drives the state, and the query that reads it."""

import torch
from torch import nn
from transformers import initialization as init

from ...layers.common import FULL_PRECISION, DecodeTables, InterdomainRMSNorm, are_untouched, backend_of, is_plain
from ...layers.convolution import TOKEN_BEFORE, CausalConv1d, convolve_all
from ...layers.feature_maps import SiluL2, feature_map
from ...layers.operators import Operators
from ...layers.rotary import rotate, rotate_around
from ...ops.common.cpu import in_graph, multiplies_bf16
from ...ops.interdomain.entry import append_one
from ...ops.interdomain.few import MAX_DRAFT, MAX_PENDING
from ...ops.interdomain.prepare import fused_inputs
from ...ops.interdomain.replay import state_after
from ..recurrent import RecurrentMixer, placed_map
from .configuration import InterdomainSpecification, KeyValueSpecification
from .few_tokens import bf16_inputs, token_inputs, token_tables
from .recurrence import InterdomainRecurrence


class KeyValueMixer(KeyValueSpecification, RecurrentMixer):
    """A state driven by two projections, called keys and values, normalised and biased (eq. 12).

    Parameters: `k_norm` (R) and `v_norm` (D), shared by the heads; `k_bias` `[G, R]`, `v_bias` `[G, D]`. With
    `state_input="key_value"` keys are convolved and pass through the feature map, and values are what they are; with
    "generic" the two are alike, linear maps of the token after a convolution: the single-input ablation.
    """

    passes_state = True
    recurrence_class = InterdomainRecurrence
    operators = Operators.of(state_after)

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
        self.recurrence.start_parameters(config)
        self.widths = [projection.width for projection in self.projections(config)]
        self.normalize = config.normalize

    def start_parameters(self, config) -> None:
        if config.input_norm:
            init.zeros_(self.k_bias)
            init.zeros_(self.v_bias)

    def attention_map(self, tokens, packing):
        ends = None if packing is None else packing.cu_seqlens
        return placed_map(self.recurrence(*tokens, mapped=True, cu_seqlens=ends), packing)

    def _tokens(self, projections, cos_sin):
        key, value = (x.unflatten(-1, (-1, width)) for x, width in zip(projections, self.widths[-2:], strict=True))
        if not self.is_generic(self.config):
            key = self._features(key, cos_sin)
        elif cos_sin is not None:
            key = rotate(key, *cos_sin)
        if self.config.input_norm:
            key = self.k_norm(key) + self.k_bias
            value = self.v_norm(value) + self.v_bias
        return key, value

    def _features(self, x: torch.Tensor, cos_sin, is_query: bool = False) -> torch.Tensor:
        return rotate_around(self.feature_map, x, cos_sin, self.rope_placement, is_query)

    def _recorded(self, tokens):
        *_, key, value = tokens
        return key, append_one(value) if self.normalize else value


class InterdomainMixer(InterdomainSpecification, DecodeTables, KeyValueMixer):
    """The token mixer of the paper (eqs. 10 to 13): queries join, convolved and passed through the feature map."""

    most_steps, max_pending = MAX_DRAFT, MAX_PENDING
    operators = Operators.of(fused_inputs, beside=KeyValueMixer.operators)
    q_proj: nn.Linear
    k_proj: nn.Linear
    q_conv: nn.Conv1d
    k_conv: nn.Conv1d

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx, config.head_dim, weighted=True)
        self.generic, self.normalised = self.is_generic(config), config.input_norm
        self.read: dict[str, type[nn.Module]] = {"feature_map": SiluL2, "q_conv": CausalConv1d, "k_conv": CausalConv1d}
        if self.normalised:
            self.read |= {"k_norm": InterdomainRMSNorm, "v_norm": InterdomainRMSNorm}
        self.eps = config.rms_norm_eps
        self.heads = config.num_attention_heads, config.num_key_value_heads

    def share_heads(self, processes: int) -> None:
        super().share_heads(processes)
        self.heads = self.heads[0] // processes, self.heads[1] // processes

    def start_parameters(self, config) -> None:
        super().start_parameters(config)
        if self.starts_with_induction(config):
            self._start_induction()

    @torch.no_grad()
    def _start_induction(self) -> None:
        """Queries as keys; of the convolutions the own token of queries (and values), of keys the token before."""
        heads, groups = self.heads
        shared = self.k_proj.weight.unflatten(0, (groups, -1)).repeat_interleave(heads // groups, dim=0)
        init.copy_(self.q_proj.weight, shared.flatten(0, 1))
        for conv in self._convolutions():
            if conv is not None:
                conv.start_weight(*(TOKEN_BEFORE if conv is self.k_conv else (1,)))

    def _inputs(self, projected, conv_state, cos_sin, packing, keep: bool):
        """In one kernel or in few calls, where these can run and may read weights of modules without calling them."""
        found, device, backend = None, projected[0].device, backend_of(self.config)
        count = projected[0].shape[1]
        few = count == 1 or (not torch.compiler.is_compiling() and count <= MAX_DRAFT)
        if not few:  # another sequence may begin
            self.doubt_tables()
        if device.type != "cpu" or backend == "triton":
            found = self._fused_inputs(projected, conv_state, cos_sin, packing, keep)
        elif backend == "auto" and packing is None and conv_state is not None and few:
            found = self._token_inputs(projected, conv_state, cos_sin)
        if found is not None:
            return found
        projections, after = convolve_all(self._convolutions(), projected, conv_state, self.kernel, packing)
        return self._tokens(projections, cos_sin), after

    def _tokens(self, projections, cos_sin):
        query, *rest = projections
        narrow = multiplies_bf16(query) and backend_of(self.config) in ("auto", "chunk") and not self.normalize
        if narrow and query.shape[1] > 1 and is_plain(query, query.dtype) and not in_graph():
            weights = self._weights(query.device)
            if weights is not None and all(w.dtype == query.dtype for w in weights):
                return bf16_inputs(projections, weights[2:], self.eps, self.heads, cos_sin, self.rope_placement)
        query = query.unflatten(-1, (-1, self.widths[0]))
        return self._features(query, cos_sin, is_query=True), *super()._tokens(rest, cos_sin)

    def _steps(self, tokens, state, move):
        if self.normalize:
            return super()._steps(tokens, state, move)
        return self.recurrence(*tokens, few=True, state=state, move=move)

    def _verifies(self, layer, hidden_states, packing):
        count = hidden_states.shape[1]
        if packing is not None or not layer.record_past or not layer.is_initialized or not layer.defers(count):
            return False
        here = hidden_states.device.type == "cpu" and self.sparse is None and not torch.is_grad_enabled()
        few = count <= MAX_DRAFT and (count > 1 or layer.pending < MAX_PENDING)
        can = here and few and backend_of(self.config) in ("auto", "triton") and not self.normalize
        return can and not layer.pads_pending  # pads would count as tokens in the ages of inputs

    def _verify(self, layer, tokens, conv_state):
        count = tokens[0].shape[1]
        *_, key, value, _ = layer.newest(layer.pending + count)
        output = self.recurrence(tokens[0], key, value, few=True, state=layer.resting_state, move=False)
        layer.write(conv_state, {"state": layer.resting_state}, count)
        return output

    def _weights(self, device: torch.device) -> list[torch.Tensor] | None:
        """The weights of the convolutions of query and key, then of the norms of key and value, and their biases.

        None where calling these modules and the feature map may do more than their weights say.
        """
        modules = [self._modules[name] for name in self.read]
        if self.generic or not are_untouched(modules, self.read.values(), device):
            return None
        weights: list[torch.Tensor] = [module._parameters["weight"] for module in modules[1:]]
        return [*weights, self.k_bias, self.v_bias] if self.normalised else weights

    def _token_inputs(self, projected, conv_state, cos_sin):
        weights = self._weights(projected[0].device)
        if weights is None:
            return None
        dtype = weights[0].dtype
        widened = dtype == torch.bfloat16 and is_plain(projected[0], dtype)
        if projected[0].dtype != dtype or not (widened or dtype in FULL_PRECISION):
            return None
        kept = self._tables.of(weights)
        tables = None if kept is None else kept.get("token")
        if tables is None:
            tables = token_tables(*(w.float() if widened else w for w in weights))
            if kept is not None:
                kept["token"] = tables
        return token_inputs(projected, conv_state, tables, self.eps, self.heads, cos_sin, self.rope_placement)

    def _fused_inputs(self, projected, conv_state, cos_sin, packing, keep: bool):
        weights = self._weights(projected[0].device)
        if weights is None or (conv_state is not None and packing is not None and packing.documents is not None):
            return None
        q_conv_weight, k_conv_weight, *norms = weights
        extent = {}
        if packing is not None:
            extent = {
                "lengths": packing.lengths,
                "cu_seqlens": packing.cu_seqlens,
                "documents": packing.documents,
            }
        return self.operators.fused_inputs(
            backend_of(self.config),
            projected,
            (q_conv_weight.flatten(1), k_conv_weight.flatten(1)),  # views, whose gradients are views
            norms or None,
            self.eps,
            self.heads,
            conv_state=conv_state,
            write_conv_state=keep,
            cos_sin=cos_sin,
            rope_placement=self.rope_placement,
            **extent,
        )
