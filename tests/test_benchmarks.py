"""The benchmarks measure what they say, and refuse to show the speed of something wrong."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import (
    batch_cpu,
    bf16_cpu,
    capacity,
    core_cpu,
    decode_cpu,
    decode_gpu,
    denominators,
    dynamic_mask_cpu,
    experts_cpu,
    gates_cpu,
    gpu,
    gpu_day,
    harness,
    model_cpu,
    models_before,
    operator_cpu,
    operator_gpu,
    overwritten,
    prefill_memory_gpu,
    prompt_reuse_cpu,
    readme,
    selective_scan_cpu,
    sparse_cpu,
    ssd_cpu,
    start_study,
    training_gpu,
)
from modeling_interdomain import interdomain_attention
from modeling_interdomain.feed_forwards.cross_domain_moe import CrossDomainMoE


def percentiles_are_ordered(times):
    return 0 < times["p20"] <= times["median"] <= times["p80"]


def test_operator_table(monkeypatch, tmp_path):
    record = {**operator_cpu.run(quick=True), "machine": harness.machine()}
    for row in record["forward"] + record["forward_and_backward"]:
        assert percentiles_are_ordered(row["interdomain"]) and percentiles_are_ordered(row["softmax"])
        assert row["ratio"] == row["softmax"]["median"] / row["interdomain"]["median"]
    assert operator_cpu.table(record).count("\n|") == len(record["forward"]) + len(record["forward_and_backward"]) + 1
    operator_cpu.plot(record, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("repository", "typed", "written"),
    [
        ("/srv/project", "/srv/shared/data", "../shared/data"),
        ("/srv/project", "../shared/data", "../shared/data"),
        ("/srv/project", "--data=/srv/project/runs/my texts", "'--data=runs/my texts'"),
        ("/srv/project", "/home/me/data", "~/data"),
        ("/srv/project", "--data=/home/me/my texts", "--data=~/'my texts'"),
        ("/home/me/project", "/home/me/data", "../data"),
        ("/home/me/project", "/mnt/data", "../../../mnt/data"),
        ("/srv/project", "1.3b.*batch 1,", "'1.3b.*batch 1,'"),
    ],
)
def test_a_command_is_recorded_as_one_types_it(monkeypatch, repository, typed, written):
    monkeypatch.setattr(harness, "REPOSITORY", Path(repository))
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "argv", ["study.py", "--threads", typed])
    assert harness.machine()["command"] == f"python -m benchmarks --threads {written}"


CPU_TABLES = [
    batch_cpu,
    core_cpu,
    gates_cpu,
    model_cpu,
    bf16_cpu,
    decode_cpu,
    ssd_cpu,
    selective_scan_cpu,
    sparse_cpu,
    dynamic_mask_cpu,
    denominators,
    overwritten,
    capacity,
    prompt_reuse_cpu,
]


@pytest.mark.parametrize("module", CPU_TABLES, ids=lambda m: m.__name__)
def test_model_tables(module):
    record = {**module.run(quick=True), "machine": harness.machine()}
    assert record["machine"]["torch"] in module.table(record)


def test_a_model_is_timed_beside_itself_at_a_commit(monkeypatch):
    monkeypatch.setattr(models_before, "COMMITS", (models_before.NOW,))
    rows = models_before.measure("softmax", {models_before.NOW: harness.REPOSITORY}, quick=True)
    assert [row["work"] for row in rows] == ["prefill", "decode", "training"]
    for row in rows:
        assert percentiles_are_ordered(row["sides"]["now"]) and row["time_beside"] == {"now": 1}
    text = models_before.table({"rows": rows, "allowed": models_before.SLOWER, "machine": harness.machine()})
    assert "now beside now" in text and text.count("\n|") == 4


def test_a_commit_that_is_not_here_is_said(tmp_path):
    with pytest.raises(
        SystemExit, match=r"^Commit ffffffffff is not here: run this in a clone with its whole history\.$"
    ):
        harness.unpack("ffffffffff", tmp_path)


def test_a_side_that_has_ended_is_said():
    command = [sys.executable, "-c", "input()", "softmax"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with worker, pytest.raises(SystemExit, match=r"^The process that times softmax has ended: see its error above\.$"):
        models_before.ask(worker, "decode")


@pytest.mark.parametrize(
    "module", [operator_gpu, decode_gpu, prefill_memory_gpu, training_gpu], ids=lambda m: m.__name__
)
def test_gpu_tables_run_small_without_a_gpu(module, tmp_path):
    record = {**module.run(quick=True), "machine": harness.machine()}
    for row in record["rows"].values():
        for times in row["times"].values() if "times" in row else [row]:
            assert percentiles_are_ordered(times)
    text = module.table(record)
    assert record["machine"]["torch"] in text and text.count("\n|") >= 2
    if hasattr(module, "plot"):
        module.plot(record, tmp_path / "plot.png")


@pytest.mark.skipif(torch.cuda.is_available(), reason="This machine has a GPU.")
def test_gpu_tables_say_that_they_need_one():
    with pytest.raises(SystemExit, match="needs a GPU and this machine has none"):
        operator_gpu.run()


def test_some_cases_of_a_table_are_measured_again_and_the_others_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)

    def fails():
        raise torch.OutOfMemoryError("no room")

    cases = {"a 1": lambda: {"x": 1}, "b 1": fails}
    gpu.run_cases("table", cases, {})
    cases = {"a 1": lambda: {"x": 2}, "b 1": lambda: {"x": 3}}
    rows = gpu.run_cases("table", cases, {}, gpu.Choice(only="^b"))["rows"]
    assert rows == harness.read("table")["rows"]
    assert [(case, row["x"]) for case, row in rows.items()] == [("a 1", 1), ("b 1", 3)]


def test_cases_are_compiled_before_they_may_be_measured(monkeypatch, tmp_path):
    """Others in the file stay, and one that fails is said when all are done."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "_longest", gpu.EVERYTHING.seconds)  # and back
    go, ran = tmp_path / "go", []

    def measured():
        ran.append(gpu.measure({"x": lambda: None}, torch.device("cpu"), 0.05)["x"]["samples"])
        go.touch()
        return {"x": len(ran)}

    def fails():
        raise RuntimeError("no such\nkernel")

    harness.write("table", {"rows": {"c": {"x": 0}}})
    with pytest.raises(SystemExit, match=r"^table: failed: b\.$"):
        gpu.run_cases("table", {"a": measured, "b": fails}, {}, gpu.Choice(only="a|b", after=go))
    rows = harness.read("table")["rows"]
    assert rows["c"] == {"x": 0} and rows["a"]["x"] == 2 and ran[0] == 2 < ran[1]
    assert rows["b"]["missing"] == "RuntimeError: no such kernel"
    gpu.run_cases("table", {"a": measured}, {}, gpu.Choice(seconds=0))
    assert ran[2] == 2


def test_a_stopped_table_goes_on_where_it_stopped(monkeypatch, tmp_path):
    """On the same GPU and commit; another commit measures anew."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    place = {**harness.machine(), "commit": "abc"}
    monkeypatch.setattr(harness, "machine", lambda: place)
    measured = []

    def case(name, stop=False):
        def measure():
            if stop:
                raise KeyboardInterrupt
            measured.append(name)
            return {"x": name}

        return measure

    with pytest.raises(KeyboardInterrupt):
        gpu.run_cases("table", {"a": case("a"), "b": case("b", stop=True)}, {}, gpu.Choice(resume=True))
    assert list(harness.read("table")["rows"]) == ["a"]
    cases = {"a": case("a"), "b": case("b")}
    assert list(gpu.run_cases("table", cases, {}, gpu.Choice(resume=True))["rows"]) == ["a", "b"]
    assert measured == ["a", "b"]
    place["commit"] = "def"
    gpu.run_cases("table", cases, {}, gpu.Choice(resume=True))
    assert measured == ["a", "b", "a", "b"]


def test_a_small_card_takes_smaller_batches():
    def fits(batch):
        if batch > 3:
            raise torch.OutOfMemoryError("no room")
        return {"batch": batch}

    assert gpu.largest_that_fits(fits, 16) == {"batch": 2}
    with pytest.raises(torch.OutOfMemoryError):
        gpu.largest_that_fits(lambda batch: fits(batch + 3), 4)


class Day:
    """A machine whose stages take the time that they are told to."""

    def __init__(self, takes, fails=()):
        self.now, self.takes, self.fails, self.given = 0.0, takes, fails, {}

    def run(self, stage, seconds):
        self.given[stage.name] = seconds
        self.now += min(seconds, self.takes[stage.name])
        if stage.name in self.fails:
            return "failed with 1"
        return "done" if self.takes[stage.name] <= seconds else "stopped"


def test_a_day_on_a_gpu_ends_in_time_and_measures_nothing_wrong():
    todo = gpu_day.stages()
    assert todo_names(todo)[0] == "correctness" and set(todo_names(todo)[1:]) == set(command.GPU)
    day = Day(dict.fromkeys(todo_names(todo), 1e9) | {"correctness": 60})
    said = gpu_day.go(todo, 1500, day.run, lambda: day.now)
    assert said.pop("correctness") == "done" and set(said.values()) == {"stopped"} and day.now <= 1500
    assert day.given["operator_gpu"] > 1500 * 6 / 25  # what correctness left over is shared
    wrong = Day(dict.fromkeys(todo_names(todo), 1), fails=("correctness",))
    with pytest.raises(SystemExit, match="Nothing is measured: correctness"):
        gpu_day.go(todo, 1500, wrong.run, lambda: wrong.now)
    assert list(wrong.given) == ["correctness"]


def test_a_few_minutes_on_a_gpu_go_to_what_says_most():
    """Every case that is asked for is there, and each program still runs everything when it has time."""
    short, whole = ({stage.name: stage.command for stage in gpu_day.stages(short)} for short in (True, False))
    assert all(short[name][: len(whole[name])] == whole[name] for name in whole) and short != whole
    operators = [f"{length} {kind}" for length in operator_gpu.LENGTHS for kind in ("training", "forward")]
    chosen = [case for case in operators if re.search(short["operator_gpu"][-1], case)]
    assert chosen == ["4096 training", "32768 training"]
    decoded = [f"125m, {kind}, batch {n}, prefix 1024" for kind in decode_gpu.KINDS for n in decode_gpu.BATCHES]
    found = {case.split(", ")[1] for case in decoded if re.search(short["decode_gpu"][-1], case)}
    assert found == {kind for kind in decode_gpu.KINDS if "captured" in kind}


def todo_names(todo):
    return [stage.name for stage in todo]


def test_a_stage_that_is_stopped_or_fails_says_so():
    sleep = gpu_day.Stage("sleep", ("-c", "import time; time.sleep(60)"), 1)
    assert gpu_day.run_stage(sleep, 0.2) == "stopped"
    assert gpu_day.run_stage(gpu_day.Stage("fail", ("-c", "raise SystemExit(3)"), 1), 30) == "failed with 3"


def test_a_new_table_finds_its_place_on_the_page(monkeypatch, tmp_path):
    file = tmp_path / "gpu.md"
    assert readme.GPU.read_text().count("\n## Still missing\n") == 1
    file.write_text("# On a GPU\n\n## Still missing\n")
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    (tmp_path / "operator_gpu.json").write_text("{}")
    for _ in range(2):
        readme.add_tables(["operator_gpu", "decode_gpu"], file)
    assert (
        file.read_text().count("<!-- table: ") == 1 and "operator_gpu -->\n<!-- end -->\n\n## Still" in file.read_text()
    )


def compiled(jobs: str) -> list[dict]:
    """What `kernel_resources` finds, in a process of its own, because kernels of this one are interpreted."""
    pytest.importorskip("triton", reason="Triton is not installed on this machine.")
    code = f"from benchmarks import kernel_resources as k; print([r for r in map(k._job, {jobs})])"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def assert_good(rows: list[dict], matrix_units: dict[str, bool]) -> None:
    assert {row["kernel"] for row in rows} == set(matrix_units)
    for row in rows:
        assert row["fits"] and row["spills"] == 0 and row["mixed_up"] == 0, row
        assert (sum(row["matrix"].values()) > 0) is matrix_units[row["kernel"]], row


MIXED_UP = """
        /*0a30*/                   ULDC.64 UR22, c[0x0][0x258] ;                      /* 0x */
        /*0f50*/                   USGXT.U32 UR4, UR5, 0xe ;                          /* 0x */
        /*2420*/                   UMOV UR46, UR4 ;                                   /* 0x */
        /*2430*/                   UMOV UR47, 0x80000020 ;                            /* 0x */
        /*2440*/                   UIADD3 UR22, UP0, UR22, 0x40, URZ ;                /* 0x */
        /*2530*/                   HGMMA.64x32x16.F32.BF16 R40, R64, gdesc[UR44].tnspB, R40 ;  /* 0x */
        /*2560*/                   HGMMA.64x32x16.F32.BF16 R40, R56, gdesc[UR20].tnspB, R40 ;  /* 0x */
"""


def test_addresses_that_an_assembler_has_mixed_up_are_found():
    """What ptxas 12.8.93 made of `pull_both`, and what it should have been."""
    from benchmarks.kernel_resources import mixed_up_descriptors

    assert mixed_up_descriptors(MIXED_UP) == 1
    assert (
        mixed_up_descriptors(MIXED_UP.replace("UP0, UR22, 0x40", "UP0, UR4, 0x40").replace("UR22, c[", "UR8, c[")) == 0
    )


def test_kernels_compile_for_a_gpu_that_is_not_here():
    matrix_units = {"attend, tiles of 16": True, "chunk_states": True, "walk": False, "walk_back": False}
    assert_good(compiled("k.small_jobs()"), matrix_units)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "warps", "matrix_units"),
    [
        ("gates, 1.3B head, bf16", 8, {"gate_sums": False, "push_both": True, "chunk_states_backward": True}),
        ("delta rule, 1.3B head, bf16", 8, {"solve": True, "solve_backward": True}),
        ("SSD, P = 64, N = 128, bf16", 8, {"walk": True, "attend": True, "contract": True}),
        ("S4D, 1.3B head, bf16", 8, {"read": True, "read_backward": True, "s4d_step": False}),
        ("selective scan, N = 16, bf16", 8, {"scan_backward": False}),
        ("experts, bf16", 4, {"products": False, "bags": False}),
        ("sparse, 64 keys, D = 128, bf16", 4, {"attend": True, "of_queries": True, "of_slots": True, "of_keys": False}),
        ("sparse step, 64 keys, bf16", 4, {"step_set": False}),
    ],
)
def test_kernels_of_other_operators_compile(problem, warps, matrix_units):
    assert_good(compiled(f"k.some_jobs({problem!r}, {tuple(matrix_units)}, {warps})"), matrix_units)


def test_experts_table(monkeypatch):
    record = {**experts_cpu.run(quick=True), "machine": harness.machine()}
    assert {(row["shape"], row["kind"], row["pass"]) for row in record["rows"]} >= set(experts_cpu.REQUIRED)
    assert all(row["relative_error"] < 1e-4 and row["ratio"] > 0 for row in record["rows"])
    assert experts_cpu.table(record).count("\n|") == len(record["rows"]) + 1
    right = CrossDomainMoE.forward
    monkeypatch.setattr(CrossDomainMoE, "forward", lambda self, x: right(self, x) * 1.01)
    with pytest.raises(SystemExit, match="no speed is shown"):
        experts_cpu.run(quick=True)


def test_decode_cache_does_not_grow():
    first, last = decode_cpu.run(quick=True)["positions"]
    assert first["bytes"] == last["bytes"] > 0
    assert last["softmax_bytes"] == first["softmax_bytes"] * last["position"] / first["position"]


def test_a_wrong_operator_has_no_speed():
    def slightly_wrong(*tensors, **options):
        output, state = interdomain_attention(*tensors, **options)
        return output * 1.01, state

    with pytest.raises(SystemExit, match="no speed is shown"):
        harness.verify_operator(slightly_wrong)
    assert harness.verify_operator() < 1e-4


def test_a_model_that_decodes_wrongly_has_no_speed(monkeypatch):
    model = model_cpu.interdomain(quick=True)
    monkeypatch.setattr(type(model.lm_head), "forward", lambda self, x: torch.randn(*x.shape[:-1], self.out_features))
    with pytest.raises(SystemExit, match="decodes wrongly"):
        harness.verify_model(model)


def test_operations_follow_the_formula():
    per_head = 8 * 64 * 64 + 2 * 64 * 128 + 8 * 64 * 128 + 8 * 64 * 64
    assert operator_cpu.operations_per_token() == 12 * per_head


def test_tables_are_filled_from_result_files(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    harness.write("decode_cpu", decode_cpu.run(quick=True))
    text = "before <!-- table: decode_cpu --> old <!-- end --> after"
    filled = readme.fill(text)
    assert filled.startswith("before") and filled.endswith("after") and " old " not in filled
    assert decode_cpu.table(json.loads((tmp_path / "decode_cpu.json").read_text())) in filled
    assert readme.fill(filled) == filled


def test_a_run_fills_the_tables_of_the_readmes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(readme, "PAGES", [tmp_path / "README.md"])
    (tmp_path / "README.md").write_text("<!-- table: decode_cpu --> old <!-- end -->")
    record = decode_cpu.run(quick=True)
    monkeypatch.setattr(decode_cpu, "run", lambda quick: record)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "decode_cpu"])
    command.main()
    assert decode_cpu.table(harness.read("decode_cpu")) in (tmp_path / "README.md").read_text()
    assert str(tmp_path / "README.md") in capsys.readouterr().out
    readme.update()
    assert not capsys.readouterr().out, "a table that is as it was is not written again"


def test_every_start_in_the_study_is_a_configuration():
    for fields in start_study.CONDITIONS.values():
        start_study.InterdomainConfig(**start_study.SIZES["1M"], **fields)


def test_one_run_of_the_study():
    training = {"steps": 2, "batch_size": 1, "sequence_length": 16, "learning_rate": 1e-3}
    row = start_study.run_condition("1M", 0, "zero-order hold, c 0.25", training, held_out_bytes=500)
    assert row["failed"] is None and 0 < row["bits_per_byte"] < 12 and row["parameters"] > 900_000


def test_a_budget_of_serving_measures_what_tells_the_most(monkeypatch, tmp_path):
    """In that order, and what would not end in time is left out for what does."""
    from benchmarks import vllm_cpu

    monkeypatch.setattr(vllm_cpu.harness, "RESULTS", tmp_path)
    monkeypatch.setattr(vllm_cpu, "version", lambda name: "0")
    asked = []

    def measured(kind, requests, length, quick, servers):
        asked.append((requests, length))
        return {"bytes": 1, "seconds": 100.0}

    monkeypatch.setattr(vllm_cpu, "measured", measured)
    # At first 100 tokens a second are expected, 8 x 2,048 take 166 seconds.
    record = vllm_cpu.run(False, r"^ours in vLLM, \d+ x", False, minutes=165 / 60)
    assert asked[:2] == [(1, 4096), (8, 256)] and (8, 2048) not in asked
    assert vllm_cpu.expected(record, "ours in vLLM", 1, 256) == pytest.approx(100)
    asked.clear()
    vllm_cpu.run(False, "^ours in vLLM, 8 x", False, minutes=10**6)
    assert asked == [(8, 2048), (8, 4096), (8, 8192)]
