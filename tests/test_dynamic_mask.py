"""The dynamic mask: by position, by value, and the window with its cache of bounded size."""

import copy
import pickle

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.cache_utils import DynamicCache
from transformers.models.doge.modeling_doge import DogeAttention

from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainStaticCache
from modeling_interdomain.inputs import layout
from modeling_interdomain.mixers.softmax import mixer as mixer_softmax
from modeling_interdomain.mixers.softmax.dynamic_mask import BIAS_COLUMNS
from modeling_interdomain.ops.common.window import Keys, best, seen, token_documents
from tests.conftest import ROPE, WINDOWED

REFUSED = (ValueError, StrictDataclassError)
WINDOW = {"dynamic_mask": "value", "dynamic_mask_window": 4}
ARRANGEMENTS = {
    "softmax": {"token_mixers": "softmax", "rope_parameters": ROPE, **WINDOW},
    "grouped": {"token_mixers": "softmax", "num_key_value_heads": 2, **WINDOW},
    "mixed": WINDOWED["windowed"],
    "narrow": {"token_mixers": ["interdomain", "softmax"], "dynamic_mask": "value", "dynamic_mask_window": 1},
}
DOCUMENTS = [5, 1, 9, 3]


@pytest.fixture(params=ARRANGEMENTS)
def windowed(request, make_model):
    return make_model(**ARRANGEMENTS[request.param])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attention_inputs(mixer, x):
    """Of a mixer without rotations and `x` `[1, T, d]`: query, key and value `[heads, T, size]`."""
    query, key, value = (
        projection(x)[0].unflatten(-1, (-1, mixer.head_dim)).transpose(0, 1)
        for projection in (mixer.q_proj, mixer.k_proj, mixer.value)
    )
    groups = mixer.num_key_value_groups
    return query, key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)


def causal(length):
    return torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)


def gradients(model, loss) -> dict:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# By position.


@pytest.mark.parametrize("mixer_name", ["softmax", "inner_function"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_position_multiplies_the_softmax(make_model, mixer_name, implementation):
    """`y = (L o softmax(causal scores)) V`, as the paper's equation has it, with a mask of `[H, T, T]`."""
    groups = {"num_key_value_heads": 2} if mixer_name == "softmax" else {}
    fields = {"dynamic_mask": "position", "attn_implementation": implementation, **groups}
    mixer = make_model(token_mixers=mixer_name, **fields).model.layers[0].token_mixer
    x, length = normal(1, 9, 32), 9
    query, key, value = attention_inputs(mixer, x)
    scores = query @ key.mT * mixer.head_dim**-0.5 + causal(length)
    table = mixer.dynamic_mask.table[:, :length].repeat_interleave(mixer.num_key_value_groups, 0)
    faded = table[:, None] * scores.softmax(-1)
    expected = mixer.o_proj((faded @ value).transpose(0, 1).flatten(1))
    found = mixer(x, position_ids=torch.arange(length)[None], attention_mask=causal(length))[0][0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_ones_are_plain_attention(make_model, random_ids):
    plain, masked = make_model("softmax"), make_model("softmax", dynamic_mask="position")
    masked.load_state_dict(plain.state_dict(), strict=False)
    for layer in masked.model.layers:
        torch.nn.init.ones_(layer.token_mixer.dynamic_mask.table)
    assert masked(random_ids(2, 9)).logits.equal(plain(random_ids(2, 9)).logits)


def test_hard_is_zero_or_one_and_its_gradient_goes_straight_through(make_model):
    mask = make_model("softmax", dynamic_mask="hard").model.layers[0].token_mixer.dynamic_mask
    numbers = torch.tensor([-3.0, 0.2, 0.7, 1.0, 4.0], dtype=torch.float64)
    with torch.no_grad():
        mask.table[:, :5] = numbers
    value, weights = torch.ones(1, 5, 4, 8, dtype=torch.float64), normal(1, 5, 4, 8)
    faded = mask(None, None, value, torch.arange(5)[None])[2]
    assert faded[0, :, 0, 0].tolist() == [0, 0, 1, 1, 1]
    (gradient,) = torch.autograd.grad((faded * weights).sum(), mask.table)
    torch.testing.assert_close(gradient[:, :5], weights[0].sum(-1).T)
    assert not gradient[:, 5:].any()


@pytest.mark.parametrize("kind", ["position", "hard"])
def test_positions_beyond_the_table_are_refused(make_model, kind, random_ids, contents):
    model = make_model("interdomain-softmax", dynamic_mask=kind, max_position_embeddings=6)
    cache = InterdomainCache(model.config)
    model(random_ids(1, 5), past_key_values=cache)
    before = contents(cache)
    message = "a number for each position below max_position_embeddings = 6, and this forward needs one for {}; shorten"
    with pytest.raises(ValueError, match=message.format(6)):
        model(random_ids(1, 2), past_key_values=cache)
    with pytest.raises(ValueError, match=message.format(-1)):
        model(random_ids(1, 2), position_ids=torch.tensor([[-1, 0]]))
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
    model(random_ids(1, 1), past_key_values=cache)  # the last one that has a number
    padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    assert model(random_ids(1, 8), attention_mask=padded).logits.isfinite().all()


@pytest.mark.parametrize("how", ["ids", "embeddings", "positions", "cache"])
def test_generate_looks_at_positions_outside_of_its_steps(make_model, random_ids, monkeypatch, how):
    """A compiled step on a GPU cannot say it, and a GPU does not recover from an index that is too large."""
    model = make_model("interdomain-softmax", dynamic_mask="position", max_position_embeddings=8)
    monkeypatch.setattr(layout, "check_dynamic_mask", lambda config, embeddings, *_: embeddings)
    ids = random_ids(1, 5)
    cache = InterdomainStaticCache(model.config, max_cache_len=20)
    if how == "cache":
        model(ids, past_key_values=cache)
    given = {
        "ids": {"inputs": ids},
        "embeddings": {"inputs_embeds": model.get_input_embeddings()(ids)},
        "positions": {"inputs": ids[:, :3], "position_ids": torch.tensor([[4, 5, 6]])},
        "cache": {"inputs": ids[:, :1], "attention_mask": torch.ones(1, 6, dtype=torch.long)},
    }
    with pytest.raises(ValueError, match="below max_position_embeddings = 8, and this forward needs one for 8"):
        model.generate(**given[how], past_key_values=cache, max_new_tokens=9, min_new_tokens=9)


def test_transforms_of_functions_are_compiled_with_the_check(make_model, random_ids):
    model = make_model("softmax", dynamic_mask="position", attn_implementation="eager")
    embeddings = model.get_input_embeddings()(random_ids(1, 5)).detach()

    def tangent(x):
        return torch.func.jvp(lambda y: model(inputs_embeds=y, use_cache=False).logits, (x,), (torch.ones_like(x),))[1]

    expected = tangent(embeddings)
    assert expected.abs().max() > 1e-3
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(tangent, backend="aot_eager")(embeddings), expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_steps_refuse_positions_beyond_the_table_before_their_layers_run(
    make_model, backend, random_ids, contents
):
    model = make_model("interdomain-softmax", dynamic_mask="position", max_position_embeddings=6, dtype=torch.float32)
    cache = InterdomainStaticCache(model.config, max_cache_len=8)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        model(random_ids(1, 5), past_key_values=cache)
        last = compiled(random_ids(1, 1), past_key_values=cache).logits
        assert last.isfinite().all()
        before = contents(cache)
        with pytest.raises(ValueError, match="below max_position_embeddings = 6, and this forward needs one for 6"):
            compiled(random_ids(1, 1), past_key_values=cache)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


# By value.


def bias_by_hand(mixer, value):
    """`[T, heads]` from `[T, d]`, an exponential and a logarithm at a time."""
    mask, rows = mixer.dynamic_mask, []
    for token in value:
        products = [weights @ token for weights in mask.dt_proj.weight]
        rows.append(torch.stack([(a * (1 + w.exp()).log()).exp() for a, w in zip(mask.A, products)]))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("mixer_name", ["softmax", "inner_function"])
@pytest.mark.each_value
def test_value_is_a_bias_and_a_top_k_of_each_row(make_model, assert_same, window, implementation, mixer_name):
    groups = {"num_key_value_heads": 2} if mixer_name == "softmax" else {}
    fields = {"dynamic_mask": "value", "dynamic_mask_window": window, "attn_implementation": implementation}
    mixer = make_model(token_mixers=mixer_name, **fields, **groups).model.layers[0].token_mixer
    x, length = normal(1, 9, 32), 9
    query, key, value = attention_inputs(mixer, x)
    bias = bias_by_hand(mixer, mixer.value(x)[0]).T.repeat_interleave(mixer.num_key_value_groups, 0)
    heads = []
    for h in range(4):
        rows = []
        for t in range(length):
            scores = query[h, t] @ key[h, : t + 1].T * mixer.head_dim**-0.5 + bias[h, : t + 1]
            kept = bias[h, : t + 1].topk(min(t + 1, window or length)).indices
            rows.append(scores[kept].softmax(0) @ value[h, kept])
        heads.append(torch.stack(rows))
    expected = mixer.o_proj(torch.cat(heads, dim=1))
    mask = causal(length) if window is None else None  # with a window it makes its own
    found = mixer(x, position_ids=torch.arange(length)[None], attention_mask=mask)[0][0]
    assert_same(found, expected)
    weights = normal(length, 32, seed=1)
    assert_same(gradients(mixer, (found * weights).sum()), gradients(mixer, (expected * weights).sum()))


def test_it_starts_without_a_bias_and_with_the_last_keys(make_config, random_ids):
    """All biases are the same then, and of equal ones the later stay."""
    bias = torch.ones(1, 2, 6)
    visible = seen(keys_of(bias), 6, 3)
    band = torch.ones(6, 6).tril().bool() & ~torch.ones(6, 6).tril(-3).bool()
    assert visible.equal(band.expand(1, 2, 6, 6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_bias_in_two_columns_is_exact_enough(make_model, dtype):
    mask = make_model("softmax", dynamic_mask="value", dtype=dtype).model.layers[0].token_mixer.dynamic_mask
    query, key, value = (normal(1, 7, 4, 8, seed=seed).to(dtype) for seed in range(3))
    query, key, value = mask(query, key, value, None)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] == 8 + BIAS_COLUMNS
    assert not value[..., 8:].any()
    added = (query[..., 8:].double() * key[..., 8:].double()).sum(-1) * 8**-0.5
    exact = {torch.float64: 1e-14, torch.float32: 1e-7, torch.bfloat16: 2**-16}[dtype]
    torch.testing.assert_close(added, mask.bias(value[..., :8]).double(), rtol=exact, atol=0)
    with torch.autocast("cpu", torch.bfloat16):  # in which attention multiplies then, unless it is all in float64
        columns = mask(*(x[..., :8] for x in (query, key, value)), None)[1][..., 8:]
        bias = mask.bias(value[..., :8]).double()
    added = (columns if dtype == torch.float64 else columns.bfloat16()).double().sum(-1) * 8**-0.5
    torch.testing.assert_close(added, bias, rtol=max(exact, 2**-16) if dtype != torch.float64 else exact, atol=0)


def test_a_bias_beyond_the_format_stays_finite(make_model, random_ids):
    model = make_model("softmax", dynamic_mask="value", dynamic_mask_window=3, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.token_mixer.dynamic_mask.A.fill_(1e4)
    assert model(random_ids(2, 9)).logits.isfinite().all()


# Which keys are seen.


def keys_of(bias, places=None, documents=None, start=0):
    places = (torch.arange(bias.shape[2]) + start).expand(bias.shape) if places is None else places
    documents = torch.zeros_like(places) if documents is None else documents
    key = bias[..., None].expand(*bias.shape, 2)
    return Keys(key, key, bias, places, documents)


def coarse(*shape, seed=0):
    """Biases of which many are the same."""
    return torch.randint(4, shape, generator=torch.Generator().manual_seed(seed)).double()


def seen_by_hand(bias, documents, window):
    """Row by row: of the keys of the document so far the best, of equal ones the later."""
    visible = torch.zeros(*bias.shape, bias.shape[2], dtype=torch.bool)
    for b, g in torch.cartesian_prod(*map(torch.arange, bias.shape[:2])).tolist():
        for t in range(bias.shape[2]):
            mine = [j for j in range(t + 1) if documents[b, g, j] == documents[b, g, t]]
            order = sorted(mine, key=lambda j: (-bias[b, g, j].item(), -j))
            visible[b, g, t, order[:window]] = True
    return visible


@pytest.mark.parametrize("window", [1, 3, 30])
def test_seen_against_the_definition(window):
    bias = coarse(2, 3, 14)
    places = torch.arange(14).expand(2, 14)
    real = torch.rand(2, 14, generator=torch.Generator().manual_seed(1)) > 0.3
    packed = torch.tensor([0] * 4 + [1] * 3 + [2] * 7).expand(2, 14)
    for documents in (None, packed):
        numbers = token_documents(real, documents, places)[:, None].expand(2, 3, 14)
        visible = seen(keys_of(bias, documents=numbers), 14, window)
        assert visible.equal(seen_by_hand(bias, numbers, window))
        assert visible.diagonal(dim1=2, dim2=3)[~real[:, None].expand(2, 3, 14)].all(), "a pad sees itself"


def test_a_key_that_has_left_never_returns():
    visible = seen(keys_of(coarse(2, 3, 40)), 40, 5).int()
    for t in range(39):
        assert (visible[:, :, t + 1, : t + 1] <= visible[:, :, t, : t + 1]).all()


def test_it_is_the_mask_of_doge():
    bias, hidden = normal(2, 3, 12).abs(), torch.zeros(2, 12, 1, dtype=torch.float64)
    causal = torch.ones(12, 12).tril().bool().expand(2, 1, 12, 12)
    theirs = DogeAttention.prepare_dynamic_mask(None, hidden, bias, 5, causal)
    visible = seen(keys_of(bias), 12, 5)
    assert visible.equal(theirs > torch.finfo(torch.float64).min)
    assert torch.equal(theirs[visible], bias[:, :, None].expand(2, 3, 12, 12)[visible])


@pytest.mark.parametrize("last", [0, 3])
def test_pieces_see_what_the_whole_sees(last):
    """What is kept between pieces is enough, and taking back `last` tokens leaves enough as well."""
    bias, window, length = coarse(2, 3, 30), 4, 30
    documents = torch.tensor([0] * 3 + [1] * 13 + [2] * 14)[None, None].expand(2, 3, 30)
    whole, held, start = seen(keys_of(bias, documents=documents), length, window), None, 0
    for size in (1, 7, 3, 1, 1, 12, 5):
        piece = slice(start, start + size)
        new = keys_of(bias[..., piece], documents=documents[..., piece], start=start)
        keys = new if held is None else held.then(new)
        visible = torch.zeros(2, 3, size, length, dtype=torch.bool)
        mine = seen(keys, size, window)
        visible.scatter_(3, torch.where(mine, keys.places[:, :, None], length - 1), mine)  # the last is its own
        expected = whole[:, :, piece]
        assert visible[..., : start + 1].equal(expected[..., : start + 1])
        held, start = best(keys, window, last), start + size
        assert held.bias.shape[2] <= window + last and (held.places.diff(dim=2) > 0).all()
        assert set(range(max(0, start - last), start)) <= set(held.places[1, 2].tolist())


# Through a model: pieces, pads, packing, the cache.


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_pieces_and_steps_through_a_cache(windowed, make_cache, implementation, random_ids, advance, assert_same):
    windowed.set_attn_implementation(implementation)
    ids = random_ids(2, 14)
    whole = advance(windowed, None, ids)
    for sizes in ([1] * 14, [6, 1, 1, 4, 2], [13, 1]):
        cache = make_cache(windowed.config)
        assert_same(torch.cat([advance(windowed, cache, piece) for piece in ids.split(sizes, 1)], 1), whole)


@pytest.mark.parametrize("layout", ["left", "right", "scattered"])
def test_pads(windowed, make_cache, layout, random_ids, advance, assert_same):
    """Whole, and through a cache; one row has nothing but pads for a while."""
    ids, mask = random_ids(3, 13), torch.ones(3, 13, dtype=torch.long)
    if layout == "scattered":
        mask = (torch.rand(3, 13, generator=torch.Generator().manual_seed(2)) > 0.4).long()
    else:
        mask[1, :7] = mask[2, :2] = 0
        mask = mask.flip(1) if layout == "right" else mask
    cache, ends = make_cache(windowed.config), [5, 6, 7, 11, 12, 13]
    pieces = [
        advance(windowed, cache, ids[:, start:end], attention_mask=mask[:, :end])
        for start, end in zip([0, *ends], ends)
    ]
    whole = advance(windowed, None, ids, attention_mask=mask)
    assert whole.isfinite().all()
    for row, real in enumerate(mask.bool()):
        alone = advance(windowed, None, ids[row : row + 1, real])[0]
        assert_same(whole[row, real], alone)
        assert_same(torch.cat(pieces, dim=1)[row, real], alone)


@pytest.mark.parametrize("given", ["ends", "positions"])
def test_packed_documents(windowed, given, random_ids, assert_same):
    ids = random_ids(1, sum(DOCUMENTS))
    packing = {
        "ends": {"cu_seq_lens_q": torch.tensor([0, *DOCUMENTS]).cumsum(0).int()},
        "positions": {"position_ids": torch.cat([torch.arange(length) for length in DOCUMENTS])[None]},
    }[given]
    packed = windowed(ids, **packing).logits
    alone = torch.cat([windowed(document).logits for document in ids.split(DOCUMENTS, dim=1)], dim=1)
    assert_same(packed, alone)
    weights = normal(*packed.shape)
    assert_same(gradients(windowed, (packed * weights).sum()), gradients(windowed, (alone * weights).sum()))


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_sequence_attends_piece_by_piece(windowed, monkeypatch, packed, random_ids, assert_same):
    ids = random_ids(1, sum(DOCUMENTS))
    packing = {"cu_seq_lens_q": torch.tensor([0, *DOCUMENTS]).cumsum(0).int()} if packed else {}
    found = {}
    for piece in (100, 2):
        monkeypatch.setattr(mixer_softmax, "_PIECE", piece)
        logits = windowed(ids, **packing).logits
        found[piece] = logits.detach(), gradients(windowed, (logits * normal(*logits.shape)).sum())
    assert_same(found[2], found[100])


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generate(windowed, mode, left_padded):
    inputs, settings = left_padded([2, 7]), {"max_new_tokens": 9, "do_sample": False}
    expected = windowed.generate(**inputs, **settings, num_beams=mode.get("num_beams", 1), use_cache=False)
    assert windowed.generate(**inputs, **settings, **mode).equal(expected)


def test_prompt_lookup(windowed, random_ids, guess_ahead):
    ids = random_ids(1, 5).repeat(1, 4)
    expected = windowed.generate(ids, max_new_tokens=9, do_sample=False)
    guess_ahead(expected)
    assert windowed.generate(ids, max_new_tokens=9, do_sample=False, prompt_lookup_num_tokens=4).equal(expected)


@pytest.mark.parametrize("removed", [1, 3, 6])
def test_rollback(windowed, removed, random_ids, advance, assert_same):
    """And again after rows have changed, and from a forward longer than the record."""
    ids, mask, rows = random_ids(2, 24), torch.ones(2, 24, dtype=torch.long), [1, 1, 0]
    mask[1, :3] = mask[0, 14] = 0
    windowed.config.max_rollback = 5
    cache = InterdomainCache(windowed.config)
    cache.activate_past_recording()
    for start, end in ((0, 11), (11, 12), (12, 18)):
        advance(windowed, cache, ids[:, start:end], attention_mask=mask[:, :end])
    cache.batch_select_indices(torch.tensor(rows))
    cache.crop(-removed)
    end = 18 - removed
    assert cache.get_seq_length() == end
    for _ in range(2):
        found = advance(windowed, cache, ids[rows, end:20], attention_mask=mask[rows, :20])
        expected = advance(windowed, None, ids[rows, :20], attention_mask=mask[rows, :20])[:, end:]
        real = mask[rows, end:20].bool()
        assert_same(found[real], expected[real])
        cache.crop(end - 20)


def test_rollback_needs_a_record_once_keys_have_left(make_model, random_ids, advance, contents, assert_same):
    model, ids = make_model(**ARRANGEMENTS["softmax"], max_rollback=3), random_ids(1, 16)
    cache = InterdomainCache(model.config)
    advance(model, cache, ids[:, :4])
    cache.crop(-2)  # nothing has left yet
    advance(model, cache, ids[:, 2:9])
    before = contents(cache)
    with pytest.raises(ValueError, match=r"the last 0 tokens, got 1: .* have left the window; call activate_past_reco"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="takes 0 or a negative number of tokens for a window of keys, got 1"):
        cache.crop(1)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
    cache.activate_past_recording()
    for t in range(9, 16):
        advance(model, cache, ids[:, t : t + 1])
    with pytest.raises(ValueError, match="the last 6 tokens, got 7: .* or raise max_rollback in the configuration"):
        cache.crop(-7)
    cache.crop(-3)
    cache.crop(-3)
    assert_same(advance(model, cache, ids[:, 10:]), advance(model, None, ids)[:, 10:])
    static = InterdomainStaticCache(model.config, max_cache_len=16)
    advance(model, static, ids)
    with pytest.raises(ValueError, match="static cache of a window of keys cannot take tokens back"):
        static.crop(-1)


def test_rows(windowed, make_cache, random_ids, advance, assert_same):
    ids, following = random_ids(3, 9), random_ids(6, 2, seed=1)
    expected = advance(windowed, None, torch.cat([ids[[2, 2, 0, 0, 0, 0]], following], dim=1))[:, -2:]
    cache = make_cache(windowed.config)
    advance(windowed, cache, ids)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.batch_repeat_interleave(2)
    assert_same(advance(windowed, cache, following), expected)


def test_the_cache_keeps_a_window_and_no_more(make_model, make_cache, random_ids, advance):
    model, sizes = make_model(**ARRANGEMENTS["grouped"]), []
    cache = make_cache(model.config)
    for length in (9, 1, 30, 1):
        advance(model, cache, random_ids(2, length))
        sizes.append(cache.state_bytes())
        held = sum(layer.keys[0].numel() + layer.values[0].numel() for layer in cache.layers)
        assert held == model.config.state_sizes(int(cache.get_seq_length()))["keys_values"]
    assert len(set(sizes)) == 1 and sizes[0] == sum(x.nbytes for layer in cache.layers for x in layer.tensors())
    assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in cache.layers[0].tensors())


def test_a_recording_cache_does_not_grow_either(make_model, random_ids, advance):
    model = make_model(**ARRANGEMENTS["softmax"], max_rollback=3)
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    advance(model, cache, random_ids(1, 20))
    for seed in range(5):
        advance(model, cache, random_ids(1, 1, seed=seed))
        assert cache.layers[0].keys.shape[2] == 4 + 2 * 3


def test_static_addresses_stay_and_reset_forgets(make_model, random_ids, advance, assert_same):
    model = make_model(**ARRANGEMENTS["softmax"])
    cache = InterdomainStaticCache(model.config, max_cache_len=16)
    first = advance(model, cache, random_ids(2, 3))
    tensors = [x for layer in cache.layers for x in (*layer.tensors(), layer.cumulative_length)]
    before = [x.data_ptr() for x in tensors]
    advance(model, cache, random_ids(2, 1, seed=1))
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert_same(advance(model, cache, random_ids(2, 3)), first)
    after = [x for layer in cache.layers for x in (*layer.tensors(), layer.cumulative_length)]
    assert [x.data_ptr() for x in after] == before


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_reset_and_moves(make_model, make_cache, how, random_ids, advance, assert_same):
    model = make_model(**ARRANGEMENTS["mixed"])
    cache, following = make_cache(model.config), random_ids(2, 1, seed=1)
    first = advance(model, cache, random_ids(2, 9))
    again = copy.deepcopy(cache) if how == "deepcopy" else pickle.loads(pickle.dumps(cache))
    assert_same(advance(model, again, following), advance(model, cache, following))
    cache.reset()
    assert_same(advance(model, cache, random_ids(2, 9)), first)
    cache.to("meta")
    assert {x.device.type for layer in cache.layers for x in layer.tensors()} == {"meta"}


def test_a_row_of_pads_only(make_model, random_ids, advance):
    for fields in (ARRANGEMENTS["softmax"], {"token_mixers": "inner_function", "dynamic_mask": "value"}):
        model, mask = make_model(**fields), torch.tensor([[1] * 6, [0] * 6])
        assert advance(model, None, random_ids(2, 6), attention_mask=mask)[0].isfinite().all()


# Refused.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dynamic_mask": "noise", "token_mixers": "softmax"}, "dynamic_mask must be one of .*; got 'noise'"),
        ({"dynamic_mask": "position"}, "dynamic_mask = 'position' masks attention layers, and token_mixers has none"),
        ({"dynamic_mask_window": 4, "token_mixers": "softmax"}, 'needs dynamic_mask = "value", got None'),
        (WINDOW | {"dynamic_mask": "hard", "token_mixers": "softmax"}, "needs dynamic_mask = \"value\", got 'hard'"),
        (WINDOW | {"dynamic_mask_window": 0, "token_mixers": "softmax"}, "must be positive, or None; got 0"),
        (WINDOW | {"token_mixers": "softmax", "bidirectional": True}, "goes by the keys so far"),
    ],
)
def test_configurations_that_are_refused(fields, message):
    with pytest.raises(REFUSED, match=message):
        InterdomainConfig(**fields)


def test_what_a_window_cannot_use(make_model, random_ids, contents):
    model = make_model(**ARRANGEMENTS["softmax"])
    with pytest.raises(ValueError, match="does not fit the 2 layers of this model; make it with InterdomainCache"):
        model(random_ids(1, 3), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, past \+ T\], or for .*plain softmax"):
        model(random_ids(1, 3), attention_mask=torch.ones(1, 1, 3, 3))
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match='hides other keys from each head, which attn_implementation = "flex_attent'):
        model(random_ids(1, 3))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("rope", [ROPE, None])
@pytest.mark.parametrize("mixer", ["softmax", "inner_function"])
def test_a_large_bias_under_autocast(make_model, random_ids, mixer, rope, attention):
    """Attention takes place in float16, whatever keys and rotations are in: no score is infinite in it."""
    changes = {"token_mixers": mixer, "feed_forwards": "mlp", "dynamic_mask": "value", "rope_parameters": rope}
    model = make_model("inner-function", dtype=torch.float32, **changes)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.token_mixer.dynamic_mask.A.fill_(30)
    ids = random_ids(2, 9)
    with torch.autocast("cpu", torch.float16):
        output = model(ids, labels=ids)
    output.loss.backward()
    assert output.logits.isfinite().all()


WINDOWED_SOFTMAX = {"token_mixers": "softmax", "dynamic_mask": "value", "dynamic_mask_window": 4}


def test_windows_by_bias_refuse_what_needs_all_keys(make_model, random_ids):
    """Also where all layers are softmax."""
    model, ids = make_model("softmax", **WINDOWED_SOFTMAX), random_ids(2, 5)
    with pytest.raises(ValueError, match="^is_causal=False needs attention to all tokens in all layers"):
        model(ids, is_causal=False)
    for other in (model, make_model("windowed")):
        with pytest.raises(ValueError, match="for recurrent layers and plain softmax, without a cache"):
            other(ids, attention_mask=torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5))
    with pytest.raises(ValueError, match=r"past_key_values \(DynamicCache of .* does not fit the 2 layers"):
        model(ids, past_key_values=DynamicCache())
