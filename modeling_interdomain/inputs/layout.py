"""The layout of the tokens of a forward: where each stands, what it may see, and how layers read them."""

import contextlib
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, StaticCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    packed_sequence_mask_function,
)

from ..layers.common import doubt_tables
from ..layers.versions import CACHE_NAME
from ..mixers.base import TokenMixer
from ..model_cache.cache import InterdomainCache, is_at_start, ready_to_step, remember_mask, remember_model
from ..ops.common.cpu import all_real, in_graph, values_at_hand
from ..ops.common.packing import (
    Packing,
    cu_seqlens_from_numbers,
    cu_seqlens_from_positions,
    document_of_tokens,
    packing_from_documents,
    packing_from_mask,
    positions_from_cu_seqlens,
)
from .checks import (
    check_cache,
    check_causal,
    check_cu_seqlens,
    check_device,
    check_dynamic_mask,
    check_forks,
    check_layers,
    check_mask,
    check_past,
    check_positions,
    check_room,
    check_seq_idx,
    check_trace,
)


class TokenLayout(NamedTuple):
    """What a forward decides once, before its layers.

    Attributes:
        inputs_embeds: as given; in a compiled graph they depend on a check, see `check_dynamic_mask`.
        cache: the one that was given or made, or None.
        seen: how many tokens it had read; -1 where that is on a GPU or a symbol of a graph.
        position_ids: `[B or 1, T]`.
        documents: `[B, T]`, the number of each token's packed document, or None.
        masks: by kind of layer.
        packing: what recurrent layers work on where some tokens are pads, or documents are packed. None where all rows
            are whole, and for a decode step, which updates the state in place and heeds the mask instead.
        arguments: more keywords of the layers.
    """

    inputs_embeds: torch.Tensor
    cache: Cache | None
    seen: int
    position_ids: torch.Tensor
    documents: torch.Tensor | None
    masks: dict[str, Any]
    packing: Packing | None
    arguments: dict[str, Any]


def lay_out(
    model,
    mixers: list[TokenMixer],
    inputs_embeds: torch.Tensor,
    attention_mask,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    use_cache: bool | None,
    sequence_group: Any,
    kwargs: dict[str, Any],
) -> TokenLayout:
    """The layout of the arguments of `InterdomainModel.forward`; a cache is made where one is wanted.

    Raises:
        ValueError: when they do not fit the model or each other, before the cache is touched.
    """
    config, shape = model.config, inputs_embeds.shape[:2]
    with refused_together(sequence_group, model):
        check_device(mixers, inputs_embeds.device)
        if cache is not None and model.training and model.gradient_checkpointing:
            raise ValueError(
                "Gradient checkpointing reads no cache in training: call eval() before generate(), or leave "
                "past_key_values out."
            )
        seen = _check(config, mixers, shape, attention_mask, position_ids, cache, kwargs)
        if sequence_group is not None:
            from ..parallel.sequence import check_sequence_group, place_piece

            check_sequence_group(model, mixers, cache, attention_mask, kwargs)
    arguments, piece = dict(kwargs), None
    if sequence_group is not None:
        given: Any = attention_mask, position_ids, kwargs.get("cu_seq_lens_q"), cache is None
        piece, position_ids, cu_seqlens = place_piece(sequence_group, inputs_embeds, *given)
        arguments["piece"] = piece
    else:
        cu_seqlens = _documents(kwargs, position_ids, attention_mask, cache, shape)
    if torch.jit.is_tracing():
        check_trace(config, cache, shape[1], cu_seqlens is not None)
    longest = seen + shape[1] if position_ids is None and _is_at_hand(seen) else None
    if position_ids is None:
        position_ids = _default_positions(attention_mask, cu_seqlens, seen, shape, inputs_embeds.device)
    inputs_embeds = check_dynamic_mask(config, inputs_embeds, position_ids, longest)
    forks = check_forks(attention_mask, config, mixers, cache, shape)
    packed = forks is not None or (cu_seqlens is not None if piece is None else piece.packed)
    trains = model.training and (torch.is_grad_enabled() or model.gradient_checkpointing)
    cacheable = not packed and not trains and not config.bidirectional
    makes, compiling = use_cache and cache is None and cacheable, torch.compiler.is_compiling()
    begins = not compiling and (cache is None or is_at_start(cache))
    if makes or (begins and cache is not None):
        check_layers(config, mixers)
    if makes:
        cache = InterdomainCache(config)
    if not compiling:
        if cache is not None:
            remember_model(cache, model, begins)
        if begins:
            doubt_tables(model)

    documents = None if cu_seqlens is None else document_of_tokens(cu_seqlens, shape.numel()).view(shape)
    if isinstance(attention_mask, dict):
        masks = dict(attention_mask)
    else:
        masks = masks_by_kind(model.mask_kinds, config, inputs_embeds, attention_mask, cache, documents)
    if cu_seqlens is not None and "flash" in config._attn_implementation:
        arguments |= _varlen_arguments(cu_seqlens, masks.get("full_attention"))
    if config.output_attentions:
        arguments.setdefault("output_attentions", True)
    mask, packing = masks.get("linear_attention"), None
    if piece is not None or not _is_step(config, cache, shape[1]):
        packing = forks or _packing(mask, cu_seqlens, shape)
        masks["linear_attention"] = None
    elif mask is not None and all_real(mask):
        masks["linear_attention"] = None
    seen = int(seen) if _is_at_hand(seen) else -1
    if cache is not None and not compiling:
        pads = packing is not None or masks.get("linear_attention") is not None
        remember_mask(cache, attention_mask, shape, begins or not seen, pads)
    return TokenLayout(inputs_embeds, cache, seen, position_ids, documents, masks, packing, arguments)


def refused_together(group: Any, model):
    """A context for checks: what is refused in one process of a `sequence_group` ends the forward in all."""
    if group is None:
        return contextlib.nullcontext()
    from ..parallel.sequence import refused_by_all

    return refused_by_all(group, model.device)


def masks_by_kind(
    kinds: set[str], config, inputs_embeds, attention_mask, cache, documents: torch.Tensor | None
) -> dict[str, Any]:
    """The masks of these kinds: "linear_attention" `[B, T]`, "full_attention" `[B, 1, T, keys]`.

    `documents` `[B, T]` numbers the packed document of each token.
    """
    masks: dict[str, Any] = {}
    if "linear_attention" in kinds:
        length = inputs_embeds.shape[1]
        rows = attention_mask is not None and attention_mask.ndim == 2
        masks["linear_attention"] = attention_mask[:, -length:].contiguous() if rows else None
    if "full_attention" in kinds:
        create_mask: Any = create_bidirectional_mask
        if not config.bidirectional:
            # A single token needs no mask, except over a static cache, whose unused room it must not see. The library
            # knows that of caches for graphs alone, and one that records is none.
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


def _check(config, mixers, shape, attention_mask, position_ids, cache, kwargs) -> int | torch.Tensor:
    """Check each argument alone; returns how many tokens the cache has read."""
    check_cache(cache, config, mixers, shape[0])
    seen = 0 if cache is None else cache.get_seq_length()
    if cache is not None and _is_at_hand(seen):
        check_room(cache, int(seen) + shape[1])
    check_mask(attention_mask, seen, *shape)
    check_past(attention_mask, cache, shape[1])
    check_causal(config, kwargs.get("is_causal"))
    check_positions(position_ids, *shape)
    return seen


def _is_step(config, cache: Cache | None, length: int) -> bool:
    """Whether the recurrent layers take one step in place, which heeds a mask without packing."""
    if cache is None or length != 1 or torch.is_grad_enabled() or config.backend not in ("auto", "triton"):
        return False
    return ready_to_step(cache)


def _is_at_hand(seen: int | torch.Tensor) -> bool:
    """Whether a count can be read without waiting for a GPU or breaking a graph."""
    if isinstance(seen, torch.Tensor):
        return values_at_hand(seen)
    return isinstance(seen, int)  # a plain number, not a symbol of an exported graph


def _documents(kwargs: dict[str, Any], position_ids, attention_mask, cache, shape) -> torch.Tensor | None:
    """The ends of packed documents: as they are given, or where positions restart (without a mask and a cache)."""
    given = {name: kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")}
    if cache is not None and (told := [name for name, x in given.items() if x is not None]):
        raise ValueError(f"{told[0]} packs whole documents, so it cannot continue from past_key_values.")
    ends, keys, numbers = given.values()
    if ends is not None or keys is not None:
        check_cu_seqlens(ends, keys, *shape)
    if numbers is not None:
        check_seq_idx(numbers, ends, *shape)
        return cu_seqlens_from_numbers(numbers) if ends is None else ends
    if ends is not None or position_ids is None or attention_mask is not None or cache is not None:
        return ends
    return cu_seqlens_from_positions(position_ids.expand(shape[0], -1))


def _default_positions(attention_mask, cu_seqlens, seen, shape, device) -> torch.Tensor:
    """Positions `[B or 1, T]` after `seen` tokens, or in each packed document; pads that a mask shows do not count."""
    if cu_seqlens is not None:
        return positions_from_cu_seqlens(cu_seqlens, tuple(shape))
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        return ((attention_mask != 0).long().cumsum(dim=1) - 1).clamp(min=0)[:, -shape[1] :].to(device)
    return torch.arange(shape[1], device=device)[None] + seen


def _packing(mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, shape) -> Packing | None:
    """What recurrent layers work on, for a `[B, T]` mask and packed documents; None where all rows are whole."""
    if mask is not None and not in_graph() and bool(mask.all()):
        mask = None
    if cu_seqlens is not None:
        return packing_from_documents(cu_seqlens, mask, tuple(shape))
    return None if mask is None else packing_from_mask(mask)


def _varlen_arguments(cu_seqlens: torch.Tensor, mask) -> dict[str, Any]:
    """The arguments that keep packed documents apart in FlashAttention, which takes no mask."""
    if mask is not None:
        raise ValueError(
            "FlashAttention cannot keep packed documents apart that hold pads: leave attention_mask out, or use "
            'attn_implementation="sdpa".'
        )
    ends, longest = cu_seqlens.int(), int(cu_seqlens.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
