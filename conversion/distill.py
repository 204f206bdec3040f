"""Teaching a converted model: every new mixer what the attention it replaces computes, then all of it the text.

Of a run that was stopped, what has been learned is kept in a file: the same command goes on from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conversion.writing import save_state
from examples.text_data import encode, mean_nll
from examples.training import check_finite, clip_gradients, cosine_with_warmup, parameter_groups, with_layer_loss

Loss = Callable[[torch.Tensor], torch.Tensor]
Groups = list[dict[str, Any]]
PIECE = {"cpu": 64, "cuda": 2048}  # tokens whose predictions are compared at once: as caches hold, or kernels fill
EVERYTHING = ("",)  # the parameters whose names have it in them


class Stage(NamedTuple):
    """One part of the training.

    Attributes:
        make_loss: makes the loss of a batch of token ids `[B, T + 1]`, and says which parameters learn. A loss that
            needs no gradient has given the parameters theirs.
        make_groups: the groups of the optimiser, of those parameters; None, those of all training here.
        seconds: it ends then at the latest, and its schedule with it; interruptions do not count.
    """

    name: str
    make_loss: Callable[[], Loss]
    steps: int
    learning_rate: float
    make_groups: Callable[[], Groups] | None = None
    seconds: float | None = None


class Progress:
    """How far a run has come, kept in a file: stage, step, what has learned, losses and what was measured."""

    def __init__(self, file: Path, save_steps: int):
        self.file, self.save_steps = file, save_steps
        fresh: dict[str, Any] = {"stage": None, "perplexity": {}, "losses": {}}
        self.state = torch.load(file, weights_only=True) if file.is_file() else fresh
        self.perplexity: dict[str, Any] = self.state["perplexity"]
        self.losses: dict[str, list[float]] = self.state["losses"]
        self.seconds: dict[str, float] = self.state.get("took", {})  # of the stages that have ended

    def measured(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure once, whatever the number of interruptions."""
        if name not in self.perplexity:
            self.perplexity[name] = measure()

    def restore(self, stage: Stage, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        """The steps of this stage that are done, and the seconds that they have taken."""
        if self.state["stage"] != stage.name:
            return 0, 0.0
        model.load_state_dict(self.state.pop("model"), strict=False)
        optimizer.load_state_dict(self.state.pop("optimizer"))
        return self.state["step"], self.state.get("seconds", 0.0)

    def save(
        self, stage: Stage, step: int, seconds: float, model: PreTrainedModel, optimizer: torch.optim.Optimizer
    ) -> None:
        """The parameters that learn in this stage: those that learned in earlier ones are among them."""
        learned = {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}
        state = {"stage": stage.name, "step": step, "seconds": seconds}
        state |= {"perplexity": self.perplexity, "losses": self.losses, "took": self.seconds}
        save_state(state | {"model": learned, "optimizer": optimizer.state_dict()}, self.file)


def train_stages(
    model: PreTrainedModel,
    stages: list[Stage],
    make_batches: Callable[[int], Iterator[torch.Tensor]],
    progress: Progress,
    measure: Callable[[], float],
) -> None:
    """Train the stages one after the other, from the one that an earlier run had reached, and measure after each.

    `make_batches` is given the number of the stage, so that each can see other batches.
    """
    names = [stage.name for stage in stages]
    reached = progress.state["stage"]
    for number in range(names.index(reached) if reached else 0, len(stages)):
        stage = stages[number]
        train_stage(model, stage, make_batches(number), progress)
        progress.measured(stage.name, measure)


def train_stage(model: PreTrainedModel, stage: Stage, batches: Iterator[torch.Tensor], progress: Progress) -> None:
    """Train one stage, on from where an earlier run stopped."""
    loss_of = stage.make_loss()
    groups = parameter_groups(model, stage.learning_rate) if stage.make_groups is None else stage.make_groups()
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    peaks = [group["lr"] for group in optimizer.param_groups]
    done, spent = progress.restore(stage, model, optimizer)
    losses = progress.losses.setdefault(stage.name, [])
    del losses[done:]
    pending: list[tuple[int, torch.Tensor]] = []
    model.train()
    started = time.perf_counter() - spent
    total = None if stage.seconds else stage.steps  # where the clock ends it, nobody knows how many there will be
    with tqdm(total=total, initial=done, desc=stage.name, unit="step", dynamic_ncols=True) as bar:
        for step, batch in enumerate(islice(batches, done, stage.steps), start=done + 1):
            passed = (time.perf_counter() - started) / stage.seconds if stage.seconds else 0.0
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = peak * cosine_with_warmup(max(step / stage.steps, passed))
            optimizer.zero_grad()
            loss = loss_of(_on(model.device, batch))
            if loss.requires_grad:
                loss.backward()
            losses += _values(pending)  # that of the step before: a GPU has this one to do while it is waited for
            pending = [(step, loss.detach())]
            clip_gradients(optimizer, 1.0)
            optimizer.step()
            if losses:
                bar.set_postfix_str(f"loss {losses[-1]:.4f}, {batch.shape[1] - 1} tokens a text", refresh=False)
            bar.update()
            is_last = step == stage.steps or passed >= 1
            if step % progress.save_steps == 0 or is_last:
                losses += _values(pending)
                progress.save(stage, step, time.perf_counter() - started, model, optimizer)
            if is_last:
                break
    progress.seconds[stage.name] = time.perf_counter() - started
    model.eval()


def _values(pending: list[tuple[int, torch.Tensor]]) -> list[float]:
    """The losses of these steps, which are then no longer pending; refuses what is no number."""
    found = [(step, loss.item()) for step, loss in pending]
    pending.clear()
    for step, value in found:
        check_finite(value, step)
    return [value for _, value in found]


def _on(device: torch.device, batch: torch.Tensor) -> torch.Tensor:
    """A batch where the model is, without waiting for what a GPU does before."""
    if device.type != "cuda":
        return batch.to(device)
    return batch.pin_memory().to(device, non_blocking=True)


def distillation_loss(
    teacher: PreTrainedModel, student: PreTrainedModel, layers: list[int], learning: tuple[str, ...] = EVERYTHING
) -> Loss:
    """The squared error of each new mixer on what the teacher's layer reads, over the variance of what it answers.

    It gives the parameters of the new mixers, or those of them whose names have a part of `learning`, their gradients
    itself, layer by layer as the teacher reads on: of no more than one layer is anything kept.
    """
    student.requires_grad_(False)
    for layer in layers:
        for name, parameter in student.model.layers[layer].token_mixer.named_parameters():
            parameter.requires_grad_(any(part in name for part in learning))
    rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    errors: list[torch.Tensor] = []

    def learn(layer: int):
        def hook(module, arguments, keywords, output):
            inputs, wanted = keywords["hidden_states"], output[0]
            if not rotations:
                positions = torch.arange(inputs.shape[1], device=inputs.device)[None]
                rotations.update({int(n): rotary(inputs, positions) for n, rotary in student.model.rotary_embs.items()})
            with torch.enable_grad():
                answer, _ = student.model.layers[layer].token_mixer(inputs, position_embeddings=rotations)
                error = F.mse_loss(answer, wanted) / wanted.var() / len(layers)
                error.backward()
            errors.append(error.detach())

        return hook

    def loss(batch: torch.Tensor) -> torch.Tensor:
        rotations.clear()
        errors.clear()
        hooks = [
            teacher.model.layers[layer].self_attn.register_forward_hook(learn(layer), with_kwargs=True)
            for layer in layers
        ]
        try:
            with torch.no_grad():
                teacher.model(input_ids=batch[:, :-1], use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(errors).sum()

    return loss


def finetuning_loss(
    teacher: PreTrainedModel, student: PreTrainedModel, kl_weight: float, learning: tuple[str, ...] = EVERYTHING
) -> Loss:
    """Cross-entropy of the text, with `kl_weight` of it given to the divergence from the teacher's predictions; and
    what the layers of the student add to it.

    Leaves gradients to all parameters, or to those whose names have a part of `learning`.
    """
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(any(part in name for part in learning))

    def loss(batch: torch.Tensor) -> torch.Tensor:
        output = student(input_ids=batch[:, :-1], use_cache=False)
        logits = output.logits.flatten(0, 1)
        loss = torch.zeros((), device=logits.device)
        if kl_weight < 1:
            loss = (1 - kl_weight) * F.cross_entropy(logits.float(), batch[:, 1:].flatten())
        if kl_weight == 0:
            return with_layer_loss(loss, output)
        with torch.no_grad():
            wanted = teacher(input_ids=batch[:, :-1], use_cache=False).logits.flatten(0, 1)
        return with_layer_loss(loss + kl_weight * divergence(logits, wanted), output)

    return loss


def divergence(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of predictions from others, both logits `[N, vocab_size]`, in nats a token; `wanted` is given no gradient."""
    return _Divergence.apply(found, wanted)


class _Divergence(torch.autograd.Function):
    """In pieces, of which nothing is kept but the gradient: in float32 all of them would fill a GPU."""

    @staticmethod
    def forward(ctx, found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        size, gradients = PIECE.get(found.device.type, PIECE["cpu"]), torch.empty_like(found)
        total = torch.zeros((), device=found.device)
        for *logits, gradient in zip(found.split(size), wanted.split(size), gradients.split(size)):
            ours, theirs = (x.log_softmax(-1, dtype=torch.float32) for x in logits)
            weights = theirs.exp()
            total += torch.dot(weights.flatten(), theirs.sub_(ours).flatten())
            gradient.copy_(ours.exp_().sub_(weights))
        ctx.save_for_backward(gradients)
        return total / len(found)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * (gradient / len(gradients)), None


def in_bfloat16(loss_of: Loss) -> Loss:
    """The same loss with products of matrices in bfloat16; weights and what they learn stay as they are."""

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(batch.device.type, dtype=torch.bfloat16):
            return loss_of(batch)

    return loss


def perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: list[str], sequence_length: int
) -> float:
    """Of a token, in windows of `sequence_length`."""
    return math.exp(mean_nll(model, encode(tokenizer, documents), sequence_length))
