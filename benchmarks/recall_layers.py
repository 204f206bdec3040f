"""Which layer looks up? What tells seeds apart with which recall of 64 pairs in 512 tokens falls behind.

The models, sequences and optimiser are those of `recall_study`, "recall, short first": 125 steps of 8 pairs in 64
tokens, 125 of 16 in 128, 125 of 32 in 256, then 64 in 512, 2,000 in all. At each look the model answers once whole and
once without what the mixer of a layer adds, at every length so far and the next, by how long ago the pair was told; and
all of that where answers are hidden, so that no pair is read a second time. Runs stop after 375 steps; how they end
`recall_study` has.

Then the question the other way round: layers start quiet, with a tenth of their C, and the seeds that fell behind as
they are (LOST) go on to their end with a quiet first layer. Beside them models of one layer, models with gates and the
delta rule, which takes from a value what the state answers already, and training with hidden answers.

And what does a quiet first layer do in language? Models of `core_study` (1.4M) start with one, with its seeds and its
best rate.

    python -m benchmarks.recall_layers --data DIR  # all runs that results/recall_layers.json does not hold yet
    python -m benchmarks.recall_layers --table     # the table as markdown
"""

import functools
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import condition_study, core_runs, core_study, core_table, recall_study, studies
from benchmarks.core_conditions import LANGUAGE, MANY_HEADS
from benchmarks.core_plan import language_item
from benchmarks.distant_study import right_and_ages
from benchmarks.harness import RESULTS, footnote, markdown
from benchmarks.recall_study import SEEDS, SETTINGS, SHORT_STEPS, STATE_SIZES
from examples.recall import Pairs

FILE = RESULTS / "recall_layers.json"
PLAIN, ONE_LAYER = "as it is", "one layer"
FIRST_QUIET, SECOND_QUIET, BOTH_QUIET = "first layer quiet", "second layer quiet", "both layers quiet"
GATES, DELTA, HIDDEN_TRAINING = "gates", "gates and delta rule", "trained with hidden answers"
FIELDS = {
    ONE_LAYER: {"num_hidden_layers": 1},
    GATES: {"gates": "forget"},
    DELTA: {"gates": "forget", "delta_rule": True},
}
QUIET = {FIRST_QUIET: (0,), SECOND_QUIET: (1,), BOTH_QUIET: (0, 1)}  # the layers that start with FACTOR times their C
FACTOR = 0.1
ORDER = (PLAIN, *QUIET, GATES, DELTA, HIDDEN_TRAINING, ONE_LAYER)
LOST = {(64, 0), (64, 2), (128, 2)}  # of 64 and 128 modes, seeds that fall behind as they are
BEGUN = SHORT_STEPS * (len(SETTINGS) - 1)  # steps, of all lengths but the last
TRAINING = recall_study.TRAINING | {"learning_rate": 3e-3, "looked_at_batches": 2, "factor": FACTOR, "begun": BEGUN}
QUARTERS = 4
IN_LANGUAGE = ("Interdomain", "Interdomain, gates", MANY_HEADS)  # conditions of `core_study`
SEEN, HIDDEN = "as trained", "answers hidden"


def plan(runs: list[dict]) -> Iterator[dict]:
    """Each number of modes as it is; then, of those with which some seeds fall behind, the other starts and layers."""
    asked = [(PLAIN, size) for size in STATE_SIZES]
    asked += [(name, 64) for name in (FIRST_QUIET, SECOND_QUIET, GATES, DELTA)]
    asked += [(FIRST_QUIET, 128), (HIDDEN_TRAINING, 64), (BOTH_QUIET, 64), (ONE_LAYER, 64), (ONE_LAYER, 32)]
    for (name, size), seed in itertools.product(asked, SEEDS):
        yield {"condition": name, "state_size": size, "seed": seed}
    for seed, name in itertools.product(SEEDS, IN_LANGUAGE):
        yield {"condition": FIRST_QUIET, "language": name, "seed": seed}


def make_run(data: Path):
    def run(condition: str, seed: int, state_size: int | None = None, language: str | None = None) -> dict:
        if language is not None:
            return run_language(language, seed, core_runs.texts_of(LANGUAGE, data))
        return run_condition(condition, state_size, seed)

    return run


def run_language(name: str, seed: int, texts: dict, **options) -> dict:
    """Train and measure a model of `core_study` whose first layer starts quiet."""
    item = language_item(name, TRAINING["learning_rate"], seed) | {"start": FIRST_QUIET}
    fleet = core_runs.make_fleet([item])
    start_quiet(fleet.models[0].model.layers[0])
    return {"machine": core_runs.machine_of("cpu")} | core_runs.run_language(fleet, [item], texts, **options)[0]


def run_condition(condition: str, state_size: int, seed: int, steps: int | None = None) -> dict:
    """Train a model and look which of its layers answer."""
    model = recall_study.make_model("recall, short first", state_size, seed, **FIELDS.get(condition, {}))
    for index in QUIET.get(condition, ()):
        start_quiet(model.model.layers[index])
    pairs, length = SETTINGS[-1]
    hidden = condition == HIDDEN_TRAINING
    batches = recall_study.make_batches(pairs, length, False, seed, hidden)
    batches = recall_study.with_short_first(batches, length, False, seed, hidden)

    def held_out(setting: tuple[int, int], kind: str) -> Iterator[Pairs]:
        return recall_study.make_batches(*setting, False, seed + 1000, kind == HIDDEN)

    looked_at = {
        (setting, kind): list(itertools.islice(held_out(setting, kind), TRAINING["looked_at_batches"]))
        for setting in SETTINGS
        for kind in (SEEN, HIDDEN)
    }

    def look(model, step: int) -> dict:
        begun = [setting for setting in SETTINGS if SHORT_STEPS * SETTINGS.index(setting) <= step]
        return {
            str(setting[0]): {kind: by_layer(model, looked_at[setting, kind]) for kind in (SEEN, HIDDEN)}
            for setting in begun
        }

    if not goes_on(condition, state_size, seed):
        batches = itertools.islice(batches, BEGUN)
    steps = steps or TRAINING["steps"][str(pairs)]
    asked = held_out(SETTINGS[-1], HIDDEN if hidden else SEEN)
    return recall_study.train_and_ask(model, batches, asked, steps, TRAINING["learning_rate"], look=look)


def goes_on(condition: str, state_size: int, seed: int) -> bool:
    """Whether a run goes on to its end."""
    return condition == FIRST_QUIET and (state_size, seed) in LOST


@torch.no_grad()
def start_quiet(layer) -> None:
    """Let what the mixer of a layer reads out of its state start at FACTOR of what it is."""
    layer.token_mixer.recurrence.C.mul_(FACTOR)


def by_layer(model, batches: list[Pairs]) -> dict[str, list[float]]:
    """Right answers of the whole model, and without the mixer of each layer: of all, then by quarters of the age."""
    found = {"whole": by_age(model, batches)}
    for index, layer in enumerate(model.model.layers):
        handle = layer.token_mixer.register_forward_hook(lambda mixer, inputs, outputs: (0 * outputs[0], *outputs[1:]))
        try:
            found[f"without {index}"] = by_age(model, batches)
        finally:
            handle.remove()
    return found


def by_age(model, batches: list[Pairs]) -> list[float]:
    """The share of right answers: of all, then of pairs told up to a quarter of the length ago, and so on."""
    right, ages = right_and_ages(model, batches)
    model.train()
    quarter = (ages * QUARTERS) // batches[0].ids.shape[1]
    return [right.mean().item(), *(right[quarter == i].mean().item() for i in range(QUARTERS))]


def table(record: dict) -> str:
    """Answers of each run, and beside them what a quiet first layer does in language."""
    return "\n\n".join(filter(None, (recall_table(record), language_table(record))))


def language_table(record: dict) -> str:
    """By condition the losses by seed, as `core_study` has them and with a quiet first layer; empty without runs."""
    names = (core_study.FILE.stem, *core_study.OTHERS)
    rows = core_table.best_language({name: studies.load(RESULTS / f"{name}.json", {}) for name in names}, LANGUAGE)
    cells, machines = [], set()
    for name in IN_LANGUAGE:
        own = [row for row in record["runs"] if row.get("language") == name]
        quiet = {row["seed"]: condition_study.score(row) for row in own}
        plain = {row["seed"]: condition_study.score(row) for row in rows[name] if row["seed"] in quiet}
        machines |= {row["machine"] for row in own}
        if quiet:
            means = [statistics.mean(found.values()) for found in (plain, quiet)]
            losses = (", ".join(f"{found[seed]:.3f}" for seed in sorted(found)) for found in (plain, quiet))
            cells.append([name, *losses, f"{means[1] - means[0]:+.3f}"])
    if not cells:
        return ""
    header = ["language, 1.4M", "loss by seed as it is", FIRST_QUIET, "difference"]
    about = "In nats a token, as in [the comparison](core_study.md), which has those as they are, of other machines. "
    about += f"Quiet: {'; '.join(sorted(machines))}: `python -m benchmarks.{FILE.stem}`"
    return f"{markdown(header, cells)}\n\n{about}"


def recall_table(record: dict) -> str:
    """One row a run: answers whole and without a layer, as lengths grow, and at the end."""
    ends = {
        (row["state_size"], row["seed"]): row["accuracy"]
        for row in studies.load(recall_study.FILE, {})["runs"]
        if (row["condition"], row["pairs"]) == ("recall, short first", SETTINGS[-1][0])
    }
    header = ["start", "modes M", "seed"]
    for index, (pairs, length) in enumerate(SETTINGS[:-1], 1):
        header.append(f"step {SHORT_STEPS * index}, {pairs} pairs in {length} tokens")
    header.append(f"{HIDDEN}, {SETTINGS[-2][0]} pairs")
    rows = []
    runs = [row for row in record["runs"] if "language" not in row]
    for row in sorted(runs, key=lambda row: (ORDER.index(row["condition"]), row["state_size"], row["seed"])):
        cells = [row["condition"], str(row["state_size"]), str(row["seed"])]
        for index, (pairs, _) in enumerate(SETTINGS[:-1], 1):
            found = row["looks"][str(SHORT_STEPS * index)][str(pairs)]
            cells.append(_shares(found[SEEN]))
        cells.append(_shares(found[HIDDEN]))
        which = row["state_size"], row["seed"]
        own = {which: row["accuracy"]} if goes_on(row["condition"], *which) else {}
        end = (ends if row["condition"] == PLAIN else own).get(which)
        rows.append([*cells, "not run" if end is None else f"{end:.1%}"])
    training = record["training"]
    about = (
        "Right answers of the whole model, without the mixer of the first layer, and without that of the second, of "
        f"{training['looked_at_batches']} batches of {training['batch_size']} sequences; at the end those of "
        "recall_study for the start as it is. Learning rate "
        f"{training['learning_rate']:g}; quiet: {training['factor']:g} times C at the start. {footnote(record)}"
    )
    header.append("{} pairs in {} tokens at the end".format(*SETTINGS[-1]))
    return f"{markdown(header, rows)}\n\n{about}"


def _shares(found: dict[str, list[float]]) -> str:
    return ", ".join(f"{shares[0]:.0%}" for shares in found.values())


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()
    fresh = {"training": TRAINING, "shape": recall_study.SHAPE}
    studies.show_or_run(arguments, FILE, fresh, plan, functools.partial(make_run, arguments.data), table)


if __name__ == "__main__":
    main()
