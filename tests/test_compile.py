"""`torch.compile(model)`: one graph without a break for every length, masked, packed, in training and prefill."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from modeling_interdomain import InterdomainCache
from modeling_interdomain.ops.common import cpu
from tests.conftest import EXPERTS, PAIRS, ROPE, dtypes_for

LENGTHS = (13, 19, 8, 30)


def _mask(length: int) -> torch.Tensor:
    """Two rows with pads on the left and between."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :3] = mask[0, 5] = 0
    return mask


def _inputs(kind: str, ids: torch.Tensor) -> dict:
    length = ids.shape[1]
    if kind == "masked":
        return {"input_ids": ids, "attention_mask": _mask(length)}
    if kind == "positions":
        positions = torch.cat([torch.arange(4), torch.arange(length - 4)])
        return {"input_ids": ids, "position_ids": positions.expand(2, -1)}
    if kind == "ends":
        return {"input_ids": ids[:1], "cu_seq_lens_q": torch.tensor([0, 3, 4, length], dtype=torch.int32)}
    return {"input_ids": ids}


def _train(model, kind: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits and every gradient of a step."""
    inputs = _inputs(kind, ids)
    model.zero_grad()
    output = model(**inputs, labels=inputs["input_ids"], use_cache=False)
    output.loss.backward()
    return [output.logits.detach(), *(p.grad.clone() for p in model.parameters())]


@torch.no_grad()
def _prefill(model, kind: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits and what the cache then holds."""
    cache = InterdomainCache(model.config)
    logits = model(**_inputs(kind, ids), past_key_values=cache).logits
    held = [
        x for layer in cache.layers for x in (layer.held() if hasattr(layer, "held") else (layer.keys, layer.values))
    ]
    return [logits, *held]


RUNS = {
    "training masked": (_train, "masked"),
    "training with positions": (_train, "positions"),
    "training with ends": (_train, "ends"),
    "training": (_train, "plain"),
    "prefill masked": (_prefill, "masked"),
    "prefill": (_prefill, "plain"),
}
QUICK = [
    ("interdomain-softmax", "training masked", "aot_eager"),
    ("interdomain-softmax", "prefill masked", "aot_eager"),
]
# Every way of running and every kind of layer, not each with each; the default backend where it matters.
THOROUGH = [
    ("s4d", "training with positions", "aot_eager"),
    ("grouped", "training with ends", "aot_eager"),
    ("interdomain", "training", "aot_eager"),
    ("s4d-grouped", "prefill", "aot_eager"),
    ("normalized", "training with positions", "aot_eager"),
    ("fourier", "training masked", "aot_eager"),
    ("inner-function", "training with ends", "aot_eager"),
    ("value-mask", "prefill masked", "aot_eager"),
    ("windowed", "training masked", "aot_eager"),
    ("windowed", "prefill masked", "aot_eager"),
    ("window", "training with ends", "aot_eager"),
    ("window-alone", "training with positions", "aot_eager"),
    ("s4d", "prefill masked", "aot_eager"),
    ("ssd", "training with positions", "aot_eager"),
    ("mamba2", "training with ends", "aot_eager"),
    ("selective-scan", "training with ends", "aot_eager"),
    ("selective-scan", "prefill masked", "aot_eager"),
    ("mamba2", "training masked", "aot_eager"),
    ("mamba2", "training masked", "inductor"),
    ("cheems", "training masked", "aot_eager"),
    ("cheems", "prefill masked", "aot_eager"),
    ("hax", "prefill masked", "aot_eager"),
    ("delta-rule", "training masked", "aot_eager"),
    ("forget-gates", "prefill masked", "aot_eager"),
    ("warped-time", "training with ends", "aot_eager"),
    ("warped-time", "training", "aot_eager"),
    ("interdomain-softmax", "training masked", "inductor"),
    ("interdomain-softmax", "prefill masked", "inductor"),
]
LONGEST = [
    ("selective-scan", "training masked", "inductor"),
    ("cheems", "training with ends", "inductor"),
]
OF_PAIRS = [(name, run, "aot_eager") for name in PAIRS for run in ("training masked", "prefill masked")]


@pytest.mark.parametrize(
    ("name", "run", "backend"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in THOROUGH),
        *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for case in [*LONGEST, *OF_PAIRS]),
    ],
)
def test_one_graph_for_every_length(name, run, backend, make_model, random_ids):
    """The first length is compiled as it is, the second as a variable, later ones not at all."""
    model = make_model(name, **dtypes_for(name), pad_token_id=None)
    function, kind = RUNS[run]
    if function is _train:
        model.train()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    try:
        for length in LENGTHS:
            ids = random_ids(2, length, seed=length)
            torch.manual_seed(length)  # some layers draw in training
            expected = function(model, kind, ids)
            torch.manual_seed(length)
            found = function(compiled, kind, ids)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert counter.frame_count == 2
    finally:
        torch._dynamo.reset()


NARROW = ("interdomain-softmax", "delta-rule", "warped-time", "s4d", "mamba2", "window")


@pytest.mark.parametrize("how", ["weights", "autocast"])
@pytest.mark.parametrize("name", ["forget-gates", *(pytest.param(name, marks=pytest.mark.slow) for name in NARROW)])
def test_bfloat16_on_a_cpu_is_one_graph(name, how, make_model, random_ids, monkeypatch):
    """Where it multiplies bfloat16 faster, as this one is made to believe."""
    monkeypatch.setattr(cpu, "_INSTRUCTIONS", ("avx512_bf16",))
    model = make_model(name, dtype=torch.float32, state_dtype="float32", pad_token_id=None).train()
    if how == "weights":
        model = model.bfloat16()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    try:
        for length in LENGTHS[:3]:
            ids = random_ids(2, length, seed=length)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
                found, expected = (_train(each, "masked", ids) for each in (compiled, model))
            found, expected = (torch.cat([x.flatten().double() for x in each]) for each in (found, expected))
            assert (found - expected).norm() < 8 * 2**-8 * expected.norm()  # of roundings, see test_bfloat16
        assert counter.frame_count == 2
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
def test_without_fullgraph_there_is_no_break_either(make_model, random_ids):
    model = make_model("interdomain-softmax", dtype=torch.float32, state_dtype="float32").train()
    torch._dynamo.reset()
    for kind in ("masked", "positions", "ends"):
        explained = torch._dynamo.explain(lambda ids, kind=kind: model(**_inputs(kind, ids), use_cache=False).logits)(
            random_ids(2, 12)
        )
        assert explained.graph_count == 1 and explained.graph_break_count == 0


# What one layer is, in a model of its own: parts that change how Inductor lays numbers out and what it fuses.
LAYERS = {
    "interdomain": {},
    "without a norm": {"input_norm": False},
    "without a convolution": {"conv_kernel": 1},
    "without either": {"input_norm": False, "conv_kernel": 1},
    "of one input": {"state_input": "generic"},
    "turned": {"rope_parameters": ROPE, "rope_placement": "after"},
    "fourier": {"feature_map": "fourier", "normalize": True, "product": "real"},
    "s4d": {"token_mixers": "s4d"},
    "s4d of two inputs": {"token_mixers": "s4d", "state_input": "key_value"},
    "ssd": {"token_mixers": "ssd", "ssd_state_size": 6},
    "selective scan": {"token_mixers": "selective_scan", "scan_channels": 24, "scan_state_size": 5},
    "softmax": {"token_mixers": "softmax", "rope_parameters": ROPE},
    "inner function": {"token_mixers": "inner_function", "rope_parameters": ROPE, "inner_value_dim": 8},
    "sparse": {"sparse_attention": "hax", "sparse_keys": 8, "sparse_key_dim": 4, "sparse_hash_size": 4},
    "experts": {"feed_forwards": "cdmoe", **EXPERTS},
}
HEADS = [(2, 1), (1, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
TRAININGS = [run for run in RUNS if run.startswith("training")]
WRONG_ONCE = [("interdomain", 2, 1, "training"), ("s4d of two inputs", 1, 1, "training masked")]
# Each layer meets the heads and the ways of training in turn; all with all are exhaustive.
IN_TURN = [(name, *HEADS[i % 6], TRAININGS[i % 4]) for i, name in enumerate(LAYERS)]
IN_TURN += [("interdomain", *heads, TRAININGS[i % 4]) for i, heads in enumerate(HEADS[1:], start=1)]
ALL = [(name, *heads, TRAININGS[(i + j) % 4]) for i, name in enumerate(LAYERS) for j, heads in enumerate(HEADS)]
LESS = [*WRONG_ONCE, *IN_TURN]


@pytest.mark.parametrize(
    ("layer", "heads", "groups", "run"),
    [
        *WRONG_ONCE,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in IN_TURN if case not in WRONG_ONCE),
        *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for case in ALL if case not in LESS),
    ],
)
def test_gradients_of_vectorised_code(layer, heads, groups, run, make_model, random_ids):
    """Those of Inductor's own C++, for every number of heads and groups; one length, whose loops are the widest."""
    changes = {"ssd": {"ssd_groups": groups}, "inner function": {"num_attention_heads": groups}}.get(layer, {})
    model = make_model(
        num_hidden_layers=1,
        hidden_size=8 * max(heads, 2),
        num_key_value_heads=groups,
        state_size=4,
        chunk_size=64,
        pad_token_id=None,
        **dtypes_for(layer),
        **{"num_attention_heads": heads, "feed_forwards": "none"} | LAYERS[layer] | changes,
    ).train()
    function, kind = RUNS[run]
    ids = random_ids(2, 19)
    torch._dynamo.reset()
    try:
        torch.manual_seed(0)  # some layers draw in training: as eager PyTorch does, where Inductor is told to
        expected = function(model, kind, ids)
        torch.manual_seed(0)
        compiled = torch.compile(model, fullgraph=True, options={"fallback_random": True})
        found = function(compiled, kind, ids)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    finally:
        torch._dynamo.reset()


def test_backends_of_loops_are_no_whole_graph(make_model):
    assert not make_model(backend="recurrent")._can_compile_fullgraph
    assert make_model(backend="chunk")._can_compile_fullgraph
