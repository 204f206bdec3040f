"""Continuous batching of states: what is written is what `generate` writes after each prompt alone."""

import pytest
import torch

PROMPTS = (7, 3, 12, 5, 1, 9, 4)


@pytest.fixture
def prompts(random_ids):
    return [random_ids(1, length, seed=length)[0].tolist() for length in PROMPTS]


def alone(model, prompt, **options):
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_as_after_each_prompt_alone(recurrent_model, prompts, rows):
    if set(recurrent_model.config.layer_types) != {"linear_attention"}:
        with pytest.raises(NotImplementedError, match="generate\\(\\) on a padded batch"):
            recurrent_model.generate_batch(prompts)
        return
    options = {"max_new_tokens": 6}
    found = recurrent_model.generate_batch(prompts, max_batch_size=rows, do_sample=False, **options)
    assert [x.prompt_ids for x in found.values()] == prompts and all(x.is_finished() for x in found.values())
    assert [x.generated_tokens for x in found.values()] == [alone(recurrent_model, x, **options) for x in prompts]


def test_sparse_branches_and_rotations_know_their_rows(make_model, prompts):
    sparse = {"token_mixers": "interdomain", "sparse_attention": "hax", "rope_placement": "after", "feature_dim": 6}
    model, options = make_model("hax", **sparse), {"max_new_tokens": 6}
    found = model.generate_batch(prompts, max_batch_size=3, do_sample=False, **options)
    assert [x.generated_tokens for x in found.values()] == [alone(model, x, **options) for x in prompts]


def test_requests_end_at_different_times(make_model, prompts):
    """At an end token of their own text, and with processors that look at it."""
    model = make_model()
    texts = [alone(model, prompt, max_new_tokens=12) for prompt in prompts]
    ends = sorted({texts[0][2], texts[3][5]})
    options = {"max_new_tokens": 12, "eos_token_id": ends, "repetition_penalty": 1.3, "prefill_chunk_size": 4}
    expected = [alone(model, prompt, **options) for prompt in prompts]
    assert len({len(text) for text in expected}) > 1
    found = model.generate_batch(prompts, max_batch_size=2, do_sample=False, **options)
    assert [x.generated_tokens for x in found.values()] == expected


def test_a_request_that_ends_with_its_first_token_needs_no_row(make_model, prompts):
    model = make_model()
    found = model.generate_batch(prompts, max_batch_size=2, do_sample=False, max_new_tokens=1)
    assert [x.generated_tokens for x in found.values()] == [alone(model, x, max_new_tokens=1) for x in prompts]
    assert model.generate_batch([]) == {}


def test_sampled_text_repeats_with_the_seed(make_model, prompts):
    model, texts = make_model(), []
    for _ in range(2):
        torch.manual_seed(5)
        found = model.generate_batch(prompts, do_sample=True, top_k=5, temperature=0.7, max_new_tokens=5)
        texts.append([x.generated_tokens for x in found.values()])
    assert texts[0] == texts[1]
    torch.manual_seed(6)
    found = model.generate_batch(prompts, do_sample=True, top_k=5, temperature=0.7, max_new_tokens=5)
    assert [x.generated_tokens for x in found.values()] != texts[0]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([[5], []], {}, "Prompt 1 has no tokens"),
        ([[5, 48]], {}, "Prompt 0 has a token outside of the vocabulary of 48"),
        ([[5]], {"max_batch_size": 0}, "max_batch_size must be positive, got 0"),
        ([[5]], {"num_beams": 3}, "leave out num_beams, or use generate"),
        ([[5]], {"stop_strings": ["end"]}, "does not heed stop_strings: leave it out, or use generate"),
        ([[5]], {"max_time": 1.0}, "does not heed max_time"),
        ([[5]], {"wide": 3}, "does not know wide"),
        ([5, 6], {}, "Prompt 0 must be a list of token ids, got int"),
        (["five"], {}, "Prompt 0 must be a list of token ids, got str"),
    ],
)
def test_what_cannot_be_is_refused(make_model, inputs, options, message):
    with pytest.raises(ValueError, match=message):
        make_model().generate_batch(inputs, **options)
