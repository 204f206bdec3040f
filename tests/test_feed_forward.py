"""The seam of the feed-forward layers: their names, one of one's own, and what it adds to the training loss."""

import copy
from functools import partial

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils import _pytree
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from examples.text_data import next_token_nll
from examples.training import next_token_loss
from modeling_interdomain import (
    AuxiliaryLoss,
    InterdomainConfig,
    InterdomainForSequenceClassification,
    add_layer_loss,
    register_feed_forward,
)
from modeling_interdomain.feed_forwards import mlp as feed_forward_mlp
from modeling_interdomain.outputs import layer_losses as module_layer_losses
from modeling_interdomain.outputs.layer_losses import InterdomainClassifierOutput
from modeling_interdomain.registry import FEED_FORWARDS

REFUSED = (ValueError, StrictDataclassError)


class Balanced(nn.Module):
    """A gate over three shares of a linear map, which asks for equal shares."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, 3, bias=False)
        self.balance = AuxiliaryLoss()

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        self.balance(shares.square().sum(-1).mean())
        return self.proj(x) * shares[..., :1]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(FEED_FORWARDS, "balanced", Balanced)


@pytest.fixture
def balanced(make_model):
    """Two of three layers have an auxiliary loss."""
    kinds = {"num_hidden_layers": 3, "token_mixers": ["interdomain", "softmax", "s4d"]}
    return make_model(**kinds, feed_forwards=["balanced", "none", "balanced"], aux_loss_coef=0.5)


def gradients(model, loss) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


# Names.


def test_a_layer_may_end_with_its_mixer(make_model, random_ids, assert_same):
    model = make_model(feed_forwards=["mlp", "none"])
    full, bare = model.model.layers
    assert bare.mlp is None and not any("mlp" in n or "post_attention" in n for n in bare.state_dict())
    x = torch.randn(1, 4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_same(bare(x), x + bare.token_mixer(bare.input_layernorm(x))[0])
    mixed = x + full.token_mixer(full.input_layernorm(x))[0]
    assert_same(full(x), mixed + full.mlp(full.post_attention_layernorm(mixed)))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("moe", "feed_forwards must be made of mlp, cdmoe, none, .*register_feed_forward has added; got moe"),
        (["mlp", "moe"], "got moe"),
        (["mlp"], "feed_forwards has 1 names for num_hidden_layers = 2"),
    ],
)
def test_names_that_are_refused(names, message):
    with pytest.raises(REFUSED, match=message):
        InterdomainConfig(num_hidden_layers=2, feed_forwards=names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_a_text_are_the_whole(dtype, monkeypatch):
    """With and without gradients: what is not differentiated goes through in memory that is used again."""
    mlp = FEED_FORWARDS["mlp"](InterdomainConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2), 0)
    mlp, x = mlp.to(dtype), torch.randn(2, 5, 16).to(dtype)
    given, expected = x.clone(), mlp(x).detach()
    opened = torch.relu(mlp.gate_proj(x)) * mlp.up_proj(x)
    for name in ("NUMBERS_AT_ONCE", "_NUMBERS_IN_TILES"):
        monkeypatch.setattr(feed_forward_mlp, name, 3 * 24)
    monkeypatch.setattr(feed_forward_mlp, "_FEW", 0)
    pieces, products = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **into: pieces.append(args[0].shape[0]) or products(*args, **into))
    with torch.no_grad():
        found = mlp(x)
        assert pieces == [size for size in (3, 3, 3, 1) for _ in range(3)]
        assert torch.equal(x, given) and torch.equal(mlp(x.mT.contiguous().mT), found)
        with torch.autocast("cpu", torch.bfloat16):
            assert mlp(x).dtype == torch.bfloat16
        mlp.up_proj.register_forward_hook(lambda module, args, output: 2 * output)
        doubled = mlp(x)
        mlp.act_fn.forward = torch.relu
        other = mlp(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(doubled, 2 * expected)
    torch.testing.assert_close(other, mlp.down_proj(2 * opened))


def test_registering():
    with pytest.raises(ValueError, match="The name 'none' belongs to the feed-forward layer no layer at all"):
        register_feed_forward("none", Balanced)
    with pytest.raises(ValueError, match="subclass of torch.nn.Module"):
        register_feed_forward("another", Balanced.forward)
    assert "another" not in FEED_FORWARDS


def test_saved_and_loaded(balanced, random_ids, tmp_path):
    model = balanced.float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.feed_forwards == ["balanced", "none", "balanced"]
    assert loaded(random_ids(2, 5)).logits.equal(model(random_ids(2, 5)).logits)


# Auxiliary losses.


def test_they_are_added_in_training_alone(balanced, random_ids, assert_same):
    ids = random_ids(2, 7)
    alone = balanced(ids, labels=ids)
    assert alone.aux_loss is None and alone.auxiliary_losses is None
    asked = balanced(ids, labels=ids, output_auxiliary_losses=True)
    assert_same(asked.loss, alone.loss)
    assert len(asked.auxiliary_losses) == 2
    assert_same(asked.aux_loss, sum(asked.auxiliary_losses))
    trained = balanced.train()(ids, labels=ids)
    assert_same(trained.auxiliary_losses, asked.auxiliary_losses)
    assert_same(trained.loss, alone.loss + 0.5 * asked.aux_loss)
    assert alone.layer_loss is None and asked.layer_loss is None
    mine = balanced(ids)  # for a loss of one's own
    assert mine.loss is None
    assert_same(mine.layer_loss, 0.5 * asked.aux_loss)
    shorter = balanced(ids[:, :-1]).layer_loss
    assert_same(next_token_loss(balanced, ids), next_token_nll(balanced, ids).mean() + shorter)


def test_the_gradient_is_that_of_the_sum(balanced, random_ids, assert_same):
    ids = random_ids(2, 7)
    found = balanced(ids, labels=ids, output_auxiliary_losses=True)
    expected = gradients(balanced, found.loss + 0.5 * found.aux_loss)
    gate = [n for n, _ in balanced.named_parameters()].index("model.layers.2.mlp.gate.weight")
    assert not torch.allclose(expected[gate], gradients(balanced, balanced(ids, labels=ids).loss)[gate])
    balanced.train()
    assert_same(gradients(balanced, balanced(ids, labels=ids).loss), expected)
    balanced.gradient_checkpointing_enable()
    assert_same(gradients(balanced, balanced(ids, labels=ids).loss), expected)


def test_reentrant_checkpointing_would_lose_them(balanced, random_ids):
    balanced.train().gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match='auxiliary losses.*"use_reentrant": False'):
        balanced(random_ids(1, 4), labels=random_ids(1, 4))


def test_a_coefficient_of_zero_adds_nothing(balanced, random_ids):
    balanced.config.aux_loss_coef, ids = 0.0, random_ids(2, 7)
    expected = balanced(ids, labels=ids).loss
    trained = balanced.train()(ids, labels=ids)
    assert trained.loss.equal(expected) and trained.aux_loss > 0


def test_accumulated_batches_are_one_batch(balanced, random_ids, assert_same):
    ids = random_ids(5, 7)
    whole = balanced.train()(ids, labels=ids).loss
    items = torch.tensor(5 * 6)
    parts = sum(balanced(x, labels=x, num_items_in_batch=items).loss for x in (ids[:1], ids[1:]))
    assert_same(parts, whole, rtol=1e-6)  # the library's cross-entropy is in float32
    assert_same(gradients(balanced, parts), gradients(balanced, whole), rtol=1e-6, atol=1e-7)


def test_trainer_reports_the_sum(balanced, random_ids, tmp_path, assert_same):
    model, rows = balanced.float(), random_ids(6, 8)
    before = copy.deepcopy(model).train()(rows, labels=rows).loss
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 1, "logging_steps": 1}
    arguments = TrainingArguments(str(tmp_path), **settings, report_to=[], use_cpu=True, disable_tqdm=True)
    examples = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=examples, eval_dataset=examples)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(before.item(), rel=1e-4)
    expected = model.eval()(rows, labels=rows).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_of_ones_own_in_the_trainer(smoothing, balanced, random_ids, tmp_path, caplog):
    """Accumulated batches of different lengths, with the layers' losses and without, of which a warning tells."""
    model, rows = balanced.float(), random_ids(4, 8)
    examples = [{"input_ids": row, "labels": row.clone()} for row in rows]
    examples[0]["labels"][3:] = -100
    labels = torch.stack([example["labels"] for example in examples])
    smoother = partial(LabelSmoother(smoothing), shift_labels=True)
    module_layer_losses.logger.warning_once.cache_clear()
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 1, "logging_steps": 1}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    found = {}
    for name, changes, extra in (
        ("with", {}, {"compute_loss_func": add_layer_loss(smoother)}),
        ("without", {"label_smoothing_factor": smoothing}, {} if smoothing else {"compute_loss_func": smoother}),
    ):
        arguments = TrainingArguments(str(tmp_path), **settings, **changes)
        trainer = Trainer(copy.deepcopy(model), arguments, train_dataset=examples, **extra)
        caplog.clear()
        with caplog.at_level("WARNING"):
            trainer.train()
        found[name] = trainer.state.log_history[0]["loss"]
        assert ("without what the layers add" in caplog.text) == (name == "without")
        evaluated = smoother(trainer.model.eval()(rows), labels).item()
        assert trainer.evaluate(examples)["eval_loss"] == pytest.approx(evaluated, rel=1e-4)
    expected = smoother(model.train()(rows), labels).item()
    assert found["without"] == pytest.approx(expected, rel=1e-4)
    counted = (labels[:, 1:] != -100).sum(1)
    added = sum(n * model(row[None]).layer_loss for n, row in zip(counted, rows, strict=True)) / counted.sum()
    assert found["with"] == pytest.approx(expected + added.item(), rel=1e-4)


def test_labels_of_rows_are_not_shifted():
    """Several a row, as the Trainer counts them."""
    outputs = InterdomainClassifierOutput(logits=torch.zeros(4, 3), layer_loss=torch.tensor(2.0))
    loss = add_layer_loss(lambda outputs, labels, num_items_in_batch: torch.tensor(1.0))
    assert loss(outputs, torch.ones(4, 3), num_items_in_batch=torch.tensor(24)) == 1 + 2.0 * 12 / 24


def test_a_loss_in_a_loop_of_ones_own(balanced, random_ids, caplog):
    ids = random_ids(2, 7)
    module_layer_losses.logger.warning_once.cache_clear()
    outputs = balanced.train()(ids)
    (outputs.logits.square().mean() + outputs.layer_loss).backward()
    balanced(ids, labels=ids).loss.backward()
    assert not caplog.text
    balanced(ids).logits.square().mean().backward()
    assert "add outputs.layer_loss" in caplog.text


def test_classifiers_add_them_too(make_model, random_ids, assert_same):
    arguments = {"feed_forwards": "balanced", "num_labels": 3, "aux_loss_coef": 0.5}
    model, ids = make_model("interdomain", InterdomainForSequenceClassification, **arguments), random_ids(2, 7)
    labels = torch.tensor([0, 2])
    asked = model(ids, labels=labels, output_auxiliary_losses=True)
    assert_same(asked.loss, model(ids, labels=labels).loss)
    assert_same(model.train()(ids, labels=labels).loss, asked.loss + 0.5 * sum(asked.auxiliary_losses))


def test_outputs_are_taken_apart_and_put_together(balanced, random_ids):
    """What DataParallel and DDP do with them."""
    output = balanced.train()(random_ids(1, 4), labels=random_ids(1, 4))
    leaves, structure = _pytree.tree_flatten(output)
    again = _pytree.tree_unflatten(leaves, structure)
    assert type(again) is type(output) and list(again) == list(output)
    assert type(output)((name, output[name]) for name in output).aux_loss is output.aux_loss


@pytest.mark.slow
def test_a_compiled_training_step(balanced, random_ids):
    model, ids = balanced.float().train(), random_ids(2, 6)
    expected = model(ids, labels=ids).loss
    found = torch.compile(model)(ids, labels=ids)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(gradients(model, found.loss), gradients(model, expected), rtol=1e-3, atol=1e-5)


def test_outputs_without_logits_are_those_of_tokens():
    outputs = {"layer_loss": torch.tensor(2.0)}
    labels = torch.tensor([[5, 5, -100, 5]])
    loss = add_layer_loss(lambda outputs, labels, num_items_in_batch=None: torch.tensor(0.0))
    torch.testing.assert_close(loss(outputs, labels, torch.tensor(4)), torch.tensor(2.0 * 2 / 4))


def test_a_step_whose_labels_are_all_ignored_adds_nothing():
    outputs = {"layer_loss": torch.tensor(2.0)}
    loss = add_layer_loss(lambda outputs, labels, num_items_in_batch=None: torch.tensor(0.0))
    assert loss(outputs, torch.full((1, 4), -100), torch.tensor(0)) == 0
