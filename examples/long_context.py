"""Read a text of any length in chunks, with memory that does not grow, then go on writing.

Prints a line about every doubling from 1,024 tokens on: bits per byte so far, tokens per second since the line before,
the bytes of the cache, and those a softmax model of the same shape would need for its keys and values. Then comes the
continuation, of the text alone or of `--prompt` after it, or the answer to `--ask`. With `--state` what was read is a
file of a few megabytes, from which the next call goes on: with another text, or with none and another prompt. Of a text
read in one call the file has the hash of its tokens, too, which take four bytes each until it is written.

Usage:
    python -m examples.long_context runs/quickstart novel.txt
    python -m examples.long_context runs/quickstart novel.txt --state novel.safetensors
    python -m examples.long_context runs/quickstart --state novel.safetensors --prompt "In short, "
    python -m examples.long_context runs/quickstart --state novel.safetensors --ask "Who tells this story?"
    cat *.txt | python -m examples.long_context runs/quickstart - --prompt "In short, " --tokens 50
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch.nn import functional as F
from transformers import DynamicLayer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from examples.saved_model import load
from examples.text_data import InputError, exit_code, num_bytes
from modeling_interdomain import InterdomainCache, InterdomainForCausalLM

PIECE = 16_384  # characters that are turned into tokens at once, with the rest of their last line


NUMBERS = {"last": int, "tokens": int, "bytes": int, "nats": float}  # of a reading, beside its cache


@dataclass
class Reading:
    """A text so far; `last` is its newest token, which the cache has not seen.

    `seen` are the tokens that it has, for a state file; None where nobody asks or a file has gone on from another.
    """

    cache: InterdomainCache
    last: int
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0
    seen: array[int] | None = None

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def chunks(tokenizer: PreTrainedTokenizerBase, text: TextIO, size: int) -> Iterator[tuple[list[int], int]]:
    """Tokens, up to `size` at a time, with the bytes they stand for; the text is never held whole."""
    settings = {"add_special_tokens": False, "split_special_tokens": True, "return_offsets_mapping": True}
    for piece in iter(lambda: text.read(PIECE) + text.readline(PIECE), ""):
        tokens = tokenizer(piece, verbose=False, **settings)
        ids, ends = tokens["input_ids"], [end for _, end in tokens["offset_mapping"]]
        ends[-1:] = [len(piece)]  # with what a tokenizer leaves out at the end
        start = 0
        for first in range(0, len(ids), size):
            part = ids[first : first + size]
            end = ends[first + len(part) - 1]
            yield part, num_bytes(piece[start:end])
            start = end


def start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Reading:
    """Of nothing yet."""
    return Reading(InterdomainCache(model.config), tokenizer.bos_token_id)


@torch.no_grad()
def read(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: TextIO,
    size: int,
    reading: Reading | None = None,
) -> Iterator[Reading]:
    """Advance one cache through the text; gives the same reading after every chunk, the given one if there is one."""
    reading = reading or start(model, tokenizer)
    for ids, count in chunks(tokenizer, text, size):
        inputs = [reading.last, *ids[:-1]]
        if reading.seen is not None:
            reading.seen.extend(inputs)
        inputs = torch.tensor([inputs], device=model.device)
        logits = model(inputs, past_key_values=reading.cache, use_cache=True).logits[0]
        reading.nats += F.cross_entropy(logits.float(), torch.tensor(ids, device=model.device), reduction="sum").item()
        reading.last = ids[-1]
        reading.tokens += len(ids)
        reading.bytes += count
        yield reading


def save(reading: Reading, path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A file from which `resume` goes on."""
    notes = {name: repr(getattr(reading, name)) for name in NUMBERS}
    tokens = None if reading.seen is None else torch.frombuffer(reading.seen, dtype=torch.int32)[None]
    try:
        reading.cache.save(path, model, tokenizer=tokenizer, tokens=tokens, notes=notes)
    except OSError as error:
        raise InputError(str(error)) from error


def resume(path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Reading:
    """What `save` wrote; another model's or a damaged file is refused."""
    try:
        cache = InterdomainCache.load(path, model, tokenizer=tokenizer)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    if not cache.notes.keys() >= NUMBERS.keys():
        raise InputError(f"{path} was not written by examples.long_context: it does not say how far the text was read.")
    return Reading(cache, **{name: number(cache.notes[name]) for name, number in NUMBERS.items()})


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, reading: Reading, prompt: str, tokens: int
) -> str:
    """What the model writes after the text and the prompt, greedily."""
    ids = torch.tensor([[reading.last, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]], device=model.device)
    mask = ids.new_ones(1, reading.cache.get_seq_length() + ids.shape[1])
    settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    written = model.generate(input_ids=ids, attention_mask=mask, past_key_values=reading.cache, **settings)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def turn(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """What stands before the answer to a question, by the chat template."""
    if tokenizer.chat_template is None:
        raise InputError("The tokenizer has no chat template to --ask with: use --prompt.")
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def cache_bytes(cache: InterdomainCache) -> int:
    """Bytes of everything a cache holds; keys and values of softmax layers, too."""
    pairs = [(x.keys, x.values) for x in cache.layers if isinstance(x, DynamicLayer) and x.is_initialized]
    return cache.state_bytes() + sum(x.numel() * x.element_size() for pair in pairs for x in pair)


def softmax_bytes(config: PretrainedConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values that a softmax model of the same shape keeps of so many tokens."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens * dtype.itemsize


def open_text(name: str) -> TextIO:
    if name == "-":
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        return sys.stdin
    if not Path(name).is_file():
        raise InputError(f"{name} is not a file: name one, or - to read from standard input.")
    return Path(name).open(encoding="utf-8", errors="replace")


def load_interdomain(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """As `load`, for models that an `InterdomainCache` fits."""
    logging.disable_progress_bar()
    model, tokenizer = load(folder)
    if not isinstance(model, InterdomainForCausalLM):
        raise InputError(f"{folder} holds a model of type {model.config.model_type!r}, not an Interdomain model.")
    return model, tokenizer


def check_options(options: argparse.Namespace) -> None:
    for name, least in (("chunk", 1), ("tokens", 0)):
        if getattr(options, name) < least:
            raise InputError(f"--{name} must be at least {least}, not {getattr(options, name)}.")
    if options.ask is not None and options.prompt:
        raise InputError("--ask is a turn of a chat in place of --prompt: name one of them.")
    if options.state is not None and not Path(options.state).absolute().parent.is_dir():
        raise InputError(f"The folder of {options.state} does not exist: make it, or name another --state.")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a model that save_pretrained wrote, with its tokenizer")
    parser.add_argument(
        "text", nargs="?", help="a file of text (default: standard input; none where a --state goes on)"
    )
    parser.add_argument(
        "--state", metavar="FILE", help="go on from this file, if it exists, and keep in it what was read"
    )
    parser.add_argument("--prompt", default="", help="what stands after the text before the model goes on")
    parser.add_argument("--ask", metavar="QUESTION", help="a turn of a chat after the text, in place of --prompt")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens read at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to write (default: %(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    check_options(options)
    resumed = options.state is not None and Path(options.state).exists()
    text = None if resumed and options.text is None else open_text(options.text or "-")
    model, tokenizer = load_interdomain(options.folder)
    if tokenizer.bos_token_id is None:
        raise InputError(f"The tokenizer of {options.folder} has no token for the beginning of a text (bos_token).")
    prompt = options.prompt if options.ask is None else turn(tokenizer, options.ask)
    reading = resume(options.state, model, tokenizer) if resumed else start(model, tokenizer)
    if options.state is not None and not resumed:
        reading.seen = array("i")
    if text is not None:
        reading = read_and_report(model, tokenizer, text, options.chunk, reading)
        if not reading.tokens:
            raise InputError(f"{options.text if options.text not in (None, '-') else 'Standard input'} holds no text.")
        if options.state is not None:
            save(reading, options.state, model, tokenizer)
    if options.tokens:
        said = options.prompt if options.ask is None else f"{options.ask}\n"
        print(f"\n{said}{write(model, tokenizer, reading, prompt, options.tokens)}")


def read_and_report(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: TextIO, size: int, reading: Reading
) -> Reading:
    """What was read in the end, with the lines of the table."""
    print("      tokens  bits per byte  tokens/s   cache bytes  keys and values of softmax")
    lines_tokens, started, next_line = reading.tokens, time.perf_counter(), 1024
    while next_line <= lines_tokens:
        next_line *= 2

    def print_line() -> None:
        speed = (reading.tokens - lines_tokens) / (time.perf_counter() - started)
        ours, theirs = cache_bytes(reading.cache), softmax_bytes(model.config, reading.tokens, model.dtype)
        print(f"{reading.tokens:12,}{reading.bits_per_byte:15.3f}{speed:10,.0f}{ours:14,}{theirs:28,}", flush=True)

    for _ in read(model, tokenizer, text, size, reading):
        if reading.tokens >= next_line:
            print_line()
            lines_tokens, started = reading.tokens, time.perf_counter()
            while next_line <= reading.tokens:
                next_line *= 2
    if reading.tokens > lines_tokens:
        print_line()
    return reading


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
