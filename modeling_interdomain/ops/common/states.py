"""The states around chunks, forwards and backwards: `S <- lambda^C S + sum_i lambda^(C-1-i) beta (x) u_i`.

Shared by the operators that work on chunks. Complex numbers are interleaved pairs, 2M real ones. No autograd: the
gradients are written out.
"""

import math
from collections.abc import Iterator

import torch

from .chunks import Chunks, Segment
from .decay import as_complex, decay_powers


class Workspace(dict):
    """Named buffers that the segments of one call use in turn: of each its views by their shapes, the whole by ()."""

    def tensor(self, name: str, shape: tuple[int, ...], like: torch.Tensor, zero: bool = False) -> torch.Tensor:
        """Uninitialised; with `zero` it is zeros at first, and then what its last user left in it."""
        views = self.setdefault(name, {})
        if shape not in views:
            count = math.prod(shape)
            whole = views.get(())
            if whole is None or whole.numel() < count:
                views.clear()
                views[()] = whole = like.new_zeros(count) if zero else like.new_empty(count)
            views[shape] = whole[:count].view(shape)
        return views[shape]

    def product(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """`a @ b` over a batch."""
        return torch.bmm(a, b, out=self.tensor(name, (*a.shape[:2], b.shape[2]), a))


def pairs(x: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs `[..., 2M]` as complex numbers `[..., M]`, the same memory."""
    return x.view(x.dtype.to_complex())


def dot(x: torch.Tensor, grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`conj(x) grad` as complex numbers, the gradient of a factor of x. All are pairs; `out` is written to."""
    return torch.conj_physical(pairs(x), out=pairs(out)).mul_(pairs(grad))


def final_states(like: torch.Tensor, shape: tuple[int, ...], wanted: bool, initial: torch.Tensor | None):
    """Room for the states after the last tokens, empty unless `wanted`; they begin as the initial states."""
    if not wanted:
        return like.new_empty(0)
    final = like.new_zeros(shape)
    return final if initial is None else final.copy_(initial)


class Repeated:
    """A table `[G, ...]` repeated for N chunks, `[G N, ...]`, since batched products take no strides of zero."""

    def __init__(self, table: torch.Tensor):
        self.table = self.last = table[:, None]

    def __call__(self, count: int) -> torch.Tensor:
        last = self.last
        if last.shape[1] != count:
            self.last = last = self.table.repeat(1, count, 1, 1)
        return last.flatten(0, 1)


class DecayTables:
    """Powers of lambda up to C, computed in float64.

    Attributes:
        table: `[G, C, 2M]`, lambda^(C-1-j) beta at row j.
        powers: complex `[G, C + 1, M]`, lambda^j.
        repeated: `table` for several chunks.
    """

    def __init__(self, log_decay: torch.Tensor, input_matrix: torch.Tensor, size: int, dtype: torch.dtype):
        self.wide_powers = decay_powers(log_decay, torch.arange(size + 1, device=log_decay.device))
        self.wide_inputs = as_complex(input_matrix.to(torch.float64))[:, None]
        table = self.wide_powers[:, :-1].flip(1) * self.wide_inputs
        self.table = torch.view_as_real(table).flatten(2).to(dtype)
        self.powers = self.wide_powers.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
        self.across = self.powers[:, -1, None, None]
        self.across_back = self.across.conj().resolve_conj()
        self.repeated = Repeated(self.table)

    def gradients(self, of_table: torch.Tensor, of_powers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of `log_decay` and `input_matrix`, `[G, M, 2]` in float64, from those of `table` and `powers`.

        With lambda^j = exp(j z), where z has the two numbers of `log_decay`: dz = conj(j lambda^j) d(lambda^j).
        """
        of_table = pairs(of_table.to(torch.float64)).flip(1)
        back = self.wide_powers.conj()
        of_inputs = (back[:, :-1] * of_table).sum(1)
        total = of_powers.to(torch.complex128)
        total[:, :-1] += of_table * self.wide_inputs.conj()
        exponents = torch.arange(back.shape[1], device=back.device, dtype=torch.float64)
        of_decay = (exponents[:, None] * back * total).sum(1)
        return torch.view_as_real(of_decay), torch.view_as_real(of_inputs)


class States:
    """The states that inputs (keys, or values) leave, segment after segment.

    Args:
        name: of the inputs, for the workspace.
        x: `[B, T, G, W]`, in the dtype of the tables but for `Bf16States`.
        initial: `[documents, G, 2, M, W]`, or None for zeros.
        ends: whether the final states are wanted.
    """

    def __init__(
        self,
        name: str,
        x: torch.Tensor,
        chunks: Chunks,
        tables: DecayTables,
        initial: torch.Tensor | None,
        workspace: Workspace,
        ends: bool,
    ):
        self.name, self.x, self.chunks, self.tables, self.workspace = name, x, chunks, tables, workspace
        self.documents = None if initial is None else initial.shape[0]
        self.initial = None if initial is None else self._by_rank(initial)
        self.next_entry: torch.Tensor | None = None  # the states with which the next segment begins
        # The states before the last chunk of every document, by rank.
        self.ends = tables.table.new_zeros(self._shape(chunks.documents)) if ends else None

    def _shape(self, count: int) -> tuple[int, ...]:
        return self.x.shape[2], count, self.x.shape[3], self.tables.table.shape[2]

    def _by_rank(self, states: torch.Tensor) -> torch.Tensor:
        """`[documents, G, 2, M, W]` to `[G, S', W, 2M]`."""
        if self.chunks.order is not None:
            states = states.index_select(0, self.chunks.order)
        states = states.permute(1, 0, 4, 3, 2)
        return states.clone(memory_format=torch.contiguous_format).flatten(3)  # pairs side by side, whatever came

    def by_document(self, states: torch.Tensor, into: torch.Tensor) -> None:
        """The inverse, written over `into`; documents without a token keep what is there."""
        states = states.unflatten(3, (-1, 2)).permute(1, 0, 4, 3, 2)
        if self.chunks.order is None:
            into.copy_(states)
        else:
            into.index_copy_(0, self.chunks.order, states)

    def inputs(self, segment: Segment) -> torch.Tensor:
        """The tokens of a segment, `[G, N, C, W]`."""
        groups, width = self.x.shape[2:]
        shape = (groups, segment.chunks, 1, self.chunks.size, width)
        target = self.workspace.tensor(f"{self.name} inputs", shape, self.x)
        self.chunks.read(self.x, segment, target)
        return target[:, :, 0]

    def entry(self, segment: Segment) -> torch.Tensor | None:
        """The states with which a segment begins, `[G, lanes, W, 2M]`; None for zeros."""
        if segment.step:
            return self.next_entry
        lanes = slice(segment.block, segment.block + segment.lanes[0])
        return None if self.initial is None else self.initial[:, lanes]

    def written(self, segment: Segment, inputs: torch.Tensor) -> torch.Tensor:
        """The inputs `[G, N, C, W]` of a segment as they enter the states after their chunks, but for the decay."""
        return inputs

    def across(self, segment: Segment) -> torch.Tensor:
        """The factor of a state across each chunk of a segment, complex `[G, N, 1, M]`."""
        return self.tables.across.expand(-1, segment.chunks, -1, -1)

    def across_back(self, segment: Segment) -> torch.Tensor:
        """Its conjugate."""
        return self.tables.across_back.expand(-1, segment.chunks, -1, -1)

    def forward(self, segment: Segment, inputs: torch.Tensor, entry: torch.Tensor | None) -> torch.Tensor | None:
        """The states before the chunks of a segment, `[G, N, W, 2M]`; None for zeros."""
        before = added = None
        if entry is not None or len(segment.lanes) > 1:
            before = self.workspace.tensor(f"{self.name} before", self._shape(segment.chunks), inputs)
            first = before[:, : segment.lanes[0]]
            first.zero_() if entry is None else first.copy_(entry)
        if segment.following or len(segment.lanes) > 1:
            # Of all chunks at once: products written into parts of `before` would run matrix by matrix.
            written, repeated = self.written(segment, inputs), self.tables.repeated(segment.chunks)
            added = self.workspace.product("added", written.flatten(0, 1).mT, repeated)
            added = added.view(self._shape(segment.chunks))
        self.next_entry = inputs.new_empty(self._shape(segment.following)) if segment.following else None
        terms, known = (None if x is None else pairs(x) for x in (added, before))
        across = None if before is None else self.across(segment)
        for index, (start, lanes, following) in enumerate(segment.moves()):
            if not following:
                break
            last, here = index + 1 == len(segment.lanes), slice(start, start + following)
            after = self.next_entry if last else before[:, start + lanes : start + lanes + following]
            if before is None:
                after.copy_(added[:, here])
            else:
                torch.addcmul(terms[:, here], across[:, here], known[:, here], out=pairs(after))
        if before is None:
            return None
        self.keep_ends(segment, before)
        return before

    def keep_ends(self, segment: Segment, before: torch.Tensor) -> None:
        """What `final` will need of the states before the chunks of a segment."""
        if self.ends is not None:
            for (start, lanes, following), ranks in _endings(segment):
                self.ends[:, ranks] = before[:, start + following : start + lanes]

    def final(self, into: torch.Tensor) -> None:
        """Write the states after the last tokens over `into`, `[documents, G, 2, M, W]`, where there are tokens."""
        for ranks in self._ranks():
            last, decay = self._last(ranks)
            added = torch.bmm(last.flatten(0, 1).mT, self.tables.repeated(last.shape[1]))
            ends = self.ends[:, ranks]
            pairs(ends).mul_(decay).add_(pairs(added.view(ends.shape)))
        self.by_document(self.ends, into)

    def _ranks(self) -> Iterator[slice]:
        """A few documents at a time."""
        for start in range(0, self.chunks.documents, self.chunks.lanes):
            yield slice(start, min(start + self.chunks.lanes, self.chunks.documents))

    def _last(self, ranks: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The last chunks `[G, n, C, W]` with the last token in the last row; lambda^tail, complex `[G, n, 1, M]`."""
        tails = self.chunks.tails[ranks]
        target = self.x.new_empty(self.x.shape[2], tails.numel(), 1, self.chunks.size, self.x.shape[3])
        self.chunks.read_last(self.x, ranks, target)
        return target[:, :, 0].to(self.tables.table.dtype), self.tables.powers[:, tails][:, :, None]


def _endings(segment: Segment) -> Iterator[tuple[tuple[int, int, int], slice]]:
    for move in segment.moves():
        _, lanes, following = move
        if following < lanes:
            yield move, slice(segment.block + following, segment.block + lanes)


class StateGradients:
    """The backward pass of `States`: from the gradients of the states before the chunks to those of inputs, tables and
    initial states.

    Args:
        final: the gradient of the final states, `[documents, G, 2, M, W]`, or None for zeros.
    """

    def __init__(self, states: States, final: torch.Tensor | None):
        self.states, self.tables, self.workspace = states, states.tables, states.workspace
        chunks = states.chunks
        self.x = chunks.empty(states.x, *states.x.shape[2:])
        self.of_table = torch.zeros_like(self.tables.table)
        self.of_powers = torch.zeros_like(self.tables.powers)
        self.initial = None if states.initial is None else torch.zeros_like(states.initial)
        self.next_entry: torch.Tensor | None = None  # the gradient of those with which the segment behind begins
        self.ends = None if final is None else states._by_rank(final)
        self.starts = self._entries()
        self._last_inputs = [] if final is None else [self._from_ends(ranks) for ranks in states._ranks()]
        states.ends = None

    def _entries(self) -> list[torch.Tensor | None]:
        """The states with which segments begin, from a walk that leaves what final states need, too."""
        states, starts = self.states, []
        for segment in states.chunks.segments:
            starts.append(states.entry(segment))
            if segment.following or states.ends is not None:
                states.forward(segment, states.inputs(segment), starts[-1])
            else:
                states.next_entry = None
        return starts

    def _from_ends(self, ranks: slice) -> torch.Tensor:
        """Take the gradients of final states to the states before the last chunks; returns that of the last inputs."""
        last, decay = self.states._last(ranks)
        grad = self.ends[:, ranks]
        rows, flat = last.flatten(0, 1), grad.flatten(0, 1)
        self.of_table += torch.bmm(rows, flat).unflatten(0, (-1, last.shape[1])).sum(1)
        before = self.states.ends[:, ranks]
        of_decay = dot(before, grad, torch.empty_like(grad)).sum(2)
        self.of_powers.index_add_(1, self.states.chunks.tails[ranks], of_decay)
        of_last = torch.bmm(self.tables.repeated(last.shape[1]), flat.mT).view(last.shape)
        pairs(grad).mul_(decay.conj())
        return of_last

    def before(self, segment: Segment) -> torch.Tensor:
        """Room for the gradient of the states before the chunks of a segment, `[G, N, W, 2M]`."""
        return self.workspace.tensor("grad before", self.states._shape(segment.chunks), self.tables.table)

    def backward(
        self, segment: Segment, inputs: torch.Tensor, before: torch.Tensor | None, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Walk a segment back.

        Args:
            inputs, before: what `States` gave.
            grad: of `before`, None like it; overwritten.

        Returns:
            The gradient of the states after the chunks, `[G, N, W, 2M]`, None for zeros.
        """
        if grad is not None and self.ends is not None:
            for (start, lanes, following), ranks in _endings(segment):
                grad[:, start + following : start + lanes] += self.ends[:, ranks]
        after, entry = None, grad
        if self._moves(segment):
            after = self.workspace.tensor("grad after", self.states._shape(segment.chunks), self.tables.table)
            entry = self._walk(segment, grad, after)
            self._sums(segment, inputs, before, after)
        self.next_entry = None
        if segment.step:
            self.next_entry = entry.clone() if entry is grad else entry
        elif self.initial is not None:
            self.initial[:, segment.block : segment.block + segment.lanes[0]] = entry
        return after

    def _moves(self, segment: Segment) -> bool:
        """Whether there are states after a chunk of a segment."""
        return segment.following > 0 or len(segment.lanes) > 1

    def _walk(self, segment: Segment, grad: torch.Tensor | None, after: torch.Tensor) -> torch.Tensor | None:
        """Fill `after`; returns the gradient of the states with which the segment begins."""
        moves = list(segment.moves())
        entry = None
        if grad is not None:
            entry = torch.empty_like(grad[:, : segment.lanes[0]].contiguous())
            earlier, across, later = pairs(grad), self.states.across_back(segment), pairs(after)
        for index in reversed(range(len(moves))):
            start, lanes, following = moves[index]
            if index + 1 == len(moves) and following:
                after[:, start : start + following] = self.next_entry
            if following < lanes:
                after[:, start + following : start + lanes] = 0
            if grad is None:
                break
            here = slice(start, start + lanes)
            into = later[:, moves[index - 1][0] :][:, :lanes] if index else pairs(entry)
            torch.addcmul(earlier[:, here], across[:, here], later[:, here], out=into)
        return entry

    def _sums(self, segment: Segment, inputs: torch.Tensor, before: torch.Tensor | None, after: torch.Tensor) -> None:
        """Add to the gradients of the table and of lambda^C."""
        found = self.workspace.product("grad tables", inputs.flatten(0, 1), after.flatten(0, 1).to(inputs.dtype))
        self.of_table += found.view(*after.shape[:2], *found.shape[1:]).sum(1, dtype=self.of_table.dtype)
        if before is not None:
            product = self.workspace.tensor("decay product", tuple(before.shape), after)
            dot(before.to(after.dtype), after, product)
            self.of_powers[:, -1] += pairs(product.flatten(1, 2).sum(1))

    def finish(self) -> torch.Tensor:
        """The gradient of the inputs `[B, T, G, W]`, after the last segment."""
        for ranks, grad in zip(self.states._ranks(), self._last_inputs):
            self.states.chunks.add_last(grad[:, :, None].to(self.x.dtype), ranks, self.x)
        return self.states.chunks.finish(self.x)

    def initial_states(self, final: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of the initial states `[documents, G, 2, M, W]`, for an empty document that of its final one."""
        if self.initial is None:
            return None
        documents = self.states.documents
        groups, _, width, pairs_of_modes = self.initial.shape
        shape = (documents, groups, 2, pairs_of_modes // 2, width)
        found = self.initial.new_zeros(shape) if final is None else final.clone()
        self.states.by_document(self.initial, found)
        return found
