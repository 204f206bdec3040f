"""What does a fixed-size memory hold? Associative and joint recall, a phone book, and a needle in a long text.

Usage:
    python -m examples.recall mqar configuration/interdomain-small configuration/softmax-small   # trained here
    python -m examples.recall mqar configuration/softmax-small --random-filler --hidden-answers --shift 7
    python -m examples.recall joint configuration/interdomain-small --sizes 6 --smallest 4
    python -m examples.recall phonebook runs/mine --sizes 4 8 16                                 # checkpoints
    python -m examples.recall needle runs/mine --sizes 256 512 1024

mqar (multi-query associative recall, Arora et al., "Zoology", 2023) trains small models of the given configurations
from scratch for each number of key-value pairs and measures how often the value of a repeated key is predicted. As in
"Zoology", gaps can hold random tokens (--random-filler) and values of repeated keys can stand in the labels alone
(--hidden-answers). Sequences that fill their length have one layout, which a layer could learn instead of looking:
--shift puts random tokens in front, another number of them for each.
joint (joint recall, the HAX paper, 2025, section 3) does the same where the value of a key depends on the context in
which it stands: contexts with the values of all keys, then all of it again in other orders. With --levels contexts
stand in contexts.
phonebook (Jelassi et al., "Repeat After Me", 2024) lists names with numbers and asks for one of them; needle hides one
sentence with a number in filler text. Both ask a trained language model by the likelihood of the right number among
`--choices` numbers, so that chance is known. Each writes a JSON file, a table and a plot.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from examples.report import labels, write_report
from examples.saved_model import load, read_config
from examples.text_data import InputError, check_folder, check_positive, check_seed, exit_code, gather_documents
from examples.training import cosine_with_warmup, parameter_groups, with_layer_loss

NAMES = ["Alice", "Bruno", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Irene", "James", "Karen", "Louis"]
NAMES += ["Maria", "Nolan", "Olive", "Peter", "Quinn", "Rosa", "Simon", "Tessa", "Ursula", "Victor", "Wendy", "Zane"]
PEOPLE = [f"{first} {last}" for first in NAMES for last in NAMES if first != last]
NEEDLES = range(10_000, 100_000)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


class Pairs(NamedTuple):
    """Token ids `[B, T]`, True `[B, T]` where the value of a key seen before is asked, and the values that are right.

    `labels` None: the value stands there, in `ids`. `mask` `[B, T]`: False for pads; None: there are none.
    """

    ids: torch.Tensor
    asked: torch.Tensor
    labels: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class Answers(NamedTuple):
    """Logits `[n, vocab_size]`, the right tokens `[n]` and weights `[n]` of what is asked, and the model's output.

    Each sequence of a batch weighs the same, however much it is asked; the weights add up to 1.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor
    output: Any

    def nats(self) -> torch.Tensor:
        """An answer, in the mean of a sequence and then of sequences."""
        return F.cross_entropy(self.logits, self.tokens, reduction="none") @ self.weights

    def loss(self) -> torch.Tensor:
        """What training minimises."""
        return with_layer_loss(self.nats(), self.output)

    def accuracy(self) -> float:
        """Of the likeliest answers, in the same mean."""
        return ((self.logits.argmax(-1) == self.tokens).float() @ self.weights).item()


def mqar_batches(
    pairs: int,
    length: int,
    vocab_size: int,
    batch_size: int,
    generator: torch.Generator,
    *,
    random_filler: bool = False,
    hidden_answers: bool = False,
    shift: int = 0,
) -> Iterator[Pairs]:
    """Key-value pairs, each key once, then the same pairs in another order with gaps; 0 fills the gaps.

    Keys and values come from the two halves of the vocabulary; values may repeat.

    Args:
        random_filler: any tokens fill the gaps (among them keys, as in "Zoology").
        hidden_answers: the values of the repeated keys stand in `labels` alone, and a gap where they would.
        shift: up to so many other values in front, see `shift_rows`.
    """
    batches = _plain_batches(pairs, length, vocab_size, batch_size, generator)
    for ids, asked, *_ in batches:
        batch = Pairs(torch.where(asked, 0, ids), asked, ids) if hidden_answers else Pairs(ids, asked)
        if shift:
            batch = shift_rows(batch, shift, vocab_size, generator)
        if random_filler:
            filler = torch.randint(1, vocab_size, batch.ids.shape, generator=generator)
            batch = batch._replace(ids=torch.where(batch.ids == 0, filler, batch.ids))
        yield batch


def shift_rows(batch: Pairs, most: int, vocab_size: int, generator: torch.Generator) -> Pairs:
    """Every row later by 0 to `most` tokens, values in front and gaps behind; rows are `most` tokens longer."""
    rows, length = batch.ids.shape
    front = torch.randint(vocab_size // 2, vocab_size, (rows, most), generator=generator)
    ids = torch.cat([front, batch.ids, torch.zeros_like(front)], dim=1)
    first = torch.randint(most + 1, (rows, 1), generator=generator)
    places = first + torch.arange(length + most)
    around = (None if x is None else F.pad(x, (most, most)).gather(1, places) for x in (batch.asked, batch.labels))
    return Pairs(ids.gather(1, places), *around)


def _plain_batches(
    pairs: int, length: int, vocab_size: int, batch_size: int, generator: torch.Generator
) -> Iterator[Pairs]:
    half = vocab_size // 2
    if length < 4 * pairs:
        raise InputError(f"{pairs} pairs need sequences of at least {4 * pairs} tokens, got {length}.")
    if pairs > half - 1:
        raise InputError(f"{pairs} pairs need a vocabulary of at least {2 * pairs + 2} tokens, got {vocab_size}.")
    while True:
        keys = 1 + torch.rand(batch_size, half - 1, generator=generator).argsort(dim=1)[:, :pairs]
        values = torch.randint(half, vocab_size, (batch_size, pairs), generator=generator)
        ids = torch.zeros(batch_size, length, dtype=torch.long)
        ids[:, 0 : 2 * pairs : 2], ids[:, 1 : 2 * pairs : 2] = keys, values
        order = torch.rand(batch_size, pairs, generator=generator).argsort(dim=1)
        slots = torch.rand(batch_size, (length - 2 * pairs) // 2, generator=generator).argsort(dim=1)[:, :pairs]
        places = 2 * pairs + 2 * slots
        ids.scatter_(1, places, keys.gather(1, order)).scatter_(1, places + 1, values.gather(1, order))
        asked = torch.zeros_like(ids, dtype=torch.bool).scatter_(1, places + 1, True)
        yield Pairs(ids, asked)


class Joint(NamedTuple):
    """The shape of joint recall: how many contexts and keys, of how many values, and contexts in how many levels."""

    smallest: int
    largest: int
    values: int = 16
    levels: int = 1

    @property
    def vocab_size(self) -> int:
        """Padding, beginning and separator, then values, then as many tokens for each level and for the keys."""
        return JOINT_SPECIAL + self.values + (self.levels + 1) * self.largest


JOINT_SPECIAL = 3
PAD, BEGIN, SEPARATOR = range(JOINT_SPECIAL)


def joint_batches(shape: Joint, batch_size: int, generator: torch.Generator) -> Iterator[Pairs]:
    """Joint recall (the HAX paper, arXiv 2507.00449, section 3), padded on the right where lengths differ.

    A sequence draws how many contexts there are on each level and how many keys, and a value for each path to a key.
    Beginning; then the contexts in any order, each followed by those of the next level in any order, the last of them
    by its keys in any order and their values; separator; and all of that once more in other orders, where the values
    are asked.
    """
    while True:
        rows = [_joint_row(shape, generator) for _ in range(batch_size)]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [PAD] * (longest - len(ids)) for ids, _ in rows])
        asked = torch.tensor([asked + [False] * (longest - len(asked)) for _, asked in rows])
        mask = ids != PAD
        yield Pairs(ids, asked, mask=None if mask.all() else mask)


def _joint_row(shape: Joint, generator: torch.Generator) -> tuple[list[int], list[bool]]:
    """Token ids, and which of them are asked."""
    sizes = torch.randint(shape.smallest, shape.largest + 1, (shape.levels + 1,), generator=generator).tolist()
    table = JOINT_SPECIAL + torch.randint(shape.values, sizes, generator=generator)

    def walk(values: torch.Tensor, level: int) -> Iterator[int]:
        for i in torch.randperm(len(values), generator=generator).tolist():
            yield JOINT_SPECIAL + shape.values + level * shape.largest + i
            if values.ndim == 1:
                yield int(values[i])
            else:
                yield from walk(values[i], level + 1)

    told, again = list(walk(table, 0)), list(walk(table, 0))
    ids = [BEGIN, *told, SEPARATOR, *again]
    first = JOINT_SPECIAL + shape.values
    return ids, [place > len(told) + 1 and token < first for place, token in enumerate(ids)]


def answers(model: torch.nn.Module, batch: Pairs) -> Answers:
    """What a model says to everything that is asked."""
    device = next(model.parameters()).device
    mask = None if batch.mask is None else batch.mask[:, :-1].to(device)
    output = model(input_ids=batch.ids[:, :-1].to(device), attention_mask=mask, use_cache=False)
    asked = batch.asked[:, 1:].to(device)
    right = batch.ids if batch.labels is None else batch.labels
    weights = (asked / asked.sum(1, keepdim=True).clamp(min=1) / len(asked))[asked]
    return Answers(output.logits[asked].float(), right[:, 1:].to(device)[asked], weights, output)


def batches_of(size: int, vocab_size: int, options: argparse.Namespace, seed: int) -> Iterator[Pairs]:
    """What mqar and joint train on and are asked."""
    generator = torch.Generator().manual_seed(seed)
    if options.task == "joint":
        return joint_batches(joint_shape(size, options), options.batch_size, generator)
    kind = {name: getattr(options, name) for name in ("random_filler", "hidden_answers", "shift")}
    length = max(options.length, 4 * size)
    return mqar_batches(size, length, vocab_size, options.batch_size, generator, **kind)


def joint_shape(size: int, options: argparse.Namespace) -> Joint:
    return Joint(options.smallest or size, size, options.values, options.levels)


def train_and_ask(config, size: int, options: argparse.Namespace) -> float:
    """Train a model of the configuration and return the fraction of right answers on new sequences."""
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(config)
    groups = parameter_groups(model, options.learning_rate)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    peaks = [group["lr"] for group in optimizer.param_groups]
    batches = batches_of(size, config.vocab_size, options, options.seed)
    name = f"{size} {LABELS[options.task]}"
    bar = tqdm(zip(range(options.steps), batches), total=options.steps, desc=name, dynamic_ncols=True)
    for step, batch in bar:
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * cosine_with_warmup((step + 1) / options.steps)
        loss = answers(model, batch).loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
    model.eval()
    batches = batches_of(size, config.vocab_size, options, options.seed + 1)
    with torch.no_grad():
        return statistics.mean(answers(model, batch).accuracy() for _, batch in zip(range(8), batches))


class Question(NamedTuple):
    """A text that ends where the answer would begin, and answers of which the first is right."""

    prompt: str
    answers: list[str]


def phonebook_question(entries: int, choices: int, draw: random.Random) -> Question:
    """A list of names and numbers, then one of the names again; wrong answers are other numbers of the list."""
    names = draw.sample(PEOPLE, entries)
    numbers = [f" {draw.randrange(10**6):06d}" for _ in names]
    book = "".join(f"{name}:{number}\n" for name, number in zip(names, numbers))
    asked = draw.randrange(entries)
    others = [number for number in dict.fromkeys(numbers) if number != numbers[asked]]
    return Question(f"{book}\n{names[asked]}:", [numbers[asked], *draw.sample(others, min(choices - 1, len(others)))])


def needle_question(sentences: Sequence[str], words: int, choices: int, draw: random.Random) -> Question:
    """`words` words of filler with one number hidden at a random depth; wrong answers are other numbers."""
    hidden, *others = (f" {number}" for number in draw.sample(NEEDLES, choices))
    statement = f"The secret number is{hidden}. "
    start, filler, count = draw.randrange(len(sentences)), [], 0
    while count < words:
        filler.append(sentences[start % len(sentences)] + " ")
        count, start = count + len(filler[-1].split()), start + 1
    filler.insert(draw.randrange(len(filler) + 1), statement)
    return Question("".join(filler) + "The secret number is", [hidden, *others])


@torch.no_grad()
def log_likelihoods(model, tokenizer, question: Question) -> list[float]:
    """Of each answer after the prompt, which is read once, in nats."""
    prompt = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    prompt += tokenizer(question.prompt, add_special_tokens=False)["input_ids"]
    rows = [tokenizer(answer, add_special_tokens=False)["input_ids"] for answer in question.answers]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=model.device)
    read = model(input_ids=torch.tensor([prompt], device=model.device), use_cache=True, logits_to_keep=1)
    read.past_key_values.batch_repeat_interleave(len(rows))
    after = model(input_ids=ids, past_key_values=read.past_key_values).logits[:, :-1]
    logits = torch.cat([read.logits.expand(len(rows), -1, -1), after], dim=1).float()
    found = logits.log_softmax(-1).gather(2, ids[..., None])[..., 0]
    return [found[i, : len(row)].sum().item() for i, row in enumerate(rows)]


def accuracy(folder: str, questions: Sequence[Question]) -> float:
    """How often the right answer is the likeliest."""
    model, tokenizer = load(folder)
    right = 0
    for question in tqdm(questions, desc=Path(folder).name, dynamic_ncols=True, leave=False):
        likelihoods = log_likelihoods(model, tokenizer, question)
        right += max(likelihoods) == likelihoods[0]
    return right / len(questions)


def filler_sentences(options: argparse.Namespace) -> list[str]:
    """Sentences of the user's text, or a few plain ones."""
    text = " ".join(gather_documents(options.data, 2_000_000)) if options.data else FILLER
    sentences = [sentence.strip() + "." for sentence in text.replace("\n", " ").split(". ") if sentence.strip(" .")]
    if not sentences:
        raise InputError(f"{', '.join(options.data)} has no sentences to hide a needle in.")
    return sentences


def questions_of(task: str, size: int, options: argparse.Namespace) -> list[Question]:
    """The same questions for every model."""
    draw = random.Random(f"{task} {size} {options.seed}")
    if task == "phonebook":
        return [phonebook_question(size, options.choices, draw) for _ in range(options.questions)]
    sentences = filler_sentences(options)
    return [needle_question(sentences, size, options.choices, draw) for _ in range(options.questions)]


def trained_config(folder: str, size: int, options: argparse.Namespace):
    vocab_size = joint_shape(size, options).vocab_size if options.task == "joint" else options.vocab_size
    changes = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return read_config(Path(folder), **changes)


LABELS = {
    "mqar": "key-value pairs",
    "joint": "contexts and keys",
    "phonebook": "entries",
    "needle": "words of text",
}
SIZES = {"mqar": [4, 8, 16, 32], "joint": [4, 6, 8], "phonebook": [4, 8, 16, 32], "needle": [100, 200, 400, 800]}
TRAINED = ("mqar", "joint")  # here, and not before


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=LABELS)
    parser.add_argument("folders", nargs="+", help="mqar, joint: configurations; else models with their tokenizers")
    parser.add_argument("--sizes", type=int, nargs="+", help="pairs, contexts, entries or words (default: the task's)")
    parser.add_argument("--output", type=Path, default=Path("runs/recall"), help="folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    read_by: dict[str, list[str]] = {}

    def add(group, *names, **how) -> None:
        read_by[group.add_argument(*names, **how).dest] = group.title.split(" and ")

    learning = parser.add_argument_group("mqar and joint")
    add(learning, "--steps", type=int, default=400, help="default: %(default)s")
    add(learning, "--batch-size", type=int, default=32, help="default: %(default)s")
    add(learning, "--learning-rate", type=float, default=3e-3, help="default: %(default)s")
    training = parser.add_argument_group("mqar")
    add(training, "--length", type=int, default=128, help="tokens a sequence (default: %(default)s)")
    add(training, "--vocab-size", type=int, default=256, help="default: %(default)s")
    add(training, "--random-filler", action="store_true", help="any tokens in the gaps, not one and the same")
    add(training, "--hidden-answers", action="store_true", help="what is asked stands in the labels alone")
    add(training, "--shift", type=int, default=0, help="up to so many tokens in front (default: %(default)s)")
    joint = parser.add_argument_group("joint")
    add(joint, "--smallest", type=int, help="contexts and keys, where --sizes are the most (default: as many)")
    add(joint, "--values", type=int, default=16, help="default: %(default)s")
    add(joint, "--levels", type=int, default=1, help="of contexts (default: %(default)s)")
    asking = parser.add_argument_group("phonebook and needle")
    add(asking, "--questions", type=int, default=100, help="for each size (default: %(default)s)")
    add(asking, "--choices", type=int, default=4, help="numbers to choose from (default: %(default)s)")
    needle = parser.add_argument_group("needle")
    add(needle, "--data", nargs="+", help="text to hide it in (default: a few plain sentences)")
    options = parser.parse_args(arguments)
    for name, tasks in read_by.items():
        if options.task not in tasks and getattr(options, name) != parser.get_default(name):
            option, whose = f"--{name.replace('_', '-')}", " and ".join(tasks)
            raise InputError(f"{option} is for {whose}: {options.task} does not read it, leave it away.")
    return options


def run(options: argparse.Namespace) -> None:
    logging.disable_progress_bar()
    sizes = options.sizes or SIZES[options.task]
    check_positive(options, "steps", "batch_size", "questions", "smallest", "levels", "learning_rate")
    check_seed(options.seed)
    check_folder(options.output)
    if min(sizes) < 1 or options.choices < 2:
        raise InputError("--sizes must be positive and --choices at least 2.")
    if options.shift < 0:
        raise InputError(f"--shift must not be negative, not {options.shift}.")
    if options.task == "joint" and (options.smallest or 1) > min(sizes):
        raise InputError(f"--smallest {options.smallest} is more than {min(sizes)}, the least of --sizes.")
    if options.values < 2:
        raise InputError(f"--values must be at least 2, not {options.values}.")
    if options.task == "phonebook" and min(sizes) < options.choices:
        raise InputError(f"A phone book of {min(sizes)} entries has no {options.choices} numbers to choose from.")
    if options.task == "phonebook" and max(sizes) > len(PEOPLE):
        raise InputError(f"A phone book has at most {len(PEOPLE)} entries, not {max(sizes)}.")
    if options.task == "needle" and options.choices > len(NEEDLES):
        raise InputError(f"--choices is at most {len(NEEDLES):,} for a needle, not {options.choices:,}.")
    for folder in options.folders:
        if not (Path(folder) / "config.json").is_file():
            raise InputError(f"{folder} has no config.json.")
    names = labels(options.folders)
    curves: dict[str, dict[float, float]] = {name: {} for name in names}
    for size in sizes:
        questions = [] if options.task in TRAINED else questions_of(options.task, size, options)
        for name, folder in zip(names, options.folders):
            if options.task in TRAINED:
                found = train_and_ask(trained_config(folder, size, options), size, options)
            else:
                found = accuracy(folder, questions)
            curves[name][float(size)] = found
    chance = {"mqar": 2 / options.vocab_size, "joint": 1 / options.values}.get(options.task, 1 / options.choices)
    settings = {name: value for name, value in vars(options).items() if isinstance(value, (int, float, str))}
    print(write_report(options.task, curves, options.output, LABELS[options.task], "accuracy", **settings))
    print(f"Chance is {chance:.3f}.")


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
