"""Whole models beside themselves at earlier commits: that moving code from room to room has cost no speed.

A process a commit builds the same model and waits; they take turns call by call, so that what else the machine does
hits all alike. Times are of calls as a user makes them, Python included.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.before_worker import MIXERS, WORK
from benchmarks.harness import REPOSITORY, footnote, markdown, summary, unpack

# Before the package had rooms, and half way.
COMMITS = ("555a879", "7c2e777")
NOW = "now"
SLOWER = 1.03  # what a row may take of the time before
ROUNDS = {"prefill": 24, "decode": 24, "training": 16}


def run(quick: bool = False) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        sides = {commit: unpack(commit, Path(folder) / commit) for commit in COMMITS} | {NOW: REPOSITORY}
        rows = [row for mixer in MIXERS for row in measure(mixer, sides, quick)]
    return {"allowed": SLOWER, "rows": rows}


def measure(mixer: str, sides: dict[str, Path], quick: bool) -> list[dict]:
    """Times of each side by kind of work, the first call of each left out."""
    with ExitStack() as stack:
        workers = {side: stack.enter_context(start(mixer, path, quick)) for side, path in sides.items()}
        rows = []
        for work in WORK:
            times: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(3 if quick else ROUNDS[work]):
                for side, worker in workers.items():
                    times[side].append(ask(worker, work))
            found = {side: summary(taken[1:]) for side, taken in times.items()}
            ratios = {
                commit: statistics.median(now / then for now, then in zip(times[NOW][1:], times[commit][1:]))
                for commit in COMMITS
            }
            rows.append({"mixer": mixer, "work": work, "sides": found, "time_beside": ratios})
    return rows


def start(mixer: str, path: Path, quick: bool) -> subprocess.Popen:
    program = str(Path(__file__).with_name("before_worker.py"))
    return subprocess.Popen(
        [sys.executable, program, str(torch.get_num_threads()), *(["quick"] if quick else []), mixer],
        env=os.environ | {"PYTHONPATH": str(path), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(worker: subprocess.Popen, work: str) -> float:
    """Seconds of one call."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(work + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise SystemExit(f"The process that times {worker.args[-1]} has ended: see its error above.")
    return float(answer)


def table(record: dict) -> str:
    """A row a mixer and kind of work: the time beside that of each commit, call by call."""
    rows = []
    for row in record["rows"]:
        cells = [f"{row['time_beside'][commit]:.2f}x" for commit in COMMITS]
        times = [f"{row['sides'][side]['median'] * 1e3:.1f}" for side in (*COMMITS, NOW)]
        rows.append([f"{row['mixer']}, {row['work']}", *times, *cells])
    header = ["ms", *COMMITS, NOW, *(f"now beside {commit}" for commit in COMMITS)]
    about = (
        "6 layers of 512, batch 1, float32: a prefill of 1,024 tokens, 20 decode steps, a training step of 512 tokens; "
        f"medians, and of the ratio that of pairs of calls one after the other. Allowed: {record['allowed']}x."
    )
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])
