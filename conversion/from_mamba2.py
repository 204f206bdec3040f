"""Convert a Mamba-2 of Transformers: the same logits, with everything that works here.

Its layers become "ssd" layers without feed-forward; nothing is new and nothing is trained. `to-mamba2` goes back.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import torch

from conversion import mamba2
from conversion.carry import expected_weights
from conversion.from_llama import source_folder
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
from modeling_interdomain import InterdomainForCausalLM

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder of the Mamba-2, or its name on the Hub")
    parser.add_argument("target", type=lambda text: Path(text).resolve(), help="folder to write")
    add_writing_arguments(parser)


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
    dtype = DTYPES.get(options.dtype, weights[EMBEDDINGS].dtype)
    needed = tensor_bytes([x if ".recurrence." in name else x.to(dtype) for name, x in expected.items()])
    check_space(options.target, needed)
    number = sum(x.numel() for x in weights.values())
    print(f"{options.source} -> {options.target}")
    print(f"{number:,} parameters; {str(dtype).removeprefix('torch.')}, {gigabytes(needed)}")
    if options.dry_run:
        return
    open_working_folder(options)
    model = convert(config, weights, dtype)
    carry_generation_config(model, [folder])
    save_model(model, [folder], options.target, {"source": options.source, "parameters": number})
    print(f"Saved {options.target}.")


def convert(config, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> InterdomainForCausalLM:
    """The model with these weights; its decays, skips and biases of dt stay in float32."""
    return InterdomainForCausalLM.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()
