"""The selective scan, keeping only the states before chunks, as one opaque operator of `torch.library`.

    h_t = exp(dt_t A) h_{t-1} + B_t (x) (dt_t x_t),    y_t = C_t . h_t        (Mamba, arXiv 2312.00752, algorithm 2)

Every channel and state number has a decay of its own, so no matrix product joins tokens: a chunk computes its decays
and inputs at once and then goes through them in order, one operation a token, in memory that all chunks share. Backward
begins a chunk at the state before it, computes the others again, and goes back with
g_t = C_t (x) dy_t + exp(dt_{t+1} A) g_{t+1}:

    dC_t = h_t dy_t,  dB_t = g_t (dt_t x_t),  d(dt_t x_t) = B_t . g_t,  d(dt_t A) = exp(dt_t A) g_t h_{t-1}

Chunks begin at multiples of C, and where a packed document begins, so that the kept states have one shape whatever the
documents are. States are `[N, E]`, channels side by side in memory.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from ..common.cpu import wants_gradient
from ..common.custom_op import differentiable
from ..common.packing import state_rows
from ..common.states import Workspace, final_states

# Numbers of the states of a chunk; rows that do not fit are worked on one after the other.
_FLOATS = {"cpu": 1 << 21, "other": 1 << 25}
# Below this, exp comes near the smallest numbers of a dtype, with which a CPU computes a hundred times as slowly.
_GONE = {torch.float32: -80.0, torch.float64: -690.0}


def chunk_scan(
    query, key, value, step, rate, initial_state, cu_seqlens, chunk_size: int, output_final_state: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `selective_scan`, all in one real dtype, without a skip; the final states are empty unless wanted."""
    tensors = query, key, value, step, rate, initial_state
    return _operator(*tensors, cu_seqlens, chunk_size, output_final_state, wants_gradient(*tensors))[:2]


class _Document(NamedTuple):
    """Tokens `start` to `stop` of some `rows`, and which of all `states` are theirs."""

    rows: slice
    start: int
    stop: int
    states: slice

    def chunks(self, size: int) -> list[tuple[int, int]]:
        ends = [self.start, *range((self.start // size + 1) * size, self.stop, size), self.stop]
        return list(pairwise(ends))


class _ScanCall:
    """One call: its tensors, its documents, and the memory that its chunks share."""

    def __init__(self, query, key, value, step, rate, initial, cu_seqlens, size: int):
        self.query, self.key, self.value, self.step, self.rate = query, key, value, step, rate
        self.initial, self.ends, self.size = initial, None if cu_seqlens is None else cu_seqlens.tolist(), size
        self.workspace = Workspace()

    def documents(self) -> Iterator[_Document]:
        """Those that have a token."""
        batch, length = self.value.shape[:2]
        if self.ends is not None:
            for number, (start, stop) in enumerate(pairwise(self.ends)):
                if start < stop:
                    yield _Document(slice(0, 1), start, stop, slice(number, number + 1))
            return
        floats = _FLOATS["cpu" if self.value.device.type == "cpu" else "other"]
        rows = max(1, floats // (min(self.size, length) * self.rate.numel()))
        for first in range(0, batch, rows):
            some = slice(first, min(first + rows, batch))
            yield _Document(some, 0, length, some)

    def before(self, document: _Document) -> torch.Tensor:
        """The states before the first token, `[r, N, E]`."""
        if self.initial is not None:
            return self.initial[document.states]
        return self.value.new_zeros(document.rows.stop - document.rows.start, *self.rate.shape)

    def room(self, name: str, *shape: int) -> torch.Tensor:
        return self.workspace.tensor(name, shape, self.value)

    def read(self, name: str, document: _Document, chunk: tuple[int, int], x: torch.Tensor) -> torch.Tensor:
        """Tokens `[B, T, W]` of a chunk as `[c, r, W]`."""
        tokens = x[document.rows, slice(*chunk)].transpose(0, 1)
        return self.room(name, *tokens.shape).copy_(tokens)

    def scan(self, document: _Document, chunk: tuple[int, int], entry: torch.Tensor) -> "_Chunk":
        """Scan a chunk, beginning with the states `entry` before it."""
        key, value, step = (self.read(n, document, chunk, getattr(self, n)) for n in ("key", "value", "step"))
        inputs = torch.mul(value, step, out=self.room("inputs", *value.shape))
        shape = *step.shape[:2], *self.rate.shape
        decays = torch.mul(step[:, :, None], self.rate, out=self.room("decays", *shape))
        decays.clamp_(min=_GONE[decays.dtype]).exp_()
        states = self.room("states", shape[0] + 1, *shape[1:])
        states[0].copy_(entry)
        torch.mul(key[..., None], inputs[:, :, None], out=states[1:])
        before, *others = states.unbind()
        for decay, state in zip(decays.unbind(), others):
            before = state.addcmul_(decay, before)
        return _Chunk(key, value, step, inputs, decays, states)

    def forward(self, final: torch.Tensor | None, kept: torch.Tensor | None) -> torch.Tensor:
        """The output `[B, T, E]`; the final states and those before the chunks are written where there is room."""
        output = _like(self.value)
        for document in self.documents():
            state = self.before(document)
            for chunk in document.chunks(self.size):
                if kept is not None and chunk[0] % self.size == 0:
                    kept[document.rows, chunk[0] // self.size] = state
                states = self.scan(document, chunk, state).states
                query = self.read("query", document, chunk, self.query)
                y = self.workspace.product("output", query.flatten(0, 1)[:, None], states[1:].flatten(0, 1))
                output[document.rows, slice(*chunk)] = y.view(*query.shape[:2], -1).transpose(0, 1)
                state = states[-1]
            if final is not None:
                final[document.states] = state
        return output

    def backward(self, kept: torch.Tensor, grad: torch.Tensor, final: torch.Tensor | None):
        """The gradients of query, key, value, step, rate and initial states; an empty document has its final's."""
        of_rate = torch.zeros_like(self.rate)
        found = _Gradients(_like(self.query), _like(self.key), _like(self.value), _like(self.step), of_rate)
        initial = None
        if self.initial is not None:
            initial = torch.zeros_like(self.initial) if final is None else final.clone()
        for document in self.documents():
            after = self.value.new_zeros(document.rows.stop - document.rows.start, *self.rate.shape)
            if final is not None:
                after.copy_(final[document.states])
            for chunk in reversed(document.chunks(self.size)):
                inside = chunk[0] % self.size
                entry = self.before(document) if inside else kept[document.rows, chunk[0] // self.size]
                self._chunk_backward(document, chunk, entry, grad, after, found)
            if initial is not None:
                initial[document.states] = after
        return (*found, initial)

    def _chunk_backward(self, document, chunk, entry, grad, after: torch.Tensor, found: "_Gradients") -> None:
        """`after` is the gradient of the states after the chunk, and becomes that of those before it."""
        key, value, step, inputs, decays, states = self.scan(document, chunk, entry)
        query, grad = self.read("query", document, chunk, self.query), self.read("grad", document, chunk, grad)
        grads = torch.mul(query[..., None], grad[:, :, None], out=self.room("grads", *decays.shape))
        later, *earlier = reversed(grads.unbind())
        later.add_(after)
        for decay, here in zip(reversed(decays.unbind()), earlier):
            later = here.addcmul_(decay, later)
        torch.mul(decays[0], grads[0], out=after)

        product, flat, shape = self.workspace.product, grads.flatten(0, 1), step.shape
        of_query = product("grad query", states[1:].flatten(0, 1), grad.flatten(0, 1)[..., None])
        of_key = product("grad key", flat, inputs.flatten(0, 1)[..., None])
        of_inputs = product("grad inputs", key.flatten(0, 1)[:, None], flat).view(shape)
        of_exponents = decays.mul_(grads).mul_(states[:-1])
        found.rate.add_(torch.mul(of_exponents, step[:, :, None], out=grads).sum((0, 1)))
        of_step = torch.sum(of_exponents.mul_(self.rate), 2).addcmul_(value, of_inputs)
        for into, x in (
            (found.query, of_query.view(query.shape)),
            (found.key, of_key.view(key.shape)),
            (found.value, of_inputs.mul_(step)),
            (found.step, of_step),
        ):
            into[document.rows, slice(*chunk)] = x.transpose(0, 1)


class _Chunk(NamedTuple):
    """Key `[c, r, N]`; value, step and their product `[c, r, E]`; decays `[c, r, N, E]`; states `[c + 1, r, N, E]`."""

    key: torch.Tensor
    value: torch.Tensor
    step: torch.Tensor
    inputs: torch.Tensor
    decays: torch.Tensor
    states: torch.Tensor


class _Gradients(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    step: torch.Tensor
    rate: torch.Tensor


def _like(x: torch.Tensor) -> torch.Tensor:
    """Contiguous room for as much, as the compiled graph expects it."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: torch.Tensor, rate: torch.Tensor,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, size: int, output_final_state: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    call = _ScanCall(query, key, value, step, rate, initial_state, cu_seqlens, size)
    of_documents, of_chunks = _shapes(value, rate, cu_seqlens, size, output_final_state, keep)
    final, kept = final_states(value, of_documents, output_final_state, initial_state), value.new_zeros(of_chunks)
    output = call.forward(final if output_final_state else None, kept if keep else None)
    return output, final, kept


def _outputs(query, key, value, step, rate, initial_state, *how):
    final, kept = _shapes(value, rate, *how)
    return value.new_empty(value.shape), value.new_empty(final), value.new_empty(kept)


def _shapes(value, rate, cu_seqlens, size: int, output_final_state: bool, keep: bool):
    """The shapes of the final states and of those before the chunks."""
    batch, length = value.shape[:2]
    final = (state_rows(value, cu_seqlens), *rate.shape) if output_final_state else (0,)
    return final, (batch, (length + size - 1) // size, *rate.shape) if keep else (0,)


def _backward(inputs, grads, needs):
    *arguments, _, _, kept = inputs
    return _ScanCall(*arguments).backward(kept, *grads[:2])


_operator = differentiable(__name__, "scan", _forward, _outputs, _backward, count=6, kept=(2,))
