"""The tables of `core_study`, and in sentences where Interdomain stands."""

import math
import statistics
from collections.abc import Iterable

from benchmarks import condition_study, larger_study
from benchmarks.core_conditions import (
    CONDITIONS,
    LANGUAGE,
    RECALL,
    REFERENCE,
    SETTINGS,
    SHARDS,
    SIZES,
    WORDS,
)
from benchmarks.core_plan import (
    ASKED,
    IN_RECALL,
    KNOWN,
    is_asked,
    known_runs,
    recall_rates,
)
from benchmarks.harness import footnote, markdown

TEXTS = {"wiki": "Wikipedia", "books": "books", "wikitext-2": "WikiText-2"}  # held out


def language_rows(records: dict[str, dict], task: str = LANGUAGE) -> dict[str, list[dict]]:
    """The runs of a size by condition, with what another study has run of them."""
    runs = [row for row in records["core_study"]["runs"] + known_runs(records) if row["task"] == task]
    return {name: [row for row in runs if row["condition"] == name] for name in CONDITIONS}


def best_language(records: dict[str, dict], task: str) -> dict[str, list[dict]]:
    """All seeds of each condition at its best rate so far, where there are any."""
    found = {name: condition_study.best_runs(rows, name) for name, rows in language_rows(records, task).items()}
    return {name: sorted(rows, key=lambda row: row["seed"]) for name, rows in found.items() if rows}


def table(records: dict[str, dict]) -> str:
    """Language by size, where in a text it differs, right answers by task and setting, and what has not been run."""
    record = records["core_study"]
    missing: dict[str, list[str]] = {}
    tables = [language_table(records, task, missing) for task in WORDS]
    tables += [text_table(records, task) for task in list(SIZES)[1:]] + [age_table(records, task) for task in SHARDS]
    tables.append(recall_table(record["runs"], missing))
    machines = sorted({row["machine"] for row in record["runs"]})
    taken = (f"{', '.join(names)} at {WORDS[task]} ({study})" for task, (study, names) in KNOWN.items())
    tokens = {task: condition_study.tokens_of(size.training) for task, size in SIZES.items()}
    tables.append(
        f"Language: {', '.join(f'{n:,}' for n in tokens.values())} tokens a run, those of 12M at half the "
        "best rate of 1.4M; losses in nats a token, the mean over held-out Wikipedia, books and WikiText-2. Seen in "
        "the context: a token that stood after the same token before, in the second half of a window. Right answers: "
        "one number a seed at the rate with the most; -: not asked, for the setting before was not learned or not run. "
        f"Runs on {'; '.join(machines)}. From other studies: {'; '.join(taken)}. {footnote(record)}"
    )
    if missing:
        named = (f"{what} ({'all' if len(x) == len(IN_RECALL) else '; '.join(x)})" for what, x in missing.items())
        tables.append(f"Not run: {', '.join(named)}.")
    return "\n\n".join(filter(None, [*tables, *sentences(records)]))


def language_table(records: dict[str, dict], task: str, missing: dict[str, list[str]]) -> str:
    """Loss by rate and seed; `missing` is told what has not been run."""
    rows = []
    for name, found in language_rows(records, task).items():
        best = best_language(records, task).get(name, [])
        if not best:
            if name in ASKED[task]:
                missing.setdefault(task, []).append(name)
            continue
        losses = [condition_study.score(row) for row in best]
        tried = condition_study.tried_rates(found, name)
        known = "" if task in SHARDS or condition_study.best_rate(found, name) else ", not bracketed"
        if known or len(losses) < len(condition_study.SEEDS):
            missing.setdefault(f"{task}, rates" if known else f"{task}, a second seed", []).append(name)
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
    header = [
        task,
        "parameters",
        "state, numbers",
        "loss by rate, first seed",
        "best rate",
        "loss by seed",
        "perplexity",
    ]
    return markdown(header, rows) if rows else ""


def text_table(records: dict[str, dict], task: str) -> str:
    """Nats in training and by text, by place, on what the context has shown and on the rest, and perplexity beyond the
    training length.
    """
    length = SIZES[task].training["sequence_length"]
    starts = [low for low in larger_study.PLACES if low < length]
    rows = []
    for name, found in best_language(records, task).items():
        nats = [("validation", text) for text in TEXTS]
        nats += [("places", str(low)) for low in starts] + [("repeats", kind) for kind in ("repeated", "other")]
        cells = [f"{statistics.mean(row['train_loss'] for row in found):.2f}"]
        cells += [f"{statistics.mean(row[what][which] for row in found):.2f}" for what, which in nats]
        far = [statistics.mean(row["lengths"][str(factor)] for row in found) for factor in condition_study.LENGTHS]
        rows.append([name, *cells, *(f"{math.exp(x):.1f}" for x in far)])
    header = [f"{task}: nats", "at the end of training", *TEXTS.values()]
    header += [f"from token {starts[0]}", *map(str, starts[1:]), "seen in the context", "others"]
    factors = [f"{factor:g}x" for factor in condition_study.LENGTHS]
    header += [f"perplexity of long documents at {factors[0]}", *(f"at {factor}" for factor in factors[1:])]
    return markdown(header, rows) if rows else ""


def age_table(records: dict[str, dict], task: str) -> str:
    """Nats on what the context has shown, by how long ago, of the seeds that have been asked for it."""
    ages = [str(low) for low in larger_study.AGES if low < SIZES[task].training["sequence_length"]]
    rows = []
    for name, found in best_language(records, task).items():
        if asked := [row for row in found if "ages" in row]:
            seeds = ", ".join(str(row["seed"]) for row in asked)
            rows.append([name, seeds, *(f"{statistics.mean(row['ages'][low] for row in asked):.3f}" for low in ages)])
    header = [f"{task}: nats on what the context has shown, by tokens since", "seeds", *(f"from {low}" for low in ages)]
    return markdown(header, rows) if rows else ""


def recall_table(runs: list[dict], missing: dict[str, list[str]]) -> str:
    """Right answers by seed at the best rate of each task and setting; `missing` is told what has not been run."""
    rows = []
    asked = [(RECALL[0], setting) for setting in SETTINGS] + [(task, SETTINGS[0]) for task in RECALL[1:]]
    for name in IN_RECALL:
        found = [recall_rates(runs, name, *one) for one in asked]
        cells = []
        for one, rates in zip(asked, found):
            if not rates and one[1] == SETTINGS[0]:
                missing.setdefault(one[0], []).append(name)
            rate, best = next(iter(rates.items()), (None, []))
            if len(best) == 1:
                missing.setdefault(f"{one[0]}, {one[1][0]} in {one[1][1]}, a second seed", []).append(name)
            right = ", ".join(f"{row['accuracy']:.1%}" for row in best)
            cells.append(f"{right} ({rate:g})" if best else "not run" if is_asked(runs, name, *one) else "-")
        if any(found):
            size = next(iter(next(filter(None, found)).values()))[0]["state_bytes"]
            rows.append([name, f"{size:,}", *cells])
    header = [f"{task}: {n} in {length} tokens" for task, (n, length) in asked]
    return markdown(["right answers", "bytes of state", *header], rows) if rows else ""


def losses(records: dict[str, dict], task: str) -> dict[str, dict[int, float]]:
    """By seed, of each condition at its best rate, that with the lowest mean first."""
    rows = best_language(records, task)
    loss = {name: {row["seed"]: condition_study.score(row) for row in found} for name, found in rows.items()}
    return dict(sorted(loss.items(), key=lambda pair: statistics.mean(pair[1].values())))


def best_form(loss: dict[str, dict[int, float]]) -> str | None:
    """Of Interdomain."""
    return next((name for name in loss if name.startswith("Interdomain")), None)


def behind(loss: dict[str, dict[int, float]], name: str, others: Iterable[str]) -> dict[str, float]:
    """By which share the perplexity of a condition is above that of others, over the seeds that both have."""
    own = loss[name]
    nats = {other: [own[seed] - loss[other][seed] for seed in own.keys() & loss[other].keys()] for other in others}
    return {other: math.expm1(statistics.mean(found)) for other, found in nats.items() if found}


def sentences(records: dict[str, dict]) -> list[str]:
    """Where the best form of Interdomain stands beside all others, as far as they have been run."""
    found = []
    for task, size in WORDS.items():
        loss = losses(records, task)
        if (best := best_form(loss)) is None:
            continue
        lags = behind(loss, best, [name for name in loss if not name.startswith("Interdomain")])
        if lags:
            beside = ", ".join(f"{_percent(lag)} that of {name}" for name, lag in lags.items())
            found.append(f"At {size} the best form is {best}: its perplexity is {beside}.")
    return found


def right_answers(runs: list[dict], task: str, setting: tuple[int, int]) -> dict[str, float]:
    """The mean over the seeds of each condition at its best rate, the most first."""
    rates = {name: recall_rates(runs, name, task, setting) for name in CONDITIONS}
    best = {name: next(iter(found.values())) for name, found in rates.items() if found}
    share = {name: statistics.mean(row["accuracy"] for row in rows) for name, rows in best.items()}
    return dict(sorted(share.items(), key=lambda pair: -pair[1]))


def short_sentence(records: dict[str, dict]) -> str:
    """Interdomain beside the closest start of Gated DeltaNet, by size, and in the longest recall; for the README."""
    found, plain = [], []
    for task, size in WORDS.items():
        loss = losses(records, task)
        peers = [name for name in loss if name.startswith("Gated DeltaNet")]
        if (best := best_form(loss)) and (lags := behind(loss, best, peers)):
            lag = max(lags.values())
            found.append(f"{size} {lag:+.1%}" + " (behind)" * (lag > 0))
        if REFERENCE in loss and (lags := behind(loss, REFERENCE, peers)):
            plain.append(max(lags.values()))
    ours = f"Interdomain's best form of each size {', '.join(found)}"
    without = f"; without gates {min(plain):+.1%} to {max(plain):+.1%}" if plain else ""
    return (
        f"Perplexity against Gated DeltaNet's, [as much state](benchmarks/results/core_study.md): {ours}{without}"
        f"{_longest_recall(records['core_study']['runs'])}."
    )


def _longest_recall(runs: list[dict]) -> str:
    """The best form of Interdomain beside the best Gated DeltaNet by seed, nothing where one was not asked."""
    pairs, length = SETTINGS[-1]
    right = right_answers(runs, RECALL[0], SETTINGS[-1])
    ours, theirs = best_form(right), next((name for name in right if name.startswith("Gated DeltaNet")), None)
    if ours is None or theirs is None:
        return ""

    def by_seed(name: str) -> str:
        rows = next(iter(recall_rates(runs, name, RECALL[0], SETTINGS[-1]).values()))
        return " and ".join(f"{row['accuracy']:.0%}" for row in rows)

    share = f"{by_seed(ours)}, Gated DeltaNet {by_seed(theirs)}"
    return f"; of {pairs} pairs in {length} tokens its best form recalls, by seed, {share}"


def _percent(share: float) -> str:
    return f"{abs(share):.1%} {'below' if share < 0 else 'above'}"
