"""The masks of one forward, by kind of layer."""

from functools import partial
from typing import Any

import torch
from transformers.cache_utils import StaticCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    packed_sequence_mask_function,
)

from ..layers.versions import CACHE_NAME


def masks_by_kind(config, inputs_embeds, attention_mask, cache, documents: torch.Tensor | None) -> dict[str, Any]:
    """Masks "linear_attention" `[B, T]` and "full_attention" `[B, 1, T, keys]`, where there are such layers.

    `documents` `[B, T]` numbers the packed document of each token.
    """
    masks: dict[str, Any] = {}
    kinds = set(config.layer_types)
    windowed = config.windowed_layers
    if kinds != {"full_attention"} or any(windowed):
        length = inputs_embeds.shape[1]
        rows = attention_mask is not None and attention_mask.ndim == 2
        masks["linear_attention"] = attention_mask[:, -length:].contiguous() if rows else None
    if any(kind != "linear_attention" and not alone for kind, alone in zip(config.layer_types, windowed)):
        create_mask: Any = create_bidirectional_mask
        if not config.bidirectional:
            # A single token sees all there is, but for the room of a static cache: also of one that records, for
            # which no graph is made.
            room = isinstance(cache, StaticCache) and inputs_embeds.shape[1] == 1
            create_mask = partial(create_causal_mask, allow_is_causal_skip=not room)
        masks["full_attention"] = create_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            **{CACHE_NAME: cache},
            and_mask_function=None if documents is None else packed_sequence_mask_function(documents),
        )
    return masks
