"""Convert a Mamba-2 of Transformers: the same logits, with everything that works here.

Its layers become "ssd" layers without feed-forward; nothing is new and nothing is trained. `to-mamba2` goes back.
"""

from __future__ import annotations

import argparse
from types import ModuleType

import torch

from conversion import mamba2
from conversion.from_llama import source_folder
from conversion.from_training import HEAD, expected_weights
from conversion.reading import compare, read_config, read_weights, weight_files
from conversion.writing import add_folders, check_target, finish, may_write, saved_dtype
from modeling_interdomain import InterdomainForCausalLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folders(parser, "folder of the Mamba-2, or its name on the Hub")


def run(options: argparse.Namespace, family: ModuleType = mamba2) -> None:
    """`family` says which fields and weights its models and ours have in common."""
    check_target(options)
    folder = source_folder(options.source)
    source = read_config(folder)
    family.check_style(source)
    config = family.our_config(source)
    weights = family.our_weights(config, read_weights(weight_files(folder)))
    if config.tie_word_embeddings:
        weights.pop(HEAD, None)
    expected = expected_weights(config)
    compare(expected, weights, folder)
    dtype = saved_dtype(options, weights)
    number = sum(x.numel() for x in weights.values())
    if may_write(options, expected, dtype, f"{number:,} parameters"):
        report = {"source": options.source, "parameters": number}
        finish(convert(config, weights, dtype), [folder], options.target, report)


def convert(config, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> InterdomainForCausalLM:
    """The model with these weights; its decays, skips and biases of dt stay in float32."""
    return InterdomainForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()
