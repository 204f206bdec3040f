"""A Mamba of Transformers and the same model here: logits, decoding, the way back, and what is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, MambaConfig, MambaForCausalLM

from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from tests.test_conversion_mamba2 import in_pieces, run

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MAMBAS = {
    "plain": {},
    "untied": {"tie_word_embeddings": False, "expand": 3, "time_step_rank": 3, "residual_in_fp32": False},
    "biases": {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 1e-2},
}


def save_mamba(folder, dtype=torch.float32, **changes) -> MambaForCausalLM:
    """A model whose logits depend clearly on its state."""
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(**SHAPE | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith((".D", "A_log", "bias")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.generation_config = GenerationConfig(max_length=77, bos_token_id=0, eos_token_id=0)
    model.to(dtype).save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", MAMBAS)
def test_the_same_logits_whole_in_pieces_and_back(name, tmp_path, capsys):
    mamba = save_mamba(tmp_path / "mamba", **MAMBAS[name])
    assert run("from-mamba", tmp_path / "mamba", tmp_path / "ours") == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert isinstance(ours, InterdomainForCausalLM) and ours.num_parameters() == mamba.num_parameters()
    assert f"{mamba.num_parameters():,} parameters" in capsys.readouterr().out
    assert ours.generation_config.max_length == 77
    assert ours.config.residual_in_fp32 == mamba.config.residual_in_fp32
    ids = torch.randint(1, 48, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = mamba(ids, use_cache=False).logits
        found = ours(ids, use_cache=False).logits
    assert expected.std() > 0.3  # of what is compared
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_pieces(ours, ids), expected, rtol=1e-4, atol=1e-4)

    assert run("to-mamba", tmp_path / "ours", tmp_path / "back") == 0
    back, report = MambaForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values())
    for (name, x), (other, y) in zip(mamba.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other and torch.equal(x, y), name
    fields = ("hidden_size", "intermediate_size", "state_size", "time_step_rank", "conv_kernel", "use_bias")
    assert [getattr(back.config, x) for x in fields] == [getattr(mamba.config, x) for x in fields]


def test_it_generates_what_the_mamba_does_and_guesses_are_taken_back(tmp_path, guess_ahead):
    mamba = save_mamba(tmp_path / "mamba")
    assert run("from-mamba", tmp_path / "mamba", tmp_path / "ours", "--dtype", "float32") == 0
    ours = InterdomainForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids = torch.randint(1, 48, (3, 12), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = mamba.generate(ids, **settings)
    assert torch.equal(ours.generate(ids, **settings), expected)
    alone = ours.generate(ids[:1], max_new_tokens=12, do_sample=False)
    guess_ahead(alone)
    guessed = ours.generate(ids[:1], max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(guessed, alone)


def test_half_precision_keeps_the_decays(tmp_path):
    mamba = save_mamba(tmp_path / "mamba", torch.bfloat16)
    assert run("from-mamba", tmp_path / "mamba", tmp_path / "ours") == 0
    ours = InterdomainForCausalLM.from_pretrained(tmp_path / "ours").eval()
    mixer = ours.model.layers[0].token_mixer
    assert mixer.v_proj.weight.dtype == torch.bfloat16 and mixer.recurrence.A_log.dtype == torch.float32
    ids = torch.randint(1, 48, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = mamba.float()(ids, use_cache=False).logits
        found = ours(ids, use_cache=False).logits
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() / exact.norm() < 0.03


def test_what_is_no_mamba_is_refused_in_one_sentence(tmp_path, capsys):
    def refused(command, source, message):
        assert run(command, source, tmp_path / "target") != 0
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1, said
        assert not (tmp_path / "target").exists()

    save_mamba(tmp_path / "mamba")
    save_mamba(tmp_path / "gelu", hidden_act="gelu")
    shape = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sources = {
        "hybrid": {"token_mixers": ["selective_scan", "ssd"], "feed_forwards": "none"},
        "with an mlp": {"token_mixers": "selective_scan"},
        "with a branch": {"token_mixers": "selective_scan", "feed_forwards": "none", "sparse_attention": "lsh"},
        "odd": {"token_mixers": "selective_scan", "feed_forwards": "none", "scan_channels": 40},
    }
    for name, changes in sources.items():
        InterdomainForCausalLM(InterdomainConfig(**shape | changes)).save_pretrained(tmp_path / name)
    capsys.readouterr()
    refused("from-mamba", tmp_path / "odd", "The source is of type interdomain: models of type mamba can be converted.")
    refused("from-mamba", tmp_path / "gelu", 'The source has hidden_act = "gelu": layers of Mamba here have "silu".')
    refused("to-mamba", tmp_path / "mamba", "The source is of type mamba: models of type interdomain can be converted.")
    refused("to-mamba", tmp_path / "hybrid", "its token_mixers is 'ssd' instead of 'selective_scan'.")
    refused("to-mamba", tmp_path / "with an mlp", "its feed_forwards is 'mlp' instead of 'none'.")
    refused("to-mamba", tmp_path / "with a branch", "it has sparse_attention beside its layers.")
    refused("to-mamba2", tmp_path / "with a branch", "it has sparse_attention beside its layers.")
    refused("to-mamba", tmp_path / "odd", "a multiple of hidden_size = 32, and the source has 40.")
