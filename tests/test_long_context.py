"""examples/long_context.py: a text read in chunks is the text read at once, and what it prints is true."""

import copy
import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from examples import long_context, text_data
from modeling_interdomain import InterdomainCache
from tests.test_examples import some_documents
from tests.test_serving import word_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
TEXT = "".join(some_documents(count=28, lines=20)) + "no newline at the end: \u00e9"
PROMPT, WRITTEN = "gamma 7", 12


@pytest.fixture(scope="module")
def tokenizer():
    return text_data.train_tokenizer(some_documents(), vocab_size=300)


@pytest.fixture(scope="module", params=["interdomain", "interdomain-softmax"])
def folder(request, make_model, tokenizer, tmp_path_factory):
    """A random model in float64 that never ends a text by itself, with its tokenizer."""
    path = tmp_path_factory.mktemp(request.param)
    make_model(request.param, vocab_size=300).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    """All in float64; loading leaves the parameters of the recurrence in float32."""
    return AutoModelForCausalLM.from_pretrained(folder).double()


@pytest.fixture(scope="module")
def ids(tokenizer):
    """`[1, 1 + T]`: the boundary and every token of TEXT."""
    tokens = tokenizer(TEXT)["input_ids"]
    assert len(tokens) > 2048
    return torch.tensor([[tokenizer.bos_token_id, *tokens]])


@pytest.fixture(scope="module")
def bits_per_byte(model, ids):
    """Of one forward over everything."""
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0]
    return F.cross_entropy(logits, ids[0, 1:], reduction="sum").item() / math.log(2) / len(TEXT.encode())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def continuation(model, tokenizer, ids, prompt: str) -> str:
    """What `generate` writes after all of it at once, greedily."""
    ids = torch.cat([ids, torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.long)], dim=1)
    settings = {"max_new_tokens": WRITTEN, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    return tokenizer.decode(model.generate(ids, **settings)[0, ids.shape[1] :], skip_special_tokens=True)


def columns(output: str) -> list[list[float]]:
    """The numbers of every line of the table."""
    head, *lines = output.partition("\n\n")[0].splitlines()
    assert head.split("  ")[-1] == "keys and values of softmax"
    return [[float(cell.replace(",", "")) for cell in line.split()] for line in lines]


def last(model, tokenizer, text: Path, chunk: int) -> long_context.Reading:
    with text.open(encoding="utf-8") as file:
        *_, reading = long_context.read(model, tokenizer, file, chunk)
    return reading


# Reading.


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 64, 700, 10**6])
def test_chunks_give_what_the_whole_gives(model, tokenizer, ids, bits_per_byte, text, chunk):
    reading = last(model, tokenizer, text, chunk)
    assert (reading.tokens, reading.bytes) == (ids.shape[1] - 1, len(TEXT.encode()))
    assert reading.cache.get_seq_length() == reading.tokens
    # The example takes the logits in float32.
    assert reading.bits_per_byte == pytest.approx(bits_per_byte, rel=2e-7)


def test_the_beginning_read_token_by_token(model, tokenizer, tmp_path):
    path = tmp_path / "beginning.txt"
    path.write_text(TEXT[:600], encoding="utf-8")
    one_by_one, whole = (last(model, tokenizer, path, chunk) for chunk in (1, 10**6))
    assert one_by_one.tokens == whole.tokens > 100
    assert one_by_one.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=2e-7)


def test_the_cache_after_chunks_is_that_of_one_forward(model, tokenizer, text, contents, assert_same):
    chunked, whole = (contents(last(model, tokenizer, text, chunk).cache) for chunk in (64, 10**6))
    assert len(chunked) == len(whole) > 0
    for a, b in zip(chunked, whole):
        assert_same(a, b)


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_chunks_are_the_tokens_and_bytes_of_the_text(tokenizer, ids, text, size):
    with text.open(encoding="utf-8") as file:
        parts = list(long_context.chunks(tokenizer, file, size))
    assert [token for tokens, _ in parts for token in tokens] == ids[0, 1:].tolist()
    assert max(len(tokens) for tokens, _ in parts) == min(size, ids.shape[1] - 1)
    assert [count for _, count in parts[:-9]] == [len(tokenizer.decode(tokens)) for tokens, _ in parts[:-9]]
    assert sum(count for _, count in parts) == len(TEXT.encode())


@pytest.mark.parametrize("end", [" ", "\n"])
def test_a_long_text_is_never_held_whole(tokenizer, tmp_path, monkeypatch, end):
    monkeypatch.setattr(long_context, "PIECE", 1000)
    path = tmp_path / "long.txt"
    path.write_text(f"alpha 3{end}" * 10_000)
    with path.open() as file:
        parts = []
        for part in long_context.chunks(tokenizer, file, size=16):
            parts.append(part)
            assert file.buffer.tell() <= sum(count for _, count in parts) + 2000 + 8192  # what Python reads ahead
    assert sum(count for _, count in parts) == 80_000
    assert tokenizer.decode([token for tokens, _ in parts for token in tokens]) == path.read_text()


def test_bytes_that_no_token_stands_for_are_counted(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("w5  w6 w7\n\n")  # to this tokenizer, white space is nothing
    with path.open() as file:
        assert list(long_context.chunks(word_tokenizer(), file, size=2)) == [([5, 6], 6), ([7], 5)]


def test_special_tokens_in_a_text_are_text(tokenizer, tmp_path):
    path = tmp_path / "special.txt"
    path.write_text(text_data.BOUNDARY)
    with path.open() as file:
        ((tokens, count),) = long_context.chunks(tokenizer, file, size=16)
    assert count == len(text_data.BOUNDARY) and tokenizer.bos_token_id not in tokens


# The program.


def test_table_and_continuation(capsys, model, tokenizer, ids, bits_per_byte, folder, text):
    arguments = [str(folder), str(text), "--chunk", "64", "--prompt", PROMPT, "--tokens", str(WRITTEN)]
    assert long_context.main(arguments) == 0
    output = capsys.readouterr().out
    tokens, bits, speeds, ours, theirs = zip(*columns(output))

    total = ids.shape[1] - 1
    assert tokens == (1024, 2048, total)
    assert bits[-1] == pytest.approx(bits_per_byte, abs=5e-4)
    assert min(speeds) > 0
    per_token = 2 * 2 * 4 * 8 * 8  # keys and values, 2 layers, 4 heads of 8, 8 bytes
    assert theirs == tuple(per_token * count for count in tokens)
    if "softmax" in model.config.mixers_per_layer:  # one layer of each kind
        state = ours[0] - per_token // 2 * tokens[0]
        assert state > 0 and ours == tuple(state + per_token // 2 * count for count in tokens)
    else:
        assert 0 < ours[0] == ours[1] == ours[2] == long_context.cache_bytes(last(model, tokenizer, text, 64).cache)

    assert output.partition("\n\n")[2] == PROMPT + continuation(model, tokenizer, ids, PROMPT) + "\n"


def test_continuation_without_a_prompt(model, tokenizer, ids, text):
    written = long_context.write(model, tokenizer, last(model, tokenizer, text, 300), "", WRITTEN)
    assert written == continuation(model, tokenizer, ids, "")


def test_no_tokens_no_continuation(capsys, folder, text):
    assert long_context.main([str(folder), str(text), "--tokens", "0"]) == 0
    assert columns(capsys.readouterr().out)[-1][0] > 2048


def test_a_state_file_goes_on_where_the_text_ended(capsys, model, tokenizer, folder, tmp_path):
    """Two texts, then a prompt, each in a call of its own; the same numbers as in one go, to the last digit."""
    state, halves = tmp_path / "text.safetensors", (TEXT[:6000], TEXT[6000:])
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for half, name in zip(halves, ("first.txt", "second.txt")):
        (tmp_path / name).write_text(half, encoding="utf-8")
        arguments = [str(folder), str(tmp_path / name), "--state", str(state), "--chunk", "64", "--tokens", "0"]
        assert long_context.main(arguments) == 0
        ids = [tokenizer.bos_token_id, *tokenizer(half, add_special_tokens=False)["input_ids"][:-1]]
        tokens = torch.tensor([ids])
        if half == halves[0]:
            assert InterdomainCache.load(state, loaded, tokenizer=tokenizer, tokens=tokens).get_seq_length() == len(ids)
        else:
            with pytest.raises(ValueError, match="does not say of which text it is"):
                InterdomainCache.load(state, loaded, tokens=tokens)
    table = columns(capsys.readouterr().out.rpartition("\n      tokens")[0])
    assert table[-1][0] > 1024, "the first call"
    found = long_context.resume(str(state), AutoModelForCausalLM.from_pretrained(folder), tokenizer)

    expected = None
    for half in halves:
        *_, expected = long_context.read(loaded, tokenizer, io.StringIO(half), 64, expected)
    assert (found.last, found.tokens, found.bytes, found.nats) == (
        expected.last,
        expected.tokens,
        expected.bytes,
        expected.nats,
    )
    assert long_context.main([str(folder), "--state", str(state), "--prompt", PROMPT, "--tokens", "5"]) == 0
    assert capsys.readouterr().out == f"\n{PROMPT}{long_context.write(loaded, tokenizer, expected, PROMPT, 5)}\n"


def run(*arguments, **options) -> subprocess.CompletedProcess:
    """The example as a user starts it."""
    command = [sys.executable, "-m", "examples.long_context", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, **options)


@pytest.mark.parametrize("folder", ["interdomain"], indirect=True)
def test_standard_input(folder, tokenizer):
    """Whatever the locale, and with bytes that are no UTF-8."""
    done = run(folder, "--tokens", "0", input=TEXT.encode() + b"\xff", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr.decode()
    assert columns(done.stdout.decode())[-1][0] == len(tokenizer(TEXT + "\ufffd")["input_ids"])


# Mistakes.


def refusal(capsys, *arguments) -> str:
    """The one line on standard error with which the example ends."""
    capsys.readouterr()
    assert long_context.main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.endswith(".\n")
    return error


def test_standard_input_without_text(capsys, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert refusal(capsys, folder, "-") == "Standard input holds no text.\n"


def test_states_of_something_else(capsys, folder, model, text, tmp_path):
    state = tmp_path / "state.safetensors"
    assert "The folder of" in refusal(capsys, folder, text, "--state", tmp_path / "no" / "state")
    state.write_bytes(b"noise")
    assert "is torn, or no state file" in refusal(capsys, folder, "--state", state)
    other, cache = copy.deepcopy(model), InterdomainCache(model.config)
    torch.nn.init.ones_(other.model.embed_tokens.weight)
    other(torch.tensor([[5, 6]]), past_key_values=cache)
    cache.save(state)
    assert "is the state of another model" in refusal(capsys, folder, "--state", state)
    loaded, tokenizer = long_context.load_interdomain(folder)
    cache = InterdomainCache(loaded.config)
    loaded(torch.tensor([[5, 6]]), past_key_values=cache)
    cache.save(state, tokenizer=tokenizer)
    assert "was not written by examples.long_context" in refusal(capsys, folder, "--state", state)


def test_missing_file(capsys, folder, tmp_path):
    assert "nowhere.txt is not a file" in refusal(capsys, folder, tmp_path / "nowhere.txt")
    assert "is not a file" in refusal(capsys, folder, tmp_path)


def test_empty_file(capsys, folder, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert "empty.txt holds no text" in refusal(capsys, folder, tmp_path / "empty.txt")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--chunk", "0", "--chunk must be at least 1, not 0"),
        ("--chunk", "-5", "--chunk must be at least 1, not -5"),
        ("--tokens", "-1", "--tokens must be at least 0, not -1"),
    ],
)
def test_impossible_numbers(capsys, folder, text, option, value, message):
    assert message in refusal(capsys, folder, text, option, value)


def test_questions_that_cannot_be_asked(capsys, folder, text):
    assert "has no chat template to --ask with: use --prompt" in refusal(capsys, folder, text, "--ask", "Who?")
    assert "in place of --prompt: name one" in refusal(capsys, folder, text, "--ask", "Who?", "--prompt", "a")


def test_no_number(folder, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        long_context.main([str(folder), str(text), "--chunk", "many"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("argument --chunk: invalid int value: 'many'")


def test_folder_without_a_model(capsys, text, tmp_path):
    assert "is not a folder with a saved model" in refusal(capsys, tmp_path, text)


def test_folder_without_a_tokenizer(capsys, make_model, text, tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    assert "holds no tokenizer" in refusal(capsys, tmp_path / "model", text)


def test_tokenizer_without_a_beginning(capsys, make_model, text, tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    assert "no token for the beginning of a text" in refusal(capsys, tmp_path / "model", text)


def test_folder_of_another_architecture(capsys, tokenizer, text, tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert "holds a model of type 'llama', not an Interdomain model" in refusal(capsys, tmp_path / "model", text)
