"""Files of named tensors that are whole or not there: what a cache is saved in."""

import hashlib
import json
import os
import uuid
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .fingerprint import tensor_bytes

FORMAT, VERSION = "interdomain-state", "1"
SAVING = ".saving"  # ends the names of files that are not complete


class StateFileError(ValueError):
    """A file that is no state, or not the one that was saved."""


class NewerStateFileError(StateFileError):
    """A file of a version that this library does not read."""


def write_state_file(
    path: str | os.PathLike, tensors: dict[str, torch.Tensor], about: dict[str, str], durable: bool = True
) -> None:
    """Write a safetensors file that replaces one of the same name when it is complete.

    Args:
        path: the file; its folder exists.
        tensors: by name.
        about: metadata, as strings; format, version and a checksum over everything are added.
        durable: wait until the file is on the disk; else a power failure may leave a torn one, which `read_state_file`
            notices.

    Raises:
        OSError: when it cannot be written; a file that was there is as it was.
    """
    path = Path(path)
    tensors = {name: _alone(x) for name, x in tensors.items()}
    about = {**about, "format": FORMAT, "version": VERSION}
    about["checksum"] = _checksum(tensors, about)
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}{SAVING}")  # beside it: a rename stays on one file system
    try:
        save_file(tensors, new, metadata=about)
        if durable:
            _sync(new)
        os.replace(new, path)
        if durable and os.name == "posix":
            _sync(path.parent)
    except (SafetensorError, OSError) as error:
        raise OSError(f"The state file {path} could not be written: {error}.") from error
    finally:
        new.unlink(missing_ok=True)


def read_state_file(path: str | os.PathLike) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, on the CPU, and the metadata.

    Raises:
        FileNotFoundError: when there is no such file.
        StateFileError: when it is no state file, of a newer version, torn or altered.
    """
    path = Path(path)
    while path.is_file():
        before = path.stat()
        try:
            return _read(path)
        except StateFileError:  # safetensors opens a file twice, and one that was replaced is another by then
            now = path.stat() if path.is_file() else None
            if now is not None and (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns):
                raise
    raise FileNotFoundError(f"There is no state file {path}.")


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise StateFileError(f"{path} is not a state file: save one with cache.save(path).")
            if about.get("version") != VERSION:
                raise NewerStateFileError(
                    f"{path} is a state file of version {about.get('version')}, and this library reads version "
                    f"{VERSION}: update modeling_interdomain."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    except RuntimeError as error:  # of the memory map, for which safetensors opens the file once more
        if not path.is_file():
            raise FileNotFoundError(f"The state file {path} was removed while it was read.") from error
        raise StateFileError(f"{path} cannot be read now: {error}.") from OSError(str(error))
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise StateFileError(f"{path} is torn, or no state file ({error}): save it again.") from error
    checksum = about.pop("checksum", None)
    if checksum != _checksum(tensors, about):
        raise StateFileError(f"{path} was altered after it was saved (its checksum does not fit): save it again.")
    return tensors, about


def _alone(x: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, no view of a larger one: safetensors saves whole storages."""
    x = x.detach().cpu().contiguous()
    return x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()


def _checksum(tensors: dict[str, torch.Tensor], about: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        digest.update(tensor_bytes(x))
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
