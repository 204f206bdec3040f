"""What does a layer find again? Selective copying, a phone book and a needle, with and without sparse attention.

Three tasks of tokens without a language, each trained from scratch and asked about new sequences, which every condition
sees in the same order:

copying      selective copying (the Mamba paper, arXiv 2312.00752): numbers among noise, then as many places at
             which they are asked for in their order, however far apart they stood.
phone book   entries of two names and a number, then all pairs of names again in another order ("Repeat After Me",
             arXiv 2402.01032). Many entries share a name, so that one name does not tell.
needle       one key and its number somewhere in filler four times as long, and the key again at the end.

Two learning rates with the first seed, the other seed at the better one; a run ends once two looks in a row find
everything.

    python -m benchmarks.lookup_study             # all runs that results/lookup_study.json does not hold yet
    python -m benchmarks.lookup_study --table     # the table as markdown
"""

from collections.abc import Iterator
from itertools import product

import torch

from benchmarks import recall_study, studies
from benchmarks.harness import RESULTS, footnote, markdown
from examples.recall import Pairs
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM

FILE = RESULTS / "lookup_study.json"
NAMES, NUMBERS, FILLERS = 12, 64, 48  # tokens of each kind
FILLER = 1  # 0 pads
NAME, NUMBER, ASK = FILLER + FILLERS, FILLER + FILLERS + NAMES, FILLER + FILLERS + NAMES + NUMBERS
SHAPE = recall_study.SHAPE | {"vocab_size": ASK + 1, "max_position_embeddings": 256, "tie_word_embeddings": True}
SHAPE |= {"sparse_keys": 16, "sparse_num_heads": 1, "sparse_hash": "sign", "sparse_hash_size": 4}
TRAINING = {"batch_size": 32, "steps": 800}
LEARNING_RATES, SEEDS = (3e-3, 1e-3), (0, 1)
HAX = {"sparse_attention": "hax"}
SSD = {"token_mixers": "ssd", "ssd_conv_kernel": 4, "ssd_activation": "silu", "ssd_state_size": 32}
CONDITIONS = {
    "softmax": {"token_mixers": "softmax", "rope_parameters": recall_study.ROPE},
    "S4D-only": {"token_mixers": "s4d"},
    "S4D-only + HAX": {"token_mixers": "s4d"} | HAX,
    "SSD": SSD,
    "SSD + HAX": SSD | HAX,
    "Interdomain, random start": {"start": "random"},
    "Interdomain": {},
    "Interdomain + HAX": HAX,
}


def copying(rows: int, draw: torch.Generator, values: int = 8, noise: int = 48) -> Pairs:
    """`values` numbers at random places of `values + noise` fillers, then places where they are asked for."""
    length = values + noise
    places = torch.rand(rows, length, generator=draw).argsort(1)[:, :values].sort(1).values
    numbers = torch.randint(NUMBER, ASK, (rows, values), generator=draw)
    ids = torch.full((rows, length + values + 1), FILLER).scatter(1, places, numbers)
    ids[:, length:] = ASK
    asked, labels = torch.zeros_like(ids, dtype=torch.bool), ids.clone()
    asked[:, length + 1 :], labels[:, length + 1 :] = True, numbers  # of the token before, as always
    return Pairs(ids, asked, labels)


def phone_book(rows: int, draw: torch.Generator, entries: int = 8) -> Pairs:
    """Two names and a number each, then the names again in another order, followed by the numbers that are asked."""
    people = torch.rand(rows, NAMES * NAMES, generator=draw).argsort(1)[:, :entries]
    numbers = torch.randint(NUMBER, ASK, (rows, entries), generator=draw)
    book = torch.stack([NAME + people // NAMES, NAME + people % NAMES, numbers], 2)
    order = torch.rand(rows, entries, generator=draw).argsort(1)
    again = book.gather(1, order[..., None].expand_as(book))
    ids = torch.cat([book, again], 1).flatten(1)
    asked = torch.zeros_like(ids, dtype=torch.bool)
    asked[:, 3 * entries + 2 :: 3] = True
    return Pairs(ids, asked)


def needle(rows: int, draw: torch.Generator, words: int = 192) -> Pairs:
    """ASK and a number at a random depth of random fillers, and at the end ASK again and the number that is asked."""
    ids = torch.randint(FILLER, NAME, (rows, words + 4), generator=draw)
    number = torch.randint(NUMBER, ASK, (rows, 1), generator=draw)
    depth = torch.randint(words + 1, (rows, 1), generator=draw)
    ends = torch.full((rows, 1), words + 2)
    ids.scatter_(1, torch.cat([depth, ends], 1), ASK)
    ids.scatter_(1, torch.cat([depth, ends], 1) + 1, number.expand(-1, 2))
    asked = torch.zeros_like(ids, dtype=torch.bool)
    asked[:, -1] = True
    return Pairs(ids, asked)


TASKS = {"phone book": phone_book, "needle": needle, "copying": copying}


def plan(runs: list[dict]) -> Iterator[dict]:
    kinds = [{"task": task, "condition": name} for task, name in product(TASKS, CONDITIONS)]
    yield from studies.rates_then_seeds(runs, kinds, LEARNING_RATES, SEEDS)


def run_condition(task: str, condition: str, learning_rate: float, seed: int, steps: int = TRAINING["steps"]) -> dict:
    """Train one condition for a task and ask it about new sequences."""
    torch.manual_seed(seed)
    tokens = {"bos_token_id": None, "eos_token_id": None}
    model = InterdomainForCausalLM(InterdomainConfig(**SHAPE | CONDITIONS[condition] | tokens))
    batches, asked = (batches_of(task, seed) for seed in (seed, seed + 1000))
    found = {"parameters": model.num_parameters()}
    return found | recall_study.train_and_ask(model, batches, asked, steps, learning_rate, recall_study.SOLVED)


def batches_of(task: str, seed: int) -> Iterator[Pairs]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield TASKS[task](TRAINING["batch_size"], draw)


def table(record: dict) -> str:
    """Right answers by condition and task, at the better learning rate."""
    rows = []
    for name in CONDITIONS:
        found = (studies.best_runs(record["runs"], {"task": task, "condition": name}, SEEDS[0]) for task in TASKS)
        rows.append([name, *(", ".join(f"{row['accuracy']:.1%}" for row in cell) or "not run" for cell in found)])
    lengths = ", ".join(f"{name} {next(batches_of(name, 0)).ids.shape[1]}" for name in TASKS)
    about = (
        f"{len(record['runs'])} runs; a number a seed, at the better of the learning rates "
        f"{' and '.join(map(str, LEARNING_RATES))} with the first seed; tokens: {lengths}; chance "
        f"{1 / NUMBERS:.1%}; {record['training']['steps']} steps of {record['training']['batch_size']} sequences; "
        f"{SHAPE['sparse_keys']} keys a query."
    )
    return f"{markdown(['right answers', *TASKS], rows)}\n\n{about} {footnote(record)}"


def main() -> None:
    fresh = {"training": TRAINING, "shape": SHAPE}
    studies.show_or_run(studies.parser(__doc__).parse_args(), FILE, fresh, plan, lambda: run_condition, table)


if __name__ == "__main__":
    main()
