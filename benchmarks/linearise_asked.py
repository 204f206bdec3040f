"""What a Llama in windows is asked beside perplexity: tasks of the evaluation harness, a number that lies far back in a
novel, and questions whose answers stand side by side."""

import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.harness import markdown
from examples.evaluate_tasks import find_tasks
from examples.quickstart_llama import answer
from examples.recall import NEEDLES, Question, log_likelihoods
from examples.text_data import read_documents

COMMONSENSE = ["piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq", "lambada_openai"]
PASSAGES = ["squad", "drop"]
CHOICES = 4
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
MEASURES = ("commonsense", "answers", "needle", "passages")


class Asking(NamedTuple):
    """How much is asked.

    Attributes:
        data: the folder of ../shared/data.
        items: of each commonsense task, from its beginning.
        passages: of each task whose answer is written.
        questions: with a needle, for each distance.
        distances: words from the needle to the question.
        batch_size: of the tasks.
        longest: tokens that a task's item is cut to.
    """

    data: Path
    items: int
    passages: int
    questions: int
    distances: tuple[int, ...]
    batch_size: int
    longest: int = 2048

    def measure(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict:
        """One of `MEASURES`."""
        if name == "answers":
            return {"answers": [answer(model, tokenizer, question) for question in ASKED]}
        if name == "needle":
            return {"right": self._needles(model, tokenizer), "questions": self.questions}
        names, limit = (COMMONSENSE, self.items) if name == "commonsense" else (PASSAGES, self.passages)
        return self._scores(model, tokenizer, names, limit) | {"limit": limit}

    def _scores(self, model, tokenizer, names: list[str], limit: int) -> dict:
        """What the evaluation harness measures of local tasks, and of those with an "acc" which items are right."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        tasks = [f"local_{name}" for name in names]
        found: Any = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=self.batch_size, max_length=self.longest),
            tasks=tasks,
            task_manager=find_tasks(tasks, self.data),
            limit=limit,
            bootstrap_iters=0,
        )
        scores, right = {}, {}
        for name in names:
            results = found["results"][f"local_{name}"]
            scores[name] = {key.removesuffix(",none"): x for key, x in results.items() if _is_score(key, x)}
            items = sorted(found["samples"][f"local_{name}"], key=lambda item: item["doc_id"])
            if "acc" in scores[name]:
                right[name] = "".join(f"{item['acc']:.0f}" for item in items)
        return {"scores": scores, "right": right} if right else {"scores": scores}

    def _needles(self, model, tokenizer) -> dict[str, float]:
        """How often the right of four numbers is the likeliest, by the words between it and the question."""
        novel = next(read_documents([str(self.data / "longdocs" / "test.parquet")]))
        words, found = novel.split(), {}
        for distance in self.distances:
            draw = random.Random(distance)
            asked = [needle(words, distance, draw) for _ in range(self.questions)]
            likelihoods = [log_likelihoods(model, tokenizer, question) for question in asked]
            found[str(distance)] = sum(max(x) == x[0] for x in likelihoods) / self.questions
        return found


def _is_score(key: str, value) -> bool:
    return key.endswith(",none") and "_stderr" not in key and isinstance(value, float)


def needle(words: list[str], distance: int, draw: random.Random) -> Question:
    """A number, so many words of a novel, and the question for the number."""
    hidden, *others = (f" {number}" for number in draw.sample(NEEDLES, CHOICES))
    start = draw.randrange(len(words) - distance)
    filler = " ".join(words[start : start + distance])
    return Question(f"The secret number is{hidden}. {filler} The secret number is", [hidden, *others])


def mean(scores: dict[str, dict[str, float]]) -> float:
    """The share of right answers in the mean of the commonsense tasks."""
    return sum(scores[task]["acc"] for task in COMMONSENSE) / len(COMMONSENSE)


def difference(one: dict[str, str], other: dict[str, str]) -> tuple[float, float]:
    """Of the mean of the tasks: how much `one` is above `other`, and the standard error, by the items of both."""
    tasks = [torch.tensor([int(a) - int(b) for a, b in zip(one[name], other[name])]).double() for name in one]
    errors = [x.var().item() / len(x) for x in tasks]
    return sum(x.mean().item() for x in tasks) / len(tasks), math.sqrt(sum(errors)) / len(tasks)


def tables(runs: list[tuple[str, dict]]) -> list[str]:
    """The tasks, the needle, and what is answered, of runs with the name of their condition; none that is empty.

    The first that was asked the tasks is what the others are compared with.
    """
    found = [_scores_table(runs), _differences(runs), _needle_table(runs), _answers(runs)]
    return [part for part in found if part]


def _differences(runs: list[tuple[str, dict]]) -> str:
    asked = {name: found["commonsense"] for name, found in _rows(runs, "commonsense").items()}
    known = [(name, run["right"]) for name, run in asked.items() if "right" in run]
    told = []
    for name, right in known[1:]:
        points, error = (100 * x for x in difference(right, known[0][1]))
        told.append(f"{name}: {points:+.1f} points (standard error {error:.1f})")
    return f"Mean of the eight beside {known[0][0]}, on the same items: {'; '.join(told)}." if told else ""


def _rows(runs: list[tuple[str, dict]], *measures: str) -> dict[str, dict]:
    """By the name of a condition what was measured of it."""
    found: dict[str, dict] = {}
    for name, run in runs:
        if run.get("measure") in measures:
            found.setdefault(name, {}).update({run["measure"]: run})
    return found


def _scores_table(runs: list[tuple[str, dict]]) -> str:
    rows, limits = [], {}
    for name, measured in _rows(runs, "commonsense", "passages").items():
        tasks, passages = (measured.get(kind, {}).get("scores", {}) for kind in ("commonsense", "passages"))
        limits |= {kind: run["limit"] for kind, run in measured.items()}
        scores = [tasks.get(task, {}).get("acc") for task in COMMONSENSE]
        scores += [passages.get(task, {}).get("contains") for task in PASSAGES]
        shown = [mean(tasks) if tasks else None, *scores]
        rows.append([name, *("" if x is None else f"{100 * x:.1f}" for x in shown)])
    asked = ", ".join(f"{limit:,} of {kind}" for kind, limit in sorted(limits.items()))
    header = [f"the first items of each, {asked}, %", "mean of eight", *COMMONSENSE, *PASSAGES]
    return markdown(header, rows) if rows else ""


def _needle_table(runs: list[tuple[str, dict]]) -> str:
    measured = {name: found["needle"] for name, found in _rows(runs, "needle").items()}
    if not measured:
        return ""
    distances = list(next(iter(measured.values()))["right"])
    rows = [[name, *(f"{100 * run['right'][x]:.0f}" for x in distances)] for name, run in measured.items()]
    questions = max(run["questions"] for run in measured.values())
    return markdown([f"needle, words behind it, % of {questions}", *distances], rows)


def _answers(runs: list[tuple[str, dict]]) -> str:
    """Of each question what each condition says, in a line."""
    told = {name: measured["answers"]["answers"] for name, measured in _rows(runs, "answers").items()}
    rows = [[_line(x) for x in row] for row in zip(ASKED, *told.values())]
    return markdown(["asked", *told], rows) if told else ""


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")
