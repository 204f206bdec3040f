"""Rows in pieces over several processes: outputs, gradients, caches and losses are those of one process, in float64."""

import threading
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from modeling_interdomain import module_sequence_parallel as sequence_parallel
from tests.conftest import VOCABULARY

LENGTH = 23
# Where rows are cut: pieces of a token, and shorter than what a convolution reaches back.
CUTS = {2: [0, 9, LENGTH], 4: [0, 7, 8, 10, LENGTH]}
RECURRENT = {
    "interdomain": {},
    "rope-before": {},
    "rope-after": {"token_mixers": "interdomain"},
    "grouped": {},
    "one-group": {"token_mixers": "interdomain"},
    "normalized": {},
    "identity": {},
    "real-product": {},
    "s4d": {},
    "s4d-rope": {},
    "single-input": {},
    "linear-readout": {},
    "gated": {},
    "no-convolution": {},
    "ssd": {},
    "mamba2": {},
    "selective-scan": {},
}


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    """Whole rows, and how they are to be read."""
    ids = torch.randint(4, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if kind == "rows":
        return {"input_ids": ids}
    if kind == "pads":  # at either end, and a piece that holds nothing else
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :9], mask[1, 19:] = 0, 0
        return {"input_ids": ids, "attention_mask": mask}
    if kind == "positions":  # documents over the cuts, at them, and of one token
        ends = [[0, 3, 16, 17, LENGTH], [0, 7, 8, LENGTH]]
        rows = [torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in ends]
        return {"input_ids": ids, "position_ids": torch.stack(rows)}
    return {"input_ids": ids[:1], "cu_seq_lens_q": torch.tensor([0, 2, 9, 18, LENGTH])}


KINDS = ("rows", "pads", "positions", "ends")


def cut(batch, ends: list[int], rank: int) -> dict[str, torch.Tensor]:
    """The piece of a process."""
    here = slice(ends[rank], ends[rank + 1])
    return {name: x if name == "cu_seq_lens_q" else x[:, here] for name, x in batch.items()}


def weights_of(batch) -> torch.Tensor:
    """Of a loss that every logit of a real token has a part in."""
    weights = torch.randn(*batch["input_ids"].shape, VOCABULARY, generator=torch.Generator().manual_seed(2)).double()
    return weights if "attention_mask" not in batch else weights * batch["attention_mask"][..., None]


def run(model, batch, weights, **arguments):
    """Weighted logits, and their gradients by name."""
    logits = weights * model(**batch, use_cache=False, **arguments).logits
    grads = torch.autograd.grad(logits.sum(), list(model.parameters()), allow_unused=True)
    named = zip(model.named_parameters(), grads)
    return logits.detach(), {name: torch.zeros_like(p) if g is None else g for (name, p), g in named}


def run_piece(model, batch, group):
    """`run` of this process's piece."""
    ends, rank = CUTS[group.size()], group.rank()
    return run(model, cut(batch, ends, rank), cut({"": weights_of(batch)}, ends, rank)[""], sequence_group=group)


def assert_pieces_are(whole, pieces, assert_same):
    """The outputs one after the other, the sum of the gradients."""
    assert_same(torch.cat([logits for logits, _ in pieces], dim=1), whole[0])
    for name, grad in whole[1].items():
        scale = grad.abs().max().clamp(min=1)
        assert_same(sum(grads[name] for _, grads in pieces) / scale, grad / scale)


class Threads:
    """Stands for `torch.distributed` where the processes are threads: each brings its tensor and takes all of them."""

    def __init__(self, size: int):
        self.brought: list = [None] * size
        self.barrier = threading.Barrier(size)

    def _all(self, x: torch.Tensor, group) -> list[torch.Tensor]:
        self.brought[group.rank()] = x
        self.barrier.wait(60)
        found = list(self.brought)
        self.barrier.wait(60)
        return found

    def all_gather_into_tensor(self, output, x, group):
        output.copy_(torch.cat(self._all(x, group)))

    def reduce_scatter_tensor(self, output, x, group):
        output.copy_(sum(self._all(x, group)).chunk(group.size())[group.rank()])

    def all_reduce(self, x, group):
        total = sum(self._all(x.clone(), group))
        x.copy_(total)


@pytest.fixture
def in_threads(monkeypatch):
    """`in_threads(size, work)`: what `work(group)` gives in each of so many threads."""

    def start(size: int, work):
        monkeypatch.setattr(sequence_parallel, "dist", Threads(size))
        found: list = [None] * size

        def begin(rank: int) -> None:
            try:
                found[rank] = work(dist.ProcessGroup(rank, size))
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return start


FAST = {"interdomain": "positions", "mamba2": "pads", "selective-scan": "ends", "s4d-rope": "rows"}


@pytest.mark.parametrize(("name", "kind"), FAST.items(), ids=FAST)
def test_pieces_in_threads(name, kind, make_model, in_threads, assert_same):
    model, batch = make_model(name, **RECURRENT[name]), batch_of(kind)
    pieces = in_threads(4, lambda group: run_piece(model, batch, group))
    assert_pieces_are(run(model, batch, weights_of(batch)), pieces, assert_same)
