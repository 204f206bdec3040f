"""Where the tokens of a batch go: pads to the end of their rows, packed documents into one row."""

from typing import NamedTuple

import torch

from .cpu import in_graph


class Packing(NamedTuple):
    """What a recurrent layer works on, when the batch is not simply B rows of T real tokens.

    Pads go to the end: a mask brings the real tokens of every row to its front, in their order, and packed documents
    become one row whose pads, if there are any, are one more document behind the last. The sizes are those of the batch
    whatever the values are, so that a compiled graph holds for every mask; but for texts that fork, whose common
    beginnings stand in the document of each (`packing_from_forks`).

    Attributes:
        shape: B and T of the batch.
        mask: `[B, T]` bool, False for pads; None when there are none.
        tokens: `[B T]`, where in the flattened batch each packed token comes from; None when all stay in place.
        places: `[B T]`, the inverse of `tokens`: where each token of the batch stands first.
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
    """Rows of a `[B, T]` mask, their pads at the end wherever they stood."""
    mask = mask.bool()
    places, tokens = _real_tokens_first(mask)
    return Packing((mask.shape[0], mask.shape[1]), mask, tokens, places, lengths=mask.sum(dim=1))


def packing_from_documents(cu_seqlens: torch.Tensor, mask: torch.Tensor | None, shape: tuple[int, int]) -> Packing:
    """Documents along the flattened `[B, T]` batch, without the pads that a mask marks in them."""
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
    """The texts of a batch that fork, for a `[B, T, T]` bool mask of which tokens each token sees.

    A state reads one token after the other, so whatever a token sees must itself see what that token sees up to there.
    Every way through the fork is a document; tokens that do not see themselves are pads. None for all other masks.
    """
    batch, length = seen.shape[:2]
    real = seen.diagonal(dim1=1, dim2=2)
    seen = seen & real[..., None]
    counts = seen.to(torch.float32)
    shared = counts @ counts.mT
    if bool((seen & ((shared != counts.sum(2)[:, None]) | (shared != counts.cumsum(2)))).any()):
        return None
    rows, ends = (real & (seen.sum(1) == 1)).nonzero().unbind(1)  # whom no other token sees
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
    """Where every token of a `[B, T]` mask goes, and where each of these places comes from, both `[B T]`."""
    rows, length = mask.shape
    real, pads = mask.long().cumsum(1), (~mask).long().cumsum(1)
    places = torch.where(mask, real, real[:, -1:] + pads) - 1
    places = (places + length * torch.arange(rows, device=mask.device)[:, None]).flatten()
    numbers = torch.arange(rows * length, device=mask.device)
    return places, torch.zeros_like(places).scatter(0, places, numbers)


def cu_seqlens_from_positions(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Documents start wherever `position_ids` `[B, T]` do not go up; None when every row is one document.

    In a graph, where no size may depend on values, the answer always has `B T + 1` entries: empty documents follow the
    last one.
    """
    return _ends_before(position_ids[:, 1:] <= position_ids[:, :-1])  # unsigned numbers have no negative difference


def cu_seqlens_from_numbers(documents: torch.Tensor) -> torch.Tensor | None:
    """The same, where the number of its document is known of each token, `[B, T]`."""
    return _ends_before(documents[:, 1:] != documents[:, :-1])


def _ends_before(later: torch.Tensor) -> torch.Tensor | None:
    """`later` `[B, T - 1]`: whether the second and later tokens of a row start a document."""
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


def mask_from_lengths(lengths: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`[B, T]` bool, False for the pads behind the first `lengths` `[B]` of tokens `[B, T, ...]`."""
    return torch.arange(x.shape[1], device=x.device) < lengths[:, None]


def zero_pads(lengths: torch.Tensor, *tokens: torch.Tensor) -> list[torch.Tensor]:
    """Tokens `[B, T, ...]` with zeros at their pads."""
    real = mask_from_lengths(lengths, tokens[0])
    return [torch.where(real.view(*real.shape, *[1] * (x.ndim - 2)), x, 0) for x in tokens]


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
