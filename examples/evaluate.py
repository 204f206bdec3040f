"""Load a saved model as any user of Transformers would, let it write, and measure it on text it has not seen.

Usage:
    python -m examples.evaluate runs/quickstart --prompt "This function" --data runs/quickstart/held_out.jsonl
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from examples.saved_model import PROMPT, add_folder, load
from examples.text_data import (
    InputError,
    bits_per_byte,
    check_positive,
    check_seed,
    encode_beginning,
    exit_code,
    gather_documents,
    num_bytes,
)


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int = 160,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """The prompt and its continuation, sampled; small models would say the same again and again."""
    torch.manual_seed(seed)
    ids = encode_beginning(tokenizer, prompt).to(model.device)
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=temperature,
        top_p=0.9,
        repetition_penalty=1.1,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.decode(written[0], skip_special_tokens=True)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], sequence_length: int
) -> dict[str, float]:
    """Bits per byte of the model and, on the same bytes, of two general compressors; and the number of bytes."""
    return {
        "held_out_bytes": sum(map(num_bytes, documents)),
        "bits_per_byte": bits_per_byte(model, tokenizer, documents, sequence_length),
        "xz_bits_per_byte": compressed_bits_per_byte(documents, lambda data: lzma.compress(data, preset=9)),
        "zlib_bits_per_byte": compressed_bits_per_byte(documents, lambda data: zlib.compress(data, level=9)),
    }


def compressed_bits_per_byte(documents: Sequence[str], compress: Callable[[bytes], bytes]) -> float:
    """Bits that a general compressor needs for each byte of the documents, which it has never seen before either."""
    data = "".join(documents).encode()
    return 8 * len(compress(data)) / len(data)


def check_options(options: argparse.Namespace) -> None:
    """Refuse at once what would fail after the model was loaded and measured."""
    check_positive(options, "tokens", "temperature", "sequence_length")
    check_seed(options.seed)
    if options.json and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise InputError(f"{options.json} cannot be written: --json needs the name of a file in a folder that exists.")
    if options.json and not options.data:
        raise InputError("--json holds what is measured on held-out text: name that with --data.")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_folder(parser)
    parser.add_argument("--prompt", default=PROMPT, help="what the model continues (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens to write (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sampling (default: %(default)s)")
    parser.add_argument("--data", nargs="+", help="held-out text to measure on; without it nothing is measured")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens read at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the measured numbers to this file")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    check_options(options)
    logging.disable_progress_bar()
    model, tokenizer = load(options.folder)
    documents = gather_documents(options.data) if options.data else []  # a wrong name is said at once
    print(generate_text(model, tokenizer, options.prompt, options.tokens, options.temperature, options.seed))
    if not documents:
        return
    results = measure(model, tokenizer, documents, options.sequence_length)
    print(
        f"\nHeld-out text, {results['held_out_bytes']:,} bytes: {results['bits_per_byte']:.3f} bits per byte"
        f" (xz needs {results['xz_bits_per_byte']:.3f}, zlib {results['zlib_bits_per_byte']:.3f})"
    )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
