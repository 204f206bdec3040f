"""The sparse branch of a recurrent layer: in a model, its caches, its training and its configuration."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import prune

from modeling_interdomain import (
    InterdomainCache,
    InterdomainForCausalLM,
    InterdomainForSequenceClassification,
    InterdomainStaticCache,
)
from modeling_interdomain.mixers.sparse.choice import RankingLoss, SparseHash, ranking_loss
from tests.conftest import VARIANTS, dtypes_for
from tests.test_layer_losses import EVERY_KEY

SMALL = {"sparse_keys": 8, "sparse_key_dim": 4, "sparse_hash_size": 4, "num_key_value_heads": 2, "max_rollback": 8}
BRANCHES = {
    "hax": {"sparse_attention": "hax"},
    "hax-s4d": {"sparse_attention": "hax", "token_mixers": "s4d"},
    "hax-selective-scan": {"sparse_attention": "hax", "token_mixers": "selective_scan", "feed_forwards": "none"},
    "hax-ssd": {"sparse_attention": "hax", "token_mixers": "ssd", "ssd_heads": 6},
    "hax-mamba2": VARIANTS["mamba2"] | {"sparse_attention": "hax"},
    "four-parts": {
        "sparse_attention": "sink+sliding_window+dilated+lsh",
        "sparse_keys": 16,
        "sparse_num_heads": 1,
        "max_position_embeddings": 24,
    },
    "full": {"sparse_attention": "full", "max_position_embeddings": 64},
    "one-layer": {"sparse_attention": [None, "key_selection"], "token_mixers": ["softmax", "interdomain"]},
    "sign": {"sparse_attention": "lsh", "sparse_hash": "sign", "sparse_hash_size": 3, "sparse_hash_center": None},
}


@pytest.fixture
def make_branch(make_model):
    def make(name="hax", **changes):
        return make_model("interdomain", **SMALL | BRANCHES[name] | changes)

    return make


@pytest.mark.parametrize("name", BRANCHES)
def test_whole_is_pieces_is_steps_is_padded_is_packed(name, make_branch, make_cache, random_ids, advance, assert_same):
    model, ids = make_branch(name), random_ids(2, 36)
    gates = [x for key, x in model.named_parameters() if "sparse.gate" in key]
    assert gates and all(gate.abs().min() > 0 for gate in gates)  # the branch speaks
    whole = model(ids, use_cache=False).logits
    cache = make_cache(model.config)
    pieces = [ids[:, :13], *ids[:, 13:15].split(1, 1), ids[:, 15:26], *ids[:, 26:].split(1, 1)]
    assert_same(torch.cat([advance(model, cache, piece) for piece in pieces], 1), whole)

    mask = torch.ones(2, 41, dtype=torch.long)
    mask[0, :5], mask[1, 20:25] = 0, 0
    padded = torch.full((2, 41), model.config.pad_token_id)
    padded[mask.bool()] = ids.flatten()
    found = model(padded, attention_mask=mask, use_cache=False).logits
    assert_same(found[mask.bool()].view_as(whole), whole)
    packed = model(ids.view(1, -1), cu_seq_lens_q=torch.tensor([0, 36, 72])).logits
    assert_same(packed.view_as(whole), whole)

    changed = ids.clone()
    changed[:, 20:] = random_ids(2, 16, seed=1)
    assert_same(model(changed, use_cache=False).logits[:, :20], whole[:, :20])


@pytest.mark.parametrize("name", BRANCHES)
def test_crop_restores_every_tensor(name, make_branch, random_ids, advance, contents, assert_same):
    model, ids = make_branch(name), random_ids(2, 36)
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    for piece in (ids[:, :20], *ids[:, 20:24].split(1, 1)):
        advance(model, cache, piece)
    before = contents(cache)
    for piece in (ids[:, 24:25], ids[:, 25:29]):
        advance(model, cache, piece)
    cache.crop(-5)
    assert_same(contents(cache), before)
    assert_same(advance(model, cache, ids[:, 24:]), model(ids, use_cache=False).logits[:, 24:])


def test_single_pads_leave_the_memory_alone(make_branch, random_ids, advance, contents, assert_same):
    model, ids = make_branch("four-parts"), random_ids(2, 12)
    cache = InterdomainCache(model.config)
    advance(model, cache, ids)
    before = contents(cache)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[:, -1] = 0
    advance(model, cache, ids[:, :1], attention_mask=mask)
    assert_same(contents(cache)[1:5], before[1:5])
    assert_same([x for x in contents(cache) if x.numel() > 2], [x for x in before if x.numel() > 2])


@pytest.mark.parametrize("name", ["k_conv", "scorer", "hash", "gate"])
def test_a_token_in_few_calls_is_that_of_the_modules(name, make_branch, random_ids, advance, assert_same):
    """Changed weights are seen, and a module that something hangs on is called."""
    model, ids = make_branch(), random_ids(2, 12)
    few, each = InterdomainCache(model.config), InterdomainCache(model.config)
    for cache in (few, each):
        advance(model, cache, ids[:, :10])
        advance(model, cache, ids[:, 10:11])
    called = []
    with torch.no_grad():
        for layer in model.model.layers:
            layer.token_mixer.sparse.k_conv.weight.mul_(1.5)
    expected = advance(model, few, ids[:, 11:])
    for layer in model.model.layers:
        module = getattr(layer.token_mixer.sparse, name)
        module.register_forward_hook(lambda module, *_: called.append(module))
    assert_same(advance(model, each, ids[:, 11:]), expected)
    assert len(called) == len(model.model.layers)


def test_a_scorer_whose_parameters_have_moved(make_branch, random_ids, advance, assert_same):
    """What is pruned for good goes to the end of its module."""
    model, ids = make_branch(), random_ids(2, 12)
    for layer in model.model.layers:
        scorer = layer.token_mixer.sparse.scorer
        before = list(scorer._parameters)
        for name in ("weight_0", "bias_0", "weight_2", "bias_2"):
            prune.l1_unstructured(scorer, name, amount=0.3)
            prune.remove(scorer, name)
        assert list(scorer._parameters) != before
    cache = InterdomainCache(model.config)
    pieces = [advance(model, cache, piece) for piece in (ids[:, :10], ids[:, 10:11], ids[:, 11:])]
    assert_same(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits)


def test_generation(make_branch, random_ids, guess_ahead):
    model, ids = make_branch(), random_ids(2, 9)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, use_cache=False, **options).tolist()
    assert model.generate(ids, **options).tolist() == expected
    assert model.generate(ids, cache_implementation="static", **options).tolist() == expected
    beams = options | {"num_beams": 3}
    assert model.generate(ids, **beams).tolist() == model.generate(ids, use_cache=False, **beams).tolist()
    options["attention_mask"] = options["attention_mask"][:1]
    guess_ahead(torch.tensor(expected[:1]))
    assert model.generate(ids[:1], prompt_lookup_num_tokens=3, **options).tolist() == [expected[0]]


@pytest.mark.slow
def test_decode_compiles_once(make_branch, random_ids, advance):
    model, ids = make_branch(dtype=torch.float32, state_dtype="float32"), random_ids(2, 20)
    cache, other = (InterdomainStaticCache(model.config, max_cache_len=32) for _ in range(2))
    for one in (cache, other):
        advance(model, one, ids[:, :9])
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(9, 20):
            found = step(ids[:, t : t + 1], past_key_values=cache).logits
            torch.testing.assert_close(found, advance(model, other, ids[:, t : t + 1]), rtol=1e-4, atol=1e-4)


class Prefill(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


LENGTH = torch.export.Dim("length", min=2, max=512)


@pytest.mark.slow
@torch.no_grad()
def test_exported_prefill(make_branch, random_ids):
    model = Prefill(make_branch(dtype=torch.float32, state_dtype="float32"))
    program = torch.export.export(model, (random_ids(2, 24),), dynamic_shapes=({1: LENGTH},)).module()
    for tokens in (random_ids(2, 24), random_ids(2, 41)):
        torch.testing.assert_close(program(tokens), model(tokens), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_exported_for_any_batch(make_model, random_ids):
    model, sizes = Prefill(make_model("hax", **dtypes_for("hax"))), {0: torch.export.Dim("batch"), 1: LENGTH}
    program = torch.export.export(model, (random_ids(2, 24),), dynamic_shapes=(sizes,)).module()
    for tokens in (random_ids(3, 31), random_ids(1, 5)):
        torch.testing.assert_close(program(tokens), model(tokens))


@pytest.mark.parametrize("name", ["hax", "hax-s4d"])
def test_a_gate_of_zero_is_the_model_without(name, make_branch, random_ids, tmp_path):
    single = {"dtype": torch.float32, "state_dtype": "float32"}
    model, ids = make_branch(name, **single), random_ids(2, 20)
    without = make_branch(name, sparse_attention=None, **single)
    missing, unexpected = without.load_state_dict(model.state_dict(), strict=False)
    assert not missing and unexpected and all(".sparse." in name for name in unexpected)
    expected = without(ids).logits
    assert (model(ids).logits - expected).abs().amax() > 0.1
    for name, parameter in model.named_parameters():
        if name.endswith("sparse.gate.weight"):
            parameter.data.zero_()
    assert torch.equal(model(ids).logits, expected)
    # An old folder has no branch; a new one begins with the gate that was asked for.
    without.save_pretrained(tmp_path)
    config = without.config.to_dict() | {"sparse_attention": "hax", "sparse_gate_init": 0.0}
    config = type(without.config)(**{k: v for k, v in config.items() if k not in ("layer_types", "model_type")})
    joined = InterdomainForCausalLM.from_pretrained(tmp_path, config=config)
    assert torch.equal(joined(ids).logits, expected)


def test_saved_and_loaded_with_its_hash(make_branch, random_ids, tmp_path):
    model, ids = make_branch(dtype=torch.float32, state_dtype="float32"), random_ids(2, 20)
    model.save_pretrained(tmp_path)
    loaded = InterdomainForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    half = InterdomainForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {name for name, x in half.state_dict().items() if x.dtype == torch.float32 and ".sparse." in name}
    assert kept and all(".sparse.hash" in name or ".sparse.scorer" in name for name in kept)
    assert half(ids).logits.isfinite().all()


def test_the_hash_is_drawn_anew_in_training_alone(make_config):
    torch.manual_seed(0)
    hashing = SparseHash(make_config(sparse_attention="lsh", **SMALL), heads=2)
    z = torch.randn(1, 50, 2, 2, 4)
    assert torch.equal(hashing.eval()(z, None), hashing(z, None))
    assert not torch.equal(hashing.train()(z, None), hashing(z, None))
    equal = torch.randn(1, 1, 1, 1, 4).expand(z.shape)  # equal tokens are their mean, up to rounding
    assert hashing(equal, equal * (1 + 1e-6)).eq(0).all()


@pytest.mark.parametrize("name", BRANCHES)
def test_without_dropout_training_reads_as_evaluation_does(name, make_branch, random_ids, assert_same):
    """What trainers that compare two forwards of a model set to 0 (DPO, GRPO), its hash hears, too."""
    model, ids = make_branch(name), random_ids(2, 36)
    expected = model(ids).logits
    draws = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    hashed = any(isinstance(module, SparseHash) for module in model.modules())
    assert bool(draws) == hashed
    torch.manual_seed(0)
    assert torch.allclose(model.train()(ids).logits, expected) != hashed
    for module in draws:
        module.p = 0
    assert_same(model(ids).logits, expected)


def test_bytes_of_the_memory_do_not_grow(make_branch, random_ids):
    model = make_branch(num_hidden_layers=1, dtype=torch.float32, state_dtype="float32")
    cache, sizes = InterdomainCache(model.config), []
    for pieces in (1, 127):
        for _ in range(pieces):
            with torch.no_grad():
                model(random_ids(1, 512), past_key_values=cache, logits_to_keep=1)
        sizes.append(cache.state_bytes())
    assert cache.get_seq_length() == 65536 and sizes[0] == sizes[1]
    counted = model.config.state_sizes(65536)
    assert sum(x.numel() for x in cache.layers[0].held()) == sum(counted.values())


# The ranking loss.


@pytest.mark.parametrize("target", ["sum", "mean"])
def test_ranking_loss_is_a_double_loop(target):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 20, 3, generator=generator, dtype=torch.float64)
    query, key = (torch.randn(2, 20, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    key[:, 7] = key[:, 5]
    lengths, drawn = [20, 11], torch.tensor([[0, 5, 7, 19], [10, 3, 2, 5]])
    losses = []
    for b, length in enumerate(lengths):
        for s in range(3):
            wanted = []
            for j in drawn[b].tolist():
                attended = [torch.sigmoid(query[b, i, s] @ key[b, j, s]) for i in range(j, length)]
                wanted.append(sum(attended) / (len(attended) if target == "mean" else 1))
            for m, a in enumerate(drawn[b].tolist()):
                for n, c in enumerate(drawn[b].tolist()):
                    goal = torch.tensor(1.0 if wanted[m] > wanted[n] else 0.5 if wanted[m] == wanted[n] else 0.0)
                    difference = scores[b, a, s] - scores[b, c, s]
                    losses.append(F.binary_cross_entropy_with_logits(difference, goal.double()))
    options = {"target": target, "lengths": torch.tensor(lengths), "drawn": drawn}
    found = ranking_loss(scores, query, key, 4, **options)
    torch.testing.assert_close(found, torch.stack(losses).mean(), rtol=1e-12, atol=1e-12)


def test_the_target_of_the_ranking_is_that_of_the_configuration(make_branch, random_ids):
    ids, losses = random_ids(2, 30), []
    for target in ("sum", "mean"):  # with so many keys all are drawn, and nothing is random
        model = make_branch("one-layer", sparse_keys=64, ranking_target=target).train()
        losses.append(model(ids, labels=ids).ranking_losses[0])
    assert 0 < losses[0] != losses[1] > 0


def test_ranking_loss_of_too_few_keys():
    scores = torch.randn(2, 1, 3, requires_grad=True)
    loss = ranking_loss(scores, torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4), 4)
    loss.backward()
    assert loss == 0 and scores.grad.eq(0).all()


def test_ranking_loss_reaches_the_scorer_alone(make_branch, random_ids):
    model, ids = make_branch().train(), random_ids(2, 30)
    found = model(ids, labels=ids)
    assert len(found.ranking_losses) == 2
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(
        sum(found.ranking_losses), parameters.values(), allow_unused=True, retain_graph=True
    )
    reached = {name for name, g in zip(parameters, gradients) if g is not None and g.ne(0).any()}
    assert reached and all(".sparse.scorer." in name for name in reached)
    logits = found.logits[:, :-1].flatten(0, 1)
    language = F.cross_entropy(logits, ids[:, 1:].flatten())
    torch.testing.assert_close(found.loss, language + 0.1 * sum(found.ranking_losses))
    others = torch.autograd.grad(language, parameters.values(), allow_unused=True)
    without = {name for name, g in zip(parameters, others) if g is None}
    assert without == {name for name in parameters if ".sparse.scorer." in name}


def test_evaluation_has_no_ranking_loss(make_branch, random_ids):
    model, ids = make_branch(), random_ids(2, 30)
    found = model(ids, labels=ids)
    assert found.ranking_losses is None
    expected = F.cross_entropy(found.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    torch.testing.assert_close(found.loss.float(), expected)


def test_ranking_loss_under_gradient_accumulation(make_branch, random_ids):
    """Two halves of a step weigh as much as the step: drawn keys are all keys, so that nothing is random."""
    model, ids = make_branch("one-layer", sparse_keys=64).train(), random_ids(2, 30)
    scorer = [p for name, p in model.named_parameters() if ".sparse.scorer." in name]
    whole = torch.autograd.grad(model(ids, labels=ids, num_items_in_batch=58).loss, scorer)
    halves = [torch.autograd.grad(model(x, labels=x, num_items_in_batch=58).loss, scorer) for x in ids.split(1)]
    torch.testing.assert_close(whole, tuple(a + b for a, b in zip(*halves)))


def test_labels_that_are_ignored_weigh_nothing(make_branch, random_ids):
    """Whatever number marks them: a batch of several in a step adds its share of the ranking."""
    model, ids, losses = make_branch("one-layer", sparse_keys=64).train(), random_ids(2, 30), []
    for ignored in (-100, 0):
        labels = ids.clamp(min=1)
        labels[:, :12] = ignored
        shifted = torch.nn.functional.pad(labels, (0, 1), value=ignored)[:, 1:].contiguous()
        for given in ({"labels": labels}, {"labels": ids, "shift_labels": shifted}):
            losses.append(model(ids, **given, num_items_in_batch=50, ignore_index=ignored).loss)
    torch.testing.assert_close(torch.stack(losses[1:]), losses[0].expand(3))
    torch.testing.assert_close(losses[0], model(ids, labels=labels, ignore_index=0).loss * (2 * 18 / 50))


def test_the_ranking_leaves_pads_of_packed_documents_out(make_branch, random_ids):
    model, ids = make_branch("one-layer", sparse_keys=64).train(), random_ids(1, 30)
    expected = model.model(ids, cu_seq_lens_q=torch.tensor([0, 12, 30]), output_ranking_losses=True).ranking_losses
    padded = torch.cat([ids[:, :12], torch.full((1, 5), 3), ids[:, 12:], torch.full((1, 4), 3)], dim=1)
    mask = torch.ones_like(padded)
    mask[:, 12:17], mask[:, -4:] = 0, 0
    packed = {"cu_seq_lens_q": torch.tensor([0, 17, 39]), "attention_mask": mask}
    found = model.model(padded, **packed, output_ranking_losses=True).ranking_losses
    torch.testing.assert_close(found, expected)


def test_gradient_checkpointing(make_branch, random_ids):
    model, ids = make_branch().train(), random_ids(2, 30)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters())))
    torch.testing.assert_close(*gradients)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="reentrant"):
        model(ids, labels=ids)


def test_a_coefficient_of_zero_freezes_the_scorer(make_branch, random_ids):
    model, ids = make_branch(ranking_loss_coef=0.0).train(), random_ids(2, 30)
    assert not any(isinstance(m, RankingLoss) for m in model.modules())
    model(ids, labels=ids).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == {
        name for name, p in model.named_parameters() if ".sparse.scorer." in name
    }


def test_classifier(make_model, random_ids):
    model = make_model(model_class=InterdomainForSequenceClassification, **SMALL | BRANCHES["hax"], num_labels=3)
    ids, labels = random_ids(2, 20), torch.tensor([0, 2])
    found = model.train()(ids, labels=labels)
    expected = F.cross_entropy(found.logits, labels) + 0.1 * sum(found.ranking_losses)
    torch.testing.assert_close(found.loss, expected)


# Mistakes.


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("sparse_attention must be .* got 'window'", {"sparse_attention": "lsh+window"}),
        ("names lsh more than once", {"sparse_attention": "lsh+sink+lsh"}),
        ("cannot be split evenly among the 2 parts", {"sparse_keys": 7}),
        ("sparse_num_heads = 3 must be a divisor of the 2 groups", {"sparse_num_heads": 3}),
        ("12 bits are the most", {"sparse_hash": "sign", "sparse_hash_size": 13}),
        ("needs at least 2 bins", {"sparse_hash_size": 1}),
        ("ranking_loss_coef must be finite and not negative", {"ranking_loss_coef": -0.1}),
        ("ranking_loss_coef must be finite and not negative", {"ranking_loss_coef": float("nan")}),
        ("sparse_attention has 1 names for num_hidden_layers = 2", {"sparse_attention": ["hax"]}),
        ('"softmax" is none', {"token_mixers": ["softmax", "interdomain"]}),
        ("bidirectional needs softmax", {"bidirectional": True}),
        ("sparse_hash must be one of", {"sparse_hash": "random"}),
        ("sparse_key_dim must be a positive integer", {"sparse_key_dim": 0}),
    ],
    ids=str,
)
def test_configuration_mistakes(message, changes, make_config):
    with pytest.raises(Exception, match=message):
        make_config(**SMALL | BRANCHES["hax"] | changes)


def test_cache_mistakes(make_branch, random_ids, advance):
    model, ids = make_branch(), random_ids(1, 12)
    for changes in ({"sparse_hash_size": 5}, {"sparse_keys": 4}, {"sparse_num_heads": 1}):
        cache = InterdomainCache(model.config)
        advance(make_branch(**changes), cache, ids)
        with pytest.raises(ValueError, match="belongs to another model or batch"):
            model(ids, past_key_values=cache)
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    for piece in (ids, *ids.split(1, 1), *ids.split(1, 1)):
        advance(model, cache, piece)
    with pytest.raises(ValueError, match="crop can take back the last"):
        cache.crop(-30)


def test_a_memory_goes_on_in_a_model_that_was_cast(make_branch, random_ids, advance):
    model, ids = make_branch(), random_ids(1, 22)
    cache = InterdomainCache(model.config)
    advance(model.float(), cache, ids[:, :18])
    model.double()
    expected = model(ids, use_cache=False).logits[:, 18:]
    found = [advance(model, cache, ids[:, 18:19]), advance(model, cache, ids[:, 19:])]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-3, atol=1e-3)


def test_generation_under_autocast(make_model, random_ids):
    """Passes and steps of a branch stay in float32."""
    model, ids = make_model("hax", dtype=torch.float32), random_ids(1, 6)
    settings = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **settings)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.generate(ids, **settings)
    torch.testing.assert_close(found.logits[0], expected.logits[0].to(found.logits[0].dtype), rtol=0.1, atol=0.1)
    assert all(x.isfinite().all() for x in found.logits)


def test_a_configuration_without_the_branches_of_the_model_makes_no_cache(make_model, random_ids):
    model = make_model("hax")
    model.config.sparse_attention = None
    with pytest.raises(ValueError, match="The configuration names layers"):
        model(random_ids(1, 5), use_cache=True)


def test_what_chooses_keys_is_loaded_in_float32(make_model, tmp_path):
    make_model(dtype=torch.float32, **EVERY_KEY).save_pretrained(tmp_path)
    model = InterdomainForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    chosen = [x for name, x in model.named_parameters() if ".sparse.scorer." in name]
    assert chosen and all(x.dtype == torch.float32 for x in chosen)
