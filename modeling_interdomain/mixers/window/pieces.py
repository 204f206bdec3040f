"""What a window sees of a row's tokens that other processes have read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch


def held_before(piece: Any, projections: Sequence[torch.Tensor], window: int, sinks: int) -> list[torch.Tensor]:
    """What a cache would hold of the document that each row of a `SequencePiece` begins in, before the piece.

    Args:
        projections: keys and values `[B, T, W]` of the piece, or `[1, B T, W]` where it is packed.

    Returns:
        The last `window` of each, `[B, W, window]`; how many tokens there were, `[B, 1, 1]`; the first `sinks` of each.
    """
    projections = [piece.rows(x) for x in projections]
    piece = replace(piece, first=None)  # a row of a batch, not a row a document
    last = piece.conv_state(projections, window)
    counts = [torch.zeros_like(piece.tokens[0])]
    for forgets, tokens in zip(piece.forgets, piece.tokens, strict=True):
        counts.append(tokens + torch.where(forgets, 0, counts[-1]))
    before = [torch.where(forgets, 0, count) for forgets, count in zip(piece.forgets, counts)]
    count = torch.where(piece.begins, 0, counts[piece.group.rank()])[:, None, None]
    first = [x.new_zeros(*x.shape[::2], 0) for x in projections]
    if sinks:
        wanted = torch.arange(sinks, device=count.device)
        start = piece.last.long().argmax(dim=1, keepdim=True)
        own = [_at(x, (start + wanted).clamp(max=x.shape[1] - 1)).mT for x in projections]

        def after(found: torch.Tensor, part: torch.Tensor, process: int) -> torch.Tensor:
            at = (wanted - before[process][:, None])[:, None]
            new = part.gather(2, at.clamp(min=0).expand(-1, part.shape[1], -1))
            return torch.where((at >= 0) & (at < piece.tokens[process][:, None, None]), new, found)

        first = list(piece.handed_on(torch.cat(own, dim=1), after).split([x.shape[-1] for x in projections], dim=1))
    return [*last, count, *first]


def _at(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Tokens `[B, T, W]` at places `[B, S]`."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
