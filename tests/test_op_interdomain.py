"""The operator: every backend against the float64 recurrence, and every bad argument."""

import functools
import math
import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from modeling_interdomain import interdomain_attention, interdomain_step
from modeling_interdomain.ops.common import slots as op_common_slots
from modeling_interdomain.ops.common.slots import check_slots
from modeling_interdomain.ops.interdomain import prefix as op_interdomain_prefix
from modeling_interdomain.ops.interdomain import scan as op_interdomain_scan
from tests.operator_checks import (
    COEFFICIENTS,
    EXTREMES,
    PRODUCTS,
    SHAPES,
    SLOTS,
    assert_close,
    at_an_odd_offset,
    cast,
    check_bad_slots,
    check_step_of_slots,
    everything,
    inputs,
    relative_error,
)

# All but the definition and the fused kernels, which test_op_interdomain_triton has.
BACKENDS = ["fft", "scan", "associative_scan", "chunk"]


# Every shape with one readout, and every readout with one shape.
PROBLEMS = [(shape, "bilinear", "full") for shape in SHAPES]
PROBLEMS += [
    ("odd_length", product, c) for product in PRODUCTS for c in COEFFICIENTS if (product, c) != PROBLEMS[0][1:]
]


@functools.cache
def problem(shape, product="bilinear", coefficients="full"):
    """Arguments, and what the definition makes of them."""
    arguments = inputs(SHAPES[shape], coefficients)
    return arguments, everything(arguments, backend="recurrent", product=product)


@pytest.mark.parametrize(("shape", "product", "coefficients"), PROBLEMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_is_the_recurrence(shape, product, coefficients, backend):
    arguments, expected = problem(shape, product, coefficients)
    found = everything(arguments, backend=backend, product=product, chunk_size=16)
    assert_close(found, expected, 1e-10)


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64, 256])
def test_chunk_size_changes_nothing(chunk_size):
    arguments, expected = problem("one_group")
    assert_close(everything(arguments, backend="chunk", chunk_size=chunk_size), expected, 1e-10)


def one_by_one(places, query, key, value, initial_state, **arguments):
    """The definition on `places`, (row, start, end) of documents, each on its own; zeros between them."""
    output, states = torch.zeros_like(query[..., :1]) * value.repeat_interleave(query.shape[2] // key.shape[2], 2), []
    for (row, start, end), state in zip(places, initial_state.split(1)):
        if start < end:
            tokens = (x[row : row + 1, start:end] for x in (query, key, value))
            piece, state = interdomain_attention(*tokens, initial_state=state, backend="recurrent", **arguments)
            output = output.index_put((torch.tensor([row]), torch.arange(start, end)), piece[0])
        states.append(state)
    return output, torch.cat(states)


ENDS = [[0, 1, 33], [0, 1, 2, 18, 33], [0, 16, 32, 33], [0, 0, 5, 5, 31, 33, 33]]


@pytest.mark.parametrize("ends", ENDS, ids=lambda ends: "_".join(map(str, ends)))
@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
def test_packed_documents_are_documents_alone(ends, backend):
    arguments = inputs(SHAPES["odd_sizes"], COEFFICIENTS[len(ends) % 3], rows=len(ends) - 1)
    places = [(0, start, end) for start, end in zip(ends[:-1], ends[1:])]
    found = everything(arguments, backend=backend, cu_seqlens=torch.tensor(ends), chunk_size=16)
    assert_close(found, everything(arguments, functools.partial(one_by_one, places)), 1e-10)


@pytest.mark.parametrize("lengths", [[33, 1, 0, 20], [0, 0, 0, 16]], ids=str)
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalised"])
@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
def test_a_row_ends_where_its_length_says(lengths, normalize, backend):
    """What stands at the pads is not read: outputs, states and gradients are those of every row alone."""
    arguments = inputs((4, 33, 6, 3, 3, 10, 7), normalize=normalize)
    pads = torch.arange(33) >= torch.tensor(lengths)[:, None]
    with torch.no_grad():
        for name in ("query", "key", "value"):
            arguments[name][pads] = 1e30
    places = [(row, 0, length) for row, length in enumerate(lengths)]
    options = {"normalize": normalize}
    found = everything(arguments, backend=backend, lengths=torch.tensor(lengths), chunk_size=16, **options)
    expected = everything(arguments, functools.partial(one_by_one, places), **options)
    assert_close(found, expected, 1e-9)
    assert not any(found[name][pads].any() for name in ("output", "grad of query", "grad of key", "grad of value"))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
def test_normalised_readout_divides_by_a_constant_value(product, backend):
    arguments = inputs(SHAPES["odd_length"], normalize=True, seed=3)
    found = everything(arguments, backend=backend, product=product, normalize=True, chunk_size=16)
    expected = everything(arguments, backend="recurrent", product=product, normalize=True)
    # Where a denominator comes near zero the quotient is as steep as float64 can follow.
    assert_close(found, expected, 1e-15 if backend == "recurrent" else 1e-9)
    one = torch.ones_like(arguments["value"][..., :1])
    plain = dict(arguments, value=torch.cat([arguments["value"], one], dim=-1))
    ratio, _ = interdomain_attention(**plain, backend="recurrent", product=product)
    assert relative_error(found["output"], ratio[..., :-1] / ratio[..., -1:]) < 1e-9


def test_normalised_readout_of_a_constant_is_the_constant():
    arguments = inputs(SHAPES["odd_length"], normalize=True)
    arguments |= {"value": torch.full_like(arguments["value"], 2.5), "initial_state": None}
    output, _ = interdomain_attention(**arguments, normalize=True)
    torch.testing.assert_close(output, torch.full_like(output, 2.5))


@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES.keys())
@pytest.mark.parametrize("chunk_size", [64, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_decay_is_safe(extreme, chunk_size, backend):
    arguments = inputs((1, 200, 2, 2, 4, 4, 5), **extreme)
    expected = everything(arguments, backend="recurrent")
    found = everything(arguments, backend=backend, chunk_size=chunk_size)
    # The gradient of a mode that is gone at once is zero but for rounding: compare those in absolute terms.
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm().clamp(min=1e-6)
        assert error < 1e-10, (name, error)


@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_decay_is_finite_in_float32(extreme, backend):
    arguments = cast(inputs((1, 300, 2, 2, 4, 4, 5), **extreme), torch.float32)
    for name, value in everything(arguments, backend=backend, chunk_size=256).items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize(("product", "coefficients"), list(zip(PRODUCTS, COEFFICIENTS)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_is_close(coefficients, product, backend):
    arguments, expected = problem("one_group", product, coefficients)
    found = everything(cast(arguments, torch.float32), backend=backend, product=product)
    assert all(value.dtype == torch.float32 for value in found.values())
    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_inputs_keep_a_float32_state(dtype):
    arguments = inputs(SHAPES["odd_length"])
    low = {name: arguments[name].detach().to(dtype) for name in ("query", "key", "value")}
    rest = {name: arguments[name].detach().float() for name in arguments if name not in low}
    output, state = interdomain_attention(**low, **rest, output_final_state=True)
    wide = {name: x.double() for name, x in (low | rest).items()}
    expected, expected_state = interdomain_attention(**wide, output_final_state=True, backend="recurrent")
    assert output.dtype == dtype and state.dtype == torch.float32
    assert relative_error(output, expected) < (1e-2 if dtype == torch.bfloat16 else 1e-3)
    assert relative_error(state, expected_state) < 1e-5


@pytest.mark.parametrize("rate", [0.01, 0.2])
def test_the_inverse_recurrence_stays_where_it_is_precise(rate, monkeypatch):
    """Below the allowed amplification it is used and agrees; beyond, the segment is computed forward."""
    used = []
    inverse = op_interdomain_scan.inverse_states
    monkeypatch.setattr(op_interdomain_scan, "inverse_states", lambda *a: used.append(1) or inverse(*a))
    arguments = inputs((1, 100, 2, 2, 4, 4, 5))
    with torch.no_grad():
        arguments["log_decay"][..., 0] = -rate
    expected = everything(arguments, backend="recurrent")
    assert_close(everything(arguments, backend="scan", chunk_size=32), expected, 1e-10)
    assert bool(used) == (rate * 32 < math.log(op_interdomain_scan.LARGEST_AMPLIFICATION))


def test_without_the_limit_the_inverse_recurrence_drifts(monkeypatch):
    arguments = inputs((1, 256, 1, 1, 4, 4, 5))
    with torch.no_grad():
        arguments["log_decay"][..., 0] = -0.1
    expected = everything(arguments, backend="recurrent")
    monkeypatch.setattr(op_interdomain_scan, "LARGEST_AMPLIFICATION", float("inf"))
    errors = []
    for every in (16, 64, 256):
        found = everything(arguments, backend="scan", chunk_size=every)
        errors.append(relative_error(found["grad of log_decay"], expected["grad of log_decay"]))
    assert errors[0] < 1e-12 and errors[0] < errors[1] < errors[2]


def test_autocast_does_not_reach_the_recurrence():
    arguments = {k: v.detach().float() for k, v in inputs(SHAPES["odd_length"]).items()}
    expected, _ = interdomain_attention(**arguments)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = interdomain_attention(**arguments)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["scan", "chunk"])
def test_autocast_does_not_reach_the_backward_pass(backend):
    arguments = cast(inputs(SHAPES["odd_length"]), torch.float32)
    expected = everything(arguments, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = everything(arguments, backend=backend)
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS, "auto"])
@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalised"])
def test_pieces_equal_the_whole(backend, normalize):
    arguments = {k: v.detach() for k, v in inputs(SHAPES["one_group"], normalize=normalize).items()}
    length = arguments["query"].shape[1]
    options = {"normalize": normalize, "chunk_size": 16, "output_final_state": True}
    expected, expected_state = interdomain_attention(**arguments, **options, backend="recurrent")
    generator = torch.Generator().manual_seed(5)
    for _ in range(5):
        cuts = sorted(torch.randperm(length - 1, generator=generator)[:6].add(1).tolist())
        state, outputs = arguments["initial_state"], []
        for start, end in zip([0, *cuts], [*cuts, length]):
            piece = {name: arguments[name][:, start:end] for name in ("query", "key", "value")}
            output, state = interdomain_attention(
                **dict(arguments, **piece, initial_state=state), **options, backend=backend
            )
            outputs.append(output)
        assert relative_error(torch.cat(outputs, dim=1), expected) < 1e-10
        assert relative_error(state, expected_state) < 1e-10


@pytest.mark.parametrize("shape", ["odd_length", "one_group", "odd_sizes"])
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_steps_equal_one_forward(shape, coefficients, product):
    arguments = inputs(SHAPES[shape], coefficients)
    arguments = {k: None if v is None else v.detach() for k, v in arguments.items()}
    expected, expected_state = interdomain_attention(
        **arguments, product=product, output_final_state=True, backend="recurrent"
    )
    state = arguments.pop("initial_state").clone()
    address = state.data_ptr()
    tokens = [arguments.pop(name).unbind(1) for name in ("query", "key", "value")]
    outputs = [interdomain_step(*token, **arguments, state=state, product=product) for token in zip(*tokens)]
    assert state.data_ptr() == address
    assert relative_error(torch.stack(outputs, dim=1), expected) < 1e-10
    assert relative_error(state, expected_state) < 1e-10


def test_step_leaves_the_rows_of_pads_alone():
    arguments = {k: v.detach() for k, v in inputs(SHAPES["odd_length"]).items()}
    before = arguments.pop("initial_state")
    token = {name: arguments.pop(name)[:, 0] for name in ("query", "key", "value")}
    both, masked = before.clone(), before.clone()
    expected = interdomain_step(**token, **arguments, state=both)
    found = interdomain_step(**token, **arguments, state=masked, mask=torch.tensor([False, True]))
    assert torch.equal(masked[0], before[0]) and torch.equal(masked[1], both[1])
    assert torch.equal(found[1], expected[1]) and not found[0].any()


STRIDED = torch.tensor([False, True, True, False])[::2]


@pytest.mark.parametrize("mask", [STRIDED, torch.tensor([0, 7]), torch.tensor([0, 1], dtype=torch.uint8)])
@pytest.mark.parametrize("backend", ["auto", "recurrent", "triton"])
def test_any_mask_of_a_step(mask, backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton runs the kernels")
    arguments = {name: x.detach().float() for name, x in inputs((2, 1, 2, 2, 5, 4, 6), "full").items()}
    state = arguments.pop("initial_state")
    token = {name: arguments.pop(name)[:, 0] for name in ("query", "key", "value")}
    expected_state, found_state = state.clone(), state.clone()
    expected = interdomain_step(**token, **arguments, state=expected_state, mask=torch.tensor([False, True]))
    found = interdomain_step(**token, **arguments, state=found_state, mask=mask, backend=backend)
    assert torch.equal(found_state[0], state[0]) and not found[0].any() and expected[1].any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_state, expected_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "recurrent"])
def test_a_step_on_a_strided_state(backend):
    arguments = {name: x.detach() for name, x in inputs((2, 1, 2, 2, 5, 4, 6), "full").items()}
    state = arguments.pop("initial_state")
    token = {name: arguments.pop(name)[:, 0] for name in ("query", "key", "value")}
    strided = state.clone().transpose(1, 3).contiguous().transpose(1, 3)
    assert not strided.is_contiguous()
    expected = interdomain_step(**token, **arguments, state=state)
    torch.testing.assert_close(interdomain_step(**token, **arguments, state=strided, backend=backend), expected)
    torch.testing.assert_close(strided, state)


def one_token(rows, coefficients="full", product="bilinear", normalize=False, device="cpu", dtype=torch.float64):
    """A step of so many rows, and their states."""
    arguments = inputs((rows, 1, 4, 2, 5, 4, 6), coefficients, normalize=normalize)
    arguments = {name: None if x is None else x.detach().to(device, dtype) for name, x in arguments.items()}
    state = arguments.pop("initial_state")
    arguments |= {name: arguments[name][:, 0] for name in ("query", "key", "value")}
    return functools.partial(interdomain_step, **arguments, product=product, normalize=normalize), state


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_step_of_slots_is_that_of_their_rows(product, normalize, slots, large, monkeypatch):
    """Rows copied together, and states moved where they lie, as large ones are."""
    monkeypatch.setattr(op_common_slots, "_LARGE", 0 if large else 1 << 16)
    for coefficients in COEFFICIENTS:
        step, state = one_token(4, coefficients, product, normalize)
        check_step_of_slots(step, state, SLOTS[slots], 1e-10)


def test_a_step_of_slots_in_a_lower_precision():
    step, state = one_token(4)
    check_step_of_slots(step, state.bfloat16(), SLOTS["pads"], 1e-10)


def test_states_that_a_step_moves_lie_where_they_were():
    """Of large ones nothing is copied: not the pool, nor a row."""
    pool, seen = torch.zeros(5, 2, 3), []
    for slots in ([3], [3, 4], [1, 2]):
        here = torch.tensor(slots)

        def step(rows, mask, token, slots=slots):
            seen.append(rows.data_ptr() == pool[slots[0]].data_ptr() and rows.shape[0] == len(slots))
            return token

        op_common_slots.step_slots(step, pool, here, None, torch.ones(len(slots), 3))
    assert seen == [True] * 3


@pytest.mark.parametrize("slots", [[5, -1, 0, -1], [-1, 6, -1, 3], [-1] * 4])
def test_a_graph_serves_any_slots(slots):
    """What no row has is what it was, numbers that a decay of 1 would change among it."""
    step, state = one_token(4)
    pool = torch.full((7, *state.shape[1:]), -0.0, dtype=state.dtype)
    pool[2] = float("inf")
    expected_pool = pool.clone()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    compiled(state=pool.clone(), state_indices=torch.tensor([1, 2, 3, 4]))
    found = compiled(state=pool, state_indices=torch.tensor(slots))
    expected = step(state=expected_pool, state_indices=torch.tensor(slots))
    assert counter.frame_count == 1 and relative_error(found, expected) < 1e-10
    torch.testing.assert_close(pool, expected_pool)
    others = [slot for slot in range(7) if slot not in slots]
    bits = [x[others].view(torch.int64) for x in (pool, expected_pool)]
    assert torch.equal(bits[0], bits[1]) and bool((bits[0][0] == torch.tensor(-0.0).double().view(torch.int64)).all())


def test_bad_slots_are_named():
    check_bad_slots(*one_token(1))
    step, state = one_token(4)
    before = state.clone()
    with pytest.raises(ValueError, match=r"^state_indices must name a slot for one row alone, got \[0, 1, 1, -1\]\.$"):
        step(state=state, state_indices=torch.tensor([0, 1, 1, -1]))
    assert torch.equal(state, before)


def test_a_prefill_begins_where_its_slot_ended_or_at_zero():
    """What a server does: the states of some requests in a batch of prefills, one of them new, and one token more."""
    arguments = inputs((1, 20, 4, 2, 5, 4, 6), rows=3)
    arguments = {name: x.detach() for name, x in arguments.items()}
    state = arguments.pop("initial_state")
    pool = torch.cat([state, state + 1])
    before, slots, ends = pool.clone(), torch.tensor([4, 0, 2]), torch.tensor([0, 7, 8, 20])
    initial = op_common_slots.read_slots(pool, slots, torch.tensor([True, False, True]))
    assert torch.equal(initial[::2], pool[[4, 2]]) and not initial[1].any()
    options = {"cu_seqlens": ends, "output_final_state": True}
    _, final = interdomain_attention(**arguments, initial_state=initial, **options)
    op_common_slots.write_slots(pool, slots, final)
    expected = torch.cat([
        interdomain_attention(**{k: v[:, a:b] if v.ndim == 4 and v.shape[1] == 20 else v for k, v in arguments.items()},
                              initial_state=initial[i : i + 1], output_final_state=True)[1]
        for i, (a, b) in enumerate(zip(ends.tolist(), ends.tolist()[1:]))
    ])  # fmt: skip
    assert relative_error(pool[slots], expected) < 1e-10
    assert torch.equal(pool[[1, 3, 5]], before[[1, 3, 5]])


def test_step_with_a_bfloat16_state():
    arguments = {k: v.detach().float() for k, v in inputs(SHAPES["odd_length"]).items()}
    state = arguments.pop("initial_state")
    token = {name: arguments.pop(name)[:, 0] for name in ("query", "key", "value")}
    low = state.bfloat16()
    expected = interdomain_step(**token, **arguments, state=state)
    found = interdomain_step(**token, **arguments, state=low)
    assert low.dtype == torch.bfloat16
    assert relative_error(found, expected) < 1e-2


def test_the_state_given_is_not_changed():
    arguments = {k: v.detach() for k, v in inputs(SHAPES["one_token"]).items()}
    before = arguments["initial_state"].clone()
    interdomain_attention(**arguments, output_final_state=True)
    assert torch.equal(arguments["initial_state"], before)


@pytest.mark.parametrize("documents", [False, True], ids=["whole", "packed"])
def test_training_keeps_the_inputs_alone(documents):
    arguments = cast(inputs((1, 1024, 2, 2, 16, 16, 16), rows=64 if documents else 1), torch.float32)
    ends = torch.arange(0, 1025, 16) if documents else None
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        interdomain_attention(**arguments, cu_seqlens=ends, backend="chunk")
    assert sum(sizes) == sum(x.numel() for x in (*arguments.values(), *([ends] if documents else [])))


@pytest.mark.parametrize("kind", ["rows", "lengths", "documents"])
def test_one_dynamic_graph_serves_every_length(kind):
    """Training in one graph: the first length is compiled as it is, the second as a variable, later ones not at all."""
    counter = CompileCounterWithBackend("aot_eager")

    def attention(**arguments):
        return interdomain_attention(**arguments, normalize=True)

    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for length in (130, 140, 77, 200):
        arguments = inputs((1 if kind == "documents" else 2, length, 4, 2, 4, 4, 5), normalize=True)
        if kind == "documents":
            arguments["initial_state"] = None
        places = {"lengths": torch.tensor([0, length - 3]), "cu_seqlens": torch.tensor([0, 50, 50, 64, length])}
        places = {name: x for name, x in places.items() if name == {"documents": "cu_seqlens"}.get(kind, kind)}
        expected = everything(arguments, attention, **places)
        assert_close(everything(arguments, compiled, **places), expected, 1e-12)
    assert counter.frame_count == 2
    torch.compiler.reset()


def test_the_scan_keeps_one_state_a_segment():
    """Counted by storage: a view of one state would hold those of its whole segment."""
    batch, length, _, groups, features, value_dim, modes = shape = (1, 1024, 2, 2, 16, 16, 16)
    held = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: held.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage()) and x, lambda x: x
    ):
        interdomain_attention(**inputs(shape, dtype=torch.float32), backend="scan")
    state = batch * groups * modes * (features + value_dim) * 8
    tokens = 4 * length * (2 * groups * features + groups * value_dim)
    assert sum(storage.nbytes() for storage in held.values()) < 4 * tokens + (length // 64 + 4) * state


@pytest.mark.parametrize("backend", ["fft", "associative_scan"])
def test_states_of_all_tokens_are_held_for_one_block_of_modes_at_a_time(monkeypatch, backend):
    """With blocks of one mode, what comes out of a block is no view of its states."""
    ends = []
    run = op_interdomain_prefix._Blocks._run
    monkeypatch.setattr(op_interdomain_prefix, "_NUMBERS", 1)
    monkeypatch.setattr(
        op_interdomain_prefix._Blocks, "_run", lambda *arguments: ends.append(run(*arguments)[1]) or run(*arguments)
    )
    with torch.no_grad():
        interdomain_attention(**inputs(SHAPES["odd_length"]), backend=backend)
    assert ends and all(end.untyped_storage().nbytes() == end.nbytes for end in ends)


BAD_ARGUMENTS = {
    "query of rank 3": ({"query": torch.zeros(2, 5, 4)}, "query must have shape"),
    "integer query": ({"query": torch.zeros(2, 5, 4, 3, dtype=torch.long)}, "query must be a floating-point tensor"),
    "no tokens": (
        {"query": torch.zeros(2, 0, 4, 3), "key": torch.zeros(2, 0, 2, 3), "value": torch.zeros(2, 0, 2, 6)},
        "query must hold at least one token, got T = 0",
    ),
    "no rows": (
        {"query": torch.zeros(0, 5, 4, 3), "key": torch.zeros(0, 5, 2, 3), "value": torch.zeros(0, 5, 2, 6)},
        "query must hold at least one row, got B = 0",
    ),
    "key of another length": ({"key": torch.zeros(2, 6, 2, 3)}, "key must have shape"),
    "key of another dimension": ({"key": torch.zeros(2, 5, 2, 4)}, "key must have shape"),
    "groups that do not divide": (
        {"key": torch.zeros(2, 5, 3, 3), "value": torch.zeros(2, 5, 3, 6)},
        "key has G = 3 groups, which must divide the H = 4 heads",
    ),
    "value of other groups": ({"value": torch.zeros(2, 5, 4, 6)}, "value must have shape"),
    "log_decay of other groups": ({"log_decay": torch.zeros(4, 7, 2)}, "log_decay must have shape"),
    "complex log_decay": ({"log_decay": torch.zeros(2, 7)}, "log_decay must have shape"),
    "input_matrix of another size": ({"input_matrix": torch.zeros(2, 6, 2)}, "input_matrix must have shape"),
    "coefficient_matrix not square": ({"coefficient_matrix": torch.zeros(2, 7, 6, 2)}, "coefficient_matrix must have"),
    "product": ({"product": "dot"}, "product must be one of bilinear, hermitian, real, got 'dot'"),
    "backend": (
        {"backend": "cuda"},
        "backend must be one of auto, recurrent, fft, scan",
    ),
    "chunk_size": ({"chunk_size": 0}, "chunk_size must be a positive integer, got 0"),
    "state of another size": ({"initial_state": torch.zeros(2, 2, 2, 6, 9)}, "initial_state must have shape"),
    "state without the constant": (
        {"initial_state": torch.zeros(2, 2, 2, 7, 9), "normalize": True},
        "initial_state must have shape",
    ),
    "state on another device": (
        {"initial_state": torch.zeros(2, 2, 2, 7, 9, device="meta")},
        "initial_state is on meta, but query is on cpu",
    ),
    "key on another device": ({"key": torch.zeros(2, 5, 2, 3, device="meta")}, "key is on meta"),
    "lengths of other rows": ({"lengths": torch.tensor([3])}, "lengths must be integers of shape [B] = [2]"),
    "a mask for lengths": ({"lengths": torch.ones(2, dtype=torch.bool)}, "lengths must be integers of shape [B] = [2]"),
    "a length beyond T": ({"lengths": torch.tensor([3, 6])}, "lengths must lie between 0 and T = 5, got [3, 6]"),
    "lengths and documents": (
        {"lengths": torch.tensor([3, 5]), "cu_seqlens": torch.tensor([0, 5])},
        "lengths and cu_seqlens exclude each other",
    ),
    "cu_seqlens of a batch": ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens packs the documents into one row"),
}
BAD_ENDS = {
    "not from zero": ([1, 5], "cu_seqlens must run from 0 to T = 5, got 1 to 5"),
    "not to the end": ([0, 3], "cu_seqlens must run from 0 to T = 5, got 0 to 3"),
    "going back": ([0, 4, 2, 5], "cu_seqlens must never decrease"),
    "one number": ([0], "cu_seqlens must be integers of shape"),
    "fractions": ([0.0, 5.0], "cu_seqlens must be integers of shape"),
}


def good_arguments():
    return {
        "query": torch.zeros(2, 5, 4, 3),
        "key": torch.zeros(2, 5, 2, 3),
        "value": torch.zeros(2, 5, 2, 6),
        "log_decay": torch.zeros(2, 7, 2),
        "input_matrix": torch.zeros(2, 7, 2),
    }


@pytest.mark.parametrize(("change", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        interdomain_attention(**(good_arguments() | change))


@pytest.mark.parametrize(("ends", "message"), BAD_ENDS.values(), ids=BAD_ENDS.keys())
def test_bad_cu_seqlens_are_named(ends, message):
    arguments = {name: x[:1] if x.ndim == 4 else x for name, x in good_arguments().items()}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        interdomain_attention(**arguments, cu_seqlens=torch.tensor(ends))


def test_a_bad_step_leaves_the_state_alone():
    arguments = {name: x[:, 0] if x.ndim == 4 else x for name, x in good_arguments().items()}
    state = torch.ones(2, 2, 2, 7, 9)
    with pytest.raises(ValueError, match=r"^key must have shape"):
        interdomain_step(**(arguments | {"key": torch.zeros(2, 2, 5)}), state=state)
    with pytest.raises(ValueError, match=r"^mask must have shape"):
        interdomain_step(**arguments, state=state, mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^mask must be bool or integers, zero for a pad, got torch.float32\.$"):
        interdomain_step(**arguments, state=state, mask=torch.ones(2))
    with pytest.raises(ValueError, match=r"^backend of a step must be one of auto, recurrent, triton, got 'chnuk'\.$"):
        interdomain_step(**arguments, state=state, backend="chnuk")
    with pytest.raises(ValueError, match=r"^state must be contiguous for backend 'triton'"):
        interdomain_step(**arguments, state=state.mT.contiguous().mT, backend="triton")
    assert bool((state == 1).all())
    with pytest.raises(ValueError, match=r"^state must have shape"):
        interdomain_step(**arguments, state=torch.ones(2, 2, 2, 7, 8))


def test_a_step_takes_one_token_a_row():
    arguments = inputs((2, 2, 2, 2, 4, 4, 3))
    tokens = {name: arguments.pop(name).detach() for name in ("query", "key", "value")}
    state = arguments.pop("initial_state").detach()
    before = state.clone()
    with pytest.raises(ValueError, match=r"query must have shape \[B, H, R\], got \[2, 2, 2, 4\]"):
        interdomain_step(**tokens, **arguments, state=state)
    assert state.equal(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", ["recurrent", *BACKENDS])
def test_arguments_in_a_flat_buffer(backend, dtype):
    """At an odd offset, where pairs are no complex numbers in place; of one mode too, and one column."""
    for shape in ((2, 20, 4, 2, 3, 5, 4), (1, 20, 2, 1, 1, 1, 1)):
        for coefficients in COEFFICIENTS:
            leaves = cast(inputs(shape, coefficients), dtype)
            flat = {name: at_an_odd_offset(x) for name, x in leaves.items()}
            expected = everything(leaves, chunk_size=8, backend=backend)
            assert_close(everything(flat, chunk_size=8, backend=backend), expected, 1e-6)


# Where lambda is zero, where a power of it is denormal (exp(-744.4) in float64), and where it is in float32.
@pytest.mark.parametrize("rate", [-float("inf"), *(-744.4 / steps for steps in (1, 16, 19, 20)), -101.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mode_that_forgets_beside_others(backend, rate):
    """Zero times infinity would be no number, nor a denormal one divided by its size."""
    for shape in ((2, 20, 4, 2, 3, 5, 4), (1, 2, 1, 1, 3, 5, 1)):
        for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
            leaves = inputs(shape)
            with torch.no_grad():
                leaves["log_decay"][:, -1] = torch.tensor([rate, 0.3])
            expected = everything(leaves, backend="recurrent")
            assert_close(everything(cast(leaves, dtype), chunk_size=8, backend=backend), expected, bound)


def test_the_first_slot_is_for_one_row_too():
    with pytest.raises(ValueError, match=r"must name a slot for one row alone, got \[0, 0\]"):
        check_slots(torch.tensor([0, 0]), torch.zeros(3, 2), 2, torch.device("cpu"))
    assert check_slots(torch.tensor([-1, -1]), torch.zeros(3, 2), 2, torch.device("cpu")) == 3


def test_one_pad_alone_is_a_pad(monkeypatch):
    """Of a batch in which all tokens but one are real, with memory that holds something."""
    arguments = {k: None if v is None else v.detach() for k, v in inputs(SHAPES["odd_sizes"]).items()}
    rows, length = arguments["query"].shape[:2]
    lengths = torch.full((rows,), length)
    lengths[-1] -= 1
    new_empty = torch.Tensor.new_empty

    def filled(x, *args, **given):
        made = new_empty(x, *args, **given)
        return made.fill_(7) if x.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    output, _ = interdomain_attention(**arguments, backend="chunk", lengths=lengths)
    assert not output[-1, -1].any()
