"""A Llama whose layers become windows with a memory: what it computes without training, and what is refused."""

import json
import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from conversion import carry, choose, from_llama
from conversion.__main__ import main
from examples import text_data
from modeling_interdomain import InterdomainForCausalLM
from modeling_interdomain.mixers import unread
from tests.conftest import edit_config
from tests.test_conversion import LLAMAS, ids, save_llama, weights_of
from tests.test_examples import some_documents

WINDOWS = ("--window", 8, "--sinks", 2, "--state-size", 6)
FAST = ("grouped", "tied", "llama3")
ROTATIONS = [
    pytest.param(changes, id=name, marks=() if name in FAST else pytest.mark.slow)
    for name, changes in LLAMAS.items()
    if name != "dynamic"
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in some_documents(120)))
    return str(file)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a small Llama with its tokenizer."""
    folder = tmp_path_factory.mktemp("window") / "llama"
    save_llama(folder, num_key_value_heads=2)
    text_data.train_tokenizer(some_documents(), vocab_size=300).save_pretrained(folder)
    return folder


def convert(source, target, *options) -> int:
    return main(["from-llama", str(source), str(target), *map(str, options)])


def logits(model, length: int = 50) -> torch.Tensor:
    with torch.no_grad():
        return model(ids(length)).logits


def windowed_logits(llama, window: int, sinks: int, length: int = 50) -> torch.Tensor:
    """What the Llama says where every layer sees the last and the first tokens, by a mask."""
    far = torch.arange(length)[:, None] - torch.arange(length)
    seen = (far >= 0) & ((far < window) | (torch.arange(length) < sinks))
    mask = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return llama(ids(length), attention_mask=mask.expand(2, -1, -1, -1)).logits


@pytest.mark.parametrize("changes", ROTATIONS)
def test_up_to_window_and_sinks_the_logits_are_those_of_the_llama(tmp_path, changes):
    llama = save_llama(tmp_path / "llama", **changes)
    assert convert(tmp_path / "llama", tmp_path / "out", "--window", 40, "--sinks", 10) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(model) is InterdomainForCausalLM and model.config.token_mixers == ["window"] * 3
    torch.testing.assert_close(logits(model), logits(llama), rtol=1e-5, atol=1e-4)
    cache, pieces = None, []  # whole, and in pieces with a cache
    for piece in ids(50).split([20, 1, 1, 28], dim=1):
        with torch.no_grad():
            output = model(piece, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits(llama), rtol=1e-5, atol=1e-4)


def test_without_a_memory_it_is_the_windowed_llama(tmp_path):
    """Sinks in the window's own place are those of the text: with them at their distance only up to W + S tokens."""
    llama = save_llama(tmp_path / "llama", num_key_value_heads=2)
    assert convert(tmp_path / "llama", tmp_path / "out", "--window", 8, "--sinks", 0, "--state-size", 0) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert not model.config.window_memory and weights_of(tmp_path / "out").keys() == {
        name.replace("self_attn", "token_mixer") for name in weights_of(tmp_path / "llama")
    }
    torch.testing.assert_close(logits(model), windowed_logits(llama, 8, 0), rtol=1e-5, atol=1e-4)


def test_a_memory_that_has_learned_nothing_changes_little(tmp_path, capsys):
    save_llama(tmp_path / "llama", num_key_value_heads=2, tie_word_embeddings=True)
    assert convert(tmp_path / "llama", tmp_path / "with", *WINDOWS) == 0
    said = capsys.readouterr().out
    assert "window layers: 0, 1, 2; softmax layers: none" in said
    assert "see the last 8 tokens and the first 2, and a state of 6 modes" in said
    assert convert(tmp_path / "llama", tmp_path / "without", "--window", 8, "--sinks", 2, "--state-size", 0) == 0
    assert "the first 2, and nothing of the others" in capsys.readouterr().out
    with_memory, without = (AutoModelForCausalLM.from_pretrained(tmp_path / x).eval() for x in ("with", "without"))
    assert with_memory.config.state_size == 6 and with_memory.lm_head.weight is with_memory.model.embed_tokens.weight
    difference = logits(with_memory) - logits(without)
    assert difference[:, :10].abs().max() < 1e-4  # W + S: nothing has entered the state
    assert 0 < difference[:, 10:].square().mean() < 0.02 * logits(without).var()
    report = json.loads((tmp_path / "with" / "conversion_report.json").read_text())
    assert report["window"] == {"tokens": 8, "sinks": 2, "modes": 6, "share": "counted", "points": 12}
    assert report["layers"] == [0, 1, 2]


def test_a_window_of_64_and_4_sinks_is_what_a_llama_becomes_unasked(tmp_path, capsys):
    save_llama(tmp_path / "llama")
    assert convert(tmp_path / "llama", tmp_path / "out") == 0
    assert "window layers: 0, 1, 2; softmax layers: none" in capsys.readouterr().out
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert (config.attention_window, config.attention_sinks, config.state_size) == (64, 4, 64)
    assert convert(tmp_path / "llama", tmp_path / "old", "--window", 0, "--state-size", 6) == 0
    assert "interdomain layers: 0, 1, 2; softmax layers: none" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "old").config.token_mixers == ["interdomain"] * 3


@pytest.mark.parametrize("options", [[], ["--state-size", "0"]], ids=["memory", "alone"])
def test_nothing_is_said_of_fields_that_no_softmax_layer_reads(llama, tmp_path, monkeypatch, options):
    said = []
    monkeypatch.setattr(unread.logger, "warning_once", said.append)
    assert main(["from-llama", str(llama), str(tmp_path / "windows"), *options]) == 0
    assert said == []


def test_some_layers_stay_softmax(tmp_path):
    llama = save_llama(tmp_path / "llama")
    assert convert(tmp_path / "llama", tmp_path / "out", *WINDOWS, "--layers", "0,2", "--dtype", "bfloat16") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.token_mixers == ["window", "softmax", "window"] and model.dtype == torch.bfloat16
    assert model.model.layers[0].token_mixer.recurrence.point_keys.dtype == torch.float32
    assert torch.isfinite(logits(model)).all() and logits(llama).shape == logits(model).shape


def test_qwen2_brings_its_biases(tmp_path):
    qwen = save_llama(tmp_path / "qwen", Qwen2ForCausalLM, Qwen2Config, num_key_value_heads=2)
    assert convert(tmp_path / "qwen", tmp_path / "out", "--window", 40, "--sinks", 10, "--layers", "0,1") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    mixer = model.model.layers[0].token_mixer
    torch.testing.assert_close(mixer.q_proj.bias, qwen.model.layers[0].self_attn.q_proj.bias)
    assert mixer.q_proj.bias.abs().sum() > 0 and not mixer.o_proj.bias.any()
    torch.testing.assert_close(logits(model), logits(qwen), rtol=1e-5, atol=1e-4)


def test_a_llama_with_biases_brings_them(tmp_path):
    llama = save_llama(tmp_path / "llama", attention_bias=True)
    assert convert(tmp_path / "llama", tmp_path / "out", "--window", 40, "--sinks", 10) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.model.layers[0].token_mixer.o_proj.bias.any()
    torch.testing.assert_close(logits(model), logits(llama), rtol=1e-5, atol=1e-4)


def test_a_checkpoint_that_is_windowed_already_is_the_same_with_its_window(tmp_path, capsys):
    mistral = save_llama(tmp_path / "m", MistralForCausalLM, MistralConfig, sliding_window=8, num_key_value_heads=2)
    options = ("--window", 8, "--sinks", 0, "--state-size", 0)
    assert convert(tmp_path / "m", tmp_path / "out", *options) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(model), logits(mistral), rtol=1e-5, atol=1e-4)
    assert convert(tmp_path / "m", tmp_path / "no", "--window", 9) == 2
    assert "attends to the last 8 tokens: --window 9 would show it more" in capsys.readouterr().err
    assert convert(tmp_path / "m", tmp_path / "no", "--window", 4, "--layers", "0,1") == 2
    assert "our softmax layers to all: convert all layers" in capsys.readouterr().err
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_key_value_heads": 2}
    qwen = save_llama(tmp_path / "q", Qwen2ForCausalLM, Qwen2Config, **windows)
    assert convert(tmp_path / "q", tmp_path / "mixed", *options, "--layers", "1,2") == 0  # those that have one
    mixed = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed").eval()
    torch.testing.assert_close(logits(mixed), logits(qwen), rtol=1e-5, atol=1e-4)


def test_the_layers_that_cost_most_stay_softmax(llama, texts, tmp_path, capsys):
    options = (*WINDOWS, "--layers", "auto:1", "--data", texts, "--sequence-length", 48)
    assert convert(llama, tmp_path / "out", *options) == 0
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    costs = report["cost_of_layers"]
    (kept,) = {0, 1, 2} - set(report["layers"])
    assert costs[kept] == max(costs) and min(costs) > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert [i for i, name in enumerate(model.config.token_mixers) if name == "softmax"] == [kept]
    assert report["perplexity"]["converted"] == pytest.approx(report["perplexity"]["source"], rel=0.5)


def test_what_a_layer_costs_is_the_divergence_when_it_alone_is_converted(llama):
    from conversion.reading import read_config, read_weights, weight_files

    source = read_config(llama)
    carried = carry.carried_weights(read_weights(weight_files(llama)), source)
    config = carry.interdomain_config(source, [0, 1, 2], 6, carry.Window(8, 2))
    rows = ids(48)
    costs = choose.conversion_costs(config, carried, rows)
    wanted = carry.convert(carry.interdomain_config(source, [], 6, carry.Window(8, 2)), carried, torch.float32)
    found = carry.convert(carry.interdomain_config(source, [1], 6, carry.Window(8, 2)), carried, torch.float32)
    together = carry.convert(config, carried, torch.float32)  # where the score of its memory starts a little elsewhere
    found.model.layers[1].load_state_dict(together.model.layers[1].state_dict())
    with torch.no_grad():
        wanted, found = (model(rows).logits.log_softmax(-1) for model in (wanted, found))
    assert costs[1] == pytest.approx((wanted.exp() * (wanted - found)).sum(-1).mean().item(), rel=1e-4)
    assert choose.costliest([0.1, 0.5, 0.3], 2) == [1, 2]
    assert choose.measured_rows(torch.arange(20_000), 64, 512).shape == (8, 512)
    assert choose.measured_rows(torch.arange(20_000), 256, 512).shape == (4, 1024)
    assert choose.measured_rows(torch.arange(100), 256, 512).shape == (1, 100)


MISTAKES = {
    "window": (None, ("--window", -1), "--window and --sinks must not be negative"),
    "sinks": (None, ("--window", 8, "--sinks", -1), "--window and --sinks must not be negative"),
    "steps": (None, (*WINDOWS, "--finetune-steps", 1, "--data", "TEXTS"), "`python -m conversion teach` it"),
    "auto without a window": (
        None,
        ("--window", 0, "--layers", "auto:1", "--data", "TEXTS"),
        "measures what windows cost: leave --window 0 away",
    ),
    "auto without a text": (None, (*WINDOWS, "--layers", "auto:1"), "measures on a text: add --data"),
    "auto of all": (None, (*WINDOWS, "--layers", "auto:3", "--data", "TEXTS"), "keeps 3 layers of 3: keep one at"),
    "auto of none": (None, (*WINDOWS, "--layers", "auto:0", "--data", "TEXTS"), "keeps 0 layers of 3: keep one at"),
    "memory of nothing": (None, ("--window", 0, "--state-size", 0), "--state-size must be positive, not 0"),
    "mlp bias": (lambda f: edit_config(f, mlp_bias=True), WINDOWS, "The MLPs of this llama model have biases"),
    "quantized": (lambda f: edit_config(f, quantization_config={"quant_method": "awq"}), WINDOWS, "is quantized"),
    "other model": (lambda f: edit_config(f, model_type="gpt2"), WINDOWS, "is of type gpt2; those of type llama"),
    "dynamic": (
        lambda f: edit_config(f, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        WINDOWS,
        'rope_type "dynamic" changes its angles with the length',
    ),
}


@pytest.mark.parametrize(("damage", "options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named_before_anything_is_written(llama, texts, tmp_path, capsys, damage, options, message):
    shutil.copytree(llama, tmp_path / "llama")
    if damage is not None:
        damage(tmp_path / "llama")
    options = (texts if option == "TEXTS" else option for option in options)
    assert convert(tmp_path / "llama", tmp_path / "out", *options) == 2
    said = capsys.readouterr().err.split("\r")[-1].strip()
    assert message in said and "\n" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


@pytest.mark.slow
def test_smollm2_with_windows_as_long_as_the_text_is_smollm2_and_answers(tmp_path):
    pytest.importorskip("gguf", reason="the package gguf is not installed: pip install gguf")
    from transformers import AutoTokenizer

    try:
        source = from_llama.source_folder(from_llama.SMOLLM2)
    except text_data.InputError as error:
        pytest.skip(str(error))
    assert convert(source, tmp_path / "wide", "--window", 64) == 0
    llama, model = (AutoModelForCausalLM.from_pretrained(x).eval() for x in (source, tmp_path / "wide"))
    with torch.no_grad():
        text = torch.randint(1, 40_000, (1, 68), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(model(text).logits, llama(text).logits, rtol=1e-4, atol=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "wide")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "The capital of France is Paris." in tokenizer.decode(answer[0])
