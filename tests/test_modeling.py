"""The model classes: saving, initialisation, precision, checkpointing, losses, heads, presets, errors."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_interdomain import (
    InterdomainCache,
    InterdomainForCausalLM,
    InterdomainForSequenceClassification,
    InterdomainModel,
    InterdomainStaticCache,
)
from modeling_interdomain.layers.convolution import CausalConv1d
from modeling_interdomain.layers.rotary import InterdomainRotaryEmbedding
from modeling_interdomain.layers.versions import CACHE_NAME
from modeling_interdomain.mixers.interdomain.configuration import STARTS
from modeling_interdomain.mixers.interdomain.mixer import InterdomainMixer
from modeling_interdomain.ops.experts import entry as op_experts
from tests.conftest import EACH_MIXER, LENGTHENED
from tests.test_layer_losses import EVERY_KEY

RECURRENCE = ("log_dt", "log_a_real", "a_imag", "B", "C")
PRESETS = Path(__file__).parents[1] / "configuration"
CLASSES = {
    "AutoModel": (AutoModel, InterdomainModel),
    "AutoModelForCausalLM": (AutoModelForCausalLM, InterdomainForCausalLM),
    "AutoModelForSequenceClassification": (AutoModelForSequenceClassification, InterdomainForSequenceClassification),
}


def _recurrence(model) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if name.split(".")[-1] in RECURRENCE}


def _loss_and_gradients(model, ids, **inputs):
    model.zero_grad()
    loss = model(ids, labels=ids, **inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


# Saving and loading.


@pytest.mark.parametrize("name", CLASSES)
def test_save_and_load_bit_for_bit(name, make_model, tmp_path, random_ids):
    auto_class, model_class = CLASSES[name]
    model = make_model("interdomain-softmax", model_class, dtype=torch.float32, num_labels=3)
    model.save_pretrained(tmp_path)
    loaded, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class
    assert not any(info.values())
    assert not loaded.training
    for (name, before), (other, after) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    for (name, before), (other, after) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
        assert name == other
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    ids = random_ids(2, 9)
    torch.testing.assert_close(loaded(ids)[0], model(ids)[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["softmax", "grouped", "normalized", "diagonal", "identity", "rope-before", "gated"])
def test_save_and_load_variants(name, make_model, tmp_path, random_ids):
    model = make_model(name, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict() | {"architectures": ["InterdomainForCausalLM"]}
    torch.testing.assert_close(loaded(random_ids(2, 9)).logits, model(random_ids(2, 9)).logits, rtol=0, atol=0)


@pytest.mark.parametrize("asked", [torch.float64, "auto"], ids=str)
def test_a_model_in_float64_stays_in_it(each_mixer, asked, tmp_path, random_ids):
    """Recurrences and learned states too: they are kept from narrower dtypes alone."""
    if {"full_attention"} != set(each_mixer.config.layer_types):
        each_mixer.add_learned_state()
    ids, parameters = random_ids(2, 9), dict(each_mixer.named_parameters())
    each_mixer.double().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=asked)
    assert all(x.equal(parameters[name]) for name, x in loaded.named_parameters())
    assert {x.dtype for x in loaded.parameters()} == {torch.float64}
    # Some CPUs add products of numbers at other addresses in another order; in float32 logits differ by 1e-7.
    torch.testing.assert_close(loaded(ids).logits, each_mixer(ids).logits, rtol=0, atol=1e-12)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {x.dtype for name, x in half.named_parameters() if ".recurrence." in name or "first_state" in name}
    assert kept <= {torch.float32}


def test_body_of_a_language_model_loads_alone(make_model, tmp_path, random_ids):
    model = make_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path)
    expected = model.model(random_ids(2, 5)).last_hidden_state
    torch.testing.assert_close(body(random_ids(2, 5)).last_hidden_state, expected, rtol=0, atol=0)


def test_classifier_from_a_language_model_initialises_its_head_alone(make_model, tmp_path):
    model = make_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=7, output_loading_info=True
    )
    assert info["missing_keys"] == {"score.weight"}
    torch.testing.assert_close(classifier.model.state_dict(), model.model.state_dict(), rtol=0, atol=0)
    assert classifier.score.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_tied_embeddings(make_model, tmp_path, random_ids):
    model = make_model(tie_word_embeddings=True, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(loaded(random_ids(1, 5)).logits, model(random_ids(1, 5)).logits, rtol=0, atol=0)


# Initialisation.


def _assert_initialised(model):
    config = model.config
    residual = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert parameter.std().item() == pytest.approx(residual, rel=0.1), name
        elif name.endswith(("proj.weight", "embed_tokens.weight", "lm_head.weight")):
            assert parameter.std().item() == pytest.approx(config.initializer_range, rel=0.1), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("conv.weight"):
            assert parameter.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.1), name
            assert parameter.abs().max() <= 0.5
    for module in model.modules():
        if isinstance(module, InterdomainMixer):
            _assert_recurrence_initialised(module)


def _assert_recurrence_initialised(mixer):
    values = {name.split(".")[-1]: p.detach().double() for name, p in _recurrence(mixer).items()}
    size = mixer.config.state_size
    modes = torch.arange(size, dtype=torch.float64)
    torch.testing.assert_close(values["log_a_real"].exp(), torch.full_like(values["log_a_real"], 0.5))
    expected = (size / math.pi * (size / (2 * modes + 1) - 1)).expand_as(values["a_imag"])
    torch.testing.assert_close(values["a_imag"], expected, rtol=1e-6, atol=1e-5)
    assert values["log_dt"].min() >= math.log(1e-3)
    assert values["log_dt"].max() <= math.log(1e-1)
    assert values["log_dt"].std() > 0
    rate = torch.complex(-values["log_a_real"].exp(), values["a_imag"])
    hold = (torch.exp(values["log_dt"].exp()[:, None] * rate) - 1) / rate
    torch.testing.assert_close(values["B"], torch.view_as_real(hold), rtol=1e-4, atol=1e-6)
    assert values["C"].std().item() == pytest.approx(0.25 / math.sqrt(2 * size), rel=0.1)
    assert all((p == 0).all() for name, p in mixer.named_parameters() if name.endswith("bias"))


@pytest.fixture
def wide_config(make_config):
    """`wide_config(name)`: wide enough for statistics."""
    shape = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "state_size": 24}
    return lambda name="interdomain-softmax": make_config(name, **shape, state_dtype="float32", start="random")


@pytest.mark.parametrize("name", ["interdomain-softmax", "softmax", "gated", "rope-after"])
@pytest.mark.parametrize("how", ["constructor", "from-config"])
def test_initialisation(name, how, wide_config):
    torch.manual_seed(0)
    make = InterdomainForCausalLM if how == "constructor" else AutoModelForCausalLM.from_config
    _assert_initialised(make(wide_config(name)))


def test_initialisation_of_what_a_checkpoint_lacks(wide_config, tmp_path):
    model = InterdomainForCausalLM(wide_config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    state = {name: x for name, x in model.state_dict().items() if "token_mixer" not in name and "mlp" not in name}
    saved = set(state)
    model.save_pretrained(tmp_path, state_dict=state)
    torch.manual_seed(0)
    loaded = InterdomainForCausalLM.from_pretrained(tmp_path)
    assert all((parameter == 7).all() == (name in saved) for name, parameter in loaded.named_parameters())
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            if name in saved:
                parameter.copy_(InterdomainForCausalLM(wide_config()).state_dict()[name])
    _assert_initialised(loaded)


def test_initialisation_of_a_bare_mixer(wide_config):
    torch.manual_seed(0)
    mixer = InterdomainMixer(wide_config(), layer_idx=0)
    _assert_recurrence_initialised(mixer)
    assert all(p.isfinite().all() for p in mixer.parameters())


def test_initialisation_repeats_with_the_seed(make_config):
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(InterdomainForCausalLM(make_config("interdomain-softmax")))
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=0, atol=0)


# Precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_recurrence_stays_float32_when_loaded(dtype, make_model, tmp_path):
    model = make_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in _recurrence(loaded).values()} == {torch.float32}
    torch.testing.assert_close(_recurrence(loaded), _recurrence(model), rtol=0, atol=0)
    others = {p.dtype for name, p in loaded.named_parameters() if name not in _recurrence(loaded)}
    assert others == {dtype}


@pytest.mark.parametrize("how", ["to-bfloat16", "to-float16", "half", "bfloat16", "from-config"])
def test_recurrence_stays_float32_when_converted(how, make_model, make_config):
    model = make_model(dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in _recurrence(model).items()}
    convert = {
        "to-bfloat16": lambda: model.to(torch.bfloat16),
        "to-float16": lambda: model.to(dtype=torch.float16),
        "half": model.half,
        "bfloat16": model.bfloat16,
        "from-config": lambda: AutoModelForCausalLM.from_config(make_config(), dtype=torch.bfloat16),
    }
    converted = convert[how]()
    assert {p.dtype for p in _recurrence(converted).values()} == {torch.float32}
    assert converted.lm_head.weight.dtype in (torch.bfloat16, torch.float16)
    if how != "from-config":
        torch.testing.assert_close({n: p.detach() for n, p in _recurrence(converted).items()}, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["softmax", "rope-after"])
def test_rotary_angles_survive_a_conversion(name, make_model, random_ids, assert_same):
    model = make_model(name, dtype=torch.float32)
    rotary = next(iter(model.model.rotary_embs.values()))
    hidden_states, positions = torch.zeros(1, 4, 8), torch.tensor([[0, 10, 100, 2000]])
    before = rotary(hidden_states, positions)
    model.to(torch.bfloat16)
    assert_same(rotary(hidden_states, positions), before)


def test_double_and_back(make_model):
    model = make_model(dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    model.float()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close({n: p.detach() for n, p in model.named_parameters()}, before, rtol=0, atol=0)


def test_gradients_keep_the_dtype_of_their_parameters(make_model, random_ids):
    model = make_model(dtype=torch.float32)
    model(random_ids(1, 5), labels=random_ids(1, 5)).loss.backward()
    model.to(torch.bfloat16)
    assert all(p.grad.dtype == p.dtype for p in model.parameters())
    torch.optim.AdamW(model.parameters()).step()


@pytest.mark.parametrize("name", ["interdomain", "interdomain-softmax", "rope-before"])
def test_bfloat16_saves_and_loads(name, make_model, tmp_path, random_ids):
    model = make_model(name, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(loaded(random_ids(2, 9)).logits, model(random_ids(2, 9)).logits, rtol=0, atol=0)


@pytest.fixture
def choose_again(monkeypatch):
    """`choose_again()`: from then on layers use the experts of their first forward, whose scores were not rounded."""
    best_pairs, places = op_experts._best_pairs, []

    def note(*arguments):
        found = best_pairs(*arguments)
        places.append(found[1:])
        return found

    def recall(first, second, count):
        i, j = places.pop(0)
        return first.gather(-1, i) + second.gather(-1, j), i, j

    monkeypatch.setattr(op_experts, "_best_pairs", note)
    return lambda: monkeypatch.setattr(op_experts, "_best_pairs", recall)


@pytest.mark.parametrize("how", ["parameters", "autocast"])
def test_bfloat16_is_close_to_float32(model, how, random_ids, choose_again):
    ids = random_ids(2, 24)
    model.float()
    with torch.no_grad():
        expected = model(ids).logits
        choose_again()
        if how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                actual = model(ids).logits
        else:
            actual = model.to(torch.bfloat16)(ids).logits
    assert actual.dtype == torch.bfloat16
    error = (actual.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.05


# Training.


def test_every_parameter_gets_a_gradient(any_model, random_ids):
    gradients = _loss_and_gradients(any_model.train(), random_ids(2, 12))[1:]
    for (name, parameter), gradient in zip(any_model.named_parameters(), gradients, strict=True):
        assert gradient.isfinite().all(), name
        # What is added to all scores of keys orders them no differently.
        assert gradient.abs().sum() > 0 or name.endswith("scorer.bias_2"), name
        assert gradient.shape == parameter.shape


@pytest.mark.parametrize("name", ["interdomain", "softmax"])
def test_gradient_checkpointing_is_given_no_cache(name, make_model, random_ids):
    """Layers would read on as if nothing had been before: Transformers takes the cache from them."""
    model, ids = make_model(token_mixers=name).eval(), random_ids(1, 20)
    expected = model(ids, use_cache=True)
    cache = InterdomainCache(model.config)
    model(ids[:, :10], past_key_values=cache)
    model.train().gradient_checkpointing_enable()
    message = (
        r"^Gradient checkpointing reads no cache in training: call eval\(\) before generate\(\), or leave "
        r"past_key_values out\.$"
    )
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model(ids[:, 10:], past_key_values=cache)
    with pytest.raises(ValueError, match=message):
        model.generate(ids, max_new_tokens=2)
    with torch.no_grad():
        assert model(ids, use_cache=True).past_key_values is None
    assert cache.get_seq_length() == 10
    found = model.eval()(ids[:, 10:], past_key_values=cache)
    torch.testing.assert_close(found.logits, expected.logits[:, 10:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not-reentrant", "reentrant"])
@pytest.mark.parametrize("inputs", ["plain", "padded", "packed"])
def test_gradient_checkpointing_changes_nothing(model, reentrant, inputs, random_ids, assert_same):
    ids = random_ids(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[1, 5] = 0
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(2, -1)
    options = {"plain": {}, "padded": {"attention_mask": mask}, "packed": {"position_ids": positions}}[inputs]
    expected = _loss_and_gradients(model.train(), ids, **options)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_same(_loss_and_gradients(model, ids, **options), expected)


def test_training_makes_no_cache(model, random_ids):
    """A cache would hold on to the graph; without one, a model in training mode may decode."""
    assert model.train()(random_ids(1, 5)).get(CACHE_NAME) is None
    assert model.train()(random_ids(1, 5), use_cache=True).get(CACHE_NAME) is None
    with torch.no_grad():
        assert model.train()(random_ids(1, 5)).get(CACHE_NAME).get_seq_length() == 5
    assert model.eval()(random_ids(1, 5)).get(CACHE_NAME) is not None
    assert model.eval()(random_ids(1, 5), use_cache=False).get(CACHE_NAME) is None


def test_loss_is_the_mean_cross_entropy(model, random_ids, assert_same):
    ids = random_ids(3, 9)
    labels = ids.clone()
    labels[0, :4] = labels[2, 7:] = -100
    output = model(ids, labels=labels)
    log_probabilities = output.logits.log_softmax(-1)
    terms = [
        -log_probabilities[row, t, labels[row, t + 1]]
        for row in range(3)
        for t in range(8)
        if labels[row, t + 1] != -100
    ]
    assert_same(output.loss.double(), torch.stack(terms).mean(), rtol=1e-5, atol=1e-5)


def test_loss_over_accumulated_batches(model, random_ids, assert_same):
    ids = random_ids(2, 9)
    output = model(ids, labels=ids, num_items_in_batch=40)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / 40
    assert_same(output.loss.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)], ids=str)
def test_no_label_is_a_loss_of_zero_with_gradients(each_mixer, items, random_ids):
    """As such a batch adds to a step of several, and as a step that has no label at all."""
    ids = random_ids(2, 6)
    for inputs in ({"input_ids": ids, "labels": torch.full_like(ids, -100)}, {"input_ids": ids[:, :1]}):
        inputs.setdefault("labels", inputs["input_ids"])
        output = each_mixer.eval()(**inputs, num_items_in_batch=items)
        assert output.loss.item() == 0
        output.loss.backward()
        assert not any(p.grad.any() for p in each_mixer.parameters() if p.grad is not None)
        training = each_mixer.train()(**inputs, num_items_in_batch=items)
        assert training.loss.isfinite() and (training.layer_loss is not None or training.loss.item() == 0)


def test_a_loss_of_ones_own_counts_its_labels_itself(make_model, random_ids):
    model, ids = make_model(), random_ids(1, 4)
    model.loss_function = lambda logits, labels, vocab_size: (logits.mean() * 0 + labels).mean()
    assert model(ids, labels=ids.double() + 0.5).loss == (ids + 0.5).mean()


def test_model_learns_to_copy(make_config):
    torch.manual_seed(0)
    model = InterdomainForCausalLM(make_config("interdomain", state_dtype="float32", vocab_size=12)).train()
    ids = torch.randint(4, 12, (4, 6)).repeat(1, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


# Outputs.


def test_logits_to_keep(model, random_ids, assert_same):
    ids = random_ids(2, 7)
    logits = model(ids).logits
    assert_same(model(ids, logits_to_keep=3).logits, logits[:, -3:])
    assert_same(model(ids, logits_to_keep=torch.tensor([0, 4])).logits, logits[:, [0, 4]])
    assert model(ids, logits_to_keep=0).logits.shape == (2, 7, 48)


def test_hidden_states(model, random_ids, assert_same):
    output = model(random_ids(2, 7), output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert_same(output.hidden_states[0], model.get_input_embeddings()(random_ids(2, 7)))
    assert_same(model.lm_head(output.hidden_states[-1]), output.logits)
    first = model.model.layers[0]
    assert all(h.shape == (2, 7, 32) for h in output.hidden_states)
    assert (output.hidden_states[1] - output.hidden_states[0]).abs().max() > 0.1, first


def test_attentions_of_softmax_layers(make_model, random_ids):
    model = make_model("interdomain-softmax", attn_implementation="eager")
    _, attention = model(random_ids(2, 7), output_attentions=True).attentions
    assert attention.shape == (2, 4, 7, 7) and attention.triu(1).abs().max() == 0
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, 4, 7), check_dtype=False)


MAPPED = ["interdomain", "grouped", "normalized", "real-product", "rope-after", "single-input"]
MAPPED += ["ssd", "mamba2", "s4d", "s4d-grouped", "linear-readout"]


@pytest.mark.parametrize("name", MAPPED)
def test_attentions_of_recurrent_layers(name, make_model, random_ids, assert_same):
    """Times the values that went into the recurrence, they are its output: rows, pads, and packed documents."""
    model, seen = make_model(name, attn_implementation="eager"), {}
    place = model.config.layer_types.index("linear_attention")
    mixer = model.model.layers[place].token_mixer
    mixer.recurrence.register_forward_hook(
        lambda module, tokens, found: seen.update(value=mixer._written(tokens), output=found[0])
    )
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = mask[0, 5] = 0
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[place]
        values = seen["value"].repeat_interleave(weights.shape[1] // seen["value"].shape[2], dim=2)
        assert_same(torch.einsum("bhtj,bjhd->bthd", weights, values), seen["output"])
        padded = model(ids, attention_mask=mask, output_attentions=True).attentions[place]
        real = mask[0].bool()
        alone = model(ids[:1, real], output_attentions=True).attentions[place]
        assert_same(padded[:1, :, real][..., real], alone)
        assert padded[0, :, ~real].eq(0).all() and padded[0, ..., ~real].eq(0).all()
        ends = torch.tensor([0, 4, 9])
        packed = model(ids[:1], cu_seq_lens_q=ends, output_attentions=True).attentions[place]
        for start, stop in ((0, 4), (4, 9)):
            alone = model(ids[:1, start:stop], output_attentions=True).attentions[place]
            assert_same(packed[..., start:stop, start:stop], alone)
        assert packed[..., 4:, :4].eq(0).all()


@pytest.mark.parametrize("name", [*MAPPED, "softmax-interdomain", "cheems", "window-alone"])
def test_attentions_take_part_in_the_output(name, make_model, random_ids, assert_same):
    """A loss gives them gradients, and the parameters those it gives without maps; with pads and documents, too."""
    model, ids = make_model(name, attn_implementation="eager"), random_ids(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for inputs in ({}, {"attention_mask": mask}, {"seq_idx": (torch.arange(7) > 3).long().expand(2, -1)}):
        found = []
        for asked in (False, True):
            model.zero_grad()
            output = model(ids, output_attentions=asked, **inputs)
            for weights in output.attentions or ():
                weights.retain_grad()
            weights = torch.linspace(-1, 1, output.logits.numel()).view_as(output.logits)
            (output.logits * weights * mask[..., None] if inputs else output.logits * weights).sum().backward()
            found.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
        assert len(output.attentions) == 2 and all(x.grad.abs().max() > 0 for x in output.attentions)
        assert found[0].keys() == found[1].keys()
        for name, gradient in found[0].items():
            assert_same(found[1][name], gradient)


@pytest.mark.parametrize("name", ["interdomain-softmax", "softmax-interdomain", "cheems", "s4d-grouped"])
def test_attentions_with_a_static_cache_have_one_width(name, make_model, random_ids, assert_same):
    model, ids = make_model(name, attn_implementation="eager"), random_ids(2, 7)
    cache = InterdomainStaticCache(model.config, max_cache_len=9)
    with torch.no_grad():
        maps = model(ids, past_key_values=cache, output_attentions=True).attentions
        alone = model(ids, use_cache=False, output_attentions=True).attentions
    assert [tuple(x.shape) for x in maps] == [(2, 4, 7, 9)] * 2
    for found, expected in zip(maps, alone, strict=True):
        assert_same(found[..., :7], expected)
        assert found[..., 7:].eq(0).all()


def test_attentions_are_those_of_tokens_without_a_past(make_model, random_ids):
    model = make_model(attn_implementation="eager")
    cache = InterdomainCache(model.config)
    with torch.no_grad():
        assert len(model(random_ids(1, 5), past_key_values=cache, output_attentions=True).attentions) == 2
        assert model(random_ids(1, 5), past_key_values=cache, output_attentions=True).attentions == ()
        for name, maps in (("selective-scan", 0), ("hax", 1), ("cheems", 2), ("window", 0)):
            other = make_model(name, attn_implementation="eager")
            assert len(other(random_ids(1, 5), output_attentions=True).attentions) == maps
    model.config.output_attentions = True
    assert len(model(random_ids(1, 5)).attentions) == 2
    settings = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_attentions": True}
    found = model.generate(random_ids(1, 5), **settings).attentions
    assert [len(step) for step in found] == [2, 0, 0]


def test_embeddings_instead_of_ids(any_model, random_ids, assert_same):
    ids = random_ids(2, 7)
    embedded = any_model.get_input_embeddings()(ids)
    assert_same(any_model(inputs_embeds=embedded).logits, any_model(ids).logits)


def test_softmax_model_is_a_llama(make_model, left_padded, assert_same):
    model = make_model("softmax", num_key_value_heads=2)
    inputs = left_padded([9, 4, 6])
    real = inputs["attention_mask"].bool()
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    expected = _llama(model)(**inputs, position_ids=positions).logits
    # Llama normalises in float32.
    assert_same(model(**inputs).logits[real], expected[real], rtol=1e-4, atol=1e-4)


def _llama(model) -> LlamaForCausalLM:
    """The same of the library, for softmax layers."""
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    names += ["num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings"]
    llama = LlamaForCausalLM(LlamaConfig(**{name: getattr(model.config, name) for name in names})).double().eval()
    llama.load_state_dict({name.replace("token_mixer", "self_attn"): x for name, x in model.state_dict().items()})
    return llama


@pytest.mark.parametrize("kind", LENGTHENED)
def test_angles_of_the_length_are_those_of_a_llama(kind, make_model, random_ids, assert_same):
    """Whole, and after a cache, whose keys keep the angles they were read with."""
    model = make_model("softmax", rope_parameters=LENGTHENED[kind], max_position_embeddings=16)
    ids, pieces = random_ids(1, 30), [12, *[1] * 10, 8]
    with torch.no_grad():
        assert_same(model(ids).logits, _llama(model)(ids).logits, rtol=1e-4, atol=1e-4)
        ours, llama = InterdomainCache(model.config), _llama(model)
        theirs = DynamicCache(config=llama.config)
        for piece in ids.split(pieces, dim=1):
            found = model(piece, past_key_values=ours).logits
            assert_same(found, llama(piece, past_key_values=theirs).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LENGTHENED)
@pytest.mark.parametrize("name", ["softmax", "inner_function, mlp"])
def test_angles_of_the_length_are_those_of_each_text(name, kind, make_model, random_ids, assert_same):
    """Neither a neighbour, nor a document beside it, nor an earlier forward changes them, unlike in a Llama."""
    model = make_model(name, rope_parameters=LENGTHENED[kind], max_position_embeddings=16)
    short, long = random_ids(1, 10), random_ids(1, 40, seed=1)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :30] = 0
    with torch.no_grad():
        alone = [model(short).logits, model(long).logits]
        assert_same(model(short).logits, alone[0], rtol=0, atol=0)
        rows = model(torch.cat([torch.cat([long[:, :30], short], dim=1), long]), attention_mask=mask).logits
        assert_same([rows[:1, 30:], rows[1:]], alone)
        packed, ends = torch.cat([short, long], dim=1), torch.tensor([0, 10, 50])
        assert_same(model(packed, cu_seq_lens_q=ends).logits, torch.cat(alone, dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", LENGTHENED)
def test_angles_of_the_length_in_one_graph(kind, make_model, random_ids, assert_same):
    model = make_model("softmax", rope_parameters=LENGTHENED[kind], max_position_embeddings=16)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for ids in (random_ids(1, 10), random_ids(1, 40), random_ids(1, 12)):
            assert_same(compiled(ids, use_cache=False).logits, model(ids).logits)


def test_attention_implementations_agree(make_model, random_ids, assert_same):
    logits = [
        make_model("softmax-interdomain", attn_implementation=implementation)(random_ids(2, 7)).logits
        for implementation in ("eager", "sdpa")
    ]
    assert_same(*logits)


@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
def test_backends_agree(backend, make_model, random_ids, left_padded, assert_same):
    ids = random_ids(2, 11)
    models = [make_model("interdomain-softmax", backend=name) for name in ("auto", backend)]
    assert_same(*(model(ids).logits for model in models))
    outputs = [
        model.generate(
            **left_padded([5, 2]), max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        for model in models
    ]
    assert_same(*(torch.stack(output.logits) for output in outputs), rtol=1e-5, atol=1e-5)


def test_batch_rows_do_not_see_each_other(any_model, random_ids, assert_same):
    ids = random_ids(3, 9)
    assert_same(any_model(ids).logits[1:2], any_model(ids[1:2]).logits)


def test_tokens_do_not_see_the_future(any_model, random_ids, assert_same):
    ids = random_ids(2, 13)
    assert_same(any_model(ids).logits[:, :6], any_model(ids[:, :6]).logits)


# Sequence classification.


@pytest.fixture(params=["interdomain", "softmax-interdomain", "softmax"])
def classifier(request, make_model):
    return make_model(request.param, InterdomainForSequenceClassification, num_labels=4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("given", ["mask", "pad-token"])
def test_classification_reads_the_last_real_token(classifier, side, given, random_ids, assert_same):
    if given == "pad-token" and side == "left":
        pytest.skip("without a mask, pads on the left are tokens")
    lengths, ids = [7, 3, 1], random_ids(3, 7)
    slots = torch.arange(7)
    lengths_column = torch.tensor(lengths)[:, None]
    mask = slots >= 7 - lengths_column if side == "left" else slots < lengths_column
    ids = torch.where(mask, ids, classifier.config.pad_token_id)
    inputs = {"attention_mask": mask.long()} if given == "mask" else {}
    logits = classifier(ids, **inputs).logits
    alone = torch.cat([classifier(row[real][None]).logits for row, real in zip(ids, mask)])
    assert logits.shape == (3, 4)
    assert_same(logits, alone)


def test_classification_of_pad_tokens_marked_real(classifier, random_ids, assert_same):
    ids = random_ids(1, 5)
    ids[0, -1] = classifier.config.pad_token_id
    embedded = classifier.get_input_embeddings()(ids)
    marked = classifier(ids, attention_mask=torch.ones_like(ids)).logits
    assert_same(marked, classifier(inputs_embeds=embedded).logits)


def test_classification_losses(classifier, random_ids, assert_same):
    ids = random_ids(3, 6)
    labels = torch.tensor([2, 0, 3])
    output = classifier(ids, labels=labels)
    assert_same(output.loss.double(), F.cross_entropy(output.logits, labels), rtol=1e-5, atol=1e-5)
    several = (torch.arange(12).reshape(3, 4) % 2).double()
    classifier.config.problem_type = None
    output = classifier(ids, labels=several)
    expected = F.binary_cross_entropy_with_logits(output.logits, several)
    assert_same(output.loss.double(), expected, rtol=1e-5, atol=1e-5)


def test_classes_that_do_not_count(classifier, random_ids):
    ids, labels = random_ids(2, 5), torch.tensor([-100, 2])
    output = classifier(ids, labels=labels)
    assert_close = torch.testing.assert_close
    assert_close(output.loss, F.cross_entropy(output.logits[1:], labels[1:]), rtol=1e-5, atol=1e-5)
    loss = classifier(ids, labels=torch.full_like(labels, -100)).loss
    loss.backward()
    assert loss.item() == 0 and not any(p.grad.any() for p in classifier.parameters() if p.grad is not None)


WRONG_CLASSES = {
    "outside": (
        torch.tensor([1, 4]),
        None,
        "labels must lie between 0 and 3, or be -100 where nothing is asked; got 4.",
    ),
    "negative": (torch.tensor([1, -1]), None, "labels must lie between 0 and 3, or be -100 .*; got -1."),
    "too many": (torch.tensor([1, 2, 3]), None, r"labels must have shape \[2\] for \"single_.*, got \[3\]."),
    "another dtype": (torch.tensor([1, 2], dtype=torch.uint8), None, "labels must be of torch.int64, got torch.uint8"),
    "one class": (torch.tensor([0.5, 1.0]), None, r"labels must have shape \[2, 4\] for \"multi_.*, got \[2\]."),
    "whole": (
        torch.ones(2, 4, dtype=torch.long),
        "multi_label_classification",
        "labels must be floating-point numbers",
    ),
    "a list": ([1, 2], None, "labels must be a tensor, got list: torch.tensor.labels. makes one."),
}


@pytest.mark.parametrize(("labels", "kind", "message"), WRONG_CLASSES.values(), ids=WRONG_CLASSES)
def test_wrong_classes_are_refused(classifier, labels, kind, message, random_ids):
    classifier.config.problem_type = kind
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        classifier(random_ids(2, 5), labels=labels)


# Presets.

COUNTS = {
    "softmax-125m": 134_105_856,
    "interdomain-125m": 135_416_208,
}


def _count(config, **changes) -> int:
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return InterdomainForCausalLM(config).num_parameters()


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    assert _count(AutoConfig.from_pretrained(PRESETS / name)) == COUNTS[name]


@pytest.mark.parametrize("coefficient_matrix", ["full", "diagonal", "identity"])
@pytest.mark.parametrize("normalize", [False, True])
def test_parameter_counts_of_variants(coefficient_matrix, normalize):
    config = AutoConfig.from_pretrained(PRESETS / "interdomain-125m")
    count = _count(config, coefficient_matrix=coefficient_matrix, normalize=normalize)
    dense = 12 * 12 * 64 * 64 * 2
    missing = {"full": 0, "diagonal": dense - 12 * 12 * 64 * 2, "identity": dense}[coefficient_matrix]
    assert count == COUNTS["interdomain-125m"] - missing


@pytest.mark.parametrize("name", sorted(path.name for path in PRESETS.iterdir() if path.is_dir()))
def test_presets_are_complete(name):
    config = AutoConfig.from_pretrained(PRESETS / name)
    assert config.model_type == "interdomain"
    images = name.startswith("workshop")
    with torch.device("meta"):
        model = (AutoModelForSequenceClassification if images else AutoModelForCausalLM).from_config(config)
    assert type(model).__name__ == config.architectures[0]
    mechanism = name.split("-")[1 if name.startswith("workshop-softmax") else 0]
    mixers = {"single": "interdomain", "linear": "s4d", "workshop": "interdomain", "cheems": "ssd inner_function"}
    assert set(config.mixers_per_layer) == set(mixers.get(mechanism, mechanism).split())


@pytest.mark.parametrize("size", ["125m", "350m", "760m", "1.3b"])
def test_presets_differ_in_the_mixer_alone(size):
    ours, theirs = (
        AutoConfig.from_pretrained(PRESETS / f"{mixer}-{size}").to_dict() for mixer in ("interdomain", "softmax")
    )
    # Which there is nothing to start with in a softmax model.
    starts = {"start", "output_init_rms", "sparse_gate_init", "sparse_query_init", *STARTS["recall"]}
    different = {key for key in ours if ours[key] != theirs.get(key)} - starts
    assert different <= {"token_mixers", "layer_types", "rope_parameters", "rope_placement", "_name_or_path"}
    count = {"125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 24), "1.3b": (24, 2048, 32)}[size]
    assert (ours["num_hidden_layers"], ours["hidden_size"], ours["num_attention_heads"]) == count


# Inputs that are refused.


def test_no_tokens_is_refused(model):
    with pytest.raises(ValueError, match="T = 0"):
        model(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="B = 0"):
        model(torch.zeros(0, 2, dtype=torch.long))


def _inputs_that_cannot_be(ids):
    """What is given, and what is said of it."""
    some, far, ends = ids.float() / 10, torch.where(ids == ids[0, 0], 99, ids), torch.tensor([0, 2, 6])
    numbers = torch.tensor([[0, 0, 1, 1, 1, 1]])
    return [
        ({"input_ids": ids.tolist()}, "input_ids must be a tensor, got list: torch.tensor(input_ids) makes one."),
        ({"input_ids": ids.numpy()}, "input_ids must be a tensor, got ndarray: torch.tensor(input_ids) makes one."),
        ({"input_ids": None}, "Give exactly one of input_ids"),
        (
            {"input_ids": some},
            "input_ids must be of torch.int64 or torch.int32, got torch.float32: use input_ids.long().",
        ),
        ({"input_ids": ids.to(torch.uint8)}, "input_ids must be of torch.int64 or torch.int32, got torch.uint8: use"),
        ({"input_ids": far}, "input_ids must lie within the vocabulary, from 0 to 47; got 99."),
        ({"input_ids": ids - 50}, "input_ids must lie within the vocabulary, from 0 to 47; got -"),
        (
            {"input_ids": None, "inputs_embeds": torch.zeros(1, 6, 9)},
            "inputs_embeds [B, T, hidden_size = 32]; got [1, 6",
        ),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 6, 32).long()}, "inputs_embeds must be floating-point"),
        (
            {"attention_mask": [[1] * 6]},
            "attention_mask must be a tensor, got list: torch.tensor(attention_mask) makes",
        ),
        ({"position_ids": [[0] * 6]}, "position_ids must be a tensor, got list"),
        ({"cu_seq_lens_q": [0, 2, 6]}, "cu_seq_lens_q must be a tensor, got list"),
        ({"cu_seq_lens_q": ends.float()}, "cu_seq_lens_q must be whole numbers, got torch.float32."),
        (
            {"cu_seq_lens_q": torch.tensor([0, 9, 3, 6], dtype=torch.uint8)},
            "cu_seq_lens_q must increase strictly from 0",
        ),
        ({"cu_seq_lens_k": ends}, "cu_seq_lens_k alone keeps no documents apart: give the same ends as cu_seq_lens_q."),
        ({"cu_seq_lens_q": ends, "cu_seq_lens_k": ends + 1}, "cu_seq_lens_k must be those of cu_seq_lens_q, [0, 2, 6]"),
        ({"seq_idx": numbers.tolist()}, "seq_idx must be a tensor, got list"),
        (
            {"seq_idx": numbers, "cu_seq_lens_q": torch.tensor([0, 3, 6])},
            "seq_idx and cu_seq_lens_q contradict each other",
        ),
        ({"seq_idx": numbers * 0, "cu_seq_lens_q": ends}, "documents end at [6] or at [2, 6]: give one of them."),
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("model_class", [own for _, own in CLASSES.values()])
def test_what_cannot_be_read_is_named(each_mixer, model_class, random_ids, contents):
    """In one sentence, before anything is written."""
    model, ids = model_class(each_mixer.config).double().eval(), random_ids(1, 6)
    cache = model(ids, use_cache=True).past_key_values
    before = contents(cache)
    for inputs, message in _inputs_that_cannot_be(ids):
        packed = not {"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"}.isdisjoint(inputs)
        with pytest.raises((ValueError, TypeError)) as error:
            model(**{"input_ids": ids, "past_key_values": None if packed else cache} | inputs)
        assert message in str(error.value) and "\n" not in str(error.value), inputs
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


def test_labels_that_cannot_be_are_named(each_mixer, random_ids, contents):
    ids = random_ids(1, 6)
    cache = each_mixer(ids, use_cache=True).past_key_values
    before = contents(cache)
    for inputs, message in [
        ({"labels": ids + 48}, "labels must lie between 0 and 47, or be -100 where nothing is asked; got "),
        ({"labels": ids - 99}, "labels must lie between 0 and 47, or be -100 where nothing is asked; got -"),
        ({"labels": ids.tolist()}, "labels must be a tensor, got list: torch.tensor(labels) makes one."),
        ({"labels": ids.int()}, "labels must be of torch.int64, got torch.int32: use labels.long()."),
        ({"labels": ids, "shift_labels": ids + 48}, "shift_labels must lie between 0 and 47"),
        (
            {"labels": ids, "shift_labels": ids[:, 1:]},
            "shift_labels must have the shape of the tokens, [1, 6], got [1, 5]",
        ),
        ({"logits_to_keep": -1}, "logits_to_keep must be a number of tokens, 0 for all, or their places; got -1."),
        ({"logits_to_keep": 0.5}, "logits_to_keep must be a number of tokens, 0 for all, or their places; got 0.5."),
        ({"logits_to_keep": None}, "logits_to_keep must be a number of tokens, 0 for all, or their places; got None."),
        ({"logits_to_keep": True}, "logits_to_keep must be a number of tokens, 0 for all, or their places; got True."),
        (
            {"labels": ids, "logits_to_keep": torch.tensor([0, 3])},
            "labels must have the shape of the 2 tokens, whose logits are kept, [1, 2], got [1, 6]",
        ),
        (
            {"labels": ids[:, :5], "logits_to_keep": ids[0] >= 0},
            "labels must have the shape of the tokens, [1, 6], got [1, 5]",
        ),
    ]:
        with pytest.raises((ValueError, TypeError)) as error:
            each_mixer(ids, past_key_values=cache, **inputs)
        assert message in str(error.value) and "\n" not in str(error.value), inputs
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
    ignored = each_mixer(ids, labels=torch.where(ids > 9, -1, ids), ignore_index=-1)
    assert ignored.loss.isfinite()
    first = torch.cat([ids[:, :1] + 99, ids[:, 1:]], dim=1)  # which nobody is asked for
    assert each_mixer(ids, labels=first).loss == each_mixer(ids, labels=ids).loss


# Keywords.


def test_names_of_other_libraries_are_taken(each_mixer, random_ids, assert_same, contents):
    ids, ends = random_ids(1, 9), torch.tensor([0, 4, 9], dtype=torch.int32)
    caches = [InterdomainCache(each_mixer.config) for _ in range(2)]
    with torch.no_grad():
        packed = [each_mixer(ids, **{name: ends}).logits for name in ("cu_seq_lens_q", "cu_seqlens")]
        assert_same(*packed, rtol=0, atol=0)
        logits = [
            each_mixer(ids, **{name: cache}).logits
            for name, cache in zip(("past_key_values", "cache_params"), caches, strict=True)
        ]
    assert_same(*logits, rtol=0, atol=0)
    torch.testing.assert_close(contents(caches[1]), contents(caches[0]), rtol=0, atol=0)
    with pytest.raises(TypeError, match="^cu_seqlens is another name of cu_seq_lens_q: give one of them.$"):
        each_mixer(ids, cu_seqlens=ends, cu_seq_lens_q=ends)


@pytest.mark.each_value
@pytest.mark.parametrize("model_class", [own for _, own in CLASSES.values()])
def test_unknown_keywords_are_refused(each_mixer, model_class, random_ids):
    model, ids = model_class(each_mixer.config).double().eval(), random_ids(1, 5)
    for name in ("inference_params", "cu_seqlens_q", "atention_mask", "output_router_logits"):
        with pytest.raises(
            TypeError, match=f"^{model_class.__name__} does not know {name}, which would have no effect"
        ):
            model(ids, **{name: True})
    attention = set(model.config.layer_types) == {"full_attention"}
    if attention:
        model(ids, is_causal=False)
    else:
        with pytest.raises(ValueError, match="^is_causal=False needs attention to all tokens in all layers"):
            model(ids, is_causal=False)
    # What the library, its Trainer, TRL, PEFT, collators and tokenizers hand over to any model.
    ends = torch.tensor([0, 5], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone(), "max_length_q": 5, "max_length_k": 5}
    usual = {"num_items_in_batch": torch.tensor(4), "token_type_ids": torch.zeros_like(ids), "cache_position": ids[0]}
    more = {"return_dict": True, "output_hidden_states": True, "output_attentions": False, "is_causal": True}
    none = {"cache_params": None, "inference_params": None, "output_router_logits": False}
    output = model(
        ids, seq_idx=torch.zeros_like(ids, dtype=torch.int32), use_cache=False, **packed, **usual, **more, **none
    )
    torch.testing.assert_close(output[0], model(ids, use_cache=False)[0])


def test_the_base_model_takes_what_is_for_its_head(make_model, random_ids):
    """As TRL's trainer for distillation calls it, which multiplies with the head itself."""
    base, ids = make_model("interdomain").model, random_ids(1, 5)
    assert base(ids, logits_to_keep=2).last_hidden_state.equal(base(ids).last_hidden_state)
    classifier = make_model("interdomain", InterdomainForSequenceClassification)
    with pytest.raises(TypeError, match="does not know logits_to_keep, which would have no effect"):
        classifier(ids, logits_to_keep=2)


def test_places_of_logits_are_those_that_the_head_takes(make_model, random_ids):
    """A list, a tuple, and a tensor, with labels of that number; of no rows something else is said."""
    model, ids = make_model("interdomain"), random_ids(2, 5)
    expected = model(ids, labels=ids[:, 1:3], logits_to_keep=torch.tensor([1, 2])).loss
    for places in ([1, 2], (1, 2), torch.arange(5).sub(1).bool().logical_and(torch.arange(5) < 3)):
        kept = model(ids, labels=ids[:, : len(model(ids, logits_to_keep=places).logits[0])], logits_to_keep=places)
        assert kept.loss.isfinite()
    assert model(ids, labels=ids[:, 1:3], logits_to_keep=(1, 2)).loss == expected
    with pytest.raises(ValueError, match="input_ids must hold at least one row, got B = 0"):
        model(ids[:0], labels=ids[:0])
    with pytest.raises(ValueError, match="0 for all, or their places; got 3"):
        model(ids, labels=ids, logits_to_keep=torch.tensor(3))


def test_generate_hands_its_own_keywords_on(each_mixer, random_ids):
    ids = each_mixer.generate(random_ids(1, 3), max_new_tokens=2, tokenizer=object())
    assert ids.shape == (1, 5)


def test_what_others_have_written_names_its_keywords(make_model, random_ids, monkeypatch):
    """An attention function, as the library documents it, and a mixer."""

    def scaled(module, query, key, value, attention_mask, loudness=1.0, **kwargs):
        output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output * loudness, weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "scaled", scaled)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "scaled", sdpa_mask)
    model, ids = make_model("interdomain-softmax", attn_implementation="scaled"), random_ids(1, 5)
    assert not torch.allclose(model(ids, loudness=2.0).logits, model(ids).logits)
    with pytest.raises(TypeError, match="does not know loudness"):
        make_model("interdomain-softmax")(ids, loudness=2.0)


def test_other_ranks_are_refused(model, random_ids):
    ids = random_ids(1, 3)
    for wrong in ({"input_ids": ids[0]}, {"input_ids": ids[None]}, {"inputs_embeds": torch.zeros(3, 8)}):
        with pytest.raises(ValueError, match=r"input_ids must have shape \[B, T\], or inputs_embeds"):
            model(**wrong)


def test_ids_and_embeddings_together_are_refused(model, random_ids):
    ids = random_ids(1, 3)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


def test_mask_of_numbers_in_four_dimensions_is_refused(recurrent_model, random_ids):
    """One of ones and zeros, which says nothing of which is seen; what a mask may say is in test_padding.py."""
    with pytest.raises(ValueError, match=r"attention_mask \[B, 1, T, T\] may do no more than let texts fork"):
        recurrent_model(random_ids(2, 5), attention_mask=torch.ones(2, 1, 5, 5).tril())


def test_mask_of_four_dimensions_for_softmax(make_model, random_ids, assert_same):
    model = make_model("softmax")
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    assert_same(model(random_ids(2, 5), attention_mask=mask).logits, model(random_ids(2, 5)).logits)


MASKS = {"narrow": (2, 4), "wide": (2, 7), "other-batch": (3, 5), "one-row": (1, 5), "one-dimension": (5,)}


@pytest.mark.parametrize("positions", [False, True], ids=["default-positions", "given-positions"])
@pytest.mark.parametrize("shape", MASKS)
def test_mask_of_another_shape_is_refused(model, shape, positions, random_ids):
    mask = torch.ones(MASKS[shape], dtype=torch.long)
    mask[..., 0] = 0
    inputs = {"position_ids": torch.arange(5).expand(2, -1)} if positions else {}
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        model(random_ids(2, 5), attention_mask=mask, **inputs)


@pytest.mark.parametrize("shape", [(1, 5), (3, 6), (6,)], ids=str)
def test_positions_of_another_shape_are_refused(model, shape, random_ids):
    with pytest.raises(ValueError, match=r"position_ids must have shape \[B, T\] = \[2, 6\] or \[1, 6\], got"):
        model(random_ids(2, 6), position_ids=torch.zeros(shape, dtype=torch.long))
    with pytest.raises(ValueError, match=r"position_ids must have shape \[B, T\] = \[1, 7\], got"):
        model(random_ids(1, 7), position_ids=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("shape", [(2, 4), (3, 6), (12,)], ids=str)
def test_labels_of_another_shape_are_refused(model, shape, random_ids, contents):
    cache = model(random_ids(2, 5), use_cache=True).past_key_values
    before = contents(cache)
    with pytest.raises(ValueError, match=r"labels must have the shape of the tokens, \[2, 6\], got"):
        model(random_ids(2, 6), labels=torch.zeros(shape, dtype=torch.long), past_key_values=cache)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)
    last = model(random_ids(2, 6), labels=random_ids(2, 4), logits_to_keep=4)
    assert last.loss.isfinite()
    kept = r"labels must have the shape of the 4 last tokens, whose logits are kept, \[2, 4\], got "
    with pytest.raises(ValueError, match=kept):
        model(random_ids(2, 6), labels=random_ids(2, 6), logits_to_keep=4)


@pytest.mark.parametrize("labelled", [False, True], ids=["scores", "loss"])
def test_the_number_of_kept_logits_may_change_in_a_graph(labelled, make_model, random_ids):
    """The checks of labels make no sentence where there is nothing to say: a graph could not hold it."""
    model, ids = make_model("no-convolution"), random_ids(2, 9)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for count in (2, 3, 5):
        inputs = {"labels": ids[:, -count:]} if labelled else {}
        with torch.no_grad():
            found, expected = (each(ids, logits_to_keep=count, **inputs) for each in (compiled, model))
        torch.testing.assert_close(found.logits, expected.logits)
        assert found.logits.shape[1] == count and (found.loss is None) is not labelled


def test_mask_without_the_past_is_refused(model, random_ids, contents):
    cache = model(random_ids(2, 5), use_cache=True).past_key_values
    before = contents(cache)
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        model(random_ids(2, 3), attention_mask=torch.ones(2, 3, dtype=torch.long), past_key_values=cache)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


ENDS = {
    "no-start": [2, 6],
    "too-short": [0, 3, 5],
    "too-long": [0, 3, 8],
    "empty-document": [0, 3, 3, 6],
    "decreasing": [0, 4, 2, 6],
    "empty": [],
    "one-end": [0],
    "no-list": 6,
}


@pytest.mark.parametrize("ends", ENDS)
def test_wrong_ends_of_documents_are_refused(model, ends, random_ids):
    with pytest.raises(ValueError, match="cu_seq_lens_q must increase strictly from 0 to T = 6"):
        model(random_ids(1, 6), cu_seq_lens_q=torch.tensor(ENDS[ends], dtype=torch.int32))


def test_ends_of_documents_with_a_batch_are_refused(model, random_ids):
    with pytest.raises(ValueError, match="cu_seq_lens_q.*B = 2"):
        model(random_ids(2, 6), cu_seq_lens_q=torch.tensor([0, 6]))


def test_ends_of_documents_with_a_cache_are_refused(model, random_ids, contents):
    cache = model(random_ids(1, 5), use_cache=True).past_key_values
    before = contents(cache)
    with pytest.raises(ValueError, match="cannot continue from past_key_values"):
        model(random_ids(1, 4), cu_seq_lens_q=torch.tensor([0, 4]), past_key_values=cache)
    torch.testing.assert_close(contents(cache), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in (*EACH_MIXER, "delta-rule", "window-alone") if name != "hax"])
def test_an_ensemble_in_one_call(name, make_model, random_ids):
    """`torch.func.vmap` without gradients, and the models afterwards; HAX chooses by values, which has no batch."""
    models, ids = [make_model(name, seed=seed) for seed in range(2)], random_ids(2, 9)
    stacked = torch.func.stack_module_state(models)

    def logits(parameters, buffers):
        return torch.func.functional_call(models[0], (parameters, buffers), (ids,), {"use_cache": False}).logits

    with torch.no_grad():
        found = torch.func.vmap(logits)(*stacked)
        for model, one in zip(models, found, strict=True):
            torch.testing.assert_close(model(ids, use_cache=False).logits, one, rtol=1e-9, atol=1e-9)


def test_maps_of_packed_rows_stay_in_their_documents(make_model, random_ids):
    model, ids = make_model("interdomain"), random_ids(2, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    with torch.no_grad():
        found = model(ids, position_ids=positions, output_attentions=True).attentions[0]
        assert found.shape[:1] + found.shape[2:] == (2, 6, 6)
        for row, ends in enumerate([(0, 3, 6), (0, 4, 6)]):
            for start, end in itertools.pairwise(ends):
                alone = model(ids[row : row + 1, start:end], output_attentions=True).attentions[0]
                torch.testing.assert_close(found[row, :, start:end, start:end], alone[0], rtol=1e-9, atol=1e-12)
                assert not found[row, :, start:end, :start].any()


def test_parameters_in_one_flat_buffer(any_model, random_ids, assert_same):
    """At odd offsets, as optimizers and shards lay them out: where pairs of numbers are no complex ones in place."""
    ids, parameters = random_ids(2, 9), list(any_model.parameters())

    def everything():
        output = any_model(ids, labels=ids, output_attentions=True)
        found = torch.autograd.grad(output.loss, parameters, allow_unused=True)
        return [x for x in (output.logits, *found, *(output.attentions or ())) if x is not None]

    expected = everything()
    sizes = [p.numel() + p.numel() % 2 for p in parameters]
    buffer = parameters[0].new_empty(1 + sum(sizes))[1:]
    for p, room in zip(parameters, buffer.split(sizes), strict=True):
        p.data = room[: p.numel()].view(p.shape).copy_(p.data)
    assert {p.storage_offset() % 2 for p in parameters} == {1}
    for found, wanted in zip(everything(), expected, strict=True):
        assert_same(found, wanted)


def test_classification_behind_a_cache_reads_the_last_real_token_of_the_new_ones(make_model, random_ids, assert_same):
    classifier = make_model("interdomain", InterdomainForSequenceClassification, num_labels=4)
    ids, mask = random_ids(2, 6), torch.tensor([[1, 1, 1, 1, 1, 0], [1] * 6])
    cache = InterdomainCache(classifier.config)
    classifier(ids[:, :3], attention_mask=mask[:, :3], past_key_values=cache)
    found = classifier(ids[:, 3:], attention_mask=mask, past_key_values=cache).logits
    assert_same(found, classifier(ids, attention_mask=mask).logits)


def test_unknown_keywords_are_named_where_attention_is_eager(make_model, random_ids):
    model = make_model("softmax", attn_implementation="eager")
    with pytest.raises(TypeError, match="does not know attention_maks, which would have no effect"):
        model(random_ids(1, 4), attention_maks=torch.ones(1, 4))


def test_more_logits_to_keep_than_tokens_are_all(model, random_ids):
    ids = random_ids(2, 6)
    with torch.no_grad():
        found, whole = model(ids, labels=ids, logits_to_keep=9), model(ids, labels=ids)
    torch.testing.assert_close((found.loss, found.logits), (whole.loss, whole.logits))


def test_classes_may_be_a_column(make_model, random_ids):
    classifier = make_model("interdomain", InterdomainForSequenceClassification, num_labels=4)
    labels = torch.tensor([[2], [0]])
    with torch.no_grad():
        assert (
            classifier(random_ids(2, 5), labels=labels).loss == classifier(random_ids(2, 5), labels=labels[:, 0]).loss
        )


def test_ignored_labels_are_those_of_the_caller(make_model, random_ids):
    """In the share of a step that layers add, too."""
    model, ids = make_model(**EVERY_KEY).train(), random_ids(2, 12)
    ids[:, 6:] = 9
    labels = {mark: torch.where(ids == 9, mark, ids) for mark in (-100, -1)}
    for items in (None, torch.tensor(40)):
        given = {} if items is None else {"num_items_in_batch": items}
        usual = model(ids, labels=labels[-100], **given).loss
        torch.testing.assert_close(model(ids, labels=labels[-1], ignore_index=-1, **given).loss, usual)


def test_masks_by_kind_are_left_as_they_were_given(each_mixer, left_padded):
    inputs = left_padded([4, 7])
    embedded = each_mixer.get_input_embeddings()(inputs["input_ids"])
    masks = each_mixer.create_masks_for_generate(each_mixer.config, embedded, inputs["attention_mask"], None)
    before = dict(masks)
    with torch.no_grad():
        each_mixer(inputs["input_ids"], attention_mask=masks)
    assert masks.keys() == before.keys() and all(masks[name] is x for name, x in before.items())


def test_another_name_of_the_cache_may_be_none(make_model, random_ids):
    model = make_model()
    cache = InterdomainCache(model.config)
    model(random_ids(1, 4), past_key_values=cache, cache_params=None)
    assert int(cache.get_seq_length()) == 4


def test_angles_of_far_positions_are_exact(make_config):
    """In float32 an angle is off by thousandths there."""

    rotary = InterdomainRotaryEmbedding(make_config("rope-before", hidden_size=256), 64)
    positions = torch.tensor([[65_535, 1_000_003]])
    cos, sin = rotary(torch.zeros(1, dtype=torch.float64), positions)
    angles = positions[..., None].double() * rotary.inv_freq.double()
    torch.testing.assert_close(cos[..., :32], angles.cos())
    torch.testing.assert_close(sin[..., :32], angles.sin())


def test_a_kernel_of_one_token_starts_as_no_convolution(make_config):
    conv = CausalConv1d(5, 5, 1, groups=5)
    conv.start_parameters(make_config())
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(conv(x), x)
