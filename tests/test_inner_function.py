"""Inner-function attention: values as the paper says, a choice that is learned, and the paper's sizes."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

from examples.training import parameter_groups
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from modeling_interdomain.mixers.inner_function.mixer import InnerFunctionMixer
from tests.conftest import ROPE

REFUSED = (ValueError, StrictDataclassError)
SMALL = {"token_mixers": "inner_function", "inner_values": 5, "inner_value_dim": 6}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(x, position):
    """One head at one position, pairs are halves."""
    half = x.shape[0] // 2
    angles = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[:half], x[half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])


def attention_of_one_row(mixer, x):
    """Token by token and head by head, from the equations: `[T, d]` to the same."""
    inner, config, size = mixer.inner_function, mixer.config, mixer.head_dim
    values = []
    for token in x:
        scores = inner.keys @ (inner.query_proj.weight @ token)
        shares = scores.exp() / scores.exp().sum()
        chosen = sorted(range(len(scores)), key=lambda i: -scores[i].item())[: config.inner_values_per_token]
        weights = shares if config.inner_value_weights == "softmax" else torch.ones_like(shares)
        values.append(token * sum(weights[i] * inner.values[i] for i in chosen))
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(config.num_attention_heads):
            part = slice(h * size, (h + 1) * size)
            query = turned((mixer.q_proj.weight @ x[t])[part], t)
            keys = [turned((mixer.k_proj.weight @ x[j])[part], j) for j in range(t + 1)]
            weights = torch.stack([query @ key / size**0.5 for key in keys]).softmax(0)
            heads.append(sum(weight * values[j][part] for j, weight in enumerate(weights)))
        rows.append(mixer.o_proj.weight @ torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize(("weights", "chosen"), [("softmax", 1), ("softmax", 3), ("one", 2)])
def test_it_is_the_equations(make_model, random_ids, assert_same, weights, chosen):
    fields = SMALL | {"inner_value_weights": weights, "inner_values_per_token": chosen, "rope_parameters": ROPE}
    model = make_model(**fields, num_hidden_layers=1)
    mixer = model.model.layers[0].token_mixer
    x, seen = normal(1, 7, 32), {}
    cos_sin = model.model.rotary_embs["8"](x, torch.arange(7)[None])
    found = mixer(x, position_embeddings={8: cos_sin})[0]
    expected = attention_of_one_row(mixer, x[0])
    assert_same(found[0], expected)
    for name, y in (("found", found[0]), ("expected", expected)):
        mixer.zero_grad()
        (y * normal(7, 32, seed=1)).sum().backward()
        seen[name] = [p.grad for p in mixer.parameters() if p.grad is not None]
    assert_same(seen["found"], seen["expected"])


@pytest.mark.parametrize(("weights", "learns"), [("softmax", True), ("one", False)])
def test_the_choice_is_learned_where_it_is_weighted(make_model, random_ids, weights, learns):
    model = make_model(**SMALL, inner_value_weights=weights).train()
    model(random_ids(2, 9), labels=random_ids(2, 9)).loss.backward()
    inner = model.model.layers[0].token_mixer.inner_function
    for parameter in (inner.query_proj.weight, inner.keys):
        assert (parameter.grad is not None and bool(parameter.grad.abs().max() > 0)) is learns
    assert inner.values.grad.abs().max() > 0


def test_values_nobody_chooses_get_zeros(make_model):
    inner = make_model(**SMALL, inner_value_weights="one").model.layers[0].token_mixer.inner_function
    with torch.no_grad():
        inner.keys.zero_()
        inner.keys[3] = inner.query_proj(torch.ones(32, dtype=torch.float64))  # the token below chooses it alone
    x = torch.ones(1, 1, 32, dtype=torch.float64)
    assert torch.equal(inner(x)[0, 0], inner.values[3])
    inner(x).sum().backward()
    assert inner.values.grad.abs().sum(1).ne(0).tolist() == [False, False, False, True, False]


def test_equal_scores_choose_different_values(make_model):
    """Which of them differs by device: as many as asked for, and none of a lower score."""
    model = make_model(**SMALL, inner_value_weights="one", inner_values_per_token=2)
    inner, x = model.model.layers[0].token_mixer.inner_function, torch.ones(1, 1, 32, dtype=torch.float64)
    with torch.no_grad():
        inner.keys.copy_(inner.query_proj(x[0]).expand_as(inner.keys))
        inner.keys[1] *= -1
        inner.values.copy_(10.0 ** torch.arange(5)[:, None].expand_as(inner.values))
    digits = f"{int(inner(x)[0, 0, 0]):05}"[::-1]  # the n-th is 1 where the n-th value was chosen
    assert sorted(digits) == ["0", "0", "0", "1", "1"] and digits[1] == "0"


def test_tokens_choose_differently_at_the_start():
    config = InterdomainConfig(vocab_size=64, hidden_size=128, num_hidden_layers=1, num_attention_heads=2)
    config.token_mixers = "inner_function"
    torch.manual_seed(0)
    inner = InterdomainForCausalLM(config).model.layers[0].token_mixer.inner_function
    assert 0.9 < inner.values.std().item() < 1.1
    assert 0.9 < inner.keys.norm(dim=1).mean().item() < 1.1
    scores = inner.query_proj(torch.randn(200, 128)) @ inner.keys.mT
    assert scores.argmax(-1).bincount(minlength=6).min() > 0


@pytest.mark.parametrize("better", [0, 1])
def test_a_choice_does_not_flip_in_half_precision(make_model, better):
    """Of two scores that are one number in bfloat16, 1 and 1 + 2^-9."""
    inner = make_model(**SMALL, inner_value_weights="one").model.layers[0].token_mixer.inner_function.bfloat16()
    with torch.no_grad():
        inner.query_proj.weight.zero_()[:2, 0] = 1
        inner.keys.zero_()[:2, 0] = 1
        inner.keys[better, 1] = 2**-9
    assert torch.equal(inner(torch.ones(1, 1, 32, dtype=torch.bfloat16))[0, 0], inner.values[better])


@pytest.mark.parametrize(("width", "heads", "count", "expected"), [(768, 12, 6, 1_971_456), (2048, 32, 16, 13_142_016)])
def test_parameters_at_the_shapes_of_the_paper(width, heads, count, expected):
    config = InterdomainConfig(
        hidden_size=width,
        num_attention_heads=heads,
        inner_values=count,
        num_hidden_layers=1,
        token_mixers="inner_function",
        dynamic_mask="position",
        max_position_embeddings=8192,
    )
    with torch.device("meta"):
        mixer = InnerFunctionMixer(config, 0)
    r = config.inner_value_dim
    formula = 3 * width**2 + width * r + count * (r + width) + heads * config.max_position_embeddings
    assert sum(p.numel() for p in mixer.parameters()) == formula == expected


def test_neither_values_nor_masks_decay(make_model):
    model = make_model("inner-function")
    (decayed,) = [group["params"] for group in parameter_groups(model, 1e-3) if group["name"] == "weights"]
    names = {name.split("token_mixer.")[1] for name, p in model.named_parameters() if "layers.0.token_mixer" in name}
    found = {id(p) for p in decayed}
    kept = {name for name in names if id(model.get_parameter(f"model.layers.0.token_mixer.{name}")) not in found}
    assert kept == {"inner_function.keys", "inner_function.values", "dynamic_mask.table"}


def test_saved_and_loaded(make_model, random_ids, tmp_path):
    model = make_model("inner-function", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded(random_ids(2, 8)).logits.equal(model(random_ids(2, 8)).logits)


def test_adapters_reach_the_choice(make_model, random_ids):
    peft = pytest.importorskip("peft")
    model = make_model(**SMALL, dtype=torch.float32, dynamic_mask="value", dynamic_mask_window=4)
    before = model(random_ids(2, 8)).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    names = {name.split(".lora_A")[0].rpartition("token_mixer.")[2] for name, _ in adapted.named_parameters()}
    assert {"q_proj", "k_proj", "o_proj", "inner_function.query_proj", "dynamic_mask.dt_proj"} <= names
    after = adapted(random_ids(2, 8)).logits
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(adapted.merge_and_unload()(random_ids(2, 8)).logits, after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 6}, "split the input itself .* got 6, 12, 64 and 768"),
        ({"head_dim": 32}, "split the input itself .* got 12, 12, 32 and 768"),
        ({"inner_values_per_token": 7}, "inner_values_per_token = 7 must be at most inner_values = 6"),
        ({"inner_values": 0}, "inner_values must be a positive integer, got 0"),
        ({"inner_value_weights": "sum"}, "inner_value_weights must be one of softmax, one; got 'sum'"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(REFUSED, match=message):
        InterdomainConfig(token_mixers=["interdomain"] * 11 + ["inner_function"], **fields)
