"""Everything that is asked of a machine with a GPU, in the order in which it is worth knowing: `make gpu`.

First the kernels are checked on the device, and nothing is measured where they are wrong. Then come the tables, each
for its share of the time that is left; in a few minutes, the cases that say most. A table keeps every case as soon as
it is measured, so that a run may be stopped at any time; the next one goes on with the cases that this GPU and this
commit do not have yet. Last, the pages are written.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks import gpu, readme

MINUTES = 25.0
_OPERATORS = ("op_interdomain", "op_interdomain_gates", "op_ssd", "op_s4d", "op_selective_scan", "op_sparse", "experts")
_TESTS = ("each_mixer_on_a_gpu", *(f"{name}_triton" for name in _OPERATORS), "op_sparse_triton_passes", "fused_layers")

# Of less time than this only what is most worth knowing is asked.
SHORT = 10.0
_ABOVE_ALL = {
    "correctness": "test_logits or test_a_step_of_training",
    "operator_gpu": "^(4096|32768) training",
    "decode_gpu": "^125m, .* captured, batch (1|32), prefix 1024",
    "training_gpu": "^125m, eager",
    "prefill_memory_gpu": ", 16384",
}


class Stage(NamedTuple):
    """One command, and the part of the time that is left for it when it is its turn."""

    name: str
    command: tuple[str, ...]
    weight: float
    required: bool = False


def stages(short: bool = False) -> list[Stage]:
    """All of them, or with `short` the tests of whole models and the cases of each table that say most."""
    of_tests = ["-m", "pytest", "-q", "-m", "not slow", *(f"tests/test_{name}.py" for name in _TESTS), *_in_parallel()]
    of_tests += ["-k", _ABOVE_ALL["correctness"]] if short else []
    correctness = Stage("correctness", tuple(of_tests), 16 if short else 6, required=True)
    weights = {"operator_gpu": 6, "decode_gpu": 6, "training_gpu": 5, "prefill_memory_gpu": 2}
    tables = []
    for name, weight in weights.items():
        some = ("--only", _ABOVE_ALL[name]) if short else ()
        tables.append(Stage(name, ("-m", "benchmarks", name, "--resume", *some), weight))
    return [correctness, *tables]


def _in_parallel() -> tuple[str, ...]:
    """A worker for each of half the cores: kernels take their time to compile, and little of the GPU to run."""
    workers = min(16, (os.cpu_count() or 1) // 2)
    if workers < 2 or importlib.util.find_spec("xdist") is None:
        return ("-x",)
    return "-n", str(workers), "--dist", "worksteal", "--maxfail", "1"


def go(
    todo: Sequence[Stage],
    seconds: float,
    run: Callable[[Stage, float], str],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, str]:
    """Run the stages one after the other within so many seconds; what became of each.

    Args:
        run: runs a stage for at most so many seconds and says "done", "stopped" or what went wrong.

    Raises:
        SystemExit: when a stage that the others need was not done.
    """
    began, said = clock(), {}
    for number, stage in enumerate(todo):
        left = seconds - (clock() - began)
        share = left * stage.weight / sum(other.weight for other in todo[number:])
        said[stage.name] = run(stage, share) if share > 1 else "no time was left"
        print(f"{stage.name}: {said[stage.name]}", flush=True)
        if stage.required and said[stage.name] != "done":
            raise SystemExit(f"Nothing is measured: {stage.name} was not done ({said[stage.name]}).")
    return said


def run_stage(stage: Stage, seconds: float) -> str:
    """In a process of its own, which is ended when its time is up; what it has written stays."""
    try:
        done = subprocess.run([sys.executable, *stage.command], cwd=readme.REPOSITORY, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "stopped"
    return "done" if done.returncode == 0 else f"failed with {done.returncode}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for everything together (default: %(default)s)")
    options = parser.parse_args(arguments)
    gpu.device(quick=False)
    try:
        go(stages(options.minutes < SHORT), 60 * options.minutes, run_stage)
    finally:
        readme.add_tables([stage.name for stage in stages()])
        readme.update()


if __name__ == "__main__":
    main()
