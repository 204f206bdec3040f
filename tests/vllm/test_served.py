"""Answers of vLLM's engine are those of Transformers' `generate`: greedy tokens, and log-probabilities within 1e-4."""

import pytest

from tests.vllm.conftest import assert_answers, engine

# Every mixer, hybrids of them, and the variants that compute something else.
MODELS = {
    "interdomain": {},
    "interdomain-softmax": {},
    "softmax": {},
    "s4d": {},
    "s4d-grouped": {},
    "ssd": {},
    "mamba2": {},
    "selective-scan": {},
    "experts": {},
    "grouped": {},
    "rope-before": {},
    "fourier": {},
    "gated": {},
    "no-convolution": {},
    "linear-readout": {},
    "all-mixers": {
        "num_hidden_layers": 5,
        "token_mixers": ["interdomain", "ssd", "softmax", "selective_scan", "s4d"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "ssd_state_size": 6,
        "tie_word_embeddings": True,
        "residual_in_fp32": True,
    },
}


def prompts(random_ids, lengths) -> dict[str, list[int]]:
    return {f"text {i}": random_ids(1, length, seed=i)[0].tolist() for i, length in enumerate(lengths)}


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_generate(make_folder, random_ids, name):
    """One request, and then four of which one has a single token."""
    model, folder = make_folder(name if name != "all-mixers" else "interdomain", **MODELS[name])
    with engine(folder) as served:
        texts = prompts(random_ids, (23, 1, 40, 2, 9))
        first, *others = texts
        served.ask(first, texts[first], 6)
        served.finish()
        for text in others:
            served.ask(text, texts[text], 6)
        for text, answer in served.finish().items():
            assert_answers(model, texts[text], answer)
