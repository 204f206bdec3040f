"""Prompt lookup that drafts only what is likely.

The library goes on from where the last two tokens, or the last one, stand first in the text. Here it is the latest of
the places that share most with the end of the text; and as a text that repeats itself does not end where it is being
written, a guess runs on into itself. What came after a single token hardly ever comes again, and a guess that is wrong
costs more than the step it was to save: a state has read what it must take back, and a CPU multiplies several rows in
more time than one.
"""

from typing import Any

import torch
from transformers.generation import CandidateGenerator, PromptLookupCandidateGenerator

from ..model_cache.cache import InterdomainCache

SHARED, MOST_SHARED = 2, 8  # tokens that must stand in the text before, and the most that are looked at
# On a CPU, where a check of up to three rows takes little more than a step but that of more up to twice as long.
SHARED_BY_MANY, MANY_ROWS = 3, 4


class SparingGuesses(CandidateGenerator):
    """A draft that a model verifies in one forward, and takes back from where it disagrees.

    Args:
        spared: the cache of that model, if it need not record what comes without guesses.

    Attributes:
        max_length: of the text; a check of guesses writes one token more than these.
    """

    max_length: int

    def __init__(self, spared: InterdomainCache | None) -> None:
        self.spared, self.begun = spared, False

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[1, T]` to `[1, T + guesses]`, and the logits `[1, guesses, vocab_size]` they were drawn from, if any.

        Nothing is guessed with the prompt: to take guesses back all of it would be recorded and read once more; and a
        prompt of embeddings leaves no room for them.
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


class LikelyLookup(SparingGuesses):
    """Guesses from the text so far.

    Args:
        lookup: the library's, whose limits hold: how many tokens are guessed, and where a text ends.
        device: of the model.
        spared: as in `SparingGuesses`. Default: None.
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
        count = min(self.count, self.max_length - len(text) - 1)  # the check itself writes one more
        place = latest_place(text, self.shared) if count > 0 else None
        if place is None:
            return text[:0]
        guess = text[place + torch.arange(count) % (len(text) - place)]
        return guess if self.ends is None else guess[: int((torch.isin(guess, self.ends).cumsum(0) == 0).sum())]


def latest_place(text: torch.Tensor, least: int) -> int | None:
    """The place in the text `[T]` after which it may go on again: the latest of those that share most with its end.

    None where not even the last `least` tokens stand together before.
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
    """A `LikelyLookup` for what looks guesses up in the text, unless it was asked to go on from a single token."""
    if type(generator) is not PromptLookupCandidateGenerator or generator.max_matching_ngram_size < SHARED:
        return generator
    return LikelyLookup(generator, device, spared)
