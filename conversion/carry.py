"""A Llama's weights as an Interdomain model: what is carried over, what is new, and how the new parts start."""

from __future__ import annotations

import re
from collections.abc import Collection
from inspect import get_annotations
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from conversion.from_training import HEAD, expected_weights
from conversion.reading import NO_SUCH_SHAPE, compare, made_config
from conversion.shares import start_shares
from examples.text_data import InputError
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from modeling_interdomain.mixers.window.configuration import WindowFields
from modeling_interdomain.mixers.window.mixer import WindowMixer
from modeling_interdomain.registry import TOKEN_MIXERS

# Models that compute what our softmax layers compute; others with the same names of parameters do not.
LLAMA_STYLE = ("llama", "mistral")
# Its projections of queries, keys and values have biases, that of the output none.
QWEN2 = "qwen2"
POINTS_A_MODE = 2  # as many points of the past as a state has real numbers of each input
TOKENS = 256  # any, to see how heads score
SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rope_parameters",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class Window(NamedTuple):
    """What a layer that becomes a window with a memory sees by softmax: the last tokens and the first ones."""

    size: int
    sinks: int


def parse_layers(text: str, number: int) -> list[int]:
    """Layers from "all", "none", "every-other" (0, 2, 4, ...) or a list such as "0,2,4-7".

    With "auto:N", which keeps N of them (`kept_layers`), those that there are to choose from.
    """
    named = {"all": range(number), "none": range(0), "every-other": range(0, number, 2)}
    if text in named:
        return list(named[text])
    if kept_layers(text, number):
        return list(range(number))
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise InputError(f'--layers must be all, none, every-other or a list such as "0,2,4-7", not "{text}".')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise InputError(f'--layers "{text}" has a range from {first} down to {last}: write {last}-{first}.')
        chosen |= set(range(first, last + 1))
    if not chosen or max(chosen) >= number:
        raise InputError(f'--layers "{text}" names no layers of a model with layers 0 to {number - 1}.')
    return sorted(chosen)


def kept_layers(text: str, number: int) -> int:
    """How many layers "auto:N" leaves softmax; 0 where `text` says anything else."""
    match = re.fullmatch(r"auto:(\d+)", text)
    kept = int(match[1]) if match else 0
    if match and not 0 < kept < number:
        raise InputError(f'--layers "{text}" keeps {kept} layers of {number}: keep one at least, and not all.')
    return kept


def interdomain_config(
    source: PreTrainedConfig, layers: Collection[int], state_size: int, window: Window | None = None
) -> InterdomainConfig:
    """The configuration with the mixers of `layers` replaced, by windows where one is given; all else as in the source.

    A window with a `state_size` of 0 has no memory.
    """
    _check_style(source, window is not None)
    _check_windows(source, layers, window)
    fields = {name: getattr(source, name, None) for name in SAME_FIELDS}
    if fields["head_dim"] is None:
        fields["head_dim"] = source.hidden_size // source.num_attention_heads
    # Relative positions stay what they were: rotated features meet as rotated queries and keys did.
    replaced: dict = {"rope_placement": "after" if layers else None, "state_size": state_size}
    if window is not None:
        replaced = {"attention_window": window.size, "attention_sinks": window.sinks, "window_memory": state_size > 0}
        replaced |= {"attention_bias": has_biases(source)}
        memory = {"state_size": state_size, "window_share": "counted", "window_write_gate": True}
        replaced |= memory | {"window_points": POINTS_A_MODE * state_size} if state_size else {}
    mixer = "interdomain" if window is None else "window"
    replaced["attention_dropout"] = float(source.attention_dropout or 0.0)
    replaced["start"] = "random"  # queries and keys are those of the source, which a start must not shift
    replaced["token_mixers"] = [mixer if i in layers else "softmax" for i in range(source.num_hidden_layers)]
    return made_config(fields | replaced, NO_SUCH_SHAPE)


def has_biases(source: PreTrainedConfig) -> bool:
    """Whether the projections of its attention have biases."""
    return source.model_type == QWEN2 or bool(getattr(source, "attention_bias", False))


def _check_style(source: PreTrainedConfig, takes_biases: bool) -> None:
    """Refuse what our layers would compute differently."""
    if getattr(source, "quantization_config", None):
        raise InputError("The source is quantized: convert the original weights.")
    if has_biases(source) and not takes_biases:
        raise InputError(
            f"The projections of this {source.model_type} model have biases, for which ours have no place with "
            "--window 0."
        )
    if getattr(source, "mlp_bias", False):
        raise InputError(f"The MLPs of this {source.model_type} model have biases, for which ours have no place.")
    if source.model_type not in (*LLAMA_STYLE, QWEN2):
        known = " and ".join(LLAMA_STYLE)
        raise InputError(
            f"The source is of type {source.model_type}; those of type {known} can be converted, and {QWEN2} "
            "without --window 0."
        )
    if (source.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("The source names a partial_rotary_factor, which Llama ignores and our layers would not.")


def source_windows(source: PreTrainedConfig) -> list[int | None]:
    """Of each layer the last tokens that it sees; None, all."""
    number, window = source.num_hidden_layers, getattr(source, "sliding_window", None)
    if window is None or window >= source.max_position_embeddings:
        return [None] * number
    kinds = getattr(source, "layer_types", None) or ["sliding_attention"] * number
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _check_windows(source: PreTrainedConfig, layers: Collection[int], window: Window | None) -> None:
    """A layer that sees a window sees no more afterwards."""
    for layer, seen in enumerate(source_windows(source)):
        if seen is not None and layer not in layers:
            raise InputError(
                f"The source attends to the last {seen:,} tokens, our softmax layers to all: convert all layers."
            )
        if seen is not None and window is not None and window.size > seen:
            raise InputError(
                f"The source attends to the last {seen:,} tokens: --window {window.size:,} would show it more."
            )


def carried_weights(weights: dict[str, torch.Tensor], source: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """The weights under our names; early checkpoints also hold the rotary frequencies, which are computed.

    A Qwen2 has no bias where ours have one: it is zero.
    """
    carried = {
        name.replace(".self_attn.", ".token_mixer."): x
        for name, x in weights.items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if source.model_type == QWEN2:
        outputs = [name for name in carried if name.endswith(".token_mixer.o_proj.weight")]
        carried |= {name.replace("weight", "bias"): carried[name].new_zeros(source.hidden_size) for name in outputs}
    return carried


def new_names(config: InterdomainConfig) -> set[str]:
    """The parameters that softmax layers do not have."""
    return expected_weights(config).keys() - _softmax_weights(config).keys()


def _softmax_weights(config: InterdomainConfig) -> dict[str, torch.Tensor]:
    of_windows = get_annotations(WindowFields)  # a configuration of softmax layers would say that none reads them
    fields = {name: x for name, x in config.to_dict().items() if name not in of_windows}
    fields |= {"token_mixers": "softmax", "rope_placement": None}
    return expected_weights(InterdomainConfig(**fields))


def check_weights(config: InterdomainConfig, carried: dict[str, torch.Tensor], where: object) -> None:
    """Raise unless the weights are those of the source's configuration."""
    found = dict(carried)
    if config.tie_word_embeddings:
        found.pop(HEAD, None)
    compare(_softmax_weights(config), found, where)


def convert(config: InterdomainConfig, carried: dict[str, torch.Tensor], dtype: torch.dtype) -> InterdomainForCausalLM:
    """The model with the carried weights; its convolutions start as the identity, the memories of windows with a share
    of 2% in the softmax, and the rest as in a new model."""
    model = InterdomainForCausalLM.from_pretrained(None, config=config, state_dict=carried, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_conv.weight"):
                parameter.zero_()
                parameter[..., -1] = 1.0
    model.eval()
    if layers := memories(config):
        draw = torch.Generator().manual_seed(0)
        start_shares(model, layers, torch.randint(config.vocab_size, (1, TOKENS), generator=draw))
    return model


def windows(config: InterdomainConfig) -> list[int]:
    """The layers that see a window."""
    return [i for i, name in enumerate(config.mixers_per_layer) if issubclass(TOKEN_MIXERS[name], WindowMixer)]


def memories(config: InterdomainConfig) -> list[int]:
    """Those that keep a state of the rest."""
    return windows(config) if config.window_memory else []


def window_report(config: InterdomainConfig) -> dict:
    """What a report says of its windows."""
    memory = {"modes": config.state_size, "share": config.window_share, "points": config.window_points}
    return {
        "tokens": config.attention_window,
        "sinks": config.attention_sinks,
        **(memory if config.window_memory else {"modes": 0, "share": None, "points": None}),
    }
