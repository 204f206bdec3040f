"""The two-pass identity as batched matrix products over chunks of C tokens, with its gradients written out.

Pulling the query through the key recurrence first gives an M-vector y_t; the coefficients turn it into p_t; p_t reads
the values. Both passes are linear attentions whose weights depend on the distance t - i only through lambda^(t - i):

    pass 1   y_t[n] = lambda_n^(t+1) (q_t . S^k[n]) + sum_{i<=t} (q_t . k_i) lambda_n^(t-i) beta_n
    pass 2   o_t    = Re sum_n conj(p_t[n]) lambda_n^(t+1) S^v[n] + sum_{j<=t} w_t(t-j) v_j,
             w_t(d) = Re sum_n conj(p_t[n]) lambda_n^d beta_n

with S the state before the chunk. Splitting lambda^(t-i) into lambda^t lambda^(-i) would need growing powers. Instead
the C x C scores are re-indexed from (t, i) to (t, t - i) by reading the same memory with another row stride
(`skew`), so that one table of decaying powers serves every row and nothing can overflow, whatever Delta and A become in
training.

Backward keeps nothing but the inputs. It walks the states once more, keeping one where a segment begins, and then takes
the segments from the last to the first, computing y and p again. The order of the chunks is that of
`ops/common/chunks.py`.

Layout inside a segment: groups G, then its chunks N, then the rows of a chunk, (heads per group P, C tokens). Complex
numbers are interleaved pairs, 2M real ones.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..common.chunks import Segment, chunks_of
from ..common.states import DecayTables, StateGradients, States, Workspace, dot, pairs
from ..diagonal.mixing import mixing_matrix

# Numbers of one M-wide intermediate of a segment. On a CPU the whole working set should stay in the second-level cache,
# and allocations small enough to be reused; on an accelerator launches count instead.
_SEGMENT_FLOATS = {"cpu": 1 << 19, "other": 1 << 24}


def tokens_per_segment(query: torch.Tensor, log_decay: torch.Tensor, more: int = 0) -> int:
    """For queries `[B, T, H, R]` and, on a CPU, `more` rows beside them a token."""
    on_cpu = query.device.type == "cpu"
    rows = query.shape[2] + (more if on_cpu else 0)
    return _SEGMENT_FLOATS["cpu" if on_cpu else "other"] // (2 * log_decay.shape[1] * rows)


class AttentionTables:
    """The tables that a call makes of the parameters, for chunks of one size.

    Attributes:
        decay: the powers of lambda.
        forth, back: complex `[G, 1, C, M]`, lambda^(t+1) and its conjugate.
        mixing: `[G, 2M, 2M]`.
    """

    def __init__(self, log_decay, input_matrix, coefficients, product: str, size: int):
        self.decay = DecayTables(log_decay, input_matrix, size, log_decay.dtype)
        self.forth = self.decay.powers[:, None, 1:].contiguous()
        self.back = self.forth.conj().resolve_conj()
        groups, modes = log_decay.shape[:2]
        self.mixing = mixing_matrix(coefficients, product, groups, modes, log_decay)


class AttentionCall:
    """One call in one real dtype: its tables, the layout of its chunks, and the memory that its segments share."""

    states_class: type[States] = States
    tables_class: type[AttentionTables] = AttentionTables
    more_rows = 0  # that a token brings beside its queries
    more_outputs = 0  # numbers behind the output of a head

    def __init__(
        self, query, key, value, log_decay, input_matrix, coefficients, initial, cu_seqlens, lengths, product: str,
        chunk_size: int, ends: bool, kept: dict[Hashable, Any] | None = None,
    ):  # fmt: skip
        batch, length, heads, feature_dim = query.shape
        self.query, self.groups, self.heads = query, key.shape[2], heads // key.shape[2]
        tokens = tokens_per_segment(query, log_decay, self.more_rows)
        self.chunks = chunks_of((batch, length), cu_seqlens, lengths, chunk_size, tokens, query.device)
        self.size = self.chunks.size
        make = partial(self.tables_class, log_decay, input_matrix, coefficients, product, self.size)
        about = self.tables_class, product, self.size, log_decay.dtype
        kept = {} if kept is None else kept
        found = kept.get("chunk", (None, None))  # read once: another thread may replace it
        if found[0] != about:  # only the last: there may be tables for many sizes
            found = kept["chunk"] = about, make()
        self.own = found[1]
        self.tables, self.mixing = self.own.decay, self.own.mixing
        self.forth, self.back, self.repeated = self.own.forth, self.own.back, self.tables.repeated
        self.workspace = Workspace()
        both = (None, None) if initial is None else initial.split([feature_dim, value.shape[3]], dim=-1)
        shared = self.chunks, self.tables
        self.keys = self.states_class("key", key, *shared, both[0], self.workspace, ends)
        self.values = self.states_class("value", value, *shared, both[1], self.workspace, ends)

    def rows(self, name: str, x: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Queries, or what else the heads have, `[B, T, H, W]`, as `[G N, P C, W]`, of which the last may be free."""
        shape = (self.groups, segment.chunks, self.heads, self.size, x.shape[3])
        target = self.workspace.tensor(name, shape, x)
        self.chunks.read(x, segment, target[:, :, : x.shape[2] // self.groups])
        return target.view(shape[0] * shape[1], shape[2] * shape[3], shape[4])

    def begin(self, segment: Segment, keys: torch.Tensor) -> torch.Tensor:
        """The rows of a segment, whose keys are `[G N, C, R]`."""
        return self.rows("rows", self.query, segment)

    def write(self, rows: torch.Tensor, segment: Segment, x: torch.Tensor) -> None:
        """The inverse of `rows`, written to x."""
        self.chunks.write(rows.view(self.groups, segment.chunks, -1, self.size, rows.shape[2]), segment, x)

    def by_group(self, x: torch.Tensor) -> torch.Tensor:
        """Rows `[G N, P C, W]` as `[G, N P C, W]`."""
        return x.view(self.groups, -1, x.shape[-1])

    def by_token(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of 2M real numbers as complex `[G, N P, C, M]`."""
        return pairs(x.view(self.groups, -1, self.size, x.shape[-1]))

    def skewed(self, scores: torch.Tensor, name: str) -> torch.Tensor:
        """`skew` of scores `[G N, P C, C]`, by group."""
        return self.by_group(skew(scores.view(-1, self.size, self.size), self.workspace, name))

    def unskewed(self, x: torch.Tensor) -> torch.Tensor:
        """`unskew`, the adjoint, as `[G N, P C, C]`."""
        found = unskew(x.view(-1, self.size, self.size), self.workspace, "unskew")
        return found.view(-1, self.heads * self.size, self.size)

    def reading(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows by which the states before their chunk are multiplied; `read_by` from then on."""
        self.read_by = rows
        return rows

    def add_read(self, rows: torch.Tensor, grad: torch.Tensor, states: torch.Tensor) -> None:
        """Add to the gradient of rows what that of their product with these states gives."""
        rows.baddbmm_(grad, states.mT)

    def pull(self, rows, keys, before, keep: bool):
        """Pass 1: skewed scores, the query times the state (with `keep`, else None), y and p; all `[G, N P C, ...]`."""
        skewed = self.skewed(self.workspace.product("scores", rows, keys.mT), "skew")
        raw = None
        if before is None:
            y = self.workspace.product("y", skewed, self.tables.table)
        else:
            raw = y = self.by_group(self.workspace.product("raw", self.reading(rows), before))
            if keep:
                y = self.workspace.tensor("y", tuple(raw.shape), raw)
            torch.mul(self.by_token(raw), self.forth, out=self.by_token(y))
            y.baddbmm_(skewed, self.tables.table)
        return skewed, raw, y, self.mixed(y)

    def mixed(self, y: torch.Tensor) -> torch.Tensor:
        """p of y."""
        return self.workspace.product("p", y, self.mixing)

    def weights(self, p: torch.Tensor) -> torch.Tensor:
        """Of the values in the chunk, `[G N, P C, C]`."""
        return self.unskewed(self.workspace.product("weights", p, self.tables.table.mT))

    def reader(self, p: torch.Tensor) -> torch.Tensor:
        """Of the states before the chunk, `[G N, P C, 2M]`, in the place of p."""
        self.by_token(p).mul_(self.back)
        return p.view(-1, self.heads * self.size, p.shape[-1])

    def forward(self, final: torch.Tensor | None) -> torch.Tensor:
        """The output; the final states are written over `final`, `[documents, G, 2, M, R + D]`."""
        streams = self.keys, self.values
        width = self.values.x.shape[3] + self.more_outputs
        output = self.chunks.empty(self.query, self.query.shape[2], width)
        for segment in self.chunks.segments:
            keys, values = (walk(s, segment, s.entry(segment)) for s in streams)
            rows = self.begin(segment, keys.inputs)
            self.write(self.attend(rows, keys, values), segment, output)
        self.write_final(final)
        return self.chunks.finish(output)

    def write_final(self, final: torch.Tensor | None) -> None:
        """The final states of keys and values, where they are wanted."""
        if final is not None:
            for stream, into in zip((self.keys, self.values), self._split(final), strict=True):
                stream.final(into)

    def attend(self, rows: torch.Tensor, keys: "Walked", values: "Walked") -> torch.Tensor:
        """The output of a segment, `[G N, P C, D]`."""
        *_, p = self.pull(rows, *keys, keep=False)
        output = self.workspace.product("output", self.weights(p), values.inputs)
        if values.before is not None:
            output.baddbmm_(self.reader(p), values.before.mT)
        return output

    def _split(self, states: torch.Tensor | None):
        """Key and value part."""
        if states is None:
            return None, None
        return states.split([self.keys.x.shape[3], self.values.x.shape[3]], dim=-1)

    def backward(self, grad_output: torch.Tensor, final: torch.Tensor | None, want_mixing: bool):
        """The gradients of query, key, value, `log_decay`, `input_matrix`, the mixing matrix and the initial states.

        Args:
            final: the gradient of the final states, None for zeros.
        """
        grads = self.gradients(grad_output, self._split(final), want_mixing)
        grads.segments()
        streams = grads.keys, grads.values
        of_table = grads.of_table + grads.keys.of_table + grads.values.of_table
        of_powers = grads.keys.of_powers + grads.values.of_powers
        of_powers[:, 1:] += grads.of_powers
        decay, inputs = (x.to(self.mixing.dtype) for x in self.tables.gradients(of_table, of_powers))
        parts = [stream.initial_states(part) for stream, part in zip(streams, self._split(final), strict=True)]
        initial = None if parts[0] is None else torch.cat(parts, dim=-1)
        tokens = self.chunks.finish(grads.query), *(stream.finish() for stream in streams)
        return *tokens, decay, inputs, grads.of_mixing, initial, *grads.others()

    def gradients(self, *arguments) -> "Gradients":
        return Gradients(self, *arguments)


class Walked(NamedTuple):
    """Keys or values in a segment: `inputs` `[G N, C, W]`, and the states before the chunks `[G N, W, 2M]`, None for
    zeros."""

    inputs: torch.Tensor
    before: torch.Tensor | None


class Gradients:
    """The backward pass of an `AttentionCall`, segment by segment from the last to the first."""

    def __init__(self, call: AttentionCall, grad_output: torch.Tensor, final, want_mixing: bool):
        self.call, self.grad_output, self.workspace = call, grad_output, call.workspace
        self.keys, self.values = (self.walked_back(s, g) for s, g in zip((call.keys, call.values), final))
        self.query = call.chunks.empty(call.query, *call.query.shape[2:])
        self.of_table = torch.zeros_like(call.tables.table)
        self.of_powers = torch.zeros_like(call.tables.powers[:, 1:])  # of lambda^(t+1)
        self.of_mixing = torch.zeros_like(call.mixing) if want_mixing else None

    def walked_back(self, states: States, final: torch.Tensor | None) -> StateGradients:
        return StateGradients(states, final)

    def others(self) -> tuple[torch.Tensor | None, ...]:
        """The gradients of what a call has beside, after the last segment."""
        return ()

    def segments(self) -> None:
        for index in reversed(range(len(self.call.chunks.segments))):
            self.segment(index)

    def segment(self, index: int) -> None:
        call, segment = self.call, self.call.chunks.segments[index]
        alone = segment._replace(following=0)  # the states with which the next one begins are known
        keys = walk(call.keys, alone, self.keys.starts[index])
        values = walk(call.values, alone, self.values.starts[index])
        rows = call.begin(segment, keys.inputs)
        grad = call.rows("grad output", self.grad_output, segment)
        self._through(segment, rows, keys, values, grad)

    def _through(self, segment: Segment, rows, keys: Walked, values: Walked, grad) -> None:
        """From the gradient of the output, `[G N, P C, D]`, to all gradients of the segment."""
        call = self.call
        pulled, raw, y, p = call.pull(rows, *keys, keep=True)
        of_p = self._second_pass(segment, grad, *values, p)
        if self.of_mixing is not None:
            self.of_mixing.baddbmm_(y.mT, of_p)
        of_y = self.workspace.product("grad y", of_p, call.mixing)  # a symmetric matrix
        self._first_pass(segment, rows, *keys, pulled, raw, of_y)

    def _second_pass(self, segment: Segment, grad, values, states, p) -> torch.Tensor:
        """From the gradient of the output, `[G N, P C, D]`, to those of the values and of p, `[G, N P C, 2M]`."""
        call, product = self.call, self.workspace.product
        of_values = product("grad values", call.weights(p).mT, grad)
        of_weights = call.skewed(product("scores", grad, values.mT), "grad skew")
        self.of_table.baddbmm_(of_weights.mT, p)
        of_p = product("grad p", of_weights, call.tables.table)
        of_states = None
        if states is not None:
            of_reader = call.by_group(product("grad reader", grad, states))
            call.by_token(of_p).addcmul_(call.by_token(of_reader), call.forth)
            self._decay(of_reader, p)
            of_states = self.values.before(segment)
            torch.bmm(grad.mT, call.reader(p), out=of_states.flatten(0, 1))
        self._inputs(self.values, segment, values, states, of_values, of_states)
        return of_p

    def _first_pass(self, segment: Segment, rows, keys, states, pulled, raw, of_y) -> None:
        """From the gradient of y to those of query and keys."""
        call, product = self.call, self.workspace.product
        self.of_table.baddbmm_(pulled.mT, of_y)
        of_scores = call.unskewed(product("weights", of_y, call.tables.table.mT))
        of_rows = product("grad rows", of_scores, keys)
        of_keys = product("grad keys", of_scores.mT, rows)
        of_states = None
        if states is not None:
            self._decay(raw, of_y)
            call.by_token(of_y).mul_(call.back)
            of_raw = of_y.view(rows.shape[0], rows.shape[1], -1)
            call.add_read(of_rows, of_raw, states)
            of_states = self.keys.before(segment)
            torch.bmm(call.read_by.mT, of_raw, out=of_states.flatten(0, 1))
        self._queries_and_keys(segment, rows, keys, states, of_rows, of_keys, of_states)

    def _queries_and_keys(self, segment: Segment, rows, keys, states, of_rows, of_keys, of_states) -> None:
        """Write their gradients, so far those within chunks, and of the states that rows have read."""
        self.call.write(of_rows, segment, self.query)
        self._inputs(self.keys, segment, keys, states, of_keys, of_states)

    def _inputs(self, stream: StateGradients, segment: Segment, inputs, before, grad, of_before) -> None:
        """Write the gradient of keys or values: `grad` `[G N, C, W]`, from their chunks, and that through states."""
        groups, chunks = self.call.groups, segment.chunks
        before = None if before is None else before.unflatten(0, (groups, chunks))
        after = stream.backward(segment, inputs.unflatten(0, (groups, chunks)), before, of_before)
        if after is not None:
            grad.baddbmm_(self.call.repeated(chunks), after.flatten(0, 1).to(grad.dtype).mT)
        self.call.chunks.write(grad.view(groups, chunks, 1, *grad.shape[1:]), segment, stream.x)

    def _decay(self, x: torch.Tensor, grad: torch.Tensor) -> None:
        """Add the gradient of lambda^(t+1), the factor of x, or of its conjugate, with x and grad exchanged.

        Overwrites x.
        """
        product = dot(x, grad, out=x)
        self.of_powers += product.unflatten(1, (-1, self.call.size)).sum(1)


def walk(states: States, segment: Segment, entry: torch.Tensor | None) -> Walked:
    inputs = states.inputs(segment)
    before = states.forward(segment, inputs, entry)
    return Walked(inputs.flatten(0, 1), None if before is None else before.flatten(0, 1))


def skew(x: torch.Tensor, workspace: Workspace, name: str) -> torch.Tensor:
    """`out[t, C-1-d] = x[t, t-d]` for d <= t, zero elsewhere; x `[batch, C, C]`.

    Each row gets a left margin of C zeros and C + 1 more at its end; then every row is read one element further: what
    was column i of row t becomes column i + C-1 - t.
    """
    batch, size, _ = x.shape
    stride = 2 * size + 1
    buffer = margins(x, workspace, name)
    buffer.as_strided((batch, size, size), (size * stride, 2 * size, 1), size).copy_(x)
    return buffer.as_strided((batch, size, size), (size * stride, stride, 1), 1)


def unskew(x: torch.Tensor, workspace: Workspace, name: str) -> torch.Tensor:
    """`out[t, i] = x[t, C-1-(t-i)]` for i <= t, zero above the diagonal: the inverse, and the adjoint, of `skew`."""
    batch, size, _ = x.shape
    stride = 2 * size  # all that is written ends just within C rows of this, so that rows of several chunks are even
    buffer = margins(x, workspace, name)
    buffer.as_strided((batch, size, size), (size * stride, stride + 1, 1), 1).copy_(x)
    return buffer.as_strided((batch, size, size), (size * stride, stride, 1), size)


def margins(x: torch.Tensor, workspace: Workspace, name: str) -> torch.Tensor:
    """A buffer with zeros in the margins; what is written between them always goes to the same places."""
    return workspace.tensor(name, (x.shape[0], x.shape[1] * (2 * x.shape[1] + 1)), x, zero=True)
