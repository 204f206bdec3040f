"""What the tables of a GPU share: where they run, correctness first, times by events, ceilings and floors, cases."""

import functools
import gc
import math
import re
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import harness
from modeling_interdomain import interdomain_attention


class Choice(NamedTuple):
    """What of a table is measured, and how long.

    Attributes:
        only: a regular expression that the names of its cases match.
        resume: leave out what this GPU and commit have measured already.
        seconds: the longest for one case.
        after: a file. All cases run once, so that everything is compiled, and are measured when it is there: what
            compiles for minutes may do so while the GPU has other work.
    """

    only: str | None = None
    resume: bool = False
    seconds: float = math.inf
    after: Path | None = None


EVERYTHING = Choice()

# The longest that `measure` takes; it always takes a few samples.
_longest = math.inf


def device(quick: bool) -> torch.device:
    """The GPU; a smoke run takes the CPU where there is none."""
    if torch.cuda.is_available():
        _tune_quickly()
        return torch.device("cuda")
    if quick:
        return torch.device("cpu")
    raise SystemExit("This table needs a GPU and this machine has none: run the same command on one that has.")


@functools.cache
def _tune_quickly() -> None:
    """Time the configurations of a kernel for a fifth of Triton's time: other operators have dozens of them."""
    import triton

    triton.testing.do_bench = functools.partial(triton.testing.do_bench, warmup=5, rep=20)


def _forget_tuning() -> None:
    """Kernels choose their configurations again, which beside other work they may have chosen badly."""
    import triton

    for thing in gc.get_objects():
        if issubclass(type(thing), triton.runtime.Autotuner):  # asks nothing of what is no tuner
            thing.cache.clear()


def backend(where: torch.device) -> str:
    return "triton" if where.type == "cuda" else "chunk"


def verify(where: torch.device) -> float:
    """The largest relative error of the operator in bfloat16 and its gradients against float64; refuses above 1e-2."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    length, heads, dim = (300, 2, 64) if where.type == "cuda" else (40, 2, 8)
    tokens = [normal(1, length, heads, dim).bfloat16().double() for _ in range(3)]
    rest = [torch.stack([-0.05 * normal(heads, dim).abs(), 3 * normal(heads, dim)], dim=-1)]
    rest += [normal(heads, dim, 2), normal(heads, dim, dim, 2) / dim**0.5]
    weights = normal(1, length, heads, dim).bfloat16()

    def everything(dtype, backend):
        tensors = [x.to(where, dtype) for x in tokens]
        tensors += [x.to(where, torch.promote_types(dtype, torch.float32)) for x in rest]
        tensors = [x.requires_grad_() for x in tensors]
        output, _ = interdomain_attention(*tensors, backend=backend)
        return [output, *torch.autograd.grad((output * weights.to(where, dtype)).sum(), tensors)]

    found, expected = everything(torch.bfloat16, backend(where)), everything(torch.float64, "recurrent")
    return harness.largest_error(found, expected, "The operator is wrong", bound=1e-2)


def measure(functions: dict[str, Callable[[], object]], where: torch.device, seconds: float = 1.0) -> dict[str, dict]:
    """Seconds of each function, in turns; on a GPU by events, with the second-level cache written over before each."""
    seconds = min(seconds, _longest)
    if where.type != "cuda":
        return harness.time_in_turns(functions, seconds, at_least=2)
    for _ in range(3):  # compiles, and times the configurations of kernels
        harness.check_finite(functions)
    flush = torch.empty(256 << 20, dtype=torch.int8, device=where)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(next(iter(samples.values()))) < 5:
        for name, function in functions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            begin.record()
            function()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / 1e3)
    harness.check_finite(functions)
    return {name: harness.summary(taken) for name, taken in samples.items()}


def ceilings(where: torch.device) -> dict:
    """What this machine does at best: bytes a second of a copy (read plus written), operations of a matrix product."""
    size = 8192 if where.type == "cuda" else 256
    source = torch.randn(size * size, device=where)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=where, dtype=torch.bfloat16) for _ in range(2))
    times = measure({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, where, 0.5)
    return {
        "bytes_per_second": 2 * source.nbytes / times["copy"]["p20"],
        "operations_per_second": 2 * size**3 / times["matmul"]["p20"],
    }


def floor(bytes_moved: float, operations: float, ceiling: dict) -> float:
    """Seconds below which no implementation can come."""
    return max(bytes_moved / ceiling["bytes_per_second"], operations / ceiling["operations_per_second"])


def peak_bytes(function: Callable[[], object], where: torch.device) -> int | None:
    """Bytes that a call needs on top of what is there; None where they cannot be counted."""
    if where.type != "cuda":
        function()
        return None
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def run_cases(
    name: str, cases: dict[str, Callable[[], dict]], record: dict, choice: Choice = EVERYTHING, keep: bool = True
) -> dict:
    """Measure the chosen cases; with `keep`, write after each and leave the others in the file.

    A case that does not fit in memory, or fails, becomes a row that says so.

    Raises:
        SystemExit: when all have run and one has failed.
    """
    global _longest
    chosen = {case: x for case, x in cases.items() if not choice.only or re.search(choice.only, case)}
    if choice.after is not None:
        _longest = 0.0
        for function in chosen.values():
            _row(function)
        print(f"{name}: compiled, waits for {choice.after}", flush=True)
        while not choice.after.exists():
            time.sleep(0.05)
        _forget_tuning()
        if "ceilings" in record:
            record["ceilings"] = ceilings(device(quick=True))
    _longest = choice.seconds
    here, rows = _place(), _rows(name) if keep and (choice.only or choice.resume) else {}
    failed = []
    for case, function in chosen.items():
        if choice.resume and rows.get(case, {}).get("place") == here:
            continue
        row = _row(function) | {"place": here}
        print(f"{name}: {case}: {row}", flush=True)
        failed += [case] if "failed" in row else []
        # Another process may have measured other cases meanwhile.
        rows = (_rows(name) if keep and (choice.only or choice.resume) else rows) | {case: row}
        if keep:
            harness.write(name, {**record, "rows": rows})
    if failed:
        raise SystemExit(f"{name}: failed: {'; '.join(failed)}.")
    return {**record, "rows": rows}


def _rows(name: str) -> dict[str, dict]:
    """What the file of a table has."""
    return harness.read(name)["rows"] if (harness.RESULTS / f"{name}.json").exists() else {}


def _row(function: Callable[[], dict]) -> dict:
    try:
        return function()
    except torch.OutOfMemoryError:
        return {"missing": "does not fit in memory"}
    except Exception as error:
        traceback.print_exc()
        return {"missing": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", "failed": True}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _place() -> str:
    """What a figure belongs to: this GPU and this commit."""
    about = harness.machine()  # the tables that were written make its tree another, but not its code
    return f"{about.get('gpu', about['cpu'])}, {about['commit'].rstrip('+')}"


def largest_that_fits(function: Callable[[int], dict], batch: int) -> dict:
    """What a case gives for a batch, or for the half of it where memory is small, and so on down to one row."""
    while True:
        try:
            return function(batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
            batch //= 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def median_of_gaps(events: list) -> dict:
    """Summary of the seconds between one event (or time) and the next."""
    if isinstance(events[0], float):
        gaps = [b - a for a, b in zip(events[:-1], events[1:])]
    else:
        torch.cuda.synchronize()
        gaps = [a.elapsed_time(b) / 1e3 for a, b in zip(events[:-1], events[1:])]
    return {**harness.summary(gaps), "mean": statistics.fmean(gaps)}
