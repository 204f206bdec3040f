"""Gates of time and of the write, and the delta rule: against loops in float64 that form every state."""

import functools
import gc
import weakref

import pytest
import torch

from modeling_interdomain import interdomain_attention, interdomain_step
from modeling_interdomain.ops.diagonal import step as diagonal_step
from modeling_interdomain.ops.diagonal.step import StepParameters, step_tables
from modeling_interdomain.ops.interdomain import chunk_call, gates_chunk
from modeling_interdomain.ops.interdomain import gates as gates_module
from modeling_interdomain.ops.interdomain.entry import take_step
from modeling_interdomain.ops.interdomain.gates import (
    decay_gated_state,
    gated_state_after,
    total_gated_decay,
)
from modeling_interdomain.ops.interdomain.gates_chunk import _operator
from modeling_interdomain.ops.interdomain.replay import replay_tables
from tests.operator_checks import (
    COEFFICIENTS,
    EXTREMES,
    PRODUCTS,
    SHAPES,
    assert_close,
    everything,
    inputs,
    relative_error,
)

KINDS = {
    "gates": ("log_gate", "write_gate"),
    "forget": ("log_gate",),
    "write": ("write_gate",),
    "delta": ("delta",),
    "all": ("log_gate", "write_gate", "delta"),
}


def gated(shape, names, coefficients="full", strength=0.1, dtype=torch.float64, **options):
    """Arguments with some gates; keys of about length one, so that the delta rule does not blow up."""
    arguments = inputs(SHAPES.get(shape, shape), coefficients, dtype=torch.float64, **options)
    batch, length, groups, feature_dim = arguments["key"].shape
    generator = torch.Generator().manual_seed(7)

    def uniform():
        return torch.rand(batch, length, groups, generator=generator, dtype=torch.float64)

    gates = {"log_gate": -strength * uniform(), "write_gate": 0.5 + uniform(), "delta": uniform()}
    if "delta" in names:
        arguments["key"] = arguments["key"] / (3 * feature_dim * arguments["log_decay"].shape[1] ** 0.5)
    return {
        k: None if v is None else v.detach().to(dtype).requires_grad_()
        for k, v in (arguments | {k: gates[k] for k in names}).items()
    }


def as_the_formulas_say(
    query, key, value, log_decay, input_matrix, coefficient_matrix, initial_state, output_final_state,
    product="bilinear", log_gate=None, write_gate=None, delta=None, time_step=None,
):  # fmt: skip
    """One head, one mode and one column after the other; slow, and without a helper of the package."""
    batch, length, heads, _ = query.shape
    groups, width = key.shape[2], key.shape[3]
    size = log_decay.shape[1]
    rate = torch.complex(log_decay[..., 0], log_decay[..., 1])
    beta = torch.complex(input_matrix[..., 0], input_matrix[..., 1])
    outputs = [[[None] * heads for _ in range(length)] for _ in range(batch)]
    states = []
    for b in range(batch):
        for g in range(groups):
            state = torch.complex(initial_state[b, g, 0], initial_state[b, g, 1])
            matrix = torch.eye(size, dtype=state.dtype)
            if coefficient_matrix is not None:
                pairs = torch.complex(coefficient_matrix[g, ..., 0], coefficient_matrix[g, ..., 1])
                matrix = pairs if pairs.ndim == 2 else torch.diag(pairs)

            def answer(row, state, matrix=matrix):
                u, gamma = (matrix @ state).split([width, value.shape[3]], dim=-1)
                total = 0
                for m in range(size):
                    pulled = (row * u[m]).sum()
                    if product == "bilinear":
                        total = total + (pulled * gamma[m]).real
                    elif product == "hermitian":
                        total = total + (pulled * gamma[m].conj()).real
                    else:
                        total = total + 4 * pulled.real * gamma[m].real
                return total

            for t in range(length):
                f = 1 if log_gate is None else log_gate[b, t, g].exp()
                step = 1 if time_step is None else time_step[b, t, g]
                state = torch.stack([f * torch.exp(step * rate[g, m]) * state[m] for m in range(size)])
                written = value[b, t, g]
                if delta is not None:
                    written = written - delta[b, t, g] * answer(key[b, t, g], state)
                w = 1 if write_gate is None else write_gate[b, t, g]
                state = state + torch.stack([w * beta[g, m] * torch.cat([key[b, t, g], written]) for m in range(size)])
                for h in range(g * (heads // groups), (g + 1) * (heads // groups)):
                    outputs[b][t][h] = answer(query[b, t, h], state)
            states.append(torch.stack([state.real, state.imag]))
    output = torch.stack([torch.stack([torch.stack(row) for row in rows]) for rows in outputs])
    return output, torch.stack(states).unflatten(0, (batch, groups))


@functools.cache
def problem(shape, kind, product="bilinear", coefficients="full"):
    """Arguments, and what the definition makes of them."""
    arguments = gated(shape, KINDS[kind], coefficients)
    return arguments, everything(arguments, backend="recurrent", product=product)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("product", "coefficients"), list(zip(PRODUCTS, COEFFICIENTS)))
def test_the_definition_is_what_the_formulas_say(kind, product, coefficients):
    arguments = gated((2, 6, 4, 2, 3, 2, 3), KINDS[kind], coefficients)
    found = everything(arguments, backend="recurrent", product=product)
    assert_close(found, everything(arguments, as_the_formulas_say, product=product), 1e-10)


# Every shape with one readout, and every readout with one shape.
PROBLEMS = [(shape, "bilinear", "full") for shape in SHAPES] + [
    ("odd_sizes", product, c) for product, c in zip(PRODUCTS, COEFFICIENTS)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "product", "coefficients"), PROBLEMS)
def test_chunks_are_the_definition(shape, product, coefficients, kind):
    arguments, expected = problem(shape, kind, product, coefficients)
    assert_close(everything(arguments, product=product, chunk_size=16), expected, 1e-9)


@pytest.mark.parametrize("kind", ["gates", "all"])
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 256])
def test_chunk_size_changes_nothing(chunk_size, kind):
    arguments, expected = problem("one_group", kind)
    assert_close(everything(arguments, backend="chunk", chunk_size=chunk_size), expected, 1e-9)


def one_by_one(
    operator, places, initial_state, log_decay, input_matrix, coefficient_matrix, output_final_state, **tokens
):
    """The definition on `places`, (row, start, end) of documents, each on its own; zeros between them."""
    outputs, states = torch.zeros_like(tokens["query"][..., :1]) * tokens["value"].repeat_interleave(2, 2), []
    for (row, start, end), state in zip(places, initial_state.split(1)):
        if start < end:
            piece, state = operator(
                **{name: x[row : row + 1, start:end] for name, x in tokens.items()}, log_decay=log_decay,
                input_matrix=input_matrix, coefficient_matrix=coefficient_matrix, initial_state=state,
                backend="recurrent", output_final_state=True,
            )  # fmt: skip
            outputs = outputs.index_put((torch.tensor([row]), torch.arange(start, end)), piece[0])
        states.append(state)
    return outputs, torch.cat(states)


ENDS = [[0, 1, 33], [0, 16, 32, 33], [0, 0, 5, 5, 31, 33, 33]]


@pytest.mark.parametrize("kind", ["gates", "all"])
@pytest.mark.parametrize("ends", ENDS, ids=lambda ends: "_".join(map(str, ends)))
@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
def test_packed_documents_are_documents_alone(ends, backend, kind):
    arguments = gated("odd_sizes", KINDS[kind], COEFFICIENTS[len(ends) % 3], rows=len(ends) - 1)
    places = [(0, start, end) for start, end in zip(ends[:-1], ends[1:])]
    found = everything(arguments, backend=backend, cu_seqlens=torch.tensor(ends), chunk_size=16)
    assert_close(found, everything(arguments, functools.partial(one_by_one, interdomain_attention, places)), 1e-9)


@pytest.mark.parametrize("kind", ["gates", "all"])
@pytest.mark.parametrize("lengths", [[33, 1, 0, 20], [0, 0, 0, 16]], ids=str)
@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
def test_a_row_ends_where_its_length_says(lengths, backend, kind):
    """What stands at the pads is not read: outputs, states and gradients are those of every row alone."""
    arguments = gated((4, 33, 6, 3, 3, 10, 7), KINDS[kind])
    pads = torch.arange(33) >= torch.tensor(lengths)[:, None]
    tokens = ("query", "key", "value", *KINDS[kind])
    with torch.no_grad():
        for name in tokens:
            arguments[name][pads] = -1e30 if name == "log_gate" else 1e30
    places = [(row, 0, length) for row, length in enumerate(lengths)]
    found = everything(arguments, backend=backend, lengths=torch.tensor(lengths), chunk_size=16)
    assert_close(found, everything(arguments, functools.partial(one_by_one, interdomain_attention, places)), 1e-9)
    assert not any(found[name][pads].any() for name in ("output", *(f"grad of {name}" for name in tokens)))


def test_gates_go_with_the_normalised_readout():
    arguments = gated("odd_length", KINDS["gates"], normalize=True, seed=3)
    expected = everything(arguments, backend="recurrent", normalize=True)
    # Where a denominator comes near zero the quotient is as steep as float64 can follow.
    assert_close(everything(arguments, normalize=True, chunk_size=16), expected, 1e-8)
    one = torch.ones_like(arguments["value"][..., :1])
    plain = dict(arguments, value=torch.cat([arguments["value"], one], dim=-1))
    ratio, _ = interdomain_attention(**plain, backend="recurrent")
    assert relative_error(expected["output"], ratio[..., :-1] / ratio[..., -1:]) < 1e-9


# What log_gate may be, of random tokens in between gates near 0.
STRONG = {"strong": -30.0, "stronger": -1e4, "zero": -float("inf")}


@pytest.mark.parametrize("what", STRONG)
@pytest.mark.parametrize("kind", ["gates", "all"])
def test_strong_and_zero_gates(what, kind):
    """States are forgotten in the middle of chunks and at their edges; what went before gets no gradient."""
    arguments = gated((2, 65, 2, 1, 4, 3, 3), KINDS[kind])
    with torch.no_grad():
        arguments["log_gate"][0, [0, 5, 15, 16, 40, 41, 64]] = STRONG[what]
        arguments["log_gate"][1] = STRONG[what]
    expected = everything(arguments, backend="recurrent")
    assert all(x.isfinite().all() for x in expected.values())
    found = everything(arguments, chunk_size=16)
    assert_close(found, expected, 1e-9)
    if what == "zero":
        assert not found["grad of log_gate"][1].any() and not found["grad of initial_state"].any()


@pytest.mark.parametrize("kind", ["write", "all"])
def test_tokens_that_write_nothing(kind):
    """Zeros in the middle of chunks and at their edges, a row of them, and a token that is written many times over."""
    arguments = gated((2, 65, 2, 1, 4, 3, 3), KINDS[kind])
    with torch.no_grad():
        arguments["write_gate"][0, [0, 5, 15, 16, 40, 41, 64]] = 0
        arguments["write_gate"][0, 20] = 30
        arguments["write_gate"][1] = 0
    found = everything(arguments, chunk_size=16)
    assert_close(found, everything(arguments, backend="recurrent"), 1e-9)
    assert found["grad of write_gate"].all() and not found["grad of value"][1].any()


@pytest.mark.parametrize("decay", EXTREMES)
def test_strong_decays_beside_gates(decay):
    """Where decays leave nothing for a gate to take away, its gradient is the rounding of what it is made of."""
    arguments = gated("odd_sizes", KINDS["all"], **EXTREMES[decay])
    found, expected = everything(arguments, chunk_size=16), everything(arguments, backend="recurrent")
    wrong = found.pop("grad of log_gate") - expected.pop("grad of log_gate")
    assert_close(found, expected, 1e-9)
    assert wrong.norm() < 1e-12 * expected["grad of write_gate"].norm()


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_no_correction_and_all_of_it(delta):
    arguments = gated("odd_length", KINDS["all"])
    with torch.no_grad():
        arguments["delta"].fill_(delta)
    expected = everything(arguments, backend="recurrent")
    found = everything(arguments, chunk_size=16)
    assert_close(found, expected, 1e-9)
    assert found["grad of delta"].any()
    if delta == 0:
        plain = everything({name: x for name, x in arguments.items() if name != "delta"})
        assert_close({name: found[name] for name in plain}, plain, 1e-9)


def test_a_thousand_tokens():
    """Gates as they start, that leave a third after 150 tokens: errors of their gradients do not add up."""
    arguments = gated((1, 1000, 1, 1, 4, 3, 4), KINDS["all"], strength=0.014, decay=0.02)
    assert_close(everything(arguments), everything(arguments, backend="recurrent"), 1e-8)


@pytest.mark.parametrize("kind", ["gates", "all"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("initial", [True, False], ids=["goes-on", "begins"])
def test_many_segments(monkeypatch, rows, kind, initial):
    """A segment begins with the state that the forward pass has kept; where the last one has a gradient, too, all are
    walked through again."""
    # 40 tokens: five chunks of a row, or one of each.
    monkeypatch.setitem(chunk_call._SEGMENT_FLOATS, "cpu", 40 * 2 * 4 * 2)
    arguments = gated((rows, 85, 2, 1, 4, 3, 4), KINDS[kind])
    if not initial:
        arguments["initial_state"] = None

    def outputs_alone(**options):
        output, state = interdomain_attention(**options)
        return output, state.detach()

    for attend in (outputs_alone, interdomain_attention):
        expected = everything(arguments, attend, backend="recurrent")
        assert_close(everything(arguments, attend, backend="chunk", chunk_size=8), expected, 1e-9)


@pytest.mark.parametrize("kind", ["gates", "all"])
def test_many_segments_of_several_blocks_of_rows(monkeypatch, kind):
    """More rows than stand side by side: numbers a token lie block by block, as segments of the rows do."""
    # 40 tokens: one chunk of each of five rows.
    monkeypatch.setitem(chunk_call._SEGMENT_FLOATS, "cpu", 40 * 2 * 4 * 2)
    arguments = gated((7, 21, 2, 1, 4, 3, 4), KINDS[kind])
    expected = everything(arguments, backend="recurrent")
    assert_close(everything(arguments, backend="chunk", chunk_size=8), expected, 1e-9)


@pytest.mark.parametrize("kind", ["gates", "all"])
def test_many_segments_of_documents(monkeypatch, kind):
    """Of these no states are kept for the backward pass: segments are cut as the documents come."""
    monkeypatch.setitem(chunk_call._SEGMENT_FLOATS, "cpu", 40 * 2 * 4 * 2)
    ends = [0, 5, 45, 45, 61, 62, 94]
    arguments = gated((1, 94, 2, 1, 4, 3, 4), KINDS[kind], rows=len(ends) - 1)
    places = [(0, start, end) for start, end in zip(ends[:-1], ends[1:])]
    expected = everything(arguments, functools.partial(one_by_one, interdomain_attention, places))
    found = everything(arguments, backend="chunk", cu_seqlens=torch.tensor(ends), chunk_size=8)
    assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("kind", ["gates", "all"])
def test_a_call_lets_go_of_its_memory(monkeypatch, kind):
    """Without a collector of cycles."""
    calls = []

    class Call(gates_chunk.GatedCall):
        def __init__(self, *arguments, **options):
            calls.append(weakref.ref(self))
            super().__init__(*arguments, **options)

    monkeypatch.setattr(gates_chunk, "GatedCall", Call)
    gc.disable()
    try:
        everything(gated(SHAPES["one_group"], KINDS[kind]))
        assert len(calls) == 2 and not any(call() for call in calls)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["gates", "all"])
def test_what_a_backward_pass_needs_is_kept_for_one_alone(monkeypatch, kind):
    """The states with which segments begin."""
    monkeypatch.setattr(chunk_call, "_SEGMENT_FLOATS", {"cpu": 1})
    rooms, room_for = [], gates_chunk._room_for_entries
    monkeypatch.setattr(
        gates_chunk, "_room_for_entries", lambda *arguments: rooms.append(room_for(*arguments)) or rooms[-1]
    )
    arguments = gated(SHAPES["one_group"], KINDS[kind])
    expected, _ = interdomain_attention(**arguments, backend="chunk", chunk_size=16)
    with torch.no_grad():
        found, _ = interdomain_attention(**arguments, backend="chunk", chunk_size=16)
    assert torch.equal(found, expected)
    assert [room.numel() > 0 for room in rooms] == [True, False]


@pytest.mark.parametrize("shape", ["odd_length", "odd_sizes"])
@pytest.mark.parametrize("initial", [True, False], ids=["goes-on", "begins"])
def test_neutral_gates_are_none(shape, initial):
    arguments = inputs(SHAPES[shape])
    if not initial:
        arguments["initial_state"] = None
    expected = everything(arguments, chunk_size=16)
    zero = torch.zeros_like(arguments["key"][..., 0])
    neutral = {"log_gate": zero, "write_gate": zero + 1, "delta": zero}
    for names in KINDS.values():
        found = everything(arguments | {name: neutral[name].clone().requires_grad_() for name in names}, chunk_size=16)
        assert_close({name: found[name] for name in expected}, expected, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_float32(kind):
    arguments, expected = problem("one_group", kind)
    narrow = {k: None if v is None else v.detach().float().requires_grad_() for k, v in arguments.items()}
    found = everything(narrow)
    assert found["output"].dtype == found["state"].dtype == torch.float32
    assert_close(found, expected, 2e-5)


@pytest.mark.parametrize("kind", ["gates", "all"])
def test_other_dtypes_and_autocast(kind):
    """Tokens in bfloat16 are computed with in float32, whatever the gates have; so is everything under autocast."""
    arguments = {k: v.detach() for k, v in gated("odd_length", KINDS[kind], dtype=torch.float32).items()}
    tokens = {k: v.bfloat16() if k in ("query", "key", "value") else v for k, v in arguments.items()}
    wide = {k: v.float() for k, v in tokens.items()}
    expected, state = interdomain_attention(**wide, output_final_state=True)
    output, found = interdomain_attention(**tokens, output_final_state=True)
    torch.testing.assert_close((output, found), (expected.bfloat16(), state))
    gates = {name: arguments[name].double() for name in KINDS[kind]}
    torch.testing.assert_close(interdomain_attention(**wide | gates)[0], expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert interdomain_attention(**wide)[0].equal(expected)


@pytest.mark.parametrize("kind", ["gates", "all"])
def test_only_what_is_asked_for(kind):
    """Without a final state, an initial state, or gradients of some arguments."""
    arguments, _ = problem("odd_length", kind)
    for names in (["log_gate"], ["value"], ["log_decay", "coefficient_matrix"]):
        for state in (None, arguments["initial_state"]):
            leaves = {k: v.detach().requires_grad_(k in names) for k, v in arguments.items()}
            if state is None:
                leaves["initial_state"] = None
            grads = []
            for backend in ("recurrent", "chunk"):
                output, final = interdomain_attention(**leaves, backend=backend)
                assert final is None
                grads.append(torch.autograd.grad(output.square().sum(), [leaves[name] for name in names]))
            for found, expected in zip(*grads, strict=True):
                assert relative_error(found, expected) < 1e-9


def test_the_operator_has_a_schema_and_compiles():
    arguments, expected = problem("odd_length", "all")
    compiled = torch.compile(interdomain_attention, fullgraph=True, backend="aot_eager")
    assert_close(everything(arguments, compiled), expected, 1e-9)
    names = ("query", "key", "value", "log_decay", "input_matrix", "coefficient_matrix", "initial_state")
    tensors = [arguments[name] for name in names]
    ends = torch.tensor([20, 63])
    gates = arguments["log_gate"], arguments["write_gate"], arguments["delta"]
    torch.library.opcheck(_operator.registered, (*tensors, *gates, None, ends, "real", 16, True, True))


def stepped(take, query, key, value, initial_state, *parameters, mask=None, **gates):
    """All tokens by steps of one token each, in place; outputs and the last state."""
    state, outputs = initial_state.detach().clone(), []
    for t in range(query.shape[1]):
        now = {name: x[:, t] for name, x in gates.items()}
        here = None if mask is None else mask[:, t]
        outputs.append(take(query[:, t], key[:, t], value[:, t], *parameters, state=state, mask=here, **now))
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("product", "coefficients"), list(zip(PRODUCTS, COEFFICIENTS)))
def test_steps_are_the_definition(kind, product, coefficients, assert_same):
    arguments = {
        k: None if v is None else v.detach() for k, v in gated("odd_length", KINDS[kind], coefficients).items()
    }
    expected = interdomain_attention(**arguments, product=product, backend="recurrent", output_final_state=True)
    names = ("query", "key", "value", "initial_state", "log_decay", "input_matrix", "coefficient_matrix")
    tensors, gates = [arguments[name] for name in names], {name: arguments[name] for name in KINDS[kind]}
    step = functools.partial(interdomain_step, product=product)
    assert_same(stepped(step, *tensors, **gates), expected)

    def as_a_mixer(query, key, value, *parameters, state, mask, log_gate=None, write_gate=None, delta=None):
        gates = tuple(None if x is None else x[:, None] for x in (log_gate, write_gate, delta))
        tokens, parameters = (
            (x[:, None] for x in (query, key, value)),
            StepParameters(step_tables, *parameters, product),
        )
        return take_step(*tokens, parameters, state=state, normalize=False, mask=mask, gates=gates)

    assert_same(stepped(as_a_mixer, *tensors, **gates), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_slots_is_that_of_their_rows(kind):
    arguments = {k: v.detach() for k, v in gated((2, 1, 2, 1, 3, 4, 5), KINDS[kind]).items()}
    state = arguments.pop("initial_state")
    tokens = {k: arguments.pop(k)[:, 0] for k in ("query", "key", "value", *KINDS[kind])}
    pool = torch.randn(5, *state.shape[1:], dtype=state.dtype)
    pool[[3, 0]] = state
    expected, before = interdomain_step(**tokens, **arguments, state=state), pool.clone()
    output = interdomain_step(**tokens, **arguments, state=pool, state_indices=torch.tensor([3, 0]))
    torch.testing.assert_close((output, pool[[3, 0]]), (expected, state))
    assert pool[[1, 2, 4]].equal(before[[1, 2, 4]])


@pytest.mark.parametrize("kind", ["gates", "all"])
def test_pads_leave_the_state_of_a_step_alone(kind, assert_same):
    arguments = {k: v.detach() for k, v in gated((2, 7, 2, 1, 3, 4, 5), KINDS[kind]).items()}
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1]])
    names = ("query", "key", "value", "initial_state", "log_decay", "input_matrix", "coefficient_matrix")
    tokens = {k: v for k, v in arguments.items() if k in ("query", "key", "value", *KINDS[kind])}
    for x in tokens.values():
        x[~mask.bool()] = torch.nan  # whatever a pad holds
    rest = {k: v for k, v in arguments.items() if k not in (*tokens, "initial_state")}
    gates = {name: arguments[name] for name in KINDS[kind]}
    output, state = stepped(interdomain_step, *(arguments[name] for name in names), mask=mask, **gates)
    for row, real in enumerate(mask.bool()):
        alone = {k: v[row : row + 1, real] for k, v in tokens.items()}
        alone |= {"initial_state": arguments["initial_state"][row : row + 1], "backend": "recurrent"}
        expected = interdomain_attention(**alone, **rest, output_final_state=True)
        assert_same((output[row : row + 1, real], state[row : row + 1]), expected)
        assert not output[row, ~real].any()


@pytest.mark.parametrize("mask", [None, torch.arange(7) % 3 > 0], ids=["all", "pads"])
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_a_step_goes_over_a_few_rows_of_a_large_batch_at_a_time(kind, mask, monkeypatch):
    names = KINDS.get(kind, ())
    arguments = {k: v.detach() for k, v in gated((7, 1, 2, 1, 3, 4, 5), names).items()}
    state = arguments.pop("initial_state")
    tokens = {k: arguments.pop(k)[:, 0] for k in ("query", "key", "value", *names)}
    whole, in_parts = state.clone(), state.clone()
    expected = interdomain_step(**tokens, **arguments, state=whole, mask=mask)
    turned = []
    turn_state = diagonal_step.turn_state
    for module in (diagonal_step, gates_module):
        monkeypatch.setattr(module, "turn_state", lambda x, *rest: (turned.append(x.shape[0]), turn_state(x, *rest)))
    monkeypatch.setattr(diagonal_step, "_ROWS_BYTES", 3 * state[0].nbytes)
    found = interdomain_step(**tokens, **arguments, state=in_parts, mask=mask)
    assert found.equal(expected) and in_parts.equal(whole) and not whole.equal(state)
    assert turned == [7, 3, 3, 1]


def test_a_narrow_state_is_stepped_in_float32():
    arguments = {k: v.detach().float() for k, v in gated((2, 1, 2, 1, 3, 4, 5), KINDS["all"]).items()}
    state = arguments.pop("initial_state").bfloat16()
    _, expected = interdomain_attention(**arguments, initial_state=state.float(), output_final_state=True)
    tokens = {k: arguments.pop(k)[:, 0] for k in ("query", "key", "value", *KINDS["all"])}
    interdomain_step(**tokens, **arguments, state=state)
    torch.testing.assert_close(state, expected.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tables", [False, True], ids=["no-tables", "tables"])
@pytest.mark.parametrize("pads", [False, True], ids=["all-real", "pads"])
def test_replay_is_the_definition(kind, tables, pads, assert_same):
    arguments = {k: v.detach() for k, v in gated((2, 9, 2, 2, 3, 4, 5), KINDS[kind]).items()}
    arguments |= {"query": arguments["key"]}
    mask = torch.ones(2, 9, dtype=torch.bool)
    if pads:
        mask[0, ::3], mask[1] = False, False
    parameters = arguments["log_decay"], arguments["input_matrix"]
    gates = {name: arguments[name] for name in KINDS[kind]}
    readout = {"coefficient_matrix": arguments["coefficient_matrix"], "product": "hermitian"}
    found = gated_state_after(
        arguments["initial_state"], arguments["key"], arguments["value"], mask, *parameters,
        *(replay_tables(*parameters, 9) if tables else ()), **gates, **readout,
    )  # fmt: skip
    for row, real in enumerate(mask):
        expected = arguments["initial_state"][row : row + 1]
        if real.any():
            tokens = {k: arguments[k][row : row + 1, real] for k in ("query", "key", "value", *KINDS[kind])}
            _, expected = interdomain_attention(
                **tokens, log_decay=parameters[0], input_matrix=parameters[1], **readout, initial_state=expected,
                backend="recurrent", output_final_state=True,
            )  # fmt: skip
        assert_same(found[row : row + 1], expected)


def test_a_state_passes_tokens_that_write_nothing(assert_same):
    """What sequence parallelism adds up: a first piece's state after a second piece, and what the second brings."""
    arguments = {k: v.detach() for k, v in gated((2, 12, 2, 2, 3, 4, 5), KINDS["gates"]).items()}
    with torch.no_grad():
        arguments["log_gate"][1, 8, 1] = -torch.inf
    first = {k: v[:, :7] if v.shape[1] == 12 else v for k, v in arguments.items()}
    second = {k: v[:, 7:] if v.shape[1] == 12 else v for k, v in arguments.items()}
    _, whole = interdomain_attention(**arguments, backend="recurrent", output_final_state=True)
    _, left = interdomain_attention(**first, backend="recurrent", output_final_state=True)
    _, right = interdomain_attention(
        **second | {"initial_state": None}, backend="recurrent", output_final_state=True
    )  # fmt: skip
    mask = torch.ones(2, 5, dtype=torch.bool)
    total = total_gated_decay(mask[:, :2], second["log_gate"][:, :2])
    total = total + total_gated_decay(mask[:, 2:], second["log_gate"][:, 2:])
    assert total.shape == (2, 3)
    assert_same(decay_gated_state(left, total, arguments["log_decay"]) + right, whole)


REFUSED = {
    "positive": ({"log_gate": 0.1}, {}, "log_gate must be at most 0, the logarithm of a factor up to 1, got 0.1."),
    "normalised": ({"delta": 0.5}, {"normalize": True}, "delta needs the plain readout: use normalize=False, or leave"),
} | {
    backend: ({"write_gate": 0.5}, {"backend": backend}, f"backend {backend!r} has no gates and no delta rule: with ")
    for backend in ("fft", "scan", "associative_scan")
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_said(what):
    gates, options, sentence = REFUSED[what]
    arguments = {k: v.detach() for k, v in gated("short", ()).items()} | {"initial_state": None}
    gates = {k: torch.full_like(arguments["key"][..., 0], x) for k, x in gates.items()}
    with pytest.raises(ValueError) as raised:
        interdomain_attention(**arguments, **gates, **options)
    assert str(raised.value).startswith(sentence) and "\n" not in str(raised.value)
    if "backend" in options:  # a step has others
        return
    now = {k: arguments.pop(k)[:, 0] for k in ("query", "key", "value")} | {k: x[:, 0] for k, x in gates.items()}
    width = now["key"].shape[-1] + now["value"].shape[-1] + int("normalize" in options)
    state = arguments["log_decay"].new_ones(1, 3, 2, 4, width)
    del arguments["initial_state"]
    with pytest.raises(ValueError) as raised:
        interdomain_step(**now, **arguments, state=state, **options)
    assert str(raised.value).startswith(sentence) and bool((state == 1).all())


@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
@pytest.mark.parametrize("spoiled", ["key", "value", "write_gate"])
@pytest.mark.parametrize("kind", ["write_gate", "all"])
def test_a_pad_that_is_no_number_gives_no_gradient(kind, spoiled, backend):
    names = ("write_gate",) if kind == "write_gate" else KINDS[kind]
    arguments = {k: v.detach() for k, v in gated("short", names).items()}
    rows, length = arguments["key"].shape[:2]
    lengths = torch.full((rows,), length - 2)
    arguments[spoiled][:, -2:] = torch.nan
    given = {name: arguments[name].requires_grad_() for name in ("key", "value", *names)}
    output, _ = interdomain_attention(**arguments, lengths=lengths, backend=backend)
    for name, grad in zip(given, torch.autograd.grad(output.sum(), list(given.values())), strict=True):
        assert grad.isfinite().all() and grad[:, -2:].eq(0).all(), name


def test_what_is_too_large_is_said_beside_what_is_no_number():
    arguments = {k: v.detach() for k, v in gated("short", ()).items()}
    gates = torch.zeros_like(arguments["key"][..., 0])
    gates[0, 0, 0], gates[0, 1, 0] = torch.nan, 0.25
    with pytest.raises(ValueError, match=r"log_gate must be at most 0, .*, got 0\.25\."):
        interdomain_attention(**arguments, log_gate=gates)


def test_models_that_are_counted_on_meta_have_gates():
    arguments = {k: v.detach().to("meta") for k, v in gated("short", KINDS["all"]).items()}
    output, state = interdomain_attention(**arguments, output_final_state=True)
    assert output.shape == arguments["query"].shape and state.shape == arguments["initial_state"].shape


def test_exported_graphs_have_no_gates():
    class Layer(torch.nn.Module):
        def forward(self, query, key, value, log_decay, input_matrix, log_gate):
            return interdomain_attention(query, key, value, log_decay, input_matrix, log_gate=log_gate)[0]

    arguments = gated("short", ("log_gate",), dtype=torch.float32)
    names = ("query", "key", "value", "log_decay", "input_matrix", "log_gate")
    with pytest.raises(Exception, match="Exported graphs have no gates and no delta rule"):
        torch.export.export(Layer(), tuple(arguments[name].detach() for name in names))


def test_an_overwritten_key_is_corrected_instead_of_added():
    """Figures of the delta rule: four keys, each written three times; what counts is the value written last.

    Keys are at right angles and modes a turn apart, so that a state answers a key with the sum of what was written
    under it, and with delta 1 with the last value alone.
    """
    keys, times, dim, size = 4, 3, 8, 32
    generator = torch.Generator().manual_seed(0)
    own = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q[:keys]
    order = torch.cat([torch.randperm(keys, generator=generator) for _ in range(times)])
    values = torch.randn(keys * times, dim, generator=generator, dtype=torch.float64)
    sums = torch.stack([values[order == k].sum(0) for k in range(keys)])
    last = torch.stack([values[order == k][-1] for k in range(keys)])
    turns = 2 * torch.pi * torch.arange(size, dtype=torch.float64) / size
    beta = torch.stack([torch.full_like(turns, size**-0.5), torch.zeros_like(turns)], dim=-1)[None]
    parameters = torch.stack([torch.zeros_like(turns), turns], dim=-1)[None], beta

    def recalled(delta):
        """What each key finds in the state after the last token."""
        delta = torch.full((1, keys * times, 1), delta, dtype=torch.float64)
        tokens = own[order][None, :, None], values[None, :, None]
        options = {"product": "hermitian", "delta": delta, "output_final_state": True}
        _, state = interdomain_attention(tokens[0], *tokens, *parameters, **options)
        nothing = torch.zeros(keys, 1, dim, dtype=torch.float64)
        states = state.expand(keys, -1, -1, -1, -1).contiguous()
        return interdomain_step(own[:, None], nothing, nothing, *parameters, state=states, product="hermitian")[:, 0]

    assert relative_error(recalled(0.0), sums) < 1e-10
    assert relative_error(recalled(1.0), last) < 1e-10
    errors = [relative_error(recalled(delta), last) for delta in (0.0, 0.5, 1.0)]
    assert errors[0] > 1 > 0.7 > errors[1] > errors[2], errors


@pytest.mark.parametrize("what", STRONG)
def test_replay_of_strong_and_zero_gates(what, assert_same):
    """What is forgotten in the middle and at the end, and the tokens behind it."""
    arguments = {k: v.detach() for k, v in gated((2, 9, 2, 2, 3, 4, 5), KINDS["gates"]).items()}
    arguments["log_gate"][0, [0, 4]] = STRONG[what]
    arguments["log_gate"][1, 8] = STRONG[what]
    tokens = {name: arguments[name] for name in ("key", "value", "log_decay", "input_matrix", *KINDS["gates"])}
    found = gated_state_after(arguments["initial_state"], mask=torch.ones(2, 9, dtype=torch.bool), **tokens)
    _, expected = interdomain_attention(**arguments, backend="recurrent", output_final_state=True)
    assert_same(found, expected)


@pytest.mark.parametrize("kind", ["gates", "all"])
def test_many_segments_of_padded_rows(monkeypatch, kind):
    """Of these, too, no states are kept for the backward pass."""
    monkeypatch.setitem(chunk_call._SEGMENT_FLOATS, "cpu", 40 * 2 * 4 * 2)
    lengths = [85, 3, 0, 50]
    arguments = gated((4, 85, 2, 1, 4, 3, 4), KINDS[kind])
    places = [(row, 0, length) for row, length in enumerate(lengths)]
    expected = everything(arguments, functools.partial(one_by_one, interdomain_attention, places))
    found = everything(arguments, backend="chunk", lengths=torch.tensor(lengths), chunk_size=8)
    assert_close(found, expected, 1e-9)
