"""Softmax attention to the last tokens and the first of a text, in blocks: time and memory are linear in its length.

Token t sees those from t - W + 1 to t, and of the first S tokens those that have left this window; and, where there is
a memory in the softmax, as one key more, with a score of its own, what stands for all between. Positions are those
within a window, so that angles are as exact after a million tokens as after ten: a sink keeps its distance to the query
until it is just before the window, and then stays there. Up to W + S tokens that is causal attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ...layers.rotary import InterdomainRotaryEmbedding, rotate
from ...ops.common.cpu import in_graph

# Tokens of all rows that attend together, or a window of each: the scores of more would fill the memory. Kernels that
# keep no scores take more; they have room for 65,535 blocks.
_PIECE, _FUSED_PIECE = 8192, 32768
_NEVER = torch.iinfo(torch.long).max
_ALIGNED = 8  # numbers that kernels ask rows of a mask and widths of heads to be multiples of


class Seen(NamedTuple):
    """What the queries of T tokens see, keys before rotation.

    Attributes:
        key, value: `[B, W + T, G, D]`, of the W tokens before and of the tokens.
        sink_key, sink_value: of the first S tokens of a text, `[B, S, G, D]`, or `[1, N, S, G, D]` where a row holds
            several: of the text that each block of queries begins in, the one of which it may have left a window.
            Those that have not been read are anything.
        places: `[B or 1, T]`, of each token in its text, from 0; None for a token far into each text, to which all of
            these are visible but the first, and whose state holds as much as counts.
    """

    key: torch.Tensor
    value: torch.Tensor
    sink_key: torch.Tensor
    sink_value: torch.Tensor
    places: torch.Tensor | None

    def between(self, start: int, stop: int, size: int) -> "Seen":
        """What the queries of these tokens see, in blocks of `size`."""
        before = self.key.shape[1] - self.places.shape[1]
        held = [x[:, start : before + stop] for x in self[:2]]
        held += [x if x.ndim == 4 else x[:, start // size : -(-stop // size)] for x in self[2:4]]
        return Seen(*[*held, self.places[:, start:stop]])


class WindowAttention(nn.Module):
    """Grouped-query attention `softmax(q k / sqrt(D)) v` to a window and sinks, rotated as `config.rope_parameters`."""

    def __init__(self, config):
        super().__init__()
        self.window, self.sinks = config.attention_window, config.attention_sinks
        self.scaling, self.dropout = config.head_dim**-0.5, config.attention_dropout
        self.rotary = None if config.rope_parameters is None else InterdomainRotaryEmbedding(config)
        self._kept: dict[tuple, Any] = {}
        self._made_of: list[tuple] = []  # the frequencies of which angles are kept, with their versions and addresses

    def block(self, length: int) -> int:
        """How many of so many queries attend together."""
        if length == 1 or torch.compiler.is_exporting():  # a graph for every length, which is no number of blocks
            return 1
        return self.window if in_graph() else min(length, self.window)

    def forward(self, query: torch.Tensor, seen: Seen, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Queries `[B, T, H, D]`, before rotation, to the same.

        Args:
            memory: `[B, T, H]`, the scores of one key more, which answers zeros; -inf where there is none.

        Returns:
            The output; with `memory` `[B, T, H, D + 1]`, at the end the weight of this key.
        """
        batch, length = query.shape[:2]
        if seen.places is None:
            return self._one(query, seen, memory)
        fused, size = query.is_cuda and not torch.compiler.is_exporting(), self.block(length)
        attend = self._fused if fused else self._blocks
        room = self.window * max(1, (_FUSED_PIECE if fused else _PIECE) // (batch * self.window))
        if in_graph() or length <= room:
            return attend(query, seen, size, memory)
        found = []
        for start in range(0, length, room):
            here = slice(start, min(start + room, length))
            own = None if memory is None else memory[:, here]
            found.append(attend(query[:, here], seen.between(here.start, here.stop, size), size, own))
        return torch.cat(found, dim=1)

    def _one(self, query: torch.Tensor, seen: Seen, memory: torch.Tensor | None) -> torch.Tensor:
        """Of a token far into each text, in few calls: it sees the sinks and the window behind them as one text.

        Keys are turned by how far they are behind it; it is not turned. A head's numbers come before tokens, as in a
        cache.
        """
        key, value = (
            torch.cat([first.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1)[..., 1:]], dim=3)
            for first, x in zip(seen[2:4], seen[:2], strict=True)
        )
        scaling = self.scaling
        if self.rotary is not None:
            cos, sin = self._kept_or("distances", self._distances, query, key.shape[3])
            turned, half = key * cos, len(sin) // 2
            turned[:, :, :half].addcmul_(key[:, :, half : 2 * half], sin[:half], value=-1)
            turned[:, :, half : 2 * half].addcmul_(key[:, :, :half], sin[half:])
            key, scaling = turned, scaling * self.rotary.attention_scaling
        scores = (query[:, 0] * scaling).unflatten(1, (key.shape[1], -1)) @ key
        if memory is not None:
            scores = torch.cat([scores, memory[:, 0].to(scores.dtype).view(*scores.shape[:3], 1)], dim=-1)
        weights = scores.softmax(dim=-1)
        if self.dropout and self.training:
            weights = F.dropout(weights, p=self.dropout)
        output = weights[..., : key.shape[3]] @ value.mT
        if memory is not None:
            output = torch.cat([output, weights[..., key.shape[3] :]], dim=-1)
        return output.flatten(1, 2)[:, None]

    def _distances(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines `[D, count]` and sines `[dim, count]` of the last places up to 0, in the dtype of x."""
        cos, sin = (y[0].T for y in self.rotary(x, torch.arange(1 - count, 1, device=x.device)[None]))
        return F.pad(cos, (0, 0, 0, x.shape[-1] - len(cos)), value=1).contiguous(), sin.contiguous()

    def _blocks(self, query: torch.Tensor, seen: Seen, size: int, memory: torch.Tensor | None) -> torch.Tensor:
        """Blocks of `size` queries, the last of which is filled up; each sees the sinks and W + `size` keys."""
        (length, heads), groups = query.shape[1:3], seen.key.shape[2]
        query, places, *parts = self._in_blocks(query * self.scaling, seen, size)
        (sink_key, key), (sink_value, value) = ((sinks, torch.cat(keys, dim=2)) for sinks, *keys in parts)
        own = toward = query
        if self.rotary is not None:
            cos_sin = self._angles(query, self.window + max(size, self.sinks))
            key = _turned(key, *(x[: self.window + size] for x in cos_sin))
            sink_key = _turned(sink_key, *(x[: self.sinks] for x in cos_sin))
            own, toward = (rotate(query, *(x[at] for x in cos_sin)) for at in self._turns(places, size))

        # By block, and by the groups whose keys heads share.
        own, toward = (x.unflatten(2, (groups, heads // groups)).unflatten(1, (-1, size)) for x in (own, toward))
        scores = [torch.einsum("bnlgrd,bnkgd->bngrlk", own, key)]
        if self.sinks:
            scores.insert(0, torch.einsum("bnlgrd,bnsgd->bngrls", toward, sink_key))
        if memory is not None:
            memory = _longer(memory, query.shape[1] - length, size).unflatten(2, (groups, -1)).unflatten(1, (-1, size))
            scores.append(memory.permute(0, 1, 3, 4, 2)[..., None].to(key.dtype))
        joined = torch.cat(scores, dim=-1) if len(scores) > 1 else scores[0]
        # Added in place, which costs a backward pass nothing. A softmax sums up in float32, whatever its dtype.
        mask = self._mask(joined, places.unflatten(1, (-1, 1, 1, size, 1)), joined.shape[-1])
        weights = joined.add_(mask).softmax(dim=-1)
        if self.dropout and self.training:
            weights = F.dropout(weights, p=self.dropout)
        sinks, own, rest = weights.split([self.sinks, key.shape[2], weights.shape[-1] - self.sinks - key.shape[2]], -1)
        output = torch.einsum("bngrlk,bnkgd->bnlgrd", own, value)
        if self.sinks:
            output = output + torch.einsum("bngrls,bnsgd->bnlgrd", sinks, sink_value)
        if memory is not None:
            output = torch.cat([output, rest.permute(0, 1, 4, 2, 3, 5)], dim=-1)
        return _first(output.flatten(3, 4).flatten(1, 2), length)

    def _fused(self, query: torch.Tensor, seen: Seen, size: int, memory: torch.Tensor | None) -> torch.Tensor:
        """What `_blocks` gives, by the library's kernels, which keep no scores: a block is a row of their batch.

        Heads that share keys are more queries of a block. To a sink a query stands elsewhere than to a key of the
        window, so it is turned for both, one behind the other, and a key has zeros where it meets the other of them.
        What a memory scores is one number more of a query, where its key alone has a one, as its value has at the end.
        """
        (batch, length, heads), groups = query.shape[:3], seen.key.shape[2]
        query, places, *parts = self._in_blocks(query, seen, size)
        count = query.shape[1] // size
        key, value = (torch.cat([sinks.expand(-1, count, -1, -1, -1), *x], dim=2) for sinks, *x in parts)
        if self.rotary is not None:
            angles, of_keys = self._kept_or("both angles", self._both_angles, query, size)
            at = torch.stack(torch.broadcast_tensors(*self._turns(places, size)), dim=-1)
            at = at if self.sinks else at[..., :1]
            query = self._turned_for_both(query, *angles[at][:, :, None].unbind(-2))
            key = self._turned_for_both(key, *of_keys)
        dim = value.shape[-1]
        if memory is not None:
            least = self.scaling * torch.finfo(query.dtype).min / 2  # of what can be multiplied by 0
            score = _longer(memory.clamp(min=least) / self.scaling, query.shape[1] - length, size)
            query = torch.cat([query, F.pad(score[..., None].to(query.dtype), (0, _ALIGNED - 1))], dim=-1)
            key, value = (_with_one_more(x) for x in (key, value))
        places = places.unflatten(1, (-1, 1, size, 1)).expand(batch, -1, heads // groups, -1, -1)
        mask = self._mask(query, places, key.shape[2]).flatten(2, 3).flatten(0, 1)[:, None]
        query = query.unflatten(1, (count, size)).unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2, 5)
        output = F.scaled_dot_product_attention(
            query.flatten(3, 4).flatten(0, 1),
            key.flatten(0, 1).transpose(1, 2),
            value.flatten(0, 1).transpose(1, 2),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scaling,
        )
        output = output[..., : dim + (memory is not None)]
        output = output.unflatten(0, (batch, count)).unflatten(3, (-1, size)).permute(0, 1, 4, 2, 3, 5)
        return _first(output.flatten(3, 4).flatten(1, 2), length)

    def _in_blocks(self, query: torch.Tensor, seen: Seen, size: int):
        """Queries and places of n blocks, and what each sees of keys and of values, in parts: sinks `[B, 1 or n, S, G,
        D]` and one or two `[B, n, K, G, D]`, together W + `size`."""
        length = query.shape[1]
        missing = (length + size - 1) // size * size - length
        query, key, value = (_longer(x, missing, size) for x in (query, *seen[:2]))
        sinks = (x if x.ndim == 5 else x[:, None] for x in seen[2:4])
        parts = ([first, *self._overlapping(x, size)] for first, x in zip(sinks, (key, value), strict=True))
        return query, F.pad(seen.places, (0, missing)), *parts

    def _overlapping(self, x: torch.Tensor, size: int) -> list[torch.Tensor]:
        """`[B, W + n size, G, D]` to what each block sees, `[B, n, W + size, G, D]`, or halves of this."""
        if size == 1:
            return [x.unfold(1, self.window + 1, 1).movedim(-1, 2)]
        if size < self.window:  # one block
            return [x.unsqueeze(1)]
        blocks = x.unflatten(1, (-1, size))
        return [blocks[:, :-1], blocks[:, 1:]]

    def _turns(self, places: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where queries stand to keys of the window, `[1, T]`, and to sinks, `[B or 1, T]`."""
        own = torch.arange(self.window, self.window + size, device=places.device)
        return own.expand(places.shape[1] // size, -1).reshape(1, -1), places.clamp(max=self.window + self.sinks - 1)

    def _mask(self, x: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
        """`[..., size, count]` in the dtype of x: 0 where queries at places `[..., size, 1]` see, or -inf.

        Of `count` keys S are sinks, W + `size` those of the window, and there may be one of a memory.
        """
        reach, lowest, zero = self._kept_or("reach", self._reach, x, places.shape[-2])
        return torch.where(reach > places, lowest, zero)[..., :count]

    def _reach(self, x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From which place of its own text on a query sees a key, and what stands in a mask.

        In rows of multiples of 8, which kernels ask of a mask.
        """
        ends = torch.arange(self.window, self.window + size, device=x.device)[:, None]
        apart = ends - torch.arange(self.window + size, device=x.device)
        apart = apart.masked_fill((apart < 0) | (apart >= self.window), _NEVER)
        sinks = torch.arange(self.window, self.window + self.sinks, device=x.device).expand(size, -1)
        reach = torch.cat([sinks, apart, torch.zeros_like(ends)], dim=1)
        lowest, zero = (torch.full((), value, dtype=x.dtype, device=x.device) for value in (-torch.inf, 0))
        return F.pad(reach, (0, -reach.shape[1] % _ALIGNED)), lowest, zero

    def _angles(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the first places, `[count, dim]` each, in the dtype of x."""
        return self._kept_or("angles", self._new_angles, x, count)

    def _new_angles(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary(x, torch.arange(count, device=x.device)[None])
        return cos[0], sin[0]

    def _both_angles(self, x: torch.Tensor, size: int):
        """Cosines, sines of the first places, `[count, 2, D]`, and of a block's keys, each `[S + W + size, 1, 2, D]`.

        The sines have the sign of the number that they multiply, see `_turned_for_both`.
        """
        cos, sin = self._new_angles(x, self.window + max(size, self.sinks))
        turned, dim = cos.shape[1], x.shape[-1]
        sin = torch.cat([-sin[:, : turned // 2], sin[:, turned // 2 :]], dim=1)
        cos, sin = F.pad(cos, (0, dim - turned), value=1), F.pad(sin, (0, dim - turned))
        of_keys = [F.pad(x[: self.window + size], (0, dim if self.sinks else 0)) for x in (cos, sin)]
        if self.sinks:
            of_keys = [torch.cat([F.pad(x[: self.sinks], (dim, 0)), y]) for x, y in zip((cos, sin), of_keys)]
        return torch.stack([cos, sin], dim=1), [x.unflatten(1, (-1, dim))[:, None] for x in of_keys]

    def _turned_for_both(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[..., D]` by angles `[..., 1 or 2, D]`, each behind the other: `[..., D or 2 D]`."""
        turned = 2 * self.rotary.inv_freq.shape[0]
        other = x[..., :turned].roll(turned // 2, -1)
        if turned < x.shape[-1]:
            other = torch.cat([other, x[..., turned:]], dim=-1)
        return torch.addcmul(x.unsqueeze(-2) * cos, other.unsqueeze(-2), sin).flatten(-2)

    def _kept_or(self, name: str, make: Callable, x: torch.Tensor, *sizes: int) -> Any:
        """What `make(x, *sizes)` gives, which depends on the dtype and device of x and on the frequencies alone, kept
        until others are asked.

        What is kept for single tokens stays, so that a captured graph of a step finds it whenever it is replayed.
        """
        asked = name, x.dtype, x.device, *sizes
        single = sizes[0] == 1
        captured = x.is_cuda and torch.cuda.is_current_stream_capturing() and not (single and asked in self._kept)
        frequencies = [] if self.rotary is None else list(self.rotary._buffers.values())
        # Inside transforms frequencies may stand for many; of those of inference mode PyTorch counts no versions.
        if captured or in_graph() or torch._C._are_functorch_transforms_active() or any(map(_uncounted, frequencies)):
            return make(x, *sizes)
        if not self._are_made_of(frequencies):
            self._kept, self._made_of = {}, [(y, y._version, y.data_ptr()) for y in frequencies]
        kept = self._kept  # read once: another thread may replace it
        if asked in kept:
            return kept[asked]
        with torch.inference_mode(False):
            found = make(x, *sizes)
        first = found if isinstance(found, torch.Tensor) else found[0]
        if type(first) is torch.Tensor:  # else it has a shape alone
            self._kept = {key: y for key, y in kept.items() if key[0] != name or key[3] == 1} | {asked: found}
        return found

    def _are_made_of(self, frequencies: list[torch.Tensor]) -> bool:
        made_of = self._made_of
        return len(made_of) == len(frequencies) and all(
            y is x and version == x._version and address == x.data_ptr()
            for (y, version, address), x in zip(made_of, frequencies)
        )


def _uncounted(x: torch.Tensor) -> bool:
    return type(x) is not torch.Tensor or x.is_inference() or x.is_meta


def _longer(x: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """Zeros for so many more tokens, fewer than `size`.

    A graph gets `size` of them and cuts off the rest: one that may add none asks whether it does, and is made anew. And
    there the gradient of `F.pad` would lie in memory otherwise than the graph foresees.
    """
    if not in_graph():
        return F.pad(x, (*[0] * (2 * x.ndim - 3), count)) if count else x
    return torch.cat([x, x.new_zeros(x.shape[0], size, *x.shape[2:])], dim=1)[:, : x.shape[1] + count]


def _first(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first tokens. A graph copies them: of a view it asks whether they are all, and is made anew."""
    if not in_graph():
        return x[:, :count]
    return x.index_select(1, torch.arange(count, device=x.device))


def _with_one_more(x: torch.Tensor) -> torch.Tensor:
    """Keys or values `[B, n, K, G, D]` and one more, `[B, n, K + 1, G, D + 8]`: its one, where the others are zero."""
    one = torch.arange(x.shape[-1] + _ALIGNED, device=x.device) == x.shape[-1]
    x = F.pad(x, (0, _ALIGNED))
    return torch.cat([x, one.to(x.dtype).expand_as(x[:, :, :1])], dim=2)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Keys `[..., K, G, D]` at places 0 to K - 1."""
    lead = x.shape[:-3]
    return rotate(x.flatten(0, -4), cos[None], sin[None]).unflatten(0, lead)
