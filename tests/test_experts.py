"""Cross-domain experts: retrieval, the trilinear form and its gradients, the layer against a dense one, its models."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from transformers import AutoModelForCausalLM

from examples.training import ExpertUsage, parameter_groups
from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainForCausalLM, InterdomainStaticCache
from modeling_interdomain.feed_forwards import cross_domain_moe as feed_forward_cdmoe
from modeling_interdomain.feed_forwards.configuration import factor_pair
from modeling_interdomain.feed_forwards.cross_domain_moe import CrossDomainMoE
from modeling_interdomain.ops.experts import entry as op_experts
from modeling_interdomain.ops.experts.entry import find_experts, read_experts, sum_experts

# 6 x 8 experts, two heads of three.
SHAPE = {"num_experts": 48, "expert_heads": 2, "experts_per_head": 3, "expert_key_dim": 6}
FORMS = [(z, score) for z in ("cross_domain", "hidden") for score in ("raw", "softmax", "sigmoid")]


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def integers(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def make_layer(make_config):
    """`make_layer(**changes)`: one feed-forward in float64 whose parts all show in its output."""

    def make(**changes) -> CrossDomainMoE:
        layer = CrossDomainMoE(make_config(**{"feed_forwards": "cdmoe", **SHAPE, **changes}), 0).double().eval()
        for seed, parameter in enumerate(layer.parameters()):
            parameter.data = normal(*parameter.shape, seed=seed) * parameter.shape[-1] ** -0.5
        return layer

    return make


@pytest.fixture
def make_experts(make_model):
    """`make_experts("s4d", **changes)`: a small model with experts in every layer."""

    def make(mixer="interdomain", **changes) -> InterdomainForCausalLM:
        return make_model(mixer, **{"feed_forwards": "cdmoe", **SHAPE, **changes})

    return make


def oracle(layer, x):
    """Every expert of every token computed, those that are not among the best of all sums multiplied with zero."""
    shared = layer.down_proj(layer.act_fn(layer.up_proj(x)))
    z = shared if layer.crosses else x
    query = layer.query_proj(z).view(*x.shape[:2], 2, layer.heads, -1)
    first = torch.einsum("bthr,hnr->bthn", query[:, :, 0], layer.expert_keys[:, : layer.rows])
    second = torch.einsum("bthr,hnr->bthn", query[:, :, 1], layer.expert_keys[:, layer.rows :])
    scores = (first[..., :, None] + second[..., None, :]).flatten(-2)  # [B, T, h, experts]
    worst = scores.topk(layer.count).values[..., -1:]
    products = (z @ layer.expert_down.mT)[:, :, None]
    if layer.score == "raw":
        weights = layer.act_fn(products * scores)
    elif layer.score == "softmax":
        weights = layer.act_fn(products) * scores.where(scores >= worst, -torch.inf).softmax(-1)
    else:
        weights = layer.act_fn(products) * scores.sigmoid()
    return shared + (weights.where(scores >= worst, 0) @ layer.expert_up).sum(2)


def differentiate(layer, output, x):
    return torch.autograd.grad((output * normal(*output.shape, seed=9)).sum(), [x, *layer.parameters()])


# ------------------------------------------------------------------------------------------ retrieval


@pytest.mark.parametrize(
    ("count", "pair"), [(1, (1, 1)), (16, (4, 4)), (48, (6, 8)), (3072, (48, 64)), (8192, (64, 128)), (13, (1, 13))]
)
def test_factors_nearest_the_root(count, pair):
    assert factor_pair(count) == pair


@pytest.mark.parametrize(("rows", "columns", "count"), [(5, 9, 5), (4, 4, 1), (16, 16, 16), (3, 3, 3)])
def test_retrieval_is_exact(rows, columns, count):
    query, keys = normal(2, 7, 2, 3, 4), normal(3, rows + columns, 4, seed=1)
    scores, ids = find_experts(query, keys, rows, count)
    halves = torch.einsum("bthr,hnr->bthn", query[:, :, 0], keys[:, :rows])[..., :, None]
    every = (halves + torch.einsum("bthr,hnr->bthn", query[:, :, 1], keys[:, rows:])[..., None, :]).flatten(-2)
    expected = every.topk(count)
    assert ids.equal(expected.indices)
    torch.testing.assert_close(scores, expected.values)
    alone = [find_experts(token, keys, rows, count)[1] for token in query.split(1, dim=1)]
    assert ids.equal(torch.cat(alone, dim=1))


def test_ties_have_the_best_scores_and_different_experts():
    query, keys = integers(2, 2, 9, 2, 1, 4).double(), integers(2, 1, 12, 4, seed=1).double()
    scores, ids = find_experts(query, keys, 6, 4)
    first, second = query[:, :, 0] @ keys[0, :6].mT, query[:, :, 1] @ keys[0, 6:].mT
    every = (first[..., :, None] + second[..., None, :]).flatten(-2)
    assert scores.equal(every.topk(4).values) and scores.equal(every.gather(-1, ids))
    assert (ids.sort().values.diff() > 0).all()


@pytest.mark.parametrize("tokens", [1, 6, 300])
def test_keys_that_inputs_meet_find_the_same_experts(make_layer, assert_same, tokens):
    """Whether they are made or not, a hook on the projection sees to it that it is called."""
    layer, x = make_layer(expert_key_dim=32), normal(1, tokens, 32, seed=3).requires_grad_()
    found = layer(x)
    with torch.no_grad():
        scores, ids = layer._find(x)
        assert layer(x).equal(layer(x)) and (layer._keys_of(x) is not None) == (tokens != 6)
    gradients, calls = differentiate(layer, found, x), []
    layer.query_proj.register_forward_hook(lambda *arguments: calls.append(arguments))
    expected = layer(x)
    assert_same(found, expected)
    for ours, theirs in zip(gradients, differentiate(layer, expected, x), strict=True):
        assert_same(ours, theirs)
    assert layer._find(x)[1].equal(ids) and len(calls) == 2
    assert_same(scores, layer._find(x)[0])


# ------------------------------------------------------------------------------------------ the trilinear form


@pytest.mark.parametrize(
    "ids", [integers(11, 2, 5, 3), torch.full((2, 5, 3), 4), integers(11, 3, 1, 2)], ids=["many", "one", "a token"]
)
def test_bags_are_gathered_rows(ids):
    """Outputs, gradients and their gradients."""
    x, table, weights = normal(*ids.shape[:2], 6), normal(11, 6, seed=1), normal(*ids.shape, seed=2)
    for tensor in (x, table, weights):
        tensor.requires_grad_()
    torch.testing.assert_close(read_experts(x, table, ids), torch.einsum("btd,btkd->btk", x, table[ids]))
    torch.testing.assert_close(sum_experts(weights, table, ids), torch.einsum("btk,btkd->btd", weights, table[ids]))
    for check in (gradcheck, gradgradcheck):
        assert check(lambda x, table: read_experts(x, table, ids), (x, table))
        assert check(lambda weights, table: sum_experts(weights, table, ids), (weights, table))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_low_precision_are_rounded_once(dtype):
    x, table, ids = normal(1, 4, 768).to(dtype), normal(50, 768, seed=1).to(dtype), integers(50, 1, 4, 9)
    products = read_experts(x, table, ids)
    assert products.dtype == dtype and products.equal(read_experts(x.float(), table.float(), ids).to(dtype))
    rows = sum_experts(products, table, ids)
    assert rows.dtype == dtype and rows.equal(sum_experts(products.float(), table.float(), ids).to(dtype))


def test_operators_say_their_shapes():
    x, table, weights, ids = normal(4, 6), normal(11, 6), normal(4, 3), integers(11, 4, 3)
    for operator, arguments in (
        (op_experts._products, (x, table, ids, "auto")),
        (op_experts._bags, (weights, table, ids, "auto")),
        (op_experts._transposed_bags, (weights, x, ids, 11, "auto")),
    ):
        differentiable = tuple(a.requires_grad_() if torch.is_tensor(a) and a is not ids else a for a in arguments)
        torch.library.opcheck(operator.registered, differentiable)


# ------------------------------------------------------------------------------------------ the layer


@pytest.mark.parametrize(("z", "score"), FORMS)
def test_the_layer_is_the_dense_one(make_layer, assert_same, z, score):
    layer, x = make_layer(expert_input=z, expert_score=score), normal(2, 9, 32).requires_grad_()
    found, expected = layer(x), oracle(layer, x)
    assert_same(found, expected)
    assert_same(differentiate(layer, found, x), differentiate(layer, expected, x))
    with torch.no_grad():  # a token alone goes another way
        assert_same(torch.cat([layer(token) for token in x.split(1, dim=1)], dim=1), expected)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("count", [1, 5])
def test_heads_and_experts(make_layer, assert_same, heads, count):
    layer, x = make_layer(expert_heads=heads, experts_per_head=count, num_experts=35), normal(2, 4, 32).requires_grad_()
    found, expected = layer(x), oracle(layer, x)
    assert_same(found, expected)
    assert_same(differentiate(layer, found, x), differentiate(layer, expected, x))


@pytest.mark.parametrize(("z", "score"), FORMS)
def test_gradcheck_of_the_layer(make_layer, z, score):
    shape = {"hidden_size": 4, "intermediate_size": 4, "num_experts": 6, "experts_per_head": 2}
    layer = make_layer(**shape, num_attention_heads=1, expert_input=z, expert_score=score)
    names, values = zip(*layer.named_parameters())

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters)), (x,))

    assert gradcheck(run, (normal(1, 3, 4).requires_grad_(), *values))


@pytest.mark.parametrize(("z", "score"), FORMS[:2])
def test_no_token_changes_another(make_layer, z, score):
    layer, x = make_layer(expert_input=z, expert_score=score).float(), normal(1, 8, 32).float()
    changed = x.clone()
    changed[:, 4] = normal(32, seed=5).float()
    before, after = layer(x), layer(changed)
    others = [t for t in range(8) if t != 4]
    assert after[:, others].equal(before[:, others]) and not after[:, 4].equal(before[:, 4])


def test_an_expert_that_nobody_chose_has_a_gradient_of_zero(make_layer):
    layer, x, seen = make_layer(), normal(1, 3, 32), []
    layer.chosen.register_forward_hook(lambda module, inputs, ids: seen.append(ids))
    layer(x).square().sum().backward()
    idle = torch.ones(48, dtype=torch.bool)
    idle[seen[0].flatten()] = False
    for table in (layer.expert_down, layer.expert_up):
        assert idle.any() and not table.grad[idle].any() and table.grad[~idle].any(1).all()


def test_all_tokens_on_one_expert(make_layer, assert_same):
    layer, x = make_layer(expert_heads=1, experts_per_head=1), normal(2, 6, 32).requires_grad_()
    layer.query_proj.weight.data.zero_()  # every score is 0
    layer.chosen.register_forward_hook(lambda module, inputs, ids: torch.full_like(ids, 17))
    found = layer(x)
    z = layer.down_proj(layer.act_fn(layer.up_proj(x)))
    expected = z + layer.act_fn(0 * z @ layer.expert_down[17])[..., None] * layer.expert_up[17]
    assert_same(found, expected)
    layer.expert_keys.data[:, :, 0] += 1
    layer.query_proj.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    found = differentiate(layer, layer(x), x)
    assert all(gradient.isfinite().all() for gradient in found)
    down = dict(zip(["x", *dict(layer.named_parameters())], found))["expert_down"]
    assert down.any(1).nonzero().flatten().tolist() == [17]


def test_twice_the_same_bits(make_layer):
    layer, x = make_layer().float(), normal(4, 64, 32).float().requires_grad_()
    first, second = ([layer(x), *differentiate(layer, layer(x), x)] for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second))


def test_autocast_leaves_the_choice_alone(make_layer):
    """The same experts as in float32, for the z that autocast has made."""
    layer, x, chosen = make_layer(expert_input="hidden").float(), normal(2, 9, 32).float(), []
    layer.chosen.register_forward_hook(lambda module, inputs, ids: chosen.append(ids))
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
        torch.autograd.grad(found.float().sum(), list(layer.parameters()))
    assert found.dtype == torch.bfloat16 and chosen[0].equal(chosen[1])
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_scores_of_a_bfloat16_model_are_sums_in_float32(make_layer, monkeypatch):
    dtypes = []

    def spy(query, keys, *arguments):
        dtypes.extend([query.dtype, keys.dtype])
        return find_experts(query, keys, *arguments)

    monkeypatch.setattr(feed_forward_cdmoe.CrossDomainMoE.operators, "find_experts", spy)
    assert make_layer().bfloat16()(normal(1, 3, 32).bfloat16()).dtype == torch.bfloat16
    assert dtypes == [torch.float32] * 2


def test_how_it_starts(make_config):
    torch.manual_seed(0)
    config = make_config(feed_forwards="cdmoe", hidden_size=64, num_experts=1024, expert_key_dim=128)
    model = InterdomainForCausalLM(config)
    for layer in model.model.layers:
        deviations = {name: p.std().item() for name, p in layer.mlp.named_parameters() if "expert" in name}
        expected = {"expert_keys": (2 / 128) ** 0.5, "expert_down": 0.02, "expert_up": 0.02 / 2}
        assert deviations == pytest.approx(expected, rel=0.05)


# ------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize(
    ("width", "hidden", "parameters", "active"),
    [(768, 3072, 10_070_016, 5_379_072), (2048, 640, 40_566_784, 7_536_640)],
    ids=["320M", "1.3B"],
)
def test_parameters(width, hidden, parameters, active):
    config = InterdomainConfig(
        hidden_size=width, intermediate_size=hidden, feed_forwards="cdmoe", num_attention_heads=width // 64
    )
    with torch.device("meta"):
        layer = CrossDomainMoE(config, 0)
    assert sum(p.numel() for p in layer.parameters()) == parameters
    chosen = 2 * config.expert_heads * config.experts_per_head * width
    assert parameters - layer.expert_down.numel() - layer.expert_up.numel() + chosen == active
    assert config.state_sizes(10) == InterdomainConfig(hidden_size=width, num_attention_heads=width // 64).state_sizes(
        10
    )


@pytest.mark.parametrize("mixer", ["interdomain", "s4d", "softmax-interdomain"])
def test_a_cache_pads_and_packing(make_experts, left_padded, random_ids, assert_same, advance, mixer):
    model, ids = make_experts(mixer), random_ids(1, 9)
    whole = advance(model, None, ids)
    cache = InterdomainCache(model.config)
    assert_same(torch.cat([advance(model, cache, part) for part in ids.split([5, 1, 1, 2], dim=1)], dim=1), whole)
    inputs = left_padded([4, 9])
    padded = model(**inputs).logits
    assert_same(padded[0, -4:], advance(model, None, inputs["input_ids"][:1, -4:])[0])
    packed = model(ids, cu_seq_lens_q=torch.tensor([0, 4, 9], dtype=torch.int32)).logits
    assert_same(packed, torch.cat([advance(model, None, part) for part in ids.split([4, 5], dim=1)], dim=1))


@pytest.mark.parametrize("mixer", ["interdomain", "softmax"])
def test_generation(make_experts, random_ids, mixer):
    model, ids = make_experts(mixer), random_ids(2, 4).repeat(1, 3)
    settings = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **settings, use_cache=False)
    assert model.generate(ids, **settings).equal(expected)
    assert model.generate(ids[:1], **settings, prompt_lookup_num_tokens=3).equal(expected[:1])
    beams = model.generate(ids, **settings, num_beams=3)
    assert beams.equal(model.generate(ids, **settings, num_beams=3, use_cache=False))


def test_layers_with_and_without(make_experts, random_ids, tmp_path):
    names = ["cdmoe", "mlp", "none", "cdmoe"]
    model = make_experts(num_hidden_layers=4, feed_forwards=names).float()
    assert [hasattr(layer.mlp, "chosen") for layer in model.model.layers] == [name == "cdmoe" for name in names]
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(2, 7)
    assert loaded.config.feed_forwards == names and loaded.config.num_experts == 48
    assert loaded(ids).logits.equal(model(ids).logits)


def test_every_parameter_learns_with_and_without_checkpointing(make_experts, random_ids, assert_same):
    model, ids, found = make_experts().train(), random_ids(4, 30), []
    for _ in range(2):
        found.append(torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters())))
        model.gradient_checkpointing_enable()
    assert all(gradient.any() for gradient in found[0])
    assert_same(found[1], found[0])


def test_experts_do_not_decay(make_experts):
    model = make_experts(feed_forwards=["cdmoe", "mlp"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    (decayed,) = (group for group in parameter_groups(model, 1e-3) if group["weight_decay"])
    decayed = {names[id(parameter)] for parameter in decayed["params"]}
    assert "model.layers.0.mlp.query_proj.weight" in decayed and not any("expert" in name for name in decayed)
    assert sum("expert" in name for name in names.values()) == 3


@pytest.mark.parametrize("targets", [["expert_keys"], ["expert_down", "expert_up"]], ids=["keys", "experts"])
def test_low_rank_changes_of_experts(make_experts, random_ids, assert_same, targets):
    """What PEFT adapts of bare parameters holds for the length of their module's forward alone."""
    adapters = {"r": 4, "init_lora_weights": False, "target_modules": ["query_proj"], "target_parameters": targets}
    model, ids = get_peft_model(make_experts(), LoraConfig(task_type="CAUSAL_LM", **adapters)), random_ids(2, 20)
    model.train()(input_ids=ids, labels=ids).loss.backward()
    learning = [parameter.grad.any() for parameter in model.parameters() if parameter.requires_grad]
    assert len(learning) == 2 * 2 * (1 + len(targets)) and all(learning)
    expected = model.eval()(input_ids=ids).logits
    assert not torch.allclose(expected, make_experts()(ids).logits)
    assert_same(model.merge_and_unload()(ids).logits, expected)


# ------------------------------------------------------------------------------------------ compiled, exported


def test_one_graph_for_every_length(make_layer, assert_same):
    layer, counter = make_layer(), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for length in (9, 14):
        x = normal(2, length, 32, seed=length).requires_grad_()
        found, expected = ([run(x), *differentiate(layer, run(x), x)] for run in (compiled, layer))
        assert_same(found, expected)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_compiled_model(make_experts, random_ids):
    model = make_experts("interdomain-softmax", num_hidden_layers=2, dtype=torch.float32).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for length in (9, 14):
        ids, found = random_ids(2, length), []
        for run in (model, compiled):
            output = run(ids, labels=ids, use_cache=False)
            found.append([output.logits, *torch.autograd.grad(output.loss, list(model.parameters()))])
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_decoding(make_experts, random_ids, assert_same):
    model, ids = make_experts(), random_ids(2, 9)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    caches = [InterdomainStaticCache(model.config, max_cache_len=16) for _ in range(2)]
    with torch.no_grad():
        for token in (ids[:, :6], *ids[:, 6:].split(1, dim=1)):
            one, other = (run(token, past_key_values=cache).logits for run, cache in zip((model, compiled), caches))
            assert_same(other, one)
    torch._dynamo.reset()


def test_an_exported_layer(make_layer, assert_same):
    layer = make_layer()
    tokens = torch.export.Dim("tokens", min=1, max=64)
    program = torch.export.export(layer, (normal(2, 9, 32),), dynamic_shapes=({1: tokens},), strict=False)
    for length in (9, 1, 30):
        x = normal(2, length, 32, seed=length)
        assert_same(program.module()(x), layer(x))
    assert not any("op_experts" in str(node.target) for node in program.graph.nodes)


# ------------------------------------------------------------------------------------------ usage


def test_chosen_experts_are_an_output(make_experts, random_ids):
    model, ids = make_experts(num_hidden_layers=3, feed_forwards=["cdmoe", "mlp", "cdmoe"]), random_ids(2, 7)
    assert model(ids).chosen_experts is None
    chosen = model(ids, output_chosen_experts=True).chosen_experts
    assert [list(x.shape) for x in chosen] == [[2, 7, 2, 3]] * 2
    assert all(x.min() >= 0 and x.max() < 48 for x in chosen) and not chosen[0].equal(chosen[1])


def test_usage_shows_a_collapse(make_experts, random_ids):
    model, ids = make_experts(), random_ids(4, 40)
    usage = ExpertUsage(model)
    model(ids)
    assert usage.read() == {}  # evaluation does not count
    chosen = model.train()(ids, output_chosen_experts=True).chosen_experts
    spread = usage.read()
    assert spread["experts_used"] == pytest.approx(min(len(x.unique()) / 48 for x in chosen), abs=1e-4)
    assert 0.3 < spread["experts_effective"] <= spread["experts_used"]
    model.model.layers[1].mlp.query_proj.weight.data.zero_()  # all scores alike
    model(ids)
    collapsed = usage.read()
    assert collapsed["experts_effective"] <= collapsed["experts_used"] <= 6 / 48
    assert usage.read() == {}


# ------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_experts": 13, "experts_per_head": 2},
            "num_experts = 13 makes a grid of 1 x 13 product keys",
        ),
        ({"num_experts": 48, "experts_per_head": 7}, "grid of 6 x 8 .* cannot find experts_per_head = 7: choose"),
        ({"expert_key_dim": 7}, "expert_key_dim must be even, one half for each product key; got 7."),
        ({"expert_heads": 0}, "expert_heads must be a positive integer"),
        ({"num_experts": -4}, "num_experts must be a positive integer"),
        ({"expert_input": "both"}, "expert_input must be one of cross_domain, hidden; got 'both'"),
        ({"expert_score": "linear"}, "expert_score must be one of raw, softmax, sigmoid; got 'linear'"),
        ({"feed_forwards": ["cdmoe"]}, "feed_forwards has 1 names for num_hidden_layers = 2"),
    ],
)
def test_mistakes(make_config, changes, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        make_config(**{"feed_forwards": "cdmoe", **SHAPE, **changes})


def test_queries_of_no_width_are_refused(make_config):
    with pytest.raises((ValueError, StrictDataclassError), match="expert_key_dim must be a positive integer"):
        make_config(feed_forwards="cdmoe", expert_key_dim=0)
