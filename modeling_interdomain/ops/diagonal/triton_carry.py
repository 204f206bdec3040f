"""Joining segments: what a state is worth after the tokens of the segments that follow."""

import torch


def segment_ends(lengths: torch.Tensor, chunk: int, segments: int) -> torch.Tensor:
    """Where the segments of rows of `lengths` `[rows]` tokens end, `[rows, segments + 1]`, beginning with 0.

    The same cut as `segment_of` of `ops/common/tiles.py`: whole chunks, as even as they go, the last ones
    possibly empty.
    """
    chunks = (lengths + chunk - 1) // chunk
    each = (chunks + segments - 1) // segments
    ends = each[:, None] * torch.arange(segments + 1, device=lengths.device) * chunk
    return torch.minimum(ends, lengths[:, None])


def _decays(powers: torch.Tensor, distance: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """lambda^distance where `used`, otherwise 0; `[*distance.shape, G, M]`, from powers `[G, C, 2, M]`."""
    chunk, size = powers.shape[1], powers.shape[3]
    table = torch.complex(powers[:, :, 0].double(), powers[:, :, 1].double())  # [G, C, M], lambda^(t+1)
    whole, rest = distance // chunk, distance % chunk
    last = table[:, -1]
    full = torch.polar(last.abs() ** whole[..., None, None], last.angle() * whole[..., None, None])
    ones = torch.ones_like(table[:, :1])
    part = torch.cat([ones, table], dim=1).movedim(1, 0)[rest]
    return torch.where(used[..., None, None], full * part, 0).to(torch.complex64).view(*distance.shape, -1, size)


def carry(powers: torch.Tensor, sources: torch.Tensor, at: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """`out[s] = sum_j lambda^(to_s - at_j) sources[j]` over the sources at or before `to_s`.

    Args:
        powers: `[G, C, 2, M]`, lambda^(t+1).
        sources: `[rows, segments, G, 2, M, width]`.
        at, to: `[rows, segments]`, tokens; source j counts for output s where j <= s.

    Returns:
        Like `sources`.
    """
    segments = torch.arange(sources.shape[1], device=sources.device)
    used = (segments[None, :] <= segments[:, None])[None]
    distance = torch.where(used, to[:, :, None] - at[:, None, :], 0)
    decays = _decays(powers, distance, used.expand_as(distance))  # [rows, s, j, G, M]
    numbers = torch.complex(sources[:, :, :, 0], sources[:, :, :, 1])
    # One product a mode: [rows, G, M, s, j] times [rows, G, M, j, width].
    joined = decays.permute(0, 3, 4, 1, 2) @ numbers.permute(0, 2, 3, 1, 4)
    joined = joined.permute(0, 3, 1, 2, 4)
    return torch.stack([joined.real, joined.imag], dim=3).contiguous()


def carry_back(powers: torch.Tensor, sources: torch.Tensor, at: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """The adjoint road: `out[s] = sum_{j >= s} conj(lambda)^(at_j - to_s) sources[j]`."""
    conjugate = torch.stack([powers[:, :, 0], -powers[:, :, 1]], dim=2)
    return carry(conjugate, sources.flip(1), -at.flip(1), -to.flip(1)).flip(1).contiguous()
