"""Window attention by the library's kernels, as on a GPU, against the same written out; in the dtypes of training."""

import itertools

import pytest
import torch

from modeling_interdomain import InterdomainCache
from modeling_interdomain.mixers.window.attention import WindowAttention
from tests.conftest import ROPE

ONE_LAYER = {"num_hidden_layers": 1, "feed_forwards": "mlp"}
CASES = {
    "sinks": {},
    "no sinks": {"attention_sinks": 0},
    "more sinks than window": {"attention_window": 2, "attention_sinks": 5},
    "one token": {"attention_window": 1, "attention_sinks": 1},
    "no rotation": {"rope_parameters": None},
    "half rotated": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
    "without a state": {"window_memory": False},
    "share of its own": {"window_share": "sigmoid"},
    "share of its own, no sinks": {"window_share": "sigmoid", "attention_sinks": 0, "rope_parameters": None},
}


def whole(model, ids):
    return model(ids).logits


def documents(model, ids):
    ends = torch.tensor([0, 1, 4, 5, 17, 18, ids.numel()])
    return model(ids.view(1, -1), cu_seq_lens_q=ends, use_cache=False).logits


def padded(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :6] = mask[1, 9:11] = 0
    return model(ids, attention_mask=mask).logits


def in_pieces(model, ids):
    cache, found = InterdomainCache(model.config), []
    for piece in ids.split([3, 1, 1, 7, 1, ids.shape[1] - 13], dim=1):
        found.append(model(piece, past_key_values=cache, use_cache=True).logits)
    return torch.cat(found, dim=1)


def gradients(model, read, ids):
    logits = read(model, ids)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits.dtype)
    names, leaves = zip(*model.named_parameters(), strict=True)
    return logits, dict(zip(names, torch.autograd.grad((logits * weights).sum(), leaves), strict=True))


@pytest.fixture
def fused(monkeypatch):
    """As on a GPU; the number of calls in a list."""
    calls, attend = [], WindowAttention._fused

    def counted(self, *arguments):
        calls.append(1)
        return attend(self, *arguments)

    def start():
        monkeypatch.setattr(WindowAttention, "_blocks", counted)
        return calls

    return start


IN_PIECES = ["sinks", "one token", "share of its own"]
READS = [*itertools.product(CASES, [whole, documents]), *itertools.product(IN_PIECES, [padded, in_pieces])]


@pytest.mark.parametrize(("name", "read"), READS)
def test_kernels_give_what_is_written_out(name, read, make_model, random_ids, fused):
    model, ids = make_model("window", **ONE_LAYER | CASES[name]).double(), random_ids(2, 21)
    logits, grads = gradients(model, read, ids)
    calls = fused()
    found, others = gradients(model, read, ids)
    assert calls
    torch.testing.assert_close(found, logits, rtol=1e-9, atol=1e-10)
    for name, grad in grads.items():
        assert (others[name] - grad).norm() <= 1e-9 * grad.norm() + 1e-12, name


@pytest.mark.parametrize("kernels", [False, True], ids=["written out", "kernels"])
@pytest.mark.parametrize("memory", [True, False], ids=["memory", "window alone"])
@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_training_in_bfloat16_is_as_exact_as_it(memory, how, kernels, make_model, fused):
    """Outputs and gradients of a layer differ from those in float64 by its rounding, and by no more."""
    mixer = make_model("window", **ONE_LAYER, window_memory=memory).double().model.layers[0].token_mixer
    x = torch.randn(2, 41, 32, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    found = []
    for dtype in (torch.float64, torch.bfloat16 if how == "bfloat16" else torch.float32):
        mixer, leaf = mixer.to(dtype), x.to(dtype).requires_grad_()
        leaves = {"x": leaf} | dict(mixer.named_parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and dtype != torch.float64):
            output = mixer(leaf)[0]
        grads = torch.autograd.grad((output * weights.to(dtype)).sum(), list(leaves.values()))
        found.append({"output": output} | dict(zip(leaves, grads, strict=True)))
        calls = fused() if kernels else None
    assert calls or not kernels
    for name, expected in found[0].items():
        # The memory of this small layer, a direction of its numbers, turns far where one of them is nearly zero.
        if name == "output" or not memory:
            assert (found[1][name].double() - expected).norm() < 0.03 * expected.norm(), name
