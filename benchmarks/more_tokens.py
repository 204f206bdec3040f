"""Do more tokens turn the order? The models of `core_study` at 1.4M, on eight times as many tokens.

Its configurations, optimiser and windows, the texts of `larger_study`, and half the rate that was best on fewer tokens,
as `core_study` takes it at 12M, where Interdomain is ahead of Gated DeltaNet after 20M tokens and behind it after 60M.

    python -m benchmarks.more_tokens --data ../shared/data  # all runs that results/more_tokens.json does not hold yet
    python -m benchmarks.more_tokens --table                # the table as markdown
"""

import functools
import math
import statistics
from collections.abc import Iterator

from benchmarks import condition_study, core_runs, core_study, core_table, studies
from benchmarks.core_conditions import GATES_MANY, LANGUAGE, LARGER, MANY_HEADS, REFERENCE, SPREAD
from benchmarks.core_plan import language_item
from benchmarks.harness import RESULTS, footnote, markdown, read

FILE = RESULTS / "more_tokens.json"
TIMES = 8
TRAINING = condition_study.TRAINING | {"steps": TIMES * condition_study.TRAINING["steps"], "learning_rate": 1.5e-3}
ASKED = (SPREAD, MANY_HEADS, "Interdomain, gates", "softmax, convolution", REFERENCE, GATES_MANY)
TWICE_ASKED = ASKED[:3]
AGES = {"1": "shown 1 to 15 tokens ago", "16": "16 to 31", "64": "64 to 127"}


def plan(runs: list[dict]) -> Iterator[dict]:
    """All conditions with the first seed, then the closest with the other."""
    for seed, names in zip(condition_study.SEEDS, (ASKED, TWICE_ASKED)):
        yield from ({"condition": name, "seed": seed} for name in names)


def run_condition(condition: str, seed: int, texts: dict, training: dict = TRAINING) -> dict:
    """Train and measure a model of `core_study`."""
    job = [language_item(condition, training["learning_rate"], seed)]
    return core_runs.run_job(job, texts, training=training)[0]


def same_seeds(few: dict, more: dict) -> dict:
    """Of the losses after few tokens those of the seeds that have seen more: seeds differ by more than conditions."""
    return {name: {seed: few[name][seed] for seed in losses} for name, losses in more.items()}


def table(record: dict) -> str:
    """Losses after the few tokens of `core_study` and after more, and where in a text they lie."""
    others = {name: read(name) for name in core_study.SOURCES}
    found = {name: [row for row in record["runs"] if row["condition"] == name] for name in ASKED}
    more = {name: {row["seed"]: condition_study.score(row) for row in rows} for name, rows in found.items() if rows}
    few = same_seeds(core_table.losses(others, LANGUAGE), more)
    nats = [("validation", text) for text in core_table.TEXTS]
    nats += [("repeats", kind) for kind in ("repeated", "other")] + [("ages", low) for low in AGES]
    rows = []
    for name in sorted(more, key=lambda name: statistics.mean(more[name].values())):
        lags = [core_table.behind(losses, name, [SPREAD])[SPREAD] for losses in (few, more)]
        cells = [f"{statistics.mean(row[what][which] for row in found[name]):.3f}" for what, which in nats]
        by_seed = ", ".join(f"{more[name][seed]:.3f}" for seed in sorted(more[name]))
        perplexity = math.exp(statistics.mean(more[name].values()))
        rows.append([name, by_seed, f"{perplexity:.1f}", *(f"{lag:+.1%}" for lag in lags), *cells])
    tokens = [condition_study.tokens_of(training) for training in (condition_study.TRAINING, TRAINING)]
    header = ["", "loss by seed", "perplexity", *(f"beside Gated DeltaNet after {n:,} tokens" for n in tokens)]
    header += [*core_table.TEXTS.values(), "seen in the context", "others", *AGES.values()]
    about = (
        f"1.4M parameters, {tokens[1]:,} tokens a run, rate {TRAINING['learning_rate']:g}; losses in nats a token, the "
        "mean over held-out Wikipedia, books and WikiText-2; Gated DeltaNet with the steps of Mamba-2, perplexity "
        "beside it, after few tokens and after more, by the same seeds, those that both have."
    )
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()

    def make_run():
        return functools.partial(run_condition, texts=core_runs.texts_of(LARGER, arguments.data))

    studies.show_or_run(arguments, FILE, {"training": TRAINING}, plan, make_run, table)


if __name__ == "__main__":
    main()
