"""What a forward refuses, with one sentence each, before anything is computed or written."""

import re
from itertools import pairwise, repeat
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, StaticLayer

from ..layers.common import Float32Module, home_of
from ..mixers.base import TokenMixer
from ..model_cache.cache import as_it_was_read, check_unbroken, contents_of, kind_of
from ..ops.common.cpu import in_graph, values_at_hand
from ..ops.common.packing import Packing, cu_seqlens_from_numbers, packing_from_forks
from ..registry import token_mixer_class

_NUMBERED = (
    "attention_mask must have one number for the real tokens of a row, and 0 for pads: give the numbers of packed "
    "documents as seq_idx."
)


def check_tensors(**given) -> None:
    """Refuse lists and arrays in the place of tensors."""
    for name, x in given.items():
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}: torch.tensor({name}) makes one.")


def _check_whole(name: str, x: torch.Tensor, *dtypes: torch.dtype) -> None:
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must be of {' or '.join(map(str, dtypes))}, got {x.dtype}: use {name}.long().")


def check_tokens(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, width: int) -> None:
    """Exactly one of the two, `[B, T]` or `[B, T, width]`, with at least one row and one token."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of input_ids and inputs_embeds.")
    check_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds)
    tokens, axes = (input_ids, 2) if inputs_embeds is None else (inputs_embeds, 3)
    if tokens.ndim != axes or (axes == 3 and tokens.shape[2] != width):
        raise ValueError(
            f"input_ids must have shape [B, T], or inputs_embeds [B, T, hidden_size = {width}]; got "
            f"{list(tokens.shape)}."
        )
    if tokens.shape[1] == 0:
        raise ValueError("input_ids must hold at least one token, got T = 0.")
    if tokens.shape[0] == 0:
        raise ValueError("input_ids must hold at least one row, got B = 0.")
    if inputs_embeds is None:
        _check_whole("input_ids", tokens, torch.int64, torch.int32)
    elif not tokens.is_floating_point():
        raise ValueError(f"inputs_embeds must be floating-point numbers, got {tokens.dtype}.")


def embed_ids(table: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """The embeddings of ids; on a CPU, an id outside of the table is named."""
    try:
        return table(input_ids)
    except IndexError as error:
        size = getattr(table, "num_embeddings", None)
        if size is None or (wrong := _outside(input_ids, size)) is None:
            raise
        raise ValueError(f"input_ids must lie within the vocabulary, from 0 to {size - 1}; got {wrong}.") from error


def _outside(numbers: torch.Tensor, size: int) -> int | None:
    """The least of the numbers if it is negative, or the largest if it is not below `size`, or None."""
    least, most = (int(x) for x in numbers.aminmax())
    return least if least < 0 else most if most >= size else None


def check_classes(name: str, labels: torch.Tensor, number: int, ignored: int = -100) -> None:
    """Labels are classes below `number`; on a GPU they are not looked at, since the CPU would have to wait."""
    _check_whole(name, labels, torch.int64)
    if not values_at_hand(labels) or not labels.numel():
        return
    if (wrong := _outside(labels.where(labels != ignored, 0), number)) is not None:
        raise ValueError(
            f"{name} must lie between 0 and {number - 1}, or be {ignored} where nothing is asked; got {wrong}."
        )


def check_labels(labels, shift_labels, input_ids, inputs_embeds, logits_to_keep) -> None:
    """Every token whose logits are kept has a label."""
    check_tensors(labels=labels, shift_labels=shift_labels)
    count = isinstance(logits_to_keep, int | float)
    wrong = logits_to_keep is None or isinstance(logits_to_keep, bool | float) or (count and logits_to_keep < 0)
    if wrong or not (count or getattr(logits_to_keep, "ndim", True)):
        raise ValueError(
            f"logits_to_keep must be a number of tokens, 0 for all, or their places; got {logits_to_keep}."
        )
    tokens = input_ids if inputs_embeds is None else inputs_embeds
    if not isinstance(tokens, torch.Tensor):
        return
    for name, x in (("labels", labels), ("shift_labels", shift_labels)):
        if x is None:
            continue
        batch, length = tokens.shape[:2]
        kept = tokens[:, slice(-logits_to_keep, None) if count else logits_to_keep].shape[1]
        if x.shape != (batch, kept):
            whose = "the tokens" if kept == length else f"the {kept}{' last' * count} tokens, whose logits are kept"
            raise ValueError(
                f"{name} must have the shape of {whose}, {[batch, kept]}, got {list(x.shape)}; labels are shifted "
                "here, and -100 stands where nothing is asked."
            )


def check_class_labels(labels: torch.Tensor | None, config, batch: int) -> None:
    """What `config.problem_type` asks for, or what the loss takes it to be where that says nothing."""
    check_tensors(labels=labels)
    if labels is None:
        return
    kind, number = config.problem_type, config.num_labels
    if kind is None:
        whole = "single_label_classification" if not labels.is_floating_point() else "multi_label_classification"
        kind = "regression" if number == 1 else whole
    one = kind == "single_label_classification" or (kind == "regression" and number == 1)
    if labels.numel() != batch if one else labels.shape != (batch, number):
        shape = [batch] if one else [batch, number]
        raise ValueError(
            f'labels must have shape {shape} for "{kind}" with num_labels = {number}, got {list(labels.shape)}.'
        )
    if kind == "single_label_classification":
        check_classes("labels", labels, number)
    elif kind == "multi_label_classification" and not labels.is_floating_point():
        raise ValueError(f'labels must be floating-point numbers for "{kind}", got {labels.dtype}.')


def check_mask(attention_mask, seen, batch: int, length: int) -> None:
    """The mask has a number for every token so far: a shorter one would silently shift pads.

    `seen` is a tensor where a step is compiled, and the size is then not checked. All numbers but 0 mark real tokens,
    so a mask that numbers packed documents would join them: it is refused where several tokens are read, in a compiled
    graph when that runs; exported and traced models do not look.
    """
    if not (isinstance(attention_mask, dict) or hasattr(attention_mask, "mask_mod")):  # of FlexAttention
        check_tensors(attention_mask=attention_mask)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim == 4 or not isinstance(seen, int):
        return
    expected, found = [batch, seen + length], list(attention_mask.shape)
    if found != expected:
        raise ValueError(f"attention_mask must have shape [B, past + T] = {expected}, got {found}.")
    unclear = torch.compiler.is_exporting() or torch.jit.is_tracing()
    unclear = unclear or (attention_mask.is_cuda and torch.cuda.is_current_stream_capturing())
    if attention_mask.dtype == torch.bool or (seen and length == 1) or unclear:
        return
    one = ((attention_mask == attention_mask.amax(dim=1, keepdim=True)) | (attention_mask == 0)).all()
    if torch.compiler.is_compiling():
        torch._assert_async(one, _NUMBERED)
    elif not one:
        raise ValueError(_NUMBERED)


def check_past(attention_mask, cache: Cache | None, length: int) -> None:
    """Refuse a mask whose past is not that with which the cache was read; a step of one token is not checked."""
    if length == 1 or in_graph() or not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
        return
    past = attention_mask[:, :-length]
    known = as_it_was_read(past, cache)
    if known is not past and not torch.equal(known != 0, past != 0):
        raise ValueError(
            "attention_mask hides tokens that past_key_values has read, or shows some that were hidden, and a state "
            "cannot be read again: pass the mask with which they were read (generate() reads the pads behind a text "
            "that has ended), or the whole text without past_key_values."
        )


def check_device(mixers: list[TokenMixer], device: torch.device) -> None:
    """Recurrences compute what they decay by in float64, which Apple's GPUs do not have."""
    if device.type == "mps" and any(isinstance(x, Float32Module) for mixer in mixers for x in mixer.children()):
        raise ValueError(
            'Recurrences need float64, which mps lacks: use the CPU (Trainer: use_cpu=True, pipeline: device="cpu").'
        )


def check_causal(config, causal: bool | None) -> None:
    """The library's `is_causal=False` is possible where all layers can see later tokens."""
    if causal in (None, True) or "linear_attention" not in config.mask_kinds:
        return
    raise ValueError("is_causal=False needs attention to all tokens in all layers: the others see earlier tokens only.")


def check_forks(mask: Any, config, mixers: list[TokenMixer], cache: Cache | None, shape) -> Packing | None:
    """The packing of recurrent layers for a mask `[B or 1, 1, T, T]` that says which tokens each token sees.

    None without such a mask, and where all layers are softmax, which takes any.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim == 2 or "linear_attention" not in config.mask_kinds:
        return None
    (batch, length), alone = shape, cache is None and not torch.compiler.is_compiling()
    known = all(mixer.reads_forks or kind == "full_attention" for mixer, kind in zip(mixers, config.layer_types))
    known = known and not any(config.windowed_layers)
    if not alone or not known or mask.shape not in ((batch, 1, length, length), (1, 1, length, length)):
        raise ValueError(
            "attention_mask must have shape [B, past + T], or for recurrent layers and plain softmax, without a cache "
            f"or a graph, [B, 1, T, T] = [{batch}, 1, {length}, {length}]; got {list(mask.shape)}."
        )
    seen = mask if mask.dtype == torch.bool else mask == 0
    lowest = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
    told = bool((seen | (mask <= lowest)).all())
    packing = packing_from_forks(seen[:, 0].expand(batch, -1, -1)) if told else None
    if packing is None:
        raise ValueError(
            "An attention_mask [B, 1, T, T] may do no more than let texts fork where layers are recurrent and cannot "
            "leave out what they have read: a token sees itself and all that an earlier token sees (True or 0.0), and "
            "no other (False or the lowest number)."
        )
    return packing


def check_positions(position_ids: torch.Tensor | None, batch: int, length: int) -> None:
    """Positions have the shape of the tokens, also where no layer rotates by them and would notice."""
    check_tensors(position_ids=position_ids)
    if position_ids is None or torch.compiler.is_compiling():  # a comparison would fix the sizes in the graph
        return
    if position_ids.shape not in ((batch, length), (1, length)):
        alike = f" or [1, {length}]" if batch > 1 else ""
        raise ValueError(
            f"position_ids must have shape [B, T] = [{batch}, {length}]{alike}, got {list(position_ids.shape)}."
        )


def check_cu_seqlens(cu_seqlens: torch.Tensor | None, keys: torch.Tensor | None, batch: int, length: int) -> None:
    """The ends of packed documents are those of one row; in a compiled graph their values are not looked at.

    `keys` are the same ends, as FlashAttention's callers give them for the keys.
    """
    check_tensors(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=keys)
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q needs all documents in one row (B = 1), got B = {batch}.")
    if cu_seqlens is None:
        raise ValueError("cu_seq_lens_k alone keeps no documents apart: give the same ends as cu_seq_lens_q.")
    if cu_seqlens.is_floating_point() or cu_seqlens.dtype == torch.bool:
        raise ValueError(f"cu_seq_lens_q must be whole numbers, got {cu_seqlens.dtype}.")
    if torch.compiler.is_compiling():
        return
    ends = cu_seqlens.tolist()
    increasing = cu_seqlens.ndim == 1 and len(ends) > 1 and all(a < b for a, b in pairwise(ends))
    if not increasing or ends[0] != 0 or ends[-1] != length:
        raise ValueError(f"cu_seq_lens_q must increase strictly from 0 to T = {length}, got {ends}.")
    if keys is not None and keys is not cu_seqlens and keys.tolist() != ends:
        raise ValueError(f"cu_seq_lens_k must be those of cu_seq_lens_q, {ends}, got {keys.tolist()}.")


def check_seq_idx(seq_idx: torch.Tensor, cu_seqlens: torch.Tensor | None, batch: int, length: int) -> None:
    """`seq_idx` has a number for each token, which changes where the given ends are."""
    check_tensors(seq_idx=seq_idx)
    if seq_idx.shape != (batch, length):
        raise ValueError(f"seq_idx must have shape [B, T] = [{batch}, {length}], got {list(seq_idx.shape)}.")
    if cu_seqlens is None or in_graph():
        return
    told = cu_seqlens_from_numbers(seq_idx)
    ends, other = [0, length] if told is None else told.tolist(), cu_seqlens.tolist()
    if ends != other:
        raise ValueError(
            f"seq_idx and cu_seq_lens_q contradict each other, documents end at {ends[1:]} or at {other[1:]}: give one "
            "of them."
        )


def check_trace(config, cache: Cache | None, length: int, packed: bool) -> None:
    """Refuse what `torch.jit.trace` would record of one input and repeat for all others."""
    reason = None
    if cache is not None:
        reason = "keeps the place where a cache stands: leave past_key_values out"
    elif length == 1:
        reason = "of one token knows no more: give it several"
    elif any(config.sparse_per_layer):
        reason = "keeps the number of keys that a sparse branch finds"
    elif any(config.windowed_layers):
        reason = "keeps the number of keys that a window finds"
    elif packed and "full_attention" in config.layer_types:
        reason = "makes no masks of packed documents: leave position_ids, cu_seq_lens_q and seq_idx out"
    if reason is not None:
        raise ValueError(f"torch.jit.trace {reason}; or use torch.export, which is made for it.")


def check_layers(config, mixers: list[TokenMixer]) -> None:
    """Refuse other layers than the configuration names, of which a cache is made."""
    names, branches = config.mixers_per_layer, config.sparse_per_layer
    fit = min(len(names), len(branches)) >= len(mixers) and all(
        isinstance(getattr(mixer, "original_module", mixer), token_mixer_class(config, i))
        and (branches[i] is None) == (getattr(mixer, "sparse", None) is None)
        for i, mixer in enumerate(mixers)
    )
    if not fit:
        found = ", ".join(re.sub("^Parametrized|Mixer$", "", type(mixer).__name__) for mixer in mixers)
        raise ValueError(
            f"The configuration names layers ({', '.join(names)}) that the model does not have ({found}): after PEFT's "
            "layer_replication put lists of its layers as they are now into config.token_mixers and "
            "config.sparse_attention, or use use_cache=False."
        )


def check_cache_layers(cache: Cache, config) -> None:
    """The layers of a cache are of the model's kinds; one whose layers are not cannot tell its length either."""
    if cache.layer_class_to_replicate is not None and "linear_attention" not in config.mask_kinds:
        return
    kinds = ["keys_values" if kind == "full_attention" else "recurrent" for kind in config.layer_types]
    kinds = ["window" if window else kind for kind, window in zip(kinds, config.windowed_layers)]
    if [kind_of(layer) for layer in cache.layers] != kinds:
        raise ValueError(
            f"past_key_values ({type(cache).__name__} of {len(cache.layers)} layers) does not fit the {len(kinds)} "
            "layers of this model; make it with InterdomainCache(model.config) (prefix tuning cannot, it makes keys "
            "and values for all layers: use prompt tuning)."
        )


def check_rest(cache: Cache, length: int, name: str, attention_mask: torch.Tensor | None) -> None:
    """What `generate` is given goes on behind what a cache has read; the library would read some of it again, or leave
    some out.

    A longer mask says that ids follow what was read. Embeddings the library takes for the whole text, with any mask.
    """
    seen = int(cache.get_seq_length())
    if not seen or (attention_mask is not None and attention_mask.ndim != 2):
        return
    follows = attention_mask is not None and attention_mask.shape[1] > length
    if follows and name == "input_ids":
        return
    if follows or length <= seen:
        mask = f" beside an attention_mask for {attention_mask.shape[1]}" if follows else ""
        new = ", or new ids with an attention_mask [B, past + T]" if name == "input_ids" else ""
        raise ValueError(
            f"past_key_values has read {seen} tokens, and {name} holds {length}{mask}: give the whole text and at "
            f"least one token more{new}."
        )


def check_prefill(settings) -> None:
    """The pieces in which a prompt is read hold tokens."""
    size = settings.prefill_chunk_size
    if size is not None and not (type(size) is int and size > 0):
        raise ValueError(f"prefill_chunk_size must be a positive number of tokens, or None for all, got {size!r}.")


def check_early_exit(config, layers: int | None) -> None:
    """The first layers that draft are layers of the model."""
    if layers is not None and not (type(layers) is int and 1 <= layers <= config.num_hidden_layers):
        raise ValueError(
            f"assistant_early_exit must be from 1 to num_hidden_layers = {config.num_hidden_layers}, the layers that "
            f"guess, got {layers!r}."
        )


def check_beside_drafts(settings) -> None:
    """What `generate` is asked for is possible with drafts, of which tokens are taken back."""
    if settings.guidance_scale not in (None, 1):
        raise ValueError(
            "guidance_scale reads the text once more with a cache of its own, from which wrong guesses are not taken "
            "back: leave it out, or the assistant and prompt_lookup_num_tokens."
        )
    if settings.output_attentions and settings.return_dict_in_generate:
        raise ValueError(
            "output_attentions is known of one token after the other: leave it out, or the assistant and "
            "prompt_lookup_num_tokens."
        )


def check_room(cache: Cache, tokens: int) -> None:
    """Static layers of keys and values have room for this many tokens in all."""
    for layer in cache.layers:
        if isinstance(layer, StaticLayer) and tokens > layer.max_cache_len:
            raise ValueError(
                f"past_key_values has room for {layer.max_cache_len} tokens, and this needs {tokens}; make it with a "
                "larger max_cache_len."
            )


def check_is_cache(cache: Any) -> None:
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values must be a cache, got {type(cache).__name__}; make it with InterdomainCache(model.config)."
        )


def check_cache(cache: Cache | None, config, mixers: list[TokenMixer], batch: int) -> None:
    """The cache is of this model, batch and device, and whole."""
    if cache is None:
        return
    check_is_cache(cache)
    if config.bidirectional:
        raise ValueError("A bidirectional model reads a whole sequence at once: leave past_key_values out.")
    check_unbroken(cache)
    if len(cache.layers) == len(mixers) and all(map(_fits, cache.layers, mixers, repeat(batch))):
        return
    check_cache_layers(cache, config)
    for i, (layer, mixer) in enumerate(zip(cache.layers, mixers)):
        home, found = home_of(mixer.o_proj), contents_of(layer)
        if found.shapes is None:
            continue
        expected = mixer.cache_shapes(batch)
        if found.shapes != expected:
            hint = ""
            plain = {shape[-1] for shape in found.shapes} == {config.head_dim}
            if config.dynamic_mask == "value" and config.layer_types[i] == "full_attention" and plain:
                hint = ' (prefix tuning does not make the biases of dynamic_mask = "value": use prompt tuning)'
            rows = found.shapes[0][0]
            alike = [[batch, *shape[1:]] for shape in found.shapes] == expected and batch % rows == 0
            if alike and all(hasattr(layer, "batch_repeat_interleave") for layer in cache.layers):
                hint = f"; for several sequences or beams a prompt call batch_repeat_interleave({batch // rows}) on it"
            raise ValueError(
                f"past_key_values holds tensors of shape {found.shapes} in layer {i}, but this model and batch need "
                f"{expected}; it belongs to another model or batch{hint}."
            )
        if found.device is not None and home.type != "meta" and found.device != home:
            raise ValueError(
                f"past_key_values is on {found.device} in layer {i}, but the layer is on {home}; move it with "
                "past_key_values.to(device)."
            )


def _fits(layer, mixer: TokenMixer, batch: int) -> bool:
    """Whether the shapes that a recurrent layer noted when it made its tensors are the mixer's.

    This quick check runs at every token; `contents_of` takes longer.
    """
    noted = getattr(layer, "kept_shapes", None)
    return (
        noted is not None
        and noted == getattr(mixer, "kept_shapes", None)
        and layer.batch_size == batch
        and layer.device == home_of(mixer.o_proj)
    )


def check_dynamic_mask(
    config, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, longest: int | torch.Tensor | None
) -> torch.Tensor:
    """The table of a dynamic mask has all positions, and the attention implementation can hide keys head by head.

    `longest` bounds the positions where that is known without looking at them. Returns the embeddings: in a compiled
    graph they depend on the check, so that it runs before any layer writes into a cache. An exported graph is not
    checked: its indexing fails.
    """
    if config.dynamic_mask is None:
        return inputs_embeds
    if config.dynamic_mask_window is not None and config._attn_implementation not in ("eager", "sdpa"):
        raise ValueError(
            "dynamic_mask_window hides other keys from each head, which attn_implementation = "
            f'"{config._attn_implementation}" cannot do: use "eager" or "sdpa".'
        )
    kind, room = config.dynamic_mask, config.longest_text
    if room is None or torch.compiler.is_exporting():
        return inputs_embeds
    from ..mixers.softmax.dynamic_mask import check_position_table, zero_if_in_table

    if torch.compiler.is_compiling():
        return inputs_embeds + zero_if_in_table(position_ids, room, kind).to(inputs_embeds.dtype)
    if longest is None or longest > room:
        check_position_table(position_ids, room, kind)
    return inputs_embeds
