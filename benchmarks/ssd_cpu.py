"""State space duality against Transformers' Mamba-2 and softmax attention on a CPU, float32."""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.utils import logging

from benchmarks.harness import footnote, in_ms, largest_error, markdown, time_in_turns
from modeling_interdomain import ssd_attention, ssd_step

HEADS, DIM, STATE, GROUPS, CHUNK = 12, 64, 128, 1, 64
# Mamba-2's time over ours at the same chunk, and SDPA's over ours at 4,096 tokens.
REQUIRED = {"forward": 2.0, "forward + backward": 2.0, "step": 4.0, "softmax at 4,096": 5.0}


def run(quick: bool = False) -> dict:
    logging.set_verbosity_error()  # that Mamba-2 has no kernels here is what is measured
    seconds = 0.1 if quick else 8.0
    record = {"relative_error": _verify()}
    record["rows"] = [_forward(length, seconds) for length in ([96] if quick else [1024, 4096])]
    record["rows"] += [_training(length, seconds) for length in ([96] if quick else [1024])]
    return record | {"steps": _steps(seconds / 2), "required": REQUIRED}


def _inputs(length: int) -> dict[str, torch.Tensor]:
    """Steps and rates as Mamba-2 starts with them."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "c": normal(1, length, GROUPS, STATE),
        "b": normal(1, length, GROUPS, STATE),
        "x": normal(1, length, HEADS, DIM),
        "step": 0.1 * 100 ** -torch.rand(1, length, HEADS, generator=generator),
        "rate": -torch.arange(1.0, HEADS + 1),
    }


def _ours(c, b, x, step, rate, **options) -> torch.Tensor:
    return ssd_attention(c, b, x * step[..., None], step * rate, chunk_size=CHUNK, **options)[0]


def _mamba2(c, b, x, step, rate, chunk_size: int = CHUNK) -> torch.Tensor:
    return mamba2_chunk_scan(x, step, rate, b, c, chunk_size)


def _softmax(tokens: list[torch.Tensor]) -> torch.Tensor:
    return scaled_dot_product_attention(*tokens, is_causal=True)


def _tokens(length: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, length, DIM) for _ in range(3)]


def _verify() -> float:
    """The largest relative error of both against the float64 recurrence; refuses above 1e-4."""
    inputs = _inputs(200)
    exact = _ours(**{name: x.double() for name, x in inputs.items()}, backend="recurrent")
    return largest_error([_ours(**inputs), _mamba2(**inputs)], [exact, exact], "State space duality is wrong")


def _forward(length: int, seconds: float) -> dict:
    inputs, tokens = _inputs(length), _tokens(length)
    functions = {
        "ours": lambda: _ours(**inputs),
        "mamba2": lambda: _mamba2(**inputs),
        "mamba2 at 256": lambda: _mamba2(**inputs, chunk_size=256),
        "softmax": lambda: _softmax(tokens),
    }
    with torch.no_grad():
        return {"what": "forward", "length": length, **time_in_turns(functions, seconds)}


def _training(length: int, seconds: float) -> dict:
    inputs, tokens = _inputs(length), _tokens(length)
    leaves = list(inputs.values())
    for x in (*leaves, *tokens):
        x.requires_grad_()
    functions = {
        "ours": lambda: torch.autograd.grad(_ours(**inputs).sum(), leaves),
        "mamba2": lambda: torch.autograd.grad(_mamba2(**inputs).sum(), leaves),
        "mamba2 at 256": lambda: torch.autograd.grad(_mamba2(**inputs, chunk_size=256).sum(), leaves),
        "softmax": lambda: torch.autograd.grad(_softmax(tokens).sum(), tokens),
    }
    return {"what": "forward + backward", "length": length, **time_in_turns(functions, seconds)}


def _steps(seconds: float) -> list[dict]:
    """With one thread and with all: what a step does is so little that the others help Mamba-2's larger parts alone."""
    threads, rows = torch.get_num_threads(), []
    try:
        for number in sorted({1, threads}):
            torch.set_num_threads(number)
            rows.append({"what": "step", "length": 1, "threads": number, **_step(seconds)})
    finally:
        torch.set_num_threads(threads)
    return rows


@torch.no_grad()
def _step(seconds: float) -> dict:
    """A hundred tokens of a sequence each time, new ones: a state that only decays ends in numbers that are slow."""
    inputs = _inputs(100)
    c, b, x, step = (inputs[name].unbind(1) for name in ("c", "b", "x", "step"))
    states = [torch.zeros(1, HEADS, DIM, STATE) for _ in range(2)]
    rate = inputs["rate"]
    rates = rate[:, None, None].expand(-1, DIM, STATE)

    def ours():
        for t in range(100):
            ssd_step(c[t], b[t], x[t] * step[t][..., None], step[t] * rate, state=states[0])
        return states[0]

    def mamba2():
        for t in range(100):
            wide = step[t][..., None].expand(-1, -1, DIM)
            mamba2_selective_state_update(states[1], x[t], wide, rates, b[t], c[t])
        return states[1]

    times = time_in_turns({"ours": ours, "mamba2": mamba2}, seconds)
    return {name: {k: v if k == "samples" else v / 100 for k, v in taken.items()} for name, taken in times.items()}


def table(record: dict) -> str:
    rows = []
    for row in [*record["rows"], *record["steps"]]:
        ours = row["ours"]["median"]
        rows.append(
            [
                row["what"] + (f", {_threads(row['threads'])}" if "threads" in row else ""),
                f"{row['length']:,}",
                in_ms(row["ours"]),
                in_ms(row["mamba2"]),
                f"{row['mamba2']['median'] / ours:.1f}x",
                f"{record['required'][row['what']]:g}x",
                *(
                    f"{in_ms(row[name])}, {row[name]['median'] / ours:.1f}x" if name in row else ""
                    for name in ("mamba2 at 256", "softmax")
                ),
            ]
        )
    header = ["", "tokens", "ours, ms", f"Mamba-2 at chunk {CHUNK}, ms", "speed against it", "required"]
    return "\n\n".join(
        [
            markdown([*header, "Mamba-2 at 256, ms", "softmax, ms"], rows),
            f"Medians (20th to 80th percentile). {HEADS} heads of {DIM}, N = {STATE}, {GROUPS} group, batch 1; "
            f"against softmax at 4,096 tokens {record['required']['softmax at 4,096']:g}x is required. "
            f"{footnote(record)}",
        ]
    )


def _threads(number: int) -> str:
    return f"{number} thread{'s' if number > 1 else ''}"
