"""The parts of a training run, without a command line and without output, for the quickstart and for comparisons.

Example:
    for progress in train(model, batches, steps=1000, learning_rate=3e-3):
        print(progress.step, progress.loss)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from examples.text_data import InputError, nll_of_logits
from modeling_interdomain import ChosenExperts, parameter_groups


def stays_on_cpu() -> bool:
    """Whether the Trainer must be kept from an accelerator that it would choose: Apple's GPUs have no float64."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == "mps"


class Progress(NamedTuple):
    """One optimiser step."""

    step: int
    """Steps done, from 1."""
    loss: float
    """Mean negative log-likelihood of the batch, in nats per token, before the step."""
    tokens_per_second: float
    """Predicted tokens of the batch over the time of the step."""
    learning_rate: float
    """Of the ordinary weights, in this step."""


def read_recipe(path: Path) -> dict[str, object]:
    """The lines of a recipe."""
    try:
        lines = yaml.safe_load(path.read_text()) or {}
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError(f"The recipe {path} is not YAML{f', see line {mark.line + 1}' if mark else ''}.") from error
    if not isinstance(lines, dict):
        raise InputError(f"The recipe {path} must have a line `name: value` for each option.")
    return lines


class ExpertUsage:
    """Counts which experts the layers of a model choose, forward after forward in training, until it is read.

    Of the layer where it is least, and of the tokens of this process: the share of the experts that were chosen at all,
    and the effective share, exp(entropy of the choices) / experts, which is 1 when all are chosen equally often. A
    retrieval that collapses falls towards k h / experts in both.
    """

    def __init__(self, model: torch.nn.Module):
        self.counts: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(experts := getattr(module, "chosen", None), ChosenExperts):
                counts = torch.zeros(module.expert_up.shape[0], dtype=torch.long, device=module.expert_up.device)
                experts.register_forward_hook(partial(self._count, counts))
                self.counts.append(counts)

    @staticmethod
    @torch.no_grad()
    def _count(counts: torch.Tensor, module: torch.nn.Module, inputs: Any, ids: torch.Tensor) -> None:
        if module.training:
            counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))

    def read(self) -> dict[str, float]:
        """ "experts_used" and "experts_effective" since the last time; nothing without experts or tokens."""
        shares = [counts / counts.sum() for counts in self.counts if counts.any()]
        for counts in self.counts:
            counts.zero_()
        if not shares:
            return {}
        effective = min(torch.special.entr(share).sum().exp().item() / len(share) for share in shares)
        used = min((share > 0).double().mean().item() for share in shares)
        return {"experts_used": round(used, 4), "experts_effective": round(effective, 4)}


def clip_gradients(
    optimizer: torch.optim.Optimizer, max_norm: float | None, recurrence_max_norm: float | None = None
) -> None:
    """Clip the gradient norm of all parameters, or that of the recurrence by itself; groups of `parameter_groups`."""
    groups = {group["name"]: group["params"] for group in optimizer.param_groups}
    if recurrence_max_norm is not None:
        torch.nn.utils.clip_grad_norm_(groups.pop("recurrence", []), recurrence_max_norm)
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_([p for parameters in groups.values() for p in parameters], max_norm)


def cosine_with_warmup(progress: float, warmup: float = 0.05, final: float = 0.1) -> float:
    """Factor of the learning rate at `progress` in [0, 1]: a line up until `warmup`, half a cosine down to `final`."""
    if progress < warmup:
        return progress / warmup
    decayed = min(1.0, (progress - warmup) / (1 - warmup)) if warmup < 1 else 1.0
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * decayed))


def check_finite(loss: float, step: int, name: str = "loss") -> None:
    """End a run whose loss is no number."""
    if not math.isfinite(loss):
        raise FloatingPointError(f"The {name} is {loss} at step {step}: try a smaller learning rate.")


def with_layer_loss(loss: torch.Tensor, output: Any) -> torch.Tensor:
    """A loss that was made of the logits of `output`, in training with what the layers of the model add to it."""
    added = getattr(output, "layer_loss", None)
    return loss if added is None else loss + added.to(loss.device)


def next_token_loss(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """What training minimises on windows [B, T + 1]: nats a token, and what the layers add."""
    windows = windows.to(next(model.parameters()).device)
    output = model(input_ids=windows[:, :-1], use_cache=False)
    return with_layer_loss(nll_of_logits(output.logits, windows).mean(), output)


def train(
    model: torch.nn.Module,
    batches: Iterable[torch.Tensor],
    *,
    steps: int | None = None,
    seconds: float | None = None,
    learning_rate: float = 3e-3,
    recurrence_learning_rate: float = 1e-3,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    warmup: float = 0.05,
    final: float = 0.1,
    max_grad_norm: float = 1.0,
    autocast_dtype: torch.dtype | None = None,
) -> Iterator[Progress]:
    """Train the model in place on batches of token ids [B, T + 1]; a generator of one `Progress` a step.

    It ends after `steps` or after `seconds` on the clock, whichever comes first, and the schedule of the learning rate
    follows the one that is nearer its end, so that it always completes. With `steps` alone (or with time to spare) the
    run is deterministic. `warmup` and `final` are fractions of the run and of the learning rate.
    """
    if steps is None and seconds is None:
        raise ValueError("train needs an end: steps, seconds or both.")
    device_type = next(model.parameters()).device.type
    groups = parameter_groups(model, learning_rate, weight_decay, recurrence_learning_rate)
    optimizer = torch.optim.AdamW(groups, betas=betas)
    peaks = [group["lr"] for group in optimizer.param_groups]
    model.train()
    started = time.perf_counter()
    for step, batch in enumerate(batches):
        step_started = time.perf_counter()
        elapsed = step_started - started
        if step == steps or (seconds is not None and elapsed >= seconds):
            return
        done = max((step + 1) / steps if steps else 0.0, elapsed / seconds if seconds else 0.0)
        factor = cosine_with_warmup(done, warmup, final)
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = peak * factor
        with torch.autocast(device_type, autocast_dtype, enabled=autocast_dtype is not None):
            loss = next_token_loss(model, batch)
        value = loss.item()
        check_finite(value, step + 1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        predicted = batch.shape[0] * (batch.shape[1] - 1)
        yield Progress(step + 1, value, predicted / (time.perf_counter() - step_started), learning_rate * factor)
