"""Teaching a converted model: every new mixer what the attention it replaces computes, then all of it the text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conversion.writing import save_state
from examples.text_data import encode, mean_nll
from examples.training import clip_gradients, cosine_with_warmup, parameter_groups, with_layer_loss

Loss = Callable[[torch.Tensor], torch.Tensor]


class Stage(NamedTuple):
    """One part of the training."""

    name: str
    make_loss: Callable[[], Loss]
    """Makes the loss of a batch of token ids [B, T + 1] and says which parameters learn."""
    steps: int
    learning_rate: float


class Progress:
    """How far a run has come, kept in a file: stage, step, weights, optimiser and what was measured."""

    def __init__(self, file: Path, save_steps: int):
        self.file, self.save_steps = file, save_steps
        self.state = torch.load(file, weights_only=True) if file.is_file() else {"stage": None, "perplexity": {}}
        self.perplexity: dict[str, float] = self.state["perplexity"]

    def measured(self, name: str, measure: Callable[[], float]) -> None:
        """Measure once, whatever the number of interruptions."""
        if name not in self.perplexity:
            self.perplexity[name] = measure()

    def restore(self, stage: Stage, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> int:
        """The steps of this stage that are done."""
        if self.state["stage"] != stage.name:
            return 0
        model.load_state_dict(self.state.pop("model"))
        optimizer.load_state_dict(self.state.pop("optimizer"))
        return self.state["step"]

    def save(self, stage: Stage, step: int, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        state = {"stage": stage.name, "step": step, "perplexity": self.perplexity}
        save_state(state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.file)


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
    optimizer = torch.optim.AdamW(parameter_groups(model, stage.learning_rate), betas=(0.9, 0.95))
    peaks = [group["lr"] for group in optimizer.param_groups]
    done = progress.restore(stage, model, optimizer)
    model.train()
    with tqdm(total=stage.steps, initial=done, desc=stage.name, unit="step", dynamic_ncols=True) as bar:
        for step, batch in enumerate(islice(batches, done, stage.steps), start=done + 1):
            for group, peak in zip(optimizer.param_groups, peaks):
                group["lr"] = peak * cosine_with_warmup(step / stage.steps)
            loss = loss_of(batch.to(model.device))
            value = loss.item()
            if not math.isfinite(value):
                raise FloatingPointError(f"The loss is {value} at step {step}: try a smaller learning rate.")
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(optimizer, 1.0)
            optimizer.step()
            bar.set_postfix_str(f"loss {value:.3f}", refresh=False)
            bar.update()
            if step % progress.save_steps == 0 or step == stage.steps:
                progress.save(stage, step, model, optimizer)
    model.eval()


def distillation_loss(teacher: PreTrainedModel, student: PreTrainedModel, layers: list[int]) -> Loss:
    """The squared error of each new mixer on what the teacher's layer reads, over the variance of what it answers.

    Leaves gradients to the parameters of the new mixers alone.
    """
    student.requires_grad_(False)
    for layer in layers:
        student.model.layers[layer].token_mixer.requires_grad_(True)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def remember(layer: int):
        def hook(module, arguments, keywords, output):
            seen[layer] = keywords["hidden_states"], output[0]

        return hook

    def loss(batch: torch.Tensor) -> torch.Tensor:
        ids = batch[:, :-1]
        hooks = [
            teacher.model.layers[layer].self_attn.register_forward_hook(remember(layer), with_kwargs=True)
            for layer in layers
        ]
        with torch.no_grad():
            teacher.model(input_ids=ids, use_cache=False)
            for hook in hooks:
                hook.remove()
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            rotations = {
                int(size): rotary(seen[layers[0]][0], positions) for size, rotary in student.model.rotary_embs.items()
            }
        errors = []
        for layer, (inputs, wanted) in seen.items():
            answer, _ = student.model.layers[layer].token_mixer(inputs, position_embeddings=rotations)
            errors.append(F.mse_loss(answer, wanted) / wanted.var())
        return torch.stack(errors).mean()

    return loss


def finetuning_loss(teacher: PreTrainedModel, student: PreTrainedModel, kl_weight: float) -> Loss:
    """Cross-entropy of the text, with `kl_weight` of it given to the divergence from the teacher's predictions; and
    what the layers of the student add to it.

    Leaves gradients to all parameters.
    """
    student.requires_grad_(True)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        output = student(input_ids=batch[:, :-1], use_cache=False)
        logits = output.logits.float().flatten(0, 1)
        loss = F.cross_entropy(logits, batch[:, 1:].flatten())
        if kl_weight == 0:
            return with_layer_loss(loss, output)
        with torch.no_grad():
            wanted = teacher(input_ids=batch[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        wanted, found = wanted.log_softmax(dim=-1), logits.log_softmax(dim=-1)
        divergence = F.kl_div(found, wanted, log_target=True, reduction="batchmean")
        return with_layer_loss((1 - kl_weight) * loss + kl_weight * divergence, output)

    return loss


def perplexity(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: list[str], sequence_length: int
) -> float:
    """Of a token, in windows of `sequence_length`."""
    return math.exp(mean_nll(model, encode(tokenizer, documents), sequence_length))
