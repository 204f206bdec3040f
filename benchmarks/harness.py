"""What every table shares: check first, time both sides in turns, write down the machine, print from the file."""

import functools
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from io import BytesIO
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from modeling_interdomain import interdomain_attention
from modeling_interdomain.mixers.interdomain.gates import what_keys_find
from modeling_interdomain.ops.interdomain.gates import Gates

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"

# The sizes of SmolLM2-135M, for models with random weights of its shape.
SMOLLM2_SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def machine() -> dict:
    """The machine, the versions and the command behind a result."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        **_gpu(),
        "commit": _commit(),
        "command": " ".join(["python -m", _program(), *map(as_typed, sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
    }


@functools.cache
def _commit() -> str:
    """What the checkout holds when first asked, "+" for changes: tables that this process writes are none.

    A copy of the files of a commit, on a machine without the history, is told of it by BENCHMARK_COMMIT.
    """
    if told := os.environ.get("BENCHMARK_COMMIT"):
        return told
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")


def _gpu() -> dict:
    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": version("triton")}


def _program() -> str:
    """The module that Python was started with: a study of its own, or all benchmarks."""
    name = getattr(sys.modules["__main__"].__spec__, "name", "")
    return name if name.startswith("benchmarks.") and not name.endswith("__main__") else "benchmarks"


def as_typed(argument: str) -> str:
    """An argument as one types it in the root of the repository: no other machine has the folders of this one."""
    option, equals, value = argument.rpartition("=") if argument.startswith("-") else ("", "", argument)
    if not os.path.isabs(value):
        return shlex.quote(argument)
    path, home = Path(value), Path.home()
    if path.is_relative_to(home) and not REPOSITORY.is_relative_to(home):
        return f"{option}{equals}~/{shlex.quote(str(path.relative_to(home)))}"
    return shlex.quote(option + equals + os.path.relpath(path, REPOSITORY))


def unpack(commit: str, folder: Path) -> Path:
    """The package as it was at a commit, into a folder that can stand in `PYTHONPATH`."""
    command = ["git", "archive", commit, "modeling_interdomain"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True)
    if done.returncode:
        raise SystemExit(f"Commit {commit} is not here: run this in a clone with its whole history.")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def _cpu_name() -> str:
    """With family and model, where the system gives them: rented machines hide what else would tell CPUs apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    first = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    name = first.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key.split()[-1]} {first[key]}" for key in ("cpu family", "model") if first.get(key)]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent)
    except FileNotFoundError:  # a copy of the files on a machine without it
        return "unknown"
    return done.stdout.strip() or ("unknown" if arguments[0] == "rev-parse" else "")


def largest_error(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], wrong: str, bound: float = 1e-4
) -> float:
    """The largest relative error of tensors; refuses above `bound`, for what is wrong has no speed."""
    error = max(((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, expected, strict=True))
    if not error < bound:
        raise SystemExit(f"{wrong} (relative error {error:.1e}): no speed is shown.")
    return error


def gates_at_start(key: torch.Tensor, *parameters: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gates of keys `[B, T, G, R]`, in float32, as they start: log_gate and write_gate near 0 and 1, and of what a key
    finds of itself about a fiftieth is taken back. States stay bounded, as those of layers do.

    Args:
        parameters: `log_decay`, `input_matrix` and `coefficient_matrix` of `interdomain_attention`.
    """
    generator = torch.Generator(key.device).manual_seed(1)
    uniform = torch.rand(3, *key.shape[:3], generator=generator, device=key.device)
    key, *parameters = (x.detach().float() for x in (key, *parameters))
    own, most = what_keys_find(*parameters)
    delta = (0.04 * uniform[2]).minimum(most) / (own * key.square().sum(-1))
    return Gates(-0.014 * uniform[0], 0.9 + 0.2 * uniform[1], delta)._asdict()


def verify_operator(attention: Callable = interdomain_attention) -> float:
    """The largest relative error of the operator and its gradients against float64; refuses above 1e-4."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    length, heads, dim, size = 150, 2, 16, 16
    tensors = [normal(1, length, heads, dim) for _ in range(3)]
    tensors.append(torch.stack([-0.1 * normal(heads, size).abs(), 3 * normal(heads, size)], dim=-1))
    tensors += [normal(heads, size, 2), normal(heads, size, size, 2) / size**0.5]
    weights = normal(1, length, heads, dim)
    expected = _with_gradients(interdomain_attention, tensors, weights, backend="recurrent")
    found = _with_gradients(attention, [x.float() for x in tensors], weights.float(), backend="chunk")
    return largest_error(found, expected, "The operator is wrong")


def _with_gradients(attention, tensors, weights, **options) -> list[torch.Tensor]:
    tensors = [x.requires_grad_() for x in tensors]
    output, _ = attention(*tensors, **options)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), tensors)]


@torch.no_grad()
def verify_model(model, bound: float = 1e-3) -> float:
    """Logits token by token with a cache against one forward; refuses above `bound` of their size."""
    ids = torch.randint(model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    whole = model(ids, use_cache=False).logits
    cache, pieces = None, []
    for token in ids.split(1, dim=1):
        output = model(token, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        pieces.append(output.logits)
    return largest_error([torch.cat(pieces, dim=1)], [whole], f"{type(model).__name__} decodes wrongly", bound)


def time_in_turns(functions: dict[str, Callable[[], object]], seconds: float, at_least: int = 5) -> dict[str, dict]:
    """Median, 20th and 80th percentile in seconds of each function; they take turns, so that drift hits all alike.

    In another order each turn: what one leaves in the caches of the processor meets all others. What they return must
    be finite at first and at last, for a state may have grown: numbers that overflowed have another speed.
    """
    check_finite(functions)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    started, draw = time.perf_counter(), random.Random(0)
    while time.perf_counter() - started < seconds or len(next(iter(samples.values()))) < at_least:
        for name, function in draw.sample(list(functions.items()), len(functions)):
            begin = time.perf_counter()
            function()
            samples[name].append(time.perf_counter() - begin)
    check_finite(functions)
    return {name: summary(taken) for name, taken in samples.items()}


def check_finite(functions: dict[str, Callable[[], object]]) -> None:
    """Call each once; refuses tensors, or what else PyTorch finds tensors in, that are not finite."""
    for name, function in functions.items():
        if not all(x.isfinite().all() for x in tree_leaves(function()) if isinstance(x, torch.Tensor)):
            raise SystemExit(f"{name} gives numbers that are not finite: no speed is shown.")


def summary(samples: list[float]) -> dict:
    """Median and the 20th and 80th percentile."""
    ordered = sorted(samples)
    return {
        "median": statistics.median(ordered),
        "p20": ordered[round(0.2 * (len(ordered) - 1))],
        "p80": ordered[round(0.8 * (len(ordered) - 1))],
        "samples": len(ordered),
    }


def in_ms(times: dict, digits: int | None = None) -> str:
    """A `summary` as median (20th to 80th percentile), with one digit, or three below a millisecond."""
    if digits is None:
        digits = 1 if times["median"] > 1e-3 else 3
    median, low, high = (f"{times[name] * 1e3:,.{digits}f}" for name in ("median", "p20", "p80"))
    return f"{median} ({low} to {high})"


def matmul_rate() -> float:
    """Operations per second of a large float32 matrix product: the ceiling for everything made of them."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return 2 * 2048**3 / time_in_turns({"matmul": lambda: a @ b}, seconds=1.0)["matmul"]["p20"]


def write(name: str, record: dict) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**record, "machine": machine()}, indent=1) + "\n")
    return path


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def footnote(record: dict) -> str:
    about = record["machine"]
    threads = f"{about['threads']} thread" + ("" if about["threads"] == 1 else "s")
    place = f"{about['gpu']}, Triton {about['triton']}" if "gpu" in about else f"{about['cpu']}, {threads}"
    return (
        f"{place}, torch {about['torch']}, transformers {about['transformers']}, "
        f"commit {about['commit']}, {about['date']}: `{about['command']}`"
    )
