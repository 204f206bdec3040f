"""Sparse attention beside the layers of a trained model: the same logits, then training; and what is refused."""

import argparse
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conversion import add_sparse
from conversion.add_sparse import start_branch
from examples import train
from examples.text_data import InputError
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, InterdomainForSequenceClassification
from tests.mamba_checks import check_refused, run
from tests.test_conversion_mamba import save_mamba
from tests.test_conversion_mamba2 import save_mamba as save_mamba2
from tests.test_train import options, texts  # noqa: F401  the fixtures of the example's runs

# Sources, and the layers that have a branch then and those of them that start with B and C.
SOURCES = {"interdomain-softmax": ([0], []), "mamba": ([0, 1], [0, 1]), "mamba2": ([0, 1], [0, 1])}
SOURCES |= {"ssd": ([0, 1], [0, 1])}  # without convolutions


@pytest.fixture
def source(make_model, tmp_path):
    def make(name: str):
        """A folder of ours, of a Mamba too."""
        folder = tmp_path / name
        if not name.startswith("mamba"):
            make_model(name, dtype=torch.float32, state_dtype="float32").save_pretrained(folder)
            return folder
        {"mamba": save_mamba, "mamba2": save_mamba2}[name](tmp_path / "theirs")
        assert run(f"from-{name}", tmp_path / "theirs", folder) == 0
        return folder

    return make


@pytest.mark.parametrize("name", SOURCES)
def test_the_logits_are_those_of_the_source(name, source, tmp_path, capsys):
    layers, started = SOURCES[name]
    folder, target = source(name), tmp_path / "target"
    asked = ("--sparse-attention", "lsh+key_selection+sink", "--sparse-keys", "12", "--sparse-hash", "sign")
    asked += ("--sparse-hash-size", "3", "--ranking-loss-coef", "0.5")
    assert run("add-sparse", folder, target, *asked, "--dry-run") == 0 and not target.exists()
    assert run("add-sparse", folder, target, *asked) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(x).eval() for x in (folder, target))
    ids = torch.randint(48, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(after(ids).logits, before(ids).logits)
    config = after.config
    assert (config.sparse_keys, config.sparse_hash, config.ranking_loss_coef) == (12, "sign", 0.5)
    assert config.sparse_per_layer == ["lsh+key_selection+sink" if i in layers else None for i in range(2)]
    report = json.loads((target / "conversion_report.json").read_text())
    assert (report["layers"], report["started_from_b_and_c"]) == (layers, started)
    new = after.num_parameters() - before.num_parameters()
    assert f"{before.num_parameters():,} parameters carried over" in capsys.readouterr().out and new > 0
    after.train()(ids, labels=ids).loss.backward()
    branch = after.model.layers[0].token_mixer.sparse
    assert branch.gate.weight.grad.ne(0).any() and branch.scorer.weight_0.grad.ne(0).any()


def test_queries_and_keys_start_as_c_and_b(make_model, random_ids):
    """Exactly those of Mamba-2 without its activation; of Mamba in the limit of small inputs, for taps all alike."""
    branch = {"sparse_attention": "hax", "sparse_keys": 8, "sparse_hash_size": 4, "sparse_key_dim": 5}
    mixer = make_model("mamba2", **branch, sparse_num_heads=2).model.layers[0].token_mixer
    assert start_branch(mixer)
    for name in ("q_proj", "k_proj", "q_conv", "k_conv"):
        assert torch.equal(getattr(mixer.sparse, name).weight, getattr(mixer, name).weight)

    mixer = make_model("selective-scan", **branch, sparse_num_heads=1).model.layers[0].token_mixer
    with torch.no_grad():
        mixer.v_conv.weight.copy_(mixer.v_conv.weight[:1].expand_as(mixer.v_conv.weight))
        mixer.v_conv.bias.zero_()
        assert start_branch(mixer)
        x = 1e-5 * torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        tokens, _ = mixer._inputs([mixer.v_proj(x)], None, None, None, keep=False)
        found = mixer.sparse.prepare(x, tokens[2][:, :, None], None, None, None)
    key = found.key[:, :, 0] * mixer.sparse.dim**0.5
    for own, theirs in ((found.query[:, :, 0], tokens[0]), (key, tokens[1])):
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-9)

    for changes in ({"sparse_key_dim": 4}, {"conv_kernel": 3}, {"sparse_num_heads": 4}):
        mixer = make_model("mamba2", **branch | changes).model.layers[0].token_mixer
        assert not start_branch(mixer)


def test_training_goes_on_from_it(options, tmp_path):  # noqa: F811
    """The gate leaves zero, and the scorer learns in the Trainer."""
    assert train.main(options("start", max_steps=1, warmup_tokens=1)) == 0
    assert (
        run("add-sparse", tmp_path / "start", tmp_path / "more", "--sparse-keys", "8", "--sparse-hash-size", "4") == 0
    )
    assert train.main(options("out", model=tmp_path / "more", max_steps=2, warmup_tokens=1)) == 0
    before, after = (
        AutoModelForCausalLM.from_pretrained(tmp_path / x).model.layers[0].token_mixer.sparse for x in ("more", "out")
    )
    assert before.gate.weight.eq(0).all() and after.gate.weight.ne(0).all()
    assert not torch.equal(before.scorer.weight_0, after.scorer.weight_0)


def test_a_classifier_keeps_its_head(make_model, random_ids, tmp_path):
    model = make_model(model_class=InterdomainForSequenceClassification, num_labels=3, dtype=torch.float32)
    model.save_pretrained(tmp_path / "source")
    assert run("add-sparse", tmp_path / "source", tmp_path / "target", "--sparse-attention", "sliding_window") == 0
    found = InterdomainForSequenceClassification.from_pretrained(tmp_path / "target").eval()
    ids = random_ids(2, 20)
    expected = InterdomainForSequenceClassification.from_pretrained(tmp_path / "source").eval()(ids).logits
    assert torch.equal(found(ids).logits, expected)


def test_what_cannot_be_is_refused_in_one_sentence(source, make_model, tmp_path, capsys):
    def refused(folder, message, *arguments, target="target"):
        check_refused(capsys, message, "add-sparse", folder, tmp_path / target, *arguments)

    ours = source("interdomain")
    refused(
        source("softmax"), "The source has no recurrent layers, which a branch stands beside: its layers are softmax."
    )
    refused(source("hax"), "The source has sparse_attention = ['hax', None] already.")
    save_mamba(tmp_path / "theirs")
    refused(tmp_path / "theirs", "a mamba model, not one of ours: convert it with from-mamba first.")
    refused(ours, "sparse_attention must be hax, lsh", "--sparse-attention", "lsh+window")
    refused(ours, "sparse_keys = 7 cannot be split evenly", "--sparse-keys", "7")
    refused(ours, "sparse_num_heads = 3 must be a divisor of the 4 groups", "--sparse-num-heads", "3")
    refused(ours, "12 bits are the most", "--sparse-hash", "sign", "--sparse-hash-size", "13")
    refused(ours, "ranking_loss_coef must be finite and not negative", "--ranking-loss-coef", "-1")
    refused(tmp_path / "nowhere", "is neither a folder nor a model of the Hub")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused(ours, "is not empty: choose another, or add --overwrite.", target="full")


PLAIN = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_a_coefficient_of_zero_is_one_that_was_asked_for():
    parser = argparse.ArgumentParser()
    add_sparse.add_arguments(parser)
    asked = parser.parse_args(["source", "target", "--ranking-loss-coef", "0"])
    assert add_sparse.with_branches(InterdomainConfig(**PLAIN), asked).ranking_loss_coef == 0


def test_branches_beside_quantized_weights_are_refused(tmp_path):
    with pytest.raises(InputError, match="The source is quantized: add branches to the original weights"):
        add_sparse.check_style(InterdomainConfig(**PLAIN, quantization_config={"quant_method": "awq"}), tmp_path)


def test_new_weights_are_those_of_the_seed(tmp_path):
    InterdomainForCausalLM(InterdomainConfig(**PLAIN)).save_pretrained(tmp_path / "source")
    found = []
    for number, seed in enumerate((1, 1, 2)):
        target = tmp_path / str(number)
        assert run("add-sparse", tmp_path / "source", target, "--seed", seed) == 0
        found.append(load_file(target / "model.safetensors")["model.layers.0.token_mixer.sparse.q_proj.weight"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
