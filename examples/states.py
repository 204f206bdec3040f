"""What a state of fixed size makes possible, on a saved model in seconds: what keys and values make hard.

It writes after several prompts at once, with a fixed number of rows in flight; guesses ahead with what the text said
before, and takes wrong guesses back; joins what it remembers of two documents, and cuts a span out, without reading
anything again; and tells which tokens answered. What a model's layers cannot do is said in a sentence.

Usage:
    python -m examples.states runs/quickstart --tokens 20
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from examples.saved_model import PROMPT, add_folder, load, one_line
from examples.text_data import check_positive, encode_beginning, exit_code
from modeling_interdomain import InterdomainCache

PROMPTS = (PROMPT, "Return the", "If the file", "When a name")
DOCUMENTS = ("Open the file and return its first line.\n\n", "Return the number of lines in the file.\n\n")


class Guide:
    """A model and its tokenizer, and what is shown of them; each method gives the lines that are printed."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int):
        self.model, self.tokenizer = model, tokenizer
        self.settings = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}

    def prompts_at_once(self) -> list[str]:
        prompts = [encode_beginning(self.tokenizer, prompt)[0].tolist() for prompt in PROMPTS]
        found = self.model.generate_batch(prompts, max_batch_size=2, **self.settings)
        return [f"{p!r} -> {self._text(x.generated_tokens)!r}" for p, x in zip(PROMPTS, found.values(), strict=True)]

    def guessing_ahead(self) -> list[str]:
        ids = encode_beginning(self.tokenizer, DOCUMENTS[0] * 3)
        times, written = [], []
        for guesses in ({}, {"prompt_lookup_num_tokens": 5}):
            start = time.perf_counter()
            written.append(self.model.generate(ids, attention_mask=torch.ones_like(ids), **self.settings, **guesses))
            times.append(time.perf_counter() - start)
        same = "the same text" if torch.equal(*written) else "another text, by the rounding of a near tie"
        return [f"plain {times[0]:.2f} s, with prompt lookup {times[1]:.2f} s: {same}"]

    def documents_joined(self) -> list[str]:
        first, second, both = self._documents()
        away = self._difference(self.model.join_caches(first, second), both)
        return [
            f"the last layer's state is {away:.1%} away from that of reading both, the second's alone "
            f"{self._difference(second, both):.1%}"
        ]

    def span_cut_out(self) -> list[str]:
        first, second, both = self._documents()
        away = self._difference(self.model.cut_cache(both, None, first), second)
        return [
            f"without the first document the state is {away:.1%} away from that of the second alone, with it "
            f"{self._difference(both, second):.1%}"
        ]

    def which_answered(self) -> list[str]:
        ids = encode_beginning(self.tokenizer, DOCUMENTS[0] + "Open the file")
        maps = self.model(ids, output_attentions=True).attentions
        if not maps:
            raise ValueError("No layer of this model has a map of which token answered.")
        best = maps[-1][0, :, -1].abs().mean(0).topk(min(5, ids.shape[1])).indices.sort().values
        return [f"the last token asks, these answer: {', '.join(repr(self._text([x])) for x in ids[0, best])}"]

    def _documents(self) -> list[InterdomainCache]:
        """After the first, after the second at its place but alone, and after both."""
        first, second = (encode_beginning(self.tokenizer, text) for text in DOCUMENTS)
        begun = self._read(first, 0)
        return [begun, *(self._read(second, first.shape[1], x) for x in (None, copy.deepcopy(begun)))]

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _read(self, ids: torch.Tensor, start: int, cache: InterdomainCache | None = None) -> InterdomainCache:
        cache = cache or InterdomainCache(self.model.config)
        self.model(ids, past_key_values=cache, position_ids=torch.arange(start, start + ids.shape[1])[None])
        return cache

    def _difference(self, cache: InterdomainCache, other: InterdomainCache) -> float:
        states = [x.layers[-1].state for x in (cache, other)]
        return float((states[0] - states[1]).norm() / states[1].norm())


def show(title: str, part: Callable[[], list[str]]) -> None:
    try:
        lines = part()
    except (ValueError, NotImplementedError) as error:  # what these layers cannot do
        lines = [one_line(error)]
    print("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    check_positive(options, "tokens")
    logging.disable_progress_bar()
    guide = Guide(*load(options.folder), options.tokens)
    show("Several prompts at once", guide.prompts_at_once)
    show("Guessing ahead", guide.guessing_ahead)
    show("Two documents joined", guide.documents_joined)
    show("A span cut out", guide.span_cut_out)
    show("Which tokens answered", guide.which_answered)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_folder(parser)
    parser.add_argument("--tokens", type=int, default=20, help="tokens to write (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse_arguments(arguments)))


if __name__ == "__main__":
    sys.exit(main())
