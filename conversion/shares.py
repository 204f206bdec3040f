"""With what the memories of windows begin: as large as what the softmax answers, and with a share of it."""

from collections.abc import Collection
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from modeling_interdomain.mixers.window.attention import Seen, WindowAttention
from modeling_interdomain.mixers.window.mixer import SHARE, WindowMixer


class Attended(NamedTuple):
    """Of the heads of a layer, `[H]` each, in the mean of the later half of some tokens.

    Attributes:
        size: the root mean square of what the softmax answers.
        scores: the logarithm of what it sums up, the exponentials of all scores.
    """

    size: torch.Tensor
    scores: torch.Tensor


@torch.no_grad()
def attended(model: PreTrainedModel, layers: Collection[int], ids: torch.Tensor) -> dict[int, Attended]:
    """What the softmax of these window layers makes of tokens `[1, T]`."""
    found: dict[int, Attended] = {}

    def note(layer: int):
        def hook(attention: WindowAttention, inputs, output) -> None:
            query, seen = inputs[:2]
            query, *held = (x.float() for x in (query, *seen[:4]))
            found[layer] = _attended(attention, query, Seen(*held, seen.places))

        return hook

    hooks = [model.model.layers[i].token_mixer.attention.register_forward_hook(note(i)) for i in layers]
    try:
        model.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _attended(attention: WindowAttention, query: torch.Tensor, seen: Seen) -> Attended:
    """The score of one key more is above the logarithm of the sum by the logit of its weight, which, where it is 0 or 1
    to the last digit, says only that it is far from it."""
    memory = query.new_zeros(query.shape[:3])
    for _ in range(100):
        output = attention.forward(query, seen, memory)
        above = output[..., -1].double().logit().clamp(-30, 30).float()
        memory -= above
        if above.abs().max() < 10:
            break
    later = slice(query.shape[1] // 2, None)
    alone = attention.forward(query, seen)[:, later]
    return Attended(alone.square().mean((0, 1, 3)).sqrt(), memory[:, later].mean((0, 1)))


@torch.no_grad()
def start_shares(model: PreTrainedModel, layers: Collection[int], ids: torch.Tensor) -> None:
    """Let the memories of these layers begin with a share of 2%, in the mean of tokens `[1, T]`."""
    for layer, found in attended(model, layers, ids).items():
        start_share(model.model.layers[layer].token_mixer, found, SHARE)


@torch.no_grad()
def start_share(mixer: WindowMixer, found: Attended, share: float) -> None:
    """Let the memory of a layer begin with a share whose logit is `share`.

    In a softmax the scores of a head may lie anywhere: what all of its keys have in common does not count among
    themselves, but does beside a memory.
    """
    bias = mixer.share_proj.bias
    bias.copy_(found.scores + share if mixer.in_softmax else torch.full_like(bias, share))
