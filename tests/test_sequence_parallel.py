"""Rows in pieces over several processes: outputs, gradients, caches and losses are those of one process, in float64."""

import copy
import os
import threading
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.exchanged_bytes import exchange
from modeling_interdomain import (
    InterdomainCache,
    InterdomainForSequenceClassification,
    sequence_piece,
)
from modeling_interdomain.parallel import sequence as sequence_parallel
from tests.conftest import VOCABULARY

LENGTH = 23
# Where rows are cut: pieces of a token, and shorter than what a convolution reaches back.
CUTS = {2: [0, 9, LENGTH], 4: [0, 7, 8, 10, LENGTH]}
# Models of recurrent layers, and in threads the rows that each reads: see `batch_of`.
RECURRENT = {
    "interdomain": "positions",
    "mamba2": "pads",
    "selective-scan": "ends",
    "s4d-rope": "rows",
    "rope-before": "positions",
    "rope-after": "ends",
    "grouped": "rows",
    "one-group": "pads",
    "normalized": "pads",
    "identity": "ends",
    "s4d": "positions",
    "single-input": "pads",
    "linear-readout": "rows",
    "gated": "ends",
    "no-convolution": "positions",
    "ssd": "positions",
    "forget-gates": "pads",
    "warped-time": "positions",
}
FAST = ("interdomain", "mamba2", "selective-scan", "s4d-rope", "forget-gates")
# In processes.
CASES = [("interdomain", kind) for kind in ("rows", "pads", "positions", "ends")]
CASES += [("ssd", "pads"), ("selective-scan", "positions"), ("s4d-rope", "ends")]


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    """Whole rows, and how they are to be read."""
    ids = torch.randint(4, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if kind == "rows":
        return {"input_ids": ids}
    if kind == "pads":  # at either end, a piece that holds nothing else, and one that a state passes over
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, :9], mask[1, 19:], mask[1, 8] = 0, 0, 0
        return {"input_ids": ids, "attention_mask": mask}
    if kind == "positions":  # documents over the cuts, at them, and of one token
        ends = [[0, 3, 16, 17, LENGTH], [0, 7, 8, LENGTH]]
        rows = [torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in ends]
        return {"input_ids": ids, "position_ids": torch.stack(rows)}
    return {"input_ids": ids[:1], "cu_seq_lens_q": torch.tensor([0, 2, 9, 18, LENGTH])}


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
        self.numbers = 0  # of floats that the first has gathered, of its own
        self.brought: list = [None] * size
        self.barrier = threading.Barrier(size)

    def _all(self, x: torch.Tensor, group) -> list[torch.Tensor]:
        self.brought[group.rank()] = x
        self.barrier.wait(60)
        found = list(self.brought)
        self.barrier.wait(60)
        return found

    def all_gather_single(self, output, x, group):
        self.numbers += x.numel() * (x.is_floating_point() and group.rank() == 0)
        output.copy_(torch.cat(self._all(x, group)))

    def reduce_scatter_single(self, output, x, group):
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


@pytest.fixture(scope="module")
def models(make_model):
    """Those of `RECURRENT`, all layers recurrent."""
    mixers = {"one-group": "interdomain", "rope-after": "interdomain"}
    return {name: make_model(name, **{"token_mixers": mixers[name]} if name in mixers else {}) for name in RECURRENT}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT]
)
def test_pieces_in_threads(name, models, in_threads, assert_same):
    model, batch = models[name], batch_of(RECURRENT[name])
    pieces = in_threads(4, lambda group: run_piece(model, batch, group))
    assert_pieces_are(run(model, batch, weights_of(batch)), pieces, assert_same)


def test_losses_in_threads(models, in_threads):
    """Each process has the loss of the whole rows, and gradients whose mean over the processes is that of one."""
    model, batch = models["interdomain"], labelled()
    parameters = list(model.parameters())

    def read(**inputs):
        loss = model(**inputs, use_cache=False).loss
        return loss.detach(), torch.autograd.grad(loss, parameters)

    whole, expected = read(**batch)
    pieces = in_threads(4, lambda group: read(**sequence_piece(batch, group)))
    for loss, _ in pieces:
        torch.testing.assert_close(loss, whole)
    for gradient, *parts in zip(expected, *(found for _, found in pieces), strict=True):
        torch.testing.assert_close(sum(parts) / 4, gradient)


WINDOWS = {
    "memory": {},
    "alone": {"window_memory": False},
    "sinks in several pieces": {"attention_window": 2, "attention_sinks": 9},
    "no sinks": {"attention_sinks": 0},
}


@pytest.mark.parametrize("kind", ["rows", "pads", "positions", "ends"])
@pytest.mark.parametrize("fields", WINDOWS.values(), ids=WINDOWS)
def test_windows_in_threads(fields, kind, make_model, in_threads, assert_same):
    """Keys and values of the window and the sinks come from the processes that have read them, as the state does."""
    model, batch = make_model("window", num_hidden_layers=2, feed_forwards="mlp", **fields), batch_of(kind)
    pieces = in_threads(4, lambda group: run_piece(model, batch, group))
    assert_pieces_are(run(model, batch, weights_of(batch)), pieces, assert_same)


@pytest.mark.parametrize("fields", WINDOWS.values(), ids=WINDOWS)
def test_the_last_piece_of_a_window_goes_on_alone(fields, make_model, in_threads, assert_same):
    model, batch = make_model("window", num_hidden_layers=2, feed_forwards="mlp", **fields), batch_of("rows")
    cache = InterdomainCache(model.config)
    with torch.no_grad():
        model(**batch, past_key_values=cache)
        expected = {name: x.clone() for name, x in cache.named_tensors().items()}
        *_, (tensors, seen, logits) = in_threads(4, lambda group: prefill(model, batch, group))
        assert seen == LENGTH
        for name, x in expected.items():
            assert_same(tensors[name], x)
        assert_same(logits, model(batch["input_ids"][:, -1:], past_key_values=cache).logits)


def work(rank: int, folder: str) -> None:
    """One of four processes: all cases in a group of four and in groups of two, and what needs a mesh."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    # A group of two: the processes of one row, the others have another one, or the same again.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "data"))
    groups = {4: dist.group.WORLD, 2: mesh["sequence"].get_group()}
    models = torch.load(f"{folder}/models", weights_only=False)
    found = {}
    for (name, kind), size in product(CASES, groups):
        found[name, kind, size] = run_piece(models[name], batch_of(kind), groups[size])
    model, batch = models["interdomain"], batch_of("rows")
    for size, group in groups.items():
        found["prefill", size] = prefill(model, batch, group)
    found["losses"] = losses(model, groups[4])
    found["checkpointed"] = checkpointed(model, groups[2])
    found["sharded"] = sharded(model, mesh)
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def prefill(model, batch, group):
    """The state after this piece, the tokens it counts, and from the last process what the next token is told."""
    cache, ids = InterdomainCache(model.config), batch["input_ids"]
    with torch.no_grad():
        model(**cut(batch, CUTS[group.size()], group.rank()), past_key_values=cache, sequence_group=group)
        tensors = {name: x.clone() for name, x in cache.named_tensors().items()}
        return tensors, cache.get_seq_length(), model(ids[:, -1:], past_key_values=cache).logits


def labelled():
    """Rows of documents of which some tokens are not to be predicted."""
    batch = batch_of("positions")
    labels = batch["input_ids"].clone()
    labels[0, 3:9] = -100
    return batch | {"labels": labels}


def losses(model, group):
    """Of pieces that `sequence_piece` cuts: of the whole, as a share of ten tokens, and gradients."""
    piece = sequence_piece(labelled(), group)
    loss = model(**piece).loss
    model.zero_grad()
    loss.backward()
    share = model(**piece, num_items_in_batch=torch.tensor(10)).loss
    return loss.detach(), share.detach(), {name: p.grad for name, p in model.named_parameters()}


def checkpointed(model, group):
    """With activations that the backward pass makes anew, exchanges among them."""
    model = copy.deepcopy(model).train()
    model.gradient_checkpointing_enable()
    return run_piece(model, batch_of("positions"), group)


def sharded(model, mesh):
    """FSDP2 over the data axis, each of whose processes has a row, and replicas over the sequence axis."""
    model, group = copy.deepcopy(model), mesh["sequence"].get_group()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    row = slice(mesh["data"].get_local_rank(), mesh["data"].get_local_rank() + 1)
    whole = batch_of("rows")
    batch, weights = {"input_ids": whole["input_ids"][row]}, weights_of(whole)[row]
    ends, rank = CUTS[2], group.rank()
    logits = cut({"": weights}, ends, rank)[""] * model(**cut(batch, ends, rank), sequence_group=group).logits
    (4 * logits.sum()).backward()  # engines average
    return logits.detach(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def found(models, tmp_path_factory):
    """What four processes found, one after the other."""
    folder = tmp_path_factory.mktemp("processes")
    torch.save(models, folder / "models")
    mp.start_processes(work, (str(folder),), nprocs=4, start_method="forkserver")
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(4)]


# In a mesh of 2 x 2 whose first axis is that of the sequence.
PROCESSES = {2: [0, 2], 4: [0, 1, 2, 3]}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_pieces_in_processes(name, kind, models, found, assert_same):
    model, batch = models[name], batch_of(kind)
    whole = run(model, batch, weights_of(batch))
    for size, ranks in PROCESSES.items():
        assert_pieces_are(whole, [found[rank][name, kind, size] for rank in ranks], assert_same)


@pytest.mark.slow
def test_a_prefill_in_processes(models, found, assert_same):
    """Each holds the state after its piece, so the last one goes on alone."""
    model, batch = models["interdomain"], batch_of("rows")
    for size, ranks in PROCESSES.items():
        for place, rank in enumerate(ranks):
            read = batch["input_ids"][:, : CUTS[size][place + 1]]
            cache = InterdomainCache(model.config)
            with torch.no_grad():
                model(read, past_key_values=cache)
                tensors, seen, logits = found[rank]["prefill", size]
                assert seen == read.shape[1] == cache.get_seq_length()
                for name, x in cache.named_tensors().items():
                    assert_same(tensors[name], x)
                assert_same(logits, model(batch["input_ids"][:, -1:], past_key_values=cache).logits)


@pytest.mark.slow
def test_losses_of_processes(models, found):
    """Every process has the loss of all, and the mean of the gradients is its gradient."""
    model, batch = models["interdomain"], labelled()
    whole = model(**batch).loss
    losses, shares, grads = zip(*(found[rank]["losses"] for rank in range(4)))
    predicted = int((batch["labels"][:, 1:] != -100).sum())
    for loss in (*losses, sum(shares) * 10 / predicted):
        torch.testing.assert_close(loss, whole.detach(), rtol=1e-6, atol=0)  # the library's loss is in float32
    expected = torch.autograd.grad(whole, list(model.parameters()))
    for (name, _), grad in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(sum(x[name] for x in grads) / 4, grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "kind"), [("checkpointed", "positions"), ("sharded", "rows")])
def test_engines_in_processes(what, kind, models, found, assert_same):
    model, batch = models["interdomain"], batch_of(kind)
    logits, grads = run(model, batch, weights_of(batch))
    if what == "checkpointed":
        assert_pieces_are((logits, grads), [found[rank][what] for rank in PROCESSES[2]], assert_same)
        return
    rows = [torch.cat([found[rank][what][0] for rank in ranks], dim=1) for ranks in ([0, 2], [1, 3])]
    assert_same(torch.cat(rows), logits)
    for rank in range(4):
        for name, grad in grads.items():
            scale = grad.abs().max().clamp(min=1)
            assert_same(found[rank][what][1][name] / scale, grad / scale)


def refused(model, in_threads, batch=None, **arguments) -> str:
    """What two processes are told, both the same."""
    batch = batch_of("rows") if batch is None else batch
    found = in_threads(2, lambda group: run_piece_with(model, batch, group, arguments))
    assert all(type(error) is ValueError for error in found), found
    (message,) = {str(error) for error in found}
    return message


def run_piece_with(model, batch, group, arguments):
    return model(**cut(batch, CUTS[2], group.rank()), sequence_group=group, **arguments)


@pytest.mark.parametrize("name", ["interdomain", "s4d"])
def test_what_is_exchanged(name, models, in_threads):
    """A layer sends its state and the last inputs of its convolutions: numbers that no length changes."""
    model, batch = models[name], batch_of("rows")
    in_threads(2, lambda group: run_piece_with(model, batch, group, {"use_cache": False}))
    sizes = model.config.state_sizes(LENGTH)
    assert sequence_parallel.dist.numbers == 2 * (sizes["recurrent"] + sizes["convolution"])  # of two rows
    found = exchange(model.config, LENGTH, processes=2)
    assert found.states * model.config.num_hidden_layers == 4 * sizes["recurrent"] + 2 * sizes["convolution"]


def _with(name, change):
    """A batch of whole rows, one argument of which is changed in the second process."""
    return lambda piece, rank: piece | {name: change(piece.get(name))} if rank else piece


ONE_ALONE = {
    "an id": (_with("input_ids", lambda x: x + VOCABULARY), "input_ids"),
    "a label": (_with("labels", lambda x: x + VOCABULARY), "labels"),
    "a mask": (_with("attention_mask", lambda x: torch.ones(2, 3)), "attention_mask must have"),
    "positions": (_with("position_ids", lambda x: torch.ones(2, 3)), "position_ids"),
}
ALIKE = {
    "labels": _with("labels", lambda x: None),
    "number of items": _with("num_items_in_batch", lambda x: 10),
    "shifted labels": lambda piece, rank: piece | ({"shift_labels": piece["labels"]} if rank else {}),
}


@pytest.mark.parametrize(("change", "message"), ONE_ALONE.values(), ids=ONE_ALONE)
def test_what_one_process_refuses_ends_all(change, message, models, in_threads):
    """None waits for it, and the next forward is as any other."""
    model, batch = models["interdomain"], labelled()
    batch = {name: batch[name] for name in ("input_ids", "labels")}

    def read(group, wrong=True):
        piece = sequence_piece(batch, group)
        return model(**(change(piece, group.rank()) if wrong else piece), use_cache=False).loss.detach()

    other, own = in_threads(2, read)
    assert type(own) is ValueError and message in str(own), own
    assert str(other) == "Process 1 of the sequence_group has refused its piece; its own error says why."
    for loss in in_threads(2, lambda group: read(group, wrong=False)):
        torch.testing.assert_close(loss, model(**batch).loss.detach())


@pytest.mark.parametrize("change", ALIKE.values(), ids=ALIKE)
def test_what_is_given_to_some_processes_alone_is_refused(change, models, in_threads):
    model, batch = models["interdomain"], labelled()
    found = in_threads(2, lambda group: model(**change(sequence_piece(batch, group), group.rank()), use_cache=False))
    (message,) = {str(error) for error in found}
    assert message.startswith("The processes of a sequence_group must give the same arguments, got (labels, shift_")


def test_shifted_labels_are_cut(models, in_threads):
    model, batch = models["interdomain"], batch_of("rows")
    batch |= {"labels": batch["input_ids"], "shift_labels": batch["input_ids"].roll(-1, 1)}
    whole = model(**batch).loss.detach()
    for loss in in_threads(4, lambda group: model(**sequence_piece(batch, group), use_cache=False).loss.detach()):
        torch.testing.assert_close(loss, whole)


LAYERS = {
    "softmax": ({"token_mixers": ["interdomain", "softmax"]}, 'Layer 1 is "softmax", which passes no state on'),
    "delta rule": (
        {"delta_rule": True, "product": "hermitian"},
        'Layer 0 is "interdomain" with the delta rule, which passes no state on',
    ),
    "inner function": ({"token_mixers": "inner_function", "inner_value_dim": 8}, 'Layer 0 is "inner_function"'),
    "sparse branch": (
        {"sparse_attention": [None, "hax"], "sparse_keys": 8, "sparse_key_dim": 4, "sparse_hash_size": 4},
        "Layer 1 has a sparse branch",
    ),
    "learned state": ({"learned_state": True}, "Layer 0 has a learned state"),
}


@pytest.mark.parametrize(("changes", "message"), LAYERS.values(), ids=LAYERS)
def test_layers_that_pass_no_state(changes, message, make_model, in_threads):
    assert message in refused(make_model(**changes), in_threads)


def test_arguments_that_cannot_be_cut(make_model, in_threads, random_ids):
    model, ids = make_model(), random_ids(2, 5)
    caches = [InterdomainCache(model.config) for _ in range(2)]
    with torch.no_grad():
        model(ids, past_key_values=caches[0])
    state = caches[0].layers[0].state.clone()
    assert "from their beginning" in refused(model, in_threads, past_key_values=caches[0])
    assert torch.equal(caches[0].layers[0].state, state)
    caches[1].activate_past_recording()
    assert "cannot be taken back" in refused(model, in_threads, past_key_values=caches[1])
    assert not caches[1].layers[0].is_initialized
    assert "output_attentions maps all tokens" in refused(model, in_threads, output_attentions=True)
    mask = torch.ones(2, 1, 9, 9)
    assert "must have shape" in refused(model, in_threads, attention_mask=mask)
    packed = batch_of("ends")
    assert "without pads" in refused(model, in_threads, packed | {"attention_mask": torch.ones(1, LENGTH)})
    ends = {"cu_seq_lens_q": torch.tensor([0, 5, 9])}
    assert "from 0 to 23, the tokens of all processes, got [0, 5, 9]" in refused(model, in_threads, packed | ends)
    with pytest.raises(ValueError, match="sequence_group must be a process group"):
        model(ids, sequence_group=2)
    classifier = make_model(model_class=InterdomainForSequenceClassification)
    assert "reads the last token of whole rows" in refused(classifier, in_threads)


def test_pieces_of_other_rows_are_refused_by_all(make_model, in_threads, random_ids):
    model = make_model()
    found = in_threads(2, lambda group: model(random_ids(2 + group.rank(), 5), sequence_group=group))
    assert all("must hold the same rows" in str(error) and "(2, 5, 0, 0, 0), (3, 5," in str(error) for error in found)


def test_how_a_batch_is_cut():
    batch = {"input_ids": torch.arange(14).view(2, 7), "cu_seq_lens_q": torch.tensor([0, 3, 7]), "use_cache": False}
    pieces = [sequence_piece(batch, dist.ProcessGroup(rank, 3)) for rank in range(3)]
    assert [piece["input_ids"].shape[1] for piece in pieces] == [3, 2, 2]
    assert torch.equal(torch.cat([piece["input_ids"] for piece in pieces], dim=1), batch["input_ids"])
    assert all(piece["cu_seq_lens_q"] is batch["cu_seq_lens_q"] and not piece["use_cache"] for piece in pieces)
    with pytest.raises(ValueError, match="Rows of 7 tokens cannot be cut into 8 pieces"):
        sequence_piece(batch, dist.ProcessGroup(0, 8))


def test_a_classifier_takes_no_pieces(make_model, random_ids):
    model = make_model("interdomain", InterdomainForSequenceClassification, num_labels=3)
    with pytest.raises(ValueError, match="leave sequence_group out"):
        model(random_ids(2, 5), sequence_group=object())
