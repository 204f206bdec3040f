"""The dynamic mask of attention layers: keys that fade by where they stand or by what they hold.

"position" and "hard" are that of "Wonderful Matrices" (arXiv 2407.16958), `y = (L o softmax(scores)) V`: L depends on
the head and the key's position alone, so it may as well multiply the value. "value" is that of its successor (arXiv
2412.11834) and of Doge, a bias of the scores that is computed from the value. All three change query, key and value
before a cache is updated: no mask is made, and every attention implementation works.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from ...ops.common.cpu import autocasts, namespace
from .configuration import BIAS_COLUMNS


class PositionMask(nn.Module):
    """Multiplies values by `table[h, position]`, one number a key/value head and position, which starts at 1.

    `config.dynamic_mask` "hard" rounds the numbers to 0 or 1. Their gradients are those of the numbers themselves, also
    of those beyond 0 and 1: one that has left could not come back otherwise.
    """

    def __init__(self, config):
        super().__init__()
        self.hard = config.dynamic_mask == "hard"
        self.table = nn.Parameter(torch.ones(config.num_key_value_heads, config.max_position_embeddings))

    def start_parameters(self, config) -> None:
        init.ones_(self.table)

    def forward(self, query, key, value, position_ids) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values `[B, T, heads, size]`, and positions `[B or 1, T]`, to the first three."""
        found = self.table.index_select(1, position_ids.long().flatten()).unflatten(1, position_ids.shape)
        if self.hard:
            found = found.detach().clamp(0, 1).round() + (found - found.detach())
        return query, key, value * found.permute(1, 2, 0)[..., None].to(value.dtype)


def check_position_table(position_ids: torch.Tensor, room: int, kind: str) -> None:
    """A mask by position has a number for each of them."""
    if position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    least, most = (int(x) for x in position_ids.aminmax())
    if least < 0 or most >= room:
        raise ValueError(
            f'dynamic_mask = "{kind}" has a number for each position below max_position_embeddings = {room}, and this '
            f"forward needs one for {most if most >= room else least}; shorten the text, or train with a larger "
            "max_position_embeddings."
        )


@torch.library.custom_op(f"{namespace(__name__)}::zero_if_in_table", mutates_args=())
def zero_if_in_table(position_ids: torch.Tensor, room: int, kind: str) -> torch.Tensor:
    """0, as the result of the check: what it is added to, a compiled graph computes after the check.

    An assertion would not do: a compiler may run it after what follows it.
    """
    if not position_ids.is_cuda:  # there the indices themselves are checked, and looking would make the CPU wait
        check_position_table(position_ids, room, kind)
    return position_ids.new_zeros(())


@zero_if_in_table.register_fake
def _(position_ids: torch.Tensor, room: int, kind: str) -> torch.Tensor:
    return position_ids.new_empty(())


class ValueMask(nn.Module):
    """Adds `beta_j = exp(A_h softplus(w_h v_j))` to the scores of key j, v_j the values of all heads; A starts at 0.

    The bias travels as more columns of the keys, which the queries multiply by 1: what caches keys keeps it, and
    attention needs no mask for it. It is split in two, of which the second is what the first has lost by rounding.
    """

    def __init__(self, config):
        super().__init__()
        heads = config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.A = nn.Parameter(torch.zeros(heads))
        self.dt_proj = nn.Linear(heads * config.head_dim, heads, bias=False)

    def start_parameters(self, config) -> None:
        init.zeros_(self.A)

    def forward(self, query, key, value, position_ids) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values `[B, T, heads, size]` to the same with `BIAS_COLUMNS` more."""
        # What multiplies queries and keys may be narrower than they are. Half of its largest number leaves room for the
        # rest of a score.
        wide = key.dtype == torch.float64 or not autocasts(key.device)
        narrow = key.dtype if wide else torch.get_autocast_dtype(key.device.type)
        bias = (self.bias(value) / self.scaling).clamp(max=torch.finfo(narrow).max / 2)[..., None]
        first = bias.to(narrow).to(key.dtype)
        second = (bias - first).to(key.dtype)
        rest = BIAS_COLUMNS - 2
        query = F.pad(F.pad(query, (0, 2), value=1.0), (0, rest))
        return query, F.pad(torch.cat([key, first, second], dim=-1), (0, rest)), F.pad(value, (0, BIAS_COLUMNS))

    def bias(self, value: torch.Tensor) -> torch.Tensor:
        """`[B, T, G, D]` to `[B, T, G]`, at least float32."""
        wide = torch.promote_types(value.dtype, torch.float32)
        return torch.exp(self.A.to(wide) * F.softplus(self.dt_proj(value.flatten(2)).to(wide)))


def bias_order(key: torch.Tensor) -> torch.Tensor:
    """A number that orders keys by their bias, `[..., size]` to `[...]`, at least float32.

    The same token at two places has one bias, but for rounding, which differs between a whole text and a step: biases
    closer than 2^-12 of themselves (float64: 2^-30) therefore count as equal.
    """
    wide = torch.promote_types(key.dtype, torch.float32)
    first, second = key[..., -BIAS_COLUMNS], key[..., 1 - BIAS_COLUMNS]
    grid = 2.0**30 if wide == torch.float64 else 2.0**12
    return ((first.detach().to(wide) + second.detach().to(wide)).log() * grid).round()


def make_dynamic_mask(config) -> PositionMask | ValueMask | None:
    """What `config.dynamic_mask` names."""
    if config.dynamic_mask is None:
        return None
    return ValueMask(config) if config.dynamic_mask == "value" else PositionMask(config)
