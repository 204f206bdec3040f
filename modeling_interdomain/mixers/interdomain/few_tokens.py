"""Query, key and value of the operator in few calls: of one token, or a few, a call costs more than what it computes,
and of a long text in bfloat16 every pass over the memory counts.
"""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ...layers.common import is_plain, plain_rms_norm, tokens_at_once
from ...layers.convolution import convolve_few, joined_weights
from ...layers.feature_maps import silu_l2, silu_l2_
from ...layers.rotary import rotate_around


class TokenTables(NamedTuple):
    """The weights of `token_inputs`, side by side.

    Attributes:
        conv_weight: `[kernel, (H + G) R]`, of the convolutions of query and key.
        weight, bias: of the norms of key and value, `[G, R]` and `[G, D]`; one tensor `[2 G, R]` where R = D; or None.
    """

    conv_weight: torch.Tensor
    weight: tuple[torch.Tensor, ...] | None
    bias: tuple[torch.Tensor, ...] | None


def token_tables(q_conv_weight: torch.Tensor, k_conv_weight: torch.Tensor, *norms: torch.Tensor) -> TokenTables:
    """Tables of weights of two `CausalConv1d`, `[W, 1, kernel]`, and of norms: `[R]`, `[D]`, `[G, R]`, `[G, D]`."""
    conv_weight = joined_weights(q_conv_weight, k_conv_weight)
    if not norms:
        return TokenTables(conv_weight, None, None)
    biases = list(norms[2:])
    weights = [w.expand_as(b) for w, b in zip(norms[:2], biases, strict=True)]
    if weights[0].shape == weights[1].shape:
        weights, biases = [torch.cat(weights)], [torch.cat(biases)]
    return TokenTables(conv_weight, tuple(weights), tuple(biases))


def token_inputs(
    projected: Sequence[torch.Tensor],
    conv_state: Sequence[torch.Tensor],
    tables: TokenTables,
    eps: float,
    heads: tuple[int, int],
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
    rope_placement: str | None,
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """`fused_inputs` of a few tokens: queries and keys go through together, and so do the norms of keys and values.

    Args:
        projected: query `[B, T, H R]`, key `[B, T, G R]` and value `[B, T, G D]`, before the convolutions; where they
            are narrower than the tables, all but the conv state is computed in the dtype of these.
        conv_state: `[B, H R, kernel - 1]` and `[B, G R, kernel - 1]`, the inputs before the first token.
        heads: H and G.
        cos_sin: `[B, T, R]` each, for a rotation "before" or "after" the feature map.

    Returns:
        query `[B, T, H, R]`, key `[B, T, G, R]`, value `[B, T, G, D]`, and the new conv state.
    """
    query, key, value = projected
    x, after = convolve_few([query, key], conv_state, tables.conv_weight)
    x = x.view(*x.shape[:2], sum(heads), -1)
    plain = is_plain(x, x.dtype)
    x = rotate_around(silu_l2_ if plain else silu_l2, x, cos_sin, rope_placement)
    query, key = x.split_with_sizes(list(heads), dim=2)
    value = value.view(*key.shape[:3], -1)
    if tables.weight is not None:
        norm = plain_rms_norm if plain and x.dtype == torch.float32 else _rms_norm
        key, value = _normalised(key, value, tables, norm, eps)
    return (query, key, value), after


def _normalised(key, value, tables: TokenTables, norm: Callable, eps: float) -> Sequence[torch.Tensor]:
    together = len(tables.weight) == 1
    xs = [torch.cat([key, value], dim=2)] if together else [key, value]
    ys = [
        torch.addcmul(bias, norm(x, eps), weight)
        for x, weight, bias in zip(xs, tables.weight, tables.bias, strict=True)
    ]
    return ys[0].chunk(2, dim=2) if together else ys


def _rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def bf16_inputs(
    projections: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor],
    eps: float,
    heads: tuple[int, int],
    cos_sin: tuple[torch.Tensor, torch.Tensor] | None,
    rope_placement: str | None,
) -> tuple[torch.Tensor, ...]:
    """Query, key and value of an operator that rounds them, `[B, T, heads, width]`, in their dtype.

    A few tokens at a time, so that what lies between stays in a CPU's cache; bfloat16 is not widened. In float32 it
    would not be, to the last digit, what norms with hooks or elsewhere compute.

    Args:
        projections: query `[B, T, H R]`, key `[B, T, G R]` and value `[B, T, G D]` after the convolutions; nothing is
            differentiated, and what is convolved is overwritten.
        norms: weights of the norms of key and value, `[R]`, `[D]`, and their biases, `[G, R]`, `[G, D]`; or none.
        cos_sin, rope_placement: as of `token_inputs`.
    """
    query, key, value = (
        x.unflatten(-1, (n, -1)) for x, n in zip(projections, (heads[0], heads[1], heads[1]), strict=True)
    )
    found = query, key, torch.empty_like(value) if norms else value
    size = tokens_at_once(query)
    turns = zip(*(x.split(size, dim=1) for x in cos_sin)) if cos_sin else repeat(None)
    pieces = (zip(*(x.split(size, dim=1) for x in tokens)) for tokens in ((query, key, value), found))
    for tokens, into, turn in zip(*pieces, turns):
        for x, y in zip(into, _bf16_piece(tokens, norms, eps, turn, rope_placement)):
            if x is not y:
                x.copy_(y)
    return found


def _bf16_piece(tokens: tuple, norms, eps: float, cos_sin, rope_placement) -> tuple[torch.Tensor, ...]:
    query, key, value = tokens
    query, key = (rotate_around(silu_l2_, x, cos_sin, rope_placement) for x in (query, key))
    if not norms:
        return query, key, value
    key_weight, value_weight, key_bias, value_bias = norms
    # The root mean square of a direction is known.
    key_weight = key_weight * (1 / key.shape[-1] + eps) ** -0.5
    value = plain_rms_norm(value, eps)
    for x, bias, weight in ((key, key_bias, key_weight), (value, value_bias, value_weight)):
        torch.addcmul(bias, x, weight, out=x)
    return query, key, value
