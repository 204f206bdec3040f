"""Text for small experiments: where it comes from, its tokens, its batches and its score in bits per byte.

Example:
    documents = gather_documents(["my_texts/"])
    train_documents, held_out_documents = split_documents(documents)
    tokenizer = train_tokenizer(train_documents)
    batches = random_batches(encode(tokenizer, train_documents), batch_size=8, sequence_length=256)
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
# Folders of the standard library that hold no programs to learn from: tests, other people's packages, character tables.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
# A paragraph of prose: from a capital to a full stop, with nothing that tables, code and templates are full of.
PARAGRAPH = re.compile(r"[A-Z][^|{}\\<>=]*[a-z)]\.")
LEAST_LETTERS = 0.92  # of its characters, spaces counted in
BOUNDARY, PADDING = "<|endoftext|>", "<|pad|>"
SMALLEST_VOCABULARY = 256 + 2  # every byte, the boundary and the padding


class InputError(ValueError):
    """Something the user gave cannot be used; the message is one sentence that says what and why."""


def exit_code(program: Callable[[], object]) -> int:
    """Run a program: 0, or 2 after one sentence on standard error where it refuses its input or its loss diverges."""
    try:
        program()
    except (InputError, FloatingPointError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Refuse the first of these options that was given and is not above zero."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise InputError(f"--{name.replace('_', '-')} must be positive, not {value}.")


def check_not_negative(options: argparse.Namespace, *names: str) -> None:
    """Refuse the first of these options that was given and is below zero."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= 0:
            raise InputError(f"--{name.replace('_', '-')} must not be negative, got {value}.")


def check_seed(seed: int) -> None:
    """Refuse what the library takes for no seed."""
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed must be from 0 to {2**32 - 1:,}, not {seed:,}.")


def check_folder(folder: Path, called: str = "") -> None:
    """Refuse a folder to write that is a file, or lies under one; `called` stands before its name."""
    for place in (folder, *folder.absolute().parents):
        if place.exists() and not place.is_dir():
            raise InputError(f"{called}{folder} cannot be written: {place} is a file, not a folder.")


def check_empty_folder(folder: Path, instead: str = "choose another folder") -> None:
    """`check_folder`, and refuse a folder that holds something."""
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty: {instead}.")


def gather_documents(sources: Sequence[str] = (), max_bytes: int = 16_000_000, seed: int = 0) -> list[str]:
    """Up to about `max_bytes` of text, divided equally over the sources.

    A source is a file, a folder (searched for .txt, .md, .py, .jsonl and .parquet), or, where no such path exists, the
    name of a dataset for `datasets.load_dataset` ("name" or "name:configuration"). Without sources it is the source
    code of Python's own standard library. Tables are read through their column "text". The seed shuffles the files.
    """
    if not sources:
        return _take(_read_files(_standard_library_files(), seed), max_bytes)
    share = max_bytes // len(sources)
    documents = []
    for source in sources:
        found = _take(_read_source(source, seed), share)
        if not found:
            raise InputError(f"No text was found in {source}.")
        documents += found
    return documents


def standard_library_prose(max_bytes: int = 16_000_000, seed: int = 0) -> list[str]:
    """What Python's standard library says of itself in sentences, a document a file: about a megabyte of English.

    It is on every computer that has Python, and a small model learns to write like it in minutes, which it does not
    learn of programs. The seed shuffles the files.
    """
    return _take(map(prose, _read_files(_standard_library_files(), seed)), max_bytes)


def prose(source: str) -> str:
    """The paragraphs of prose in the strings of a program, each once and on one line; licences are comments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes that the program's author forgot to double
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a program of another Python
            return ""
    strings = [x.value for x in ast.walk(tree) if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    paragraphs = [" ".join(part.split()) for string in strings for part in re.split(r"\n\s*\n", string)]
    return "".join(f"{paragraph}\n\n" for paragraph in dict.fromkeys(filter(_is_prose, paragraphs)))


def _is_prose(paragraph: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(paragraph) >= 50 and letters >= LEAST_LETTERS * len(paragraph) and bool(PARAGRAPH.fullmatch(paragraph))


def read_documents(sources: Sequence[str], seed: int = 0) -> Iterator[str]:
    """The documents of all sources one after the other, read as they are asked for; blank ones are left out."""
    for source in sources:
        yield from (document for document in _read_source(source, seed) if document.strip())


def split_documents(
    documents: Sequence[str], held_out_bytes: int = 400_000, min_bytes: int = 10_000, seed: int = 0
) -> tuple[list[str], list[str]]:
    """Training and held-out documents: a tenth of the text is held out, at most `held_out_bytes`.

    The two share no document, but for one that is cut in two: a single one, or one of which more than a tenth of all
    text would be lost. With `held_out_bytes` 0 nothing is held out.
    """
    documents = [document for document in documents if document.strip()]
    total = sum(map(num_bytes, documents))
    if total < min_bytes:
        raise InputError(f"The text has {total:,} bytes, too little to learn from: {min_bytes:,} are needed.")
    wanted = min(held_out_bytes, total // 10)
    if not wanted:
        return documents, []
    if len(documents) == 1:
        train, held_out = cut(documents[0], total - wanted)
        return [train], [held_out]
    random.Random(seed).shuffle(documents)
    held_out_documents = _take(documents[:-1], wanted)
    last = len(held_out_documents)
    rest = documents[last - 1][len(held_out_documents[-1]) :]
    return [rest] * (num_bytes(rest) > total // 10) + documents[last:], held_out_documents


def train_tokenizer(documents: Iterable[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE learned from the documents: any text has tokens, and they decode to exactly that text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(f"A vocabulary of {vocab_size} is too small: bytes alone need {SMALLEST_VOCABULARY}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOUNDARY, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    # The same token ends one document and begins the next, so a model has always seen what its first token follows.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOUNDARY,
        eos_token=BOUNDARY,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> torch.Tensor:
    """One stream of token ids [N], int64: a boundary, then each document followed by a boundary."""
    if tokenizer.eos_token_id is None:
        raise InputError("The tokenizer has no eos token to put between documents.")
    # Text that happens to spell a special token is text.
    encoded = tokenizer(list(documents), add_special_tokens=False, split_special_tokens=True, verbose=False)
    stream = [tokenizer.eos_token_id]
    for ids in encoded["input_ids"]:
        stream += ids
        stream.append(tokenizer.eos_token_id)
    return torch.tensor(stream)


def encode_beginning(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """Token ids [1, T] of a text that is to be continued, after a boundary as in training."""
    text = (tokenizer.bos_token or "") + text  # by hand: some tokenizers would add it themselves, a second time
    if not text:
        raise InputError("There is nothing to continue: the tokenizer has no bos token, so the prompt needs a text.")
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]


def random_batches(
    tokens: torch.Tensor, batch_size: int, sequence_length: int, seed: int = 0
) -> Iterator[torch.Tensor]:
    """Endless windows [B, T + 1] of the stream tokens [N]: a model reads the first T and predicts the last T."""
    if len(tokens) <= sequence_length:
        raise InputError(f"The text has {len(tokens):,} tokens, fewer than one sequence of {sequence_length:,} needs.")
    return _random_windows(tokens, batch_size, sequence_length, torch.Generator().manual_seed(seed))


def _random_windows(
    tokens: torch.Tensor, batch_size: int, sequence_length: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    offsets = torch.arange(sequence_length + 1)
    while True:
        starts = torch.randint(len(tokens) - sequence_length, (batch_size, 1), generator=generator)
        yield tokens[starts + offsets]


def next_token_nll(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood [B, T], in nats and float32, of the last T tokens of windows [B, T + 1]."""
    windows = windows.to(next(model.parameters()).device)
    return nll_of_logits(model(input_ids=windows[:, :-1], use_cache=False).logits, windows)


def nll_of_logits(logits: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """The same of logits [B, T, vocab_size] that were made of the first T tokens."""
    # Rows of a matrix: with the classes in the middle a CPU takes twice as long.
    nats = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    return nats.view(logits.shape[:2])


@torch.no_grad()
def mean_nll(model: torch.nn.Module, tokens: torch.Tensor, sequence_length: int, batch_size: int = 8) -> float:
    """Nats a token of the stream [N]: every token but the first once, from at most `sequence_length` before it.

    The stream is cut into contiguous windows, the last of which may be shorter; each begins from nothing.
    """
    was_training = model.training
    model.eval()
    nats = sum(
        next_token_nll(model, batch).double().sum().item() for batch in _windows(tokens, sequence_length, batch_size)
    )
    model.train(was_training)
    return nats / (len(tokens) - 1)


def bits_per_byte(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    sequence_length: int = 256,
    batch_size: int = 8,
) -> float:
    """Bits that the model needs for each UTF-8 byte of the documents, independent of the vocabulary; lower is better.

    Every token is predicted once, boundaries included, as in `mean_nll`.
    """
    tokens = encode(tokenizer, documents)
    nats = mean_nll(model, tokens, sequence_length, batch_size) * (len(tokens) - 1)
    return nats / math.log(2) / sum(map(num_bytes, documents))


def num_bytes(text: str) -> int:
    """Length of the text in UTF-8."""
    return len(text.encode())


def cut(text: str, max_bytes: int) -> tuple[str, str]:
    """The text in two: at most `max_bytes` bytes of UTF-8, to the end of a line where one ends in the last half of
    them, and the rest."""
    data = text.encode()
    if len(data) <= max_bytes:
        return text, ""
    head = data[:max_bytes].decode(errors="ignore")  # a character cut in half belongs to the rest
    head = head[: head.rfind("\n", len(head) // 2) + 1] or head
    return head, text[len(head) :]


def _windows(tokens: torch.Tensor, sequence_length: int, batch_size: int) -> Iterator[torch.Tensor]:
    """Batches [B, T + 1] that predict each token of the stream [N] but the first once; the last one may be shorter."""
    num_whole = (len(tokens) - 1) // sequence_length
    if num_whole:
        yield from tokens.unfold(0, sequence_length + 1, sequence_length).split(batch_size)
    rest = tokens[num_whole * sequence_length :]
    if len(rest) > 1:
        yield rest[None]


def _take(documents: Iterable[str], max_bytes: int) -> list[str]:
    """The first documents that hold `max_bytes` together, the last one cut; blank ones are left out."""
    taken, left = [], max_bytes
    for document in documents:
        if not document.strip():
            continue
        head, rest = cut(document, left)
        taken.append(head)
        left -= num_bytes(head)
        if rest or not left:
            break
    return taken


def _standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]


def _read_source(source: str, seed: int) -> Iterator[str]:
    if not source:
        raise InputError("A source of text has no name: an empty one would be the folder in which this runs.")
    path = Path(source).expanduser()
    if path.is_file():
        return _read_file(path)
    if path.is_dir():
        return _read_files([file for file in path.rglob("*") if file.is_file() and _suffix(file) in SUFFIXES], seed)
    if path.is_absolute() or _suffix(path) in SUFFIXES:
        raise InputError(f"{source} does not exist.")
    return _read_dataset(source)


def _read_files(paths: Iterable[Path], seed: int) -> Iterator[str]:
    shuffled = sorted(paths)
    random.Random(seed).shuffle(shuffled)
    for path in shuffled:
        yield from _read_file(path)


def _suffix(path: Path) -> str:
    """Some write them in capitals."""
    return path.suffix.lower()


def _read_file(path: Path) -> Iterator[str]:
    if _suffix(path) == ".jsonl":
        yield from _read_jsonl(path)
    elif _suffix(path) == ".parquet":
        yield from _read_parquet(path)
    else:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
        if "\0" in text:  # a picture, an archive, weights, or text of two bytes a character
            raise InputError(f"{path} is not text in UTF-8.")
        yield text


def _read_jsonl(path: Path) -> Iterator[str]:
    """The texts of the lines; those that are null are left out."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode("utf-8-sig"))["text"]
                if text is not None:
                    num_bytes(text)  # half a pair of surrogates has none
                    yield text
            except UnicodeError as error:
                raise InputError(f"Line {number} of {path} is not text in UTF-8.") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f'Line {number} of {path} is not a JSON object with a field "text".') from error


def _read_parquet(path: Path) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
        if "text" not in table.schema_arrow.names:
            raise InputError(f'{path} has no column "text".')
        for batch in table.iter_batches(batch_size=256, columns=["text"]):
            yield from (str(text) for text in batch.column(0).to_pylist() if text is not None)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a readable parquet file.") from error


def _read_dataset(source: str) -> Iterator[str]:
    from datasets import load_dataset

    name, _, configuration = source.partition(":")
    try:
        rows = load_dataset(name, configuration or None, split="train", streaming=True)
        yield from (str(row["text"]) for row in rows if row["text"] is not None)
    except KeyError as error:
        raise InputError(f'The dataset {source} has no column "text".') from error
    except Exception as error:  # the many ways in which a name is unknown, a network absent, a file damaged
        raise InputError(f"{source} is neither a file, a folder, nor a dataset that could be loaded.") from error
