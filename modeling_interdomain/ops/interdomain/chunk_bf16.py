"""`ops/interdomain/chunk_call.py` with bfloat16 operands, for CPUs that multiply these several times as fast.

A product sums in float32 and rounds its result once. States, decays, sums over chunks and the making of tables stay in
float32. Passes 1 and 2 are joined: weights within a chunk depend on the scores through distances alone, so one matrix
makes skewed weights of skewed scores, and a larger one also takes in the states before the chunk and gives p:

    [skewed weights | p] = [skewed scores | y] [[T W T^T, T W], [W T^T, W]],   T the table, W the mixing matrix

Here y holds only what comes from the states. The matrix is made in float32 and rounded once; y and p of the chunk's own
keys are never rounded. That matters where C is the inverse of a Gramian (the posterior start): y is then much larger
than what W leaves of it. For the same reason the columns for p have a second term, what rounding took from the first.
"""

import torch

from ..common.chunks import Segment
from ..common.states import Repeated, StateGradients, States, pairs
from .chunk_call import AttentionCall, AttentionTables, Gradients, Walked


class Bf16States(States):
    """`States` of bfloat16 inputs, in the dtype of the tables but for copies in bfloat16 that products read."""

    def forward(self, segment: Segment, inputs: torch.Tensor, entry: torch.Tensor | None) -> torch.Tensor | None:
        before, state = None, entry
        if entry is not None or len(segment.lanes) > 1:
            before = self.workspace.tensor(f"{self.name} before", self._shape(segment.chunks), inputs)
        first = segment.block
        for start, lanes, following in segment.moves():
            if before is not None:
                before[:, start : start + lanes] = 0 if state is None else state
                if self.ends is not None and following < lanes and state is not None:
                    self.ends[:, first + following : first + lanes] = state[:, following:]
            if not following:
                break
            # The backward pass needs the states with which a segment begins.
            state = self._moved(state, inputs[:, start : start + following], in_place=state is not entry)
        self.next_entry = state if segment.following else None
        return before

    def _moved(self, state: torch.Tensor | None, inputs: torch.Tensor, in_place: bool) -> torch.Tensor:
        """States `[G, N, W, 2M]`, None for zeros, after one more chunk `[G, n, C, W]` of the first n <= N documents."""
        shape = self._shape(inputs.shape[1])
        wide = self.workspace.tensor("wide inputs", tuple(inputs.shape), self.tables.table).copy_(inputs)
        wide, table = wide.flatten(0, 1).mT, self.tables.repeated(inputs.shape[1])
        if state is None:
            return torch.bmm(wide, table).view(shape)
        if in_place and state.shape == shape:
            pairs(state).mul_(self.tables.across)
        else:
            before, state = state[:, : inputs.shape[1]], state.new_empty(shape)
            torch.mul(pairs(before), self.tables.across, out=pairs(state))
        state.flatten(0, 1).baddbmm_(wide, table)
        return state


class Bf16Tables(AttentionTables):
    """The tables of a `Bf16Call`, in bfloat16 where products read them.

    Attributes:
        repeated: the table of powers.
        to_near, to_far: the columns of the joint matrix for the skewed weights and for p, `[G, C + 2M, C]` and `[...,
            2M]`.
        rest_to_far: what rounding took away from `to_far`.
    """

    def __init__(self, log_decay: torch.Tensor, *arguments):
        super().__init__(log_decay, *arguments)
        table, narrow = self.decay.table, torch.bfloat16
        self.repeated = Repeated(table.to(narrow))
        below = table @ self.mixing  # a symmetric matrix
        self.to_near = torch.cat([below @ table.mT, below.mT], dim=-2).to(narrow)
        far = torch.cat([below, self.mixing], dim=-2)
        self.to_far = far.to(narrow)
        self.rest_to_far = far.sub_(self.to_far.to(far.dtype)).to(narrow)


class Bf16Call(AttentionCall):
    """Query, keys and values in bfloat16, the rest in float32."""

    states_class = Bf16States
    tables_class = Bf16Tables
    own: Bf16Tables

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.modes, self.repeated = self.tables.table.shape[2], self.own.repeated
        self.to_near, self.to_far, self.rest_to_far = self.own.to_near, self.own.to_far, self.own.rest_to_far

    def gradients(self, *arguments) -> Gradients:
        return Bf16Gradients(self, *arguments)

    def attend(self, rows: torch.Tensor, keys: Walked, values: Walked) -> torch.Tensor:
        pulled, _ = self.gather(rows, *keys)
        output = self.workspace.product("output", self.near(pulled), values.inputs)
        if values.before is not None:
            output.baddbmm_(self.reader(self.turned(self.far(pulled), self.back)), values.before.mT)
        return output

    def gather(self, rows, keys, before) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[skewed scores | y]`, `[G, N P C, C + 2M]`, and the query times the state, `[G, N P C, 2M]`."""
        scores = self.workspace.product("scores", rows, keys.mT)
        if before is None:
            return self.skewed(scores, "pulled")[..., : self.size], None
        raw = self.by_group(self.workspace.product("raw", rows, before))
        pulled = self.skewed(scores, "pulled")
        pulled[..., self.size :] = self.turned(raw, self.forth)
        return pulled, raw

    def skewed(self, scores: torch.Tensor, name: str) -> torch.Tensor:
        """`[G N, P C, C]` skewed in the first columns of `[G, N P C, C + 2M]`; the other columns are to be overwritten.

        Rows are written one element less far apart than they are read, so that column i of row t becomes column
        i + C-1 - t; what is above the diagonal falls into the other columns.
        """
        size, width = self.size, max(self.size + self.modes, 2 * self.size - 1)
        rows = self.workspace.tensor(
            name, (self.groups, scores.numel() // (self.groups * size), width), scores, zero=True
        )
        scores = scores.view(-1, size, size)
        rows.as_strided(scores.shape, (size * width, width - 1, 1), size - 1).copy_(scores)
        return rows[..., : size + self.modes]

    def near(self, pulled: torch.Tensor) -> torch.Tensor:
        """The weights of the values in the chunk, `[G N, P C, C]`: `skewed` the other way round, from rows that have
        zeros on their right."""
        size = self.size
        rows = self.workspace.tensor("near", (*pulled.shape[:2], 2 * size), pulled, zero=True)
        torch.bmm(pulled, self.to_near[:, : pulled.shape[2]], out=rows[..., :size])
        weights = self.workspace.tensor("weights", (rows.numel() // (2 * size * size), size, size), rows)
        weights.copy_(rows.as_strided(weights.shape, (2 * size * size, 2 * size - 1, 1), size - 1))
        return weights.view(-1, self.heads * size, size)

    def far(self, pulled: torch.Tensor) -> torch.Tensor:
        """p, `[G, N P C, 2M]`."""
        return self.workspace.product("p", pulled, self.rest_to_far).baddbmm_(pulled, self.to_far)

    def turned(self, x: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
        """`[G, N P C, 2M]` times powers of lambda, in float32."""
        x = self.wide("turned", x)
        self.by_token(x).mul_(powers)
        return x

    def reader(self, p: torch.Tensor) -> torch.Tensor:
        """Rows that multiply the states before their chunks: in bfloat16, `[G N, P C, 2M]`."""
        narrow = self.workspace.tensor("reader", tuple(p.shape), self.query).copy_(p)
        return narrow.view(-1, self.heads * self.size, self.modes)

    def wide(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.workspace.tensor(name, tuple(x.shape), self.mixing).copy_(x)


class Bf16Gradients(Gradients):
    """The backward pass of a `Bf16Call`."""

    call: Bf16Call

    def __init__(self, call: Bf16Call, *arguments):
        super().__init__(call, *arguments)
        width = call.size + call.modes
        self.of_joint = call.mixing.new_zeros(call.groups, width, width)

    def segments(self) -> None:
        super().segments()
        call = self.call
        ones = torch.eye(call.modes, dtype=call.mixing.dtype, device=call.mixing.device)
        both = torch.cat([call.tables.table.mT, ones.expand(call.groups, -1, -1)], dim=-1)  # joint = both^T W both
        of_both = call.mixing @ both @ (self.of_joint + self.of_joint.mT)
        self.of_table += of_both[..., : call.size].mT
        if self.of_mixing is not None:
            self.of_mixing += both @ self.of_joint @ both.mT

    def _through(self, segment: Segment, rows, keys: Walked, values: Walked, grad) -> None:
        call, product = self.call, self.workspace.product
        pulled, raw = call.gather(rows, *keys)
        of_values = product("grad values", call.near(pulled).mT, grad)
        of_mixed = call.skewed(product("scores", grad, values.inputs.mT), "grad mixed")[..., : pulled.shape[2]]
        of_states = None
        if raw is not None:
            p = call.wide("wide p", call.far(pulled))
            of_reader = call.wide("grad reader", call.by_group(product("narrow grad reader", grad, values.before)))
            of_mixed[..., call.size :] = call.turned(of_reader, call.forth)
            self._decay(of_reader, p)
            of_states = self._states(self.values, segment, grad, call.reader(call.turned(p, call.back)))
        self._inputs(self.values, segment, *values, of_values, of_states)

        width = pulled.shape[2]
        self.of_joint[:, :width, :width] += product("grad joint", pulled.mT, of_mixed)
        of_scores = call.near(of_mixed)  # the joint matrix is symmetric
        of_rows = product("grad rows", of_scores, keys.inputs)
        of_keys = product("grad keys", of_scores.mT, rows)
        of_states = None
        if raw is not None:
            of_y = call.wide("grad y", call.far(of_mixed))
            self._decay(call.wide("wide raw", raw), of_y)
            of_raw = call.reader(call.turned(of_y, call.back))
            of_rows.baddbmm_(of_raw, keys.before.mT)
            of_states = self._states(self.keys, segment, rows, of_raw)
        call.write(of_rows, segment, self.query)
        self._inputs(self.keys, segment, *keys, of_keys, of_states)

    def _states(self, stream: StateGradients, segment: Segment, rows, readers) -> torch.Tensor:
        """The gradient of the states that `readers` have read for `rows`."""
        into = stream.before(segment)
        into.flatten(0, 1).copy_(self.workspace.product("grad states", rows.mT, readers))
        return into
