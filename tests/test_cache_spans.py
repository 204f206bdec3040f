"""Caches joined and cut: exact in a first layer without convolutions, near in later ones, refused where neither is."""

import copy
import sys

import pytest
import torch
from transformers import DynamicCache

import modeling_interdomain
from examples.joined_states import cut_cache, join_caches
from modeling_interdomain import InterdomainCache, add_learned_state

DOCUMENTS = (slice(0, 7), slice(7, 16))
REST = slice(16, 20)


def read(model, ids, *pieces: slice, cache=None, **inputs):
    """The cache after some pieces of a text, one forward each, and the logits of the last."""
    cache = InterdomainCache(model.config) if cache is None else cache
    for piece in pieces:
        with torch.no_grad():
            logits = model(ids[:, piece], past_key_values=cache, **inputs).logits
    return cache, logits


@pytest.fixture(params=["interdomain", "s4d"])
def one_layer(request, make_model):
    """A model in which nothing is approximate."""
    return make_model("no-convolution", token_mixers=request.param, num_hidden_layers=1)


@pytest.mark.parametrize("learned", [False, True])
def test_a_joined_cache_goes_on_as_if_it_had_read_both(one_layer, learned, random_ids, assert_same):
    model, ids = one_layer, random_ids(2, 20)
    if learned:
        add_learned_state(model)
        torch.nn.init.normal_(model.model.layers[0].token_mixer.first_state.state)
    first, second = (read(model, ids, piece)[0] for piece in DOCUMENTS)
    kept = [x.clone() for x in (first.layers[0].state, second.layers[0].state)]
    joined = model.join_caches(first, second)
    assert joined.get_seq_length() == 16
    assert_same(read(model, ids, REST, cache=joined)[1], read(model, ids, *DOCUMENTS, REST)[1])
    assert torch.equal(first.layers[0].state, kept[0]) and torch.equal(second.layers[0].state, kept[1])


def test_rows_of_their_own_lengths_are_joined(one_layer, random_ids, assert_same):
    model, ids = one_layer, random_ids(2, 20)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4] = False
    first = read(model, ids, DOCUMENTS[0])[0]
    second = read(model, ids, DOCUMENTS[1], attention_mask=mask)[0]
    joined = join_caches(first, second, model, lengths=mask.sum(1))
    found = read(model, ids, REST, cache=joined)[1]
    shorter = torch.cat([ids[:1, :7], ids[:1, 11:]], dim=1)
    assert_same(found[:1], read(model, shorter, slice(0, 12), slice(12, 16))[1])
    assert_same(found[1:], read(model, ids[1:], slice(0, 16), REST)[1])


def test_a_document_that_was_read_at_its_place_joins_with_rotary_embeddings(make_model, random_ids, assert_same):
    model = make_model(
        "no-convolution", num_hidden_layers=1, rope_parameters={"rope_type": "default"}, rope_placement="after"
    )
    ids = random_ids(2, 20)
    first = read(model, ids, DOCUMENTS[0])[0]
    second = read(model, ids, DOCUMENTS[1], position_ids=torch.arange(7, 16)[None])[0]
    assert_same(
        read(model, ids, REST, cache=join_caches(first, second, model))[1], read(model, ids, *DOCUMENTS, REST)[1]
    )
    with pytest.raises(ValueError, match="Rotary embeddings have numbered the tokens"):
        cut_cache(second, None, first, model)


@pytest.mark.parametrize("start", [0, 5])
def test_a_cut_cache_goes_on_as_if_it_had_never_read_the_span(one_layer, start, random_ids, assert_same):
    model, ids = one_layer, random_ids(2, 20)
    before = read(model, ids, slice(0, start))[0] if start else None
    after = read(model, ids, slice(start, 9), cache=copy.deepcopy(before))[0]
    cache = read(model, ids, slice(9, 16), cache=copy.deepcopy(after))[0]
    found = model.cut_cache(cache, before, after)
    rest = torch.cat([ids[:, :start], ids[:, 9:]], dim=1)
    assert found.get_seq_length() == start + 7
    expected = read(model, rest, slice(0, start + 7), slice(start + 7, None))[1]
    assert_same(read(model, ids, REST, cache=found)[1], expected)


def test_through_layers_it_is_near(make_model, random_ids):
    """Nearer than the second document alone, and `generate` goes on from it."""
    model, ids = make_model("interdomain"), random_ids(2, 20)
    first, second = (read(model, ids, piece)[0] for piece in DOCUMENTS)
    true = read(model, ids, *DOCUMENTS)[0].layers[-1].state
    joined = join_caches(first, second, model)
    assert (joined.layers[-1].state - true).norm() < (second.layers[-1].state - true).norm()
    found = model.generate(ids[:, :17], past_key_values=joined, max_new_tokens=3, do_sample=False)
    assert found.shape == (2, 20)


def test_what_cannot_be_joined_is_refused_before_anything_is_made(make_model, random_ids):
    ids = random_ids(2, 20)
    for name, words in (("ssd", r"Layer 0 \(ssd\)"), ("softmax", r"Layer 0 \(softmax\)")):
        model = make_model("interdomain", token_mixers=name)
        caches = [read(model, ids, piece)[0] for piece in DOCUMENTS]
        with pytest.raises(ValueError, match=words + " does not hold one linear state"):
            join_caches(*caches, model)
    model = make_model("interdomain")
    first, second = (read(model, ids, piece)[0] for piece in DOCUMENTS)
    for wrong in (DynamicCache(), None):
        with pytest.raises(ValueError, match=f"second must be an InterdomainCache, got {type(wrong).__name__}"):
            join_caches(first, wrong, model)
    deeper = make_model("interdomain", num_hidden_layers=3)
    with pytest.raises(ValueError, match="of 3 layers. does not fit the 2 layers of this model"):
        join_caches(first, read(deeper, ids, DOCUMENTS[1])[0], model)
    with pytest.raises(ValueError, match="second has read nothing"):
        join_caches(first, InterdomainCache(model.config), model)
    with pytest.raises(ValueError, match="as many rows, got first 2, second 1"):
        join_caches(first, read(model, ids[:1], DOCUMENTS[1])[0], model)
    with pytest.raises(ValueError, match=r"more and more of one text, got \[9, 7, 9\]"):
        cut_cache(second, second, first, model)
    for wrong, words in ((10, "lengths must be at most the 9 tokens that were read"), (2.5, "must be whole")):
        with pytest.raises(ValueError, match=words):
            join_caches(first, second, model, lengths=torch.tensor([3, wrong]))
    after = read(model, ids, slice(7, 9), cache=copy.deepcopy(first))[0]
    with pytest.raises(ValueError, match="since must be at most the 2 tokens that were read"):
        cut_cache(after, None, first, model, since=torch.tensor([2, 3]))
    with pytest.raises(ValueError, match="A state belongs to an Interdomain model"):
        join_caches(first, second, torch.nn.Linear(1, 1))


def test_the_names_of_the_package_stay(one_layer, random_ids, assert_same, monkeypatch):
    """They are those of the example; where that is not at hand, they say where it is."""
    model, ids = one_layer, random_ids(2, 20)
    first, second = (read(model, ids, piece)[0] for piece in DOCUMENTS)
    both = read(model, ids, *DOCUMENTS)[0]
    joined = modeling_interdomain.join_caches(first, second, model)
    assert_same(joined.layers[0].state, both.layers[0].state)
    assert_same(modeling_interdomain.cut_cache(both, None, first, model).layers[0].state, second.layers[0].state)
    monkeypatch.setitem(sys.modules, "examples.joined_states", None)
    with pytest.raises(ImportError, match="examples/joined_states.py of its repository: run from the root"):
        model.join_caches(first, second)
