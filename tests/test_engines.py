"""Training with the stock engines gives the curve of one plain process: DDP, FSDP2, DeepSpeed, compile, TRL."""

import copy
import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.utils import is_accelerate_available

from examples import text_data, train
from examples.quickstart import load_config
from tests.test_examples import some_documents
from tests.test_train import history, options, texts  # noqa: F401  the fixtures of the example's runs

TINY = train.REPOSITORY / "configuration" / "interdomain-tiny"


def launch(launcher, arguments):
    """`examples.train` in processes of its own, as a user starts it."""
    environment = os.environ | {"PYTHONPATH": str(train.REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", *launcher, "-m", "examples.train", *map(str, arguments)]
    done = subprocess.run(command, cwd=train.REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def torchrun(processes):
    return f"torch.distributed.run --nproc_per_node {processes} --rdzv_backend c10d --rdzv_endpoint localhost:0".split()


def assert_same_curve(folder, other, tolerance=2e-5):
    mine, theirs = history(folder), history(other)
    assert [row[0] for row in mine] == [row[0] for row in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert a[1:] == pytest.approx(b[1:], abs=tolerance)


def assert_same_parameters(folder, other):
    mine, theirs = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, other))
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_batch(options, tmp_path):  # noqa: F811
    assert train.main(options("one", per_device_train_batch_size=4)) == 0
    launch(torchrun(2), options("two"))
    assert_same_curve(tmp_path / "two", tmp_path / "one")


SHARDED = {
    "interdomain": {},
    "cheems": {
        "token_mixers": ["ssd", "inner_function"],
        "ssd_state_size": 8,
        "inner_value_dim": 8,
        "dynamic_mask": "position",
        "feed_forwards": "cdmoe",
        "num_experts": 64,
        "experts_per_head": 2,
        "expert_key_dim": 8,
    },
}
_EXPERTS = {"feed_forwards": "cdmoe", "num_experts": 64, "experts_per_head": 2, "expert_key_dim": 8}
# With those above every token mixer is sharded with every feed-forward layer.
SHARDED_TOO = {
    "experts": {"num_hidden_layers": 4, "token_mixers": ["interdomain", "s4d", "softmax", "selective_scan"]} | _EXPERTS,
    "mlp": {
        "num_hidden_layers": 5,
        "token_mixers": ["s4d", "softmax", "selective_scan", "ssd", "inner_function"],
        "ssd_state_size": 8,
        "inner_value_dim": 8,
        "dynamic_mask": "value",
    },
}


@pytest.mark.parametrize(
    "changes",
    [
        SHARDED["interdomain"],
        pytest.param(SHARDED["cheems"], marks=pytest.mark.slow),
        *(pytest.param(x, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for x in SHARDED_TOO.values()),
    ],
    ids=[*SHARDED, *SHARDED_TOO],
)
def test_sharded_parameters_equal_whole_ones(options, tmp_path, changes):  # noqa: F811
    """FSDP2: every parameter is split over two processes, those of a state space model and of experts included."""
    (tmp_path / "model").mkdir()
    fields = json.loads((TINY / "config.json").read_text()) | changes
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    assert train.main(options("start", config=tmp_path / "model")) == 0
    go_on = {"model": tmp_path / "start", "save_only_model": "true"}
    assert train.main(options("whole", per_device_train_batch_size=4, **go_on)) == 0
    launch(torchrun(2), options("sharded", fsdp_size=2, **go_on))
    assert_same_curve(tmp_path / "sharded", tmp_path / "whole")
    assert_same_parameters(tmp_path / "sharded", tmp_path / "whole")


def test_names_of_what_is_sharded_leave_one_dtype_together(recurrent_model):
    """Of a model in bfloat16, whose recurrences are wider."""
    model = recurrent_model.to(torch.bfloat16)
    named = [name for name, part in model.named_modules() if type(part).__name__ in model._no_split_modules]
    groups = {}
    for name, parameter in model.named_parameters():
        holder = max((part for part in named if name.startswith(f"{part}.")), key=len, default="")
        groups.setdefault(holder, set()).add(parameter.dtype)
    assert {torch.float64, torch.bfloat16} == set.union(*groups.values())
    assert all(len(dtypes) == 1 for dtypes in groups.values()), groups


IN_BFLOAT16 = """
import os, sys, torch, torch.distributed as dist
from types import SimpleNamespace
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp import fully_shard
from transformers.distributed.configuration_utils import DistributedConfig
from modeling_interdomain import InterdomainCache, InterdomainForCausalLM

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
os.environ["ACCELERATE_USE_FSDP"] = "true"
PartialState(cpu=True)


def by_names(model):
    named = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for module in (*reversed(named), model):
        fully_shard(module, mesh=mesh)
    return model


def by_accelerate(model):  # whose Accelerator shards nothing on CPUs
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    parallel = SimpleNamespace(fsdp_dim_names=["fsdp"])
    state = {"state": SimpleNamespace(fsdp_plugin=plugin), "mixed_precision": "no", "is_main_process": True}
    return fsdp2_prepare_model(SimpleNamespace(**state, torch_device_mesh=mesh, parallelism_config=parallel), model)


ids, found = torch.arange(40).view(2, 20), {}
for kind in ("whole", "names", "accelerate", "library"):
    shards = {"distributed_config": DistributedConfig(fsdp_size=2)} if kind == "library" else {}
    model = InterdomainForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, **shards).train()
    model = {"names": by_names, "accelerate": by_accelerate}.get(kind, lambda model: model)(model)
    with torch.no_grad():  # what is read of a recurrence beside its forward
        cache = InterdomainCache(model.config)
        cache.activate_past_recording()
        model.eval()(ids, past_key_values=cache, output_attentions=True)
        model(ids[:, :6], past_key_values=cache)
        cache.crop(-5)
        after = model.train()(ids[:, 1:6], past_key_values=cache).logits[:, -1].float()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    gradients = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}
    if kind == "whole":
        expected, first, replayed = gradients, loss.detach(), after
        continue
    torch.testing.assert_close(loss.detach(), first, rtol=1e-3, atol=1e-3)
    assert (after - replayed).norm() < 0.02 * replayed.norm()
    for name, gradient in gradients.items():
        size = expected[name].float().norm()
        assert (gradient - expected[name]).float().norm() < 0.02 * size + 1e-6, (kind, name)
dist.destroy_process_group()
"""
BFLOAT16 = {
    "hax": {"sparse_attention": "key_selection", "sparse_keys": 64, "sparse_key_dim": 4, "learned_state": True},
    "others": {"token_mixers": ["ssd", "softmax", "selective_scan", "s4d"], "num_hidden_layers": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BFLOAT16)
def test_a_model_in_bfloat16_is_sharded(name, make_model, tmp_path):
    """By the classes that it names, by accelerate, which asks for these, and by the library while it loads."""
    changes = BFLOAT16[name] | {"state_dtype": "float32"}
    make_model(dtype=torch.float32, **changes).save_pretrained(tmp_path / "model")
    (tmp_path / "run.py").write_text(IN_BFLOAT16)
    environment = os.environ | {"PYTHONPATH": str(train.REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *torchrun(2), str(tmp_path / "run.py"), str(tmp_path / "model")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.exhaustive  # two runs of four processes, minutes on two cores
def test_pieces_of_sequences_equal_whole_ones(options, tmp_path):  # noqa: F811
    """Of four processes two have the same rows, half of each, of packed documents and an odd length."""
    changes = {"separate_documents": "true", "sequence_length": 33, "gradient_accumulation_steps": 2}
    # The library weighs batches of an evaluation alike, whatever they hold.
    changes |= {"held_out_bytes": 1500, "per_device_eval_batch_size": 1}
    assert train.main(options("whole", per_device_train_batch_size=4, **changes)) == 0
    launch(torchrun(4), options("pieces", sequence_parallel=2, **changes))
    assert_same_curve(tmp_path / "pieces", tmp_path / "whole")
    whole, pieces = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "pieces"))
    assert pieces["tokens"] == whole["tokens"]
    assert pieces["eval_loss"] == pytest.approx(whole["eval_loss"], abs=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_pieces_of_sequences_with_sharded_parameters(options, tmp_path, processes):  # noqa: F811
    """FSDP2 over all processes, in pairs that hold half of each row: every one has a share of both."""
    changes = {"sequence_length": 33, "gradient_accumulation_steps": 2, "separate_documents": "true"}
    assert train.main(options("start")) == 0
    changes |= {"model": tmp_path / "start", "save_only_model": "true"}
    assert train.main(options("whole", per_device_train_batch_size=processes, **changes)) == 0
    launch(torchrun(processes), options("pieces", sequence_parallel=2, fsdp_size=processes, **changes))
    assert_same_curve(tmp_path / "pieces", tmp_path / "whole")
    assert_same_parameters(tmp_path / "pieces", tmp_path / "whole")


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_gives_the_same_curve(options, tmp_path):  # noqa: F811
    assert train.main(options("plain")) == 0
    arguments = options("zero", deepspeed=train.REPOSITORY / "recipes" / "deepspeed-zero2.json")
    place = arguments.index("--use_cpu")  # DeepSpeed finds the processor by itself
    launch(torchrun(1), arguments[:place] + arguments[place + 2 :])
    assert_same_curve(tmp_path / "zero", tmp_path / "plain")


SAME = {
    "accumulated gradients": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "checkpointed activations": {"per_device_train_batch_size": 4, "gradient_checkpointing": "true"},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
def test_other_ways_to_the_same_curve(options, tmp_path, changes):  # noqa: F811
    assert train.main(options("plain", per_device_train_batch_size=4)) == 0
    assert train.main(options("other", **changes)) == 0
    assert_same_curve(tmp_path / "other", tmp_path / "plain")


@pytest.mark.slow
def test_inductor_trains_the_same_curve(options, tmp_path):  # noqa: F811
    torch._dynamo.reset()  # of what other tests have compiled
    assert train.main(options("plain")) == 0
    assert train.main(options("compiled", torch_compile="true")) == 0
    assert_same_curve(tmp_path / "compiled", tmp_path / "plain", 2e-4)


MISTAKES = {
    "no checkpoint": ({"fsdp_size": 2}, "--fsdp_size needs --model"),
    "resume": ({"fsdp_size": 2, "model": TINY}, "--fsdp_size needs --save_only_model true"),
    "processes": ({"fsdp_size": 2, "model": TINY, "save_only_model": "true"}, "--fsdp_size 2 needs as many processes"),
    "pieces": (
        {"sequence_parallel": 2},
        "--sequence_parallel 2 needs a multiple of as many processes"
        if is_accelerate_available("1.12.0")
        else "--sequence_parallel needs accelerate 1.12 or newer",
    ),
    "no tokenizer": ({"model": TINY}, "holds no tokenizer"),
    "not a checkpoint": ({"model": "nowhere"}, "nowhere has no config.json"),
}


def test_pieces_need_a_newer_accelerate(options, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(train, "is_accelerate_available", lambda least: False)
    assert train.main(options(sequence_parallel=2)) == 2
    assert "--sequence_parallel needs accelerate 1.12 or newer" in capsys.readouterr().err


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(options, capsys, tmp_path, changes, message):  # noqa: F811
    assert train.main(options(**changes)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_with_more_tokens_than_the_checkpoint_is_refused(options, capsys, tmp_path):  # noqa: F811
    assert train.main(options("start")) == 0
    text_data.train_tokenizer(some_documents(), 320).save_pretrained(tmp_path / "larger")
    assert train.main(options(model=tmp_path / "start", tokenizer=tmp_path / "larger")) == 2
    assert "name the tokenizer that the checkpoint was trained with" in capsys.readouterr().err


def test_the_plain_trainer_needs_nothing_of_ours(tmp_path):
    """Transformers' Trainer with its own optimiser, collator and defaults."""
    tokenizer = text_data.train_tokenizer(some_documents(), 300)
    model = AutoModelForCausalLM.from_config(load_config(TINY, tokenizer))
    ids = text_data.encode(tokenizer, some_documents())[: 64 * 8].view(8, 64)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        tmp_path, max_steps=8, learning_rate=1e-2, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 0.3
    assert trainer.evaluate()["eval_loss"] < losses[0]


def conversations():
    """Chats of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": document[: 20 + count]},
                {"role": "assistant", "content": document[20 : 50 + 2 * count]},
            ]
        }
        for count, document in enumerate(some_documents(24))
    ]


def test_trl_compares_a_model_with_itself(tmp_path):
    """DPO begins at the log of 2: no key is drawn in the one and not in the other; and the scores of keys learn."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    tokenizer = text_data.train_tokenizer(some_documents(), 300)
    torch.manual_seed(0)
    sparse = {"sparse_attention": "hax", "sparse_keys": 8, "sparse_key_dim": 4, "sparse_hash_size": 4}
    config = load_config(TINY, tokenizer)
    model = AutoModelForCausalLM.from_config(type(config).from_dict(config.to_dict() | sparse))
    arguments = trl.DPOConfig(
        str(tmp_path), max_steps=2, learning_rate=1e-3, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True
    )
    rows = [{"prompt": f"def f{i}(", "chosen": "self, x):", "rejected": "a b c d"} for i in range(16)]
    arguments.logging_steps = 1
    reference, before = copy.deepcopy(model), copy.deepcopy(model)
    trainer = trl.DPOTrainer(
        model, reference, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    scorers = [name for name, _ in model.named_parameters() if ".scorer." in name]
    assert scorers and all(
        not model.get_parameter(x).equal(before.get_parameter(x)) for x in scorers if "bias" not in x
    )


def test_trl_fine_tunes_on_packed_chats(tmp_path):
    """SFTTrainer packs chats into one row; each of them costs what it costs alone."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    tokenizer = text_data.train_tokenizer(some_documents(), 300)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(load_config(TINY, tokenizer))
    arguments = trl.SFTConfig(
        str(tmp_path / "sft"),
        max_length=128,
        packing=True,
        max_steps=6,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    data = Dataset.from_list(conversations())
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    ends = batch["cu_seq_lens_q"].tolist()
    assert len(ends) > 2
    packed = trainer.compute_loss(model.train(), dict(batch)).item()
    chats = batch["input_ids"].split(torch.tensor(ends).diff().tolist(), dim=1)
    alone = [model(chat, labels=chat).loss.item() for chat in chats]
    predicted = [end - start - 1 for start, end in zip(ends, ends[1:])]
    expected = sum(loss * count for loss, count in zip(alone, predicted)) / sum(predicted)
    assert packed == pytest.approx(expected, rel=1e-5)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 0.2
    trainer.save_model(tmp_path / "chat")
    assert AutoTokenizer.from_pretrained(tmp_path / "chat").chat_template
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "chat").config.vocab_size == len(tokenizer)
