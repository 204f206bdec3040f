"""What decoding one token costs beside arithmetic: calls, each of which costs more than what it computes at batch 1."""

import pytest

from benchmarks.model_cpu import calls_a_layer


@pytest.mark.parametrize("name", ["interdomain", "rope-after", "grouped", "diagonal", "normalized", "s4d", "softmax"])
def test_a_token_takes_at_most_100_calls_a_layer(name, make_model):
    calls = calls_a_layer(lambda layers: make_model(name, num_hidden_layers=layers, token_mixers=mixer(name)))
    assert 0 < calls <= 100


def mixer(name: str) -> str:
    return name if name in ("s4d", "softmax") else "interdomain"
