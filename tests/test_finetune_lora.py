"""LoRA fine-tuning: from a saved model to an adapter and a merged model, and mistakes named before a run."""

import json
import os
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import finetune_lora, text_data
from examples.training import train
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from tests.test_examples import some_documents


def save_base(folder, tokenizer, learned=None, **changes):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = InterdomainConfig(**shape | {"state_size": 8, "vocab_size": len(tokenizer)} | special | changes)
    model = InterdomainForCausalLM(config)
    if learned is not None:
        batches = text_data.random_batches(text_data.encode(tokenizer, learned), batch_size=8, sequence_length=32)
        list(train(model, batches, steps=60, learning_rate=1e-2))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a text, models and adapters, some of which do not fit each other."""
    place = tmp_path_factory.mktemp("place")
    # The model has learned the words in one order and meets them in the other.
    turned = [" ".join(reversed(document.split(" "))) for document in some_documents(120)]
    rows = [json.dumps({"text": document}) + "\n" for document in turned]
    (place / "texts.jsonl").write_text("".join(rows))
    (place / "short.txt").write_text("short")
    tokenizer = text_data.train_tokenizer(some_documents(), 300)
    save_base(place / "base", tokenizer, learned=some_documents())
    save_base(place / "wide", tokenizer, hidden_size=64)
    save_base(place / "deep", tokenizer, num_hidden_layers=3)
    save_base(place / "speechless", tokenizer)
    for file in (place / "speechless").glob("tokenizer*"):
        file.unlink()
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    adapters = {
        "adapter": ("base", LoraConfig(task_type="CAUSAL_LM", r=4)),
        "wide-adapter": ("wide", LoraConfig(task_type="CAUSAL_LM", r=4)),
        "deep-adapter": ("deep", LoraConfig(task_type="CAUSAL_LM", r=4)),
        "prompt": ("base", prompt),
    }
    for name, (base, config) in adapters.items():
        get_peft_model(AutoModelForCausalLM.from_pretrained(place / base), config).save_pretrained(place / name)
    for name in ("foreign", "cut-off", "weightless", "unreadable"):
        shutil.copytree(place / "adapter", place / name)
    foreign = json.loads((place / "adapter" / "adapter_config.json").read_text()) | {"target_modules": ["c_attn"]}
    (place / "foreign" / "adapter_config.json").write_text(json.dumps(foreign))
    (place / "unreadable" / "adapter_config.json").write_text("{")
    (place / "weightless" / "adapter_model.safetensors").unlink()
    os.truncate(place / "cut-off" / "adapter_model.safetensors", 1000)
    return place


@pytest.fixture
def start(place, tmp_path):
    """`start(base, *options)`: a run of a few steps that writes to tmp_path / "out"."""

    def run(base, *options):
        arguments = ["--data", str(place / "texts.jsonl"), "--output", str(tmp_path / "out"), "--steps", "30"]
        arguments += ["--batch-size", "4", "--sequence-length", "32", "--learning-rate", "0.01"]
        names = [option.format(place=place, tmp=tmp_path) for option in options]
        return finetune_lora.main([str(place / base), *arguments, *names])

    return run


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_from_a_model_to_an_adapter_and_a_merged_model(place, start, tmp_path, capsys):
    assert start("base", "--merge", "{tmp}/merged") == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    before, after = results["perplexity_before"], results["perplexity_after"]
    assert after < 0.9 * before
    assert f"perplexity {before:.4g} before, {after:.4g} after 30 steps" in capsys.readouterr().out
    # 2 layers, 4 projections from 32 to 32, two factors of rank 8 each.
    assert results["trained_parameters"] == 2 * 4 * 2 * 32 * 8

    ids = torch.randint(5, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    plain = logits(base, ids)
    adapted = logits(PeftModel.from_pretrained(base, tmp_path / "out"), ids)
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), ids)
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(adapted, plain, atol=0.1)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == 300


def test_a_run_keeps_to_the_cpu_of_a_computer_by_apple(place, start, monkeypatch):
    made = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(finetune_lora, "TrainingArguments", lambda **given: made.append(given) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start("base")
    assert made[0]["use_cpu"] is True


def test_an_adapter_is_trained_further_or_only_merged(start, tmp_path):
    assert start("base", "--targets", "all-linear", "q_proj", "--rank", "2") == 0  # the second is one of them
    first = json.loads((tmp_path / "out" / "results.json").read_text())
    (tmp_path / "out").rename(tmp_path / "first")
    assert start("base", "--adapter", "{tmp}/first") == 0
    second = json.loads((tmp_path / "out" / "results.json").read_text())
    assert second["trained_parameters"] == first["trained_parameters"]
    assert second["perplexity_before"] == pytest.approx(first["perplexity_after"], rel=1e-5)
    assert second["perplexity_after"] < second["perplexity_before"]
    (tmp_path / "out").rename(tmp_path / "second")
    assert start("base", "--adapter", "{tmp}/second", "--steps", "0", "--merge", "{tmp}/merged") == 0
    third = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (
        third["perplexity_before"] == third["perplexity_after"] == pytest.approx(second["perplexity_after"], rel=1e-5)
    )
    assert (tmp_path / "merged" / "model.safetensors").is_file()


MISTAKES = {
    "no model": ("texts.jsonl", [], "texts.jsonl is not a folder with a saved model."),
    "adapter as model": (
        "adapter",
        [],
        "adapter is an adapter: name the model it was made for, and this with --adapter.",
    ),
    "no tokenizer": ("speechless", [], "speechless holds no tokenizer: tokenizer.save_pretrained writes it there."),
    "no adapter": ("base", ["--adapter", "{place}/wide"], "wide is not a folder with a saved adapter."),
    "width": (
        "base",
        ["--adapter", "{place}/wide-adapter"],
        "was made for a model of another shape than {place}/base.",
    ),
    "fewer layers": (
        "deep",
        ["--adapter", "{place}/adapter"],
        "was made for a model of another shape than {place}/deep.",
    ),
    "more layers": (
        "base",
        ["--adapter", "{place}/deep-adapter"],
        "made for a model of another shape than {place}/base.",
    ),
    "other modules": ("base", ["--adapter", "{place}/foreign"], "made for a model of another shape than {place}/base."),
    "method": ("base", ["--adapter", "{place}/prompt"], "prompt is a PROMPT_TUNING adapter, not one of LoRA."),
    "weightless": (
        "base",
        ["--adapter", "{place}/weightless"],
        "weightless has no weights: adapter_model.safetensors is missing.",
    ),
    "rank of another": (
        "base",
        ["--adapter", "{place}/adapter", "--rank", "4"],
        "the one that --adapter names has its own.",
    ),
    "targets": ("base", ["--targets", "q_proj", "query"], "The model has no modules named query."),
    "rank": ("base", ["--rank", "-1"], "--rank must be positive, not -1."),
    "steps": ("base", ["--steps", "-1"], "--steps must not be negative, got -1."),
    "nothing to do": ("base", ["--steps", "0"], "--steps 0 trains nothing: it needs --adapter."),
    "one folder": ("base", ["--merge", "{tmp}/out"], "cannot both be saved in {tmp}/out."),
    "output": ("base", ["--output", "{place}/wide"], "wide is not empty: choose another folder."),
    "merge": ("base", ["--merge", "{place}/wide"], "wide is not empty: choose another folder."),
    "one folder by another name": ("base", ["--merge", "{tmp}/x/../out"], "cannot both be saved in {tmp}/out."),
    "seed": ("base", ["--seed", "-1"], "--seed must be from 0 to 4,294,967,295, not -1."),
    "file": ("base", ["--merge", "{place}/short.txt"], "short.txt is a file, not a folder."),
    "too little text": ("base", ["--data", "{place}/short.txt"], "too little to learn from: 10,000 are needed."),
    "long sequences": ("base", ["--sequence-length", "100000"], "fewer than one sequence of 100,000."),
}


@pytest.mark.parametrize(("base", "options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_sentence(place, start, tmp_path, capsys, base, options, message):
    assert start(base, *options) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(message.format(place=place, tmp=tmp_path))
    assert not (tmp_path / "out").exists()


# What follows these words is the library's, and its versions say it differently.
IN_OTHER_WORDS = {
    "cut off": ("base", ["--adapter", "{place}/cut-off"], "cut-off cannot be read: Error while deserializing header: "),
    "unreadable": ("base", ["--adapter", "{place}/unreadable"], "unreadable cannot be read: Expecting property name"),
    "norm": ("base", ["--targets", "input_layernorm"], "LoRA cannot adapt these modules: "),
}


@pytest.mark.parametrize(("base", "options", "message"), IN_OTHER_WORDS.values(), ids=IN_OTHER_WORDS)
def test_what_a_library_refuses_is_one_sentence(place, start, tmp_path, capsys, base, options, message):
    assert start(base, *options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
