"""The ways to compute the recurrence: time and memory against length, and the drift of the inverse recurrence."""

import multiprocessing
import re
import time
from pathlib import Path

import torch

from benchmarks.harness import footnote, markdown
from modeling_interdomain import interdomain_attention
from modeling_interdomain.ops.interdomain.scan import LARGEST_AMPLIFICATION, forward_states, inverse_states

HEADS, DIM, STATE = 4, 32, 32
BACKENDS = ("recurrent", "scan", "associative_scan", "fft", "chunk")
LENGTHS = (256, 1024, 4096, 16384)
# Where the definition would hold every state of a long sequence for its backward pass, it is left out.
LONGEST = {"recurrent": 4096}
SEGMENTS, RATES = (16, 64, 256, 1024), (0.001, 0.01, 0.05, 0.1)


def arguments(length: int, requires_grad: bool = False) -> list[torch.Tensor]:
    """A batch of one at the start of training: S4D-Inv modes, steps in [1e-3, 1e-1], zero-order hold."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(1, length, HEADS, DIM, generator=generator) for _ in range(3)]
    step = torch.logspace(-3, -1, HEADS)[:, None]
    modes = torch.arange(STATE)
    phase = STATE / torch.pi * (STATE / (2 * modes + 1) - 1)
    log_decay = torch.stack([-0.5 * step.expand(-1, STATE), step * phase], dim=-1)
    rate = torch.complex(torch.full((STATE,), -0.5), phase)
    beta = torch.view_as_real((torch.exp(torch.view_as_complex(log_decay)) - 1) / rate)
    coefficients = 0.25 * torch.randn(HEADS, STATE, STATE, 2, generator=generator) / STATE**0.5
    return [x.requires_grad_(requires_grad) for x in (*tokens, log_decay, beta.contiguous(), coefficients)]


def measure(backend: str, length: int, repeats: int) -> dict:
    """Best seconds of a forward, and of a forward with backward, and the memory that the latter adds to the process.

    The memory is the highest that the process ever had, so it is read before anything else has run in it.
    """
    torch.set_num_threads(1)

    def both(leaves):
        output, _ = interdomain_attention(*leaves, backend=backend)
        torch.autograd.grad(output.sum(), leaves)

    both(arguments(8, requires_grad=True))  # what is loaded once
    leaves = arguments(length, requires_grad=True)
    before = _highest_bytes()
    both(leaves)
    added = max(0, _highest_bytes() - before)  # the kernel's count lags by some pages, and may come down by as many
    forward_and_backward = _best(lambda: both(leaves), repeats)
    tensors = arguments(length)
    with torch.no_grad():
        forward = _best(lambda: interdomain_attention(*tensors, backend=backend), repeats)
    return {
        "backend": backend,
        "length": length,
        "forward": forward,
        "forward_and_backward": forward_and_backward,
        "backward_bytes": added,
    }


def _highest_bytes() -> int:
    """The most memory this process has had. `getrusage` would also count what its parent had when it was started."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1))


def _best(function, repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def errors(backend: str, length: int = 512) -> float:
    """The largest relative error of float32 outputs and gradients against the definition in float64."""
    found = []
    for kind, dtype in ((backend, torch.float32), ("recurrent", torch.float64)):
        leaves = [x.to(dtype).detach().requires_grad_() for x in arguments(length)]
        output, _ = interdomain_attention(*leaves, backend=kind)
        found.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(*found))


def drift(every: int, rate: float) -> dict:
    """How far the states of the inverse recurrence are from the true ones after K steps back, in float32."""
    generator = torch.Generator().manual_seed(0)
    phase = 3 * torch.randn(1, STATE, generator=generator)
    decay = torch.polar(torch.full_like(phase, -rate).exp(), phase)
    beta = torch.ones_like(decay)
    inputs = torch.randn(1, every, 1, 2 * DIM, generator=generator)
    state = torch.zeros(1, 1, STATE, 2 * DIM, dtype=torch.complex64)
    true = forward_states(state.to(torch.complex128), inputs.double(), decay.to(torch.complex128), beta)
    forward = forward_states(state, inputs, decay, beta)
    found = inverse_states(forward[:, -1], inputs, decay, beta)
    amplification = float(torch.tensor(rate * every, dtype=torch.float64).exp())
    return {
        "every": every,
        "rate": rate,
        "amplification": amplification,
        "inverse": ((found[:, 0] - true[:, 0]).norm() / true[:, 0].norm()).item(),
        "forward": ((forward - true).norm() / true.norm()).item(),
        "used": amplification <= LARGEST_AMPLIFICATION,
    }


def run(quick: bool = False) -> dict:
    lengths = (32, 64) if quick else LENGTHS
    jobs = [(b, n, 3 if n <= 1024 and not quick else 1) for b in BACKENDS for n in lengths if n <= LONGEST.get(b, n)]
    context = multiprocessing.get_context("spawn")
    rows = []
    for job in jobs:  # a process each, so that one's memory is not another's
        with context.Pool(1) as pool:
            rows.append(pool.apply(measure, job))
    return {
        "rows": rows,
        "errors": {backend: errors(backend, 64 if quick else 512) for backend in BACKENDS},
        "drift": [drift(every, rate) for rate in RATES for every in SEGMENTS],
    }


def table(record: dict) -> str:
    lengths = sorted({row["length"] for row in record["rows"]})
    rows = {(row["backend"], row["length"]): row for row in record["rows"]}
    lines = []
    for backend in BACKENDS:
        cells = [backend]
        for length in lengths:
            row = rows.get((backend, length))
            cells.append(
                f"{1e3 * row['forward']:.0f}; {1e3 * row['forward_and_backward']:.0f} ms; "
                f"{row['backward_bytes'] / 2**20:.0f} MiB"
                if row
                else "not run"
            )
        lines.append([*cells, f"{record['errors'][backend]:.1e}"])
    first = markdown(["backend", *(f"T = {n:,}" for n in lengths), "error against float64"], lines)
    every = sorted({row["every"] for row in record["drift"]})
    drifts = {(row["rate"], row["every"]): row for row in record["drift"]}
    lines = [
        [f"{rate:g}", *(_drift_cell(drifts[rate, k]) for k in every)]
        for rate in sorted({row["rate"] for row in record["drift"]})
    ]
    second = markdown(["decay a token", *(f"K = {k:,}" for k in every)], lines)
    about = (
        f"One sequence, {HEADS} heads, R = D = M = {DIM}, float32, one thread: forward; forward and backward; memory "
        "added by the latter. Below, the relative error of a state that the inverse recurrence has walked back K steps "
        f"to; in brackets where errors would grow more than {LARGEST_AMPLIFICATION:g} times, so that the segment is "
        f"computed forward again instead. {footnote(record)}"
    )
    return f"{first}\n\n{second}\n\n{about}"


def _drift_cell(row: dict) -> str:
    text = f"{row['inverse']:.0e}" if row["inverse"] < 1e3 else "lost"
    return text if row["used"] else f"({text})"


def plot(record: dict, path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for backend in BACKENDS:
        rows = [row for row in record["rows"] if row["backend"] == backend]
        lengths = [row["length"] for row in rows]
        left.loglog(lengths, [row["forward_and_backward"] for row in rows], marker="o", label=backend)
        right.loglog(lengths, [max(1, row["backward_bytes"]) / 2**20 for row in rows], marker="o", label=backend)
    left.set(xlabel="tokens", ylabel="forward and backward (s)")
    right.set(xlabel="tokens", ylabel="memory added by it (MiB)")
    left.legend()
    figure.savefig(path, dpi=120)
