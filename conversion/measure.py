"""Perplexity by the place in a text: what a window cannot see shows behind it, what a state cannot hold further on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from examples.text_data import InputError

PIECE = 2048  # tokens that are read at once


def beginnings(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], count: int, length: int) -> torch.Tensor:
    """The first `length` tokens of the first `count` documents that are long enough, `[count, length]`."""
    rows: list[list[int]] = []
    for document in documents:
        # A token has a byte at least, and most have four.
        for text in (document[: 8 * length], document):
            ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            if len(ids) >= length:
                rows.append(ids[:length])
                break
        if len(rows) == count:
            return torch.tensor(rows)
    raise InputError(f"Of {len(documents):,} documents {len(rows)} have {length:,} tokens: {count} are needed.")


@torch.no_grad()
def nats_by_position(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Nats `[N, T - 1]` of all tokens of `[N, T]` but the first, each text read from nothing."""
    found = []
    for row in rows.to(model.device):
        cache, nats = None, []
        for start in range(0, len(row) - 1, PIECE):
            ids, wanted = row[start : start + PIECE], row[start + 1 : start + PIECE + 1]
            output = model(input_ids=ids[None], past_key_values=cache, use_cache=len(row) > PIECE)
            cache = output.past_key_values
            nats.append(F.cross_entropy(output.logits[0, : len(wanted)].float(), wanted, reduction="none").cpu())
        found.append(torch.cat(nats))
    return torch.stack(found)


def between(nats: torch.Tensor, edges: Sequence[int]) -> dict[str, float]:
    """Perplexity of the tokens from one edge to the next, of `[N, T]` nats, and of all."""
    parts = {f"{a}-{b}": nats[:, a:b] for a, b in zip(edges, edges[1:]) if a < nats.shape[1]}
    return {name: part.double().mean().exp().item() for name, part in (parts | {"all": nats}).items()}


def octaves(length: int) -> list[int]:
    """Edges at 0, 256, and from there a factor of 4 apart, up to `length`."""
    edges, edge = [0], 256
    while edge < length:
        edges.append(edge)
        edge *= 4
    return [*edges, length]
