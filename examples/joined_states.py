"""Caches of texts put together and taken apart without reading anything again, in one file beside the package.

The states are joined by `join_states` and `remove_span` of the package: exact at the operator, and in a first layer
without convolutions. With them the first tokens after a joint are those that the convolutions made without the text
before it, and the keys and values of later layers are those of the text as it was read: there it is approximate. How
near that is, is measured in benchmarks/spans_study.py.

Usage:
    joined = join_caches(cache_of_first, cache_of_second, model)
    shorter = cut_cache(cache, before, after, model)
"""

from typing import Any

import torch

from modeling_interdomain import InterdomainCache, InterdomainStaticCache, join_states, remove_span
from modeling_interdomain.inputs.checks import check_cache_layers
from modeling_interdomain.mixers.interdomain.mixer import KeyValueMixer
from modeling_interdomain.model_cache.cache import check_unbroken
from modeling_interdomain.model_cache.fingerprint import decoder_of


@torch.no_grad()
def join_caches(first, second, model, lengths: torch.Tensor | None = None) -> InterdomainCache:
    """The cache of two documents one after the other, each read alone.

    Args:
        first, second: caches with as many rows; what comes next follows the second.
        model: that has read both. With rotary embeddings it must have read the second at its place, with `position_ids`
            that begin where the first ends.
        lengths: `[B]`, tokens of the second in each row, without pads. Default: None, all that it has read.

    Returns:
        A new cache, without a record of past tokens.

    Raises:
        ValueError: when a cache has read nothing, the rows differ, `lengths` are not of what the second has read, or a
            layer's state cannot be joined.
    """
    decoder = _check(model, first=first, second=second)
    seen = _counted("lengths", lengths, int(second.get_seq_length()))
    mixers = [layer.token_mixer for layer in decoder.layers]
    states = [
        join_layer(mixer, a.state, b.state, seen)
        for mixer, a, b in zip(mixers, first.layers, second.layers, strict=True)
    ]
    return _with_states(second, states, int(first.get_seq_length()) + int(second.get_seq_length()), decoder)


def join_layer(
    mixer: KeyValueMixer, first: torch.Tensor, second: torch.Tensor, length: int | torch.Tensor
) -> torch.Tensor:
    """The state of one layer after two documents, of which the second has `length` tokens, from those of each alone."""
    if mixer.first_state is not None:  # with which the second has begun, too
        first = first - mixer.first_state(first)
    return join_states(first, second, length, _log_decay(mixer))


def _log_decay(mixer: KeyValueMixer) -> torch.Tensor:
    recurrence: Any = mixer.recurrence
    return recurrence.parameters_of_operator()[0]


@torch.no_grad()
def cut_cache(cache, before, after, model, since: torch.Tensor | None = None) -> InterdomainCache:
    """The cache of a text without a span, the rest closed up.

    Args:
        cache: after the text.
        before, after: of the same text where the span begins and where it ends: `copy.deepcopy` of the cache there.
            `before` is None where the span is the beginning.
        model: that has read it, without rotary embeddings: they number the tokens, those after the span too.
        since: `[B]`, tokens of each row after the span, without pads. Default: None, all that were read.

    Returns:
        A new cache, without a record of past tokens.

    Raises:
        ValueError: when a cache has read nothing, they are not in this order, the rows differ, `since` is not of
            what was read, the model has rotary embeddings, or a layer's state cannot be cut.
    """
    caches = {"cache": cache, "after": after} if before is None else {"cache": cache, "before": before, "after": after}
    decoder = _check(model, **caches)
    seen = [0 if x is None else int(x.get_seq_length()) for x in (before, after, cache)]
    if not seen[0] <= seen[1] < seen[2]:
        raise ValueError(f"before, after and cache must have read more and more of one text, got {seen} tokens.")
    if decoder.config.rope_placement is not None:
        raise ValueError("Rotary embeddings have numbered the tokens after the span: it cannot be closed up.")
    start, stop, end = seen
    tokens = _counted("since", since, end - stop)
    states = []
    for i, layer in enumerate(decoder.layers):
        whole, rest = cache.layers[i].state, after.layers[i].state
        head = _begun(layer.token_mixer, rest) if before is None else before.layers[i].state
        states.append(remove_span(whole, head, rest, tokens, _log_decay(layer.token_mixer)))
    return _with_states(cache, states, end - (stop - start), decoder)


def _counted(name: str, tokens: torch.Tensor | None, read: int) -> int | torch.Tensor:
    """The tokens of each row, no more than were read."""
    if tokens is not None and bool((torch.as_tensor(tokens) > read).any()):
        raise ValueError(f"{name} must be at most the {read} tokens that were read, got {tokens!r}.")
    return read if tokens is None else tokens


def _begun(mixer, state: torch.Tensor) -> torch.Tensor:
    """What a layer holds before it has read anything."""
    return torch.zeros_like(state) if mixer.first_state is None else mixer.first_state(state)


def _with_states(cache, states: list[torch.Tensor], seen: int, decoder) -> InterdomainCache:
    """A new cache with the conv state of one, and other states."""
    tensors = cache.named_tensors()
    for i, state in enumerate(states):
        tensors[f"{i}.states.0.state"] = state
    found = InterdomainCache(decoder.config)
    found.restore(tensors, seen, decoder)
    return found


def _check(model, **caches) -> Any:
    """The decoder, once it is known that every layer has one state with one decay, of as many rows."""
    decoder = decoder_of(model)
    for i, layer in enumerate(decoder.layers):
        mixer = layer.token_mixer
        linear, gated = isinstance(mixer, KeyValueMixer), bool(getattr(mixer, "gate_names", ()))
        if not linear or gated or mixer.sparse is not None:
            kind = decoder.config.mixers_per_layer[i]
            kind += (" with gates or the delta rule" if gated else " with a sparse branch") * linear
            raise ValueError(
                f"Layer {i} ({kind}) does not hold one linear state with a decay that is the same for all tokens: only "
                "those can be joined and cut."
            )
    for name, cache in caches.items():
        if not isinstance(cache, InterdomainCache | InterdomainStaticCache):
            raise ValueError(f"{name} must be an InterdomainCache, got {type(cache).__name__}.")
        check_cache_layers(cache, decoder.config)
        check_unbroken(cache)
        cache.commit()
    empty = [name for name, cache in caches.items() if not cache.get_seq_length()]
    if empty:
        raise ValueError(f"{empty[0]} has read nothing.")
    rows = {name: cache.layers[0].state.shape[0] for name, cache in caches.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"The caches must have as many rows, got {', '.join(f'{k} {v}' for k, v in rows.items())}.")
    return decoder
