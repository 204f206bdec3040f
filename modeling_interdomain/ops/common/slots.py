"""States in the slots of a pool, as servers keep them: `state_indices` names the slot of each row of a batch."""

from collections.abc import Callable
from typing import Any

import torch

from .checks import shape_of
from .cpu import values_at_hand

# From this size of a state on, stepping rows one by one in place costs less than copying them together and back.
_LARGE = 1 << 16


def check_slots(state_indices: Any, state: Any, rows: int, device: torch.device) -> int:
    """The number of slots of a pool, after a check of the slots that the rows of a batch name.

    Raises:
        ValueError: when the indices are no integers `[B]` on the device of the tokens; on a CPU outside graphs also
            when one is beyond the pool or two rows share a slot.
    """
    found = state_indices
    if not isinstance(found, torch.Tensor) or found.dtype not in (torch.int32, torch.int64) or found.shape != (rows,):
        dtype = f"{found.dtype} of shape " if isinstance(found, torch.Tensor) else ""
        raise ValueError(f"state_indices must be int32 or int64 of shape [B] = [{rows}], got {dtype}{shape_of(found)}.")
    if found.device != device:
        raise ValueError(f"state_indices is on {found.device}, but the tokens are on {device}; move it there.")
    if not isinstance(state, torch.Tensor) or state.ndim == 0 or state.shape[0] == 0:
        raise ValueError(f"state must be a pool [N, ...] of at least one slot, got {shape_of(state)}.")
    slots = state.shape[0]
    if values_at_hand(found):
        used = [n for n in found.tolist() if n >= 0]
        if used and max(used) >= slots:
            raise ValueError(f"state_indices must be below the N = {slots} slots of state, got {max(used)}.")
        if len(set(used)) < len(used):
            raise ValueError(f"state_indices must name a slot for one row alone, got {found.tolist()}.")
    return slots


def real_slots(mask: torch.Tensor | None, state_indices: torch.Tensor) -> torch.Tensor:
    """The mask `[B]` of a step, False also for rows without a slot."""
    real = state_indices >= 0
    return real if mask is None else mask & real


def step_slots(
    step: Callable[..., torch.Tensor],
    pool: torch.Tensor,
    state_indices: torch.Tensor,
    mask: torch.Tensor | None,
    *tokens: torch.Tensor,
) -> torch.Tensor:
    """Take a step in PyTorch on some slots of a pool; the others are neither read nor written.

    A run of neighbouring slots is advanced in place, and with large states several runs are, one after the other.

    Args:
        step: called with states `[b, ...]`, which it overwrites, a mask `[b]` or None, and tokens of some rows; returns
            their outputs.
        pool: `[N, ...]`.
        state_indices: `[B]`, the slot of each row, no two the same; one below 0 leaves the pool alone, and its row has
            no real token.
        mask, tokens: `[B]`, bool, or None; and `[B, ...]` each.
    """
    if values_at_hand(state_indices):
        runs = _runs(state_indices.tolist())
        if min(slot for slot, _, _ in runs) >= 0 and (len(runs) == 1 or pool.numel() >= _LARGE * pool.shape[0]):
            found = [
                step(
                    pool.narrow(0, slot, count),
                    None if mask is None else mask.narrow(0, first, count),
                    *(x.narrow(0, first, count) for x in tokens),
                )
                for slot, first, count in runs
            ]
            return found[0] if len(found) == 1 else torch.cat(found)
    rows = read_slots(pool, state_indices)
    output = step(rows, real_slots(mask, state_indices), *tokens)
    write_slots(pool, state_indices, rows)
    return output


def _runs(slots: list[int]) -> list[tuple[int, int, int]]:
    """Runs of neighbouring slots as (first slot, its row, number of slots)."""
    runs: list[tuple[int, int, int]] = []
    for row, slot in enumerate(slots):
        if runs and slot == sum(runs[-1][::2]):
            runs[-1] = *runs[-1][:2], runs[-1][2] + 1
        else:
            runs.append((slot, row, 1))
    return runs


def read_slots(pool: torch.Tensor, state_indices: torch.Tensor, begun: torch.Tensor | None = None) -> torch.Tensor:
    """A copy `[B, ...]` of the states in some slots of a pool: what a prefill goes on from.

    Args:
        pool: `[N, ...]`.
        state_indices: `[B]`; below 0 for a pad, whose row of the result means nothing.
        begun: `[B]` bool, False for a new request, which begins from zeros whatever its slot holds.
    """
    rows = pool.index_select(0, state_indices.clamp(min=0))
    return rows if begun is None else rows.where(begun.view(-1, *[1] * (rows.ndim - 1)), 0)


def write_slots(pool: torch.Tensor, state_indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Write states `[B, ...]` to their slots in the dtype of the pool; those of pads are dropped."""
    rows, real = rows.to(pool.dtype), state_indices >= 0
    if values_at_hand(state_indices):
        if not bool(real.all()):
            kept = real.nonzero()[:, 0]
            state_indices, rows = state_indices.index_select(0, kept), rows.index_select(0, kept)
    else:
        # No size may depend on values: a pad writes what the first real row writes, or, without one, what is there.
        first = real.int().argmax()
        here = torch.where(real, torch.arange(rows.shape[0], device=rows.device), first)
        state_indices = state_indices.index_select(0, here).clamp(min=0)
        there = pool.index_select(0, state_indices)
        rows = torch.where(real.any(), rows.index_select(0, here), there)
    pool.index_copy_(0, state_indices.long(), rows)
