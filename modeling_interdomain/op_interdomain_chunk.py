"""The two-pass identity as batched matrix products over chunks of C tokens.

Pulling the query through the key recurrence first gives an M-vector y_t; `pull_back` turns it into p_t; p_t reads the
values. Both passes are linear attentions whose weights depend on the distance t - i only through lambda^(t - i):

    pass 1   y_t[n] = lambda_n^(t+1) (q_t . S^k[n]) + sum_{i<=t} (q_t . k_i) lambda_n^(t-i) beta_n
    pass 2   o_t    = Re sum_n conj(p_t[n]) lambda_n^(t+1) S^v[n] + sum_{j<=t} w_t(t-j) v_j,
             w_t(d) = Re sum_n conj(p_t[n]) lambda_n^d beta_n

with S the state before the chunk. Splitting lambda^(t-i) into lambda^t lambda^(-i) would need growing powers. Instead
the C x C scores are re-indexed from (t, i) to (t, t - i) by reading the same memory with another row stride
(`skew`), so that one table of decaying powers serves every row and nothing can overflow, whatever Delta and A become in
training.

Layout inside a segment: groups G first, then chunks N, lanes L (batch rows), and the rows of a chunk, (heads per group
P, C tokens). The tables depend on the group alone, so their products fold everything else into matrix rows.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from .op_common import as_complex, decay_powers
from .op_interdomain_readout import pull_back, pull_back_matrix
from .op_interdomain_step import grouped_coefficients


class Document(NamedTuple):
    """Where a document lies among the chunks: it starts at chunk `first` and has `tail` tokens in chunk `last`."""

    first: int
    last: int
    tail: int


class Tables(NamedTuple):
    """What the chunks of one call share; complex numbers are interleaved pairs wherever a dimension says 2M."""

    reversed_inputs: torch.Tensor  # [G, C, 2M]: lambda^(C-1-j) beta at row j
    powers: torch.Tensor  # [G, C + 1, M] complex: lambda^j
    backward: torch.Tensor  # [G, C, M] complex: the conjugate of lambda^(t+1)
    coefficients: torch.Tensor | None  # complex, for the elementwise pull-back
    mixing: torch.Tensor | None  # [G, 2M, 2M]: the pull-back as a matrix, when C is a full matrix


def chunk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None,
    product: str,
    initial_state: torch.Tensor | None,
    boundaries: list[int],
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and results as `recurrent_attention`; training keeps the inputs and one state per segment."""
    chunk_size = min(chunk_size, max(end - start for start, end in pairwise(boundaries)))
    if len(boundaries) == 2:
        length = boundaries[1]
        last = (length - 1) // chunk_size
        whole = (Document(0, last, length - last * chunk_size),)
        return _ChunkAttention.apply(
            query,
            key,
            value,
            log_decay,
            input_matrix,
            coefficient_matrix,
            initial_state,
            product,
            whole,
            chunk_size,
        )
    documents, slots = documents_on_chunks(boundaries, chunk_size)
    index = torch.tensor(slots, device=query.device)
    length = (documents[-1].last + 1) * chunk_size

    def spread(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(1, length, *x.shape[2:]).index_copy(1, index, x)

    output, states = _ChunkAttention.apply(
        spread(query),
        spread(key),
        spread(value),
        log_decay,
        input_matrix,
        coefficient_matrix,
        initial_state,
        product,
        documents,
        chunk_size,
    )
    return output.index_select(1, index), states


def documents_on_chunks(boundaries: list[int], chunk_size: int) -> tuple[tuple[Document, ...], list[int]]:
    """Give every document whole chunks of its own; also the slot of each token."""
    documents: list[Document] = []
    slots: list[int] = []
    first = 0
    for start, end in pairwise(boundaries):
        length = end - start
        last = first + (length - 1) // chunk_size
        documents.append(Document(first, last, length - (last - first) * chunk_size))
        slots.extend(range(first * chunk_size, first * chunk_size + length))
        first = last + 1
    return tuple(documents), slots


class _ChunkAttention(torch.autograd.Function):
    """Walks the segments; backward walks them in reverse, recomputing each from the state stored at its start."""

    @staticmethod
    def forward(
        ctx,
        query,
        key,
        value,
        log_decay,
        input_matrix,
        coefficient_matrix,
        initial_state,
        product,
        documents,
        chunk_size,
    ):
        tables = _tables(log_decay, input_matrix, coefficient_matrix, product, chunk_size)
        entry = _entry_states(initial_state, query, key, value, log_decay, documents)
        segments = _segments(query, key, log_decay, documents, chunk_size)
        state = entry[:, 0]
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        finals = [None] * len(documents)
        starts = []
        workspace = _Workspace()
        for segment in segments:
            starts.append(state)
            piece, state, ends = _run_segment(
                query, key, value, state, entry, tables, product, segment, chunk_size, workspace
            )
            output[:, segment.tokens] = piece
            state = state.clone()  # a view would keep the states of the whole segment alive
            for document, end in zip(segment.endings, ends, strict=True):
                finals[document] = end
        ctx.save_for_backward(query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, *starts)
        ctx.product, ctx.documents, ctx.chunk_size = product, documents, chunk_size
        return output, _to_rows(torch.stack(finals, dim=1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output, grad_states):
        query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, *starts = ctx.saved_tensors
        documents, chunk_size, product = ctx.documents, ctx.chunk_size, ctx.product
        parameters = [
            None if p is None else p.detach().requires_grad_()
            for p in (log_decay, input_matrix, coefficient_matrix, initial_state)
        ]
        with torch.enable_grad():
            tables = _tables(*parameters[:3], product, chunk_size)
            entry = _entry_states(parameters[3], query, key, value, log_decay, documents)
        table_leaves = Tables(*(None if t is None else t.detach().requires_grad_() for t in tables))
        entry_leaf = entry.detach().requires_grad_()
        table_grads = [None if t is None else torch.zeros_like(t) for t in tables]
        entry_grad = torch.zeros_like(entry_leaf)
        grad_ends = _from_rows(grad_states, len(documents))
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        grad_state = torch.zeros_like(entry[:, 0])

        segments = _segments(query, key, log_decay, documents, chunk_size)
        for segment, start in zip(reversed(segments), reversed(starts), strict=True):
            pieces = [x[:, segment.tokens].detach().requires_grad_() for x in (query, key, value)]
            local = segment._replace(tokens=slice(None))
            state = start.detach().requires_grad_()
            with torch.enable_grad():
                piece, after, ends = _run_segment(*pieces, state, entry_leaf, table_leaves, product, local, chunk_size)
            leaves = [*pieces, state, entry_leaf, *(t for t in table_leaves if t is not None)]
            found = torch.autograd.grad(
                [piece, after, *ends],
                leaves,
                [grad_output[:, segment.tokens], grad_state, *(grad_ends[:, d] for d in segment.endings)],
                allow_unused=True,
            )
            for whole, part in zip(grads, found[:3], strict=True):
                whole[:, segment.tokens] = part
            grad_state = torch.zeros_like(state) if found[3] is None else found[3]
            if found[4] is not None:
                entry_grad += found[4]
            used = [g for g in table_grads if g is not None]
            for total, part in zip(used, found[5:], strict=True):
                if part is not None:
                    total += part
        entry_grad[:, 0] += grad_state

        wanted = [p for p in parameters if p is not None]
        roots = [(t, g) for t, g in zip(tables, table_grads, strict=True) if t is not None and t.requires_grad]
        if entry.requires_grad:
            roots.append((entry, entry_grad))
        found = iter(torch.autograd.grad([r for r, _ in roots], wanted, [g for _, g in roots], allow_unused=True))
        parameter_grads = [None if p is None else next(found) for p in parameters]
        return (*grads, *parameter_grads, None, None, None)


class Segment(NamedTuple):
    """A run of chunks worked on together."""

    tokens: slice
    chunks: int
    openings: tuple[tuple[int, int], ...]  # (chunk within the segment, document) that starts there
    closings: tuple[tuple[int, int], ...]  # (chunk within the segment, tokens of it) where a document ends
    endings: tuple[int, ...]  # the documents of `closings`


# Floats of one M-wide intermediate of a segment. On a CPU the whole working set should stay in the second-level cache,
# and allocations small enough to be reused; on an accelerator launches count instead.
_SEGMENT_FLOATS = {"cpu": 1 << 18, "other": 1 << 24}


def _segments(query, key, log_decay, documents, chunk_size) -> list[Segment]:
    batch, length, heads, _ = query.shape
    row = 2 * log_decay.shape[1] * heads * batch * chunk_size
    per_segment = max(1, _SEGMENT_FLOATS["cpu" if query.device.type == "cpu" else "other"] // row)
    total = documents[-1].last + 1
    segments = []
    for start in range(0, total, per_segment):
        stop = min(start + per_segment, total)
        inside = range(start, stop)
        endings = tuple(d for d, document in enumerate(documents) if document.last in inside)
        segments.append(
            Segment(
                slice(start * chunk_size, min(stop * chunk_size, length)),
                stop - start,
                tuple((doc.first - start, d) for d, doc in enumerate(documents) if doc.first in inside),
                tuple((documents[d].last - start, documents[d].tail) for d in endings),
                endings,
            )
        )
    return segments


def _tables(log_decay, input_matrix, coefficient_matrix, product, chunk_size) -> Tables:
    real = log_decay.dtype
    powers = decay_powers(log_decay, torch.arange(chunk_size + 1, device=log_decay.device))
    inputs = powers[:, :chunk_size] * as_complex(input_matrix.to(torch.float64))[:, None]
    reversed_inputs = torch.view_as_real(inputs.flip(1)).flatten(2).to(real)
    powers = powers.to(torch.complex128 if real == torch.float64 else torch.complex64)
    coefficients = grouped_coefficients(coefficient_matrix, real)
    if coefficient_matrix is not None and coefficient_matrix.ndim == 4:
        return Tables(
            reversed_inputs, powers, powers[:, 1:].conj().resolve_conj(), None, pull_back_matrix(coefficients, product)
        )
    return Tables(reversed_inputs, powers, powers[:, 1:].conj().resolve_conj(), coefficients, None)


def _entry_states(initial_state, query, key, value, log_decay, documents) -> torch.Tensor:
    """States at the start of each document, `[G, documents, L, R + D, M]` complex."""
    if initial_state is not None:
        return _from_rows(initial_state, len(documents))
    shape = (key.shape[2], len(documents), query.shape[0], key.shape[-1] + value.shape[-1], log_decay.shape[1])
    dtype = torch.complex128 if query.dtype == torch.float64 else torch.complex64
    return torch.zeros(shape, dtype=dtype, device=query.device)


def _from_rows(states: torch.Tensor, documents: int) -> torch.Tensor:
    """`[B or documents, G, 2, M, R + D]` to complex `[G, documents, L, R + D, M]`."""
    states = torch.complex(states[:, :, 0], states[:, :, 1]).permute(1, 0, 3, 2)
    return states.unflatten(1, (documents, -1)).contiguous()


def _to_rows(states: torch.Tensor) -> torch.Tensor:
    states = states.flatten(1, 2).permute(1, 0, 3, 2)
    return torch.stack([states.real, states.imag], dim=2)


class _Workspace(dict):
    """Memory that the segments of one forward use in turn; gradients need their own, so there backward passes None."""

    def tensor(self, name: str, shape: tuple[int, ...], like: torch.Tensor, zero: bool = False) -> torch.Tensor:
        if name not in self or self[name].shape != shape:
            self[name] = like.new_zeros(shape) if zero else like.new_empty(shape)
        return self[name]


def _product(a: torch.Tensor, b: torch.Tensor, workspace: _Workspace | None, name: str) -> torch.Tensor:
    """`a @ b` over a batch."""
    if workspace is None:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out=workspace.tensor(name, (*a.shape[:2], b.shape[2]), a))


def _collect(x: torch.Tensor, workspace: _Workspace | None, name: str) -> torch.Tensor:
    """A contiguous copy, or the tensor itself if it is contiguous already."""
    if workspace is None or x.is_contiguous():
        return x.contiguous()
    return workspace.tensor(name, tuple(x.shape), x).copy_(x)


def _run_segment(query, key, value, state, entry, tables, product, segment, chunk_size, workspace=None):
    """Outputs `[L, tokens, H, D]`, the state after the segment, and the states of the documents that end in it."""
    feature_dim = key.shape[-1]
    chunks, groups = segment.chunks, key.shape[2]
    length = query[:, segment.tokens].shape[1]
    rows = _to_chunks(query[:, segment.tokens].unflatten(2, (groups, -1)), chunks, chunk_size)
    rows = _collect(rows, workspace, "rows")  # [G, N, L, P, C, R]
    inputs = torch.cat([key[:, segment.tokens], value[:, segment.tokens]], dim=-1)
    inputs = _collect(_to_chunks(inputs[:, :, :, None], chunks, chunk_size), workspace, "inputs")
    inputs = inputs[:, :, :, 0].mT  # [G, N, L, R + D, C]
    lanes, heads = rows.shape[2], rows.shape[3]
    batch = (groups * chunks * lanes, heads * chunk_size)

    states = _ChunkStates.apply(inputs, state, entry, tables.reversed_inputs, tables.powers[:, -1], segment.openings)
    before = _collect(torch.view_as_real(states[:, :-1]).flatten(-2), workspace, "before").flatten(0, 2)
    flat_inputs = inputs.flatten(0, 2)
    flat_rows = rows.reshape(*batch, feature_dim)

    # Pass 1: the query through the key recurrence.
    scores = _product(flat_rows, flat_inputs[:, :feature_dim], workspace, "scores")
    scores = skew(scores.view(-1, chunk_size, chunk_size), workspace)
    carried = _product(flat_rows, before[:, :feature_dim], workspace, "carried")  # before: [G N L, R + D, 2M]
    carried = _times(carried.view(groups, -1, chunk_size, carried.shape[-1]), tables.powers[:, 1:]).flatten(1, 2)
    y = _add_product(carried, scores.view(groups, -1, chunk_size), tables.reversed_inputs)
    if tables.mixing is not None:
        p = _product(y, tables.mixing, workspace, "p")
    else:
        y = torch.view_as_complex(y.unflatten(-1, (-1, 2)))
        p = torch.view_as_real(pull_back(tables.coefficients, y, product).resolve_conj()).flatten(-2)

    # Pass 2: what came out reads the values.
    weights = _product(p, tables.reversed_inputs.mT, workspace, "weights")
    weights = unskew(weights.view(-1, chunk_size, chunk_size), workspace)
    reader = _times(p.view(groups, -1, chunk_size, p.shape[-1]), tables.backward).view(*batch, -1)
    output = _product(reader, before[:, feature_dim:].mT, workspace, "output")
    output = _add_product(output, weights.reshape(*batch, chunk_size), flat_inputs[:, feature_dim:].mT)

    output = output.view(groups, chunks, lanes, heads, chunk_size, -1).permute(2, 1, 4, 0, 3, 5)
    output = output.reshape(lanes, chunks * chunk_size, groups * heads, -1)[:, :length]
    ends = [_end_state(inputs, states, tables, chunk, tail) for chunk, tail in segment.closings]
    return output, states[:, -1], ends


def _to_chunks(x: torch.Tensor, chunks: int, chunk_size: int) -> torch.Tensor:
    """`[L, tokens, G, P, W]` to `[G, N, L, P, C, W]`, the last chunk filled up with zeros."""
    missing = chunks * chunk_size - x.shape[1]
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 0, missing))
    return x.unflatten(1, (chunks, chunk_size)).permute(3, 1, 0, 4, 2, 5)


def _times(pairs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply interleaved pairs `[G, rows, C, 2M]` by complex factors `[G, C, M]`; without gradients, in place."""
    numbers, factors = torch.view_as_complex(pairs.unflatten(-1, (-1, 2))), factors[:, None]
    numbers = numbers * factors if torch.is_grad_enabled() else numbers.mul_(factors)
    return torch.view_as_real(numbers).flatten(-2)


def _add_product(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`base + a @ b` over a batch; without gradients, in place."""
    return torch.baddbmm(base, a, b) if torch.is_grad_enabled() else base.baddbmm_(a, b)


def _end_state(inputs, states, tables, chunk, tail):
    """The state after the first `tail` tokens of a chunk, complex `[G, L, R + D, M]`."""
    # Row j of the table belongs to the token C-1-j steps before the end; here the end comes C - tail tokens early, and
    # the inputs beyond it are zero, so any finite weight serves them.
    table = tables.reversed_inputs
    if tail < table.shape[1]:
        table = torch.cat([table[:, -tail:], torch.zeros_like(table[:, tail:])], dim=1)
    added = torch.bmm(inputs[:, chunk].flatten(1, 2), table).view(*states[:, 0].shape, 2)
    return tables.powers[:, tail, None, None] * states[:, chunk] + torch.view_as_complex(added)


class _ChunkStates(torch.autograd.Function):
    """The states around the chunks: `S <- lambda^C S + sum_i lambda^(C-1-i) beta (x) [k_i; v_i]`."""

    @staticmethod
    def forward(ctx, inputs, state, entry, reversed_inputs, across, openings):
        groups, chunks, lanes, width, _ = inputs.shape
        opened = dict(openings)
        states = state.new_empty(chunks + 1, groups, lanes, width, state.shape[-1]).transpose(0, 1)
        states[:, 0] = state
        pairs = torch.view_as_real(states).flatten(-2)
        decay = across[:, None, None]
        for n in range(chunks):
            if n in opened:
                states[:, n] = entry[:, opened[n]]
            torch.mul(decay, states[:, n], out=states[:, n + 1])
            after = pairs[:, n + 1].view(groups, lanes * width, -1)
            torch.baddbmm(after, inputs[:, n].reshape(groups, lanes * width, -1), reversed_inputs, out=after)
        ctx.save_for_backward(inputs, states, reversed_inputs, across, entry)
        ctx.opened = opened
        return states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_states):
        inputs, states, reversed_inputs, across, entry = ctx.saved_tensors
        groups, chunks, lanes, width, _ = inputs.shape
        grad_inputs = torch.empty_like(inputs)
        grad_entry = torch.zeros_like(entry)
        grad_table = torch.zeros_like(reversed_inputs)
        grad_across = torch.zeros_like(across)
        decay = across[:, None, None].conj()
        grad = grad_states[:, chunks].clone()
        for n in reversed(range(chunks)):
            pairs = torch.view_as_real(grad.resolve_conj()).reshape(groups, lanes * width, -1)
            flat = inputs[:, n].reshape(groups, lanes * width, -1)
            grad_inputs[:, n] = torch.bmm(pairs, reversed_inputs.mT).view(groups, lanes, width, -1)
            grad_table.baddbmm_(flat.mT, pairs)
            grad_across += (grad * states[:, n].conj()).sum(dim=(1, 2))
            grad = decay * grad + grad_states[:, n]
            if n in ctx.opened:
                grad_entry[:, ctx.opened[n]] += grad
                grad = torch.zeros_like(grad)
        return grad_inputs, grad, grad_entry, grad_table, grad_across, None


def _margins(x: torch.Tensor, workspace: _Workspace | None, name: str) -> torch.Tensor:
    """A buffer with zeros in the margins; what is written between them always goes to the same places."""
    shape = (x.shape[0], x.shape[1] * (2 * x.shape[1] + 1))
    return x.new_zeros(shape) if workspace is None else workspace.tensor(name, shape, x, zero=True)


def _skew(x: torch.Tensor, workspace: _Workspace | None = None) -> torch.Tensor:
    """`out[t, C-1-d] = x[t, t-d]` for d <= t, zero elsewhere; x `[batch, C, C]`."""
    # Give each row a left margin of C zeros and C extra at the end, then step one element further with every row: what
    # was column i of row t becomes column i + C-1 - t.
    batch, size, _ = x.shape
    stride = 2 * size + 1
    buffer = _margins(x, workspace, "skew")
    buffer.as_strided((batch, size, size), (size * stride, 2 * size, 1), size).copy_(x)
    return buffer.as_strided((batch, size, size), (size * stride, stride, 1), 1)


def _unskew(x: torch.Tensor, workspace: _Workspace | None = None) -> torch.Tensor:
    """`out[t, i] = x[t, C-1-(t-i)]` for i <= t, zero above the diagonal: the inverse, and the adjoint, of `_skew`."""
    batch, size, _ = x.shape
    stride = 2 * size + 1
    buffer = _margins(x, workspace, "unskew")
    buffer.as_strided((batch, size, size), (size * stride, stride, 1), 1).copy_(x)
    return buffer.as_strided((batch, size, size), (size * stride, 2 * size, 1), size)


class _Skew(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, workspace):
        return _skew(x, workspace)

    @staticmethod
    def backward(ctx, grad):
        return _unskew(grad), None


class _Unskew(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, workspace):
        return _unskew(x, workspace)

    @staticmethod
    def backward(ctx, grad):
        return _skew(grad), None


def skew(x: torch.Tensor, workspace: _Workspace | None = None) -> torch.Tensor:
    """Scores `[batch, C, C]` by (t, i) to scores by (t, distance), see `_skew`."""
    return _Skew.apply(x, workspace)


def unskew(x: torch.Tensor, workspace: _Workspace | None = None) -> torch.Tensor:
    """The way back, see `_unskew`."""
    return _Unskew.apply(x, workspace)
