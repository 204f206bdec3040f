"""What a Mamba-2 of Transformers and an Interdomain model of state space duality have in common: fields and weights."""

from __future__ import annotations

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedConfig

from conversion.reading import NO_SUCH_SHAPE, made_config
from examples.text_data import InputError
from modeling_interdomain import InterdomainConfig
from modeling_interdomain.mixers.ssd.configuration import SSDSpecification

THEIR_CLASS = Mamba2ForCausalLM
SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "initializer_range",
    "residual_in_fp32",
    "time_step_min",
    "time_step_max",
    "tie_word_embeddings",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# Theirs and ours.
OTHER_NAMES = {
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "state_size": "ssd_state_size",
    "n_groups": "ssd_groups",
    "conv_kernel": "ssd_conv_kernel",
    "use_conv_bias": "ssd_conv_bias",
    "hidden_act": "ssd_activation",
    "use_bias": "ssd_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}
# What makes a layer of ours one of theirs.
MAMBA2 = {
    "token_mixers": "ssd",
    "feed_forwards": "none",
    "ssd_dt_bias": "time_step",
    "ssd_skip": True,
    "ssd_norm": "after_gate",
    "use_output_gate": True,
    "use_output_norm": False,
    "rope_placement": None,
}
# Parameters of a layer that have one counterpart, ours and theirs.
LAYER = {
    "input_layernorm.weight": "norm.weight",
    "token_mixer.norm.weight": "mixer.norm.weight",
    "token_mixer.recurrence.A_log": "mixer.A_log",
    "token_mixer.recurrence.D": "mixer.D",
    "token_mixer.recurrence.dt_bias": "mixer.dt_bias",
    "token_mixer.o_proj.weight": "mixer.out_proj.weight",
    "token_mixer.o_proj.bias": "mixer.out_proj.bias",
}
MODEL = {
    "model.embed_tokens.weight": "backbone.embeddings.weight",
    "model.norm.weight": "backbone.norm_f.weight",
    "lm_head.weight": "lm_head.weight",
}
# One matrix of theirs holds these rows of ours, in their order.
IN_PROJECTION, CONVOLUTION = ("g_proj", "v_proj", "k_proj", "q_proj", "dt_proj"), ("v_conv", "k_conv", "q_conv")


def our_config(source: Mamba2Config) -> InterdomainConfig:
    """The configuration of the same model here."""
    fields = {name: getattr(source, name) for name in SAME_FIELDS}
    fields |= {ours: getattr(source, theirs) for theirs, ours in OTHER_NAMES.items()}
    least, largest = source.time_step_limit
    limit = None if least <= 0 and largest == float("inf") else [float(least), float(largest)]
    return made_config(fields | MAMBA2 | {"ssd_dt_limit": limit}, NO_SUCH_SHAPE)


def their_config(source: InterdomainConfig) -> Mamba2Config:
    """The way back; raises where a layer computes what no Mamba-2 does."""
    started = {"ssd_dt_bias": source.ssd_dt_bias or MAMBA2["ssd_dt_bias"]}  # how it started is no matter
    check_layers(source, MAMBA2 | started, "Mamba-2")
    heads, width = SSDSpecification.output_heads(source), SSDSpecification.head_width(source)
    if heads * width % source.hidden_size:
        raise InputError(
            f"Heads of Mamba-2 make a multiple of hidden_size = {source.hidden_size}, and the source has {heads} of "
            f"{width}."
        )
    if source.ssd_conv_kernel == 1 or source.ssd_activation is None:
        raise InputError("The source is no Mamba-2: it has no convolution of x, B and C, or no activation after it.")
    fields = {name: getattr(source, name) for name in SAME_FIELDS}
    fields |= {theirs: getattr(source, ours) for theirs, ours in OTHER_NAMES.items()}
    fields |= {"num_heads": heads, "head_dim": width, "expand": heads * width // source.hidden_size}
    if source.ssd_dt_limit is not None:
        fields["time_step_limit"] = tuple(source.ssd_dt_limit)
    return Mamba2Config(**fields)


def check_layers(source: InterdomainConfig, wanted: dict, what: str) -> None:
    """Refuse layers of ours with a branch or a learned state, or other values of these fields: `what` has none such."""
    if any(source.sparse_per_layer):
        raise InputError(f"The source is no {what}: it has sparse_attention beside its layers.")
    if source.learned_state:
        raise InputError(f"The source is no {what}: it begins each text with a learned state.")
    of_layers = {"token_mixers": source.mixers_per_layer, "feed_forwards": source.feed_forwards_per_layer}
    for name, value in wanted.items():
        for found in of_layers.get(name) or [getattr(source, name)]:
            if found != value:
                raise InputError(f"The source is no {what}: its {name} is {found!r} instead of {value!r}.")


def check_kind(source: PreTrainedConfig, kind: str) -> None:
    """Refuse models of another type, and quantized ones."""
    if source.model_type != kind:
        raise InputError(f"The source is of type {source.model_type}: models of type {kind} can be converted.")
    if getattr(source, "quantization_config", None):
        raise InputError("The source is quantized: convert the original weights.")


def check_style(source: PreTrainedConfig) -> None:
    """Refuse what is no Mamba-2 of Transformers, or has no convolution."""
    check_kind(source, "mamba2")
    if source.conv_kernel == 1:
        raise InputError("The source has conv_kernel = 1, a convolution of one token: 2 and more can be converted.")


def names(config: InterdomainConfig, layer: dict[str, str]) -> dict[str, str]:
    """Ours and theirs, of the parameters of a model that have one counterpart, given those of a layer."""
    each = range(config.num_hidden_layers)
    return MODEL | {f"model.layers.{i}.{a}": f"backbone.layers.{i}.{b}" for i in each for a, b in layer.items()}


def _parts(config: InterdomainConfig, number: int) -> dict[str, dict[str, int]]:
    """Their matrices, and which of ours with how many rows each is made of."""
    heads = SSDSpecification.output_heads(config)
    inner = heads * SSDSpecification.head_width(config)
    state = config.ssd_groups * config.ssd_state_size
    rows = {"g": inner, "v": inner, "k": state, "q": state, "dt": heads}
    found = {}
    for i in range(number):
        for theirs, ours in (("in_proj", IN_PROJECTION), ("conv1d", CONVOLUTION)):
            for kind in ("weight", "bias"):
                parts = {f"model.layers.{i}.token_mixer.{x}.{kind}": rows[x.split("_")[0]] for x in ours}
                found[f"backbone.layers.{i}.mixer.{theirs}.{kind}"] = parts
    return found


def our_weights(config: InterdomainConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their weights under our names, large matrices cut into ours; what is not known stays as it is."""
    # As the first versions wrote it.
    rest = {name.replace("backbone.embedding.", "backbone.embeddings."): x for name, x in weights.items()}
    found = {ours: rest.pop(theirs) for ours, theirs in names(config, LAYER).items() if theirs in rest}
    for theirs, parts in _parts(config, config.num_hidden_layers).items():
        if theirs in rest and rest[theirs].shape[0] == sum(parts.values()):
            found |= dict(zip(parts, rest.pop(theirs).split(list(parts.values())), strict=True))
    return found | rest


def their_weights(config: InterdomainConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The way back, of weights that fit the configuration."""
    found = {theirs: weights[ours] for ours, theirs in names(config, LAYER).items() if ours in weights}
    for theirs, parts in _parts(config, config.num_hidden_layers).items():
        if next(iter(parts)) in weights:
            found[theirs] = torch.cat([weights[ours] for ours in parts])
    return found
