"""A saved folder, read and written: what is wrong with it is said in one sentence, and no file is left half replaced.

Example:
    model, tokenizer = load("runs/mine")
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import modeling_interdomain  # noqa: F401  the import makes the Auto classes know the architecture
from examples.text_data import InputError

# What `from_pretrained` finds out about weights that do not fit, and only warns about.
MISFITS = {"missing_keys": "missing", "unexpected_keys": "unexpected", "mismatched_keys": "of another shape"}

# Where a model lies that nobody named: the best of benchmarks.larger_study, or what `make quickstart` has left.
DEFAULTS = (Path("runs/best"), Path("runs/quickstart"))

# How texts begin that such a model has learned to write: `examples.text_data.standard_library_prose`.
PROMPT = "This function"


def add_folder(parser: argparse.ArgumentParser, name: str = "folder") -> None:
    """The argument that names a model."""
    default = next((folder for folder in DEFAULTS if (folder / "config.json").is_file()), DEFAULTS[-1])
    help = f"a model that save_pretrained wrote, with its tokenizer (default: {' or '.join(map(str, DEFAULTS))})"
    parser.add_argument(name, nargs="?", type=Path, default=default, help=help)


def load(folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Language model in evaluation mode, and tokenizer, of a folder that `save_pretrained` wrote."""
    if not (Path(folder) / "config.json").is_file():
        raise InputError(f"{folder} is not a folder with a saved model.")
    tokenizer = load_tokenizer(folder)  # the smaller first
    check_fits(tokenizer, read_config(folder), folder)
    return load_model(folder).eval(), tokenizer


def load_model(folder: str | Path, auto_class: type = AutoModelForCausalLM, **options) -> PreTrainedModel:
    """As `from_pretrained`, but a weight that the library would leave as it was drawn, or leave out, is refused."""
    try:
        with without_load_report():
            model, found = auto_class.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except Exception as error:  # whatever a damaged file leads to
        raise InputError(f"{folder} does not load: {one_line(error)}") from error
    for kind, words in MISFITS.items():
        if names := sorted(name if isinstance(name, str) else name[0] for name in found[kind]):
            raise InputError(
                f"The weights of {folder} do not fit its config.json: {len(names)} {words}, for example {names[0]}."
            )
    return model


@contextmanager
def without_load_report() -> Iterator[None]:
    """Without the library's table of weights that do not fit: the error says it in one sentence."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_drop)  # its level stays: with a higher one the library has more to say
    try:
        yield
    finally:
        logger.removeFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the folder."""
    if not (Path(folder) / "tokenizer_config.json").is_file():
        raise InputError(f"The folder {folder} holds no tokenizer: tokenizer.save_pretrained writes it there.")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever a damaged file leads to
        raise InputError(f"The tokenizer in {folder} does not load: {one_line(error)}") from error


def check_fits(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, folder: str | Path) -> None:
    """Refuse a tokenizer with tokens that the model does not know."""
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"The tokenizer of {folder} has {len(tokenizer):,} tokens, the model only {config.vocab_size:,}: it is"
            " another model's."
        )


def read_config(folder: str | Path, **changes) -> PreTrainedConfig:
    """The configuration in the folder, with these fields changed."""
    try:
        return AutoConfig.from_pretrained(folder, **changes)
    except Exception as error:  # whatever a damaged or a newer file leads to
        raise InputError(f"{Path(folder) / 'config.json'} cannot be used: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The last line of a message: the library puts the sentence that says what is wrong below others."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip().removeprefix("ValueError: ").removeprefix("TypeError: ")


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: on a full disk the one that was there stays."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
