"""Which layer looks up? Why recall of 64 pairs in 512 tokens is lost with some seeds, and with more modes.

The models, sequences and optimiser are those of `recall_study`, "recall, short first": 125 steps of 8 pairs in 64
tokens, 125 of 16 in 128, 125 of 32 in 256, then 64 in 512, 2,000 in all. At each look the model answers once whole and
once without what the mixer of a layer adds, at every length so far and the next, by quarters of the age of the pair
that is asked for; and all of that where answers are hidden, so that no pair is read a second time. Runs stop after 375
steps, where it is plain which of them are lost; how they end `recall_study` has.

Then the question the other way round: a layer starts quiet, with a tenth of its C, the first one in runs that go on to
their end. And with gates and the delta rule, which takes from a value what the state answers already.

    python -m benchmarks.recall_layers             # all runs that results/recall_layers.json does not hold yet
    python -m benchmarks.recall_layers --table     # the table as markdown
"""

import itertools
from collections.abc import Iterator

import torch

from benchmarks import recall_study, studies
from benchmarks.harness import RESULTS, footnote, markdown
from benchmarks.recall_study import EVERY, SEEDS, SETTINGS, STATE_SIZES
from examples.recall import Pairs, answers

FILE = RESULTS / "recall_layers.json"
PLAIN, FIRST_QUIET, SECOND_QUIET = "as it is", "first layer quiet", "second layer quiet"
GATES, DELTA = "gates", "gates and delta rule"
FIELDS = {GATES: {"gates": "forget"}, DELTA: {"gates": "forget", "delta_rule": True}}
QUIET = {FIRST_QUIET: 0, SECOND_QUIET: 1}  # the layer that starts with FACTOR times its C
FACTOR = 0.1
BEGUN = EVERY * (len(SETTINGS) - 1)  # steps, of all lengths but the last
TRAINING = recall_study.TRAINING | {"learning_rate": 3e-3, "looked_at_batches": 2, "factor": FACTOR, "begun": BEGUN}
QUARTERS = 4
SEEN, HIDDEN = "as trained", "answers hidden"


def plan(runs: list[dict]) -> Iterator[dict]:
    """Each number of modes as it is; then of what is lost with some seeds, the other starts and layers."""
    short = [(PLAIN, size) for size in STATE_SIZES] + [(name, 64) for name in (SECOND_QUIET, *FIELDS)]
    for name, size in (*short, (FIRST_QUIET, 64), (FIRST_QUIET, 128)):
        for seed in SEEDS:
            yield {"condition": name, "state_size": size, "seed": seed}


def run_condition(condition: str, state_size: int, seed: int, steps: int | None = None) -> dict:
    """Train a model and look which of its layers answer."""
    model = recall_study.make_model("recall, short first", state_size, seed, **FIELDS.get(condition, {}))
    if condition in QUIET:
        start_quiet(model.model.layers[QUIET[condition]])
    pairs, length = SETTINGS[-1]
    batches = recall_study.make_batches(pairs, length, False, seed)
    batches = recall_study.with_short_first(batches, length, False, seed)
    asked = {setting: recall_study.make_batches(*setting, False, seed + 1000) for setting in SETTINGS}
    looked_at = {
        setting: list(itertools.islice(found, TRAINING["looked_at_batches"])) for setting, found in asked.items()
    }

    def look(model, step: int) -> dict:
        begun = [setting for setting in SETTINGS if EVERY * SETTINGS.index(setting) <= step]
        kinds = {SEEN: lambda batch: batch, HIDDEN: hide}
        return {
            str(setting[0]): {kind: by_layer(model, list(map(kinds[kind], looked_at[setting]))) for kind in kinds}
            for setting in begun
        }

    if condition != FIRST_QUIET:
        batches = itertools.islice(batches, BEGUN)
    held_out = recall_study.make_batches(pairs, length, False, seed + 1000)
    steps = steps or TRAINING["steps"][str(pairs)]
    return recall_study.train_and_ask(model, batches, held_out, steps, TRAINING["learning_rate"], look=look)


@torch.no_grad()
def start_quiet(layer) -> None:
    """Let what the mixer of a layer reads out of its state start at FACTOR of what it is."""
    layer.token_mixer.recurrence.C.mul_(FACTOR)


def hide(batch: Pairs) -> Pairs:
    """With gaps where answers stand, which are asked all the same."""
    return Pairs(torch.where(batch.asked, 0, batch.ids), batch.asked, batch.ids)


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


@torch.no_grad()
def by_age(model, batches: list[Pairs]) -> list[float]:
    """The share of right answers: of all, then of pairs that stood up to a quarter of the length ago, and so on."""
    model.eval()
    right, ages = [], []
    for batch in batches:
        found = answers(model, batch)
        right.append((found.logits.argmax(-1) == found.tokens).float())
        ages.append(ages_of(batch))
    model.train()
    right, ages = torch.cat(right), torch.cat(ages)
    quarter = (ages * QUARTERS) // batches[0].ids.shape[1]
    return [right.mean().item(), *(right[quarter == i].mean().item() for i in range(QUARTERS))]


def ages_of(batch: Pairs) -> torch.Tensor:
    """Tokens between a key that is asked and the same key in its pair, in the order of the answers."""
    rows, places = batch.asked.nonzero(as_tuple=True)
    keys = batch.ids[rows, places - 1]
    first = (batch.ids[rows] == keys[:, None]).float().argmax(1)
    return places - 1 - first


def table(record: dict) -> str:
    """One row a run: answers whole and without a layer, as lengths grow, and at the end."""
    ends = {
        (row["state_size"], row["seed"]): row["accuracy"]
        for row in studies.load(recall_study.FILE, {})["runs"]
        if (row["condition"], row["pairs"]) == ("recall, short first", SETTINGS[-1][0])
    }
    header = ["start", "modes M", "seed"]
    for index, (pairs, length) in enumerate(SETTINGS[:-1], 1):
        header.append(f"step {EVERY * index}, {pairs} pairs in {length} tokens")
    header.append(f"{HIDDEN}, {SETTINGS[-2][0]} pairs")
    rows = []
    order = [PLAIN, *QUIET, *FIELDS]
    for row in sorted(record["runs"], key=lambda row: (order.index(row["condition"]), row["state_size"], row["seed"])):
        cells = [row["condition"], str(row["state_size"]), str(row["seed"])]
        for index, (pairs, _) in enumerate(SETTINGS[:-1], 1):
            found = row["looks"][str(EVERY * index)][str(pairs)]
            cells.append(_shares(found[SEEN]))
        cells.append(_shares(found[HIDDEN]))
        own = {PLAIN: ends.get((row["state_size"], row["seed"])), FIRST_QUIET: row["accuracy"]}
        end = own.get(row["condition"])
        rows.append([*cells, "not run" if end is None else f"{end:.1%}"])
    training = record["training"]
    about = (
        "Right answers of the whole model, without the mixer of the first layer, and without that of the second, in "
        f"{training['looked_at_batches']} batches of {training['batch_size']} sequences; at the end those of "
        "recall_study for the start as it is. Learning rate "
        f"{training['learning_rate']:g}; quiet: {training['factor']:g} times C at the start. {footnote(record)}"
    )
    header.append("{} pairs in {} tokens at the end".format(*SETTINGS[-1]))
    return f"{markdown(header, rows)}\n\n{about}"


def _shares(found: dict[str, list[float]]) -> str:
    return ", ".join(f"{shares[0]:.0%}" for shares in found.values())


def main() -> None:
    arguments = studies.parser(__doc__).parse_args()
    fresh = {"training": TRAINING, "shape": recall_study.SHAPE}
    studies.show_or_run(arguments, FILE, fresh, plan, lambda: run_condition, table)


if __name__ == "__main__":
    main()
