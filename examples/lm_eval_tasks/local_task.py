"""Tasks of the evaluation harness whose rows are parquet files in a folder of the user's.

The harness includes another task only by its path, which for an installed one differs from machine to machine.
So `stock` names a task of the harness by its path in `lm_eval/tasks`, and `data_files` the file of each split.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from lm_eval import tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.squad_completion.task import contains_score

DEFAULT_FOLDER = "../shared/data"
STOCK = Path(tasks.__file__).parent


class LocalTask(ConfigurableTask):
    """A task, or a stock one under another name, that reads `data_files` under the folder in the metadata `data`."""

    def __init__(self, config: dict[str, Any]):
        config = {key: value for key, value in config.items() if key != "class"}
        stock = load_yaml(STOCK / config.pop("stock")) if "stock" in config else {}
        stock = {key: value for key, value in stock.items() if key != "tag"}
        metadata = stock.get("metadata", {}) | config.pop("metadata")
        files = find_files(config.pop("data_files"), Path(metadata.setdefault("data", DEFAULT_FOLDER)))
        config = stock | config | {"metadata": metadata, "dataset_path": "parquet", "dataset_name": None}
        # A split without a file does not exist: examples in the prompt then come from the one that is evaluated.
        splits = {key: config.get(key) for key in ("training_split", "validation_split", "test_split")}
        config |= {key: split if split in files else None for key, split in splits.items()}
        super().__init__(config=config | {"dataset_kwargs": {"data_files": files}})


def find_files(names: dict[str, str], folder: Path) -> dict[str, str]:
    """The path of each split's file, and a FileNotFoundError that says what to do where one does not exist."""
    paths = {split: folder / name for split, name in names.items()}
    for path in paths.values():
        if not path.is_file():
            advice = "Name the folder of the data with --metadata data=FOLDER: this file does not exist"
            raise FileNotFoundError(errno.ENOENT, advice, str(path))
    return {split: str(path) for split, path in paths.items()}


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, int]:
    """1 where the text that was generated contains one of the accepted answers, in upper or lower case."""
    answers = doc.get("answers") or doc["aliases"]
    return {"contains": contains_score(results[0], [answer.strip() for answer in answers])}
