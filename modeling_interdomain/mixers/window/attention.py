"""Softmax attention to the last tokens and the first of a text, in blocks: time and memory are linear in its length.

Token t sees those from t - W + 1 to t, and of the first S tokens those that have left this window. Positions are those
within a window, so that angles are as exact after a million tokens as after ten: a sink keeps its distance to the query
until it is just before the window, and then stays there. Up to W + S tokens that is causal attention.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ...layers.common import is_plain
from ...layers.rotary import InterdomainRotaryEmbedding, rotate
from ...ops.common.cpu import in_graph

# Tokens of all rows that attend together, or a window of each: the scores of more would fill the memory.
_PIECE = 8192


class Seen(NamedTuple):
    """What the queries of T tokens see, keys before rotation.

    Attributes:
        key, value: `[B, W + T, G, D]`, of the W tokens before and of the tokens.
        sink_key, sink_value: of the first S tokens of a text, `[B, S, G, D]`, or `[1, T, S, G, D]`, of each token's
            where a row holds several texts. Those that have not been read are anything.
        places: `[B or 1, T]`, of each token in its text, from 0.
    """

    key: torch.Tensor
    value: torch.Tensor
    sink_key: torch.Tensor
    sink_value: torch.Tensor
    places: torch.Tensor

    def between(self, start: int, stop: int) -> "Seen":
        """What the queries of these tokens see."""
        before = self.key.shape[1] - self.places.shape[1]
        held = [x[:, start : before + stop] for x in self[:2]]
        held += [x if x.ndim == 4 else x[:, start:stop] for x in self[2:4]]
        return Seen(*[*held, self.places[:, start:stop]])


class WindowRotary(InterdomainRotaryEmbedding):
    """Cosines and sines of the positions within a window."""

    _kept: tuple = None, None

    def table(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the first positions, `[count, dim]` each, in the dtype of x."""
        # What a graph uses it computes itself: what is kept here may be gone when it is replayed.
        if in_graph() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._table(x, count)
        asked = x.dtype, x.device, count
        if self._kept[0] != asked:
            with torch.inference_mode(False):
                found = self._table(x, count)
            if type(found[0]) is not torch.Tensor:  # it has a shape alone
                return found
            self._kept = asked, found
        return self._kept[1]

    def _table(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self(x, torch.arange(count, device=x.device)[None])
        return cos[0], sin[0]


class WindowAttention(nn.Module):
    """Grouped-query attention `softmax(q k / sqrt(D)) v` to a window and sinks, rotated as `config.rope_parameters`."""

    def __init__(self, config):
        super().__init__()
        self.window, self.sinks = config.attention_window, config.attention_sinks
        self.scaling, self.dropout = config.head_dim**-0.5, config.attention_dropout
        self.rotary = None if config.rope_parameters is None else WindowRotary(config)

    def forward(self, query: torch.Tensor, seen: Seen) -> torch.Tensor:
        """`[B, T, H, D]`, before rotation, to the same."""
        batch, length = query.shape[:2]
        if length == 1 and is_plain(query, query.dtype) and bool((seen.places >= self.window + self.sinks).all()):
            return self._one(query, seen)
        if torch.compiler.is_exporting():  # a graph for every length, which is no number of blocks
            return self._blocks(query, seen, 1)
        if length == 1 or (not in_graph() and length <= self.window):
            return self._blocks(query, seen, length)
        room = self.window * max(1, _PIECE // (batch * self.window))
        if in_graph() or length <= room:
            return self._blocks(query, seen, self.window)
        pieces = [(start, min(start + room, length)) for start in range(0, length, room)]
        outputs = [self._blocks(query[:, a:b], seen.between(a, b), self.window) for a, b in pieces]
        return torch.cat(outputs, dim=1)

    def _one(self, query: torch.Tensor, seen: Seen) -> torch.Tensor:
        """Of a token far into each text, in few calls: it sees the sinks and the window behind them as one text."""
        key, value = (torch.cat([first, x[:, 1:]], dim=1) for first, x in zip(seen[2:4], seen[:2], strict=True))
        if self.rotary is not None:
            cos, sin = (x[None] for x in self.rotary.table(query, self.window + max(1, self.sinks)))
            key = rotate(key, cos[:, : key.shape[1]], sin[:, : key.shape[1]])
            query = rotate(query, cos[:, key.shape[1] - 1 : key.shape[1]], sin[:, key.shape[1] - 1 : key.shape[1]])
        grouped = (query[:, 0] * self.scaling).unflatten(1, (key.shape[2], -1))
        scores = grouped @ key.permute(0, 2, 3, 1)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
        return (weights @ value.transpose(1, 2)).flatten(1, 2)[:, None]

    def _blocks(self, query: torch.Tensor, seen: Seen, size: int) -> torch.Tensor:
        """Blocks of `size` queries, the last of which is filled up; each sees W + `size` keys and the sinks."""
        (length, heads), groups = query.shape[1:3], seen.key.shape[2]
        count = (length + size - 1) // size
        missing = count * size - length
        query, key, value = (_longer(x, missing) for x in (query * self.scaling, *seen[:2]))
        places = F.pad(seen.places, (0, missing))
        key, value = (self._overlapping(x, size) for x in (key, value))

        own = toward = query
        sink_key, sink_value = (
            x if x.ndim == 4 else _longer(x, missing).unflatten(1, (count, size)) for x in seen[2:4]
        )
        within = torch.arange(self.window + size, device=query.device)
        if self.rotary is not None:
            cos_sin = self.rotary.table(query, self.window + max(size, self.sinks))
            key = _turned(key, *(x[: self.window + size] for x in cos_sin))
            sink_key = _turned(sink_key, *(x[: self.sinks] for x in cos_sin))
            here, farthest = within[self.window :].repeat(count)[None], self.window + self.sinks - 1
            own, toward = (rotate(query, *(x[at] for x in cos_sin)) for at in (here, places.clamp(max=farthest)))

        # By block, and by the groups whose keys heads share.
        own, toward = (x.unflatten(2, (groups, heads // groups)).unflatten(1, (count, size)) for x in (own, toward))
        places = places.unflatten(1, (count, size))[:, :, None, None, :, None]
        distance = within[self.window :, None] - within
        visible = (distance >= 0) & (distance < self.window) & (distance <= places)
        scores = torch.einsum("bnlgrd,bnkgd->bngrlk", own, key).masked_fill(~visible, -torch.inf)
        if self.sinks:
            visible = places - torch.arange(self.sinks, device=places.device) >= self.window
            each = "bsgd" if sink_key.ndim == 4 else "bnlsgd"
            beside = torch.einsum(f"bnlgrd,{each}->bngrls", toward, sink_key).masked_fill(~visible, -torch.inf)
            scores = torch.cat([scores, beside], dim=-1)

        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(dim=-1, dtype=wide).to(value.dtype)
        if self.dropout and self.training:
            weights = F.dropout(weights, p=self.dropout)
        output = torch.einsum("bngrlk,bnkgd->bnlgrd", weights[..., : key.shape[2]], value)
        if self.sinks:
            output = output + torch.einsum(f"bngrls,{each}->bnlgrd", weights[..., key.shape[2] :], sink_value)
        return output.flatten(3, 4).flatten(1, 2)[:, :length]

    def _overlapping(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """`[B, W + n size, G, D]` to what each block sees, `[B, n, W + size, G, D]`."""
        if size == 1:
            return x.unfold(1, self.window + 1, 1).movedim(-1, 2)
        if size < self.window:  # one block
            return x.unsqueeze(1)
        blocks = x.unflatten(1, (-1, size))
        return torch.cat([blocks[:, :-1], blocks[:, 1:]], dim=2)


def _longer(x: torch.Tensor, count: int) -> torch.Tensor:
    """Zeros for so many more tokens."""
    return F.pad(x, (*[0] * (2 * x.ndim - 3), count))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Keys `[..., K, G, D]` at places 0 to K - 1."""
    lead = x.shape[:-3]
    return rotate(x.flatten(0, -4), cos[None], sin[None]).unflatten(0, lead)
