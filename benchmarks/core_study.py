"""How strong is the recurrence? Interdomain and its gates beside what others would choose, in language and in recall.

Every model has as many parameters as Interdomain without gates, by the width of its feed-forward layers, and every
fixed state as many numbers. Language is that of `condition_study`: the same texts, tokens, batches and optimiser, three
learning rates with the first seed, more where the best lies at an end, and the other seed at the best. Its runs of
Interdomain and S4D-only are read from there. Recall is that of `recall_study` (`mqar`), and two tasks beside it:

- overwritten: every key is written twice, among the others, and the last value is right;
- copying: tokens stand at any places among empty ones, and are to be repeated in their order (selective copying,
  arXiv 2312.00752).

    python -m benchmarks.core_study --data ../shared/data    # all runs that results/core_study.json does not hold yet
    python -m benchmarks.core_study --table                  # the tables as markdown
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import condition_study, peers, recall_study, studies
from benchmarks.harness import RESULTS, footnote, markdown
from examples.recall import Pairs
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "core_study.json"
SOURCES = ("core_study", "condition_study")
MAMBA2 = recall_study.MAMBA2 | {"ssd_conv_bias": True, "ssd_norm": "after_gate", "use_output_gate": True}
PLAIN = {"token_mixers": "interdomain", "start": "recall"}
CONDITIONS = {
    "Interdomain": PLAIN,
    "Interdomain, gates": PLAIN | {"gates": "forget"},
    "Interdomain, gates and delta rule": PLAIN | {"gates": "forget", "delta_rule": True},
    "Gated DeltaNet": peers.GATED_DELTANET,
    "Gated DeltaNet, steps as Mamba-2's": peers.GATED_DELTANET_SPREAD,
    "Mamba-2": MAMBA2,
    "S4D-only": {"token_mixers": "s4d", "start": "recall"},
    "softmax, convolution": peers.SOFTMAX_CONVOLUTION,
    "Interdomain, warp": PLAIN | {"gates": "warp"},
}
# What `condition_study` has run of them, with as many parameters and the same texts.
KNOWN = {"Interdomain": "interdomain-norope, recall", "S4D-only": "s4d, recall"}
LANGUAGE = "language"
RECALL = ("recall", "overwritten", "copying")
SETTINGS = ((8, 64), (16, 128), (32, 256), (64, 512))  # pairs or copied tokens, and tokens
REFERENCE = "Interdomain"


def fields_of(condition: str, shape: dict) -> dict:
    """A configuration of a condition with the parameters of Interdomain, as near as whole widths come."""
    fields = shape | CONDITIONS[condition]
    wanted = peers.count(shape | CONDITIONS[REFERENCE])
    return fields | {"intermediate_size": peers.equal_width(fields, wanted)}


def language_item(condition: str, learning_rate: float = condition_study.LEARNING_RATES[0], seed: int = 0) -> dict:
    """What tells a run of the language study from the others."""
    return {"task": LANGUAGE, "condition": condition, "learning_rate": learning_rate, "seed": seed}


def recall_item(
    condition: str,
    task: str = RECALL[0],
    setting: tuple[int, int] = SETTINGS[0],
    learning_rate: float = recall_study.LEARNING_RATES[0],
    seed: int = 0,
) -> dict:
    """What tells a run of a recall task from the others."""
    return language_item(condition, learning_rate, seed) | {"task": task, "pairs": setting[0], "length": setting[1]}


def plan(runs: list[dict]) -> Iterator[dict]:
    """Language first: Gated DeltaNet and gates, one rate of all, the others, then the second seed at the best.

    Then recall, the shortest first.
    """
    known = [name for name in CONDITIONS if name not in KNOWN]
    yield from (language_item("Gated DeltaNet", rate) for rate in condition_study.LEARNING_RATES)
    yield from (language_item("Interdomain, gates", seed=seed) for seed in condition_study.SEEDS)
    for rate in condition_study.LEARNING_RATES:
        yield from (language_item(name, rate) for name in known)
    language = [row for row in runs if row["task"] == LANGUAGE]
    for name in known:
        if (rate := condition_study.rate_beyond(condition_study.tried_rates(language, name))) is not None:
            yield language_item(name, rate)
    for name in known:
        if (rate := condition_study.best_rate(language, name)) is not None:
            yield from (language_item(name, rate, seed) for seed in condition_study.SEEDS)
    for task, rate in itertools.product(RECALL, recall_study.LEARNING_RATES):
        yield from (recall_item(name, task, learning_rate=rate) for name in CONDITIONS)
    for task, setting in itertools.product(RECALL, SETTINGS):
        for name in CONDITIONS:
            if (rate := best_recall_rate(runs, name, task)) is not None:
                yield from (recall_item(name, task, setting, rate, seed) for seed in condition_study.SEEDS)


def best_recall_rate(runs: list[dict], name: str, task: str) -> float | None:
    """That with the fewest errors at the shortest length, once all rates are tried."""
    tried = {rate: rows for rate in recall_study.LEARNING_RATES if (rows := _recall_rows(runs, name, task, rate))}
    if len(tried) < len(recall_study.LEARNING_RATES):
        return None
    return min(tried, key=lambda rate: (1 - tried[rate][0]["accuracy"], tried[rate][0]["loss"]))


def _recall_rows(runs: list[dict], name: str, task: str, rate: float, setting=SETTINGS[0]) -> list[dict]:
    wanted = recall_item(name, task, setting, rate)
    del wanted["seed"]
    return sorted((row for row in runs if wanted.items() <= row.items()), key=lambda row: row["seed"])


def run_condition(task: str, data: Path | dict, training: dict = condition_study.TRAINING, **item) -> dict:
    """Train one condition on a task and measure it; `data` are the texts, or the folder of them."""
    if task != LANGUAGE:
        return run_recall(task, **item)
    texts = condition_study.prepare(data) if isinstance(data, Path) else data
    config = InterdomainConfig(**fields_of(item.pop("condition"), condition_study.SHAPE))
    return condition_study.train_and_measure(config, **item, data=texts, training=training)


def run_recall(
    task: str, condition: str, pairs: int, length: int, learning_rate: float, seed: int, steps: int | None = None
) -> dict:
    torch.manual_seed(seed)
    shape = recall_study.SHAPE | {"state_size": recall_study.STATE_SIZE, "bos_token_id": None, "eos_token_id": None}
    model = InterdomainForCausalLM(InterdomainConfig(**fields_of(condition, shape)))
    batches, asked = (make_batches(task, pairs, length, first) for first in (seed, seed + 1000))
    steps = steps or recall_study.TRAINING["steps"][str(pairs)]
    found = recall_study.train_and_ask(model, batches, asked, steps, learning_rate, recall_study.SOLVED)
    state_bytes = 4 * sum(model.config.state_sizes(length).values())
    return found | {"parameters": model.num_parameters(), "state_bytes": state_bytes}


def make_batches(task: str, pairs: int, length: int, seed: int) -> Iterator[Pairs]:
    if task == "recall":
        return recall_study.make_batches(pairs, length, False, seed)
    draw = {"overwritten": overwritten_batch, "copying": copying_batch}[task]
    generator = torch.Generator().manual_seed(seed)
    return (draw(pairs, length, generator) for _ in itertools.count())


def overwritten_batch(pairs: int, length: int, generator: torch.Generator) -> Pairs:
    """Every key and a value, twice, in any order; then each key once, of which the last value is asked; 0 in gaps."""
    rows, half = recall_study.TRAINING["batch_size"], recall_study.SHAPE["vocab_size"] // 2
    order = torch.rand(rows, 2 * pairs, generator=generator).argsort(dim=1)
    keys = 1 + torch.rand(rows, half - 1, generator=generator).argsort(dim=1)[:, :pairs]
    values = torch.randint(half, 2 * half, (rows, 2 * pairs), generator=generator)
    last = torch.maximum(*order.argsort(dim=1).view(rows, 2, pairs).unbind(1))  # place of the later of both writes
    ids = torch.zeros(rows, length, dtype=torch.long)
    ids[:, 0 : 4 * pairs : 2], ids[:, 1 : 4 * pairs : 2] = keys.repeat(1, 2).gather(1, order), values
    slots = torch.rand(rows, (length - 4 * pairs) // 2, generator=generator).argsort(dim=1)[:, :pairs]
    places = 4 * pairs + 2 * slots
    ids.scatter_(1, places, keys).scatter_(1, places + 1, values.gather(1, last))
    return Pairs(ids, torch.zeros_like(ids, dtype=torch.bool).scatter_(1, places + 1, True))


def copying_batch(count: int, length: int, generator: torch.Generator) -> Pairs:
    """`count` tokens at any places among empty ones, then a sign and `count` empty places, where they are asked."""
    rows, vocabulary = recall_study.TRAINING["batch_size"], recall_study.SHAPE["vocab_size"]
    told = length - count - 1
    places = torch.rand(rows, told, generator=generator).argsort(dim=1)[:, :count].sort(dim=1).values
    tokens = torch.randint(2, vocabulary, (rows, count), generator=generator)
    ids = torch.zeros(rows, length, dtype=torch.long).scatter_(1, places, tokens)
    ids[:, told] = 1
    labels = ids.clone()
    labels[:, told + 1 :] = tokens
    asked = torch.zeros_like(ids, dtype=torch.bool)
    asked[:, told + 1 :] = True
    return Pairs(ids, asked, labels)


def language_rows(records: dict[str, dict]) -> dict[str, list[dict]]:
    """The runs of the language study by condition, with what `condition_study` has run of them."""
    found = {name: [] for name in CONDITIONS}
    for row in records["core_study"]["runs"]:
        if row["task"] == LANGUAGE and row["condition"] in found:
            found[row["condition"]].append(row)
    for name, there in KNOWN.items():
        found[name] += [
            row | {"condition": name} for row in records["condition_study"]["runs"] if row["condition"] == there
        ]
    return found


def table(records: dict[str, dict]) -> str:
    """Language by condition, then right answers by task and length, then what has not been run."""
    record, rows = records["core_study"], []
    missing: dict[str, list[str]] = {}
    for name, found in language_rows(records).items():
        best = condition_study.best_runs(found, name)
        if not best:
            missing.setdefault(LANGUAGE, []).append(name)
            continue
        losses = [condition_study.score(row) for row in best]
        tried = condition_study.tried_rates(found, name)
        known = "" if condition_study.best_rate(found, name) else ", not bracketed"
        if known or len(losses) < len(condition_study.SEEDS):
            missing.setdefault("language, rates" if known else "language, a second seed", []).append(name)
        rows.append(
            [
                name,
                f"{best[0]['parameters']:,}",
                f"{best[0]['state']:,}",
                ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in tried.items()),
                f"{best[0]['learning_rate']:g}{known}",
                ", ".join(f"{loss:.3f}" for loss in losses),
                f"{math.exp(statistics.mean(losses)):.1f}",
            ]
        )
    header = ["language", "parameters", "state, numbers", "loss by rate, first seed", "best rate", "loss by seed"]
    tables = [markdown([*header, "perplexity"], rows)]
    recall = []
    for name, task in itertools.product(CONDITIONS, RECALL):
        cells = [_recall_cell(record["runs"], name, task, setting) for setting in SETTINGS]
        if any(cells):
            recall.append([name, task, *(cell or "not run" for cell in cells)])
        else:
            missing.setdefault(task, []).append(name)
    if recall:
        tables.append(
            markdown(["right answers", "task", *(f"{n} in {length} tokens" for n, length in SETTINGS)], recall)
        )
    training = condition_study.TRAINING
    tokens = training["steps"] * training["batch_size"] * training["sequence_length"]
    about = (
        f"Language: {tokens:,} tokens a run, losses in nats a token, the mean over held-out Wikipedia, books and "
        f"WikiText-2. Right answers: one number a seed at the best rate so far. {footnote(record)}"
    )
    tables.append(about)
    if missing:
        named = (f"{what} ({'all' if len(x) == len(CONDITIONS) else '; '.join(x)})" for what, x in missing.items())
        tables.append(f"Not run: {', '.join(named)}.")
    return "\n\n".join(tables)


def _recall_cell(runs: list[dict], name: str, task: str, setting: tuple[int, int]) -> str:
    """Right answers by seed, of the rate with the most."""
    tried = {rate: _recall_rows(runs, name, task, rate, setting) for rate in recall_study.LEARNING_RATES}
    tried = {rate: rows for rate, rows in tried.items() if rows}
    if not tried:
        return ""
    rate = max(tried, key=lambda rate: tried[rate][0]["accuracy"])
    return ", ".join(f"{row['accuracy']:.1%}" for row in tried[rate]) + f" ({rate:g})"


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()
    fresh = {"training": condition_study.TRAINING, "shape": condition_study.SHAPE}

    def make_run():
        return functools.partial(run_condition, data=arguments.data)

    def show(record: dict) -> str:
        return table({"core_study": record, "condition_study": studies.load(condition_study.FILE, {})})

    studies.show_or_run(arguments, FILE, fresh, plan, make_run, show)


if __name__ == "__main__":
    main()
