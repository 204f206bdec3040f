"""What all operators share: powers of a decay, which tokens belong to which document, and the checks of both."""

from typing import NamedTuple

import torch


def decay_powers(log_decay: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """`lambda ** exponents`, computed in float64 whatever the dtype of the parameters.

    A phase of 128 rad a token over 64 tokens is 8,192 rad: float32 would keep only three digits of the angle. Exponents
    are non-negative, so that every power of a stable decay stays within [0, 1] and no chunk length, step size or decay
    rate can overflow; the fused kernels alone ask for negative ones, where they know that the result is finite.

    Args:
        log_decay: `[G, M, 2]`, Delta A as (real, imaginary) pairs; the imaginary part in radians per token.
        exponents: `[E]`, integers.

    Returns:
        `[G, E, M]`, complex128.
    """
    exponents = exponents.to(torch.float64)[:, None]
    rate, phase = log_decay.to(torch.float64)[:, None].unbind(-1)
    return torch.polar((rate * exponents).exp(), phase * exponents)


def as_complex(pairs: torch.Tensor) -> torch.Tensor:
    """View real pairs `[..., 2]` as complex numbers `[...]`, in the nearest dtype that has a complex partner."""
    if pairs.dtype not in (torch.float32, torch.float64):
        pairs = pairs.float()
    return torch.view_as_complex(pairs.contiguous())


class Packing(NamedTuple):
    """The real tokens of a batch as one row of documents.

    Attributes:
        cu_seqlens: `[S + 1]`, the ends of the documents along the packed row, starting with 0.
        tokens: `[n]`, where in the flattened `[B T]` batch the packed tokens come from; None when all of them do.
        rows: `[S]`, the batch row of each document, where documents and batch rows correspond and some rows have no
            real token; None when document s is row s, or documents are not rows at all.
        mask: `[B, T]` bool, False for pads; None when there are none.
    """

    cu_seqlens: torch.Tensor
    tokens: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, ...]` to `[1, n, ...]`."""
        x = x.flatten(0, 1)
        return (x if self.tokens is None else x.index_select(0, self.tokens))[None]

    def unpack(self, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """`[1, n, ...]` back to `[B, T, ...]` with zeros at the pads; `shape` is [B, T]."""
        if self.tokens is None:
            return x[0].unflatten(0, tuple(shape))
        flat = x.new_zeros(shape[0] * shape[1], *x.shape[2:])
        return flat.index_copy(0, self.tokens, x[0]).unflatten(0, tuple(shape))


def packing_from_mask(mask: torch.Tensor) -> Packing:
    """Leave the pads of a `[B, T]` mask out, wherever they stand: one document a row that has a real token."""
    mask = mask.bool()
    lengths = mask.sum(dim=1)
    rows = lengths.nonzero()[:, 0]
    cu_seqlens = torch.nn.functional.pad(lengths[rows].cumsum(0), (1, 0))
    every_row = rows.numel() == mask.shape[0]
    return Packing(cu_seqlens, mask.flatten().nonzero()[:, 0], None if every_row else rows, mask)


def packing_from_documents(cu_seqlens: torch.Tensor, mask: torch.Tensor | None) -> Packing:
    """Documents along the flattened `[B, T]` batch, without the pads that a mask marks in them."""
    cu_seqlens = cu_seqlens.long()
    if mask is None:
        return Packing(cu_seqlens)
    real = mask.bool().flatten()
    counted = torch.nn.functional.pad(real.long().cumsum(0), (1, 0))
    return Packing(counted[cu_seqlens].unique_consecutive(), real.nonzero()[:, 0], mask=mask.bool())


def cu_seqlens_from_positions(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Documents start wherever `position_ids` `[B, T]` do not go up by one; None when every row is one document."""
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=1) != 1
    if not starts[:, 1:].any():
        return None
    begins = starts.flatten().nonzero()[:, 0]
    return torch.cat([begins, begins.new_tensor([position_ids.numel()])])


def document_of_tokens(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """`[length]`: the number of the document each token belongs to."""
    tokens = torch.arange(length, device=cu_seqlens.device)
    return torch.bucketize(tokens, cu_seqlens[1:-1].to(tokens.dtype), right=True)


def positions_from_cu_seqlens(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """`[1, T]` positions that restart at every document."""
    cu_seqlens = cu_seqlens.long()
    lengths = cu_seqlens.diff()
    starts = torch.repeat_interleave(cu_seqlens[:-1], lengths)
    return (torch.arange(length, device=cu_seqlens.device) - starts)[None]


def check_documents(cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None, x: torch.Tensor) -> None:
    """Refuse `cu_seqlens` or `lengths` that do not fit tokens `[B, T, ...]`; their values where it costs no graph."""
    batch, length = x.shape[:2]
    if lengths is not None:
        if cu_seqlens is not None:
            raise ValueError("lengths and cu_seqlens exclude each other: documents have no pads to leave out.")
        if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise ValueError(f"lengths must be integers of shape [B] = [{batch}], got {_described(lengths)}.")
        if not torch.compiler.is_compiling() and bool(((lengths < 0) | (lengths > length)).any()):
            raise ValueError(f"lengths must lie between 0 and T = {length}, got {lengths.tolist()}.")
    if cu_seqlens is None:
        return
    if batch != 1:
        raise ValueError(f"cu_seqlens packs the documents into one row, so query must have B = 1, got B = {batch}.")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be integers of shape [S + 1] with S >= 1, got {_described(cu_seqlens)}.")
    if torch.compiler.is_compiling():
        return
    first, last, falling = torch.stack([cu_seqlens[0], cu_seqlens[-1], (cu_seqlens.diff() < 0).any()]).tolist()
    if first != 0 or last != length:
        raise ValueError(f"cu_seqlens must run from 0 to T = {length}, got {first} to {last}.")
    if falling:
        raise ValueError("cu_seqlens must never decrease: every document begins where the one before it ends.")


def _described(x: torch.Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)}"
