"""Convert back: an Interdomain model that is a Mamba-2 as one of Transformers, for whatever reads those."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from conversion import mamba2
from conversion.carry import expected_weights
from conversion.from_mamba2 import EMBEDDINGS, HEAD
from conversion.reading import compare, read_config, read_weights, tensor_bytes, weight_files
from conversion.writing import (
    DTYPES,
    carry_generation_config,
    check_space,
    check_target,
    gigabytes,
    open_working_folder,
    save_model,
)
from conversion.writing import add_arguments as add_writing_arguments
from examples.text_data import InputError
from modeling_interdomain import InterdomainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="folder of the Interdomain model")
    parser.add_argument("target", type=lambda text: Path(text).resolve(), help="folder to write")
    add_writing_arguments(parser)


def run(options: argparse.Namespace, family: ModuleType = mamba2) -> None:
    """`family` says which fields and weights its models and ours have in common."""
    check_target(options)
    source = read_config(options.source)
    if not isinstance(source, InterdomainConfig):
        raise InputError(f"The source is of type {source.model_type}: models of type interdomain can be converted.")
    config = family.their_config(source)
    weights = read_weights(weight_files(options.source))
    if source.tie_word_embeddings:
        weights.pop(HEAD, None)
    compare(expected_weights(source), weights, options.source)
    dtype = DTYPES.get(options.dtype, weights[EMBEDDINGS].dtype)
    weights = {name: x.to(dtype) for name, x in family.their_weights(source, weights).items()}
    needed = tensor_bytes(list(weights.values()))
    check_space(options.target, needed)
    print(f"{options.source} -> {options.target}")
    print(
        f"{sum(x.numel() for x in weights.values()):,} parameters; {str(dtype).removeprefix('torch.')}, "
        f"{gigabytes(needed)}"
    )
    if options.dry_run:
        return
    open_working_folder(options)
    model = family.THEIR_CLASS.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()
    carry_generation_config(model, [options.source])
    save_model(model, [options.source], options.target)
    print(f"Saved {options.target}.")
