"""The matrix products over chunks with bfloat16 operands, for CPUs that multiply these several times as fast.

A product sums in float32 and rounds its result once. What is carried is never rounded: states, decays and sums over
chunks stay in float32, and so does what makes the tables. Two things differ from `op_interdomain_chunk_call`.

Within a chunk a query meets a key and a value only through the distances to both, so that between the skewed scores and
the skewed weights stands one matrix, and with the states before the chunk beside them one larger one:

    [skewed weights | p] = [skewed scores | y] [[T W T^T, T W], [W T^T, W]],   T the table, W the mixing matrix

in which y now holds only what comes from the states. The matrix is made in float32, from tables that were never
rounded, and two roundings in between are saved: a y of all keys is much larger than what W leaves of it, where C has
been made an inverse (the posterior start). For the same reason the columns of p have beside them what rounding their
matrix took away.
"""

import torch

from .op_common_chunks import Segment
from .op_common_states import Repeated, StateGradients, States, pairs
from .op_interdomain_chunk_call import AttentionCall, Gradients, Walked, skew, unskew


class NarrowStates(States):
    """Narrow inputs, states in the dtype of the tables; what products read of a state is narrow again."""

    def forward(self, segment: Segment, inputs: torch.Tensor, entry: torch.Tensor | None) -> torch.Tensor | None:
        before = state = None
        if entry is not None or len(segment.lanes) > 1:
            before = self.workspace.tensor(f"{self.name} before", self._shape(segment.chunks), inputs)
        if segment.following > 0 or len(segment.lanes) > 1:
            added = self._added(inputs)
        if entry is not None:
            state = entry.clone(memory_format=torch.contiguous_format)  # an earlier one is kept for the way back
        elif before is not None:
            state = self.tables.table.new_zeros(self._shape(segment.lanes[0]))
        first = segment.block
        for start, lanes, following in segment.moves():
            if before is not None:
                before[:, start : start + lanes] = state
                if self.ends is not None and following < lanes:
                    self.ends[:, first + following : first + lanes] = state[:, following:]
            if not following:
                break
            more = added[:, start : start + following]
            if state is None:
                state = more.clone()
            else:
                state = state[:, :following]
                torch.addcmul(pairs(more), self.tables.across, pairs(state), out=pairs(state))
        self.left = state if segment.following else None
        return before

    def _added(self, inputs: torch.Tensor) -> torch.Tensor:
        """What each chunk puts in, `[G, N, W, 2M]`."""
        wide = self.workspace.tensor(f"{self.name} wide", tuple(inputs.shape), self.tables.table).copy_(inputs)
        repeated = self.tables.repeated(inputs.shape[1])
        return self.workspace.product("added", wide.flatten(0, 1).mT, repeated).view(self._shape(inputs.shape[1]))


class NarrowCall(AttentionCall):
    """Query, keys and values in bfloat16, the rest in float32."""

    states_class = NarrowStates

    def __init__(self, query: torch.Tensor, *arguments):
        super().__init__(query, *arguments)
        table = self.tables.table
        self.modes = table.shape[2]
        self.repeated = Repeated(table.to(query.dtype))
        below = table @ self.mixing  # a symmetric matrix
        beside = torch.cat([below.mT, self.mixing], dim=-1)
        joint = torch.cat([torch.cat([below @ table.mT, below], dim=-1), beside], dim=-2)
        narrow = joint.to(query.dtype)
        rest = (joint - narrow)[..., self.size :].to(query.dtype)
        self.joint = torch.cat([narrow, rest], dim=-1)

    def gradients(self, *arguments) -> Gradients:
        return NarrowGradients(self, *arguments)

    def attend(self, rows: torch.Tensor, keys: Walked, values: Walked) -> torch.Tensor:
        pulled, _ = self.gather(rows, *keys)
        mixed = self.mix(pulled)
        output = self.workspace.product("output", self.near(mixed, "weights"), values.inputs)
        if values.before is not None:
            output.baddbmm_(self.turned_back(self.far(mixed, "p"), "reader"), values.before.mT)
        return output

    def gather(self, rows, keys, before) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[skewed scores | y]`, `[G, N P C, C + 2M]`, and the query times the state in float32, `[G, N P C, 2M]`."""
        scores = self.workspace.product("scores", rows, keys.mT)
        width = self.size if before is None else self.size + self.modes
        pulled = self.workspace.tensor("pulled", (*self.by_group(scores).shape[:2], width), rows)
        self.put_near(scores, pulled, "skew")
        if before is None:
            return pulled, None
        raw = self.by_group(self.wide("raw", self.workspace.product("narrow raw", rows, before)))
        y = self.workspace.tensor("y", tuple(raw.shape), raw)
        torch.mul(self.by_token(raw), self.forth, out=self.by_token(y))
        pulled[..., self.size :] = y
        return pulled, raw

    def mix(self, pulled: torch.Tensor) -> torch.Tensor:
        """`[skewed weights | p | the rest of p]`, `[G, N P C, C + 4M]`; without states the weights alone."""
        alone = pulled.shape[2] == self.size
        matrix = self.joint[:, : self.size, : self.size] if alone else self.joint
        return self.workspace.product("mixed", pulled, matrix)

    def put_near(self, scores: torch.Tensor, target: torch.Tensor, name: str) -> None:
        """Skew `[G N, P C, C]` into the first columns."""
        skewed = skew(scores.view(-1, self.size, self.size), self.workspace, name)
        self._first(target).copy_(skewed.unflatten(0, (self.groups, -1)))

    def near(self, mixed: torch.Tensor, name: str) -> torch.Tensor:
        """The first columns as they stand in the chunk, `[G N, P C, C]`."""
        straight = unskew(self._first(mixed).flatten(0, 1), self.workspace, "unskew")
        weights = self.workspace.tensor(name, tuple(straight.shape), straight).copy_(straight)
        return weights.view(-1, self.heads * self.size, self.size)

    def far(self, mixed: torch.Tensor, name: str) -> torch.Tensor:
        """The columns of the modes in float32, `[G, N P C, 2M]`."""
        narrow, rest = mixed[..., self.size :].chunk(2, dim=-1)
        return self.wide(name, narrow).add_(rest)

    def turned_back(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Columns of the modes times the conjugate of lambda^(t+1), in their place; narrow, `[G N, P C, 2M]`."""
        self.by_token(x).mul_(self.back)
        narrow = self.workspace.tensor(name, tuple(x.shape), self.query).copy_(x)
        return narrow.view(-1, self.heads * self.size, self.modes)

    def wide(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.workspace.tensor(name, tuple(x.shape), self.mixing).copy_(x)

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        """`[G, N P, C, C]`."""
        return x.unflatten(1, (-1, self.size))[..., : self.size]


class NarrowGradients(Gradients):
    """The backward pass of a `NarrowCall`."""

    call: NarrowCall

    def __init__(self, call: NarrowCall, *arguments):
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
        mixed = call.mix(pulled)

        of_values = product("grad values", call.near(mixed, "weights").mT, grad)
        of_mixed = self.workspace.tensor("grad mixed", tuple(pulled.shape), pulled)
        call.put_near(product("scores", grad, values.inputs.mT), of_mixed, "grad skew")
        of_states = None
        if raw is not None:
            p = call.far(mixed, "p")
            of_reader = call.by_group(call.wide("grad reader", product("narrow raw", grad, values.before)))
            self._decay(of_reader, p)
            call.by_token(of_reader).mul_(call.forth)
            of_mixed[..., call.size :] = of_reader
            of_states = self._states(self.values, segment, grad, call.turned_back(p, "reader"))
        self._inputs(self.values, segment, *values, of_values, of_states)

        width = pulled.shape[2]
        self.of_joint[:, :width, :width] += product("grad joint", pulled.mT, of_mixed)
        of_pulled = call.mix(of_mixed)  # a symmetric matrix
        of_scores = call.near(of_pulled, "weights")
        of_rows = product("grad rows", of_scores, keys.inputs)
        of_keys = product("grad keys", of_scores.mT, rows)
        of_states = None
        if raw is not None:
            of_y = call.far(of_pulled, "p")
            self._decay(raw, of_y)
            of_raw = call.turned_back(of_y, "reader")
            of_rows.baddbmm_(of_raw, keys.before.mT)
            of_states = self._states(self.keys, segment, rows, of_raw)
        call.write(of_rows, segment, self.query)
        self._inputs(self.keys, segment, *keys, of_keys, of_states)

    def _states(self, stream: StateGradients, segment: Segment, rows, readers) -> torch.Tensor:
        """The gradient of the states that `readers` have read for `rows`."""
        into = stream.before(segment)
        into.flatten(0, 1).copy_(self.workspace.product("grad states", rows.mT, readers))
        return into
