"""What layers add to a loss that is made of logits: it reaches the scorer in every training there is."""

import os
import subprocess
import sys

import pytest
import torch

from conversion.distill import finetuning_loss
from examples import train
from examples.recall import Pairs, answers
from examples.training import next_token_loss
from modeling_interdomain import InterdomainForCausalLM
from modeling_interdomain.outputs import layer_losses
from modeling_interdomain.outputs import layer_losses as module_layer_losses
from modeling_interdomain.registry import FEED_FORWARDS, TOKEN_MIXERS
from tests.test_feed_forward import Balanced

# All keys are drawn and all are seen, so that nothing is random.
EVERY_KEY = {"sparse_attention": "key_selection", "sparse_keys": 64, "sparse_key_dim": 4}


def recall_loss(model, ids, teacher):
    return answers(model, Pairs(ids, torch.arange(ids.shape[1]).expand_as(ids) % 3 == 2)).loss()


TRAININGS = {
    "recall": recall_loss,
    "text": lambda model, ids, teacher: next_token_loss(model, ids),
    "distillation": lambda model, ids, teacher: finetuning_loss(teacher, model, 0.5)(ids),
    "fine-tuning": lambda model, ids, teacher: finetuning_loss(teacher, model, 0.0)(ids),
}


def scorer_of(model) -> list[torch.nn.Parameter]:
    return [x for name, x in model.named_parameters() if ".sparse.scorer." in name]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_scorer_gets_its_gradient(name, make_model, random_ids):
    """That of the ranking losses, whole, in accumulated halves and with checkpoints; nothing is added in evaluation."""
    teacher, model, ids = make_model("softmax"), make_model(**EVERY_KEY), random_ids(4, 30)
    without = TRAININGS[name](model, ids, teacher).detach()
    model.train()
    found = model(ids[:, :-1], labels=ids[:, :-1])
    expected = torch.autograd.grad(0.1 * sum(found.ranking_losses), scorer_of(model))
    torch.testing.assert_close(found.layer_loss, 0.1 * sum(found.ranking_losses))

    def gradients(part):
        return torch.autograd.grad(TRAININGS[name](model, part, teacher), scorer_of(model))

    torch.testing.assert_close(TRAININGS[name](model, ids, teacher), without + found.layer_loss)
    assert all(x.ne(0).any() for x in expected[::2])
    torch.testing.assert_close(gradients(ids), expected)
    halves = [gradients(part) for part in ids.split(2)]
    torch.testing.assert_close(tuple((a + b) / 2 for a, b in zip(*halves)), expected)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(ids), expected)
    for settings in ({"use_reentrant": True}, {"preserve_rng_state": False}):  # PyTorch's own default is reentrant
        model.gradient_checkpointing_enable(settings)
        with pytest.raises(ValueError, match="reentrant"):
            gradients(ids)


@pytest.fixture(params=["interdomain", "s4d", "ssd", "selective_scan", "softmax", "inner_function"])
def with_losses(request, make_model, monkeypatch):
    """A model of each mixer with balanced feed-forward layers, and with learned scores where it can have such."""
    monkeypatch.setitem(FEED_FORWARDS, "balanced", Balanced)
    keys = EVERY_KEY if TOKEN_MIXERS[request.param].can_branch else {}
    return make_model(f"{request.param}, mlp", feed_forwards="balanced", aux_loss_coef=0.5, **keys)


def gradients_of(loss, model):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


def test_a_loss_past_the_head_trains_the_layers(with_losses, random_ids, assert_same, caplog):
    """Once in every backward pass, unless the caller asks for what they add; and the program is told."""
    model, ids = with_losses, random_ids(2, 12)
    reads = {
        "states": lambda **asked: model.model(ids, **asked).last_hidden_state,
        "tuple": lambda **asked: model.model(ids, return_dict=False, **asked)[0],
        "last of all": lambda **asked: model.model(ids, output_hidden_states=True, **asked).hidden_states[-1],
    }
    plain = model.model(ids).last_hidden_state
    own = gradients_of(plain.square().mean(), model)
    added = gradients_of(model.train()(ids).layer_loss, model)
    assert any(x.ne(0).any() for x in added)
    expected = [a + b for a, b in zip(own, added, strict=True)]
    module_layer_losses.logger.warning_once.cache_clear()
    for read in reads.values():
        assert_same(read(), plain)
        assert not caplog.text
        assert_same(gradients_of(read().square().mean(), model), expected)
        asked = read(output_auxiliary_losses=True, output_ranking_losses=True)
        assert_same(gradients_of(asked.square().mean(), model), own)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same(gradients_of(read().square().mean(), model), expected)
        model.gradient_checkpointing_disable()
        assert "past the head of the model" in caplog.text
        module_layer_losses.logger.warning_once.cache_clear()
        caplog.clear()
    output = model.model(ids)
    assert output.ranking_losses is None and output.auxiliary_losses is None
    model.eval()
    assert_same(gradients_of(model.model(ids).last_hidden_state.square().mean(), model), own)
    assert not caplog.text


def test_a_loss_of_the_last_states_of_a_head_is_warned_of(make_model, random_ids, caplog):
    model, ids = make_model(**EVERY_KEY).train(), random_ids(2, 12)
    module_layer_losses.logger.warning_once.cache_clear()
    model(ids, output_hidden_states=True).hidden_states[-1].square().mean().backward()
    assert "without what the layers add" in caplog.text


DISTRIBUTED = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from examples.training import next_token_loss
from modeling_interdomain import InterdomainForCausalLM

dist.init_process_group("gloo")
windows = torch.load(sys.argv[2]).chunk(2)[dist.get_rank()]
losses = {"logits": next_token_loss, "labels": lambda model, ids: model(input_ids=ids, labels=ids).loss}


class PastTheHead(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model.model(input_ids).last_hidden_state.square().mean()


found = {}
for kind in ("DDP", "FSDP2"):
    for name, loss in losses.items():
        model = InterdomainForCausalLM.from_pretrained(sys.argv[1]).train()
        wrapped = DistributedDataParallel(model) if kind == "DDP" else model
        if kind == "FSDP2":
            for part in (*model.model.layers, model):
                fully_shard(part)
        loss(wrapped, windows).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found[kind, name] = {name: g.full_tensor() if kind == "FSDP2" else g for name, g in gradients.items()}
model = InterdomainForCausalLM.from_pretrained(sys.argv[1]).train()
model.lm_head.requires_grad_(False)
past = DistributedDataParallel(PastTheHead(model))  # as TRL calls a model
for _ in range(2):  # the second tells of parameters that the first has not reached
    model.zero_grad()
    past(windows).backward()
found["past the head"] = {name: p.grad for name, p in model.named_parameters()}
if dist.get_rank() == 0:
    torch.save(found, sys.argv[3])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(make_model, random_ids, tmp_path):
    make_model(**EVERY_KEY, dtype=torch.float32, state_dtype="float32").save_pretrained(tmp_path / "model")
    ids = random_ids(4, 30)
    torch.save(ids, tmp_path / "ids.pt")
    (tmp_path / "run.py").write_text(DISTRIBUTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command += map(str, (tmp_path / "run.py", tmp_path / "model", tmp_path / "ids.pt", tmp_path / "found.pt"))
    environment = os.environ | {"PYTHONPATH": str(train.REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "found.pt")
    model = InterdomainForCausalLM.from_pretrained(tmp_path / "model").train()
    for name, loss in {"logits": next_token_loss(model, ids), "labels": model(ids, labels=ids).loss}.items():
        expected = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))
        assert any(".sparse.scorer." in x and g.ne(0).any() for x, g in expected.items())
        for kind in ("DDP", "FSDP2"):
            torch.testing.assert_close(found[kind, name], expected, rtol=1e-4, atol=1e-6)
    asked = model.model(ids, output_ranking_losses=True, output_auxiliary_losses=True)
    loss, past = asked.last_hidden_state.square().mean() + model(ids).layer_loss, model.model
    expected = dict(zip(dict(past.named_parameters()), torch.autograd.grad(loss, list(past.parameters()))))
    of_past = {name.removeprefix("model."): g for name, g in found["past the head"].items() if g is not None}
    torch.testing.assert_close(of_past, expected, rtol=1e-4, atol=1e-6)


def test_a_base_model_in_training_returns_a_tuple_where_one_is_asked_for(make_model, random_ids):
    model = make_model(**EVERY_KEY).train()
    assert type(model.model(random_ids(1, 6), return_dict=False)) is tuple


def test_a_loss_that_has_passed_the_layers_is_not_warned_of(make_model, random_ids, caplog):
    model, ids = make_model(**EVERY_KEY).train(), random_ids(2, 12)
    layer_losses.logger.warning_once.cache_clear()
    model(ids, labels=ids).loss.backward()
    found = model(ids)
    (found.logits.square().mean() + found.layer_loss).backward()
    assert "without what the layers add" not in caplog.text


def test_a_loss_that_trains_nothing_asks_for_nothing(make_model, random_ids, caplog):
    """With the scorers frozen there is nothing to add, nor to warn of."""
    model, ids = make_model(**EVERY_KEY).train(), random_ids(2, 12)
    for weight in scorer_of(model):
        weight.requires_grad_(False)
    layer_losses.logger.warning_once.cache_clear()
    found = model(ids)
    assert found.ranking_losses and not found.layer_loss.requires_grad
    found.logits.square().mean().backward()
    assert not caplog.text


def test_who_asks_for_one_of_two_losses_has_the_other_trained_along(make_model, random_ids, monkeypatch):
    monkeypatch.setitem(FEED_FORWARDS, "balanced", Balanced)
    model, ids = make_model(feed_forwards="balanced", aux_loss_coef=0.5, **EVERY_KEY).train(), random_ids(2, 12)
    parameters = list(model.model.parameters())

    def gradients(loss):
        found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    both = model.model(ids, output_auxiliary_losses=True, output_ranking_losses=True)
    own, ranked = gradients(both.last_hidden_state.square().mean()), gradients(0.1 * sum(both.ranking_losses))
    asked = model.model(ids, output_auxiliary_losses=True)
    assert asked.ranking_losses is None and len(asked.auxiliary_losses) == 2
    found = gradients(asked.last_hidden_state.square().mean())
    torch.testing.assert_close(found, [a + b for a, b in zip(own, ranked, strict=True)])


@pytest.mark.parametrize("asked", [{}, {"output_ranking_losses": False}, {"output_ranking_losses": None}], ids=str)
def test_who_wants_no_losses_has_them_trained_along(make_model, random_ids, asked):
    model, ids = make_model(**EVERY_KEY).train(), random_ids(2, 12)
    outputs = model.model(ids, **asked)
    assert outputs.ranking_losses is None
    outputs.last_hidden_state.square().mean().backward()
    scorers = [p for name, p in model.named_parameters() if ".sparse.scorer." in name]
    assert scorers and all(p.grad is not None and bool(p.grad.any()) for p in scorers)


def test_a_configuration_that_asks_for_tuples_gets_one_in_training(make_model, random_ids):
    model = make_model(**EVERY_KEY, return_dict=False).train()
    assert type(model.model(random_ids(1, 6))) is tuple


def test_no_return_dict_is_that_of_the_configuration(make_model, random_ids):
    """As outside of training."""
    model, ids = make_model(**EVERY_KEY), random_ids(1, 6)
    assert type(model.train().model(ids, return_dict=None)) is type(model.eval().model(ids, return_dict=None))
