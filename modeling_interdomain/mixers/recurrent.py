"""What all recurrent token mixers share: projections, short convolutions, the cache, and the output projection."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..layers.common import InterdomainRMSNorm, backend_of, project, project_all, residual_projection
from ..layers.convolution import CausalConv1d, convolve_all, last_inputs
from ..layers.operators import Operators
from ..ops.common.packing import Packing
from .base import TokenMixer
from .configuration import RecurrentSpecification


class RecurrentMixer(RecurrentSpecification, TokenMixer):
    """Projects the tokens into `projections`, convolves them, runs a recurrence on from the cache, and projects back.

    Its specification names them and the state. A subclass makes `recurrence` (a module that is called with tokens and
    gives output and final state, see `InterdomainRecurrence`), and turns convolved projections into `_tokens`.
    """

    reads_forks = True
    # Sums over the whole text of a sparse branch, and what it compares for equality.
    exact_states = ("sparse_sums", "sparse_scores")
    recurrence: nn.Module
    operators = Operators()
    # So many tokens are faster on a CPU as single steps than in an operator for many.
    most_steps = 6
    max_pending = 0  # inputs that `_verify` reads beside the resting state, at most

    def __init__(self, config, layer_idx: int, output_width: int):
        """`output_width` are the numbers a head that the recurrence gives."""
        super().__init__(config, layer_idx)
        # Asked for at every token: a configuration is slow to look up.
        self.rope_placement, self.kernel = config.rope_placement, self.kernel_size(config)
        self.rotated_width = self.rotated(config)
        projections = self.projections(config)
        self.projection_names = [projection.name for projection in projections]
        self.convolved = [projection.convolved for projection in projections]
        conv_state = [(heads * width, self.kernel - 1) for _, heads, width, convolved, _ in projections if convolved]
        branch = config.sparse_per_layer[layer_idx]
        self.sparse = None
        if branch is not None:
            from .sparse.branch import SparseBranch

            shape = *self.written_shape(config), self.output_heads(config)
            self.sparse = SparseBranch(config, branch, *shape, reads_first=not self.starts_with_induction(config))
        self.own_conv_state = len(conv_state)
        self.kept_shapes = [*conv_state, tuple(self.state_shape(config))]
        if self.sparse is not None:
            states = self.sparse.state_shapes.values()
            self.kept_shapes = [*conv_state, *self.sparse.conv_state_shapes, self.kept_shapes[-1], *states]

        self.first_state = None
        if config.learned_state:
            from ..layers.learned_state import FirstState

            self.first_state = FirstState(tuple(self.state_shape(config)))
        hidden, outputs, biases = config.hidden_size, self.output_heads(config) * output_width, self.biases(config)
        for name, heads, width, _, bias in projections:
            setattr(self, f"{name}_proj", nn.Linear(hidden, heads * width, biases.projections or bias))
        self.o_proj = residual_projection(outputs, hidden, biases.projections)
        self.g_proj = nn.Linear(hidden, outputs, biases.projections) if self.gated(config) else None
        for name, heads, width, convolved, _ in projections:
            if convolved:
                size = heads * width
                conv = CausalConv1d(size, size, self.kernel, groups=size, bias=biases.convolutions)
                setattr(self, f"{name}_conv", conv)
        self.o_norm = InterdomainRMSNorm(output_width, config.rms_norm_eps) if config.use_output_norm else None

    # What a subclass says.

    def _tokens(self, projections: list[torch.Tensor], cos_sin) -> tuple[torch.Tensor, ...]:
        """What the recurrence is called with, from convolved projections `[B, T, heads width]`."""
        raise NotImplementedError

    def _recorded(self, tokens: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The tokens `[B, T, ...]` that move the state."""
        raise NotImplementedError

    # What a subclass says whose state decays in other ways than by fixed factors.

    @staticmethod
    def replay_state(operators: Operators, state: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """The state after recorded tokens: called with those, their mask and what `transition=True` gave.

        A static method that is given the layer's operators: a method would let caches hold the layer.
        """
        return operators.state_after(state, *arguments)

    def decay_state(self, state: torch.Tensor, total_decay: torch.Tensor, *transition: Any) -> torch.Tensor:
        """A state `[B, ...]` after tokens that write nothing, given their `total_decay`; in any floating dtype."""
        from ..ops.common.spans import decay_state

        return decay_state(state, total_decay, transition[0])

    @staticmethod
    def total_decay(mask: torch.Tensor, *arguments: Any) -> torch.Tensor | None:
        """What `decay_state` needs of recorded tokens, `[B, ...]`, summed over those that the mask `[B, T]` marks.

        Called with the tokens and what `transition=True` gave; None means the number of tokens.
        """
        return None

    # What a subclass may say otherwise.

    def _way_out(self, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """What `o_proj` reads, `[B, T, heads width]`: here the output, gated by the tokens of the layer."""
        if self.g_proj is None:
            return output
        return nn.functional.silu(self.g_proj(hidden_states)) * output

    def _written(self, tokens: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """What the recurrence writes, `[B, T, groups, width]`: a sparse branch reads it a second time."""
        return tokens[-1]

    # What follows from it.

    def cache_shapes(self, batch: int) -> list[list[int]]:
        return [[batch, *shape] for shape in self.kept_shapes]

    def share_heads(self, processes: int) -> None:
        self.kept_shapes = [(heads // processes, *rest) for heads, *rest in self.kept_shapes]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        packing: Packing | None = None,
        piece: Any = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Mix the tokens `[B, T, hidden_size]`; returns the same shape, and the map of `attention_map` or None.

        Args:
            position_embeddings: cosines and sines `[B, T, R]` by dimension, for rotary embeddings.
            attention_mask: `[B, 1]` bool for a single token, False for a pad; longer masks come as `packing`.
            past_key_values: an `InterdomainCache`, updated in place.
            packing: where the real tokens stand, when some are pads or several documents are packed.
            piece: a `SequencePiece`, where these tokens stand in rows that several processes hold.
            output_attentions: make the map, if no tokens came before these.
        """
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        transition = conv_state = states = None
        if layer is not None:
            layer.thaw()
            if self.first_state is not None and layer.is_initialized and not layer.has_previous_state[0]:
                layer.set_state(self.first_state(layer.state))  # after a reset
            if layer.record_past:
                transition = self.recurrence(hidden_states, transition=True)
                layer.commit_unless(transition)
        projected = project_all([self._modules[f"{name}_proj"] for name in self.projection_names], hidden_states)
        if packing is not None:  # after the projections, where adapters that differ by row need the rows of the batch
            projected = [packing.pack(x) for x in projected]
        cos_sin = None
        if self.rope_placement is not None and position_embeddings is not None:
            cos, sin = position_embeddings[self.rotated_width]
            if packing is not None:
                cos, sin = (packing.pack(x.expand(*hidden_states.shape[:2], -1)) for x in (cos, sin))
            cos_sin = cos, sin
        verifies = transition is not None and self._verifies(layer, hidden_states, packing)
        if verifies:
            conv_state = layer.lookahead_conv_state(self.max_pending - hidden_states.shape[1])
        elif layer is not None:
            conv_state, states = layer.committed()
        own = conv_state if self.sparse is None or conv_state is None else conv_state[: self.own_conv_state]
        if piece is not None:
            own = self._before_piece(piece, projected)
        tokens, after = self._inputs(projected, own, cos_sin, packing, keep=layer is not None)
        companion = None
        if self.sparse is not None:
            companion = self._companion(hidden_states, tokens, conv_state, states, packing)
        if transition is not None:
            self._record(layer, transition, projected, tokens, attention_mask, packing, hidden_states, companion)
        weights = None
        plain = self.sparse is None and self.first_state is None
        if kwargs.get("output_attentions") and plain and (layer is None or not layer.get_seq_length()):
            weights = self.attention_map(tokens, packing)
        if weights is not None and past_key_values is not None:  # as wide as those of keys in a static cache
            weights = nn.functional.pad(weights, (0, max(0, past_key_values.get_max_length() - weights.shape[-1])))

        if verifies:
            output = self._verify(layer, tokens, after)
        elif layer is not None and self._can_step(layer, tokens, packing):
            output = self._step(layer, tokens, (conv_state, states), after, attention_mask, companion)
        else:
            output = self._all_at_once(layer, tokens, states, after, packing, companion, piece)
        if weights is not None and weights.requires_grad:  # so that a loss of the output gives the map gradients
            output = self._apply_map(weights, tokens, packing)
        if self.o_norm is not None:
            output = self.o_norm(output)
        output = output.flatten(-2).to(hidden_states.dtype)
        if packing is not None:
            output = packing.unpack(output)
        return project(self.o_proj, self._way_out(output, hidden_states)), weights

    def attention_map(self, tokens: tuple[torch.Tensor, ...], packing: Packing | None) -> torch.Tensor | None:
        """`[B, H, T, T]`, the weights with which values make the outputs of the recurrence, where it has such."""
        return None

    def _apply_map(self, weights: torch.Tensor, tokens, packing: Packing | None) -> torch.Tensor:
        """The output of the recurrence: its map times what it writes."""
        written = self._written(tokens)
        written = written if packing is None else packing.unpack(written)
        values = written.repeat_interleave(weights.shape[1] // written.shape[2], dim=2).to(weights.dtype)
        output = torch.einsum("bhtj,bjhw->bthw", weights[..., : values.shape[1]], values)
        return output if packing is None else packing.pack(output)

    def _inputs(self, projected, conv_state, cos_sin, packing: Packing | None, keep: bool):
        """What the recurrence is called with, and the new conv state (if there is a cache to `keep` them)."""
        projections, after = convolve_all(self._convolutions(), projected, conv_state, self.kernel, packing)
        return self._tokens(projections, cos_sin), after

    def _convolutions(self) -> list[CausalConv1d | None]:
        return [getattr(self, f"{name}_conv", None) for name in self.projection_names]

    def _convolved(self, projected) -> list[torch.Tensor]:
        """The projections that have a convolution."""
        return [x for x, convolved in zip(projected, self.convolved, strict=True) if convolved]

    def _companion(self, hidden_states, tokens, conv_state, states, packing: Packing | None):
        own = None if conv_state is None else conv_state[self.own_conv_state :]
        inputs = self.sparse.prepare(hidden_states, self._written(tokens), own, states, packing)
        self.sparse.add_ranking_loss(inputs, packing)
        return inputs

    def _all_at_once(
        self, layer, tokens, before, conv_state, packing: Packing | None, companion=None, piece: Any = None
    ) -> torch.Tensor:
        """All tokens at once, on from the states `before` of the cache, or of other processes, if there are any."""
        extent: dict[str, Any] = {}
        if packing is not None:
            extent = {"lengths": packing.lengths, "cu_seqlens": packing.cu_seqlens}
        if piece is not None:
            extent["initial_state"] = partial(self._arriving, piece, tokens)
        elif before is not None:
            extent["initial_state"] = before["state"]
        elif self.first_state is not None:
            extent["initial_state"] = self._first_states(tokens, packing)
        beside: torch.Tensor | None = None
        states: dict[str, torch.Tensor] | None = None
        if companion is not None:
            beside, states = self.sparse.attend(companion, before, packing, keep=layer is not None)
            conv_state = [*conv_state, *companion.conv_state]
        if layer is None:
            output = self.recurrence(*tokens, **extent)[0]
        else:
            output, state = self.recurrence(*tokens, **extent, output_final_state=True)
            seen = tokens[0].shape[1] + (0 if piece is None else piece.offset)
            layer.write(conv_state, {"state": state, **(states or {})}, seen)
        return output if beside is None else output + beside

    def _before_piece(self, piece: Any, projected: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """What a cache would hold of the projections before a piece, from other processes."""
        if not self.own_conv_state or self.kernel == 1:
            return None
        return piece.conv_state(self._convolved(projected), self.kernel - 1)

    def _arriving(self, piece: Any, tokens: tuple[torch.Tensor, ...], *transition: Any) -> torch.Tensor:
        """The state with which a piece begins; the recurrence calls this while its parameters are at hand."""
        recorded = [piece.rows(x) for x in self._recorded(tokens)]
        wide = torch.promote_types(recorded[0].dtype, torch.float32)
        nothing = recorded[0].new_zeros(piece.last.shape[0], *self.kept_shapes[-1], dtype=wide)
        left = self.replay_state(self.operators, nothing, *recorded, piece.last, *transition)
        total_decay = self.total_decay(piece.last, *recorded, *transition)
        return piece.state(
            left, total_decay, lambda state, total_decay: self.decay_state(state, total_decay, *transition)
        )

    def _first_states(self, tokens: Sequence[torch.Tensor], packing: Packing | None) -> torch.Tensor:
        """The learned state once for every row, or packed document."""
        first: Any = self.first_state
        return first(tokens[0] if packing is None or packing.cu_seqlens is None else packing.cu_seqlens[1:])

    def _can_step(self, layer, tokens: Sequence[torch.Tensor], packing: Packing | None) -> bool:
        differentiated = torch.is_grad_enabled() and (
            any(x.requires_grad for x in (*tokens, *layer.held()))
            or any(p.requires_grad for p in self.recurrence.parameters())
            or (self.sparse is not None and any(p.requires_grad for p in self.sparse.parameters()))
        )
        few = packing is None and (tokens[0].shape[1] == 1 or self._can_step_each(layer, tokens[0]))
        return few and not differentiated and layer.is_initialized and backend_of(self.config) in ("auto", "triton")

    def _can_step_each(self, layer, first: torch.Tensor) -> bool:
        """Whether a few tokens, a draft usually, are faster as single steps than in an operator for many."""
        here = first.device.type == "cpu" and self.sparse is None and not torch.compiler.is_compiling()
        return here and first.shape[1] <= self.most_steps and layer.has_previous_state[0]

    def _step(self, layer, tokens, before, conv_state, attention_mask, companion=None) -> torch.Tensor:
        """One token, or some after each other, the state updated in place; a pad leaves conv_state and state alone.

        `before` are the conv state and the states of the layer.
        """
        mask = None if attention_mask is None else attention_mask[:, -1].bool()
        if companion is not None:
            conv_state = [*conv_state, *companion.conv_state]
        if mask is not None:
            keep = mask[:, None, None]
            conv_state = [torch.where(keep, w, old) for w, old in zip(conv_state, before[0], strict=True)]
        layer.torn = True  # until `write` has ended
        # What a forward with gradients has written is not overwritten in place.
        states = {name: x.detach().clone() if x.requires_grad else x for name, x in before[1].items()}
        count = tokens[0].shape[1]
        if count == 1:
            output = self.recurrence(*tokens, step=True, state=states["state"], mask=mask)
            if companion is not None:
                output = output + self.sparse.step(companion, states, mask)
            output = output[:, None]
        else:
            output = self._steps(tokens, states["state"], move=not layer.defers(count))
        layer.write(conv_state, states, count)
        return output

    def _verifies(self, layer, hidden_states: torch.Tensor, packing: Packing | None) -> bool:
        """Whether a draft is verified with the pending inputs of a recording cache, and the state rests."""
        return False

    def _verify(self, layer, tokens: Sequence[torch.Tensor], conv_state: list[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def _steps(self, tokens: Sequence[torch.Tensor], state: torch.Tensor, move: bool) -> torch.Tensor:
        """A few tokens one after the other; without `move` the state stays as it was."""
        state = state if move else state.clone()
        each = zip(*(x.split(1, dim=1) for x in tokens))
        return torch.stack([self.recurrence(*one, step=True, state=state) for one in each], dim=1)

    def _record(
        self, layer, transition, projected, tokens, attention_mask, packing, hidden_states, companion=None
    ) -> None:
        """Record what this forward puts into the states, unpacked, in the cache."""
        convolved = self._convolved(projected)
        kept = [*convolved, *self._recorded(tokens)]
        if companion is not None:
            kept = [*convolved, *companion.convolved(), *self._recorded(tokens), *companion.recorded()]
        mask = attention_mask
        if packing is not None:
            kept, mask = [packing.unpack(x) for x in kept], packing.mask
        if mask is None:
            mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.bool)
        first = None if self.first_state is None else {"state": self._first_states(tokens, None)}
        replayed = partial(type(self).replay, self.operators, getattr(self.sparse, "operators", None))
        layer.record((*kept, mask.bool()), transition, replayed, first, defer=True)

    @classmethod
    def replay(cls, operators, sparse_operators, conv_state, states, inputs, constants):
        """Conv state and states after recorded inputs, for `RecurrentLayer.record`; without states the first alone.

        `operators` are those of the layer, `sparse_operators` those of its branch.
        """
        convolved, tokens, mask = inputs[: len(conv_state)], inputs[len(conv_state) : -1], inputs[-1]
        conv_state = [last_inputs(w, x, mask) for w, x in zip(conv_state, convolved, strict=True)]
        if states is None:
            return conv_state, None
        beside = {name: x for name, x in states.items() if name != "state"}
        if beside:
            from .sparse.branch import recorded_count, replay

            count = len(tokens) - recorded_count(beside)
            tokens, recorded = tokens[:count], tokens[count:]
            beside = replay(sparse_operators, beside, list(recorded), mask)
        return conv_state, {"state": cls.replay_state(operators, states["state"], *tokens, mask, *constants)} | beside


def placed_map(weights: torch.Tensor, packing: Packing | None) -> torch.Tensor:
    """A map `[B, H, T, T]` of packed tokens, unpacked: zero at pads and between documents."""
    if packing is None:
        return weights
    weights = packing.unpack(weights.transpose(1, 2)).transpose(1, 2)  # queries
    if packing.cu_seqlens is None:
        return packing.unpack(weights.transpose(1, 3)).transpose(1, 3)  # keys
    if packing.tokens is not None:  # keys of all rows, of which each query keeps its own
        count = packing.shape[0] * packing.shape[1]
        weights = weights.new_zeros(*weights.shape[:3], count).index_add(3, packing.tokens, weights)
    return weights.unflatten(3, packing.shape).diagonal(dim1=0, dim2=3).permute(3, 0, 1, 2)
