"""Pads and packing: outputs, gradients and states are those of each row, or document, alone."""

import copy

import pytest
import torch
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_interdomain import InterdomainCache
from modeling_interdomain.mixers.softmax.mixer import eager_attention_forward
from modeling_interdomain.model_cache.cache import kind_of
from modeling_interdomain.ops.common import packing
from modeling_interdomain.ops.common.packing import packing_from_documents, packing_from_mask

LENGTHS = [9, 4, 1, 6]
WIDTH = 12
DOCUMENTS = [5, 1, 9, 3]


def _mask(layout: str) -> torch.Tensor:
    """`[4, WIDTH]` with LENGTHS real tokens a row."""
    slots = torch.arange(WIDTH)
    lengths = torch.tensor(LENGTHS)[:, None]
    if layout == "left":
        return (slots >= WIDTH - lengths).long()
    if layout == "right":
        return (slots < lengths).long()
    if layout == "both":
        return ((slots >= 2) & (slots < lengths + 2)).long()
    if layout == "between":  # the first token, a gap, the rest
        return ((slots == 0) | ((slots > WIDTH - lengths) & (lengths > 1))).long()
    order = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(3)).argsort(dim=1)
    return (order < lengths).long()


@pytest.fixture(params=["left", "right", "both", "between", "scattered"])
def mask(request):
    mask = _mask(request.param)
    assert mask.sum(dim=1).tolist() == LENGTHS
    return mask


@pytest.fixture
def weights():
    """What multiplies the logits in a loss that weighs every one of them differently."""
    return torch.randn(4, 20, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def assert_rows_are_alone(assert_same):
    """The logits at real tokens are those of each row on its own, without its pads."""

    def check(model, ids, mask, logits):
        with torch.no_grad():
            for row, real in enumerate(mask.bool()):
                assert_same(logits[row, real], model(ids[row : row + 1, real]).logits[0])

    return check


def _gradients(model, loss) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    # What ranks the keys of a sparse branch learns from a loss of its own.
    return list(torch.autograd.grad(loss, parameters, materialize_grads=True))


def test_early_tokens_show_in_late_logits(any_model, random_ids):
    ids = random_ids(1, 20)
    with torch.no_grad():
        before = any_model(ids).logits[0, -1]
        ids[0, 1] = ids[0, 1] - 1
        after = any_model(ids).logits[0, -1]
    assert (after - before).abs().max() > 1e-2
    assert before.std() > 0.5


def test_outputs(any_model, mask, random_ids, assert_rows_are_alone):
    ids = random_ids(4, WIDTH)
    assert_rows_are_alone(any_model, ids, mask, any_model(ids, attention_mask=mask).logits.detach())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_outputs_by_attention_implementation(make_model, mask, implementation, random_ids, assert_rows_are_alone):
    model = make_model("softmax-interdomain", attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    ids = random_ids(4, WIDTH)
    assert_rows_are_alone(model, ids, mask, model(ids, attention_mask=mask).logits.detach())


def test_gradients(any_model, mask, weights, random_ids, assert_same):
    ids = random_ids(4, WIDTH)
    real = mask.bool()
    loss = (any_model(ids, attention_mask=mask).logits * weights[:, :WIDTH])[real].sum()
    alone = sum(
        (any_model(ids[row : row + 1, real[row]]).logits * weights[row : row + 1, :WIDTH][:, real[row]]).sum()
        for row in range(4)
    )
    assert_same(_gradients(any_model, loss), _gradients(any_model, alone))


def test_states(recurrent_model, mask, random_ids, assert_same):
    ids = random_ids(4, WIDTH)
    with torch.no_grad():
        together = recurrent_model(ids, attention_mask=mask, use_cache=True).past_key_values
        for row in range(4):
            alone = recurrent_model(ids[row : row + 1, mask[row].bool()], use_cache=True).past_key_values
            for layer, expected in zip(together.layers, alone.layers):
                if hasattr(layer, "state"):
                    assert_same(layer.state[row], expected.state[0])
                    assert_same([w[row] for w in layer.conv_state], [w[0] for w in expected.conv_state])


@pytest.mark.parametrize("seed", range(2))
def test_pieces_of_random_length(any_model, mask, seed, random_ids, advance, assert_rows_are_alone):
    ids = random_ids(4, WIDTH)
    cuts = torch.randperm(WIDTH - 1, generator=torch.Generator().manual_seed(seed))[: 3 + 2 * seed].sort().values + 1
    cache, pieces, end = InterdomainCache(any_model.config), [], 0
    for piece in ids.tensor_split(cuts.tolist(), dim=1):
        end += piece.shape[1]
        pieces.append(advance(any_model, cache, piece, attention_mask=mask[:, :end]))
    assert_rows_are_alone(any_model, ids, mask, torch.cat(pieces, dim=1))


def test_tokens_one_by_one(model, mask, make_cache, random_ids, advance, assert_rows_are_alone):
    ids, cache = random_ids(4, WIDTH), make_cache(model.config)
    steps = [advance(model, cache, ids[:, t : t + 1], attention_mask=mask[:, : t + 1]) for t in range(WIDTH)]
    assert_rows_are_alone(model, ids, mask, torch.cat(steps, dim=1))


def test_row_of_pads_leaves_the_others_alone(any_model, weights, random_ids, assert_same):
    ids, mask = random_ids(3, 6), torch.ones(3, 6, dtype=torch.long)
    mask[1] = 0
    rows = [0, 2]
    logits = any_model(ids, attention_mask=mask).logits[rows]
    expected = any_model(ids[rows]).logits
    assert_same(logits, expected)
    actual = _gradients(any_model, (logits * weights[:2, :6]).sum())
    assert_same(actual, _gradients(any_model, (expected * weights[:2, :6]).sum()))


def test_nothing_but_pads(any_model, random_ids):
    ids = random_ids(2, 5)
    output = any_model(ids, attention_mask=torch.zeros_like(ids), use_cache=True)
    assert output.logits.isfinite().all()
    output.logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in any_model.parameters())


def test_pads_of_the_first_pieces(any_model, random_ids, advance, assert_rows_are_alone):
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :5] = mask[1, :7] = 0
    cache = InterdomainCache(any_model.config)
    pieces = [advance(any_model, cache, ids[:, end - 3 : end], attention_mask=mask[:, :end]) for end in (3, 6, 9)]
    assert_rows_are_alone(any_model, ids, mask, torch.cat(pieces, dim=1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_masks_of_any_dtype(model, dtype, random_ids, assert_same):
    ids, mask = random_ids(4, WIDTH), _mask("left")
    with torch.no_grad():
        actual = model(ids, attention_mask=mask.to(dtype)).logits
        assert_same(actual[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.each_value
@pytest.mark.parametrize("real", [2, 0.5], ids=str)
def test_every_number_but_zero_is_real(each_mixer, real, random_ids, assert_same):
    """Read at once, token by token, and written after."""
    ids, mask = random_ids(4, WIDTH), _mask("left")
    other, cache = mask * real, InterdomainCache(each_mixer.config)
    with torch.no_grad():
        expected = each_mixer(ids, attention_mask=mask).logits[mask.bool()]
        assert_same(each_mixer(ids, attention_mask=other).logits[mask.bool()], expected, rtol=0, atol=0)
        pieces = [(0, 8), *((i, i + 1) for i in range(8, WIDTH))]
        steps = [
            each_mixer(ids[:, start:stop], attention_mask=other[:, :stop], past_key_values=cache).logits
            for start, stop in pieces
        ]
    assert_same(torch.cat(steps, dim=1)[mask.bool()], expected)
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    written = [each_mixer.generate(ids, attention_mask=x, **options).logits for x in (mask, other)]
    assert_same(*written, rtol=0, atol=0)


@pytest.mark.parametrize("numbers", [[1] * 5 + [2] * 7, [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 0]], ids=str)
def test_documents_numbered_in_a_mask_are_refused(each_mixer, numbers, random_ids):
    """Of whole numbers and others, and of a prompt; one number a row is no document of its own."""
    ids, mask = random_ids(2, WIDTH), torch.tensor([numbers, [1] * WIDTH])
    cache, message = InterdomainCache(each_mixer.config), "have one number for the real tokens of a row, and 0 for pads"
    for dtype in (torch.long, torch.float32, torch.uint8):
        with pytest.raises(ValueError, match=message):
            each_mixer(ids, attention_mask=mask.to(dtype), past_key_values=cache)
    assert not int(cache.get_seq_length())
    with pytest.raises(ValueError, match=message):
        each_mixer.generate(ids, attention_mask=mask, max_new_tokens=2)
    rows = torch.where(mask == 0, 0, torch.tensor([[3], [7]]))  # each row a number of its own
    with torch.no_grad():
        each_mixer(ids, attention_mask=rows)


@pytest.mark.slow
def test_documents_numbered_in_a_mask_stop_a_compiled_graph(make_model, random_ids):
    model, ids, mask = make_model("interdomain-softmax"), random_ids(1, WIDTH), torch.tensor([[0] * 5 + [1] * 7])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(ids, attention_mask=mask, use_cache=False)
        with pytest.raises(RuntimeError, match="attention_mask must have one number for the real tokens of a row"):
            compiled(ids, attention_mask=mask + 1, use_cache=False)


@pytest.mark.parametrize("late", ["cache of the library", "backend"])
def test_a_first_pad_alone_leaves_no_trace(late, make_model, random_ids, advance):
    """However the cache was put together, and whenever the backend was chosen."""
    model, ids, mask = make_model(backend="chunk"), random_ids(2, 1), torch.tensor([[0], [1]])
    if late == "backend":
        model.config.backend = "auto"
        cache = InterdomainCache(model.config)
        advance(model, cache, random_ids(2, 3))
    else:
        cache = Cache(layers=[layer.token_mixer.make_cache_layer(model.config) for layer in model.model.layers])
    before = [None if layer.state is None else layer.state[0].clone() for layer in cache.layers]
    if late == "backend":
        mask = torch.cat([torch.ones(2, 3, dtype=torch.long), mask], dim=1)
    advance(model, cache, ids, attention_mask=mask)
    for layer, expected in zip(cache.layers, before):
        torch.testing.assert_close(layer.state[0], torch.zeros_like(layer.state[0]) if expected is None else expected)


# Packed documents.


def _positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def _ends(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _numbers(lengths: list[int]) -> torch.Tensor:
    return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]


PACKINGS = {
    "positions": {"position_ids": _positions(DOCUMENTS)},
    "ends": {"cu_seq_lens_q": _ends(DOCUMENTS)},
    "numbers": {"seq_idx": _numbers(DOCUMENTS)},
    "both": {
        "position_ids": _positions(DOCUMENTS),
        "cu_seq_lens_q": _ends(DOCUMENTS),
        "cu_seq_lens_k": _ends(DOCUMENTS),
        "max_length_q": max(DOCUMENTS),
        "max_length_k": max(DOCUMENTS),
    },
}


def _assert_documents_are_alone(model, ids, weights, assert_same, rows, **packing):
    """Logits and gradients of packed `rows` (lengths of their documents) against each document alone."""
    logits = model(ids, **packing).logits
    weights = weights[: len(rows), : ids.shape[1]]
    alone = torch.cat(
        [
            torch.cat([model(document[None]).logits for document in row.split(lengths)], dim=1)
            for row, lengths in zip(ids, rows)
        ]
    )
    assert_same(logits, alone)
    assert_same(_gradients(model, (logits * weights).sum()), _gradients(model, (alone * weights).sum()))


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_documents(any_model, packing, weights, random_ids, assert_same):
    ids = random_ids(1, sum(DOCUMENTS))
    _assert_documents_are_alone(any_model, ids, weights, assert_same, [DOCUMENTS], **PACKINGS[packing])


@pytest.mark.parametrize("rows", [[[5, 1, 4], [2, 8]], [[10], [3, 7], [1, 1, 8]]], ids=str)
def test_packed_documents_in_several_rows(any_model, rows, weights, random_ids, assert_same):
    ids = random_ids(len(rows), 10)
    positions = torch.cat([_positions(lengths) for lengths in rows])
    _assert_documents_are_alone(any_model, ids, weights, assert_same, rows, position_ids=positions)


def test_numbers_of_documents_in_several_rows(model, weights, random_ids, assert_same):
    rows = [[10], [3, 7], [1, 1, 8]]
    numbers = torch.cat([_numbers(lengths) for lengths in rows])
    _assert_documents_are_alone(model, random_ids(3, 10), weights, assert_same, rows, seq_idx=numbers)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.float64], ids=str)
def test_positions_and_numbers_of_any_dtype(each_mixer, dtype, random_ids, assert_same):
    """Those of unsigned dtypes fall where documents begin, too."""
    ids, ends = random_ids(1, sum(DOCUMENTS)), _ends(DOCUMENTS)
    given = [{"position_ids": _positions(DOCUMENTS).to(dtype)}, {"seq_idx": (9 - _numbers(DOCUMENTS)).to(dtype)}]
    if not dtype.is_floating_point:
        given.append({"cu_seq_lens_q": ends.to(dtype)})
    with torch.no_grad():
        expected = each_mixer(ids, cu_seq_lens_q=ends).logits
        for packing in given:
            assert_same(each_mixer(ids, **packing).logits, expected)


def test_numbers_of_documents_that_do_not_fit_are_refused(make_model, random_ids, contents):
    model = make_model()
    with pytest.raises(ValueError, match=r"seq_idx must have shape \[B, T\] = \[1, 4\], got \[1, 3\]."):
        model(random_ids(1, 4), seq_idx=_numbers([1, 2]))
    cache = InterdomainCache(model.config)
    with pytest.raises(ValueError, match="seq_idx packs whole documents, so it cannot continue from past_key_values."):
        model(random_ids(1, 4), seq_idx=_numbers([1, 3]), past_key_values=cache)
    assert not int(cache.get_seq_length())


def test_packed_documents_in_training(model, weights, random_ids, assert_same):
    ids = random_ids(1, sum(DOCUMENTS))
    _assert_documents_are_alone(model.train(), ids, weights, assert_same, [DOCUMENTS], **PACKINGS["positions"])


@pytest.mark.parametrize("extra", ["mask-of-ones", "running-positions"])
def test_ends_hold_whatever_else_is_given(model, extra, weights, random_ids, assert_same):
    ids = random_ids(1, sum(DOCUMENTS))
    others = {
        "mask-of-ones": {"attention_mask": torch.ones_like(ids)},
        "running-positions": {"position_ids": torch.arange(ids.shape[1])[None]},
    }
    # Rotary embeddings see differences alone, so running positions change nothing within a document.
    packing = {"cu_seq_lens_q": _ends(DOCUMENTS)} | others[extra]
    _assert_documents_are_alone(model, ids, weights, assert_same, [DOCUMENTS], **packing)


def test_pads_among_packed_documents_do_not_leak(model, random_ids):
    ids = random_ids(1, sum(DOCUMENTS))
    mask = torch.ones_like(ids)
    mask[0, 8] = 0
    logits = []
    for pad in (5, 6):
        ids[0, 8] = pad
        try:
            with torch.no_grad():
                logits.append(model(ids, attention_mask=mask, cu_seq_lens_q=_ends(DOCUMENTS)).logits[mask.bool()])
        except ValueError as error:
            assert "attention_mask" in str(error)
            return
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-9)


# Which tokens each token of a row sees, where its text forks twice; 0 is a pad.
WAYS = [[1, 2, 3], [1, 2, 4, 5], [1, 6]]
FORKS = torch.zeros(7, 7, dtype=torch.bool)
for way in WAYS:
    for end in range(len(way)):
        FORKS[way[end], way[: end + 1]] = True
PLACES = torch.tensor([[0, 0, 1, 2, 2, 3, 1]])


def lowest_where_hidden(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("written", ["bool", "numbers"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_texts_that_fork(each_mixer, implementation, written, random_ids, assert_same):
    """Every way through a mask of which tokens each token sees is a text of its own, and so are its gradients."""
    model, ids = each_mixer, random_ids(2, 7)
    model.set_attn_implementation(implementation)
    mask = FORKS if written == "bool" else lowest_where_hidden(FORKS)
    for rows in (mask.expand(2, 1, 7, 7), mask.expand(1, 1, 7, 7)):
        asked = {"output_attentions": implementation == "eager"}
        forked = model(ids, attention_mask=rows, position_ids=PLACES, **asked)
        for way in WAYS:
            alone = model(ids[:, way], use_cache=False, **asked)
            assert_same(forked.logits[:, way], alone.logits)
            for found, expected in zip(forked.attentions or (), alone.attentions or (), strict=True):
                assert_same(found[:, :, way][..., way], expected)
    way, embedded = WAYS[1], model.get_input_embeddings().weight
    alone = model(ids[:, way], use_cache=False).logits
    weights = torch.linspace(-1, 1, alone.numel()).view_as(alone)
    (found,) = torch.autograd.grad((forked.logits[:, way] * weights).sum(), embedded)
    assert_same(found, torch.autograd.grad((alone * weights).sum(), embedded)[0])


@pytest.mark.parametrize("name", ["interdomain", "softmax-interdomain", "hax", "cheems", "selective-scan"])
def test_masks_that_no_state_can_follow_are_refused(name, make_model, random_ids):
    model, ids = make_model(name), random_ids(2, 7)
    left_out, later, joined, biased = *(FORKS.clone() for _ in range(3)), lowest_where_hidden(FORKS)
    left_out[5, 2], later[3, 5], joined[5, 3], biased[5, 4] = False, True, True, -2.0
    for mask in (left_out, later, joined, biased, FORKS.long()):
        with pytest.raises(ValueError, match="may do no more than let texts fork where layers are recurrent"):
            model(ids, attention_mask=mask.expand(2, 1, 7, 7))
    for shape in ((2, 7, 7), (3, 1, 7, 7), (2, 4, 7, 7)):
        with pytest.raises(ValueError, match=r"must have shape \[B, past \+ T\]"):
            model(ids, attention_mask=FORKS.expand(shape))


@pytest.mark.parametrize("name", ["interdomain", "cheems", "windowed"])
def test_texts_that_fork_leave_no_cache(name, make_model, random_ids):
    model, ids, mask = make_model(name), random_ids(2, 7), FORKS.expand(2, 1, 7, 7)
    cache = InterdomainCache(model.config)
    with pytest.raises(ValueError, match="plain softmax, without a cache or a graph"):
        model(ids, attention_mask=mask, past_key_values=cache)
    assert not cache.get_seq_length()
    if name != "windowed":  # which takes no such mask at all
        assert list(model(ids, attention_mask=mask, use_cache=True)) == ["logits"]


def test_packed_documents_make_no_cache(model, random_ids):
    ids = random_ids(1, sum(DOCUMENTS))
    assert model(ids, use_cache=True, **PACKINGS["positions"]).past_key_values is None


@pytest.mark.parametrize("start", [0, 3])
def test_positions_that_jump_are_one_document(model, start, random_ids, assert_same):
    """Where positions go up, tokens have merely been left out between; rotary embeddings see how many."""
    ids = random_ids(1, 6)
    jumping = start + torch.tensor([[0, 1, 2, 7, 8, 20]])
    whole = torch.zeros(1, 21, dtype=torch.long)
    whole[0, jumping[0] - start] = 1
    spread = torch.full_like(whole, 5)
    spread[0, jumping[0] - start] = ids[0]
    with torch.no_grad():
        found = model(ids, position_ids=jumping).logits
        expected = model(spread, attention_mask=whole, position_ids=torch.arange(21)[None]).logits
    assert_same(found, expected[:, whole[0].bool()])


# FlashAttention takes no mask: it is told where documents end.


@pytest.fixture
def flash(monkeypatch, make_model):
    """A hybrid whose attention, like FlashAttention, knows of documents from its keyword arguments alone."""

    def attend(module, query, key, value, attention_mask, cu_seq_lens_q=None, max_length_q=None, **kwargs):
        assert attention_mask is None
        batch, ends = query.shape[0], [0, query.shape[0] * query.shape[2]]
        if cu_seq_lens_q is not None:
            assert cu_seq_lens_q.dtype == torch.int32 and kwargs["cu_seq_lens_k"].equal(cu_seq_lens_q)
            assert max_length_q == kwargs["max_length_k"] == cu_seq_lens_q.diff().max()
            ends = cu_seq_lens_q.tolist()
        outputs = []
        flat = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (query, key, value)]
        for start, end in zip(ends, ends[1:]):
            causal = torch.full((end - start, end - start), -torch.inf, dtype=query.dtype).triu(1)
            document = (x[:, :, start:end] for x in flat)
            outputs.append(eager_attention_forward(module, *document, causal, kwargs["scaling"])[0])
        return torch.cat(outputs, dim=1)[0].unflatten(0, (batch, -1)), None

    def mask(attention_mask=None, **kwargs):
        return None if attention_mask is None or attention_mask.all() else attention_mask

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "toy_flash", attend)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "toy_flash", mask)
    model = make_model("softmax-interdomain")
    model.config._attn_implementation = "toy_flash"
    return model


@pytest.mark.parametrize("rows", [[[5, 1, 4], [2, 8]], [[10], [3, 7], [1, 1, 8]], [[3, 7]]], ids=str)
def test_packed_documents_in_flash_attention(flash, rows, weights, random_ids, assert_same):
    ids = random_ids(len(rows), 10)
    positions = torch.cat([_positions(lengths) for lengths in rows])
    _assert_documents_are_alone(flash, ids, weights, assert_same, rows, position_ids=positions)
    if len(rows) == 1:
        _assert_documents_are_alone(flash, ids, weights, assert_same, rows, cu_seq_lens_q=_ends(rows[0]))


def test_pads_among_packed_documents_in_flash_attention_are_refused(flash, random_ids):
    ids = random_ids(1, sum(DOCUMENTS))
    mask = torch.ones_like(ids)
    flash(ids, attention_mask=mask, cu_seq_lens_q=_ends(DOCUMENTS))
    mask[0, 8] = 0
    with pytest.raises(ValueError, match="FlashAttention cannot keep packed documents apart that hold pads.*sdpa"):
        flash(ids, attention_mask=mask, cu_seq_lens_q=_ends(DOCUMENTS))


def test_documents_numbered_in_a_mask_are_refused_behind_a_cache(each_mixer, random_ids, advance, contents):
    ids, cache = random_ids(1, 8), InterdomainCache(each_mixer.config)
    advance(each_mixer, cache, ids[:, :4])
    before = contents(cache)
    with pytest.raises(ValueError, match="have one number for the real tokens of a row, and 0 for pads"):
        advance(each_mixer, cache, ids[:, 4:], attention_mask=torch.tensor([[1] * 4 + [2] * 4]))
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


def test_positions_beside_a_mask_pack_nothing(each_mixer, left_padded, random_ids, assert_same):
    """Those of pads fall behind, and documents would begin there."""
    inputs = left_padded([4, 9])
    positions = (inputs["attention_mask"].cumsum(1) - 1).masked_fill(inputs["attention_mask"] == 0, 1)
    ids, mask = random_ids(1, 6), torch.ones(1, 6, dtype=torch.long)
    falling = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with torch.no_grad():
        found = each_mixer(**inputs, position_ids=positions, use_cache=True)
        assert found.past_key_values is not None
        whole = each_mixer(ids, attention_mask=mask, position_ids=falling, use_cache=True)
        assert whole.past_key_values is not None


def test_positions_beside_a_cache_pack_nothing(each_mixer, random_ids):
    ids, caches = random_ids(1, 6), [InterdomainCache(each_mixer.config) for _ in range(2)]
    given = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    with torch.no_grad():
        found = each_mixer(**given, past_key_values=caches[0]).logits
        expected = each_mixer(**given, attention_mask=torch.ones_like(ids), past_key_values=caches[1]).logits
    assert int(caches[0].get_seq_length()) == 6
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("written", ["bool", "numbers"])
def test_pads_of_texts_that_fork_may_see_what_is_before_them(each_mixer, written, random_ids, assert_same):
    """As in a causal mask of rows with pads: the pad sees the others, no one sees it."""
    seen, ids = FORKS.clone(), random_ids(1, 7)
    seen[6] = False
    seen[6, [1, 2, 4, 5]] = True
    seen[:, 6] = False
    mask = seen if written == "bool" else lowest_where_hidden(seen)
    way = [1, 2, 4, 5]
    with torch.no_grad():
        forked = each_mixer(ids, attention_mask=mask[None, None], position_ids=PLACES).logits
        assert_same(forked[:, way], each_mixer(ids[:, way], use_cache=False).logits)


def test_pads_come_back_as_zeros():
    """Whatever layers have made of them."""
    mask, x = torch.tensor([[1, 0, 1], [0, 0, 1]]), torch.arange(1.0, 13).view(2, 3, 2)
    for found in (packing_from_mask(mask), packing_from_documents(torch.tensor([0, 2, 6]), mask, (2, 3))):
        torch.testing.assert_close(found.unpack(found.pack(x)), x * mask[..., None])


def test_the_tokens_that_begin_documents():
    ends = torch.tensor([0, 2, 5])
    assert packing_from_documents(ends, None, (1, 5)).starts.tolist() == [[True, False, True, False, False]]
    mask = torch.tensor([[0, 1, 1, 0, 1]])
    assert packing_from_documents(ends, mask, (1, 5)).starts.tolist() == [[False, True, True, False, False]]
    assert packing_from_mask(mask).starts is None


def test_one_row_of_positions_packs_every_row(each_mixer, random_ids, assert_same):
    ids, positions = random_ids(2, 6), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with torch.no_grad():
        found = each_mixer(ids, position_ids=positions).logits
        assert_same(found, each_mixer(ids, position_ids=positions.expand(2, -1)).logits)
        assert_same(found[:, 3:], each_mixer(ids[:, 3:]).logits)


def test_the_ends_of_documents_in_a_graph_are_followed_by_empty_ones(monkeypatch):
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    expected = packing.cu_seqlens_from_positions(positions)
    monkeypatch.setattr(packing, "in_graph", lambda: True)
    found = packing.cu_seqlens_from_positions(positions)
    assert found.shape == (11,) and found[:4].equal(expected) and bool((found[4:] == 10).all())
    assert packing.cu_seqlens_from_positions(torch.arange(5)[None] * 0).tolist() == list(range(6))


@pytest.mark.parametrize("first", ["no mask", "a mask", "in pieces"])
def test_a_later_mask_tells_what_was_read(each_mixer, first, random_ids, advance):
    """Pads that a state has read as tokens cannot be hidden afterwards; keys and values can."""
    model, ids = each_mixer, random_ids(2, 13)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0 if first != "no mask" else 1
    cache = InterdomainCache(model.config)
    for piece in (slice(0, 4), slice(4, 9)) if first == "in pieces" else (slice(0, 9),):
        advance(model, cache, ids[:, piece], attention_mask=None if first == "no mask" else mask[:, : piece.stop])
    hidden, shown = mask.clone(), torch.ones_like(mask)
    hidden[0, 6:9] = 0
    if all(kind_of(layer) == "keys_values" for layer in cache.layers):
        found = model(ids[:, 9:], attention_mask=hidden, past_key_values=cache).logits
        torch.testing.assert_close(found, model(ids, attention_mask=hidden).logits[:, 9:])
        return
    for other in (hidden, *([] if first == "no mask" else [shown])):
        with pytest.raises(ValueError, match="hides tokens that past_key_values has read, or shows some"):
            model(ids[:, 9:], attention_mask=other, past_key_values=cache)
    found = model(ids[:, 9:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids, attention_mask=mask).logits[:, 9:])


def test_a_window_of_keys_has_read_them(make_model, random_ids, advance):
    model, ids = make_model("softmax", dynamic_mask="value", dynamic_mask_window=4), random_ids(2, 10)
    cache, hidden = InterdomainCache(model.config), torch.ones_like(ids)
    hidden[0, 2:6] = 0
    advance(model, cache, ids[:, :6])
    with pytest.raises(ValueError, match="hides tokens that past_key_values has read"):
        model(ids[:, 6:], attention_mask=hidden, past_key_values=cache)


@pytest.mark.parametrize("move", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_that_moved_are_not_known(make_model, random_ids, advance, move):
    """A mask is compared with what was read only where that is known."""
    model, ids = make_model("interdomain"), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    cache = InterdomainCache(model.config)
    advance(model, cache, ids[:, :6], attention_mask=mask[:, :6])
    order = [0, 1] if move == "batch_repeat_interleave" else [1, 0]
    getattr(cache, move)(1 if move == "batch_repeat_interleave" else torch.tensor(order))
    assert cache._read_mask is None
    found = model(ids[order, 6:], attention_mask=mask[order], past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids, attention_mask=mask).logits[order, 6:])


def test_a_step_tells_of_its_own_token_alone(make_model, random_ids, advance):
    """What its mask says of the past is not heeded; a pad of its own is known."""
    model, ids = make_model("interdomain"), random_ids(2, 12)
    cache, wrong, padded = InterdomainCache(model.config), torch.ones_like(ids), torch.ones_like(ids)
    wrong[0, 2:4], padded[1, 9] = 0, 0
    advance(model, cache, ids[:, :8])
    advance(model, cache, ids[:, 8:9], attention_mask=wrong[:, :9])
    advance(model, cache, ids[:, 9:10], attention_mask=padded[:, :10])
    for other in (wrong, torch.ones_like(ids)):
        with pytest.raises(ValueError, match="hides tokens that past_key_values has read"):
            model(ids[:, 10:], attention_mask=other, past_key_values=cache)
    found = advance(model, cache, ids[:, 10:], attention_mask=padded)
    torch.testing.assert_close(found, model(ids, attention_mask=padded).logits[:, 10:])


def test_what_was_taken_back_is_not_known_of(make_model, random_ids, advance):
    model, ids = make_model("interdomain"), random_ids(2, 10)
    cache, mask = InterdomainCache(model.config), torch.ones_like(ids)
    cache.allow_rollback(4)
    cache.activate_past_recording()
    mask[0, 6:8] = 0
    advance(model, cache, ids[:, :8], attention_mask=mask[:, :8])
    cache.crop(-2)
    advance(model, cache, ids[:, 6:8])
    found = advance(model, cache, ids[:, 8:], attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(found, model(ids).logits[:, 8:])


@pytest.mark.parametrize("real", [1, 0.5], ids=["reused", "of halves"])
def test_masks_are_known_by_what_they_say(make_model, random_ids, advance, real):
    """Whatever number is real, and whatever becomes of the tensor."""
    model, ids = make_model("interdomain"), random_ids(2, 9)
    cache, mask = InterdomainCache(model.config), torch.ones_like(ids)
    mask[0, :2] = 0
    given = (real * mask[:, :6]).requires_grad_(isinstance(real, float))
    advance(model, cache, ids[:, :6], attention_mask=given)
    given.detach().fill_(1)
    found = advance(model, copy.deepcopy(cache), ids[:, 6:], attention_mask=mask)
    torch.testing.assert_close(found, model(ids, attention_mask=mask).logits[:, 6:])


def test_a_chat_of_several_rows_goes_on_as_it_was_read(make_model, random_ids):
    """`generate` reads the pads behind a row that has ended: with its cache the next turn shows them, or is refused."""
    model, ids = make_model("interdomain"), random_ids(2, 7)
    end = int(model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None)[0, -1])
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
    turn = model.generate(ids, eos_token_id=end, return_dict_in_generate=True, **options)
    text = torch.cat([turn.sequences, random_ids(2, 3, seed=5)], dim=1)
    mask = torch.ones_like(text)
    mask[0, 9 : turn.sequences.shape[1]] = 0
    assert (turn.sequences[0, 9:] == 0).all() and turn.sequences.shape[1] > 10
    with pytest.raises(ValueError, match="generate\\(\\) reads the pads behind a text that has ended"):
        model.generate(text, attention_mask=mask, past_key_values=turn.past_key_values, **options)
    shown, by_id = torch.ones_like(text), torch.ones_like(text)
    seen = turn.past_key_values.get_seq_length()
    # Without a mask the library hides pads by their id, of which the past is read.
    by_id[:, seen:] = text[:, seen:] != 0
    for given, mask in (({"attention_mask": shown}, shown), ({}, by_id)):
        found = model.generate(text, past_key_values=copy.deepcopy(turn.past_key_values), **given, **options)
        assert torch.equal(found, model.generate(text, attention_mask=mask, **options))
