"""A learned first state: rows, documents and caches begin with it; it is trained and saved alone."""

import re
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples import finetune_state, text_data
from examples.joined_states import join_layer
from modeling_interdomain import (
    InterdomainCache,
    add_learned_state,
    load_learned_state,
    save_learned_state,
)
from tests.conftest import PAD
from tests.test_examples import some_documents


@torch.no_grad()
def with_state(model, seed=0):
    """A learned state that shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in add_learned_state(model):
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, use_cache=False, **inputs).logits


def test_zeros_change_nothing_bit_for_bit(recurrent_model, random_ids):
    ids, length = random_ids(2, 12), 5
    options = {"max_new_tokens": length, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    before, written = logits(recurrent_model, ids), recurrent_model.generate(ids, **options)
    parameters = add_learned_state(recurrent_model)
    assert all(not x.any() and x.requires_grad for x in parameters)
    assert torch.equal(logits(recurrent_model, ids), before)
    again = recurrent_model.generate(ids, **options)
    assert torch.equal(again.sequences, written.sequences)
    assert all(torch.equal(x, y) for x, y in zip(again.logits, written.logits, strict=True))
    assert add_learned_state(recurrent_model) == parameters


def test_pieces_padding_and_documents_begin_with_it(recurrent_model, random_ids, assert_same):
    model, ids = with_state(recurrent_model), random_ids(2, 13)
    expected = logits(model, ids)
    cache = InterdomainCache(model.config)
    with torch.no_grad():
        for _ in range(2):  # a cache that was reset begins with it, too
            parts = [model(x, past_key_values=cache).logits for x in ids.split([5, 1, 6, 1], dim=1)]
            assert_same(torch.cat(parts, dim=1), expected)
            cache.reset()
        first = model(ids[:, :1], past_key_values=cache).logits
    assert_same(first, expected[:, :1])
    pads = torch.full((2, 3), PAD)
    for sides in ((pads, ids), (ids, pads)):
        padded, real = torch.cat(sides, dim=1), torch.cat([(x != PAD).long() for x in sides], dim=1)
        found = logits(model, padded, attention_mask=real)
        assert_same(found[real.bool()], expected.flatten(0, 1))
    if set(model.config.layer_types) == {"linear_attention"}:
        packed = torch.cat([ids[0, :8], ids[1]])[None]
        positions = torch.cat([torch.arange(8), torch.arange(13)])[None]
        found = logits(model, packed, position_ids=positions)
        assert_same(found[0], torch.cat([expected[0, :8], expected[1]]))


@pytest.mark.parametrize("backend", ["recurrent", pytest.param("triton", marks=pytest.mark.slow)])
def test_every_backend_begins_with_it(backend, make_model, random_ids):
    if backend == "triton":
        pytest.importorskip("triton")
    model, ids = with_state(make_model(dtype=torch.float32)), random_ids(2, 9)
    positions = torch.cat([torch.arange(4), torch.arange(5)]).expand(2, -1)
    expected = logits(model, ids), logits(model, ids, position_ids=positions)
    model.config.backend = backend
    found = logits(model, ids), logits(model, ids, position_ids=positions)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_states_are_joined_as_if_only_the_first_had_begun_with_it(make_model, random_ids, assert_same):
    model, ids = with_state(make_model(conv_kernel=1, num_hidden_layers=1)), random_ids(2, 12)
    mixer, states = model.model.layers[0].token_mixer, []
    with torch.no_grad():
        for part in (ids[:, :7], ids[:, 7:], ids):
            cache = InterdomainCache(model.config)
            model(part, past_key_values=cache)
            states.append(cache.layers[0].state)
        assert_same(join_layer(mixer, states[0], states[1], 5), states[2])


@pytest.mark.parametrize("name", ["interdomain", "ssd", "selective-scan"])
def test_all_tokens_can_be_taken_back_to_it(name, make_model, random_ids, assert_same):
    model, ids = with_state(make_model(name)), random_ids(2, 9)
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.crop(-9)
        assert_same(model(ids, past_key_values=cache).logits, logits(model, ids))


@pytest.mark.parametrize("name", ["interdomain", "s4d", "ssd", "selective-scan"])
def test_its_gradient_is_that_of_finite_differences(name, make_model, random_ids):
    model, ids = make_model(name).requires_grad_(False), random_ids(2, 7)
    with_state(model)
    states = add_learned_state(model)

    def loss():
        return model(ids, use_cache=False).logits.logsumexp(-1).mean()

    gradients = torch.autograd.grad(loss(), states)
    direction = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).double() for x in states]
    losses = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            for x, d in zip(states, direction):
                x.add_(step * d)
            losses.append(loss())
            for x, d in zip(states, direction):
                x.sub_(step * d)
    slope = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
    torch.testing.assert_close((losses[0] - losses[1]) / 2e-5, slope, rtol=1e-6, atol=1e-9)
    assert slope.abs() > 1e-3


def test_a_gradient_flows_through_tokens_that_are_read_one_by_one(make_model, random_ids, assert_same):
    model, ids = with_state(make_model().requires_grad_(False)), random_ids(2, 4)
    states, cache = add_learned_state(model), InterdomainCache(model.config)
    expected = torch.autograd.grad(model(ids, use_cache=False).logits.square().sum(), states)
    one_by_one = torch.cat([model(x, past_key_values=cache).logits for x in ids.split(1, dim=1)], dim=1)
    assert_same(torch.autograd.grad(one_by_one.square().sum(), states), expected)


@pytest.fixture
def saved(make_model, tmp_path):
    """The folder of a model, and the file of a learned state of it."""
    model = make_model("interdomain", dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    save_learned_state(with_state(model), tmp_path / "state.safetensors")
    return tmp_path, model


READ = """
import sys, torch
from transformers import AutoModelForCausalLM
from modeling_interdomain import load_learned_state
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
load_learned_state(model, sys.argv[2])
ids = torch.arange(2, 12)[None]
written = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
torch.save([model(ids, use_cache=False).logits.detach(), written], sys.argv[3])
"""


def test_another_process_begins_with_it(saved):
    folder, model = saved
    arguments = [folder / "model", folder / "state.safetensors", folder / "out.pt"]
    subprocess.run([sys.executable, "-c", READ, *map(str, arguments)], check=True)
    found, written = torch.load(folder / "out.pt")
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(found, logits(model, ids), rtol=1e-5, atol=1e-5)  # threads may be others there
    assert torch.equal(written, model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False))
    count = sum(x.numel() for x in add_learned_state(model))
    assert count == sum(model.config.state_sizes(1).values()) - model.config.state_sizes(1)["convolution"]
    assert 4 * count < (folder / "state.safetensors").stat().st_size < 4 * count + 2000


def test_a_model_is_saved_with_it_in_any_dtype(saved, random_ids):
    folder, model = saved
    model.save_pretrained(folder / "whole")
    ids = random_ids(2, 10)
    found = AutoModelForCausalLM.from_pretrained(folder / "whole").eval()
    assert found.config.learned_state and torch.equal(logits(found, ids), logits(model, ids))
    half = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    states = load_learned_state(half, folder / "state.safetensors")
    assert all(x.dtype == torch.float32 for x in (*states, *add_learned_state(half.to(torch.bfloat16))))


def test_lora_and_a_state_are_trained_saved_and_merged_together(saved, random_ids):
    folder, _ = saved
    ids = random_ids(2, 10)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), LoraConfig(r=2))
    with_state(adapted, seed=1)
    trained = {name for name, x in adapted.named_parameters() if x.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"weight", "state"}
    assert all("lora" in name or "first_state" in name for name in trained)
    optimizer = torch.optim.SGD([x for x in adapted.parameters() if x.requires_grad], lr=1.0)
    for _ in range(2):  # LoRA begins with a factor of zeros
        adapted(ids, labels=ids).loss.backward()
        optimizer.step()
    adapted.eval().save_pretrained(folder / "lora")
    save_learned_state(adapted, folder / "both.safetensors")
    expected = logits(adapted, ids)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), folder / "lora").eval()
    assert not torch.equal(logits(again, ids), expected)
    again.load_learned_state(folder / "both.safetensors")  # a method, where the package is not installed
    assert torch.equal(logits(again, ids), expected)
    again.merge_and_unload().save_pretrained(folder / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    torch.testing.assert_close(logits(merged, ids), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="a model with other weights .* before adapters are merged"):
        load_learned_state(merged, folder / "both.safetensors")


def test_what_does_not_fit_is_refused_by_name(saved, make_model, random_ids, tmp_path):
    folder, model = saved
    file = folder / "state.safetensors"
    other = make_model("interdomain", dtype=torch.float32, state_size=5)
    with pytest.raises(
        ValueError, match=r"of another shape: it has 2 layers of \[4, 2, 6, 16\], and .* \[4, 2, 5, 16\]"
    ):
        load_learned_state(other, file)
    with pytest.raises(ValueError, match="of a model with other weights"):
        load_learned_state(make_model("interdomain", dtype=torch.float32, seed=1), file)
    assert not other.config.learned_state and other.model.layers[0].token_mixer.first_state is None
    with pytest.raises(ValueError, match="no learned state that could be saved"):
        save_learned_state(other, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="this model has none: use prompt tuning"):
        add_learned_state(make_model("softmax"))
    with pytest.raises(ValueError, match="this model has none: use prompt tuning"):
        add_learned_state(make_model("window-alone"))  # a window without a memory has a state of no numbers
    with pytest.raises(FileNotFoundError):
        load_learned_state(model, tmp_path / "none.safetensors")
    cache = InterdomainCache(model.config)
    with torch.no_grad():
        model(random_ids(1, 4), past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors", model)
    with pytest.raises(ValueError, match="holds no learned state"):
        load_learned_state(model, tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match="does not say of which model"):
        InterdomainCache.load(file, model)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="torn"):
        load_learned_state(model, torn)


def test_a_learned_state_that_is_there_stays(make_model):
    model = with_state(make_model("interdomain"))
    before = [state.detach().clone() for state in add_learned_state(model)]
    assert all(state.any() for state in before)
    assert all(map(torch.equal, add_learned_state(model), before))


def test_maps_of_attention_are_left_out(make_model, random_ids):
    model = make_model()
    assert len(model(random_ids(1, 4), output_attentions=True).attentions) == 2
    assert not with_state(model)(random_ids(1, 4), output_attentions=True).attentions


# ------------------------------------------------------------------------------------------ the example


def test_the_example_trains_saves_and_goes_on(make_model, tmp_path, capsys):
    tokenizer = text_data.train_tokenizer(some_documents(), vocab_size=300)
    model = make_model(dtype=torch.float32, vocab_size=300)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("".join(some_documents(60)))
    base, data, output = str(tmp_path / "model"), str(tmp_path / "text.txt"), tmp_path / "state.safetensors"
    short = ["--data", data, "--steps", "8", "--sequence-length", "16", "--batch-size", "4"]
    assert finetune_state.main([base, "--output", str(output), *short]) == 0
    said = capsys.readouterr().out
    before, after = (float(x) for x in re.findall(r"([0-9.e+]+) (?:before|after)", said))
    assert after < before and f"{output.stat().st_size / 1e6:.3g} MB" in said
    assert finetune_state.main([base, "--output", str(output), *short]) == 2
    assert "is already there" in capsys.readouterr().err
    further = ["--output", str(tmp_path / "further.safetensors"), "--state"]
    assert finetune_state.main([base, *further, str(output), *short]) == 0
    assert f"perplexity {after:.4g} before" in capsys.readouterr().out
    assert finetune_state.main([base, *further[:1], str(tmp_path / "x"), "--state", data, *short]) == 2
    assert "no state file" in capsys.readouterr().err
    assert load_file(output).keys() == {"layers.0.first_state", "layers.1.first_state"}


def test_windows_learn_a_state_of_texts_that_leave_them(make_model, random_ids, tmp_path, capsys):
    """Of shorter ones a state of zeros gets no gradient, and the example refuses them."""
    model = make_model("window", dtype=torch.float32, vocab_size=300)
    states = add_learned_state(model)
    window = model.config.attention_window + model.config.attention_sinks
    for more in (0, 1):
        ids = random_ids(1, window + more)
        with torch.enable_grad():
            gradients = torch.autograd.grad(model(ids).logits[:, -1, :9].sum(), states)
        assert all(bool(x.any()) == bool(more) for x in gradients)
    text_data.train_tokenizer(some_documents(), vocab_size=300).save_pretrained(tmp_path / "model")
    make_model("window", dtype=torch.float32, vocab_size=300).save_pretrained(tmp_path / "model")
    text, short = tmp_path / "text.txt", ["--steps", "1", "--batch-size", "2", "--sequence-length"]
    text.write_text("".join(some_documents(60)))
    run = [str(tmp_path / "model"), "--data", str(text), "--output", str(tmp_path / "state.safetensors"), *short]
    assert finetune_state.main([*run, str(window)]) == 2
    assert f"windows and sinks hold {window} tokens" in capsys.readouterr().err
    assert finetune_state.main([*run, str(window + 1)]) == 0


def test_a_learned_state_that_no_layer_reads_is_no_error(make_model, random_ids, assert_same):
    ids = random_ids(1, 5)
    assert_same(make_model("softmax", learned_state=True)(ids).logits, make_model("softmax")(ids).logits)
