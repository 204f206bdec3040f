"""Prompt lookup that drafts only what is likely.

The library continues from where the last two tokens, or the last one, stand first in the text. Here it is the latest of
the places that share most tokens with the end of the text; and a draft that comes to that end goes on into itself, for
a text that repeats itself does not stop doing so where it is being written. What followed a single token hardly ever
follows it again, and a wrong draft costs more than the step it was to save: the state must take its tokens back, and a
CPU takes more time for several rows than for one.
"""

from typing import Any

import torch
from transformers.generation import CandidateGenerator, PromptLookupCandidateGenerator

from ..model_cache.cache import InterdomainCache

SHARED, MOST_SHARED = 2, 8  # tokens that must match, and the most that are compared
# On a CPU: verifying up to three tokens takes little more than a step, verifying more up to twice as long.
SHARED_BY_MANY, MANY_ROWS = 3, 4


class DraftGenerator(CandidateGenerator):
    """Makes drafts, which a model verifies in one forward and takes back from where it disagrees.

    Args:
        spared: the cache of that model, if it is to record drafts alone.

    Attributes:
        max_length: of the text; verifying a draft writes one token more than the draft has.
    """

    max_length: int

    def __init__(self, spared: InterdomainCache | None) -> None:
        self.spared, self.begun = spared, False

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[1, T]` to `[1, T + draft]`, and the logits `[1, draft, vocab_size]` it was drawn from, if any.

        There is no draft with the prompt: to take it back, all of the prompt would have to be recorded and replayed;
        and beside a prompt of embeddings there is no place for ids.
        """
        guess, logits = self.guess(input_ids) if self.begun else (input_ids[0, :0], None)
        self.begun = True
        if self.spared is not None:
            self.spared.pause_recording(not len(guess))
        if not len(guess):
            return input_ids, None
        return torch.cat([input_ids, guess[None].to(input_ids.device)], dim=1), logits

    def guess(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What may follow on the text `[1, T]`, as ids, and the logits of `get_candidates`."""
        raise NotImplementedError


class LikelyLookup(DraftGenerator):
    """Drafts from the text so far.

    Args:
        lookup: the library's, whose limits hold: how many tokens a draft has, and where a text ends.
        device: of the model.
        spared: as in `DraftGenerator`. Default: None.
    """

    def __init__(
        self,
        lookup: PromptLookupCandidateGenerator,
        device: torch.device,
        spared: InterdomainCache | None = None,
    ) -> None:
        super().__init__(spared)
        self.count, self.max_length = lookup.num_output_tokens, lookup.max_length
        self.ends = None if lookup.eos_token_id is None else lookup.eos_token_id.cpu()
        dear = device.type == "cpu" and 1 + self.count >= MANY_ROWS
        self.shared = SHARED_BY_MANY if dear else SHARED

    def guess(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.likely(input_ids[0].cpu()), None

    def likely(self, text: torch.Tensor) -> torch.Tensor:
        """What may follow on the text `[T]`."""
        count = min(self.count, self.max_length - len(text) - 1)  # verifying writes one more
        place = latest_place(text, self.shared) if count > 0 else None
        if place is None:
            return text[:0]
        guess = text[place + torch.arange(count) % (len(text) - place)]
        return guess if self.ends is None else guess[: int((torch.isin(guess, self.ends).cumsum(0) == 0).sum())]


def latest_place(text: torch.Tensor, least: int) -> int | None:
    """The place in the text `[T]` from which it may go on again: the latest of those that share most with its end.

    None where even the last `least` tokens do not stand together before.
    """
    last = len(text) - 1
    found = (text[:-1] == text[-1:]).nonzero()[:, 0]
    for shared in range(1, MOST_SHARED):
        longer = found[found >= shared]
        longer = longer[text[longer - shared] == text[last - shared]]
        if not len(longer):
            if shared < least:
                return None
            break
        found = longer
    return int(found[-1]) + 1


def likely_guesses(
    generator: CandidateGenerator, device: torch.device, spared: InterdomainCache | None = None
) -> CandidateGenerator:
    """A `LikelyLookup` in the place of the library's prompt lookup, unless that may go on from a single token."""
    if type(generator) is not PromptLookupCandidateGenerator or generator.max_matching_ngram_size < SHARED:
        return generator
    return LikelyLookup(generator, device, spared)
