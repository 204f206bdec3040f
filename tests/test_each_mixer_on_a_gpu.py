"""Every mixer in float32 on a GPU, where there is one, against the same model in float64 on the CPU."""

import pytest
import torch

from modeling_interdomain.ops.common import launch
from tests.operator_checks import relative_error
from tests.test_devices import uses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = {"dtype": torch.float32, "state_dtype": "float32"}
NAMES = (
    "interdomain", "grouped", "forget-gates", "delta-rule", "warped-time", "s4d", "s4d-grouped", "mamba2", "ssd",
    "selective-scan", "cheems", "inner-function", "hax", "value-mask", "windowed", "window", "window-alone",
)  # fmt: skip
pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def no_kernel_fails(monkeypatch):
    """With "auto" another way would run and give the same."""
    monkeypatch.setattr(launch, "_failed", {})
    yield
    assert not launch._failed


@torch.no_grad()
def test_logits(name, make_model, random_ids):
    """Of whole, padded and packed rows, and of tokens after a cache, some of which are taken back."""
    ids = random_ids(2, 9)
    expected = uses(make_model(name), ids)
    found = uses(make_model(name, **LOW).to(DEVICE), ids.to(DEVICE))
    for use, logits in expected.items():
        assert found[use].device.type == DEVICE
        assert relative_error(found[use].cpu(), logits) < 1e-4, use


def test_a_step_of_training(name, make_model, left_padded):
    """The gradient of every parameter, and the loss after the step."""
    batch = left_padded([12, 7], seed=1)  # no key is chosen or left out by a rounding error
    expected = step_of_training(make_model(name), batch)
    found = step_of_training(make_model(name, **LOW).to(DEVICE), batch)
    for parameter, b in expected.items():
        a = found[parameter]
        if b is None:  # what chooses sparse keys learns from a loss of its own, which in so small a model is noise
            assert a is None, parameter
        else:
            assert a.device.type == DEVICE and relative_error(a.cpu(), b) < 2e-3, parameter
    for parameter in ("loss before", "loss after"):
        assert relative_error(found[parameter].cpu(), expected[parameter]) < 1e-4


def step_of_training(model, batch) -> dict[str, torch.Tensor | None]:
    """The gradients of all parameters, and the loss before and after a step."""
    batch = {key: x.to(model.device) for key, x in batch.items()}
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = model(**batch, labels=labels).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    with torch.no_grad():
        after = model(**batch, labels=labels).loss
    return {name: x.grad for name, x in model.named_parameters()} | {"loss before": loss.detach(), "loss after": after}


@pytest.mark.parametrize("cache", [None, "static"])
def test_what_is_generated(name, cache, make_model, left_padded):
    """With a static cache, on a GPU, from a compiled step in a CUDA graph."""
    batch = left_padded([9, 5])
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = make_model(name).generate(**batch, **options)
    model = make_model(name, **LOW).to(DEVICE)
    torch.compiler.reset()
    found = model.generate(**{key: x.to(DEVICE) for key, x in batch.items()}, **options, cache_implementation=cache)
    for a, b in zip(found.logits, expected.logits, strict=True):
        assert a.device.type == DEVICE and relative_error(a.cpu(), b) < 1e-4
    assert found.sequences.tolist() == expected.sequences.tolist()
