"""Interdomain attention as a token mixer: projections, convolutions, feature maps, norms, then the operator."""

import torch
from torch import nn

from .cache_interdomain import Inputs, Recurrence
from .module_common import InterdomainRMSNorm, residual_projection
from .module_convolution import CausalConv1d, causal_conv
from .module_feature_maps import feature_map
from .module_recurrence import InterdomainRecurrence
from .module_rotary import rotate
from .op_common import Packing, document_of_tokens
from .op_common_launch import fused
from .op_interdomain import append_one


class InterdomainMixer(nn.Module):
    """The token mixer of the paper (eqs. 10 to 13).

    Parameters: `q_proj`, `k_proj`, `v_proj`, `o_proj`, the convolutions `q_conv` and `k_conv`; `k_norm` (R) and
    `v_norm` (D), shared by the heads; `k_bias` `[G, R]`, `v_bias` `[G, D]`; and those of `recurrence`.

    With `state_input="generic"` the two inputs of the state are alike, linear maps of the token after a convolution
    (`v_conv` joins), and only the query passes through the feature map: the single-input ablation.
    """

    has_query = True
    default_state_input = "key_value"
    recurrence_class = InterdomainRecurrence

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_key_value_heads
        self.feature_dim, self.head_dim = config.feature_dim, config.head_dim
        self.kernel = config.conv_kernel
        self.generic = (config.state_input or self.default_state_input) == "generic"
        self.feature_map = feature_map(config, self.has_query) if self.has_query or not self.generic else None
        self.key_dim = self.feature_dim if self.generic else config.mapped_dim
        self.output_dim = self.head_dim if self.has_query else self.feature_dim + self.head_dim
        hidden, heads, groups = config.hidden_size, self.num_heads, self.num_groups

        self.q_proj = nn.Linear(hidden, heads * config.mapped_dim, bias=False) if self.has_query else None
        self.k_proj = nn.Linear(hidden, groups * self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden, groups * self.head_dim, bias=False)
        self.o_proj = residual_projection(heads * self.output_dim, hidden)
        self.g_proj = nn.Linear(hidden, heads * self.output_dim, bias=False) if config.use_output_gate else None
        self.q_conv = CausalConv1d(heads * config.mapped_dim, self.kernel) if self.has_query else None
        self.k_conv = CausalConv1d(groups * self.key_dim, self.kernel)
        self.v_conv = CausalConv1d(groups * self.head_dim, self.kernel) if self.generic else None
        if config.input_norm:
            self.k_norm = InterdomainRMSNorm(self.feature_dim, config.rms_norm_eps)
            self.v_norm = InterdomainRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_bias = nn.Parameter(torch.zeros(groups, self.feature_dim))
            self.v_bias = nn.Parameter(torch.zeros(groups, self.head_dim))
        self.o_norm = InterdomainRMSNorm(self.output_dim, config.rms_norm_eps) if config.use_output_norm else None
        self.recurrence = self.recurrence_class(config)

    def cache_shapes(self, batch: int) -> list[list[int]]:
        """The shapes of the windows and the state that a cache of this layer holds."""
        width = self.feature_dim + self.head_dim + int(self.config.normalize)
        windows = [[batch, conv.in_channels, self.kernel - 1] for conv in self._convolutions() if conv is not None]
        return [*windows, [batch, self.num_groups, 2, self.config.state_size, width]]

    def _convolutions(self) -> list[nn.Conv1d | None]:
        """Those of the query (if there is one), the key and the value."""
        return [self.q_conv, self.k_conv, self.v_conv] if self.has_query else [self.k_conv, self.v_conv]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        packing: Packing | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """Mix the tokens of `[B, T, hidden_size]`.

        Args:
            position_embeddings: cosines and sines `[B, T, R]` by dimension, for rotary embeddings.
            attention_mask: `[B, 1]` bool for a single token, False for a pad; longer masks come as `op_common`.
            past_key_values: an `InterdomainCache`, updated in place.
            packing: the real tokens as one row of documents.
        """
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        if layer is not None:
            layer.thaw()
        shape = hidden_states.shape[:2]
        if packing is not None and packing.cu_seqlens.numel() == 1:  # nothing but pads
            if layer is not None:
                if layer.record_past:
                    layer.record(self._pads(hidden_states), self._transition(hidden_states))
                layer.saw(shape[1])
            return torch.zeros_like(hidden_states), None
        cos_sin: tuple[torch.Tensor, ...] | None = None
        if self.config.rope_placement is not None and position_embeddings is not None:
            cos_sin = position_embeddings[self.feature_dim]
        if packing is not None and cos_sin is not None:
            cos_sin = tuple(packing.pack(x.expand(*shape, -1)) for x in cos_sin)
        rows = None if packing is None else packing.rows

        projections = (self.q_proj, self.k_proj, self.v_proj) if self.has_query else (self.k_proj, self.v_proj)
        projected = [projection(hidden_states) for projection in projections]
        if packing is not None:  # not before: adapters that differ by row must find the rows of the batch
            projected = [packing.pack(x) for x in projected]
        windows = None if layer is None or layer.windows is None else [_select(w, rows) for w in layer.windows]
        cu_seqlens = None if packing is None else packing.cu_seqlens
        places = windows, cos_sin, cu_seqlens
        prepared = self._fused_inputs(projected, *places, layer is not None)
        tokens, windows = self._plain_inputs(projected, *places) if prepared is None else prepared
        if layer is not None and layer.record_past:
            inputs = self._inputs(projected, tokens, attention_mask, packing, shape)
            layer.record(inputs, self._transition(hidden_states))

        if layer is None:
            output, _ = self.recurrence(*tokens, cu_seqlens=cu_seqlens)
        elif self._can_step(layer, tokens, packing):
            output = self._step(layer, tokens, windows, attention_mask)
        else:
            state = None if layer.state is None else _select(layer.state, rows)
            output, state = self.recurrence(
                *tokens, cu_seqlens=cu_seqlens, initial_state=state, output_final_state=True
            )
            layer.write(*self._all_rows(layer, windows, state, packing, shape[0]), shape[1])
        if self.o_norm is not None:
            output = self.o_norm(output)
        output = output.flatten(-2).to(hidden_states.dtype)
        if packing is not None:
            output = packing.unpack(output, shape)
        if self.g_proj is not None:
            output = nn.functional.silu(self.g_proj(hidden_states)) * output
        return self.o_proj(output), None

    def _plain_inputs(self, projected, windows, cos_sin, cu_seqlens):
        """Query (if there is one), key and value of the operator from the projections, and the new windows."""
        before, after, streams = iter(windows or [None] * len(projected)), [], []
        for x, conv in zip(projected, self._convolutions(), strict=True):
            if conv is not None:
                x, window = causal_conv(conv, x, next(before), self.kernel, cu_seqlens)
                after.append(window)
            streams.append(x)
        *query, key, value = streams
        query = [self._features(x.unflatten(-1, (self.num_heads, -1)), cos_sin, is_query=True) for x in query]
        key = key.unflatten(-1, (self.num_groups, self.key_dim))
        if not self.generic:
            key = self._features(key, cos_sin)
        elif cos_sin is not None:
            key = rotate(key, *cos_sin)
        value = value.unflatten(-1, (self.num_groups, self.head_dim))
        if self.config.input_norm:
            key = self.k_norm(key) + self.k_bias
            value = self.v_norm(value) + self.v_bias
        return (*query, key, value), after

    def _fused_inputs(self, projected, windows, cos_sin, cu_seqlens, write_windows: bool):
        """The same in one kernel; None where it cannot run, or where a module is not our own (a LoRA layer)."""
        if self.generic or not self.has_query:
            return None
        query, key, value = projected
        modules: list[tuple[nn.Module, type]] = [(self.q_conv, CausalConv1d), (self.k_conv, CausalConv1d)]
        if self.config.input_norm:
            modules += [(self.k_norm, InterdomainRMSNorm), (self.v_norm, InterdomainRMSNorm)]
        ours = all(type(module) is kind and not module._forward_hooks for module, kind in modules)
        if self.config.backend not in ("auto", "triton") or self.config.feature_map != "silu_l2" or not ours:
            return None
        if self.kernel > 4 or any(w.requires_grad for w in windows or ()):
            return None
        norms = None
        if self.config.input_norm:
            norms = self.k_norm.weight, self.v_norm.weight, self.k_bias, self.v_bias

        def run():
            from .op_interdomain_triton_prepare import triton_prepare

            documents = None if cu_seqlens is None else document_of_tokens(cu_seqlens, query.shape[1]).int()
            taps = self.q_conv.weight[:, 0], self.k_conv.weight[:, 0]
            ends = None if cu_seqlens is None else cu_seqlens.int()
            places = windows, cos_sin, documents, ends, self.num_heads, self.num_groups, self.config.rope_placement
            return triton_prepare(query, key, value, taps, norms, *places, self.config.rms_norm_eps, write_windows)

        return fused(self.config.backend, (query, key, value), max(self.feature_dim, self.head_dim), run)

    def _features(self, x: torch.Tensor, cos_sin, is_query: bool = False) -> torch.Tensor:
        if cos_sin is None:
            return self.feature_map(x, is_query)
        if self.config.rope_placement == "before":
            return self.feature_map(rotate(x, *cos_sin), is_query)
        return rotate(self.feature_map(x, is_query), *cos_sin)

    def _can_step(self, layer, tokens: tuple[torch.Tensor, ...], packing: Packing | None) -> bool:
        differentiated = torch.is_grad_enabled() and (
            tokens[0].requires_grad or any(p.requires_grad for p in self.recurrence.parameters())
        )
        single = tokens[0].shape[1] == 1 and packing is None and not differentiated
        return single and layer.is_initialized and self.config.backend in ("auto", "triton")

    def _step(self, layer, tokens, windows, attention_mask) -> torch.Tensor:
        """One token, the state updated in place; a pad leaves windows and state alone."""
        mask = None if attention_mask is None else attention_mask[:, -1].bool()
        if mask is not None:
            keep = mask[:, None, None]
            windows = [torch.where(keep, w, old) for w, old in zip(windows, layer.windows)]
        state = layer.state.detach().clone() if layer.state.requires_grad else layer.state
        output = self.recurrence(*(x[:, 0] for x in tokens), step=True, state=state, mask=mask)
        layer.write(windows, state, 1)
        return output[:, None]

    def _transition(self, hidden_states: torch.Tensor) -> Recurrence:
        """What a recording cache needs to move a state on."""
        return Recurrence(*self.recurrence(hidden_states, transition=True))

    def _inputs(self, projected, tokens, attention_mask, packing, shape) -> Inputs:
        """What a recording cache keeps of this forward, at its place in the batch."""
        *_, key, value = tokens
        convolved = tuple(x for x, conv in zip(projected, self._convolutions(), strict=True) if conv is not None)
        value = append_one(value) if self.config.normalize else value
        inputs = Inputs(convolved, key, value, torch.ones(key.shape[:2], dtype=torch.bool, device=key.device))
        if packing is not None:
            inputs = inputs.map(lambda x: packing.unpack(x, shape))
        if attention_mask is not None:
            inputs = inputs._replace(mask=attention_mask.bool())
        return inputs

    def _pads(self, hidden_states: torch.Tensor) -> Inputs:
        """What a recording cache keeps of a forward without a real token."""
        tokens = hidden_states.shape[:2]
        *windows, _ = self.cache_shapes(tokens[0])
        convolved = tuple(hidden_states.new_zeros(*tokens, width) for _, width, _ in windows)
        key = hidden_states.new_zeros(*tokens, self.num_groups, self.feature_dim)
        value = hidden_states.new_zeros(*tokens, self.num_groups, self.head_dim + int(self.config.normalize))
        mask = torch.zeros(tokens, dtype=torch.bool, device=key.device)
        return Inputs(convolved, key, value, mask)

    def _all_rows(self, layer, windows, state, packing, batch: int):
        """Put the rows of a packing back among those that had no real token."""
        if packing is None or packing.rows is None:
            return windows, state
        old = [*layer.windows, layer.state] if layer.is_initialized else [None] * (len(windows) + 1)
        *windows, state = (
            (x.new_zeros(batch, *x.shape[1:]) if before is None else before.to(x.dtype)).index_copy(0, packing.rows, x)
            for x, before in zip([*windows, state], old, strict=True)
        )
        return windows, state


def _select(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x.index_select(0, rows)
