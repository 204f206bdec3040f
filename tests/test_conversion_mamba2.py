"""A Mamba-2 of Transformers and the same model here: logits, decoding, the way back, and what is refused."""

import json

import pytest
import torch
from transformers import GenerationConfig, Mamba2Config, Mamba2ForCausalLM

from conversion import mamba2
from examples.text_data import InputError
from modeling_interdomain import InterdomainCache, InterdomainConfig, InterdomainForCausalLM
from tests.mamba_checks import check_generation, check_half_precision, check_refused, check_there_and_back, run

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 16,
    "n_groups": 1,
    "chunk_size": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
MAMBAS = {
    "plain": {},
    "groups": {"n_groups": 2, "use_conv_bias": False, "tie_word_embeddings": True},
    "biases": {"use_bias": True, "conv_kernel": 3, "layer_norm_epsilon": 1e-2},
    "limits": {"time_step_limit": (0.02, 0.3), "expand": 3, "head_dim": 12, "n_groups": 4},
}


def save_mamba(folder, dtype=torch.float32, **changes) -> Mamba2ForCausalLM:
    """A model whose logits depend clearly on its state."""
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(Mamba2Config(**SHAPE | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith((".D", "bias")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif not name.endswith("A_log"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.generation_config = GenerationConfig(max_length=77, bos_token_id=0, eos_token_id=0)
    model.to(dtype).save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", MAMBAS)
def test_the_same_logits_whole_in_pieces_and_back(name, tmp_path, capsys):
    mamba = save_mamba(tmp_path / "mamba", **MAMBAS[name])
    back = check_there_and_back("mamba2", mamba, tmp_path, 1e-5)
    assert f"{mamba.num_parameters():,} parameters" in capsys.readouterr().out
    same = {key: getattr(back.config, key) == value for key, value in mamba.config.to_dict().items() if key in SHAPE}
    same.pop("chunk_size")  # how it is computed
    assert all(same.values()), same


def test_it_generates_what_the_mamba_does_and_pads_do_not_leak(tmp_path, guess_ahead):
    mamba = save_mamba(tmp_path / "mamba")
    assert run("from-mamba2", tmp_path / "mamba", tmp_path / "ours", "--dtype", "float32") == 0
    ours = InterdomainForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids = torch.randint(1, 48, (3, 12), generator=torch.Generator().manual_seed(1))
    check_generation(ours, mamba, ids, guess_ahead)

    # Pads on the right: the state is that of the row alone, also where a decoding step goes on from it.
    padded, mask = torch.nn.functional.pad(ids[:, :7], (0, 5)), torch.zeros(3, 12, dtype=torch.long)
    mask[:, :7] = 1
    next_token, mask_after = ids[:, :1], torch.nn.functional.pad(mask, (0, 1), value=1)
    with torch.no_grad():
        alone = mamba(torch.cat([ids[:, :7], next_token], dim=1)).logits[:, -1]
        cache = InterdomainCache(ours.config)
        ours(padded, attention_mask=mask, past_key_values=cache)
        found = ours(next_token, attention_mask=mask_after, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


def test_what_a_mamba_alone_does_not_do(tmp_path):
    """Beams, tokens taken back, packed documents and adapters, each against what the Mamba-2 says of whole texts."""
    peft = pytest.importorskip("peft")
    mamba = save_mamba(tmp_path / "mamba", n_groups=2)
    assert run("from-mamba2", tmp_path / "mamba", tmp_path / "ours") == 0
    ours = InterdomainForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids = torch.randint(1, 48, (2, 20), generator=torch.Generator().manual_seed(2))
    settings = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **settings), mamba.generate(ids, use_cache=False, **settings))

    with torch.no_grad():
        whole = mamba(ids, use_cache=False).logits
        cache = InterdomainCache(ours.config)
        cache.activate_past_recording()
        ours(ids[:, :12], past_key_values=cache)
        ours(torch.full((2, 3), 7), past_key_values=cache)
        cache.crop(-3)
        again = ours(ids[:, 12:], past_key_values=cache).logits
        packed = ours(ids.view(1, -1), cu_seq_lens_q=torch.tensor([0, 20, 40]), use_cache=False).logits
    torch.testing.assert_close(again, whole[:, 12:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.view_as(whole), whole, rtol=1e-5, atol=1e-5)

    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted = peft.get_peft_model(ours, peft.LoraConfig(target_modules=targets, init_lora_weights=False)).train()
    adapted(ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(gradients) == 2 * 2 * len(targets) and all(x is not None and x.any() for x in gradients.values())
    after = adapted.eval()(ids).logits
    assert (after - whole).abs().max() > 1e-2
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, after, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    assert run("to-mamba2", tmp_path / "merged", tmp_path / "back") == 0
    back = Mamba2ForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(back(ids, use_cache=False).logits, after, rtol=1e-4, atol=1e-4)


def test_half_precision_keeps_the_decays(tmp_path):
    check_half_precision("mamba2", save_mamba(tmp_path / "mamba", torch.bfloat16), tmp_path)


def test_a_dry_run_writes_nothing(tmp_path):
    save_mamba(tmp_path / "mamba")
    assert run("from-mamba2", tmp_path / "mamba", tmp_path / "ours", "--dry-run") == 0
    assert run("from-mamba2", tmp_path / "mamba", tmp_path / "kept") == 0
    assert run("to-mamba2", tmp_path / "kept", tmp_path / "back", "--dry-run") == 0
    assert sorted(x.name for x in tmp_path.iterdir()) == ["kept", "mamba"]


def test_what_is_no_mamba_is_refused_in_one_sentence(tmp_path, capsys):
    def refused(command, source, message):
        check_refused(capsys, message, command, source, tmp_path / "target")

    save_mamba(tmp_path / "mamba")
    ours = InterdomainConfig(
        vocab_size=48, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, token_mixers="ssd"
    )
    InterdomainForCausalLM(ours).save_pretrained(tmp_path / "cheems")
    refused(
        "from-mamba2", tmp_path / "cheems", "The source is of type interdomain: models of type mamba2 can be converted."
    )
    refused(
        "to-mamba2", tmp_path / "mamba", "The source is of type mamba2: models of type interdomain can be converted."
    )
    refused("to-mamba2", tmp_path / "cheems", "The source is no Mamba-2: its feed_forwards is 'mlp' instead of 'none'.")
    refused("from-mamba2", tmp_path / "nowhere", "neither a folder nor a model of the Hub")
    file = tmp_path / "mamba" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"state_size": 12}))
    refused("from-mamba2", tmp_path / "mamba", "does not fit its configuration: it")
    file.write_text(json.dumps(config | {"conv_kernel": 1}))
    refused("from-mamba2", tmp_path / "mamba", "The source has conv_kernel = 1, a convolution of one token")


OURS = {"token_mixers": "ssd", "num_attention_heads": 4, "ssd_conv_kernel": 4, "ssd_activation": "silu"}
OURS |= mamba2.MAMBA2 | {"hidden_size": 32, "head_dim": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssd_head_dim": 10}, "a multiple of hidden_size = 32, and the source has 4 of 10"),
        ({"ssd_conv_kernel": 1}, "it has no convolution of x, B and C, or no activation after it"),
        ({"ssd_activation": None}, "it has no convolution of x, B and C, or no activation after it"),
    ],
)
def test_what_no_mamba2_computes_does_not_go_back(changes, message):
    mamba2.their_config(InterdomainConfig(**OURS))
    with pytest.raises(InputError, match=message):
        mamba2.their_config(InterdomainConfig(**OURS | changes))


def test_a_quantized_mamba_is_refused():
    with pytest.raises(InputError, match="The source is quantized"):
        mamba2.check_style(Mamba2Config(quantization_config={"quant_method": "awq"}))


def test_a_limit_on_one_side_is_one():
    limits = {(0.0, 0.3): [0.0, 0.3], (0.1, float("inf")): [0.1, float("inf")], (0.0, float("inf")): None}
    shape = {"hidden_size": 32, "num_heads": 8, "head_dim": 8}
    for limit, expected in limits.items():
        assert mamba2.our_config(Mamba2Config(**shape, time_step_limit=limit)).ssd_dt_limit == expected


def test_embeddings_of_the_first_versions_are_found():
    found = mamba2.our_weights(InterdomainConfig(**OURS), {"backbone.embedding.weight": torch.ones(1)})
    assert list(found) == ["model.embed_tokens.weight"]
