"""Pairs among other tokens: does a state of fixed size still find them when much else has been read?

Eight keys, each with its value behind it, stand at places of their own in the first half of 256 tokens, and each is
asked once in the second; all others are drawn from tokens that are neither. So a state has to leave out what nobody
will ask for. Models, with as many parameters and fixed states of as many numbers, and their starts are those of the
recall tasks of `core_study`; a run ends once two looks in a row find nearly all answers right. Two learning rates with
the first seed, the other at the better one.

    python -m benchmarks.distant_study             # all runs that results/distant_study.json does not hold yet
    python -m benchmarks.distant_study --table     # the table as markdown
"""

from collections.abc import Iterator

import torch

from benchmarks import core_conditions, core_plan, core_runs, recall_study, studies
from benchmarks.harness import RESULTS, footnote, markdown
from examples.recall import Pairs, answers

FILE = RESULTS / "distant_study.json"
PAIRS, LENGTH = 8, 256
KEYS, VALUES = 64, 128  # where the tokens begin that are values, and those that are neither
TRAINING = {"steps": 1000, "batch_size": 16, "solved": 0.99}
LEARNING_RATES, SEEDS = (3e-3, 1e-3), (0, 1)
CONDITIONS = (
    "Interdomain",
    "Interdomain, gates",
    "Interdomain, warp",
    "Interdomain, gates and delta rule",
    core_conditions.SPREAD,
    "softmax, convolution",
)
AGES = (1, 64, 128, 192, 256)  # in tokens, to the next


def plan(runs: list[dict]) -> Iterator[dict]:
    return studies.rates_then_seeds(runs, [{"condition": name} for name in CONDITIONS], LEARNING_RATES, SEEDS)


def batches(seed: int, pairs: int = PAIRS, length: int = LENGTH) -> Iterator[Pairs]:
    """Keys from 1 on, values from KEYS, others from VALUES; each half of a row has the pairs at places of its own."""
    generator, rows, half = torch.Generator().manual_seed(seed), TRAINING["batch_size"], length // 2

    def drawn(count: int) -> torch.Tensor:
        """`pairs` of so many numbers from 0 on, in every row others."""
        return torch.rand(rows, count, generator=generator).argsort(dim=1)[:, :pairs]

    while True:
        ids = torch.randint(VALUES, recall_study.SHAPE["vocab_size"], (rows, length), generator=generator)
        keys, values = 1 + drawn(KEYS - 1), torch.randint(KEYS, VALUES, (rows, pairs), generator=generator)
        told, asked = 2 * drawn(half // 2), half + 2 * drawn(half // 2)
        for places in (told, asked):
            ids.scatter_(1, places, keys).scatter_(1, places + 1, values)
        yield Pairs(ids, torch.zeros_like(ids, dtype=torch.bool).scatter_(1, asked + 1, True))


def ages(batch: Pairs) -> torch.Tensor:
    """How many tokens before it is asked each pair was told, `[n]`, in the order of the answers."""
    row, place = batch.asked.nonzero(as_tuple=True)
    key = batch.ids[row, place - 1]
    return place - 1 - (batch.ids[row] == key[:, None]).int().argmax(dim=1)


@torch.no_grad()
def right_and_ages(model, held_out: list[Pairs]) -> tuple[torch.Tensor, torch.Tensor]:
    """1 for each right answer and 0 for others, `[n]`, and `ages`."""
    model.eval()
    found = [answers(model, batch) for batch in held_out]
    right = torch.cat([answer.logits.argmax(-1) == answer.tokens for answer in found]).double()
    return right, torch.cat([ages(batch) for batch in held_out])


def right_by_age(model, held_out: list[Pairs]) -> dict[str, float]:
    """The share of right answers by age."""
    right, age = right_and_ages(model, held_out)
    return {str(low): right[(age >= low) & (age < high)].mean().item() for low, high in zip(AGES, AGES[1:])}


def run_condition(condition: str, learning_rate: float, seed: int, steps: int | None = None) -> dict:
    """Train one condition and ask it about new sequences."""
    item = core_plan.recall_item(condition, learning_rate=learning_rate, seed=seed)
    (model,) = core_runs.make_fleet([item]).models
    steps = TRAINING["steps"] if steps is None else steps
    held_out = [batch for _, batch in zip(range(recall_study.TRAINING["held_out_batches"]), batches(seed + 1000))]
    found = recall_study.train_and_ask(model, batches(seed), iter(held_out), steps, learning_rate, TRAINING["solved"])
    sizes = {"parameters": model.num_parameters(), "state_bytes": 4 * sum(model.config.state_sizes(LENGTH).values())}
    return sizes | found | {"ages": right_by_age(model, held_out)}


def table(record: dict) -> str:
    """Right answers at the better rate, after how many steps, and by age in the mean of the seeds."""
    rows = []
    for name in CONDITIONS:
        best = studies.best_runs(record["runs"], {"condition": name}, SEEDS[0])
        if not best:
            continue
        right = ", ".join(f"{row['accuracy']:.1%}" for row in best)
        steps = ", ".join(list(row["curve"])[-1] for row in best)
        by_age = [sum(row["ages"][str(low)] for row in best) / len(best) for low in AGES[:-1]]
        cells = [f"{best[0]['state_bytes']:,}", right, f"{best[0]['learning_rate']:g}", steps]
        rows.append([name, *cells, *(f"{share:.0%}" for share in by_age)])
    header = ["condition", "bytes of state", "right answers", "rate", "steps"]
    header += [f"told {low} to {high - 1} tokens ago" for low, high in zip(AGES, AGES[1:])]
    training = record["training"]
    about = (
        f"{len(record['runs'])} runs, a number a seed, at the better of the rates "
        f"{' and '.join(f'{rate:g}' for rate in LEARNING_RATES)} as far as they were run; at most "
        f"{training['steps']:,} steps of {training['batch_size']} sequences, fewer where {training['solved']:.0%} were "
        "right twice in a row. Who guesses among the values not answered yet is right in "
        f"{recall_study.guessed(PAIRS):.0%}."
    )
    return f"{markdown(header, rows)}\n\n{about} {footnote(record)}"


def main() -> None:
    fresh = {"training": TRAINING, "shape": recall_study.SHAPE}
    studies.show_or_run(studies.parser(__doc__).parse_args(), FILE, fresh, plan, lambda: run_condition, table)


if __name__ == "__main__":
    main()
