"""Safe writing: a folder appears whole under its name or not at all, and nothing is replaced unasked.

All work happens in `TARGET.partial`; what is finished there is renamed. A run that was interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig, PreTrainedModel

from conversion.reading import tensor_bytes
from examples.saved_model import replace_text
from examples.text_data import InputError, check_folder

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
# In `TARGET.partial`: what a run has done, as opposed to what it was asked for.
STARTED = ("training.pt", "model", "replaced")
# Options that say how to write, not what: a rerun may change them.
HOW_TO_WRITE = ("run", "dry_run", "overwrite")
# Parts of names of weights that a model keeps in float32 whatever the rest is.
_IN_FLOAT32 = (".recurrence.", ".first_state.", ".sparse.hash.", ".sparse.scorer.")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_folders(parser: argparse.ArgumentParser, source: str, kind: Callable = str) -> None:
    """SOURCE, described and of a kind, TARGET and the options of `add_arguments`."""
    parser.add_argument("source", type=kind, help=source)
    parser.add_argument("target", type=lambda text: Path(text).resolve(), help="folder to write")
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="of the saved weights (default: as in SOURCE)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it exists")


def working_folder(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def check_target(options: argparse.Namespace) -> None:
    """Refuse to lose somebody's files; put back what an interrupted replacement had set aside."""
    target, folder = options.target, working_folder(options.target)
    for name, place in _read_from(options).items():
        if target.resolve() == place:
            raise InputError(f"{name} and TARGET are the same folder, {target}: choose another TARGET.")
        if folder.resolve() in (place, *place.parents):
            raise InputError(f"{name} lies in {folder}, which is removed in the end: choose another TARGET.")
    check_folder(target, "The target ")
    if (folder / "replaced").is_dir() and not target.exists():
        os.replace(folder / "replaced", target)
    if target.is_dir() and any(target.iterdir()):
        _check_replaceable(target, options)
    if any((folder / name).exists() for name in STARTED) and _request(options) != _stored_request(folder):
        raise InputError(
            f"{folder} holds an unfinished run with other arguments, or of folders that have changed since: repeat "
            "that command to go on with it, or remove the folder."
        )


def _check_replaceable(target: Path, options: argparse.Namespace) -> None:
    """Only a saved model is replaced, and when asked for, never a folder that happens to be named."""
    if not options.overwrite:
        raise InputError(f"The target folder {target} is not empty: choose another, or add --overwrite.")
    for name, place in _read_from(options).items():
        if target.resolve() in place.parents:
            raise InputError(f"The target folder {target} contains {name}, which would be lost: choose another TARGET.")
    if not (target / "config.json").is_file():
        raise InputError(
            f"The target folder {target} is no saved model, so --overwrite does not replace it: choose another TARGET."
        )


def _read_from(options: argparse.Namespace) -> dict[str, Path]:
    """Folders and files that are read; a name on the Hub is that of no file here."""
    given = {name: getattr(options, name, None) for name in ("source", "teacher")}
    return {name.upper(): Path(place).resolve() for name, place in given.items() if place}


def check_space(target: Path, needed: int) -> None:
    """Refuse before the first byte when the disk cannot hold the result."""
    place = next(folder for folder in target.resolve().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise InputError(f"{target} needs {gigabytes(needed)}, but {place} has {gigabytes(free)} left.")


def gigabytes(number: int) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e8 else f"{number / 1e6:.3g} MB"


def saved_dtype(options: argparse.Namespace, weights: dict[str, torch.Tensor]) -> torch.dtype:
    """What was asked for, or that of most of the weights, which is said where they differ."""
    if options.dtype in DTYPES:
        return DTYPES[options.dtype]
    found: Counter[torch.dtype] = Counter()
    for name, x in weights.items():
        if not _stays(name) and x.is_floating_point():
            found[x.dtype] += x.numel()
    dtype, *others = [x for x, _ in found.most_common()] or [torch.float32]
    if others:
        most, *fewer = (str(x).removeprefix("torch.") for x in (dtype, *others))
        print(
            f"The source has weights in {most} and, fewer, in {' and '.join(fewer)}: all are saved in {most}, or as "
            "--dtype says."
        )
    return dtype


def in_dtype(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights as they are saved: in this dtype, but for what a model keeps in float32."""
    return {name: x if _stays(name) else x.to(dtype) for name, x in weights.items()}


def _stays(name: str) -> bool:
    return any(part in name for part in _IN_FLOAT32)


def may_write(options: argparse.Namespace, expected: dict[str, torch.Tensor], dtype: torch.dtype, about: str) -> bool:
    """Say what would be saved, and open the working folder unless that is all that was asked for.

    `expected` are the tensors of the model, and `about` is said before them.
    """
    needed = tensor_bytes(list(in_dtype(expected, dtype).values()))
    check_space(options.target, needed)
    print(f"{options.source} -> {options.target}")
    print(f"{about}; {str(dtype).removeprefix('torch.')}, {gigabytes(needed)}")
    if not options.dry_run:
        open_working_folder(options)
    return not options.dry_run


def _request(options: argparse.Namespace) -> dict:
    """What was asked for, and when the models it names were written."""
    asked = {name: str(value) for name, value in vars(options).items() if name not in HOW_TO_WRITE}
    places, kinds = list(_read_from(options).values()), ("config.json", "*.safetensors", "*.bin")
    files = [file for folder in places for kind in kinds for file in folder.glob(kind)]
    files += [place for place in places if place.is_file()]
    return asked | {"written": {str(file): file.stat().st_mtime_ns for file in sorted(files)}}


def _stored_request(folder: Path) -> dict | None:
    file = folder / "request.json"
    return json.loads(file.read_text()) if file.is_file() else None


def open_working_folder(options: argparse.Namespace) -> Path:
    """`TARGET.partial`, which remembers what was asked for."""
    folder = working_folder(options.target)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "request.json", json.dumps(_request(options), indent=2) + "\n")
    return folder


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """A full disk, in the words of whatever library met it, as one sentence."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise InputError(
            f"{place} could not be written; is the disk full? What was there is unchanged ({said})."
        ) from error


def save_state(state: dict, file: Path) -> None:
    """As `torch.save`, but an interruption leaves the file that was there."""
    temporary = file.with_name(file.name + ".new")
    with writing(file):
        torch.save(state, temporary)
        os.replace(temporary, file)


def tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def carry_generation_config(model: PreTrainedModel, folders: Sequence[Path]) -> None:
    """The settings of the first folder that has any."""
    for folder in folders:
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
            return


def finish(model: PreTrainedModel, beside: Sequence[Path], target: Path, *more: Any) -> None:
    """Save a model as `save_model` does, with the settings for generation of the first folder `beside` that has any."""
    if model.can_generate():
        carry_generation_config(model, beside)
    save_model(model, beside, target, *more)
    print(f"Saved {target}.")


def save_model(
    model: PreTrainedModel,
    beside: Sequence[Path],
    target: Path,
    report: dict | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Model, the tokenizer of the first folder `beside` that has one, and report; the target is replaced last.

    A report travels with the model: of the folder or file that was its "source" it keeps the name, of one on the Hub
    all of it.
    """
    partial = working_folder(target)
    finished, replaced = partial / "model", partial / "replaced"
    shutil.rmtree(finished, ignore_errors=True)
    with writing(finished):
        model.save_pretrained(finished)
        for file in next(filter(None, map(tokenizer_files, beside)), []):
            shutil.copy2(file, finished)
        if report is not None:
            source = Path(report["source"])
            report = report | {"source": source.resolve().name if source.exists() else str(source)}
            replace_text(finished / "conversion_report.json", json.dumps(report, indent=2) + "\n")
        if write_more is not None:
            write_more(finished)
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.replace(target, replaced)
    os.replace(finished, target)
    shutil.rmtree(partial)
