"""Which runs `core_study` asks for, in which order.

Of language three learning rates with the first seed, more where the best lies at an end, and the other seed, but for
what another study has run. 12M takes half the rate that was best at 1.4M, as the two closest have it best at 3M on 2M
tokens. Of recall both seeds at every rate, for seeds differ more there, and longer settings of what has learned half of
the one before.
"""

import itertools
import statistics
from collections.abc import Iterator

from benchmarks import condition_study, recall_study, studies
from benchmarks.core_conditions import (
    CLOSEST,
    CONDITIONS,
    EVEN,
    EXPANDED,
    FEWER,
    GATES_MANY,
    KIMI,
    LANGUAGE,
    LARGE,
    LARGER,
    MORE,
    NARROW,
    OUTPUT_GATE,
    RECALL,
    REFERENCE,
    ROTARY,
    SETTINGS,
    SPREAD,
    TWICE,
)

# Which study has run conditions of ours, with the same configuration, texts and training, and what it calls them.
KNOWN = {
    LANGUAGE: ("condition_study", {"Interdomain": "interdomain-norope, recall", "S4D-only": "s4d, recall"}),
    LARGER: ("larger_study", {"S4D-only": "s4d"}),
}
FIRST = ("Interdomain", "Interdomain, gates", "Interdomain, gates and delta rule", *CLOSEST)
REST = ("Gated DeltaNet", KIMI, "Mamba-2", "S4D-only", "softmax, convolution")
MOST_ASKED = (*FIRST, GATES_MANY, OUTPUT_GATE)  # with more seeds at 1.4M, and in recall
FORMS = (*MOST_ASKED, TWICE)  # at 3M
BETTER_PEERS = (EVEN, EXPANDED, ROTARY)  # peers, at 1.4M and at 3M on 2M tokens
IN_RECALL = (*MOST_ASKED, *REST, EVEN)
MORE_SEEDS = (2, 3, 4, 5)  # of those at 1.4M, to tell what lies within a percent
# Conditions in language, by size.
ASKED = {
    LANGUAGE: tuple(CONDITIONS),
    FEWER: (*FORMS, *REST, *BETTER_PEERS),
    LARGER: (*FORMS, *REST),
    LARGE: (
        *CLOSEST,
        OUTPUT_GATE,
        TWICE,
        GATES_MANY,
        "softmax, convolution",
        "Interdomain, gates",
        REFERENCE,
        "Mamba-2",
        "S4D-only",
    ),
    MORE: (SPREAD, "softmax, convolution", "Interdomain, gates", GATES_MANY, REFERENCE, NARROW),
}


def language_item(
    condition: str, learning_rate: float = condition_study.LEARNING_RATES[0], seed: int = 0, task: str = LANGUAGE
) -> dict:
    """What tells a run of the language study from the others."""
    return {"task": task, "condition": condition, "learning_rate": learning_rate, "seed": seed}


def recall_item(
    condition: str,
    task: str = RECALL[0],
    setting: tuple[int, int] = SETTINGS[0],
    learning_rate: float = recall_study.LEARNING_RATES[0],
    seed: int = 0,
) -> dict:
    """What tells a run of a recall task from the others."""
    return language_item(condition, learning_rate, seed, task) | {"pairs": setting[0], "length": setting[1]}


def plan(runs: list[dict], others: dict[str, dict]) -> Iterator[dict]:
    """All runs but what the records of `others` hold, studies by name."""
    known = known_runs(others)
    return (item for item in _plan([*runs, *known]) if not studies.holds(known, item))


def _plan(runs: list[dict]) -> Iterator[dict]:
    """Language at 1.4M, at 3M on 2M tokens, the closest two first and BETTER_PEERS last, and our forms on 8M, recall,
    the others on 8M, 12M, and longer recall.
    """
    small = [row for row in runs if row["task"] == LANGUAGE]
    best = {name: condition_study.best_rate(small, name) for name in CONDITIONS}
    yield from language_plan(runs, LANGUAGE, ASKED[LANGUAGE])
    for names in (CLOSEST, FIRST[:3], REST, FORMS[len(FIRST) :], BETTER_PEERS):
        yield from language_plan(runs, FEWER, names)
    yield from language_plan(runs, LARGER, FORMS)
    for name in (*MOST_ASKED, EVEN):
        if best[name] is not None:
            yield from (language_item(name, best[name], seed) for seed in MORE_SEEDS)
    yield from recall_plan(runs, SETTINGS[:1])
    for name in REST:
        if best[name] is not None:
            yield from (language_item(name, best[name], seed, LARGER) for seed in condition_study.SEEDS)
    for task in (LARGE, MORE):
        yield from large_plan(best, task)
    yield from recall_plan(runs, SETTINGS[1:])
    yield from language_plan(runs, LARGER, REST)


def language_plan(runs: list[dict], task: str, names: tuple[str, ...]) -> Iterator[dict]:
    """All rates with the first seed, more where the best lies at an end, then the other seeds at the best."""
    found = [row for row in runs if row["task"] == task]
    for name, rate in itertools.product(names, condition_study.LEARNING_RATES):
        yield language_item(name, rate, task=task)
    for name in names:
        if (rate := condition_study.rate_beyond(condition_study.tried_rates(found, name))) is not None:
            yield language_item(name, rate, task=task)
    for name in names:
        if (rate := condition_study.best_rate(found, name)) is not None:
            yield from (language_item(name, rate, seed, task) for seed in condition_study.SEEDS)


def large_plan(best: dict[str, float | None], task: str) -> Iterator[dict]:
    """Each condition at half the rate that was best at 1.4M, then all with the other seed."""
    rates = {name: rate / 2 for name in ASKED[task] if (rate := best[name]) is not None}
    for seed in condition_study.SEEDS:
        yield from (language_item(name, rate, seed, task) for name, rate in rates.items())


def recall_plan(runs: list[dict], settings: tuple[tuple[int, int], ...]) -> Iterator[dict]:
    """All seeds, on which recall hangs, at all rates; longer settings, where asked, at the best rate of the one
    before."""
    for setting, task, name in itertools.product(settings, RECALL, IN_RECALL):
        if not is_asked(runs, name, task, setting):
            continue
        if setting == SETTINGS[0]:
            tried = recall_rates(runs, name, task, setting)
            beyond = recall_rate_beyond(runs, name, task)
            rates = tuple(dict.fromkeys((*recall_study.LEARNING_RATES, *tried, beyond)))
        else:
            rates = (best_recall_rate(runs, name, task, SETTINGS[SETTINGS.index(setting) - 1]),)
        for rate, seed in itertools.product(rates, condition_study.SEEDS):
            if rate is not None:
                yield recall_item(name, task, setting, rate, seed)


def is_asked(runs: list[dict], name: str, task: str, setting: tuple[int, int]) -> bool:
    """Longer settings are asked in recall, of what has learned half of the one before with some seed."""
    if setting == SETTINGS[0]:
        return True
    best = next(iter(recall_rates(runs, name, task, SETTINGS[SETTINGS.index(setting) - 1]).values()), [])
    return task == RECALL[0] and any(row["accuracy"] >= 0.5 for row in best)


def best_recall_rate(runs: list[dict], name: str, task: str, setting: tuple[int, int] = SETTINGS[0]) -> float | None:
    """That with the fewest errors, once the shortest length has worse ones on both sides of it, or has been learned."""
    tried = recall_rates(runs, name, task, setting)
    whole = set(recall_study.LEARNING_RATES) <= set(tried) and recall_rate_beyond(runs, name, task) is None
    return next(iter(tried), None) if whole or setting != SETTINGS[0] else None


def recall_rate_beyond(runs: list[dict], name: str, task: str) -> float | None:
    """The next rate at the shortest setting, where the best lies at an end and has not learned all."""
    tried = {rate: recall_errors(rows) for rate, rows in sorted(recall_rates(runs, name, task, SETTINGS[0]).items())}
    learned = any(errors <= 1 - recall_study.SOLVED for errors, _ in tried.values())
    return None if learned else recall_study.rate_beyond(tried)


def recall_rates(runs: list[dict], name: str, task: str, setting: tuple[int, int]) -> dict[float, list[dict]]:
    """The runs of all seeds by learning rate, the rate with the fewest errors first."""
    wanted = recall_item(name, task, setting)
    del wanted["seed"], wanted["learning_rate"]
    found = sorted((row for row in runs if wanted.items() <= row.items()), key=lambda row: row["seed"])
    rates = {row["learning_rate"]: [] for row in found}
    for row in found:
        rates[row["learning_rate"]].append(row)
    return dict(sorted(rates.items(), key=lambda pair: recall_errors(pair[1])))


def recall_errors(rows: list[dict]) -> tuple[float, float]:
    """The share of wrong answers, and nats, in the mean of the seeds."""
    return 1 - statistics.mean(row["accuracy"] for row in rows), statistics.mean(row["loss"] for row in rows)


def known_runs(others: dict[str, dict]) -> list[dict]:
    """What other studies, whose records these are, have run of the conditions here, as rows of ours."""
    return [
        row | {"task": task, "condition": name}
        for task, (study, names) in KNOWN.items()
        for name, there in names.items()
        for row in others[study]["runs"]
        if row["condition"] == there
    ]
