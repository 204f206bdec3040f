"""The road of `generate()` to a compiled decode step: the static cache, without graph breaks or recompilations."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("interdomain", "auto"),
        ("interdomain", "triton"),
        ("interdomain-softmax", "triton"),
        ("s4d-grouped", "auto"),
        ("mamba2", "auto"),
        ("cheems", "auto"),
        ("experts", "triton"),
        ("inner-function", "triton"),
        ("value-mask", "auto"),
        ("windowed", "auto"),
        ("hax", "auto"),
        ("delta-rule", "auto"),
        ("warped-time", "auto"),
    ],
)
def test_static_decode_compiles_once_and_agrees(name, backend, make_model, random_ids):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(name, dtype=torch.float32, state_dtype="float32", backend=backend).to(device)
    ids = random_ids(2, 9).to(device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, attention_mask=mask, **options)
    compile_config = CompileConfig(fullgraph=True, mode=None)
    compile_config._compile_all_devices = True  # by default the library compiles on accelerators only
    torch._dynamo.reset()
    counters.clear()
    found = model.generate(
        ids, attention_mask=mask, cache_implementation="static", compile_config=compile_config, **options
    )
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)

    # A shorter text finds keys and values of the same shape.
    shorter = options | {"max_new_tokens": 3, "cache_implementation": "static", "compile_config": compile_config}
    model.generate(ids[:, 2:], attention_mask=mask[:, 2:], **shorter)
    assert counters["stats"]["unique_graphs"] == 1
