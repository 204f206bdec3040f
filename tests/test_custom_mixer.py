"""examples/custom_mixer.py: the mixer is right in every way a model calls it, and the program says what it does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from examples import custom_mixer
from modeling_interdomain import InterdomainCache, InterdomainConfig, register_feed_forward, register_token_mixer
from modeling_interdomain.layers.versions import CACHE_NAME, CACHE_NAMES
from modeling_interdomain.registry import TOKEN_MIXERS
from tests.test_examples import some_documents

REPOSITORY = Path(__file__).resolve().parents[1]
ARRANGEMENTS = {
    "alone": "moving_average",
    "before": ["moving_average", "interdomain"],
    "after": ["softmax", "moving_average"],
}
DOCUMENTS = [3, 1, 6]


@pytest.fixture(params=ARRANGEMENTS)
def model(request, make_model):
    """The example's mixer in every layer and beside the package's own, in float64."""
    return make_model(token_mixers=ARRANGEMENTS[request.param])


@pytest.fixture
def mixer(make_model):
    return make_model(token_mixers="moving_average").model.layers[0].token_mixer


def gradients(model, logits, weights) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logits * weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def weights_like(logits):
    return torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)


# The mixer.


def test_it_is_the_formula(mixer, assert_same):
    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, h, expected = mixer.decay.sigmoid(), torch.zeros(2, 32, dtype=torch.float64), []
    for token in x.unbind(1):
        h = a * h + (1 - a) * (token @ mixer.v_proj.weight.T)
        gate = token @ mixer.g_proj.weight.T
        expected.append((gate * gate.sigmoid() * h) @ mixer.o_proj.weight.T)
    mixed, attentions = mixer(x)
    assert_same(mixed, torch.stack(expected, dim=1))
    assert attentions is None


def test_memory_lasts_as_long_as_the_comment_says(make_config):
    a = custom_mixer.MovingAverage(make_config(), 0).decay.sigmoid()
    half = torch.log(torch.tensor(0.5)) / a.log()  # tokens until half is forgotten
    assert half.min().item() == pytest.approx(1, rel=0.01)
    assert half.max().item() == pytest.approx(103, rel=0.01)


def test_half_precision_remembers_as_long(make_model):
    mixer = make_model(token_mixers="moving_average", dtype=torch.bfloat16).model.layers[0].token_mixer
    x = torch.randn(1, 400, 32, generator=torch.Generator().manual_seed(0)).add(1).bfloat16()
    with torch.no_grad():
        mixer.decay.fill_(5)
        half = mixer(x)[0].double()
        exact = mixer.double()(x.double())[0]
    assert ((half - exact).norm() / exact.norm()).item() < 0.01


@pytest.mark.parametrize("sizes", [[1] * 10, [4, 1, 5], [9, 1]], ids=str)
def test_steps_through_a_cache_give_the_whole(model, random_ids, make_cache, advance, assert_same, sizes):
    ids = random_ids(2, 10)
    whole = advance(model, None, ids, use_cache=False)
    cache = make_cache(model.config)
    assert_same(torch.cat([advance(model, cache, piece) for piece in ids.split(sizes, dim=1)], dim=1), whole)


def test_a_cache_that_records_reads_on_and_says_what_it_has_not(model, random_ids, advance, assert_same):
    """A mixer of one's own need not note its inputs."""
    ids = random_ids(2, 10)
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    pieces = [advance(model, cache, piece) for piece in ids.split([4, 3, 1, 2], dim=1)]
    assert_same(torch.cat(pieces, dim=1), advance(model, None, ids, use_cache=False))
    with pytest.raises(ValueError, match="no token was recorded.*calls `layer.record` before `layer.write`"):
        cache.crop(-1)


def test_generate_with_a_cache_is_generate_without(model, left_padded):
    inputs = left_padded([3, 7])
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert model.generate(**inputs, **settings).equal(model.generate(**inputs, **settings, use_cache=False))


def test_pads_change_nothing(model, left_padded, advance, assert_same):
    lengths = [2, 7, 5]
    inputs, caches = left_padded(lengths, width=8), InterdomainCache(model.config)
    padded = advance(model, caches, **without_ids(inputs), ids=inputs["input_ids"])
    step, mask = torch.tensor([[5], [6], [7]]), torch.cat([inputs["attention_mask"], torch.ones(3, 1).long()], dim=1)
    after = advance(model, caches, step, attention_mask=mask)
    for row, length in enumerate(lengths):
        cache = InterdomainCache(model.config)
        assert_same(padded[row, -length:], advance(model, cache, inputs["input_ids"][row : row + 1, -length:])[0])
        assert_same(after[row], advance(model, cache, step[row : row + 1])[0])


def without_ids(inputs: dict) -> dict:
    return {name: value for name, value in inputs.items() if name != "input_ids"}


@pytest.mark.parametrize("sizes", [[4, 1, 1], [4, 2]], ids=str)
def test_a_row_whose_token_is_a_pad_keeps_its_state(model, random_ids, advance, assert_same, sizes):
    ids, mask, cache, end = random_ids(2, 6), torch.ones(2, 6).long(), InterdomainCache(model.config), 0
    mask[0, 4] = 0
    for piece in ids.split(sizes, dim=1):
        end += piece.shape[1]
        last = advance(model, cache, piece, attention_mask=mask[:, :end])[:, -1]
    assert_same(last[0], advance(model, None, ids[:1, [0, 1, 2, 3, 5]])[0, -1])
    assert_same(last[1], advance(model, None, ids[1:])[0, -1])


def test_padded_gradients_are_those_of_the_rows_alone(model, left_padded, assert_same):
    lengths, inputs = [2, 7, 5], left_padded([2, 7, 5], width=8)
    padded = model(**inputs).logits
    alone = torch.zeros_like(padded)
    for row, length in enumerate(lengths):
        alone[row, -length:] = model(inputs["input_ids"][row : row + 1, -length:]).logits[0]
    weights = weights_like(padded) * inputs["attention_mask"][..., None]
    assert_same(gradients(model, padded, weights), gradients(model, alone, weights))


@pytest.mark.parametrize("given", ["ends", "positions"])
def test_packed_documents_do_not_see_each_other(model, random_ids, assert_same, given):
    ids = random_ids(1, sum(DOCUMENTS))
    packing = {
        "ends": {"cu_seq_lens_q": torch.tensor([0, *DOCUMENTS]).cumsum(0).int()},
        "positions": {"position_ids": torch.cat([torch.arange(length) for length in DOCUMENTS])[None]},
    }[given]
    packed = model(ids, **packing).logits
    alone = torch.cat([model(document).logits for document in ids.split(DOCUMENTS, dim=1)], dim=1)
    assert_same(packed, alone)
    weights = weights_like(packed)
    assert_same(gradients(model, packed, weights), gradients(model, alone, weights))


class Renamed:
    """What `forward` of a mixer of one's own may be written like."""

    class PastKeyValues(custom_mixer.MovingAverage):
        def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
            return super().forward(hidden_states, attention_mask, past_key_values, **kwargs)

    class CacheParams(custom_mixer.MovingAverage):
        def forward(self, hidden_states, *, cache_params, **kwargs):
            return super().forward(hidden_states, cache_params=cache_params, **kwargs)

    class OnlyKeywords(custom_mixer.MovingAverage):
        def forward(self, hidden_states, **kwargs):
            assert CACHE_NAME in kwargs  # the library's name, where it has none of its own
            return super().forward(hidden_states, **kwargs)


@pytest.mark.parametrize("kind", ["PastKeyValues", "CacheParams", "OnlyKeywords"])
def test_its_forward_may_call_the_cache_what_it_likes(make_model, monkeypatch, random_ids, advance, assert_same, kind):
    monkeypatch.setitem(TOKEN_MIXERS, "renamed", getattr(Renamed, kind))
    model, ids = make_model(token_mixers=["renamed", "softmax"]), random_ids(2, 8)
    whole = advance(model, None, ids, use_cache=False)
    for name in CACHE_NAMES:
        cache = InterdomainCache(model.config)
        with torch.no_grad():
            pieces = [model(piece, **{name: cache}).logits for piece in ids.split([4, 1, 3], dim=1)]
        assert_same(torch.cat(pieces, dim=1), whole)


def test_every_parameter_learns(model, random_ids):
    logits = model.train()(random_ids(2, 9)).logits
    for name, gradient in gradients(model, logits, weights_like(logits)).items():
        assert gradient.abs().max() > 0, name


def test_gradient_of_the_decay(mixer):
    x = torch.randn(1, 4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    decay = mixer.decay.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda value: torch.func.functional_call(mixer, {"decay": value}, (x,))[0].sum(-1), (decay,)
    )


def test_the_cache_does_not_grow(make_model, random_ids, advance):
    model = make_model(token_mixers="moving_average")
    cache, sizes = InterdomainCache(model.config), []
    for _ in range(3):
        advance(model, cache, random_ids(2, 9))
        sizes.append(cache.state_bytes())
    assert sizes == [2 * 2 * 32 * 8] * 3  # layers, rows, width, bytes


def test_beams_and_a_cache_of_the_wrong_batch(model, random_ids, advance):
    ids = random_ids(2, 5)
    settings = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert model.generate(ids, **settings).equal(model.generate(ids, **settings, use_cache=False))
    cache = InterdomainCache(model.config)
    advance(model, cache, ids)
    with pytest.raises(ValueError, match="past_key_values"):
        advance(model, cache, ids[:1])


# Saving, and registering.


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_saved_and_loaded(make_model, random_ids, tmp_path, advance, arrangement):
    model = make_model(token_mixers=ARRANGEMENTS[arrangement], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.mixers_per_layer == model.config.mixers_per_layer
    ids = random_ids(2, 8)
    assert advance(loaded, None, ids).equal(advance(model, None, ids))


def test_a_folder_needs_the_registration(make_model, tmp_path, monkeypatch):
    make_model(token_mixers=ARRANGEMENTS["before"]).save_pretrained(tmp_path)
    monkeypatch.delitem(TOKEN_MIXERS, "moving_average")
    with pytest.raises((ValueError, StrictDataclassError), match="register_token_mixer has added; got moving_average"):
        AutoConfig.from_pretrained(tmp_path)


def test_an_unknown_name_says_what_makes_names_known():
    with pytest.raises((ValueError, StrictDataclassError)) as raised:
        InterdomainConfig(token_mixers="median")
    message = str(raised.value)
    assert "token_mixers must be made of interdomain, " in message
    assert message.rstrip().endswith("or what register_token_mixer has added; got median.")


@pytest.mark.parametrize("name", ["interdomain", "softmax", "moving_average"])
def test_a_name_can_be_taken_once(name):
    before = dict(TOKEN_MIXERS)
    with pytest.raises(ValueError, match=f"The name '{name}' belongs to the token mixer {before[name].__name__}: "):
        register_token_mixer(name, custom_mixer.MovingAverage)
    assert before == TOKEN_MIXERS


def test_layer_type_must_be_one_the_library_knows():
    class Moving(custom_mixer.MovingAverage):
        layer_type = "moving"

    with pytest.raises(ValueError, match="layer_type of Moving must be one of \"linear_attention\", .*, got 'moving'"):
        register_token_mixer("another", Moving)
    with pytest.raises(ValueError, match="must be a subclass of TokenMixer"):
        register_token_mixer("another", torch.nn.Linear)
    assert "another" not in TOKEN_MIXERS


# The program.


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text("".join(some_documents()))
    return str(path)


def test_the_program_learns_writes_and_counts(data):
    command = [sys.executable, "-m", "examples.custom_mixer", "--data", data, "--prompt", "alpha 3 "]
    command += ["--steps", "30", "--tokens", "12", "--vocab-size", "300"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size = r"[\d,]+ parameters, layers of moving_average and interdomain"
    assert re.fullmatch(size, done.stdout.splitlines()[0])
    steps = re.findall(r"^step +(\d+)  loss ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    assert [step for step, _ in steps] == ["1", "20", "30"]
    losses = [float(loss) for _, loss in steps]
    assert losses[0] > losses[1] > losses[2] and losses[2] < 0.8 * losses[0]
    assert "\n\nalpha 3 " in done.stdout
    held, seen = re.search(
        r"The cache holds ([\d,]+) bytes after (\d+) tokens, as after the first", done.stdout
    ).groups()
    config = AutoConfig.from_pretrained(custom_mixer.CONFIG, num_hidden_layers=1)
    numbers = config.state_sizes(1)["recurrent"] + config.state_sizes(1)["convolution"] + config.hidden_size
    assert int(held.replace(",", "")) == 4 * numbers
    assert int(seen) >= 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be positive, not 0."),
        (["--tokens", "-1"], "--tokens must be positive, not -1."),
        (["--data", "/nowhere/text.txt"], "/nowhere/text.txt does not exist."),
    ],
)
def test_mistakes_are_one_sentence(capsys, arguments, message):
    assert custom_mixer.main(arguments) == 2
    assert capsys.readouterr().err == message + "\n"


def test_a_vocabulary_without_room_for_the_bytes(capsys, data):
    assert custom_mixer.main(["--data", data, "--vocab-size", "5"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_no_layer_is_not_registered():
    with pytest.raises(ValueError, match="^A token mixer must be a subclass of TokenMixer, got 3.$"):
        register_token_mixer("three", 3)
    for wrong in (3, dict):
        with pytest.raises(ValueError, match="^A feed-forward layer must be a subclass of torch.nn.Module, got"):
            register_feed_forward("three", wrong)
    with pytest.raises(
        ValueError, match="^The name 'none' belongs to the feed-forward layer no layer at all: choose another.$"
    ):
        register_feed_forward("none", nn.Identity)
