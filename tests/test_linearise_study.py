"""The study of a real Llama in windows: its measure, its plan, and one run of each kind with a small Llama."""

import math

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from transformers import LlamaForCausalLM

from benchmarks import harness, linearise_study
from conversion import measure
from examples import text_data
from tests.test_conversion import ids, save_llama
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
    assert plan[0] == {"window": None, "length": 2048} and plan[:12] == untaught[:12]
    assert {item["window"] for item in plan} == {None, *linearise_study.WINDOWS}
    assert all(item["modes"] for item in plan if item.get("taught", "no") != "no")
    assert len({tuple(sorted(map(str, item.items()))) for item in plan}) == len(plan)


@pytest.mark.slow
def test_a_run_of_each_kind_and_its_table(tmp_path, monkeypatch):
    save_llama(tmp_path / "llama", num_key_value_heads=2)
    text_data.train_tokenizer(some_documents(), vocab_size=300).save_pretrained(tmp_path / "llama")
    text = pa.table({"text": [" ".join(some_documents(40))] * 3 + some_documents(100)})
    for name in ("longdocs/test", "corpus/wiki/train-000", "corpus/books/train-000"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(text, tmp_path / f"{name}.parquet")
    changes = {"TEXTS": {48: 2}, "LENGTH": 48, "MODES": 6, "TOKENS_A_STEP": 48}
    changes |= {"TEACHING": {"layers": 96, "whole": 96, "long": 96}, "LENGTHS": {"layers": "24,48", "long": "48"}}
    for name, value in changes.items():
        monkeypatch.setattr(linearise_study, name, value)
    study = linearise_study.Study(tmp_path, tmp_path / "runs", str(tmp_path / "llama"))
    kind = linearise_study.kind
    runs = [kind(), kind(8, sinks=0), kind(8, modes=6), kind(8, modes=6, taught="whole")]
    rows = [item | study.run(**item) for item in runs]
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "llama").eval()
    texts = measure.beginnings(study.tokenizer, text.column("text").to_pylist(), 2, 48)
    expected = measure.nats_by_position(llama, texts).double().mean().exp().item()
    assert rows[0]["perplexity"]["all"] == pytest.approx(expected, rel=1e-5)
    assert sorted(x.name for x in (tmp_path / "runs").iterdir()) == ["window-8-0-whole"]
    again = study.run(**runs[-1])  # what was taught is there
    assert again["perplexity"] == rows[-1]["perplexity"]
    table = linearise_study.table({"runs": rows, "machine": harness.machine() | {"command": "x"}})
    for label in (
        "everything (the Llama)",
        "the last 8 tokens alone",
        "the last 8 tokens and the first 4, state of 6 modes, untaught",
        "the last 8 tokens and the first 4, state of 6 modes, taught (whole)",
    ):
        assert f"| {label} |" in table


def test_what_is_said_of_a_real_llama_in_windows():
    runs = harness.read("linearise_study")["runs"]
    found = {
        (run["window"], run.get("sinks"), run.get("modes")): run["perplexity"]
        for run in runs
        if run["length"] == 2048 and run.get("taught", "no") == "no"
    }
    llama = found[None, None, None]["all"]
    assert found[256, 4, 0]["all"] < 1.10 * llama and 1.25 < found[64, 4, 0]["all"] / llama < 1.30
    alone = [found[window, 4, 0]["all"] for window in (32, 64, 128, 256)]
    assert alone == sorted(alone, reverse=True)
    assert found[256, 0, 0]["all"] > 1.8 * llama
    for (window, sinks, modes), with_state in found.items():
        if modes:
            without = found[window, sinks, 0]
            assert all(0.98 * without[place] < x <= without[place] for place, x in with_state.items())
    assert not any(run.get("taught", "no") != "no" for run in runs)  # the page says so
