"""Warped time: against loops in float64 that form every state."""

import functools

import pytest
import torch

from modeling_interdomain.ops.common import launch
from modeling_interdomain.ops.interdomain import warp
from modeling_interdomain.ops.interdomain.warp import decay_warped_state, warped_attention, warped_state_after
from tests.operator_checks import COEFFICIENTS, EXTREMES, PRODUCTS, SHAPES, assert_close, everything, inputs
from tests.test_op_interdomain_gates import PROBLEMS, as_the_formulas_say, one_by_one

TOKENS = ("query", "key", "value", "time_step")


def warped(shape, coefficients="full", dtype=torch.float64, **options):
    """Arguments in which time stands still for some tokens and moves by up to 3 with others."""
    arguments = inputs(SHAPES.get(shape, shape), coefficients, **options)
    generator = torch.Generator().manual_seed(7)
    steps = torch.rand(arguments["key"].shape[:3], generator=generator, dtype=torch.float64)
    arguments["time_step"] = (3 * steps - 0.3).clamp(min=0)
    return {k: None if v is None else v.detach().to(dtype).requires_grad_() for k, v in arguments.items()}


@functools.cache
def problem(shape, product="bilinear", coefficients="full"):
    """Arguments, and what the definition makes of them."""
    arguments = warped(shape, coefficients)
    return arguments, everything(arguments, warped_attention, backend="recurrent", product=product)


@pytest.mark.parametrize(("product", "coefficients"), list(zip(PRODUCTS, COEFFICIENTS)))
def test_the_definition_is_what_the_formulas_say(product, coefficients):
    arguments = warped((2, 6, 4, 2, 3, 2, 3), coefficients)
    found = everything(arguments, warped_attention, backend="recurrent", product=product)
    assert_close(found, everything(arguments, as_the_formulas_say, product=product), 1e-10)


@pytest.mark.parametrize(("shape", "product", "coefficients"), PROBLEMS)
def test_chunks_are_the_definition(shape, product, coefficients):
    arguments, expected = problem(shape, product, coefficients)
    assert_close(everything(arguments, warped_attention, product=product), expected, 1e-9)


@pytest.mark.parametrize("chunk_size", [1, 7])
def test_chunk_size_changes_nothing(chunk_size):
    arguments, expected = problem("one_group")
    assert_close(everything(arguments, warped_attention, backend="chunk", chunk_size=chunk_size), expected, 1e-9)


@pytest.mark.parametrize("ends", [[0, 1, 33], [0, 0, 5, 5, 31, 33, 33]], ids=lambda ends: "_".join(map(str, ends)))
@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
def test_packed_documents_are_documents_alone(ends, backend):
    arguments = warped("odd_sizes", COEFFICIENTS[len(ends) % 3], rows=len(ends) - 1)
    places = [(0, start, end) for start, end in zip(ends[:-1], ends[1:])]
    found = everything(arguments, warped_attention, backend=backend, cu_seqlens=torch.tensor(ends))
    assert_close(found, everything(arguments, functools.partial(one_by_one, warped_attention, places)), 1e-9)


@pytest.mark.parametrize("lengths", [[19, 1, 0, 17], [0, 0, 0, 16]], ids=str)
@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
def test_a_row_ends_where_its_length_says(lengths, backend):
    """What stands at the pads is not read."""
    arguments = warped((4, 19, 4, 2, 3, 5, 3))
    pads = torch.arange(19) >= torch.tensor(lengths)[:, None]
    with torch.no_grad():
        for name in TOKENS:
            arguments[name][pads] = 1e30
    places = [(row, 0, length) for row, length in enumerate(lengths)]
    found = everything(arguments, warped_attention, backend=backend, lengths=torch.tensor(lengths))
    assert_close(found, everything(arguments, functools.partial(one_by_one, warped_attention, places)), 1e-9)
    assert not any(found[name][pads].any() for name in ("output", *(f"grad of {name}" for name in TOKENS)))


@pytest.mark.parametrize(("rows", "texts"), [(1, {"cu_seqlens": [0, 4, 19]}), (2, {"lengths": [4, 19]})], ids=str)
@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
def test_texts_without_a_state_begin_with_zeros(rows, texts, backend):
    arguments = {k: v.detach() for k, v in warped((rows, 19, 4, 2, 3, 5, 3), rows=2).items()}
    arguments |= {name: torch.tensor(x) for name, x in texts.items()}
    found = []
    for state in (None, torch.zeros_like(arguments["initial_state"])):
        options = {"initial_state": state, "output_final_state": True, "backend": backend}
        found.append(warped_attention(**arguments | options))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("decay", EXTREMES)
def test_strong_decays(decay):
    """Where a mode leaves nothing, the gradients of its decay are what float64 cannot add to the others."""
    arguments = warped("odd_sizes", **EXTREMES[decay])
    with torch.no_grad():
        arguments["time_step"] += 0.1  # where time stands still nothing decays at all, however steep it is there
    found = everything(arguments, warped_attention)
    expected = everything(arguments, warped_attention, backend="recurrent")
    assert all(x.isfinite().all() for x in (*found.values(), *expected.values()))
    scale = expected["grad of input_matrix"].norm()
    for name in ("log_decay", "time_step", "initial_state"):
        wrong = found.pop(f"grad of {name}") - expected.pop(f"grad of {name}")
        assert wrong.norm() < 1e-9 * scale
    assert_close(found, expected, 1e-9)


def test_time_that_leaps_and_time_that_stands_still():
    """Within a chunk, at its edges, and over the whole of it; modes are of all speeds."""
    arguments = warped((2, 65, 2, 1, 4, 3, 5))
    with torch.no_grad():
        arguments["log_decay"][0, :, 0] = -torch.tensor([1e-6, 1e-2, 1.0, 30.0, 1e3])
        arguments["time_step"][0, [0, 5, 15, 16, 40, 41, 64]] = 1e4
        arguments["time_step"][1, :40] = 0
    expected = everything(arguments, warped_attention, backend="recurrent")
    assert_close(everything(arguments, warped_attention), expected, 1e-9)


def test_a_thousand_tokens():
    arguments = warped((1, 1000, 1, 1, 4, 3, 4), decay=0.02)
    expected = everything(arguments, warped_attention, backend="recurrent")
    assert_close(everything(arguments, warped_attention), expected, 1e-9)


def test_even_time_is_none():
    """Steps of 1 are the layer without."""
    arguments = inputs(SHAPES["odd_length"])
    expected = everything(arguments, chunk_size=16)
    one = torch.ones_like(arguments["key"][..., 0]).requires_grad_()
    found = everything(arguments | {"time_step": one}, warped_attention)
    assert_close({name: found[name] for name in expected}, expected, 1e-10)


def test_other_dtypes_and_autocast():
    arguments, expected = problem("one_group")
    narrow = {k: v.detach().float().requires_grad_() for k, v in arguments.items()}
    found = everything(narrow, warped_attention)
    assert found["output"].dtype == found["state"].dtype == torch.float32
    assert_close(found, expected, 2e-5)
    half = {k: v.detach().bfloat16() if k in TOKENS[:3] else v.detach() for k, v in narrow.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = warped_attention(**half, output_final_state=True)
    wide, _ = warped_attention(**{k: v.float() for k, v in half.items()})
    assert state.dtype == torch.float32
    torch.testing.assert_close(output, wide.bfloat16())


def test_only_what_is_asked_for():
    arguments, _ = problem("odd_length")
    for names in (["time_step"], ["value"], ["log_decay", "coefficient_matrix"]):
        leaves = {k: v.detach().requires_grad_(k in names) for k, v in arguments.items()} | {"initial_state": None}
        grads = []
        for backend in ("recurrent", "chunk"):
            output, final = warped_attention(**leaves, backend=backend)
            assert final is None
            grads.append(torch.autograd.grad(output.square().sum(), [leaves[name] for name in names]))
        assert_close(dict(enumerate(grads[1])), dict(enumerate(grads[0])), 1e-9)


def test_the_operator_has_a_schema_and_compiles():
    arguments, expected = problem("odd_length")
    compiled = torch.compile(warped_attention, fullgraph=True, backend="aot_eager")
    assert_close(everything(arguments, compiled), expected, 1e-9)
    names = ("query", "key", "value", "log_decay", "input_matrix", "coefficient_matrix", "initial_state", "time_step")
    torch.library.opcheck(
        warp._operator.registered, (*(arguments[name] for name in names), None, torch.tensor([20, 63]), "real", 16)
    )


@pytest.mark.parametrize("pads", [False, True], ids=["all-real", "pads"])
def test_replay_is_the_definition(pads, assert_same):
    arguments = {k: v.detach() for k, v in warped((2, 19, 2, 2, 3, 4, 5)).items()}
    mask = torch.ones(2, 19, dtype=torch.bool)
    if pads:
        mask[0, ::3], mask[1] = False, False
    parameters = arguments["log_decay"], arguments["input_matrix"]
    tokens = [arguments[name] for name in TOKENS[1:]]
    found = warped_state_after(arguments["initial_state"], *tokens, mask, *parameters)
    for row, real in enumerate(mask):
        expected = arguments["initial_state"][row : row + 1]
        if real.any():
            here = {k: arguments[k][row : row + 1, real] for k in TOKENS}
            others = {"log_decay": parameters[0], "input_matrix": parameters[1], "initial_state": expected}
            _, expected = warped_attention(**here, **others, backend="recurrent", output_final_state=True)
        assert_same(found[row : row + 1], expected)


def test_a_state_passes_tokens_that_write_nothing(assert_same):
    """What sequence parallelism adds up."""
    arguments = {k: v.detach() for k, v in warped((2, 12, 2, 2, 3, 4, 5)).items()}
    first = {k: v[:, :7] if v.shape[1] == 12 else v for k, v in arguments.items()}
    second = {k: v[:, 7:] if v.shape[1] == 12 else v for k, v in arguments.items()} | {"initial_state": None}
    whole, left, right = (
        warped_attention(**each, backend="recurrent", output_final_state=True)[1] for each in (arguments, first, second)
    )
    time = second["time_step"].sum(1)
    assert_same(decay_warped_state(left, time, arguments["log_decay"]) + right, whole)


REFUSED = {
    "negative": ({"time_step": -0.1}, {}, "time_step must be finite and at least 0: time stands still or moves on."),
    "infinite": ({"time_step": float("inf")}, {}, "time_step must be finite and at least 0"),
    "kernels": ({}, {"backend": "triton"}, "backend must be one of auto, recurrent, chunk, got 'triton'."),
    "state": ({}, {"initial_state": torch.zeros(1)}, "initial_state must have shape [rows, G, 2, M, R + D] = "),
    "steps": ({}, {"time_step": torch.ones(1, 5)}, "time_step must have shape [B, T, G], got [1, 5]."),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_said(what):
    filled, options, sentence = REFUSED[what]
    arguments = {k: v.detach() for k, v in warped("short").items()}
    arguments |= {k: torch.full_like(arguments[k], x) for k, x in filled.items()}
    with pytest.raises(ValueError) as raised:
        warped_attention(**arguments | options)
    assert str(raised.value).startswith(sentence) and "\n" not in str(raised.value)


def test_exported_graphs_have_no_warped_time(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    with pytest.raises(ValueError, match=r"^Exported graphs have no warped time: export a model without it\.$"):
        warped_attention(**warped("short"))


def test_where_kernels_run_it_is_said_once_that_warped_time_has_none(monkeypatch, caplog):
    """And models that are counted on "meta" have it."""
    monkeypatch.setattr(launch, "_WITHOUT_KERNELS", ("cpu",))
    launch._say_once.cache_clear()
    arguments = {k: v.detach().to("meta") for k, v in warped("short").items()}
    for _ in range(2):
        output, state = warped_attention(**arguments, output_final_state=True)
        assert output.shape == arguments["query"].shape and state.shape == arguments["initial_state"].shape
    assert [record.message for record in caplog.records] == [
        "Interdomain attention runs without its fused kernels: warped time has none."
    ]
