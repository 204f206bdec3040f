"""Folders of checkpoints: a new one replaces an old one when it is complete, and damaged weights are named."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path

from safetensors import SafetensorError, safe_open


def holds_weights(folder: str | os.PathLike) -> bool:
    """Whether a folder holds weights, which a save that fails must not lose."""
    return Path(folder).is_dir() and any(Path(folder).glob("*.safetensors"))


@contextmanager
def replacing(folder: str | os.PathLike, variant: str | None = None) -> Iterator[str]:
    """A new folder to save into; what is in it moves to `folder` at the end, and is thrown away after an error.

    Once the new weights are in place, weights of the same variant that they do not name are removed: another number of
    shards would otherwise leave old ones behind, and the library prefers `model.safetensors` to any shards.
    """
    kind = "" if variant is None else re.escape(f".{variant}")
    weights = re.compile(rf"model{kind}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index{kind}\.json")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as new:
        yield new
        files = sorted(os.listdir(new), key=lambda file: file.endswith(".json"))  # an index after its shards
        for file in files:
            os.replace(Path(new, file), Path(folder, file))
        if any(weights.fullmatch(file) for file in files):
            for file in os.listdir(folder):
                if weights.fullmatch(file) and file not in files:
                    os.remove(Path(folder, file))


def damaged_weights(folder: str | os.PathLike) -> list[str]:
    """The safetensors files of a folder that cannot be opened; none if it is the name of a repository."""
    damaged = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            damaged.append(path.name)
    return damaged


class CheckpointFolders:
    """The part of a model that loads and saves folders. It stands before the library's class, which does the rest."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in the library; weights that cannot be read are named."""
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except (SafetensorError, JSONDecodeError) as error:
            files = ", ".join(damaged_weights(pretrained_model_name_or_path)) or "weights"
            raise OSError(
                f"{pretrained_model_name_or_path} has {files} that cannot be read ({error}); copy or download again, "
                "from the Hub with force_download=True."
            ) from error

    def save_pretrained(
        self, save_directory, is_main_process=True, state_dict=None, push_to_hub=False, *args, **kwargs
    ):
        """As in the library; a checkpoint that is already there is replaced when the new one is complete.

        So a full disk loses none. The configuration writes the code for `trust_remote_code` beside itself.
        """
        arguments = (is_main_process, state_dict, push_to_hub, *args)
        if push_to_hub or kwargs.get("distributed_checkpoint") or not holds_weights(save_directory):
            super().save_pretrained(save_directory, *arguments, **kwargs)
            return
        with replacing(save_directory, kwargs.get("variant")) as folder:
            super().save_pretrained(folder, *arguments, **kwargs)
