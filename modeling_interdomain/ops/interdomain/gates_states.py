"""The states around chunks whose tokens bring gates of time, and with the delta rule write what the state lacks.

With c_t the running sum of a chunk's `log_gate`, its last one c, a chunk leaves exp(c) lambda^C of the state before it,
and exp(c - c_t) of what its token t has written. Differences of sums are never positive, so nothing can overflow; sums
are float64, where a gate of 0 counts as exp(-1000), which is 0 as well.

The gradients of gates need no products of their own. Query, key and value enter an output, or a state, linearly and
with a difference of sums, so that what c_t receives is `2 <q_t, dq_t> - <k_t, dk_t> - <v_t, dv_t>` (twice, for the
query reads through both passes), and what the last sum of a chunk receives besides is `<S, dS>` with S the state after
it. Both are summed chunk by chunk: over a whole sequence they would cancel.
"""

from typing import NamedTuple

import torch

from ..common.chunks import Chunks, Segment
from ..common.decay import finite
from ..common.states import DecayTables, StateGradients, States, dot, pairs


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
        self._of_states: dict[bool, torch.Tensor] = {}

    def of_states(self, tables: DecayTables, back: bool = False) -> torch.Tensor:
        """Complex `[G, N, 1, M]`, the factor of a state across each chunk, with `back` its conjugate."""
        if back not in self._of_states:
            self._of_states[back] = (tables.across_back if back else tables.across) * self.across
        return self._of_states[back]

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
    entries: list[torch.Tensor | None] | None = None  # the states with which segments begin, where they are known
    _written: tuple[tuple[int, ...], torch.Tensor] | None = None

    def written(self, segment: Segment, inputs: torch.Tensor) -> torch.Tensor:
        name = segment[:3]  # on the way back a segment is asked for twice
        if self._written is None or self._written[0] != name:
            left = self.workspace.tensor(f"{self.name} written", tuple(inputs.shape), inputs)
            self._written = name, torch.mul(inputs, self.gates.of(segment).after, out=left)
        return self._written[1]

    def across(self, segment: Segment, chunks: slice) -> torch.Tensor:
        return self.gates.of(segment).of_states(self.tables)[:, chunks]

    def across_back(self, segment: Segment, chunks: slice) -> torch.Tensor:
        return self.gates.of(segment).of_states(self.tables, back=True)[:, chunks]

    def _last(self, ranks: slice) -> tuple[torch.Tensor, torch.Tensor]:
        last, decay = super()._last(ranks)
        gates = self.gates.last(ranks)
        return last * gates.after, decay * gates.across


class Answering(NamedTuple):
    """What the chunks of a segment need for the delta rule, by step.

    Attributes:
        delta: `[N G, C, 1]`.
        weights: `[N G, C, C]`, A: what each earlier token of the chunk has written, in the answer to a key.
        inverse: `[N G, C, C]`, of I + A diag(delta).
        readers: `[N G, C, 2M]`, `inverse` times those of the states before the chunks; None where these are zero.
    """

    delta: torch.Tensor
    weights: torch.Tensor
    inverse: torch.Tensor
    readers: torch.Tensor | None


class DeltaStates(GatedStates):
    """Those of values from which what the state answers to their keys is taken before they are written.

    A walk holds its chunks by step, `[N G, ...]`, so that those of a step lie side by side and few calls take them on.
    """

    def answer(
        self, segment: Segment, values: torch.Tensor, entry: torch.Tensor | None, how: Answering
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forward` of what values write, each chunk when the state before it is known.

        Args:
            values: `[G, N, C, W]`, overwritten with what they write.

        Returns:
            What the state answers to the keys, `[G, N, C, W]`, and the states before the chunks, as `forward`.
        """
        groups, count = self.x.shape[2], self.x.shape[2] * segment.chunks
        written, states = by_step(values), self._steps(segment, entry)
        answers = torch.bmm(how.inverse, torch.bmm(how.weights, written))
        writes, replies, delta, table, across, before = (
            steps_of(x, segment)
            for x in (
                written, answers, how.delta, self.table_left(segment),
                by_step(self.across(segment, slice(None))), states[:count],
            )
        )  # fmt: skip
        readers = None if how.readers is None else steps_of(how.readers, segment)
        for step, after in enumerate((*before[1:], states[count:])):
            if readers is not None:
                replies[step].baddbmm_(readers[step], before[step].mT)
            writes[step].addcmul_(delta[step], replies[step], value=-1)
            going = after.shape[0]
            if going:
                torch.mul(pairs(before[step][:going]), across[step][:going], out=pairs(after))
                after.baddbmm_(writes[step][:going].mT, table[step][:going])
        values.copy_(by_group(written, groups))
        self.next_entry = by_group(states[count:], groups).contiguous() if segment.following else None
        if readers is None:
            return by_group(answers, groups), None
        found = self.workspace.tensor(f"{self.name} before", self._shape(segment.chunks), values)
        self.keep_ends(segment, found.copy_(by_group(states[:count], groups)))
        return by_group(answers, groups), found

    def _steps(self, segment: Segment, entry: torch.Tensor | None) -> torch.Tensor:
        """Room for the states before the chunks of a segment, by step, and behind it; the first ones are there."""
        groups, _, width, modes = self._shape(0)
        shape = groups * (segment.chunks + segment.following), width, modes
        states = self.workspace.tensor(f"{self.name} by step", shape, self.x)
        first = states[: groups * segment.lanes[0]]
        first.zero_() if entry is None else by_group(first, groups).copy_(entry)
        return states

    def table_left(self, segment: Segment) -> torch.Tensor:
        """The table of each chunk of a segment with what gates leave of its tokens after it, `[N G, C, 2M]`."""
        after = by_step(self.gates.of(segment).after).view(segment.chunks, -1, self.chunks.size, 1)
        return (after * self.tables.table).flatten(0, 1)


def by_step(x: torch.Tensor) -> torch.Tensor:
    """A copy `[N G, ...]` of `[G, N, ...]`."""
    return x.transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(0, 1)


def by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """The inverse, a view."""
    return x.unflatten(0, (-1, groups)).transpose(0, 1)


def steps_of(x: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, ...]:
    """The steps of `[N G, ...]`, views."""
    return x.split([x.shape[0] // segment.chunks * lanes for lanes in segment.lanes])


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

    def _entries(self) -> list[torch.Tensor | None]:
        known = self.states.entries
        return super()._entries() if known is None or self.states.ends is not None else known

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
    # Of the segment that is walked, by step: gradients of what was written, and delta times `readers`.
    answered: tuple[torch.Tensor, torch.Tensor | None]

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
        """As that of `StateGradients`; adds to the gradients of what was written those through the states."""
        if grad is not None and not segment.following and len(segment.lanes) == 1:
            written, readers = self.answered
            grad -= by_group(torch.bmm(written.mT, readers), grad.shape[0])
        return super().backward(segment, inputs, before, grad)

    def _walk(self, segment: Segment, grad: torch.Tensor | None, after: torch.Tensor) -> torch.Tensor | None:
        written, readers = self.answered
        groups = after.shape[0]
        found = self.workspace.tensor("grad after by step", (written.shape[0], *after.shape[2:]), after)
        writes, later, table = (steps_of(x, segment) for x in (written, found, self.states.table_left(segment)))
        reads = entry = None
        if grad is not None:
            entry = grad.new_empty(groups * segment.lanes[0], *grad.shape[2:])
            across = steps_of(by_step(self.states.across_back(segment, slice(None))), segment)
            earlier, reads = steps_of(by_step(grad), segment), steps_of(readers, segment)
        for step in reversed(range(len(later))):
            last = step + 1 == len(later)
            going = groups * (segment.following if last else segment.lanes[step + 1])
            later[step][going:] = 0
            if going:
                if last:
                    by_group(later[step][:going], groups).copy_(self.next_entry)
                writes[step][:going].baddbmm_(table[step][:going], later[step][:going].mT)
            if reads is not None:
                into = later[step - 1][: later[step].shape[0]] if step else entry
                torch.addcmul(pairs(earlier[step]), across[step], pairs(later[step]), out=pairs(into))
                into.baddbmm_(writes[step].mT, reads[step], alpha=-1)
        after.copy_(by_group(found, groups))
        return None if entry is None else by_group(entry, groups)
