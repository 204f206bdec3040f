"""The states around chunks whose tokens bring gates of time, and with the delta rule write what the state lacks.

With c_t the running sum of a chunk's `log_gate`, its last one c, a chunk leaves exp(c) lambda^C of the state before it,
and exp(c - c_t) of what its token t has written. Differences of sums are never positive, so nothing can overflow; sums
are float64, where a gate of 0 counts as exp(-1000), which is 0 as well.

The gradients of gates need no products of their own. Query, key and value enter an output, or a state, linearly and
with a difference of sums, so that what c_t receives is `2 <q_t, dq_t> - <k_t, dk_t> - <v_t, dv_t>` (twice, for the
query reads through both passes), and what the last sum of a chunk receives besides is `<S, dS>` with S the state after
it. Both are summed chunk by chunk: over a whole sequence they would cancel.
"""

from collections.abc import Iterator
from itertools import chain, groupby
from typing import NamedTuple

import torch

from ..common.chunks import Chunks, Segment
from ..common.decay import finite
from ..common.states import StateGradients, States, Workspace, dot, pairs


class ChunkGates(NamedTuple):
    """What the gates of some chunks, `[G, N, C]` in float64, leave.

    Attributes:
        sums: their running sums.
        before: `[G, N, C, 1]`, at each token of the state before the chunk.
        after: `[G, N, C, 1]`, of each token after the chunk.
        across: `[G, N, 1, 1]`, of the state before the chunk after it.
    """

    sums: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    across: torch.Tensor

    @classmethod
    def of(cls, log_gate: torch.Tensor, dtype: torch.dtype) -> "ChunkGates":
        sums = log_gate.cumsum(-1)
        last = sums[..., -1:]
        return cls(sums, *(x.exp().to(dtype)[..., None] for x in (sums, last - sums, last)))

    def part(self, here: slice) -> "ChunkGates":
        """Of some of the chunks."""
        return ChunkGates(*(x[:, here] for x in self))

    def within(self) -> torch.Tensor:
        """`[G N, 1, C, C]`: at token t of what token i has written, zero for i > t."""
        size = self.sums.shape[-1]
        apart = self.before.new_empty(*self.sums.shape, size)
        torch.sub(self.sums[..., :, None], self.sums[..., None, :], out=apart)
        return apart.clamp_(max=0).exp_().tril_().view(-1, 1, size, size)


class _AmongChunks:
    """Numbers of tokens, `[B, T, G, W]`, among the chunks of a call."""

    def __init__(self, x: torch.Tensor, chunks: Chunks):
        self.x, self.chunks = x, chunks

    def last(self, ranks: slice) -> torch.Tensor:
        """Of the last chunks of some documents, their tokens at the right end."""
        target = self.x.new_empty(self._shape(self.chunks.tails[ranks].numel()))
        self.chunks.read_last(self.x, ranks, target)
        return target[:, :, 0]

    def _shape(self, chunks: int) -> tuple[int, ...]:
        return self.x.shape[2], chunks, 1, self.chunks.size, self.x.shape[3]


class PerToken(_AmongChunks):
    """Numbers that are read with each segment; those of the last one asked for are kept."""

    def __init__(self, name: str, x: torch.Tensor, chunks: Chunks, workspace: Workspace):
        super().__init__(x, chunks)
        self.name, self.workspace = name, workspace
        self._now: tuple[int, ...] | None = None

    def of(self, segment: Segment) -> torch.Tensor:
        """`[G, N, C, W]`, until another segment is asked for."""
        target = self.workspace.tensor(self.name, self._shape(segment.chunks), self.x)
        if self._now != segment[:3]:
            self._now = segment[:3]
            self.chunks.read(self.x, segment, target)
        return target[:, :, 0]


class OnePerToken(_AmongChunks):
    """One number a token, `[B, T, G, 1]`: so few that those of all segments are read at once, `[G, chunks, C, 1]`."""

    def __init__(self, x: torch.Tensor, chunks: Chunks):
        super().__init__(x, chunks)
        target = x.new_empty(self._shape(sum(segment.chunks for segment in chunks.segments)))
        for block in _blocks(chunks):
            chunks.read(x, block, target[:, block.here])
        self.all = target[:, :, 0]

    def of(self, segment: Segment) -> torch.Tensor:
        return self.all[:, segment.here]


def tokens_of(chunks: Chunks, x: torch.Tensor) -> torch.Tensor:
    """The way back, from `[G, chunks, C]` to `[B T or more, G, 1]`."""
    out = chunks.empty(x, x.shape[0], 1)
    for block in _blocks(chunks):
        chunks.write(x[:, block.here, None, :, None], block, out)
    return out


def _blocks(chunks: Chunks) -> Iterator[Segment]:
    """The segments of each block as one."""
    for _, segments in groupby(chunks.segments, key=lambda segment: segment.block):
        first, *others = segments
        yield first._replace(lanes=tuple(chain(first.lanes, *(segment.lanes for segment in others))))


class TokenGates:
    """The gates of a call, `[B, T, G]`, among its chunks."""

    def __init__(self, log_gate: torch.Tensor, chunks: Chunks, dtype: torch.dtype):
        self.tokens, self.dtype = OnePerToken(finite(log_gate)[..., None], chunks), dtype
        self.all = ChunkGates.of(self.tokens.all[..., 0], dtype)
        self._now: tuple[slice, ChunkGates] | None = None

    def of(self, segment: Segment) -> ChunkGates:
        here = segment.here
        if self._now is None or self._now[0] != here:
            self._now = here, self.all.part(here)
        return self._now[1]

    def last(self, ranks: slice) -> ChunkGates:
        """Of the last chunks of some documents, their tokens at the right end."""
        return ChunkGates.of(self.tokens.last(ranks)[..., 0], self.dtype)


class GatedStates(States):
    """`States` of a call with gates, set before anything is asked for.

    Attributes:
        write: the factor of the inputs, None for 1.
        raw: the inputs of the segment that was asked for last, or of last chunks, without it.
    """

    gates: TokenGates
    write: OnePerToken | None = None
    raw: torch.Tensor
    entries: list[torch.Tensor | None] | None = None  # the states with which segments begin, where they are known
    _written: tuple[tuple[int, ...], torch.Tensor] | None = None

    def inputs(self, segment: Segment) -> torch.Tensor:
        self.raw = super().inputs(segment)
        if self.write is None:
            return self.raw
        gated = self.workspace.tensor(f"{self.name} gated", tuple(self.raw.shape), self.raw)
        return torch.mul(self.raw, self.write.of(segment), out=gated)

    def written(self, segment: Segment, inputs: torch.Tensor) -> torch.Tensor:
        name = segment[:3]  # on the way back a segment is asked for twice
        if self._written is None or self._written[0] != name:
            groups, chunks, size, width = inputs.shape
            left = self.workspace.tensor(f"{self.name} written", (groups, size, chunks, width), inputs).transpose(1, 2)
            self._written = name, torch.mul(inputs, self.gates.of(segment).after, out=left)
        return self._written[1]

    def across(self, segment: Segment) -> torch.Tensor:
        return self.tables.across * self.gates.of(segment).across

    def across_back(self, segment: Segment) -> torch.Tensor:
        return self.tables.across_back * self.gates.of(segment).across

    def _last(self, ranks: slice) -> tuple[torch.Tensor, torch.Tensor]:
        self.raw, decay = super()._last(ranks)
        gates = self.gates.last(ranks)
        return self._last_written(ranks) * gates.after, decay * gates.across

    def _last_written(self, ranks: slice) -> torch.Tensor:
        return self.raw if self.write is None else self.raw * self.write.last(ranks)


class Answering(NamedTuple):
    """What the chunks of a segment need for the delta rule.

    Attributes:
        delta: `[G, N, C, 1]`.
        weights: `[G N, C, C]`, A: what each earlier token of the chunk has written, in the answer to a key.
        inverse: `[G N, C, C]`, of I + A diag(delta).
        reader: `[G N, P C, 2M]`, all rows that read the states before the chunks, those of keys last; None where these
            are zero.
    """

    delta: torch.Tensor
    weights: torch.Tensor
    inverse: torch.Tensor
    reader: torch.Tensor | None


class DeltaStates(GatedStates):
    """Those of values from which what the state answers to their keys is taken before they are written.

    A walk fills what it finds by step, `[N G, ...]`: those of a step lie side by side, and few calls take them on.

    Attributes:
        answers: where they are known, inputs are what values write.
        known: those of the segment that was asked for last, `[G, N, C, W]`.
    """

    delta: OnePerToken
    answers: PerToken | None = None
    known: torch.Tensor

    def inputs(self, segment: Segment) -> torch.Tensor:
        found = super().inputs(segment)
        if self.answers is not None:
            self.known = self.answers.of(segment)
            found.addcmul_(self.delta.of(segment), self.known, value=-1)
        return found

    def _last_written(self, ranks: slice) -> torch.Tensor:
        found = super()._last_written(ranks)
        if self.answers is not None:
            found = torch.addcmul(found, self.delta.last(ranks), self.answers.last(ranks), value=-1)
        return found

    def answer(
        self, segment: Segment, values: torch.Tensor, entry: torch.Tensor | None, how: Answering
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`forward` of what values write, each chunk when the state before it is known.

        Args:
            values: `[G, N, C, W]`, overwritten with what they write.

        Returns:
            What the states answer to the keys, `[G, N, C, W]`, and what all rows read from those before their chunk,
            but for what gates leave of them, `[G, N, P C, W]`, None for zeros.
        """
        groups, size, shape = values.shape[0], self.chunks.size, values.shape[:2]
        count, states, gates = groups * segment.chunks, self._steps(segment, entry), self.gates.of(segment)
        within = self.workspace.product("within", how.weights, values.flatten(0, 1))
        inside, inverse, left, writes, delta, across = (
            steps_of(x, segment)
            for x in (
                within.unflatten(0, shape), how.inverse.unflatten(0, shape), gates.before,
                self.written(segment, values), how.delta * gates.after, self.across(segment),
            )
        )  # fmt: skip
        answers, table = values.new_empty(count, *values.shape[2:]), self.table(segment)
        before, answer = split_steps(states[:count], segment), split_steps(answers, segment)
        found = None
        if how.reader is not None:
            found = self.workspace.tensor("found", (count, how.reader.shape[1], values.shape[3]), values)
            reader, read = steps_of(how.reader.unflatten(0, shape), segment), split_steps(found, segment)
        for step, after in enumerate((*before[1:], states[count:])):
            known = inside[step]
            if found is not None:
                torch.bmm(reader[step], before[step].mT, out=read[step])
                known = torch.addcmul(known, left[step], read[step][:, -size:])
            torch.bmm(inverse[step], known, out=answer[step])
            going = after.shape[0]
            if going:
                write = torch.addcmul(writes[step], delta[step], answer[step], value=-1)
                torch.mul(pairs(before[step][:going]), across[step][:going], out=pairs(after))
                after.baddbmm_(write[:going].mT, table[:going])
        answers = by_group(answers, groups)
        values.addcmul_(how.delta, answers, value=-1)
        self.next_entry = by_group(states[count:], groups).contiguous() if segment.following else None
        if found is None:
            return answers, None
        self.keep_ends(segment, by_group(states[:count], groups))
        return answers, by_group(found, groups)

    def table(self, segment: Segment) -> torch.Tensor:
        """The table for each chunk of the first step of a segment, `[n G, C, 2M]`."""
        return self.tables.table.expand(segment.lanes[0], -1, -1, -1).flatten(0, 1)

    def _steps(self, segment: Segment, entry: torch.Tensor | None) -> torch.Tensor:
        """Room for the states before the chunks of a segment, by step, and behind it; the first ones are there."""
        groups, _, width, modes = self._shape(0)
        shape = groups * (segment.chunks + segment.following), width, modes
        states = self.workspace.tensor(f"{self.name} by step", shape, self.x)
        first = states[: groups * segment.lanes[0]]
        first.zero_() if entry is None else by_group(first, groups).copy_(entry)
        return states


def by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """What lies by step, `[N G, ...]`, as `[G, N, ...]`, a view."""
    return x.unflatten(0, (-1, groups)).transpose(0, 1)


def split_steps(x: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, ...]:
    """The steps of `[N G, ...]`, views."""
    return x.split([x.shape[0] // segment.chunks * lanes for lanes in segment.lanes])


def steps_of(x: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, ...]:
    """The steps of `[G, N, ...]`, each `[n G, ...]`: views where each is one chunk, else of a copy."""
    if segment.lanes[0] == 1:
        return x.unbind(1)
    return split_steps(x.transpose(0, 1).flatten(0, 1), segment)


class GatedStateGradients(StateGradients):
    """`StateGradients` that also say what the gates receive through the states.

    Attributes:
        of_across: `[G, N]`, what the last sums of the chunks of the segment walked last receive; None for zeros.
        through: `[G, N, C, W]`, what its inputs receive through the states, but for what gates leave of them.
    """

    states: GatedStates
    through: torch.Tensor

    def __init__(self, states: GatedStates, final: torch.Tensor | None):
        self.of_across: torch.Tensor | None = None
        self._last_gates: list[torch.Tensor] = []
        self._last_writes: list[torch.Tensor] = []
        super().__init__(states, final)

    def _entries(self) -> list[torch.Tensor | None]:
        known = self.states.entries
        return super()._entries() if known is None or self.states.ends is not None else known

    def _from_ends(self, ranks: slice) -> torch.Tensor:
        last, decay = self.states._last(ranks)
        gates = self.states.gates.last(ranks)
        grad, before = self.ends[:, ranks], self.states.ends[:, ranks]
        flat = grad.flatten(0, 1)
        self.of_table += torch.bmm(last.flatten(0, 1), flat).unflatten(0, last.shape[:2]).sum(1)
        of_decay = dot(before, grad, torch.empty_like(grad)).sum(2) * gates.across[..., 0]  # [G, n, M]
        self.of_powers.index_add_(1, self.states.chunks.tails[ranks], of_decay)
        of_last = torch.bmm(self.tables.repeated(last.shape[1]), flat.mT).view(last.shape)
        pairs(grad).mul_(decay.conj())
        of_sums = self._of_last_sums(last, of_last)
        powers = self.tables.powers[:, self.states.chunks.tails[ranks]]
        of_sums[..., -1] += self._of_across(last, of_last, of_decay, powers)
        self._last_gates.append(of_sums)
        return self._of_last_inputs(ranks, of_last * gates.after)

    def _of_last_inputs(self, ranks: slice, grad: torch.Tensor) -> torch.Tensor:
        """From the gradient of what last chunks write, `[G, n, C, W]`, to that of their inputs."""
        write = self.states.write
        if write is None:
            return grad
        self._last_writes.append((self.states.raw * grad).sum(-1))
        return grad * write.last(ranks)

    def _of_last_sums(self, last: torch.Tensor, of_last: torch.Tensor) -> torch.Tensor:
        """What the sums of last chunks receive as those of their tokens, `[G, n, C]`."""
        return -(last * of_last).sum(-1, dtype=torch.float64)

    def _walk(self, segment: Segment, grad: torch.Tensor | None, after: torch.Tensor) -> torch.Tensor | None:
        entry = super()._walk(segment, grad, after)
        table = self.tables.repeated(segment.chunks)
        self.through = self.workspace.product("through", table, after.flatten(0, 1).mT).unflatten(0, after.shape[:2])
        return entry

    def _sums(self, segment: Segment, inputs: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor) -> None:
        written = self.states.written(segment, inputs)
        self.of_table.baddbmm_(written.transpose(1, 2).flatten(2), after.flatten(1, 2))
        of_decay = None
        if before is not None:
            product = dot(after, before, out=after)  # its conjugate, in the place of what is read for the last time
            of_decay = product.sum(2).conj() * self.states.gates.of(segment).across[..., 0]
            self.of_powers[:, -1] += of_decay.sum(1)
        self.of_across = self._of_across(written, self.through, of_decay, self.tables.powers[:, -1:])

    def _of_across(self, written, through, of_decay: torch.Tensor | None, powers: torch.Tensor) -> torch.Tensor:
        """`<S, dS>` of the states after chunks, `[G, N]`, from what their inputs and the state before have given."""
        product = torch.mul(written, through, out=self.workspace.tensor("dot", tuple(through.shape), through))
        total = product.sum((-2, -1)).double()
        if of_decay is not None:
            total += (powers.conj() * of_decay).real.sum(-1)
        return total

    def finish_gates(self, of_gate: torch.Tensor, of_write: torch.Tensor | None) -> None:
        """Add what both gates receive from the final states to these, `[B T or more, G, 1]`."""
        of_gates = [of_sums.flip(-1).cumsum(-1).flip(-1) for of_sums in self._last_gates]
        for found, into in ((of_gates, of_gate), (self._last_writes, of_write)):
            for ranks, grad in zip(self.states._ranks(), found):
                self.states.chunks.add_last(grad[:, :, None, :, None].to(into.dtype), ranks, into)


class DeltaStateGradients(GatedStateGradients):
    """The same of `DeltaStates`, whose inputs are what has been written."""

    states: DeltaStates
    # Of the segment that is walked: how it answered; what was written receives but for the states, `[G, N, C, W]`; and
    # what reads of the state before receive, `[G N, P C, W]`, of which the walk fills those of keys; None for zeros.
    answered: tuple[Answering, torch.Tensor, torch.Tensor | None]
    of_answers: torch.Tensor  # what the answers of the segment walked last receive, `[G, N, C, W]`, but for its sign

    def __init__(self, states: DeltaStates, final: torch.Tensor | None):
        super().__init__(states, final)
        self.given: PerToken | None = None  # what was written receives through the final states
        if self._last_inputs:
            given = states.chunks.empty(states.x, *states.x.shape[2:]).zero_()
            for ranks, grad in zip(states._ranks(), self._last_inputs):
                states.chunks.add_last(grad[:, :, None], ranks, given)
            self.given = PerToken("given", states.chunks.finish(given), states.chunks, states.workspace)
            self._last_inputs = []

    def _of_last_sums(self, last: torch.Tensor, of_last: torch.Tensor) -> torch.Tensor:
        return of_last.new_zeros(of_last.shape[:-1], dtype=torch.float64)  # `given` is among their gradients

    def _of_last_inputs(self, ranks: slice, grad: torch.Tensor) -> torch.Tensor:
        return grad  # as above

    def of_written(self, segment: Segment, grad: torch.Tensor) -> None:
        """Add to the gradients `[G, N, C, W]` of what a segment has written those through the final states."""
        if self.given is not None:
            grad += self.given.of(segment)

    def _moves(self, segment: Segment) -> bool:
        return True

    def _walk(self, segment: Segment, grad: torch.Tensor | None, after: torch.Tensor) -> torch.Tensor | None:
        (how, given, grad_left), states, gates = self.answered, self.states, self.states.gates.of(segment)
        groups, shape, size = after.shape[0], given.shape[:2], given.shape[2]
        found, through, answers = (
            self.workspace.tensor(name, (groups * segment.chunks, *x.shape[2:]), x)
            for name, x in (("grad after by step", after), ("through by step", given), ("grad answers", given))
        )
        inverse = (how.inverse.unflatten(0, shape) * how.delta).mT
        writes, left, inverses, taken = (steps_of(x, segment) for x in (given, gates.after, inverse, -gates.before))
        later, reads, of_answers = (split_steps(x, segment) for x in (found, through, answers))
        table, entry = states.table(segment), None
        if how.reader is not None and grad_left is not None:
            entry = after.new_empty(groups * segment.lanes[0], *after.shape[2:])
            across, readers, rows = (
                steps_of(x, segment)
                for x in (
                    states.across_back(segment), how.reader.unflatten(0, shape),
                    grad_left.unflatten(0, shape),
                )
            )  # fmt: skip
        for step in reversed(range(len(later))):
            last, count = step + 1 == len(later), later[step].shape[0]
            going = groups * (segment.following if last else segment.lanes[step + 1])
            if going < count:
                later[step][going:] = 0
            if last and going:
                by_group(later[step][:going], groups).copy_(self.next_entry)
            torch.bmm(table[:count], later[step].mT, out=reads[step])
            torch.bmm(inverses[step], torch.addcmul(writes[step], reads[step], left[step]), out=of_answers[step])
            if entry is not None:
                into = later[step - 1][:count] if step else entry
                torch.mul(of_answers[step], taken[step], out=rows[step][:, -size:])
                torch.mul(pairs(later[step]), across[step], out=pairs(into))
                into.baddbmm_(rows[step].mT, readers[step])
                self._add_ends(segment, by_group(into, groups), going // groups)
        if entry is not None and segment.lanes[0] > 1:  # then `rows` may be copies
            of_keys = torch.cat([x[:, -size:] for x in rows])
            grad_left.unflatten(0, shape)[:, :, -size:] = by_group(of_keys, groups)
        after.copy_(by_group(found, groups))
        self.through, self.of_answers = by_group(through, groups), by_group(answers, groups)
        return None if entry is None else by_group(entry, groups)

    def _add_ends(self, segment: Segment, grad: torch.Tensor, going: int) -> None:
        """What final states give those before a step, `[G, n, W, 2M]`, of which all but `going` documents end."""
        if self.ends is not None and going < grad.shape[1]:
            grad[:, going:] += self.ends[:, segment.block + going : segment.block + grad.shape[1]]
