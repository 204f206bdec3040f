"""Length extrapolation and recall: what is asked is what the scripts say, and they write a table and a plot."""

import json
import math
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from examples import evaluate_lengths, recall, text_data
from examples.saved_model import load
from examples.text_data import mean_nll
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from tests.test_examples import some_documents


class Fixed(torch.nn.Module):
    """Says the same logits `[V]` everywhere, or those that `rule(ids)` gives."""

    def __init__(self, rule, vocab_size=16):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.rule, self.vocab_size, self.device = rule, vocab_size, torch.device("cpu")

    def forward(self, input_ids, logits_to_keep=0, **kwargs):
        return SimpleNamespace(logits=self.rule(input_ids)[:, -logits_to_keep or None :])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = text_data.train_tokenizer(some_documents(), 300)
    torch.manual_seed(0)
    config = InterdomainConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                               bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)  # fmt: skip
    InterdomainForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


# Lengths.


def test_bits_at_every_length_are_over_the_same_tokens():
    """A model that gives every token the same probability needs log2(V) bits at any length."""
    tokens = torch.randint(16, (141,))
    model = Fixed(lambda ids: torch.zeros(*ids.shape, 16))
    for length in (10, 20, 35, 33, 500):
        assert mean_nll(model, tokens, length) == pytest.approx(math.log(16))


def test_a_longer_window_shows_more_past():
    """A model that is certain from the fifth token of a window on: of every window four tokens cost one bit each."""

    def rule(ids):
        known = torch.arange(ids.shape[1]) >= 4
        right = torch.nn.functional.one_hot((ids + 1) % 2, 2) * 1e3
        return torch.where(known[None, :, None], right, 0.0)

    tokens = torch.arange(141) % 2
    for length in (10, 20, 35):
        assert mean_nll(Fixed(rule, 2), tokens, length) == pytest.approx(4 / length * math.log(2))


def test_lengths_are_written_as_table_and_plot(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n".join(some_documents()))
    arguments = [folder, "--data", str(tmp_path / "text.txt"), "--trained-length", "16", "--output", str(tmp_path)]
    assert evaluate_lengths.main(arguments) == 0
    assert "tiny: " in capsys.readouterr().out
    curve = json.loads((tmp_path / "lengths.json").read_text())["curves"]["tiny"]
    assert set(curve) == {"16", "32", "56"} and all(0 < bits < 20 for bits in curve.values())
    assert (tmp_path / "lengths.png").stat().st_size > 1000 and "| tiny |" in (tmp_path / "lengths.md").read_text()
    assert evaluate_lengths.main([*arguments[:4], "1000000"]) == 2
    assert "fewer than one window of 3,500,000" in capsys.readouterr().err
    assert evaluate_lengths.main([*arguments, "--factors", "nan", "1"]) == 2
    assert "at least one token" in capsys.readouterr().err
    assert evaluate_lengths.main([*arguments[:4], "0"]) == 2
    assert "at least one token" in capsys.readouterr().err


def test_folders_of_the_same_name_are_told_apart(folder, tmp_path):
    again = str(shutil.copytree(folder, tmp_path / "again" / "tiny"))
    (tmp_path / "text.txt").write_text("\n".join(some_documents()))
    arguments = ["--data", str(tmp_path / "text.txt"), "--trained-length", "16", "--output", str(tmp_path)]
    assert evaluate_lengths.main([folder, again, *arguments]) == 0
    assert set(json.loads((tmp_path / "lengths.json").read_text())["curves"]) == {folder, again}
    assert recall.main(["needle", folder, again, "--sizes", "5", "--questions", "2", *arguments[-2:]]) == 0
    assert set(json.loads((tmp_path / "needle.json").read_text())["curves"]) == {folder, again}


# Recall.


def test_every_key_is_asked_once_after_its_pair():
    batch = next(recall.mqar_batches(6, 32, 64, 5, torch.Generator().manual_seed(0)))
    assert batch.ids.shape == (5, 32) and batch.asked.sum(1).tolist() == [6] * 5
    for ids, asked in zip(batch.ids, batch.asked):
        pairs = dict(ids[:12].view(6, 2).tolist())
        assert len(pairs) == 6 and all(0 < key < 32 <= value < 64 for key, value in pairs.items())
        places = asked.nonzero()[:, 0]
        assert places.min() > 12
        assert {ids[p - 1].item(): ids[p].item() for p in places} == pairs
        rest = torch.ones(32, dtype=torch.bool)
        rest[:12] = rest[places] = rest[places - 1] = False
        assert not ids[rest].any()


def test_the_kinds_of_sequences_ask_the_same():
    """Of one seed: what is put in front, in gaps and in labels leaves pairs and questions as they are."""

    def draw(**kind):
        generator = torch.Generator().manual_seed(0)
        return next(recall.mqar_batches(6, 32, 64, 50, generator, **kind))

    plain, hidden, filled = draw(), draw(hidden_answers=True), draw(random_filler=True)
    assert torch.equal(hidden.labels, plain.ids) and torch.equal(hidden.asked, plain.asked)
    assert torch.equal(hidden.ids, plain.ids.masked_fill(plain.asked, 0))
    gaps = plain.ids == 0
    assert torch.equal(filled.ids[~gaps], plain.ids[~gaps]) and len(filled.ids[gaps].unique()) == 63
    assert not (filled.ids == 0).any() and filled.labels is None
    every = draw(random_filler=True, hidden_answers=True, shift=7)
    moved, starts = draw(shift=7), set()
    assert torch.equal(every.asked, moved.asked) and torch.equal(every.labels[every.asked], moved.ids[moved.asked])
    for row in range(50):
        place = moved.asked[row].nonzero()[0] - plain.asked[row].nonzero()[0]
        starts.add(place.item())
        behind = slice(place, place + 32)
        assert torch.equal(moved.ids[row, behind], plain.ids[row])
        assert (moved.ids[row, :place] >= 32).all() and not moved.ids[row, place + 32 :].any()
        given = hidden.ids[row] != 0
        assert torch.equal(every.ids[row, behind][given], hidden.ids[row][given]) and (every.ids[row] != 0).all()
    assert starts == set(range(8)) and moved.ids.shape == (50, 39)
    logits = F.one_hot(every.labels[:, 1:], 64).float()
    found = recall.answers(Fixed(lambda ids: logits, 64), every)
    assert len(found.tokens) == 300 and found.accuracy() == pytest.approx(1.0)


def test_a_model_that_looks_keys_up_is_right():
    def lookup(ids):
        logits = torch.zeros(*ids.shape, 64)
        for row, tokens in enumerate(ids.tolist()):
            pairs = dict(zip(tokens[:12:2], tokens[1:12:2]))
            for place, token in enumerate(tokens):
                logits[row, place, pairs.get(token, 0)] = 1.0
        return logits

    batch = next(recall.mqar_batches(6, 32, 64, 5, torch.Generator().manual_seed(0)))
    found = recall.answers(Fixed(lookup, 64), batch)
    assert len(found.tokens) == 30 and found.accuracy() == pytest.approx(1.0)


def read_joint(row, asked, shape):
    """By path the values that are told, and those that are asked: contexts of each level, then the key."""
    first, halves, path = 3 + shape.values, [{}, {}], []
    assert row[0] == 1 and row.count(1) == row.count(2) == 1
    half = 0
    for place, token in enumerate(row[1:], start=1):
        assert asked[place] == (half == 1 and 3 <= token < first)
        if token == 2:
            half = 1
        elif token < first:
            assert len(path) == shape.levels + 1 and tuple(path) not in halves[half]
            halves[half][tuple(path)] = token
        else:
            level, number = divmod(token - first, shape.largest)
            path = [*path[:level], number]
    return halves


@pytest.mark.parametrize("shape", [recall.Joint(2, 4, 5), recall.Joint(3, 3, 7, levels=2)], ids=["drawn", "levels"])
def test_joint_recall_tells_every_value_once_and_asks_it_in_other_orders(shape):
    batch = next(recall.joint_batches(shape, 40, torch.Generator().manual_seed(0)))
    assert batch.ids.max() < shape.vocab_size and (batch.mask is None) == (shape.smallest == shape.largest)
    sizes, orders, values, turned = set(), set(), set(), 0
    for row, (ids, asked) in enumerate(zip(batch.ids, batch.asked)):
        real = int((ids != 0).sum())
        assert ids[real:].eq(0).all() and not asked[real:].any()
        assert batch.mask is None or batch.mask[row].sum() == real == batch.mask[row, :real].sum()
        told, wanted = read_joint(ids[:real].tolist(), asked.tolist(), shape)
        assert told == wanted
        turned += list(told) != list(wanted)
        by_level = [len({path[level] for path in told}) for level in range(shape.levels + 1)]
        assert len(told) == math.prod(by_level) == asked.sum()
        sizes.add(tuple(by_level))
        orders.add(tuple(told))
        values |= set(told.values())
    drawn = range(shape.smallest, shape.largest + 1)
    assert len(sizes) == len(drawn) ** (shape.levels + 1) and len(orders) > 20
    assert len(values) == shape.values and turned > 30


def test_sequences_weigh_the_same_however_much_they_are_asked():
    ids = torch.tensor([[1, 5, 4, 5, 4, 5, 4], [1, 5, 4, 0, 0, 0, 0]])
    asked = torch.tensor([[0, 0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 0, 0, 0]]).bool()
    model = Fixed(lambda ids: torch.eye(6)[4] * torch.tensor([[1.0], [-1.0]])[..., None].expand(2, ids.shape[1], 1), 6)
    found = recall.answers(model, recall.Pairs(ids, asked, mask=ids != 0))
    assert found.accuracy() == pytest.approx(0.5)
    nats = [math.log(5 + math.exp(x)) - x for x in (1, -1)]
    assert found.nats().item() == pytest.approx(sum(nats) / 2, rel=1e-5) == found.loss().item()


@pytest.mark.parametrize(("steps", "least"), [(5, 0.0), pytest.param(600, 0.6, marks=pytest.mark.slow)])
def test_mqar_learns_to_look_keys_up(tmp_path, steps, least):
    """Knowing the two values of a sequence without their keys would be right half of the time."""
    config = tmp_path / "small"
    InterdomainConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=1, state_size=8).save_pretrained(config)
    arguments = ["mqar", str(config), "--sizes", "2", "--steps", str(steps), "--vocab-size", "16", "--length", "8"]
    arguments += ["--random-filler", "--shift", "2"] if steps == 5 else []
    assert recall.main([*arguments, "--batch-size", "64", "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "mqar.json").read_text())
    assert least < record["curves"]["small"]["2"] <= 1 and record["steps"] == steps
    assert (tmp_path / "mqar.png").exists()


def test_joint_recall_is_trained_and_asked(tmp_path, capsys):
    config = tmp_path / "small"
    InterdomainConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=1, state_size=8).save_pretrained(config)
    arguments = ["joint", str(config), "--sizes", "3", "--smallest", "2", "--values", "4", "--steps", "3"]
    assert recall.main([*arguments, "--batch-size", "8", "--output", str(tmp_path)]) == 0
    assert "Chance is 0.250" in capsys.readouterr().out
    assert 0 <= json.loads((tmp_path / "joint.json").read_text())["curves"]["small"]["3"] <= 1


def test_the_phone_book_asks_for_a_number_that_it_lists():
    for seed in range(20):
        question = recall.phonebook_question(8, 4, random.Random(seed))
        *book, name = question.prompt.split("\n")
        numbers = dict(line.split(":") for line in book if line)
        assert len(numbers) == 8 and question.answers[0] == numbers[name.rstrip(":")]
        assert len(set(question.answers)) == 4 and set(question.answers) <= set(numbers.values())


def test_the_needle_is_in_the_text_once():
    depths = set()
    for seed in range(20):
        question = recall.needle_question(["One two three.", "Four five."], 40, 4, random.Random(seed))
        right = f"The secret number is{question.answers[0]}. "
        assert question.prompt.count(right) == 1 and question.prompt.endswith("The secret number is")
        assert len(set(question.answers)) == 4
        assert not any(answer in question.prompt for answer in question.answers[1:])
        assert 40 <= len(question.prompt.split()) < 60
        depths.add(question.prompt.index(right))
    assert len(depths) > 5


def test_likelihoods_are_those_of_the_answer_alone(folder):
    model, tokenizer = load(folder)
    question = recall.Question("alpha 1 beta", [" gamma 12", " delta", " x"])
    for answer, found in zip(question.answers, recall.log_likelihoods(model, tokenizer, question)):
        prompt = [tokenizer.bos_token_id, *tokenizer(question.prompt, add_special_tokens=False)["input_ids"]]
        row = tokenizer(answer, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + row])).logits[0].log_softmax(-1)
        expected = sum(logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(row))
        assert math.isclose(found, expected, rel_tol=1e-4)


@pytest.mark.parametrize(("task", "sizes"), [("phonebook", ["4", "6"]), ("needle", ["20"])])
def test_checkpoints_are_asked(folder, tmp_path, capsys, task, sizes):
    arguments = [task, folder, "--sizes", *sizes, "--questions", "5", "--output", str(tmp_path)]
    assert recall.main(arguments) == 0
    assert "Chance is 0.250" in capsys.readouterr().out
    first = json.loads((tmp_path / f"{task}.json").read_text())["curves"]["tiny"]
    assert set(first) == set(sizes) and all(0 <= x <= 1 for x in first.values())
    assert (
        recall.main(arguments) == 0 and json.loads((tmp_path / f"{task}.json").read_text())["curves"]["tiny"] == first
    )


MISTAKES = {
    "folder": (["mqar", "nowhere"], "nowhere has no config.json"),
    "pairs": (["mqar", "CONFIG", "--sizes", "200"], "200 pairs need a vocabulary of at least 402 tokens, got 256"),
    "choices": (["phonebook", "CONFIG", "--sizes", "2"], "A phone book of 2 entries has no 4 numbers"),
    "entries": (["phonebook", "CONFIG", "--sizes", "600"], "A phone book has at most 552 entries, not 600"),
    "needles": (["needle", "CONFIG", "--choices", "100000"], "--choices is at most 90,000 for a needle"),
    "sizes": (["needle", "CONFIG", "--sizes", "0"], "--sizes must be positive"),
    "steps": (["mqar", "CONFIG", "--steps", "0"], "--steps must be positive, not 0"),
    "smallest": (["joint", "CONFIG", "--sizes", "4", "6", "--smallest", "5"], "--smallest 5 is more than 4"),
    "values": (["joint", "CONFIG", "--values", "1"], "--values must be at least 2, not 1"),
    "levels": (["joint", "CONFIG", "--levels", "0"], "--levels must be positive, not 0"),
    "joint": (["mqar", "CONFIG", "--levels", "2"], "--levels is for joint: mqar does not read it, leave it away."),
    "mqar": (["joint", "CONFIG", "--random-filler"], "--random-filler is for mqar: joint does not read it"),
    "needle": (["phonebook", "CONFIG", "--data", "x"], "--data is for needle: phonebook does not read it"),
    "learned": (["needle", "CONFIG", "--steps", "5"], "--steps is for mqar and joint: needle does not read it"),
    "shift": (["mqar", "CONFIG", "--shift", "-1"], "--shift must not be negative, not -1"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(folder, capsys, arguments, message):
    assert recall.main([folder if x == "CONFIG" else x for x in arguments]) == 2
    assert message in capsys.readouterr().err


def test_bits_of_one_window_over_all_documents_are_those_of_their_bytes(folder):
    documents = some_documents(3)
    model, tokenizer = load(folder)
    length = len(text_data.encode(tokenizer, documents)) - 1
    expected = text_data.bits_per_byte(model, tokenizer, documents, length)
    assert evaluate_lengths.evaluate(folder, documents, [length]) == {length: pytest.approx(expected)}


def test_a_file_in_the_place_of_the_folder_is_named_before_texts_are_read(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    arguments = ["model", "--data", "missing.txt", "--trained-length", "16", "--output", str(tmp_path / "out")]
    assert evaluate_lengths.main(arguments) == 2
    assert "out is a file, not a folder" in capsys.readouterr().err
