"""Models whose recurrent layers and experts run on fused kernels, against the same in float64 without them."""

import pytest
import torch

from tests.operator_checks import relative_error

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
pytestmark = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = {
    "mamba2": {},
    "s4d-grouped": {"token_mixers": "s4d", "feed_forwards": "cdmoe"},
    "selective-scan": {"feed_forwards": "none"},
    "hax": {"token_mixers": "interdomain", "sparse_attention": "hax"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in ("s4d-grouped", "hax"))) for x in LAYERS]
)
def test_a_model_on_fused_kernels(make_model, left_padded, name):
    """Logits, gradients, a padded prefill and decoding; `backend="triton"` would raise where no kernel runs."""
    changes = {"num_hidden_layers": 1, **LAYERS[name]}
    reference = make_model(name, **changes)
    changes |= {"dtype": torch.float32, "state_dtype": "float32", "backend": "triton"}
    model = make_model(name, **changes).to(DEVICE)
    batch = left_padded([5, 3])
    ids, mask = (batch[key].to(DEVICE) for key in ("input_ids", "attention_mask"))
    expected = reference(**batch, labels=batch["input_ids"])
    found = model(ids, attention_mask=mask, labels=ids)
    real = batch["attention_mask"].bool()
    assert relative_error(found.logits.cpu()[real], expected.logits[real]) < 1e-5
    expected.loss.backward()
    found.loss.backward()
    for (parameter, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        if b.grad is None:  # what chooses sparse keys learns from a loss of its own
            assert a.grad is None, parameter
        else:
            assert relative_error(a.grad.cpu(), b.grad) < 1e-4, parameter
    with torch.no_grad():
        cache = model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True).past_key_values
        last = model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits
    assert relative_error(last.cpu(), expected.logits[:, -1:]) < 1e-5
