"""What is asked of a model made of a Mamba or a Mamba-2 of Transformers, and the commands of `conversion` here."""

import torch
from transformers import AutoModelForCausalLM

from conversion.__main__ import main
from modeling_interdomain import InterdomainCache, InterdomainForCausalLM


def run(command, *arguments) -> int:
    return main([command, *map(str, arguments)])


def check_refused(capsys, message, command, source, target, *options):
    """The command ends with one sentence that says so, and nothing is written."""
    capsys.readouterr()
    before = sorted(target.parent.rglob("*"))
    assert run(command, source, target, *options) != 0
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1, said
    assert sorted(target.parent.rglob("*")) == before


@torch.no_grad()
def _in_pieces(model, ids: torch.Tensor) -> torch.Tensor:
    """Two chunks, then one token at a time."""
    cache = InterdomainCache(model.config)
    pieces = [*ids[:, :22].split([13, 9], dim=1), *ids[:, 22:].split(1, dim=1)]
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1)


def check_there_and_back(kind, mamba, folder, bound):
    """The same logits, whole and in pieces, and the same weights again, in the model that is returned."""
    assert run(f"from-{kind}", folder / "mamba", folder / "ours") == 0
    ours = AutoModelForCausalLM.from_pretrained(folder / "ours").eval()
    assert isinstance(ours, InterdomainForCausalLM) and ours.num_parameters() == mamba.num_parameters()
    assert ours.generation_config.max_length == 77
    ids = torch.randint(1, 48, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = mamba(ids, use_cache=False).logits
        found = ours(ids, use_cache=False).logits
    assert expected.std() > 0.3  # of what is compared
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    torch.testing.assert_close(_in_pieces(ours, ids), expected, rtol=bound, atol=bound)

    assert run(f"to-{kind}", folder / "ours", folder / "back") == 0
    back, report = type(mamba).from_pretrained(folder / "back", output_loading_info=True)
    assert not any(report.values())
    for (name, x), (other, y) in zip(mamba.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other and torch.equal(x, y), name
    return back


def check_generation(ours, mamba, ids, guess_ahead):
    """Greedily the same tokens, and guesses that were wrong are taken back."""
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(ours.generate(ids, **settings), mamba.generate(ids, **settings))
    alone = ours.generate(ids[:1], max_new_tokens=12, do_sample=False)
    guess_ahead(alone)
    guessed = ours.generate(ids[:1], max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4)
    assert torch.equal(guessed, alone)


def check_half_precision(kind, mamba, folder):
    """Weights of a Mamba in bfloat16 stay that, but for its decays."""
    assert run(f"from-{kind}", folder / "mamba", folder / "ours") == 0
    ours = InterdomainForCausalLM.from_pretrained(folder / "ours").eval()
    mixer = ours.model.layers[0].token_mixer
    assert mixer.v_proj.weight.dtype == torch.bfloat16 and mixer.recurrence.A_log.dtype == torch.float32
    ids = torch.randint(1, 48, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = mamba.float()(ids, use_cache=False).logits
        found = ours(ids, use_cache=False).logits
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() / exact.norm() < 0.03
