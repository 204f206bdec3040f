"""The study of guessing ahead: what it trains, counts and shows."""

import itertools
import math

import pytest
import torch

from benchmarks import speculation_study as study
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM


@pytest.fixture
def small(monkeypatch):
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3, "state_size": 8, "vocab_size": 64}
    monkeypatch.setattr(study, "SHAPE", study.SHAPE | shape)


def test_the_first_layers_learn_to_guess(small):
    """Their loss is that of a model that ends there, and both losses fall."""
    windows = torch.arange(33).repeat(4, 1) % 7 + 3
    training = {"steps": 30, "learning_rate": 1e-2}
    model, found = study.trained(study.fresh("interdomain", 3), itertools.repeat(windows), training)
    assert found["loss"] < math.log(64) / 2 > found["early_loss"]
    whole, early = study.losses(model, windows)
    torch.testing.assert_close(whole, model(windows, labels=windows).loss)
    fewer = InterdomainForCausalLM(InterdomainConfig(**study.SHAPE | {"num_hidden_layers": study.EXIT})).eval()
    fewer.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(early, fewer(windows, labels=windows).loss)


def test_every_way_is_measured(small, monkeypatch):
    monkeypatch.setattr(study, "NEW_TOKENS", 6)
    models = {name: study.fresh(name, 3).eval() for name in study.CONDITIONS}
    rows = study.measure(models, [torch.arange(12)[None] % 5 + 3], rounds=1)
    assert len(rows) == len(models) * len(study.WAYS) * len(study.CHOICES)
    plain = [row for row in rows if row["way"] == "plain"]
    assert all(row["tokens_per_forward"] == 1 for row in plain)
    assert all(row["tokens_per_forward"] >= 1 and row["seconds"]["median"] > 0 for row in rows)
    machine = dict.fromkeys(("cpu", "threads", "torch", "transformers", "commit", "date", "command"), "x")
    losses = {name: {"loss": 1.0, "early_loss": 2.0} for name in models}
    monkeypatch.setattr(study, "DEPTHS", (3,))
    rows = [{"layers": 3} | row for row in rows]
    text = study.table({"rows": rows, "training_losses": {"3": losses}, "machine": machine})
    assert text.count("| plain |") == len(study.CHOICES) and "1.00x" in text
