"""State space duality as matrix products over chunks of C tokens, as one opaque operator of `torch.library`.

Inside a chunk, with s the running sum of the log decays, L_ij = exp(s_i - s_j) for j <= i, and S the state before it:

    Y = ((Q K^T) o L) U + exp(s) (Q S^T),    S_next = exp(s_end) S + sum_j exp(s_end - s_j) u_j k_j^T

(Mamba-2, arXiv 2405.21060, section 6). No exponent is positive where no decay is above 1, so nothing overflows. The
sums are float64: after a single decay of -1e4, sums in float32 leave the later ones without their digits.

Backward keeps the inputs alone. The gradient of the log decay of token t is the sum of all that crosses it: of the
pairs (i, j) within a chunk those with j < t <= i, what the state before the chunk gives to t and later, and what the
tokens before t give to the state after it. Only these terms are summed, not a larger sum minus the rest: where t
forgets nearly everything the difference would be nothing but rounding.

Documents, pads and the order of the chunks are those of `ops/common/chunks.py`; slots without a token have decay 1 and
input 0, so a state passes through them. Layout in a segment: chunks n, groups G, heads of a group P, then tokens.
"""

import math
from typing import NamedTuple

import torch

from ..common.chunks import Segment, chunks_of
from ..common.custom_op import differentiable
from ..common.decay import finite
from ..common.packing import state_rows
from ..common.states import Workspace, final_states

# Floats of what a segment works on, a token having W + N a head.
_SEGMENT_FLOATS = {"cpu": 1 << 22, "other": 1 << 24}
# Weights below this are zero. Their products would come near the smallest numbers of a dtype, with which a CPU computes
# a hundred times as slowly, and would not show beside the weight 1 of a token's own input.
_NOTHING = {torch.float32: 1e-30, torch.float64: 1e-290}


class _Tokens(NamedTuple):
    """A segment: `[n G, C, N]`, `[n G, C, N]`, `[n G, P, C, W]`, and powers of the decays.

    Attributes:
        within: L, `[n G, P, C, C]`, 1 above the diagonal.
        since: exp(s), `[n G, P, C, 1]`.
        until: exp(s_end - s), `[n G, P, C, 1]`.
        across: exp(s_end), `[n, G, P, 1, 1]`.
        added: the inputs times `until`, `[n G, C, P W]`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    within: torch.Tensor
    since: torch.Tensor
    until: torch.Tensor
    across: torch.Tensor
    added: torch.Tensor


class _SSDCall:
    """One call: how its tokens lie among the chunks, the memory that its segments share, and its states.

    Attributes:
        ends: the states after each document by rank, `[S', G, P, W, N]`, where they are wanted.
    """

    def __init__(self, query, key, value, log_decay, initial, cu_seqlens, lengths, chunk_size, ends: bool = False):
        batch, length, self.groups, self.width = key.shape
        self.heads, self.head_dim = value.shape[2] // self.groups, value.shape[3]
        floats = _SEGMENT_FLOATS["cpu" if query.device.type == "cpu" else "other"]
        tokens = floats // (value.shape[2] * (self.width + self.head_dim))
        self.chunks = chunks_of((batch, length), cu_seqlens, lengths, chunk_size, tokens, query.device)
        self.size = self.chunks.size
        self.query, self.key, self.value = query, key, value
        self.log_decay = finite(log_decay)[..., None]
        self.workspace = Workspace()
        self.documents = None if initial is None else initial.shape[0]
        self.initial = None if initial is None else self.by_rank(initial)
        self.ends = value.new_zeros(self._shape(self.chunks.documents)) if ends else None
        self.next_entry: torch.Tensor | None = None  # the states with which the next segment begins

    def _shape(self, count: int) -> tuple[int, ...]:
        return count, self.groups, self.heads, self.head_dim, self.width

    def by_rank(self, states: torch.Tensor) -> torch.Tensor:
        """`[documents, H, W, N]` to `[S', G, P, W, N]`."""
        if self.chunks.order is not None:
            states = states.index_select(0, self.chunks.order)
        return states.unflatten(1, (self.groups, -1)).contiguous()

    def by_document(self, states: torch.Tensor, into: torch.Tensor) -> None:
        """The inverse, written over `into`; documents without a token keep what is there."""
        if self.chunks.order is None:
            into.copy_(states.flatten(1, 2))
        else:
            into.index_copy_(0, self.chunks.order, states.flatten(1, 2))

    def room(self, name: str, *shape: int) -> torch.Tensor:
        return self.workspace.tensor(name, shape, self.value)

    def read(self, name: str, x: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Tokens `[B, T, G heads, W]` as `[n G, heads, C, W]`."""
        shape = segment.chunks, self.groups, x.shape[2] // self.groups, self.size, x.shape[3]
        target = self.workspace.tensor(name, shape, x)
        self.chunks.read(x, segment, target.transpose(0, 1))
        return target.flatten(0, 1)

    def write(self, x: torch.Tensor, segment: Segment, into: torch.Tensor) -> None:
        """The way back, from `[n G, heads, C, W]`."""
        self.chunks.write(x.unflatten(0, (-1, self.groups)).transpose(0, 1), segment, into)

    def by_token(self, name: str, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """`x * factor`, `[n G, P, C, W]`, as rows `[n G, C, P W]`, which products with states take."""
        target = self.room(name, x.shape[0], self.size, self.heads, self.head_dim)
        torch.mul(x, factor, out=target.transpose(1, 2))
        return target.flatten(2)

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """Rows `[n G, C, P W]` as `[n G, P, C, W]`, a view."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def tokens(self, segment: Segment, within: bool = True) -> _Tokens:
        """Read a segment; without `within`, only what the walk over the states needs."""
        key, value = self.read("key", self.key, segment)[:, 0], self.read("value", self.value, segment)
        query = self.read("query", self.query, segment)[:, 0] if within else key
        sums = self.read("decay", self.log_decay, segment).cumsum(2)  # [n G, P, C, 1]
        since, until = (_power_(x.to(self.value.dtype, copy=True)) for x in (sums, sums[:, :, -1:] - sums))
        across = since[:, :, -1:].unflatten(0, (-1, self.groups))
        matrix = value
        if within:
            matrix = self.room("within", *sums.shape[:3], self.size)
            _power_(torch.sub(sums, sums.mT, out=matrix).tril_())
        return _Tokens(query, key, value, matrix, since, until, across, self.by_token("added", value, until))

    def scores(self, tokens: _Tokens) -> torch.Tensor:
        """`Q K^T` up to the diagonal, `[n G, C, C]`."""
        return self.workspace.product("scores", tokens.query, tokens.key.mT).tril_()

    # The states, forwards.

    def entry(self, segment: Segment) -> torch.Tensor | None:
        """The states with which a segment begins, `[lanes, G, P, W, N]`; None for zeros."""
        if segment.step:
            return self.next_entry
        return None if self.initial is None else self.initial[segment.block : segment.block + segment.lanes[0]]

    def walk(self, segment: Segment, tokens: _Tokens, keep: bool = False) -> torch.Tensor | None:
        """The states before the chunks of a segment, `[n, G, P, W, N]`, None for zeros; `keep` them for later."""
        entry, before = self.entry(segment), None
        if entry is not None or len(segment.lanes) > 1:
            shape = self._shape(segment.chunks)
            before = self.value.new_empty(shape) if keep else self.room("before", *shape)
            first = before[: segment.lanes[0]]
            first.zero_() if entry is None else first.copy_(entry)
        self.next_entry = self.value.new_empty(self._shape(segment.following)) if segment.following else None
        for index, (start, lanes, following) in enumerate(segment.moves()):
            if following:
                last = index + 1 == len(segment.lanes)
                after = self.next_entry if last else before[start + lanes : start + lanes + following]
                self._advance(before, tokens, slice(start, start + following), after)
            if following < lanes and self.ends is not None:
                after = self.ends[segment.block + following : segment.block + lanes]
                self._advance(before, tokens, slice(start + following, start + lanes), after)
        return before

    def _advance(self, before: torch.Tensor | None, tokens: _Tokens, here: slice, after: torch.Tensor) -> None:
        """`S_next` of some chunks, written to `after`."""
        rows = slice(here.start * self.groups, here.stop * self.groups)
        self.move(before, tokens.across, here, tokens.added[rows], tokens.key[rows], after)

    @staticmethod
    def move(states, across, here: slice, rows, columns, into) -> None:
        """`into = across states + rows^T columns`, forwards or backwards."""
        flat = into.flatten(2, 3).flatten(0, 1)
        if states is None:
            torch.bmm(rows.mT, columns, out=flat)
            return
        torch.mul(states[here], across[here], out=into)
        flat.baddbmm_(rows.mT, columns)

    def forward(self, final: torch.Tensor | None) -> torch.Tensor:
        """The output `[B, T, H, W]`; the final states are written over `final`."""
        output = self.chunks.empty(self.value, self.groups * self.heads, self.head_dim)
        for segment in self.chunks.segments:
            tokens = self.tokens(segment)
            weights = tokens.within.mul_(self.scores(tokens)[:, None])
            y = self.workspace.product("output", weights.flatten(0, 1), tokens.value.flatten(0, 1))
            y = y.view(tokens.value.shape)
            before = self.walk(segment, tokens)
            if before is not None:
                read = self.workspace.product("read", tokens.query, _rows(before).mT)
                y.addcmul_(self.by_head(read), tokens.since)
            self.write(y, segment, output)
        if final is not None:
            self.by_document(self.ends, final)
        return self.chunks.finish(output)


class _Gradients:
    """The backward pass of a `_SSDCall`, segment by segment from the last to the first.

    Args:
        final: the gradient of the final states, `[documents, H, W, N]`, None for zeros.
    """

    def __init__(self, call: _SSDCall, grad_output: torch.Tensor, final: torch.Tensor | None):
        self.call, self.grad_output, self.final = call, grad_output, final
        chunks = call.chunks
        self.query, self.key, self.value, self.log_decay = (
            chunks.empty(x, *x.shape[2:]) for x in (call.query, call.key, call.value, call.log_decay)
        )
        self.ends = None if final is None else call.by_rank(final)
        self.initial = None if call.initial is None else torch.zeros_like(call.initial)
        self.next_entry: torch.Tensor | None = None
        self.before, self.tokens = [], None
        for segment in chunks.segments:
            last = segment is chunks.segments[-1]  # `run` begins with it and uses what is read here
            self.tokens = call.tokens(segment, within=last)
            self.before.append(call.walk(segment, self.tokens, keep=True))

    def run(self):
        """Of query, key, value, log decays and initial states."""
        for segment in reversed(self.call.chunks.segments):
            tokens, self.tokens = self.tokens or self.call.tokens(segment), None
            self._segment(segment, tokens, self.before.pop())
        found = (self.call.chunks.finish(x) for x in (self.query, self.key, self.value, self.log_decay))
        query, key, value, log_decay = found
        return query, key, value, log_decay[..., 0], self._initial_states()

    def _initial_states(self) -> torch.Tensor | None:
        """An empty document hands on the gradient of its final state."""
        if self.initial is None:
            return None
        shape = self.call.documents, *self.initial.flatten(1, 2).shape[1:]
        found = self.initial.new_zeros(shape) if self.final is None else self.final.clone()
        self.call.by_document(self.initial, found)
        return found

    def _segment(self, segment: Segment, tokens: _Tokens, before: torch.Tensor | None) -> None:
        call, product = self.call, self.call.workspace.product
        grad = call.read("grad", self.grad_output, segment)
        pulled = call.by_token("pulled", grad, tokens.since)
        after = self._walk(segment, tokens, pulled)

        scores, within = call.scores(tokens), tokens.within
        shape, flat = tokens.value.shape, (0, 1)
        of_weights = product("grad weights", grad.flatten(*flat), tokens.value.flatten(*flat).mT).view(within.shape)
        of_weights.mul_(within)
        of_scores = torch.sum(of_weights, 1, out=call.room("grad scores", *scores.shape)).tril_()
        weights = within.mul_(scores[:, None])
        of_value = product("grad value", weights.flatten(*flat).mT, grad.flatten(*flat)).view(shape)
        of_query, of_key = product("grad query", of_scores, tokens.key), product("grad key", of_scores.mT, tokens.query)

        # The gradient of the log decays: pairs within the chunk, summed over writers up to j and then over the readers
        # behind j; what t and later tokens read of the state before; what tokens before t write to the state after.
        passed = of_weights.mul_(scores[:, None]).cumsum_(3).tril_(-1).sum(2).double()
        of_decay = torch.zeros_like(passed)
        if before is not None:
            of_query.baddbmm_(pulled, _rows(before))
            read = product("read", tokens.query, _rows(before).mT).mul_(pulled)
            of_decay = call.by_head(read).sum(3).double().flip(2).cumsum(2).flip(2)
        if after is not None:
            of_key.baddbmm_(tokens.added, _rows(after))
            handed = product("handed", tokens.key, _rows(after).mT)
            of_value.addcmul_(call.by_head(handed), tokens.until)
            passed += call.by_head(handed.mul_(tokens.added)).sum(3).double().cumsum(2)
        of_decay[:, :, 1:] += passed[:, :, :-1]
        if before is not None and after is not None:
            through = torch.mul(before, after, out=before).mul_(tokens.across).sum(4).sum(3, dtype=torch.float64)
            of_decay += through.flatten(0, 1)[:, :, None]
        call.write(of_query[:, None], segment, self.query)
        call.write(of_key[:, None], segment, self.key)
        call.write(of_value, segment, self.value)
        call.write(of_decay[..., None], segment, self.log_decay)

    def _walk(self, segment: Segment, tokens: _Tokens, pulled: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the states after the chunks of a segment, `[n, G, P, W, N]`, None for zeros."""
        call, moves = self.call, list(segment.moves())
        after = None
        if segment.following or len(moves) > 1 or self.ends is not None:
            after = call.room("after", *call._shape(segment.chunks))
        entry = None
        if segment.step or self.initial is not None:
            entry = call.value.new_empty(call._shape(segment.lanes[0]))
        for index in reversed(range(len(moves))):
            start, lanes, following = moves[index]
            if after is not None:
                if index + 1 == len(moves) and following:
                    after[start : start + following] = self.next_entry
                ranks = slice(segment.block + following, segment.block + lanes)
                after[start + following : start + lanes] = 0 if self.ends is None else self.ends[ranks]
            into = entry
            if index:
                previous = moves[index - 1][0]
                into = after[previous : previous + lanes]
            if into is not None:
                rows = slice(start * call.groups, (start + lanes) * call.groups)
                here = slice(start, start + lanes)
                call.move(after, tokens.across, here, pulled[rows], tokens.query[rows], into)
        if segment.step:
            self.next_entry = entry
        elif self.initial is not None:
            self.initial[segment.block : segment.block + segment.lanes[0]] = entry
        return after


def _rows(states: torch.Tensor) -> torch.Tensor:
    """`[n, G, P, W, N]` as matrices `[n G, P W, N]`."""
    return states.flatten(2, 3).flatten(0, 1)


def _power_(exponents: torch.Tensor) -> torch.Tensor:
    """`exp` in place, and zero below `_NOTHING`."""
    nothing = _NOTHING[exponents.dtype]
    powers = exponents.clamp_(min=math.log(nothing) - 1).exp_()  # subnormal numbers and exp(-inf) are slow
    return torch.threshold_(powers, nothing, 0.0)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None, chunk_size: int,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `ssd_attention`, all but the log decays in one real dtype; the final states are empty unless wanted."""
    inputs = query, key, value, log_decay, initial_state, cu_seqlens, lengths, chunk_size, output_final_state
    final = final_states(value, _state_shape(*inputs), output_final_state, initial_state)
    return _SSDCall(*inputs).forward(final if output_final_state else None), final


def _outputs(*inputs) -> tuple[torch.Tensor, torch.Tensor]:
    value, wanted = inputs[2], inputs[-1]
    return value.new_empty(value.shape), value.new_empty(_state_shape(*inputs) if wanted else 0)


def _state_shape(query, key, value, log_decay, initial_state, cu_seqlens, *_) -> tuple[int, ...]:
    return state_rows(value, cu_seqlens), *value.shape[2:], key.shape[3]


def _backward(inputs, grads, needs):
    query, key, value, decay, initial = _Gradients(_SSDCall(*inputs[:-1]), *grads).run()
    return query, key, value, decay.to(inputs[3].dtype), initial


chunk_ssd = differentiable(__name__, "attention", _forward, _outputs, _backward, count=5)
