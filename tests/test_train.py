"""The Trainer example: the paper's optimiser, packing, streaming, exact resume, and mistakes named before a run."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from examples import text_data, train
from tests.test_examples import some_documents

TINY = str(train.REPOSITORY / "configuration" / "interdomain-tiny")
CHEEMS = str(train.REPOSITORY / "configuration" / "cheems-tiny")


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in some_documents(120)))
    return str(path)


@pytest.fixture
def options(texts, tmp_path):
    """`options(output="out", **changes)`: arguments of a run of six steps of 2 x 32 tokens."""

    def make(output="out", **changes):
        fields = {
            "config": TINY,
            "data": texts,
            "vocab_size": 300,
            "output_dir": tmp_path / output,
            "sequence_length": 32,
            "per_device_train_batch_size": 2,
            "max_steps": 6,
            "warmup_tokens": 128,
            "logging_steps": 1,
            "save_steps": 3,
            "use_cpu": "true",
            "disable_tqdm": "true",
        } | changes
        return [x for name, value in fields.items() for x in (f"--{name}", str(value))]

    return make


def rates_of(trainer, steps=6) -> list[list[float]]:
    """The learning rate of each group of the trainer's optimiser, step by step."""
    optimizer, scheduler, rates = trainer.optimizer, trainer.create_scheduler(steps), []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


def history(folder, step=6):
    state = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [(row["step"], row["loss"], row["learning_rate"]) for row in state["log_history"] if "loss" in row]


def test_a_run_saves_what_loads_and_logs_its_speed(options, tmp_path, capsys):
    assert train.main(options()) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["tokens"] == 6 * 2 * 32
    assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.config.vocab_size == len(tokenizer)
    state = json.loads((tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text())
    logged = [row for row in state["log_history"] if "tokens_per_second" in row]
    assert len(logged) == 5 and all(row["tokens_per_second"] > 0 and 0 < row["mfu"] < 1 for row in logged)


@pytest.mark.once
def test_a_model_with_experts_logs_how_many_are_in_use(options, tmp_path, capsys):
    fields = json.loads((Path(TINY) / "config.json").read_text())
    fields |= {"feed_forwards": "cdmoe", "num_experts": 64, "experts_per_head": 2, "expert_key_dim": 8}
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts" / "config.json").write_text(json.dumps(fields))
    assert train.main(options(config=tmp_path / "experts")) == 0
    state = json.loads((tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text())
    logged = [row for row in state["log_history"] if "loss" in row]
    assert len(logged) == 6
    assert all(2 / 64 <= row["experts_effective"] <= row["experts_used"] <= 1 for row in logged)
    assert "experts_used" in capsys.readouterr().out
    assert AutoConfig.from_pretrained(tmp_path / "out").num_experts == 64


def test_accelerates_fsdp_rounds_no_recurrence(options, monkeypatch):
    """The policy that it makes of `bf16` is gone before models are sharded."""
    plugin, plain, seen = SimpleNamespace(mixed_precision_policy="bf16"), train.InterdomainTrainer.__init__, []

    def with_plugin(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        monkeypatch.setitem(self.accelerator.state.__dict__, "fsdp_plugin", plugin)

    monkeypatch.setattr(train.InterdomainTrainer, "__init__", with_plugin)
    monkeypatch.setattr(
        train.InterdomainTrainer, "train", lambda *_, **__: seen.append(plugin.mixed_precision_policy) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        train.main(options())
    assert seen == [None]


def test_the_same_curve_with_and_without_a_stop(options, tmp_path, monkeypatch):
    assert train.main(options("whole")) == 0

    class Stop(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = True

    plain = train.InterdomainTrainer.__init__

    def interrupted(self, *args, **kwargs):
        plain(self, *args, **kwargs, callbacks=[Stop()])

    with monkeypatch.context() as patch:
        patch.setattr(train.InterdomainTrainer, "__init__", interrupted)
        assert train.main(options("stopped")) == 0
    assert not (tmp_path / "stopped" / "checkpoint-6").exists()
    assert train.main(options("stopped", resume_from_checkpoint="true")) == 0
    assert history(tmp_path / "stopped") == history(tmp_path / "whole")
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "stopped")]
    assert all(torch.equal(a, b) for a, b in zip(*(x.values() for x in weights), strict=True))


def test_the_optimiser_is_the_papers(options):
    args, _ = train.parse_arguments(options(learning_rate=4e-3, warmup_tokens=128))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY))
    trainer = train.InterdomainTrainer(model=model, args=args)
    groups = {group["name"]: group for group in trainer.create_optimizer().param_groups}
    rates = rates_of(trainer)
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "weights": 0.1,
        "vectors": 0.0,
        "recurrence": 0.0,
    }
    assert groups["recurrence"]["initial_lr"] == 1e-3 and groups["weights"]["initial_lr"] == 4e-3
    assert groups["weights"]["betas"] == (0.9, 0.95) and args.max_grad_norm == 1.0
    # 128 tokens are two steps of 2 x 32: a line up to the peak, then down to 1e-5 for both kinds of parameters.
    assert rates[0][0] == pytest.approx(2e-3) and rates[1][0] == pytest.approx(4e-3)
    assert rates[5][0] == pytest.approx(1e-5) and rates[5][-1] == pytest.approx(1e-5)
    assert all(a[0] > b[0] for a, b in zip(rates[1:], rates[2:]))


@pytest.mark.parametrize(("accelerator", "stays"), [("mps", True), ("cuda", False)])
def test_a_run_keeps_to_the_cpu_of_a_computer_by_apple(options, monkeypatch, accelerator, stays):
    """Whose GPU has no float64: the Trainer would take it by itself."""
    given = options()
    place = given.index("--use_cpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(accelerator))
    args, _ = train.parse_arguments([*given[:place], *given[place + 2 :]])
    assert args.use_cpu is stays and args.device.type == "cpu"  # there is nothing else here


def test_the_recipe_of_cheems_is_its_papers(options):
    given = {"recipe": train.REPOSITORY / "recipes" / "cheems.yaml", "config": CHEEMS, "max_steps": 6}
    args, _ = train.parse_arguments(options(**given, warmup_tokens=64))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CHEEMS))
    trainer = train.InterdomainTrainer(model=model, args=args)
    groups = {group["name"]: group for group in trainer.create_optimizer().param_groups}
    assert groups["weights"]["weight_decay"] == 0.01
    assert all(group["betas"] == (0.9, 0.999) and group["lr"] == 3e-4 for group in groups.values())
    rates = rates_of(trainer)
    assert rates[0][0] == pytest.approx(3e-4) and rates[5][0] == pytest.approx(2e-5)


def test_packed_documents_do_not_see_each_other():
    """A row of documents costs what each of them costs alone."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY)).double().eval()
    blocks = [{"input_ids": torch.tensor([5, 6, 0, 7, 8, 9])}, {"input_ids": torch.tensor([7, 7, 7, 0, 5, 6])}]
    batch = train.Collator(boundary=0, separate_documents=True)(blocks)
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 6, 9, 12]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, 6, 0, 7, 8, 9, -100, 7, 7, 0, 5, 6]]
    logits = model(**batch).logits[0]
    for start, end in ((0, 2), (2, 6), (6, 9), (9, 12)):
        alone = model(batch["input_ids"][:, start:end]).logits[0]
        torch.testing.assert_close(logits[start:end], alone, rtol=1e-6, atol=1e-8)


# A CPU without instructions for bfloat16 takes a minute for it.
@pytest.mark.parametrize(
    "changes",
    [
        {"separate_documents": "true"},
        {"gradient_checkpointing": "true"},
        pytest.param({"bf16": "true"}, marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_train(options, changes, tmp_path):
    assert train.main(options(**changes)) == 0
    assert history(tmp_path / "out")[-1][1] < math.log(300) + 0.2


@pytest.mark.once
def test_streams_are_read_over_and_over_and_go_on_where_they_stopped(options, tmp_path):
    text_data.train_tokenizer(some_documents(), 300).save_pretrained(tmp_path / "tokenizer")
    stream = {"streaming": "true", "tokenizer": tmp_path / "tokenizer"}
    assert train.main(options("whole", **stream)) == 0
    assert train.main(options("parts", **stream)) == 0
    (tmp_path / "parts" / "checkpoint-6").rename(tmp_path / "gone")
    assert train.main(options("parts", **stream, resume_from_checkpoint="true")) == 0
    assert history(tmp_path / "parts") == history(tmp_path / "whole")
    assert train.main(options("apart", **stream, separate_documents="true")) == 0
    both = zip(history(tmp_path / "apart"), history(tmp_path / "whole"), strict=True)
    assert all(math.isclose(apart[1], whole[1], rel_tol=0.1) for apart, whole in both)


def test_a_stream_equals_the_text_in_memory(texts):
    tokenizer = text_data.train_tokenizer(some_documents(), 300)
    blocks = iter(train.StreamedBlocks([texts], tokenizer, 16))
    tokens = text_data.encode(tokenizer, list(text_data.read_documents([texts])))[:-1]
    whole = len(tokens) // 16
    read = torch.stack([next(blocks)["input_ids"] for _ in range(whole)])
    assert torch.equal(read.flatten(), tokens[: whole * 16])
    after = next(blocks)["input_ids"]  # the rest and the beginning again
    assert torch.equal(after, torch.cat([tokens[whole * 16 :], tokens])[:16])


MISTAKES = {
    "config": ({"config": "nowhere"}, "nowhere has no config.json"),
    "end": ({"max_steps": -1, "total_tokens": 0}, "The run needs an end"),
    "tokenizer": ({"tokenizer": "nowhere"}, "The folder nowhere holds no tokenizer"),
    "stream": ({"streaming": "true"}, "--streaming needs --tokenizer"),
    "checkpoint": ({"resume_from_checkpoint": "nowhere"}, "The checkpoint nowhere does not exist"),
    "nothing to go on from": ({"resume_from_checkpoint": "true"}, "holds no checkpoint to go on from"),
    "recipe": ({"recipe": "nowhere.yaml"}, "The recipe nowhere.yaml does not exist"),
    "length": ({"sequence_length": 0}, "--sequence-length must be positive, not 0."),
    "one token": ({"sequence_length": 1}, "--sequence_length must be at least 2"),
    "negative rate": ({"learning_rate": -1}, "--learning-rate must not be negative, got -1.0."),
    "negative end": ({"final_learning_rate": -1}, "--final-learning-rate must not be negative, got -1.0."),
    "negative warm-up": ({"warmup_tokens": -512}, "--warmup-tokens must not be negative, got -512."),
    "negative text": ({"held_out_bytes": -5}, "--held-out-bytes must not be negative, got -5."),
    "no text": ({"max_bytes": 0}, "--max-bytes must be positive, not 0."),
    "seed": ({"seed": -1}, "--seed must be from 0 to 4,294,967,295, not -1."),
    "a source without a name": ({"data": ""}, "A source of text has no name"),
    "evaluation": ({"per_device_eval_batch_size": 0}, "--per-device-eval-batch-size must be positive, not 0."),
    "batch": ({"per_device_train_batch_size": 0}, "--per-device-train-batch-size must be positive, not 0."),
    "option": ({"lerning_rate": 1}, "Unknown options: --lerning_rate 1; --help lists those there are."),
    "the Trainer's own": (
        {"bf16": "true", "fp16": "true", "use_cpu": "true"},
        "At most one of fp16 and bf16 can be True",
    ),
    "a file of the Trainer's": ({"accelerator_config": "nowhere.json"}, "No such file or directory: 'nowhere.json'"),
    "long warm-up": ({"warmup_tokens": 10**6}, "The warm-up of 1,000,000 tokens is no shorter than the run of"),
    "optimiser": ({"optim": "sgd", "num_train_epochs": 2}, "and no use for num_train_epochs, optim: AdamW"),
    "schedule": ({"lr_scheduler_type=constant": ""}, "and no use for lr_scheduler_type"),
    "stream of several workers": (
        {"streaming": "true", "dataloader_num_workers": 2, "data": "texts.txt", "tokenizer": "nowhere"},
        "leave --dataloader_num_workers at 0 or 1",
    ),
    "recipe in one word": ({"recipe=nowhere.yaml": ""}, "The recipe nowhere.yaml does not exist"),
    "too little text": ({"sequence_length": 100_000}, "fewer than one sequence of 100,000"),
}


@pytest.mark.parametrize(("changes", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(options, capsys, tmp_path, changes, message):
    """And leave nothing in the way of the next try."""
    assert train.main(options(**changes)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.once
def test_a_run_whose_loss_is_no_number_ends(options, tmp_path, capsys):
    assert train.main(options(learning_rate=1e12, warmup_tokens=0, held_out_bytes=5000)) == 2
    assert "loss is nan at step " in (said := capsys.readouterr().err) and "try a smaller learning rate." in said
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.once
def test_a_run_goes_on_with_the_options_it_began_with(options, tmp_path, capsys):
    """Other numbers would follow; and there is nothing to go on from without an optimizer, or at the end."""
    begun = {"max_steps": 2, "save_steps": 2, "warmup_tokens": 64}
    assert train.main(options("first", **begun)) == 0
    assert train.main(options("bare", **begun, save_only_model="true")) == 0
    checkpoint, bare = tmp_path / "first" / "checkpoint-2", tmp_path / "bare" / "checkpoint-2"
    capsys.readouterr()
    for folder, changes, message in (
        (checkpoint, {"learning_rate": 1e-9}, "is of a run with learning_rate 0.001, not 1e-09: go on with what it"),
        (checkpoint, {"seed": 1}, "is of a run with seed 42, not 1: go on with what it began with"),
        (checkpoint, {"sequence_length": 16}, "is of a run with sequence_length 32, not 16"),
        (checkpoint, {"max_grad_norm": 2.0}, "is of a run with max_grad_norm 1.0, not 2.0"),
        (checkpoint, {"per_device_train_batch_size": 4}, "is of a run with tokens_per_step 64, not 128"),
        (checkpoint, {"max_steps": 2}, "has done 2 steps, and the run ends at 2."),
        (bare, {}, "holds no optimizer, it was saved with --save_only_model true: begin a run of its own from it"),
    ):
        given = {"warmup_tokens": 64, "resume_from_checkpoint": folder} | changes
        assert train.main(options("second", **given)) == 2
        assert f"{folder} {message}" in capsys.readouterr().err


def test_a_checkpoint_that_was_cut_off_is_named_not_read(options, tmp_path, capsys):
    whole, cut = tmp_path / "out" / "checkpoint-2", tmp_path / "out" / "checkpoint-4"
    for folder in (whole, cut):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"")
    (whole / "trainer_state.json").write_text("{}")
    assert train.main(options(resume_from_checkpoint="true")) == 2
    assert f"{cut} is incomplete: remove it to go on from the one before." in capsys.readouterr().err
    assert cut.is_dir()


def test_a_run_goes_on_with_the_model_and_the_tokenizer_it_began_with(options, tmp_path, capsys):
    assert train.main(options("first", max_steps=2, warmup_tokens=64)) == 0
    checkpoint = tmp_path / "first" / "checkpoint-2"
    (tmp_path / "other.txt").write_text("\n\n".join(reversed(some_documents())).upper())
    onward = {"resume_from_checkpoint": checkpoint, "data": tmp_path / "other.txt", "held_out_bytes": 0}
    assert train.main(options("second", **onward)) == 0  # elsewhere, and on other text
    vocabularies = [AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() for name in ("first", "second")]
    assert vocabularies[0] == vocabularies[1]
    assert [step for step, *_ in history(tmp_path / "second")] == list(range(1, 7))

    text_data.train_tokenizer([(tmp_path / "other.txt").read_text()], 290).save_pretrained(tmp_path / "tokenizer")
    fields = json.loads((Path(TINY) / "config.json").read_text())
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": 1e-5}))  # fits as well
    capsys.readouterr()
    for changes, message in (
        ({"tokenizer": tmp_path / "tokenizer"}, "has another tokenizer than"),
        ({"config": tmp_path / "config"}, "is of another model: its rms_norm_eps is 1e-06, not 1e-05; name the"),
    ):
        assert train.main(options("third", resume_from_checkpoint=checkpoint, **changes)) == 2
        assert f"{checkpoint} {'has' if 'tokenizer' in changes else 'is'}" in (said := capsys.readouterr().err)
        assert message in said


@pytest.mark.once
def test_a_run_that_holds_nothing_out_is_not_evaluated(options, tmp_path):
    assert train.main(options(held_out_bytes=0, max_steps=2, warmup_tokens=64)) == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text()).keys().isdisjoint({"eval_loss", "perplexity"})


def test_nothing_is_overwritten(options, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for changes in ({}, {"resume_from_checkpoint": "false"}):
        assert train.main(options(**changes)) == 2
        assert "is not empty: choose another --output_dir" in capsys.readouterr().err


@pytest.mark.once
def test_of_two_runs_in_a_folder_one_begins(options, tmp_path, capsys, monkeypatch):
    made = train.make_model

    def meanwhile(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "run.json").write_text("{}")
        return made(*arguments)

    monkeypatch.setattr(train, "make_model", meanwhile)
    assert train.main(options()) == 2
    assert "Another run has begun in " in capsys.readouterr().err
    assert [x.name for x in (tmp_path / "out").iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("lerning_rate: 1\n", "has unknown fields: lerning_rate."),
        ("bf16: false\nlearning_rate: 1: 2\n", "is not YAML, see line 2."),
        ("\0", "is not YAML."),
        ("- learning_rate\n", "must have a line `name: value` for each option."),
    ],
)
def test_a_recipe_that_cannot_be_used(options, tmp_path, capsys, lines, message):
    (tmp_path / "recipe.yaml").write_text(lines)
    assert train.main(options(recipe=tmp_path / "recipe.yaml")) == 2
    assert message in capsys.readouterr().err
