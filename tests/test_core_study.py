"""The study of the recurrence: peers of one size that train, tasks with an answer, tables that say what is missing."""

import functools
import itertools
import math
import re
import statistics
from types import SimpleNamespace

import pytest
import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

from benchmarks import (
    condition_study,
    core_conditions,
    core_plan,
    core_runs,
    core_study,
    core_table,
    core_tasks,
    delta_rules,
    larger_study,
    peers,
    recall_layers,
    recall_study,
    side_by_side,
    studies,
)
from benchmarks.core_conditions import (
    CLOSEST,
    CONDITIONS,
    EVEN,
    EXPANDED,
    FEWER,
    GATES_MANY,
    KIMI,
    LANGUAGE,
    LARGE,
    LARGER,
    MANY_HEADS,
    MORE,
    NARROW,
    OUTPUT_GATE,
    RECALL,
    RECALL_RANGE,
    REFERENCE,
    SETTINGS,
    SIZES,
    SPREAD,
    TWICE,
    WORDS,
)
from benchmarks.harness import read
from benchmarks.side_by_side import SideBySide, run_steps
from examples.recall import answers
from examples.text_data import random_batches
from examples.training import next_token_loss, train
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, interdomain_attention

TINY = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "state_size": 4}
RECALL_SHAPE = recall_study.SHAPE | {"state_size": 32}
PEERS = {
    "Gated DeltaNet": peers.GATED_DELTANET,
    KIMI: peers.KIMI_DELTA | {"state_size": 8},
    "softmax, convolution": peers.SOFTMAX_CONVOLUTION,
}


@pytest.mark.parametrize(
    "shape", [condition_study.SHAPE, recall_study.SHAPE | {"state_size": 32}], ids=["1.4M", "170k"]
)
def test_conditions_are_of_one_size(shape):
    """Parameters within 1%, and as many numbers of state in all that keep one of fixed size."""
    fields = {name: core_conditions.fields_of(name, shape) for name in CONDITIONS}
    counts = {name: peers.count(x) for name, x in fields.items()}
    assert max(counts.values()) < 1.01 * min(counts.values()), counts
    states = {name: InterdomainConfig(**x).state_sizes(64)["recurrent"] for name, x in fields.items()}
    heads = shape["num_hidden_layers"] * shape["num_attention_heads"]
    assert {size for name, size in states.items() if not name.startswith("softmax")} == {heads * 64 * 64}


def test_a_width_is_found_for_any_number_of_parameters():
    fields = TINY | PEERS["Gated DeltaNet"]
    for width in (1, 2, 37):
        assert peers.equal_width(fields, peers.count(fields | {"intermediate_size": width})) == width
    assert peers.equal_width(fields, 0) == 1


def peer(name: str) -> InterdomainForCausalLM:
    torch.manual_seed(0)
    return InterdomainForCausalLM(InterdomainConfig(**TINY | PEERS[name]))


@pytest.mark.parametrize("name", PEERS)
def test_peers_learn_look_back_and_do_not_look_ahead(name):
    model = peer(name)
    ids = torch.randint(48, (2, 13), generator=torch.Generator().manual_seed(0))
    losses = [progress.loss for progress in train(model, itertools.repeat(ids), steps=8, learning_rate=1e-2)]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 0.2
    model.eval()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        other = model(ids.index_fill(1, torch.tensor([5]), 7), use_cache=False).logits
    torch.testing.assert_close(whole[:, :5], other[:, :5])
    assert (whole[:, 8] - other[:, 8]).abs().max() > 1e-6, "by more tokens than one layer's convolution"
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_gated_deltanet_can_start_with_the_steps_of_mamba2():
    """Transformers starts it with larger ones, with which nine heads of ten keep less than a tenth after a token."""
    steps = {}
    for name in ("gated_deltanet_spread", "gated_deltanet"):
        model = InterdomainForCausalLM(InterdomainConfig(**TINY, token_mixers=name))
        steps[name] = torch.cat([layer.token_mixer.layer.dt_bias for layer in model.model.layers])
        steps[name] = torch.nn.functional.softplus(steps[name])
    assert ((steps["gated_deltanet_spread"] > 0.9e-3) & (steps["gated_deltanet_spread"] < 0.11)).all()
    assert (steps["gated_deltanet"] > 1.3).all() and steps["gated_deltanet_spread"].std() > 0
    rates = torch.linspace(0.01, 16, 1000)  # of which its own are drawn
    assert 0.88 < ((-rates * steps["gated_deltanet"][0]).exp() < 0.1).float().mean() < 0.92


def test_even_steps_are_drawn_by_no_seed():
    """Every layer has heads that keep a hundred tokens and heads that keep few, whatever the seed."""
    decays = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = InterdomainForCausalLM(InterdomainConfig(**condition_study.SHAPE, **peers.GATED_DELTANET_EVEN))
        layers = [layer.token_mixer.layer for layer in model.model.layers]
        decays += [layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias) for layer in layers]
    assert all(torch.equal(each, decays[0]) for each in decays)
    assert decays[0].diff().min() > 0 and 1 / decays[0].max() < 2 and 1 / decays[0].min() > 200


def test_kimi_delta_attention_starts_as_transformers_starts_it():
    """Decays a token from `KimiLinearForCausalLM` of the same layer, and keys and values of one width alone."""
    gates = [layer.token_mixer.layer.forget_gate for layer in peer(KIMI).model.layers]
    sizes = {"hidden_size": 16, "vocab_size": 8, "intermediate_size": 8, "linear_num_heads": 2, "linear_head_dim": 16}
    kinds = {"layer_types": ["linear_attention"] * 2, "mlp_layer_types": ["dense"] * 2, "num_hidden_layers": 2}
    config = KimiLinearConfig(**sizes, **kinds, pad_token_id=0)
    theirs = [layer.self_attn.forget_gate for layer in KimiLinearForCausalLM(config).model.layers]
    for found in (gates, theirs):
        steps = torch.cat([torch.nn.functional.softplus(gate.dt_bias) for gate in found])
        rates = torch.cat([gate.A_log.exp().flatten() for gate in found])
        assert 0.9e-3 < steps.min() < 4e-3 and 0.03 < steps.max() < 0.11
        assert rates.min() >= 1 and 3 < rates.max() <= 16
    with pytest.raises(ValueError, match="R \\+ D = 16 must be 2 M, and M is 4"):
        InterdomainForCausalLM(InterdomainConfig(**TINY | peers.KIMI_DELTA))


@pytest.mark.parametrize("name", CONDITIONS)
def test_no_mixer_starts_larger_than_the_embeddings_it_is_added_to(name):
    """Else a model learns slowly for its first weights alone, as a comparison of layers must not."""
    model = core_runs.make_fleet([core_plan.language_item(name)]).models[0].eval()
    ids = torch.randint(2048, (2, 64), generator=torch.Generator().manual_seed(0))
    embedded = model.model.embed_tokens(ids)
    first = model.model.layers[0]
    with torch.no_grad():
        added, *_ = first.token_mixer(first.input_layernorm(embedded))
    assert 0 < added.square().mean() < 0.25 * embedded.square().mean()


@pytest.mark.parametrize("name", [*PEERS, SPREAD])
def test_convolutions_of_peers_start_as_transformers_starts_one(name):
    """Small: PyTorch's own start is fourteen times as large, and Gated DeltaNet then learns slowly."""
    model = core_runs.make_fleet([core_plan.language_item(name)]).models[0]
    mixer = model.model.layers[0].token_mixer
    if name.startswith("softmax"):
        convolutions = [mixer.q_proj[1], mixer.k_proj[1], mixer.v_proj[1]]
    else:
        convolutions = [mixer.layer.conv1d]
    for conv in convolutions:
        assert conv.weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.1)


def done_again(record: dict, kept_as: str = "again"):
    """The runs that were done again, each with the first."""
    for row in record.get(kept_as, []):
        item = {name: row[name] for name in core_plan.language_item("")}
        (first,) = (other for other in record["runs"] if item.items() <= other.items())
        yield row, first


def test_what_the_page_says_of_language():
    """By seed and by size; a run more may change it, and then the page is to say something else."""
    records = {name: read(name) for name in core_study.SOURCES}
    best = core_table.best_language(records, LANGUAGE)
    loss = {name: [condition_study.score(row) for row in rows] for name, rows in best.items()}
    plain, gates, delta, many, deltanet = (loss[name] for name in core_plan.FIRST)
    assert len(plain) == len(gates) == 6 and max(gates) < min(plain)

    def ahead(a, b):
        return round(100 * (1 - math.exp(statistics.mean(a) - statistics.mean(b))))

    assert (ahead(gates, plain), ahead(delta, gates[:2]), ahead(many, plain)) == (6, 1, 12) and len(delta) == 2
    without = loss[GATES_MANY]
    assert (ahead(without, plain), ahead(without, deltanet)) == (11, 3)
    assert [a < b for a, b in zip(without, deltanet, strict=True)].count(True) == 5
    assert ahead(loss["Interdomain, warp"], plain) < 0
    kimi, pair = statistics.mean(loss[KIMI]), [deltanet[:2], plain[:2]]
    assert [round(100 * math.expm1(kimi - statistics.mean(x))) for x in pair] == [7, -2]
    between = [round(b - a, 3) for a, b in zip(many, deltanet, strict=True)]
    assert ahead(many, deltanet) == 4 and (len(between), min(between), max(between)) == (6, 0.001, 0.09)
    order = sorted(loss, key=lambda name: statistics.mean(loss[name]))
    assert order[:2] == [OUTPUT_GATE, MANY_HEADS]
    best = core_table.best_language(records, FEWER)
    larger = {name: [condition_study.score(row) for row in rows] for name, rows in best.items()}
    mean = {name: statistics.mean(loss) for name, loss in larger.items()}
    behind = [round(100 * math.expm1(mean[name] - mean[SPREAD]), 1) for name in core_plan.FIRST[2:4]]
    assert behind == [2.5, -3.0] and ahead(larger[GATES_MANY], larger[SPREAD]) == 1
    without = zip(*(larger[name] for name in (GATES_MANY, SPREAD)), strict=True)
    assert [a < b for a, b in without] == [True, False]
    tried = [
        {row["learning_rate"]: condition_study.score(row) for row in runs if row["seed"] == 0}
        for name, runs in core_table.language_rows(records, FEWER).items()
        if name in CLOSEST
    ]
    assert [len(rates) for rates in tried] == [4, 4]
    assert all(min(rates) < min(rates, key=rates.get) < max(rates) for rates in tried)
    both = zip(*(larger[name] for name in CLOSEST), strict=True)
    assert [a < b for a, b in both] == [True, True]


def test_what_the_page_says_of_peers_as_published():
    """Decays that no seed draws, an expansion, and rotary embeddings."""
    best = core_table.best_language({name: read(name) for name in core_study.SOURCES}, LANGUAGE)
    loss = {name: [condition_study.score(row) for row in rows] for name, rows in best.items()}

    def ahead(name, other):
        """In percent of perplexity, in the mean of the seeds of both."""
        return 100 * math.expm1(statistics.mean(b - a for a, b in zip(loss[name], loss[other])))

    assert round(ahead(MANY_HEADS, EVEN)) == 3 and len(loss[EVEN]) == 6
    assert [a < b for a, b in zip(loss[MANY_HEADS], loss[EVEN], strict=True)].count(True) == 5
    expanded = statistics.mean(loss[EXPANDED])
    assert round(100 * math.expm1(expanded - statistics.mean(loss["Mamba-2"]))) == -13
    assert round(ahead(REFERENCE, EXPANDED)) == 1 and max(loss[EXPANDED]) < min(loss["S4D-only"])
    assert [best[name][0]["learning_rate"] for name in (EXPANDED, core_conditions.ROTARY)] == [0.006, 0.006]
    difference = statistics.mean(loss[core_conditions.ROTARY]) - statistics.mean(loss["softmax, convolution"])
    assert 0 < difference < 0.02
    larger = core_table.best_language({name: read(name) for name in core_study.SOURCES}, FEWER)
    rotary, others = (
        [*map(condition_study.score, larger[x])] for x in (core_conditions.ROTARY, "softmax, convolution")
    )
    assert all(a < b for a, b in zip(rotary, others, strict=True)) and len(rotary) == 2
    assert round(100 * math.expm1(statistics.mean(rotary) - statistics.mean(others))) == -2
    many, even = ([*map(condition_study.score, larger[x])] for x in (MANY_HEADS, EVEN))
    assert all(a < b for a, b in zip(many, even, strict=True)) and len(even) == 2
    assert round(100 * math.expm1(statistics.mean(even) - statistics.mean(many))) == 2
    runs = read("core_study")["runs"]
    rates = {task: core_plan.recall_rates(runs, EVEN, task, SETTINGS[0]) for task in RECALL}
    assert [round(row["accuracy"], 2) for row in next(iter(rates["recall"].values()))] == [0.78, 1.0]
    assert all(len(rows) == 2 for found in rates.values() for rows in found.values())


def test_what_the_page_says_of_the_output_gate():
    """Ahead of many heads without it with four of six seeds, of Gated DeltaNet with each; hardly at 3M."""
    records = {name: read(name) for name in core_study.SOURCES}
    held_out = {}
    for task in (LANGUAGE, FEWER):
        best = core_table.best_language(records, task)
        rows, others = ([*map(condition_study.score, best[x])] for x in (OUTPUT_GATE, MANY_HEADS))
        held_out[task] = [b - a for a, b in zip(rows, others, strict=True)]
    assert [x > 0 for x in held_out[LANGUAGE]].count(True) == 4 and len(held_out[LANGUAGE]) == 6
    assert round(100 * statistics.mean(held_out[LANGUAGE])) == 1
    assert 0 < statistics.mean(held_out[FEWER]) < 0.005
    best = core_table.best_language(records, LANGUAGE)
    rows, others = best[OUTPUT_GATE], best[SPREAD]
    ahead = [condition_study.score(b) - condition_study.score(a) for a, b in zip(rows, others, strict=True)]
    assert [round(x, 3) for x in (min(ahead), max(ahead))] == [0.022, 0.109] and len(ahead) == 6


def test_what_the_page_says_of_more_tokens():
    """Many heads have one rate there, and lead with both seeds; twice the heads lie between them and the usual."""
    records = {name: read(name) for name in core_study.SOURCES}
    lead = beside(records, LARGER)
    assert lead == {MANY_HEADS: -1.5, GATES_MANY: -1.1}
    rows = {name: core_table.language_rows(records, LARGER)[name] for name in CLOSEST}
    assert {row["learning_rate"] for row in rows[MANY_HEADS]} == {1.5e-3}
    best = core_table.best_language(records, LARGER)
    many, deltanet = ([condition_study.score(row) for row in best[name]] for name in CLOSEST)
    assert [a < b for a, b in zip(many, deltanet, strict=True)] == [True, True]
    assert condition_study.best_rate(rows[SPREAD], SPREAD) == 3e-3
    without = [condition_study.score(row) for row in best[GATES_MANY]]
    assert [a < b for a, b in zip(without, deltanet, strict=True)] == [True, True]
    order = list(core_table.losses(records, FEWER))
    assert [x for x in order if x in (TWICE, MANY_HEADS, core_plan.FIRST[2])] == [
        MANY_HEADS,
        TWICE,
        core_plan.FIRST[2],
    ]
    assert beside(records, LANGUAGE, TWICE)[MANY_HEADS] < 0


def beside(records, task, other=SPREAD) -> dict[str, float]:
    """By how many percent the perplexity of each form of Interdomain is above that of Gated DeltaNet, or another."""
    loss = core_table.losses(records, task)
    forms = (name for name in loss if name.startswith("Interdomain"))
    return {name: round(100 * core_table.behind(loss, name, [other])[other], 1) for name in forms}


def test_conditions_are_compared_over_the_seeds_of_both():
    """A seed that one of them lacks would count for the other alone."""
    loss = {
        "a": {0: 4.0, 1: 4.2, 2: 9.0},
        "b": {0: 4.1, 1: 4.1},
        "Interdomain, gates": {0: 5.0},
        "Interdomain": {0: 6.0},
    }
    found = core_table.behind(loss, "b", ["a", "Interdomain, gates"])
    assert found == pytest.approx({"a": 0, "Interdomain, gates": math.expm1(-0.9)})
    assert core_table.behind(loss | {"c": {3: 4.0}}, "a", ["b", "c"]) == pytest.approx({"b": 0})
    assert core_table.best_form(loss) == "Interdomain, gates" and core_table.best_form({"a": {0: 4.0}}) is None


def lag(rows, others, *names) -> float:
    """By how much a number is larger in the mean of `rows` than in that of `others`."""
    a, b = (
        statistics.mean(functools.reduce(lambda x, name: x[name], names, row) for row in found)
        for found in (rows, others)
    )
    return a - b


def test_what_the_page_says_of_12m():
    """After 20M tokens gates alone are ahead by the mean of two seeds, behind at 1.4M and at 3M on 2M tokens."""
    records = {name: read(name) for name in core_study.SOURCES}
    lags = {task: beside(records, task) for task in WORDS}
    large = lags[LARGE]
    gates, many = "Interdomain, gates", MANY_HEADS
    assert min(large, key=large.get) == gates and large[gates] == -3.0
    others = ("Interdomain", TWICE, many, OUTPUT_GATE, GATES_MANY)
    assert [large[name] for name in others] == [1.6, 3.1, 1.7, 6.0, 2.5]
    assert [lags[task][gates] for task in (LANGUAGE, FEWER)] == [3.5, 2.4]
    loss = core_table.losses(records, LARGE)
    for name, expected in (("Mamba-2", {SPREAD: 13, REFERENCE: 8}), ("S4D-only", {SPREAD: 23, REFERENCE: 17})):
        found = core_table.behind(loss, name, [SPREAD, REFERENCE])
        assert {other: round(100 * lag) for other, lag in found.items()} == expected
    three = [lags[task] for task in (LANGUAGE, FEWER, LARGE)]
    everywhere = set.intersection(*map(set, three))
    assert len(everywhere) == 6 and not [name for name in everywhere if max(found[name] for found in three) < 0]

    best = core_table.best_language(records, LARGE)
    found, peer = best[gates], best[SPREAD]
    lead = [condition_study.score(b) - condition_study.score(a) for a, b in zip(found, peer, strict=True)]
    assert [round(x, 3) for x in lead] == [0.003, 0.057]
    texts = {x: [b["validation"][x] - a["validation"][x] for a, b in zip(found, peer)] for x in core_table.TEXTS}
    assert [round((a + b) / 2, 3) for a, b in zip(texts["wiki"], texts["books"])] == [-0.004, 0.035]
    assert round(sum(texts["wikitext-2"]) / sum(itertools.chain(*texts.values())), 2) == 0.66
    lead = [condition_study.score(b) - condition_study.score(a) for a, b in zip(best[many], peer, strict=True)]
    assert [round(x, 3) for x in lead] == [-0.047, 0.014]
    seen = {name: [round(row["repeats"]["repeated"], 2) for row in rows] for name, rows in best.items()}
    assert (seen[gates], seen["Interdomain"], seen[SPREAD]) == (
        [3.42, 3.42],
        [3.51, 3.47],
        [3.41, 3.68],
    )
    assert (seen[many], seen[OUTPUT_GATE]) == ([3.75, 3.7], [3.93, 3.94])

    assert round(lag(found, peer, "repeats", "other"), 3) == 0.014
    assert [round(100 * math.expm1(lag(found, peer, "lengths", x)), 1) for x in ("1.0", "3.5")] == [1.1, 2.4]


def test_what_the_page_says_of_60m_tokens():
    """Interdomain is behind, by what the context has shown more than 64 tokens ago."""
    records = {name: read(name) for name in core_study.SOURCES}
    best = core_table.best_language(records, MORE)
    gates, peer, softmax = (best[x] for x in ("Interdomain, gates", SPREAD, "softmax, convolution"))
    seeds = [condition_study.score(row) for row in gates]
    assert len(seeds) == 2 and round(abs(seeds[0] - seeds[1]), 3) == 0.001 and len(peer) == len(softmax) == 2
    lag_of = beside(records, MORE)
    assert list(lag_of) == ["Interdomain, gates", "Interdomain", GATES_MANY, NARROW]
    assert [lag_of.pop("Interdomain, gates"), *map(round, lag_of.values())] == [6.4, 8, 9, 12]
    assert beside(records, MORE, "softmax, convolution")["Interdomain, gates"] == 0.1
    texts = {name: lag(gates, softmax, "validation", name) for name in core_table.TEXTS}
    assert [name for name, nats in texts.items() if nats > 0] == ["wikitext-2"]
    texts = {name: lag(gates, peer, "validation", name) for name in core_table.TEXTS}
    assert round(texts["wikitext-2"] / sum(texts.values()), 2) == 0.63
    for name in (NARROW, GATES_MANY):
        assert min(lag(best[name], gates, "ages", str(low)) for low in larger_study.AGES) > 0

    ages = [lag(gates, peer, "ages", str(low)) for low in larger_study.AGES]
    assert [round(x, 2) for x in (min(ages[:3]), max(ages[:3]))] == [0.08, 0.18], "up to 63 tokens ago"
    assert [round(x, 2) for x in (min(ages[3:]), max(ages[3:]))] == [0.37, 0.45]
    assert round(lag(gates, peer, "repeats", "other"), 2) == 0.03
    assert [round(100 * math.expm1(lag(gates, peer, "lengths", x))) for x in ("1.0", "3.5")] == [2, 4]


def test_what_the_page_says_of_runs_on_another_machine():
    """How far runs done again end from the first; fused and plain operators give the same nats, forward."""
    record = read("core_study")
    apart = {"train": [], "wikitext-2": [], "mean": []}
    for row, first in done_again(record):
        assert first["machine"] != row["machine"]
        apart["train"].append(abs(row["train_loss"] - first["train_loss"]))
        apart["wikitext-2"].append(abs(row["validation"]["wikitext-2"] - first["validation"]["wikitext-2"]))
        apart["mean"].append(abs(condition_study.score(row) - condition_study.score(first)))
    again = ([row for row in record["again"] if row["condition"] == name] for name in CLOSEST)
    many, deltanet = ([*map(condition_study.score, rows)] for rows in again)
    assert [round(b - a, 3) for a, b in zip(many, deltanet, strict=True)] == [0.037, 0.002]
    assert round(-100 * math.expm1(statistics.mean(many) - statistics.mean(deltanet))) == 2
    (both,) = done_again(record, "cut")
    assert [f"{condition_study.score(row):.3f}" for row in both] == ["4.230", "4.218"]
    found = {name: round(max(nats), 3) for name, nats in apart.items()}
    assert found == {"train": 0.005, "wikitext-2": 0.061, "mean": 0.022} and len(record["again"]) == 6
    ways = [row["ways"] for row in (*record["runs"], *record["again"]) if "NVIDIA" in row["machine"] and "ways" in row]
    fused = [abs(found["measured"] - found["chunk"]) for found in ways if "chunk" in found]
    assert len(fused) == 19 and max(fused) < 1e-7


def test_what_the_page_says_of_longer_recall():
    """Of 16 pairs all that were asked learned with both seeds, but for Mamba-2 and Gated DeltaNet: one, or with even
    steps none.
    """
    runs = read("core_study")["runs"]
    found = {}
    for name in CONDITIONS:
        if (rate := core_plan.best_recall_rate(runs, name, "recall", (16, 128))) is not None:
            rows = core_plan.recall_rates(runs, name, "recall", (16, 128))[rate]
            found[name] = [row["accuracy"] for row in sorted(rows, key=lambda row: row["seed"])]
    assert [f"{x:.0%}" for x in found.pop("Mamba-2")] == ["100%", "1%"]
    assert [f"{x:.0%}" for x in found.pop(EVEN)] == ["17%", "18%"]
    assert len(found) == 7 and all(len(answers) == 2 for answers in found.values())
    assert [f"{x:.0%}" for x in found.pop(SPREAD)] == ["100%", "14%"]
    assert f"{min(min(answers) for answers in found.values()):.0%}" == "98%"
    ((_, rows),) = core_plan.recall_rates(runs, SPREAD, "recall", (32, 256)).items()
    assert [f"{row['accuracy']:.0%}" for row in rows] == ["100%", "8%"], "one seed in two"
    found, rows_of = {}, {}
    for name in (
        "softmax, convolution",
        "Interdomain, gates",
        "Interdomain",
        "Interdomain, gates and delta rule",
        SPREAD,
        GATES_MANY,
        MANY_HEADS,
    ):
        ((_, rows_of[name]),) = core_plan.recall_rates(runs, name, "recall", (64, 512)).items()
        found[name] = [f"{row['accuracy']:.0%}" for row in rows_of[name]]
    softmax, gates, plain, delta, deltanet, *many = found.values()
    assert deltanet == ["100%", "3%"] and f"{rows_of[SPREAD][0]['accuracy']:.1%}" == "99.7%"
    assert (softmax, gates, plain, delta) == (["100%", "100%"], ["94%", "96%"], ["92%", "93%"], ["96%", "96%"])
    assert sorted(itertools.chain(*many)) == ["76%", "82%", "84%", "88%"]
    assert len(core_table.right_answers(runs, "recall", (64, 512))) == len(found)


def test_what_is_said_of_the_speed_of_training():
    """Beside the plain layer, at both sizes."""
    medians = [{name: x["median"] for name, x in row["times"].items()} for row in read("core_cpu")["rows"]]
    speed = {name: [row[REFERENCE] / row[name] for row in medians] for name in CONDITIONS}
    plain, gates, delta, many, deltanet = (speed[name] for name in core_plan.FIRST)
    assert len(plain) == 2 and min(gates) > 0.91
    assert [round(statistics.mean(x), 1) for x in (delta, many, deltanet)] == [0.8, 0.5, 0.6]
    assert round(statistics.mean(speed[GATES_MANY]), 2) == 0.65
    assert [round(statistics.mean(speed[name]), 1) for name in (KIMI, NARROW)] == [0.4, 0.4]
    assert all(a < b for a, b in zip(many, deltanet, strict=True))
    fewer = [x for name in ("S4D-only", "Mamba-2", "softmax, convolution") for x in speed[name]]
    assert [round(x, 1) for x in (min(fewer), max(fewer))] == [1.2, 1.3]
    assert [round(x, 1) for x in speed[EXPANDED]] == [1.1, 1.1] and round(min(delta), 2) == 0.76


def test_what_the_page_says_of_recall():
    """Forms of Interdomain learned with both seeds, but for the output gate; Gated DeltaNet at no rate with both."""
    runs = read("core_study")["runs"]
    for task in ("recall", "overwritten"):
        for name in CONDITIONS:
            rates = core_plan.recall_rates(runs, name, task, SETTINGS[0])
            if name.startswith("Interdomain") and rates:
                best = next(iter(rates.values()))
                right = [row["accuracy"] for row in best]
                if name == OUTPUT_GATE:
                    assert (task, [round(x, 2) for x in right]) == ("recall", [0.97, 0.95])
                elif (task, name) == ("overwritten", GATES_MANY):
                    assert [round(x, 2) for x in right] == [0.99, 1.0]
                else:
                    assert len(right) == 2 and min(right) > 0.999, (task, name)
        learned = [
            [row["accuracy"] > 0.99 for row in rows]
            for rows in core_plan.recall_rates(runs, SPREAD, task, SETTINGS[0]).values()
        ]
        assert any(map(any, learned)) and not any(map(all, learned)), (task, learned)
        assert {len(rows) for rows in learned} == {2}
    assert answers_at_best(runs, KIMI, "recall") == answers_at_best(runs, KIMI, "overwritten") == [1.0, 1.0]
    copied = {
        KIMI: [1.0, 1.0],
        "Interdomain, gates and delta rule": [0.99, 1.0],
        "Interdomain, gates": [0.97, 0.97],
        "Mamba-2": [0.99, 0.96],
        SPREAD: [0.94, 0.4],
        "softmax, convolution": [0.65, 1.0],
    }
    for name, right in copied.items():
        assert answers_at_best(runs, name, "copying") == right, name


def answers_at_best(runs, name, task) -> list[float]:
    """By seed, at the shortest setting."""
    rows = next(iter(core_plan.recall_rates(runs, name, task, SETTINGS[0]).values()))
    return [round(row["accuracy"], 2) for row in rows]


def test_what_the_page_says_of_mamba2_in_recall():
    """It is asked without the gate and the norm of language, and with ordinary maps; so it learns, else it did not."""
    record = read("core_study")
    assert answers_at_best(record["runs"], "Mamba-2", "recall") == [0.96, 0.01]
    assert answers_at_best(record["runs"], "Mamba-2", "overwritten") == [0.9, 0.89]
    pairs = [row["accuracy"] for row in record["gated"] if row["task"] != "copying"]
    assert len(pairs) == 16 and max(pairs) < 0.021 and {row["condition"] for row in record["gated"]} == {"Mamba-2"}
    fields = core_conditions.recall_fields("Mamba-2")
    assert recall_study.MAMBA2.items() <= fields.items() and "use_output_gate" not in fields
    assert core_conditions.fields_of("Mamba-2", TINY)["use_output_gate"]
    (model,) = core_runs.make_fleet([core_plan.recall_item("Mamba-2")]).models
    assert all(layer.token_mixer.o_proj.weight.std() > 0.005 for layer in model.model.layers), "not made small"


@pytest.mark.parametrize("name", PEERS)
def test_peers_refuse_what_they_cannot_read(name):
    model, ids = peer(name).eval(), torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="is a peer in studies and reads whole rows: pass neither a cache nor pads"):
        model(ids, use_cache=True)
    with pytest.raises(ValueError, match="pass neither a cache nor pads"):
        model(ids, attention_mask=torch.tensor([[0, 1, 1, 1]]), use_cache=False)


def test_the_softmax_with_a_convolution_has_one_a_projection():
    """A projection is a linear map, then a causal convolution over the tokens of each of its channels."""
    mixer = peer("softmax, convolution").model.layers[0].token_mixer
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    for name in ("q_proj", "k_proj", "v_proj"):
        linear, conv = getattr(mixer, name)
        padded = torch.nn.functional.pad(linear(x).mT, (conv.kernel_size[0] - 1, 0))
        expected = torch.conv1d(padded, conv.weight, groups=conv.groups).mT
        torch.testing.assert_close(getattr(mixer, name)(x), expected)


def test_overwritten_keys_ask_for_the_last_value():
    batch = next(core_tasks.make_batches("overwritten", 5, 64, 0))
    for ids, asked in zip(batch.ids.tolist(), batch.asked.tolist()):
        memory, changed = {}, 0
        for place in range(0, 20, 2):
            changed += ids[place] in memory and memory[ids[place]] != ids[place + 1]
            memory[ids[place]] = ids[place + 1]
        found = {ids[place - 1]: ids[place] for place, ask in enumerate(asked) if ask}
        assert found == memory and len(found) == 5 and changed >= 4
        assert not any(asked[:20])


def test_copying_asks_for_the_tokens_in_their_order():
    batch = next(core_tasks.make_batches("copying", 5, 32, 0))
    for ids, asked, labels in zip(batch.ids, batch.asked, batch.labels):
        told = ids[:26]
        assert torch.equal(labels[asked], told[told > 1]) and asked.sum() == 5
        assert ids[26] == 1 and not ids[27:].any()
    assert batch.ids[:, :26].bool().sum(0).min() < 32, "at places of its own in every row"


def done(item: dict) -> dict:
    """A row as if 0.003 were the best rate of everything."""
    error = abs(math.log(item["learning_rate"] / 3e-3))
    item = item | {"machine": "x"}
    if item["task"] in RECALL:
        return item | {"accuracy": 0.5, "loss": error, "state_bytes": 1024}
    lengths = {str(factor): 4.0 for factor in condition_study.LENGTHS}
    places = dict.fromkeys(map(str, (0, 16, 64, 128, 256)), 4.0)
    repeats = {"share": 0.5, "repeated": 3.0, "other": 5.0}
    ages = dict.fromkeys(map(str, larger_study.AGES), 3.0)
    nats = {"train_loss": 3.5, "validation": dict.fromkeys(core_table.TEXTS, 4 + error)}
    texts = nats | {"lengths": lengths, "places": places, "repeats": repeats, "ages": ages}
    return item | texts | {"parameters": 10, "state": 20}


def known(task: str, *pairs: tuple[float, int]) -> dict[str, dict]:
    """What the study of a size has run: rates and seeds of each of the conditions that are ours."""
    study, names = core_plan.KNOWN[task]
    rows = [
        {"condition": there, "learning_rate": rate, "seed": seed, "parameters": 10, "state": 20}
        | {"validation": {"a": 4 + abs(math.log(rate / 3e-3))}}
        for there, (rate, seed) in itertools.product(names.values(), pairs)
    ]
    return {study: {"runs": rows}}


NOTHING = known(LANGUAGE) | known(LARGER)
SHORTER = NOTHING | known(LANGUAGE, (1.5e-3, 0), (3e-3, 0), (6e-3, 0))
MACHINE = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")


def test_the_plan_brackets_the_rates_of_what_is_not_known():
    """What another study has run is not run again, what it has not is; then more."""
    others = known(LANGUAGE, (1.5e-3, 0), (3e-3, 0), (3e-3, 1), (6e-3, 0)) | known(LARGER, (3e-3, 0), (3e-3, 1))
    language = [item for item in core_plan.plan([], others) if item["task"] == LANGUAGE and item["seed"] < 2]
    assert {item["condition"] for item in language} == set(CONDITIONS) - set(core_plan.KNOWN[LANGUAGE][1])
    assert {item["learning_rate"] for item in language} == set(condition_study.LEARNING_RATES)
    larger = [item for item in core_plan.plan([], others) if item["task"] == LARGER]
    asked = {(item["learning_rate"], item["seed"]) for item in larger if item["condition"] == "S4D-only"}
    assert asked == {(1.5e-3, 0), (6e-3, 0)}, "the rates that `larger_study` has not tried"
    runs = []
    while missing := [item for item in core_plan.plan(runs, SHORTER) if done(item) not in runs]:
        runs += [done(item) for item in missing]
    for task, name in itertools.product(list(SIZES)[:3], core_plan.FIRST[1:]):
        found = [row for row in runs if (row["task"], row["condition"]) == (task, name)]
        assert {(row["learning_rate"], row["seed"]) for row in found} >= {(3e-3, 0), (3e-3, 1), (6e-3, 0)}
    rest = [row for row in runs if row["task"] == LARGER and row["condition"] == "Mamba-2"]
    assert {(row["learning_rate"], row["seed"]) for row in rest} == {(6e-3, 0), (3e-3, 0), (3e-3, 1), (1.5e-3, 0)}
    small = [row for row in runs if row["task"] == LANGUAGE]
    seeds = {row["seed"] for row in small if row["condition"] == SPREAD}
    assert seeds == {0, 1, *core_plan.MORE_SEEDS}
    largest = [row for row in runs if row["task"] == LARGE]
    assert {row["condition"] for row in largest} == set(core_plan.ASKED[LARGE])
    assert {row["learning_rate"] for row in largest} == {1.5e-3}, "half of the best at 1.4M"
    assert len([row for row in largest if row["seed"]]) == len(core_plan.ASKED[LARGE])
    longest = [row for row in runs if row.get("length") == 512]
    assert {(row["task"], row["seed"]) for row in longest} == {("recall", 0), ("recall", 1)}
    assert {row["condition"] for row in longest} == set(core_plan.IN_RECALL)
    assert {row["learning_rate"] for row in longest} == {3e-3}


@pytest.mark.parametrize("task", core_plan.KNOWN)
def test_what_another_study_has_run_is_what_is_asked_here(task):
    name_of_study, names = core_plan.KNOWN[task]
    study = {"condition_study": condition_study, "larger_study": larger_study}[name_of_study]
    assert SIZES[task].training.items() <= study.TRAINING.items()
    for name, there in names.items():
        if study is larger_study:
            there = larger_study.CONDITIONS[there]
        theirs = SIZES[task].shape | condition_study.CONDITIONS[there]
        ours = core_conditions.fields_of(name, SIZES[task].shape)
        assert InterdomainConfig(**ours).to_dict() == InterdomainConfig(**theirs).to_dict()


def test_peers_start_recall_with_larger_maps():
    """Those without a start of their own: with smaller maps Gated DeltaNet recalled less in trials."""
    ranges = {name: core_conditions.recall_fields(name).get("initializer_range") for name in CONDITIONS}
    larger = {name for name, found in ranges.items() if found == RECALL_RANGE}
    assert larger == {*core_plan.REST[:2], SPREAD, "softmax, convolution", *core_plan.BETTER_PEERS}
    item = core_plan.recall_item(SPREAD)
    mixer = core_runs.make_fleet([item]).models[0].model.layers[0].token_mixer
    assert mixer.layer.in_proj_qkvz.weight.std().item() == pytest.approx(RECALL_RANGE, rel=0.05)


def test_recall_brackets_rates_of_what_has_not_learned():
    """With both seeds, and a longer setting at the best rate of the shorter."""
    rates = {3e-3: 0.4, 1e-3: 0.6, 1e-2: 0.1}
    runs = [
        done(core_plan.recall_item("Mamba-2", learning_rate=x, seed=seed)) | {"accuracy": y}
        for x, y in rates.items()
        for seed in (0, 1)
    ]

    def asked() -> list[tuple]:
        plan = core_plan.recall_plan(runs, SETTINGS[:2])
        own = (item for item in plan if item["condition"] == "Mamba-2" and item["task"] == "recall")
        names = ("pairs", "learning_rate", "seed")
        return [tuple(map(item.get, names)) for item in own if not studies.holds(runs, item)]

    assert asked() == [(8, 3e-4, 0), (8, 3e-4, 1)]
    more = [done(core_plan.recall_item("Mamba-2", learning_rate=3e-4, seed=seed)) for seed in (0, 1)]
    runs.append(more[0])
    assert (8, 3e-4, 1) in asked(), "a rate beyond is tried with both seeds, too"
    runs.append(more[1])
    assert asked() == [(16, 1e-3, 0), (16, 1e-3, 1)]
    runs = [row | {"accuracy": 1.0} if row["learning_rate"] == 1e-3 else row for row in runs if row not in more]
    assert asked() == [(16, 1e-3, 0), (16, 1e-3, 1)], "learned: no further rate"


def test_longer_recall_is_asked_of_what_has_learned_the_shorter():
    """Half of it, with some seed at the best rate; other tasks have the shortest setting alone."""
    right = {"Interdomain": (0.1, 0.5), "Mamba-2": (0.49, 0.4), "S4D-only": (1.0, 1.0)}
    runs = [
        done(core_plan.recall_item(name, task, seed=seed)) | {"accuracy": accuracy}
        for name, both in right.items()
        for seed, accuracy in enumerate(both)
        for task in RECALL
    ]
    asked = {
        (task, name)
        for task, name in itertools.product(RECALL, CONDITIONS)
        if core_plan.is_asked(runs, name, task, SETTINGS[1])
    }
    assert asked == {("recall", "Interdomain"), ("recall", "S4D-only")}
    assert core_plan.is_asked([], "Mamba-2", "copying", SETTINGS[0])
    table = core_table.recall_table(runs, {})
    assert f"| Mamba-2 | 1,024 | {(found := '49.0%, 40.0% (0.003)')} | - | - | - | {found} | {found} |" in table
    assert (
        f"| Interdomain | 1,024 | {(found := '10.0%, 50.0% (0.003)')} | not run | - | - | {found} | {found} |" in table
    )


def test_the_tables_say_where_interdomain_stands():
    runs = []
    while missing := [item for item in core_plan.plan(runs, SHORTER) if done(item) not in runs]:
        runs += [done(item) for item in missing]
    for row in runs:
        if row["condition"].startswith("Gated DeltaNet") and row["task"] in list(SIZES)[1:]:
            row["validation"] = {text: nats + math.log(1.1) for text, nats in row["validation"].items()}
    records = NOTHING | {"core_study": {"runs": runs, "machine": MACHINE}}
    table = core_table.table(records)
    assert "At 3M the best form is Interdomain: its perplexity is 0.0% above that of" in table
    assert "9.1% below that of Gated DeltaNet" in table
    assert f"| Mamba-2 | 1,024 |{6 * ' 50.0%, 50.0% (0.003) |'}\n" in table, (
        "four settings, then two tasks at the first"
    )
    right = core_table.right_answers(runs, "overwritten", SETTINGS[0])
    assert list(right.items())[:2] == [("Interdomain", 0.5), ("Interdomain, gates", 0.5)]
    sentence = core_table.short_sentence(records)
    assert "1.4M +0.0%, 3M on 2M tokens -9.1%, 3M -9.1%, 12M -9.1%" in sentence and "(behind)" not in sentence
    assert sentence.endswith(
        "; of 64 pairs in 512 tokens its best form recalls, by seed, 50% and 50%, Gated DeltaNet 50% and 50%."
    )
    assert table.count("0.0015: 4.693, 0.003: 4.000") > 3 and "Not run: language (" in table
    ours = core_plan.KNOWN[LANGUAGE][1]
    runs[:] = [row for row in runs if row["task"] != LANGUAGE or row["condition"] not in ours]
    assert core_table.table(records | SHORTER).count("Not run: language, a second") == 1


def each_of_size(monkeypatch, size: core_conditions.Size) -> None:
    """Let every size be this one, for all modules that have read the table of them."""
    for task in SIZES:
        monkeypatch.setitem(SIZES, task, size)


def tiny(monkeypatch) -> dict:
    """Sizes of a second, and texts for them."""
    training = {"steps": 2, "batch_size": 2, "sequence_length": 8}
    each_of_size(monkeypatch, core_conditions.Size(TINY, training))
    monkeypatch.setattr(recall_study, "SHAPE", TINY)
    monkeypatch.setattr(recall_study, "EVERY", 2)
    monkeypatch.setattr(condition_study, "WINDOWS", 4)
    tokens = torch.randint(48, (200,), generator=torch.Generator().manual_seed(0))
    texts = ("wiki", "books", "wikitext-2")
    data = {"train": tokens, "validation": dict.fromkeys(texts, tokens[:50]), "bytes": dict.fromkeys(texts, 150)}
    return data | {"long": tokens}


def test_runs_have_what_the_tables_read(monkeypatch):
    """Of language and of a recall task; what has no run, or one rate, is named below."""
    data, name = tiny(monkeypatch), "Gated DeltaNet"
    items = [core_plan.language_item(name, seed=seed) for seed in (0, 1)]
    runs = [item | row for item, row in zip(items, core_runs.run_job(items, data))]
    assert runs[0]["validation"] != runs[1]["validation"] and list(runs[0]["places"]) == ["0"]
    item = core_plan.recall_item(name, "overwritten", (3, 24))
    (row,) = core_runs.run_job([item], data, steps=4)
    runs.append(item | row | {"pairs": 8, "length": 64})
    assert list(row["curve"]) == ["2", "4"] and row["state_bytes"] == 4 * 2 * 2 * (16 * 64 + 3 * (16 + 16 + 64))
    assert row["machine"].endswith(torch.__version__) and "backend" not in row
    other = core_plan.language_item("Interdomain")
    for wanted, backend in ((None, ["chunk", name]), ("chunk", ["chunk", name, "Interdomain"]), ("chunk", ["chunk"])):
        assert core_runs.run_job([other], data, backend=backend)[0].get("backend") == wanted
    table = core_table.table(NOTHING | {"core_study": {"runs": runs, "machine": MACHINE}})
    assert f"| {name} | {runs[0]['parameters']:,} |" in table and "0.003, not bracketed" in table
    assert "language, rates (Gated DeltaNet)" in table and "copying (all)" in table
    found = f"not run | - | - | - | {row['accuracy']:.1%} (0.003) | not run |"
    assert f"| {name} | {row['state_bytes']:,} | {found}" in table
    (others,) = re.findall(r"overwritten \((.*?)\)", table)
    assert "Mamba-2" in others and "Gated DeltaNet;" not in others


def test_a_quiet_first_layer_in_language_stands_beside_the_same_without(monkeypatch, tmp_path):
    """It begins as `core_study` begins but for the C of that layer, and does not take up a run of that."""
    data, begun, run_language = tiny(monkeypatch), [], core_runs.run_language

    def noted(fleet, job, texts):
        weights = {name: x.clone() for name, x in fleet.models[0].state_dict().items()}
        begun.append((studies.checksum(job), weights))
        return run_language(fleet, job, texts)

    monkeypatch.setattr(core_runs, "run_language", noted)
    monkeypatch.setattr(core_runs, "texts_of", lambda task, folder: data)
    (planned,) = (x for x in recall_layers.plan([]) if (x.get("language"), x["seed"]) == (REFERENCE, 0))
    item = core_plan.language_item(REFERENCE)
    quiet = planned | recall_layers.make_run(tmp_path)(**planned)
    plain = item | core_runs.run_job([item], data)[0]
    (one, first), (other, second) = begun
    changed = [name for name, x in first.items() if not x.equal(second[name])]
    assert changed == ["model.layers.0.token_mixer.recurrence.C"] and one != other
    torch.testing.assert_close(first[changed[0]], second[changed[0]] / 10)

    known = [plain | {"condition": name} for name in recall_layers.IN_LANGUAGE]
    monkeypatch.setattr(studies, "load", lambda file, fresh: {"runs": known if file.stem == "core_study" else []})
    table = recall_layers.language_table({"runs": [quiet]})
    losses = [condition_study.score(row) for row in (plain, quiet)]
    assert f"| {REFERENCE} | {losses[0]:.3f} | {losses[1]:.3f} | {losses[1] - losses[0]:+.3f} |" in table
    assert table.count("\n| ") == 1


RULES = {
    "gated": (peers.qwen3_next.torch_chunk_gated_delta_rule, delta_rules.gated_delta_rule),
    "kimi": (peers.kimi_linear.chunk_kimi_delta_attention, delta_rules.kimi_delta_rule),
}


@pytest.mark.parametrize("kind", RULES)
def test_the_delta_rules_are_those_of_transformers(kind):
    """Outputs and gradients, at lengths that no chunk divides, from weak decays to those that leave nothing, and
    under autocast no further from float32 than theirs; states are refused."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.rand(*shape, generator=generator)

    for length, most in ((150, 0.1), (7, 0.1), (70, 8)):
        query, key, value = (drawn(2, length, 3, width) - 0.5 for width in (16, 16, 8))
        decays = -most * drawn(2, length, 3, *([16] if kind == "kimi" else []))
        inputs = [query, key, value, decays, drawn(2, length, 3)]
        weights = drawn(2, length, 3, 8) - 0.5

        def computed(rule, half: bool = False):
            given = [x.clone().requires_grad_() for x in inputs]  # noqa: B023, used at once
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                output, state = rule(*given, use_qk_l2norm_in_kernel=True)
            assert state is None
            return [output, *torch.autograd.grad((output * weights).sum(), given)]  # noqa: B023

        theirs, rule = RULES[kind]
        for exact, found, rounded, own in zip(
            computed(theirs), computed(rule), computed(theirs, half=True), computed(rule, half=True)
        ):
            assert found.shape == exact.shape and (found - exact).norm() <= 1e-5 * exact.norm()
            assert (own - exact).norm() <= 1.05 * (rounded - exact).norm()
    with pytest.raises(ValueError, match="pass no state and ask for none"):
        rule(*inputs, output_final_state=True)
    if kind == "kimi":
        with pytest.raises(ValueError, match="chunk_size must be a multiple of 8, the tokens of a block; got 12"):
            rule(*inputs, chunk_size=12, use_qk_l2norm_in_kernel=True)
    grouped = [inputs[0][:, :, :1], inputs[1][:, :, :1], *inputs[2:]]
    for given, normed in ((inputs, False), (grouped, True)):
        with pytest.raises(ValueError, match="a head of them for each head of values"):
            rule(*given, use_qk_l2norm_in_kernel=normed)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_layers_take_the_quicker_rules(on_gpu):
    """That of Kimi anywhere, that of Gated DeltaNet on a GPU, and compute the same; afterwards they take their own."""
    ids = torch.randint(48, (2, 70), generator=torch.Generator().manual_seed(0))

    def answers():
        return {name: peer(name)(ids, use_cache=False).logits for name in ("Gated DeltaNet", KIMI)}

    theirs = answers()
    with peers.quickened(on_gpu):
        found = answers()
    for name, expected in theirs.items():
        error = (found[name] - expected).norm() / expected.norm()
        assert (error > 0) == (on_gpu or name == KIMI) and error < 1e-5
    assert all(torch.equal(found, theirs[name]) for name, found in answers().items())


def test_a_run_is_measured_in_the_ways_that_kernels_know(monkeypatch):
    """In the dtype of training, and of Interdomain by PyTorch alone, whatever backend it was trained with."""
    data = tiny(monkeypatch)
    size = SIZES[LANGUAGE]
    half = size._replace(training=size.training | {"autocast": "bfloat16"})
    each_of_size(monkeypatch, half)
    backends = []

    def noted(*arguments, backend, **options):
        backends.append(backend)
        return interdomain_attention(*arguments, backend=backend, **options)

    fleet = core_runs.make_fleet([core_plan.language_item("Interdomain, gates")], backend="recurrent")
    for layer in fleet.models[0].model.layers:
        monkeypatch.setattr(layer.token_mixer.recurrence, "operators", SimpleNamespace(interdomain_attention=noted))
    found = core_runs.ways(fleet.models[0].eval(), data, 8, fleet.autocast)
    assert set(backends) == {"recurrent", "chunk"} and fleet.models[0].config.backend == "recurrent"
    assert found["measured"] == pytest.approx(found["chunk"], abs=1e-6)
    assert 1e-6 < abs(found["trained"] - found["measured"]) < 0.01
    (row,) = core_runs.run_job([core_plan.language_item("Gated DeltaNet")], data)
    assert list(row["ways"]) == ["measured", "trained"]


def test_a_run_of_recall_ends_when_it_is_solved_and_others_go_on(monkeypatch):
    data = tiny(monkeypatch)
    monkeypatch.setattr(recall_study, "SOLVED", 0.5)
    right = iter([1.0, 0.0, 1.0, 0.5, 0.0, 0.25, 0.25])  # at two looks, the end of the first, at two more, the other's
    monkeypatch.setattr(recall_study, "evaluate", lambda model, batches: (next(right), 1.0))
    items = [core_plan.recall_item("Interdomain", setting=(3, 24), seed=seed) for seed in (0, 1)]
    rows = core_runs.run_job(items, data, steps=6)
    assert rows[0]["accuracy"] == 0.5 and rows[0]["curve"] == {"2": 1.0, "4": 1.0}
    assert rows[1]["accuracy"] == 0.25 and list(rows[1]["curve"]) == ["2", "4", "6"]


def test_a_run_that_diverges_is_told_beside_one_that_does_not(monkeypatch):
    data = tiny(monkeypatch)
    items = [core_plan.language_item("Interdomain", rate) for rate in (3e-3, math.inf)]
    good, bad = core_runs.run_job(items, data)
    assert "validation" in good and bad["failed"] == "The loss is nan at step 2: try a smaller learning rate."


def test_longer_recall_begins_with_shorter():
    lengths = [
        batch.ids.shape[1] for batch in itertools.islice(core_tasks.training_batches("copying", 32, 256, 0), 251)
    ]
    assert lengths == [64] * 125 + [128] * 125 + [256]
    assert next(core_tasks.training_batches("copying", 16, 128, 0)).ids.shape[1] == 128


def test_side_by_side_is_what_training_alone_is():
    """Models with other seeds and rates, step for step."""
    tokens = torch.randint(48, (500,), generator=torch.Generator().manual_seed(0))
    rates = {0: 3e-3, 1: 1e-3}

    def made(seed):
        torch.manual_seed(seed)
        return InterdomainForCausalLM(InterdomainConfig(**TINY, **CONDITIONS["Interdomain, gates"].fields))

    models = [made(seed) for seed in rates]
    streams = [random_batches(tokens, 2, 8, seed) for seed in rates]
    batches = ([(next(stream),) for stream in streams] for _ in itertools.count())
    losses, failures = run_steps(SideBySide(models, list(rates.values()), next_token_loss), batches, 10)
    assert failures == [None, None]
    for k, (seed, rate) in enumerate(rates.items()):
        alone = made(seed)
        expected = [x.loss for x in train(alone, random_batches(tokens, 2, 8, seed), steps=10, learning_rate=rate)]
        assert losses[:, k].tolist() == expected
        assert all(map(torch.equal, alone.parameters(), models[k].parameters()))


def test_a_run_that_is_stopped_goes_on_where_it_was(monkeypatch, tmp_path):
    """It ends with the numbers of one that was not, and leaves no file; runs of other settings do not take it up."""
    data, items = tiny(monkeypatch), [core_plan.language_item("Interdomain, gates", seed=seed) for seed in (0, 1)]
    size = SIZES[LANGUAGE]
    longer = size._replace(training=size.training | {"steps": 6})
    each_of_size(monkeypatch, longer)
    monkeypatch.setattr(core_runs, "UNDER_WAY", tmp_path / "under" / "way")
    monkeypatch.setattr(side_by_side, "KEEP", 0.0)
    whole = core_runs.run_job(items, data)
    assert not list(tmp_path.rglob("*.*"))

    step, taken, stop_at = SideBySide.step, [], 4

    def counted(fleet, batches, factor):
        if len(taken) == stop_at:
            raise KeyboardInterrupt
        taken.append(factor)
        return step(fleet, batches, factor)

    monkeypatch.setattr(SideBySide, "step", counted)
    with pytest.raises(KeyboardInterrupt):
        core_runs.run_job(items, data)
    assert len(list(tmp_path.rglob("*.*"))) == 1
    stop_at = None
    core_runs.run_job([items[0] | {"learning_rate": 1e-3}], data)
    assert len(taken) == 10
    assert str(core_runs.run_job(items, data)) == str(whole) and len(taken) == 12  # a mean of nothing is no number
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU to capture a step on.")
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_captured_step_is_a_step(name, monkeypatch):
    """Of two models, on a GPU: for batches of two shapes, from the same weights, and what is kept of them is new."""
    tiny(monkeypatch)
    job = [core_plan.language_item(name, rate, seed) for rate, seed in ((3e-3, 0), (1e-3, 1))]
    fleets = [core_runs.make_fleet(job, "cuda", graph=graph) for graph in (True, False)]
    generator = torch.Generator().manual_seed(0)
    for length in (9, 9, 17, 9):
        batches = [(torch.randint(48, (2, length), generator=generator),) for _ in job]
        captured, single = (fleet.step(batches, 0.5).clone() for fleet in fleets)
        torch.testing.assert_close(captured, single, rtol=1e-3, atol=1e-3)
        fleets[0].counted()
        ids = batches[0][0].cuda()
        with torch.no_grad():
            logits = [fleet.models[0].eval()(ids, use_cache=False).logits for fleet in fleets]
        for fleet in fleets:
            fleet.models[0].train()
        torch.testing.assert_close(*logits, rtol=1e-2, atol=1e-2)
    assert fleets[0].graph and len(fleets[0]._captured) == 2


def test_what_is_asked_costs_what_recall_says():
    torch.manual_seed(0)
    model = peer("softmax, convolution")
    for task in RECALL:
        batch = next(core_tasks.make_batches(task, 3, 24, 0))
        batch = batch._replace(ids=batch.ids % 48, labels=None if batch.labels is None else batch.labels % 48)
        found = core_tasks.answers_loss(model, *core_tasks.asked_tensors(batch))
        torch.testing.assert_close(found, answers(model, batch).loss())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONS)
def test_every_condition_learns_the_shortest_task_a_little(name):
    """In a hundred steps each nearly knows that values are asked, which are half of the vocabulary."""
    torch.manual_seed(0)
    fields = core_conditions.fields_of(name, RECALL_SHAPE)
    model = InterdomainForCausalLM(InterdomainConfig(**fields | {"bos_token_id": None, "eos_token_id": None}))
    batches = core_tasks.make_batches("overwritten", 2, 16, 0)
    held_out = next(core_tasks.make_batches("overwritten", 2, 16, 1))
    recall_study.train_and_ask(model, batches, iter([held_out]), 100, 3e-3)
    assert answers(model, held_out).nats() < math.log(128) + 0.1
