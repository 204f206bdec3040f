"""How a batch is laid out for a recurrent layer: pads at the ends of rows, packed documents in one row."""

from typing import NamedTuple

import torch

from .cpu import in_graph


class Packing(NamedTuple):
    """The layout of a batch that is not simply B rows of T real tokens.

    With a mask the real tokens of every row come first, in their order, and then its pads. Packed documents become one
    row, in which all pads are one more document behind the last. The sizes are those of the batch whatever the values
    are, so that a compiled graph serves every mask; only `packing_from_forks` repeats tokens.

    Attributes:
        shape: B and T of the batch.
        mask: `[B, T]` bool, False for pads; None when there are none.
        tokens: `[B T]`, where in the flattened batch each packed token comes from; None when all stay in place.
        places: `[B T]`, the inverse of `tokens`: the first packed token that comes from each token of the batch.
        lengths: `[B]`, the real tokens of every row; None with packed documents.
        cu_seqlens: `[S + 1]`, ends of the documents along the packed row, starting with 0; None for rows.
        documents: `[B T]`, the document of every packed token; None for rows.
    """

    shape: tuple[int, int]
    mask: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    places: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, ...]` to the same with pads at the ends of rows, or to one row `[1, B T, ...]` of documents."""
        flat = x.flatten(0, 1)
        if self.tokens is not None:
            flat = flat.index_select(0, self.tokens)
        return flat.unflatten(0, self.shape) if self.cu_seqlens is None else flat[None]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Back to `[B, T, ...]`, with zeros at the pads."""
        flat = x.flatten(0, 1)
        if self.places is not None:
            flat = flat.index_select(0, self.places)
        if self.mask is not None:
            flat = torch.where(self.mask.flatten().view(-1, *[1] * (flat.ndim - 1)), flat, 0)
        return flat.unflatten(0, self.shape)

    @property
    def starts(self) -> torch.Tensor | None:
        """`[B, T]` bool: the tokens of the batch that begin a packed document; None for rows."""
        if self.documents is None:
            return None
        return self.unpack(torch.nn.functional.pad(self.documents.diff() != 0, (1, 0), value=True)[None])


def packing_from_mask(mask: torch.Tensor) -> Packing:
    """The rows of a `[B, T]` mask, whose pads may stand anywhere."""
    mask = mask.bool()
    places, tokens = _real_tokens_first(mask)
    return Packing((mask.shape[0], mask.shape[1]), mask, tokens, places, lengths=mask.sum(dim=1))


def packing_from_documents(cu_seqlens: torch.Tensor, mask: torch.Tensor | None, shape: tuple[int, int]) -> Packing:
    """Documents along the flattened `[B, T]` batch, and a mask of the real tokens in them."""
    cu_seqlens = cu_seqlens.long()
    if mask is None:
        return Packing(shape, cu_seqlens=cu_seqlens, documents=document_of_tokens(cu_seqlens, shape[0] * shape[1]))
    mask = mask.bool()
    flat = mask.flatten()
    places, tokens = _real_tokens_first(flat[None])
    counted = torch.nn.functional.pad(flat.long().cumsum(0), (1, 0))
    ends = torch.nn.functional.pad(counted[cu_seqlens], (0, 1), value=flat.shape[0])
    documents = document_of_tokens(ends, flat.shape[0])
    return Packing(shape, mask, tokens, places, cu_seqlens=ends, documents=documents)


def packing_from_forks(seen: torch.Tensor) -> Packing | None:
    """Trees of tokens, for a `[B, T, T]` bool mask of which tokens each token sees: a document for each path to a leaf.

    A recurrence can read a path when every token that t sees itself sees exactly what t sees up to there. Tokens that
    do not see themselves are pads. None for all other masks.
    """
    batch, length = seen.shape[:2]
    real = seen.diagonal(dim1=1, dim2=2)
    seen = seen & real[..., None]
    counts = seen.to(torch.float32)
    shared = counts @ counts.mT
    if bool((seen & ((shared != counts.sum(2)[:, None]) | (shared != counts.cumsum(2)))).any()):
        return None
    rows, ends = (real & (seen.sum(1) == 1)).nonzero().unbind(1)  # the leaves: no other token sees them
    ways, pads = seen[rows, ends], (~real).flatten().nonzero()[:, 0]
    numbers = torch.arange(length, device=seen.device) + length * rows[:, None]
    tokens = torch.cat([numbers[ways], pads])
    lengths = [ways.sum(1), *([pads.new_full((1,), len(pads))] if len(pads) else [])]
    cu_seqlens = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
    order = torch.arange(len(tokens), device=seen.device)
    places = order.new_zeros(batch * length).scatter_reduce(0, tokens, order, "amin", include_self=False)
    documents = document_of_tokens(cu_seqlens, len(tokens))
    mask = real if len(pads) else None
    return Packing((batch, length), mask, tokens, places, cu_seqlens=cu_seqlens, documents=documents)


def _real_tokens_first(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where every token of a `[B, T]` mask goes, and which token each place gets, both `[B T]`."""
    rows, length = mask.shape
    real, pads = mask.long().cumsum(1), (~mask).long().cumsum(1)
    places = torch.where(mask, real, real[:, -1:] + pads) - 1
    places = (places + length * torch.arange(rows, device=mask.device)[:, None]).flatten()
    numbers = torch.arange(rows * length, device=mask.device)
    return places, torch.zeros_like(places).scatter(0, places, numbers)


def cu_seqlens_from_positions(position_ids: torch.Tensor) -> torch.Tensor | None:
    """A document starts wherever `position_ids` `[B, T]` do not increase; None when every row is one document.

    In a graph, where no size may depend on values, the result always has `B T + 1` entries: empty documents follow the
    last one.
    """
    return _from_starts(position_ids[:, 1:] <= position_ids[:, :-1])  # unsigned integers have no negative differences


def cu_seqlens_from_numbers(documents: torch.Tensor) -> torch.Tensor | None:
    """The same from the number of each token's document, `[B, T]`."""
    return _from_starts(documents[:, 1:] != documents[:, :-1])


def _from_starts(later: torch.Tensor) -> torch.Tensor | None:
    """`cu_seqlens` from `later` `[B, T - 1]`: whether the second and later tokens of each row start a document."""
    starts = torch.nn.functional.pad(later, (1, 0), value=True).flatten()
    count = starts.shape[0]
    if in_graph():
        numbers = torch.arange(1, count + 2, device=starts.device)
        return torch.searchsorted(starts.long().cumsum(0), numbers)
    begins = starts.nonzero()[:, 0]
    if begins.shape[0] == later.shape[0]:
        return None
    return torch.nn.functional.pad(begins, (0, 1), value=count)


def state_rows(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """How many states tokens `[B, T, ...]` have: one a batch row, or one a packed document."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def step_rows(x: torch.Tensor, state, state_indices: torch.Tensor | None) -> int:
    """The rows that the state of a step on x `[B, ...]` must have: B, or those of a pool into which the indices fit."""
    if state_indices is None:
        return x.shape[0]
    from .slots import check_slots

    return check_slots(state_indices, state, x.shape[0], x.device)


def mask_from_lengths(lengths: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`[B, T]` bool, False for the pads behind the first `lengths` `[B]` of tokens `[B, T, ...]`."""
    return torch.arange(x.shape[1], device=x.device) < lengths[:, None]


def zero_pads(lengths: torch.Tensor, *tokens: torch.Tensor) -> list[torch.Tensor]:
    """Tokens `[B, T, ...]` with zeros at their pads."""
    real = mask_from_lengths(lengths, tokens[0])
    return [torch.where(real.view(*real.shape, *[1] * (x.ndim - 2)), x, 0) for x in tokens]


def export_slots(x: torch.Tensor, size: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """`[chunks, size]`: the places along T of tokens `[B, T, ...]` in the chunks of an exported graph.

    A tracer specialises on an axis of one element: so there is one chunk more than needed, and tokens are to be
    gathered by index rather than viewed.
    """
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens cannot be exported: pass the documents as rows, with lengths.")
    chunks = torch.arange((x.shape[1] + size - 1) // size + 1, device=x.device)
    return chunks[:, None] * size + torch.arange(size, device=x.device)


def within_documents(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """`[..., T, T]`, zero between tokens of different documents."""
    if cu_seqlens is None:
        return x
    document = document_of_tokens(cu_seqlens, x.shape[-1])
    return torch.where(document[:, None] == document, x, 0)


def document_of_tokens(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """`[length]`: the number of the document each token belongs to."""
    tokens = torch.arange(length, device=cu_seqlens.device)
    return torch.bucketize(tokens, cu_seqlens[1:-1].to(tokens.dtype), right=True)


def positions_from_cu_seqlens(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """`[B, T]` positions that restart at every document."""
    length = shape[0] * shape[1]
    starts = cu_seqlens.long()[document_of_tokens(cu_seqlens, length)]
    return (torch.arange(length, device=cu_seqlens.device) - starts).view(shape)
