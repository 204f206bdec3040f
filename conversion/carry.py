"""A Llama's weights as an Interdomain model: what is carried over, what is new, and how the new parts start."""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from conversion.reading import compare, reason
from examples.text_data import InputError
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

# Models that compute what our softmax layers compute; others with the same names of parameters do not.
LLAMA_STYLE = ("llama", "mistral")
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


def parse_layers(text: str, number: int) -> list[int]:
    """Layers from "all", "none", "every-other" (0, 2, 4, ...) or a list such as "0,2,4-7"."""
    named = {"all": range(number), "none": range(0), "every-other": range(0, number, 2)}
    if text in named:
        return list(named[text])
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise InputError(f'--layers must be all, none, every-other or a list such as "0,2,4-7", not "{text}".')
        first = int(match[1])
        chosen |= set(range(first, int(match[2] or first) + 1))
    if not chosen or max(chosen) >= number:
        raise InputError(f'--layers "{text}" names no layers of a model with layers 0 to {number - 1}.')
    return sorted(chosen)


def interdomain_config(source: PreTrainedConfig, layers: Collection[int], state_size: int) -> InterdomainConfig:
    """The configuration with the mixers of `layers` replaced; all else as in the source."""
    _check_style(source, layers)
    number = source.num_hidden_layers
    fields = {name: getattr(source, name) for name in SAME_FIELDS}
    if fields["head_dim"] is None:
        fields["head_dim"] = source.hidden_size // source.num_attention_heads
    try:
        return InterdomainConfig(
            **fields,
            attention_dropout=float(source.attention_dropout or 0.0),
            start="random",  # queries and keys are those of the source, which a start must not shift
            token_mixers=["interdomain" if i in layers else "softmax" for i in range(number)],
            # Relative positions stay what they were: rotated features meet as rotated queries and keys did.
            rope_placement="after" if layers else None,
            state_size=state_size,
        )
    except (ValueError, StrictDataclassError) as error:
        raise InputError(f"The source has a shape that an Interdomain model cannot have: {reason(error)}") from error


def _check_style(source: PreTrainedConfig, layers: Collection[int]) -> None:
    """Refuse what our layers would compute differently."""
    if getattr(source, "quantization_config", None):
        raise InputError("The source is quantized: convert the original weights.")
    if getattr(source, "attention_bias", False) or source.model_type == "qwen2":
        raise InputError(
            f"The projections of this {source.model_type} model have biases, for which ours have no place."
        )
    if getattr(source, "mlp_bias", False):
        raise InputError(f"The MLPs of this {source.model_type} model have biases, for which ours have no place.")
    if source.model_type not in LLAMA_STYLE:
        known = " and ".join(LLAMA_STYLE)
        raise InputError(f"The source is of type {source.model_type}; those of type {known} can be converted.")
    if (source.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError("The source names a partial_rotary_factor, which Llama ignores and our layers would not.")
    window = getattr(source, "sliding_window", None)
    if window is not None and window < source.max_position_embeddings and len(layers) < source.num_hidden_layers:
        raise InputError(
            f"The source attends to the last {window:,} tokens, our softmax layers to all: convert all layers."
        )


def carried_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under our names; early checkpoints also hold the rotary frequencies, which are computed."""
    return {
        name.replace(".self_attn.", ".token_mixer."): x
        for name, x in weights.items()
        if not name.endswith("rotary_emb.inv_freq")
    }


def expected_weights(config: InterdomainConfig) -> dict[str, torch.Tensor]:
    """Every parameter of a saved model, without its numbers; a tied head is not saved."""
    with torch.device("meta"):
        weights = InterdomainForCausalLM(config).state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def new_names(config: InterdomainConfig) -> set[str]:
    """The parameters that softmax layers do not have."""
    return expected_weights(config).keys() - _softmax_weights(config).keys()


def _softmax_weights(config: InterdomainConfig) -> dict[str, torch.Tensor]:
    fields = config.to_dict() | {"token_mixers": "softmax", "rope_placement": None}
    return expected_weights(InterdomainConfig(**fields))


def check_weights(config: InterdomainConfig, carried: dict[str, torch.Tensor], where: object) -> None:
    """Raise unless the weights are those of the source's configuration."""
    found = dict(carried)
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    compare(_softmax_weights(config), found, where)


def convert(config: InterdomainConfig, carried: dict[str, torch.Tensor], dtype: torch.dtype) -> InterdomainForCausalLM:
    """The model with the carried weights; its convolutions start as the identity, the rest as in a new model."""
    model = InterdomainForCausalLM.from_pretrained(None, config=config, state_dict=carried, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_conv.weight"):
                parameter.zero_()
                parameter[..., -1] = 1.0
    return model.eval()
