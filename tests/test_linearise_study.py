"""The study of a real Llama in windows: its measure, its plan, and one run of each kind with a small Llama."""

import math
import random

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks import harness, linear_window, linearise_asked, linearise_gpu, linearise_study
from conversion import measure
from conversion.__main__ import main
from examples import text_data
from tests.test_conversion import ids, save_llama, stop_at
from tests.test_examples import some_documents


def test_each_token_is_predicted_once_from_all_before_it(tmp_path, monkeypatch):
    model = save_llama(tmp_path / "llama").eval()
    rows = ids(50)
    with torch.no_grad():
        expected = text_data.nll_of_logits(model(rows[:, :-1]).logits, rows)
    torch.testing.assert_close(measure.nats_by_position(model, rows), expected)
    monkeypatch.setattr(measure, "PIECE", 16)  # in pieces, the last of which is shorter
    torch.testing.assert_close(measure.nats_by_position(model, rows), expected, rtol=1e-4, atol=1e-4)


def test_perplexities_lie_between_edges():
    nats = torch.tensor([[1.0, 1.0, 3.0], [1.0, 1.0, 5.0]])
    found = measure.between(nats, [0, 2, 3, 9])
    assert found == pytest.approx({"0-2": math.e, "2-3": math.exp(4), "all": math.exp(2)})
    assert measure.octaves(2047) == [0, 256, 1024, 2047] and measure.octaves(100) == [0, 100]


def test_texts_that_are_too_short_are_left_out():
    tokenizer = text_data.train_tokenizer(some_documents(), vocab_size=300)
    rows = measure.beginnings(tokenizer, ["short", *some_documents(20)], 2, 16)
    assert rows.shape == (2, 16) and tokenizer.decode(rows[0]) in some_documents(20)[0]
    with pytest.raises(text_data.InputError, match="Of 1 documents 0 have 16 tokens: 2 are needed."):
        measure.beginnings(tokenizer, ["short"], 2, 16)


def test_the_plan_begins_with_what_needs_no_teaching():
    plan = list(linearise_study.plan([]))
    untaught = [item for item in plan if item.get("taught", "no") == "no"]
    assert plan[0] == {"window": None, "length": 2048} and plan[:10] == untaught[:10]
    assert {item["window"] for item in plan} == {None, *linearise_study.WINDOWS}
    read = [item for item in plan if "measure" not in item]
    stages = [item["taught"] for item in read if item.get("taught", "no") != "no" and item["length"] == 2048]
    assert stages == ["layers", "whole", "layers", "whole", "whole", "layers", "whole", "long"]
    asked = [(item["measure"], item["window"], item.get("taught")) for item in plan if "measure" in item]
    conditions = [(None, None), (64, "no"), (64, "whole")]
    assert asked == [(name, *condition) for name in linearise_asked.MEASURES for condition in conditions]
    assert len({tuple(sorted(map(str, item.items()))) for item in plan}) == len(plan)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """The study of a small Llama, short texts and few steps."""
    save_llama(tmp_path / "llama", num_key_value_heads=2)
    text_data.train_tokenizer(some_documents(), vocab_size=300).save_pretrained(tmp_path / "llama")
    text = pa.table({"text": [" ".join(some_documents(40))] * 3 + some_documents(100)})
    for name in ("longdocs/test", "corpus/wiki/train-000", "corpus/books/train-000"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(text, tmp_path / f"{name}.parquet")
    changes = {
        "TEXTS": {48: 2},
        "LENGTH": 48,
        "MODES": 6,
        "HELD_OUT_BYTES": 2000,
    }
    for name, value in changes.items():
        monkeypatch.setattr(linearise_study, name, value)
    how = ("--bf16", "--save-steps", 1)
    stages = {"layers": (96, 48, "24,48", how), "whole": (192, 48, "24,48", how), "long": (96, 48, "48", how)}
    stages = {name: linearise_study.Teaching(*stage) for name, stage in stages.items()}
    monkeypatch.setattr(linearise_study.Study, "teaching", stages)
    return linearise_study.Study(tmp_path, tmp_path / "runs", str(tmp_path / "llama"))


def table_of(rows: list[dict]) -> str:
    return linearise_study.table({"runs": rows, "machine": harness.machine() | {"command": "x"}})


@pytest.mark.slow
def test_a_run_of_each_kind_and_its_table(tmp_path, study):
    kind = linearise_study.kind
    runs = [kind(), kind(8, sinks=0), kind(8, modes=6), kind(8, modes=6, taught="whole"), kind(8, taught="whole")]
    runs += [kind(8, modes=linearise_study.LINEAR, taught="layers")]
    rows = [item | study.run(**item) for item in runs]
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "llama").eval()
    texts = measure.beginnings(study.tokenizer, list(text_data.read_documents([str(tmp_path / "longdocs")])), 2, 48)
    expected = measure.nats_by_position(llama, texts).double().mean().exp().item()
    assert rows[0]["perplexity"]["all"] == pytest.approx(expected, rel=1e-5)
    assert sorted(x.name for x in (tmp_path / "runs").iterdir()) == [
        "window-8-kept-0-modes-0-untaught",
        "window-8-kept-0-modes-0-whole",
        "window-8-kept-0-modes-6-layers",
        "window-8-kept-0-modes-6-untaught",
        "window-8-kept-0-modes-6-whole",
        "window-8-kept-0-modes-linear-layers",
        "window-8-kept-0-modes-linear-untaught",
    ]
    again = study.run(**runs[3])  # what was taught is there
    assert again["perplexity"] == rows[3]["perplexity"] and (again["tokens"], rows[4]["tokens"]) == (288, 192)
    table = table_of(rows)
    for label in (
        "everything (the Llama)",
        "the last 8 tokens alone",
        "the last 8 tokens and the first 4, state of 6 modes, untaught",
        "the last 8 tokens and the first 4, state of 6 modes, taught (whole, 288 tokens)",
        "the last 8 tokens and the first 4, taught (whole, 192 tokens)",
        "the last 8 tokens and the first 4, linear attention of equal state, taught (layers, 96 tokens)",
    ):
        assert f"| {label} |" in table


def test_a_stage_that_was_stopped_is_measured_as_far_as_it_came_and_goes_on(tmp_path, study, monkeypatch):
    item = linearise_study.kind(8, modes=6, taught="whole")
    monkeypatch.setattr(linearise_study, "plan", lambda runs: iter([linearise_study.kind(), item]))
    record = {"runs": [{**linearise_study.kind(), "perplexity": {"0-256": 9.0, "all": 9.0}}]}
    linearise_study.measure_so_far(record, study)
    assert len(record["runs"]) == 1  # nothing was stopped
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_at(patched, 5)  # in the third step of the second stage
        study.run(**item)
    for _ in range(2):
        linearise_study.measure_so_far(record, study)
    assert [run.get("taught") for run in record["runs"]] == [None, "whole so far"]
    assert record["runs"][1]["tokens"] == 96 + 2 * 48
    assert "state of 6 modes, taught (whole so far, 192 tokens) |" in table_of(record["runs"])
    record["runs"].append(item | study.run(**item))
    assert record["runs"][2]["tokens"] == 288 and record["runs"][2]["perplexity"] != record["runs"][1]["perplexity"]
    said = table_of(record["runs"])
    assert "taught (whole, 288 tokens) |" in said and "so far" not in said
    whole = linearise_study.Study(tmp_path, tmp_path / "others", str(tmp_path / "llama")).run(**item)
    assert whole["perplexity"] == record["runs"][2]["perplexity"]


def test_the_plan_of_a_gpu_measures_each_stage_and_ends_with_the_clock():
    plan = list(linearise_gpu.plan([], ["llama", "state"]))
    llama, state = ([x for x in plan if x["window"] == window] for window in (None, 64))
    assert [x["length"] for x in (*llama[:2], llama[-1])] == list(linearise_study.TEXTS) and len(llama) == 7
    assert [(x["taught"], x["length"]) for x in state[:5]] == [
        ("layers", 2048),
        ("whole", 2048),
        *(("long", length) for length in linearise_study.TEXTS),
    ]
    assert {x.get("measure") for x in plan} == {None, "answers", "commonsense", "needle", "passages"}
    assert not list(linearise_gpu.plan([], ["llama"], deadline=0.0))
    alone = list(linearise_gpu.plan([], ["taught window"]))
    assert [(x["taught"], x["length"]) for x in alone] == [("whole", length) for length in linearise_study.TEXTS]
    assert list(linearise_gpu.STAGES) == list(linearise_study.TEACHING)


def test_what_each_condition_reaches_stands_in_tables():
    state, llama = linearise_gpu.CONDITIONS["state"] | {"tokens": 5}, linearise_gpu.CONDITIONS["llama"]
    tasks = {name: {"acc": 0.5} for name in linearise_asked.COMMONSENSE}
    runs = [
        llama | {"perplexity": {"0-256": 9.0, "all": 9.0}},
        state | {"perplexity": {"0-256": 9.9, "all": 9.9}},
        state | {"measure": "commonsense", "limit": 2, "scores": tasks | {"piqa": {"acc": 0.9}}},
        llama | {"measure": "needle", "right": {"50": 1.0}, "questions": 2},
        llama | {"measure": "answers", "answers": ["Paris | or\nso."]},
    ]
    said = linearise_gpu.table({"runs": runs, "machine": harness.machine() | {"command": "x"}})
    assert (
        "| the last 64 tokens and the first 4, state of 64 modes, taught (long, 5 tokens) | 9.9 | 9.9 | 1.10 |" in said
    )
    assert (
        "taught (long, 5 tokens) | 55.0 | 90.0 | 50.0 |" in said
        and "the first items of each, 2 of commonsense, %" in said
    )
    assert "| everything (the Llama) | 100 |" in said
    assert (
        list(linearise_gpu.findings(runs[:2])) == [] and "- Mean of the eight commonsense tasks, in %: the last" in said
    )
    window = linearise_gpu.CONDITIONS["window"] | {"perplexity": {"0-256": 9.0, "all": 10.8}}
    alone = linearise_gpu.CONDITIONS["taught window"] | {"perplexity": {"0-256": 9.0, "all": 10.35}, "tokens": 4}
    assert list(linearise_gpu.findings([*runs[:2], window, alone])) == [
        "Windows of 64 tokens stand at 1.20 times the Llama's perplexity; with a memory, taught on 5 tokens, at 1.100: "
        "50% of what they lose is won back.",
        "Taught as much or longer: without a memory 1.150 (4 tokens).",
    ]
    long = [run | {"length": 8192, "perplexity": {"0-256": 1.0, "1024-2047": 2.5}} for run in (runs[0], state, window)]
    assert list(linearise_gpu.findings(long)) == [
        "Tokens 1024-2047 of a text: perplexity 2.5 with a memory, 2.5 of the untaught windows, 2.5 of the Llama."
    ]
    assert "| What is the capital of France? | Paris / or so. |" in said


def test_tasks_are_compared_item_by_item():
    one, other = {"a": "1101", "b": "10"}, {"a": "1000", "b": "10"}
    points, error = linearise_asked.difference(one, other)
    assert points == pytest.approx(0.25) and error == pytest.approx(math.sqrt(1 / 3 / 4) / 2)
    runs = [
        (name, {"measure": "commonsense", "right": right, "scores": {}, "limit": 4})
        for name, right in (("llama", other), ("state", one))
    ]
    said = linearise_asked._differences(runs)
    assert said == "Mean of the eight beside llama, on the same items: state: +25.0 points (standard error 14.4)."


def test_a_needle_lies_so_many_words_before_its_question():
    question = linearise_asked.needle([f"w{i}" for i in range(100)], 20, random.Random(0))
    before, _, after = question.prompt.partition(".")
    assert before == f"The secret number is{question.answers[0]}" and len(set(question.answers)) == 4
    words = after.split()
    assert len(words) == 24 and words[-4:] == ["The", "secret", "number", "is"]
    assert [int(word[1:]) for word in words[:20]] == list(range(int(words[0][1:]), int(words[0][1:]) + 20))


def test_linear_attention_has_a_state_as_large_and_is_its_definition(tmp_path):
    llama = save_llama(tmp_path / "llama", num_key_value_heads=2)
    assert main(["from-llama", str(tmp_path / "llama"), str(tmp_path / "w"), "--window", "8", "--state-size", "6"]) == 0
    linear_window.with_linear_attention(tmp_path / "llama", tmp_path / "w", tmp_path / "linear")
    windows, linear = (AutoModelForCausalLM.from_pretrained(tmp_path / x).eval() for x in ("w", "linear"))
    shapes = [torch.Size(m.model.layers[1].token_mixer.kept_shapes[-1]).numel() for m in (windows, linear)]
    assert shapes[0] == shapes[1] and linear.config.token_mixers == ["linear_window"] * 3
    with torch.no_grad():
        within = linear(ids(12)).logits
        torch.testing.assert_close(within, llama(ids(12)).logits, rtol=1e-5, atol=1e-4)
        whole, cache, pieces = linear(ids(40)).logits, None, []
        for piece in ids(40).split([20, 1, 19], dim=1):
            output = linear(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-4)
    recurrence = linear.model.layers[1].token_mixer.recurrence
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 9, n, d, generator=generator) for n, d in ((4, 5), (2, 5), (2, 3)))
    state, decay, wanted = torch.zeros(2, 3, 5), torch.exp(-recurrence.log_dt.exp()), []
    for q, k, v in zip(query[0], key[0], value[0]):
        state = decay[:, None, None] * state + v[:, :, None] * k[:, None]
        wanted.append((state.repeat_interleave(2, dim=0) @ q[..., None])[..., 0])
    torch.testing.assert_close(recurrence(query, key, value)[0][0], torch.stack(wanted))


def test_what_is_said_of_a_real_llama_in_windows():
    runs = harness.read("linearise_study")["runs"]
    found = {
        (run["window"], run.get("sinks"), run.get("modes")): run["perplexity"]
        for run in runs
        if run["length"] == 2048 and run.get("taught", "no") == "no" and "perplexity" in run
    }
    llama = found[None, None, None]["all"]
    assert found[256, 4, 0]["all"] < 1.10 * llama and 1.25 < found[64, 4, 0]["all"] / llama < 1.30
    alone = [found[window, 4, 0]["all"] for window in (32, 64, 128, 256)]
    assert alone == sorted(alone, reverse=True)
    assert found[256, 0, 0]["all"] > 1.8 * llama
    for (window, sinks, modes), with_state in found.items():
        if modes:
            without = found[window, sinks, 0]
            changes = [round(x / without[place], 3) for place, x in with_state.items()]
            assert 0.985 <= min(changes) < 1 and max(changes) <= 1
    page = (harness.RESULTS / "linearise_study.md").read_text()
    assert "at most 1.5% for the better, and nothing for the worse" in " ".join(page.split())
    on_gpu = harness.read("linearise_gpu")["runs"] if linearise_gpu.FILE.exists() else []
    taught = [run for run in (*runs, *on_gpu) if run.get("taught", "no") != "no"]
    assert ("Nothing here is taught yet" in page) == (not taught)
    assert ("<!-- table: linearise_gpu -->" in page) == linearise_gpu.FILE.exists()
    for run in taught:
        assert run["tokens"] > 0 and (f"{run['tokens']:,} tokens" in page or run["taught"].endswith("so far"))


def test_a_state_that_was_taught_is_nowhere_worse_than_the_window_alone():
    runs = [*harness.read("linearise_study")["runs"]]
    runs += harness.read("linearise_gpu")["runs"] if linearise_gpu.FILE.exists() else []
    read = [run for run in runs if "perplexity" in run]
    alone = {
        (run["window"], run["length"]): run["perplexity"]
        for run in read
        if run.get("modes") == 0 and run["taught"] == "no" and run["sinks"]
    }
    for run in read:
        window = alone.get((run["window"], run["length"]))
        if run.get("taught", "no") != "no" and run["modes"] and window is not None:
            assert all(x <= 1.001 * window[place] for place, x in run["perplexity"].items())
