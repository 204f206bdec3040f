"""PEFT: what it adapts by default, that every adapted weight learns, adapters saved, switched, mixed and merged."""

import copy
import subprocess
import sys
from functools import partial

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from modeling_interdomain import InterdomainCache, InterdomainForCausalLM, InterdomainForSequenceClassification
from modeling_interdomain.layers.convolution import CausalConv1d

# It hands its prompts and prefixes on as `past_key_values` and asks `generate()` for what is called so.
too_old = Version(transformers.__version__) >= Version("5.24") and Version(peft.__version__) < Version("0.22")
reason = "PEFT knows `cache`, Transformers 5.24's name, from 0.22 on"
with_its_cache = pytest.mark.xfail(too_old, reason=reason, strict=True)

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
CAUSAL = {"task_type": "CAUSAL_LM"}
# Adapters that change something from the start, in configurations that PEFT completes for one model.
LORA = {**CAUSAL, "r": 4, "init_lora_weights": False}
METHODS = {
    "lora": partial(LoraConfig, **LORA, target_modules="all-linear"),
    "dora": partial(LoraConfig, **LORA, target_modules="all-linear", use_dora=True),
    "ia3": partial(IA3Config, **CAUSAL, init_ia3_weights=False),
}
# What PEFT can adapt of a recurrence directly; the others have one dimension (log_dt) or four (a full C).
MATRICES = ["recurrence.log_a_real", "recurrence.a_imag", "recurrence.B"]


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def assert_all_learn(model, ids, labels=None):
    model.train()(input_ids=ids, labels=ids if labels is None else labels).loss.backward()
    idle = [name for name, p in trained(model).items() if p.grad is None or not p.grad.abs().sum() > 0]
    assert trained(model) and not idle
    model.zero_grad()
    model.eval()


def logits(model, input_ids, **inputs):
    with torch.no_grad():
        return model(input_ids=input_ids, **inputs).logits


def write(model, **inputs):
    return model.generate(**inputs, max_new_tokens=8, do_sample=False)


@torch.no_grad()
def disturb(model, seed=1):
    """Stands for training."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(model).values():
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


# ------------------------------------------------------------------------------------------ what is adapted


def test_defaults_wait_for_peft_and_find_it_whenever_it_comes():
    script = """
import sys
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
model = InterdomainForCausalLM(InterdomainConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
assert "peft" not in sys.modules
from peft import LoraConfig, get_peft_model
print(sorted(get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).peft_config["default"].target_modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == str(sorted(PROJECTIONS)), done.stderr


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        (LoraConfig(**CAUSAL), PROJECTIONS),
        (AdaLoraConfig(**CAUSAL, total_step=1), PROJECTIONS),
        (IA3Config(**CAUSAL), ["k_proj", "v_proj", "down_proj"]),
        (LNTuningConfig(**CAUSAL), ["input_layernorm", "post_attention_layernorm", "norm"]),
    ],
    ids=["lora", "adalora", "ia3", "ln"],
)
def test_defaults(make_model, config, modules):
    assert set(get_peft_model(make_model("s4d-grouped"), config).peft_config["default"].target_modules) == set(modules)


def test_users_own_defaults_stay(make_model, monkeypatch):
    table = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    monkeypatch.setitem(table, "interdomain", ["v_proj"])
    assert get_peft_model(make_model(), LoraConfig(**CAUSAL)).peft_config["default"].target_modules == {"v_proj"}


def test_projections_are_plain_linear_layers(any_model):
    """bitsandbytes leaves out all others, and GLoRA refuses them."""
    assert {type(module) for module in any_model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}


# ------------------------------------------------------------------------------------------ every one of them learns


def test_every_projection_learns(any_model, random_ids):
    projections = [name for name, module in any_model.model.named_modules() if isinstance(module, nn.Linear)]
    model = get_peft_model(any_model, METHODS["lora"]())
    assert len(trained(model)) == 2 * len(projections)
    assert_all_learn(model, random_ids(2, 9))


@pytest.mark.parametrize("method", ["dora", "ia3"])
def test_other_methods_learn(model, method, random_ids):
    assert_all_learn(get_peft_model(model, METHODS[method]()), random_ids(2, 9))


def test_all_parameters_of_a_recurrence_learn_and_are_saved(recurrent_model, random_ids, tmp_path, assert_same):
    base, ids = copy.deepcopy(recurrent_model), random_ids(2, 9)
    model = get_peft_model(recurrent_model, LoraConfig(**LORA, modules_to_save=["recurrence"]))
    assert_all_learn(model, ids)
    disturb(model)
    expected = logits(model, ids)
    with model.disable_adapter():
        assert_same(logits(model, ids), logits(base, ids))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    assert_same(logits(loaded, ids), expected)


@pytest.mark.parametrize("name", ["interdomain", "s4d", "diagonal"])
def test_low_rank_changes_of_a_recurrence(make_model, name, random_ids, assert_same):
    matrices = [*MATRICES, "recurrence.C"] if name == "diagonal" else MATRICES
    config = LoraConfig(**LORA, target_modules=["v_proj"], target_parameters=matrices)
    model, ids = get_peft_model(make_model(name), config), random_ids(2, 9)
    assert_all_learn(model, ids)
    expected = logits(model, ids)
    assert not torch.allclose(expected, logits(make_model(name), ids))
    assert_same(logits(model.merge_and_unload(), ids), expected)


@pytest.mark.parametrize(
    ("name", "parameter"), [("interdomain", "k_bias"), ("interdomain", "v_bias"), ("window", "q_map")]
)
def test_low_rank_changes_of_a_mixers_own_parameter(make_model, name, parameter, random_ids, advance, assert_same):
    """PEFT wraps the mixer for it."""
    config = LoraConfig(**LORA, target_modules=["o_proj"], target_parameters=[f"token_mixer.{parameter}"])
    model, ids = get_peft_model(make_model(name), config).eval(), random_ids(2, 9)
    whole, cache = logits(model, ids), InterdomainCache(model.config)
    pieces = [advance(model, cache, piece) for piece in (ids[:, :5], ids[:, 5:6], ids[:, 6:])]
    assert_same(torch.cat(pieces, dim=1), whole)
    assert_same(logits(model.merge_and_unload(), ids), whole)


def test_replicated_layers(make_model, random_ids, advance, assert_same):
    """PEFT copies layers and leaves the lists of the configuration, of which caches are made."""
    layers = LoraConfig(**LORA, target_modules=["o_proj"], layer_replication=[(1, 2), (0, 2)])
    model, ids = get_peft_model(make_model("interdomain-softmax"), layers).eval(), random_ids(2, 9)
    whole = model(ids, use_cache=False).logits
    for ask in (lambda: model(ids, use_cache=True), lambda: model.generate(ids, max_new_tokens=2)):
        with pytest.raises(ValueError, match=r"have \(Softmax, Interdomain, Softmax\): after PEFT's layer_replication"):
            ask()
    model.config.token_mixers = ["softmax", "interdomain", "softmax"]
    cache = InterdomainCache(model.config)
    assert_same(torch.cat([advance(model, cache, piece) for piece in (ids[:, :5], ids[:, 5:])], dim=1), whole)
    assert model.generate(ids, max_new_tokens=2).shape == (2, 11)


@pytest.mark.parametrize(("parameter", "dimensions"), [("log_dt", 1), ("C", 4)])
def test_what_peft_cannot_target(make_model, parameter, dimensions):
    if dimensions == 1 and Version(peft.__version__) < Version("0.21"):
        pytest.skip("PEFT 0.20 fails with an IndexError")
    config = LoraConfig(**LORA, target_modules=["v_proj"], target_parameters=[f"recurrence.{parameter}"])
    with pytest.raises(ValueError, match=f"initialized with {dimensions} dimensional Parameter, but only 2d and 3d"):
        get_peft_model(make_model(), config)


def test_convolutions_are_trained_whole(make_model, random_ids):
    with pytest.raises(ValueError, match="Targeting a CausalConv1d with groups=32 and rank 4"):
        get_peft_model(make_model(), LoraConfig(**LORA, target_modules=["q_conv"]))
    whole = ["q_conv", "k_conv", "k_norm", "v_norm"]
    model = get_peft_model(make_model(), LoraConfig(**LORA, modules_to_save=whole))
    assert {name for name in whole if any(name in trained_name for trained_name in trained(model))} == set(whole)
    assert_all_learn(model, random_ids(2, 9))


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd")
@pytest.mark.parametrize("name", ["interdomain-softmax", "s4d", "mamba2", "selective-scan", "hax"])
def test_low_rank_changes_of_convolutions(make_model, name, random_ids, assert_same, advance, monkeypatch):
    """Of a rank that all groups divide: whole, in pieces, token by token, and as PyTorch's own functions compute it."""
    base, ids = make_model(name), random_ids(2, 12)
    convolved = [part for part in base.modules() if isinstance(part, nn.Conv1d)]
    config = LoraConfig(**LORA | {"r": 160}, target_modules=["q_conv", "k_conv", "v_conv"])
    model = get_peft_model(copy.deepcopy(base), config).eval()
    assert len(trained(model)) == 2 * len(convolved)
    assert_all_learn(model, ids)
    expected = logits(model, ids)
    cache = InterdomainCache(model.config)
    parts = [advance(model, cache, part) for part in ids.split([5, 1, 3, 1, 2], dim=1)]
    assert_same(torch.cat(parts, dim=1), expected)
    with model.disable_adapter():
        assert_same(logits(model, ids), logits(base, ids))
    with pytest.raises(NotImplementedError, match="Merging is not supported"):
        model.merge_adapter()
    with monkeypatch.context() as patch:
        patch.setattr(CausalConv1d, "forward", nn.Conv1d.forward)
        assert_same(logits(model, ids), expected)
    assert not torch.allclose(expected, logits(base, ids))


@pytest.mark.parametrize("extra", [{}, {"modules_to_save": ["q_conv", "k_norm"]}], ids=["projections", "inputs too"])
def test_fused_kernels_see_adapters(make_model, extra, left_padded):
    """In Triton's interpreter: what a kernel reads is adapted, or it leaves the module to PyTorch."""
    pytest.importorskip("triton", reason="Triton runs the kernels")
    outputs, inputs = [], left_padded([4, 9])
    for backend in ("triton", "recurrent"):
        torch.manual_seed(0)
        base = make_model(dtype=torch.float32, state_dtype="float32", backend=backend)
        model = get_peft_model(base, LoraConfig(**LORA, target_modules="all-linear", **extra)).eval()
        disturb(model)
        outputs.append(logits(model, **inputs))
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(model, random_ids, assert_same, reentrant):
    model, ids = get_peft_model(model, METHODS["lora"]()), random_ids(2, 9)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in trained(model).values()])
        model.zero_grad()
    assert_same(gradients[1], gradients[0])


# ------------------------------------------------------------------------------------------ decoding


ADAPTED_RECURRENCE = {
    "modules_to_save": {"modules_to_save": ["recurrence"]},
    "target_parameters": {"target_parameters": MATRICES},
}


@pytest.mark.parametrize("extra", ADAPTED_RECURRENCE.values(), ids=ADAPTED_RECURRENCE)
@pytest.mark.parametrize("name", ["interdomain", "softmax-interdomain", "s4d"])
def test_an_adapted_recurrence_takes_tokens_back(make_model, name, extra, random_ids, guess_ahead):
    """Prompt lookup replays the tokens it keeps with the recurrence as it is adapted."""
    model = get_peft_model(make_model(name), LoraConfig(**LORA, target_modules=["v_proj"], **extra)).eval()
    disturb(model)
    ids = random_ids(1, 4).repeat(1, 3)
    expected = write(model, input_ids=ids)
    guess_ahead(expected)
    assert torch.equal(write(model, input_ids=ids, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize("extra", ADAPTED_RECURRENCE.values(), ids=ADAPTED_RECURRENCE)
def test_gradients_go_through_the_steps_of_a_cache(make_model, extra, random_ids, assert_same):
    model, ids = get_peft_model(make_model(), LoraConfig(**LORA, **extra)).eval(), random_ids(2, 5)
    model(input_ids=ids).logits[:, -1].sum().backward()
    whole = {name: p.grad for name, p in trained(model).items()}
    model.zero_grad()
    cache = InterdomainCache(model.config)
    for token in ids.split(1, dim=1):
        output = model(input_ids=token, past_key_values=cache)
    output.logits[:, -1].sum().backward()
    assert_same({name: p.grad for name, p in trained(model).items()}, whole)


@pytest.mark.parametrize("name", ["interdomain", "s4d-grouped"])
def test_a_token_mixer_trained_whole_decodes(make_model, name, random_ids, assert_same, advance):
    config = LoraConfig(**LORA, target_modules=["up_proj"], modules_to_save=["token_mixer"])
    model, ids = get_peft_model(make_model(name), config).eval(), random_ids(2, 9)
    disturb(model)
    cache = InterdomainCache(model.config)
    parts = [advance(model, cache, part) for part in ids.split([5, 1, 3], dim=1)]
    assert_same(torch.cat(parts, dim=1), logits(model, ids))


def test_repeated_layers(make_model, random_ids, assert_same, advance):
    config = LoraConfig(**LORA, target_modules=["up_proj", "o_proj"], layer_replication=[[0, 2], [1, 2]])
    model, ids = get_peft_model(make_model(), config).eval(), random_ids(2, 9)
    first, second, third = model.get_base_model().model.layers
    assert second.token_mixer.q_proj.weight is third.token_mixer.q_proj.weight is not first.token_mixer.q_proj.weight
    cache = InterdomainCache(model.config)
    parts = [advance(model, cache, part) for part in ids.split([5, 1, 3], dim=1)]
    assert_same(torch.cat(parts, dim=1), logits(model, ids))


# ------------------------------------------------------------------------------------------ adapters


@pytest.mark.parametrize("method", METHODS)
def test_merged_equals_unmerged(model, method, left_padded, assert_same):
    inputs = left_padded([4, 9])
    before = logits(model, **inputs)
    adapted = get_peft_model(model, METHODS[method]()).eval()
    expected, text = logits(adapted, **inputs), write(adapted, **inputs)
    assert not torch.allclose(expected, before)
    merged = adapted.merge_and_unload()
    assert type(merged) is InterdomainForCausalLM
    assert_same(logits(merged, **inputs), expected)
    assert torch.equal(write(merged, **inputs), text)


@pytest.fixture
def two_adapters(make_model):
    """A hybrid with the adapters "one" and "two"."""
    model = get_peft_model(make_model("softmax-interdomain"), METHODS["lora"](), adapter_name="one")
    model.add_adapter("two", METHODS["lora"]())
    return model.eval()


def test_adapters_are_saved_loaded_and_switched(two_adapters, make_model, random_ids, tmp_path, assert_same):
    ids, model = random_ids(2, 9), two_adapters
    with model.disable_adapter():
        assert_same(logits(model, ids), logits(make_model("softmax-interdomain"), ids))
    expected = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        expected[name] = logits(model, ids)
    assert not torch.allclose(expected["one"], expected["two"])
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_model("softmax-interdomain"), tmp_path / "one", adapter_name="one").eval()
    loaded.load_adapter(tmp_path / "two", adapter_name="two")
    for name in ("two", "one"):
        loaded.set_adapter(name)
        assert_same(logits(loaded, ids), expected[name])


def test_several_adapters_at_once(two_adapters, random_ids, assert_same):
    ids, model = random_ids(2, 9), two_adapters
    model.base_model.set_adapter(["one", "two"])
    expected = logits(model, ids)
    model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "both", combination_type="cat")
    model.set_adapter("both")
    assert_same(logits(model, ids), expected)
    assert_same(logits(model.merge_and_unload(["one", "two"]), ids), expected)


def test_every_row_its_own_adapter(two_adapters, left_padded, assert_same):
    """Rows with pads keep their places in the batch where a module looks for its adapter."""
    inputs, rows = left_padded([4, 9, 6]), ["one", "__base__", "two"]
    together = logits(two_adapters, **inputs, adapter_names=rows)
    text = write(two_adapters, **inputs, adapter_names=rows)
    for row, name in enumerate(rows):
        length = int(inputs["attention_mask"][row].sum())
        alone = {"input_ids": inputs["input_ids"][row : row + 1, -length:], "adapter_names": [name]}
        assert_same(together[row, -length:], logits(two_adapters, **alone)[0])
        assert torch.equal(text[row, -length - 8 :], write(two_adapters, **alone)[0])


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *((name, "all-linear") for name in ("selective-scan", "mamba2", "softmax-interdomain", "hax")),
        *(("selective-scan", [part]) for part in ("x_proj", "dt_proj")),
    ],
    ids=str,
)
def test_every_row_its_own_adapter_of_packed_documents(name, targets, make_model, random_ids, assert_same):
    """Also where a map reads tokens behind a convolution, as the steps of a selective scan."""
    how = LoraConfig(**LORA, target_modules=targets)
    model = get_peft_model(make_model(name), how, adapter_name="one")
    model.add_adapter("two", how)
    ids, rows = random_ids(3, 12), ["one", "__base__", "two"]
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(3, -1)
    together = logits(model.eval(), ids, position_ids=positions, adapter_names=rows)
    for row, name in enumerate(rows):
        alone = {"position_ids": positions[:1], "adapter_names": [name]}
        assert_same(together[row], logits(model, ids[row : row + 1], **alone)[0])


def test_classifiers(make_model, left_padded, tmp_path, assert_same):
    base = make_model("interdomain-softmax", InterdomainForSequenceClassification, num_labels=3)
    base.save_pretrained(tmp_path / "base")
    inputs = left_padded([4, 9])
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=4, init_lora_weights=False))
    assert "base_model.model.score.modules_to_save.default.weight" in trained(model)
    assert_all_learn(model, inputs["input_ids"], labels=torch.tensor([0, 2]))
    disturb(model)
    expected = logits(model, **inputs)
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", dtype=torch.float64)
    again = again.double()  # the recurrence too, which loading leaves in float32
    loaded = PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert_same(logits(loaded, **inputs), expected)


# ------------------------------------------------------------------------------------------ virtual tokens


@with_its_cache
def test_prompt_tuning(model, left_padded, assert_same):
    inputs = left_padded([4, 9])
    tuned = get_peft_model(model, PromptTuningConfig(**CAUSAL, num_virtual_tokens=3))
    assert_all_learn(tuned, inputs["input_ids"])
    disturb(tuned)
    prompt = tuned.get_prompt(batch_size=1)[0]
    text = write(tuned, **inputs)
    for row, length in enumerate([4, 9]):
        ids = inputs["input_ids"][row : row + 1, -length:]
        embeddings = torch.cat([prompt, model.get_input_embeddings()(ids)[0]])[None]
        output = logits(tuned, ids)
        assert_same(output, model(inputs_embeds=embeddings).logits)
        # `generate()` gives back only what it has added to embeddings.
        assert torch.equal(text[row, -8:], write(model, inputs_embeds=embeddings)[0, -8:])


def test_p_tuning(model, random_ids):
    tuned = get_peft_model(model, PromptEncoderConfig(**CAUSAL, num_virtual_tokens=3, encoder_hidden_size=8))
    assert_all_learn(tuned, random_ids(2, 9))
    assert write(tuned, input_ids=random_ids(2, 9)).shape == (2, 17)


@with_its_cache
def test_prefix_tuning_needs_keys_and_values(model, random_ids):
    """A state has no place for keys and values that no token made, and keys with a bias are wider than these."""
    refused = "linear_attention" in model.config.layer_types or model.config.dynamic_mask == "value"
    tuned, ids = get_peft_model(model, PrefixTuningConfig(**CAUSAL, num_virtual_tokens=3)), random_ids(2, 9)
    if not refused:
        assert_all_learn(tuned, ids)
        assert write(tuned, input_ids=ids).shape == (2, 17)
        return
    for use in (lambda: tuned(input_ids=ids, labels=ids), lambda: write(tuned, input_ids=ids)):
        with pytest.raises(ValueError, match=r"prefix tuning .*: use prompt tuning\)\.$"):
            use()


# ------------------------------------------------------------------------------------------ quantized models


@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_of_a_quantized_model(make_model, random_ids, tmp_path, bits):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes quantizes the model: `make test-oldest`")
    from transformers import BitsAndBytesConfig

    plain = make_model("softmax-interdomain", dtype=torch.float32, hidden_size=64, intermediate_size=64)
    plain.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4, bnb_4bit_quant_type="nf4")
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    kind = bitsandbytes.nn.Linear8bitLt if bits == 8 else bitsandbytes.nn.Linear4bit
    assert {type(m) for m in quantized.model.modules() if isinstance(m, nn.Linear)} == {kind}
    assert {p.dtype for name, p in quantized.named_parameters() if "recurrence" in name} == {torch.float32}
    ids = random_ids(2, 9)
    expected = logits(plain, ids)
    assert (logits(quantized, ids) - expected).std() < (0.05 if bits == 8 else 0.3) * expected.std()
    model = get_peft_model(peft.prepare_model_for_kbit_training(quantized), METHODS["lora"]())
    assert_all_learn(model, ids)
    assert write(model, input_ids=ids).shape == (2, 17)


def test_layers_in_another_order_than_the_configuration_take_no_cache(make_model, random_ids):
    model = make_model(token_mixers=["interdomain", "s4d"], start="random")
    cache = InterdomainCache(model.config)
    model.config.token_mixers = ["s4d", "interdomain"]
    with pytest.raises(ValueError, match="The configuration names layers .* that the model does not have"):
        model(random_ids(2, 5), past_key_values=cache)
    assert not int(cache.get_seq_length())
