"""What decoding one token costs beside arithmetic: calls, each of which costs more than what it computes at batch 1."""

import pytest
import torch

from benchmarks.model_cpu import calls_a_layer


@pytest.mark.parametrize("name", ["interdomain", "rope-after", "grouped", "diagonal", "normalized", "s4d", "softmax"])
def test_a_token_takes_at_most_100_calls_a_layer(name, make_model):
    def make(layers: int):
        return make_model(name, num_hidden_layers=layers, token_mixers=mixer(name), feed_forwards="mlp")

    assert 0 < calls_a_layer(make) <= 100
    # As in `generate`: a mask without pads costs nothing.
    assert calls_a_layer(make, attention_mask=torch.ones(1, 10, dtype=torch.long)) == calls_a_layer(make)


@pytest.mark.parametrize(("name", "most"), [("forget-gates", 110), ("delta-rule", 145)])
def test_gates_and_a_correction_take_a_few_more(name, most, make_model):
    def make(layers: int):
        return make_model(name, num_hidden_layers=layers, token_mixers="interdomain", feed_forwards="mlp")

    assert 0 < calls_a_layer(make) <= most


@pytest.mark.parametrize("name", ["interdomain", "rope-after", "grouped", "diagonal"])
def test_six_tokens_take_at_most_a_half_more(name, make_model):
    """As many as a guess has: each of them as a step would take six times as many."""

    def make(layers: int):
        return make_model(name, num_hidden_layers=layers, token_mixers="interdomain", feed_forwards="mlp")

    assert 0 < calls_a_layer(make, tokens=6) <= 150


def mixer(name: str) -> str:
    return name if name in ("s4d", "softmax") else "interdomain"
