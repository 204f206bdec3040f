"""Continuous batching of states: what is written is what `generate` writes after each prompt alone."""

import json

import numpy
import pytest
import torch
from accelerate import cpu_offload
from transformers import ContinuousBatchingConfig, GenerationConfig

from modeling_interdomain import InterdomainCache, StateStore
from modeling_interdomain.generation.prompt_store import store_of
from modeling_interdomain.generation.slots import Slots
from modeling_interdomain.mixers.softmax.mixer import SoftmaxMixer
from tests.conftest import LENGTHENED

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
    options = {"max_new_tokens": 6}
    found = recurrent_model.generate_batch(prompts, max_batch_size=rows, do_sample=False, **options)
    assert [x.prompt_ids for x in found.values()] == prompts and all(x.is_finished() for x in found.values())
    assert [x.generated_tokens for x in found.values()] == [alone(recurrent_model, x, **options) for x in prompts]


def test_sparse_branches_and_rotations_know_their_rows(make_model, prompts):
    sparse = {"token_mixers": "interdomain", "sparse_attention": "hax", "rope_placement": "after", "feature_dim": 6}
    model, options = make_model("hax", **sparse), {"max_new_tokens": 6}
    found = model.generate_batch(prompts, max_batch_size=3, do_sample=False, **options)
    assert [x.generated_tokens for x in found.values()] == [alone(model, x, **options) for x in prompts]


@pytest.mark.parametrize("kind", LENGTHENED)
def test_angles_of_the_length_are_those_of_each_row(kind, make_model, prompts):
    model = make_model("softmax", rope_parameters=LENGTHENED[kind], max_position_embeddings=8)
    found = model.generate_batch(prompts, max_batch_size=3, do_sample=False, max_new_tokens=8)
    assert [x.generated_tokens for x in found.values()] == [alone(model, x, max_new_tokens=8) for x in prompts]


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 30, "forced_eos_token_id": 3},
        {
            "max_new_tokens": 6,
            "min_new_tokens": 4,
            "encoder_repetition_penalty": 5.0,
            "encoder_no_repeat_ngram_size": 2,
        },
    ],
    ids=["as the library has it", "in all", "of the prompt"],
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_lengths_and_processors_are_those_of_each_prompt(make_model, prompts, options):
    model = make_model()
    expected = [alone(model, prompt, **options) for prompt in prompts]
    found = model.generate_batch(prompts, max_batch_size=2, do_sample=False, **options)
    assert [x.generated_tokens for x in found.values()] == expected
    if not options:
        assert {len(text) for text in expected} == {20}
    if "forced_eos_token_id" in options:
        assert all(len(prompt) + len(text) == 30 and text[-1] == 3 for prompt, text in zip(prompts, expected))


def test_the_librarys_own_way_there(make_model, prompts):
    """`generate` hands over where it is asked for pages of keys."""
    model = make_model("softmax-interdomain")
    ids = torch.tensor([prompts[0]])
    found = model.generate(ids, cache_implementation="paged", max_new_tokens=4, do_sample=False)
    assert found[0, 0].tolist() == prompts[0] + alone(model, prompts[0], max_new_tokens=4)


@pytest.mark.parametrize("limits", [{"max_requests_per_batch": 2}, {"max_batch_tokens": 3}], ids=str)
def test_the_librarys_limits_bound_a_forward(make_model, prompts, limits):
    model, sizes = make_model(), []
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate_batch(prompts, **options)
    model.model.embed_tokens.register_forward_pre_hook(lambda module, ids: sizes.append(tuple(ids[0].shape)))
    found = model.generate_batch(prompts, None, ContinuousBatchingConfig(**limits), **options)
    assert {name: x.generated_tokens for name, x in found.items()} == {
        name: x.generated_tokens for name, x in expected.items()
    }
    if "max_batch_tokens" in limits:
        assert max(rows * length for rows, length in sizes) == 3
    else:
        assert max(rows for rows, _ in sizes) == 2


def test_pieces_are_the_smaller_of_what_is_asked(make_model, prompts):
    model, sizes = make_model(), []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, ids: sizes.append(ids[0].numel()))
    for pieces, most in ((2, 6), (6, 2)):
        limits = ContinuousBatchingConfig(max_batch_tokens=most, max_requests_per_batch=1)
        model.generate_batch(prompts, None, limits, max_new_tokens=1, do_sample=False, prefill_chunk_size=pieces)
        assert max(sizes) == 2
        sizes.clear()


@pytest.mark.parametrize("limits", [4, {"max_requests_per_batch": 2}], ids=str)
def test_what_is_no_configuration_of_limits_is_refused(make_model, prompts, limits):
    with pytest.raises(ValueError, match="^continuous_batching_config must be a ContinuousBatchingConfig, got "):
        make_model().generate_batch(prompts, None, limits, max_new_tokens=1)
    with pytest.raises(ValueError, match="^continuous_batching_config must be a ContinuousBatchingConfig, got "):
        make_model().init_continuous_batching(continuous_batching_config=limits)


@pytest.mark.parametrize("shown", [False, True])
def test_callers_of_the_librarys_method_may_show_a_bar(make_model, prompts, capsys, shown):
    """As TRL's trainers call it."""
    settings = GenerationConfig(max_new_tokens=3, do_sample=False)
    options = {"record_timestamps": False, "persistent_manager": False, "warmup": True, "progress_bar": shown}
    found = make_model().generate_batch(prompts, settings, ContinuousBatchingConfig(), **options)
    assert all(len(x.generated_tokens) == 3 for x in found.values())
    assert (f"{len(prompts)}/{len(prompts)}" in capsys.readouterr().err) is shown


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
        ([[5]], {"max_batch_size": None}, "max_batch_size must be positive, got None"),
        (None, {}, "Prompts are a list of lists of token ids, got NoneType"),
        ([[5]], {"num_beams": 3}, "leave out num_beams, or use generate"),
        ([[5]], {"assistant_early_exit": 1}, "leave out assistant_early_exit, or use generate"),
        ([[5]], {"stop_strings": ["end"]}, "does not heed stop_strings: leave it out, or use generate"),
        ([[5]], {"max_time": 1.0}, "does not heed max_time"),
        ([[5]], {"output_scores": True}, "does not heed output_scores"),
        ([[5]], {"wide": 3}, "does not know wide"),
        ([[5]], {"record_timestamps": True}, "does not know record_timestamps"),
        ([[4.5]], {}, "Prompt 0 must be a list of token ids, which are whole numbers"),
        ([5, 6], {}, "Prompt 0 must be a list of token ids, got int"),
        (["five"], {}, "Prompt 0 must be a list of token ids, got str"),
        ([[5], [5] * 13], {}, "Prompt 1 has 13 tokens, and this model knows 12 positions"),
        ([[5] * 9], {"max_length": 9}, "Input length of input_ids is 9, but `max_length` is set to 9"),
        ([[5], [5] * 10], {"max_new_tokens": 9}, "req_1 has come to the end of the 12 positions.*: ask for fewer"),
    ],
)
def test_what_cannot_be_is_refused(make_model, inputs, options, message):
    model = make_model("softmax-interdomain", dynamic_mask="position", max_position_embeddings=12)
    with pytest.raises(ValueError, match=message):
        model.generate_batch(inputs, **options)
    assert model.generate_batch([[5] * 10], max_new_tokens=3)["req_0"].is_finished()


@pytest.mark.parametrize("dtype", ["int16", "uint8", "uint16", "int64"])
def test_numbers_of_any_whole_kind_are_ids(make_model, dtype):
    """As tokenised texts lie on disks; what comes back can be written as JSON."""
    model, prompt = make_model("interdomain"), [3, 4, 5]
    given = [numpy.array(prompt, dtype=dtype), torch.tensor(prompt, dtype=getattr(torch, dtype))]
    wanted = model.generate_batch([prompt], max_new_tokens=2)["req_0"].generated_tokens
    for output in model.generate_batch(given, max_new_tokens=2).values():
        assert output.generated_tokens == wanted and json.dumps(output.prompt_ids) == "[3, 4, 5]"


def test_models_that_cannot_say_why(make_model, monkeypatch):
    model = make_model("softmax")
    monkeypatch.setattr(SoftmaxMixer, "make_cache_layer", lambda *args: OwnLayer())
    with pytest.raises(NotImplementedError, match='Layer 0, "softmax", keeps more than .*: call generate'):
        model.generate_batch([[5]])
    assert not hasattr(model, "init_continuous_batching")


class OwnLayer:
    """Of a cache, of a kind that nobody knows."""


# ------------------------------------------------------------------------------------ with a prompt store


@pytest.fixture(params=["interdomain", "softmax-interdomain", "windowed"])
def stored(request, make_model):
    """A model with a store that keeps states at every fourth token."""
    model = make_model(request.param)
    model.prompt_store = StateStore(block=4)
    return model


def written(model, prompts, **options):
    found = model.generate_batch(prompts, do_sample=False, max_new_tokens=6, **options)
    return [x.generated_tokens for x in found.values()]


def read_by(model, call):
    """What a call gives, and how many tokens of prompts it has read."""
    before = model.prompt_store.tokens_read
    return call(), model.prompt_store.tokens_read - before


def expected_of(model, prompts):
    """What is written after each prompt alone, without a store."""
    store, model.prompt_store = model.prompt_store, None
    found = [alone(model, prompt, max_new_tokens=6) for prompt in prompts]
    model.prompt_store = store
    return found


def test_prompts_of_one_call_share_what_they_begin_with(stored, random_ids):
    begin = random_ids(1, 18)[0].tolist()
    prompts = [begin + random_ids(1, length, seed=length)[0].tolist() for length in (3, 1, 6, 9)]
    found, read = read_by(stored, lambda: written(stored, prompts, max_batch_size=2))
    assert found == expected_of(stored, prompts)
    assert read == len(prompts[0]) + sum(len(prompt) - 16 for prompt in prompts[1:])


def test_a_conversation_costs_what_is_new(stored, random_ids):
    """The next turns of several, by generate_batch or by generate, after an answer of either."""
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (11, 5, 8)]
    for turn in range(3):
        new = [random_ids(1, 2, seed=10 * turn + i)[0].tolist() for i in range(3)]
        answers = written(stored, prompts) if turn != 1 else [alone(stored, x, max_new_tokens=6) for x in prompts]
        assert answers == expected_of(stored, prompts)
        # Of an answer the last token has not been read, and of a prompt one is read again where all is known.
        prompts = [prompt + answer + more for prompt, answer, more in zip(prompts, answers, new, strict=True)]
        store = stored.prompt_store
        known = [store.longest(*key)[0] for key in ((store_of(stored)[1], prompt) for prompt in prompts)]
        assert known == [len(prompt) - 3 for prompt in prompts]
    (_, read) = read_by(stored, lambda: written(stored, prompts))
    assert read == 3 * len(prompts)


def test_a_store_that_cannot_take_part_is_left_alone(stored, random_ids):
    prompts = [random_ids(1, 9)[0].tolist()] * 2
    hook = stored.model.layers[0].register_forward_pre_hook(lambda module, args: None)
    found, read = read_by(stored, lambda: written(stored, prompts))
    hook.remove()
    assert read == 0 and found == expected_of(stored, prompts)


@pytest.mark.parametrize("places", [None, 1], ids=["all", "one-layer"])
def test_offloaded_weights(stored, places, random_ids):
    """They are on their device only while their module is called; nobody asks them where a state or a token belongs."""
    prompts = [random_ids(1, 9)[0].tolist()] * 2
    expected = expected_of(stored, prompts)
    part = stored if places is None else stored.model.layers[places]
    cpu_offload(part, execution_device=torch.device("cpu"))
    assert next(part.parameters()).is_meta and stored.device.type == "cpu"
    assert written(stored, prompts) == expected
    found = stored.generate(torch.tensor(prompts[:1]), do_sample=False, prompt_lookup_num_tokens=3, max_new_tokens=6)
    assert found[0, 9:].tolist() == expected[0]
    assert store_of(stored) is None  # nobody can take the fingerprint of these weights


@torch.no_grad()
def test_a_row_whose_window_is_not_full_sees_its_own_tokens_alone(make_model, random_ids):
    model, prompts = make_model("windowed"), [random_ids(1, 2, seed=1), random_ids(1, 9, seed=2)]
    caches = [InterdomainCache(model.config) for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        model(prompt, past_key_values=cache)
    slots = Slots(model)
    slots.change([], caches)
    found = slots.step([5, 6])
    for row, (prompt, token) in enumerate(zip(prompts, (5, 6), strict=True)):
        whole = torch.cat([prompt, torch.tensor([[token]])], dim=1)
        torch.testing.assert_close(found[row], model(whole, use_cache=False).logits[0, -1])
