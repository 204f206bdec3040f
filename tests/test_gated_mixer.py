"""Gates and the delta rule in Interdomain layers: what they are at the start and after it, and what refuses them."""

import copy
import re
from functools import partial

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch.nn import functional as F

from conversion.fewer_modes import check_reducible
from examples.joined_states import cut_cache, join_caches
from examples.text_data import InputError
from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainForCausalLM, interdomain_attention
from modeling_interdomain.mixers.interdomain.gated import GatedInterdomainMixer
from modeling_interdomain.mixers.interdomain.gates import operator_gates, what_keys_find
from modeling_interdomain.mixers.interdomain.mixer import InterdomainMixer
from modeling_interdomain.mixers.interdomain.warped import WarpedInterdomainMixer
from modeling_interdomain.mixers.softmax.mixer import SoftmaxMixer
from modeling_interdomain.model_cache.fingerprint import model_fingerprint
from modeling_interdomain.ops.interdomain.gates_map import gated_attention_map
from modeling_interdomain.ops.interdomain.naive import recurrent_attention
from modeling_interdomain.registry import token_mixer_class

FORMS = {
    "forget": {"gates": "forget"},
    "delta": {"delta_rule": True},
    "both": {"gates": "forget", "delta_rule": True},
    "warp": {"gates": "warp"},
}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"gates": "time"}, "gates must be one of none, forget, warp; got 'time'"),
        ({"gates": "warp", "delta_rule": True}, 'gates = "warp" has no delta rule: set delta_rule=False, or gates='),
        (
            {"gates": "warp", "backend": "triton"},
            'and backend = "triton" needs one way for all: choose one of auto, rec',
        ),
        ({"gates": "warp", "normalize": True}, 'gates = "warp" needs the plain readout: set normalize to False'),
        ({"gates": "forget", "token_mixers": "s4d"}, 'gates = "forget" and delta_rule = False are of "interdomain" l'),
        ({"delta_rule": True, "token_mixers": "s4d"}, '"interdomain" layers, and token_mixers names none: leave'),
        ({"gates": "forget", "normalize": True}, 'gates = "forget" needs the plain readout: set normalize to False'),
        ({"gates": "forget", "backend": "fft"}, 'and backend = "fft" needs one way for all: choose one of auto, rec'),
        ({"delta_rule": True, "product": "bilinear"}, 'product is "bilinear": set product="hermitian"'),
        ({"delta_rule": True, "input_norm": False}, "the size that input_norm gives keys: set input_norm=True"),
    ],
)
def test_what_has_no_gates_says_so(make_config, fields, sentence):
    with pytest.raises(StrictDataclassClassValidationError, match=re.escape(sentence)):
        make_config(**fields)


def test_layers_are_of_the_class_that_their_configuration_asks_for(make_model):
    """Other mixers beside them are what they were."""
    model = make_model(token_mixers=["s4d", "interdomain"], gates="forget", product="hermitian")
    s4d, gated = (layer.token_mixer for layer in model.model.layers)
    assert type(gated) is GatedInterdomainMixer and not hasattr(s4d, "forget_proj")
    assert type(make_model().model.layers[0].token_mixer) is InterdomainMixer
    assert type(make_model(gates="warp").model.layers[0].token_mixer) is WarpedInterdomainMixer


@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_formula(form, make_model, random_ids):
    """From the weights of the layer alone, token by token."""
    model = make_model(num_key_value_heads=2, **FORMS[form])
    mixer, seen = model.model.layers[0].token_mixer, {}
    mixer.recurrence.register_forward_hook(lambda module, inputs, output: seen.update(tokens=inputs, output=output))

    def keep(name, module, inputs, output):  # the first: the delta rule asks for the weights of a norm
        seen.setdefault(name, output)

    for name, module in {"x": model.model.layers[0].input_layernorm, "k": mixer.k_norm, "v": mixer.v_norm}.items():
        module.register_forward_hook(partial(keep, name))
    model(random_ids(2, 11), use_cache=False)
    query, key, value = seen["tokens"][0], seen["k"] + mixer.k_bias, seen["v"] + mixer.v_bias
    log_decay, beta, c = mixer.recurrence.parameters_of_operator()
    log_gate = write = delta = time_step = None
    if form == "warp":
        time_step = F.softplus(mixer.warp_proj(seen["x"]) + 0.54)
    elif "gates" in FORMS[form]:
        log_gate = -F.softplus(mixer.forget_proj(seen["x"]) - 5)
    if "gates" in FORMS[form]:
        write = F.softplus(mixer.write_proj(seen["x"]) + 0.54)
    if "delta_rule" in FORMS[form]:
        lam, row, c_ = (torch.view_as_complex(x.detach().double()) for x in (log_decay, beta, c))
        found = []
        for _ in range(256):
            found.append((c_ @ row[..., None])[..., 0])
            row = row * lam.exp()
        found = torch.stack(found, dim=1)
        own = found.abs().square().sum(2).amax(1)
        every = torch.einsum("gam,gbm->gab", found, found.conj()).real.abs().sum(1)[:, ::7].amax(1)
        size = mixer.k_norm.weight.square().sum() + mixer.k_bias.square().sum(-1)
        share = torch.sigmoid(mixer.delta_proj(seen["x"]) - 4) / size
        written = key.square().sum(-1) * (1 if write is None else write**2)
        assert (written > size).any() and (written < size).any()
        most = own / every / written.maximum(size)
        assert (share > most).any() and (share < most).any()
        delta = share.minimum(most) / own
    expected = recurrent_attention(
        query, key, value, log_decay, beta, c, "hermitian", None, None, None, log_gate, write, delta, time_step
    )[0]
    torch.testing.assert_close(seen["output"][0], expected, rtol=1e-5, atol=1e-6)


def test_gradients_take_what_a_share_is_cut_to_for_a_constant(make_model, random_ids, monkeypatch):
    """They are those of differences with each bound where it was, and not those of differences that move it."""
    model = make_model(num_hidden_layers=1, **FORMS["both"]).double()
    ids, bounds = random_ids(2, 11), []

    def kept(names, gates, answers):
        bounds.append(answers[1] / gates[-1])
        assert (gates[-2] > bounds[0]).any() and (gates[-2] < bounds[0]).any()
        return operator_gates(names, (*gates[:-1], 1 / bounds[0]), (answers[0], torch.ones_like(answers[1])))

    embedded = model.get_input_embeddings()(ids).detach()
    direction = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(step):
        logits = model(inputs_embeds=embedded + step * direction, use_cache=False).logits
        return (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=torch.float64)).sum()

    def difference():
        with torch.no_grad():
            return (loss(1e-6) - loss(-1e-6)).item() / 2e-6

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(loss(step), step)
    moving = difference()
    monkeypatch.setattr("modeling_interdomain.mixers.interdomain.gated.operator_gates", kept)
    loss(0.0)
    assert abs(difference() - found) < 1e-6 * abs(found) < abs(moving - found) / 10


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_starts_nearly_as_it_is_without(form, make_config, random_ids):
    """The start that remembers is kept: outputs differ by a part of their size, what the maps of the tokens give."""
    torch.manual_seed(0)
    gated = InterdomainForCausalLM(make_config(state_size=16, **FORMS[form])).double().eval()
    plain = InterdomainForCausalLM(make_config(state_size=16)).double().eval()
    left = plain.load_state_dict({k: x for k, x in gated.state_dict().items() if k in plain.state_dict()})
    assert not left.missing_keys
    embedded = plain.model.embed_tokens(random_ids(2, 20))
    layers = [model.model.layers[0] for model in (gated, plain)]
    found, expected = (layer.token_mixer(layer.input_layernorm(embedded))[0] for layer in layers)
    # Time that is warped by some hundredths blurs what is told apart by its age.
    assert 0 < (found - expected).norm() < (0.5 if form == "warp" else 0.25) * expected.norm()


def test_a_key_that_is_written_twice_has_its_last_value():
    """Of the start that remembers: without the delta rule both values are found, with a whole share the last one.

    What is found is in units of what a key finds of a value that it wrote once, as long ago.
    """
    torch.manual_seed(0)
    fields = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8, "head_dim": 16}
    model = InterdomainForCausalLM(InterdomainConfig(**fields, delta_rule=True, state_size=32)).double()
    recurrence = model.model.layers[0].token_mixer.recurrence
    parameters = recurrence.parameters_of_operator()
    keys = torch.eye(16, dtype=torch.float64)[torch.tensor([0, 1, 2, 0, 3, 4])][None, :, None]
    values = torch.eye(16, dtype=torch.float64)[torch.tensor([0, 5, 6, 1, 7, 8])][None, :, None]
    values[:, -1] = 0
    queries = torch.zeros_like(keys)
    queries[:, -1, :, 0] = 1

    def found(keys, values, **gates):
        return interdomain_attention(queries, keys, values, *parameters, product="hermitian", **gates)[0][0, -1, 0]

    once = found(keys.index_fill(1, torch.tensor([0]), 0), values)[1]
    share = torch.ones(1, 6, 1, dtype=torch.float64) / what_keys_find(*parameters)[0]
    plain, corrected = (found(keys, values, **gates) / once for gates in ({}, {"delta": share}))
    assert plain[1] > 0.9 and plain[0] > 0.8, "both"
    assert corrected[1] > 0.9 and abs(corrected[0]) < 0.35, "the last, and a third at most of the first"


def test_a_share_is_of_the_most_that_a_key_finds_at_any_age():
    """Of a C that finds less of a value at once than later: a tenth of what it finds at once would run away."""
    generator = torch.Generator().manual_seed(0)
    log_decay = torch.tensor([[[-0.05, 0.0], [-0.05, 1.0]]], dtype=torch.float64)
    beta = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    c = torch.tensor([[[[1.0, 0.0], [-0.9, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]], dtype=torch.float64)
    at_once = (c[0, 0, 0, 0] + c[0, 0, 1, 0]) ** 2  # |C beta|^2
    ages = torch.arange(256)
    most = ((-0.05 * ages).exp() * (1 - 0.9 * torch.polar(torch.ones(256), 1.0 * ages))).abs().square().max()
    assert what_keys_find(log_decay, beta, c)[0].item() == pytest.approx(most.item()) and most > 200 * at_once
    tokens = torch.randn(3, 1, 300, 1, 32, generator=generator, dtype=torch.float64) / 32**0.5

    def size(share):
        delta = None if share is None else share * torch.ones(1, 300, 1, dtype=torch.float64)
        output = interdomain_attention(*tokens, log_decay, beta, c, product="hermitian", delta=delta)[0]
        return output.abs().max().item()

    plain = size(None)
    assert size(0.1 / most) < 1.1 * plain and size(0.1 / at_once) > 1e9 * plain


@torch.no_grad()
def largest_output(text: str, bias: float, write: float = 0.0, key: float = 1.0, **fields) -> float:
    """Of an untrained layer in 1,500 tokens of one word, or of any, that all ask for a share by `bias`.

    Args:
        write: the bias of the gate of the write, where there is one.
        key: weights of the norm of keys, but for the first, which is 1.
    """
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "hidden_size": 32, "vocab_size": 32, "num_hidden_layers": 1}
    model = InterdomainForCausalLM(InterdomainConfig(**sizes, delta_rule=True, **fields)).double().eval()
    ids = torch.full((1, 1500), 7) if text == "one word" else torch.randint(32, (1, 1500))
    mixer, seen = model.model.layers[0].token_mixer, []
    mixer.delta_proj.bias.fill_(bias)
    mixer.k_norm.weight[1:] *= key
    if "gates" in fields:
        mixer.write_proj.bias.fill_(write)
    mixer.recurrence.register_forward_hook(lambda *call: seen.append(call[2]))
    mixer(model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)))
    return seen[-1][0].abs().max().item()


BOUNDED = {"plain": {}, "strong writes": {"gates": "forget", "write": 2.0}, "keys of any length": {"key": 0.1}}


@pytest.mark.parametrize("size", [4, 8, 16, 64])
@pytest.mark.parametrize("text", ["one word", "random words"])
@pytest.mark.parametrize("case", BOUNDED)
def test_a_state_stays_bounded_whatever_share_a_token_asks_for(size, text, case, monkeypatch):
    """Of as many modes as numbers a head; of few modes it grows where a whole share is taken."""
    fields = BOUNDED[case] | {"head_dim": size, "state_size": size}
    plain = largest_output(text, -1e4, **fields)
    assert all(largest_output(text, bias, **fields) <= plain for bias in (0.0, 3.0, 4.0, 12.0))
    place = "modeling_interdomain.mixers.interdomain.gated.what_keys_find"
    monkeypatch.setattr(place, lambda *parameters: (what_keys_find(*parameters)[0], torch.full((4,), torch.inf)))
    if size < 16:
        assert not largest_output(text, 12.0, **fields) < 1000 * plain


def test_a_state_from_a_random_start_grows_at_the_share_of_the_start():
    """As docs/delta-rule.md says of a text of one word."""
    fields = {"start": "random", "product": "hermitian", "state_size": 64, "head_dim": 16}
    assert largest_output("one word", 0.0, **fields) > 100 * largest_output("one word", -1e4, **fields)
    gated = fields | {"gates": "forget"}
    assert largest_output("one word", 0.0, **gated) < largest_output("one word", -1e4, **gated)


def test_shares_are_of_the_weights_as_they_are(make_model, random_ids):
    """Also where `.data` was written, which is noticed at the next tokens that are more than a draft."""
    model, ids = make_model(gates="forget", delta_rule=True).eval(), random_ids(1, 41)
    cache = InterdomainCache(model.config)
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        model(ids[:, 10:11], past_key_values=cache)
        for layer in model.model.layers:
            c = layer.token_mixer.recurrence.C
            c.data.copy_(torch.randn(c.shape, generator=torch.Generator().manual_seed(1)))
        state = copy.deepcopy(cache)
        found = model(ids[:, 11:], past_key_values=cache).logits
        again = model(ids[:, 11:], past_key_values=state).logits
    assert torch.equal(found, again)


def test_shares_at_the_start_are_as_they_are_asked_for(make_config):
    """The largest is four times as much and more."""
    for size in (4, 6, 16, 64):
        model = InterdomainForCausalLM(make_config(delta_rule=True, state_size=size))
        recurrence = model.model.layers[0].token_mixer.recurrence
        assert recurrence.answers()[1].min() > 4 * torch.tensor(-4.0).sigmoid()


def test_a_group_that_answers_nothing_takes_nothing_back(make_model, random_ids):
    """Nor does one whose keys are nothing: both stand below the share."""
    ids = random_ids(2, 9)
    for name in ("recurrence.C", "k_norm.weight"):
        model = make_model(gates="forget", delta_rule=True).train()
        with torch.no_grad():
            model.model.layers[0].token_mixer.get_parameter(name).zero_()
        found = model(ids, labels=ids)
        found.loss.backward()
        assert found.logits.isfinite().all() and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("form", ["forget", "delta", "both"])
@pytest.mark.parametrize("packed", [False, True])
def test_the_map_of_who_answered_makes_the_output(form, packed):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = draw(1, 13, 4, 6), draw(1, 13, 2, 6), draw(1, 13, 2, 5)
    parameters = torch.stack([-draw(2, 3).abs(), draw(2, 3)], -1), draw(2, 3, 2), draw(2, 3, 3, 2)
    gates = {"log_gate": -draw(1, 13, 2).abs(), "write_gate": draw(1, 13, 2).abs(), "delta": 0.1 * draw(1, 13, 2)}
    if form != "both":
        gates = {name: x for name, x in gates.items() if (name == "delta") == (form == "delta")}
    if "log_gate" in gates:
        gates["log_gate"][0, 3, 0] = -float("inf")
    ends = torch.tensor([0, 5, 6, 13]) if packed else None
    options = {"product": "hermitian", "cu_seqlens": ends, **gates}
    expected = interdomain_attention(query, key, value, *parameters, backend="recurrent", **options)[0]
    weights = gated_attention_map(query, key, *parameters, **options)
    found = torch.einsum("bhtj,bjhw->bthw", weights, value.repeat_interleave(2, dim=2))
    torch.testing.assert_close(found, expected)
    assert not weights.triu(1).any()


def test_the_map_of_warped_time_makes_the_output(make_model, random_ids):
    recurrence = make_model("warped-time").double().model.layers[0].token_mixer.recurrence
    generator = torch.Generator().manual_seed(0)
    heads, groups = recurrence.config.num_attention_heads, recurrence.config.num_key_value_heads
    sizes = (heads, recurrence.config.feature_dim), (groups, recurrence.config.feature_dim), (groups, 5)
    tokens = [torch.randn(1, 13, *size, generator=generator, dtype=torch.float64) for size in sizes]
    time_step = torch.rand(1, 13, groups, generator=generator, dtype=torch.float64)
    ends = torch.tensor([0, 5, 6, 13])
    expected = recurrence(*tokens, time_step, cu_seqlens=ends)[0]
    weights = recurrence(*tokens, time_step, mapped=True, cu_seqlens=ends)
    found = torch.einsum("bhtj,bjhw->bthw", weights, tokens[2].repeat_interleave(heads // groups, dim=2))
    torch.testing.assert_close(found, expected)
    assert not weights.triu(1).any()


def test_a_model_without_gates_has_the_fingerprint_that_it_had(make_model, monkeypatch):
    """The fields are no part of it; with gates they are."""
    model = make_model()
    before = model_fingerprint(model)
    monkeypatch.setattr("modeling_interdomain.model_cache.fingerprint._fields_of", _fields_before)
    assert model_fingerprint(model) == before
    gated = make_model(gates="forget")
    other = model_fingerprint(gated)
    monkeypatch.undo()
    assert model_fingerprint(gated) != other


def _fields_before(kind: type) -> set[str]:
    from modeling_interdomain.model_cache import fingerprint

    ours = (each for each in kind.__mro__ if not each.__module__.startswith(("transformers.", "builtins")))
    annotated = (item for each in ours for item in vars(each).get("__annotations__", {}).items())
    names = {name for name, hint in annotated if fingerprint.get_origin(hint) is not fingerprint.ClassVar}
    return names - {"gates", "delta_rule"}


@pytest.mark.parametrize("form", FORMS)
def test_states_of_gated_layers_are_not_joined_or_cut(form, make_model, random_ids, advance):
    model, ids = make_model(**FORMS[form]), random_ids(1, 8)
    caches = [InterdomainCache(model.config) for _ in range(3)]
    for cache, count in zip(caches, (3, 5, 8)):
        advance(model, cache, ids[:, :count])
    sentence = r"Layer 0 \(interdomain with gates or the delta rule\) does not hold one linear state"
    with pytest.raises(ValueError, match=sentence):
        join_caches(*caches[:2], model)
    with pytest.raises(ValueError, match=sentence):
        cut_cache(caches[2], *caches[:2], model)


def test_gated_layers_keep_their_modes(make_config):
    with pytest.raises(InputError, match="Gates and the delta rule weigh each token, and what is refit is a kernel of"):
        check_reducible(make_config(gates="forget"))


@pytest.mark.parametrize("form", FORMS)
def test_padded_batches_are_learned_in_float32(form, make_model, left_padded):
    """With the gradients of float64."""
    inputs, found = left_padded([3, 9, 14]), []
    for dtype in (torch.float32, torch.float64):
        model = make_model(dtype=dtype, state_dtype="float32", **FORMS[form]).train()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        found.append([p.grad.double() for p in model.parameters()])
    for single, double in zip(*found, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-3, atol=1e-4 * double.abs().max().item())


def test_gates_are_computed_in_float32(make_model, random_ids):
    """Of a model in bfloat16, whose layers learn."""
    model = make_model(gates="forget", delta_rule=True, dtype=torch.bfloat16, state_dtype="float32").train()
    seen = []
    recurrence = model.model.layers[0].token_mixer.recurrence
    recurrence.register_forward_hook(lambda module, inputs, _: seen.extend(inputs if len(inputs) > 3 else ()))
    ids = random_ids(2, 9)
    model(ids, labels=ids).loss.backward()
    assert [x.dtype for x in seen[3:]] == [torch.float32] * 4, "three gates, and the size of what is written"
    mixer = model.model.layers[0].token_mixer
    for name in ("forget", "write", "delta"):
        assert getattr(mixer, f"{name}_proj").bias.grad.isfinite().all()


@torch.no_grad()
def test_the_delta_rule_in_bfloat16_without_gradients(make_model, random_ids):
    """The norm of tokens in bfloat16, which goes over them in pieces, is asked here for its weight."""
    model, ids = make_model(gates="forget", delta_rule=True), random_ids(1, 9)
    expected = model(ids).logits
    found = model.to(torch.bfloat16)(ids).logits
    assert (found - expected).norm() < 0.1 * expected.norm()


def _broken(model, ids) -> torch.Tensor:
    """Embeddings of which the third token of the first row is not a number."""
    broken = model.get_input_embeddings()(ids)
    broken[0, 2] = torch.nan
    return broken


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_stays_where_it_is(make_model, random_ids, form):
    """In its own row or document, whatever reads it, and nowhere where it is a pad."""
    model, ids = make_model(**FORMS[form], product="hermitian"), random_ids(2, 9)
    broken, expected = _broken(model, ids), model(ids).logits
    for found in (model(inputs_embeds=broken).logits, _token_by_token(model, broken)):
        assert found[0, 2:].isnan().all()
        assert torch.allclose(found[1], expected[1])
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = model(inputs_embeds=broken[:1], cu_seq_lens_q=ends).logits
    assert packed[0, 2:4].isnan().all()
    assert torch.allclose(packed[0, 4:], model(ids[:1, 4:]).logits[0])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    behind = model(inputs_embeds=broken, attention_mask=mask).logits
    assert torch.allclose(behind[0, 3:], model(ids[:1, 3:]).logits[0])


def _token_by_token(model, embeddings: torch.Tensor) -> torch.Tensor:
    cache = InterdomainCache(model.config)
    return torch.cat([model(inputs_embeds=x, past_key_values=cache).logits for x in embeddings.split(1, 1)], 1)


def test_a_loss_that_is_no_number_is_the_trainers_to_judge(make_model, random_ids):
    model, ids = make_model(gates="forget").train(), random_ids(2, 9)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[0] = torch.nan
    assert model(ids, labels=ids).loss.isnan()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_each_row(make_model, random_ids, assert_gradients_of_each_row, form):
    """By `torch.func`, which can look at no value."""
    model, ids = make_model(**FORMS[form], product="hermitian", backend="recurrent"), random_ids(2, 9)
    assert_gradients_of_each_row(model, ids)


def test_no_key_takes_back_more_than_was_written():
    """Of modes and C with which a key finds most of a value at the next token, and nearly nothing at once."""
    log_decay = torch.tensor([[[-2.0, 0.0], [-2.0, torch.pi]]], dtype=torch.float64)
    beta = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    c = torch.tensor([[[[1.0, 0.0], [-0.99, 0.0]], [[0.0, 0.0], [0.0, 0.0]]]], dtype=torch.float64)
    own, share = what_keys_find(log_decay, beta, c)
    assert own.item() > 100 * (1 - 0.99) ** 2 and share.item() == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_record_shares_no_memory_with_parameters(form, make_model):
    """What shards a module frees its parameters after the call, and a record is made behind it."""
    recurrence = make_model(**FORMS[form]).model.layers[0].token_mixer.recurrence
    own = {x.untyped_storage().data_ptr() for x in recurrence.parameters()}
    constants = recurrence(torch.zeros(1, 1, 1), transition=True)
    assert not own & {x.untyped_storage().data_ptr() for x in constants}


def test_layers_of_attention_have_no_gates(make_config):
    """Of a model whose other layers have some."""
    for gates in ("forget", "warp"):
        config = make_config(token_mixers=["interdomain", "softmax"], gates=gates)
        assert token_mixer_class(config, 1) is SoftmaxMixer
