"""Whatever `generate()` does with a cache, it does without one: the same logits, not only the same tokens."""

import copy
import threading

import pytest
import torch
from accelerate import cpu_offload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache, StoppingCriteriaList
from transformers.cache_utils import StaticLayer
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

from examples import first_layers as generation_first_layers
from modeling_interdomain import InterdomainCache, InterdomainStaticCache
from tests.conftest import EXHAUSTIVE_PAIRS

MODES = {
    "greedy": {},
    "one-token": {"max_new_tokens": 1},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 1.3},
    "several-samples": {"do_sample": True, "num_return_sequences": 3},
    "two-beams": {"num_beams": 2},
    "long-beams": {"num_beams": 4, "length_penalty": 3.0, "num_return_sequences": 3, "eos_token_id": [5, 6, 7, 8, 9]},
    "short-beams": {"num_beams": 3, "length_penalty": -2.0, "early_stopping": True, "eos_token_id": [5, 6, 7, 8, 9]},
    "sampled-beams": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "repetition-penalty": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "guidance": {"guidance_scale": 2.0},
}


class Listener:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.fixture
def generate():
    """`generate(model, ids, **options)`: everything `generate()` can return, with a fixed seed."""

    def run(model, input_ids=None, **options):
        torch.manual_seed(11)
        if input_ids is not None:  # a generated pad token is a token like any other
            options = {"attention_mask": torch.ones_like(input_ids)} | options
        options = {"max_new_tokens": 7, "do_sample": False} | options
        return model.generate(
            input_ids, return_dict_in_generate=True, output_logits=True, output_scores=True, **options
        )

    return run


@pytest.fixture
def assert_same_generation(assert_same):
    def check(actual, expected):
        assert actual.sequences.tolist() == expected.sequences.tolist()
        for name in ("logits", "scores"):
            assert_same(torch.stack(actual[name]), torch.stack(expected[name]), rtol=1e-5, atol=1e-5)
        if "sequences_scores" in expected:
            assert_same(actual.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)

    return check


@pytest.fixture
def assert_logits_of_text(assert_same):
    """The logits of each step are those of one forward over the text so far."""

    def check(model, output):
        with torch.no_grad():
            whole = model(output.sequences, use_cache=False).logits.float()
        steps = torch.stack(output.logits, dim=1)
        assert_same(steps, whole[:, -steps.shape[1] - 1 : -1], rtol=1e-5, atol=1e-5)

    return check


# Modes of generation, chunked prefill, static caches.


@pytest.mark.parametrize("mode", MODES)
def test_mode_is_the_same_without_a_cache(model, mode, left_padded, generate, assert_same_generation):
    inputs = left_padded([6, 2])
    actual = generate(model, **inputs, **MODES[mode])
    assert_same_generation(actual, generate(model, **inputs, **MODES[mode], use_cache=False))


@pytest.mark.parametrize("mode", ["greedy", "long-beams"])
def test_variant_is_the_same_without_a_cache(recurrent_model, mode, left_padded, generate, assert_same_generation):
    inputs = left_padded([6, 2])
    actual = generate(recurrent_model, **inputs, **MODES[mode])
    assert_same_generation(actual, generate(recurrent_model, **inputs, **MODES[mode], use_cache=False))


def test_left_padded_rows_are_as_alone(any_model, left_padded, generate, assert_same):
    inputs = left_padded([3, 7, 1], width=9)
    together = generate(any_model, **inputs)
    for row, length in enumerate([3, 7, 1]):
        alone = generate(any_model, inputs["input_ids"][row : row + 1, -length:])
        assert together.sequences[row, 9:].tolist() == alone.sequences[0, length:].tolist()
        rows = torch.stack(together.logits)[:, row]
        assert_same(rows, torch.stack(alone.logits)[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("lengths", [[9], [9, 2, 5], [4, 2]], ids=["unpadded", "row-of-pads", "all-rows-pads"])
def test_prefill_in_chunks(model, size, lengths, left_padded, generate, assert_same_generation):
    inputs = left_padded(lengths, width=9)
    assert_same_generation(generate(model, **inputs, prefill_chunk_size=size), generate(model, **inputs))


def test_prefill_in_chunks_holds_nothing_of_the_whole_length(make_model, random_ids, generate):
    """The largest floating-point tensor of a prefill depends on the chunk, not on the length."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            for x in tree_leaves(output):
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    self.numbers = max(self.numbers, x.untyped_storage().nbytes())
            return output

    model = make_model("interdomain", vocab_size=8, hidden_size=16, intermediate_size=16)

    def largest(length, **options):
        with Largest() as seen:
            generate(model, random_ids(1, length) % 8, max_new_tokens=1, **options)
        return seen.numbers

    assert largest(512, prefill_chunk_size=32) == largest(128, prefill_chunk_size=32)
    assert largest(512) > 3 * largest(128)


@pytest.mark.parametrize("mode", ["greedy", "several-samples", "long-beams"])
def test_prefill_in_chunks_with_mode(model, mode, left_padded, generate, assert_same_generation):
    inputs = left_padded([2, 5], width=8)
    actual = generate(model, **inputs, **MODES[mode], prefill_chunk_size=3)
    assert_same_generation(actual, generate(model, **inputs, **MODES[mode]))


@pytest.mark.parametrize("mode", ["greedy", "several-samples", "long-beams"])
def test_static_cache(model, mode, left_padded, generate, assert_same_generation):
    inputs = left_padded([2, 6])
    actual = generate(model, **inputs, **MODES[mode], cache_implementation="static")
    assert_same_generation(actual, generate(model, **inputs, **MODES[mode]))


def test_static_cache_in_several_calls(model, random_ids, generate, assert_same_generation):
    for batch, length, new in [(1, 5, 9), (3, 2, 4), (1, 12, 1), (2, 1, 6)]:
        ids = random_ids(batch, length, seed=length)
        actual = generate(model, ids, max_new_tokens=new, cache_implementation="static")
        assert_same_generation(actual, generate(model, ids, max_new_tokens=new, use_cache=False))


def test_static_cache_is_as_long_as_the_longest_so_far(model, random_ids, generate):
    """A compiled step sees keys of the same shape, and need not be compiled again."""
    shapes = []
    for length, new in [(5, 7), (2, 3), (6, 4), (8, 9)]:
        cache = generate(
            model, random_ids(1, length), max_new_tokens=new, cache_implementation="static"
        ).past_key_values
        shapes.append([tuple(layer.keys.shape) for layer in cache.layers if layer.__dict__.get("keys") is not None])
    assert shapes[0] == shapes[1] == shapes[2]
    assert all(long[2] > short[2] for short, long in zip(shapes[0], shapes[3], strict=True))


def test_static_cache_with_chunked_prefill(model, left_padded, generate, assert_same_generation):
    inputs = left_padded([2, 5], width=8)
    actual = generate(model, **inputs, cache_implementation="static", prefill_chunk_size=3)
    assert_same_generation(actual, generate(model, **inputs))


def test_from_embeddings(model, left_padded, generate, assert_same):
    inputs = left_padded([2, 6])
    embedded = model.get_input_embeddings()(inputs["input_ids"])
    actual = generate(model, inputs_embeds=embedded, attention_mask=inputs["attention_mask"])
    assert_same(torch.stack(actual.logits), torch.stack(generate(model, **inputs).logits), rtol=1e-5, atol=1e-5)


def test_rows_that_end_early_leave_the_others_alone(model, left_padded, generate, assert_same):
    inputs = left_padded([6, 6, 2], seed=2)
    free = generate(model, **inputs, max_new_tokens=9)
    first = free.sequences[0, 7].item()  # ends row 0 after two tokens
    stopped = generate(model, **inputs, max_new_tokens=9, eos_token_id=first)
    for row in (1, 2):
        tokens = free.sequences[row, 6:].tolist()
        end = tokens.index(first) + 1 if first in tokens else len(tokens)
        assert stopped.sequences[row, 6 : 6 + end].tolist() == tokens[:end]
        rows = [torch.stack(output.logits)[:end, row] for output in (stopped, free)]
        assert_same(*rows, rtol=1e-5, atol=1e-5)


def test_generation_leaves_modes_and_gradients_alone(model, random_ids, generate):
    model.train()
    generate(model, random_ids(1, 4))
    assert model.training
    assert all(p.grad is None for p in model.parameters())


# Continuing from a cache.


def test_continue_from_the_returned_cache(any_model, left_padded, generate, assert_same):
    inputs = left_padded([6, 2, 4])
    whole = generate(any_model, **inputs, max_new_tokens=8)
    first = generate(any_model, **inputs, max_new_tokens=3)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    second = generate(
        any_model, first.sequences, attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=5
    )
    assert second.sequences.tolist() == whole.sequences.tolist()
    assert_same(torch.stack([*first.logits, *second.logits]), torch.stack(whole.logits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 4}, {"prompt_lookup_num_tokens": 3}, {"do_sample": True, "top_k": 1}],
    ids=["greedy", "in-chunks", "lookup", "sampled"],
)
@pytest.mark.parametrize("seen", [3, 10])
def test_only_what_is_new_with_the_whole_mask(any_model, seen, options, random_ids, generate, request):
    """As the library allows: ids that follow on the cache, more or fewer than it has seen, with the mask of both."""
    ids, cache = random_ids(1, 13), InterdomainCache(any_model.config)
    any_model(ids[:, :seen], past_key_values=cache)
    mask = torch.ones_like(ids)
    expected = generate(any_model, ids, max_new_tokens=4)
    if "prompt_lookup_num_tokens" in options:
        request.getfixturevalue("guess_ahead")(expected.sequences[:, seen:])
    found = generate(any_model, ids[:, seen:], attention_mask=mask, past_key_values=cache, max_new_tokens=4, **options)
    assert found.sequences[:, 13 - seen :].tolist() == expected.sequences[:, 13:].tolist()


WAYS = [{}, {"prefill_chunk_size": 4}, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"num_beams": 2}]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("length", [3, 7, 9])
@pytest.mark.parametrize("name", ["interdomain", "interdomain-softmax", "softmax", "windowed"])
def test_a_cache_that_has_read_all_is_refused(name, length, options, make_model, make_cache, random_ids, contents):
    """Without a mask of both: the library would read tokens again, or leave some out."""
    model = make_model(name)
    ids, cache = random_ids(1, 9), make_cache(model.config)
    model(ids, past_key_values=cache)
    before = contents(cache)
    said = rf"has read 9 tokens, and {{}} holds {length}.*: give the whole text and at least one token more"
    rest, mask = ids[:, :length], torch.ones(1, 9 + length, dtype=torch.long)
    for alone in ({}, {"attention_mask": torch.ones_like(rest)}):
        with pytest.raises(ValueError, match=said.format("input_ids") + r", or new ids with an attention_mask \["):
            model.generate(rest, past_key_values=cache, max_new_tokens=4, **alone, **options)
    embeds = model.get_input_embeddings()(rest)
    for alone in ({}, {"attention_mask": mask}):
        with pytest.raises(ValueError, match=said.format("inputs_embeds") + r"\.$"):
            model.generate(inputs_embeds=embeds, past_key_values=cache, max_new_tokens=4, **alone)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


@pytest.mark.parametrize("size", [0, -2, 1.5, True])
def test_pieces_of_a_prompt_hold_tokens(model, random_ids, size):
    ids, said = random_ids(1, 5), "prefill_chunk_size must be a positive number of tokens, or None for all, got "
    with pytest.raises(ValueError, match=said):
        model.generate(ids, prefill_chunk_size=size, max_new_tokens=2)
    with pytest.raises(ValueError, match=said):
        model.generate_batch(ids.tolist(), prefill_chunk_size=size, max_new_tokens=2)


def test_only_what_is_new_of_padded_rows(any_model, left_padded, generate):
    inputs, cache = left_padded([9, 4]), InterdomainCache(any_model.config)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    any_model(ids[:, :3], attention_mask=mask[:, :3], past_key_values=cache)
    found = generate(any_model, ids[:, 3:], attention_mask=mask, past_key_values=cache, max_new_tokens=4)
    expected = generate(any_model, **inputs, max_new_tokens=4)
    assert found.sequences[:, 6:].tolist() == expected.sequences[:, 9:].tolist()


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 2}], ids=["whole", "in-chunks"])
def test_chat_turn_by_turn(model, make_cache, options, random_ids, generate, assert_same_generation):
    cache = make_cache(model.config)
    text = random_ids(1, 0)
    for turn in range(3):
        text = torch.cat([text, random_ids(1, 3 + turn, seed=turn)], dim=1)
        answer = generate(model, text, past_key_values=cache, max_new_tokens=4, **options)
        assert_same_generation(answer, generate(model, text, max_new_tokens=4, use_cache=False))
        assert answer.past_key_values is cache
        text = answer.sequences


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_offloaded_parameters(any_model, options, random_ids, generate, assert_same_generation):
    """Every parameter is on its device while its module is called, and nobody reads it at another time."""
    ids = random_ids(1, 4).repeat(1, 3)
    expected = generate(any_model, ids, **options)
    offloaded = cpu_offload(any_model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert_same_generation(generate(offloaded, ids, **options), expected)


def test_streaming(model, random_ids, generate):
    listener = Listener()
    output = generate(model, random_ids(1, 5), streamer=listener)
    assert listener.ended
    assert listener.tokens == output.sequences[0].tolist()


# Assisted decoding: candidates are taken back when the main model disagrees.

ASSISTED = [
    ("interdomain", "interdomain"),
    ("interdomain", "softmax"),
    ("softmax", "interdomain"),
    ("interdomain-softmax", "softmax-interdomain"),
    ("softmax-interdomain", "interdomain"),
    ("normalized", "rope-after"),
    ("cheems", "mamba2"),
    ("mamba2", "inner-function"),
    ("value-mask", "cheems"),
]


def _small_assistant(make_model, name):
    return make_model(name, seed=5, hidden_size=16, intermediate_size=24, num_attention_heads=2)


def _similar_assistant(model, make_model, name):
    """The same model with noise: it is right often, and wrong often."""
    assistant = make_model(name)
    with torch.no_grad():
        for parameter in assistant.lm_head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return assistant


def test_beams_have_no_use_for_an_assistant(make_model, random_ids, generate):
    """The library says so in a warning, and goes on with the beams."""
    model, ids = make_model(), random_ids(1, 6)
    settings = {"num_beams": 2, "max_new_tokens": 6}
    found = generate(model, ids, assistant_model=model, **settings)
    assert found.sequences.tolist() == generate(model, ids, **settings).sequences.tolist()


@pytest.mark.each_value
@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.parametrize(("main", "assistant"), ASSISTED)
def test_assisted_decoding(main, assistant, tokens, make_model, random_ids, generate, assert_same_generation):
    model, assistant, ids = make_model(main), _small_assistant(make_model, assistant), random_ids(1, 6)
    assistant.generation_config.num_assistant_tokens = tokens
    actual = generate(model, ids, assistant_model=assistant, max_new_tokens=12)
    assert_same_generation(actual, generate(model, ids, max_new_tokens=12, use_cache=False))


@pytest.mark.parametrize("name", EXHAUSTIVE_PAIRS)
def test_assisted_decoding_of_every_pair(name, make_model, random_ids, generate, assert_same_generation):
    model, ids = make_model(name), random_ids(1, 6)
    actual = generate(model, ids, assistant_model=_similar_assistant(model, make_model, name), max_new_tokens=12)
    assert_same_generation(actual, generate(model, ids, max_new_tokens=12, use_cache=False))


@pytest.mark.parametrize("ours", ["main", "assistant"])
def test_assisted_decoding_beside_a_model_of_the_library(ours, make_model, random_ids, generate):
    torch.manual_seed(0)
    own, ids = make_model("interdomain"), random_ids(1, 6)
    shape = {"vocab_size": own.config.vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    theirs = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, eos_token_id=None)).eval()
    model, assistant = (own, theirs) if ours == "main" else (theirs, own)
    actual = generate(model, ids, assistant_model=assistant, max_new_tokens=12)
    assert actual.sequences.equal(generate(model, ids, max_new_tokens=12).sequences)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "name", ["interdomain", "interdomain-softmax", "softmax-interdomain", "normalized", "cheems", "mamba2"]
)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_assistant_that_is_often_right(name, do_sample, make_model, random_ids, generate, assert_logits_of_text):
    model = make_model(name)
    assistant = _similar_assistant(model, make_model, name)
    assistant.generation_config.num_assistant_tokens = 7
    assistant.generation_config.assistant_confidence_threshold = 0.0
    output = generate(model, random_ids(1, 6), assistant_model=assistant, do_sample=do_sample, max_new_tokens=20)
    assert_logits_of_text(model, output)


def test_more_candidates_than_the_configured_rollback(make_model, random_ids, generate, assert_same_generation):
    """The assistant's own settings say how many there are, not those of the model."""
    model = make_model(max_rollback=2)
    model.generation_config.num_assistant_tokens = 1
    assistant = _small_assistant(make_model, "interdomain")
    assistant.generation_config.num_assistant_tokens = 9
    assistant.generation_config.assistant_confidence_threshold = 0.0
    ids = random_ids(1, 6)
    actual = generate(model, ids, assistant_model=assistant, max_new_tokens=12)
    assert_same_generation(actual, generate(model, ids, max_new_tokens=12))


def test_more_lookup_tokens_than_the_configured_rollback(make_model, random_ids, generate, assert_same_generation):
    model, ids = make_model(max_rollback=4), random_ids(1, 20).repeat(1, 2)
    actual = generate(model, ids, prompt_lookup_num_tokens=12, max_new_tokens=14)
    assert_same_generation(actual, generate(model, ids, max_new_tokens=14))


@pytest.mark.parametrize("tokens", [2, 10])
def test_prompt_lookup(each_mixer, tokens, random_ids, generate, assert_same_generation, guess_ahead):
    """With what the text itself gives, and with guesses all along of which some are right."""
    ids = random_ids(1, 5).repeat(1, 4)
    options = {"prompt_lookup_num_tokens": tokens, "max_new_tokens": 12}
    expected = generate(each_mixer, ids, max_new_tokens=12)
    assert_same_generation(generate(each_mixer, ids, **options), expected)
    guess_ahead(expected.sequences)
    assert_same_generation(generate(each_mixer, ids, **options), expected)


@pytest.mark.parametrize("recorded", [False, True])
def test_what_prompt_lookup_records(recorded, recurrent_model, random_ids, generate, guess_ahead, contents):
    """All, where the user asked for it, and otherwise nothing in the end: the next turn is spared a record, too."""
    model, ids = recurrent_model, random_ids(1, 10)
    text = generate(model, ids, max_new_tokens=12).sequences
    guess_ahead(text)
    cache = InterdomainCache(model.config)
    if recorded:
        cache.activate_past_recording()
    generate(model, ids, past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=12)
    seen = cache.get_seq_length()
    assert cache.records is recorded and seen == 21
    before = contents(cache)
    if not recorded:
        with pytest.raises(ValueError, match="crop needs the past: call activate_past_recording"):
            cache.crop(-1)
        assert all(map(torch.equal, contents(cache), before))
        cache.activate_past_recording()
        model(text[:, seen:], past_key_values=cache)
    cache.crop(-15 if recorded else -1)
    left = cache.get_seq_length()
    expected = InterdomainCache(model.config)
    with torch.no_grad():
        model(text[:, :left], past_key_values=expected)
    for actual, other in zip(contents(cache), contents(expected), strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-4, atol=1e-5)


def test_a_refused_lookup_leaves_the_record_as_it_was(recurrent_model, random_ids):
    """One that fails half way through, too."""
    model, cache = recurrent_model, InterdomainCache(recurrent_model.config)

    class Streamer:
        def put(self, ids):
            if cache.get_seq_length():
                raise KeyboardInterrupt

    with pytest.raises(ValueError, match="batch_size"):
        model.generate(random_ids(2, 4), past_key_values=cache, prompt_lookup_num_tokens=2, max_new_tokens=2)
    assert not cache.records and not any(layer.paused for layer in cache.recurrent_layers())
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            random_ids(1, 4), past_key_values=cache, prompt_lookup_num_tokens=2, max_new_tokens=2, streamer=Streamer()
        )
    assert cache.get_seq_length() and not cache.records
    assert not any(layer.paused for layer in cache.recurrent_layers())


def test_a_copy_made_while_guesses_are_checked_can_be_told_to_record(recurrent_model, random_ids, guess_ahead):
    model, ids, copies = recurrent_model, random_ids(1, 6), []
    guess_ahead(model.generate(ids, max_new_tokens=12))
    cache = InterdomainCache(model.config)

    def keep(ids, scores, **kwargs):
        copies.append(copy.deepcopy(cache))
        return torch.zeros(len(ids), dtype=torch.bool)

    settings = {"past_key_values": cache, "prompt_lookup_num_tokens": 2, "max_new_tokens": 12}
    model.generate(ids, stopping_criteria=StoppingCriteriaList([keep]), **settings)
    kept = copies[0]
    kept.activate_past_recording()
    with torch.no_grad():
        model(random_ids(1, 2), past_key_values=kept)
    kept.crop(-2)
    assert kept.get_seq_length() == copies[0].get_seq_length() == 6


def _early_exit(model):
    """The same model with the drafts of examples/first_layers.py."""
    model.__class__ = generation_first_layers.EarlyExitForCausalLM
    return model


@pytest.mark.parametrize("threads", [2])
def test_first_layers_guess_beside_other_threads(threads, make_model, random_ids, generate):
    """Guesses change nothing that another thread reads."""
    model, ids = _early_exit(make_model(num_hidden_layers=3)), random_ids(1, 6)
    expected = generate(model, ids, max_new_tokens=12).sequences
    depths, found, done = set(), [], threading.Event()

    def watch():
        while not done.is_set():
            depths.add(model.config.num_hidden_layers)

    def write():
        found.append(generate(model, ids, max_new_tokens=12, assistant_early_exit=1).sequences)

    watcher, writers = threading.Thread(target=watch), [threading.Thread(target=write) for _ in range(threads)]
    for thread in (watcher, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    watcher.join()
    assert depths == {3} and len(found) == threads and all(text.equal(expected) for text in found)


@pytest.mark.parametrize("guesses", [{"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 1}])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"guidance_scale": 1.5}, "guidance_scale reads the text once more"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is known of one token"),
    ],
)
def test_what_does_not_go_with_guesses(guesses, asked, message, make_model, random_ids):
    model, cache = make_model(), InterdomainCache(make_model().config)
    with pytest.raises(ValueError, match=message):
        model.generate(random_ids(1, 5), past_key_values=cache, max_new_tokens=4, **guesses, **asked)
    assert not cache.get_seq_length() and not cache.records


@pytest.mark.parametrize("guesses", [{"prompt_lookup_num_tokens": 6}, {"assistant_early_exit": 1}])
def test_guesses_stay_where_positions_are_known(guesses, make_model, random_ids, generate, monkeypatch):
    """A text that may be longer than a mask by position, but ends before."""
    monkeypatch.setattr(generation_first_layers, "guesses_that_pay", lambda rate, cost, most, share: max(most, 0))
    limits = {"dynamic_mask": "position", "max_position_embeddings": 12}
    model, ids = _early_exit(make_model("softmax", **limits)), random_ids(1, 3).repeat(1, 2)
    expected = generate(model, ids, max_new_tokens=6).sequences
    model.generation_config.num_assistant_tokens = 6
    ends = {"eos_token_id": int(expected[0, -1]), "max_new_tokens": 30}
    assert generate(model, ids, **ends).sequences.equal(generate(model, ids, **ends, **guesses).sequences)


def test_assisted_decoding_continues_a_chat(model, make_model, random_ids, generate, assert_same_generation):
    assistant = _small_assistant(make_model, "interdomain")
    cache, text = InterdomainCache(model.config), random_ids(1, 4)
    for turn, helper in enumerate([None, assistant, None, assistant]):
        answer = generate(model, text, past_key_values=cache, assistant_model=helper, max_new_tokens=6)
        assert_same_generation(answer, generate(model, text, max_new_tokens=6, use_cache=False))
        text = torch.cat([answer.sequences, random_ids(1, 2, seed=turn)], dim=1)


def test_own_first_layers_as_the_assistant(each_mixer, random_ids, generate, assert_same_generation):
    ids = random_ids(1, 6)
    expected = generate(each_mixer, ids)
    assert_same_generation(generate(each_mixer, ids, assistant_early_exit=1), expected)
    assert_same_generation(generate(_early_exit(each_mixer), ids, assistant_early_exit=1), expected)


@pytest.fixture
def guess_always(monkeypatch):
    """The first layers guess as many as they may, in every step."""
    monkeypatch.setattr(generation_first_layers, "guesses_that_pay", lambda rate, cost, most, share: most)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
def test_first_layers_that_always_guess(
    each_mixer, count, do_sample, random_ids, generate, guess_always, assert_same_generation, assert_logits_of_text
):
    """Of two layers alike but for what each adds: some guesses are right, others not."""
    model = _early_exit(each_mixer)
    for name, parameter in model.model.layers[1:].named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data *= 0.05
    model.generation_config.update(num_assistant_tokens=count, assistant_confidence_threshold=0.0)
    ids, forwards = random_ids(1, 6), []
    model.model.layers[-1].register_forward_hook(lambda *_: forwards.append(1))
    options = {"max_new_tokens": 16, "do_sample": do_sample, "top_k": 0}
    actual = generate(model, ids, assistant_early_exit=1, **options)
    assert len(forwards) < 16  # of the last layer: what the first had guessed it has read together
    assert_logits_of_text(model, actual)
    if not do_sample:
        assert_same_generation(actual, generate(model, ids, **options))


@pytest.mark.parametrize("pads", [0, 2])
def test_what_first_layers_say(model, pads, random_ids, guess_always, monkeypatch):
    """The logits of a model that ends there, whatever was taken back before; and what was drawn from them."""
    ids = random_ids(1, 9)
    mask = torch.ones_like(ids)
    mask[:, :pads] = 0
    model.generation_config.update(num_assistant_tokens=3, assistant_confidence_threshold=0.0)
    settings = copy.deepcopy(model.generation_config)
    settings.update(assistant_early_exit=1, max_length=40, do_sample=True)
    settings._eos_token_tensor = None
    drafts = EarlyExitCandidateGenerator(ids, model, settings, {"attention_mask": mask})
    guesses = generation_first_layers.FirstLayers(drafts, ids.shape[1])
    text = ids
    with torch.no_grad():
        assert guesses.get_candidates(text)[0] is text  # the prompt is read alone
        for right in (0, 2, 3, 1):
            found, logits = guesses.get_candidates(text)
            longer = torch.cat([mask, mask.new_ones(1, found.shape[1] - ids.shape[1])], dim=1)
            with monkeypatch.context() as first:
                first.setattr(model.config, "num_hidden_layers", 1)
                expected = model(found[:, :-1], attention_mask=longer[:, :-1], use_cache=False).logits[:, -3:]
            torch.testing.assert_close(logits, expected.float(), rtol=1e-4, atol=1e-5)
            other = (found[:, text.shape[1] + right :][:, :1] + 1) % 40 + 3
            text = torch.cat([found[:, : text.shape[1] + right], other if other.numel() else random_ids(1, 1)], dim=1)


@pytest.mark.parametrize("guesses", [{"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.parametrize("recorded", [False, True])
def test_guesses_after_embeddings(model, guesses, recorded, random_ids, generate, guess_always):
    model = _early_exit(model)
    ids, cache = random_ids(1, 5).repeat(1, 2), InterdomainCache(model.config)
    if recorded:
        cache.activate_past_recording()
    embeddings = model.get_input_embeddings()(ids).detach()
    settings = {"inputs_embeds": embeddings, "max_new_tokens": 30}
    expected = generate(model, ids, **settings)
    actual = generate(model, ids, past_key_values=cache, **settings, **guesses)
    assert actual.sequences.equal(expected.sequences)


def test_guesses_after_embeddings_alone(model, random_ids, generate):
    """Where the library can."""
    settings = {"inputs_embeds": model.get_input_embeddings()(random_ids(1, 5)).detach(), "max_new_tokens": 30}
    expected = generate(model, **settings)
    assert generate(model, **settings, prompt_lookup_num_tokens=3).sequences.equal(expected.sequences)
    padded = {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}
    for refused in ({"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 3} | padded):
        cache = InterdomainCache(model.config)
        with pytest.raises(ValueError, match="give input_ids too, or leave the assistant and the mask out"):
            model.generate(past_key_values=cache, **settings, **refused)
        assert not cache.get_seq_length() and not cache.records


def test_first_layers_go_on_with_a_chat(model, random_ids, generate, guess_always, assert_same_generation):
    model = _early_exit(model)
    cache, text = InterdomainCache(model.config), random_ids(1, 4)
    for turn, layers in enumerate([None, 1, None, 1]):
        answer = generate(model, text, past_key_values=cache, assistant_early_exit=layers, max_new_tokens=6)
        assert_same_generation(answer, generate(model, text, max_new_tokens=6, use_cache=False))
        text = torch.cat([answer.sequences, random_ids(1, 2, seed=turn)], dim=1)


def test_a_guess_that_fails_leaves_the_model_whole(model, random_ids, guess_always, monkeypatch):
    depth = model.config.num_hidden_layers

    def fail(self, text):
        assert (self.model.config.num_hidden_layers, model.config.num_hidden_layers) == (1, depth)
        raise KeyboardInterrupt

    monkeypatch.setattr(generation_first_layers.FirstLayers, "_read", fail)
    with pytest.raises(KeyboardInterrupt):
        _early_exit(model).generate(random_ids(1, 4), assistant_early_exit=1, max_new_tokens=4)
    assert model.config.num_hidden_layers == depth


@pytest.mark.parametrize("layers", [-1, 0, 99, True, 1.0])
def test_layers_that_are_not_there_cannot_guess(model, layers, random_ids):
    cache = InterdomainCache(model.config)
    with pytest.raises(ValueError, match="assistant_early_exit must be from 1 to num_hidden_layers"):
        model.generate(random_ids(1, 4), past_key_values=cache, assistant_early_exit=layers, max_new_tokens=2)
    assert not cache.records and not cache.get_seq_length()


# What is refused, and that a refusal changes nothing.


@pytest.mark.parametrize("kind", ["quantized", "offloaded", "offloaded_static"])
def test_cache_implementations_that_are_refused(recurrent_model, kind, random_ids):
    with pytest.raises(ValueError, match=f'cache_implementation=\'{kind}\' is not possible.*use "dynamic" or "static"'):
        recurrent_model.generate(random_ids(1, 4), cache_implementation=kind, max_new_tokens=2)


@pytest.mark.skipif(hasattr(StaticLayer, "crop"), reason="static keys are taken back since Transformers 5.24")
def test_assisted_decoding_with_a_static_cache_is_refused(model, random_ids):
    with pytest.raises(ValueError, match="Static cache"):
        model.generate(random_ids(1, 4), prompt_lookup_num_tokens=2, cache_implementation="static")


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="static keys are taken back since Transformers 5.24")
@pytest.mark.parametrize("guesses", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}], ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_assisted_decoding_with_a_static_cache(each_mixer, guesses, given, random_ids):
    ids, settings = random_ids(1, 6).repeat(1, 2), {"max_new_tokens": 12, "do_sample": False}
    cache = InterdomainStaticCache(each_mixer.config, max_cache_len=32)
    asked = {"past_key_values": cache} if given else {"cache_implementation": "static"}
    expected = each_mixer.generate(ids, use_cache=False, **settings)
    assert each_mixer.generate(ids, **settings, **guesses, **asked).equal(expected)
    if given:
        assert cache.get_seq_length() == expected.shape[1] - 1 and not cache.records


STOCK = {
    "DynamicCache": lambda config: DynamicCache(config=config),
    "StaticCache": lambda config: StaticCache(config=config, max_cache_len=16),
}


@pytest.mark.parametrize("name", ["interdomain", "interdomain-softmax", "softmax-interdomain"])
@pytest.mark.parametrize("call", ["generate", "forward"])
@pytest.mark.parametrize("stock", STOCK)
def test_stock_cache_for_a_recurrent_model_is_refused(name, call, stock, make_model, random_ids, contents):
    model, ids = make_model(name), random_ids(1, 4)
    cache = STOCK[stock](model.config)
    before = contents(cache)
    refusal = rf"{stock}.*InterdomainCache\(model.config\)"
    with pytest.raises(ValueError, match=refusal), torch.no_grad():
        if call == "generate":
            model.generate(ids, past_key_values=cache, max_new_tokens=2)
        else:
            model(ids, past_key_values=cache)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


@pytest.mark.parametrize("stock", STOCK)
def test_stock_cache_for_softmax(stock, make_model, random_ids, generate, assert_same_generation):
    model, ids = make_model("softmax"), random_ids(2, 4)
    cache = STOCK[stock](model.config)
    assert_same_generation(generate(model, ids, past_key_values=cache), generate(model, ids, use_cache=False))


@pytest.mark.parametrize("cache", [InterdomainCache, InterdomainStaticCache])
def test_offloading_is_refused(cache, model):
    with pytest.raises(ValueError, match="is not offloaded: leave offloading=False"):
        cache(config=model.config, max_cache_len=16, offloading=True)


def test_embeddings_of_more_than_the_ids(model, random_ids, generate):
    """A prompt that no ids tell stands before those that are part of the answer; the mask is that of the embeddings."""
    ids = random_ids(1, 8)
    given = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "max_new_tokens": 4}
    found = generate(model, ids[:, 3:], attention_mask=torch.ones(1, 8, dtype=torch.long), **given)
    assert found.sequences[:, 5:].tolist() == generate(model, **given).sequences.tolist()


@pytest.mark.parametrize("given", [((None, None),) * 2, [], {}], ids=lambda x: type(x).__name__)
def test_what_is_no_cache_is_refused(given, model, random_ids):
    for call in (model, model.generate):
        with pytest.raises(ValueError, match=rf"past_key_values must be a cache, got {type(given).__name__}; .*Inter"):
            call(random_ids(1, 2), past_key_values=given)


@pytest.mark.parametrize("name", ["interdomain-softmax", "softmax-interdomain", "softmax"])
def test_static_cache_without_room_is_refused(name, make_model, random_ids, contents):
    model, ids = make_model(name), random_ids(1, 7)
    cache = InterdomainStaticCache(model.config, max_cache_len=6)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        before = contents(cache)
        with pytest.raises(ValueError, match="room for 6 tokens, and this needs 7; .*max_cache_len"):
            model(ids[:, 4:], past_key_values=cache)
        with pytest.raises(ValueError, match="room for 6 tokens"):
            model.generate(ids[:, :5], past_key_values=cache, max_new_tokens=3)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


OTHERS = {
    "state-size": ({"state_size": 5}, 2),
    "feature-dim": ({"feature_dim": 10}, 2),
    "groups": ({"num_key_value_heads": 2}, 2),
    "convolution": ({"conv_kernel": 3}, 2),
    "normalize": ({"normalize": True}, 2),
    "layers": ({"num_hidden_layers": 4}, 2),
    "batch": ({}, 3),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("order", [("interdomain", "softmax"), ("softmax", "interdomain")], ids="-".join)
def test_cache_of_another_model_is_refused(order, other, make_model, random_ids, contents):
    changes, batch = OTHERS[other]
    mixers = list(order) * (2 if other == "layers" else 1)
    model = make_model("-".join(order))
    stranger = make_model("-".join(order), **{"token_mixers": mixers} | changes)
    cache = InterdomainCache(stranger.config)
    with torch.no_grad():
        stranger(random_ids(batch, 5), past_key_values=cache)
    before = contents(cache)
    with pytest.raises(ValueError, match="past_key_values"), torch.no_grad():
        model(random_ids(2, 3), past_key_values=cache)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


@pytest.mark.parametrize("layers", [1, 4])
def test_softmax_cache_of_another_depth_is_refused(layers, make_model, random_ids, contents):
    model, stranger = make_model("softmax"), make_model("softmax", num_hidden_layers=layers)
    cache = InterdomainCache(stranger.config)
    with torch.no_grad():
        stranger(random_ids(2, 5), past_key_values=cache)
    before = contents(cache)
    with pytest.raises(ValueError, match="past_key_values"), torch.no_grad():
        model(random_ids(2, 3), past_key_values=cache)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


def test_attentions_that_are_not_returned_do_not_stop_guesses(make_model, random_ids):
    model, ids = make_model("softmax"), random_ids(1, 6)
    asked = {"max_new_tokens": 3, "do_sample": False, "prompt_lookup_num_tokens": 2}
    model.set_attn_implementation("eager")
    assert torch.equal(model.generate(ids, output_attentions=True, **asked), model.generate(ids, **asked))
