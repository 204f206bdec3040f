"""Bits per byte on long documents at once, twice and 3.5 times the length a model was trained on.

Usage:
    python -m examples.evaluate_lengths runs/quickstart runs/softmax --data novels.parquet --trained-length 256

The same text is cut into windows of each length, so a model that uses a longer past needs fewer bits, and one that is
lost beyond its training length needs more. Writes lengths.json, lengths.md and lengths.png.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging

from examples.report import labels, write_report
from examples.saved_model import load
from examples.text_data import (
    InputError,
    check_folder,
    check_positive,
    encode,
    exit_code,
    gather_documents,
    mean_nll,
    num_bytes,
)


def evaluate(folder: str, documents: Sequence[str], lengths: Sequence[int]) -> dict[float, float]:
    """Bits per byte by length, all over the same tokens: as many as the longest windows cover."""
    model, tokenizer = load(folder)
    tokens = encode(tokenizer, documents)
    whole = (len(tokens) - 1) // max(lengths)
    if not whole:
        raise InputError(f"The text has {len(tokens):,} tokens, fewer than one window of {max(lengths):,}.")
    tokens = tokens[: whole * max(lengths) + 1]
    num_text_bytes = num_bytes(tokenizer.decode(tokens[1:], skip_special_tokens=True))
    tokens_per_byte = (len(tokens) - 1) / num_text_bytes
    batches = {length: max(1, 4096 // length) for length in lengths}
    nats = {float(length): mean_nll(model, tokens, length, size) for length, size in batches.items()}
    return {length: value / math.log(2) * tokens_per_byte for length, value in nats.items()}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", help="models that save_pretrained wrote, with their tokenizers")
    parser.add_argument("--data", nargs="+", required=True, help="long documents")
    parser.add_argument("--trained-length", type=int, required=True, help="tokens a sequence in training")
    parser.add_argument("--factors", type=float, nargs="+", default=[1, 2, 3.5], help="lengths (default: 1 2 3.5)")
    parser.add_argument("--max-bytes", type=int, default=1_000_000, help="text to read (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/lengths"), help="folder (default: %(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    logging.disable_progress_bar()
    if not all(1 <= factor * options.trained_length < math.inf for factor in options.factors):
        raise InputError("--trained-length times every factor must be at least one token.")
    lengths = [int(factor * options.trained_length) for factor in options.factors]
    check_positive(options, "max_bytes")
    check_folder(options.output)
    documents = gather_documents(options.data, options.max_bytes)
    names = labels(options.folders)
    curves = {name: evaluate(folder, documents, lengths) for name, folder in zip(names, options.folders)}
    print(write_report("lengths", curves, options.output, "tokens a window", "bits per byte", data=options.data))
    for name, curve in curves.items():
        change = curve[float(max(lengths))] / curve[float(min(lengths))] - 1
        print(f"{name}: {change:+.1%} from {min(lengths):,} to {max(lengths):,} tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
