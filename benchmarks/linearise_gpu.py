"""The real Llama in windows, taught on a GPU on millions of tokens: perplexity up to 64k, tasks, recall, and answers.

The conditions can be taught by as many processes at once, since each run goes into the file when it is done:

    python -m benchmarks.linearise_gpu --data ../shared/data                              # all, one after the other
    python -m benchmarks.linearise_gpu --data ../shared/data --conditions llama window    # those alone
    python -m benchmarks.linearise_gpu --data ../shared/data --conditions state --minutes 7
    python -m benchmarks.linearise_gpu --table

Of the tasks each is asked the first `--limit` items. Numbers are float32, its products TF32; teaching is in bfloat16.
"""

import json
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks import linearise_study, studies
from benchmarks.harness import RESULTS, footnote, markdown
from benchmarks.linearise_study import LENGTH, LINEAR, MODES, Study, Teaching, kind
from examples.evaluate_tasks import find_tasks
from examples.quickstart_llama import answer
from examples.recall import NEEDLES, Question, log_likelihoods
from examples.text_data import read_documents

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
COMMONSENSE = ["piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq", "lambada_openai"]
PASSAGES = ("squad", "drop")
LIMIT = 1000  # items of a task
BATCH = 32  # items of a task that are read at once
DISTANCES = (50, 100, 200, 400, 800, 1600, 3200)  # words from the needle to the question
QUESTIONS, CHOICES = 50, 4
ASKED = (
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "How many days are in a week?",
    "What do bees make?",
    "Explain in one sentence why the sky is blue.",
    "Write a short poem about the sea.",
    "Name three animals that live in Africa.",
    "What is 7 plus 5?",
    "Give me a recipe for pancakes.",
    "Why should one sleep enough?",
)


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
        yield from (condition | {"measure": measure} for measure in ("commonsense", "answers", "needle", "passages"))
    if name == "llama":  # which reads it with the square of its length
        yield longest


class GpuStudy(Study):
    """The runs, with one model kept for the next of them."""

    teaching = STAGES

    def __init__(self, data: Path, folder: Path = Path("runs/linearise_gpu"), limit: int = LIMIT):
        super().__init__(data, folder)
        self.limit = limit
        self.kept: tuple[dict, Any] = {}, None  # a condition, its model and the tokens that this has learned from
        torch.set_float32_matmul_precision("high")

    def run(self, length: int, measure: str = "perplexity", **condition) -> dict:
        if self.kept[0] != condition:
            self.kept = {}, None  # two would not always find room, nor others what teaching has left
            torch.cuda.empty_cache()
            self.kept = condition, self._model(**condition)
        model, tokens = self.kept[1]
        measures = {
            "perplexity": lambda: self._measured(model, length),
            "answers": lambda: {"answers": [answer(model, self.tokenizer, question) for question in ASKED]},
            "commonsense": lambda: {"scores": self._scores(model, COMMONSENSE), "limit": self.limit},
            "passages": lambda: {"scores": self._scores(model, PASSAGES), "limit": self.limit},
            "needle": lambda: {"right": self._needles(model)},
        }
        return measures[measure]() | (
            {} if tokens is None else {"tokens": tokens, "teaching": self._taught_how(condition)}
        )

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

    def _scores(self, model: PreTrainedModel, names) -> dict[str, dict[str, float]]:
        """What the evaluation harness measures of local tasks, its stars and standard errors left out."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        tasks = [f"local_{name}" for name in names]
        results = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=self.tokenizer, batch_size=BATCH, max_length=LENGTH),
            tasks=tasks,
            task_manager=find_tasks(tasks, self.data),
            limit=self.limit,
            bootstrap_iters=0,
            log_samples=False,
        )["results"]
        return {
            name: {key.removesuffix(",none"): x for key, x in results[f"local_{name}"].items() if _is_score(key, x)}
            for name in names
        }

    def _needles(self, model: PreTrainedModel) -> dict[str, float]:
        """How often the right of four numbers is the likeliest, by the words between it and the question."""
        novel = next(read_documents([str(self.data / "longdocs" / "test.parquet")]))
        words, found = novel.split(), {}
        for distance in DISTANCES:
            draw = random.Random(distance)
            asked = [needle(words, distance, draw) for _ in range(QUESTIONS)]
            likelihoods = [log_likelihoods(model, self.tokenizer, question) for question in asked]
            found[str(distance)] = sum(max(x) == x[0] for x in likelihoods) / QUESTIONS
        return found


def _is_score(key: str, value) -> bool:
    return key.endswith(",none") and "_stderr" not in key and isinstance(value, float)


def needle(words: list[str], distance: int, draw: random.Random) -> Question:
    """A number, so many words of a novel, and the question for the number."""
    hidden, *others = (f" {number}" for number in draw.sample(NEEDLES, CHOICES))
    start = draw.randrange(len(words) - distance)
    filler = " ".join(words[start : start + distance])
    return Question(f"The secret number is{hidden}. {filler} The secret number is", [hidden, *others])


def table(record: dict) -> str:
    """What was found in sentences; perplexities by length, the tasks, the needle, and what is answered."""
    runs = record["runs"]
    read = record | {"runs": [run for run in runs if "perplexity" in run]}
    parts = ["\n".join(f"- {sentence}" for sentence in findings(runs))]
    parts += [linearise_study.table(read) if read["runs"] else footnote(record)]
    return "\n\n".join(filter(None, [*parts, _scores_table(runs), _needle_table(runs), _answers(runs)]))


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
    means = {
        name: _mean(_first(runs, condition | {"measure": "commonsense"})) for name, condition in CONDITIONS.items()
    }
    if told := [
        f"{linearise_study.label(found[name])} {100 * x:.1f}" for name, x in means.items() if x and found[name]
    ]:
        yield f"Mean of the eight commonsense tasks, in %: {'; '.join(told)}."


def _first(runs: list[dict], item: dict) -> dict | None:
    """The run of a plan's item: of perplexity where it names no measure."""
    return next(
        (run for run in runs if (item.items() <= run.items()) and run.get("measure") == item.get("measure")), None
    )


def _mean(run: dict | None) -> float | None:
    return None if run is None else sum(run["scores"][task]["acc"] for task in COMMONSENSE) / len(COMMONSENSE)


def _rows(runs: list[dict], *measures: str) -> dict[str, dict]:
    """By the name of a condition what was measured of it."""
    found: dict[str, dict] = {}
    for run in sorted(runs, key=linearise_study.order):
        if run.get("measure") in measures:
            found.setdefault(linearise_study.label(run), {}).update({run["measure"]: run})
    return found


def _scores_table(runs: list[dict]) -> str:
    rows = []
    for name, measured in _rows(runs, "commonsense", "passages").items():
        tasks, passages = (measured.get(kind, {}).get("scores", {}) for kind in ("commonsense", "passages"))
        scores = [tasks.get(task, {}).get("acc") for task in COMMONSENSE]
        scores += [passages.get(task, {}).get("contains") for task in PASSAGES]
        shown = [_mean(measured.get("commonsense")), *scores]
        rows.append([name, *("" if x is None else f"{100 * x:.1f}" for x in shown)])
    limit = max((run["limit"] for run in runs if "limit" in run), default=0)
    header = [f"the first {limit:,} items of each, %", "mean of eight", *COMMONSENSE, *PASSAGES]
    return markdown(header, rows) if rows else ""


def _needle_table(runs: list[dict]) -> str:
    right = {name: measured["needle"]["right"] for name, measured in _rows(runs, "needle").items()}
    distances = list(next(iter(right.values()), {}))
    rows = [[name, *(f"{100 * found[distance]:.0f}" for distance in distances)] for name, found in right.items()]
    return markdown([f"needle, words behind it, % of {QUESTIONS}", *distances], rows) if rows else ""


def _answers(runs: list[dict]) -> str:
    """Of each question what each condition says, in a line."""
    told = {name: measured["answers"]["answers"] for name, measured in _rows(runs, "answers").items()}
    rows = [[_line(x) for x in row] for row in zip(ASKED, *told.values())]
    return markdown(["asked", *told], rows) if told else ""


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


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
