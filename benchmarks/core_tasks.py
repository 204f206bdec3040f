"""Tasks of which every answer is known, beside the recall of `recall_study` (`mqar`).

- overwritten: every key is written twice, among the others, and the last value is right;
- copying: tokens stand at any places among empty ones, and are to be repeated in their order (selective copying,
  arXiv 2312.00752).
"""

import itertools
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from benchmarks import recall_study
from benchmarks.core_conditions import SETTINGS
from examples.recall import Pairs
from examples.training import with_layer_loss
from modeling_interdomain import InterdomainForCausalLM


def answers_loss(
    model: InterdomainForCausalLM, ids: torch.Tensor, right: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """That of `examples.recall.Answers`, of all places with weights, so that no shape depends on what is asked."""
    output = model(input_ids=ids, use_cache=False)
    nats = F.cross_entropy(output.logits.float().flatten(0, 1), right.flatten(), reduction="none")
    return with_layer_loss(nats @ weights.flatten(), output)


def asked_tensors(batch: Pairs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a model reads, what is right after each token, and how much each place counts."""
    asked = batch.asked[:, 1:]
    right = batch.ids if batch.labels is None else batch.labels
    return batch.ids[:, :-1], right[:, 1:], asked / asked.sum(1, keepdim=True).clamp(min=1) / len(asked)


def joined(batches: Iterator[Pairs]) -> Pairs:
    """The held-out sequences of a recall task."""
    drawn = [batch for _, batch in zip(range(recall_study.TRAINING["held_out_batches"]), batches)]
    return Pairs(*(None if x[0] is None else torch.cat(x) for x in zip(*drawn)))


def training_batches(task: str, pairs: int, length: int, seed: int) -> Iterator[Pairs]:
    """Those of a setting; of more than 128 tokens after some of each shorter one, as in `recall_study`."""
    shorter = (setting for setting in SETTINGS if setting[1] < length) if length > SETTINGS[1][1] else ()
    first = (itertools.islice(make_batches(task, *setting, seed), recall_study.SHORT_STEPS) for setting in shorter)
    return itertools.chain(*first, make_batches(task, pairs, length, seed))


def make_batches(task: str, pairs: int, length: int, seed: int) -> Iterator[Pairs]:
    if task == "recall":
        return recall_study.make_batches(pairs, length, False, seed)
    draw = {"overwritten": overwritten_batch, "copying": copying_batch}[task]
    generator = torch.Generator().manual_seed(seed)
    return (draw(pairs, length, generator) for _ in itertools.count())


def overwritten_batch(pairs: int, length: int, generator: torch.Generator) -> Pairs:
    """Every key and a value, twice, in any order; then each key once, of which the last value is asked; 0 in gaps."""
    rows, half = recall_study.TRAINING["batch_size"], recall_study.SHAPE["vocab_size"] // 2
    order = torch.rand(rows, 2 * pairs, generator=generator).argsort(dim=1)
    keys = 1 + torch.rand(rows, half - 1, generator=generator).argsort(dim=1)[:, :pairs]
    values = torch.randint(half, 2 * half, (rows, 2 * pairs), generator=generator)
    last = torch.maximum(*order.argsort(dim=1).view(rows, 2, pairs).unbind(1))  # place of the later of both writes
    ids = torch.zeros(rows, length, dtype=torch.long)
    ids[:, 0 : 4 * pairs : 2], ids[:, 1 : 4 * pairs : 2] = keys.repeat(1, 2).gather(1, order), values
    slots = torch.rand(rows, (length - 4 * pairs) // 2, generator=generator).argsort(dim=1)[:, :pairs]
    places = 4 * pairs + 2 * slots
    ids.scatter_(1, places, keys).scatter_(1, places + 1, values.gather(1, last))
    return Pairs(ids, torch.zeros_like(ids, dtype=torch.bool).scatter_(1, places + 1, True))


def copying_batch(count: int, length: int, generator: torch.Generator) -> Pairs:
    """`count` tokens at any places among empty ones, then a sign and `count` empty places, where they are asked."""
    rows, vocabulary = recall_study.TRAINING["batch_size"], recall_study.SHAPE["vocab_size"]
    told = length - count - 1
    places = torch.rand(rows, told, generator=generator).argsort(dim=1)[:, :count].sort(dim=1).values
    tokens = torch.randint(2, vocabulary, (rows, count), generator=generator)
    ids = torch.zeros(rows, length, dtype=torch.long).scatter_(1, places, tokens)
    ids[:, told] = 1
    labels = ids.clone()
    labels[:, told + 1 :] = tokens
    asked = torch.zeros_like(ids, dtype=torch.bool)
    asked[:, told + 1 :] = True
    return Pairs(ids, asked, labels)
