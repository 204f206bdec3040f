"""Reduce the state of a trained model: fewer modes a layer, moved and refit to do what all of them did.

Nothing is trained: only what the layers compute from white keys and values is kept as well as it can be, see
fewer_modes.py. What that costs on a text of yours is measured with --text.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch

from conversion.carry import memories
from conversion.fewer_modes import check_reducible, kernel_error, kernel_of, reduced_parameters
from conversion.from_llama import read_tokenizer, source_folder
from conversion.from_training import HEAD, class_of, expected_weights, fitting
from conversion.reading import read_config, read_weights, weight_files
from conversion.writing import add_folders, check_target, finish, may_write, saved_dtype
from examples.text_data import InputError, check_positive, encode, gather_documents, mean_nll
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from modeling_interdomain.model_cache.fingerprint import decoder_of

REDUCIBLE = ("interdomain", "s4d")
CHOICES = ("greedy", "strongest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-size", type=int, required=True, help="modes to keep a layer, M")
    parser.add_argument(
        "--modes",
        choices=CHOICES,
        default="greedy",
        help="which to keep: those that together lose least, or the strongest alone (default: %(default)s)",
    )
    parser.add_argument("--text", nargs="+", default=[], help="files or folders to measure the loss on")
    parser.add_argument("--max-bytes", type=int, default=200_000, help="of the text to read (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens a window (default: %(default)s)")
    add_folders(parser, "folder of the Interdomain model, or its name on the Hub")


def run(options: argparse.Namespace) -> None:
    check_positive(options, "state_size", "max_bytes", "sequence_length")
    check_target(options)
    folder = source_folder(options.source)
    config = read_config(folder)
    smaller = reduced_config(config, options.state_size)
    weights, _ = fitting(config, read_weights(weight_files(folder)), folder)
    dtype = saved_dtype(options, weights)
    expected = expected_weights(smaller)
    tokens = _read_text(options, config, folder) if options.text else None
    if not may_write(options, expected, dtype, f"{config.state_size} modes a layer -> {options.state_size}"):
        return
    model = class_of(config).from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()
    reduced = reduce_model(model, smaller, dtype, greedy=options.modes == "greedy")
    errors = kernel_errors(model, reduced)
    for layer, error in errors.items():
        print(f"layer {layer:<4}{config.mixers_per_layer[layer]:<14}kernel error {error:.1%}")
    report = {"source": options.source, "state_size": [config.state_size, options.state_size], "kernel_error": errors}
    if tokens is not None:
        report["loss"] = dict(zip(("before", "after"), _losses([model, reduced], tokens, options.sequence_length)))
        before, after = report["loss"].values()
        print(f"loss {before:.4f} -> {after:.4f} nats a token ({after - before:+.4f}), {len(tokens):,} tokens")
    finish(reduced, [folder], options.target, report)


def reduced_config(config, size: int) -> InterdomainConfig:
    """The same with fewer modes; raises where they cannot be fewer."""
    if not isinstance(config, InterdomainConfig):
        raise InputError(f"The source is of type {config.model_type}: models of type interdomain can be reduced.")
    others = sorted(set(config.mixers_per_layer) - set(REDUCIBLE))
    if len(others) == len(set(config.mixers_per_layer)):
        raise InputError(
            f"The source has {' and '.join(others)} layers alone, which keep no fixed modes that others could stand in "
            f"for: layers of {' and '.join(REDUCIBLE)} can be reduced."
        )
    if size >= config.state_size:
        raise InputError(f"--state-size must be below the {config.state_size} modes of the source, not {size}.")
    if config.learned_state:
        raise InputError("The source has a learned state, which belongs to its modes: reduce the model without it.")
    if memories(config):
        raise InputError("The source has windows whose memories have as many modes, and these cannot be reduced.")
    check_reducible(config)
    smaller = copy.deepcopy(config)
    smaller.state_size = size
    return smaller


def reduce_model(model, config: InterdomainConfig, dtype: torch.dtype, **how: bool):
    """A model of this configuration with the same weights but for the recurrences; `how` as in `reduced_parameters`."""
    weights = dict(model.state_dict())
    names = {module: name for name, module in model.named_modules()}
    for recurrence in _recurrences(model).values():
        found = reduced_parameters(recurrence, config.state_size, **how)
        weights |= {f"{names[recurrence]}.{name}": x for name, x in found.items()}
    if config.tie_word_embeddings:
        weights.pop(HEAD, None)
    return type(model).from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()


def kernel_errors(model, reduced) -> dict[int, float]:
    """By layer, the norm of what changed of its kernels over that of the kernels."""
    found, after = {}, _recurrences(reduced)
    for layer, recurrence in _recurrences(model).items():
        error = kernel_error(kernel_of(recurrence), kernel_of(after[layer]))
        found[layer] = error.square().mean().sqrt().item()
    return found


def _recurrences(model) -> dict:
    mixers = [layer.token_mixer for layer in decoder_of(model).layers]
    names = model.config.mixers_per_layer
    return {i: mixer.recurrence for i, (mixer, name) in enumerate(zip(mixers, names)) if name in REDUCIBLE}


def _read_text(options: argparse.Namespace, config: InterdomainConfig, folder: Path) -> torch.Tensor:
    """The tokens of the text, `[N]`."""
    if class_of(config) is not InterdomainForCausalLM:
        raise InputError("--text measures how well a language model predicts it, and the source is none: leave it out.")
    tokenizer = read_tokenizer(folder, config.vocab_size, "--text")
    return encode(tokenizer, gather_documents(options.text, options.max_bytes))


def _losses(models: list, tokens: torch.Tensor, sequence_length: int) -> list[float]:
    """Nats a token."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [mean_nll(model.to(device), tokens, sequence_length) for model in models]
