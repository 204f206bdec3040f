"""Continuous batching: many prompts, a fixed number of rows, and a new prompt as soon as a row is free."""

import operator
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.utils.logging import tqdm

from ..inputs.checks import check_prefill
from ..model_cache.cache import InterdomainCache
from .prompt_store import begin_reading, on_cpu, put_after, read_on, store_of
from .slots import Slots

# Options of `generate` that end or change a text, or return more about it; batching has none of them.
_UNHEEDED = (
    *("stop_strings", "max_time", "token_healing", "dola_layers", "constraints", "force_words_ids"),
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
)
# Options of the library's `generate_batch` with which its engine does more than write; False asks for nothing.
_ENGINES = ("record_timestamps", "persistent_manager")
ROWS = 8  # in flight at once, where nobody asks for another number
# Options that need several rows a prompt, or another way to write than one token a row and step; beside them the value
# that asks for nothing, as None does.
_SINGLE = {
    **{"num_beams": 1, "num_return_sequences": 1},
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha")),
}


class Request:
    """A prompt, what is written after it, and how its next token is chosen."""

    ids: torch.Tensor  # [1, T], the prompt and what is written
    processors: LogitsProcessorList
    room: int | None

    def __init__(self, name: str, prompt: Sequence[int], config, streaming: bool = False):
        self.name, self.prompt, self.config, self.streaming = name, prompt, config, streaming
        self.written: list[int] = []
        self.error: str | None = None
        self.cancelled = False
        self.keep: Callable[[list], None] | None = None  # keeps states in the prompt store, see `put_after`

    def prepare(self, model, called: str, unset: dict[str, bool]) -> None:
        """Check and set up a request before it is read; a bad prompt, or one that leaves no room, is an error.

        Args:
            called: what errors call the prompt.
            unset: of `unset_lengths`.
        """
        self.prompt, self.room = check_prompt(model, called, self.prompt), model.config.longest_text
        self.ids, length = torch.tensor([self.prompt], device=model.device), len(self.prompt)
        self.config = model._prepare_generated_length(
            deepcopy(self.config),
            **unset,
            model_input_name="input_ids",
            input_ids_length=length,
            inputs_tensor=self.ids,
        )
        model._validate_generated_length(self.config, length, unset["has_default_max_length"])
        self.processors = model._get_logits_processor(
            generation_config=self.config,
            input_ids_seq_length=length,
            encoder_input_ids=self.ids,
            device=model.device,
        )

    @property
    def finished(self) -> bool:
        if self.cancelled or self.error is not None:
            return True
        ends = self.config._eos_token_tensor
        ended = bool(self.written) and ends is not None and self.written[-1] in ends.tolist()
        return ended or len(self.prompt) + len(self.written) >= self.config.max_length

    def choose(self, logits: torch.Tensor) -> None:
        """The next token from logits `[1, vocab]`, as `generate` chooses it."""
        scores = self.processors(self.ids, logits.float())
        token = torch.multinomial(scores.softmax(-1), 1) if self.config.do_sample else scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=1)
        self.written.append(int(token))
        if not self.finished and self.room is not None and self.ids.shape[1] > self.room:
            self.error = f"{self.name} has come to the end of the {self.room} positions that this model knows."

    def output(self):
        # Imported here: only programs that batch wait for the library's engine.
        from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

        status = RequestStatus.FINISHED if self.finished else RequestStatus.DECODING
        return GenerationOutput(
            self.name,
            prompt_ids=self.prompt,
            generated_tokens=list(self.written),
            error=self.error,
            status=status if self.error is None else RequestStatus.FAILED,
        )


class Batch:
    """Requests that wait and requests in flight, which are the rows of a cache.

    If the model has a `prompt_store`, only what is new in a prompt is read, and states are kept as `generate` does.

    Args:
        model: whose layers keep states, or keys and values.
        rows: how many requests are in flight at once.
        tell: called with a request whenever it has a new token, or has failed.
        apart: where the token of a request cannot be chosen, that is its error alone, and the others go on.
    """

    def __init__(
        self, model, rows: int, tell: Callable[[Request], None] = lambda request: None, apart: bool = False
    ) -> None:
        self.model, self.rows, self.tell, self.apart = model, rows, tell, apart
        self.slots = Slots(model)
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []

    @property
    def requests(self) -> list[Request]:
        return [request for request in (*self.active, *self.waiting) if not request.finished]

    @torch.no_grad()
    def step(self) -> None:
        """One more token of every request in flight; those that wait take the rows that are free."""
        kept = [row for row, request in enumerate(self.active) if not request.finished]
        self.active, new = [self.active[row] for row in kept], []
        while self.waiting and len(self.active) < self.rows:
            request = self.waiting[0]
            if not request.finished:
                cache = self._read(request)
                self.tell(request)
            self.waiting.popleft()
            if not request.finished:
                self.active.append(request)
                new.append(cache)
        self.slots.change(kept, new)
        if not self.active:
            return
        logits = self.slots.step([request.written[-1] for request in self.active])
        for row, request in enumerate(self.active):
            self._choose(request, logits[row : row + 1])
            if request.finished and request.keep is not None:
                request.keep([([*request.prompt, *request.written[:-1]], on_cpu(self.slots.take(row)))])
            self.tell(request)

    def _choose(self, request: Request, logits: torch.Tensor) -> None:
        try:
            request.choose(logits)
        except Exception as error:
            if not self.apart:
                raise
            # The state has read one token more than a store would be told.
            request.error, request.keep = f"{type(error).__name__}: {error}", None

    def _read(self, request: Request) -> InterdomainCache:
        """Read a prompt and choose its first token; returns the cache."""
        cache, prompt, piece = InterdomainCache(self.model.config), request.ids, request.config.prefill_chunk_size
        reading = begin_reading(self.model, cache, prompt, piece)
        if reading is not None:
            reading.begin()
        self._choose(request, read_on(self.model, prompt[:, int(cache.get_seq_length()) :], cache, piece))
        if reading is not None:
            reading.finish(prompt)
            request.keep = partial(put_after, self.model, reading.found)
        return cache


def write_batch(model, prompts: Sequence[Sequence[int]], generation_config, limits: Any, options: dict[str, Any]):
    """`generate_batch` of a model, with `limits` of a `ContinuousBatchingConfig` or None."""
    rows, piece = limits_of(limits)
    options = {name: x for name, x in options.items() if x or name not in _ENGINES}
    options.pop("warmup", None)  # there is nothing to warm up
    rows, bar = options.pop("max_batch_size", rows), options.pop("progress_bar", False)
    unset = unset_lengths(model, generation_config, options)
    config, others = model._prepare_generation_config(generation_config, **options)
    if not isinstance(rows, int) or rows < 1:
        raise ValueError(f"max_batch_size must be positive, got {rows}.")
    if not hasattr(prompts, "__iter__"):
        raise ValueError(f"Prompts are a list of lists of token ids, got {type(prompts).__name__}.")
    if others:
        raise ValueError(
            f"generate_batch takes the options of a GenerationConfig; it does not know {', '.join(others)}."
        )
    check_way(config)
    if piece is not None:
        rows = min(rows, piece)
        bound_pieces(config, piece)
    if reason := why_not_batched(model):
        raise NotImplementedError(reason)
    model._prepare_special_tokens(config, True, device=model.device)
    requests = [Request(f"req_{number}", prompt, config) for number, prompt in enumerate(prompts)]
    for number, request in enumerate(requests):
        request.prepare(model, f"Prompt {number}", unset)
    batch = Batch(model, rows)
    batch.waiting.extend(requests)
    if (found := store_of(model)) is not None:
        store, fingerprint = found
        store.announce(fingerprint, [list(request.prompt) for request in requests])
    left = len(batch.requests)
    with tqdm(total=left, desc="Writing", unit="text", disable=not bar) as shown:
        while left:
            batch.step()
            if error := next((request.error for request in requests if request.error is not None), None):
                raise ValueError(f"{error[:-1]}: ask for fewer tokens.")
            before, left = left, len(batch.requests)
            shown.update(before - left)
    return {request.name: request.output() for request in requests}


def limits_of(limits: Any) -> tuple[int, int | None]:
    """The rows in flight, and the most tokens of a forward or None, of a `ContinuousBatchingConfig` or None."""
    names = "max_requests_per_batch", "max_batch_tokens"
    if limits is not None and not any(hasattr(limits, name) for name in names):
        raise ValueError(f"continuous_batching_config must be a ContinuousBatchingConfig, got {type(limits).__name__}.")
    rows, tokens = (getattr(limits, name, None) for name in names)
    given = [limit for limit in (rows, tokens) if limit is not None] or [ROWS]
    if min(given) < 1:
        raise ValueError(f"max_requests_per_batch and max_batch_tokens must be positive, got {min(given)}.")
    return min(given), tokens


def bound_pieces(config, tokens: int) -> None:
    """Read prompts in pieces of at most so many tokens."""
    config.prefill_chunk_size = min(tokens, config.prefill_chunk_size or tokens)


def unset_lengths(model, generation_config, options: dict[str, Any]) -> dict[str, bool]:
    """Whether the longest and shortest length are left to defaults, found out as `generate` does."""
    said = [SimpleNamespace(**options), generation_config, model.generation_config]
    return {
        f"has_default_{name}": all(getattr(where, name, None) is None for where in said)
        for name in ("max_length", "min_length")
    }


def why_not_batched(model) -> str | None:
    """One sentence, why rows of a model cannot begin and end at different times; None where they can."""
    names, kinds = model.config.mixers_per_layer, Slots(model).kinds
    for layer, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        if kind == "other":
            return (
                f'Layer {layer}, "{name}", keeps more than a state, or keys and values, and continuous batching does '
                "not know how to move a row of that: call generate() on a padded batch."
            )
    return None


def check_way(config) -> None:
    """Refuse a way to write that is not one token a row and step, and options without effect."""
    check_prefill(config)
    if asked := [name for name, usual in _SINGLE.items() if getattr(config, name, None) not in (None, usual)]:
        raise ValueError(
            f"Continuous batching writes one token a row and step: leave out {', '.join(asked)}, or use generate."
        )
    if asked := [name for name in _UNHEEDED if getattr(config, name, None) not in (None, False)]:
        raise ValueError(f"Continuous batching does not heed {', '.join(asked)}: leave it out, or use generate.")


def check_prompt(model, name: str, prompt: Sequence[int]) -> list[int]:
    """The ids of a prompt; one that is no list of ids, is empty or too long, or has unknown ids is refused."""
    if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
        raise ValueError(
            f"{name} must be a list of token ids, got {type(prompt).__name__}; several prompts are a list of such "
            "lists."
        )
    if not len(prompt):
        raise ValueError(f"{name} has no tokens; give it at least one, for example the first of a text.")
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError:
        raise ValueError(f"{name} must be a list of token ids, which are whole numbers.") from None
    if not all(0 <= token < model.config.vocab_size for token in ids):
        raise ValueError(f"{name} has a token outside of the vocabulary of {model.config.vocab_size:,}.")
    most = model.config.longest_text
    if most is not None and len(prompt) > most:
        raise ValueError(f"{name} has {len(prompt)} tokens, and this model knows {most} positions; shorten it.")
    return ids
