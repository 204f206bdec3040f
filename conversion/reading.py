"""Weights on disk, whatever wrote them, as one dictionary of tensors; what cannot be read is named."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tqdm import tqdm
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from examples.text_data import InputError
from modeling_interdomain import InterdomainConfig  # which makes the Auto classes know the architecture

# What is wrong with a source of which no configuration of ours can be made.
NO_SUCH_SHAPE = "The source has a shape that an Interdomain model cannot have"
# The names that `save_pretrained` gives weights, now and in earlier versions.
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
# What the pickled index of a sharded checkpoint is made of; anything else could be a program.
METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *(name for name, x in vars(torch).items() if isinstance(x, torch.dtype))),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePath", "PurePosixPath"),  # where Python 3.13 keeps them
}


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a folder, whose settings for generation can be read, too."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json, so it is not a folder with a saved model.")
    file = folder / "config.json"
    try:
        config = AutoConfig.from_pretrained(folder)
        file = folder / "generation_config.json"
        if file.is_file():
            GenerationConfig.from_pretrained(folder)  # what is saved beside a model in the end, after hours maybe
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, StrictDataclassError) as error:
        raise InputError(f"{file} is not a configuration that can be used: {reason(error)}") from error
    return config


def made_config(fields: dict, problem: str) -> InterdomainConfig:
    """The configuration with these fields; an InputError that begins with `problem` where there is none."""
    try:
        return InterdomainConfig(**fields)
    except (ValueError, StrictDataclassError) as error:
        raise InputError(f"{problem}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """The first sentence of an error; of one that only says that a validator failed, what that validator said."""
    cause = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
    return " ".join(str(cause).split()).split(". ")[0].rstrip(".") + "."


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a saved model; all of them are there."""
    for name in SINGLE_FILES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
    raise InputError(f"{folder} holds no weights: none of {', '.join(SINGLE_FILES)}, whole or in shards, is there.")


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        shards = sorted(index.parent / name for name in names)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{index} does not say which shard holds which weights: download or save it again.") from error
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise InputError(f"{len(missing)} of {len(shards)} shards are missing in {index.parent}: {', '.join(missing)}.")
    return shards


def read_weights(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The tensors of all files. They are mapped, not loaded, where the format allows it."""
    weights: dict[str, torch.Tensor] = {}
    for file in tqdm(files, desc="Reading", unit="file", leave=False, dynamic_ncols=True):
        weights |= _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    return weights


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dictionary
    except SafetensorError as error:
        raise InputError(f"{file} is damaged or cut off ({error}): download or save it again.") from error


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    """A state dict, or the one inside a larger checkpoint."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever an unpickler runs into in damaged bytes
        raise InputError(
            f"{file} is damaged, or holds more than weights, which could run a program; it was not opened."
        ) from error
    for name in ("model", "state_dict", "model_state_dict", "module"):
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    weights = {name: x for name, x in found.items() if isinstance(x, torch.Tensor)} if isinstance(found, dict) else {}
    if not weights:
        raise InputError(f"{file} holds no weights by name.")
    return weights


def read_distributed(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder that `torch.distributed.checkpoint` (FSDP, accelerate) wrote, from all ranks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    check_metadata(folder / ".metadata")
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in stored.items()
        if isinstance(about, TensorStorageMetadata) and not name.startswith("optim")
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process is enough here
            dcp.load(weights, storage_reader=reader, no_dist=True)
    except (dcp.api.CheckpointException, RuntimeError, OSError) as error:
        raise InputError(f"{folder} is damaged, or the file of a rank is missing: copy all of it again.") from error
    return weights


class _MetadataUnpickler(pickle.Unpickler):
    """Reads tables of tensors and nothing that acts."""

    def find_class(self, module, name):
        if name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def check_metadata(file: Path) -> None:
    """Refuse an index of shards that would run a program; the library itself unpickles whatever it finds."""
    try:
        with file.open("rb") as opened:
            _MetadataUnpickler(opened).load()
    except pickle.UnpicklingError as error:
        raise InputError(f"{file} holds more than a table of weights ({error}), so it is not opened.") from error
    except Exception as error:  # whatever an unpickler runs into in damaged bytes
        raise InputError(f"{file} is damaged or of another version of PyTorch.") from error


def compare(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], where: object) -> None:
    """Raise unless the tensors have the names and shapes that a model expects."""
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unexpected:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"also has {_some(unexpected)}"] * bool(unexpected)
        raise InputError(f"{where} does not fit its configuration: it {' and '.join(parts)}.")
    different = [
        f"{name} {list(x.shape)} instead of {list(expected[name].shape)}"
        for name, x in found.items()
        if x.shape != expected[name].shape
    ]
    if different:
        raise InputError(f"{where} does not fit its configuration: it has {_some(different)}.")


def _some(names: Sequence[str]) -> str:
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")


def check_finite(weights: dict[str, torch.Tensor], where: object) -> None:
    """Raise at the first tensor that holds NaN or infinity."""
    for name, x in tqdm(weights.items(), desc="Checking", unit="tensor", leave=False, dynamic_ncols=True):
        if not bool(torch.isfinite(x).all()):
            raise InputError(f"{where} has NaN or infinity in {name}: the run diverged; use an earlier checkpoint.")


def tensor_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
