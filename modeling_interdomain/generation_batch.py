"""Continuous batching: many prompts, a fixed number of rows, and a new prompt as soon as a row is free."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList

from .cache_interdomain import InterdomainCache
from .cache_slots import Slots

# What ends or changes a text in `generate` alone.
_UNHEEDED = ("stop_strings", "max_time", "token_healing", "dola_layers", "constraints", "force_words_ids")
# What asks for more rows a prompt, or for another way to write, than one token a row and step.
_SINGLE = ("num_beams", "num_return_sequences", "prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha")


class _Request:
    """A prompt, what is written after it, and how its next token is chosen."""

    def __init__(self, model, number: int, prompt: Sequence[int], config):
        self.name, self.prompt = f"req_{number}", list(prompt)
        self.written: list[int] = []
        self.config = config
        self.ids = torch.tensor([self.prompt], device=model.device)
        self.processors: LogitsProcessorList = model._get_logits_processor(
            generation_config=config, input_ids_seq_length=len(self.prompt), device=model.device
        )
        most = config.max_new_tokens
        self.most = most if most is not None else max(config.max_length - len(self.prompt), 1)

    @property
    def finished(self) -> bool:
        ends = self.config._eos_token_tensor
        return len(self.written) >= self.most or (ends is not None and self.written[-1] in ends.tolist())

    def choose(self, logits: torch.Tensor) -> None:
        """The next token from logits `[1, vocab]`, as `generate` chooses it."""
        scores = self.processors(self.ids, logits.float())
        token = torch.multinomial(scores.softmax(-1), 1) if self.config.do_sample else scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=1)
        self.written.append(int(token))

    def output(self):
        # Here, because a program that never asks for it should not wait for what the library's engine imports.
        from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

        return GenerationOutput(
            self.name, prompt_ids=self.prompt, generated_tokens=self.written, status=RequestStatus.FINISHED
        )


@torch.no_grad()
def write_batch(model, prompts: Sequence[Sequence[int]], generation_config, rows: int, options: dict[str, Any]):
    """What `generate` would write after each prompt alone: `{request id: GenerationOutput}`, in the order of prompts.

    Args:
        model: all of its layers keep a state.
        prompts: token ids of each.
        generation_config: or None, that of the model.
        rows: how many are in flight at once.
        options: of `generate`, beside the configuration.

    Raises:
        ValueError: for rows, prompts and options that cannot be, before anything is read.
    """
    config, others = model._prepare_generation_config(generation_config, **options)
    _check(model, prompts, config, rows, others)
    model._prepare_special_tokens(config, True, device=model.device)
    waiting = deque(_Request(model, number, prompt, config) for number, prompt in enumerate(prompts))
    order, slots = list(waiting), Slots(min(rows, len(waiting)))
    active: list[_Request | None] = [None] * slots.number
    while waiting or any(active):
        for row, request in enumerate(active):
            while request is None and waiting:
                request = _begin(model, waiting.popleft(), slots, row)
            active[row] = request
        if not waiting and None in active:
            kept = [row for row, request in enumerate(active) if request is not None]
            slots.keep(kept)
            active = [active[row] for row in kept]
        if active:
            _step(model, active, slots)
    return {request.name: request.output() for request in order}


def _begin(model, request: _Request, slots: Slots, row: int) -> _Request | None:
    """Read a prompt into a row and choose the first token; None where that was the last."""
    cache, piece = InterdomainCache(model.config), request.config.prefill_chunk_size or len(request.prompt)
    for ids in request.ids.split(piece, dim=1):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    request.choose(logits)
    if request.finished:
        return None
    slots.admit(cache, row)
    return request


def _step(model, active: list[_Request | None], slots: Slots) -> None:
    """One token of every row; a free row reads a token too, which nobody will ask for."""
    last = [request.written[-1] if request else 0 for request in active]
    places = [len(request.prompt) + len(request.written) - 1 if request else 0 for request in active]
    ids, positions = (torch.tensor(x, device=model.device)[:, None] for x in (last, places))
    logits = model(ids, position_ids=positions, past_key_values=slots.cache, use_cache=True).logits[:, -1]
    for row, request in enumerate(active):
        if request is not None:
            request.choose(logits[row : row + 1])
            if request.finished:
                active[row] = None


def _check(model, prompts, config, rows: int, others: dict[str, Any]) -> None:
    if rows < 1:
        raise ValueError(f"max_batch_size must be positive, got {rows}.")
    if others:
        raise ValueError(
            f"generate_batch takes the options of a GenerationConfig; it does not know {', '.join(others)}."
        )
    if asked := [name for name in _SINGLE if getattr(config, name, None) not in (None, 1)]:
        raise ValueError(
            f"generate_batch writes one token a row and step: leave out {', '.join(asked)}, or use generate."
        )
    if asked := [name for name in _UNHEEDED if getattr(config, name, None)]:
        raise ValueError(f"generate_batch does not heed {', '.join(asked)}: leave it out, or use generate.")
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise ValueError(
                f"Prompt {number} must be a list of token ids, got {type(prompt).__name__}; several prompts are a list "
                "of such lists."
            )
        if not len(prompt):
            raise ValueError(f"Prompt {number} has no tokens; give it at least one, for example the first of a text.")
        if not all(0 <= token < model.config.vocab_size for token in prompt):
            raise ValueError(f"Prompt {number} has a token outside of the vocabulary of {model.config.vocab_size:,}.")
