"""Does the order of the conditions change with more tokens? Interdomain, S4D-only and softmax, four times as long.

Everything is as in `condition_study`, each condition with the learning rate that was its best there; one seed.

    python -m benchmarks.longer_study --data ../shared/data     # all runs that the results do not hold yet
    python -m benchmarks.longer_study --table                   # the table as markdown
"""

import functools
import math
from collections.abc import Iterator

from benchmarks import condition_study, studies
from benchmarks.harness import RESULTS, footnote, markdown, read

FILE = RESULTS / "longer_study.json"
CONDITIONS = ("interdomain", "s4d", "softmax")
TRAINING = condition_study.TRAINING | {"steps": 2000}


def plan(runs: list[dict], shorter: list[dict]) -> Iterator[dict]:
    """The conditions at their best learning rates in the `shorter` study."""
    for name in CONDITIONS:
        rate = condition_study.best_rate(shorter, name)
        if rate is None:
            raise SystemExit(f"The best learning rate of {name} is not known: run benchmarks.condition_study first.")
        yield {"condition": name, "learning_rate": rate, "seed": 0}


def table(record: dict) -> str:
    shorter = read("condition_study")
    losses = {
        shorter["training"]["steps"]: _losses(shorter["runs"], record["runs"]),
        record["training"]["steps"]: _losses(record["runs"], record["runs"]),
    }
    per_step = record["training"]["batch_size"] * record["training"]["sequence_length"]
    header = ["tokens", *CONDITIONS, "Interdomain against S4D-only", "against softmax"]
    rows = [
        [
            f"{steps * per_step:,}",
            *(f"{math.exp(loss[name]):.1f}" for name in CONDITIONS),
            *(f"{math.exp(loss['interdomain'] - loss[name]) - 1:+.1%}" for name in CONDITIONS[1:]),
        ]
        for steps, loss in losses.items()
        if set(loss) == set(CONDITIONS)
    ]
    about = (
        "Perplexity, mean over the held-out texts of the table above, with the same seed and rates in both rows; then, "
        "of the longer runs, on long documents."
    )
    runs = {name: [row for row in record["runs"] if row["condition"] == name] for name in CONDITIONS}
    lengths = condition_study.length_table(runs)
    return f"{markdown(header, rows)}\n\n{lengths}\n\n{about} {footnote(record)}"


def _losses(runs: list[dict], like: list[dict]) -> dict[str, float]:
    """Nats a token by condition, of the runs with the rates and seeds of `like`."""
    keys = ("condition", "learning_rate", "seed")
    wanted = [[row[key] for key in keys] for row in like]
    return {row["condition"]: condition_study.score(row) for row in runs if [row[key] for key in keys] in wanted}


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()
    fresh = {"training": TRAINING, "shape": condition_study.SHAPE}
    planned = functools.partial(plan, shorter=read("condition_study")["runs"])

    def make_run():
        data = condition_study.prepare(arguments.data)
        return functools.partial(condition_study.run_condition, data=data, training=TRAINING)

    studies.show_or_run(arguments, FILE, fresh, planned, make_run, table)


if __name__ == "__main__":
    main()
