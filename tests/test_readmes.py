"""The pages: links lead somewhere, tables and sentences say what the result files say, the map shows every room."""

import itertools
import math
import re
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks import (
    cheems_study,
    condition_study,
    core_conditions,
    core_plan,
    core_runs,
    core_study,
    core_table,
    headlines,
    joint_study,
    kernel_costs,
    kernel_resources,
    larger_study,
    lookup_study,
    more_tokens,
    prompt_reuse_cpu,
    readme,
    recall_layers,
    recall_study,
    sparse_cpu,
    speculation_study,
    studies,
)
from benchmarks.adapter_study import RATES
from benchmarks.harness import RESULTS, read
from benchmarks.readme import MARKED, PAGES
from benchmarks.recall_study import (
    BRACKETED,
    CONDITIONS,
    SETTINGS,
    best_rate,
    best_runs,
    has_learned,
    item,
    tried_rates,
)
from tests.pages import REPOSITORY, anchors, links, page_name, pages, prose

MAIN, CONTRIBUTING, SHAPES, INDEX = (
    REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "configuration/README.md", "benchmarks/README.md")
)
ALL = pages()
TABLES = [(file, table) for file in ALL for table in MARKED.findall(file.read_text())]
STUDIES = sorted(file for file in RESULTS.glob("*.md"))


def test_pages_are_found():
    assert {MAIN, CONTRIBUTING, SHAPES, INDEX, *STUDIES} <= set(ALL) and len(ALL) > 30
    assert {file for file, _ in TABLES} == {MAIN, *STUDIES} <= set(PAGES), "what --readme writes"


@pytest.mark.parametrize("file", ALL, ids=page_name)
def test_links_lead_somewhere(file):
    for target, anchor in links(file):
        assert target.exists(), f"{file} links to {target}"
        assert not anchor or anchor in anchors(target), f"{file} links to {target}#{anchor}"


def test_every_page_is_found_from_the_first():
    seen, waiting = set(), [MAIN]
    while waiting:
        file = waiting.pop().resolve()
        if file not in seen and file.suffix == ".md":
            seen.add(file)
            waiting += [target for target, _ in links(file)]
    assert seen == set(ALL) - {REPOSITORY / "model_cards" / "template.md"}


def test_what_code_says_of_a_page_is_there():
    """A path to a page in a comment, a docstring or a message, from the root of the repository."""
    named_pages = re.compile(r"\b(?:docs|benchmarks|examples|conversion|configuration|model_cards)/[\w/.-]+\.md\b")
    sources = [
        file for room in ("*", "[a-z]*/*", "modeling_interdomain/**/*") for file in REPOSITORY.glob(f"{room}.py")
    ]
    for file in sources:
        for page in named_pages.findall(file.read_text()):
            assert (REPOSITORY / page).exists(), f"{file} names {page}"


@pytest.mark.parametrize("file", [*ALL, *sorted(RESULTS.glob("*.json"))], ids=page_name)
def test_no_file_says_where_a_machine_keeps_its_files(file):
    """After a space, a quote, a bracket or "=", a slash begins a path from the root; one of the server's is none."""
    assert re.findall(r"(?:^|(?<=[\s\"'`(=\[]))/(?!v1/)\w[^\s\"'`)]*", file.read_text(), flags=re.MULTILINE) == []


def test_a_newcomer_reads_it_in_five_minutes():
    text = MAIN.read_text()
    assert text.count("\n") <= 100 and len(text.split()) <= 1000
    assert text.index("make quickstart") < text.index("make test") < 300


@pytest.mark.parametrize("file", ALL, ids=page_name)
def test_pages_are_short(file):
    size = file.stat().st_size
    assert size <= (6_144 if file == INDEX else 25_000)
    if file not in STUDIES:
        return
    text = file.read_text()
    if file.stem == "speed":  # tables that share a page
        assert all(len(prose(f"## {part}")) <= 7 for part in text.split("\n## ")[1:])
    else:
        assert len(prose(text)) <= 36


def test_every_study_is_in_the_index():
    assert {target.resolve() for target, _ in links(INDEX)} >= set(STUDIES)


@pytest.mark.parametrize(("file", "name"), TABLES, ids=[f"{file.stem}-{name}" for file, name in TABLES])
def test_tables_say_what_the_result_files_say(file, name):
    if name == "kernel_resources":
        pytest.importorskip("triton", reason="Triton is not installed on this machine.")
    written = next(match[0] for match in MARKED.finditer(file.read_text()) if match[1] == name)
    assert readme.fill(written) == written, "python -m benchmarks --readme writes the table anew"
    assert re.search(r"^\|(---\|)+$", written, flags=re.MULTILINE), "the line below a heading"


def test_every_result_has_its_table():
    assert [name for file, name in TABLES if file == MAIN] == ["headlines"]
    shown = {name: file for file, name in TABLES if file != MAIN}
    assert len(shown) == len(TABLES) - 1 and shown.keys() == {path.stem for path in RESULTS.glob("*.json")}
    own = {name: file.stem for name, file in shown.items() if file.stem not in ("speed", "gpu")}
    assert own == {study: study for study in own} and {name for name in shown if "study" in name} <= own.keys()


def test_headlines_follow_the_result_files():
    records = {source: read(source) for source in headlines.SOURCES}
    for source in ("operator_cpu", "model_cpu"):
        records[source]["machine"] = records["decode_cpu"]["machine"]
    records["decode_cpu"]["positions"][1] |= {"position": 7777, "median": 0.5, "bytes": 123_400_000}
    records["model_cpu"]["decode"][-1]["llama"]["tokens_per_second"] = 1234.56
    records["larger_study"]["training"] |= {"steps": 1000}
    records["larger_study"]["machine"] |= {"cpu": "another"}
    text = headlines.table(records)
    assert "then at 7,777" in text and "then 500.0 ms and 123.4 MB" in text and "then 1234.6" in text
    assert "after 2,048,000 tokens" in text and "\n\n1, 2, 3: " in text and "\n\n4, 5: another" in text
    assert len(re.findall(r"^\| \[\d\]", text, flags=re.MULTILINE)) == 6


# ------------------------------------------------------------------------------------------ sentences


def test_what_the_index_says():
    """Its figures in words; what it says without a figure is said again, and checked, below."""
    layer = {row["length"]: row.get("ratio") for row in read("operator_cpu")["forward"]}
    assert layer[1024] < 1 and round(layer[16384]) == 8
    early, late = read("model_cpu")["decode"][:2]
    assert (round(early["ratio"], 1), round(late["ratio"]), round(late["static_ratio"], 1)) == (1, 4, 1.8)
    assert round(early["static_ratio"], 1) == 0.9
    assert read("decode_cpu")["positions"][1]["position"] == 65_536
    assert read("rollback_cpu")["crop"]["ratio"] < 1
    taken = {way: times["median"] for way, times in read("batch_cpu")["times"].items()}
    assert round(taken["one by one"] / taken["refilled rows"]) == 2
    assert 1.3 < taken["padded batches"] / taken["refilled rows"] < 1.4, "a third"
    text = INDEX.read_text()
    larger = {}
    for row in read("larger_study")["runs"]:
        larger.setdefault(row["condition"], []).append(condition_study.score(row))
    ours, *others = (statistics.mean(larger[name]) for name in ("interdomain", "s4d", "softmax"))
    below = [round(100 * (1 - math.exp(ours - other))) for other in others]
    size = max(row["parameters"] for row in read("larger_study")["runs"]) / 1e6
    assert (
        f"{below[0]}% below S4D-only and {below[1]}% below softmax without a convolution at {size:.1f}M parameters"
        in text
    )
    recall = {
        name: statistics.median(row["accuracy"] for row in best_runs(read("recall_study")["runs"], name, SETTINGS[0]))
        for name in ("recall", "Interdomain")
    }
    assert f"{recall['recall']:.0%} of 8 pairs, a random start {recall['Interdomain']:.0%}" in text


def test_what_is_said_of_speed():
    layer, model, decode = read("operator_cpu"), read("model_cpu"), read("decode_cpu")
    speeds = {str(row["length"]): row["ratio"] for row in layer["forward"] if "ratio" in row}
    assert all(speeds[length] >= required for length, required in layer["required"].items())
    assert layer["spread_of_time_per_token"] <= 0.2
    assert model["prefill"][-1]["ratio"] > 1 < model["decode"][-1]["ratio"]
    assert model["prefill"][0]["ratio"] < 1, "at 512 tokens Llama reads faster"
    assert abs(model["decode"][0]["ratio"] - 1) < 0.05, "and writes within a few percent as fast"
    before = read("operator_before")
    assert all(row["ratio"] >= before["required"] for row in before["rows"])
    here = read("bf16_cpu")
    required = here["required"]
    tiles, vectors = (
        next(other for other in here["elsewhere"] if maker in other["machine"]["cpu"]) for maker in ("Intel", "AMD")
    )
    for record, share in ((here, 0.7), (tiles, 0.4)):
        products = sum(taken for name, taken in record["floor"].items() if name != "length")
        assert round(products / record["prefill"][1]["interdomain"]["median"], 1) == share
    assert all(record["prefill"][0]["ratio"] < 1 for record in (here, vectors, tiles))
    missed: set = {("prefill", 2048), ("prefill", 8192)}
    for record, expected in ((here, set()), (vectors, set()), (tiles, missed)):
        rows = [
            (kind, row.get("length", row.get("position")), row["ratio"]) for kind in required for row in record[kind]
        ]
        slow = {(kind, tokens) for kind, tokens, ratio in rows if ratio < required[kind].get(str(tokens), 0)}
        assert slow == expected
    rollback = read("rollback_cpu")
    assert rollback["crop"]["ratio"] <= 1 and rollback["generate"]["ratio"] >= 1.3
    assert round(rollback["crop"]["guess_ratio"], 1) == 2 and round(rollback["narrow"]["crop"]["guess_ratio"], 1) == 1.6
    reuse = read("prompt_reuse_cpu")
    turns, users = reuse["conversation"], reuse["users"]
    assert turns[-1]["ratio"] >= prompt_reuse_cpu.REQUIRED["turn"]
    assert min(row["ratio"] for row in users[2:]) >= prompt_reuse_cpu.REQUIRED["user"]
    assert users[1]["read"] == users[1]["prompt"] and max(row["read"] for row in users[2:]) < 64
    later = [row["with"]["median"] for row in turns[1:]]
    assert max(later) < 1.3 * min(later), "it does not grow with the text"
    experts = read("experts_cpu")["rows"]
    missed = {
        (row["shape"], row["pass"]): round(row["ratio"], 2) for row in experts if row["ratio"] < (row["required"] or 0)
    }
    assert missed == {("320M", "one token"): 0.64}
    assert all(row["ratio"] < 1 for row in experts if row["pass"] == "one token")
    early, late = decode["positions"]
    assert early["bytes"] == late["bytes"] and abs(decode["time_ratio"] - 1) < 0.05


def test_what_is_said_of_state_space_duality():
    record = read("ssd_cpu")
    rows, required = [*record["rows"], *record["steps"]], record["required"]
    assert all(row["mamba2"]["median"] >= required[row["what"]] * row["ours"]["median"] for row in rows)
    assert [(row["length"], row["threads"]) for row in record["steps"]] == [(1, 1), (1, 2)]
    longest = next(row for row in rows if row["length"] == 4096)
    assert longest["softmax"]["median"] >= required["softmax at 4,096"] * longest["ours"]["median"]


def test_what_is_said_of_dynamic_masks():
    record = read("dynamic_mask_cpu")
    (_, long), (early, late) = record["forward"], record["decode"]
    windowed = next(name for name in late if name.startswith("value, window"))
    for row in record["forward"]:
        assert row["position"]["median"] <= record["required"]["position"] * row["plain"]["median"]
        assert row["a mask tensor"]["median"] > 1.15 * row["plain"]["median"]
    longer = [row["position"]["median"] / row["plain"]["median"] for row in (early, late)]
    assert 1.05 < max(longer) < 1.15, "a single token takes up to a tenth longer"
    assert all(1 < row["Doge"]["median"] / row["value"]["median"] < 2 for row in (early, late))
    assert long[windowed]["median"] < long["a mask tensor"]["median"]
    assert late[windowed]["median"] < 1.25 * early[windowed]["median"] and late[windowed]["p20"] < late["value"]["p20"]
    assert early[windowed]["median"] > early["value"]["median"]


def test_what_is_said_of_sparse_attention():
    found = read("sparse_cpu")
    for name, required in sparse_cpu.REQUIRED.items():
        ratios = {row["length"]: row["ratio"] for row in found[name] if "ratio" in row}
        assert required.keys() == ratios.keys() and all(1 < ratios[length] < required[length] for length in required)
    assert found["spread_of_time_per_token"] > sparse_cpu.FLAT_WITHIN
    steps = [row["median"] for row in found["steps"]]
    assert max(steps) / min(steps) - 1 < sparse_cpu.STEP_FLAT_WITHIN
    assert {round(1e3 * step, 1) for step in steps} == {0.7}, "more than 0.4 ms"


def test_what_is_said_of_the_ways_to_compute_the_recurrence():
    rows = read("backends")["rows"]
    for length in {row["length"] for row in rows}:
        for key in ("forward", "forward_and_backward", "backward_bytes"):
            order = sorted((row[key], row["backend"]) for row in rows if row["length"] == length)
            assert [name for _, name in order[:2]] == ["chunk", "scan"]


def test_what_is_said_of_starts():
    runs = read("start_study")["runs"]

    def bits(name, size):
        return [row["bits_per_byte"] for row in runs if (row["condition"], row["size"]) == (name, size)]

    small = [f"zero-order hold, c {c}" for c in ("0.5", "0.25", "0.1")]
    small += [f"zero-order hold, c {c}" for c in ("0.25, RoPE before xi", "0.25, RoPE after xi", "0.1, RoPE after xi")]
    large = ["the paper's form: beta 1, c 1, RoPE before xi", "beta 1, c 0.25", "zero-order hold, c 1"]
    large += ["beta unit variance, c 0.25", "zero-order hold, c 0.25, output norm"]
    for size in ("1M", "2M"):
        assert max(b for name in small for b in bits(name, size)) < min(b for name in large for b in bits(name, size))
    ranges = [(min(bits(name, "1M")), max(bits(name, "1M"))) for name in small]
    assert all(one[0] <= other[1] for one, other in itertools.permutations(ranges, 2)), "within those of the seeds"


def test_what_is_said_of_denominators():
    rows = read("denominators")["rows"]
    fourier = [row for row in rows if row["features"] != "silu_l2"]
    assert {row["negative"] for row in fourier if row["start"].startswith("hermitian")} == {0}
    negative = [row["negative"] for row in rows if row not in fourier or row["start"].startswith("bilinear")]
    assert all(0.4 < share < 0.6 for share in negative)
    small = {row["start"]: row["small"] for row in fourier}
    assert small["hermitian, posterior, uniform modes, even steps"] < 0.03 < min(small["hermitian, C random"], 1)


def test_what_is_said_of_keys_written_twice():
    found = {(row["keys"], row["share"]): row for row in read("overwritten")["rows"]}
    sums, whole = ({n: found[n, d]["nearer"][0] for n in (4, 8, 16, 32)} for d in (0.0, 1.0))
    assert (round(min(sums.values()), 2), round(max(sums.values()), 2)) == (0.53, 0.6)
    assert round(whole[32], 2) == 0.96 and min(whole[n] for n in (4, 8, 16)) > 0.98
    assert all(sums[n] < found[n, 0.5]["nearer"][0] < whole[n] for n in whole)
    assert all(abs(found[n, 0.0]["last"][0] - found[n, 0.0]["first"][0]) < 0.05 for n in whole)


def test_what_is_said_of_what_fits_into_a_state():
    rows = read("capacity")["rows"]
    found = {(row["layout"], row["share"], row["pairs"], row["apart"]): row for row in rows}
    assert len({row["numbers"] for row in rows}) == 1
    usual, many, outer = "4 heads of 32, M = 32", "16 heads of 16, M = 16", "4 heads of 64 x 64, no modes"
    of_128 = {name: found[name, 0.0, 128, 1] for name in (usual, many, outer)}
    assert [round(of_128[usual][part], 2) for part in ("latest", "earlier")] == [0.95, 0.02]
    assert of_128[many]["latest"] > 0.95 and of_128[many]["earlier"] < 0.05
    assert round(of_128[outer]["all"], 2) == 0.99
    longer = found["4 heads of 16, M = 64", 0.0, 32, 4]["all"]
    assert longer > found[usual, 0.0, 32, 4]["all"] + 0.3 and found[usual, 0.0, 64, 1]["all"] > 0.95
    assert found[usual, 0.0, 32, 4]["all"] > found[many, 0.0, 32, 4]["all"] + 0.1
    shares = {name: [found[name, share, 128, 1]["all"] for share in (0.0, 1.0)] for name in (usual, many, outer)}
    assert all(with_rule < without for without, with_rule in shares.values())
    long = {"condition": "recall, short first", "pairs": 64, "length": 512}
    rows = [row for row in read("recall_study")["runs"] if long.items() <= row.items()]
    trained = {modes: [row["accuracy"] for row in rows if row["state_size"] == modes] for modes in (16, 32)}
    assert round(statistics.mean(trained[32]), 2) == 0.92 and max(trained[16]) < 0.5


DENSE = ("recall", 16, 64)


def test_what_is_said_of_recall():
    runs = [row for row in read("recall_study")["runs"] if (row["pairs"], row["learning_rate"]) == (8, 3e-3)]
    by_name = {name: [row for row in runs if row["condition"] == name] for name in {row["condition"] for row in runs}}
    start, random = by_name["recall"], by_name["Interdomain"]
    lead = [row for row in by_name["posterior, uniform, even"] if not row["shifted"]]
    assert sorted(row["accuracy"] > 0.99 for row in lead) == [False, True, True, True, True]
    assert max(row["accuracy"] for row in random) < 0.9
    assert {round(row["accuracy"], 1) for row in by_name["posterior, uniform, even, output 0.05"]} == {0.1}
    assert {row["theory"]["span"] for row in lead} == {64} and max(row["theory"]["span"] for row in random) < 5
    eight = [row for row in start if not row["shifted"]]
    assert len(eight) == 5 and min(row["accuracy"] for row in eight) > 0.99
    assert min(row["curve"]["125"] for row in eight) > 0.98
    dense = [row for row in read("recall_study")["runs"] if (row["condition"], row["pairs"], row["length"]) == DENSE]
    assert len(dense) == 5 and min(row["accuracy"] for row in dense) > 0.999
    plain = best_runs(read("recall_study")["runs"], "posterior, uniform, even", DENSE[1:])
    assert sorted(round(row["accuracy"], 1) for row in plain) == [0.1, 0.2, 1.0, 1.0, 1.0]
    longer = {
        row["state_size"]: row
        for row in read("recall_study")["runs"]
        if (row["condition"], row["pairs"], row["length"], row["learning_rate"]) == ("recall", 16, 128, 3e-3)
    }
    assert longer[16]["accuracy"] > 0.98 and longer[32]["accuracy"] > 0.99
    assert {round(longer[size]["accuracy"], 3) for size in (64, 128)} == {0.999}
    at_256 = [row for row in read("recall_study")["runs"] if row["length"] == 256]
    far = {row["state_size"]: row for row in at_256 if row["condition"] == "recall"}
    assert {size: (row["theory"]["span"], round(row["accuracy"], 2)) for size, row in far.items()} == {
        32: (64, 0.36),
        128: (255, 0.01),
    }
    by_rate = {
        name: sorted(1 - errors for errors, _ in tried_rates(read("recall_study")["runs"], name, SETTINGS[0]).values())
        for name in ("recall", "Interdomain", "S4D-only, uniform, even")
    }
    assert all(len(found) == 3 for found in by_rate.values()) and by_rate["recall"][0] > 0.998
    assert [round(x, 2) for x in by_rate["Interdomain"][::2]] == [0.01, 0.36]
    assert [round(x, 2) for x in by_rate["S4D-only, uniform, even"][::2]] == [0.02, 0.16]
    assert (longer[16]["theory"]["span"], longer[32]["theory"]["span"]) == (31, 64)
    shifted = [row for row in start if row["shifted"]]
    assert len(shifted) == 3 and min(row["accuracy"] for row in shifted) > 0.999
    softmax = [row for row in read("recall_study")["runs"] if (row["condition"], row["pairs"]) == ("softmax", 8)]
    assert max(row["accuracy"] for row in softmax) < 0.9
    assert max(row["accuracy"] for row in by_name["induction alone"]) < 0.2


def test_what_is_said_of_the_speed_of_gates():
    """Which rows are below what is required, to two digits, as the table has them."""
    record = read("gates_cpu")
    step = dict.fromkeys(record["required"], 1 / record["required_step"])
    required = {"training": record["required"], "step": step, "decode": step}
    below = {
        (key, row.get("length", row.get("batch")), side)
        for key, least in required.items()
        for row in record[key]
        for side, share in least.items()
        if row["ratios"][side] < share
    }
    missed = ("step", 1), ("step", 32), ("decode", 1)
    assert below == {(*case, "delta") for case in missed} | {("step", 1, "gates")}
    by = [1 / record["required_step"] - row["ratios"]["delta"] for row in (record["decode"][0], *record["step"])]
    gates = 1 / record["required_step"] - record["step"][0]["ratios"]["gates"]
    assert round(by[0], 2) == round(gates, 2) == 0.01 and by[0] < min(by[1:])


def test_what_is_said_of_the_layer_that_looks_up():
    runs = [row for row in read("recall_layers")["runs"] if "language" not in row]

    def shares(row, step, pairs, kind="as trained", age=0):
        """Right answers whole, without the first layer's mixer and without the second's; `age` 0: of any."""
        return [found[age] for found in row["looks"][str(step)][str(pairs)][kind].values()]

    def kept(row):
        """What is right of 32 pairs without each of the two layers, of what is right."""
        whole, *others = shares(row, 375, 32)
        return [share / whole for share in others]

    plain = [row for row in runs if row["condition"] == "as it is"]
    lost = [row for row in plain if kept(row)[0] < 0.05]
    found = [row for row in plain if kept(row)[1] < 0.05]
    assert len(lost) == 4 and len(found) == 8 and all(kept(row)[1] > 0.8 for row in lost)
    assert sorted((row["state_size"], row["seed"]) for row in lost) == [(16, 1), (64, 0), (64, 2), (128, 2)]
    ends = {
        (row["state_size"], row["seed"]): row["accuracy"]
        for row in read("recall_study")["runs"]
        if (row["condition"], row["length"]) == ("recall, short first", 512)
    }
    for size, least, most in ((16, 0.47, 0.18), (64, 0.94, 0.52), (128, 0.95, 0.791)):
        rows = [[ends[size, row["seed"]] for row in group if row["state_size"] == size] for group in (found, lost)]
        assert min(rows[0]) > least and max(rows[1]) < most
    costs = [[whole - first for whole, _, first in (shares(row, 125, 8) for row in rows)] for rows in (lost, found)]
    assert max(costs[0]) < 0.02 and min(costs[1]) > 0.04
    for kind, age, range_ in (
        ("as trained", 1, (0.81, 0.96)),
        ("as trained", 4, (0.02, 0.15)),
        ("answers hidden", 0, (0.69, 0.92)),
        ("as trained", 0, (0.28, 0.56)),
    ):
        without = [shares(row, 375, 32, kind, age)[1] for row in found]
        assert tuple(round(end, 2) for end in (min(without), max(without))) == range_
    of_32 = [row for row in plain if row["state_size"] == 32]
    alone = [
        [(round(first, 2), round(second, 2)) for _, second, first in (shares(row, *at) for row in of_32)]
        for at in ((125, 8), (250, 16))
    ]
    assert [pair for pair in alone[0] if pair[0] > pair[1]] == [(0.93, 0.77), (0.94, 0.8)]
    assert all(first < second for first, second in alone[1])
    assert {round(shares(row, 250, 16)[2], 2) for row in lost if row["state_size"] == 64} == {0.96}
    by_name = {name: [row for row in runs if row["condition"] == name] for name in {row["condition"] for row in runs}}
    second = by_name["second layer quiet"]
    assert len(second) == 3 and all(kept(row)[0] < 0.05 for row in second)
    whole = [round(shares(row, 375, 32)[0], 2) for row in second]
    assert [min(whole), max(whole)] == [0.56, 0.63]
    assert {round(shares(row, 375, 32)[0], 2) for row in found if row["state_size"] >= 64} == {0.95}
    assert [sum(kept(row)[0] < 0.05 for row in by_name[name]) for name in ("gates", "gates and delta rule")] == [0, 2]
    assert len(by_name["gates"]) == len(by_name["gates and delta rule"]) == 3
    one = {size: [row for row in by_name["one layer"] if row["state_size"] == size] for size in (32, 64)}
    assert [len(rows) for rows in one.values()] == [3, 3]
    at_256 = sorted(round(shares(row, 375, 32)[0], 2) for row in one[64])
    assert (at_256[0], at_256[-1]) == (0.53, 0.62)
    assert {round(shares(row, 375, 32)[0], 2) for row in lost if row["state_size"] == 64} == {0.6, 0.61}
    at_128 = {size: sorted(round(shares(row, 250, 16)[0], 2) for row in rows) for size, rows in one.items()}
    assert (at_128[32][0], at_128[32][-1], set(at_128[64])) == (0.81, 0.84, {0.96})
    hidden = by_name["trained with hidden answers"]
    assert len(hidden) == 3 and all(kept(row)[0] < 0.05 < 0.9 < kept(row)[1] for row in hidden)
    quiet = {(row["state_size"], row["seed"]): row for row in by_name["first layer quiet"]}
    assert quiet.keys() == set(itertools.product((64, 128), range(3)))
    assert all(kept(row)[1] < 0.05 for row in quiet.values())
    went_on = {which: round(row["accuracy"], 2) for which, row in quiet.items() if len(row["looks"]) == 16}
    assert went_on == {(64, 0): 0.94, (64, 2): 0.94, (128, 2): 0.98}
    assert [kept(row)[0] < 0.05 for row in by_name["both layers quiet"]] == [False, True, True]


def test_what_is_said_of_a_quiet_first_layer_in_language():
    quiet = [row for row in read("recall_layers")["runs"] if "language" in row]
    records = {name: read(name) for name in ("core_study", *core_study.OTHERS)}
    plain = core_table.best_language(records, "language")
    differences, spreads = [], []
    for name in recall_layers.IN_LANGUAGE:
        before = {row["seed"]: condition_study.score(row) for row in plain[name]}
        after = {row["seed"]: condition_study.score(row) for row in quiet if row["language"] == name}
        assert after.keys() == {0, 1, 2}
        differences.append([after[seed] - before[seed] for seed in after])
        spreads.append(max(before[seed] for seed in after) - min(before[seed] for seed in after))
    assert [round(statistics.mean(found), 3) for found in differences] == [-0.002, 0.002, 0.012]
    assert (round(min(spreads), 3), round(max(spreads), 3)) == (0.011, 0.033)
    assert [all(x > 0 for x in found) for found in differences] == [False, False, True]


def test_what_is_said_of_more_tokens():
    ours, peer, softmax = "Interdomain, gates", core_conditions.SPREAD, "softmax, convolution"
    many, without, rows = core_conditions.MANY_HEADS, core_conditions.GATES_MANY, read("more_tokens")["runs"]
    plain = core_conditions.REFERENCE
    loss = {name: {} for name in (ours, peer, softmax, many, without, plain)}
    for row in rows:
        loss[row["condition"]][row["seed"]] = condition_study.score(row)
    assert [sorted(loss[name]) for name in loss] == [[0, 1], [0, 1], [0], [0, 1], [0], [0]]
    on_intel = [(row["condition"], row["seed"]) in ((many, 0), (without, 0), (plain, 0)) for row in rows]
    assert ["Intel" in row["machine"] for row in rows] == on_intel

    def after(name, what, which, seeds=(0, 1)):
        return statistics.mean(row[what][which] for row in rows if row["condition"] == name and row["seed"] in seeds)

    records = {name: read(name) for name in core_study.SOURCES}
    few = more_tokens.same_seeds(core_table.losses(records, "language"), loss)

    def lag(losses, name, digits=3):
        return round(core_table.behind(losses, name, [peer])[peer], digits)

    assert (lag(few, ours), lag(loss, ours)) == (0.043, -0.016)

    def by_seed(name):
        return [lag({each: {0: loss[each][seed]} for each in (name, peer)}, name) for seed in (0, 1)]

    assert (by_seed(ours), by_seed(many)) == ([-0.022, -0.009], [-0.034, -0.006])
    assert (lag(few, many), lag(loss, many)) == (-0.023, -0.02)
    assert round(core_table.behind(loss, many, [ours])[ours], 3) == -0.004
    assert (lag(few, without), lag(loss, without)) == (0.014, 0.01)
    assert round(math.expm1(loss[without][0] - loss[many][0]), 3) == 0.045
    assert (lag(few, plain), lag(loss, plain)) == (0.12, 0.013)
    assert round(math.expm1(loss[plain][0] - loss[ours][0]), 3) == 0.036
    assert [round(after(name, "repeats", "other"), 2) for name in (many, peer)] == [4.07, 4.08]
    assert round(after(many, "ages", "1"), 2) == 3.87
    apart = [math.expm1(abs(loss[name][0] - loss[name][1])) for name in (ours, peer, many)]
    assert (round(min(apart), 3), round(max(apart), 3)) == (0.003, 0.026)
    assert (lag(few, softmax, 2), lag(loss, softmax, 2)) == (0.35, 0.17)
    assert [round(after(name, "ages", "1"), 2) for name in (ours, peer, plain)] == [3.55, 4.07, 3.55]
    assert [round(after(ours, "ages", "1", [seed]), 2) for seed in (0, 1)] == [3.34, 3.75]
    places = ("repeats", "other"), ("validation", "wiki"), ("validation", "books")
    assert [round(after(ours, *place) - after(peer, *place), 2) for place in places] == [0.02, 0.02, 0]
    assert after(ours, "repeats", "repeated") < after(peer, "repeats", "repeated")
    large = {task: core_table.best_language(records, task) for task in core_conditions.SHARDS}

    def looked_up(task, name):
        return [round(row["repeats"]["repeated"], 2) for row in large[task][name]]

    assert [[looked_up(task, name) for name in (ours, peer)] for task in core_conditions.SHARDS] == [
        [[3.42, 3.42], [3.41, 3.68]],
        [[2.87, 2.87], [2.61, 2.52]],
    ]
    each = [
        condition_study.tokens_of(core_conditions.SIZES[task].training)
        / core_table.best_language(records, task)[peer][0]["parameters"]
        for task in ("language", *core_conditions.SHARDS)
    ]
    assert [round(x, 1) for x in (*each, 8 * each[0])] == [0.7, 1.5, 4.6, 5.8]


def test_what_is_said_of_how_peers_are_run():
    fleet = core_runs.make_fleet([core_plan.recall_item(core_conditions.SPREAD, seed=1)])
    layer = fleet.models[0].model.layers[1].token_mixer.layer
    ages = 1 / (layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias))
    assert 2 < ages.min() <= ages.max() < 3, "tokens until a third is left"
    assert round(recall_study.guessed(8), 2) == 0.34
    costs = {"softmax, convolution": 0.08, "Mamba-2": 0.03, core_conditions.SPREAD: 0, core_conditions.MANY_HEADS: 0}
    for name, cost in costs.items():
        item = {"task": core_conditions.FEWER, "condition": name, "seed": 0}
        runs = [row for row in read("core_study")["runs"] if item.items() <= row.items()]
        loss = {row["learning_rate"]: condition_study.score(row) for row in runs}
        assert round(math.expm1(loss[0.0015] - min(loss.values())), 2) == cost


def test_what_is_said_of_the_parts_of_the_start_that_remembers():
    runs = read("recall_study")["runs"]

    def right(name, pairs, length, rate=3e-3, size=32, step=None, digits=2):
        """Answers at the end of a run with the first seed, or after a number of steps."""
        wanted = item(name, (pairs, length), rate, state_size=size)
        (row,) = (row for row in runs if wanted.items() <= row.items())
        return round(row["accuracy"] if step is None else row["curve"][step], digits)

    sizes = ((8, 64), (16, 64), (16, 128))
    without_c, others = "normal, uniform, even, output 0.02, induction", "hermitian, output 0.02, induction"
    assert [right(without_c, *size) for size in sizes] == [1.0, 1.0, 0.99]
    assert [right(name, 16, 128, step="125") for name in (without_c, "recall")] == [0.14, 0.3]
    assert [right(others, *size) for size in sizes] == [0.01, 0.43, 0.02]
    best = {
        name: best_runs(runs, name, (16, 128))[0]["accuracy"]
        for name in CONDITIONS
        if tried_rates(runs, name, (16, 128))
    }
    knowing = {name for name in best if name == "recall" or (name.endswith("induction") and "uniform" in name)}
    assert len(knowing) == 3 and min(best[name] for name in knowing) > 0.99
    assert best.keys() == CONDITIONS.keys() and all(best_rate(runs, name, (16, 128)) for name in best)
    by_name = {name: [row["accuracy"] for row in best_runs(runs, name, (16, 128))] for name in best}
    assert {len(seeds) for seeds in by_name.values()} == {3}
    few = {name for name in best if not has_learned(runs, name, SETTINGS[0])}
    assert len(few) == 6 and round(max(max(by_name[name]) for name in few), 2) == 0.22
    assert min(min(by_name[name]) for name in knowing) > 0.99
    found = {
        others: [0.98, 0.99, 0.23],
        "posterior, S4D-Lin": [0.94, 0.97, 0.03],
        "posterior, uniform, even": [0.21, 0.21, 0.87],
        "identity, uniform, even": [0.2, 0.97, 0.19],
        "normal, uniform, even": [0.21, 0.13, 0.94],
    }
    for name, expected in found.items():
        rows = sorted(best_runs(runs, name, (16, 128)), key=lambda row: row["seed"])
        assert [round(row["accuracy"], 2) for row in rows] == expected
    for name, ends in {"induction alone": (0.2, 0.22), "softmax": (0.19, 0.21)}.items():
        assert (round(min(by_name[name]), 2), round(max(by_name[name]), 2)) == pytest.approx(ends, abs=0.006)
    cores = {name for name in best if "SSD" in name or "HAX" in name}
    rest = best.keys() - knowing - cores - found.keys()
    assert max(max(by_name[name]) for name in rest) < 0.62
    plain = {
        "posterior, uniform, even": [0.92, 1.0],
        "identity, uniform, even": [0.34, 0.97],
        "normal, uniform, even": [0.36, 0.01],
        "hermitian": [0.96, 0.79],
        "posterior, uniform, even, output 0.05": [0.61, 0.11],
    }
    for name, found in plain.items():
        assert [right(name, 8, 64, rate) for rate in (1e-3, 3e-3)] == found
    shorter = [right("recall, short first", 32, 256, size=size) for size in (16, 32, 64)]
    assert shorter == [0.99, 0.99, 0.98]
    by_modes: dict[int, list[dict]] = {}
    for row in sorted(runs, key=lambda row: row["seed"]):
        if (row["condition"], row["length"]) == ("recall, short first", 512):
            by_modes.setdefault(row["state_size"], []).append(row)
    assert {size: [round(100 * row["accuracy"]) for row in rows] for size, rows in by_modes.items()} == {
        16: [49, 17, 47], 32: [91, 92, 92], 64: [52, 94, 52], 128: [95, 96, 79],
    }  # fmt: skip
    for size, late in {64: {0, 2}, 128: {2}}.items():
        assert {row["seed"] for row in by_modes[size] if row["curve"]["500"] < 0.5} == late
        assert all((row["curve"]["500"] > 0.76) is (row["seed"] not in late) for row in by_modes[size])
    assert round(sum(row["seconds"] for row in runs) / 3600) == 44
    controls = {
        "softmax": (1e-3, 0.1),
        "S4D-only, uniform, even": (3e-3, 0.09),
        "posterior, uniform, even": (3e-3, 0.04),
    }
    for name, (rate, found) in controls.items():
        assert right(f"{name}, short first", 32, 256, rate) == found
    assert [right(name, 8, 64, 1e-3) for name in ("induction alone", others)] == [0.34, 0.34]
    assert max(right(name, 8, 64, 1e-2) for name in ("identity, uniform, even", "normal, uniform, even")) < 0.1
    bracketed = [sum(best_rate(runs, name, setting) is not None for name in CONDITIONS) for setting in BRACKETED]
    assert (bracketed, len(CONDITIONS)) == ([31, 31], 31)

    def by_seed(name):
        found = [row["accuracy"] for row in best_runs(runs, name, SETTINGS[0])]
        return len(found), round(min(found), 2), round(max(found), 2)

    assert by_seed("posterior, uniform, even, output 0.05") == (3, 0.34, 0.61)
    assert by_seed("identity, uniform, even") == (3, 0.86, 0.98)
    assert by_seed("normal, uniform, even") == (3, 0.32, 0.76)
    assert by_seed("hermitian") == (3, 0.35, 0.96)
    assert by_seed("SSD") == (3, 0.01, 0.04)
    hax = ("SSD as in Mamba-2", "S4D-only, uniform, even", "Interdomain")
    first = {name: best_runs(runs, name, SETTINGS[0])[0] for name in (hax[0], *(f"{name}, HAX" for name in hax))}
    assert [by_seed(name) for name in first] == [(3, 0.13, 0.32), (3, 0.99, 1.0), (3, 0.7, 0.94), (3, 0.6, 0.76)]
    later = [(min(by_name[name]), max(by_name[name])) for name in first]
    assert [(round(low, 2), round(high, 2)) for low, high in later[::2]] == [(0.9, 1.0), (0.54, 0.79)]
    assert later[1][0] > 0.998 and [round(x, 2) for x in later[3]] == [0.38, 0.66]
    assert right(hax[0], 16, 128, 3e-3) == 0.01
    bytes_of = [best_runs(runs, name, SETTINGS[0])[0]["state_bytes"] for name in hax]
    more = sorted(first[f"{name}, HAX"]["state_bytes"] / kept for name, kept in zip(hax, bytes_of))
    assert (round(more[0], 1), round(more[-1], 1)) == (2.2, 3.3)
    assert right("recall, short first", 32, 256, size=128, digits=3) == 0.998


def test_what_is_said_of_the_papers_comparison():
    runs, longer = read("condition_study")["runs"], read("longer_study")["runs"]
    score = condition_study.score
    loss = {name: [score(row) for row in condition_study.best_runs(runs, name)] for name in condition_study.CONDITIONS}
    ours, s4d = loss["interdomain"], loss["s4d"]
    assert min(ours) < max(s4d) and min(s4d) < max(ours), "as close together as the seeds of each"
    started = {name: loss[f"{name}, recall"] for name in condition_study.RECURRENT}
    gain = {name: math.exp(min(loss[name]) - max(losses)) - 1 for name, losses in started.items()}
    assert len(started["interdomain"]) == len(started["s4d"]) == 2 and gain["interdomain"] > 0.08
    assert math.exp(max(started["interdomain"]) - min(started["s4d"])) < 0.96
    assert all(condition_study.best_rate(runs, name) and len(loss[name]) == 2 for name in loss)
    assert round(max(max(losses) - min(losses) for losses in loss.values()), 2) == 0.05
    assert min(gain["interdomain-norope"], gain["single-input"]) > 0.09
    assert 0 < gain["s4d"] < 0.05 < gain["linear-readout"] and gain["s4d-rope"] < 0
    posterior = {
        name: statistics.mean(loss[name]) - statistics.mean(loss[f"{name}, posterior"])
        for name in ("interdomain", "s4d")
    }
    assert round(math.exp(posterior["interdomain"]) - 1, 2) == 0.03 and posterior["s4d"] < 0
    assert min(loss["softmax"]) > max(loss_ for name in loss if name != "softmax" for loss_ in loss[name])
    late = {row["condition"]: row for row in longer}
    assert score(late["s4d"]) < score(late["interdomain"]) < score(late["softmax"])
    change = {name: math.exp(row["lengths"]["3.5"] - row["lengths"]["1.0"]) - 1 for name, row in late.items()}
    assert abs(change["s4d"]) < 0.01 > abs(change["interdomain"]) and change["softmax"] > 0.1


def test_what_is_said_of_the_papers_comparison_at_the_largest_size():
    runs = {name: [] for name in larger_study.CONDITIONS}
    for row in read("larger_study")["runs"]:
        runs[row["condition"]].append(row)
    loss = {name: [condition_study.score(row) for row in rows] for name, rows in runs.items()}
    assert max(loss["interdomain"]) < min(loss["s4d"]) and max(loss["s4d"]) < min(loss["softmax"])
    less = statistics.mean(loss["s4d"]) - statistics.mean(loss["interdomain"])
    shorter = read("condition_study")["runs"]
    smaller = {
        name: statistics.mean(map(condition_study.score, condition_study.best_runs(shorter, f"{name}, recall")))
        for name in ("interdomain", "s4d")
    }
    assert less < smaller["s4d"] - smaller["interdomain"] and round(100 * (1 - math.exp(-less))) == 4

    def nats(name, *keys):
        return statistics.mean(row[keys[0]][keys[1]] for row in runs[name])

    ours, s4d, softmax = (nats(name, "repeats", "repeated") for name in runs)
    assert 1 / 7 < s4d - ours < 1 / 5 and 0.4 < (softmax - ours) / (s4d - ours) < 0.6
    others = nats("s4d", "repeats", "other") - nats("interdomain", "repeats", "other")
    share = nats("s4d", "repeats", "share")
    assert 1 / 50 < others < 1 / 30 and share * (s4d - ours) > (1 - share) * others, "most of it"
    assert 1 / 60 < nats("s4d", "places", "0") - nats("interdomain", "places", "0") < 1 / 30, "a fortieth, too"
    change = {name: nats(name, "lengths", "3.5") - nats(name, "lengths", "1.0") for name in runs}
    assert max(change["interdomain"], change["s4d"]) < 0.01 and abs(math.exp(change["softmax"]) - 5 / 3) < 0.05


def test_what_is_said_of_joint_recall():
    runs = read("joint_study")["runs"]

    def seeds(name: str, core: str) -> list[float]:
        return [row["accuracy"] for row in studies.best_runs(runs, {"condition": name, "core": core}, 0)]

    def right(name: str, core: str) -> float:
        return statistics.mean(seeds(name, core))

    def spread(name: str, core: str) -> float:
        return max(seeds(name, core)) - min(seeds(name, core))

    by_content, by_place = ("+KS", "+HAX"), ("+D", "+SW", "+SW+D", "+A")
    for core in joint_study.CORES:
        assert all(len(seeds(name, core)) == 2 for name in joint_study.CONDITIONS)
        assert min(seeds("+HAX", core)) > max(seeds("base", core))
        assert right("+LSH", core) > right("base", core) - 0.01
        least = min(right(name, core) for name in by_content)
        assert least > max(right(name, core) for name in joint_study.CONDITIONS if name not in by_content)
    assert min(seeds("+KS", "interdomain")) > max(seeds("+HAX", "interdomain"))
    for core in ("ssd", "s4d"):
        assert right("+HAX", core) > 2 * right("base", core) and right("+HAX, random", core) < 2 / 3 * right(
            "+HAX", core
        )
        assert abs(right("+KS", core) - right("+HAX", core)) < max(spread(name, core) for name in by_content)
    assert right("+LSH", "ssd") > 1.9 * right("base", "ssd")
    assert max(joint_study.CORES, key=lambda core: right("+SW", core) - right("base", core)) == "s4d"
    wider = {core: right("base, 2x width", core) - right("base", core) for core in joint_study.CORES}
    assert round(wider.pop("ssd"), 2) == 0.18 and max(wider.values()) < 0.05
    assert right("base", "interdomain") > max(right(name, "ssd") for name in by_place)
    assert right("+HAX, random", "interdomain") < right("base", "interdomain")
    assert (
        round(spread("base", "ssd"), 1)
        == 0.2
        == round(max(spread(*x) for x in itertools.product(joint_study.CONDITIONS, joint_study.CORES)), 1)
    )


def test_what_is_said_of_lookups():
    runs = read("lookup_study")["runs"]

    def right(task: str) -> dict[str, list[float]]:
        found = {
            name: [row["accuracy"] for row in studies.best_runs(runs, {"task": task, "condition": name}, 0)]
            for name in lookup_study.CONDITIONS
        }
        assert all(len(seeds) == len(lookup_study.SEEDS) for seeds in found.values())
        return found

    ours = ("Interdomain", "Interdomain + HAX")
    book, needle, copying = map(right, ("phone book", "needle", "copying"))
    assert all(min(book[name]) > 0.99 and min(needle[name]) > 0.99 for name in ours) and min(needle["Interdomain"]) == 1
    assert all(round(x, 1) == 0.9 for name in ours for x in copying[name])
    assert max(max(x) for name, x in copying.items() if name not in ours) < min(copying["Interdomain + HAX"])
    random = "Interdomain, random start"
    assert max(needle[random]) < 0.03
    assert all(max(task[random]) > 0.8 and min(task[random]) < 0.6 for task in (book, copying))
    assert 0.3 < min(book["S4D-only"]) <= max(book["S4D-only"]) < 0.4 and min(book["S4D-only + HAX"]) > 0.95
    assert max(book["SSD"]) < 0.02 and min(book["SSD + HAX"]) > 0.8
    assert min(needle["softmax"]) == 1 and max(book["softmax"]) < 0.36
    assert max(needle["S4D-only"]) < 0.03 and min(needle["SSD"]) < 0.03 and 0.5 < max(needle["SSD"]) < 0.6
    assert min(needle["S4D-only + HAX"] + needle["SSD + HAX"]) == 1


def test_what_is_said_of_cheems():
    runs = read("cheems_study")["runs"]

    def nats(part: str, condition: str) -> list[float]:
        found = [row for row in runs if (row["part"], row["condition"]) == (part, condition)]
        return [condition_study.score(row) for row in sorted(found, key=lambda row: row["seed"])]

    def more(part: str, first: str, second: str) -> float:
        """Perplexity of the first over the second, less 1."""
        return math.exp(statistics.mean(nats(part, first)) - statistics.mean(nats(part, second))) - 1

    rows = [name for name in cheems_study.PAPER_ENCODINGS if name != "softmax"]
    for name in rows:
        pairs = zip(nats("encodings", f"{name}, rope"), nats("encodings", f"{name}, conv"), strict=True)
        assert all(rope < conv for rope, conv in pairs)
        assert 0.01 < more("encodings", f"{name}, decay", f"{name}, rope") < 0.07
        assert more("encodings", f"{name}, decay", f"{name}, conv") < 0
        assert more("encodings", "softmax, rope", f"{name}, rope") > 0.3
    assert more("encodings", "SSD + softmax, rope", "SSD, rope") > 0.03
    inner, masked = "SSD + inner function, rope", "SSD + inner function + dynamic mask, rope"
    assert -0.02 < more("encodings", inner, "SSD, rope") < 0 < more("encodings", masked, inner)
    assert abs(more("placements", "the first", "none")) < 0.01
    assert round(more("placements", "all eight", "none"), 1) == 0.2
    spread = {
        name: math.exp(max(x) - min(x)) - 1 for name in cheems_study.PLACEMENTS for x in [nats("placements", name)]
    }
    assert 1 / 8 < max(spread.values()) < 1 / 6

    def right(name: str, shift: int, widths=cheems_study.WIDTHS) -> list[float]:
        names = {f"{name}, {width}" for width in widths}
        wanted = {"part": "recall", "shift": shift}
        return [row["accuracy"] for row in runs if wanted.items() <= row.items() and row["condition"] in names]

    solved = {name: sum(x > 0.99 for x in right(name, 0)) for name in cheems_study.RECALL}
    assert solved["softmax"] == 5 < solved["inner function + dynamic mask"] and solved["SSD"] == 0
    assert min(right("softmax", cheems_study.SHIFT)) > 0.99
    narrow, wide = cheems_study.WIDTHS[:2], cheems_study.WIDTHS[2:]
    for name in ("inner function", "inner function + dynamic mask"):
        assert min(right(name, cheems_study.SHIFT, narrow)) > 0.99 > max(right(name, cheems_study.SHIFT, wide))


def test_what_is_said_of_guessing_ahead():
    rows = {
        (run["layers"], *(row[x] for x in ("model", "choice", "way"))): row
        for run in read("speculation_study")["runs"]
        for row in run["ways"]
    }
    gain = {
        key: rows[(*key[:3], "plain")]["seconds"]["median"] / row["seconds"]["median"]
        for key, row in rows.items()
        if key[3] != "plain"
    }
    lookups = [f"prompt lookup, {n}" for n in speculation_study.CANDIDATES]
    first = ["first layers", f"first layers, {speculation_study.DRAFTED}"]

    narrow, wide = (8, 16), (12,)

    def span(model, choice, ways, depths):
        found = [gain[depth, model, choice, way] for depth in depths for way in ways]
        return round(min(found), 2), round(max(found), 2)

    every = narrow + wide
    assert span("interdomain", "greedy", lookups, every) == (1.1, 1.53)
    assert span("softmax", "greedy", lookups, every) == (1.41, 1.98)
    nothing = {key: row for key, row in rows.items() if key[2] == "sampled" and key[3] in lookups}
    assert all(row["tokens_per_forward"] < 1.005 for row in nothing.values())
    assert span("interdomain", "sampled", lookups, every) == (0.96, 1.06)
    assert span("softmax", "sampled", lookups, every) == (0.89, 0.99)
    assert span("interdomain", "greedy", first, narrow) == (0.94, 1.03)
    assert span("interdomain", "sampled", first, [16]) == (1.05, 1.18)
    assert max(abs(gain[8, "interdomain", "sampled", way] - 1) for way in first) < 0.035
    assert span("softmax", "sampled", first, [16]) == (1.34, 1.38)
    assert span("interdomain", "greedy", first, wide) == (1.04, 1.07)
    assert span("interdomain", "sampled", first, wide) == (1.23, 1.23)
    assert span("softmax", "greedy", first, wide) == (1.04, 1.12)
    assert span("softmax", "sampled", first, wide) == (1.39, 1.43)
    for depth, way in itertools.product(every, lookups):
        mine, theirs = (rows[depth, model, "greedy", way]["tokens_per_forward"] for model in ("interdomain", "softmax"))
        assert theirs > 1.05 * mine


def test_what_is_said_of_adapters():
    runs = read("adapter_study")["runs"]
    first = next(row["losses"] for row in runs if row["method"] == "none")

    def losses(method: str, length: str) -> list[float]:
        by_rate = {
            rate: [x for x in runs if (x["method"], x["learning_rate"]) == (method, rate)] for rate in RATES[method]
        }
        best = min(by_rate.values(), key=lambda rows: statistics.mean(row["losses"]["128"] for row in rows))
        return [row["losses"][length] for row in best]

    learned = {method: statistics.mean(losses(method, "128")) for method in RATES}
    assert learned["LoRA"] < learned["state"] - 0.05 and abs(learned["state"] - learned["prompt"]) < 0.01
    assert min(losses("prompt", "1024")) > first["1024"] > max(losses("state", "1024")) > first["1024"] - 0.01


def test_what_is_said_of_joined_and_cut_states():
    for row in read("spans_study")["runs"]:
        for kind, (ours, bound) in {"join": ("joined", "second alone"), "cut": ("cut", "not cut")}.items():
            near, far = (row[kind][name]["errors"][-1] for name in (ours, bound))
            assert 0.2 < near / far < 0.45 and (0.045 < near < 0.065 or row["length"] < 128)
            assert all(abs(row[kind][name]["nats"] - row[kind]["read"]["nats"]) < 0.003 for name in (ours, bound))


def test_what_is_said_of_images_conversion_and_kernels():
    accuracy = {row["condition"]: row["accuracy"] for row in read("image_study")["runs"]}
    names = ("shared-shifted", "shared-fourier", "per-head-shifted", "per-head-fourier", "softmax-bidirectional")
    language = ("language layer, random", "language layer, recall")
    started = {
        name: accuracy.pop(f"{name}, recall") - accuracy[name] for name in ("shared-fourier", "per-head-fourier")
    }
    assert sorted(accuracy, key=accuracy.get) == [*names, "softmax-causal", *language]
    assert [round(100 * x) for x in started.values()] == [-7, -6]
    assert round(100 * (accuracy[language[1]] - accuracy[language[0]])) == 2
    found = read("conversion_study")["perplexity"]
    assert found["source, trained on"] < found["fine-tuned"] < 1.05 * found["source"]
    costs = read("kernel_costs")
    operations = [costs[when]["backward"]["matrix"] for when in ("before", "sums")]
    assert round(1 - operations[1] / operations[0], 1) == 0.3
    product = 2 * 64 * 64  # of one token and head with a plane; seven for each side, where one term would take four
    assert (operations[1], operations[1] - 2 * 3 * product) == (466_944, 417_792)
    assert costs["counts"]["backward"]["mix"]["matrix"] == 2 * 7 * product
    paces = [kernel_costs.paced(costs, ("forward", "backward"), anchor) for anchor in kernel_costs.ANCHORS]
    assert paces[1] < 5.0 < 7.0 < paces[0] < 40.0 / 4
    rows = read("kernel_resources")["rows"]
    kernels = {(row["problem"], row["kernel"], row["target"]) for row in rows if row["problem"] == "1.3B head, bf16"}
    assert kernels == {(row["problem"], row["kernel"], row["target"]) for row in rows if row["fits"]} & kernels
    spilled: dict[tuple, int] = {}
    blocks: dict[str, int] = {}
    crowded: dict[str, int] = {}
    for row in rows:
        if row["target"] in ("sm_90", "sm_100"):
            key = row["problem"], row["kernel"], row["target"]
            spilled[key] = min(row["spills"], spilled.get(key, row["spills"]))
        if row["target"] == "sm_90" and row["problem"] == "1.3B head, bf16" and "skewed" not in row["kernel"]:
            fit = kernel_resources.blocks_a_multiprocessor(row, kernel_resources.CHIPS["sm_90"])
            blocks[row["kernel"]] = max(fit, blocks.get(row["kernel"], 0))
            if row["registers"] > 168 and row["warps"] == 4:
                crowded[row["kernel"]] = row["registers"]
    assert {problem for problem, _, target in spilled if target == "sm_100"} == set(kernel_resources.PROBLEMS)
    assert set(spilled.values()) == {0}
    assert min(blocks.values()) == 2
    assert crowded == {"attend, tiles of 32": 200}
    assert blocks["attend, tiles of 32"] == 2 and blocks["attend, tiles of 16"] == 3
    a100 = [row for row in rows if row["target"] == "sm_80" and row["problem"] == "1.3B head, bf16"]
    fewest = {row["kernel"]: min(x["spills"] for x in a100 if x["kernel"] == row["kernel"]) for row in a100}
    few = "tables", "attend, tiles of 16", "attend, skewed"
    assert {name for name, spills in fewest.items() if spills} == {*few, "push_both, skewed"}
    assert max(fewest[name] for name in few) == 2
    units = {"sm_90": "wgmma", "sm_100": "tcgen05"}
    products = [row for row in rows if row["problem"] == "1.3B head, bf16" and any(row["matrix"].values())]
    multiply = {row["kernel"].split(",")[0] for row in products}
    assert multiply >= {"chunk_states", "chunk_states_backward", "attend", "push_both"}
    for row in products:
        used = {name for name, count in row["matrix"].items() if count}
        assert row["target"] not in units or used == {units[row["target"]]}


# ------------------------------------------------------------------------------------------ the map


def section(file: Path, title: str) -> str:
    return file.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """What stands as code in the first column of a table, or is the text of its link."""
    cells = re.findall(r"^\| ([^|]*) \|", text, flags=re.MULTILINE)
    return [
        found for cell in cells for found in re.findall(r"`([^`]+)`|\[([^\]]+)\]\(", cell) for found in found if found
    ]


def test_the_map_names_every_folder_and_every_room():
    folders = {f"{path.parent.name}/" for path in REPOSITORY.glob("[a-z]*/*.py")} | {"configuration/", "recipes/"}
    assert set(first_cells(section(CONTRIBUTING, "Folders"))) == folders - {"runs/"}
    package = REPOSITORY / "modeling_interdomain"
    rooms = {f"{path.parent.relative_to(package).as_posix()}/" for path in package.glob("*/**/*.py")}
    entries = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    named = first_cells(section(CONTRIBUTING, "Rooms of the package"))
    assert sorted(named) == sorted(rooms | entries), "each room once"


def test_the_map_names_files_that_are_there():
    package = REPOSITORY / "modeling_interdomain"
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", CONTRIBUTING.read_text()):
        assert (package / path).exists() or (REPOSITORY / path).exists(), path
    for page in ("docs/how-it-works.md",):
        for path in re.findall(r"`((?:\w+/)+\w+\.py)`", (REPOSITORY / page).read_text()):
            assert (package / path).exists(), path


def test_every_configuration_is_named():
    patterns = re.findall(r"`((?:[a-z0-9]|-|\.|\{[^}]*\})+)`", section(SHAPES, "The folders"))
    shapes = set()
    for pattern in patterns:
        parts = [part.strip("{}").split(",") for part in re.findall(r"\{[^}]*\}|[^{]+", pattern)]
        shapes |= {"".join(choice) for choice in itertools.product(*parts)}
    assert {path.parent.name for path in (REPOSITORY / "configuration").glob("*/config.json")} == shapes
