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


DISTRIBUTED = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from examples.training import next_token_loss
from modeling_interdomain import InterdomainForCausalLM

dist.init_process_group("gloo")
windows = torch.load(sys.argv[2]).chunk(2)[dist.get_rank()]
losses = {"logits": next_token_loss, "labels": lambda model, ids: model(input_ids=ids, labels=ids).loss}
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
