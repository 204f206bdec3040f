"""A Mamba of Transformers and the same model here: logits, decoding, the way back, and what is refused."""

import pytest
import torch
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM

from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
from tests.mamba_checks import check_generation, check_half_precision, check_refused, check_there_and_back, run

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
    back = check_there_and_back("mamba", mamba, tmp_path, 1e-4)
    assert f"{mamba.num_parameters():,} parameters" in capsys.readouterr().out
    assert InterdomainConfig.from_pretrained(tmp_path / "ours").residual_in_fp32 == mamba.config.residual_in_fp32
    fields = ("hidden_size", "intermediate_size", "state_size", "time_step_rank", "conv_kernel", "use_bias")
    assert [getattr(back.config, x) for x in fields] == [getattr(mamba.config, x) for x in fields]


def test_it_generates_what_the_mamba_does_and_guesses_are_taken_back(tmp_path, guess_ahead):
    mamba = save_mamba(tmp_path / "mamba")
    assert run("from-mamba", tmp_path / "mamba", tmp_path / "ours", "--dtype", "float32") == 0
    ours = InterdomainForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids = torch.randint(1, 48, (3, 12), generator=torch.Generator().manual_seed(1))
    check_generation(ours, mamba, ids, guess_ahead)


def test_half_precision_keeps_the_decays(tmp_path):
    check_half_precision("mamba", save_mamba(tmp_path / "mamba", torch.bfloat16), tmp_path)


def test_what_is_no_mamba_is_refused_in_one_sentence(tmp_path, capsys):
    def refused(command, source, message):
        check_refused(capsys, message, command, source, tmp_path / "target")

    save_mamba(tmp_path / "mamba")
    save_mamba(tmp_path / "gelu", hidden_act="gelu")
    shape = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sources = {
        "hybrid": {"token_mixers": ["selective_scan", "ssd"], "feed_forwards": "none"},
        "with an mlp": {"token_mixers": "selective_scan"},
        "with a branch": {"token_mixers": "selective_scan", "feed_forwards": "none", "sparse_attention": "lsh"},
        "with a state": {"token_mixers": "selective_scan", "feed_forwards": "none", "learned_state": True},
        "odd": {"token_mixers": "selective_scan", "feed_forwards": "none", "scan_channels": 40},
    }
    for name, changes in sources.items():
        InterdomainForCausalLM(InterdomainConfig(**shape | changes)).save_pretrained(tmp_path / name)
    refused("from-mamba", tmp_path / "odd", "The source is of type interdomain: models of type mamba can be converted.")
    refused("from-mamba", tmp_path / "gelu", 'The source has hidden_act = "gelu": layers of Mamba here have "silu".')
    refused("to-mamba", tmp_path / "mamba", "The source is of type mamba: models of type interdomain can be converted.")
    refused("to-mamba", tmp_path / "hybrid", "its token_mixers is 'ssd' instead of 'selective_scan'.")
    refused("to-mamba", tmp_path / "with an mlp", "its feed_forwards is 'mlp' instead of 'none'.")
    refused("to-mamba", tmp_path / "with a branch", "it has sparse_attention beside its layers.")
    refused("to-mamba2", tmp_path / "with a branch", "it has sparse_attention beside its layers.")
    refused("to-mamba", tmp_path / "with a state", "it begins each text with a learned state.")
    refused("to-mamba2", tmp_path / "with a state", "it begins each text with a learned state.")
    refused("to-mamba", tmp_path / "odd", "a multiple of hidden_size = 32, and the source has 40.")
