"""Fine-tune nothing but the state with which a saved model begins (state tuning): one small file, no weight changed.

Usage:
    python -m examples.finetune_state runs/quickstart --data my_texts/ --output runs/state.safetensors
    python -m examples.finetune_state runs/quickstart --state runs/state.safetensors --output runs/more.safetensors

The perplexity on held-out text of the same data is printed before and after. `load_learned_state(model, file)` lets a
model begin with the state; then it generates, is evaluated and is trained as any other.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from tqdm import tqdm
from transformers import set_seed

from examples.finetune_lora import load_base
from examples.saved_model import add_folder
from examples.text_data import (
    InputError,
    check_folder,
    check_positive,
    check_seed,
    encode,
    exit_code,
    gather_documents,
    mean_nll,
    random_batches,
    split_documents,
)
from examples.training import train
from modeling_interdomain import InterdomainConfig, add_learned_state, load_learned_state, save_learned_state


def check_options(options: argparse.Namespace) -> None:
    """Refuse at once what would fail, or lose somebody's file, after the training."""
    check_positive(options, "steps", "batch_size", "sequence_length", "learning_rate")
    if options.output.exists():
        raise InputError(f"{options.output} is already there: choose another file.")
    check_folder(options.output.parent)
    check_seed(options.seed)


def check_length(length: int, config: InterdomainConfig, states: list[nn.Parameter]) -> None:
    """Refuse texts that would not train the states of windows, which begin as zeros."""
    window = config.attention_window + config.attention_sinks
    remember = config.window_memory and "window" in config.mixers_per_layer
    if remember and length <= window and any(not x.any() for x in states):
        raise InputError(
            f"--sequence-length {length}: windows and sinks hold {window} tokens, and of shorter texts no new state is "
            f"learned: make it longer than {window}."
        )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_folder(parser, "base")
    parser.add_argument("--data", nargs="+", default=[], help="files, folders or datasets; none: Python's own source")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/state.safetensors"), help="file (default: %(default)s)"
    )
    parser.add_argument("--state", type=Path, help="go on from this state instead of zeros")
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-2, help="at its peak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the batches (default: %(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, float]:
    """Train and save the state; the perplexity before and after."""
    check_options(options)
    model, tokenizer = load_base(options.base)
    model.requires_grad_(False)
    try:
        states = add_learned_state(model) if options.state is None else load_learned_state(model, options.state)
    except (ValueError, FileNotFoundError) as error:
        raise InputError(str(error)) from error
    check_length(options.sequence_length, model.config, states)
    documents = gather_documents(options.data, seed=options.seed)
    training_documents, held_out_documents = split_documents(documents, 100_000, seed=options.seed)
    held_out = encode(tokenizer, held_out_documents)
    tokens = encode(tokenizer, training_documents)
    set_seed(options.seed)
    batches = random_batches(tokens, options.batch_size, options.sequence_length, options.seed)
    before = math.exp(mean_nll(model, held_out, options.sequence_length))
    with tqdm(total=options.steps, desc="Training", unit="step", dynamic_ncols=True) as bar:
        for progress in train(model, batches, steps=options.steps, learning_rate=options.learning_rate):
            bar.set_postfix_str(f"loss {progress.loss:.3f}", refresh=False)
            bar.update()
    after = math.exp(mean_nll(model, held_out, options.sequence_length))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    save_learned_state(model, options.output)
    print(
        f"{sum(x.numel() for x in states):,} trained parameters; perplexity {before:.4g} before, {after:.4g} after "
        f"{options.steps:,} steps; {options.output.stat().st_size / 1e6:.3g} MB in {options.output}"
    )
    return {"perplexity_before": before, "perplexity_after": after}


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
