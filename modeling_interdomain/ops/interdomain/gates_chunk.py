"""Gates of time and the delta rule as batched matrix products over chunks, as one opaque operator of `torch.library`.

As `ops/interdomain/chunk_call.py`, with two changes.

Gates (`ops/interdomain/gates_states.py`): scores and weights within a chunk are multiplied by exp(c_t - c_i), rows that
read the state before it by exp(c_t). The write gate is a factor of keys and values, taken as a chunk reads them.

The delta rule: the key of token t reads like one more query of its group, before its own token is there. With A the
weights of its chunk's earlier tokens and r_t what the state S^v before the chunk answers,

    a_t = sum_{j<t} A[t, j] u_j + r_t,   u_t = v_t - delta_t a_t,   (I + A diag(delta)) a = A V + R S^v

in which A and the readers R need keys and gates alone: the inverses and A V are computed for many chunks at once. The
walk over the states has a product for what all rows read from a state, one for the answers a, and one for the state
after. The answers are kept for the backward pass beside the inputs: there the states are those of known values.
"""

from typing import Any

import torch

from ..common.chunks import Segment, later_lanes
from ..common.cpu import wants_gradient
from ..common.custom_op import differentiable
from ..common.decay import LEAST
from ..common.states import final_states
from ..diagonal.mixing import mixing_gradient
from .chunk import state_shape
from .chunk_call import AttentionCall, Gradients, Walked, margins, tokens_per_segment, walk
from .gates_states import (
    Answering,
    DeltaStateGradients,
    DeltaStates,
    GatedStateGradients,
    GatedStates,
    OnePerToken,
    PerToken,
    TokenGates,
    tokens_of,
)
from .unit_triangular import inverses

# The largest chunk with the delta rule on a CPU: each token costs a row of queries more, and half of that grows with
# the chunk. On an accelerator launches count instead, some for each chunk.
_DELTA_CHUNK = 32


def gated_chunk_attention(
    query, key, value, log_decay, input_matrix, coefficient_matrix, product: str, initial_state, cu_seqlens, lengths,
    chunk_size: int, output_final_state: bool, log_gate, write_gate, delta,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `chunk_attention`, in one real dtype but for the gates, which may be in any.

    Args:
        log_gate: `[B, T, G]`, None for zeros.
        write_gate: `[B, T, G]`, None for ones.
        delta: `[B, T, G]`, None without the delta rule.
    """
    if delta is not None and key.device.type == "cpu":
        chunk_size = min(chunk_size, _DELTA_CHUNK)
    if log_gate is None:
        log_gate = key.new_zeros(key.shape[:3])
    if write_gate is not None:
        write_gate = write_gate.to(key.dtype)
    tensors = (
        query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, log_gate, write_gate, delta,
    )  # fmt: skip
    keep = wants_gradient(*tensors)
    return _operator(*tensors, cu_seqlens, lengths, product, chunk_size, output_final_state, keep)[:2]


class GatedCall(AttentionCall):
    """An `AttentionCall` with gates of time, and with `delta` one more row of queries a group, that of the keys."""

    states_class = DeltaStates
    keys: GatedStates
    values: DeltaStates
    answers: torch.Tensor  # `[B, T, G, D]`, what `forward` finds

    def __init__(
        self, query, key, value, *arguments, log_gate: torch.Tensor, write_gate: torch.Tensor | None,
        delta: torch.Tensor | None, kept: torch.Tensor, answers: torch.Tensor | None = None,
    ):  # fmt: skip
        self.kept = kept  # for the backward pass, `entries`
        super().__init__(query, key, value, *arguments)
        self.gates = self.keys.gates = self.values.gates = TokenGates(log_gate, self.chunks, key.dtype)
        self.queries, self.delta = self.heads * self.size, None
        if write_gate is not None:
            self.keys.write = self.values.write = OnePerToken(write_gate[..., None], self.chunks)
        if delta is not None:
            self.delta = self.values.delta = OnePerToken(delta.to(key.dtype)[..., None], self.chunks)
            self.heads += 1
        if answers is not None:
            self.know(answers)

    def know(self, answers: torch.Tensor) -> None:
        """From now on the values are what they write, with these answers `[B, T, G, D]`."""
        self.values.answers = PerToken("answers", answers, self.chunks, self.workspace)

    def entries(self, kept: torch.Tensor) -> dict[Segment, tuple[torch.Tensor, ...]]:
        """Where in what is kept, `[n, G, R + D, 2M]`, the states of keys and of values are with which segments begin.

        Each `[G, lanes, W, 2M]`, of the segments that go on from others.
        """
        later = [segment for segment in self.chunks.segments if segment.step and kept.numel()]
        parts = kept.split([segment.lanes[0] for segment in later]) if later else ()
        widths = [self.keys.x.shape[3], self.values.x.shape[3]]
        return {segment: part.transpose(0, 1).split(widths, dim=2) for segment, part in zip(later, parts)}

    def begin(self, segment: Segment, keys: torch.Tensor) -> torch.Tensor:
        """The rows of a segment whose gates count from here on, with the delta rule those of its keys behind them."""
        rows = self.rows("rows", self.query, segment)
        if self.delta is not None:
            rows[:, self.queries :] = keys
        self.now = self.gates.of(segment)
        self.within = self.now.within()
        return rows

    def left(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Rows `[G N, P C, W]` times what is left of the state before their chunk, written to `out`."""
        torch.mul(self._by_chunk(x), self.now.before[:, :, None], out=self._by_chunk(out))
        return out

    def add_read(self, rows: torch.Tensor, grad: torch.Tensor, states: torch.Tensor) -> None:
        self.add_left(rows, self.workspace.product("raw rows", grad, states.mT))

    def add_left(self, rows: torch.Tensor, x: torch.Tensor) -> None:
        """Add the same to other rows."""
        self._by_chunk(rows).addcmul_(self._by_chunk(x), self.now.before[:, :, None])

    def _by_chunk(self, rows: torch.Tensor) -> torch.Tensor:
        """`[G N, P C, W]`, or with two axes of its chunks, as `[G, N, P, C, W]`."""
        return rows.view(self.groups, -1, rows.shape[-2] // self.size, self.size, rows.shape[-1])

    def skewed(self, scores: torch.Tensor, name: str) -> torch.Tensor:
        """`skew` of scores `[G N, P C, C]` times what the gates leave, `[G, N P C, C]`; no key meets its own token."""
        size = self.size
        stride = 2 * size + 1
        buffer = margins(scores.view(-1, size, size), self.workspace, name)
        shape = (scores.shape[0], self.heads, size, size)
        steps = (self.heads * size * stride, size * stride)
        torch.mul(scores.view(shape), self.within, out=buffer.as_strided(shape, (*steps, 2 * size, 1), size))
        out = buffer.as_strided(shape, (*steps, stride, 1), 1)
        if self.delta is not None:
            out[:, -1, :, -1] = 0
        return self.by_group(out.flatten(0, 1))

    def unskewed(self, x: torch.Tensor) -> torch.Tensor:
        """The adjoint of `skewed`, `[G N, P C, C]`: rows that are read one element less far apart than they stand.

        Behind the diagonal each reads on in the next one, times zero.
        """
        size = self.size
        shape = (self.within.shape[0], self.heads, size, size)
        out = self.workspace.tensor("unskew", shape, x)
        strides = (self.heads * size * size, size * size, size - 1, 1)
        torch.mul(x.as_strided(shape, strides, x.storage_offset() + size - 1), self.within, out=out)
        if self.delta is not None:
            out[:, -1].diagonal(dim1=-2, dim2=-1).zero_()
        return out.flatten(1, 2)

    def reading(self, rows: torch.Tensor) -> torch.Tensor:
        return super().reading(self.left(rows, self.workspace.tensor("rows left", tuple(rows.shape), rows)))

    def reader(self, p: torch.Tensor) -> torch.Tensor:
        """Of the states before the chunk, beside p, `[G N, P C, 2M]`; what is left of these is for what was read."""
        out = self.workspace.tensor("reader", tuple(p.shape), p)
        torch.mul(self.by_token(p), self.back, out=self.by_token(out))
        return out.view(-1, self.heads * self.size, p.shape[-1])

    def forward(self, final: torch.Tensor | None) -> torch.Tensor:
        """As before; with the delta rule the answers are then known."""
        output = self.chunks.empty(self.query, self.query.shape[2], self.values.x.shape[3])
        if self.delta is not None:
            self.answers = self.chunks.empty(self.values.x, *self.values.x.shape[2:])
        kept = self.entries(self.kept)
        for segment in self.chunks.segments:
            for stream, entry in zip((self.keys, self.values), kept.get(segment, ())):
                entry.copy_(stream.entry(segment))
            keys = walk(self.keys, segment, self.keys.entry(segment))
            rows = self.begin(segment, keys.inputs)
            *_, p = self.pull(rows, *keys, keep=False)
            weights, reader = self.weights(p), None if keys.before is None else super().reader(p)
            values, found = self.written(segment, weights, reader)
            outputs = self.workspace.product("output", weights[:, : self.queries], values)
            if found is not None:
                self.add_left(outputs, found[..., : self.queries, :])
            self.write(outputs, segment, output)
        if self.delta is not None:
            self.answers = self.chunks.finish(self.answers)
            self.know(self.answers)
        self.write_final(final)
        return self.chunks.finish(output)

    def gradients(self, *arguments) -> Gradients:
        kept = self.entries(self.kept)
        for index, stream in enumerate((self.keys, self.values) if kept else ()):
            stream.entries = [kept[s][index] if s.step else stream.entry(s) for s in self.chunks.segments]
        return GatedGradients(self, *arguments)

    def written(self, segment: Segment, weights: torch.Tensor, reader: torch.Tensor | None):
        """The values of a segment `[G N, C, W]`, with the delta rule what is written of them, and what all rows read
        from the states before their chunk, None for zeros."""
        entry = self.values.entry(segment)
        if self.delta is None:
            values, before = walk(self.values, segment, entry)
            return values, None if before is None else self.workspace.product("output left", reader, before.mT)
        values = self.values.inputs(segment)
        answers, found = self.values.answer(segment, values, entry, self.answering(segment, weights, reader))
        self.chunks.write(answers[:, :, None], segment, self.answers)
        return values.flatten(0, 1), found

    def answering(self, segment: Segment, weights: torch.Tensor, reader: torch.Tensor | None) -> Answering:
        """From the weights `[G N, P C, C]` and readers `[G N, P C, 2M]` of a segment, of which keys have the last."""
        delta = self.delta.of(segment)
        weights = weights[:, self.queries :]
        return Answering(delta, weights, inverses(weights * delta.flatten(0, 1).mT), reader)


class GatedGradients(Gradients):
    """The backward pass of a `GatedCall`, whose inputs are what was written."""

    call: GatedCall
    keys: GatedStateGradients
    of_sums: torch.Tensor  # what the running sums of a segment's gates receive, `[G, N, C]`
    values: DeltaStateGradients

    def __init__(self, call: GatedCall, *arguments):
        super().__init__(call, *arguments)
        # By chunk, `[G, chunks, C]`: what running sums, write gate and delta receive.
        self.sums = torch.empty_like(call.gates.all.sums)
        self.write, self.delta = (
            None if x is None else torch.empty_like(x.all[..., 0]) for x in (call.keys.write, call.delta)
        )

    def walked_back(self, states: Any, final: torch.Tensor | None) -> GatedStateGradients:
        answers = self.call.delta is not None and states is self.call.values
        return (DeltaStateGradients if answers else GatedStateGradients)(states, final)

    def _through(self, segment: Segment, rows, keys: Walked, values: Walked, grad) -> None:
        call = self.call
        pulled, raw, y, p = call.pull(rows, *keys, keep=True)
        self._values(segment, values, grad, p)
        of_p = self._second_pass(segment, grad, *values, p)
        if self.of_mixing is not None:
            self.of_mixing.baddbmm_(y.mT, of_p)
        of_y = self.workspace.product("p", of_p, call.mixing)  # a symmetric matrix
        self._first_pass(segment, rows, *keys, pulled, raw, of_y)
        for stream in (self.keys, self.values):
            if stream.of_across is not None:
                self.of_sums[..., -1] += stream.of_across
        self.sums[:, segment.here] = self.of_sums
        if self.write is not None:
            self.write[:, segment.here] = self.of_write

    def _through_write(self, stream: GatedStateGradients, segment: Segment, grad: torch.Tensor) -> torch.Tensor | None:
        """From the gradient of what keys or values write, `[G N, C, W]`, to theirs, in its place; returns that of the
        write gate, `[G, N, C]`, None without one."""
        states = stream.states
        if states.write is None:
            return None
        found = grad.view(states.raw.shape)
        product = torch.mul(states.raw, found, out=self.workspace.tensor("dot", tuple(found.shape), found))
        found.mul_(states.write.of(segment))
        return product.sum(-1)

    def _values(self, segment: Segment, values: Walked, grad: torch.Tensor, p: torch.Tensor) -> None:
        """The gradient of the values, and in `grad` of what they answered to the keys."""
        call, queries, product = self.call, slice(0, self.call.queries), self.workspace.product
        weights, reader = call.weights(p), None if values.before is None else call.reader(p)
        of_values = product("grad values", weights[:, queries].mT, grad[:, queries])
        if reader is not None:
            self.grad_left = self.workspace.tensor("grad left", tuple(grad.shape), grad)
            left = call.left(grad[:, queries], self.grad_left[:, queries])
        if self.delta is not None:
            self._answers(segment, values, weights, reader, of_values, grad)
        else:
            of_states = None
            if reader is not None:
                of_states = self.values.before(segment)
                torch.bmm(left.mT, reader, out=of_states.flatten(0, 1))
            self._moved(self.values, segment, *values, of_values, of_states)
        self.of_sums = -self._dot(values.inputs, of_values)
        self.of_write = self._through_write(self.values, segment, of_values)
        call.write(of_values, segment, self.values.x)

    def _answers(self, segment: Segment, values: Walked, weights, reader, of_values, grad) -> None:
        """From the gradient of what was written, so far as outputs tell, to that of the values, in its place."""
        call, own = self.call, slice(self.call.queries, None)
        shape = call.groups, segment.chunks
        of_values = of_values.unflatten(0, shape)
        self.values.of_written(segment, of_values)
        how = call.answering(segment, weights, reader)
        self.values.answered = how, of_values, None if reader is None else self.grad_left
        self._walked(self.values, segment, *values, None)
        torch.neg(self.values.of_answers, out=grad[:, own].unflatten(0, shape))
        of_values.addcmul_(self.values.through, call.now.after)
        of_values.flatten(0, 1).baddbmm_(how.weights.mT, grad[:, own])
        torch.neg((of_values * call.values.known).sum(-1), out=self.delta[:, segment.here])

    def _second_pass(self, segment: Segment, grad, values, states, p) -> torch.Tensor:
        """From the gradient of what was read, `[G N, P C, D]`, to that of p, `[G, N P C, 2M]`."""
        call, product = self.call, self.workspace.product
        of_weights = call.skewed(product("scores", grad, values.mT), "grad skew")
        self.of_table.baddbmm_(of_weights.mT, p)
        of_p = product("reader", of_weights, call.tables.table)
        if states is not None:
            of_reader = call.by_group(product("grad before", self.grad_left, states))
            call.by_token(of_p).addcmul_(call.by_token(of_reader), call.forth)
            self._decay(of_reader, p)
        return of_p

    def _queries_and_keys(self, segment: Segment, rows, keys, states, of_rows, of_keys, of_states) -> None:
        call = self.call
        self._moved(self.keys, segment, keys, states, of_keys, of_states)
        self.of_sums += 2 * self._dot(rows, of_rows) - self._dot(keys, of_keys)
        call.write(of_rows[:, : call.queries], segment, self.query)
        if self.delta is not None:
            of_keys += of_rows[:, call.queries :]
        if self.of_write is not None:
            self.of_write += self._through_write(self.keys, segment, of_keys)
        call.write(of_keys, segment, self.keys.x)

    def _moved(self, stream: GatedStateGradients, segment: Segment, inputs, before, grad, of_before) -> None:
        """Add to the gradient of keys or values within the chunk, `[G N, C, W]`, that through the states."""
        after = self._walked(stream, segment, inputs, before, of_before)
        if after is not None:
            grad.addcmul_(stream.through.flatten(0, 1), self.call.now.after.flatten(0, 1))

    def _walked(self, stream: GatedStateGradients, segment: Segment, inputs, before, of_before) -> torch.Tensor | None:
        shape = (self.call.groups, segment.chunks)
        before = None if before is None else before.unflatten(0, shape)
        stream.of_across = None
        return stream.backward(segment, inputs.unflatten(0, shape), before, of_before)

    def _dot(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """What rows `[G N, P C, W]` and their gradients have in common, `[G, N, C]`, in float64."""
        product = torch.mul(x, grad, out=self.workspace.tensor("dot", tuple(x.shape), grad))
        return product.sum(-1).view(self.call.groups, -1, x.shape[1] // self.call.size, self.call.size).sum(2).double()

    def others(self) -> tuple[torch.Tensor | None, ...]:
        """Those of `log_gate`, `write_gate` and `delta`, `[B, T, G]`."""
        gates = self.sums.flip(-1).cumsum(-1).flip(-1)
        chunks, by_chunk = self.call.chunks, (gates, self.write, self.delta)
        log_gate, write, _ = found = [None if x is None else tokens_of(chunks, x) for x in by_chunk]
        for stream in (self.keys, self.values):
            stream.finish_gates(log_gate, write)
        return tuple(None if x is None else chunks.finish(x)[..., 0] for x in found)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None, initial_state: torch.Tensor | None, log_gate: torch.Tensor,
    write_gate: torch.Tensor | None, delta: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None, product: str, chunk_size: int, output_final_state: bool, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    kept = _room_for_entries(query, key, value, log_decay, cu_seqlens, lengths, chunk_size, keep)
    inputs = query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state
    call = GatedCall(
        *inputs, cu_seqlens, lengths, product, chunk_size, output_final_state, log_gate=log_gate,
        write_gate=write_gate, delta=delta, kept=kept,
    )  # fmt: skip
    shape = state_shape(query, key, value, log_decay, cu_seqlens)
    final = final_states(log_decay, shape, output_final_state, initial_state)
    output = call.forward(final if output_final_state else None)
    return output, final, value.new_empty(0) if delta is None else call.answers, kept


def _outputs(query, key, value, log_decay, input_matrix, coefficients, initial_state, log_gate, write, delta, *rest):
    cu_seqlens, lengths, _, chunk_size, wanted, keep = rest
    output = query.new_empty((*query.shape[:3], value.shape[3]))
    shape = state_shape(query, key, value, log_decay, cu_seqlens) if wanted else (0,)
    kept = _room_for_entries(query, key, value, log_decay, cu_seqlens, lengths, chunk_size, keep)
    return output, log_decay.new_empty(shape), value.new_empty(0 if delta is None else value.shape), kept


def _room_for_entries(query, key, value, log_decay, cu_seqlens, lengths, chunk_size: int, keep: bool) -> torch.Tensor:
    """What `GatedCall.entries` takes; empty for documents, which cut segments as they come: they are walked again.

    Args:
        keep: whether there may be a backward pass.
    """
    later = 0
    if keep and cu_seqlens is None and lengths is None:
        later = later_lanes(query.shape[:2], chunk_size, tokens_per_segment(query, log_decay))
    return key.new_empty(later, key.shape[2], key.shape[3] + value.shape[3], 2 * log_decay.shape[1])


def _backward(inputs, grads, needs):
    query, key, value, *parameters, initial_state, log_gate, write_gate, delta = inputs[:10]
    *options, answers, kept = inputs[10:]
    call = GatedCall(
        query, key, value, *parameters, initial_state, *options[:-2], grads[1] is not None, log_gate=log_gate,
        write_gate=write_gate, delta=delta, kept=kept, answers=None if delta is None else answers,
    )  # fmt: skip
    *found, mixing, initial, of_gate, of_write, of_delta = call.backward(*grads[:2], needs[5])
    of_gate = of_gate.masked_fill_(log_gate < LEAST, 0).to(log_gate.dtype)
    of_delta = None if delta is None else of_delta.to(delta.dtype)
    of_coefficients = mixing_gradient(parameters[2], options[2], mixing) if needs[5] else None
    return *found, of_coefficients, initial, of_gate, of_write, of_delta


_operator = differentiable(__name__, "gated_attention", _forward, _outputs, _backward, count=10, kept=(2, 3))
