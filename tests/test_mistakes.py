"""What a user does wrong ends in one clear sentence, and what was on the disk or on the Hub is still there."""

import json
import logging
import os
import shutil

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples import (
    chat_page,
    evaluate,
    evaluate_lengths,
    evaluate_tasks,
    finetune_lora,
    long_context,
    publish,
    recall,
    text_data,
)
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from modeling_interdomain.saving.checkpoint_folder import replacing
from tests.conftest import edit_config
from tests.hub_server import TOKEN, running_hub, speak_to
from tests.test_examples import some_documents


@pytest.fixture(scope="module")
def original(make_model, tmp_path_factory):
    """The folder of a small model in one file, with its tokenizer; tests spoil copies of it."""
    path = tmp_path_factory.mktemp("original")
    make_model("interdomain", dtype=torch.float32, vocab_size=300).save_pretrained(path)
    text_data.train_tokenizer(some_documents(), 300).save_pretrained(path)
    return path


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


@pytest.fixture
def sharded(original, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(original)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    AutoTokenizer.from_pretrained(original).save_pretrained(tmp_path / "sharded")
    return tmp_path / "sharded"


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def second_shard(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def one_sentence(error) -> str:
    (line,) = str(error.value).splitlines()
    return line


# ------------------------------------------------------------------------------------------ loading


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="Unrecognized model in .* Should have a `model_type` key"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_configuration_without_weights():
    preset = publish.REPOSITORY / "configuration" / "interdomain-tiny"
    with pytest.raises(
        OSError, match="no file named model.safetensors.* found in directory .*interdomain-tiny"
    ) as error:
        AutoModelForCausalLM.from_pretrained(preset)
    one_sentence(error)


def test_a_damaged_configuration(folder):
    truncate(folder / "config.json")
    with pytest.raises(OSError, match="config file at .*config.json' is not a valid JSON file") as error:
        AutoModelForCausalLM.from_pretrained(folder)
    one_sentence(error)


@pytest.mark.parametrize("damage", ["half", "empty", "noise"])
def test_a_damaged_file_is_named(folder, damage):
    weights = folder / "model.safetensors"
    if damage == "half":
        truncate(weights)
    else:
        weights.write_bytes(b"" if damage == "empty" else b"\xff" * 5000)
    with pytest.raises(OSError, match="has model.safetensors that cannot be read .*; copy or download again") as error:
        AutoModelForCausalLM.from_pretrained(folder)
    assert str(folder) in one_sentence(error)


def test_only_the_damaged_shard_is_named(sharded):
    second = second_shard(sharded)
    truncate(second)
    with pytest.raises(OSError, match=f"has {second.name} that cannot be read") as error:
        AutoModelForCausalLM.from_pretrained(sharded)
    assert "model-00001" not in one_sentence(error)


def test_a_damaged_list_of_shards(sharded):
    truncate(sharded / "model.safetensors.index.json")
    with pytest.raises(OSError, match="has weights that cannot be read") as error:
        AutoModelForCausalLM.from_pretrained(sharded)
    assert str(sharded) in one_sentence(error)


def test_a_missing_shard(sharded):
    second = second_shard(sharded)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=f"No such file .*{second.name}") as error:
        AutoModelForCausalLM.from_pretrained(sharded)
    one_sentence(error)


# ------------------------------------------------------------------------------------------ newer checkpoints


def test_a_mixer_of_a_newer_version(folder):
    edit_config(folder, token_mixers=["interdomain", "hyena"])
    with pytest.raises(ValueError, match="token_mixers must be .*; got hyena.") as error:
        AutoModelForCausalLM.from_pretrained(folder)
    one_sentence(error)


def test_a_choice_of_a_newer_version(folder):
    edit_config(folder, feature_map="exponential")
    with pytest.raises(StrictDataclassError, match="feature_map must be one of silu_l2, .*; got 'exponential'"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_field_of_a_newer_version_is_named(folder, caplog):
    """The library keeps such a field without a word, and the model would quietly be another one."""
    edit_config(folder, forget_rank=4)
    with caplog.at_level(logging.WARNING):
        config = AutoConfig.from_pretrained(folder)
    (record,) = [record for record in caplog.records if "forget_rank" in record.message]
    assert record.message == (
        "InterdomainConfig does not know, and ignores, forget_rank: correct the name, or update modeling_interdomain "
        "if a newer version has saved it."
    )
    assert config.forget_rank == 4  # kept, as any user's own field


def test_known_fields_are_not_named(folder, caplog):
    with caplog.at_level(logging.WARNING):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
        InterdomainConfig(**model.config.to_dict())
        InterdomainConfig(num_labels=3, rope_theta=500.0, torch_dtype="float32", layer_types=["linear_attention"] * 12)
        AutoConfig.from_pretrained(folder, num_labels=4, output_hidden_states=True, return_dict=True)
    assert "does not know" not in caplog.text


# ------------------------------------------------------------------------------------------ saving


def changed(folder):
    model = InterdomainForCausalLM.from_pretrained(folder)
    torch.nn.init.ones_(model.lm_head.weight)
    return model


@pytest.mark.parametrize(("size", "shards"), [(30_000, "50GB"), (30_000, "40KB"), (2_000, "1KB")])
@pytest.mark.parametrize("before", ["one-file", "shards"])
def test_a_full_disk_leaves_the_checkpoint_that_was_there(folder, sharded, full_disk, before, size, shards):
    """At the configuration, at the only file, at a later shard: wherever the disk fills up."""
    place = folder if before == "one-file" else sharded
    model, kept = changed(place), contents(place)
    with full_disk(size), pytest.raises((SafetensorError, OSError), match="File too large"):
        model.save_pretrained(place, max_shard_size=shards)
    assert contents(place) == kept
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(place).lm_head.weight, model.lm_head.weight)


def test_an_interrupted_save_leaves_the_checkpoint_that_was_there(sharded, monkeypatch):
    """Ctrl-C after the first of several shards that have the names of the old ones."""
    model, kept, written = changed(sharded), contents(sharded), []

    def interrupted(tensors, filename, **options):
        if written:
            raise KeyboardInterrupt
        written.append(filename)
        save_file(tensors, filename, **options)

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(sharded, max_shard_size="40KB")
    assert written and contents(sharded) == kept


@pytest.mark.parametrize("shards", ["50GB", "40KB", "20KB"])
@pytest.mark.parametrize("before", ["one-file", "shards"])
def test_a_new_checkpoint_replaces_the_old_one_whole(folder, sharded, before, shards):
    """The library would leave a single file beside new shards, and load the old weights from it."""
    place = folder if before == "one-file" else sharded
    model = changed(place)
    model.save_pretrained(place, max_shard_size=shards)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(place).lm_head.weight, model.lm_head.weight)
    index = place / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert {path.name for path in place.glob("*.safetensors")} == named
    assert (place / "tokenizer.json").exists() and not list(place.glob(".saving-*"))


def test_a_variant_lies_beside_the_other_weights(folder):
    model, kept = changed(folder), contents(folder)
    for shards in ("40KB", "50GB"):
        model.save_pretrained(folder, variant="ones", max_shard_size=shards)
    assert contents(folder).keys() == kept.keys() | {"model.ones.safetensors"}
    assert contents(folder)["model.safetensors"] == kept["model.safetensors"]
    loaded = AutoModelForCausalLM.from_pretrained(folder, variant="ones")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
def test_what_a_save_is_given_is_heeded(before, tmp_path, make_model):
    """Weights gathered by others, and that another process writes; also where a checkpoint is replaced."""
    model = make_model(dtype=torch.float32)
    if before:
        model.save_pretrained(tmp_path)
    kept = sorted(tmp_path.iterdir())
    model.save_pretrained(tmp_path, is_main_process=False)
    assert sorted(tmp_path.iterdir()) == kept
    model.save_pretrained(tmp_path, state_dict={name: torch.full_like(x, 2) for name, x in model.state_dict().items()})
    assert all(x.eq(2).all() for x in load_file(tmp_path / "model.safetensors").values())


def test_a_list_of_shards_arrives_after_them(tmp_path, monkeypatch):
    """Whoever is cut off in between has no list of files that are not there."""
    moved, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: moved.append(os.path.basename(new)) or replace(old, new))
    monkeypatch.setattr(os, "listdir", lambda path, listdir=os.listdir: sorted(listdir(path)))
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    with replacing(tmp_path) as new:
        for name in (*shards, "model.safetensors.index.json", "config.json", "zero.safetensors"):
            (tmp_path / os.path.basename(new) / name).write_text("x")
    assert moved.index("model.safetensors.index.json") > max(map(moved.index, shards))
    assert moved[-2:] == ["config.json", "model.safetensors.index.json"]


# ------------------------------------------------------------------------------------------ using, publishing


def no_config(folder):
    (folder / "config.json").unlink()


def another_architecture(folder):
    edit_config(folder, model_type="llama")


def newer_mixer(folder):
    edit_config(folder, token_mixers="hyena")


def newer_choice(folder):
    edit_config(folder, feature_map="exponential")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def only_pickles(folder):
    no_weights(folder)
    torch.save({}, folder / "pytorch_model.bin")


def damaged_weights(folder):
    truncate(folder / "model.safetensors")


def other_shape(folder):
    edit_config(folder, num_hidden_layers=3)


def leftover_weights(folder):
    tensors = load_file(folder / "model.safetensors") | {"model.adapter": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def diverged(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def no_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def anothers_tokenizer(folder):
    text_data.train_tokenizer(some_documents(), 310).save_pretrained(folder)


def no_auto_map(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))


def lost_code(folder):
    (folder / "registry.py").unlink()


def broken_card(folder):
    (folder / "README.md").write_text("---\nlicense: [\n---\n\n# Mine\n")


def broken_report(folder):
    (folder / "results.json").write_text("{")


def list_as_report(folder):
    (folder / "results.json").write_text("[1]")


def other_width(folder):
    edit_config(folder, intermediate_size=40)


def damaged_tokenizer(folder):
    truncate(folder / "tokenizer.json")


MISTAKES = {
    no_config: "is not a folder with a saved model: it has no config.json.",
    another_architecture: "holds a model of type llama, and the card is for interdomain models.",
    newer_mixer: "got hyena.",
    newer_choice: "feature_map must be one of silu_l2, fourier, fourier_shifted; got 'exponential'.",
    no_weights: "has no weights: neither model.safetensors nor model.safetensors.index.json.",
    only_pickles: "has no safetensors, only pickles (pytorch_model.bin): load and save the model again.",
    damaged_weights: "copy or download again, from the Hub with force_download=True.",
    other_shape: "do not fit its config.json: 20 missing, for example model.layers.2.input_layernorm.weight.",
    other_width: "do not fit its config.json: 6 of another shape, for example model.layers.0.mlp.down_proj.weight.",
    leftover_weights: "do not fit its config.json: 1 unexpected, for example model.adapter.",
    diverged: "1 weights of {folder} are not finite, for example lm_head.weight.",
    no_tokenizer: "holds no tokenizer: tokenizer.save_pretrained writes it there.",
    anothers_tokenizer: "has 310 tokens, the model only 300: it is another model's.",
    no_auto_map: "names no code (auto_map): load the model and save it again, which writes the code beside it.",
    lost_code: "lacks the code registry.py: load the model and save it again, which writes the code beside it.",
    broken_card: "README.md cannot be read: repair or remove it.",
    broken_report: "results.json is not a readable JSON file.",
    list_as_report: "results.json must hold a JSON object, that is {{...}}: remove it, or write it again.",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_folder_that_should_not_be_published(folder, capsys, mistake):
    mistake(folder)
    kept = contents(folder)
    assert publish.main([str(folder), "user/model"]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.endswith(MISTAKES[mistake].format(folder=folder)) and captured.out == ""
    assert contents(folder) == kept


UNUSABLE = {
    no_config: "is not a folder with a saved model.",
    no_tokenizer: "holds no tokenizer: tokenizer.save_pretrained writes it there.",
    damaged_tokenizer: "does not load: ",
    no_weights: "does not load: Error no file named model.safetensors",
    damaged_weights: "copy or download again, from the Hub with force_download=True.",
    newer_choice: "feature_map must be one of silu_l2, fourier, fourier_shifted; got 'exponential'.",
} | {mistake: MISTAKES[mistake] for mistake in (other_shape, other_width, leftover_weights, anothers_tokenizer)}


@pytest.mark.parametrize("mistake", UNUSABLE, ids=lambda mistake: mistake.__name__)
def test_a_folder_that_should_not_be_used(folder, capsys, mistake):
    mistake(folder)
    assert evaluate.main([str(folder)]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert UNUSABLE[mistake] in line and str(folder) in line and captured.out == ""


PROGRAMS = {
    "lengths": (evaluate_lengths, ["--trained-length", "8", "--data", "{text}"]),
    "tasks": (evaluate_tasks, []),
    "lora": (finetune_lora, ["--output", "{text}.adapter"]),
    "context": (long_context, ["{text}"]),
    "page": (chat_page, []),
}


@pytest.mark.parametrize(("program", "options"), PROGRAMS.values(), ids=PROGRAMS)
def test_every_program_refuses_weights_that_do_not_fit(folder, tmp_path, capsys, program, options):
    if program is chat_page:
        pytest.importorskip("gradio")
    other_shape(folder)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(some_documents()))
    assert program.main([str(folder), *(option.format(text=text) for option in options)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(MISTAKES[other_shape])


@pytest.mark.parametrize("task", ["needle", "mqar"])
def test_recall_refuses_a_folder_of_a_newer_version(folder, tmp_path, capsys, task):
    newer_choice(folder)
    assert recall.main([task, str(folder), "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(MISTAKES[newer_choice])


@pytest.mark.parametrize("damage", ["missing", "index", "[]", '{"weight_map": {"a": null}}'])
def test_shards_that_should_not_be_published(sharded, capsys, damage):
    if damage == "missing":
        second_shard(sharded).unlink()
    elif damage != "index":
        (sharded / "model.safetensors.index.json").write_text(damage)
    else:
        truncate(sharded / "model.safetensors.index.json")
    assert publish.main([str(sharded), "user/model"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    message = "lacks the weight files model-00002" if damage == "missing" else "is not a list of weight files"
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "model names no owner: a repository is user/name."),
        (["user/a/b"], "user/a/b is not a name for a repository: Repo id must be in the form"),
        (["user/mo del"], "user/mo del is not a name for a repository: "),
        (["user/model", "--evaluation", "nowhere.json"], "nowhere.json is not a readable JSON file."),
        (["user/model", "--evaluation", "{folder}/config.json"], "is not a file of results of lm-eval"),
    ],
    ids=["no owner", "too long", "space", "no results", "other results"],
)
def test_arguments_of_publish(folder, capsys, arguments, message):
    assert publish.main([str(folder), *(argument.format(folder=folder) for argument in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (folder / "README.md").exists()


@pytest.fixture(scope="module")
def hub():
    with running_hub() as hub:
        yield hub


@pytest.fixture
def here(hub, monkeypatch):
    speak_to(hub, publish, monkeypatch)
    return hub


@pytest.mark.parametrize(
    ("token", "refusals", "message"),
    [
        (None, {}, "You are not logged in to the Hub: run `hf auth login`, or set HF_TOKEN."),
        ("hf_wrong", {}, "The Hub refused user/{name} (status 401): log in with `hf auth login`"),
        (TOKEN, {"POST /api/models/": 403}, "The Hub refused user/{name} (status 403): may this token write there?"),
        (
            TOKEN,
            {"PUT /lfs": 507},
            "user/{name} was not updated: Error while uploading 'model.safetensors' to the Hub.",
        ),
        (TOKEN, {"POST /api/models/": 413}, "The Hub refused user/{name} (status 413): "),
    ],
    ids=["no-token", "wrong-token", "not-mine", "upload", "too-large"],
)
def test_an_upload_that_fails_changes_nothing(here, folder, capsys, monkeypatch, request, token, refusals, message):
    name = request.node.callspec.id
    assert publish.main([str(folder), f"user/{name}"]) == 0
    published = here.repositories[f"user/{name}"].files
    changed(folder).save_pretrained(folder)
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    here.refusals.update(refusals)
    here.objects.clear()
    capsys.readouterr()
    assert publish.main([str(folder), f"user/{name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message.format(name=name))
    assert here.repositories[f"user/{name}"].files == published

    here.refusals.clear()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert publish.main([str(folder), f"user/{name}"]) == 0
    assert here.repositories[f"user/{name}"].files["model.safetensors"] == (folder / "model.safetensors").read_bytes()


def test_private_is_not_sent_to_what_is_public(here, folder, capsys):
    assert publish.main([str(folder), "user/open"]) == 0
    published = here.repositories["user/open"].files
    changed(folder).save_pretrained(folder)
    assert publish.main([str(folder), "user/open", "--private"]) == 2
    assert "user/open exists and is public: nothing was sent" in capsys.readouterr().err
    assert here.repositories["user/open"].files == published


def test_metadata_that_the_hub_does_not_know(here, folder, capsys):
    (folder / "README.md").write_text("---\npipeline_tag: oracle\n---\n\n# Mine\n")
    assert publish.main([str(folder), "user/oracle"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('user/oracle was not updated: README.md: "pipeline_tag" must be one of')
    assert not here.repositories["user/oracle"].files


def test_no_network(here, folder, capsys, monkeypatch):
    monkeypatch.setattr(publish, "HfApi", lambda: HfApi(endpoint="http://127.0.0.1:1"))
    assert publish.main([str(folder), "user/offline"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("user/offline was not updated: ") and line.endswith("Run the same command again.")


def test_a_card_that_cannot_be_written_leaves_the_old_one(here, folder, capsys, full_disk):
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    kept = contents(folder)
    with full_disk(10):
        assert publish.main([str(folder), "user/full"]) == 2
    assert "could not be written" in capsys.readouterr().err
    assert contents(folder) == kept and "user/full" not in here.repositories


def test_a_save_without_weights_removes_none(tmp_path, make_model):
    make_model(dtype=torch.float32).save_pretrained(tmp_path)
    with replacing(tmp_path) as new:
        (tmp_path / os.path.basename(new) / "notes.txt").write_text("x")
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "notes.txt").is_file()


def test_weights_of_a_variant_with_a_point_replace_their_own_alone(tmp_path):
    for name in ("model.a.b.safetensors", "model.aXb.safetensors", "model.safetensors"):
        (tmp_path / name).write_text("old")
    with replacing(tmp_path, "a.b") as new:
        (tmp_path / os.path.basename(new) / "model.a.b-00001-of-00001.safetensors").write_text("new")
    names = ["model.a.b-00001-of-00001", "model.aXb", "model"]
    assert sorted(x.name for x in tmp_path.iterdir()) == [f"{name}.safetensors" for name in names]


def test_shards_of_a_variant_are_replaced_by_its_single_file(tmp_path, make_model):
    model = make_model(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    for size in ("20KB", "50GB"):
        model.save_pretrained(tmp_path, variant="ones", max_shard_size=size)
    assert sorted(x.name for x in tmp_path.glob("*.safetensors*")) == ["model.ones.safetensors", "model.safetensors"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_not_published(folder, capsys, value):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert publish.main([str(folder), "user/model", "--dry-run"]) == 2
    assert "1 weights of" in (said := capsys.readouterr().err) and "for example model.norm.weight" in said


def test_a_repository_for_code_has_an_owner(folder, capsys):
    assert publish.main([str(folder), "user/model", "--code-repo", "code", "--dry-run"]) == 2
    assert "code names no owner: a repository is user/name." in capsys.readouterr().err


def test_folders_are_not_sent(folder, capsys):
    """Whatever they are called."""
    (folder / "curves.png").mkdir()
    assert publish.main([str(folder), "user/model", "--dry-run"]) == 0
    sent, left = capsys.readouterr().out.splitlines()[:2]
    assert "curves.png" not in sent and left == "Not sent: curves.png/"
