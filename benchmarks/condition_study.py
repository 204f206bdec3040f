"""The paper's comparison at a size that fits a laptop: every condition, three or more rates, several seeds, real text.

All conditions see the same tokens in the same order with the same optimiser; a seed changes the weights and the
batches. Three learning rates are run with the first seed, and more of them where the best one lies at an end, until
it is between two worse ones; each condition's best is run with the other seeds. Text and
tokenizer come from a folder of parquet shards (columns "text"): corpus/{wiki,books}/{train-000,validation}.parquet,
wikitext-2/wiki.test.raw.xz and longdocs/test.parquet.

    python -m benchmarks.condition_study --data ../shared/data     # all runs that the results do not hold yet
    python -m benchmarks.condition_study --speed                   # training speed of all conditions, in turns
    python -m benchmarks.condition_study --table                   # the tables as markdown
    python -m benchmarks.condition_study --plot                    # results/condition_study.png
"""

import functools
import itertools
import lzma
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import readme, studies
from benchmarks.harness import RESULTS, footnote, markdown
from benchmarks.recall_study import CONDITIONS as RECALL
from examples.text_data import (
    encode,
    gather_documents,
    mean_nll,
    num_bytes,
    random_batches,
    train_tokenizer,
)
from examples.training import train
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "condition_study.json"
CACHE = Path("runs/condition_study.pt")
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHAPE = {"vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "state_size": 32}
TRAINING = {"steps": 500, "batch_size": 8, "sequence_length": 256}
LEARNING_RATES, SEEDS = (3e-3, 1.5e-3, 6e-3), (0, 1)
SECOND = ("interdomain", "s4d", "s4d-rope", "linear-readout")  # of which the start is run with a second seed first
LENGTHS = (1.0, 2.0, 3.5)  # of the training length
WINDOWS = 32  # of the longest length, on long documents

CONDITIONS = {
    "interdomain": {"token_mixers": "interdomain", "rope_parameters": ROPE, "rope_placement": "after"},
    "s4d": {"token_mixers": "s4d"},
    "softmax": {"token_mixers": "softmax", "rope_parameters": ROPE},
    "interdomain-norope": {"token_mixers": "interdomain"},
    "single-input": {
        "token_mixers": "interdomain",
        "state_input": "generic",
        "rope_parameters": ROPE,
        "rope_placement": "after",
    },
    "linear-readout": {
        "token_mixers": "s4d",
        "state_input": "key_value",
        "rope_parameters": ROPE,
        "rope_placement": "after",
    },
    "s4d-rope": {"token_mixers": "s4d", "rope_parameters": ROPE, "rope_placement": "before"},
}
RECURRENT = {name: fields for name, fields in CONDITIONS.items() if fields["token_mixers"] != "softmax"}
# Every recurrent condition with a random start, then with the start that remembers, and two with what of it is not
# induction.
CONDITIONS |= {name: fields | {"start": "random"} for name, fields in RECURRENT.items()}
CONDITIONS |= {f"{name}, recall": fields | {"start": "recall"} for name, fields in RECURRENT.items()}
CONDITIONS |= {
    f"{name}, posterior": CONDITIONS[name] | RECALL["posterior, uniform, even, output 0.05"]
    for name in ("interdomain", "s4d")
}


def tokens_of(training: dict) -> int:
    """That a run learns from."""
    return training["steps"] * training["batch_size"] * training["sequence_length"]


def corpora_of(data: Path) -> list[Path]:
    return [data / "corpus" / name for name in ("wiki", "books")]


def training_documents(data: Path, shards: int = 1) -> list[str]:
    """16 MB of text a shard, half Wikipedia and half books."""
    files = [str(folder / f"train-{shard:03}.parquet") for folder in corpora_of(data) for shard in range(shards)]
    return gather_documents(files, max_bytes=shards * 16_000_000)


def prepare(data: Path) -> dict:
    """Tokens of the training and evaluation texts, and the bytes of the latter; kept in `runs/`."""
    if CACHE.exists():
        return torch.load(CACHE)
    if not data.is_dir():
        raise SystemExit(
            f"{data} is not a folder; name the one that holds corpus/, wikitext-2/ and longdocs/ (--data)."
        )
    documents = training_documents(data)
    tokenizer = train_tokenizer(documents, SHAPE["vocab_size"])
    texts = {
        folder.name: gather_documents([str(folder / "validation.parquet")], max_bytes=80_000)
        for folder in corpora_of(data)
    }
    with lzma.open(data / "wikitext-2" / "wiki.test.raw.xz", "rt", encoding="utf-8") as file:
        texts["wikitext-2"] = [file.read(80_000)]
    long = gather_documents([str(data / "longdocs" / "test.parquet")], max_bytes=2_000_000)
    prepared = {
        "train": encode(tokenizer, documents),
        "validation": {name: encode(tokenizer, text) for name, text in texts.items()},
        "bytes": {name: sum(map(num_bytes, text)) for name, text in texts.items()},
        "long": encode(tokenizer, long),
    }
    CACHE.parent.mkdir(exist_ok=True)
    torch.save(prepared, CACHE)
    return prepared


def run_condition(condition: str, learning_rate: float, seed: int, data: dict, training: dict = TRAINING) -> dict:
    """Train one condition and measure it."""
    config = InterdomainConfig(**SHAPE, **CONDITIONS[condition])
    return train_and_measure(config, learning_rate, seed, data, training)


def train_and_measure(
    config: InterdomainConfig, learning_rate: float, seed: int, data: dict, training: dict = TRAINING
) -> dict:
    """Nats a token on three texts, and at longer lengths than it was trained on.

    `training["autocast"]`, if there is one, names the dtype that training multiplies in.
    """
    torch.manual_seed(seed)
    model = InterdomainForCausalLM(config)
    batches = random_batches(data["train"], training["batch_size"], training["sequence_length"], seed)
    autocast = getattr(torch, training["autocast"]) if "autocast" in training else None
    options = {"steps": training["steps"], "learning_rate": learning_rate, "autocast_dtype": autocast}
    try:
        steps = list(train(model, batches, **options))
    except FloatingPointError as error:
        return {"parameters": model.num_parameters(), "failed": str(error)}
    row = {"parameters": model.num_parameters(), "train_loss": statistics.mean(step.loss for step in steps[-50:])}
    return row | measure(model, data, training["sequence_length"])


def measure(model: InterdomainForCausalLM, data: dict, length: int, at_once: int = 2048) -> dict:
    """Numbers of the state, nats a token and bits a byte on the held-out texts, nats at longer lengths.

    `at_once` tokens are read in a forward, or a window where that is longer.
    """

    def loss(tokens: torch.Tensor, length: int) -> float:
        return mean_nll(model, tokens, length, max(1, at_once // length))

    row: dict = {"state": sum(model.config.state_sizes(length).values())}
    row["validation"] = {key: loss(tokens, length) for key, tokens in data["validation"].items()}
    row["bits_per_byte"] = {
        key: row["validation"][key] * (len(tokens) - 1) / math.log(2) / data["bytes"][key]
        for key, tokens in data["validation"].items()
    }
    longest = int(LENGTHS[-1] * length)
    same = data["long"][: WINDOWS * longest + 1]
    row["lengths"] = {str(factor): loss(same, int(factor * length)) for factor in LENGTHS}
    return row


def endless_runs(training: dict = TRAINING) -> dict[str, Iterator]:
    """Training of every condition on one batch, to be timed."""
    torch.manual_seed(0)
    batch = torch.randint(SHAPE["vocab_size"], (training["batch_size"], training["sequence_length"] + 1))
    return {
        name: train(InterdomainForCausalLM(InterdomainConfig(**SHAPE, **fields)), itertools.repeat(batch), seconds=1e9)
        for name, fields in CONDITIONS.items()
    }


def plan(runs: list[dict]) -> Iterator[dict]:
    """The starts at one rate; all rates with the first seed; then, condition by condition, the best with the others."""
    for seed, names in zip(SEEDS, (RECURRENT, SECOND)):
        for name in names:
            yield {"condition": f"{name}, recall", "learning_rate": LEARNING_RATES[0], "seed": seed}
    for rate in LEARNING_RATES[1:]:  # what larger_study waits for
        for name in SECOND[:2]:
            yield {"condition": f"{name}, recall", "learning_rate": rate, "seed": SEEDS[0]}
    for rate in LEARNING_RATES:
        for name in CONDITIONS:
            yield {"condition": name, "learning_rate": rate, "seed": SEEDS[0]}
    for name in CONDITIONS:
        if (rate := rate_beyond(tried_rates(runs, name))) is not None:
            yield {"condition": name, "learning_rate": rate, "seed": SEEDS[0]}
    for seed in SEEDS[1:]:
        for name in CONDITIONS:
            if (rate := best_rate(runs, name)) is not None:
                yield {"condition": name, "learning_rate": rate, "seed": seed}


def tried_rates(runs: list[dict], name: str) -> dict[float, float]:
    """The validation loss by learning rate of a condition with the first seed, from the smallest rate on."""
    return dict(
        sorted(
            (row["learning_rate"], score(row)) for row in runs if (row["condition"], row["seed"]) == (name, SEEDS[0])
        )
    )


def rate_beyond(tried: dict[float, float]) -> float | None:
    """The next learning rate to try where the best one of a whole grid lies at its end."""
    if not set(LEARNING_RATES) <= set(tried):
        return None
    best = min(tried, key=lambda rate: tried[rate])
    return {min(tried): best / 2, max(tried): best * 2}.get(best)


def best_rate(runs: list[dict], name: str) -> float | None:
    """The learning rate of the lowest validation loss with the first seed, once worse ones lie on both sides of it."""
    tried = tried_rates(runs, name)
    if not set(LEARNING_RATES) <= set(tried) or rate_beyond(tried) is not None:
        return None
    return min(tried, key=lambda rate: tried[rate])


def score(row: dict) -> float:
    """Mean nats a token over the validation texts; infinite for a run that diverged."""
    return statistics.mean(row["validation"].values()) if "validation" in row else math.inf


def table(record: dict) -> str:
    """Two tables: quality by condition, and what happens beyond the training length."""
    quality = []
    for name in CONDITIONS:
        best = best_runs(record["runs"], name)
        if not best:
            continue
        losses = [score(row) for row in best]
        first = best[0]
        tried = tried_rates(record["runs"], name)
        quality.append(
            [
                name,
                f"{first['parameters']:,}",
                f"{first['state']:,}",
                f"{first['learning_rate']:g}" + ("" if best_rate(record["runs"], name) else ", not bracketed"),
                ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in tried.items()),
                f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})",
                f"{math.exp(statistics.mean(losses)):.1f}",
                f"{statistics.mean(row['bits_per_byte']['wikitext-2'] for row in best):.3f}",
                f"{record['speed'][name]['median']:,.0f}" if name in record.get("speed", {}) else "not measured",
            ]
        )
    training = record["training"]
    tokens = tokens_of(training)
    header = ["condition", "parameters", "state, numbers", "best rate", "loss by rate, first seed", "loss, all seeds"]
    header += ["perplexity", "WikiText-2, bits per byte", "tokens/s"]
    about = (
        f"{tokens:,} tokens a run ({training['steps']} steps of {training['batch_size']} x "
        f"{training['sequence_length']}), vocabulary {record['shape']['vocab_size']}; losses in nats a token, the mean "
        f"over held-out Wikipedia, books and WikiText-2; all seeds at the best rate (mean, and range)."
    )
    lengths = length_table({name: best_runs(record["runs"], name) for name in CONDITIONS})
    tables = [markdown(header, quality), lengths, f"{about} {footnote(record)}"]
    return "\n\n".join([*tables, *reading(record)])


def length_table(runs: dict[str, list[dict]]) -> str:
    """Perplexity on the long documents by condition and evaluation length, in multiples of the training length."""
    rows = []
    for name, found in runs.items():
        if found:
            at = {factor: math.exp(statistics.mean(row["lengths"][str(factor)] for row in found)) for factor in LENGTHS}
            rows.append([name, *(f"{value:.1f}" for value in at.values()), f"{at[3.5] / at[1.0] - 1:+.1%}"])
    header = ["condition", *(f"perplexity at {factor:g}x" for factor in LENGTHS), "3.5x against 1x"]
    return markdown(header, rows)


def reading(record: dict) -> list[str]:
    """Where Interdomain stands with either start, beside the paper's figures at 125M; nothing without results."""
    sentences = []
    for start, words in (("", "a random start"), (", recall", "the start that remembers")):
        means = [_mean_score(record["runs"], name) for name in (f"interdomain{start}", f"s4d{start}", "softmax")]
        if None not in means:
            ours, s4d, softmax = means
            sentences.append(
                f"With {words}, Interdomain's perplexity against S4D-only: {math.exp(ours - s4d) - 1:+.0%} (the paper "
                f"at 125M: -14%); against softmax: {math.exp(ours - softmax) - 1:+.0%} (the paper: level)."
            )
    return sentences


def _mean_score(runs: list[dict], name: str) -> float | None:
    found = best_runs(runs, name)
    return statistics.mean(map(score, found)) if found else None


def best_runs(runs: list[dict], name: str) -> list[dict]:
    """All seeds of a condition at its best learning rate, or the best so far."""
    tried = tried_rates(runs, name)
    rate = min(tried, key=lambda rate: tried[rate], default=None)
    return [row for row in runs if (row["condition"], row["learning_rate"]) == (name, rate) and "validation" in row]


def plot(record: dict) -> Path:
    """Validation loss by learning rate, and perplexity by evaluation length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in CONDITIONS:
        if tried := tried_rates(record["runs"], name):
            left.plot(tried.keys(), tried.values(), marker="o", label=name)
        if best := best_runs(record["runs"], name):
            mean = [statistics.mean(row["lengths"][str(factor)] for row in best) for factor in LENGTHS]
            right.plot(LENGTHS, [math.exp(x) for x in mean], marker="o", label=name)
    left.set(xlabel="peak learning rate", ylabel="validation loss (nats per token)", xscale="log")
    right.set(xlabel="evaluation length / training length", ylabel="perplexity on long documents")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path = RESULTS / "condition_study.png"
    figure.savefig(path, dpi=120)
    return path


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data", speed=True, plot=True).parse_args()
    fresh = {"training": TRAINING, "shape": SHAPE}
    if arguments.speed:
        torch.set_num_threads(arguments.threads)
        studies.write_speed(FILE, fresh, endless_runs(), TRAINING["batch_size"] * TRAINING["sequence_length"])
        readme.update()
        return

    def make_run():
        return functools.partial(run_condition, data=prepare(arguments.data))

    studies.show_or_run(arguments, FILE, fresh, plan, make_run, table, plot)


if __name__ == "__main__":
    main()
