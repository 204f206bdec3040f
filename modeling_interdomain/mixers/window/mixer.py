"""A window with a memory: softmax attention to the last tokens and the first, and a state of those between."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from ...layers.common import is_plain, plain_rms_norm
from ...layers.convolution import last_inputs
from ...layers.feature_maps import silu_l2
from ...layers.operators import Operators
from ...ops.common.cpu import values_at_hand
from ...ops.interdomain.replay import state_after
from ..recurrent import RecurrentMixer, placed_map
from .attention import Seen, WindowAttention
from .configuration import WindowSpecification
from .recurrence import NoRecurrence, WindowRecurrence

# At the start: the logit of a share of 2%, the size of what is read, and what softplus makes 1 of.
SHARE, _GATE, _WRITE = -4.0, 0.1, math.log(math.e - 1)


class WindowMixer(WindowSpecification, RecurrentMixer):
    """`y = (1 - s) a + s (gate * RMSNorm(r))`, a of softmax attention, r what a state is read as, s a share of both.

    Each token that came before is in one of three: the last W are in the window, and the first S are sinks; a token
    enters the state when it leaves the window, unless it is a sink. The share, one a head, is a sigmoid of a linear map
    of the token, and 0 as long as the state is empty. With `window_share="softmax"` the state is one more key of the
    softmax, and that map its score: a query that finds its like in the window leaves the state less. With "counted" a
    state of n tokens, fewer than W, scores log(W / n) lower: two tokens weigh no more than two do. The norm bounds what
    is read: it would grow with the text.

    The state reads and writes what the softmax does, before rotation, each head through a map of its own that starts as
    the identity: `q_map` `[H, D, R]` and `k_map` `[G, D, R]`, before the feature map, and `v_map` `[G, D, D]`. The gate
    is `memory_gate` `[H, D]`. With `window_write_gate` a token enters the state times `softplus(<write_gate, (k, v)> +
    write_bias)`, `[G, 2, D]` and `[G]`, of its key and value before rotation, normalised; at the start that is 1.
    With `window_points` N a query reads the state by softmax, at N points of the past (`points.py`), without feature
    maps, and the logarithm of what that sums up, times `point_weight` `[H]`, at the start 0, is added to its score.
    Without a memory (`window_memory=False`) there are none of these.

    In a cache the keys and values of the last W tokens take the place of a convolution's inputs, `[B, G D, W]` each;
    beside them are how many tokens were read, `[B, 1, 1]`, and the keys and values of the sinks, `[B, G D, S]`.
    """

    operators = Operators.of(state_after)
    passes_state = True
    share_proj: nn.Linear

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx, config.head_dim)
        self.memory, self.in_softmax = config.window_memory, config.window_share != "sigmoid"
        self.at_points = self.memory and config.window_points > 0
        self.feature_map = nn.Identity() if self.at_points else silu_l2
        dim, features = config.head_dim, config.feature_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.o_norm = self.rope_placement = None  # what it rotates it places itself
        self.window, self.sinks, self.eps = config.attention_window, config.attention_sinks, config.rms_norm_eps
        held = 2 * [(groups * dim, self.window)] + [(1, 1)] + 2 * [(groups * dim, self.sinks)]
        self.kept_shapes = [*held, *self.kept_shapes]
        self.head_dim = dim
        self.write_gate: nn.Parameter | None = None
        self.worth_a_window = self.window if config.window_share == "counted" else 1  # as many tokens in the state
        self.attention = WindowAttention(config)
        if self.memory:
            self.q_map = nn.Parameter(torch.empty(heads, dim, features))
            self.k_map = nn.Parameter(torch.empty(groups, dim, features))
            self.v_map = nn.Parameter(torch.empty(groups, dim, dim))
            self.memory_gate = nn.Parameter(torch.empty(heads, dim))
            if config.window_write_gate:
                self.write_gate = nn.Parameter(torch.empty(groups, 2, dim))
                self.write_bias = nn.Parameter(torch.empty(groups))
            if self.at_points:
                self.point_weight = nn.Parameter(torch.empty(heads))
            self.recurrence = _recurrence_of(config)
            self.recurrence.start_parameters(config)
            self.start_parameters(config)
        else:
            self.recurrence, self.first_state = NoRecurrence(config), None

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        if not self.memory:
            return
        init.zeros_(self.share_proj.weight)
        init.constant_(self.share_proj.bias, SHARE)
        init.constant_(self.memory_gate, _GATE)
        if self.at_points:
            init.zeros_(self.point_weight)
        if self.write_gate is not None:
            init.zeros_(self.write_gate)
            init.constant_(self.write_bias, _WRITE)
        for each in (self.q_map, self.k_map, self.v_map):
            init.copy_(each, torch.eye(*each.shape[1:], dtype=each.dtype, device=each.device).expand_as(each))

    def share_heads(self, processes: int) -> None:
        count = self.kept_shapes[2]
        super().share_heads(processes)
        self.kept_shapes[2] = count

    def _convolved(self, projected):
        """What a record keeps of them for the window and the sinks."""
        return projected[1:3]

    def _inputs(self, projected, conv_state, cos_sin, packing, keep: bool):
        """Query, key and value of the state, where there is one; then the query of the softmax, what it sees, and the
        share. Beside them what a cache holds next."""
        query, key, value, *share = projected
        query = query.unflatten(-1, (-1, self.head_dim))
        seen, after = self._seen(key, value, conv_state, packing, keep)
        if not self.memory:
            return (query, *seen), after
        # What leaves the window now, and was no sink.
        left = [x[:, : x.shape[1] - self.window] for x in seen[:2]]
        key, value = self.feature_map(_mapped(left[0], self.k_map)), _mapped(left[1], self.v_map)
        if self.write_gate is not None:
            strength = self._strength(left, self.write_gate).to(key.dtype)
            key, value = key * strength, value * strength
        if seen.places is not None:
            enters = (self._entered(seen.places) > 0)[..., None, None]
            key, value = (torch.where(enters, x, 0).reshape(*query.shape[:2], *x.shape[2:]) for x in (key, value))
        return (self.feature_map(_mapped(query, self.q_map)), key, value, query, *seen, *share), after

    def _strength(self, left: Sequence[torch.Tensor], gate: torch.Tensor) -> torch.Tensor:
        """How strongly tokens whose keys and values `[B, T, G, D]` have left enter the state, `[B, T, G, 1]`."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        both = torch.stack([x.to(wide) for x in left], dim=-2)
        said = (_normed(both, self.eps) * gate).sum((-2, -1)) + self.write_bias
        return F.softplus(said)[..., None]

    def _seen(self, key, value, conv_state, packing, keep: bool) -> tuple[Seen, list[torch.Tensor]]:
        """What the tokens of keys `[B, T, G D]` and values see, after what a cache has held; and what it holds next."""
        if packing is not None and packing.cu_seqlens is not None:
            after: list[torch.Tensor] = []
            seen = self._seen_in_documents(key, value, conv_state, packing)
        else:
            lengths = None if packing is None else packing.lengths
            seen, after = self._seen_in_rows(key, value, conv_state, lengths, keep)
        groups = key.shape[-1] // self.head_dim
        return Seen(*[*(x.unflatten(-1, (groups, -1)) for x in seen[:4]), seen.places]), after

    def _entered(self, places: torch.Tensor) -> torch.Tensor:
        """How many tokens have entered the state by the one that is at this place of the text, or fewer than none."""
        return places - (self.window + self.sinks - 1)

    def _seen_in_rows(self, key, value, held, lengths: torch.Tensor | None, keep: bool):
        """What the tokens `[B, T, G D]` see, after what a cache has held or nothing; and what it holds next."""
        batch, length, width = key.shape
        if held is None and not keep:
            places = torch.arange(length, device=key.device)
            first = torch.arange(self.sinks, device=key.device).clamp(max=length - 1)
            both = [F.pad(x, (0, 0, self.window, 0)) for x in (key, value)]
            return Seen(*[*both, *(x.index_select(1, first) for x in (key, value)), places[None]]), []
        if held is None:
            none = key.new_zeros(batch, width, self.window), key.new_zeros(batch, width, self.sinks)
            held = [none[0], none[0], key.new_zeros(batch, 1, 1, dtype=torch.long), none[1], none[1]]
        count = held[2]  # the others may have been read in another dtype
        before, sinks = ([x.to(key.dtype) for x in some] for some in (held[:2], held[3:]))
        if length == 1:  # in the layout of a cache
            both = [torch.cat([x, new.mT], dim=2).mT for x, new in zip(before, (key, value), strict=True)]
            plain = lengths is None and is_plain(key, key.dtype)
            if plain and bool((self._entered(count) >= self.worth_a_window).all()):
                after = [*(x[:, 1:].mT for x in both), count + 1, *sinks]
                return Seen(*[*both, *(x.mT for x in sinks), None]), after
        else:
            both = [torch.cat([x.mT, new], dim=1) for x, new in zip(before, (key, value), strict=True)]
        tokens = torch.arange(length, device=key.device)
        places = count[:, 0] + tokens  # a new tensor, since the count will be written in place
        real = None if lengths is None else tokens < lengths[:, None]
        if lengths is None:
            last, added = [x[:, length:] for x in both], length
        else:
            end = lengths[:, None] + torch.arange(self.window, device=key.device)
            last, added = [x.gather(1, end[..., None].expand(-1, -1, width)) for x in both], lengths[:, None, None]
        sinks = _sinks_after(sinks, (key, value), places, real)
        seen = Seen(*[*both, *(x.mT for x in sinks), places])
        return seen, [*(x.mT for x in last), count + added, *sinks]

    def _seen_in_documents(self, key, value, held, packing) -> Seen:
        """What the tokens `[1, B T, G D]` of packed documents see, each of its own.

        They are of one row; or of B, whose first documents began in other processes, with what is `held` of these.
        """
        rows = 1 if held is None else held[0].shape[0]
        key, value = (x[0].unflatten(0, (rows, -1)) for x in (key, value))
        length = key.shape[1]
        tokens = torch.arange(rows * length, device=key.device).view(rows, length)
        starts = packing.cu_seqlens[packing.documents].view(rows, length)
        begun = torch.zeros_like(starts)  # tokens elsewhere
        if held is None:
            both = [F.pad(x, (0, 0, self.window, 0)) for x in (key, value)]
        else:
            both = [torch.cat([x.mT, new], dim=1) for x, new in zip(held, (key, value))]
            begun = torch.where(starts % length == 0, held[2][:, 0], begun)
        places = tokens - starts + begun
        # Of the document that a block begins in.
        starts, begun = (x[:, :: self.attention.block(length), None] for x in (starts % length, begun))
        wanted = torch.arange(self.sinks, device=key.device)
        at = (starts + wanted - begun).clamp(min=0, max=length - 1)  # one that its document does not reach is not seen
        found = at.flatten(1)[..., None]
        sinks = [x.gather(1, found.expand(-1, -1, x.shape[2])).unflatten(1, at.shape[1:]) for x in (key, value)]
        if held is not None:
            here = (wanted >= begun)[..., None]
            sinks = [torch.where(here, new, x.mT[:, None]) for x, new in zip(held[3:], sinks, strict=True)]
        return Seen(*[*both, *sinks, places])

    def _all_at_once(self, layer, tokens, before, conv_state, packing, companion=None, piece=None):
        return self._joined(tokens, super()._all_at_once(layer, tokens[:3], before, conv_state, packing, piece=piece))

    def _step(self, layer, tokens, before, conv_state, attention_mask, companion=None):
        return self._joined(tokens, super()._step(layer, tokens[:3], before, conv_state, attention_mask))

    def _can_step_each(self, layer, first):
        return False

    def _joined(self, tokens, read: torch.Tensor) -> torch.Tensor:
        """The output of the softmax, and its share of what the state is `read` as, `[B, T, H, D]`."""
        if not self.memory:
            return self._attended(tokens[0], Seen(*tokens[1:]))
        query, *held, share = tokens[3:]
        seen = Seen(*held)
        wide = torch.promote_types(query.dtype, torch.float32)
        share = share.to(wide)
        if seen.places is not None:
            share = share + self._worth(seen.places.reshape(-1, query.shape[1], 1), share)
        read = read.to(wide)
        if self.at_points:
            read, log_total = read.split([self.head_dim, 1], dim=-1)
            share = share + self.point_weight * log_total[..., 0]
        remembered = (self.memory_gate * _normed(read, self.eps)).to(wide)
        if self.in_softmax:
            attended, share = self._attended(query, seen, share).to(wide).split([self.head_dim, 1], dim=-1)
            return torch.addcmul(attended, share, remembered)
        return torch.lerp(self._attended(query, seen).to(wide), remembered, share.sigmoid()[..., None])

    def _worth(self, places: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """What is added to the shares `[B, T, H]` of a state that holds little: of an empty one nothing is left."""
        most = self.worth_a_window
        worth = (self._entered(places).clamp(0, most).to(share.dtype) / most).log()
        if self.first_state is None:
            return worth
        begun = self.first_state(share[:1]).flatten(2).any(dim=-1)  # what a group begins with it can read at once
        return worth.masked_fill(begun.repeat_interleave(share.shape[-1] // begun.shape[-1], dim=-1), 0)

    def _attended(self, query: torch.Tensor, seen: Seen, memory: torch.Tensor | None = None) -> torch.Tensor:
        """The output of the softmax; what one row of documents sees may be that of several."""
        rows = seen.key.shape[0]
        if rows == query.shape[0]:
            return self.attention(query, seen, memory)
        shape = query.shape[:3]
        query, *score = (x.reshape(rows, -1, *x.shape[2:]) for x in (query, memory) if x is not None)
        return self.attention(query, seen, *score).reshape(*shape, -1)

    def _before_piece(self, piece, projected):
        from .pieces import held_before

        return held_before(piece, self._convolved(projected), self.window, self.sinks)

    def attention_map(self, tokens, packing):
        """Of the softmax; none with a memory, whose gate weighs every channel of a value in its own way."""
        if self.memory:
            return None
        query, values = tokens[0], self._written(tokens)
        batch, length, groups = values.shape[:3]  # values that say which token they are of
        names = torch.eye(length).to(values).repeat(1, groups).expand(batch, -1, -1)
        key = tokens[1][:, self.window :].flatten(2)
        weights = self._attended(query, self._seen(key, names, None, packing, keep=False)[0])
        return placed_map(weights.transpose(1, 2), packing)

    def _written(self, tokens):
        return tokens[2][:, self.window :]

    def _recorded(self, tokens):
        return tokens[1:3] if self.memory else ()

    @classmethod
    def replay(cls, operators, sparse_operators, conv_state, states, inputs, constants):
        key, value, *tokens, mask = inputs
        *before, count = conv_state[:3]
        places = count[:, 0] + mask.cumsum(1) - 1
        last = [last_inputs(x, new, mask) for x, new in zip(before, (key, value), strict=True)]
        sinks = _sinks_after(conv_state[3:], (key, value), places, mask)
        after = [*last, count + mask.sum(1)[:, None, None], *sinks]
        if states is None:
            return after, None
        state = states["state"]
        return after, {"state": cls.replay_state(operators, state, *tokens, mask, *constants) if tokens else state}


def _recurrence_of(config) -> WindowRecurrence:
    if not config.window_points:
        return WindowRecurrence(config)
    from .points import PointRecurrence

    return PointRecurrence(config)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return plain_rms_norm(x, eps) if is_plain(x) else F.rms_norm(x, x.shape[-1:], eps=eps)


def _mapped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[B, T, heads, D]` by the maps of the heads, `[heads, D, R]`."""
    rows = x.flatten(0, 1).transpose(0, 1)
    return (rows @ weight).transpose(0, 1).unflatten(0, x.shape[:2])


def _sinks_after(
    held: list[torch.Tensor], inputs: Sequence[torch.Tensor], places: torch.Tensor, real: torch.Tensor | None
) -> list[torch.Tensor]:
    """`[B, W, S]` each, the first S inputs of a text, of which some were `held` before new `inputs` `[B, T, W]`.

    Args:
        places: `[B, T]`, of each in its text.
        real: `[B, T]` bool, False for pads; None, all are.
    """
    count = held[0].shape[2]
    if not places.shape[1] or (values_at_hand(places) and bool((places >= count).all())):
        return held
    wanted, tokens = (torch.arange(x, device=places.device) for x in (count, places.shape[1]))
    found = places[:, None] == wanted[:, None]
    if real is not None:
        found = found & real[:, None]
    if places.shape[1] > 1:
        at, found = (found * tokens).sum(dim=2)[..., None], found.any(dim=2, keepdim=True)
        inputs = [x.gather(1, at.expand(-1, -1, x.shape[2])) for x in inputs]
    first, found = (x.mT for x in inputs), found.mT
    return [torch.where(found, new, old.to(new.dtype)) for new, old in zip(first, held, strict=True)]
