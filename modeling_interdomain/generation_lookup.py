"""Prompt lookup that guesses only where a guess has a chance.

The library looks for the last two tokens in the text so far and, where they are new, for the last one alone. What came
after a single token hardly ever comes again, and a guess that is wrong costs more than the step it was to save: a state
has read what it must take back.
"""

import torch
from transformers.generation import CandidateGenerator, PromptLookupCandidateGenerator

MATCHED = 2  # tokens that must stand in the text before


class LongerLookup(CandidateGenerator):
    """The guesses of the library's prompt lookup, without those that only one token speaks for.

    Args:
        lookup: the library's.
    """

    def __init__(self, lookup: PromptLookupCandidateGenerator) -> None:
        self.lookup = lookup

    def get_candidates(self, input_ids: torch.Tensor, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[1, T]` to `[1, T + guesses]`, and no logits."""
        if not _stands_before(input_ids, MATCHED):
            return input_ids, None
        return self.lookup.get_candidates(input_ids, **kwargs)


def spare_guesses(generator: CandidateGenerator) -> CandidateGenerator:
    """A `LongerLookup` around what looks guesses up in the text, unless it was asked to go on from a single token."""
    looks_up = type(generator) is PromptLookupCandidateGenerator
    return LongerLookup(generator) if looks_up and generator.max_matching_ngram_size >= MATCHED else generator


def _stands_before(ids: torch.Tensor, length: int) -> bool:
    """Whether the last tokens of `[1, T]` also stand together somewhere before their end."""
    if ids.shape[1] <= length:
        return False
    windows = ids[0].unfold(0, length, 1)
    return bool((windows[:-1] == windows[-1]).all(-1).any())
