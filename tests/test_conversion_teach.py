"""Windows with a memory are taught by the Llama that they came from: stages, what goes on after a stop, the report."""

import csv
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from conversion import distill, shares, teach
from conversion.__main__ import main
from examples import text_data
from modeling_interdomain import InterdomainForCausalLM
from tests.test_conversion import ids, no_space, save_llama, stop_at
from tests.test_examples import some_documents

TAUGHT = ("--layers-steps", 6, "--whole-steps", 4, "--lengths", "24,48", "--tokens-a-step", 96, "--save-steps", 2)
LONG = ("--long-steps", 2, "--long-lengths", 60)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small Llama, the same with windows, and a text."""
    folder = tmp_path_factory.mktemp("teach")
    save_llama(folder / "llama", num_key_value_heads=2)
    text_data.train_tokenizer(some_documents(), vocab_size=300).save_pretrained(folder / "llama")
    converted = ["from-llama", folder / "llama", folder / "windows", "--window", 8, "--sinks", 2, "--state-size", 6]
    assert main([*map(str, converted), "--layers", "0,2"]) == 0
    documents = "".join(json.dumps({"text": document}) + "\n" for document in some_documents(120))
    (folder / "texts.jsonl").write_text(documents)
    return folder


def arguments(place, target, *options, source="windows", teacher="llama"):
    given = ["teach", place / source, target, "--teacher", place / teacher, "--data", place / "texts.jsonl", *options]
    return [str(argument) for argument in given]


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def is_memory(name: str) -> bool:
    return any(part in name for part in teach.MEMORY)


def test_a_layer_learns_what_its_attention_saw_and_nothing_else_moves(place):
    teacher = LlamaForCausalLM.from_pretrained(place / "llama").eval()
    student = AutoModelForCausalLM.from_pretrained(place / "windows")
    teach.start_memories(student, ids(49))
    before = {name: x.clone() for name, x in student.state_dict().items()}
    loss = distill.distillation_loss(teacher, student, [0, 2], teach.MEMORY)
    first = loss(ids(49)).item()
    optimizer = torch.optim.AdamW([x for x in student.parameters() if x.requires_grad], lr=1e-2, weight_decay=0.0)
    for _ in range(30):
        optimizer.zero_grad()
        assert not loss(ids(49)).requires_grad
        optimizer.step()
    assert loss(ids(49)).item() < 0.9 * first
    changed = {name for name, x in student.state_dict().items() if not torch.equal(x, before[name])}
    assert changed and all(map(is_memory, changed)) and {name.split(".")[2] for name in changed} == {"0", "2"}
    assert not any(module._forward_hooks for module in teacher.modules())


def test_the_gradients_of_all_layers_are_those_of_their_mean_error(place):
    """Each layer's graph is gone before the next is read; the sum is that of all of them together."""
    teacher = LlamaForCausalLM.from_pretrained(place / "llama").eval()
    student = AutoModelForCausalLM.from_pretrained(place / "windows")
    value = distill.distillation_loss(teacher, student, [0, 2], teach.MEMORY)(ids(49))
    found = {name: x.grad.clone() for name, x in student.named_parameters() if x.grad is not None}
    student.zero_grad()
    seen = {}
    for layer in (0, 2):
        attention = teacher.model.layers[layer].self_attn
        attention.register_forward_hook(
            lambda m, a, kw, out, layer=layer: seen.update({layer: (kw["hidden_states"], out[0])}), with_kwargs=True
        )
    with torch.no_grad():
        teacher.model(ids(49)[:, :-1], use_cache=False)
    errors = []
    for layer, (inputs, wanted) in seen.items():
        answer, _ = student.model.layers[layer].token_mixer(inputs)
        errors.append((answer - wanted).square().mean() / wanted.var())
    torch.stack(errors).mean().backward()
    torch.testing.assert_close(value, torch.stack(errors).mean().detach())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, student.get_parameter(name).grad, msg=name)


def test_the_divergence_in_pieces_is_that_of_all_with_its_gradient(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    found, wanted = (torch.randn(150, 40, generator=generator) for _ in range(2))
    found.requires_grad_()
    expected = torch.nn.functional.kl_div(
        found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    (gradient,) = torch.autograd.grad(3 * expected, found)
    value = distill.divergence(found, wanted)  # 64 at once, and the rest
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * value, found)[0], gradient)


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_loss_that_is_no_number_ends_it_before_anything_is_saved(place, tmp_path, at):
    model, steps = AutoModelForCausalLM.from_pretrained(place / "windows"), []

    def loss(batch):
        steps.append(batch)
        return model.lm_head.weight.mean() * (math.nan if len(steps) == at else 1.0)

    progress = distill.Progress(tmp_path / "training.pt", 2)
    stage = distill.Stage("whole", lambda: loss, 4, 1e-3)
    with pytest.raises(FloatingPointError, match=f"The loss is nan at step {at}: try a smaller learning rate."):
        distill.train_stage(model, stage, itertools.repeat(ids(8)), progress)
    saved = (at - 1) // 2 * 2
    assert (tmp_path / "training.pt").exists() == bool(saved)
    if saved:
        assert torch.load(tmp_path / "training.pt", weights_only=True)["step"] == saved


def test_memories_start_at_the_size_of_the_softmax_and_learned_ones_stay(place):
    student = AutoModelForCausalLM.from_pretrained(place / "windows").eval()
    mixer, found = student.model.layers[min(teach.memories(student.config))].token_mixer, []
    teach.start_memories(student, ids(49))
    assert not mixer.share_proj.weight.any()
    with mixer.attention.register_forward_hook(lambda *call: found.append(call[2].split([mixer.head_dim, 1], -1))):
        student(input_ids=ids(49)[:1, :-1])
    answers, weight = (x[0, 24:] for x in found[0])
    size = (answers / (1 - weight)).square().mean((0, 2)).sqrt()
    torch.testing.assert_close(mixer.memory_gate, size[:, None].expand_as(mixer.memory_gate))
    shares = weight[..., 0].double().logit().mean(0)
    torch.testing.assert_close(shares, torch.full_like(shares, teach.SHARE), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        mixer.memory_gate[0, 0] = mixer.share_proj.bias[0] = 7.0
    learned = [x.clone() for x in (mixer.memory_gate, mixer.share_proj.bias)]
    teach.start_memories(student, ids(49))
    assert torch.equal(mixer.memory_gate, learned[0]) and torch.equal(mixer.share_proj.bias, learned[1])


@pytest.mark.parametrize("apart", [-500.0, 300.0])
def test_a_memory_starts_with_a_small_share_wherever_the_scores_of_its_head_lie(apart, place):
    """Biases of keys that all share, as Qwen2 has, move every score of a head, and its memory's with them."""
    student = AutoModelForCausalLM.from_pretrained(place / "windows").eval()
    mixer = student.model.layers[min(teach.memories(student.config))].token_mixer
    scored = mixer.attention.forward

    def moved(query, seen, memory=None):
        return scored(query, seen, None if memory is None else memory - apart)

    mixer.attention.forward = moved
    with torch.no_grad():
        mixer.share_proj.bias.fill_(0.0)
        shares.start_shares(student, teach.memories(student.config), ids(49)[:1, :-1])
    found = shares.attended(student, teach.memories(student.config), ids(49)[:1, :-1])
    torch.testing.assert_close(mixer.share_proj.bias, next(iter(found.values())).scores + shares.SHARE)
    assert ((mixer.share_proj.bias - apart).abs() < 50).all()


@pytest.mark.parametrize("how", [(), pytest.param(("--lora", 2), marks=pytest.mark.slow)], ids=["full", "lora"])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(place, tmp_path, monkeypatch, capsys, how):
    options = (*TAUGHT, *LONG, *how)
    assert main(arguments(place, tmp_path / "whole", *options)) == 0
    said = capsys.readouterr().out
    assert "2 of 3 layers have a memory" in said and "| before |" in said and "| taught on longer texts |" in said
    for number in (4, 5, 4):  # in the second step after a state was saved, in each of the stages
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            stop_at(patched, number)
            main(arguments(place, tmp_path / "parts", *options))
        assert not (tmp_path / "parts").exists()
    assert main(arguments(place, tmp_path / "parts", *options, "--seed", 1)) == 2
    assert "parts.partial holds an unfinished run with other arguments" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(InterdomainForCausalLM, "save_pretrained", no_space)
        assert main(arguments(place, tmp_path / "parts", *options)) == 2
        assert "No space left on device" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(distill, "clip_gradients", lambda *_: pytest.fail("all steps were done"))
        assert main(arguments(place, tmp_path / "parts", *options)) == 0
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert whole.keys() == weights_of(place / "windows").keys()  # no adapter is left
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())
    assert not (tmp_path / "parts.partial").exists()
    reports = [json.loads((tmp_path / x / "conversion_report.json").read_text()) for x in ("whole", "parts")]
    assert reports[0]["losses"] == reports[1]["losses"] and reports[0]["perplexity"] == reports[1]["perplexity"]
    assert [len(x) for x in reports[0]["losses"].values()] == [6, 4, 2]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    before = weights_of(place / "windows")
    moved = {name for name, x in model.state_dict().items() if name in before and not torch.equal(x, before[name])}
    assert any(map(is_memory, moved)) and any("mlp" in name for name in moved)
    assert any("embed" in name for name in moved) == (how == ())


@pytest.mark.once
@pytest.mark.parametrize(("read", "name"), [("source", "windows"), ("teacher", "llama")])
def test_a_run_does_not_go_on_over_other_models(place, tmp_path, monkeypatch, capsys, read, name):
    """Its memories are of the windows that it began with, and of what taught them."""
    folder = tmp_path / name
    shutil.copytree(place / name, folder)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_at(patched, 4)
        main(arguments(place, tmp_path / "out", *TAUGHT, **{read: folder}))
    (folder / "model.safetensors").touch()
    assert main(arguments(place, tmp_path / "out", *TAUGHT, **{read: folder})) == 2
    assert "or of folders that have changed since: repeat that command" in capsys.readouterr().err


def test_the_folder_says_what_was_converted_and_measured(place, tmp_path):
    assert main(arguments(place, tmp_path / "out", *TAUGHT, "--whole-steps", 0)) == 0
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["teacher"] == "llama" and str(tmp_path) not in json.dumps(report)
    assert report["conversion"]["layers"] == [0, 2] and report["window"]["layers"] == [0, 2]
    assert list(report["perplexity"]) == ["teacher", "untaught", "layers"]
    after, before = weights_of(tmp_path / "out"), weights_of(place / "windows")
    assert all(torch.equal(x, after[name]) for name, x in before.items() if not is_memory(name))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "Converted from llama: 2 of its layers see the last 8 tokens and the first 2 as before" in card.text
    assert "A window layer attends to the last 8 tokens and the first 2, and each of its heads keeps" in card.text
    assert "It answers as llama does," in card.text and "growing with the length" in card.text  # one is softmax
    assert "| each layer taught |" in card.text and "6 steps (layers) on texts of 24, 48 tokens" in card.text
    assert card.data.license == "other" and "the weights are under the licence of llama" in card.text
    rows = list(csv.DictReader((tmp_path / "out" / "teaching.csv").open()))
    assert [row["stage"] for row in rows] == ["layers"] * 6
    assert float(rows[-1]["loss"]) == report["losses"]["layers"][-1]
    for name in ("teaching.png", "perplexity_by_position.png", "perplexity_by_position.md"):
        assert (tmp_path / "out" / name).stat().st_size > 50
    assert main(["check", str(tmp_path / "out")]) == 0
    assert main(arguments(place, tmp_path / "again", *TAUGHT, source=tmp_path / "out")) == 0  # from where it is


def test_windows_without_a_memory_learn_the_predictions_alone(place, tmp_path, capsys):
    converted = ["from-llama", place / "llama", tmp_path / "bare", "--window", 8, "--sinks", 2, "--state-size", 0]
    assert main([*map(str, converted)]) == 0
    steps = ("--whole-steps", 2, "--lengths", 48, "--tokens-a-step", 96)
    assert main(arguments(place, tmp_path / "out", *steps, source=tmp_path / "bare")) == 2
    assert "bare have no memory to teach alone: add --layers-steps 0" in capsys.readouterr().err
    assert main(arguments(place, tmp_path / "out", *steps, "--layers-steps", 0, source=tmp_path / "bare")) == 0
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["window"] == {"tokens": 8, "sinks": 2, "modes": 0, "share": None, "points": None, "layers": [0, 1, 2]}
    assert len(report["losses"]["whole"]) == 2
    card = ModelCard.load(tmp_path / "out" / "README.md").text
    assert "the first 2 as before, and keep nothing of the others" in card
    again = ("--layers-steps", 0, *steps)
    assert main(arguments(place, tmp_path / "more", *again, source=tmp_path / "out")) == 0
    more = json.loads((tmp_path / "more" / "conversion_report.json").read_text())
    assert more["conversion"] == report["conversion"] and report["conversion"]["source"] == "llama"


def test_products_in_bfloat16_teach_the_same(place, tmp_path):
    teacher = LlamaForCausalLM.from_pretrained(place / "llama").eval()
    student = AutoModelForCausalLM.from_pretrained(place / "windows")
    teach.start_memories(student, ids(49))
    for make in (
        lambda: distill.distillation_loss(teacher, student, [0, 2], teach.MEMORY),
        lambda: distill.finetuning_loss(teacher, student, 1.0),
    ):
        found = []
        for loss_of in (make(), distill.in_bfloat16(make())):
            student.zero_grad()
            loss = loss_of(ids(49))
            if loss.requires_grad:
                loss.backward()
            gradient = student.model.layers[2].token_mixer.v_map.grad
            assert gradient.dtype == torch.float32
            found.append((loss.detach(), gradient / gradient.norm()))
        torch.testing.assert_close(found[1][0].float(), found[0][0], rtol=0.05, atol=1e-3)
        assert (found[0][1] * found[1][1]).sum() > 0.98
    assert main(arguments(place, tmp_path / "out", *TAUGHT, "--bf16")) == 0
    assert all(x.dtype == torch.float32 for x in weights_of(tmp_path / "out").values())


def test_minutes_are_those_of_all_runs_together(place, tmp_path, monkeypatch):
    options = (*TAUGHT, "--whole-steps", 0, "--layers-steps", 1000, "--minutes", 60)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_at(patched, 4)
        main(arguments(place, tmp_path / "out", *options))
    file = tmp_path / "out.partial" / "training.pt"
    state = torch.load(file, weights_only=True)
    assert state["step"] == 2 and 0 < state["seconds"] < 3600
    torch.save(state | {"seconds": 3700.0}, file)
    assert main(arguments(place, tmp_path / "out", *options)) == 0
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["steps"] == {"layers": 3, "whole": 0, "long": 0}


def test_lengths_take_turns_and_have_as_many_tokens():
    options = teach_options("--lengths", "24,48", "--tokens-a-step", 96)
    batches = teach.mixed_batches(torch.arange(1000), options, "layers")
    assert [tuple(next(batches).shape) for _ in range(4)] == [(4, 25), (2, 49)] * 2
    options = teach_options("--lengths", "48", "--tokens-a-step", 10)
    assert next(teach.mixed_batches(torch.arange(1000), options, "whole")).shape == (1, 49)


def teach_options(*options):
    import argparse

    parser = argparse.ArgumentParser()
    teach.add_arguments(parser)
    return parser.parse_args(["source", "target", "--teacher", "x", "--data", "x", *map(str, options)])


MISTAKES = {
    "nothing": (("--layers-steps", 0, "--whole-steps", 0), {}, "There is nothing to teach"),
    "negative": (("--long-steps", -1), {}, "steps must not be negative"),
    "rate": (("--learning-rate", 0), {}, "--learning-rate must be positive, not 0"),
    "rank": (("--lora", 0), {}, "--lora must be positive, not 0"),
    "no windows": ((), {"source": "llama"}, "has no window layers to teach"),
    "no Llama": ((), {"teacher": "windows"}, "windows: name the Llama that was converted."),
    "another teacher": ((), {"teacher": "wide"}, "cannot teach"),
    "no teacher": ((), {"teacher": "nowhere"}, "is neither a folder nor a model of the Hub"),
    "another number of heads": ((), {"teacher": "heads"}, "its num_attention_heads is 8, not 4."),
    "too long": (("--lengths", 65), {}, "--lengths and --long-lengths name 65 tokens, more than the 64 that"),
    "little text": (("--max-bytes", 100), {}, "too little to learn from"),
    "no tokenizer": ((), {"source": "bare"}, "has no tokenizer that can be loaded, which --data needs"),
    "wrong tokenizer": ((), {"source": "other"}, "has 400 tokens, the model 300"),
}


@pytest.fixture(scope="module")
def damaged(place):
    """Beside those of `place` a wider Llama, and windows without and with another tokenizer."""
    save_llama(place / "wide", hidden_size=64, num_key_value_heads=2)
    save_llama(place / "heads", num_attention_heads=8, num_key_value_heads=2)
    for name in ("bare", "other"):
        shutil.copytree(place / "windows", place / name)
        for file in (place / name).glob("tokenizer*"):
            file.unlink()
    text_data.train_tokenizer(some_documents(120), vocab_size=400).save_pretrained(place / "other")
    return place


@pytest.mark.parametrize(("options", "places", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named_before_anything_is_written(damaged, tmp_path, capsys, options, places, message):
    assert main(arguments(damaged, tmp_path / "out", *TAUGHT, *options, **places)) == 2
    said = capsys.readouterr().err.split("\r")[-1].strip()
    assert message in said and "\n" not in said
    assert not list(tmp_path.iterdir())


def test_a_dry_run_writes_nothing_and_lengths_are_numbers(place, tmp_path, capsys):
    assert main(arguments(place, tmp_path / "out", *TAUGHT, "--dry-run")) == 0
    assert not list(tmp_path.iterdir())
    assert "6 steps of each memory: texts of 24, 48 tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(arguments(place, tmp_path / "out", "--lengths", "long"))
    assert 'must be lengths of texts such as "512,1024", not "long"' in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_was_killed_loses_nothing(place, tmp_path):
    """kill -9 after the first saved state; the same command goes on from there."""
    options = (*TAUGHT, "--layers-steps", 300, "--save-steps", 1)
    command = [sys.executable, "-m", "conversion", *arguments(place, tmp_path / "killed", *options)]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    state = tmp_path / "killed.partial" / "training.pt"
    for _ in range(1200):
        time.sleep(0.05)
        if state.is_file() or run.poll() is not None:
            break
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert state.is_file() and not (tmp_path / "killed").exists()
    reached = torch.load(state, weights_only=True)
    assert reached["stage"] == "layers" and 0 < reached["step"] < 300
    assert main(arguments(place, tmp_path / "killed", *options)) == 0
    assert main(arguments(place, tmp_path / "whole", *options)) == 0
    whole, killed = weights_of(tmp_path / "whole"), weights_of(tmp_path / "killed")
    assert all(torch.equal(x, killed[name]) for name, x in whole.items())


def test_a_report_has_the_seconds_of_stages_that_ended_before_a_stop(place, tmp_path, monkeypatch):
    options = (*TAUGHT, "--layers-steps", 2, "--save-steps", 1)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_at(patched, 4)  # in the second stage, of which a step was saved
        main(arguments(place, tmp_path / "out", *options))
    assert main(arguments(place, tmp_path / "out", *options)) == 0
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert list(report["seconds"]) == ["layers", "whole"]


def test_every_part_learns_at_its_own_rate(place):
    model = AutoModelForCausalLM.from_pretrained(place / "windows")

    def rates(stage, *options):
        groups = teach.groups_of(model, teach_options("--learning-rate", 0.03, *options), stage)
        return {group["name"]: group["lr"] for group in groups}

    assert rates("layers") == {"memory": 0.03, "recurrence": 1e-3, "llama": 1e-4}
    assert rates("whole", "--lora", 2) == {"memory": 0.01, "recurrence": 1e-3, "llama": 1e-3}
    assert rates("layers", "--learning-rate", 3e-4)["recurrence"] == 3e-4


def test_every_length_and_every_stage_reads_other_places():
    options = teach_options("--lengths", "24,24", "--tokens-a-step", 24)
    begins = [
        [next(batches)[0, 0].item() for _ in range(2)]
        for batches in (teach.mixed_batches(torch.arange(100_000), options, stage) for stage in ("layers", "whole"))
    ]
    assert len({x for found in begins for x in found}) == 4


def test_what_is_taught_keeps_the_dtype_of_its_source(place, tmp_path):
    source = tmp_path / "windows"
    AutoModelForCausalLM.from_pretrained(place / "windows", dtype=torch.bfloat16).save_pretrained(source)
    for file in (place / "windows").glob("tokenizer*"):
        shutil.copy(file, source)
    options = (*TAUGHT, "--layers-steps", 1, "--whole-steps", 0)
    assert main(arguments(place, tmp_path / "out", *options, source=source)) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_model_is_left_as_it_answers(place, tmp_path):
    """After a stage it is no longer in training, and nothing looks on when its shares were started."""
    model = AutoModelForCausalLM.from_pretrained(place / "windows")
    shares.start_shares(model, teach.memories(model.config), ids(49)[:1, :-1])
    assert not any(module._forward_hooks for module in model.modules())
    stage = distill.Stage("whole", lambda: lambda batch: model.lm_head.weight.mean(), 1, 1e-3)
    distill.train_stage(model, stage, itertools.repeat(ids(8)), distill.Progress(tmp_path / "training.pt", 1))
    assert not model.training


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_loss_of_a_text_is_the_weighted_mean_of_both(place, weight):
    teacher = LlamaForCausalLM.from_pretrained(place / "llama").eval()
    student = AutoModelForCausalLM.from_pretrained(place / "windows").eval()
    text = ids(49)
    value = distill.finetuning_loss(teacher, student, weight)(text)
    with torch.no_grad():
        found, wanted = (model(text[:, :-1]).logits.flatten(0, 1).log_softmax(-1) for model in (student, teacher))
    expected = (1 - weight) * F.nll_loss(found, text[:, 1:].flatten())
    expected = expected + weight * F.kl_div(found, wanted, log_target=True, reduction="batchmean")
    torch.testing.assert_close(value.detach(), expected)


def test_a_stage_trains_with_gradients_of_at_most_one(place, tmp_path, monkeypatch):
    model, seen = AutoModelForCausalLM.from_pretrained(place / "windows").eval(), []
    clip = distill.clip_gradients

    def clipped(optimizer, most):
        clip(optimizer, most)
        norms = [x.grad.norm() for group in optimizer.param_groups for x in group["params"] if x.grad is not None]
        seen.append((model.training, torch.stack(norms).norm().item()))

    monkeypatch.setattr(distill, "clip_gradients", clipped)
    stage = distill.Stage("whole", lambda: lambda batch: 1e3 * model.lm_head.weight.square().sum(), 1, 1e-3)
    distill.train_stage(model, stage, itertools.repeat(ids(8)), distill.Progress(tmp_path / "training.pt", 1))
    assert seen == [(True, pytest.approx(1.0, rel=1e-3))]


def test_the_schedule_ends_with_the_clock(place, tmp_path, monkeypatch):
    """Where time runs out before the steps do."""
    model, rates = AutoModelForCausalLM.from_pretrained(place / "windows"), []
    clock = itertools.count(0.0, 4.0)
    monkeypatch.setattr(distill.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(
        distill, "clip_gradients", lambda optimizer, most: rates.append(optimizer.param_groups[0]["lr"])
    )
    stage = distill.Stage("whole", lambda: lambda batch: model.lm_head.weight.mean(), 1000, 1e-3, seconds=20.0)
    distill.train_stage(model, stage, itertools.repeat(ids(8)), distill.Progress(tmp_path / "training.pt", 100))
    assert len(rates) == 5 and rates[-1] == pytest.approx(1e-4) and rates == sorted(rates, reverse=True)


def test_what_does_not_learn_is_not_kept(place, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(place / "windows").requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    stage = distill.Stage("whole", lambda: lambda batch: model.lm_head.weight.mean(), 1, 1e-3)
    distill.train_stage(model, stage, itertools.repeat(ids(8)), distill.Progress(tmp_path / "training.pt", 1))
    assert list(torch.load(tmp_path / "training.pt", weights_only=True)["model"]) == ["lm_head.weight"]


def test_lengths_have_their_own_rotations(place):
    teacher = LlamaForCausalLM.from_pretrained(place / "llama").eval()
    student = AutoModelForCausalLM.from_pretrained(place / "windows")
    loss = distill.distillation_loss(teacher, student, [0, 2], teach.MEMORY)
    alone = [distill.distillation_loss(teacher, student, [0, 2], teach.MEMORY)(ids(49)[:, :n]).item() for n in (49, 25)]
    assert [loss(ids(49)[:, :n]).item() for n in (49, 25)] == pytest.approx(alone)


def test_shares_are_those_of_the_later_half(place):
    """Of the first tokens a window sees few, which says little of what follows."""
    student = AutoModelForCausalLM.from_pretrained(place / "windows").eval()
    layers, text = teach.memories(student.config), ids(49)[:1]
    calls = {}
    hooks = [
        student.model.layers[i].token_mixer.attention.register_forward_hook(
            lambda module, inputs, output, i=i: calls.update({i: calls.get(i, (module, *inputs[:2]))})
        )
        for i in layers
    ]
    with torch.no_grad():
        student(text)
        found = shares.attended(student, layers, text)
        for hook in hooks:
            hook.remove()
        for i, (attention, query, seen) in calls.items():
            answers = attention.forward(query, seen)[:, query.shape[1] // 2 :]
            torch.testing.assert_close(found[i].size, answers.square().mean((0, 1, 3)).sqrt())
