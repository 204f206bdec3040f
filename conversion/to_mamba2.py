"""Convert back: an Interdomain model that is a Mamba-2 as one of Transformers, for whatever reads those."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from conversion import mamba2
from conversion.from_training import HEAD, expected_weights
from conversion.reading import compare, read_config, read_weights, weight_files
from conversion.writing import add_folders, check_target, finish, may_write, saved_dtype
from examples.text_data import InputError
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folders(parser, "folder of the Interdomain model", Path)


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
    compare(expected_weights(source, InterdomainForCausalLM), weights, options.source)
    dtype = saved_dtype(options, weights)
    weights = {name: x.to(dtype) for name, x in family.their_weights(source, weights).items()}
    number = sum(x.numel() for x in weights.values())
    if may_write(options, weights, dtype, f"{number:,} parameters"):
        model = family.THEIR_CLASS.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()
        finish(model, [options.source], options.target)
