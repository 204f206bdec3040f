"""The study of pairs among other tokens: what is told, what is asked, and what its page says."""

import pytest
import torch

from benchmarks import core_conditions, distant_study, recall_study, studies
from benchmarks.harness import read


def test_each_pair_is_told_once_and_asked_once_among_tokens_that_are_neither():
    batch = next(distant_study.batches(0, pairs=3, length=32))
    age = distant_study.ages(batch).tolist()
    found = []
    for ids, asked in zip(batch.ids.tolist(), batch.asked.tolist()):
        told = {ids[i]: (i, ids[i + 1]) for i in range(16) if ids[i] < distant_study.KEYS}
        places = [place for place, ask in enumerate(asked) if ask]
        assert len(told) == len(places) == 3 and min(places) > 16 and 0 not in told
        for place in places:
            first, value = told[ids[place - 1]]
            assert ids[place] == value and distant_study.KEYS <= value < distant_study.VALUES
            found.append(place - 1 - first)
        assert sum(x < distant_study.VALUES for x in ids) == 12, "two of each pair, twice"
    assert age == found
    again, other = (next(distant_study.batches(seed, pairs=3, length=32)).ids for seed in (0, 1))
    assert torch.equal(again, batch.ids) and not torch.equal(other, batch.ids)


@pytest.mark.parametrize("name", ["Interdomain, warp", "softmax, convolution"])
def test_a_run_has_what_the_table_reads(monkeypatch, name):
    monkeypatch.setitem(recall_study.TRAINING, "held_out_batches", 1)
    monkeypatch.setitem(distant_study.TRAINING, "batch_size", 4)
    monkeypatch.setattr(recall_study, "EVERY", 1)
    item = {"condition": name, "learning_rate": 1e-3, "seed": 0}
    row = item | distant_study.run_condition(**item, steps=2)
    assert list(row["curve"]) == ["1", "2"] and row["failed"] is None
    assert list(row["ages"]) == ["1", "64", "128", "192"] and all(0 <= share <= 1 for share in row["ages"].values())
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    found = distant_study.table({"runs": [row], "training": distant_study.TRAINING, "machine": machine})
    assert f"| {name} | {row['state_bytes']:,} | {row['accuracy']:.1%} | 0.001 | 2 |" in found
    assert found.count("\n| ") == 1, "what has not been run has no row"


def test_what_the_page_says():
    """All runs of the plan are there; who finds what, and from how far."""
    runs = read("distant_study")["runs"]
    assert len(runs) == 18 and all(studies.holds(runs, item) for item in distant_study.plan(runs))
    first = [row["condition"] for row in distant_study.plan([])]
    assert first == [*distant_study.CONDITIONS] * len(distant_study.LEARNING_RATES)
    best = {name: studies.best_runs(runs, {"condition": name}, 0) for name in distant_study.CONDITIONS}
    right = {name: [row["accuracy"] for row in rows] for name, rows in best.items()}
    plain, gates, warp, delta, deltanet, softmax = right.values()
    assert min(*warp, *softmax) > 0.99 and max(deltanet) < 0.16 and list(best)[4] == core_conditions.SPREAD
    assert all(0.8 < share < 0.86 for share in (*gates, *delta)) and max(plain) < 0.5
    ages = {name: [sum(row["ages"][age] for row in rows) / 2 for age in ("1", "192")] for name, rows in best.items()}
    near, far = ages["Interdomain"]
    assert near > 0.96 and far < 0.07 and 0.6 < ages["Interdomain, gates"][1] < 0.7
    moved = [row["accuracy"] for row in runs if row["condition"] == "Interdomain, warp" and row["seed"] == 0]
    assert len(moved) == 2 and min(moved) > 0.99
