"""Run tasks of the lm-evaluation-harness on a saved model and write the scores into its folder and model card.

Usage:
    python -m examples.evaluate_tasks runs/mine --data ../shared/data --limit 100
    python -m examples.evaluate_tasks runs/mine --tasks local_wikitext local_recall --batch-size 8

The harness's record goes to lm_eval.json; the scores go into README.md, as metadata that the Hub reads and as a table.
Tasks that were run before keep their scores until they are run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from huggingface_hub import ModelCard
from transformers.utils import logging
from yaml import YAMLError

from examples.report import markdown_table
from examples.saved_model import add_folder, load, replace_text
from examples.text_data import InputError, check_positive, exit_code
from model_cards.model_card import HARNESS, harness_results, is_number

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "lm_eval_tasks"
RECORD = "lm_eval.json"
START, END = "<!-- lm-eval -->", "<!-- lm-eval: end -->"


class Score(NamedTuple):
    """One metric of one task or group."""

    task: str
    metric: str
    value: float
    error: float | str  # "N/A" where the harness knows none
    shots: int
    items: str  # how many were evaluated, and of how many


def check_options(options: argparse.Namespace) -> None:
    check_positive(options, "limit", "max_length")
    if options.max_length == 1:
        raise InputError("--max-length must be at least 2: a token is scored after another one.")
    if options.batch_size != "auto" and not (options.batch_size.isdecimal() and int(options.batch_size)):
        raise InputError(f"--batch-size must be a positive number or auto, not {options.batch_size}.")
    load(options.folder)  # the harness does it again, and would go on with weights that do not fit


def find_tasks(names: Sequence[str], data: Path) -> TaskManager:
    """The harness's index of tasks, once every name is in it and every file of the local ones is there."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise InputError("lm-eval is not installed: pip install lm-eval.") from error
    # The thousands of tasks that come with the harness take long to read: only where one of them is asked for.
    for include_defaults in (False, True):
        manager = TaskManager(include_path=TASKS, include_defaults=include_defaults, metadata={"data": str(data)})
        unknown = sorted(set(names) - set(manager.all_tasks))
        if not unknown:
            break
    else:
        raise InputError(f"There is no task {unknown[0]}: lm_eval ls tasks --include_path {TASKS} lists them.")
    try:
        manager.load(list(names))
    except FileNotFoundError as error:
        raise InputError(f"{error.filename} does not exist: name the folder of the data with --data.") from error
    except ConnectionError as error:
        raise InputError(f"A task of the harness's own needs a network: {error}.") from error
    except ValueError as error:  # a task that is asked for twice
        raise InputError(f"{error}.") from error
    return manager


def read_record(path: Path) -> dict[str, Any]:
    """What earlier runs have left."""
    if not path.exists():
        return {}
    try:
        record = dict(json.loads(path.read_text()))
        tables = [record.get(name, {}) for name in ("results", "n-samples", "n-shot")]
        if not all(isinstance(x, dict) for x in (*tables, *tables[0].values())):
            raise TypeError("a table by task")
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a record of the harness: move it away.") from error
    return record


def merge(record: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """The record with what the new results say of their tasks; tasks that they do not name stay."""
    tables = {key: record.get(key, {}) | value for key, value in results.items() if isinstance(value, dict)}
    return record | results | tables


def scores(record: dict[str, Any]) -> Iterator[Score]:
    """Every score in the record, task after task."""
    for task, metrics in sorted(record["results"].items()):
        items = record["n-samples"].get(task)
        for key, value in metrics.items():
            metric, comma, answer = key.partition(",")  # how the answer was found in the text, or "none"
            if not comma or metric.endswith("_stderr") or not is_number(value):
                continue
            yield Score(
                task,
                key.removesuffix(",none"),
                value,
                metrics.get(f"{metric}_stderr,{answer}", "N/A"),
                record["n-shot"].get(task, 0),
                f"{items['effective']:,} of {items['original']:,}" if items else "",
            )


def table(found: Sequence[Score]) -> str:
    def digits(x):
        return x if isinstance(x, str) else f"{x:.4g}"

    rows = [[s.task, s.metric, digits(s.value), digits(s.error), s.shots, s.items] for s in found]
    return markdown_table(["task", "metric", "value", "standard error", "shots", "items"], rows)


def read_card(folder: Path) -> ModelCard:
    """The model card in the folder, or the start of one."""
    path = folder / "README.md"
    if not path.exists():
        return ModelCard(f"---\nlibrary_name: transformers\n---\n\n# {folder.resolve().name}\n")
    try:
        return ModelCard.load(path)
    except (ValueError, YAMLError) as error:
        raise InputError(f"The metadata at the top of {path} cannot be read: correct or remove it.") from error


def update_card(card: ModelCard, record: dict[str, Any], found: Sequence[Score], name: str) -> None:
    """Put the scores of the record into the metadata and between the two markers; all other text stays."""
    others = [result for result in card.data.eval_results or [] if result.source_name != HARNESS["source_name"]]
    card.data.model_name = card.data.model_name or name
    card.data.eval_results = others + harness_results(record)
    section = f"{START}\n\n{table(found)}\n\n{END}"
    before, start, rest = card.text.partition(START)
    if start:
        card.text = before + section + rest.partition(END)[2]
    else:
        card.text = f"{card.text.rstrip()}\n\n## Evaluation\n\n{section}\n"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_folder(parser)
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["local_commonsense", "local_wikitext"],
        help="tasks or groups, of examples/lm_eval_tasks or of the harness itself (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("../shared/data"),
        help="folder with their files, eval/piqa/... (default: %(default)s)",
    )
    parser.add_argument("--limit", type=int, help="items of each task (default: all)")
    parser.add_argument("--batch-size", default="1", help="sequences at once, or auto (default: %(default)s)")
    parser.add_argument("--max-length", type=int, help="tokens of context (default: the model's)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    logging.disable_progress_bar()
    check_options(options)
    record, card = read_record(options.folder / RECORD), read_card(options.folder)
    manager = find_tasks(options.tasks, options.data)
    from lm_eval import simple_evaluate
    from lm_eval.utils import handle_non_serializable

    length = {} if options.max_length is None else {"max_length": options.max_length}
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(options.folder)} | length,
        tasks=options.tasks,
        task_manager=manager,
        limit=options.limit,
        batch_size=options.batch_size,
        device="cuda" if torch.cuda.is_available() else "cpu",
        log_samples=False,
    )
    record = json.loads(json.dumps(merge(record, results), default=handle_non_serializable))
    found = list(scores(record))
    print(table(found))
    update_card(card, record, found, options.folder.resolve().name)
    try:
        replace_text(options.folder / RECORD, json.dumps(record, indent=2) + "\n")
        replace_text(options.folder / "README.md", str(card))
    except OSError as error:
        raise InputError(f"{options.folder} could not be written ({error}): what was there is still there.") from error


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
