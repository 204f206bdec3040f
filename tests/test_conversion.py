"""Conversions: a Llama is carried over exactly and taught on, a training run is cleaned, a folder is checked."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks import conversion_study, harness, readme
from conversion import carry, distill, from_llama, writing
from conversion.__main__ import main
from examples import text_data, train
from modeling_interdomain import (
    InterdomainConfig,
    InterdomainForCausalLM,
    InterdomainForSequenceClassification,
    InterdomainModel,
)
from tests.conftest import edit_config
from tests.test_examples import some_documents

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMAS = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "head-dim": {"head_dim": 12},
    "eps": {"rms_norm_eps": 1e-2},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "max_position_embeddings": 32,  # shorter than what it reads below
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


def save_llama(folder, model_class=LlamaForCausalLM, config_class=LlamaConfig, dtype=torch.float32, **changes):
    """A model whose logits depend clearly on its attention."""
    torch.manual_seed(0)
    options = {name: changes.pop(name) for name in ("max_shard_size",) if name in changes}
    model = model_class(config_class(**SHAPE | changes)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "embed" in name:
                parameter.normal_()
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.generation_config = GenerationConfig(max_length=77, bos_token_id=0, eos_token_id=0)
    model.save_pretrained(folder, **options)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return text_data.train_tokenizer(some_documents(), vocab_size=300)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": document}) + "\n" for document in some_documents(120)))
    return str(file)


@pytest.fixture
def llama(tmp_path, tokenizer):
    """The folder of a small Llama with its tokenizer."""
    save_llama(tmp_path / "llama", num_key_value_heads=2)
    tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def convert(llama, tmp_path):
    """`convert(*options, target="out")`: the exit code of a conversion of that Llama, without windows."""

    def run(*options, target="out"):
        fixed = ["--window", "0", "--state-size", "6"]
        return main(["from-llama", str(llama), str(tmp_path / target), *fixed, *map(str, options)])

    return run


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def ids(length=50, vocabulary=300):
    return torch.randint(1, vocabulary, (2, length), generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------------------ from a Llama


@pytest.mark.parametrize("changes", LLAMAS.values(), ids=LLAMAS)
def test_without_a_new_mixer_the_logits_are_those_of_the_llama(tmp_path, changes):
    llama = save_llama(tmp_path / "llama", **changes)
    assert main(["from-llama", str(tmp_path / "llama"), str(tmp_path / "out"), "--layers", "none"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(model) is InterdomainForCausalLM and model.config.token_mixers == ["softmax"] * 3
    with torch.no_grad():
        expected = llama(ids()).logits
        torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-5, atol=1e-4)
        swapped = ids()[:, torch.cat([torch.tensor([1, 0]), torch.arange(2, 50)])]
        assert (llama(swapped).logits - expected)[:, -1].abs().max() > 0.1  # the order of distant tokens shows
    prompt = {"input_ids": ids(10), "attention_mask": torch.ones(2, 10, dtype=torch.long), "pad_token_id": 0}
    written = [x.generate(**prompt, max_new_tokens=8, do_sample=False) for x in (model, llama)]
    assert torch.equal(*written)


def test_mistral_has_the_same_layout(tmp_path):
    mistral = save_llama(tmp_path / "m", MistralForCausalLM, MistralConfig, sliding_window=None, num_key_value_heads=2)
    assert main(["from-llama", str(tmp_path / "m"), str(tmp_path / "out"), "--layers", "none"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, mistral(ids()).logits, rtol=1e-5, atol=1e-4)


def test_a_converted_layer_keeps_its_projections_and_starts_without_convolution(convert, llama, tmp_path):
    assert convert("--layers", "1") == 0
    before, after = weights_of(llama), weights_of(tmp_path / "out")
    for name, x in before.items():
        assert torch.equal(x, after[name.replace("self_attn", "token_mixer")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.config.token_mixers == ["softmax", "interdomain", "softmax"]
    assert model.config.num_key_value_heads == 2 and model.config.rope_parameters["rope_theta"] == 10000.0
    plain = InterdomainForCausalLM(InterdomainConfig(**model.config.to_dict() | {"conv_kernel": 1})).eval()
    plain.load_state_dict({k: x for k, x in after.items() if "_conv" not in k}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, plain(ids()).logits)


def test_shards_dtype_tokenizer_and_generation_settings_are_kept(tmp_path, tokenizer):
    folder = tmp_path / "llama"
    save_llama(folder, dtype=torch.bfloat16, max_shard_size="20KB", tie_word_embeddings=True)
    tokenizer.save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert main(["from-llama", str(folder), str(tmp_path / "out"), "--window", "0", "--layers", "every-other"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.token_mixers == ["interdomain", "softmax", "interdomain"]
    assert model.dtype == torch.bfloat16 and model.model.layers[0].token_mixer.recurrence.C.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.max_length == 77
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert main(["from-llama", str(folder), str(tmp_path / "wide"), "--window", "0", "--dtype", "float32"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "wide").dtype == torch.float32


def test_of_several_dtypes_that_of_most_weights_is_kept_and_said(tmp_path, capsys):
    folder, out = tmp_path / "llama", tmp_path / "out"
    llama = save_llama(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["from-llama", str(folder), str(out), "--layers", "none"]) == 0
    said = "The source has weights in float32 and, fewer, in bfloat16: all are saved in float32, or as --dtype says."
    assert said in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert {x.dtype for x in load_file(out / "model.safetensors").values()} == {torch.float32}
    with torch.no_grad():
        llama.model.embed_tokens.weight.copy_(llama.model.embed_tokens.weight.bfloat16())
        ids = torch.arange(3, 20)[None]
        torch.testing.assert_close(model(ids).logits, llama(ids).logits, rtol=1e-4, atol=1e-4)
    assert main(["from-llama", str(folder), str(tmp_path / "asked"), "--dtype", "bfloat16"]) == 0
    assert "has weights in" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("none", []),
        ("every-other", [0, 2, 4, 6]),
        ("0,2,4-7", [0, 2, 4, 5, 6, 7]),
        ("3", [3]),
    ],
)
def test_layers_are_named(text, layers):
    assert carry.parse_layers(text, 8) == layers


def test_distillation_teaches_the_new_mixers_alone(convert, llama, tmp_path):
    assert convert("--layers", "0,2") == 0
    teacher = LlamaForCausalLM.from_pretrained(llama).eval()
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = {name: x.clone() for name, x in student.state_dict().items()}
    stage = distill.Stage("distilled", lambda: distill.distillation_loss(teacher, student, [0, 2]), 30, 1e-2)
    loss, batches = stage.make_loss(), lambda: iter([ids(33)] * 30)
    first = loss(ids(33)).item()
    distill.train_stage(student, stage, batches(), distill.Progress(tmp_path / "state.pt", 100))
    assert 0.8 < first < 1.3  # the start answers next to nothing, so the error is the variance
    assert loss(ids(33)).item() < 0.85 * first
    changed = {name for name, x in student.state_dict().items() if not torch.equal(x, before[name])}
    mixers = ("model.layers.0.token_mixer.", "model.layers.2.token_mixer.")
    assert changed and all(name.startswith(mixers) for name in changed)
    assert any(name.endswith("recurrence.C") for name in changed)
    assert not any(module._forward_hooks for module in teacher.modules())


def test_the_distilled_answer_is_that_of_the_teachers_layer(llama, tmp_path):
    """A mixer that is the teacher's own attention has no error: inputs, rotations and targets belong together."""
    assert main(["from-llama", str(llama), str(tmp_path / "same"), "--layers", "none"]) == 0
    teacher = LlamaForCausalLM.from_pretrained(llama, attn_implementation="sdpa").eval()
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "same", attn_implementation="sdpa").eval()
    assert distill.distillation_loss(teacher, student, [0, 1, 2])(ids(33)).item() < 1e-9


def test_divergence_from_the_teacher(llama, tmp_path):
    assert main(["from-llama", str(llama), str(tmp_path / "same"), "--layers", "none"]) == 0
    teacher = LlamaForCausalLM.from_pretrained(llama).eval()
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "same").eval()
    batch = ids(33)
    entropy = distill.finetuning_loss(teacher, student, 0.0)(batch)
    torch.testing.assert_close(entropy, text_data.next_token_nll(student, batch).mean())
    half = distill.finetuning_loss(teacher, student, 0.5)(batch)  # of the student that is the teacher, nothing is added
    torch.testing.assert_close(half, 0.5 * entropy, rtol=1e-4, atol=1e-4)


TAUGHT = ("--distill-steps", 6, "--finetune-steps", 6, "--batch-size", 2, "--sequence-length", 32, "--save-steps", 2)


@pytest.mark.once
def test_perplexities_are_reported_and_training_goes_on_where_it_stopped(convert, texts, tmp_path, monkeypatch, capsys):
    """Stopped in both stages and while it saves, a run gives the weights of a run that was never stopped."""
    options = (*TAUGHT, "--data", texts, "--learning-rate", 1e-2)
    assert convert(*options, target="whole") == 0
    report = json.loads((tmp_path / "whole" / "conversion_report.json").read_text())
    found = report["perplexity"]
    assert list(found) == ["source", "converted", "distilled", "fine-tuned"] and report["layers"] == [0, 1, 2]
    assert found["fine-tuned"] < found["distilled"]
    assert f"{found['fine-tuned']:,.2f}" in capsys.readouterr().out
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "whole"),
        AutoTokenizer.from_pretrained(tmp_path / "whole"),
    )
    _, held_out = text_data.split_documents(text_data.gather_documents([texts]), 100_000)
    assert distill.perplexity(model, tokenizer, held_out, 32) == pytest.approx(found["fine-tuned"])

    for number in (4, 7):  # in step 4 of the first stage, saved at 2; then in step 3 of the second, saved at 2
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            stop_at(patched, number)
            convert(*options, target="parts")
        assert not (tmp_path / "parts").exists()
    assert convert(*options, "--seed", 1, target="parts") == 2
    assert "parts.partial holds an unfinished run with other arguments" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(InterdomainForCausalLM, "save_pretrained", no_space)
        assert convert(*options, target="parts") == 2
        assert "No space left on device" in capsys.readouterr().err
    monkeypatch.setattr(distill, "clip_gradients", lambda *_: pytest.fail("all steps were done"))
    assert convert(*options, target="parts") == 0
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(x, parts[name]) for name, x in whole.items())
    assert not (tmp_path / "parts.partial").exists()


def stop_at(monkeypatch, number: int) -> None:
    """Interrupt training in this step."""
    steps, clip = [], distill.clip_gradients

    def counted(*arguments):
        steps.append(number)
        if len(steps) == number:
            raise KeyboardInterrupt
        clip(*arguments)

    monkeypatch.setattr(distill, "clip_gradients", counted)


def no_space(*arguments, **options):
    raise OSError(28, "No space left on device")


def test_a_dry_run_writes_nothing(convert, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert convert("--layers", "1", "--dry-run") == 0
    assert sorted(tmp_path.rglob("*")) == before
    said = capsys.readouterr().out
    assert convert("--layers", "1") == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    new = sum(x.numel() for name, x in model.named_parameters() if name in carry.new_names(model.config))
    assert "interdomain layers: 1; softmax layers: 0, 2" in said
    assert f"{model.num_parameters() - new:,} parameters carried over, {new:,} new; float32" in said


def test_nothing_is_replaced_unasked_and_the_old_folder_survives_an_interrupted_save(
    convert, tmp_path, capsys, monkeypatch
):
    assert convert("--layers", "none") == 0
    before = (tmp_path / "out" / "config.json").read_bytes()
    assert convert() == 2
    assert "out is not empty: choose another, or add --overwrite" in capsys.readouterr().err
    replace = os.replace

    def stop_between_the_renames(source, target):
        if str(source).endswith("model"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(writing.os, "replace", stop_between_the_renames)
        with pytest.raises(KeyboardInterrupt):
            convert("--overwrite")
    assert convert() == 2  # puts the old folder back, and again asks
    assert (tmp_path / "out" / "config.json").read_bytes() == before
    assert convert("--overwrite") == 0
    assert (tmp_path / "out" / "config.json").read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "out"]


def test_only_a_saved_model_that_is_not_the_source_is_replaced(llama, tmp_path, capsys):
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("mine")
    assert main(["from-llama", str(llama), str(tmp_path / "papers"), "--overwrite"]) == 2
    assert "is no saved model, so --overwrite does not replace it" in capsys.readouterr().err
    shutil.copytree(llama, tmp_path / "papers" / "llama")
    assert main(["from-llama", str(tmp_path / "papers" / "llama"), str(tmp_path / "papers"), "--overwrite"]) == 2
    assert "contains SOURCE, which would be lost" in capsys.readouterr().err
    assert main(["from-llama", str(llama), str(tmp_path / "papers" / "thesis.txt" / "out")]) == 2
    assert "thesis.txt is a file, not a folder" in capsys.readouterr().err
    assert (tmp_path / "papers" / "thesis.txt").read_text() == "mine"
    source = tmp_path / "out.partial" / "model"
    shutil.copytree(llama, source)
    assert main(["from-llama", str(source), str(tmp_path / "out")]) == 2
    assert "SOURCE lies in" in capsys.readouterr().err and (source / "config.json").is_file()


@pytest.mark.once
@pytest.mark.parametrize("size", [10, 5_000, 60_000])
def test_a_disk_that_fills_up_is_one_sentence_and_the_same_command_goes_on(convert, texts, capsys, full_disk, size):
    """At the request, at the first state of the training, at the weights."""
    taught = () if size == 5_000 else (*TAUGHT, "--data", texts)
    with full_disk(size):
        assert convert(*taught) == 2
    said = capsys.readouterr().err.split("\r")[-1].strip().splitlines()[-1]
    assert "could not be written; is the disk full?" in said
    assert convert(*taught) == 0


def test_a_run_that_has_done_nothing_leaves_the_choice_of_another(convert, texts, tmp_path, capsys):
    working = tmp_path / "out.partial"
    working.mkdir()
    (working / "request.json").write_text("{}")
    assert convert() == 0
    assert not working.exists()


def test_a_full_disk_is_seen_before_anything_is_written(convert, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    assert convert() == 2
    assert "MB, but " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-100])


def rename_weight(folder, old, new):
    weights = weights_of(folder)
    weights[new] = weights.pop(old)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


LLAMA_MISTAKES = {
    "no config": (lambda f: (f / "config.json").unlink(), (), "has no config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), (), "is not a configuration that can be used"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), (), "holds no weights"),
    "damaged": (lambda f: cut_off(f / "model.safetensors"), (), "is damaged or cut off"),
    "attention bias": (lambda f: edit_config(f, attention_bias=True), (), "have biases, for which ours have no place"),
    "mlp bias": (lambda f: edit_config(f, mlp_bias=True), (), "The MLPs of this llama model have biases"),
    "quantized": (lambda f: edit_config(f, quantization_config={"quant_method": "awq"}), (), "The source is quantized"),
    "other model": (
        lambda f: edit_config(f, model_type="gpt2"),
        (),
        "is of type gpt2; those of type llama and mistral",
    ),
    "window": (
        lambda f: edit_config(f, model_type="mistral", sliding_window=8),
        ("--layers", "0"),
        "attends to the last 8 tokens",
    ),
    "partial rotation": (lambda f: edit_config(f, partial_rotary_factor=0.5), (), "names a partial_rotary_factor"),
    "missing weight": (
        lambda f: rename_weight(f, "model.norm.weight", "model.other.weight"),
        (),
        "it lacks model.norm.weight and also has model.other.weight",
    ),
    "shape": (lambda f: edit_config(f, intermediate_size=40), (), "[48, 32] instead of [40, 32]"),
    "odd head": (lambda f: edit_config(f, head_dim=7), (), "config.json is not a configuration that can be used: RoPE"),
    "groups": (lambda f: edit_config(f, num_key_value_heads=3), (), "that an Interdomain model cannot have: num_key"),
    "layers": (None, ("--layers", "two"), '--layers must be all, none, every-other or a list such as "0,2,4-7"'),
    "layer": (None, ("--layers", "1,3"), "names no layers of a model with layers 0 to 2"),
    "range": (None, ("--layers", "0,2-1"), "has a range from 2 down to 1: write 1-2."),
    "no heads": (lambda f: edit_config(f, num_attention_heads=0), (), "is not a configuration that can be used"),
    "generation": (
        lambda f: (f / "generation_config.json").write_text("{"),
        (),
        "generation_config.json is not a configuration that can be used",
    ),
    "no rate": (
        None,
        ("--learning-rate", "nan", "--finetune-steps", 1, "--data", "TEXTS"),
        "--learning-rate must be positive, not nan.",
    ),
    "share": (None, ("--kl-weight", 1.5), "--kl-weight lies in 0 to 1"),
    "state size": (None, ("--state-size", 0), "--state-size must be positive, not 0"),
    "steps": (None, ("--distill-steps", -1), "must not be negative"),
    "no data": (None, ("--finetune-steps", 1), "need text to learn from: add --data"),
    "nothing to teach": (None, ("--layers", "none", "--distill-steps", 1, "--data", "TEXTS"), "has nothing to teach"),
    "too long": (None, ("--sequence-length", 65, "--data", "TEXTS"), "--sequence-length 65 is longer than the 64"),
    "no such text": (None, ("--sequence-length", 32, "--data", "typo.jsonl"), "typo.jsonl does not exist"),
    "little text": (
        None,
        ("--sequence-length", 32, "--data", "TEXTS", "--max-bytes", 100),
        "too little to learn from",
    ),
    "no tokenizer": (
        lambda f: [file.unlink() for file in f.glob("tokenizer*")],
        ("--data", "TEXTS"),
        "has no tokenizer that can be loaded, which --data needs",
    ),
    "damaged tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("[]"),
        ("--data", "TEXTS"),
        "has no tokenizer that can be loaded, which --data needs",
    ),
}


@pytest.mark.parametrize(("damage", "options", "message"), LLAMA_MISTAKES.values(), ids=LLAMA_MISTAKES)
def test_mistakes_are_named_before_anything_is_written(
    convert, llama, texts, tmp_path, capsys, damage, options, message
):
    if damage is not None:
        damage(llama)
    assert convert(*(texts if option == "TEXTS" else option for option in options)) == 2
    said = capsys.readouterr().err.split("\r")[-1].strip()
    assert message in said and "\n" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


def test_wrong_places_are_named(llama, tmp_path, capsys):
    assert main(["from-llama", str(llama), str(llama)]) == 2
    assert "SOURCE and TARGET are the same folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    assert main(["from-llama", str(llama), str(tmp_path / "file")]) == 2
    assert "is a file, not a folder" in capsys.readouterr().err
    assert main(["from-llama", "no/where", str(tmp_path / "out")]) == 2
    assert "no/where is neither a folder nor a model of the Hub" in capsys.readouterr().err


def test_a_name_on_the_hub_is_downloaded(llama, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.append((name, options)) or str(llama)
    )
    assert main(["from-llama", "some/llama", str(tmp_path / "out")]) == 0
    assert asked == [("some/llama", {"allow_patterns": from_llama.HUB_FILES})]
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_biases_of_other_families_and_missing_shards(tmp_path, capsys):
    save_llama(tmp_path / "qwen", Qwen2ForCausalLM, Qwen2Config)
    assert main(["from-llama", str(tmp_path / "qwen"), str(tmp_path / "out"), "--window", "0"]) == 2
    assert "The projections of this qwen2 model have biases" in capsys.readouterr().err
    save_llama(tmp_path / "llama", max_shard_size="20KB")
    (tmp_path / "llama" / "model-00002-of-00004.safetensors").unlink(missing_ok=True)
    shards = sorted((tmp_path / "llama").glob("*.safetensors"))
    shards[0].unlink()
    assert main(["from-llama", str(tmp_path / "llama"), str(tmp_path / "out")]) == 2
    assert f"shards are missing in {tmp_path / 'llama'}: {shards[0].name}" in capsys.readouterr().err


def test_tokenizers_that_do_not_fit(llama, texts, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.add_tokens(["<one>", "<more>"])
    tokenizer.save_pretrained(llama)
    assert main(["from-llama", str(llama), str(tmp_path / "out"), "--data", texts]) == 2
    assert "has 302 tokens, the model 300" in capsys.readouterr().err
    tokenizer = text_data.train_tokenizer(some_documents(), 300)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(llama)
    assert main(["from-llama", str(llama), str(tmp_path / "out"), "--data", texts]) == 2
    assert "has no eos token" in capsys.readouterr().err


def test_a_diverging_run_says_so(convert, texts, capsys):
    assert convert(*TAUGHT, "--data", texts, "--learning-rate", 1e30) == 2
    assert "try a smaller learning rate" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ from a training run


@pytest.fixture
def trained(tmp_path, make_model, tokenizer):
    """A model, and the folder `run` with its configuration and tokenizer, where checkpoints of it go."""
    model = make_model("interdomain-softmax", dtype=torch.float32, vocab_size=300, state_dtype="float32")
    model.config.save_pretrained(tmp_path / "run")
    tokenizer.save_pretrained(tmp_path / "run")
    return model


def save_checkpoint(state, folder):
    dcp.save(state, checkpoint_id=folder, no_dist=True)


def optimizer_of(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids(5), labels=ids(5)).loss.backward()
    return optimizer.state_dict()


FORMS = {
    "folder": lambda model, run: model.save_pretrained(run),
    "shards": lambda model, run: model.save_pretrained(run, max_shard_size="20KB"),
    "state dict": lambda model, run: torch.save(model.state_dict(), run / "pytorch_model.bin"),
    "DDP": lambda model, run: torch.save(torch.nn.DataParallel(model).state_dict(), run / "x.pt"),
    "compiled": lambda model, run: torch.save({"model": torch.compile(model).state_dict()}, run / "x.pt"),
    "compiled DDP": lambda model, run: torch.save(
        {"state_dict": torch.compile(torch.nn.DataParallel(model)).state_dict(), "epoch": 3}, run / "x.pt"
    ),
    "FSDP": lambda model, run: torch.save(
        {name.replace("layers.0.", "layers.0._fsdp_wrapped_module."): x for name, x in model.state_dict().items()},
        run / "x.pt",
    ),
    "inside another model": lambda model, run: torch.save(
        {f"model.{name}": x for name, x in model.state_dict().items()} | {"scale": torch.ones(1)}, run / "x.pt"
    ),
    "distributed": lambda model, run: save_checkpoint(model.state_dict(), run),
    "accelerate": lambda model, run: (
        save_checkpoint({"model": model.state_dict()}, run / "pytorch_model_fsdp_0"),
        save_checkpoint({"optimizer": optimizer_of(model)}, run / "optimizer_0"),
    ),
    "distributed with optimizer": lambda model, run: save_checkpoint(
        {"model": model.state_dict(), "optim": optimizer_of(model), "step": torch.tensor(3)}, run
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_folder(tmp_path, trained, save):
    run = tmp_path / "run"
    save(trained, run)
    source = run / "x.pt" if (run / "x.pt").is_file() else run
    assert main(["from-training", str(source), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = trained.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


SHARDED_RUN = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from modeling_interdomain import InterdomainForCausalLM

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
model = InterdomainForCausalLM.from_pretrained(sys.argv[1])
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
ids = torch.arange(8)[None]
model(ids, labels=ids).loss.backward()
optimizer.step()
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optim": moments}, checkpoint_id=sys.argv[2])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_shards_of_two_processes(tmp_path, trained):
    trained.save_pretrained(tmp_path / "start")
    (tmp_path / "run.py").write_text(SHARDED_RUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command += [str(tmp_path / "run.py"), str(tmp_path / "start"), str(tmp_path / "run" / "checkpoint")]
    environment = os.environ | {"PYTHONPATH": str(train.REPOSITORY)}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=240)
    assert len(list((tmp_path / "run" / "checkpoint").glob("*.distcp"))) == 2
    assert main(["from-training", str(tmp_path / "run" / "checkpoint"), str(tmp_path / "out")]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(x, found[name]) for name, x in trained.state_dict().items())


def test_checkpoint_of_the_trainer_in_another_dtype(texts, tmp_path, capsys):
    options = {"config": train.REPOSITORY / "configuration" / "interdomain-tiny", "data": texts, "vocab_size": 300}
    options |= {
        "output_dir": tmp_path / "run",
        "sequence_length": 32,
        "max_steps": 2,
        "save_steps": 1,
        "warmup_tokens": 64,
    }
    options |= {"per_device_train_batch_size": 2, "use_cpu": "true", "disable_tqdm": "true"}
    assert train.main([x for name, value in options.items() for x in (f"--{name}", str(value))]) == 0
    source, target = tmp_path / "run" / "checkpoint-1", tmp_path / "out"
    assert main(["from-training", str(source), str(target), "--dtype", "bfloat16", "--dry-run"]) == 0
    assert not target.exists() and "bfloat16" in capsys.readouterr().out
    assert main(["from-training", str(source), str(target), "--dtype", "bfloat16"]) == 0
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.bfloat16 and model.model.layers[0].token_mixer.recurrence.B.dtype == torch.float32
    before = weights_of(source)
    assert torch.equal(model.model.norm.weight, before["model.norm.weight"].bfloat16())
    assert not (target / "optimizer.pt").exists()
    assert main(["check", str(target)]) == 0


def test_classifiers_and_tied_heads(tmp_path, make_model):
    make_model("softmax", InterdomainForSequenceClassification).save_pretrained(tmp_path / "classifier")
    assert main(["from-training", str(tmp_path / "classifier"), str(tmp_path / "a")]) == 0
    assert weights_of(tmp_path / "a").keys() == weights_of(tmp_path / "classifier").keys()
    model = make_model(tie_word_embeddings=True)
    model.tie_weights()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "x.pt")  # holds the head, too
    assert main(["from-training", str(tmp_path / "x.pt"), str(tmp_path / "b")]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


class Program:
    def __reduce__(self):
        return (os.system, ("true",))


def dotted(module, name, argument):
    """A pickle that calls what a module has imported: `pathlib` `os.system`."""
    texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name, argument)]
    return b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."


def changed(**changes):
    """The state dict of a model with other tensors under some names; None takes one away."""

    def save(model, run):
        state = dict(model.state_dict()) | {name.replace("__", "."): x for name, x in changes.items()}
        torch.save({name: x for name, x in state.items() if x is not None}, run / "x.pt")

    return save


def edited_config(**changes):
    def save(model, run):
        edit_config(run, **changes)
        torch.save(model.state_dict(), run / "x.pt")

    return save


def distributed(damage):
    def save(model, run):
        save_checkpoint({"model": model.state_dict()}, run)
        damage(run)

    return save


def two_models(model, run):
    state = model.state_dict()
    torch.save(state | {f"ema.{name}": x for name, x in state.items()}, run / "x.pt")


TRAINING_MISTAKES = {
    "missing": (changed(lm_head__weight=None), "it lacks lm_head.weight."),
    "unexpected": (changed(extra=torch.ones(1)), "it also has extra."),
    "shape": (changed(lm_head__weight=torch.ones(3, 2)), "it has lm_head.weight [3, 2] instead of [300, 32]."),
    "diverged": (changed(model__norm__weight=torch.full((32,), torch.nan)), "NaN or infinity in model.norm.weight"),
    "untied": (edited_config(tie_word_embeddings=True), "the checkpoint holds two different ones"),
    "two models": (two_models, "holds 2 models"),
    "program": (
        lambda model, run: torch.save({"model": Program()}, run / "x.pt"),
        "holds more than weights, which could run a program",
    ),
    "damaged": (lambda model, run: (run / "x.pt").write_bytes(b"PK no"), "x.pt is damaged, or"),
    "text": (lambda model, run: (run / "x.pt").write_bytes(b"hello world"), "x.pt is damaged, or"),
    "no weights": (lambda model, run: torch.save([1, 2], run / "x.pt"), "holds no weights by name"),
    "empty": (lambda model, run: None, "holds no checkpoint"),
    "deepspeed": (
        lambda model, run: ((run / "step").mkdir(), (run / "step" / "mp_rank_00_model_states.pt").touch()),
        "run the zero_to_fp32.py",
    ),
    "missing rank": (distributed(lambda run: (run / "__0_0.distcp").unlink()), "the file of a rank is missing"),
    "program in metadata": (
        distributed(lambda run: (run / ".metadata").write_bytes(pickle.dumps(Program()))),
        "holds more than a table of weights",
    ),
    "program behind a module": (
        distributed(lambda run: (run / ".metadata").write_bytes(dotted("pathlib", "os.system", "touch PWNED"))),
        "holds more than a table of weights (pathlib.os.system)",
    ),
    "cut metadata": (distributed(lambda run: cut_off(run / ".metadata")), ".metadata"),
    "damaged metadata": (
        distributed(lambda run: (run / ".metadata").write_bytes(b"\x80\x04](K\x01tR.")),  # calls a list
        ".metadata is damaged",
    ),
    "no config": (lambda model, run: shutil.move(run / "config.json", run / "other.json"), "name one with --config"),
    "other model": (edited_config(model_type="llama"), "is that of a llama model"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("save", "message"), TRAINING_MISTAKES.values(), ids=TRAINING_MISTAKES)
def test_unusable_checkpoints_are_named(tmp_path, trained, capsys, save, message):
    run = tmp_path / "run"
    save(trained, run)
    source = run / "x.pt" if (run / "x.pt").is_file() else run
    assert main(["from-training", str(source), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.split("\r")[-1].strip()
    assert message in said and "\n" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_sources_that_are_no_checkpoints(tmp_path, trained, capsys):
    assert main(["from-training", str(tmp_path / "gone"), str(tmp_path / "out")]) == 2
    assert "gone does not exist" in capsys.readouterr().err
    source = str(tmp_path / "run" / "tokenizer.json")
    assert main(["from-training", source, str(tmp_path / "out")]) == 2
    assert "tokenizer.json is none of .pt, .pth, .bin, .safetensors" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ checking


@pytest.fixture
def good(tmp_path, trained, tokenizer):
    folder = tmp_path / "good"
    trained.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_good_folder_passes(good, capsys):
    assert main(["check", str(good)]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert [line.split()[0] for line in lines] == ["configuration", "weights", "tokenizer", "model"]
    assert "2 layers of interdomain, softmax" in lines[0] and "generates 8 tokens" in lines[3]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (good / name).unlink()
    edit_config(good, transformers_version="99.0.0")
    assert main(["check", str(good)]) == 0
    said = capsys.readouterr().out
    assert "note: saved by the later Transformers 99.0.0" in said and "note: there is none in the folder" in said


@pytest.mark.parametrize("made", [InterdomainForSequenceClassification, InterdomainModel])
def test_a_model_that_does_not_generate_passes(tmp_path, make_model, capsys, made):
    make_model("interdomain-softmax", made, num_labels=7).save_pretrained(tmp_path / "a")
    assert main(["from-training", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert main(["check", str(tmp_path / "b")]) == 0
    assert f"loads as {made.__name__}" in capsys.readouterr().out


def damaged_tensor(folder):
    weights = weights_of(folder)
    weights["model.norm.weight"][3] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def larger_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<one>", "<more>"])
    tokenizer.save_pretrained(folder)


def missing_shard(folder):
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")


def overflowing(folder):
    weights = weights_of(folder)
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], 3e38)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


FAILURES = {
    "no config": (lambda f: (f / "config.json").unlink(), 0, "has no config.json"),
    "llama": (lambda f: edit_config(f, model_type="llama"), 0, "is a llama model, not an Interdomain one"),
    "later version": (lambda f: edit_config(f, new_field=1), 0, "fields that this version does not know (new_field)"),
    "contradiction": (lambda f: edit_config(f, product="other"), 0, "is not a configuration that can be used"),
    "cut off": (lambda f: cut_off(f / "model.safetensors"), 1, "is damaged or cut off"),
    "header": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 5), 1, "is damaged or cut off"),
    "missing shard": (missing_shard, 1, "1 of 2 shards are missing"),
    "broken index": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors.index.json").write_text("{")),
        1,
        "does not say which shard holds which weights",
    ),
    "renamed": (lambda f: rename_weight(f, "model.norm.weight", "norm.weight"), 1, "it lacks model.norm.weight"),
    "infinite": (damaged_tensor, 1, "NaN or infinity in model.norm.weight"),
    "large tokenizer": (larger_tokenizer, 2, "has token 301, but the vocabulary ends at 299"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), 2, "cannot be loaded: copy its files again"),
    "overflow": (overflowing, 3, "generates from NaN or infinite logits in torch.float32"),
}


@pytest.mark.parametrize(("damage", "passed", "message"), FAILURES.values(), ids=FAILURES)
def test_the_first_failure_is_named_after_what_passed(good, capsys, damage, passed, message):
    damage(good)
    assert main(["check", str(good)]) == 2
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == passed
    last = said.err.split("\r")[-1].strip()
    assert message in last and "\n" not in last


def test_a_folder_that_is_not_there(tmp_path, capsys):
    assert main(["check", str(tmp_path / "gone")]) == 2
    assert "gone is not a folder." in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ the study


@pytest.mark.once
def test_the_study_from_data_to_table(tmp_path, capsys, monkeypatch):
    """A run of a few steps, its table, and the table in a README."""
    from pyarrow import parquet
    from pyarrow import table as arrow_table

    (tmp_path / "corpus" / "wiki").mkdir(parents=True)
    text = arrow_table({"text": some_documents(60)})
    parquet.write_table(text, tmp_path / "corpus" / "wiki" / "train-000.parquet")
    monkeypatch.setattr(conversion_study, "SHAPE", conversion_study.SHAPE | {"vocab_size": 300, "num_hidden_layers": 2})
    training = {"source_steps": 2, "distill_steps": 2, "finetune_steps": 2, "batch_size": 2, "sequence_length": 32}
    record = conversion_study.run(tmp_path, tmp_path / "runs", training)
    memory = record["cache_bytes"]
    assert len(set(memory["interdomain"].values())) == 1
    growth = {memory["llama"][str(length)] // length for length in conversion_study.LENGTHS}
    assert growth == {2 * 2 * 2 * 32 * 4}  # keys and values of two layers, two groups of 32 numbers
    record["machine"] = harness.machine()
    monkeypatch.setattr(harness, "read", lambda name: record)
    filled = readme.fill("<!-- table: conversion_study --><!-- end -->")
    assert f"| the Llama | {record['perplexity']['source']:.1f} | +0.0% |" in filled
    assert "| after 2 steps of the mixers alone |" in filled


def test_the_measured_recovery_is_within_15_percent():
    """What the study's file says, for a Llama that had much to lose."""
    found = harness.read("conversion_study")["perplexity"]
    assert found["fine-tuned"] < 1.15 * found["source"] < found["without attention"]


def test_a_measured_conversion_is_saved_in_the_dtype_asked_for(convert, texts, tmp_path):
    measured = ("--data", texts, "--sequence-length", 32, "--dtype", "bfloat16")
    assert convert(*measured) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
