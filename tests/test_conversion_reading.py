"""What the commands of `conversion` read of other models and of runs, piece by piece."""

import argparse
import copy
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from transformers import LlamaConfig, MistralConfig

from conversion import carry, check, from_training, reading, writing
from examples.text_data import InputError
from modeling_interdomain import InterdomainConfig
from modeling_interdomain.saving import whole
from tests.test_conversion import SHAPE, tokenizer  # noqa: F401  the fixture


def test_dropout_activation_and_padding_are_those_of_the_llama():
    source = LlamaConfig(**SHAPE, attention_dropout=0.25, hidden_act="gelu", pad_token_id=7)
    config = carry.interdomain_config(source, [0], 4)
    assert (config.attention_dropout, config.hidden_act, config.pad_token_id) == (0.25, "gelu", 7)


def test_a_window_as_long_as_the_positions_hides_nothing():
    assert carry.source_windows(MistralConfig(**SHAPE, sliding_window=64)) == [None] * 3
    assert carry.source_windows(MistralConfig(**SHAPE, sliding_window=63)) == [63] * 3


def test_rotary_frequencies_of_early_checkpoints_are_left_behind():
    weights = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert not carry.carried_weights(weights, LlamaConfig(**SHAPE))


def test_safetensors_are_read_where_there_are_pickles_too(tmp_path):
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).touch()
    assert reading.weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_a_state_dict_inside_a_checkpoint_of_deepspeed_is_found(tmp_path):
    torch.save({"module": {"x": torch.ones(1)}, "step": 3}, tmp_path / "x.pt")
    assert list(reading.read_weights([tmp_path / "x.pt"])) == ["x"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_optimizer_beside_the_weights_is_not_read(tmp_path):
    dcp.save({"x": torch.ones(1), "optim": {"x": torch.ones(1)}}, checkpoint_id=tmp_path, no_dist=True)
    assert list(reading.read_distributed(tmp_path)) == ["x"]


def test_checkpointed_layers_keep_their_names():
    weights = {f"model.layers.0._checkpoint_wrapped_module.{name}": torch.ones(1) for name in "ab"}
    assert from_training.clean(weights, "here").keys() == {"model.layers.0.a", "model.layers.0.b"}


def test_a_configuration_is_that_named_or_up_to_two_folders_above(tmp_path):
    def found(source, config=None):
        return from_training.config_folder(argparse.Namespace(source=source, config=config))

    (tmp_path / "config.json").touch()
    assert found(tmp_path / "a" / "b") == tmp_path and found(tmp_path, tmp_path / "other") == tmp_path / "other"
    with pytest.raises(InputError, match="name one with --config"):
        found(tmp_path / "a" / "b" / "c")


def test_only_a_later_version_is_noted():
    versions = ("99.0.0", transformers.__version__, "unknown")
    assert [check._later(version) for version in versions] == [True, False, False]


def test_a_chat_template_is_one_of_the_files_of_a_tokenizer(tmp_path, tokenizer):  # noqa: F811
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    assert sorted(writing.tokenizer_files(tmp_path)) == sorted(tmp_path.iterdir())


def test_a_run_goes_on_when_it_is_asked_to_overwrite(tmp_path):
    asked = {"source": tmp_path / "source", "target": tmp_path / "target", "overwrite": False, "dry_run": False}
    first, again, other = (asked, asked | {"overwrite": True}, asked | {"target": tmp_path})
    requests = [writing._request(argparse.Namespace(**x)) for x in (first, again, other)]
    assert requests[0] == requests[1] != requests[2]


@pytest.mark.parametrize("index", ["[]", '{"weight_map": {"a": 1}}', '{"weight_map": []}', "{"])
def test_an_index_that_names_no_shards(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InputError, match="does not say which shard holds which weights"):
        reading.weight_files(tmp_path)


def test_a_run_does_not_go_on_from_another_file(tmp_path):
    """Of whatever kind, in a folder or alone."""
    for source, file in ((tmp_path, tmp_path / "pytorch_model.bin"), (tmp_path / "x.gguf", tmp_path / "x.gguf")):
        file.touch()
        asked = argparse.Namespace(source=source, target=tmp_path / "target")
        before = writing._request(asked)
        os.utime(file, (1, 1))
        assert writing._request(asked) != before


def test_no_teacher_is_replaced(tmp_path):
    InterdomainConfig().save_pretrained(tmp_path / "llama")
    asked = {"source": "x", "teacher": str(tmp_path / "llama"), "overwrite": True}
    for target, message in ((tmp_path / "llama", "TEACHER and TARGET are the same"), (tmp_path, "contains TEACHER")):
        with pytest.raises(InputError, match=message):
            writing.check_target(argparse.Namespace(target=target, **asked))


def test_a_damaged_configuration_gets_no_code(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text("{")
    monkeypatch.setattr("sys.argv", ["whole", str(tmp_path)])
    with pytest.raises(SystemExit):
        whole.main()
    assert "has a config.json that cannot be read" in capsys.readouterr().err


def test_the_first_token_past_the_vocabulary_is_named(tmp_path, tokenizer):  # noqa: F811
    tokenizer.save_pretrained(tmp_path)
    InterdomainConfig(vocab_size=299).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has token 299, but the vocabulary ends at 298"):
        check.check_tokenizer(tmp_path)
