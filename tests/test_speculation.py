"""The study of guessing ahead: what it trains, counts and shows."""

import itertools
import json
import math
import sys

import pytest
import torch
from transformers.generation import PromptLookupCandidateGenerator

from benchmarks import speculation_study as study
from examples.first_layers import FirstLayers, guesses_that_pay, share_of_calls
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from modeling_interdomain.generation.lookup import MOST_SHARED, latest_place, likely_guesses

SMALL = study.Size(3, 32, 1e-2, autocast=False)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(study, "SHAPE", study.SHAPE | {"state_size": 8, "vocab_size": 64})
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": SMALL.layers}
    monkeypatch.setattr(study.Size, "shape", shape)


def test_the_first_layers_learn_to_guess(small):
    """Their loss is that of a model that ends there, and both losses fall."""
    windows = torch.arange(33).repeat(4, 1) % 7 + 3
    model, found = study.trained(study.fresh("interdomain", SMALL), itertools.repeat(windows), SMALL, steps=30)
    assert found["loss"] < math.log(64) / 2 > found["early_loss"]
    whole, early = study.losses(model, windows)
    torch.testing.assert_close(whole, model(windows, labels=windows).loss)
    shape = study.SHAPE | SMALL.shape | {"num_hidden_layers": study.EXIT}
    fewer = InterdomainForCausalLM(InterdomainConfig(**shape)).eval()
    fewer.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(early, fewer(windows, labels=windows).loss)


@pytest.mark.parametrize(
    ("text", "guessed"),
    [
        ([3, 4, 5, 6, 3, 4], [5, 6]),
        ([3, 4, 5, 9, 3, 4, 6, 9, 3, 4], [6, 9]),  # the latest place; the library goes on from the first
        ([7, 3, 4, 5, 9, 3, 4, 6, 7, 3, 4], [5, 9]),  # but of those that share most
        ([5, 3, 3, 3], [3, 3]),  # on into the guess itself
        ([8, 3, 4, 3, 4], [3, 4]),
        ([4, 5, 6, 3, 4], []),  # the library goes on from the 4
        ([3, 4, 5], []),
        ([3, 4], []),
        ([3], []),
    ],
)
def test_what_is_likely_is_guessed(text, guessed):
    lookup = PromptLookupCandidateGenerator(num_output_tokens=2, max_length=20)
    ids = torch.tensor([text])
    for device in ("cpu", "cuda"):
        found, logits = likely_guesses(lookup, torch.device(device)).guess(ids)
        assert found.tolist() == guessed and logits is None
    alone = PromptLookupCandidateGenerator(num_output_tokens=2, max_length=20, max_matching_ngram_size=1)
    assert likely_guesses(alone, ids.device) is alone
    assert likely_guesses(other := object(), ids.device) is other


def test_many_guesses_need_more_to_speak_for_them_on_a_cpu():
    lookup = PromptLookupCandidateGenerator(num_output_tokens=3, max_length=20)
    two, three = ([[3, 4, 5, 6, 3, 4]], [[7, 3, 4, 5, 7, 3, 4]])
    for device, text, guessed in (("cpu", two, []), ("cuda", two, [5, 6, 3]), ("cpu", three, [5, 7, 3])):
        found, _ = likely_guesses(lookup, torch.device(device)).guess(torch.tensor(text))
        assert found.tolist() == guessed


@pytest.mark.parametrize(
    ("limits", "guessed"), [({"max_length": 9}, [5, 6]), ({"max_length": 7}, []), ({"ends": 6}, [5])]
)
def test_guesses_end_where_the_text_does(limits, guessed):
    """One token is left to the check; and what follows an end is not guessed, nor the end."""
    ends = torch.tensor([limits.get("ends", 99)])
    lookup = PromptLookupCandidateGenerator(ends, num_output_tokens=9, max_length=limits.get("max_length", 20))
    text = [3, 4, 5, 6, 3, 4]
    found, _ = likely_guesses(lookup, torch.device("cuda")).guess(torch.tensor([text]))
    assert found.tolist() == guessed


def test_only_guesses_are_recorded():
    """Not the prompt, with which none comes, nor a step without one."""
    paused = []

    class Spared:
        def pause_recording(self, pause):
            paused.append(pause)

    lookup = PromptLookupCandidateGenerator(num_output_tokens=2, max_length=20)
    generator = likely_guesses(lookup, torch.device("cpu"), Spared())
    repeats, new = torch.tensor([[3, 4, 5, 6, 3, 4]]), torch.tensor([[3, 4, 5, 6, 3, 7]])
    for text, drafted in ((repeats, []), (repeats, [5, 6]), (new, [])):
        found, logits = generator.get_candidates(text)
        assert found[0, text.shape[1] :].tolist() == drafted and logits is None
    assert paused == [True, False, True]


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1.0])
def test_no_more_is_guessed_than_pays(share):
    def count(rate, cost, most=6):
        return guesses_that_pay(rate, cost, most, share)

    assert count(0.0, 0.1) == 0 and count(0.99, 0.01) == 6 and count(0.99, 0.01, 0) == 0
    assert count(0.9, 1.0) == 0  # a guess that costs a step saves none
    for rate in (0.3, 0.6, 0.9):
        counts = [count(rate, cost) for cost in (0.01, 0.1, 0.2, 0.4, 0.8)]
        assert counts == sorted(counts, reverse=True)
    for cost in (0.05, 0.3):
        counts = [count(rate / 20, cost) for rate in range(20)]
        assert counts == sorted(counts)


def test_guesses_pay_sooner_where_a_layer_computes_more():
    """Beside calls the check of two guesses costs half a step more, beside weights next to nothing."""
    shares = [share_of_calls(study.fresh("interdomain", size)) for size in study.SIZES]
    assert shares[0] == shares[1] > 0.85 and 0.2 < shares[2] < 0.5
    assert guesses_that_pay(0.5, 0.2, 4, shares[1]) == 0 < guesses_that_pay(0.5, 0.2, 4, shares[2])


def test_wrong_guesses_end_and_are_tried_again_ever_more_rarely(small, monkeypatch):
    """With first layers that know nothing, hardly a forward but the last has more than a token."""
    model, lengths = study.fresh("interdomain", SMALL).eval(), []

    def guess_wrong(self, text):
        return torch.nn.functional.one_hot(text[:, -1] * 0 + 1, 64).float()

    monkeypatch.setattr(FirstLayers, "next_logits", guess_wrong)
    model.model.layers[-1].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    ids = torch.arange(3, 9)[None]
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 120, "bad_words_ids": [[1]]}
    model.generate(ids, assistant_early_exit=1, **settings)
    tried = [place for place, length in enumerate(lengths) if place and length > 1]
    assert lengths[0] == 6 and len(lengths) == 120
    far = [later - earlier for earlier, later in zip(tried, tried[1:])]
    assert 3 <= len(tried) <= 6 and far == sorted(far) and far[-1] > 60


@pytest.mark.parametrize("least", [2, 3])
def test_the_place_is_that_of_a_search_one_by_one(least):
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 3, 20, 60):
        for _ in range(20):
            text = torch.randint(3, generator=generator, size=(length,))
            shared = {place: _shared(text, place) for place in range(1, length)}
            most = max(shared.values(), default=0)
            expected = max(place for place in shared if shared[place] == most) if most >= least else None
            assert latest_place(text, least) == expected


def _shared(text: torch.Tensor, place: int) -> int:
    """How many tokens before a place are those at the end of the text; no more than count."""
    pairs = zip(text[:place].flip(0), text.flip(0))
    return sum(1 for _ in itertools.islice(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs), MOST_SHARED))


def test_generation_spares_guesses(small, monkeypatch):
    """Of a text without a pair that comes twice, no forward but the first has more than a token."""
    model, lengths = study.fresh("interdomain", SMALL).eval(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr(model.lm_head, "forward", Parrot([3, 6, 3, 7]))
    ids = torch.tensor([[3, 4, 3, 5]])
    written = model.generate(ids, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)
    assert written[0, 4:].tolist() == [3, 6, 3, 7] and lengths == [4, 1, 1, 1]


class Parrot:
    """A head that says one token after another, whatever it reads."""

    def __init__(self, tokens: list[int]):
        self.tokens = iter(tokens)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(next(self.tokens)), 64).expand(*x.shape[:2], -1).float()


def test_every_way_is_measured(small, monkeypatch):
    monkeypatch.setattr(study, "NEW_TOKENS", 6)
    models = {name: study.fresh(name, SMALL).eval() for name in study.CONDITIONS}
    rows = study.measure(models, [torch.arange(12)[None] % 5 + 3], rounds=1)
    assert len(rows) == len(models) * len(study.WAYS) * len(study.CHOICES)
    plain = [row for row in rows if row["way"] == "plain"]
    assert all(row["tokens_per_forward"] == 1 for row in plain)
    assert all(row["tokens_per_forward"] >= 1 and row["seconds"]["median"] > 0 for row in rows)
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    losses = {name: {"loss": 1.0, "early_loss": 2.0} for name in models}
    run = {"layers": 3, "width": 32, "losses": losses, "ways": rows, "machine": machine}
    text = study.table({"runs": [run]})
    assert text.count("| plain |") == len(study.CHOICES) and "1.00x" in text


def test_only_sizes_that_are_missing_are_trained(monkeypatch, tmp_path):
    file, asked = tmp_path / "study.json", []
    file.write_text(json.dumps({"runs": [{"layers": 3, "width": 32}]}))
    monkeypatch.setattr(study, "FILE", file)
    monkeypatch.setattr(study, "SIZES", (SMALL, SMALL._replace(layers=2)))
    monkeypatch.setattr(study.condition_study, "prepare", lambda data: {})
    monkeypatch.setattr(study, "load_models", lambda layers, width, data: asked.append((layers, width)))
    monkeypatch.setattr(sys, "argv", ["speculation_study", "--train", "--threads", str(torch.get_num_threads())])
    study.main()
    assert asked == [(2, 32)]
