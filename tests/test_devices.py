"""Devices that are not those of the model: the default one of a program, and the one on which nothing is computed."""

import pytest
import torch
from torch import nn

from modeling_interdomain import InterdomainCache, InterdomainStaticCache
from modeling_interdomain.inputs.checks import check_device
from modeling_interdomain.layers.common import home_of


@pytest.fixture(params=["interdomain", "one-group", "s4d", "cheems", "mamba2", "selective-scan", "hax", "windowed"])
def each_operator(request, make_model):
    return make_model(request.param)


def uses(model, ids) -> dict[str, torch.Tensor]:
    """Logits of whole rows, padded and packed ones, and of tokens after a cache, some of which are taken back."""
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, -2:] = 0
    found = {"whole": model(ids).logits, "padded": model(ids, attention_mask=mask).logits}
    found["packed"] = model(ids[:1], cu_seq_lens_q=torch.tensor([0, 4, 7, 9], device=ids.device)).logits
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    for name, start, stop in (("prompt", 0, 4), ("token", 4, 5), ("guesses", 5, 9)):
        found[name] = model(ids[:, start:stop], past_key_values=cache).logits
    cache.crop(-3)
    found["after a crop"] = model(ids[:, 6:], past_key_values=cache).logits
    if set(model.config.layer_types) == {"linear_attention"}:  # the others' are the library's own
        cache = InterdomainStaticCache(model.config, max_cache_len=16)
        found["static"] = model(ids[:, :4], past_key_values=cache).logits
        found["static token"] = model(ids[:, 4:5], past_key_values=cache).logits
    return found


@torch.no_grad()
def test_the_default_device_of_a_program_changes_nothing(each_operator, random_ids):
    """Where it is a GPU, tensors made on the way for the host's own use must not follow it."""
    ids = random_ids(2, 9)
    expected = uses(each_operator, ids)
    torch.set_default_device("meta")
    try:
        found = uses(each_operator, ids)
    finally:
        torch.set_default_device(None)
    for name, logits in expected.items():
        assert logits.equal(found[name]), name


@pytest.mark.parametrize("training", [False, True])
def test_a_model_without_numbers_is_run_for_its_shapes(each_operator, training):
    """As programs do that count operations or memory before anything is loaded."""
    model = each_operator.to("meta").train(training)
    ids = torch.zeros(2, 9, dtype=torch.long, device="meta")
    if training:
        model(ids, labels=ids).loss.backward()
        assert all(p.grad.is_meta for p in model.parameters() if p.grad is not None)
        return
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        for length in (1, 3):
            logits = model(ids[:, :length], past_key_values=cache).logits
            assert logits.is_meta and logits.shape == (2, length, model.config.vocab_size)
    assert int(cache.get_seq_length()) == 13


class _OnAnApple(torch.Tensor):
    """A tensor of which only the place and the shape are known."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was computed.")


@pytest.mark.parametrize("name", ["interdomain", "cheems", "s4d", "selective-scan", "windowed"])
def test_a_device_without_float64_is_refused_before_anything_is_computed(name, make_model):
    """A Trainer and a pipeline take Apple's GPU by themselves."""
    model = make_model(name)
    cache = InterdomainCache(model.config)
    tokens = torch.Tensor._make_wrapper_subclass(_OnAnApple, (1, 5, 32), dtype=torch.float32, device="mps")
    with pytest.raises(ValueError, match=r"need float64, which mps lacks: use the CPU \(Trainer: use_cpu=True"):
        model(inputs_embeds=tokens, past_key_values=cache)
    model(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)  # which nothing has touched


@pytest.mark.parametrize("name", ["softmax", "window-alone"])
def test_layers_without_a_recurrence_may_run_on_any_device(make_model, name):
    check_device([layer.token_mixer for layer in make_model(name).model.layers], torch.device("mps"))


def test_the_home_of_a_map_without_parameters_is_that_of_its_buffers():
    module = nn.Module()
    assert home_of(module).type == "cpu"
    module.register_buffer("packed", torch.empty(2, device="meta"))
    assert home_of(module).type == "meta"
