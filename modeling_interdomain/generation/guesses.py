"""What all drafters share: the prompt is read without a draft, and tokens without a draft are not recorded."""

from typing import Any

import torch
from transformers.generation import CandidateGenerator

from ..model_cache.cache import InterdomainCache


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
