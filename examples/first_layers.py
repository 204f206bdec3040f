"""Drafts of the model's own first layers, as many as pay, in one file beside the package.

Self-speculation as in LayerSkip (arXiv 2404.16710) writes each guess with a forward of a few layers. The library calls
`generate()` for them, which costs a small model as much as the layers do, and always makes as many. Here the layers
are called themselves, as a model that shares its weights with the whole one, and how many guesses there are follows
from how many were right so far: of independent guesses, each right with the chance a, a check of n gives
(1 - a^(n+1)) / (1 - a) tokens (arXiv 2211.17192, eq. 1) for the price of the check and of n times the first layers.

It is no part of the package because it seldom pays: see benchmarks/results/speculation_study.md. The first layers must
have learned to say what comes next, as that study trains them.

Usage:
    model = EarlyExitForCausalLM.from_pretrained(folder)
    model.generate(ids, assistant_early_exit=2, max_new_tokens=64)
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers.generation import LogitsProcessorList
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

from modeling_interdomain import InterdomainCache, InterdomainForCausalLM
from modeling_interdomain.generation.lookup import DraftGenerator

# What is believed before anything was guessed, in guesses; and what is still known of earlier ones after each check.
RIGHT, TRIED, KEPT = 4.8, 6.0, 0.9
PAUSE = 16  # forwards without a guess until one is tried again; twice as many each time that it was wrong
CHECK = 1.1  # in steps of one token
# On a CPU a step is calls and the reading of weights. By the guesses that a check reads, and for more of them, what
# either costs in steps: calls as measured with layers of width 128, which are little else; and up to three rows are
# multiplied in little more time than one, more in up to twice that.
CALLS, CALLS_OF_MORE = {0: 1.0, 1: 1.5, 2: 1.6}, 1.95
READS, READS_OF_MORE = {0: 1.0, 1: 1.02, 2: 1.1}, 1.5
WEIGHTS_OF_CALLS = 1_700_000  # that are read in the time of a layer's calls
HEAD = 1.5  # what embedding, norm and head take, in layers


class EarlyExitForCausalLM(InterdomainForCausalLM):
    """The language model, whose `generate(assistant_early_exit=n)` drafts with its first n layers as much as pays.

    All else is as in `InterdomainForCausalLM`, whose own `assistant_early_exit` is that of the library.
    """

    def _get_candidate_generator(self, *, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        found = super()._get_candidate_generator(model_kwargs=model_kwargs, **kwargs)
        if type(found) is not EarlyExitCandidateGenerator:
            return found
        return self.within_positions(FirstLayers(found, kwargs["input_ids"].shape[1], model_kwargs.get("spared_cache")))


def first_layers(model: InterdomainForCausalLM, count: int) -> InterdomainForCausalLM:
    """A model that ends after the first `count` layers of another, with the modules and weights of the other."""
    part, body = copy.copy(model), copy.copy(model.model)
    part._modules, body._modules = (
        part._modules | {"model": body},
        body._modules | {"layers": model.model.layers[:count]},
    )
    part.config = body.config = copy.copy(model.config)
    part.config.num_hidden_layers = count
    return part


class FirstLayers(DraftGenerator):
    """Guesses of the first layers of a model, which must have learned to say what comes next.

    Args:
        drafts: the library's, whose limits hold: of how many layers, how many guesses there are at most, and, where the
            likeliest token is taken, how likely it has to be for another one.
        length: of the text so far; its attention mask may begin earlier, with what the model's cache has seen.
        spared: as in `DraftGenerator`. Default: None.
    """

    def __init__(
        self, drafts: EarlyExitCandidateGenerator, length: int, spared: InterdomainCache | None = None
    ) -> None:
        super().__init__(spared)
        whole, layers, settings = drafts.assistant_model, drafts.assistant_early_exit, drafts.generation_config
        self.model = first_layers(whole, layers)
        self.most, self.max_length = int(drafts.num_assistant_tokens), drafts.main_model_max_length
        self.least_likely = drafts.assistant_confidence_threshold or 0.0
        self.samples = settings.do_sample
        self.processors = LogitsProcessorList(drafts.logits_processor)
        mask = drafts.assistant_kwargs.get("attention_mask")
        self.mask = None if mask is None or bool(mask[:, -length:].all()) else mask[:, -length:]
        ends = getattr(settings, "_eos_token_tensor", None)
        self.ends = set() if ends is None else set(ends.flatten().tolist())
        self.cost = (layers + HEAD) / (whole.config.num_hidden_layers + HEAD)
        self.share = share_of_calls(whole) if whole.device.type == "cpu" else None
        self.cache: InterdomainCache | None = None
        self.right, self.tried, self.guessed = RIGHT, TRIED, 0
        self.pause, self.idle = PAUSE, 0

    def guess(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids = input_ids.to(self.model.device)
        most = min(self.most, self.max_length - ids.shape[1] - 1)  # the check itself writes one more
        count = guesses_that_pay(self.right / self.tried, self.cost, most, self.share)
        self.idle = 0 if count else self.idle + 1
        if self.idle > self.pause:
            count, self.idle, self.pause = min(1, most), 0, 2 * self.pause
        drawn: list[torch.Tensor] = []
        text = ids
        while len(drawn) < count:
            scores = self.processors(text, self.next_logits(text))
            chances = scores.softmax(dim=-1)
            token = chances.multinomial(1) if self.samples else chances.argmax(dim=-1, keepdim=True)
            drawn.append(scores)
            text = torch.cat([text, token], dim=1)
            unlikely = not self.samples and bool(chances[0, token[0, 0]] < self.least_likely)
            if unlikely or int(token) in self.ends:
                break
        self.guessed = len(drawn)
        return text[0, ids.shape[1] :], torch.stack(drawn, dim=1) if drawn else None

    def next_logits(self, text: torch.Tensor) -> torch.Tensor:
        """`[1, vocab_size]` after the text `[1, T]`, of which the cache forgets what was taken back."""
        if self.cache is None:
            self.cache = InterdomainCache(self.model.config)
            self.cache.allow_rollback(self.most + 1)
            if text.shape[1] > 1:
                self._read(text[:, :-1])  # never taken back, so not recorded
            self.cache.activate_past_recording()
        self.cache.crop(min(text.shape[1] - 1 - self.cache.get_seq_length(), 0))
        return self._read(text)

    def _read(self, text: torch.Tensor) -> torch.Tensor:
        """The logits after the rest of the text that the cache has not seen."""
        seen, mask = self.cache.get_seq_length(), self.mask
        if mask is not None:
            after = mask.new_ones(1, max(text.shape[1] - mask.shape[1], 0))
            mask = torch.cat([mask, after], dim=1)[:, : text.shape[1]]
        known = {"attention_mask": mask, "past_key_values": self.cache}
        output = self.model(text[:, seen:], **known, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].float()

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: Any) -> None:
        """Learn how many guesses are right: those before the first that is wrong were tried, and that one."""
        if not self.guessed:
            return
        matches = int(num_matches)
        if matches:
            self.pause = PAUSE
        self.right = KEPT * self.right + matches
        self.tried = KEPT * self.tried + min(matches + 1, self.guessed)


def share_of_calls(model: Any) -> float:
    """What part of a step on a CPU its calls take, the rest being weights that are read: 0 for the widest layers."""
    layers = model.model.layers
    weights = sum(part.weight.numel() for part in layers.modules() if isinstance(part, nn.Linear)) / len(layers)
    return WEIGHTS_OF_CALLS / (WEIGHTS_OF_CALLS + weights)


def guesses_that_pay(rate: float, cost: float, most: int, share: float | None) -> int:
    """How many guesses, up to `most`, give the most tokens a time: 0 where none pays.

    Args:
        rate: of the guesses that are right.
        cost: of a guess, in steps of the whole model.
        share: of calls in a step (`share_of_calls`); None on a GPU.
    """

    def check(count: int) -> float:
        if share is None:
            return CHECK if count else 1.0
        return share * CALLS.get(count, CALLS_OF_MORE) + (1 - share) * READS.get(count, READS_OF_MORE)

    def speed(count: int) -> float:
        return sum(rate**i for i in range(count + 1)) / (check(count) + count * cost)

    return max(range(most + 1), key=speed, default=0)
