"""Everything that is asked of a machine with a GPU, in the order in which it is worth knowing: `make gpu`.

First the kernels are checked on the device, and nothing is measured where they are wrong. Then come the tables, each
for its share of the time that is left. A table keeps every case as soon as it is measured, so that a run may be stopped
at any time; the next one goes on with the cases that this GPU and this commit do not have yet. Last, the pages are
written.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks import gpu, readme

MINUTES = 25.0
_OPERATORS = ("op_interdomain", "op_interdomain_gates", "op_ssd", "op_s4d", "op_selective_scan", "op_sparse", "experts")
_TESTS = (*(f"{name}_triton" for name in _OPERATORS), "fused_layers", "fused_inputs", "compiled_decode", "padding")


class Stage(NamedTuple):
    """One command, and the part of the time that is left for it when it is its turn."""

    name: str
    command: tuple[str, ...]
    weight: float
    required: bool = False


def stages() -> list[Stage]:
    tests = (f"tests/test_{name}.py" for name in _TESTS)
    correctness = Stage("correctness", ("-m", "pytest", "-q", "-x", "-m", "not slow", *tests), 6, required=True)
    weights = {"operator_gpu": 6, "decode_gpu": 6, "training_gpu": 5, "prefill_memory_gpu": 2}
    tables = (Stage(name, ("-m", "benchmarks", name, "--resume"), weight) for name, weight in weights.items())
    return [correctness, *tables]


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
        go(stages(), 60 * options.minutes, run_stage)
    finally:
        readme.add_tables([stage.name for stage in stages()])
        readme.update()


if __name__ == "__main__":
    main()
