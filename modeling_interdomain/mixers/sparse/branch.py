"""Softmax attention to a few keys chosen by content, beside a recurrence (HAX, arXiv 2507.00449).

Its values are what the recurrence writes, its queries and keys are its own; the output joins that of the recurrence,
each channel with a learned weight.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import initialization as init

from ...layers.common import FULL_PRECISION, DecodeTables, RankingLoss, are_untouched, backend_of, is_plain
from ...layers.convolution import TOKEN_BEFORE, CausalConv1d, convolve_all, convolve_few, joined_weights
from ...layers.operators import Operators
from ...ops.common.cpu import without_autocast
from ...ops.common.launch import STEP_BACKENDS
from ...ops.common.packing import Packing, zero_pads
from ...ops.sparse.entry import sparse_attention
from ...ops.sparse.step import take_sparse_step
from ...ops.sparse.stream import Bins, Ring, SparseMemory, memory_of
from .choice import KeyScorer, SparseHash, hashed, ranking_loss, scored
from .parts import PARTS, Budget, budgets, kept_shapes


class SparseInputs(NamedTuple):
    """What the branch computes of the tokens of one forward.

    Attributes:
        query, key: `[B, T, S, d]`, keys scaled by `d^-1/2`.
        value: `[B, T, S, D]`.
        scores: `[B, T, S]`, or None.
        bins: of every part but key selection.
        sums: `[B, S, 2, d]`, the sums of all queries and keys so far; None where no part needs them.
        inputs: what the convolutions read, `[B, T, S d]` of each, or `[B, T, 2 S d]` of both side by side.
        conv_state: that of both convolutions, `[B, 2 S d, kernel - 1]`.
        factors: the weights of the gate `[H, D]`, where multiplying by them saves calling it.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scores: torch.Tensor | None
    bins: tuple[Bins, ...]
    sums: torch.Tensor | None
    inputs: list[torch.Tensor]
    conv_state: list[torch.Tensor]
    factors: torch.Tensor | None = None

    def convolved(self) -> list[torch.Tensor]:
        """What moves the conv state."""
        return [_side_by_side(self.inputs)]

    def recorded(self) -> list[torch.Tensor]:
        """What moves the memory, `[B, T, ...]` each, for `replay`."""
        kept = [self.value, self.key, *(part.key for part in self.bins)]
        kept += [] if self.scores is None else [self.scores]
        return kept if self.sums is None else [*kept, self.query]


class ChannelGate(nn.Module):
    """A factor for every channel of every head, `[H, D]`.

    A module of its own, because what offloads, shards or adapts parameters does so where their module is called, and a
    branch itself is never called.
    """

    def __init__(self, config, heads: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, width))
        self.start_parameters(config)

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        init.constant_(self.weight, config.sparse_gate_init)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _side_by_side(projections: list[torch.Tensor]) -> torch.Tensor:
    """Numbers `[B, T, W]` of several projections, those of a token one after the other."""
    return projections[0] if len(projections) == 1 else torch.cat(projections, dim=-1)


class SparseBranch(DecodeTables):
    """`gate * attention` of queries and keys of S heads to `value`, the numbers that the recurrence writes.

    Parameters: `q_proj`, `k_proj`, each followed by a short convolution (`q_conv`, `k_conv`); `gate` `[H, D]`, E of the
    paper; `hash` and `scorer`, where a part needs them.
    """

    operators = Operators.of(sparse_attention, take_sparse_step, memory_of)

    def __init__(
        self, config, name: str, groups: int, width: int, outputs: int | None = None, *, reads_first: bool = False
    ):
        """`groups` x `width` is what the recurrence writes of a token; its output has `outputs` (H) x `width`.

        `reads_first`: the branch may start with "induction", because the recurrence does not.
        """
        outputs = config.num_attention_heads if outputs is None else outputs
        super().__init__()
        self.config = config
        self.budgets = budgets(config, name)
        parts = {budget.part for budget in self.budgets}
        self.heads = config.sparse_num_heads or groups
        self.dim, self.kernel = config.sparse_key_dim, config.conv_kernel
        self.groups, self.width, self.repeats = groups, width, outputs // groups
        self.selected_keys = next((b.keys for b in self.budgets if b.part == "key_selection"), 0)
        self.binned = [budget for budget in self.budgets if budget.part != "key_selection"]
        self.spacing = max(1, config.max_position_embeddings // max(1, self.budgets[0].keys))
        size = self.heads * self.dim
        self.q_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.q_conv, self.k_conv = (CausalConv1d(size, size, self.kernel, groups=size, bias=False) for _ in range(2))
        self.gate = ChannelGate(config, outputs, width)
        self.hash = SparseHash(config, self.heads) if "lsh" in parts else None
        self.scorer = KeyScorer(config) if "key_selection" in parts else None
        self.ranking = None
        if self.scorer is not None and config.ranking_loss_coef > 0:
            self.ranking = RankingLoss()
        elif self.scorer is not None:
            self.scorer.requires_grad_(False)  # nothing but the ranking loss trains the scorer
        self.centred = self.hash is not None and config.sparse_hash_center is not None
        self.summed = self.centred or self.scorer is not None
        # For decoding: looking up a module is slow.
        self.scored, self.hashed = self.scorer is not None, self.hash is not None
        self.hash_kind = config.sparse_hash
        read = {"q_proj": nn.Linear, "k_proj": nn.Linear, "q_conv": CausalConv1d, "k_conv": CausalConv1d}
        read |= {"gate": ChannelGate, "scorer": KeyScorer, "hash": SparseHash}
        self.read = {name: kind for name, kind in read.items() if getattr(self, name) is not None}
        self.conv_state_shapes, self.state_shapes = kept_shapes(config, name, groups, width)
        self.reads_first = reads_first

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        """With `sparse_query_init="induction"` keys are those of the token before, which queries of that token find.

        Both of unit variance in every number, so that equal ones score `d^(1/2)` and others about 0.
        """
        if config.sparse_query_init != "induction" or not self.reads_first:
            return
        init.normal_(self.k_proj.weight, std=config.hidden_size**-0.5)
        init.copy_(self.q_proj.weight, self.k_proj.weight)
        self.q_conv.start_weight(1)
        self.k_conv.start_weight(*TOKEN_BEFORE)

    def prepare(
        self,
        hidden_states: torch.Tensor,
        value: torch.Tensor,
        conv_state: list[torch.Tensor] | None,
        states: dict[str, torch.Tensor] | None,
        packing: Packing | None,
    ) -> SparseInputs:
        """Inputs from tokens `[B, T, hidden_size]` of the batch and `value` `[B, T, groups, width]`, packed already.

        `conv_state`, that of `q_conv` and `k_conv`, and `states` are those of the cache, if there is one.
        """
        if self.heads != self.groups:
            value = value.flatten(2).unflatten(-1, (self.heads, -1))
        if states is None or packing is not None or hidden_states.shape[1] > 1:
            self.doubt_tables()  # another sequence may begin
        elif (found := self._token(hidden_states, value, conv_state, states)) is not None:
            return found
        projected = [self.q_proj(hidden_states), self.k_proj(hidden_states)]
        if packing is not None:
            projected = [packing.pack(x) for x in projected]
        before = conv_state[0].chunk(2, dim=1) if conv_state else None
        convolved, after = convolve_all((self.q_conv, self.k_conv), projected, before, self.kernel, packing)
        query, key = (x.unflatten(-1, (self.heads, self.dim)) for x in convolved)
        key = key * self.dim**-0.5
        differentiated = self.training and torch.is_grad_enabled()
        with torch.no_grad(), without_autocast(query.device):
            both = torch.stack([query, key], dim=3).detach()
            scores, bins, sums = self._choose(both, states, packing, differentiated)
        window = None if after[0] is None else _side_by_side([x.mT for x in after]).mT
        return SparseInputs(query, key, value, scores, bins, sums, projected, [window])

    def _token(self, x: torch.Tensor, value: torch.Tensor, conv_state, states) -> SparseInputs | None:
        """`prepare` of one token x in few calls, where a call costs more than what it computes.

        None where calling a module may do more than its weights say, or something is differentiated or compiled.
        """
        own: dict[str, Any] = self._modules
        dtype = x.dtype
        if self.training or not is_plain(x, dtype) or dtype not in FULL_PRECISION or torch.is_autocast_enabled("cpu"):
            return None
        read = [own[name] for name in self.read]
        if not are_untouched(read, self.read.values(), x.device):
            return None
        weights = [module._parameters["weight"] for module in read[:4]]
        # By name: what is parametrized and then made permanent has moved to the end.
        layers = [own["scorer"]._parameters.get(name) for name in KeyScorer.NAMES] if self.scored else []
        projection = own["hash"]._buffers["H"] if self.hashed else None
        if weights[0].dtype != dtype or any(x is None or x.dtype != dtype for x in layers):
            return None
        if projection is not None and projection.dtype != dtype:
            projection = projection.to(dtype)
        weight, conv_weight = self._tables.get("token", weights, lambda _: self._joined(*weights))
        with torch.inference_mode():
            projected = nn.functional.linear(x, weight)
            y, after = convolve_few([projected], conv_state, conv_weight)
            heads_first = y.view(-1, 2, self.heads, self.dim).transpose(1, 2)
            both = heads_first.unsqueeze(1)
            query, key = both.unbind(3)
            scores = sums = found = running = None
            if self.summed:
                sums = states["sparse_sums"] + heads_first
                running = sums.to(dtype).unsqueeze(1)
            if self.scored:
                scores = scored(key, running.select(3, 0), layers)
            if self.hashed:
                centred = _about_mean(both, running, states["sparse_seen"]) if self.centred else None
                found = hashed(both, centred, projection, self.hash_kind)
            counts = states["sparse_seen"][:, None] + 1 if len(self.binned) > self.hashed else None
            bins = tuple([self._bins(budget, found, counts, both) for budget in self.binned])
        factors = own["gate"]._parameters["weight"]
        return SparseInputs(query, key, value, scores, bins, sums, [projected], after, factors)

    def _joined(self, q_proj, k_proj, q_conv_weight, k_conv_weight) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight `[2 S d, hidden_size]` and conv_weight `[kernel, 2 S d]` of queries and keys, the latter scaled."""
        return torch.cat([q_proj, k_proj]), joined_weights(q_conv_weight, k_conv_weight * self.dim**-0.5)

    def _choose(self, both, states, packing: Packing | None, differentiated: bool):
        """Scores, bins and sums of queries and keys `[B, T, S, 2, d]`, in at least float32.

        Only scores have a gradient, and only in training.
        """
        wide = torch.promote_types(both.dtype, torch.float32)
        both = both.to(wide)
        counts = _counts(both, None if states is None else states["sparse_seen"], packing)
        sums, running = None, None
        if self.summed:
            before = None if states is None else states["sparse_sums"]
            running, sums = _running_sums(both, before, packing)
        scores = None
        if self.scorer is not None:
            with torch.set_grad_enabled(differentiated and self.ranking is not None):
                scores = self.scorer(both[..., 1, :], running[..., 0, :].to(wide))
        bins = None
        if self.hash is not None:
            means = (running / counts.view(*counts.shape, 1, 1, 1)).to(wide) if self.centred else None
            bins = self.hash(both, means)
        return scores, tuple(self._bins(budget, bins, counts, both) for budget in self.binned), sums

    def _bins(self, budget: Budget, bins, counts: torch.Tensor | None, both: torch.Tensor) -> Bins:
        """The bins of a part: those of the hash, or one bin, from which "sink" and "dilated" leave most keys out."""
        part, keys, number = budget
        if part == "lsh":
            of_query, of_key = bins.unbind(-1)
            return Bins(of_query, of_key, number, keys, complete=True)
        one = torch.zeros(both.shape[:3], dtype=torch.long, device=both.device)
        if part in ("sliding_window", "full"):
            return Bins(one, one, number, keys, complete=True)
        seen = counts <= keys if part == "sink" else counts % self.spacing == 0
        return Bins(one, torch.where(seen[..., None], one, -1), number, keys)

    # Attention.

    def attend(
        self, inputs: SparseInputs, states: dict[str, torch.Tensor] | None, packing: Packing | None, keep: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
        """All tokens at once: `[B, T, H, width]`, and the new states if a cache is to `keep` them."""
        extent: dict[str, Any] = {}
        if packing is not None:
            extent = {"lengths": packing.lengths, "cu_seqlens": packing.cu_seqlens, "documents": packing.documents}
        output, memory = self.operators.sparse_attention(
            inputs.query,
            inputs.key,
            inputs.value,
            scores=inputs.scores,
            selected_keys=self.selected_keys,
            bins=inputs.bins,
            initial_state=None if states is None else _memory_of(states),
            output_final_state=keep,
            **extent,
        )
        after = None
        if memory is not None:
            after = _states_of(memory) | ({} if inputs.sums is None else {"sparse_sums": inputs.sums})
            after = {name: after[name] for name in self.state_shapes}
        return self._gated(output), after

    def step(self, inputs: SparseInputs, states: dict[str, torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor:
        """One token, the states updated in place: `[B, H, width]`."""
        if inputs.sums is not None:
            kept = states["sparse_sums"]
            kept.copy_(inputs.sums if mask is None else inputs.sums.where(mask[:, None, None, None], kept))
        output = self.operators.take_sparse_step(
            inputs.query,
            inputs.key,
            inputs.value,
            memory=_memory_of(states),
            scores=inputs.scores,
            bins=inputs.bins,
            mask=mask,
            backend=backend_of(self.config, STEP_BACKENDS),
        )
        return self._gated(output, inputs.factors)

    def _gated(self, output: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        """Expand S heads to the H of the recurrence's output, and gate them; by `factors`, if they are given."""
        if self.heads != self.groups:
            output = output.flatten(-2).unflatten(-1, (self.groups, self.width))
        if self.repeats > 1:
            output = output.repeat_interleave(self.repeats, dim=-2)
        return self.gate(output) if factors is None else factors * output

    def add_ranking_loss(self, inputs: SparseInputs, packing: Packing | None) -> None:
        """In training, hand on the loss of the scorer."""
        if self.ranking is None or not self.training:
            return
        lengths = None if packing is None else packing.lengths
        if packing is not None and packing.cu_seqlens is not None and packing.mask is not None:
            lengths = packing.cu_seqlens[-2:-1]  # pads are the last document
        with without_autocast(inputs.query.device):
            wide = torch.promote_types(inputs.query.dtype, torch.float32)
            loss = ranking_loss(
                inputs.scores,
                inputs.query.detach().to(wide),
                inputs.key.detach().to(wide),
                self.selected_keys,
                target=self.config.ranking_target,
                lengths=lengths,
                documents=None if packing is None else packing.documents,
            )
        self.ranking(loss)

    def extra_repr(self) -> str:
        return ", ".join(f"{part}: {keys} keys of {bins} bins" for part, keys, bins in self.budgets)


def replay(
    operators: Operators, states: dict[str, torch.Tensor], recorded: list[torch.Tensor], mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The states of a branch with these operators, by name, after `SparseInputs.recorded` (mask `[B, T]`)."""
    memory = _memory_of(states)
    value, key, *rest = recorded
    of_bins, rest = rest[: len(memory.rings)], rest[len(memory.rings) :]
    bins = [Bins(x, x, *ring.places.shape[2:]) for x, ring in zip(of_bins, memory.rings, strict=True)]
    scores, selected = None, 0
    if memory.scores is not None:
        scores, selected, rest = rest[0], memory.scores.shape[-1], rest[1:]
    after = _states_of(operators.memory_of(key, value, scores, selected, bins, mask, memory))
    if rest:
        both = torch.stack([rest[0], key], dim=3).to(states["sparse_sums"].dtype)
        after["sparse_sums"] = states["sparse_sums"] + torch.where(mask[..., None, None, None], both, 0).sum(1)
    return {name: after[name] for name in states}


def recorded_count(states: dict[str, torch.Tensor]) -> int:
    """How many tensors a branch with these states records."""
    if "sparse_seen" not in states:
        return 0
    rings = sum(name.endswith("_places") for name in states) - ("sparse_places" in states)
    return 2 + rings + ("sparse_scores" in states) + ("sparse_sums" in states)


# Names of the states of every part but key selection, in their order.
_RINGS = [(f"sparse_ring{i}", f"sparse_ring{i}_places") for i in range(len(PARTS))]


def _memory_of(states: dict[str, torch.Tensor]) -> SparseMemory:
    rings = tuple([Ring(states[name], states[places]) for name, places in _RINGS if name in states])
    chosen = states.get("sparse_entries"), states.get("sparse_scores"), states.get("sparse_places")
    return SparseMemory(states["sparse_seen"], *chosen, rings)


def _states_of(memory: SparseMemory) -> dict[str, torch.Tensor]:
    states = {"sparse_seen": memory.seen}
    if memory.entries is not None:
        states |= {"sparse_entries": memory.entries, "sparse_scores": memory.scores, "sparse_places": memory.places}
    for (name, places), ring in zip(_RINGS, memory.rings):
        states |= {name: ring.entries, places: ring.places}
    return states


def _counts(x: torch.Tensor, seen: torch.Tensor | None, packing: Packing | None) -> torch.Tensor:
    """`[B or 1, T]`, how many tokens there are up to each, in its row or document."""
    if x.shape[1] == 1 and packing is None and seen is not None:
        return (seen + 1)[:, None]
    counts = torch.arange(1, x.shape[1] + 1, device=x.device)[None]
    if packing is not None and packing.documents is not None:
        counts = counts - packing.cu_seqlens[packing.documents]
    return counts if seen is None else counts + seen[:, None]


def _about_mean(x: torch.Tensor, sums: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """A token x `[B, 1, S, n, d]` minus the mean of it and the `seen` `[B]` tokens before it, all in `sums`."""
    if seen.shape[0] == 1:  # with a plain number it is three calls less
        return torch.sub(x, sums, alpha=1 / (seen.item() + 1))
    return torch.addcdiv(x, sums, (seen + 1).to(x.dtype).view(-1, 1, 1, 1, 1), value=-1)


def _running_sums(x: torch.Tensor, before: torch.Tensor | None, packing: Packing | None):
    """The sums of `[B, T, S, n, d]` up to every token, in float64, and the last of them `[B, S, n, d]`.

    With sums in float32 the bin of a token would depend on how a long text was cut into forwards.
    """
    if packing is not None and packing.lengths is not None:
        (x,) = zero_pads(packing.lengths, x)
    if x.shape[1] == 1 and packing is None and before is not None:
        running = x + before[:, None]
        return running, running[:, 0]
    by_number = x.movedim(1, -1).to(torch.float64, memory_format=torch.contiguous_format)
    running = by_number.cumsum(-1).movedim(-1, 1).contiguous()  # on a CPU faster than along an axis in the middle
    if packing is not None and packing.documents is not None:
        starts = packing.cu_seqlens[packing.documents]
        earlier = nn.functional.pad(running[0], (0, 0, 0, 0, 0, 0, 1, 0))
        running = running - earlier[starts]
    if before is not None:
        running = running + before[:, None]
    return running, running[:, -1]
