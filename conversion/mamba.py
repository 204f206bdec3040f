"""What a Mamba of Transformers and an Interdomain model of selective scans have in common: fields and weights."""

from __future__ import annotations

import torch
from transformers import MambaConfig, MambaForCausalLM, PreTrainedConfig

from conversion.mamba2 import SAME_FIELDS, check_kind, check_layers, names
from conversion.reading import NO_SUCH_SHAPE, made_config
from examples.text_data import InputError
from modeling_interdomain import InterdomainConfig
from modeling_interdomain.mixers.selective_scan.configuration import SelectiveScanSpecification

THEIR_CLASS = MambaForCausalLM
# Theirs and ours.
OTHER_NAMES = {
    "state_size": "scan_state_size",
    "intermediate_size": "scan_channels",
    "time_step_rank": "scan_step_rank",
    "conv_kernel": "conv_kernel",
    "use_conv_bias": "scan_conv_bias",
    "use_bias": "scan_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}
# What makes a layer of ours one of theirs.
MAMBA = {
    "token_mixers": "selective_scan",
    "feed_forwards": "none",
    "use_output_norm": False,
}
# Parameters of a layer that have one counterpart, ours and theirs.
LAYER = {
    "input_layernorm.weight": "norm.weight",
    "token_mixer.v_conv.weight": "mixer.conv1d.weight",
    "token_mixer.v_conv.bias": "mixer.conv1d.bias",
    "token_mixer.x_proj.weight": "mixer.x_proj.weight",
    "token_mixer.dt_proj.weight": "mixer.dt_proj.weight",
    "token_mixer.recurrence.dt_bias": "mixer.dt_proj.bias",
    "token_mixer.recurrence.D": "mixer.D",
    "token_mixer.o_proj.weight": "mixer.out_proj.weight",
    "token_mixer.o_proj.bias": "mixer.out_proj.bias",
}
# One matrix of theirs holds these of ours, in their order; and ours has channels side by side.
IN_PROJECTION = ("v_proj", "g_proj")
TRANSPOSED = "token_mixer.recurrence.A_log", "mixer.A_log"


def our_config(source: MambaConfig) -> InterdomainConfig:
    """The configuration of the same model here."""
    if source.hidden_act not in ("silu", "swish"):
        raise InputError(f'The source has hidden_act = "{source.hidden_act}": layers of Mamba here have "silu".')
    fields = {name: getattr(source, name) for name in SAME_FIELDS}
    fields |= {ours: getattr(source, theirs) for theirs, ours in OTHER_NAMES.items()}
    heads = {"num_attention_heads": 1}  # of which a layer of Mamba knows nothing
    return made_config(fields | heads | MAMBA, NO_SUCH_SHAPE)


def their_config(source: InterdomainConfig) -> MambaConfig:
    """The way back; raises where a layer computes what no Mamba does."""
    check_layers(source, MAMBA, "Mamba")
    channels, rank = SelectiveScanSpecification.channels(source), source.scan_step_rank
    if channels % source.hidden_size:
        raise InputError(
            f"The channels of a Mamba are a multiple of hidden_size = {source.hidden_size}, and the source has "
            f"{channels}."
        )
    fields = {name: getattr(source, name) for name in SAME_FIELDS}
    fields |= {theirs: getattr(source, ours) for theirs, ours in OTHER_NAMES.items()}
    del fields["intermediate_size"]
    fields |= {"expand": channels // source.hidden_size, "time_step_rank": "auto" if rank is None else rank}
    return MambaConfig(**fields)


def check_style(source: PreTrainedConfig) -> None:
    """Refuse what is no Mamba of Transformers."""
    check_kind(source, "mamba")


def our_weights(config: InterdomainConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their weights under our names, large matrices cut into ours; what is not known stays as it is."""
    # As the first versions wrote it.
    rest = {name.replace("backbone.embedding.", "backbone.embeddings."): x for name, x in weights.items()}
    found = {ours: rest.pop(theirs) for ours, theirs in names(config, LAYER).items() if theirs in rest}
    ours, theirs = TRANSPOSED
    for i in range(config.num_hidden_layers):
        layer, other = f"model.layers.{i}", f"backbone.layers.{i}"
        if f"{other}.{theirs}" in rest:
            found[f"{layer}.{ours}"] = rest.pop(f"{other}.{theirs}").T.contiguous()
        for kind in ("weight", "bias"):
            if (both := rest.pop(f"{other}.mixer.in_proj.{kind}", None)) is not None:
                parts = [f"{layer}.token_mixer.{name}.{kind}" for name in IN_PROJECTION]
                found |= dict(zip(parts, both.chunk(2), strict=True))
    return found | rest


def their_weights(config: InterdomainConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The way back, of weights that fit the configuration."""
    found = {theirs: weights[ours] for ours, theirs in names(config, LAYER).items() if ours in weights}
    ours, theirs = TRANSPOSED
    for i in range(config.num_hidden_layers):
        layer, other = f"model.layers.{i}", f"backbone.layers.{i}"
        found[f"{other}.{theirs}"] = weights[f"{layer}.{ours}"].T.contiguous()
        for kind in ("weight", "bias"):
            parts = [f"{layer}.token_mixer.{name}.{kind}" for name in IN_PROJECTION]
            if parts[0] in weights:
                found[f"{other}.mixer.in_proj.{kind}"] = torch.cat([weights[name] for name in parts])
    return found
