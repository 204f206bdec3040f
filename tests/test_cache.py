"""The cache as an object: rows, rollback, addresses, dtypes, copies, size, gradients."""

import copy
import pickle

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from transformers.cache_utils import DynamicCache, StaticLayer
from transformers.utils import generic

from modeling_interdomain import InterdomainCache, InterdomainStaticCache, StateStore
from modeling_interdomain.cache.recurrent import RecurrentLayer
from modeling_interdomain.layers.versions import CACHE_NAME, CACHE_NAMES
from modeling_interdomain.model_cache.fingerprint import model_fingerprint


@pytest.fixture
def cache_after(advance):
    """`cache_after(model, ids, ...)`: a cache that saw these ids, in one forward each."""

    def make(model, *pieces, recording=False):
        cache = InterdomainCache(model.config)
        if recording:
            cache.activate_past_recording()
        for ids in pieces:
            advance(model, cache, ids)
        return cache

    return make


def _recurrent_layers(cache) -> list:
    return [layer for layer in cache.layers if hasattr(type(layer), "state")]


# Rows.


@pytest.mark.parametrize("order", [[2, 0, 0], [0, 1, 2]], ids=str)
def test_reorder(model, make_cache, order, random_ids, advance, assert_same):
    ids, next_ids = random_ids(3, 6), random_ids(3, 1, seed=1)
    cache = make_cache(model.config)
    advance(model, cache, ids)
    cache.reorder_cache(torch.tensor(order))
    expected = model(torch.cat([ids[order], next_ids], dim=1), use_cache=False).logits[:, -1:]
    assert_same(advance(model, cache, next_ids), expected)


def test_repeat_rows(model, random_ids, advance, assert_same):
    ids, next_ids = random_ids(2, 6), random_ids(6, 2, seed=1)
    cache = InterdomainCache(model.config)
    advance(model, cache, ids)
    cache.batch_repeat_interleave(3)
    expected = model(torch.cat([ids.repeat_interleave(3, dim=0), next_ids], dim=1), use_cache=False).logits[:, -2:]
    assert_same(advance(model, cache, next_ids), expected)


@pytest.mark.parametrize("rows", [[2], [1, 1, 0, 2], [0, 2, 1]], ids=str)
def test_select_rows(model, rows, random_ids, advance, assert_same):
    ids, next_ids = random_ids(3, 6), random_ids(len(rows), 1, seed=1)
    cache = InterdomainCache(model.config)
    advance(model, cache, ids)
    cache.batch_select_indices(torch.tensor(rows))
    expected = model(torch.cat([ids[rows], next_ids], dim=1), use_cache=False).logits[:, -1:]
    assert_same(advance(model, cache, next_ids), expected)


def test_rows_change_while_recording(model, random_ids, cache_after, contents, assert_same):
    ids = random_ids(3, 7)
    cache = cache_after(model, ids[:, :4], ids[:, 4:], recording=True)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 5]))
    cache.crop(-4)
    assert_same(contents(cache), contents(cache_after(model, ids[[2, 0, 0], :3])))


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("reorder_cache", torch.tensor([0, 3]), r"numbers of the 3 rows of this cache, from 0, got \[0, 3\]"),
        ("reorder_cache", torch.tensor([-1]), r"numbers of the 3 rows .*, got \[-1\]"),
        ("reorder_cache", [0, 1], r"the numbers of rows as a tensor of one axis, got \[0, 1\]"),
        ("batch_select_indices", torch.tensor([3]), r"numbers of the 3 rows .*, got \[3\]"),
        ("batch_select_indices", torch.tensor([True]), r"numbers of the 3 rows .*, got a mask of 1"),
        ("batch_select_indices", torch.tensor([], dtype=torch.long), r"numbers of the 3 rows .*, got \[\]"),
        ("batch_select_indices", torch.tensor([False] * 3), r"numbers of .*, got \[False, False, False\]"),
        ("batch_repeat_interleave", 0, "a number of copies from 1, got 0"),
        ("batch_select_indices", torch.tensor([0.0]), "the numbers of rows as a tensor of one axis"),
        ("batch_select_indices", torch.tensor(1), "the numbers of rows as a tensor of one axis"),
    ],
)
def test_rows_that_are_not_there_are_refused(name, asked, reason, make_model, random_ids, advance, contents):
    for model in map(make_model, ("interdomain", "softmax-interdomain", "softmax", "windowed")):
        cache = InterdomainCache(model.config)
        advance(model, cache, random_ids(3, 6))
        before = contents(cache)
        with pytest.raises(ValueError, match=f"^{name} takes {reason}"):
            getattr(cache, name)(asked)
        torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


def test_rows_of_static_keys_are_not_chosen(make_model, random_ids, advance, contents):
    model = make_model("interdomain-softmax")
    cache = InterdomainStaticCache(model.config, max_cache_len=16)
    advance(model, cache, random_ids(2, 6))
    before = contents(cache)
    for name, asked in (("batch_select_indices", torch.tensor([1])), ("batch_repeat_interleave", 2)):
        with pytest.raises(ValueError, match=f"^A static cache of keys and values has no {name}: use InterdomainCache"):
            getattr(cache, name)(asked)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


@pytest.mark.parametrize("several", [{"num_return_sequences": 3, "do_sample": True}, {"num_beams": 3}], ids=str)
def test_a_cache_of_one_row_for_several_sequences(each_mixer, several, random_ids, advance):
    ids, cache = random_ids(1, 9), InterdomainCache(each_mixer.config)
    advance(each_mixer, cache, ids[:, :6])
    settings = {"max_new_tokens": 4, "attention_mask": torch.ones_like(ids), **several}
    with pytest.raises(ValueError, match=r"for several sequences or beams a prompt call batch_repeat_interleave\(3\)"):
        each_mixer.generate(ids, past_key_values=cache, **settings)
    cache.batch_repeat_interleave(3)
    found = []
    for used in (cache, None):
        torch.manual_seed(0)
        found.append(each_mixer.generate(ids, past_key_values=used, **settings))
    assert found[0].equal(found[1])


# A forward that is broken off.

PLACES = {
    "before the first mixer": lambda model: model.model.layers[0].token_mixer,
    "in the first mixer": lambda model: model.model.layers[0].token_mixer.o_proj,
    "before the last mixer": lambda model: model.model.layers[-1].token_mixer,
    "at the end": lambda model: model.model.norm,
}


@pytest.fixture
def broken_off(advance):
    """`broken_off(model, cache, ids, part)`: a forward that is interrupted when a part of the model is called."""

    def interrupt(module, inputs):
        raise KeyboardInterrupt

    def run(model, cache, ids, part):
        hook = part.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            advance(model, cache, ids)
        hook.remove()

    return run


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("place", PLACES)
def test_a_forward_that_was_broken_off(
    each_mixer, make_cache, place, length, random_ids, broken_off, advance, assert_same, tmp_path
):
    """As if it had not been where nothing was written, and refused everywhere else, until a reset."""
    ids, cache = random_ids(2, 12), make_cache(each_mixer.config)
    advance(each_mixer, cache, ids[:, :6])
    broken_off(each_mixer, cache, ids[:, 6 : 6 + length], PLACES[place](each_mixer))
    untouched = place == "before the first mixer"
    for use in () if untouched else (lambda cache: cache, *COPIES.values()):
        with pytest.raises(ValueError, match="A forward was broken off while it wrote into this past_key_values"):
            advance(each_mixer, use(cache), ids[:, 6:])
        with pytest.raises(ValueError, match="call its reset"):
            use(cache).save(tmp_path / "state", each_mixer)
    if not untouched:
        cache.reset()
    seen = int(cache.get_seq_length())
    assert seen == (6 if untouched else 0)
    assert_same(advance(each_mixer, cache, ids[:, seen:]), each_mixer(ids, use_cache=False).logits[:, seen:].detach())


@torch.no_grad()
def test_a_step_that_was_broken_off_in_its_first_layer(recurrent_model, random_ids, advance, assert_same, monkeypatch):
    """Where the state has moved and the window has not, though no layer has counted the token."""
    ids, cache = random_ids(2, 7), InterdomainCache(recurrent_model.config)
    layer = next(layer for layer in cache.layers if hasattr(type(layer), "state"))
    advance(recurrent_model, cache, ids[:, :6])
    with monkeypatch.context() as patch:
        patch.setattr(layer, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            advance(recurrent_model, cache, ids[:, 6:])
    with pytest.raises(ValueError, match="A forward was broken off"):
        advance(recurrent_model, cache, ids[:, 6:])
    cache.reset()
    assert_same(advance(recurrent_model, cache, ids), recurrent_model(ids, use_cache=False).logits)


def test_the_librarys_own_cache_is_refused_and_healed_alike(make_model, random_ids, broken_off, advance, assert_same):
    model, ids = make_model("softmax"), random_ids(2, 9)
    cache = DynamicCache()
    advance(model, cache, ids[:, :5])
    broken_off(model, cache, ids[:, 5:], model.model.layers[1])
    with pytest.raises(ValueError, match="A forward was broken off"):
        advance(model, cache, ids[:, 5:])
    cache.reset()
    assert_same(advance(model, cache, ids), model(ids, use_cache=False).logits.detach())


def test_reset(model, make_cache, random_ids, advance, assert_same):
    cache = make_cache(model.config)
    first = advance(model, cache, random_ids(2, 5))
    advance(model, cache, random_ids(2, 1, seed=1))
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert_same(advance(model, cache, random_ids(2, 5)), first)


@pytest.mark.parametrize("length", [2, 7])
def test_reset_forgets_gradients(any_model, length, random_ids, advance, assert_same):
    ids = random_ids(2, length + 3)
    cache = InterdomainCache(any_model.config)
    advance(any_model, cache, ids[:, length:])
    logits = any_model(ids[:, :length], past_key_values=cache).logits
    cache.reset()
    assert not any(x.requires_grad for layer in _recurrent_layers(cache) for x in layer.held())
    assert_same(advance(any_model, cache, ids), any_model(ids, use_cache=False).logits.detach())
    logits.sum().backward()


def test_reset_forgets_the_recording(model, random_ids, cache_after, contents, advance, assert_same):
    cache = cache_after(model, random_ids(2, 5), recording=True)
    cache.reset()
    ids = random_ids(2, 6, seed=1)
    advance(model, cache, ids)
    cache.crop(-2)
    assert_same(contents(cache), contents(cache_after(model, ids[:, :4])))


# Taking tokens back.


@pytest.mark.parametrize("removed", [0, 1, 3, 4, 9])
def test_rollback_restores_the_state(any_model, removed, random_ids, cache_after, contents, assert_same):
    ids = random_ids(2, 10)
    cache = cache_after(any_model, ids[:, :5], ids[:, 5:6], ids[:, 6:7], ids[:, 7:], recording=True)
    cache.crop(-removed)
    assert int(cache.get_seq_length()) == 10 - removed
    assert_same(contents(cache), contents(cache_after(any_model, ids[:, : 10 - removed])))


def test_a_record_begins_anew_after_a_pause(recurrent_model, random_ids, cache_after, advance, contents, assert_same):
    ids = random_ids(2, 10)
    cache = cache_after(recurrent_model, ids[:, :2], ids[:, 2:4], recording=True)
    for start, paused in ((4, True), (6, False), (8, False)):
        cache.pause_recording(paused)
        advance(recurrent_model, cache, ids[:, start : start + 2])
    cache.crop(-3)
    assert_same(contents(cache), contents(cache_after(recurrent_model, ids[:, :7])))


def test_a_single_pad_moves_no_state_where_gradients_are_asked_for(recurrent_model, random_ids, cache_after):
    ids, mask = random_ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    before, cache = (cache_after(recurrent_model, ids[:, :5]) for _ in range(2))
    mask[1, 5] = 0
    with torch.enable_grad():
        recurrent_model(ids[:, 5:], attention_mask=mask, past_key_values=cache)
    for layer, held in zip(_recurrent_layers(cache), _recurrent_layers(before), strict=True):
        assert torch.equal(layer.state[1], held.state[1])


def test_rollback_without_the_parameters(any_model, random_ids, cache_after, contents, assert_same):
    """They are on the device only while their modules are called: a record has all that it replays."""
    ids = random_ids(2, 10)
    expected = contents(cache_after(any_model, ids[:, :7]))
    offloaded = cpu_offload(any_model, execution_device=torch.device("cpu"))
    cache = cache_after(offloaded, ids[:, :5], ids[:, 5:6], ids[:, 6:], recording=True)
    cache.crop(-3)
    assert_same(contents(cache), expected)


def test_rollback_to_single_steps_is_exact(recurrent_model, random_ids, cache_after):
    model, ids = recurrent_model.double(), random_ids(2, 12)
    model.config.state_dtype = "float64"
    steps = [ids[:, :5], *ids[:, 5:].split(1, dim=1)]
    cache = cache_after(model, *steps, recording=True)
    cache.crop(-4)
    never_advanced = cache_after(model, *steps[:-4])
    for layer, expected in zip(_recurrent_layers(cache), _recurrent_layers(never_advanced)):
        torch.testing.assert_close(layer.state, expected.state, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer.conv_state, expected.conv_state, rtol=0, atol=0)


def test_rollback_again_and_again(model, random_ids, cache_after, contents, advance, assert_same):
    ids = random_ids(2, 30)
    cache = cache_after(model, ids[:, :6], recording=True)
    kept = ids[:, :6]
    for length, removed in [(1, 1), (4, 2), (3, 3), (1, 0), (6, 5), (2, 4)]:
        piece = random_ids(2, length, seed=length)
        advance(model, cache, piece)
        cache.crop(-removed)
        kept = torch.cat([kept, piece], dim=1)[:, : kept.shape[1] + length - removed]
        assert_same(contents(cache), contents(cache_after(model, kept)))


def test_guesses_of_which_some_are_right(any_model, random_ids, advance, assert_same):
    """A few tokens at once, most of them taken back, and on from there: as in a text that has only the right ones."""
    ids, cache = random_ids(2, 16), InterdomainCache(any_model.config)
    cache.activate_past_recording()
    found = [advance(any_model, cache, ids[:, :5])]
    for start, guessed, right in ((5, 6, 2), (7, 5, 5), (12, 4, 1), (13, 3, 3)):
        guesses = torch.cat([ids[:, start : start + right], random_ids(2, guessed - right, seed=start)], dim=1)
        found.append(advance(any_model, cache, guesses)[:, :right])
        cache.crop(right - guessed)
    assert_same(torch.cat(found, dim=1), any_model(ids, use_cache=False).logits)


@pytest.fixture
def after_guesses(recurrent_model, random_ids, cache_after, advance):
    """A cache whose layers have inputs that wait, of two guesses and what is left of them, and its tokens."""
    ids = random_ids(2, 11)
    cache = cache_after(recurrent_model, ids[:, :4], recording=True)
    for start, right in ((4, 3), (7, 4)):
        advance(recurrent_model, cache, torch.cat([ids[:, start : start + right], random_ids(2, 2, seed=start)], dim=1))
        cache.crop(-2)
    assert all(layer.pending >= 4 for layer in _recurrent_layers(cache))
    return cache, ids


ASKED = {
    "nothing": lambda cache: None,
    "rows": lambda cache: cache.reorder_cache(torch.tensor([0, 1])),
    "more rows": lambda cache: (cache.batch_repeat_interleave(2), cache.batch_select_indices(torch.tensor([0, 2]))),
    "a copy": copy.deepcopy,
    "device": lambda cache: cache.to("cpu"),
    "further back": lambda cache: cache.crop(-5),
    "one back": lambda cache: cache.crop(-1),
    "committed": lambda cache: cache.commit(),
}


@pytest.mark.parametrize(("asked", "length"), [*zip(ASKED, (3, 1, 15, 3, 1, 3, 3, 15))])
def test_inputs_that_wait_are_not_lost(
    recurrent_model, asked, length, after_guesses, cache_after, contents, random_ids, advance, assert_same
):
    """Whatever is asked of a cache in which inputs wait, it is one that has read the tokens as they came."""
    cache, ids = after_guesses
    asked_for = ASKED[asked](cache)
    cache = asked_for if isinstance(asked_for, InterdomainCache) else cache
    ids = ids[:, : int(cache.get_seq_length())]
    further = random_ids(2, length, seed=1)
    found = advance(recurrent_model, cache, further)
    expected = cache_after(recurrent_model, ids)
    assert_same(found, advance(recurrent_model, expected, further))
    assert_same(contents(cache), contents(expected))


def test_a_state_is_not_read_while_inputs_are_pending(recurrent_model, after_guesses, cache_after, assert_same):
    """Nothing is replayed by looking; the library's way to ask for a state lets it take in what is pending."""
    cache, ids = after_guesses
    expected = cache_after(recurrent_model, ids)
    before = [layer.pending for layer in _recurrent_layers(cache)]
    for layer in _recurrent_layers(cache):
        for name in ("conv_states", "recurrent_states", "conv_state", "states", "state"):
            with pytest.raises(ValueError, match=r"^The last \d+ tokens of a draft are pending, .* call commit\(\)"):
                getattr(layer, name)
    assert [layer.pending for layer in _recurrent_layers(cache)] == before
    for i, layer in enumerate(cache.layers):
        if layer in _recurrent_layers(cache):
            assert_same(cache.get_recurrent_state(i), expected.layers[i].state)
            if layer.conv_state:
                assert_same(cache.get_conv_state(i), expected.get_conv_state(i))


@pytest.mark.parametrize("defer", [False, True])
def test_only_a_mixer_that_commits_leaves_inputs_pending(defer):
    """One of one's own may know nothing of drafts: unless it says so, its states take in every token at once."""

    def replay(conv_state, states, inputs, constants):
        return conv_state, {"state": states["state"] + inputs[0].sum(1)}

    layer, read = RecurrentLayer(), 0
    layer.activate_past_recording()
    for count in (2, 3, 4):
        layer.commit()
        layer.record((torch.ones(1, count, 4), torch.ones(1, count, dtype=torch.bool)), (), replay, defer=defer)
        read += count
        layer.write([], {"state": torch.full((1, 4), float(read))}, count)
        assert layer.pending == (count if defer and count < read else 0)
    layer.crop(-1)
    layer.commit()
    assert layer.state.eq(8).all()
    layer.crop(-7)
    assert layer.state.eq(1).all() and layer.get_seq_length() == 1


def test_inputs_that_wait_are_saved(recurrent_model, after_guesses, cache_after, contents, assert_same, tmp_path):
    cache, ids = after_guesses
    cache.save(tmp_path / "states", recurrent_model)
    loaded = InterdomainCache.load(tmp_path / "states", recurrent_model)
    assert_same(contents(loaded), contents(cache_after(recurrent_model, ids)))


def test_inputs_that_wait_are_forgotten_by_a_reset(recurrent_model, after_guesses, random_ids, advance, assert_same):
    cache, _ = after_guesses
    cache.reset()
    assert not any(layer.pending or layer.state.any() for layer in _recurrent_layers(cache) if "state" in layer.states)
    ids = random_ids(2, 7, seed=2)
    assert_same(advance(recurrent_model, cache, ids), recurrent_model(ids, use_cache=False).logits)


def test_a_state_rests_while_guesses_are_read(make_model, random_ids, cache_after, advance):
    """Of a few tokens with a recording cache only the inputs are kept, until more wait than are read together."""
    ids, model = random_ids(1, 4), make_model()
    layer = (cache := cache_after(model, ids, recording=True)).layers[0]
    before, pending = layer.resting_state.clone(), []
    for _ in range(3):
        advance(model, cache, random_ids(1, 4))
        pending.append(layer.pending)
    assert pending == [4, 8, 12] and torch.equal(layer.resting_state, before)
    cache.crop(-3)
    advance(model, cache, random_ids(1, 8))
    assert layer.pending == 8 and not torch.equal(layer.resting_state, before)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(5, 4, 1, 1, 1), (5, 4, 3, 1), (5, 1, 1, 3, 1, 1)])
def test_inputs_that_wait_may_be_pads(recurrent_model, random_ids, assert_same, pieces):
    """One row has a turn of fewer tokens than the other, with pads behind it, and both go on."""
    ids, cache = random_ids(2, sum(pieces)), InterdomainCache(recurrent_model.config)
    cache.activate_past_recording()
    mask = torch.ones_like(ids)
    mask[0, 6:9] = 0
    found, start = [], 0
    for count in pieces:
        end = start + count
        part = recurrent_model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
        found.append(part.logits)
        start = end
    expected = recurrent_model(ids, attention_mask=mask, use_cache=False).logits
    assert_same(torch.cat(found, dim=1)[mask.bool()], expected[mask.bool()])


def test_guesses_in_inference_mode_go_on_outside_of_it(any_model, random_ids, cache_after, contents, assert_same):
    ids = random_ids(2, 12)
    with torch.inference_mode():
        cache = InterdomainCache(any_model.config)
        cache.activate_past_recording()
        for piece in (ids[:, :4], ids[:, 4:8]):
            any_model(piece, past_key_values=cache)
        cache.crop(-1)
    found, expected = any_model(ids[:, 7:], past_key_values=cache).logits, any_model(ids, use_cache=False).logits
    assert_same(found.detach(), expected[:, 7:])


CHANGES = {
    "in place": lambda x, new: x.copy_(new),
    "without a version": lambda x, new: x.data.copy_(new),
    "another tensor": lambda x, new: setattr(x, "data", new),
}


@torch.no_grad()
@pytest.mark.parametrize("how", CHANGES)
def test_what_was_read_stays_when_parameters_change(
    recurrent_model, how, random_ids, cache_after, contents, advance, assert_same
):
    """As optimizers, averages and syncs change them: what waits, and what is taken back to, was read before."""
    model, ids, removed = recurrent_model, random_ids(2, 32), (0, 2, 16)
    cache = cache_after(model, *ids[:, :15].split((9, 4, 2), dim=1), recording=True)
    fewer = {count: cache_after(model, ids[:, : min(15, 29 - count)]) for count in removed}
    generator = torch.Generator().manual_seed(2)
    for x in model.parameters():
        CHANGES[how](x, x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype))
    for piece in ids[:, 15:29].split([13, 1], dim=1):  # long enough that all writes are seen
        advance(model, cache, piece)
    for count, expected in fewer.items():
        found = copy.deepcopy(cache)
        found.crop(-count)
        if 29 - count > 15:
            advance(model, expected, ids[:, 15 : 29 - count])
        assert_same(contents(found), contents(expected))
        assert_same(advance(model, found, ids[:, 29:]), advance(model, expected, ids[:, 29:]))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("name", ["interdomain", "s4d", "ssd", "selective-scan", "hax"])
def test_guesses_that_wait_while_an_adapter_is_switched_off(
    name, length, make_model, random_ids, cache_after, contents, advance, assert_same
):
    inner, ids = make_model(name), random_ids(2, 24 + length)
    model = get_peft_model(inner, LoraConfig(target_modules=["o_proj"], modules_to_save=["recurrence"])).eval()
    for _, x in filter(lambda named: "modules_to_save" in named[0], model.named_parameters()):
        x += 0.3 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    found = []
    for recording in (False, True):
        cache = cache_after(inner, *ids[:, :24].split([20, 4], dim=1), recording=recording)
        with model.disable_adapter():
            found.append([advance(inner, cache, ids[:, 24:]), *contents(cache)])
    assert_same(found[1], found[0])


def test_a_text_that_was_taken_back_begins_with_what_is_learned_by_then(make_model, random_ids, advance, assert_same):
    model, ids = make_model(learned_state=True), random_ids(1, 9)
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    advance(model, cache, ids[:, :6])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.token_mixer.first_state.state += 1
    cache.crop(-6)
    assert_same(advance(model, cache, ids), model(ids, use_cache=False).logits)


def test_as_much_can_be_taken_back_again(each_mixer, random_ids, advance, contents, cache_after, assert_same):
    """Whenever it comes, and however little is read in between."""
    each_mixer.config.max_rollback = 4
    ids, cache = random_ids(1, 40), InterdomainCache(each_mixer.config)
    cache.activate_past_recording()
    advance(each_mixer, cache, ids[:, :9])
    for end in range(9, 40):
        advance(each_mixer, cache, ids[:, end : end + 1])
        if end % 3:
            continue
        twin = copy.deepcopy(cache)
        twin.crop(-1 - end % 4)
        twin.crop(-4)
        assert twin.get_seq_length() == end - 4 - end % 4
    assert_same(contents(twin), contents(cache_after(each_mixer, ids[:, : 39 - 4 - 39 % 4])))


@pytest.mark.parametrize("recording", [False, True])
def test_more_than_was_read_is_not_taken_back(each_mixer, make_cache, recording, random_ids, advance, contents):
    cache = make_cache(each_mixer.config)
    if recording:
        cache.activate_past_recording()
    with pytest.raises(ValueError, match="^crop can take back the last 0 tokens, no more were read, got 1"):
        cache.crop(-1)
    advance(each_mixer, cache, random_ids(2, 5))
    before = contents(cache)
    with pytest.raises(ValueError, match="^crop can take back the last 5 tokens, no more were read, got 99"):
        cache.crop(-99)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


def test_rollback_of_everything(model, random_ids, cache_after, advance, assert_same):
    cache = cache_after(model, random_ids(2, 5), recording=True)
    cache.crop(-5)
    assert int(cache.get_seq_length()) == 0
    ids = random_ids(2, 4, seed=1)
    assert_same(advance(model, cache, ids), model(ids, use_cache=False).logits)


def test_rollback_within_a_prompt_longer_than_the_record(make_model, random_ids, cache_after, contents, assert_same):
    model, ids = make_model("interdomain-softmax", max_rollback=4), random_ids(2, 11)
    cache = cache_after(model, ids, recording=True)
    cache.crop(-4)
    assert_same(contents(cache), contents(cache_after(model, ids[:, :7])))


@pytest.mark.parametrize("order", ["interdomain-softmax", "softmax-interdomain"])
def test_rollback_beyond_the_record_is_refused(order, make_model, random_ids, cache_after, contents):
    model = make_model(order, max_rollback=4)
    cache = cache_after(model, random_ids(2, 13), recording=True)
    before = contents(cache)
    with pytest.raises(ValueError, match="take back the last 8 tokens, got 9.*max_rollback"):
        cache.crop(-9)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


@pytest.mark.parametrize("order", ["interdomain-softmax", "softmax-interdomain"])
def test_rollback_without_a_record_is_refused(order, make_model, random_ids, cache_after, contents):
    cache = cache_after(make_model(order), random_ids(2, 5))
    before = contents(cache)
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-1)
    cache.crop(0)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="static keys are taken back since Transformers 5.24")
def test_rollback_of_static_caches(model, random_ids, advance, assert_same):
    ids = random_ids(2, 9)
    cache = InterdomainStaticCache(model.config, max_cache_len=16)
    cache.activate_past_recording()
    assert not cache.recurrent_layers() or not cache.is_compileable  # a record grows
    for piece in (ids[:, :5], ids[:, 5:6], random_ids(2, 3, seed=1)):
        advance(model, cache, piece)
    cache.crop(-3)
    assert cache.get_seq_length() == 6
    assert_same(advance(model, cache, ids[:, 6:]), advance(model, None, ids, use_cache=False)[:, 6:])
    cache.stop_recording()
    assert cache.is_compileable


@pytest.mark.skipif(hasattr(StaticLayer, "crop"), reason="static keys are taken back since Transformers 5.24")
@pytest.mark.parametrize("order", ["interdomain-softmax", "softmax-interdomain"])
def test_rollback_of_static_keys_is_refused(order, make_model, random_ids, advance, contents):
    model = make_model(order)
    cache = InterdomainStaticCache(model.config, max_cache_len=16)
    cache.activate_past_recording()
    advance(model, cache, random_ids(2, 5))
    before = contents(cache)
    with pytest.raises(ValueError, match="static cache of keys and values cannot take tokens back"):
        cache.crop(-2)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


def test_rollback_by_a_positive_number_is_refused(recurrent_model, random_ids, cache_after):
    cache = cache_after(recurrent_model, random_ids(2, 5), recording=True)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(2)


def test_a_record_that_pauses_can_be_cropped(recurrent_model, make_cache):
    """Guesses are made after a prompt that was read without a record; the library asks in between."""
    cache = make_cache(recurrent_model.config)
    assert not any(layer.is_croppable for layer in cache.recurrent_layers())
    cache.activate_past_recording()
    cache.pause_recording(True)
    assert not cache.records and all(layer.is_croppable for layer in cache.recurrent_layers())


def test_recording_may_begin_late(model, random_ids, cache_after, contents, advance, assert_same):
    ids = random_ids(2, 9)
    cache = cache_after(model, ids[:, :4])
    cache.activate_past_recording()
    advance(model, cache, ids[:, 4:])
    cache.crop(-3)
    assert_same(contents(cache), contents(cache_after(model, ids[:, :6])))


@pytest.mark.parametrize("removed", [1, 2, 3, 4, 6])
def test_rollback_in_a_padded_batch(any_model, removed, random_ids, contents, assert_same):
    ids = random_ids(3, 11)
    mask = torch.ones_like(ids)
    mask[1, :6] = mask[2, :3] = 0  # on the left
    mask[0, 8] = mask[1, 9:] = mask[2, 10] = 0  # among what is taken back
    caches = [InterdomainCache(any_model.config) for _ in range(2)]
    caches[0].activate_past_recording()
    with torch.no_grad():
        for start, end in [(0, 5), (5, 8), (8, 9), (9, 11)]:
            any_model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=caches[0])
        end = 11 - removed
        any_model(ids[:, :end], attention_mask=mask[:, :end], past_key_values=caches[1])
    caches[0].crop(-removed)
    caches[0].commit()
    for layer, expected in zip(_recurrent_layers(caches[0]), _recurrent_layers(caches[1])):
        assert_same([layer.state, *layer.conv_state], [expected.state, *expected.conv_state])


@pytest.mark.parametrize("removed", [1, 2, 3, 4])
def test_rollback_over_a_forward_of_pads(model, removed, random_ids, cache_after, advance, assert_same):
    ids = random_ids(2, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0]] * 2)
    cache = cache_after(model, ids[:, :3], recording=True)
    advance(model, cache, ids[:, 3:], attention_mask=mask)
    cache.crop(-removed)
    assert int(cache.get_seq_length()) == 5 - removed
    cache.commit()
    expected = cache_after(model, ids[:, : min(3, 5 - removed)])
    for layer, other in zip(_recurrent_layers(cache), _recurrent_layers(expected)):
        assert_same([layer.state, *layer.conv_state], [other.state, *other.conv_state])


def test_record_does_not_keep_the_prompt(make_model, random_ids, cache_after):
    """A view of the last tokens would hold the whole prompt in memory, in every layer."""
    layer = cache_after(make_model(max_rollback=4), random_ids(2, 40), recording=True).layers[0]
    for tensor in layer.recorded.pieces[0].inputs:
        assert tensor.shape[1] == 4 + 4
        assert tensor.untyped_storage().nbytes() <= 2 * tensor.numel() * tensor.element_size()


def test_record_keeps_what_was_promised_and_not_much_more(make_model, random_ids, cache_after, advance):
    model, kept = make_model(max_rollback=4, num_hidden_layers=1), []
    cache = cache_after(model, random_ids(1, 9), recording=True)
    for step in range(20):
        advance(model, cache, random_ids(1, 1, seed=step))
        kept.append(cache.layers[0].recorded.tokens)
    assert min(kept) >= 4 + 4 and max(kept) <= 4 + 8
    advance(model, cache, random_ids(1, 13))  # all of it can be taken back
    cache.crop(-13)
    assert cache.get_seq_length() == 29


def test_repeated_rows_of_a_recorded_prompt_of_pads(model, random_ids, advance, contents, assert_same):
    """The prompt of row 1 begins with pads alone; then rows double, and tokens are taken back."""
    ids, mask = random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, :5] = 0
    rows, caches = [0, 0, 1, 1], [InterdomainCache(model.config) for _ in range(2)]
    caches[0].activate_past_recording()
    advance(model, caches[0], ids[:, :4], attention_mask=mask[:, :4])
    caches[0].batch_repeat_interleave(2)
    advance(model, caches[0], ids[rows, 4:], attention_mask=mask[rows])
    caches[0].crop(-2)
    caches[0].commit()
    advance(model, caches[1], ids[rows, :6], attention_mask=mask[rows, :6])
    for layer, expected in zip(_recurrent_layers(caches[0]), _recurrent_layers(caches[1])):
        assert_same([layer.state, *layer.conv_state], [expected.state, *expected.conv_state])


def test_a_cache_moves_as_a_whole(model, make_cache, random_ids, advance):
    """To a device without memory; nothing that a rollback needs stays behind."""
    cache = make_cache(model.config)
    cache.activate_past_recording()
    advance(model, cache, random_ids(2, 5))
    advance(model, cache, random_ids(2, 1))
    advance(model, cache, random_ids(2, 3))
    cache.to("meta")
    for layer in cache.layers:
        held = [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]
        if layer in _recurrent_layers(cache):
            windows, states, pieces, _, latest = layer.recorded
            held += [*layer.tensors(), *(windows or ()), *(states or {}).values()]
            held += [x for piece in pieces for x in (*piece.inputs, *piece.constants)]
            held += [*latest.conv_state, *latest.states.values()]
        assert held and {x.device.type for x in held} == {"meta"}


# Addresses, sizes, dtypes.


@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
def test_addresses_stay(model, make_cache, padded, random_ids, advance):
    cache = make_cache(model.config)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 1 - int(padded)
    advance(model, cache, random_ids(2, 5), attention_mask=mask[:, :5])

    def addresses():
        tensors = [x for layer in _recurrent_layers(cache) for x in (layer.state, *layer.conv_state)]
        if isinstance(cache, InterdomainStaticCache):
            tensors += [x for layer in cache.layers if layer.keys is not None for x in (layer.keys, layer.values)]
        return [x.data_ptr() for x in tensors]

    before = addresses()
    for end, ids in [(6, random_ids(2, 1)), (7, random_ids(2, 1)), (9, random_ids(2, 2))]:
        advance(model, cache, ids, attention_mask=mask[:, :end])
        assert addresses() == before
    cache.reorder_cache(torch.tensor([1, 0]))
    recurrent = sum(1 + len(layer.conv_state) for layer in _recurrent_layers(cache))
    assert addresses()[:recurrent] == before[:recurrent]


def test_addresses_stay_over_rollback_and_reset(recurrent_model, random_ids, cache_after):
    cache = cache_after(recurrent_model, random_ids(2, 5), recording=True)
    tensors = [x for layer in _recurrent_layers(cache) for x in (layer.state, *layer.conv_state)]
    cache.crop(-2)
    cache.reset()
    after = [x for layer in _recurrent_layers(cache) for x in (layer.state, *layer.conv_state)]
    assert [x.data_ptr() for x in after] == [x.data_ptr() for x in tensors]


def test_static_count_is_a_tensor_that_stays(recurrent_model, random_ids):
    cache = InterdomainStaticCache(recurrent_model.config, max_cache_len=16)
    with torch.no_grad():
        recurrent_model(random_ids(2, 5), past_key_values=cache)
        layer = _recurrent_layers(cache)[0]
        count = layer.cumulative_length
        recurrent_model(random_ids(2, 1), past_key_values=cache)
    assert layer.cumulative_length is count
    assert count.tolist() == 6


@pytest.mark.parametrize("length", [512, 4096])
def test_state_does_not_grow(length, make_model, random_ids):
    model = make_model(num_hidden_layers=1, dtype=torch.float32, state_dtype="float32", chunk_size=64)
    cache = InterdomainCache(model.config)
    sizes = set()
    with torch.no_grad():
        for piece in random_ids(1, length).split(256, dim=1):
            model(piece, past_key_values=cache, logits_to_keep=1)
            sizes.add(cache.state_bytes())
    config = model.config
    state = 2 * config.num_key_value_heads * config.state_size * (config.feature_dim + config.head_dim)
    windows = 2 * config.hidden_size * (config.conv_kernel - 1)
    assert sizes == {4 * (state + windows)}
    assert cache.get_seq_length() == length


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float64"])
def test_state_dtype_under_a_bfloat16_model(state_dtype, make_model, random_ids, cache_after):
    model = make_model("interdomain-softmax", dtype=torch.bfloat16, state_dtype=state_dtype)
    ids = random_ids(2, 9)
    cache = cache_after(model, ids[:, :6], *ids[:, 6:].split(1, dim=1), recording=True)
    assert cache.layers[0].state.dtype == getattr(torch, state_dtype)
    assert all(window.dtype == torch.bfloat16 for window in cache.layers[0].conv_state)
    assert cache.layers[1].keys.dtype == torch.bfloat16
    cache.crop(-2)
    expected = cache_after(model, ids[:, :7]).layers[0].state
    assert cache.layers[0].state.dtype == expected.dtype
    torch.testing.assert_close(cache.layers[0].state.float(), expected.float(), rtol=0.02, atol=0.02)


def test_steps_in_float32_follow_the_float64_model(make_model, random_ids, cache_after):
    ids = random_ids(2, 40)
    pieces = ids.split(1, dim=1)
    narrow = cache_after(make_model(dtype=torch.float32, state_dtype="float32"), *pieces)
    wide = cache_after(make_model(), ids)
    for layer, expected in zip(narrow.layers, wide.layers):
        torch.testing.assert_close(layer.state.double(), expected.state, rtol=1e-4, atol=1e-4)


def test_move_to_another_dtype(model, make_cache, random_ids, advance):
    ids, next_ids = random_ids(2, 6), random_ids(2, 1, seed=1)
    cache = make_cache(model.config)
    advance(model, cache, ids)
    assert cache.to("cpu", torch.float32) is cache
    for layer in cache.layers:
        tensors = [layer.state, *layer.conv_state] if hasattr(layer, "state") else [layer.keys, layer.values]
        assert {x.dtype for x in tensors if x.is_floating_point()} == {torch.float32}
    model.float()
    expected = model(torch.cat([ids, next_ids], dim=1), use_cache=False).logits[:, -1:]
    torch.testing.assert_close(advance(model, cache, next_ids), expected, rtol=1e-3, atol=1e-3)


CASTS = [("bfloat16", "float32"), ("float32", "bfloat16"), ("float64", "float32"), ("float32", "float64")]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["interdomain-softmax", "windowed"])
@pytest.mark.parametrize("dtypes", CASTS)
def test_a_cache_goes_on_in_the_dtype_of_a_model_that_was_cast(
    implementation, name, dtypes, make_model, make_cache, random_ids, advance
):
    """Also where the cache was moved to another dtype than that of the model."""
    model, ids = make_model(name, attn_implementation=implementation), random_ids(2, 9)
    expected = model(ids, use_cache=False).logits[:, 6:]
    before, after = (getattr(torch, name) for name in dtypes)
    cache = make_cache(model.config)
    advance(model.to(before), cache, ids[:, :6])
    model.to(after)
    found = [advance(model, cache, ids[:, 6:7]), advance(model, cache.to(dtype=before), ids[:, 7:])]
    assert cache.layers[name != "windowed"].keys.dtype == after
    # The mean: in bfloat16 a window may hold other keys, of nearly the same bias.
    assert (torch.cat(found, dim=1) - expected).abs().mean() < (0.05 if "bfloat16" in dtypes else 1e-4)


def test_move_before_the_first_forward(make_model, random_ids):
    model = make_model(dtype=torch.float32)
    cache = InterdomainCache(model.config).to(dtype=torch.bfloat16)
    with torch.no_grad():
        model(random_ids(1, 3), past_key_values=cache)
    assert cache.layers[0].state.dtype == torch.bfloat16


# Copies, modes of autograd, layers.

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_independent(model, make_cache, how, random_ids, advance, contents, assert_same):
    ids = random_ids(2, 6)
    cache = make_cache(model.config)
    if not isinstance(cache, InterdomainStaticCache):
        cache.activate_past_recording()
    advance(model, cache, ids)
    twin = COPIES[how](cache)
    before = contents(cache)
    logits = advance(model, twin, random_ids(2, 2, seed=1))
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
    assert_same(advance(model, cache, random_ids(2, 2, seed=1)), logits)


def test_cache_of_inference_mode_is_usable_outside(model, make_cache, random_ids, advance, assert_same):
    ids = random_ids(2, 10)
    cache = make_cache(model.config)
    if any(isinstance(layer, StaticLayer) for layer in cache.layers):
        pytest.skip("the library's static layers of keys and values stay in inference mode")
    with torch.inference_mode():
        model(ids[:, :6], past_key_values=cache)
    logits = [advance(model, cache, ids[:, 6:7]), advance(model, cache, ids[:, 7:9]), advance(model, cache, ids[:, 9:])]
    assert_same(torch.cat(logits, dim=1), model(ids, use_cache=False).logits[:, 6:].detach())


@pytest.mark.parametrize("operation", ["reset", "reorder", "rollback", "repeat"])
def test_cache_of_inference_mode_is_changeable_outside(model, operation, random_ids, advance):
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    with torch.inference_mode():
        model(random_ids(2, 6), past_key_values=cache)
    changes = {
        "reset": cache.reset,
        "reorder": lambda: cache.reorder_cache(torch.tensor([1, 0])),
        "rollback": lambda: cache.crop(-2),
        "repeat": lambda: cache.batch_repeat_interleave(2),
    }
    changes[operation]()
    rows = 4 if operation == "repeat" else 2
    assert advance(model, cache, random_ids(rows, 2)).isfinite().all()


def test_cache_of_grad_mode_is_usable_without(model, random_ids, advance, assert_same):
    ids = random_ids(2, 8)
    cache = InterdomainCache(model.config)
    model(ids[:, :6], past_key_values=cache)
    logits = torch.cat([advance(model, cache, ids[:, 6:7]), advance(model, cache, ids[:, 7:])], dim=1)
    assert_same(logits, model(ids, use_cache=False).logits[:, 6:].detach())


@pytest.mark.parametrize("pieces", [(4, 3, 2), (4, 1, 1, 3)], ids=str)
def test_gradient_through_a_cache(any_model, pieces, random_ids, assert_same):
    ids = random_ids(2, sum(pieces))
    weights = torch.randn(2, sum(pieces), 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameters = list(any_model.parameters())

    cache, loss = InterdomainCache(any_model.config), 0
    for piece, weight in zip(ids.split(pieces, dim=1), weights.split(pieces, dim=1)):
        loss = loss + (any_model(piece, past_key_values=cache).logits * weight).sum()
    expected = (any_model(ids, use_cache=False).logits * weights).sum()
    # What ranks the keys of a sparse branch learns from a loss of its own.
    gradients = [torch.autograd.grad(x, parameters, materialize_grads=True) for x in (loss, expected)]
    assert_same(*gradients)


@pytest.mark.parametrize("length", [1, 3])
def test_gradient_of_values_alone_through_a_cache(length, make_model, random_ids, advance, assert_same):
    model, ids = make_model().requires_grad_(False), random_ids(2, 4 + length)
    weight = model.model.layers[0].token_mixer.v_proj.weight.requires_grad_(True)
    gradients = []
    for backend in ("auto", "recurrent"):
        model.config.backend = backend
        cache = InterdomainCache(model.config)
        advance(model, cache, ids[:, :4])
        logits = model(ids[:, 4:], past_key_values=cache).logits
        gradients += torch.autograd.grad(logits.square().sum(), weight)
    assert_same(*gradients)


def test_layers_hold_what_their_mixers_need(model, random_ids, cache_after):
    cache, config = cache_after(model, random_ids(3, 7)), model.config
    states = {
        "interdomain": (3, 4, 2, config.state_size, config.feature_dim + config.head_dim),
        "ssd": (3, 4, config.head_dim, config.ssd_state_size),
    }
    for mixer, layer in zip(config.mixers_per_layer, cache.layers):
        if mixer in states:
            assert layer.keys is None
            assert layer.state.shape == states[mixer]
            assert [tuple(w.shape) for w in layer.conv_state] == (
                [(3, 32, 3), (3, 32, 3)] if mixer == "interdomain" else []
            )
        else:
            assert layer.keys.shape == layer.values.shape == (3, 4, 7, config.head_dim)


def test_layers_refuse_keys_and_values(recurrent_model):
    cache = InterdomainCache(recurrent_model.config)
    index = recurrent_model.config.layer_types.index("linear_attention")
    with pytest.raises(ValueError, match="recurrent state"):
        cache.update(torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8), index)


# Quantized projections.


class WeightOnly(torch.nn.Module):
    """A linear map as quantizers make them: whole numbers and a scale in buffers, and no `weight`."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("numbers", (linear.weight.detach() / self.scale).round().to(torch.int8))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x):
        return torch.nn.functional.linear(x, self.numbers * self.scale, self.bias)


def test_weights_in_buffers(each_mixer, random_ids, make_cache, advance, tmp_path, assert_same):
    """Whole is pieces is a saved state; a cache of other rows is refused as ever."""
    model, ids = each_mixer, random_ids(2, 9)
    for parent in list(model.model.modules()):
        for name, part in list(parent.named_children()):
            if type(part) is torch.nn.Linear:
                setattr(parent, name, WeightOnly(part))
    cache = make_cache(model.config)
    parts = [advance(model, cache, part) for part in ids.split([5, 1, 3], dim=1)]
    assert_same(torch.cat(parts, dim=1), model(ids, use_cache=False).logits)
    with pytest.raises(ValueError, match="belongs to another model or batch"):
        model(random_ids(3, 1), past_key_values=cache)
    if isinstance(cache, InterdomainCache):
        cache.save(tmp_path / "state.safetensors", model)
        again = InterdomainCache.load(tmp_path / "state.safetensors", model)
        assert advance(model, again, ids[:, :2]).equal(advance(model, cache, ids[:, :2]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_packed_weights(each_mixer, random_ids, make_cache, advance):
    """PyTorch's dynamic quantization, of which `weight` is a method; two such models have each their own states."""
    quantize = pytest.importorskip("torch.ao.quantization", reason="this PyTorch quantizes no more").quantize_dynamic
    models, ids = [], random_ids(2, 9)
    for factor in (1, 1.1):
        for part in each_mixer.float().modules():
            if isinstance(part, torch.nn.Linear):
                part.weight.data *= factor
        models.append(quantize(each_mixer, {torch.nn.Linear}, dtype=torch.qint8))
    model, cache = models[0], make_cache(each_mixer.config)
    whole = model(ids, use_cache=False).logits
    assert (advance(model, cache, ids) - whole).std() < 0.05 * whole.std()  # rounded inputs may jump
    assert advance(model, cache, ids[:, :1]).isfinite().all()
    assert model.generate(ids, max_new_tokens=3).shape == (2, 12)
    assert len({model_fingerprint(model) for model in models}) == 2


class Scaled(torch.Tensor):
    """A weight as torchao makes them: a tensor of a class of its own around plain ones, which PyTorch cannot view."""

    @staticmethod
    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        if function in (torch.ops.aten.t.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            plain = [x.numbers * x.scale if isinstance(x, cls) else x for x in args]
            return function(*plain, **kwargs or {})
        raise NotImplementedError(f"Scaled dispatch: {function}")


def test_weights_of_a_class_of_their_own(make_model, random_ids, tmp_path):
    """States and prompts are kept, and a weight that is written is seen."""
    model, ids = make_model("forget-gates", dtype=torch.float32, state_dtype="float32"), random_ids(1, 9)
    for part in model.model.modules():
        if type(part) is torch.nn.Linear:
            weight = part.weight.detach()
            scale = weight.abs().amax(1, keepdim=True) / 127
            part.weight = torch.nn.Parameter(Scaled((weight / scale).round(), scale), requires_grad=False)
    expected = model.generate(ids, do_sample=False, max_new_tokens=8)
    model.prompt_store = StateStore()
    for text, more in ((ids, 4), (expected[:, :13], 4)):
        assert model.generate(text, do_sample=False, max_new_tokens=more).equal(expected[:, : text.shape[1] + more])
    assert model.prompt_store.tokens_reused == 12
    cache, file = InterdomainCache(model.config), tmp_path / "state.safetensors"
    model(ids, past_key_values=cache)
    cache.save(file, model)
    InterdomainCache.load(file, model)
    weight = model.model.layers[1].token_mixer.q_proj.weight
    for part in (weight.numbers, weight.scale):
        before = part.clone()
        part.data[0, 0] += 1
        with pytest.raises(ValueError, match="is the state of another model"):
            InterdomainCache.load(file, model)
        part.data.copy_(before)
    InterdomainCache.load(file, model)


# Its name, which Transformers 5.24 has changed.


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_the_cache_has_any_of_its_names(each_mixer, name, random_ids, advance, assert_same, recwarn, monkeypatch):
    """For forwards, mixers and `generate`, and nothing warns of it."""
    logged: list[str] = []
    monkeypatch.setattr(generic.logger, "warning_once", logged.append)
    ids, decoder = random_ids(1, 9), each_mixer.model
    whole = advance(each_mixer, None, ids, use_cache=False)
    cache = InterdomainCache(each_mixer.config)
    with torch.no_grad():
        first = each_mixer(ids[:, :5], **{name: cache})
        rest = decoder(ids[:, 5:], **{name: first[CACHE_NAME]})
        assert_same(each_mixer.lm_head(rest.last_hidden_state), whole[:, 5:])
        for i, layer in enumerate(decoder.layers):
            x = torch.randn(1, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            inputs = {"position_ids": torch.tensor([[9]])}
            rotations = {int(dim): rotary(x, **inputs) for dim, rotary in decoder.rotary_embs.items()}
            inputs["position_embeddings"] = rotations
            layer.token_mixer(x, **inputs, **{name: cache})
            assert cache.layers[i].get_seq_length() == 10
    written, settings = InterdomainCache(each_mixer.config), {"max_new_tokens": 6, "do_sample": False}
    found = each_mixer.generate(ids, **settings, **{name: written})
    assert written.get_seq_length() == 14 and found.equal(each_mixer.generate(ids, **settings, use_cache=False))
    assert not logged + [str(warning.message) for warning in recwarn if "cache" in str(warning.message)]


def test_two_caches_under_two_names_are_refused(each_mixer, random_ids, contents):
    ids, first, second = random_ids(1, 4), InterdomainCache(each_mixer.config), InterdomainCache(each_mixer.config)
    for called in (each_mixer, each_mixer.model, each_mixer.generate):
        with pytest.raises(TypeError, match="are two names of one argument, the cache: give one of them"):
            called(ids, past_key_values=first, cache=second)
        assert not first.get_seq_length() and not second.get_seq_length()
    assert each_mixer(ids, past_key_values=first, cache=None)[CACHE_NAME] is first


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_static_cache_that_records_hides_its_unused_room(
    make_model, implementation, random_ids, advance, assert_same
):
    model, ids = make_model("interdomain-softmax", attn_implementation=implementation), random_ids(2, 6)
    cache = InterdomainStaticCache(model.config, max_cache_len=32)
    cache.activate_past_recording()
    steps = [advance(model, cache, ids[:, :5]), advance(model, cache, ids[:, 5:])]
    with torch.no_grad():
        assert_same(torch.cat(steps, dim=1), model(ids, use_cache=False).logits)


def test_a_cache_of_more_layers_is_refused(make_model, random_ids):
    """Also where the first are alike."""
    cache = make_model(num_hidden_layers=3)(random_ids(2, 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="InterdomainCache of 3 layers. does not fit the 2 layers"):
        make_model()(random_ids(2, 1), past_key_values=cache)


def test_rows_that_do_not_divide_the_batch_are_not_repeated(make_model, random_ids):
    model = make_model()
    cache = model(random_ids(2, 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="it belongs to another model or batch") as error:
        model(random_ids(3, 1), past_key_values=cache)
    assert "batch_repeat_interleave" not in str(error.value)


def test_what_may_be_taken_back_never_becomes_less(make_config):
    cache = InterdomainCache(make_config("interdomain", max_rollback=6))
    for tokens, allowed in ((2, 6), (9, 9)):
        cache.allow_rollback(tokens)
        assert {layer.max_rollback for layer in cache.layers} == {allowed}
