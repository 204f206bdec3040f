"""The states around chunks whose tokens bring gates of time, and with the delta rule write what the state lacks.

With c_t the running sum of a chunk's `log_gate`, its last one c, a chunk leaves exp(c) lambda^C of the state before it,
and exp(c - c_t) of what its token t has written. Differences of sums are never positive, so nothing can overflow; sums
are float64, where a gate of 0 counts as exp(-1000), which is 0 as well.

The gradients of gates need no products of their own. Query, key and value enter an output, or a state, linearly and
with a difference of sums, so that what c_t receives is `2 <q_t, dq_t> - <k_t, dk_t> - <v_t, dv_t>` (twice, for the
query reads through both passes), and what the last sum of a chunk receives besides is `<S, dS>` with S the state after
it. Both are summed chunk by chunk: over a whole sequence they would cancel.
"""

import torch

from ..common.chunks import Chunks, Segment
from ..common.decay import finite
from ..common.states import Repeated, StateGradients, States, dot, pairs


class ChunkGates:
    """What the gates of some chunks, `[G, N, C]` in float64, leave.

    Attributes:
        sums: their running sums.
        before: `[G, N, C, 1]`, at each token of the state before the chunk.
        after: `[G, N, C, 1]`, of each token after the chunk.
        across: `[G, N, 1, 1]`, of the state before the chunk after it.
    """

    def __init__(self, log_gate: torch.Tensor, dtype: torch.dtype):
        self.sums = log_gate.cumsum(-1)
        last = self.sums[..., -1:]
        self.before = self.sums.exp().to(dtype)[..., None]
        self.after = (last - self.sums).exp().to(dtype)[..., None]
        self.across = last.exp().to(dtype)[..., None]

    def within(self) -> torch.Tensor:
        """`[G N, 1, C, C]`: at token t of what token i has written, zero for i > t."""
        size = self.sums.shape[-1]
        apart = self.before.new_empty(*self.sums.shape, size)
        torch.sub(self.sums[..., :, None], self.sums[..., None, :], out=apart)
        return apart.clamp_(max=0).exp_().tril_().view(-1, 1, size, size)


class TokenGates:
    """The gates of a call, `[B, T, G]`, among its chunks; those of the last segment that was asked for are kept."""

    def __init__(self, log_gate: torch.Tensor, chunks: Chunks, dtype: torch.dtype):
        self.x, self.chunks, self.dtype = finite(log_gate)[..., None], chunks, dtype
        self._kept: tuple[tuple[int, ...], ChunkGates] | None = None

    def of(self, segment: Segment) -> ChunkGates:
        name = segment[:3]
        if self._kept is None or self._kept[0] != name:
            target = self.x.new_empty(self.x.shape[2], segment.chunks, 1, self.chunks.size, 1)
            self.chunks.read(self.x, segment, target)
            self._kept = name, ChunkGates(target[:, :, 0, :, 0], self.dtype)
        return self._kept[1]

    def last(self, ranks: slice) -> ChunkGates:
        """Of the last chunks of some documents, their tokens at the right end."""
        count = self.chunks.tails[ranks].numel()
        target = self.x.new_empty(self.x.shape[2], count, 1, self.chunks.size, 1)
        self.chunks.read_last(self.x, ranks, target)
        return ChunkGates(target[:, :, 0, :, 0], self.dtype)


class GatedStates(States):
    """`States` of a call with gates, set before anything is asked for."""

    gates: TokenGates
    _written: tuple[tuple[int, ...], torch.Tensor] | None = None

    def written(self, segment: Segment, inputs: torch.Tensor) -> torch.Tensor:
        name = segment[:3]  # on the way back a segment is asked for twice
        if self._written is None or self._written[0] != name:
            left = self.workspace.tensor(f"{self.name} written", tuple(inputs.shape), inputs)
            self._written = name, torch.mul(inputs, self.gates.of(segment).after, out=left)
        return self._written[1]

    def across(self, segment: Segment, chunks: slice) -> torch.Tensor:
        return self.tables.across * self.gates.of(segment).across[:, chunks]

    def across_back(self, segment: Segment, chunks: slice) -> torch.Tensor:
        return self.tables.across_back * self.gates.of(segment).across[:, chunks]

    def _last(self, ranks: slice) -> tuple[torch.Tensor, torch.Tensor]:
        last, decay = super()._last(ranks)
        gates = self.gates.last(ranks)
        return last * gates.after, decay * gates.across


class DeltaStates(GatedStates):
    """Those of values from which what the state answers to their keys is taken before they are written."""

    stepped: Repeated | None = None

    def answer(
        self,
        segment: Segment,
        values: torch.Tensor,
        entry: torch.Tensor | None,
        inverse: torch.Tensor,
        readers: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """`forward` of what values write, each chunk when the state before it is known.

        Args:
            values: `[G, N, C, W]`, overwritten with what they write.
            inverse: `[G, N, C, C]`, of I + diag(delta) A.
            readers: `[G, N, C, 2M]`, times delta, of the states before the chunks; None where all are zero.

        Returns:
            The states before the chunks, as `forward`.
        """
        before = None
        if entry is not None or len(segment.lanes) > 1:
            before = self.workspace.tensor(f"{self.name} before", self._shape(segment.chunks), values)
            first = before[:, : segment.lanes[0]]
            first.zero_() if entry is None else first.copy_(entry)
        self.next_entry = values.new_empty(self._shape(segment.following)) if segment.following else None
        for index, (start, lanes, following) in enumerate(segment.moves()):
            here = slice(start, start + lanes)
            lacking = rows_of(values, here)
            if before is not None and readers is not None and (index or entry is not None):
                lacking = lacking - torch.bmm(rows_of(readers, here), rows_of(before, here).mT)
            values[:, here] = torch.bmm(rows_of(inverse, here), lacking).view(values[:, here].shape)
            if not following:
                break
            here = slice(start, start + following)
            after = self.next_entry if index + 1 == len(segment.lanes) else before[:, start + lanes :][:, :following]
            written = values[:, here] * self.gates.of(segment).after[:, here]
            added = torch.bmm(written.flatten(0, 1).mT, self._table(following)).view(after.shape)
            if before is None:
                after.copy_(added)
            else:
                torch.addcmul(pairs(added), self.across(segment, here), pairs(before[:, here]), out=pairs(after))
        if before is not None:
            self.keep_ends(segment, before)
        return before

    def _table(self, count: int) -> torch.Tensor:
        if self.stepped is None:
            self.stepped = Repeated(self.tables.table)
        return self.stepped(count)


def rows_of(x: torch.Tensor, chunks: slice) -> torch.Tensor:
    """Some chunks of `[G, N, ...]` as `[G n, ...]`; a copy where there are several."""
    x = x[:, chunks]
    return x[:, 0] if x.shape[1] == 1 else x.flatten(0, 1)


class GatedStateGradients(StateGradients):
    """`StateGradients` that also say what the gates receive through the states.

    Attributes:
        of_across: `[G, N]`, what the last sums of the chunks of the segment walked last receive; None for zeros.
    """

    states: GatedStates

    def __init__(self, states: GatedStates, final: torch.Tensor | None):
        self.of_across: torch.Tensor | None = None
        self._last_gates: list[torch.Tensor] = []
        super().__init__(states, final)

    def _from_ends(self, ranks: slice) -> torch.Tensor:
        last, decay = self.states._last(ranks)
        gates = self.states.gates.last(ranks)
        grad, before = self.ends[:, ranks], self.states.ends[:, ranks]
        flat = grad.flatten(0, 1)
        found = torch.bmm(last.flatten(0, 1), flat).unflatten(0, last.shape[:2])
        self.of_table += found.sum(1)
        of_decay = dot(before, grad, torch.empty_like(grad)).sum(2) * gates.across[..., 0]  # [G, n, M]
        self.of_powers.index_add_(1, self.states.chunks.tails[ranks], of_decay)
        of_last = torch.bmm(self.tables.repeated(last.shape[1]), flat.mT).view(last.shape)
        pairs(grad).mul_(decay.conj())
        of_sums = self._of_last_sums(last, of_last)
        of_sums[..., -1] += self._of_across(found, of_decay, self.tables.powers[:, self.states.chunks.tails[ranks]])
        self._last_gates.append(of_sums)
        return of_last * gates.after

    def _of_last_sums(self, last: torch.Tensor, of_last: torch.Tensor) -> torch.Tensor:
        """What the sums of last chunks receive as those of their tokens, `[G, n, C]`."""
        return -(last * of_last).sum(-1, dtype=torch.float64)

    def _sums(self, segment: Segment, inputs: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor) -> None:
        written = self.states.written(segment, inputs)
        found = self.workspace.product("grad tables", written.flatten(0, 1), after.flatten(0, 1))
        found = found.view(*after.shape[:2], *found.shape[1:])
        self.of_table += found.sum(1)
        of_decay = None
        if before is not None:
            product = dot(before, after, self.workspace.tensor("decay product", tuple(before.shape), after))
            of_decay = product.sum(2) * self.states.gates.of(segment).across[..., 0]
            self.of_powers[:, -1] += of_decay.sum(1)
        self.of_across = self._of_across(found, of_decay, self.tables.powers[:, -1:])

    def _of_across(self, of_table: torch.Tensor, of_decay: torch.Tensor | None, powers: torch.Tensor) -> torch.Tensor:
        """`<S, dS>` of the states after chunks, `[G, N]`, from what their inputs and the state before have given."""
        total = (of_table * self.tables.table[:, None]).sum((-2, -1)).double()
        if of_decay is not None:
            total += (powers.conj() * of_decay).real.sum(-1)
        return total

    def finish_gates(self, into: torch.Tensor) -> None:
        """Add what gates receive from the final states to `into`, `[B T or more, G, 1]`."""
        for ranks, of_sums in zip(self.states._ranks(), self._last_gates):
            of_gates = of_sums.flip(-1).cumsum(-1).flip(-1)
            self.states.chunks.add_last(of_gates[:, :, None, :, None].to(into.dtype), ranks, into)


class DeltaStateGradients(GatedStateGradients):
    """The same of `DeltaStates`, whose inputs are what has been written."""

    states: DeltaStates
    # Gradients of what was written, `inverse` and `readers` of the segment that is walked.
    answered: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]

    def __init__(self, states: DeltaStates, final: torch.Tensor | None):
        super().__init__(states, final)
        self.given: torch.Tensor | None = None  # what was written receives through the final states
        if self._last_inputs:
            self.given = states.chunks.empty(states.x, *states.x.shape[2:]).zero_()
            for ranks, grad in zip(states._ranks(), self._last_inputs):
                states.chunks.add_last(grad[:, :, None], ranks, self.given)
            self.given, self._last_inputs = states.chunks.finish(self.given), []

    def _of_last_sums(self, last: torch.Tensor, of_last: torch.Tensor) -> torch.Tensor:
        return of_last.new_zeros(of_last.shape[:-1], dtype=torch.float64)  # `given` is among their gradients

    def of_written(self, segment: Segment, grad: torch.Tensor) -> None:
        """Add to the gradients `[G, N, C, W]` of what a segment has written those through the final states."""
        if self.given is not None:
            target = self.workspace.tensor("given", (*grad.shape[:2], 1, *grad.shape[2:]), grad)
            self.states.chunks.read(self.given, segment, target)
            grad += target[:, :, 0]

    def backward(
        self, segment: Segment, inputs: torch.Tensor, before: torch.Tensor | None, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As that of `StateGradients`; the gradients of what was written, in `answered`, become those of the values."""
        if not segment.following and len(segment.lanes) == 1:
            self._solve(slice(0, segment.chunks), grad)
        return super().backward(segment, inputs, before, grad)

    def _solve(self, here: slice, of_before: torch.Tensor | None) -> None:
        """Take the gradients of some chunks back through the solve, and to the states that they have read."""
        written, inverse, readers = self.answered
        found = torch.bmm(rows_of(inverse, here).mT, rows_of(written, here))
        written[:, here] = found.view(written[:, here].shape)
        if of_before is not None and readers is not None:
            of_before -= torch.bmm(found.mT, rows_of(readers, here)).view(of_before.shape)

    def _walk(self, segment: Segment, grad: torch.Tensor | None, after: torch.Tensor) -> torch.Tensor | None:
        written, gates = self.answered[0], self.states.gates.of(segment)
        moves = list(segment.moves())
        entry = None if grad is None else torch.empty_like(grad[:, : segment.lanes[0]].contiguous())
        for index in reversed(range(len(moves))):
            start, lanes, following = moves[index]
            here = slice(start, start + lanes)
            if index + 1 == len(moves) and following:
                after[:, start : start + following] = self.next_entry
            after[:, start + following : start + lanes] = 0
            if following:
                through = torch.bmm(self.states._table(lanes), rows_of(after, here).mT)
                written[:, here].addcmul_(through.view(written[:, here].shape), gates.after[:, here])
            into = None
            if grad is not None:
                into = after[:, moves[index - 1][0] :][:, :lanes] if index else entry
                across = self.states.across_back(segment, here)
                torch.addcmul(pairs(grad[:, here]), across, pairs(after[:, here]), out=pairs(into))
            self._solve(here, into)
        return entry
