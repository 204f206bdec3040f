"""What the studies share: runs that are added to a result file one by one, by one process or by several."""

import argparse
import contextlib
import fcntl
import functools
import itertools
import json
import tempfile
import time
import zlib
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import torch

from benchmarks import readme
from benchmarks.harness import machine, time_in_turns
from benchmarks.pool import Job, MakeRun, run_jobs
from examples.saved_model import replace_text


def load(file: Path, fresh: dict) -> dict:
    """The record so far: `fresh` with the key "runs"."""
    return json.loads(file.read_text()) if file.exists() else fresh | {"runs": []}


def parser(
    description: str, data: str | None = None, speed: bool = False, plot: bool = False, pool: bool = False
) -> argparse.ArgumentParser:
    """The options of every study; `speed` adds the measuring of speed, `plot` the drawing, `pool` several processes."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data is not None:
        found.add_argument("--data", type=Path, default=Path(data), help="folder (default: %(default)s)")
    found.add_argument("--table", action="store_true", help="print the table of the runs so far and stop")
    if plot:
        found.add_argument("--plot", action="store_true", help="draw the runs so far and stop")
    if speed:
        found.add_argument("--speed", action="store_true", help="measure the speed of training and stop")
    found.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of PyTorch (default: as it has them)"
    )
    if pool:
        found.add_argument("--device", default="cpu", help="where models are trained (default: %(default)s)")
        found.add_argument("--processes", type=int, default=1, help="that train at once (default: %(default)s)")
        found.add_argument("--minutes", type=float, help="stop after so many (default: when all are done)")
    found.add_argument("--runs", type=int, metavar="N", help="stop after N runs (default: when all are done)")
    found.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="those runs that fall to part I < N"
    )
    return found


def show_or_run(
    arguments: argparse.Namespace,
    file: Path,
    fresh: dict,
    plan: Callable[[list[dict]], Iterator[dict]],
    make_run: Callable[[], Callable[..., dict]],
    table: Callable[[dict], str],
    plot: Callable[[dict], Path] | None = None,
    pooled: tuple[Callable[[dict], Hashable], Callable[[dict], int | None]] | None = None,
) -> None:
    """What `parser` was asked for: the table or the plot of the runs so far, or the runs that are missing.

    `make_run()`, called where there is something to run, gives the `run` of `run_missing`, or with `pooled`, its `kind`
    and `most`, that of `run_in_pool`; the pages are updated.
    """
    if arguments.table or getattr(arguments, "plot", False):
        print((table if arguments.table else plot)(load(file, fresh)))
        return
    torch.set_num_threads(arguments.threads)
    command = f"python -m benchmarks.{file.stem}"
    if pooled is None:
        run_missing(file, fresh, plan, make_run(), command, arguments.part, arguments.runs)
    else:
        run_in_pool(file, fresh, plan, make_run, command, *pooled, arguments.processes, arguments.minutes)
    readme.update()


def run_missing(
    file: Path,
    fresh: dict,
    plan: Callable[[list[dict]], Iterator[dict]],
    run: Callable[..., dict],
    command: str,
    part: tuple[int, int] = (0, 1),
    limit: int | None = None,
) -> None:
    """Do the runs of the plan that the file does not hold yet, `limit` of them at most.

    The plan is asked again after every run, because later runs may depend on the results of earlier ones. Each of its
    items are the arguments of `run`, which are also kept in the row and tell the runs apart.
    """
    index, count = part
    if not 0 <= index < count:
        raise SystemExit(f"--part counts from 0: of {count} parts, {index} is none.")
    for _ in itertools.count() if limit is None else range(limit):
        done = load(file, fresh)["runs"]
        own = (item for item in plan(done) if _part_of(item, count) == index)
        chosen = next((item for item in own if not holds(done, item)), None)
        if chosen is None:
            return
        started = time.perf_counter()
        row = chosen | run(**chosen) | {"seconds": time.perf_counter() - started}
        with _alone(file):
            record = load(file, fresh)  # another process may have added its runs
            record["runs"].append(row)
            record["machine"] = {**machine(), "command": command}
            _save(file, record)
        print(f"{chosen}: {row['seconds']:.0f} s", flush=True)


def run_in_pool(
    file: Path,
    fresh: dict,
    plan: Callable[[list[dict]], Iterator[dict]],
    make_run: MakeRun,
    command: str,
    kind: Callable[[dict], Hashable],
    most: Callable[[dict], int | None],
    processes: int = 1,
    minutes: float | None = None,
) -> None:
    """As `run_missing`, by several processes; this one alone writes the file, after each job.

    A job are all the missing items of the plan that are of one kind. What waits for results of others is not in the
    plan yet, and the others go on. A job that fails is said, and not tried again.

    Args:
        make_run: called in each process, gives what makes the rows of a job.
        kind: of an item; those of a kind are given to one process together.
        most: how many jobs of items with this number may run at once, None for any number.
        minutes: after which what still runs is stopped; what a run does not keep itself is lost.
    """
    failed: list[dict] = []

    def next_job(busy: list[Job]) -> Job:
        runs = load(file, fresh)["runs"]
        return _next_job(plan(runs), runs, busy, failed, kind, most)

    def finished(job: Job, rows: list[dict], error: str | None) -> None:
        if error is not None:
            failed.extend(job)
            return
        record = load(file, fresh)
        record["runs"] += rows
        record["machine"] = {**machine(), "command": command}
        _save(file, record)

    run_jobs(next_job, finished, make_run, processes, minutes)


def _next_job(
    planned: Iterator[dict],
    runs: list[dict],
    busy: list[Job],
    failed: list[dict],
    kind: Callable[[dict], Hashable],
    most: Callable[[dict], int | None],
) -> Job:
    """The first missing item that may begin, with all others of its kind; empty where there is none."""
    taken = [*failed, *itertools.chain(*busy)]
    limits = [most(job[0]) for job in busy]
    job: Job = []
    for item in planned:
        if holds(runs, item) or item in taken or item in job:
            continue
        limit = most(item)
        may_begin = limit is None or limits.count(limit) < limit
        if kind(item) == kind(job[0]) if job else may_begin:
            job.append(item)
    return job


def _part_of(item: dict, count: int) -> int:
    """Which of the parts does a run, told by the run alone: its place in the plan moves with what is known, and a plan
    may ask twice.
    """
    return checksum(item) % count


def checksum(told: object) -> int:
    """A number of what JSON can hold, the same in every process."""
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


def holds(runs: list[dict], item: dict) -> bool:
    """Whether a run of the plan is done."""
    return any(item.items() <= row.items() for row in runs)


def rates_then_seeds(
    runs: list[dict], kinds: list[dict], rates: tuple[float, ...], seeds: tuple[int, ...]
) -> Iterator[dict]:
    """A plan: every kind of run at a learning rate, then at the next, then the other seeds at the best rate of each."""
    for rate in rates:
        yield from (kind | {"learning_rate": rate, "seed": seeds[0]} for kind in kinds)
    for seed in seeds[1:]:
        for kind in kinds:
            if {row["learning_rate"] for row in runs if kind.items() <= row.items()} >= set(rates):
                yield kind | {"learning_rate": best_rate(runs, kind, seeds[0]), "seed": seed}


def best_rate(runs: list[dict], kind: dict, seed: int) -> float | None:
    """The learning rate with the most right answers of a seed, of those tried."""
    tried = [row for row in runs if (kind | {"seed": seed}).items() <= row.items()]
    return max(tried, key=lambda row: row["accuracy"])["learning_rate"] if tried else None


def best_runs(runs: list[dict], kind: dict, seed: int) -> list[dict]:
    """All seeds at that rate, in their order."""
    wanted = kind | {"learning_rate": best_rate(runs, kind, seed)}
    return sorted((row for row in runs if wanted.items() <= row.items()), key=lambda row: row["seed"])


def write_speed(file: Path, fresh: dict, runs: dict[str, Iterator], amount: int, seconds: float = 10.0) -> None:
    """Add to the file what each condition does a second: median, 20th and 80th percentile.

    Args:
        runs: by condition an iterator whose items are training steps; the conditions take turns.
        amount: tokens or images of a step.
        seconds: how long each condition is measured, about.
    """
    steps = {name: functools.partial(next, run) for name, run in runs.items()}
    times = time_in_turns(steps, seconds * len(steps))
    speed = {
        name: {"median": amount / taken["median"], "p20": amount / taken["p80"], "p80": amount / taken["p20"]}
        for name, taken in times.items()
    }
    _save(file, load(file, fresh) | {"speed": speed | {"machine": machine()}})


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """While one process adds to a file, the others of this machine wait."""
    with Path(tempfile.gettempdir(), f"{file.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _save(file: Path, record: dict) -> None:
    file.parent.mkdir(exist_ok=True)
    replace_text(file, json.dumps(record, indent=1) + "\n")
