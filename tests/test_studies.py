"""The studies: every condition is a configuration, runs are resumed one by one, tables follow the files."""

import functools
import itertools
import json
import math
import sys

import pytest
import torch

from benchmarks import (
    adapter_study,
    backends,
    cheems_study,
    condition_study,
    conversion_study,
    core_runs,
    core_study,
    distant_study,
    image_study,
    joint_study,
    larger_study,
    longer_study,
    lookup_study,
    more_tokens,
    readme,
    recall_layers,
    recall_study,
    reduce_study,
    spans_study,
    start_study,
    studies,
)
from benchmarks.harness import RESULTS
from conversion import fewer_modes
from examples.classify_images import Images
from examples.recall import answers, shift_rows
from examples.text_data import mean_nll
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from tests import pool_checks
from tests.test_examples import some_documents


def test_runs_are_added_until_the_plan_is_done(tmp_path, capsys):
    """The plan grows with the results and may ask twice, a study goes on where it was cut, two processes share it."""
    file, called = tmp_path / "study.json", []

    def plan(runs):
        yield from ({"x": x} for x in (0, 1, 2, 1))
        if len(runs) >= 3:
            yield {"x": sum(row["y"] for row in runs if row["x"] < 3)}

    def run(x):
        called.append(x)
        if called == [0, 1]:
            raise KeyboardInterrupt
        return {"y": x + 1}

    with pytest.raises(KeyboardInterrupt):
        studies.run_missing(file, {"about": "x"}, plan, run, "python study")
    assert [row["x"] for row in studies.load(file, {})["runs"]] == [0]
    studies.run_missing(file, {"about": "x"}, plan, run, "python study", part=(1, 2))
    assert called == [0, 1, 2]
    studies.run_missing(file, {"about": "x"}, plan, run, "python study", limit=1)
    assert called == [0, 1, 2, 1]
    with pytest.raises(SystemExit, match="--part counts from 0: of 2 parts, 2 is none"):
        studies.run_missing(file, {"about": "x"}, plan, run, "python study", part=(2, 2))
    studies.run_missing(file, {"about": "x"}, plan, run, "python study")
    record = json.loads(file.read_text())
    assert [row["x"] for row in record["runs"]] == [0, 2, 1, 6] and record["about"] == "x"
    assert record["machine"]["command"] == "python study" and all(row["seconds"] >= 0 for row in record["runs"])


def test_processes_share_the_runs_of_a_plan(tmp_path, capsys):
    """Items of a kind are one job; what waits for others is run after them; a job that fails is said, the rest goes on.

    Each job calls `str.format` with its items, which knows no third one.
    """
    file = tmp_path / "study.json"

    def plan(runs):
        yield from ({"kind": kind, "x": x} for kind in ("a", "b") for x in range(2))
        yield from ({"kind": "c", "x": x} for x in range(3))
        if len(runs) >= 4:
            yield {"kind": "d", "x": 7}

    make = functools.partial(functools.partial, pool_checks.rows_of)
    studies.run_in_pool(
        file, {"about": "x"}, plan, make, "python study", lambda item: item["kind"], lambda item: None, 2
    )
    runs = studies.load(file, {})["runs"]
    assert sorted((row["kind"], row["x"], row["together"]) for row in runs) == [
        *(("a", 0, 2), ("a", 1, 2), ("b", 0, 2), ("b", 1, 2), ("d", 7, 1))
    ]
    assert all(row["seconds"] > 0 for row in runs)
    said = capsys.readouterr().out
    assert "three are too many" in said and said.count("done") == 3


def test_a_process_that_dies_is_replaced_and_the_time_ends_what_runs(tmp_path, capsys):
    file = tmp_path / "study.json"

    def plan(runs):
        yield from ({"kind": kind, "x": 0} for kind in ("exit", "a", "sleep"))

    make = functools.partial(functools.partial, pool_checks.rows_of)
    options = "python study", lambda item: item["kind"], lambda item: 1, 2
    studies.run_in_pool(file, {}, plan, make, *options, minutes=0.2)  # three start, on a busy machine, too
    assert [row["kind"] for row in studies.load(file, {})["runs"]] == ["a"]
    assert "the process has ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    "study",
    [
        adapter_study,
        condition_study,
        core_study,
        larger_study,
        longer_study,
        lookup_study,
        image_study,
        start_study,
        conversion_study,
        recall_study,
        reduce_study,
    ],
)
def test_a_study_that_ends_writes_its_table(monkeypatch, tmp_path, study):
    """Its runs are those of the file, so that there is nothing left to do but the table."""
    name = study.__name__.rpartition(".")[2]
    record = json.loads((RESULTS / f"{name}.json").read_text())
    prepared = ((condition_study, "prepare"), (larger_study, "prepare"), (image_study, "load_images"))
    for module, function in (
        *prepared,
        (larger_study, "keep_best"),
        (studies, "run_missing"),
        (studies, "run_in_pool"),
    ):
        monkeypatch.setattr(module, function, lambda *arguments: None)
    monkeypatch.setattr(start_study, "RUNS", [])
    monkeypatch.setattr(conversion_study, "run", lambda data: record)
    monkeypatch.setattr(conversion_study, "FILE", tmp_path / "conversion_study.json")
    monkeypatch.setattr(readme, "PAGES", [tmp_path / "README.md"])
    (tmp_path / "README.md").write_text(f"<!-- table: {name} --><!-- end -->")
    monkeypatch.setattr(sys, "argv", [name, "--threads", str(torch.get_num_threads())])
    study.main()
    assert readme.show(name) in (tmp_path / "README.md").read_text()


def test_the_best_learning_rate_of_a_condition_is_run_with_the_other_seeds():
    rates = condition_study.LEARNING_RATES
    planned = list(condition_study.plan([]))
    grid = len(rates) * len(condition_study.CONDITIONS)
    starts, first = planned[:-grid], planned[-grid:]
    assert all(item["condition"].endswith(", recall") for item in starts)
    assert {item["learning_rate"] for item in starts[-4:]} == set(rates[1:]), "of what the larger study waits for"
    assert {item["learning_rate"] for item in first} == set(rates) and {item["seed"] for item in first} == {0}
    losses = {rate: {"validation": {"a": abs(rate - rates[0])}} for rate in rates}
    runs = [item | losses[item["learning_rate"]] for item in first if item["condition"] != "softmax"]
    later = list(condition_study.plan(runs))[len(planned) :]
    assert {item["learning_rate"] for item in later} == {rates[0]} and {item["seed"] for item in later} == {1}
    assert {item["condition"] for item in later} == set(condition_study.CONDITIONS) - {"softmax"}
    diverged = [
        item
        | (
            {"failed": "nan"}
            if item["learning_rate"] > rates[0]
            else {"validation": {"a": -1e4 * item["learning_rate"]}}
        )
        for item in first
    ]
    assert condition_study.best_rate(diverged, "s4d") == rates[0]


def test_rates_are_added_until_the_best_lies_between_two_worse_ones():
    def run(item):
        wanted = {"s4d": 7e-4, "softmax": 1.3e-2}.get(item["condition"], 3e-3)
        return item | {"validation": {"a": abs(math.log(item["learning_rate"] / wanted))}}

    runs = []
    while missing := [item for item in condition_study.plan(runs) if run(item) not in runs]:
        runs.append(run(missing[0]))
    tried = {name: list(condition_study.tried_rates(runs, name)) for name in ("s4d", "softmax", "interdomain")}
    assert tried["interdomain"] == sorted(condition_study.LEARNING_RATES)
    assert tried["s4d"] == [3.75e-4, 7.5e-4, 1.5e-3, 3e-3, 6e-3] and condition_study.best_rate(runs, "s4d") == 7.5e-4
    assert tried["softmax"] == [1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2]
    assert condition_study.best_rate(runs, "softmax") == 1.2e-2


def test_the_longer_study_takes_the_best_rates_of_the_shorter(monkeypatch):
    rates = condition_study.LEARNING_RATES
    shorter = [
        item | {"validation": {"a": math.log(2) + abs(item["learning_rate"] - rates[0])}}
        for item in condition_study.plan([])
    ]
    with pytest.raises(SystemExit, match="run benchmarks.condition_study first"):
        list(longer_study.plan([], shorter[:5]))
    planned = list(longer_study.plan([], shorter))
    assert planned == [{"condition": name, "learning_rate": rates[0], "seed": 0} for name in longer_study.CONDITIONS]
    loss = {"interdomain": 1.0, "s4d": 1.0, "softmax": 1.5}
    lengths = {"lengths": {"1.0": math.log(2.0), "2.0": math.log(2.0), "3.5": math.log(3.0)}}
    runs = [item | {"validation": {"a": math.log(loss[item["condition"]])}} | lengths for item in planned]
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    monkeypatch.setattr(longer_study, "read", lambda name: {"training": condition_study.TRAINING, "runs": shorter})
    table = longer_study.table({"training": longer_study.TRAINING, "runs": runs, "machine": machine})
    assert "| 1,024,000 | 2.0 | 2.0 | 2.0 | +0.0% | +0.0% |" in table
    assert "| 4,096,000 | 1.0 | 1.0 | 1.5 | +0.0% | -33.3% |" in table
    assert "| s4d | 2.0 | 2.0 | 3.0 | +50.0% |" in table


@pytest.mark.parametrize(
    ("study", "kinds"),
    [(joint_study, 33), (lookup_study, 24), (distant_study, 6)],
    ids=["joint", "lookup", "distant"],
)
def test_a_study_runs_all_at_each_rate_and_then_the_other_seeds_at_the_better(study, kinds):
    first, rates = list(study.plan([])), study.LEARNING_RATES
    assert len(first) == 2 * kinds and {row["seed"] for row in first} == {0}
    assert [row["learning_rate"] for row in first] == [rate for rate in rates for _ in range(kinds)]
    # Which rate is better differs from kind to kind.
    runs = [row | {"accuracy": row["learning_rate"] * (-1) ** (i % kinds)} for i, row in enumerate(first)]
    then = list(study.plan(runs))[len(first) :]
    better = [max(rates), min(rates)] * kinds
    assert then == [row | {"seed": 1, "learning_rate": rate} for row, rate in zip(first[:kinds], better)]


def test_joint_recall_is_run_and_its_table_takes_the_better_rate(monkeypatch):
    monkeypatch.setitem(recall_study.TRAINING, "held_out_batches", 1)
    row = joint_study.run_condition("+HAX", "ssd", 1e-3, 0, steps=1)
    assert 0 <= row["accuracy"] <= 1 and row["failed"] is None and row["state_sizes"]["sparse"] > 0
    assert joint_study.LENGTH == joint_study.SHAPE["max_position_embeddings"] == 74
    model = joint_study.make_model("Samba", "s4d").eval()
    assert model.config.mixers_per_layer == ["s4d", "softmax"]
    _, keywords = joint_study.see_latest(None, (torch.zeros(1, 40, 8),), {"attention_mask": None})
    mask = keywords["attention_mask"][0, 0]
    assert mask.sum(1).tolist() == [min(i + 1, joint_study.KEYS) for i in range(40)] and not mask.triu(1).any()
    runs = [
        {"condition": "base", "core": "ssd", "learning_rate": rate, "seed": seed, "accuracy": accuracy}
        for rate, seed, accuracy in ((3e-3, 0, 0.5), (1e-3, 1, 0.75), (1e-3, 0, 0.625))
    ]
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    table = joint_study.table({"training": joint_study.TRAINING, "runs": runs, "machine": machine})
    assert "| base | 62.5%, 75.0% | not run | not run | 16.3% | 36.6% |" in table
    assert "| Samba | not run | not run | not run | 6.3% |  |" in table


@pytest.mark.parametrize("task", lookup_study.TASKS)
def test_what_is_looked_up_can_be_answered_and_by_looking_alone(task):
    batch = next(lookup_study.batches_of(task, 0))
    labels = batch.ids if batch.labels is None else batch.labels
    for ids, asked, right in zip(batch.ids.tolist(), batch.asked.tolist(), labels.tolist()):
        wanted = [right[i] for i, ask in enumerate(asked) if ask]
        before = ids[: asked.index(True)]
        if task == "copying":
            found = [x for x in before if x >= lookup_study.NUMBER and x != lookup_study.ASK]
        elif task == "needle":
            found = [before[before.index(lookup_study.ASK) + 1]]
        else:
            entries = [ids[i : i + 3] for i in range(0, len(ids), 3)]
            book = {tuple(names): number for *names, number in entries[:8]}
            found = [book[tuple(names)] for *names, _ in entries[8:]]
            assert len(book) == 8 and sorted(entries[:8]) == sorted(entries[8:])
        assert found == wanted and all(lookup_study.NUMBER <= x < lookup_study.ASK for x in wanted)


def test_lookups_are_run_and_their_table_names_what_is_missing(monkeypatch):
    monkeypatch.setitem(recall_study.TRAINING, "held_out_batches", 1)
    kind = {"task": "phone book", "condition": "S4D-only + HAX", "learning_rate": 1e-3, "seed": 0}
    row = kind | lookup_study.run_condition(**kind, steps=1)
    assert 0 <= row["accuracy"] <= 1 and row["failed"] is None
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    runs = [row | {"accuracy": 0.5}, row | {"accuracy": 0.625, "learning_rate": 3e-3}]
    table = lookup_study.table({"training": lookup_study.TRAINING, "runs": runs, "machine": machine})
    assert "| S4D-only + HAX | 62.5% | not run | not run |" in table


def test_every_condition_is_a_configuration_of_one_size():
    counts = {}
    for name, fields in condition_study.CONDITIONS.items():
        with torch.device("meta"):
            model = InterdomainForCausalLM(InterdomainConfig(**condition_study.SHAPE, **fields))
        counts[name] = model.num_parameters()
    assert max(counts.values()) < 1.05 * min(counts.values())


@pytest.fixture
def data():
    tokens = torch.randint(2048, (400,), generator=torch.Generator().manual_seed(0))
    texts = ("wiki", "books", "wikitext-2")
    return {
        "train": tokens,
        "validation": dict.fromkeys(texts, tokens[:50]),
        "bytes": dict.fromkeys(texts, 150),
        "long": tokens,
    }


def test_one_run_of_a_condition_and_its_tables(data, monkeypatch, tmp_path):
    training = {"steps": 2, "batch_size": 2, "sequence_length": 8}
    monkeypatch.setattr(condition_study, "WINDOWS", 4)
    row = condition_study.run_condition("s4d", 3e-3, 0, data, training)
    loss = row["validation"]["wiki"]
    assert 7 < loss < 8.5 and row["state"] == 4 * (4 * 2 * 32 * 64 + 2 * 3 * 128)
    assert row["bits_per_byte"]["wiki"] == pytest.approx(loss * 49 / math.log(2) / 150)
    assert set(row["lengths"]) == {"1.0", "2.0", "3.5"}
    runs = [
        {"condition": name, "learning_rate": rate, "seed": seed}
        | row
        | {"validation": {key: loss + abs(rate - condition_study.LEARNING_RATES[0]) for key in row["validation"]}}
        for name, rate, seed in itertools.product(["s4d"], condition_study.LEARNING_RATES, condition_study.SEEDS)
    ]
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    record = {"training": training, "shape": condition_study.SHAPE, "runs": runs, "machine": machine}
    table = condition_study.table(record)
    assert f"| s4d | {row['parameters']:,} |" in table and "32 tokens a run" in table
    monkeypatch.setattr(condition_study, "RESULTS", tmp_path)
    assert condition_study.plot(record).stat().st_size > 1000


def test_a_run_on_more_tokens_has_what_its_table_reads(data, monkeypatch):
    monkeypatch.setattr(condition_study, "WINDOWS", 4)
    monkeypatch.setattr(larger_study, "AGES", (1, 4))
    training = more_tokens.TRAINING | {"steps": 2, "batch_size": 2, "sequence_length": 8}
    texts = data | {"validation": dict.fromkeys(data["validation"], torch.arange(4).repeat(13))}
    items = [{"condition": name, "seed": 0} for name in more_tokens.ASKED[::2]]
    runs = [item | more_tokens.run_condition(**item, texts=texts, training=training) for item in items]
    assert all(1.41e6 < row["parameters"] < 1.42e6 for row in runs)
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    for row in runs:
        row["ages"] = dict.fromkeys(more_tokens.AGES, max(row["ages"].values()))
    table = more_tokens.table({"training": more_tokens.TRAINING, "runs": runs, "machine": machine})
    assert table.count("\n| ") == 3 and "8,192,000 tokens a run" in table and "| +0.0% | +0.0% |" in table


def test_the_loss_is_that_of_every_token_once():
    """Against one forward a token, each with the past of its window alone."""
    torch.manual_seed(0)
    model = InterdomainForCausalLM(InterdomainConfig(**condition_study.SHAPE | {"num_hidden_layers": 1})).eval()
    tokens = torch.randint(2048, (20,))
    expected = 0.0
    with torch.no_grad():
        for place in range(1, 20):
            start = (place - 1) // 8 * 8
            logits = model(tokens[None, start:place]).logits[0, -1]
            expected -= logits.log_softmax(-1)[tokens[place]].item()
    assert mean_nll(model, tokens, 8) == pytest.approx(expected / 19, rel=1e-5)


def test_one_run_of_the_image_study():
    images = Images(torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8), torch.arange(6))
    training = image_study.TRAINING | {"steps": 1, "batch_size": 2}
    row = image_study.run_condition("shared-fourier", 0, images, images, training)
    for name in image_study.CHANGED:
        config = image_study.make_model(name, 0, images, training).config
        assert config.start == name.rpartition(", ")[2] and config.normalize == ("fourier" in name)
        assert config.product == ("bilinear" if "random" in name else "hermitian")
    assert 0 <= row["accuracy"] <= 1 and 1 < row["train_loss"] < 4
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    runs = [{"condition": "shared-fourier", "seed": 0} | row]
    record = {"training": training, "test_images": 6, "runs": runs, "machine": machine}
    assert "| shared-fourier |" in image_study.table(record)


def test_the_inverse_recurrence_drifts_with_its_amplification():
    near, far = backends.drift(16, 0.01), backends.drift(256, 0.05)
    assert near["inverse"] < 1e-5 and near["used"]
    assert far["inverse"] > 1e-2 and not far["used"] and far["forward"] < 1e-5
    assert far["amplification"] == pytest.approx(math.exp(12.8))


@pytest.mark.parametrize("backend", backends.BACKENDS)
def test_backends_are_measured_and_right(backend):
    row = backends.measure(backend, 16, repeats=1)
    assert row["forward"] > 0 and row["forward_and_backward"] > 0 and row["backward_bytes"] >= 0
    assert backends.errors(backend, length=64) < 1e-4


def test_the_speed_of_training_is_measured_in_turns(monkeypatch, tmp_path):
    monkeypatch.setattr(condition_study, "SHAPE", condition_study.SHAPE | {"hidden_size": 32, "num_hidden_layers": 1})
    runs = condition_study.endless_runs({"batch_size": 1, "sequence_length": 16})
    (tmp_path / "study.json").write_text('{"runs": [1]}')
    studies.write_speed(tmp_path / "study.json", {}, runs, amount=16, seconds=0.0)
    record = json.loads((tmp_path / "study.json").read_text())
    speed = record["speed"]
    assert record["runs"] == [1] and speed.pop("machine")["threads"] == torch.get_num_threads()
    assert set(speed) == set(condition_study.CONDITIONS)
    assert all(0 < row["p20"] <= row["median"] <= row["p80"] for row in speed.values())


def test_images_are_timed_with_the_models_of_the_study():
    images = Images(torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8), torch.arange(6))
    runs = image_study.endless_runs(images)
    assert set(runs) == set(image_study.CONDITIONS)
    assert next(runs["softmax-causal"]).images_per_second > 0


def test_the_recall_study_brackets_rates_then_goes_on_with_the_best():
    """A best rate at an end asks for one beyond it; seeds, control, state sizes and lengths follow at the best."""
    study = recall_study
    small, second = study.BRACKETED
    middle, low, _ = study.LEARNING_RATES

    def result(item):
        return item | {"accuracy": 0.5, "loss": abs(math.log(item["learning_rate"] / middle))}

    first = list(study.plan([]))
    assert tuple(first[: len(study.FIRST)]) == study.FIRST
    assert {item["condition"] for item in first} == {*study.CONDITIONS, *study.SHORT_FIRST}
    assert tuple(first[-len(study.LONGEST) :]) == study.LONGEST
    others = [item for item in first if item not in (*study.HELD_TO, *study.LONGEST)]
    assert all(item["length"] == small[1] and not item["shifted"] for item in others)
    runs = [result(item) for item in first]
    assert study.best_rate(runs, "softmax", small) == middle
    for _ in range(2):  # the second size, then what follows from it
        runs += [result(item) for item in study.plan(runs) if item not in first]
    later = [row for row in runs if row not in [result(item) for item in first]]
    assert {row["seed"] for row in later} == set(study.SEEDS)
    assert {row["learning_rate"] for row in later if row["length"] == second[1]} == set(study.LEARNING_RATES)
    assert {row["condition"] for row in runs if row["length"] > second[1]} == {"recall", *study.SHORT_FIRST}
    assert {row["condition"] for row in later if row["state_size"] != study.STATE_SIZE} < set(study.FRONTIER)
    assert {row["learning_rate"] for row in later if row["state_size"] != study.STATE_SIZE} == {middle}
    assert {row["state_size"] for row in later if row["condition"] == "softmax"} == {study.STATE_SIZE}
    assert {row["condition"] for row in runs if row["shifted"]} == set(study.FRONTIER)

    at_an_end = [result(item) | {"loss": item["learning_rate"]} for item in first]
    assert study.best_rate(at_an_end, "softmax", small) is None
    assert study.item("softmax", learning_rate=study.LIMITS[0]) in list(study.plan(at_an_end))
    beyond = [*at_an_end, study.item("softmax", learning_rate=study.LIMITS[0]) | {"accuracy": 0.4, "loss": 1.0}]
    assert study.best_rate(beyond, "softmax", small) == low


def test_the_recall_study_gives_what_is_not_learned_the_same_care():
    """At the larger size too, once the smaller one has its rate."""
    study = recall_study
    _, second = study.BRACKETED
    runs = [
        item | {"accuracy": 0.1 if item["condition"] == "S4D-only" else 0.5, "loss": abs(item["learning_rate"] - 3e-3)}
        for item in study.plan([])
    ]
    unknown = [row for row in runs if (row["condition"], row["learning_rate"]) != ("SSD", study.LEARNING_RATES[1])]

    def larger(found, name):
        named = [item for item in study.plan(found) if item["condition"] == name]
        return [item for item in named if (item["pairs"], item["length"]) == second]

    assert larger(runs, "S4D-only") == [study.item("S4D-only", second, rate) for rate in study.LEARNING_RATES]
    assert len(larger(runs, "hermitian")) == len(larger(unknown, "hermitian")) == len(study.LEARNING_RATES)
    assert len(larger(runs, "SSD")) == len(study.LEARNING_RATES) and not larger(unknown, "SSD")


def test_short_first_begins_with_each_smaller_size(monkeypatch):
    monkeypatch.setattr(recall_study, "SHORT_STEPS", 2)
    batches = recall_study.with_short_first(recall_study.make_batches(32, 256, False, 0), 256, False, 0)
    found = [(int(batch.asked[0].sum()), batch.ids.shape[1]) for _, batch in zip(range(6), batches)]
    assert found == [(8, 64)] * 2 + [(16, 128)] * 2 + [(32, 256)] * 2


def test_the_shifted_control_moves_rows_and_asks_the_same():
    plain = next(recall_study.make_batches(4, 24, False, 0))
    generator = torch.Generator().manual_seed(1)
    moved = shift_rows(plain, recall_study.SHIFT, recall_study.SHAPE["vocab_size"], generator)
    assert moved.ids.shape == (plain.ids.shape[0], 24 + recall_study.SHIFT)
    assert torch.equal(moved.ids[moved.asked], plain.ids[plain.asked])
    offsets = set()
    for row, original in zip(moved.ids, plain.ids):
        offset = next(i for i in range(recall_study.SHIFT + 1) if torch.equal(row[i : i + 24], original))
        half = recall_study.SHAPE["vocab_size"] // 2
        assert (row[:offset] >= half).all() and (row[offset + 24 :] == 0).all()
        offsets.add(offset)
    assert len(offsets) > 1 and max(offsets) <= recall_study.SHIFT


def test_the_theory_of_a_start_names_what_it_can_hold():
    """As many ages as the posterior resolves; none for C at random; beyond 2M tokens uniform modes alias."""
    lead = recall_study.make_model("posterior, uniform, even")
    found = recall_study.theory(lead, 64)
    assert found["span"] == 64 and 1 <= found["resolution"] < 1.1
    assert recall_study.theory(recall_study.make_model("Interdomain"), 64)["span"] < 8
    few = recall_study.make_model("posterior, uniform, even", state_size=8)
    assert recall_study.theory(few, 64)["resolution"] > found["resolution"]
    assert recall_study.theory(recall_study.make_model("softmax"), 64) is None
    for name in ("S4D-only", "SSD"):
        assert recall_study.theory(recall_study.make_model(name), 64) is None


def test_states_of_the_recall_study_are_of_one_size():
    """Of state space duality as many numbers as of 32 modes; what HAX keeps beside a state comes on top."""
    sizes = {name: recall_study.make_model(name).config.state_sizes(64) for name in recall_study.CONDITIONS}
    assert {size["recurrent"] for name, size in sizes.items() if name != "softmax"} == {16384}
    assert {name for name, size in sizes.items() if size.get("sparse")} == {name for name in sizes if "HAX" in name}


def test_a_run_of_the_recall_study_has_what_its_table_and_plot_read(monkeypatch, tmp_path):
    """The answers on the way and at the end, by a model that the study's own options describe."""
    monkeypatch.setattr(recall_study, "EVERY", 2)
    monkeypatch.setattr(recall_study, "TRAINING", recall_study.TRAINING | {"batch_size": 2})
    monkeypatch.setattr(recall_study, "FILE", tmp_path / "recall_study.json")
    items = [
        recall_study.item("posterior, uniform, even"),
        recall_study.item("softmax", recall_study.SETTINGS[1], state_size=32),
        recall_study.item("posterior, uniform, even", shifted=True),
    ]
    plan, run = lambda runs: iter(items), recall_study.run_condition
    training = {"training": recall_study.TRAINING}
    studies.run_missing(recall_study.FILE, training, plan, lambda **item: run(**item, steps=4), "python study")
    record = json.loads(recall_study.FILE.read_text())
    for row in record["runs"]:
        assert list(row["curve"]) == ["2", "4"] and 0 <= row["accuracy"] <= 1 and math.isfinite(row["loss"])
    assert record["runs"][0]["state_bytes"] == record["runs"][2]["state_bytes"]
    table = recall_study.table(record)
    assert "posterior, uniform, even | " in table and "shifted control" in table and "not run" in table
    assert recall_study.plot(record).stat().st_size > 0


def test_the_cheems_study_compares_models_of_one_size():
    counts = {}
    for part, conditions in cheems_study.conditions().items():
        for name, fields in conditions.items():
            with torch.device("meta"):
                counts[part, name] = InterdomainForCausalLM(InterdomainConfig(**fields)).num_parameters()
    placements = [count for (part, _), count in counts.items() if part == "placements"]
    assert len(placements) == 6 and max(placements) < 1.01 * min(placements)
    encodings = [count for (part, _), count in counts.items() if part == "encodings"]
    assert len(encodings) == 13 and max(encodings) < 1.05 * min(encodings)
    items = list(cheems_study.plan([]))
    assert len({tuple(item.items()) for item in items}) == len(items) == 2 * (13 + 6 + 32)


def test_a_run_of_the_cheems_study_has_what_its_table_reads(data, monkeypatch, tmp_path):
    monkeypatch.setattr(cheems_study, "FILE", tmp_path / "cheems_study.json")
    monkeypatch.setattr(cheems_study, "RECALL_STEPS", 2)
    training = {"steps": 1, "batch_size": 1, "sequence_length": 16, "autocast": "bfloat16"}
    monkeypatch.setattr(cheems_study, "TRAINING", training)
    items = [
        cheems_study.item("encodings", "SSD, rope"),
        cheems_study.item("placements", "two"),
        cheems_study.item("recall", "SSD, 32", shift=cheems_study.SHIFT),
    ]
    run = functools.partial(cheems_study.run_condition, data=data)
    studies.run_missing(cheems_study.FILE, {"training": training}, lambda runs: iter(items), run, "python study")
    record = json.loads(cheems_study.FILE.read_text())
    table = cheems_study.table(record)
    for row in record["runs"][:2]:
        assert f"{math.exp(condition_study.score(row)):.1f}" in table
    assert f"{record['runs'][2]['accuracy']:.0%}" in table and "3 of 102 runs so far" in table


def test_the_larger_study_begins_with_the_rates_that_are_known():
    """First seeds first; a condition whose rate is not bracketed is left for later."""
    rates = condition_study.LEARNING_RATES
    shorter = [
        {"condition": there, "learning_rate": rate, "seed": 0, "validation": {"wiki": 1.0 + abs(rate - rates[0])}}
        for name, there in larger_study.CONDITIONS.items()
        for rate in rates[: 3 if name != "interdomain" else 2]
    ]
    planned = [(item["condition"], item["seed"]) for item in larger_study.plan([], shorter)]
    assert planned == [("s4d", 0), ("softmax", 0), ("s4d", 1)]
    assert all(item["learning_rate"] == rates[0] for item in larger_study.plan([], shorter))


def test_a_run_of_the_larger_study_says_where_the_loss_lies(data, monkeypatch, tmp_path):
    """Models are kept, and the order is told once all conditions are there."""
    monkeypatch.setattr(condition_study, "WINDOWS", 4)
    for name, value in {"FOLDER": tmp_path, "PLACES": (0, 2, 4, 8)}.items():
        monkeypatch.setattr(larger_study, name, value)
    shape = larger_study.SHAPE | {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(larger_study, "SHAPE", shape)
    training = {"steps": 1, "batch_size": 2, "sequence_length": 8, "autocast": "bfloat16", "compiled": False}
    data["validation"] = {name: tokens.repeat(2) for name, tokens in data["validation"].items()}
    runs = []
    for name in larger_study.CONDITIONS:
        item = {"condition": name, "learning_rate": 1e-3, "seed": 0}
        runs.append(item | larger_study.run_condition(**item, data=data, training=training))
        assert InterdomainForCausalLM.from_pretrained(tmp_path / f"{name}-0").num_parameters() == runs[-1]["parameters"]
        assert list(runs[-1]["places"]) == ["0", "2", "4"]
    (tmp_path / "tokenizer").mkdir()
    larger_study.keep_best(runs, tmp_path / "best")
    best = min(runs, key=condition_study.score)["condition"]
    kept, copied = (InterdomainForCausalLM.from_pretrained(tmp_path / name) for name in (f"{best}-0", "best"))
    assert torch.equal(kept.lm_head.weight, copied.lm_head.weight)
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    record = {"training": training, "shape": shape, "machine": machine}
    assert "The paper's order" in larger_study.table(record | {"runs": runs})
    assert "The paper's order" not in larger_study.table(record | {"runs": runs[:2]})


def test_a_token_repeats_where_the_context_had_it_after_the_same_one():
    windows = torch.tensor([[1, 2, 3, 1, 2, 3, 2], [1, 1, 1, 2, 1, 2, 1], [1, 2, 1, 2, 3, 1, 2]])
    expected = [[0, 0, 0, 3, 3, 0], [0, 1, 0, 0, 2, 2], [0, 0, 2, 0, 0, 3]]
    assert larger_study.age(windows).tolist() == expected


def test_a_run_of_the_spans_study_has_what_its_table_reads(data, monkeypatch, tmp_path):
    """Exact in the first layer but for the convolutions over the joint; a model is trained once."""
    for name, value in {"FOLDER": tmp_path, "LENGTHS": (12,), "AFTER": 4}.items():
        monkeypatch.setattr(spans_study, name, value)
    training = spans_study.TRAINING | {"steps": 1, "batch_size": 1, "sequence_length": 16}
    runs = [item | spans_study.run_condition(**item, data=data, training=training) for item in spans_study.plan([])]
    assert [row["condition"] for row in runs] == list(spans_study.CONDITIONS)
    for row in runs:
        for kind, (ours, bound) in {"join": ("joined", "second alone"), "cut": ("cut", "not cut")}.items():
            errors = {name: row[kind][name]["errors"] for name in (ours, bound)}
            assert row[kind]["read"]["errors"] == [0] * 4 and errors[ours][0] < 0.5 * errors[bound][0]
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    table = spans_study.table({"runs": runs, "machine": machine})
    assert table.count("second alone") == table.count("not cut") == 2


def test_models_are_reduced_and_adapted_from_one_training(monkeypatch, tmp_path):
    """Both studies on models of a few steps: every way of reducing, every adapter, and the tables."""
    documents = some_documents(120)
    for study in (reduce_study, adapter_study):
        monkeypatch.setattr(study, "gather_documents", lambda *arguments: documents)
    monkeypatch.setattr(reduce_study, "SHAPE", reduce_study.SHAPE | {"vocab_size": 300, "num_hidden_layers": 1})
    monkeypatch.setattr(fewer_modes, "STEPS", 2)
    reduce_study.documents.cache_clear(), adapter_study.texts.cache_clear()
    training = {"steps": 2, "batch_size": 2, "sequence_length": 8, "learning_rate": 3e-3, "held_out_tokens": 40}
    small = {"data": tmp_path, "runs": tmp_path, "training": training, "recall": reduce_study.RECALL | {"steps": 2}}
    planned = [item for item in reduce_study.plan([]) if item["state_size"] in (32, 4)]
    runs = [item | reduce_study.run_condition(**item, **small) for item in planned]
    by_run = {(row["model"], row["how"]): row for row in runs}
    for model in reduce_study.MODELS:
        dropped, refit, moved = (by_run[model, how]["kernel_errors"] for how in ("dropped", "refit", "refit, moved"))
        assert len(dropped) == {"language": 1, "recall": 2}[model] and sum(dropped) > sum(refit) >= sum(moved)
        losses = [by_run[model, how]["loss"] for how in (reduce_study.WHOLE, reduce_study.SILENT, "dropped")]
        assert len(set(losses)) == 3
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    table = reduce_study.table({"runs": runs, "machine": machine})
    assert "| dropped | not run | not run | " in table and "| greedy, refit, moved |" in table

    monkeypatch.setattr(adapter_study, "VIRTUAL_TOKENS", 4)
    items = [{"method": "none", "learning_rate": 0.0, "seed": 0}]
    items += [{"method": name, "learning_rate": rates[0], "seed": 0} for name, rates in adapter_study.RATES.items()]
    runs = [
        item | adapter_study.run_condition(**item, data=tmp_path, folder=tmp_path / "language", training=training)
        for item in items
    ]
    assert len({row["losses"]["8"] for row in runs}) == 4
    assert runs[1]["parameters"] == 4 * 2 * 32 * 64 and runs[2]["parameters"] == 4 * 16 * 2 * 128
    assert "| prompt | 512 |" in adapter_study.table({"training": training, "runs": runs, "machine": machine})
    reduce_study.documents.cache_clear(), adapter_study.texts.cache_clear()


def test_layers_answer_alone_or_not():
    """What a layer adds is left out of an answer as if its last map were zero, and is back afterwards."""
    batch = next(recall_study.make_batches(4, 24, False, 0))
    ages = []
    for row, asked in zip(batch.ids.tolist(), batch.asked.tolist()):
        ages += [place - 1 - row.index(row[place - 1]) for place in range(24) if asked[place]]
    assert distant_study.ages(batch).tolist() == ages and min(ages) >= 2
    model = recall_study.make_model("recall")
    core_runs.start_smaller(model, 100.0)  # loud, so that answers hang on both layers
    whole = recall_layers.by_age(model, [batch])
    found = recall_layers.by_layer(model, [batch])
    hidden = next(recall_study.make_batches(4, 24, False, 0, hidden_answers=True))
    assert hidden.ids.equal(batch.ids.masked_fill(batch.asked, 0)) and hidden.asked.equal(batch.asked)
    assert distant_study.ages(hidden).tolist() == ages
    assert answers(model, hidden).tokens.equal(answers(model, batch).tokens)
    assert found["whole"] == whole == recall_layers.by_age(model, [batch]) and len(whole) == 5
    torch.nn.init.zeros_(model.model.layers[1].token_mixer.o_proj.weight)
    assert recall_layers.by_age(model, [batch]) == found["without 1"] != found["without 0"]


def test_a_run_that_looks_at_layers_has_what_its_table_reads(monkeypatch):
    """It ends with the shorter lengths but for a quiet first layer, which starts with a tenth of its C."""
    monkeypatch.setattr(recall_study, "SHAPE", recall_study.SHAPE | {"hidden_size": 16})
    monkeypatch.setitem(recall_study.TRAINING, "held_out_batches", 1)
    for study, values in {
        recall_study: {"EVERY": 1, "SHORT_STEPS": 1, "SETTINGS": ((2, 8), (3, 12), (4, 16))},
        recall_layers: {"SHORT_STEPS": 1, "BEGUN": 2, "SETTINGS": ((2, 8), (3, 12), (4, 16)), "LOST": {(16, 0)}},
    }.items():
        for name, value in values.items():
            monkeypatch.setattr(study, name, value)
    conditions = (
        recall_layers.PLAIN,
        recall_layers.FIRST_QUIET,
        recall_layers.HIDDEN_TRAINING,
        recall_layers.ONE_LAYER,
    )
    items = [{"condition": name, "state_size": 16, "seed": 0} for name in conditions]
    rows = [item | recall_layers.run_condition(**item, steps=4) for item in items]
    assert [list(row["looks"]) for row in rows] == [["1", "2"], ["1", "2", "3", "4"], ["1", "2"], ["1", "2"]]
    assert [list(look) for look in rows[1]["looks"].values()] == [["2", "3"], *[["2", "3", "4"]] * 3]
    layer = recall_study.make_model("recall").model.layers[0]
    before = layer.token_mixer.recurrence.C.clone()
    recall_layers.start_quiet(layer)
    torch.testing.assert_close(layer.token_mixer.recurrence.C, before / 10)
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    table = recall_layers.table({"runs": rows, "machine": machine, "training": recall_layers.TRAINING})
    assert table.count("\n| ") == 4 and table.count("not run") == 3
