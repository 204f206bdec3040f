"""Six figures for the README, each from the result file of a table in benchmarks/results/, and where it stands."""

import functools
import math
import statistics

from benchmarks import condition_study, core_study, core_table, model_cpu, recall_study
from benchmarks.harness import footnote, markdown

# Attention whose queries, keys and values pass through convolutions, as those of the others do.
FAIR = "softmax, convolution"
SOURCES = ("decode_cpu", "operator_cpu", "model_cpu", "recall_study", *core_study.SOURCES)


def table(records: dict[str, dict]) -> str:
    """The figures, each linked to its page, and under them which were measured where and with which command."""
    sources = [
        ("decode_cpu", "speed.md#decoding", decoding),
        ("operator_cpu", "speed.md#one-layer", one_layer),
        ("model_cpu", "speed.md#whole-models", whole_model),
        ("larger_study", "larger_study.md", quality),
        ("larger_study", "larger_study.md", length),
        ("recall_study", "recall_study.md", functools.partial(recall, others=records["core_study"]["runs"])),
    ]
    rows, measured = [], {}
    for number, (source, page, cells) in enumerate(sources, start=1):
        rows.append([f"[{number}](benchmarks/results/{page})", *cells(records[source])])
        measured.setdefault(footnote(records[source]), []).append(f"{number}")
    notes = [f"{', '.join(numbers)}: {note}" for note, numbers in measured.items()]
    figures = markdown(["", "figure", "Interdomain", "beside it"], rows)
    return "\n\n".join([figures, core_table.short_sentence(records), *notes])


def decoding(record: dict) -> list[str]:
    """Time and memory of a token early and late in a text."""
    early, late = record["positions"]
    return [
        f"a token of the 125M model at position {early['position']:,}, then at {late['position']:,}: time and cache",
        f"{_ms(early)} and {_mb(early['bytes'])}, then {_ms(late)} and {_mb(late['bytes'])}",
        f"keys and values (computed): {_mb(early['softmax_bytes'])}, then {_mb(late['softmax_bytes'])}",
    ]


def one_layer(record: dict) -> list[str]:
    """The operator's forward at the shortest and the longest text that softmax was timed on."""
    short, *_, long = (row for row in record["forward"] if "softmax" in row)
    return [
        f"attention of one layer over {short['length']:,} tokens, then over {long['length']:,}",
        f"{_ms(short['interdomain'])}, then {_ms(long['interdomain'])}",
        f"softmax: {_ms(short['softmax'])}, then {_ms(long['softmax'])}",
    ]


def whole_model(record: dict) -> list[str]:
    """Decoding beside Llama at the first and the last position."""
    first, *_, last = record["decode"]
    speeds = {
        name: f"{first[name]['tokens_per_second']:.1f}, then {last[name]['tokens_per_second']:.1f}"
        for name in ("interdomain", "llama")
    }
    return [
        f"tokens a second of a 125M model after {first['position']:,} tokens, then after {last['position']:,}",
        speeds["interdomain"],
        f"Llama: {speeds['llama']} (static cache: {last[model_cpu.STATIC]['tokens_per_second']:.1f})",
    ]


def quality(record: dict) -> list[str]:
    """Perplexity of small models, trained alike."""
    training, runs = record["training"], record["runs"]
    tokens = condition_study.tokens_of(training)

    def perplexity(rows: list[dict]) -> str:
        return f"{math.exp(statistics.mean(map(condition_study.score, rows))):.1f}" if rows else "not run"

    found = {name: perplexity(rows) for name, rows in _by(runs).items()}
    size = max(row["parameters"] for row in runs) / 1e6
    return [
        f"perplexity of a model of {size:.1f}M parameters after {tokens:,} tokens",
        found["interdomain"],
        f"S4D-only: {found['s4d']}; softmax, no convolution: {found['softmax']}",
    ]


def recall(record: dict, others: list[dict]) -> list[str]:
    """Associative recall with the default start and without it, the median seed at the rate that most runs have.

    `others` are the runs of `core_study`, the mean of whose seeds says what softmax does with a convolution.
    """

    def median(name: str) -> str:
        rows = recall_study.best_runs(record["runs"], name, recall_study.SETTINGS[0])
        return f"{statistics.median(row['accuracy'] for row in rows):.0%}" if rows else "not run"

    pairs, length = recall_study.SETTINGS[0]
    steps = record["training"]["steps"][str(pairs)]
    guessed = f"guessed: {recall_study.guessed(pairs):.0%}"
    answers = core_table.right_answers(others, "recall", recall_study.SETTINGS[0])
    fair = f", [with one](benchmarks/results/core_study.md) {answers[FAIR]:.0%}" if FAIR in answers else ""
    return [
        f"values recalled right of {pairs} pairs in {length} tokens after {steps:,} steps, median seed ({guessed})",
        median("recall"),
        f"a random start: {median('Interdomain')}; S4D-only: {median('S4D-only')}; softmax, no convolution: "
        f"{median('softmax')}{fair}",
    ]


def length(record: dict) -> list[str]:
    """What text beyond the training length does to the same models."""
    factor = max(condition_study.LENGTHS)

    def change(rows: list[dict]) -> str:
        if not rows:
            return "not run"
        near, far = (statistics.mean(row["lengths"][str(x)] for row in rows) for x in (1.0, factor))
        return f"{math.exp(far - near) - 1:+.1%}"

    found = {name: change(rows) for name, rows in _by(record["runs"]).items()}
    return [
        f"their perplexity on long documents at {factor:g} times the training length against that length",
        found["interdomain"],
        f"S4D-only: {found['s4d']}; softmax: {found['softmax']}",
    ]


def _by(runs: list[dict]) -> dict[str, list[dict]]:
    return {name: [row for row in runs if row["condition"] == name] for name in ("interdomain", "s4d", "softmax")}


def _ms(times: dict) -> str:
    return f"{times['median'] * 1e3:,.1f} ms"


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
