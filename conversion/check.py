"""Check a saved folder: configuration, weights, tokenizer, and a few generated tokens.

One line for each thing that holds; the first that does not ends the check with one sentence.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers
from packaging.version import InvalidVersion, Version
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion.from_training import class_of, fitting
from conversion.reading import read_config, read_weights, weight_files
from conversion.writing import tokenizer_files
from examples.text_data import InputError
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

NEW_TOKENS = 8
# What the library itself may write beside the fields of a configuration.
LIBRARY_FIELDS = {"auto_map", "dtype", "transformers_version", "layer_types", "model_type", "_name_or_path"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder that save_pretrained wrote")


def run(options: argparse.Namespace) -> None:
    folder = options.folder
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder.")
    _say("configuration", check_config(folder))
    _say("weights", check_weights(folder))
    _say("tokenizer", check_tokenizer(folder))
    _say("model", check_model(folder))


def _say(what: str, result: str) -> None:
    print(f"{what:<14}{result}", flush=True)


def check_config(folder: Path) -> str:
    """The configuration is one of ours, and of no later version than this."""
    config = read_config(folder)
    if not isinstance(config, InterdomainConfig):
        raise InputError(
            f"{folder} is a {config.model_type} model, not an Interdomain one: from-llama converts Llama-style models."
        )
    saved = json.loads((folder / "config.json").read_text())
    version = str(saved.get("transformers_version", "unknown"))
    known = InterdomainConfig().to_dict().keys() | vars(InterdomainConfig()).keys() | LIBRARY_FIELDS
    unknown = sorted(saved.keys() - known)
    if unknown:
        raise InputError(
            f"{folder / 'config.json'} has fields that this version does not know ({', '.join(unknown)}): update "
            "modeling_interdomain, or remove them if they are your own."
        )
    mixers = ", ".join(dict.fromkeys(config.mixers_per_layer))
    later = _later(version)
    note = f"; note: saved by the later Transformers {version}, here is {transformers.__version__}" if later else ""
    return f"{config.num_hidden_layers} layers of {mixers}{note}"


def _later(version: str) -> bool:
    try:
        return Version(version) > Version(transformers.__version__)
    except InvalidVersion:
        return False


def check_weights(folder: Path) -> str:
    """Every file is whole, every tensor has its name and shape, and none holds NaN or infinity."""
    files = weight_files(folder)
    weights, _ = fitting(read_config(folder), read_weights(files), folder)
    total = sum(x.numel() for x in weights.values())
    return f"{total:,} parameters in {len(files)} file{'s' * (len(files) > 1)}, all finite"


def check_tokenizer(folder: Path) -> str:
    """All tokens are in the vocabulary; a model without a tokenizer is no failure."""
    if not tokenizer_files(folder):
        return "note: there is none in the folder"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the many ways in which one of its files is damaged or missing
        raise InputError(f"The tokenizer in {folder} cannot be loaded: copy its files again.") from error
    size = read_config(folder).vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= size:
        raise InputError(f"The tokenizer in {folder} has token {largest:,}, but the vocabulary ends at {size - 1:,}.")
    return f"{len(tokenizer):,} tokens for a vocabulary of {size:,}"


def check_model(folder: Path) -> str:
    """The folder loads as any other; a language model generates, with finite logits."""
    made = class_of(read_config(folder))
    if made is not InterdomainForCausalLM:
        made.from_pretrained(folder)
        return f"loads as {made.__name__}"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.zeros(1, 1, dtype=torch.long)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    if not all(bool(torch.isfinite(logits).all()) for logits in output.logits):
        raise InputError(f"{folder} generates from NaN or infinite logits in {model.dtype}: save it in another dtype.")
    return f"loads and generates {NEW_TOKENS} tokens"
