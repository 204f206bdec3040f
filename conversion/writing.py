"""Safe writing: a folder appears whole under its name or not at all, and nothing is replaced unasked.

All work happens in `TARGET.partial`; what is finished there is renamed. A run that was interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel

from examples.text_data import InputError

# Copied as they are: reading a tokenizer and saving it again may change it.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# Options that say how to write, not what: a rerun may change them.
HOW_TO_WRITE = ("run", "dry_run", "overwrite")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="of the saved weights (default: as in SOURCE)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it exists")


def working_folder(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def check_target(options: argparse.Namespace) -> None:
    """Refuse to lose somebody's files; put back what an interrupted replacement had set aside."""
    target, folder = options.target, working_folder(options.target)
    if target.resolve() == Path(options.source).resolve():
        raise InputError(f"SOURCE and TARGET are the same folder, {target}: choose another TARGET.")
    if target.exists() and not target.is_dir():
        raise InputError(f"The target {target} is a file, not a folder.")
    if (folder / "replaced").is_dir() and not target.exists():
        os.replace(folder / "replaced", target)
    if target.is_dir() and any(target.iterdir()) and not options.overwrite:
        raise InputError(f"The target folder {target} is not empty: choose another, or add --overwrite.")
    if folder.exists() and _request(options) != _stored_request(folder):
        raise InputError(
            f"{folder} holds an unfinished run with other arguments: repeat that command to go on with it, or remove "
            "the folder."
        )


def check_space(target: Path, needed: int) -> None:
    """Refuse before the first byte when the disk cannot hold the result."""
    place = next(folder for folder in target.resolve().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(f"{target} needs {gigabytes(needed)}, but {place} has {gigabytes(free)} left.")


def gigabytes(number: int) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e8 else f"{number / 1e6:.3g} MB"


def _request(options: argparse.Namespace) -> dict:
    return {name: str(value) for name, value in vars(options).items() if name not in HOW_TO_WRITE}


def _stored_request(folder: Path) -> dict | None:
    file = folder / "request.json"
    return json.loads(file.read_text()) if file.is_file() else None


def open_working_folder(options: argparse.Namespace) -> Path:
    """`TARGET.partial`, which remembers what was asked for."""
    folder = working_folder(options.target)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "request.json", json.dumps(_request(options), indent=2) + "\n")
    return folder


def write_text(file: Path, text: str) -> None:
    temporary = file.with_name(file.name + ".new")
    temporary.write_text(text)
    os.replace(temporary, file)


def save_state(state: dict, file: Path) -> None:
    """As `torch.save`, but an interruption leaves the file that was there."""
    temporary = file.with_name(file.name + ".new")
    torch.save(state, temporary)
    os.replace(temporary, file)


def save_model(model: PreTrainedModel, tokenizer_from: Path, target: Path, report: dict | None = None) -> None:
    """Model, tokenizer and report under the name of the target, which is replaced last."""
    partial = working_folder(target)
    finished, replaced = partial / "model", partial / "replaced"
    shutil.rmtree(finished, ignore_errors=True)
    try:
        model.save_pretrained(finished)
        for name in TOKENIZER_FILES:
            if (tokenizer_from / name).is_file():
                shutil.copy2(tokenizer_from / name, finished)
        if report is not None:
            write_text(finished / "conversion_report.json", json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"{finished} could not be written ({error}); {target} is as it was.") from error
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.replace(target, replaced)
    os.replace(finished, target)
    shutil.rmtree(partial)
