"""One token of sparse attention in one launch for each set of keys: the set takes the token in, and its query reads it.

A program has one head. A later set leaves out the places that an earlier one has shown, so that every key counts once,
and the softmax goes on from the sums of the sets before. Nothing is read back by the host, so that a CUDA graph can
hold the step.
"""

from typing import Any, NamedTuple

import torch

from ..common.cpu import namespace
from ..common.launch import StateTouched, on_device, power_of_two, tl, triton
from .stream import Bins, SparseMemory


class Token(NamedTuple):
    """query `[N, d]`, entry `[N, d + D]` and, where the set has such, score, own and asked bin `[N]` of N = B S heads;
    place and mask (or None) `[B]`.
    """

    query: Any
    entry: Any
    score: Any
    own: Any
    asked: Any
    place: Any
    mask: Any


class KeptEntries(NamedTuple):
    """A set: entries `[N, bins, K, d + D]`, places `[N, bins, K]`; the best keys are one bin with scores `[N, K]`."""

    entries: Any
    places: Any
    scores: Any


class Sums(NamedTuple):
    """What a set hands on to the next: the places seen so far, `known` `[N, all keys]`; and in float32 `softmax`
    `[N, 2 + D]`, the largest logit, the sum of powers and that of the values.
    """

    known: Any
    softmax: Any


@triton.jit
def _remember(token, kept, n, bin, drop, place, keys, width, K: tl.constexpr, BW: tl.constexpr):
    """Drop the slot `drop` of a bin: among the best keys those behind it move up and the token becomes the last; in a
    ring the token takes the slot.
    """
    k = tl.arange(0, K)
    used = k < keys
    source = k + (k >= drop).to(tl.int32)
    if kept.scores is None:
        source = tl.where(k == drop, keys, k)
    moves = used & (source < keys)
    places = tl.where(source == keys, place, tl.load(kept.places + bin * keys + source, mask=moves, other=0))
    if kept.scores is not None:
        scores = tl.load(kept.scores + bin * keys + source, mask=moves, other=0.0)
        scores = tl.where(source == keys, tl.load(token.score + n), scores)
    for first in range(0, width, BW):
        w = first + tl.arange(0, BW)
        at = bin * keys * width + w[None, :]
        column = (w < width)[None, :]
        tile = tl.load(kept.entries + at + source[:, None] * width, mask=moves[:, None] & column, other=0.0)
        fresh = tl.load(token.entry + n * width + w, mask=w < width, other=0.0).to(tile.dtype)
        tile = tl.where((source == keys)[:, None], fresh[None, :], tile)
        tl.debug_barrier()  # all is read before it is written
        tl.store(kept.entries + at + k[:, None] * width, tile, mask=used[:, None] & column)
    tl.debug_barrier()
    tl.store(kept.places + bin * keys + k, places, mask=used)
    if kept.scores is not None:
        tl.store(kept.scores + bin * keys + k, scores, mask=used)


@triton.jit
def _unseen(places, known, before, BLOCK: tl.constexpr):
    """`places`, 0 for those among the first `before` known ones."""
    for first in range(0, before, BLOCK):
        j = first + tl.arange(0, BLOCK)
        there = tl.load(known + j, mask=j < before, other=0)
        found = tl.max((places[:, None] == there[None, :]).to(tl.int32), 1)
        places = tl.where(found > 0, 0, places)
    return places


@triton.jit
def step_set(
    token, kept, sums, out, heads, bins, keys, query_width, value_width, before, total,
    K: tl.constexpr, BQ: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One set of keys takes the token in and is read; grid [B S].

    before: how many places are known; out `[N, D]`, written by the last set and None for the others.
    """
    n = tl.program_id(0).to(tl.int64)
    row = n // heads
    width = query_width + value_width
    real = tl.load(token.mask + row) > 0 if token.mask is not None else row >= 0
    place = tl.load(token.place + row)
    k = tl.arange(0, K)
    used = k < keys
    if kept.scores is not None:
        # The worst makes room, of equals the latest, which may be the new one; an empty slot is worse than all.
        old = tl.load(kept.places + n * keys + k, mask=used, other=1)
        scores = tl.load(kept.scores + n * keys + k, mask=used, other=0.0)
        scores = tl.where(used, tl.where(old == 0, -float("inf"), scores), float("inf"))
        least = tl.min(scores, 0)
        drop = tl.max(tl.where(used & (scores == least), k, -1), 0)
        bin = n
        takes = real & (tl.load(token.score + n) > least)
    else:
        own = tl.load(token.own + n)
        bin = n * bins + tl.maximum(own, 0)
        takes = real & (own >= 0)
        # The oldest makes room, an empty slot before all.
        old = tl.load(kept.places + bin * keys + k, mask=used, other=place)
        drop = tl.min(tl.where(old == tl.min(old, 0), k, K), 0)
    if takes:
        _remember(token, kept, n, bin, drop, place, keys, width, K, BW)
    tl.debug_barrier()

    visible = used
    bin = n
    if token.asked is not None:
        asked = tl.load(token.asked + n)
        visible = k < tl.where(asked >= 0, keys, 0)
        bin = n * bins + tl.maximum(asked, 0)
    places = tl.load(kept.places + bin * keys + k, mask=visible, other=0)
    tl.store(sums.known + n * total + before + k, places, mask=used)
    if not FIRST:
        places = _unseen(places, sums.known + n * total, before, 16)
    seen = places != 0
    q = tl.arange(0, BQ)
    d = tl.arange(0, BD)
    entries = kept.entries + bin * keys * width + k[:, None] * width
    query = tl.load(token.query + n * query_width + q, mask=q < query_width, other=0.0).to(tl.float32)
    key = tl.load(entries + q[None, :], mask=seen[:, None] & (q < query_width)[None, :], other=0.0).to(tl.float32)
    inside = seen[:, None] & (d < value_width)[None, :]
    value = tl.load(entries + query_width + d[None, :], mask=inside, other=0.0).to(tl.float32)
    logits = tl.where(seen, tl.sum(key * query[None, :], 1), -float("inf"))
    largest = tl.max(logits, 0)
    at = sums.softmax + n * (2 + value_width)
    if not FIRST:
        largest = tl.maximum(largest, tl.load(at))
    level = tl.where(largest == -float("inf"), 0.0, largest)  # as long as nothing is seen
    powers = tl.exp(logits - level)
    weight = tl.sum(powers, 0)
    read = tl.sum(powers[:, None] * value, 0)
    if not FIRST:
        scale = tl.exp(tl.load(at) - level)
        weight += scale * tl.load(at + 1)
        read += scale * tl.load(at + 2 + d, mask=d < value_width, other=0.0)
    if out is None:
        tl.debug_barrier()
        tl.store(at, largest)
        tl.store(at + 1, weight)
        tl.store(at + 2 + d, read, mask=d < value_width)
    else:
        read = tl.where(real & (weight > 0), read / tl.where(weight > 0, weight, 1.0), 0.0)
        tl.store(out + n * value_width + d, read.to(out.dtype.element_ty), mask=d < value_width)


_step_set = step_set


@torch.library.custom_op(
    f"{namespace(__name__)}::step_set", mutates_args=("entries", "places", "scores", "known", "softmax", "out")
)
def _set(
    query: torch.Tensor, entry: torch.Tensor, score: torch.Tensor | None, own: torch.Tensor | None,
    asked: torch.Tensor | None, place: torch.Tensor, mask: torch.Tensor | None, entries: torch.Tensor,
    places: torch.Tensor, scores: torch.Tensor | None, known: torch.Tensor, softmax: torch.Tensor,
    out: torch.Tensor | None, before: int,
) -> None:  # fmt: skip
    (rows, width), value_width = query.shape, entry.shape[1] - query.shape[1]
    keys = places.shape[-1]
    with on_device(query):
        _step_set[(rows,)](
            Token(query, entry, score, own, asked, place, mask), KeptEntries(entries, places, scores),
            Sums(known, softmax), out, rows // len(place), places.numel() // (rows * keys), keys, width, value_width,
            before, known.shape[1], K=power_of_two(keys), BQ=power_of_two(width), BD=power_of_two(value_width), BW=16,
            FIRST=before == 0, num_warps=4,
        )  # fmt: skip


def triton_sparse_step(query, entry, memory: SparseMemory, scores, bins: tuple[Bins, ...], mask) -> torch.Tensor:
    """As `sparse_step` for queries `[N, d]` and entries `[N, d + D]`, with a contiguous memory; `[N, D]` in float32.

    Raises:
        StateTouched: when a launch fails after another has changed the memory.
    """
    place = memory.seen + (1 if mask is None else mask.long())
    mask = None if mask is None else mask.to(torch.uint8)  # a view of booleans is more than some graphs can have
    sets: list[tuple] = [] if memory.entries is None else [(memory.entries, memory.places, memory.scores, None)]
    sets += [(ring.entries, ring.places, None, part) for ring, part in zip(memory.rings, bins, strict=True)]
    value_width = entry.shape[1] - query.shape[1]
    known = memory.seen.new_empty(len(query), sum(places.shape[-1] for _, places, _, _ in sets))
    softmax = torch.empty(len(query), 2 + value_width, dtype=torch.float32, device=query.device)
    out = torch.empty(len(query), value_width, dtype=torch.float32, device=query.device)
    before = 0
    for number, (entries, places, kept_scores, part) in enumerate(sets, start=1):
        try:
            _set(
                query.contiguous(), entry.contiguous(), None if kept_scores is None else scores.flatten(),
                *((None, None) if part is None else (part.key.flatten(), part.query.flatten())), place, mask, entries,
                places, kept_scores, known, softmax, out if number == len(sets) else None, before,
            )  # fmt: skip
        except Exception as error:
            if number == 1:
                raise
            raise StateTouched(f"a set of keys failed after another had taken the token in: {error}") from error
        before += places.shape[-1]
    memory.seen.copy_(place)
    return out
