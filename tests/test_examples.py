"""The examples: text and its score, the parts of a training run, the quickstart from data to a fresh process."""

import argparse
import copy
import csv
import json
import math
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import Trainer, TrainingArguments

from examples import evaluate, quickstart, saved_model, states, text_data, training
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from modeling_interdomain.parameter_groups import _group_of

REPOSITORY = Path(__file__).resolve().parents[1]
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


def some_documents(count=60, lines=20):
    """Documents of a few words each line, no two alike."""
    return [
        "".join(f"{WORDS[(number + line) % 8]} {number} {WORDS[line % 8]}\n" for line in range(lines))
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return text_data.train_tokenizer(some_documents(), vocab_size=300)


def test_a_beginning_has_one_boundary_if_there_is_any(tokenizer):
    """Whether a tokenizer adds it by itself, is asked to, or has none."""
    alpha = tokenizer("alpha")["input_ids"]
    own = copy.deepcopy(tokenizer)
    own._tokenizer.post_processor = TemplateProcessing(f"{text_data.BOUNDARY} $A", None, [(text_data.BOUNDARY, 0)])
    assert own("alpha")["input_ids"] == [0, *alpha]
    for each in (tokenizer, own):
        assert text_data.encode_beginning(each, "alpha").tolist() == [[0, *alpha]]
    own.bos_token = own.eos_token = None
    assert text_data.encode_beginning(own, "alpha").tolist() == [alpha]
    with pytest.raises(text_data.InputError, match="There is nothing to continue"):
        text_data.encode_beginning(own, "")
    with pytest.raises(text_data.InputError, match="no eos token to put between documents"):
        text_data.encode(own, ["alpha"])


class Bigram(nn.Module):
    """A language model whose next-token logits [V] depend on the last token only, so its score is known by hand."""

    def __init__(self, vocab_size):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(vocab_size, vocab_size))

    def forward(self, input_ids, use_cache=None):
        return SimpleNamespace(logits=self.table[input_ids])


# ------------------------------------------------------------------------------------------ gathering text


def test_default_text_is_the_standard_library_without_its_tests():
    files = text_data._standard_library_files()
    names = {path.name for path in files}
    assert {"argparse.py", "heapq.py"} <= names
    assert not any({"test", "site-packages"} & set(path.parts[-3:-1]) for path in files)
    first = text_data.gather_documents(max_bytes=100_000, seed=1)
    assert first == text_data.gather_documents(max_bytes=100_000, seed=1)
    assert first != text_data.gather_documents(max_bytes=100_000, seed=2)
    assert 95_000 < sum(map(text_data.num_bytes, first)) <= 100_000


def test_prose_is_the_sentences_of_a_program():
    """Each once, in flowing lines; no licence, no table, no code, no fragment."""
    sentence = "Return the number of lines in the file,\n    or None where there is no such file."
    flowing = "Return the number of lines in the file, or None where there is no such file."
    source = f'''# Licensed to nobody under an agreement with nobody in particular.
##########################################################
def count(path):
    """{sentence}

    >>> count("The name of a file that is to be read by this function.")
    | The first column of a table | The second column of a table that is long. |
    """
    raise ValueError("Too short.")

def again(path):
    """{sentence}"""
'''
    assert text_data.prose(source) == f"{flowing}\n\n"
    assert text_data.prose("no program") == ""


def test_default_prose_is_on_every_computer():
    documents = text_data.standard_library_prose(max_bytes=10_000, seed=1)
    assert documents == text_data.standard_library_prose(max_bytes=10_000, seed=1)
    assert 9_000 < sum(map(text_data.num_bytes, documents)) <= 10_000
    assert not {"#", "|", "="} & set("".join(documents))


def test_folder_of_every_format(tmp_path):
    from pyarrow import parquet, table

    (tmp_path / "inner").mkdir()
    (tmp_path / "one.txt").write_text("text")
    (tmp_path / "two.md").write_text("markdown")
    (tmp_path / "inner" / "three.py").write_text("python")
    (tmp_path / "four.jsonl").write_text('{"text": "row 1"}\n\n{"text": "row 2"}\n')
    parquet.write_table(table({"text": ["cell 1", None, "cell 2"], "other": [1, 2, 3]}), tmp_path / "five.parquet")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    (tmp_path / "blank.txt").write_text(" \n")
    expected = ["cell 1", "cell 2", "markdown", "python", "row 1", "row 2", "text"]
    assert sorted(text_data.gather_documents([str(tmp_path)])) == expected
    both = text_data.gather_documents([str(tmp_path / "one.txt"), str(tmp_path / "two.md")])
    assert both == ["text", "markdown"]


def test_a_suffix_may_be_in_capitals(tmp_path):
    (tmp_path / "ROWS.JSONL").write_text('{"text": "row"}\n')
    (tmp_path / "NOTE.TXT").write_text("text")
    assert sorted(text_data.gather_documents([str(tmp_path)])) == ["row", "text"]
    assert text_data.gather_documents([str(tmp_path / "ROWS.JSONL")]) == ["row"]


def test_dataset_by_name(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return iter([{"text": "row"}, {"text": "another"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert text_data.gather_documents(["name:part"]) == ["row", "another"]
    assert asked == [(("name", "part"), {"split": "train", "streaming": True})]


def test_budget_is_shared_by_the_sources(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 1000)
    documents = text_data.gather_documents([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], max_bytes=1000)
    assert documents == ["a\n" * 250, "b\n" * 250]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", '{"text": "fine"}\n{"content": 1}\n', 'Line 2 of .* is not a JSON object with a field "text"'),
        ("bad.jsonl", "no json\n", "Line 1 of "),
        ("bad.parquet", "no parquet", "is not a readable parquet file"),
        ("empty.txt", "\n \n", "No text was found in "),
        ("bad.jsonl", '{"text": 1}\n', 'Line 1 of .* is not a JSON object with a field "text"'),
        ("bad.jsonl", '{"text": "caf\\ud83d"}\n', "Line 1 of .* is not text in UTF-8"),
        ("weights.bin", "\0\0", "weights.bin is not text in UTF-8"),
    ],
)
def test_unusable_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(text_data.InputError, match=message):
        text_data.gather_documents([str(tmp_path / name)])


def test_lines_of_other_kinds(tmp_path):
    """A byte order mark is no text, nor is null; bytes of another encoding are named."""
    (tmp_path / "marked.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n', encoding="utf-8-sig")
    assert text_data.gather_documents([str(tmp_path)]) == ["one", "two"]
    (tmp_path / "latin.jsonl").write_bytes('{"text": "café"}\n'.encode("latin-1"))
    with pytest.raises(text_data.InputError, match=r"Line 1 of .*latin.jsonl is not text in UTF-8"):
        text_data.gather_documents([str(tmp_path)])


def test_each_source_has_text_and_a_name(tmp_path):
    (tmp_path / "one.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(text_data.InputError, match=r"No text was found in .*empty\.$"):
        text_data.gather_documents([str(tmp_path / "one.txt"), str(tmp_path / "empty")])
    with pytest.raises(text_data.InputError, match="A source of text has no name"):
        text_data.gather_documents([str(tmp_path / "one.txt"), ""])


def test_a_damaged_parquet_is_named(tmp_path):
    from pyarrow import parquet, table

    parquet.write_table(table({"text": ["a" * 10_000]}), tmp_path / "bad.parquet", compression="zstd")
    data = bytearray((tmp_path / "bad.parquet").read_bytes())
    data[4:40] = bytes(36)
    (tmp_path / "bad.parquet").write_bytes(data)
    with pytest.raises(text_data.InputError, match="is not a readable parquet file"):
        text_data.gather_documents([str(tmp_path)])


def test_parquet_without_text(tmp_path):
    from pyarrow import parquet, table

    parquet.write_table(table({"content": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(text_data.InputError, match='has no column "text"'):
        text_data.gather_documents([str(tmp_path)])


def test_unknown_dataset(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: 1 / 0)
    with pytest.raises(text_data.InputError, match=r"^nowhere is neither a file, a folder, nor a dataset"):
        text_data.gather_documents(["nowhere"])
    with pytest.raises(text_data.InputError, match=r"^nowhere.txt does not exist"):
        text_data.gather_documents(["nowhere.txt"])


# ------------------------------------------------------------------------------------------ splitting, cutting


def test_split_shares_no_document_and_is_reproducible():
    documents = some_documents()
    train, held_out = text_data.split_documents(documents, seed=3)
    assert (train, held_out) == text_data.split_documents(documents, seed=3)
    assert not set(train) & set(held_out)
    assert set(train) <= set(documents)
    share = sum(map(text_data.num_bytes, held_out)) / sum(map(text_data.num_bytes, documents))
    assert 0.08 < share <= 0.1
    # Only the last of the held-out documents may be cut, and its rest is not trained on.
    assert set(held_out[:-1]) <= set(documents)
    assert any(document.startswith(held_out[-1]) for document in set(documents) - set(train))
    assert len(train) + len(held_out) == len(documents)
    assert sum(map(text_data.num_bytes, text_data.split_documents(documents, held_out_bytes=500)[1])) <= 500


def test_nothing_is_held_out_where_nothing_was_asked_for():
    documents = some_documents(60)
    assert sorted(text_data.split_documents(documents, held_out_bytes=0)[0]) == sorted(documents)
    assert text_data.split_documents(["\n".join(documents)], held_out_bytes=0) == (["\n".join(documents)], [])


def test_split_of_one_document_loses_nothing():
    document = "".join(some_documents())
    (train,), (held_out,) = text_data.split_documents([document])
    assert train + held_out == document
    assert len(held_out) == pytest.approx(len(document) / 10, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_split_of_few_large_documents_loses_little(seed):
    """The rest of a large document that is cut is trained on, whichever it is."""
    documents = ["a line\n" * 100_000, "another\n" * 90_000, "short\n" * 100]
    train, held_out = text_data.split_documents(documents, held_out_bytes=50_000, seed=seed)
    total = sum(map(text_data.num_bytes, documents))
    assert 49_000 < sum(map(text_data.num_bytes, held_out)) <= 50_000
    assert sum(map(text_data.num_bytes, train + held_out)) == total


def test_too_little_text():
    with pytest.raises(text_data.InputError, match="10 bytes, too little to learn from: 10,000 are needed"):
        text_data.split_documents(["0123456789"])


@pytest.mark.parametrize(
    ("text", "max_bytes", "head"),
    [
        ("one\ntwo\n", 100, "one\ntwo\n"),
        ("one\ntwo\n", 6, "one\n"),
        ("one\ntwo", 2, "on"),
        ("o\ntwo three four", 9, "o\ntwo thr"),
        ("aé", 2, "a"),
        ("é", 1, ""),
    ],
)
def test_cut(text, max_bytes, head):
    assert text_data.cut(text, max_bytes) == (head, text[len(head) :])


# ------------------------------------------------------------------------------------------ tokens, batches


@pytest.mark.parametrize("text", ["beta 7 gamma\n", "naïve 🙂 \t\r\n\x00", f"a {text_data.BOUNDARY} b", ""])
def test_tokens_are_reversible(tokenizer, text):
    start, *ids, end = text_data.encode(tokenizer, [text]).tolist()
    assert start == end == tokenizer.eos_token_id == tokenizer.bos_token_id != tokenizer.pad_token_id
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_stream_separates_documents(tokenizer):
    one, two = text_data.encode(tokenizer, ["beta"]), text_data.encode(tokenizer, ["gamma delta"])
    assert torch.equal(text_data.encode(tokenizer, ["beta", "gamma delta"]), torch.cat([one, two[1:]]))


def test_tokenizer_learns_and_is_reproducible(tokenizer):
    assert len(tokenizer) == 300
    assert len(text_data.encode(tokenizer, some_documents())) < 0.6 * sum(map(text_data.num_bytes, some_documents()))
    again = text_data.train_tokenizer(some_documents(), vocab_size=300)
    assert again.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(text_data.InputError, match="A vocabulary of 200 is too small: bytes alone need 258"):
        text_data.train_tokenizer(some_documents(), vocab_size=200)


def test_random_batches():
    tokens = torch.arange(1000)
    batches = text_data.random_batches(tokens, batch_size=3, sequence_length=5, seed=1)
    again = text_data.random_batches(tokens, batch_size=3, sequence_length=5, seed=1)
    first, second = next(batches), next(batches)
    assert first.shape == (3, 6)
    assert torch.equal(first - first[:, :1], torch.arange(6).expand(3, 6))
    assert torch.equal(first, next(again)) and not torch.equal(first, second)
    # The only window of the shortest stream possible, and one token fewer.
    assert next(text_data.random_batches(tokens[:6], 2, 5)).tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    with pytest.raises(text_data.InputError, match="The text has 5 tokens, fewer than one sequence of 5 needs"):
        next(text_data.random_batches(tokens[:5], 2, 5))


# ------------------------------------------------------------------------------------------ bits per byte


def test_bits_per_byte_of_a_uniform_guess(tokenizer):
    model = Bigram(len(tokenizer))
    nn.init.zeros_(model.table)
    documents = ["naïve 🙂", "alpha beta\n"]
    predicted = len(text_data.encode(tokenizer, documents)) - 1
    # 11 bytes (two characters take 2 and 4) and 11.
    expected = predicted * math.log2(300) / 22
    assert text_data.bits_per_byte(model, tokenizer, documents) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sequence_length", [1, 7, 8, 64, 10_000])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_bits_per_byte_counts_every_token_once(tokenizer, sequence_length, batch_size):
    model, documents = Bigram(len(tokenizer)), some_documents(3)
    ids = text_data.encode(tokenizer, documents).tolist()
    log_probabilities = model.table.detach().double().log_softmax(-1)
    nats = -sum(log_probabilities[before, after].item() for before, after in pairwise(ids))
    expected = nats / math.log(2) / sum(len(document.encode()) for document in documents)
    model.train()
    score = text_data.bits_per_byte(model, tokenizer, documents, sequence_length, batch_size)
    assert score == pytest.approx(expected, rel=1e-6)
    assert model.training and model.table.grad is None


def test_compressors_are_measured_on_the_same_bytes():
    assert evaluate.compressed_bits_per_byte(["ab", "é"], lambda data: data + data[:2]) == 8 * 6 / 4


# ------------------------------------------------------------------------------------------ training


def mixer_like():
    model = nn.Module()
    model.proj = nn.Linear(4, 4)
    model.conv = nn.Conv1d(4, 4, 4, groups=4, bias=False)
    model.norm = nn.LayerNorm(4)
    model.k_bias = nn.Parameter(torch.zeros(2, 4))
    model.log_dt = nn.Parameter(torch.zeros(2))
    model.a_imag = nn.Parameter(torch.zeros(2, 4))
    model.C = nn.Parameter(torch.zeros(2, 4, 4, 2))
    return model


def test_parameter_groups():
    model = mixer_like()
    model.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group["name"]: group for group in training.parameter_groups(model, 3e-3, weight_decay=0.2)}
    members = {name: {names[id(parameter)] for parameter in group["params"]} for name, group in groups.items()}
    assert members == {
        "weights": {"proj.weight", "conv.weight"},
        "vectors": {"proj.bias", "norm.weight", "norm.bias", "k_bias"},
        "recurrence": {"log_dt", "a_imag", "C"},
    }
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "weights": 0.2,
        "vectors": 0.0,
        "recurrence": 0.0,
    }
    assert {name: group["lr"] for name, group in groups.items()} == {
        "weights": 3e-3,
        "vectors": 3e-3,
        "recurrence": 1e-3,
    }
    # The cap is a cap: a smaller rate stays. And a model without a recurrence has no group for it.
    assert {group["lr"] for group in training.parameter_groups(model, 2e-4)} == {2e-4}
    assert [group["name"] for group in training.parameter_groups(nn.Linear(2, 2), 1e-3)] == ["weights", "vectors"]


def test_parameter_groups_know_the_whole_recurrence():
    config = InterdomainConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, state_size=4
    )
    model = InterdomainForCausalLM(config)
    (group,) = [group for group in training.parameter_groups(model, 3e-3) if group["name"] == "recurrence"]
    found = {id(parameter) for parameter in group["params"]}
    assert found == {id(parameter) for name, parameter in model.named_parameters() if ".recurrence." in name}


def test_the_trainer_leaves_the_recurrence_alone_with_groups(make_model, tmp_path, random_ids):
    """Without them it lets time scales decay, which its rule of names does not know."""
    model = make_model("forget-gates", dtype=torch.float32)
    texts = [{"input_ids": ids, "labels": ids} for ids in random_ids(8, 12)]
    how = {"use_cpu": True, "report_to": "none", "max_steps": 1, "learning_rate": 0.0, "weight_decay": 0.5}
    how |= {"disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0.0}
    recurrent = {name: x for name, x in model.named_parameters() if ".recurrence." in name}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **how), train_dataset=texts)
    assert set(trainer.get_decay_parameter_names(model)) >= recurrent.keys()
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    groups = training.parameter_groups(model, 1e-3, weight_decay=0.5)
    optimizer = torch.optim.AdamW(groups, betas=(0.0, 0.0), eps=1e30)  # no step but the decay
    Trainer(model, TrainingArguments(str(tmp_path), **how), train_dataset=texts, optimizers=(optimizer, None)).train()
    changed = {name for name, x in model.named_parameters() if not x.equal(before[name])}
    assert changed and not changed & recurrent.keys()
    assert all(model.get_parameter(name).ndim > 1 for name in changed)


def test_cosine_with_warmup():
    factors = [training.cosine_with_warmup(step / 100, warmup=0.1, final=0.2) for step in range(101)]
    assert factors[0] == 0 and factors[5] == pytest.approx(0.5) and factors[10] == pytest.approx(1.0)
    assert factors[55] == pytest.approx(0.6) and factors[100] == pytest.approx(0.2)
    assert factors[:11] == sorted(factors[:11]) and factors[10:] == sorted(factors[10:], reverse=True)
    assert training.cosine_with_warmup(1.5) == pytest.approx(0.1)
    assert training.cosine_with_warmup(0.0, warmup=0.0) == 1.0
    assert training.cosine_with_warmup(1.0, warmup=1.0) == pytest.approx(0.1)


def training_run(tokenizer, **options):
    model = Bigram(len(tokenizer))
    batches = text_data.random_batches(text_data.encode(tokenizer, some_documents()), batch_size=4, sequence_length=32)
    return list(training.train(model, batches, learning_rate=0.1, **options)), model


def test_training_learns_and_is_reproducible(tokenizer):
    history, model = training_run(tokenizer, steps=60, final=0.1)
    again, same_model = training_run(tokenizer, steps=60, final=0.1)
    assert [progress.step for progress in history] == list(range(1, 61))
    assert history[-1].loss < 0.6 * history[0].loss
    assert all(progress.tokens_per_second > 0 for progress in history)
    assert 0 < history[0].learning_rate < 0.1 and history[-1].learning_rate == pytest.approx(0.01)
    assert [progress.loss for progress in history] == [progress.loss for progress in again]
    assert torch.equal(model.table, same_model.table)


def test_training_ends_with_the_clock_and_completes_its_schedule(tokenizer, monkeypatch):
    clock = iter(range(10_000))
    monkeypatch.setattr(training.time, "perf_counter", lambda: float(next(clock)))
    history, _ = training_run(tokenizer, steps=10_000, seconds=100.0, final=0.1)
    assert 30 < len(history) < 100
    assert history[-1].learning_rate == pytest.approx(0.01, rel=0.05)
    assert training_run(tokenizer, steps=0)[0] == []


def test_training_stops_at_a_loss_that_is_not_finite(tokenizer):
    model = Bigram(len(tokenizer))
    nn.init.constant_(model.table, math.nan)
    batches = text_data.random_batches(text_data.encode(tokenizer, some_documents()), batch_size=2, sequence_length=8)
    with pytest.raises(FloatingPointError, match="The loss is nan at step 1"):
        next(training.train(model, batches, steps=3))
    with pytest.raises(ValueError, match="train needs an end"):
        next(training.train(model, batches))


# ------------------------------------------------------------------------------------------ quickstart


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "model_type": "interdomain",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "state_size": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def some_text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "some.jsonl"
    text_data_rows = [json.dumps({"text": document}) + "\n" for document in some_documents()]
    path.write_text("".join(text_data_rows))
    return path


def test_text_curve():
    assert quickstart.text_curve([3.0, 2.0, 1.0], width=3, height=3) == (
        "  3.00 |*\n       | *\n  1.00 |  *\n       +--- step 3"
    )
    assert quickstart.text_curve([1.0], width=2, height=2) == "  1.00 |**\n  1.00 |\n       +-- step 1"
    assert quickstart.smoothed([4.0, 2.0, 0.0], window=2) == [4.0, 3.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "steps", "minutes"),
    [([], quickstart.STEPS, quickstart.MINUTES), (["--steps", "7"], 7, None), (["--minutes", "2"], None, 2.0)],
)
def test_end_of_the_training(arguments, steps, minutes):
    # Who asks for steps gets them, however long they take; who gives minutes gets as many steps as fit.
    options = quickstart.parse_arguments(arguments)
    assert (options.steps, options.minutes) == (steps, minutes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere"], "nowhere has no config.json."),
        (["--data", "nowhere.txt"], "nowhere.txt does not exist."),
        (["--data", "{tmp}/short.txt"], "The text has 5 bytes, too little to learn from: 10,000 are needed."),
        (["--data", "{text}", "--vocab-size", "3"], "A vocabulary of 3 is too small: bytes alone need 258."),
        (["--data", "{text}", "--sequence-length", "9000000"], "fewer than one sequence of 9,000,000 needs."),
        (["--steps", "0"], "--steps must be positive, not 0."),
        (["--sequence-length", "-1"], "--sequence-length must be positive, not -1."),
        (["--output", "{tmp}"], "is not empty: choose another, or add --overwrite."),
        (["--output", "{tmp}/short.txt"], "is a file, not a folder."),
        (["--output", "{tmp}/short.txt/deep"], "short.txt is a file, not a folder."),
        (["--seed", "-1"], "--seed must be from 0 to 4,294,967,295, not -1."),
    ],
)
def test_errors_are_one_sentence(tmp_path, tiny_config, some_text, capsys, arguments, message):
    (tmp_path / "short.txt").write_text("short")
    arguments = [argument.format(tmp=tmp_path, text=some_text) for argument in arguments]
    defaults = ["--config", str(tiny_config), "--output", str(tmp_path / "out"), "--vocab-size", "300"]
    assert quickstart.main(defaults + arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "--tokens must be positive, not 0."),
        (["--temperature", "0"], "--temperature must be positive, not 0.0."),
        (["--sequence-length", "0"], "--sequence-length must be positive, not 0."),
        (["--json", "/no/where"], "/no/where cannot be written: --json needs the name of a file in a folder that"),
        (["--json", "/"], "/ cannot be written: --json needs the name of a file in a folder that"),
    ],
)
def test_evaluate_refuses_options_before_it_loads(capsys, arguments, message):
    assert evaluate.main(["nowhere", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_evaluate_refuses_a_folder_without_a_model(tmp_path, capsys):
    assert evaluate.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} is not a folder with a saved model.\n"


def test_quickstart_from_data_to_a_fresh_process(tmp_path, tiny_config, some_text):
    output = tmp_path / "deep" / "output"
    command = [sys.executable, "-m", "examples.quickstart", "--config", str(tiny_config), "--data", str(some_text)]
    command += ["--output", str(output), "--steps", "30", "--vocab-size", "300", "--sequence-length", "32"]
    done = subprocess.run([*command, "--prompt", "alpha"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((output / "results.json").read_text())
    assert "\nalpha" in done.stdout and f"{results['bits_per_byte']:.3f} bits per byte" in done.stdout
    assert results["steps"] == 30 and results["held_out_bytes"] > 1000

    with (output / "learning_curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 30 and float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert (output / "learning_curve.png").stat().st_size > 1000
    card = ModelCard.load(output / "README.md")
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        "apache-2.0",
        "transformers",
        "text-generation",
    )
    assert card.data.eval_results[0].metric_value == pytest.approx(results["bits_per_byte"], abs=1e-4)
    assert str(tmp_path) not in card.text

    # The saved folder is the model that was measured.
    model, tokenizer = evaluate.load(str(output))
    assert len(tokenizer) == model.config.vocab_size == 300
    assert model.config.eos_token_id == tokenizer.eos_token_id
    documents = text_data.gather_documents([str(output / "held_out.jsonl")])
    score = text_data.bits_per_byte(model, tokenizer, documents, sequence_length=32)
    assert score == pytest.approx(results["bits_per_byte"], rel=1e-3)


def test_a_new_model_leaves_nothing_of_the_one_before(tmp_path):
    """What lies there beside a model, in folders or where none is, stays."""
    for name in ("notes.txt", "inner/chat_template.jinja"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    quickstart.make_room(tmp_path)
    assert (tmp_path / "notes.txt").exists()
    for name in ("config.json", "chat_template.jinja", "conversion_report.json"):
        (tmp_path / name).write_text("{}")
    quickstart.make_room(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["inner"]
    assert (tmp_path / "inner" / "chat_template.jinja").exists()


@pytest.mark.slow
def test_what_is_written_from_scratch_reads_like_text(tmp_path, capfd):
    """After a fifth of the quickstart's tokens, of what Python says of itself: words that stand there, few twice.

    Of several texts, for one may end early.
    """
    arguments = ["--from-scratch", "--steps", "160", "--batch-size", "4", "--vocab-size", "2048"]
    assert quickstart.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    shown = capfd.readouterr().out.partition("writes:\n\n")[2].partition("\n\nHeld-out text")[0]
    model, tokenizer = saved_model.load(tmp_path / "out")
    texts = [evaluate.generate_text(model, tokenizer, "This function", seed=seed) for seed in range(5)]
    assert shown.strip() == texts[0].strip() and all(text.startswith("This function") for text in texts)
    held_out = set(text_data.gather_documents([str(tmp_path / "out" / "held_out.jsonl")]))
    read = " ".join(text for text in text_data.standard_library_prose() if text not in held_out)
    word = re.compile(r"[A-Za-z]+")
    words, known = [word.findall(text) for text in texts], set(word.findall(read))
    count, written = sum(map(len, words)), "".join(texts)
    letters = sum(character.isalpha() or character.isspace() for character in written)
    assert count > 200, texts
    assert letters > 0.85 * len(written), texts
    assert sum(x in known for found in words for x in found) > 0.85 * count, texts
    threes = [three for found in words for three in zip(found, found[1:], found[2:])]
    assert len(set(threes)) > 0.8 * len(threes), texts


def test_numbers_to_write_need_text_to_measure(capsys, tmp_path):
    assert evaluate.main([str(tmp_path), "--json", str(tmp_path / "found.json")]) == 2
    assert capsys.readouterr().err.startswith("--json holds what is measured on held-out text: name that with --data.")


def test_a_model_that_nobody_named_is_the_best_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def default() -> Path:
        parser = argparse.ArgumentParser()
        saved_model.add_folder(parser)
        return parser.parse_args([]).folder

    assert default() == Path("runs/quickstart")
    (tmp_path / "runs" / "best").mkdir(parents=True)
    assert default() == Path("runs/quickstart"), "an empty folder is no model"
    (tmp_path / "runs" / "best" / "config.json").touch()
    assert default() == Path("runs/best")


@pytest.mark.parametrize(
    ("fields", "sentences"),
    [
        (
            {},
            ["the same text", "away from that of reading both", "away from that of the second alone", "these answer: "],
        ),
        ({"rope_parameters": {"rope_type": "default"}, "rope_placement": "after"}, ["it cannot be closed up"]),
        (
            {"token_mixers": ["selective_scan", "softmax"]},
            ["the same text", "one linear state", "No layer"],
        ),
    ],
    ids=["all of it", "numbered tokens", "other layers"],
)
def test_what_a_state_makes_possible(fields, sentences, tokenizer, tmp_path, capsys):
    """Each part, or the sentence that says why not."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = InterdomainConfig(**shape, **special, vocab_size=len(tokenizer), state_size=8, **fields)
    InterdomainForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert states.main([str(tmp_path), "--tokens", "4"]) == 0
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if not line.startswith("  ")]) == 5
    for sentence in sentences:
        assert sentence in printed
    assert states.main([str(tmp_path), "--tokens", "0"]) == 2


def test_gates_of_branches_tables_and_states_do_not_decay_and_points_learn_slowly():
    names = {
        "sparse.gate.weight": "vectors",
        "dynamic_mask.table": "vectors",
        "first_state.state": "vectors",
        "token_mixer.memory_gate": "vectors",
        "token_mixer.write_gate": "vectors",
        "feature_map.frequencies": "vectors",
        "feature_map.phases": "vectors",
        "feature_map.weights": "vectors",
        "recurrence.A_log": "vectors",
        "model.cls_token": "vectors",
        "points.point_log_scale": "vectors",
        "recurrence.point_keys": "recurrence",
        "recurrence.point_values": "recurrence",
        "recurrence.readout": "recurrence",
        "q_proj.weight": "weights",
    }
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    assert {name: _group_of(name, matrix) for name in names} == names


def test_short_sentences_are_no_prose():
    assert text_data.prose('"Raised when a name is unknown."') == ""


def test_a_budget_that_ends_with_a_document_leaves_no_empty_one():
    assert text_data._take(["one\n", "two\n"], 4) == ["one\n"]


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text("text")
    assert text_data.gather_documents(["~/mine.txt"]) == ["text"]


def test_rows_of_a_dataset_without_text_are_left_out_and_no_configuration_is_none(monkeypatch):
    import datasets

    asked = []
    rows = [{"text": None}, {"text": "row"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **_: asked.append(names) or rows)
    assert text_data.gather_documents(["name"]) == ["row"] and asked == [("name", None)]


def test_likelihoods_of_rounded_logits_are_in_float32():
    logits = torch.randn(1, 3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = text_data.nll_of_logits(logits, torch.tensor([[1, 2, 3, 4]]))
    assert torch.equal(found, text_data.nll_of_logits(logits.float(), torch.tensor([[1, 2, 3, 4]])))


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    assert text_data.gather_documents([str(tmp_path / "a.txt")]) == ["text"]
