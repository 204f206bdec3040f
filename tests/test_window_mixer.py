"""A window with a memory: what its layers compute, against loops, a Llama and a Mistral; where each token is kept."""

import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from modeling_interdomain import (
    InterdomainCache,
    InterdomainConfig,
    InterdomainForCausalLM,
    InterdomainStaticCache,
    add_learned_state,
)
from modeling_interdomain.mixers.window.attention import Seen, WindowAttention
from modeling_interdomain.mixers.window.mixer import WindowMixer
from modeling_interdomain.saving.code import flat_code
from tests.conftest import LENGTHENED, ROPE

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("name", ["window", "window-alone"])
def test_other_frequencies_are_seen(name, make_model, random_ids, advance, assert_same):
    """Angles are kept of the buffers as they are: written in place, or swapped for one call."""
    ids, (model, changed) = random_ids(2, 9), (make_model(name) for _ in range(2))

    def quarters(model):
        return {key: x / 4 for key, x in model.named_buffers() if key.endswith("inv_freq")}

    def cached(model):
        cache = InterdomainCache(model.config)
        return torch.cat([advance(model, cache, piece) for piece in (ids[:, :8], ids[:, 8:])], dim=1)

    before = cached(model)
    for key, x in quarters(changed).items():
        changed.get_buffer(key).copy_(x)
    expected = cached(changed)
    assert not torch.allclose(expected, before)
    with torch.no_grad():
        swapped = torch.func.functional_call(model, quarters(model), (ids,), {"use_cache": False}).logits
    assert_same(swapped, expected)
    assert_same(cached(model), before)
    for key, x in quarters(model).items():
        model.get_buffer(key).copy_(x)
    assert_same(cached(model), expected)


def _mixer(model, layer: int = 0) -> WindowMixer:
    return model.model.layers[layer].token_mixer


def _angles(mixer: WindowMixer, dim: int) -> torch.Tensor:
    rotary = mixer.attention.rotary
    return torch.zeros(dim // 2).double() if rotary is None else rotary.inv_freq.double()


def _by_loops(mixer: WindowMixer, x: torch.Tensor) -> torch.Tensor:
    """The layer as it is described, token by token and head by head: a score a pair, and a state in complex numbers."""
    config, (batch, length, _) = mixer.config, x.shape
    window, sinks, dim = config.attention_window, config.attention_sinks, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    query, key, value = (f(x).unflatten(-1, (-1, dim)) for f in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    as_complex = [torch.complex(y[..., : dim // 2], y[..., dim // 2 :]) for y in (query, key)]
    theta = _angles(mixer, dim)
    if config.window_memory:
        log_decay, beta, coefficients = mixer.recurrence.parameters_of_operator()
        decay, beta = (torch.view_as_complex(y.contiguous()) for y in (log_decay, beta))
        decay = decay.exp()

    def features(y):
        y = y if config.window_points else F.silu(y)
        return y if config.window_points else y / y.norm()

    rows = []
    for b in range(batch):
        for t in range(length):
            outputs = []
            for h in range(heads):
                g = h // (heads // groups)
                seen = [j for j in range(t + 1) if t - j < window or j < sinks]
                scores = []
                for j in seen:
                    apart = t - j if t - j < window else min(t - j, window + sinks - 1 - j)
                    turned = (
                        as_complex[0][b, t, h]
                        * as_complex[1][b, j, g].conj()
                        * torch.polar(torch.ones_like(theta), apart * theta)
                    )
                    scores.append(turned.real.sum() * dim**-0.5)
                weights = torch.stack(scores).softmax(0)
                output = sum(w * value[b, j, g] for w, j in zip(weights, seen, strict=True))
                left = range(sinks, t - window + 1)
                if config.window_memory and len(left):
                    state = 0
                    for j in left:
                        inputs = torch.cat([features(key[b, j, g] @ mixer.k_map[g]), value[b, j, g] @ mixer.v_map[g]])
                        if config.window_write_gate:
                            said = mixer.write_bias[g]
                            for y, weight in zip((key[b, j, g], value[b, j, g]), mixer.write_gate[g], strict=True):
                                said = said + y @ weight / (y.square().mean() + config.rms_norm_eps).sqrt()
                            inputs = inputs * (1 + said.exp()).log()
                        state = decay[g][:, None] * state + beta[g][:, None] * inputs
                    asked = features(query[b, t, h] @ mixer.q_map[h])
                    if config.window_points:
                        read, found = _at_points(mixer.recurrence, state, asked, g, h % (heads // groups))
                    else:
                        u, gamma = (torch.view_as_complex(coefficients[g]) @ state).split([len(asked), dim], dim=-1)
                        read = asked @ (u.mT @ gamma.conj()).real
                    read = mixer.memory_gate[h] * read / (read.square().mean() + config.rms_norm_eps).sqrt()
                    score = mixer.share_proj.weight[h] @ x[b, t] + mixer.share_proj.bias[h]
                    if config.window_points:
                        score = score + mixer.point_weight[h] * found
                    if config.window_share == "counted":
                        score = score + math.log(min(len(left), window) / window)
                    if config.window_share != "sigmoid":
                        score = score - torch.stack(scores).logsumexp(0)
                    share = score.sigmoid()
                    output = (1 - share) * output + share * read
                outputs.append(output)
            rows.append(mixer.o_proj(torch.cat(outputs)))
    return torch.stack(rows).view(batch, length, -1)


def _at_points(recurrence, state: torch.Tensor, asked: torch.Tensor, group: int, head: int):
    """Attention to what the state says of each point, and log sum exp of its scores."""
    scores, values = [], []
    for n in range(recurrence.config.window_points):
        of_key, of_value = (
            torch.view_as_complex(x[group, n]) for x in (recurrence.point_keys, recurrence.point_values)
        )
        key, value = (
            (state[:, : len(asked)].mT @ of_key.conj()).real,
            (state[:, len(asked) :].mT @ of_value.conj()).real,
        )
        scale = recurrence.point_log_scale[group, head].exp() / len(asked) ** 0.5
        scores.append(scale * (asked @ key) + recurrence.point_bias[group, head, n])
        values.append(value)
    scores = torch.stack(scores)
    return scores.softmax(0) @ torch.stack(values), scores.logsumexp(0)


CASES = {
    "sinks": {},
    "no sinks": {"attention_sinks": 0},
    "more sinks than window": {"attention_window": 2, "attention_sinks": 4, "attention_bias": False},
    "one token": {"attention_window": 1, "attention_sinks": 1},
    "no rotation": {"rope_parameters": None},
    "llama3": {"rope_parameters": LLAMA3},
    "features of another size": {"feature_dim": 6},
    "without a state": {"window_memory": False},
    "written alike": {"window_write_gate": False},
    "read as a sum": {"window_points": 0},
    "read as a sum, features of another size": {"window_points": 0, "feature_dim": 6},
    "counted from the first on": {"window_share": "softmax"},
    "share of its own": {"window_share": "sigmoid"},
    "share of its own, no sinks": {"window_share": "sigmoid", "attention_sinks": 0},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_those_of_loops(changes, make_model):
    mixer = _mixer(make_model("window", **changes))
    x = torch.randn(2, 11, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    leaves = {"x": x} | dict(mixer.named_parameters())
    weights = torch.randn(2, 11, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found, expected = mixer(x)[0], _by_loops(mixer, x)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    grads = [torch.autograd.grad((y * weights).sum(), list(leaves.values())) for y in (found, expected)]
    for name, one, other in zip(leaves, *grads, strict=True):
        scale = other.norm().clamp(min=1e-6)
        assert (one - other).norm() < 1e-6 * scale, name
    assert all(grad.any() for grad in grads[0])


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 2), (3, 0), (3, 2), (2, 5), (4, 4)])
def test_every_past_token_is_in_one_place(window, sinks, make_model):
    """In the window, among the sinks or in the state: at every length, and whatever the blocks."""
    mixer = _mixer(make_model("window", attention_window=window, attention_sinks=sinks))
    for length in range(1, 2 * (window + sinks) + 3):
        x = torch.randn(1, length, 32, dtype=torch.float64)
        projected = [f(x) for f in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.share_proj)]
        (_, written, _, query, key, _, sink_key, _, places, _), _ = mixer._inputs(projected, None, None, None, False)
        # What a query sees of each place, with values that name the token.
        names = torch.eye(length, dtype=torch.float64)
        values = F.pad(names, (0, 0, window, 0))[None, :, None].expand(1, -1, key.shape[2], -1)
        first = F.pad(names[:sinks], (0, 0, 0, max(0, sinks - length)))[None, :, None].expand(1, -1, key.shape[2], -1)
        weights = mixer.attention(query, Seen(key, values, sink_key, first, places))[0, :, 0]
        entered = written[0, :, 0].norm(dim=-1) > 0  # whether the token W before enters
        in_state = torch.zeros(length, length, dtype=torch.bool)
        for t in range(length):
            for since in range(window, t + 1):
                in_state[t:, since - window] |= entered[since]
        assert ((weights > 0).int() + in_state.int()).equal(torch.ones(length, length).tril().int())
        torch.testing.assert_close(weights.sum(1), torch.ones(length, dtype=torch.float64))


@pytest.mark.parametrize("name", ["window", "window-alone"])
@pytest.mark.parametrize("cuts", [[1] * 23, [2, 3, 1, 8, 1, 1, 7], [22, 1], [5, 18], [9] + [1] * 14], ids=str)
@torch.no_grad()
def test_decoding_is_reading_at_once(name, cuts, make_model, make_cache, random_ids, assert_same):
    model, ids = make_model(name), random_ids(2, 23)
    cache, start, found = make_cache(model.config), 0, []
    for count in cuts:
        found.append(model(ids[:, start : start + count], past_key_values=cache, use_cache=True).logits)
        start += count
    assert_same(torch.cat(found, dim=1), model(ids).logits)


@torch.no_grad()
def test_long_texts_attend_in_pieces(make_model, random_ids, assert_same, monkeypatch):
    """Whose results are joined: no size of a piece shows."""
    model, ids, ends = make_model("window"), random_ids(2, 41), torch.tensor([0, 3, 20, 41])
    whole, packed = model(ids).logits, model(ids[:1], cu_seq_lens_q=ends).logits
    monkeypatch.setattr("modeling_interdomain.mixers.window.attention._PIECE", 8)
    assert_same(model(ids).logits, whole)
    assert_same(model(ids[:1], cu_seq_lens_q=ends).logits, packed)


@torch.no_grad()
def test_nothing_after_a_token_changes_it(make_model, random_ids, assert_same):
    model, ids = make_model("window"), random_ids(1, 21)
    whole = model(ids).logits
    for t in range(1, 21):
        other = ids.clone()
        other[:, t:] = random_ids(1, 21 - t, seed=t)
        assert_same(model(other).logits[:, :t], whole[:, :t])


SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SOURCES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": ROPE}),
    "llama3 with biases": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3, "attention_bias": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"rope_parameters": ROPE, "sliding_window": 6}),
}


def _pair(name: str, **fields):
    """A model of the library, and ours with its weights and window layers."""
    config_class, model_class, changes = SOURCES[name]
    torch.manual_seed(0)
    source = model_class(config_class(**SIZES | changes, attn_implementation="eager")).eval()
    with torch.no_grad():
        for p in source.parameters():
            p.normal_(std=0.3) if p.ndim > 1 or "bias" in "".join(dict(source.named_parameters())) else None
    bias = name.startswith(("llama3", "qwen2"))
    config = InterdomainConfig(
        **SIZES, rope_parameters=changes["rope_parameters"], token_mixers="window", attention_bias=bias, **fields
    )
    model = InterdomainForCausalLM(config).eval()
    weights = {name.replace("self_attn", "token_mixer"): x for name, x in source.state_dict().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    own = ("_map", "memory_gate", "write_gate", "write_bias", "share_proj.weight", "share_proj.bias", "o_proj.bias")
    assert not unexpected and all(x.endswith(own) or "recurrence" in x for x in missing)
    return source, model


@pytest.mark.parametrize("name", ["llama", "llama3 with biases", "qwen2"])
@torch.no_grad()
def test_within_its_window_it_is_the_source(name, random_ids):
    """Up to W + S tokens: read whole, in pieces, and one by one."""
    source, model = _pair(name, attention_window=14, attention_sinks=4)
    ids = random_ids(2, 18)
    expected = source(ids).logits
    assert expected.std() > 0.3
    for cuts in ([18], [5, 13], [1] * 18, [12] + [1] * 6):
        cache, found = InterdomainCache(model.config), []
        for piece in ids.split(cuts, dim=1):
            found.append(model(piece, past_key_values=cache, use_cache=True).logits)
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(random_ids(2, 30)).logits, source(random_ids(2, 30)).logits, atol=1e-2)


@torch.no_grad()
def test_without_state_and_sinks_it_is_a_sliding_window(random_ids):
    source, model = _pair("mistral", attention_window=6, attention_sinks=0, window_memory=False)
    assert {name for name, _ in _mixer(model).named_parameters()} == {f"{x}_proj.weight" for x in "qkvo"}
    ids = random_ids(2, 40)
    torch.testing.assert_close(model(ids).logits, source(ids).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_an_untrained_memory_leaves_the_answers_of_the_window(random_ids):
    fields = {"attention_window": 8, "attention_sinks": 2, "state_size": 16}
    (_, model), (_, control) = _pair("llama", **fields), _pair("llama", **fields, window_memory=False)
    ids = random_ids(2, 60)
    found, expected = (x(ids).logits.log_softmax(-1) for x in (model, control))
    assert 0 < (expected.exp() * (expected - found)).sum(-1).mean() < 1e-3  # nats a token


@torch.no_grad()
def test_long_texts_stay_bounded(make_model):
    """20 windows long and with values that all point one way, so that a sum would grow: no head reads more."""
    mixer = _mixer(make_model("window"))
    x = torch.randn(1, 32, dtype=torch.float64) + 0.1 * torch.randn(80, 32, dtype=torch.float64)
    mixer.recurrence.log_a_real.fill_(-20)  # nothing fades
    found = []
    handle = mixer.o_proj.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    mixer(x[None])
    handle.remove()
    values = mixer.v_proj(x).abs().max()
    bound = values + mixer.memory_gate.abs().max() * mixer.head_dim**0.5
    assert found[0].abs().max() <= bound and found[0][0, 40:].std() > 0.01


@torch.no_grad()
def test_a_million_tokens_are_as_good_as_a_hundred(make_model, random_ids, advance):
    """Nothing that a layer computes depends on how many tokens it has read, beyond the first."""
    model, ids = make_model("window"), random_ids(1, 20)
    logits, held = [], []
    for more in (0, 10**6):
        cache = InterdomainCache(model.config)
        advance(model, cache, ids[:, :12])
        for layer in cache.layers:
            layer.conv_states[2] += more
        logits.append(torch.cat([advance(model, cache, x) for x in (ids[:, 12:13], ids[:, 13:])], dim=1))
        held.append(cache.state_bytes())
    assert logits[0].equal(logits[1]) and held[0] == held[1]


@pytest.mark.parametrize("name", ["window", "window-alone"])
def test_a_cache_does_not_grow(name, make_model, random_ids, advance):
    config = make_model(name, num_hidden_layers=2, token_mixers="window", feed_forwards="mlp").config
    model, cache = InterdomainForCausalLM(config).eval(), InterdomainCache(config)
    sizes = set()
    for _ in range(12):
        advance(model, cache, random_ids(1, 3))
        sizes.add(cache.state_bytes())
    state = 2 * 2 * 6 * 16 * 8 if config.window_memory else 0  # modes in float64
    kept = 2 * config.num_key_value_heads * 8 * (config.attention_window + config.attention_sinks) * 4 + 8
    assert sizes == {2 * (kept + (state if name == "window" else 0))}


def test_left_pads_and_a_step_of_pads_change_nothing(make_model, left_padded, make_cache, assert_same):
    """Of a row: sinks and window are those of its real tokens."""
    model, batch = make_model("window"), left_padded([13, 4, 9])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = make_cache(model.config)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        more = torch.tensor([[7], [8], [9]])
        mask = torch.cat([mask, torch.tensor([[1], [0], [1]])], dim=1)
        model(more, attention_mask=mask, past_key_values=cache, use_cache=True)
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
        last = model(more + 1, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        for row, count in enumerate((13, 4, 9)):
            own = ids[row : row + 1, 13 - count :]
            assert_same(logits[row : row + 1, 13 - count :], model(own).logits)
            between = [] if row == 1 else [more[row : row + 1]]
            whole = torch.cat([own, *between, more[row : row + 1] + 1], dim=1)
            assert_same(last[row], model(whole).logits[0, -1:])


def test_the_start():
    """Three groups, a factor of 4 apart; small shares and gates, tokens written as they are, maps that are none."""
    config = InterdomainConfig(
        hidden_size=72, num_attention_heads=9, num_key_value_heads=3, token_mixers="window", state_size=64,
        vocab_size=16, num_hidden_layers=1, window_write_gate=True,
    )  # fmt: skip
    mixer = _mixer(InterdomainForCausalLM(config))
    recurrence = mixer.recurrence
    step = recurrence.log_dt.exp()
    torch.testing.assert_close(step, torch.tensor([1 / 16, 1 / 4, 1]) / 64)
    phases = step[:, None] * recurrence.a_imag
    torch.testing.assert_close(phases[2], math.pi * torch.arange(64) / 64)
    torch.testing.assert_close(
        phases[1] / phases[2].clamp(min=1e-9), torch.full((64,), 0.25).index_fill(0, torch.tensor(0), 0)
    )
    assert (mixer.share_proj.bias == -4).all() and not mixer.share_proj.weight.any()
    assert (mixer.memory_gate == 0.1).all()
    assert not mixer.write_gate.any()
    torch.testing.assert_close(F.softplus(mixer.write_bias), torch.ones(3))
    assert all((x == torch.eye(8)).all() for x in (mixer.q_map, mixer.k_map, mixer.v_map))
    assert recurrence.product == "hermitian" and recurrence.C.shape == (3, 64, 64, 2)


BAD_FIELDS = {
    "no window": ({"attention_window": 0}, "attention_window must be a positive integer, got 0"),
    "negative sinks": ({"attention_sinks": -1}, "attention_sinks must not be negative, got -1"),
    "dynamic": ({"rope_parameters": LENGTHENED["dynamic"]}, 'rope_type "dynamic" changes its angles with the length'),
    "longrope": ({"rope_parameters": LENGTHENED["longrope"]}, 'rope_type "longrope" changes its angles'),
    "negative points": ({"window_points": -2}, "window_points must not be negative, got -2"),
    "a branch": ({"sparse_attention": "hax"}, "sparse_attention stands beside recurrent layers"),
    "both ways": ({"bidirectional": True}, "bidirectional needs softmax in all layers"),
}


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_bad_fields_are_named(fields, message, make_config):
    with pytest.raises(StrictDataclassError) as error:
        make_config("window", **fields)
    assert message in str(error.value.__cause__)


def test_a_count_of_tokens_is_not_rounded(make_model, random_ids, advance, assert_same):
    """Where a cache goes to another dtype: in bfloat16 there is no 257."""
    model, ids = make_model("window"), random_ids(1, 12)
    cache = InterdomainCache(model.config)
    advance(model, cache, ids[:, :9])
    cache.layers[0].conv_states[2] += 248
    cache.to(dtype=torch.bfloat16)
    assert cache.layers[0].conv_states[2].item() == 257 and cache.layers[0].conv_states[0].dtype == torch.bfloat16


def test_what_is_kept_may_go_before_it_is_read(make_model, random_ids):
    """Several threads that read texts of other lengths replace each other's angles and masks."""

    class Contested(WindowAttention):
        _kept = property(lambda self: {}, lambda self, kept: None)

    model, ids = make_model("window"), random_ids(1, 9)
    with torch.no_grad():
        expected = model(ids).logits
        for layer in model.model.layers:
            vars(layer.token_mixer.attention).pop("_kept")
            layer.token_mixer.attention.__class__ = Contested
        assert torch.equal(model(ids).logits, expected)


def test_what_is_kept_is_of_no_transform(make_model, random_ids, assert_gradients_of_each_row):
    """The gradients of each row (`torch.func`), and nothing of that is left where the model is called again."""
    model, ids = make_model("window-alone", token_mixers="window"), random_ids(2, 9)
    assert_gradients_of_each_row(model, ids)


@torch.no_grad()
def test_dropout_of_a_token_is_that_of_many(make_model, random_ids):
    """Also of one whose window is full: with all weights dropped nothing is read (Monte Carlo dropout)."""
    mixer = _mixer(make_model("window-alone", attention_dropout=1.0)).train()
    cache = InterdomainCache(mixer.config)
    x = torch.randn(1, 8, 32, dtype=torch.float64)
    for some in x.split([6, 1, 1], dim=1):
        assert mixer(some, past_key_values=cache)[0].eq(0).all()


@torch.no_grad()
def test_a_cache_goes_on_in_another_dtype(make_model, random_ids):
    """What was read under autocast, or in a narrower model: sinks that no token changes are widened, too."""
    model, ids = make_model("window", feed_forwards="mlp", dtype=torch.float32), random_ids(1, 16)
    expected = model(ids).logits[:, 10:]
    for before, after in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        cache = InterdomainCache(model.config)
        model.to(before)(ids[:, :10], past_key_values=cache)
        model.to(after)
        found = [model(some, past_key_values=cache).logits for some in ids[:, 10:].split([3, 1, 1, 1], dim=1)]
        assert (torch.cat(found, dim=1) - expected).norm() < 0.1 * expected.norm()


def test_it_travels_where_it_is_configured(make_config):
    own = {"mixers_window_mixer", "mixers_window_attention", "mixers_window_recurrence"}
    assert own <= set(flat_code(make_config("window")))
    assert not any("window_" in name for name in flat_code(make_config("interdomain")))


def test_a_static_cache_of_a_window_has_no_limit(make_model, random_ids, advance):
    model, ids = make_model("window"), random_ids(1, 30)
    cache = InterdomainStaticCache(model.config, max_cache_len=8)
    found = torch.cat([advance(model, cache, x) for x in ids.split([9, *[1] * 21], dim=1)], dim=1)
    torch.testing.assert_close(found, model(ids).logits)


@torch.no_grad()
def test_a_window_alone_has_the_map_of_its_softmax(make_model, random_ids, assert_same):
    """Times the values it is what a layer projects back: rows, pads, and packed documents; a memory has none."""
    model, ids = make_model("window-alone", attn_implementation="eager", attention_sinks=2), random_ids(2, 13)
    mixer, read = _mixer(model), []
    mixer.o_proj.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    mixer.v_proj.register_forward_hook(lambda _, inputs, output: read.append(output))
    weights = model(ids, output_attentions=True).attentions[0]
    value, output = (x.unflatten(-1, (-1, 8)) for x in read)
    heads = weights.shape[1] // value.shape[2]
    assert_same(torch.einsum("bhtj,bjhd->bthd", weights, value.repeat_interleave(heads, dim=2)), output)
    assert_same(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights[:, :, 12] > 0).sum(-1).eq(3 + 2).all()
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[0, 5] = 0
    real, ends = mask[0].bool(), torch.tensor([0, 4, 13])
    padded = model(ids, attention_mask=mask, output_attentions=True).attentions[0]
    assert_same(padded[:1, :, real][..., real], model(ids[:1, real], output_attentions=True).attentions[0])
    assert padded[0, :, ~real].eq(0).all() and padded[0, ..., ~real].eq(0).all()
    packed = model(ids[:1], cu_seq_lens_q=ends, output_attentions=True).attentions[0]
    for start, stop in ((0, 4), (4, 13)):
        alone = model(ids[:1, start:stop], output_attentions=True).attentions[0]
        assert_same(packed[..., start:stop, start:stop], alone)
    assert packed[..., 4:, :4].eq(0).all()


@torch.no_grad()
def test_points_start_as_what_stood_there():
    """White noise in the group that resolves tokens, slow noise in that which sees furthest: ages of `age` tokens."""
    config = InterdomainConfig(
        hidden_size=72, num_attention_heads=9, num_key_value_heads=3, token_mixers="window", state_size=16,
        vocab_size=16, num_hidden_layers=1, window_points=32,
    )  # fmt: skip
    recurrence = _mixer(InterdomainForCausalLM(config)).recurrence
    assert torch.equal(recurrence.point_keys, recurrence.point_values) and not recurrence.point_bias.any()
    decay, beta = recurrence._transition_and_beta()
    weights = torch.view_as_complex(recurrence.point_keys.double())
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(440, 50, generator=draw, dtype=torch.float64)
    for group, smooth, age in ((2, 1, 1), (1, 16, 4), (0, 40, 16)):
        written = noise.unfold(0, smooth, 1).mean(-1)[:400]
        state = torch.zeros(16, 50, dtype=torch.complex128)
        for x in written:
            state = decay[group, :, None] * state + beta[group, :, None] * x
        found, expected = (weights[group].conj() @ state).real, written.flip(0)[: 32 * age : age][:24]
        assert F.cosine_similarity(found[: len(expected)].flatten(), expected.flatten(), dim=0) > 0.9


@torch.no_grad()
def test_a_learned_state_is_read_before_a_token_has_left_the_window(make_model, random_ids):
    model, ids = make_model("window"), random_ids(1, 3)
    assert ids.shape[1] < model.config.attention_window + model.config.attention_sinks
    plain = model(ids).logits
    states = add_learned_state(model)
    assert model(ids).logits.equal(plain), "of zeros nothing is read"
    for state in states:
        state.normal_()
    assert (model(ids).logits - plain).abs().max() > 1e-2
