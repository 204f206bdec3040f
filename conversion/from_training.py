"""Clean the checkpoint of a training run: whatever wrote it, a folder that `from_pretrained` loads.

Reads folders of the Trainer, sharded folders of `torch.distributed.checkpoint` (FSDP, accelerate) and single files with
a state dict; takes away the names that wrappers (DDP, FSDP, `torch.compile`) put before those of the model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from conversion.reading import (
    SINGLE_FILES,
    check_finite,
    compare,
    read_config,
    read_distributed,
    read_weights,
    weight_files,
)
from conversion.writing import add_folders, check_target, finish, may_write, saved_dtype
from examples.text_data import InputError
from modeling_interdomain import (
    InterdomainConfig,
    InterdomainForCausalLM,
    InterdomainForSequenceClassification,
    InterdomainModel,
)

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FILE_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="folder with config.json (default: SOURCE, or up to two above it)")
    add_folders(parser, "checkpoint of a training run: a folder or a file", Path)


def run(options: argparse.Namespace) -> None:
    check_target(options)
    if not options.source.exists():
        raise InputError(f"{options.source} does not exist.")
    folder = config_folder(options)
    config = read_config(folder)
    if not isinstance(config, InterdomainConfig):
        raise InputError(f"{folder / 'config.json'} is that of a {config.model_type} model, not of an Interdomain one.")
    weights, expected = fitting(config, clean(read_checkpoint(options.source), options.source), options.source)
    dtype = saved_dtype(options, weights)
    number = sum(x.numel() for x in weights.values())
    if not may_write(options, expected, dtype, f"{number:,} parameters in {len(weights)} tensors"):
        return
    model = class_of(config).from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    finish(model, [options.source if options.source.is_dir() else options.source.parent, folder], options.target)


def fitting(config, weights: dict[str, torch.Tensor], where: object) -> tuple[dict, dict]:
    """The weights of a checkpoint, and what its configuration expects (without numbers), both without a tied head.

    Raises an InputError where they do not fit each other, or a number is not finite.
    """
    weights, expected = drop_tied_head(config, weights), expected_weights(config)
    compare(expected, weights, where)
    check_finite(weights, where)
    return weights, expected


def expected_weights(config: InterdomainConfig, kind: type | None = None) -> dict[str, torch.Tensor]:
    """Every parameter of a saved model, of a kind or its `class_of`, without its numbers; a tied head is not saved."""
    with torch.device("meta"):
        weights = (kind or class_of(config))(config).state_dict()
    if config.tie_word_embeddings:
        weights.pop(HEAD, None)
    return weights


def config_folder(options: argparse.Namespace) -> Path:
    """The named folder, or the nearest one at or above the source that has a config.json."""
    if options.config is not None:
        return options.config
    source = options.source.resolve()
    for folder in [source, *source.parents][:3]:
        if (folder / "config.json").is_file():
            return folder
    raise InputError(f"Neither {options.source} nor the folders around it have a config.json: name one with --config.")


def class_of(config: InterdomainConfig) -> type:
    """The model that the configuration was saved with; a language model where it does not say."""
    known = {x.__name__: x for x in (InterdomainModel, InterdomainForSequenceClassification)}
    return next((known[name] for name in config.architectures or [] if name in known), InterdomainForCausalLM)


def read_checkpoint(source: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in any of the forms that training leaves."""
    if source.is_file():
        if source.suffix not in FILE_SUFFIXES:
            raise InputError(f"{source} is none of {', '.join(FILE_SUFFIXES)}.")
        return read_weights([source])
    for folder in [source, *sorted(source.glob("pytorch_model_fsdp*"))]:
        if (folder / ".metadata").is_file():
            return read_distributed(folder)
    if any((source / f"{name}{end}").is_file() for name in SINGLE_FILES for end in ("", ".index.json")):
        return read_weights(weight_files(source))
    if list(source.glob("**/*_model_states.pt")):
        raise InputError(
            f"{source} is a DeepSpeed checkpoint: run the zero_to_fp32.py in it and give the file it writes."
        )
    raise InputError(
        f"{source} holds no checkpoint: neither {', '.join(SINGLE_FILES)} nor the .metadata of a sharded one."
    )


def clean(weights: dict[str, torch.Tensor], where: object) -> dict[str, torch.Tensor]:
    """The weights under the names of the model: no wrappers, and nothing else that the checkpoint holds beside it."""
    plain = {".".join(part for part in name.split(".") if part not in WRAPPERS): x for name, x in weights.items()}
    around = sorted({name.removesuffix(EMBEDDINGS) for name in plain if name.endswith(EMBEDDINGS)})
    if len(around) > 1:
        raise InputError(f"{where} holds {len(around)} models, under the names {', '.join(around)}: keep one of them.")
    prefix = around[0] if around else ""
    return {name.removeprefix(prefix): x for name, x in plain.items() if name.startswith(prefix)}


def drop_tied_head(config, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the head that is the embeddings; they must be the same numbers."""
    if not config.tie_word_embeddings or class_of(config) is not InterdomainForCausalLM:
        return weights
    weights = dict(weights)
    tied = weights.pop(HEAD, None)
    if tied is not None and EMBEDDINGS in weights and not torch.equal(tied, weights[EMBEDDINGS]):
        raise InputError(
            "The configuration ties lm_head to the embeddings, but the checkpoint holds two different ones."
        )
    return weights
