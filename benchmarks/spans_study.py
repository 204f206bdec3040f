"""How near are joined and cut caches? What a model loses that goes on from `join_caches` and `cut_cache`.

Exact in a first layer without convolutions, approximate elsewhere: so a trained model reads two documents apart, its
states are joined, and beside those of reading both the following text tells what is lost; and a span in the middle of a
text is cut out. The lower bounds are to keep the second document alone, and to keep the span. Models of 1.4M parameters
as in `condition_study` without rotary embeddings, trained here once and kept in runs/spans_study/; text that was held
out.

    python -m benchmarks.spans_study --data ../shared/data     # the models, then what is missing of the table
    python -m benchmarks.spans_study --table                   # the table as markdown
"""

import copy
import functools
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import condition_study, studies
from benchmarks.harness import RESULTS, footnote, markdown
from examples.joined_states import cut_cache, join_caches
from examples.text_data import nll_of_logits, random_batches
from examples.training import train
from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "spans_study.json"
FOLDER = Path("runs/spans_study")
CONDITIONS = {"interdomain": "interdomain-norope, recall", "s4d": "s4d, recall"}  # names in condition_study
TRAINING = condition_study.TRAINING | {"steps": 1000, "learning_rate": 3e-3}
LENGTHS, AFTER, TEXTS = (32, 128), 64, 64  # tokens of a document or span; those that follow; texts that are read


def plan(runs: list[dict]) -> Iterator[dict]:
    for condition in CONDITIONS:
        for length in LENGTHS:
            yield {"condition": condition, "length": length}


def load_or_train(condition: str, data: dict, training: dict = TRAINING) -> InterdomainForCausalLM:
    folder = FOLDER / condition
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        fields = condition_study.SHAPE | condition_study.CONDITIONS[CONDITIONS[condition]]
        model = InterdomainForCausalLM(InterdomainConfig(**fields))
        batches = random_batches(data["train"], training["batch_size"], training["sequence_length"])
        options = {"steps": training["steps"], "learning_rate": training["learning_rate"]}
        for _ in train(model, batches, **options, autocast_dtype=torch.bfloat16):
            pass
        model.save_pretrained(folder)
    return InterdomainForCausalLM.from_pretrained(folder).eval()


def run_condition(condition: str, length: int, data: dict, training: dict = TRAINING) -> dict:
    """Errors of the state by layer, and nats a token of what follows, of both operations and their bounds."""
    model = load_or_train(condition, data, training)
    span = 3 * length + AFTER + 1
    texts = torch.cat([tokens.unfold(0, span, span) for tokens in data["validation"].values()])[:TEXTS]
    return {"texts": len(texts), "join": joining(model, texts, length), "cut": cutting(model, texts, length)}


def joining(model, texts: torch.Tensor, length: int) -> dict:
    """Two documents of `length` tokens; the text goes on after the second."""
    first, second, rest = texts[:, :length], texts[:, length : 2 * length], texts[:, 2 * length :]
    apart = read(model, first), read(model, second)
    caches = {"read": read(model, first, second), "joined": join_caches(*apart, model), "second alone": apart[1]}
    return compare(model, caches, rest)


def cutting(model, texts: torch.Tensor, length: int) -> dict:
    """A text of which the middle is cut out: `length` tokens before the span, in it, and after it."""
    pieces = texts.split(length, dim=1)
    before = read(model, pieces[0])
    after = read(model, pieces[1], cache=before)
    whole = read(model, pieces[2], cache=after)
    caches = {
        "read": read(model, pieces[0], pieces[2]),
        "cut": cut_cache(whole, before, after, model),
        "not cut": whole,
    }
    return compare(model, caches, texts[:, 3 * length :])


@torch.no_grad()
def read(model, *pieces: torch.Tensor, cache: InterdomainCache | None = None) -> InterdomainCache:
    """A new cache after some pieces of text, on from another."""
    cache = InterdomainCache(model.config) if cache is None else copy.deepcopy(cache)
    for piece in pieces:
        model(input_ids=piece, past_key_values=cache)
    return cache


@torch.no_grad()
def compare(model, caches: dict[str, InterdomainCache], rest: torch.Tensor) -> dict:
    """By cache the relative error of each layer's state beside the first cache's, and nats a token of the rest."""
    true, *_ = [[layer.state.clone() for layer in cache.layers] for cache in caches.values()]
    found = {}
    for name, cache in caches.items():
        errors = [((layer.state - x).norm() / x.norm()).item() for layer, x in zip(cache.layers, true, strict=True)]
        windows = rest[:, : AFTER + 1]
        logits = model(input_ids=windows[:, :-1], past_key_values=copy.deepcopy(cache)).logits
        found[name] = {"errors": errors, "nats": nll_of_logits(logits, windows).mean().item()}
    return found


def table(record: dict) -> str:
    """One row an operation, model and length: what is lost beside reading, and what the bound loses."""
    rows = []
    for row in record["runs"]:
        for kind, (ours, bound) in {"join": ("joined", "second alone"), "cut": ("cut", "not cut")}.items():
            true, *others = (row[kind][name] for name in ("read", ours, bound))
            errors = [f"{other['errors'][-1]:.0%} ({statistics.mean(other['errors']):.0%})" for other in others]
            lost = [f"{other['nats'] - true['nats']:+.4f}" for other in others]
            cells = [row["condition"], f"{row['length']}", f"{true['nats']:.3f}", errors[0], lost[0], bound]
            rows.append([kind, *cells, errors[1], lost[1]])
    header = ["operation", "model", "tokens", "nats, read", "error of the last state (mean of all)", "nats lost"]
    texts = record["runs"][0]["texts"]
    about = (
        f"{texts} held-out texts; tokens: of each document, or of the span and of the text on either side; nats a "
        f"token of the {AFTER} tokens that follow. {footnote(record)}"
    )
    return f"{markdown([*header, 'instead', 'its error', 'nats lost'], rows)}\n\n{about}"


def main() -> None:
    arguments = studies.parser(__doc__, "../shared/data").parse_args()
    fresh = {"training": TRAINING, "shape": condition_study.SHAPE}

    def make_run():
        return functools.partial(run_condition, data=condition_study.prepare(arguments.data))

    studies.show_or_run(arguments, FILE, fresh, plan, make_run, table)


if __name__ == "__main__":
    main()
