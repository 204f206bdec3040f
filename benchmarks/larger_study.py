"""The paper's order at the largest size that two cores train: 3M parameters, 8M tokens, the default start.

Interdomain, S4D-only (with the same start) and softmax, each with the learning rate that was its best in
`condition_study`; the two recurrent ones with two seeds. Beside the loss: lengths beyond training, the loss by the
place in the window, and that of tokens which the context has already shown after the same token, where recall shows
and the mean hides it. Training multiplies in bfloat16 (autocast) and is compiled; losses are measured in float32. Every
model stays in runs/larger_study/, and the best in runs/best, where the examples find it.

    python -m benchmarks.larger_study --data ../shared/data     # all runs that the results do not hold yet
    python -m benchmarks.larger_study --table                   # the tables as markdown
"""

import functools
import math
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import condition_study, studies
from benchmarks.harness import RESULTS, footnote, markdown, read
from examples.saved_model import DEFAULTS
from examples.text_data import encode, next_token_nll, random_batches, train_tokenizer
from examples.training import train
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "larger_study.json"
FOLDER = Path("runs/larger_study")
SHAPE = condition_study.SHAPE | {"hidden_size": 192, "num_hidden_layers": 5, "num_attention_heads": 6}
TRAINING = {"steps": 4000, "batch_size": 8, "sequence_length": 256, "autocast": "bfloat16", "compiled": True}
CONDITIONS = {"interdomain": "interdomain, recall", "s4d": "s4d, recall", "softmax": "softmax"}  # names there
SEEDS = {"interdomain": (0, 1), "s4d": (0, 1), "softmax": (0,)}
PLACES = (0, 16, 64, 128, 256)  # of a token in its window, to the next
AGES = (1, 16, 32, 64, 128, 256)  # of what repeats, in tokens, to the next


def plan(runs: list[dict], shorter: list[dict]) -> Iterator[dict]:
    """The conditions at their best learning rates in the `shorter` study, as far as that knows them."""
    rates = {name: condition_study.best_rate(shorter, there) for name, there in CONDITIONS.items()}
    if None in rates.values():
        print(f"Not all best rates are known, {rates}: benchmarks.condition_study finds the others.")
    for seed in range(max(map(len, SEEDS.values()))):
        for name, rate in rates.items():
            if rate is not None and seed in SEEDS[name]:
                yield {"condition": name, "learning_rate": rate, "seed": seed}


def prepare(data: Path) -> dict:
    """The texts of `condition_study`, with its tokenizer and twice its training text; kept in `runs/`."""
    cache = FOLDER / "tokens.pt"
    if cache.exists():
        return torch.load(cache)
    prepared = condition_study.prepare(data)
    tokenizer = train_tokenizer(condition_study.training_documents(data), SHAPE["vocab_size"])
    prepared["train"] = encode(tokenizer, condition_study.training_documents(data, shards=2))
    tokenizer.save_pretrained(FOLDER / "tokenizer")
    torch.save(prepared, cache)
    return prepared


def run_condition(condition: str, learning_rate: float, seed: int, data: dict, training: dict = TRAINING) -> dict:
    """Train one condition, keep it, and measure it."""
    torch.manual_seed(seed)
    model = InterdomainForCausalLM(InterdomainConfig(**SHAPE, **condition_study.CONDITIONS[CONDITIONS[condition]]))
    batches = random_batches(data["train"], training["batch_size"], training["sequence_length"], seed)
    trained = torch.compile(model, dynamic=False) if training["compiled"] else model
    options = {"steps": training["steps"], "learning_rate": learning_rate}
    steps = list(train(trained, batches, **options, autocast_dtype=getattr(torch, training["autocast"])))
    model.save_pretrained(FOLDER / f"{condition}-{seed}")
    row = {"parameters": model.num_parameters(), "train_loss": statistics.mean(step.loss for step in steps[-50:])}
    row |= condition_study.measure(model, data, training["sequence_length"])
    return row | by_token(model, data["validation"], training["sequence_length"])


def keep_best(runs: list[dict], folder: Path = DEFAULTS[0]) -> None:
    """Copy the model with the lowest loss and its tokenizer to where the examples look, if it lies here."""
    best = min(runs, key=condition_study.score)
    kept = FOLDER / f"{best['condition']}-{best['seed']}"
    for source in (kept, FOLDER / "tokenizer") if kept.is_dir() else ():
        shutil.copytree(source, folder, dirs_exist_ok=True)


@torch.no_grad()
def by_token(model, texts: dict[str, torch.Tensor], length: int, at_once: int = 2048) -> dict:
    """Nats a token by its place in the window ("places"), of tokens that repeat and of the others ("repeats"), and of
    those that repeat by their `age` ("ages").

    Whole windows of all texts together, `at_once` tokens in a forward. "repeats" counts the second half of a window,
    so that there is a context to repeat; "ages" counts all of it.
    """
    model.eval()
    windows = torch.cat([tokens.unfold(0, length + 1, length) for tokens in texts.values()])
    batches = windows.split(max(1, at_once // length))
    nats = torch.cat([next_token_nll(model, batch).double().cpu() for batch in batches])
    ages = age(windows)
    late, early = nats[:, length // 2 :], ages[:, length // 2 :] > 0
    places = {str(low): nats[:, low:high].mean().item() for low, high in _parts(PLACES, length)}
    repeats = {"share": early.double().mean().item(), "repeated": late[early].mean().item()}
    repeats["other"] = late[~early].mean().item()
    by_age = {str(low): nats[(ages >= low) & (ages < high)] for low, high in _parts(AGES, length)}
    return {
        "places": places,
        "repeats": repeats,
        "ages": {low: found.mean().item() for low, found in by_age.items() if len(found)},
    }


def _parts(starts: tuple[int, ...], length: int) -> list[tuple[int, int]]:
    ends = [low for low in starts if low < length] + [length]
    return list(zip(ends, ends[1:]))


def age(windows: torch.Tensor) -> torch.Tensor:
    """Of windows [W, T + 1]: how many tokens ago the context last had this token after the same one [W, T], for the
    last T; 0 where it has not had it."""
    pairs = torch.stack((windows[:, :-1], windows[:, 1:]), -1)
    same = (pairs[:, :, None] == pairs[:, None]).all(-1).tril(-1)
    number = torch.arange(1, same.shape[-1] + 1, dtype=torch.int16)
    last = (same * number).amax(-1)
    return torch.where(last > 0, number - last, 0)


def table(record: dict) -> str:
    """Quality, lengths beyond training, and where in the text the difference lies."""
    runs = {name: [row for row in record["runs"] if row["condition"] == name] for name in CONDITIONS}
    runs = {name: rows for name, rows in runs.items() if rows}
    quality, places = [], []
    for name, rows in runs.items():
        losses = [condition_study.score(row) for row in rows]
        bits = statistics.mean(row["bits_per_byte"]["wikitext-2"] for row in rows)
        seeds = ", ".join(f"{loss:.3f}" for loss in losses)
        cells = [f"{rows[0]['parameters']:,}", f"{rows[0]['state']:,}", f"{rows[0]['learning_rate']:g}", seeds]
        quality.append([name, *cells, f"{math.exp(statistics.mean(losses)):.1f}", f"{bits:.3f}"])
        at = [f"{_mean(rows, 'places', str(low)):.3f}" for low in PLACES[:-1]]
        places.append([name, *at, *(f"{_mean(rows, 'repeats', key):.3f}" for key in ("repeated", "other"))])
    header = ["condition", "parameters", "state, numbers", "rate", "loss by seed", "perplexity"]
    tables = [markdown([*header, "WikiText-2, bits per byte"], quality), condition_study.length_table(runs)]
    header = [f"tokens {low} to {high - 1}" for low, high in zip(PLACES, PLACES[1:])]
    tables.append(markdown(["nats a token", *header, "seen in the context", "others"], places))
    training = record["training"]
    tokens = condition_study.tokens_of(training)
    share = record["runs"][0]["repeats"]["share"]
    about = (
        f"{tokens:,} tokens a run ({training['steps']:,} steps of {training['batch_size']} x "
        f"{training['sequence_length']}, {training['autocast']} autocast), losses in nats a token, as above. "
        f"Seen in the context: the token stood after the same token before, {share:.0%} of the second half of a window."
    )
    return "\n\n".join([*tables, f"{about} {footnote(record)}", *order(runs)])


def order(runs: dict[str, list[dict]]) -> list[str]:
    """Whether the paper's order is found, in a sentence; nothing while a condition is missing."""
    if runs.keys() != CONDITIONS.keys():
        return []
    loss = {name: [condition_study.score(row) for row in rows] for name, rows in runs.items()}
    means = {name: statistics.mean(losses) for name, losses in loss.items()}
    apart = max(loss["interdomain"]) < min(loss["s4d"])
    words = "found: every seed of it is below every one of theirs" if apart else "not found: their seeds overlap"
    return [
        f"The paper's order, Interdomain before S4D-only, is {words}. Its perplexity is "
        f"{_beside(means['interdomain'], means['s4d'])} S4D-only's (the paper at 125M: 14% below) and "
        f"{_beside(means['interdomain'], means['softmax'])} softmax's (the paper: level)."
    ]


def _beside(nats: float, others: float) -> str:
    """How a perplexity stands beside another."""
    ratio = math.exp(nats - others) - 1
    return f"{abs(ratio):.1%} {'below' if ratio < 0 else 'above'}"


def _mean(rows: list[dict], *keys: str) -> float:
    return statistics.mean(functools.reduce(lambda found, key: found[key], keys, row) for row in rows)


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()
    fresh = {"training": TRAINING, "shape": SHAPE}
    planned = functools.partial(plan, shorter=read("condition_study")["runs"])

    def make_run():
        return functools.partial(run_condition, data=prepare(arguments.data))

    studies.show_or_run(arguments, FILE, fresh, planned, make_run, table)
    if not arguments.table:
        keep_best(studies.load(FILE, fresh)["runs"])


if __name__ == "__main__":
    main()
