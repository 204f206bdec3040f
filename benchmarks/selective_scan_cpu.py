"""The selective scan against what Transformers' Mamba runs without its CUDA kernels, on a CPU, float32."""

import torch
from transformers.models.mamba.modeling_mamba import mamba_selective_scan, mamba_selective_state_update
from transformers.utils import logging

from benchmarks.harness import footnote, in_ms, largest_error, markdown, time_in_turns
from modeling_interdomain import selective_scan, selective_scan_step

CHANNELS, STATE = 1536, 16
# Mamba's time over ours.
REQUIRED = {"forward": 2.0, "forward + backward": 2.0, "step": 1.5}


def run(quick: bool = False) -> dict:
    logging.set_verbosity_error()  # that Mamba has no kernels here is what is measured
    seconds = 0.1 if quick else 8.0
    record = {"relative_error": _verify()}
    record["rows"] = [_forward(length, seconds) for length in ([48] if quick else [1024, 4096])]
    # Its autograd fills a tensor of all states for every token: the square of the length, minutes at 1,024.
    record["rows"] += [_training(length, seconds) for length in ([16] if quick else [128])]
    record["rows"] += [_step(seconds)]
    return record | {"required": REQUIRED}


def _inputs(length: int) -> list[torch.Tensor]:
    """C, B, x, steps and rates as Mamba starts with them."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    steps = 0.1 * 100 ** -torch.rand(1, length, CHANNELS, generator=generator)
    rates = -torch.arange(1.0, STATE + 1)[:, None].repeat(1, CHANNELS)
    return [normal(1, length, STATE), normal(1, length, STATE), normal(1, length, CHANNELS), steps, rates]


def _ours(c, b, x, step, rate, **options) -> torch.Tensor:
    return selective_scan(c, b, x, step, rate, **options)[0]


def _mamba(c, b, x, step, rate) -> torch.Tensor:
    return mamba_selective_scan(x.mT, step.mT, rate.mT, b.mT, c.mT).mT


def _verify() -> float:
    """The largest relative error of both against the float64 recurrence; refuses above 1e-4."""
    inputs = _inputs(100)
    exact = _ours(*(x.double() for x in inputs), backend="recurrent")
    return largest_error([_ours(*inputs), _mamba(*inputs)], [exact, exact], "The selective scan is wrong")


@torch.no_grad()
def _forward(length: int, seconds: float) -> dict:
    inputs = _inputs(length)
    functions = {"ours": lambda: _ours(*inputs), "mamba": lambda: _mamba(*inputs)}
    return {"what": "forward", "length": length, **time_in_turns(functions, seconds)}


def _training(length: int, seconds: float) -> dict:
    leaves = [x.requires_grad_() for x in _inputs(length)]
    functions = {
        "ours": lambda: torch.autograd.grad(_ours(*leaves).sum(), leaves),
        "mamba": lambda: torch.autograd.grad(_mamba(*leaves).sum(), leaves),
    }
    return {"what": "forward + backward", "length": length, **time_in_turns(functions, seconds)}


@torch.no_grad()
def _step(seconds: float) -> dict:
    """A hundred tokens of a sequence each time, new ones: a state that only decays ends in numbers that are slow."""
    *tokens, rate = _inputs(100)
    c, b, x, step = (y.unbind(1) for y in tokens)
    ours_state, mamba_state, turned = torch.zeros(1, STATE, CHANNELS), torch.zeros(1, CHANNELS, STATE), rate.T.clone()

    def ours():
        for t in range(100):
            selective_scan_step(c[t], b[t], x[t], step[t], rate, state=ours_state)
        return ours_state

    def mamba():
        for t in range(100):
            mamba_selective_state_update(mamba_state, x[t], step[t], turned, b[t], c[t])
        return mamba_state

    times = time_in_turns({"ours": ours, "mamba": mamba}, seconds)
    per_token = {name: {k: v if k == "samples" else v / 100 for k, v in taken.items()} for name, taken in times.items()}
    return {"what": "step", "length": 1, **per_token}


def table(record: dict) -> str:
    rows = [
        [
            row["what"],
            f"{row['length']:,}",
            in_ms(row["ours"]),
            in_ms(row["mamba"]),
            f"{row['mamba']['median'] / row['ours']['median']:.1f}x",
            f"{record['required'][row['what']]:g}x",
        ]
        for row in record["rows"]
    ]
    return "\n\n".join(
        [
            markdown(["", "tokens", "ours, ms", "Mamba, ms", "speed against it", "required"], rows),
            f"Medians (20th to 80th percentile). {CHANNELS:,} channels, N = {STATE}, batch 1. {footnote(record)}",
        ]
    )
