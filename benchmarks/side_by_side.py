"""Models of one architecture trained side by side, on a GPU as one graph of kernels that is replayed step by step.

A step of a small model is a thousand short kernels: a processor launches them more slowly than a GPU runs them, and
each fills a small part of it. Captured once (`torch.cuda.CUDAGraph`) and on a stream a model, steps of several models
cost little more than one of them. What is computed is what `examples.training.train` computes.
"""

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from examples.training import cosine_with_warmup, parameter_groups

LOOK = 50  # steps after which losses are looked at, for which the GPU has to be waited for
WARM_UP = 2  # steps before a capture, in which kernels are compiled and tuned
KEEP = 300.0  # seconds after which what has been trained so far is kept

Batch = tuple[torch.Tensor, ...]
Loss = Callable[..., torch.Tensor]


class SideBySide:
    """Models of one architecture on one device, each with an optimiser, a learning rate and batches of its own.

    Args:
        models: on the device where they are trained.
        learning_rates: one each, the highest of its schedule.
        loss: of a model and the tensors of a batch, a number; on a GPU computed without waiting for it.
        autocast: the dtype in which losses are computed, None for that of the model.
        graph: on a GPU, whether steps are captured; where that fails, it is said and they are taken one by one.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        learning_rates: Sequence[float],
        loss: Loss,
        autocast: torch.dtype | None = None,
        graph: bool = True,
    ):
        self.models, self.loss, self.autocast = models, loss, autocast
        self.device = next(models[0].parameters()).device
        self.on_gpu = self.device.type == "cuda"
        self.graph = graph and self.on_gpu
        groups = [parameter_groups(model, rate) for model, rate in zip(models, learning_rates, strict=True)]
        options = {"fused": True, "capturable": True} if self.on_gpu else {}
        self.optimizers = [torch.optim.AdamW(each, betas=(0.9, 0.95), **options) for each in groups]
        self.groups = self._groups()
        self.peaks = torch.tensor([group["lr"] for group in self.groups], dtype=torch.float64).to(self.device)
        self.rates = self.peaks.float()
        if self.on_gpu:
            for group, rate in zip(self.groups, self.rates.unbind(), strict=True):
                group["lr"] = rate
        self.losses = torch.zeros(len(models), device=self.device)
        self._captured: dict[tuple, tuple[list[Batch], torch.cuda.CUDAGraph]] = {}
        for model in models:
            model.train()

    def step(self, batches: Sequence[Batch], factor: float) -> torch.Tensor:
        """One step of every model at `factor` times its learning rate; the losses before it, valid until the next."""
        self._set_rates(factor)
        if self.graph:
            found = self._replayed(batches)
            if found is not None:
                return found
        for index, batch in enumerate(batches):
            self._advance(index, [x.to(self.device) for x in batch])
        return self.losses

    def counted(self) -> None:
        """Say that parameters have changed, which a replay does not: layers keep tables of them where none has."""
        for model in self.models:
            torch.autograd.graph.increment_version(list(model.parameters()))

    def state(self) -> list[tuple[dict, dict]]:
        """What later steps depend on, of each model and its optimiser."""
        return [(model.state_dict(), own.state_dict()) for model, own in zip(self.models, self.optimizers, strict=True)]

    def take_up(self, state: list[tuple[dict, dict]]) -> None:
        """Go on from `state()` of the same models, on a CPU: a GPU's steps keep learning rates of their own."""
        for model, optimizer, (weights, moments) in zip(self.models, self.optimizers, state, strict=True):
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
        self.groups = self._groups()  # an optimiser makes new ones when it loads

    def _groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _set_rates(self, factor: float) -> None:
        if self.on_gpu:
            self.rates.copy_(self.peaks * factor)
            return
        for group, peak in zip(self.groups, self.peaks.tolist(), strict=True):
            group["lr"] = peak * factor

    def _advance(self, index: int, batch: Sequence[torch.Tensor]) -> None:
        model, optimizer = self.models[index], self.optimizers[index]
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            loss = self.loss(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        self.losses[index].copy_(loss.detach())

    def _replayed(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """The losses of a replayed step; None where steps cannot be captured."""
        kind = tuple(tuple(x.shape) for batch in batches for x in batch)
        if kind not in self._captured:
            static = [tuple(x.to(self.device) for x in batch) for batch in batches]
            try:
                self._captured[kind] = static, self._capture(static)
            except RuntimeError as error:
                self.graph = False
                self.not_captured = f"{type(error).__name__}: {error}"
                print(f"Steps are not captured: {self.not_captured}", file=sys.stderr, flush=True)
                return None
        static, graph = self._captured[kind]
        for kept, batch in zip(static, batches, strict=True):
            for target, x in zip(kept, batch, strict=True):
                target.copy_(x, non_blocking=True)
        graph.replay()
        return self.losses

    def _capture(self, static: Sequence[Sequence[torch.Tensor]]) -> torch.cuda.CUDAGraph:
        """A graph of a step of all models, which are left as they were."""
        streams = [torch.cuda.Stream(self.device) for _ in self.models]

        def advance_all() -> None:
            current = torch.cuda.current_stream(self.device)
            for index, stream in enumerate(streams):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    self._advance(index, static[index])
            for stream in streams:
                current.wait_stream(stream)

        kept = [x.detach().clone() for x in self._numbers()]
        try:
            for _ in range(WARM_UP):
                advance_all()
            torch.cuda.synchronize(self.device)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                advance_all()
        finally:
            torch.cuda.synchronize(self.device)
            with torch.no_grad():
                for target, x in itertools.zip_longest(self._numbers(), kept):
                    if x is None:  # an optimiser had no state before
                        target.zero_()
                    else:
                        target.copy_(x)
        return graph

    def _numbers(self) -> Iterable[torch.Tensor]:
        """All that a step changes: parameters, then the state of the optimisers."""
        for model in self.models:
            yield from model.parameters()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (x for x in state.values() if isinstance(x, torch.Tensor))


def run_steps(
    fleet: SideBySide,
    batches: Iterable[Sequence[Batch]],
    steps: int,
    look: Callable[[int], bool] = lambda step: False,
    kept: Path | None = None,
) -> tuple[torch.Tensor, list[str | None]]:
    """Train until `steps` or until `look`, called after each step with its number, says that all is done.

    A run on a CPU that takes hours is kept in the file `kept` every KEEP seconds; one that was stopped goes on from
    there, with the same batches, and ends as it would have without. The file is gone once all is done.

    Returns:
        The losses `[steps, K]`, and for each model None or at which step it had none.
    """
    history = torch.zeros(steps, len(fleet.models), device=fleet.device)
    done = before = 0 if kept is None else _taken_up(fleet, history, kept)
    last = time.monotonic()
    for done, batch in zip(range(before + 1, steps + 1), itertools.islice(batches, before, None)):
        history[done - 1].copy_(fleet.step(batch, cosine_with_warmup(done / steps)))
        if look(done) or (done % LOOK == 0 and not history[done - 1].isfinite().any()):
            break
        if kept is not None and time.monotonic() - last >= KEEP:
            _keep(fleet, history[:done], kept)
            last = time.monotonic()
    if kept is not None:
        kept.unlink(missing_ok=True)
    fleet.counted()
    history = history[:done].cpu()
    return history, [_failure(history[:, k].tolist()) for k in range(history.shape[1])]


def _keep(fleet: SideBySide, history: torch.Tensor, kept: Path) -> None:
    """Write what later steps depend on; the file before stays until the new one is whole."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    new = kept.with_name(f"{kept.name}.new")
    torch.save({"history": history, "trained": fleet.state()}, new)
    os.replace(new, kept)


def _taken_up(fleet: SideBySide, history: torch.Tensor, kept: Path) -> int:
    """The steps that `kept` holds, whose losses go into `history`, and 0 where there is none."""
    if not kept.exists():
        return 0
    found = torch.load(kept)
    fleet.take_up(found["trained"])
    done = len(found["history"])
    history[:done] = found["history"]
    return done


def _failure(losses: Sequence[float]) -> str | None:
    step = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if step is None:
        return None
    return f"The loss is {losses[step]} at step {step + 1}: try a smaller learning rate."
