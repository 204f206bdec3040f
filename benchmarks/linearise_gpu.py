"""The real Llama in windows, taught on a GPU on millions of tokens: perplexity up to 64k, tasks, recall, and answers.

The conditions can be taught by as many processes at once, since each run goes into the file when it is done:

    python -m benchmarks.linearise_gpu --data ../shared/data                              # all, one after the other
    python -m benchmarks.linearise_gpu --data ../shared/data --conditions llama window    # those alone
    python -m benchmarks.linearise_gpu --data ../shared/data --conditions state --minutes 7
    python -m benchmarks.linearise_gpu --table

Of the tasks each is asked the first `--limit` items. Numbers are float32, its products TF32; teaching is in bfloat16.
"""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import linearise_asked, linearise_study, studies
from benchmarks.harness import RESULTS, footnote
from benchmarks.linearise_asked import Asking
from benchmarks.linearise_study import LINEAR, MODES, Study, Teaching, kind

FILE = RESULTS / "linearise_gpu.json"
FRESH = linearise_study.FRESH
WINDOW, KEPT = 64, 8
HOW = ("--bf16", "--max-bytes", 16_000_000, "--save-steps", 100_000)
WHOLE = (*HOW, "--whole-learning-rate", 2e-4)
STAGES = {
    "layers": Teaching(524_288, 4096, "1024,2048", (*HOW, "--minutes", 0.75)),
    "whole": Teaching(1_572_864, 4096, "2048", (*WHOLE, "--minutes", 2.5)),
    "long": Teaching(2_097_152, 8192, "8192", (*WHOLE, "--minutes", 1.75)),
}
CONDITIONS = {
    "llama": kind(),
    "window": kind(WINDOW),
    "untaught": kind(WINDOW, modes=MODES),
    "state": kind(WINDOW, modes=MODES, taught="long"),
    "taught window": kind(WINDOW, taught="whole"),
    "linear": kind(WINDOW, modes=LINEAR, taught="whole"),
    "kept": kind(WINDOW, modes=MODES, kept=KEPT, taught="long"),
}
ASKED_ALL = ("llama", "window", "state", "kept")
LIMIT = 1000  # items of a task
BATCH = 32  # items of a task that are read at once
DISTANCES = (50, 100, 200, 400, 800, 1600, 3200)  # words from the needle to the question
QUESTIONS = 50


def plan(runs: list[dict], conditions: list[str], deadline: float = float("inf")) -> Iterator[dict]:
    """What each condition is asked, the perplexities first; nothing more after the deadline."""
    items = (item for name in conditions for item in _asked(name))
    yield from (item for item in items if time.monotonic() < deadline)


def _asked(name: str) -> Iterator[dict]:
    condition = CONDITIONS[name]
    stages = list(STAGES) if condition.get("modes") else list(STAGES)[1:]
    if condition.get("taught") in stages:
        before = stages[: stages.index(condition["taught"])]
        yield from (condition | {"taught": stage} for stage in before)
    *lengths, longest = (condition | {"length": length} for length in linearise_study.TEXTS)
    yield from lengths
    if name != "llama":
        yield longest
    if name in ASKED_ALL:
        yield from (condition | {"measure": measure} for measure in linearise_asked.MEASURES)
    if name == "llama":  # which reads it with the square of its length
        yield longest


class GpuStudy(Study):
    """The runs, with one model kept for the next of them."""

    teaching = STAGES

    def __init__(self, data: Path, folder: Path = Path("runs/linearise_gpu"), limit: int = LIMIT):
        super().__init__(data, folder)
        self.asking = Asking(data, limit, limit, QUESTIONS, DISTANCES, BATCH)
        self.kept: tuple[dict, Any] = {}, None  # a condition, its model and the tokens that this has learned from
        torch.set_float32_matmul_precision("high")

    def run(self, length: int, measure: str = "perplexity", **condition) -> dict:
        if self.kept[0] != condition:
            self.kept = {}, None  # two would not always find room, nor others what teaching has left
            torch.cuda.empty_cache()
            self.kept = condition, self._model(**condition)
        model, tokens = self.kept[1]
        about = {} if tokens is None else {"tokens": tokens, "teaching": self._taught_how(condition)}
        return self._found(measure, model, length) | about

    def _taught_how(self, condition: dict) -> dict:
        """Of each stage that a model has come through."""
        found, stage = {}, condition["taught"]
        shape = condition | {}
        while stage is not None:
            report = json.loads((self._place(**shape | {"taught": stage}) / "conversion_report.json").read_text())
            names = ("tokens_per_step", "learning_rate", "whole_learning_rate")
            taken = {"steps": report["steps"][stage], "seconds": report["seconds"][stage]}
            found[stage] = taken | {name: report[name] for name in names}
            stage = linearise_study.stage_before(stage, condition["modes"])
        return found


def table(record: dict) -> str:
    """What was found in sentences; perplexities by length, the tasks, the needle, and what is answered."""
    runs = record["runs"]
    read = record | {"runs": [run for run in runs if "perplexity" in run]}
    parts = ["\n".join(f"- {sentence}" for sentence in findings(runs))]
    parts += [linearise_study.table(read) if read["runs"] else footnote(record)]
    return "\n\n".join(filter(None, [*parts, *linearise_asked.tables(linearise_study.named(runs))]))


def findings(runs: list[dict]) -> Iterator[str]:
    """In a sentence each, as far as it was measured."""
    found = {name: _first(runs, condition) for name, condition in CONDITIONS.items()}
    ratios = {
        name: run["perplexity"]["all"] / found["llama"]["perplexity"]["all"]
        for name, run in found.items()
        if run and found["llama"]
    }
    if {"state", "window"} <= ratios.keys():
        won = (ratios["window"] - ratios["state"]) / (ratios["window"] - 1)
        yield (
            f"Windows of {WINDOW} tokens stand at {ratios['window']:.2f} times the Llama's perplexity; with a memory, "
            f"taught on {found['state']['tokens']:,} tokens, at {ratios['state']:.3f}: {won:.0%} of what they lose is "
            "won back."
        )
    others = {
        "with it": CONDITIONS["state"] | {"taught": "whole"},
        "without a memory": CONDITIONS["taught window"],
        "with linear attention of equal state": CONDITIONS["linear"],
        f"with {KEPT} layers of 30 left softmax": CONDITIONS["kept"],
    }
    told = [
        f"{said} {run['perplexity']['all'] / found['llama']['perplexity']['all']:.3f} ({run['tokens']:,} tokens)"
        for said, condition in others.items()
        if found["llama"] and (run := _first(runs, condition))
    ]
    if told:
        yield f"Taught as much or longer: {', '.join(told)}."
    for length in list(linearise_study.TEXTS)[1:]:
        read = {name: _first(runs, CONDITIONS[name] | {"length": length}) for name in ("llama", "window", "state")}
        if all(read.values()):
            part = [part for part in read["state"]["perplexity"] if part != "all"][-1]
            llama, window, state = (read[name]["perplexity"][part] for name in read)
            yield (
                f"Tokens {part} of a text: perplexity {state:.1f} with a memory, {window:.1f} of the untaught windows, "
                f"{llama:.1f} of the Llama."
            )
    asked = [run for condition in CONDITIONS.values() if (run := _first(runs, condition | {"measure": "commonsense"}))]
    told = [f"{name} {100 * linearise_asked.mean(run['scores']):.1f}" for name, run in linearise_study.named(asked)]
    if told:
        yield f"Mean of the eight commonsense tasks, in %: {'; '.join(told)}."


def _first(runs: list[dict], item: dict) -> dict | None:
    """The run of a plan's item: of perplexity where it names no measure."""
    return next(
        (run for run in runs if (item.items() <= run.items()) and run.get("measure") == item.get("measure")), None
    )


def main() -> None:
    parser = studies.parser(__doc__, "../shared/data")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS), help="default: all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing more after so many")
    parser.add_argument("--limit", type=int, default=LIMIT, help="items of a task (default: %(default)s)")
    arguments = parser.parse_args()
    asked = partial(plan, conditions=arguments.conditions, deadline=time.monotonic() + 60 * arguments.minutes)
    studies.show_or_run(
        arguments, FILE, FRESH, asked, lambda: GpuStudy(arguments.data, limit=arguments.limit).run, table
    )


if __name__ == "__main__":
    main()
