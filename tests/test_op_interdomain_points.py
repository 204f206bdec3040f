"""Reading a state at points of the past: against loops in float64 that form the keys and values of every point."""

import functools

import pytest
import torch

from modeling_interdomain.ops.common import launch
from modeling_interdomain.ops.diagonal.step import StepParameters
from modeling_interdomain.ops.interdomain.points import Points, point_attention, point_tables, take_point_step
from modeling_interdomain.ops.interdomain.points_chunk import point_operator
from tests.operator_checks import EXTREMES, SHAPES, SLOTS, assert_close, cast, check_step_of_slots, everything, inputs

TOKENS = ("query", "key", "value")
TABLES = ("keys", "values", "bias", "scale")


def attention(keys, values, bias, scale, **arguments):
    return point_attention(**arguments, points=Points(keys, values, bias, scale))


def problem_of(shape, count=5, **options):
    """Arguments of `attention`."""
    shape = SHAPES.get(shape, shape)
    _, _, heads, groups, *_, size = shape
    arguments = inputs(shape, "identity", **options)
    del arguments["coefficient_matrix"]
    draw = torch.Generator().manual_seed(3)
    arguments["keys"] = torch.randn(groups, count, size, 2, generator=draw, dtype=torch.float64)
    arguments["values"] = torch.randn(groups, count, size, 2, generator=draw, dtype=torch.float64)
    arguments["bias"] = torch.randn(groups, heads // groups, count, generator=draw, dtype=torch.float64)
    arguments["scale"] = 0.2 + torch.rand(groups, heads // groups, generator=draw, dtype=torch.float64)
    return {k: v.detach().requires_grad_() for k, v in arguments.items()}


@functools.cache
def problem(shape, count=5):
    """Arguments, and what the definition makes of them."""
    arguments = problem_of(shape, count)
    return arguments, everything(arguments, attention, backend="recurrent")


def by_loops(query, key, value, log_decay, input_matrix, keys, values, bias, scale, initial_state, output_final_state):
    """As the formulas say, a number at a time where they do."""
    decay, beta, of_keys, of_values = (
        torch.view_as_complex(x.contiguous()) for x in (log_decay, input_matrix, keys, values)
    )
    batch, length, heads, width = query.shape
    groups, count = keys.shape[:2]
    outputs, finals = [], []
    for b in range(batch):
        rows = []
        states = [torch.complex(*initial_state[b, g].unbind(0)) for g in range(groups)]
        for t in range(length):
            for g in range(groups):
                written = torch.cat([key[b, t, g], value[b, t, g]])
                states[g] = decay[g].exp()[:, None] * states[g] + beta[g][:, None] * written
            for h in range(heads):
                g, p = divmod(h, heads // groups)
                state_k, state_v = states[g][:, :width], states[g][:, width:]
                scores, found = [], []
                for n in range(count):
                    key_n = sum(of_keys[g, n, m].conj() * state_k[m] for m in range(len(state_k))).real
                    found.append(sum(of_values[g, n, m].conj() * state_v[m] for m in range(len(state_v))).real)
                    scores.append(scale[g, p] * (query[b, t, h] @ key_n) + bias[g, p, n])
                sizes = torch.stack(scores).exp()
                read = sum(size * value_n for size, value_n in zip(sizes, found, strict=True)) / sizes.sum()
                rows.append(torch.cat([read, sizes.sum().log()[None]]))
        outputs.append(torch.stack(rows).view(length, heads, -1))
        finals.append(torch.stack([torch.stack([x.real, x.imag]) for x in states]))
    return torch.stack(outputs), torch.stack(finals) if output_final_state else None


def test_the_definition_is_what_the_formulas_say():
    arguments, expected = problem((2, 6, 4, 2, 3, 2, 3))
    assert_close(everything(arguments, by_loops), expected, 1e-10)


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_are_the_definition(shape, count):
    arguments, expected = problem(shape, count)
    assert_close(everything(arguments, attention), expected, 1e-9)


@pytest.mark.parametrize("chunk_size", [1, 7, 16])
def test_chunk_size_changes_nothing(chunk_size):
    arguments, expected = problem("one_group")
    assert_close(everything(arguments, attention, backend="chunk", chunk_size=chunk_size), expected, 1e-9)


def test_segments_change_nothing(monkeypatch):
    arguments, expected = problem("one_group")
    monkeypatch.setattr("modeling_interdomain.ops.interdomain.chunk_call._SEGMENT_FLOATS", {"cpu": 1, "other": 1})
    assert_close(everything(arguments, attention, chunk_size=16), expected, 1e-9)


def one_by_one(places, **arguments):
    """The definition on `places`, (row, start, end) of documents, each on its own; zeros between them."""
    query, state = arguments["query"], arguments.pop("initial_state")
    outputs, states = query.new_zeros(*query.shape[:3], arguments["value"].shape[-1] + 1), []
    for (row, start, end), own in zip(places, state.split(1), strict=True):
        if start < end:
            tokens = {name: arguments[name][row : row + 1, start:end] for name in TOKENS}
            piece, own = attention(**arguments | tokens, initial_state=own, backend="recurrent")
            outputs = outputs.index_put((torch.tensor([row]), torch.arange(start, end)), piece[0])
        states.append(own)
    return outputs, torch.cat(states)


@pytest.mark.parametrize("ends", [[0, 1, 33], [0, 0, 5, 5, 31, 33, 33]], ids=lambda ends: "_".join(map(str, ends)))
@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
def test_packed_documents_are_documents_alone(ends, backend):
    arguments = problem_of("odd_sizes", rows=len(ends) - 1)
    places = [(0, start, end) for start, end in zip(ends[:-1], ends[1:])]
    found = everything(arguments, attention, backend=backend, cu_seqlens=torch.tensor(ends))
    assert_close(found, everything(arguments, functools.partial(one_by_one, places)), 1e-9)


@pytest.mark.parametrize("lengths", [[19, 1, 0, 17], [0, 0, 0, 16]], ids=str)
@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
def test_a_row_ends_where_its_length_says(lengths, backend):
    """What stands at the pads is not read."""
    arguments = problem_of((4, 19, 4, 2, 3, 5, 3))
    pads = torch.arange(19) >= torch.tensor(lengths)[:, None]
    with torch.no_grad():
        for name in TOKENS:
            arguments[name][pads] = 1e30
    places = [(row, 0, length) for row, length in enumerate(lengths)]
    found = everything(arguments, attention, backend=backend, lengths=torch.tensor(lengths))
    assert_close(found, everything(arguments, functools.partial(one_by_one, places)), 1e-9)
    assert not any(found[name][pads].any() for name in ("output", *(f"grad of {name}" for name in TOKENS)))


@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
def test_texts_without_a_state_begin_with_zeros(backend):
    arguments = {k: v.detach() for k, v in problem_of((2, 19, 4, 2, 3, 5, 3)).items()}
    found = []
    for state in (None, torch.zeros_like(arguments["initial_state"])):
        options = {"initial_state": state, "output_final_state": True, "backend": backend}
        found.append(attention(**arguments | options))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("decay", EXTREMES)
def test_strong_decays(decay):
    arguments = problem_of("odd_sizes", **EXTREMES[decay])
    found = everything(arguments, attention)
    expected = everything(arguments, attention, backend="recurrent")
    assert all(x.isfinite().all() for x in (*found.values(), *expected.values()))
    scale = expected["grad of input_matrix"].norm()
    for name in ("log_decay", "initial_state"):
        assert (found.pop(f"grad of {name}") - expected.pop(f"grad of {name}")).norm() < 1e-9 * scale
    assert_close(found, expected, 1e-9)


def test_scores_far_from_zero():
    """A softmax of scores in the hundreds sums up what no exponential can hold."""
    arguments = problem_of("odd_length")
    with torch.no_grad():
        arguments["scale"] *= 300
        arguments["bias"] -= 2000
    expected = everything(arguments, attention, backend="recurrent")
    assert expected["output"][..., -1].abs().max() > 1000
    assert_close(everything(arguments, attention), expected, 1e-9)


def test_a_thousand_tokens():
    arguments = problem_of((1, 1000, 1, 1, 4, 3, 4), decay=0.02)
    expected = everything(arguments, attention, backend="recurrent")
    assert_close(everything(arguments, attention), expected, 1e-9)


def test_other_dtypes_and_autocast():
    arguments, expected = problem("one_group")
    found = everything(cast(arguments, torch.float32), attention)
    assert found["output"].dtype == found["state"].dtype == torch.float32
    assert_close(found, expected, 2e-5)
    half = {k: v.detach().to(torch.bfloat16 if k in TOKENS else torch.float32) for k, v in arguments.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = attention(**half, output_final_state=True)
    wide, _ = attention(**{k: v.float() for k, v in half.items()})
    assert state.dtype == output.dtype == torch.float32
    torch.testing.assert_close(output, wide)


def test_only_what_is_asked_for():
    arguments, _ = problem("odd_length")
    for names in (["keys"], ["value"], ["log_decay", "bias"], ["scale", "query"]):
        leaves = {k: v.detach().requires_grad_(k in names) for k, v in arguments.items()} | {"initial_state": None}
        grads = []
        for backend in ("recurrent", "chunk"):
            output, final = attention(**leaves, backend=backend)
            assert final is None
            grads.append(torch.autograd.grad(output.square().sum(), [leaves[name] for name in names]))
        assert_close(dict(enumerate(grads[1])), dict(enumerate(grads[0])), 1e-9)


def test_the_operator_has_a_schema_and_compiles():
    arguments, expected = problem("odd_length")
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_close(everything(arguments, compiled), expected, 1e-9)
    names = (*TOKENS, "log_decay", "input_matrix", *TABLES, "initial_state")
    given = (*(arguments[x] for x in names), None, torch.tensor([20, 63]), 16, True)
    torch.library.opcheck(point_operator.registered, given)


@pytest.mark.parametrize("lengths", [None, [63, 20]], ids=["all", "lengths"])
def test_exported_graphs_compute_the_same(lengths, monkeypatch, assert_same):
    arguments = {k: v.detach() for k, v in problem("odd_length")[0].items()} | {"output_final_state": True}
    lengths = None if lengths is None else torch.tensor(lengths)
    expected = attention(**arguments, lengths=lengths, backend="recurrent")
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert_same(attention(**arguments, lengths=lengths, chunk_size=16), expected)


def steps_of(arguments):
    arguments = {k: v.detach() for k, v in arguments.items()}
    points = Points(*(arguments[name] for name in TABLES))
    return arguments, StepParameters(point_tables, arguments["log_decay"], arguments["input_matrix"], points)


@pytest.mark.parametrize("axis", [False, True], ids=["", "an axis of the token"])
def test_steps_are_the_definition(axis, assert_same):
    arguments, parameters = steps_of(problem("odd_length")[0])
    expected, final = attention(**arguments, output_final_state=True, backend="recurrent")
    state = arguments["initial_state"].clone()
    for t in range(63):
        tokens = [arguments[name][:, t : t + 1] if axis else arguments[name][:, t] for name in TOKENS]
        assert_same(take_point_step(*tokens, parameters, state=state), expected[:, t])
    assert_same(state, final)


def test_a_pad_leaves_the_state_and_answers_nothing(assert_same):
    arguments, parameters = steps_of(problem("odd_length")[0])
    state, tokens = arguments["initial_state"].clone(), [arguments[name][:, 0] for name in TOKENS]
    found = take_point_step(*tokens, parameters, state=state, mask=torch.tensor([True, False]))
    assert torch.equal(state[1], arguments["initial_state"][1]) and not found[1].any()
    other = arguments["initial_state"].clone()
    assert_same(found[0], take_point_step(*tokens, parameters, state=other)[0])
    assert_same(state[0], other[0])


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_a_step_of_slots(slots):
    arguments, parameters = steps_of(problem_of((4, 1, 4, 2, 3, 5, 3)))
    step = functools.partial(take_point_step, *(arguments[name][:, 0] for name in TOKENS), parameters)
    check_step_of_slots(step, arguments["initial_state"], slots, 1e-12)


def test_a_state_of_half_precision_moves_in_float32():
    arguments, parameters = steps_of(cast(problem("odd_length")[0], torch.float32))
    tokens = [arguments[name][:, 0] for name in TOKENS]
    state, wide = arguments["initial_state"].bfloat16(), arguments["initial_state"].bfloat16().float()
    assert torch.equal(
        take_point_step(*tokens, parameters, state=state), take_point_step(*tokens, parameters, state=wide)
    )
    assert torch.equal(state, wide.bfloat16())


REFUSED = {
    "heads": (
        {"bias": torch.zeros(3, 2, 5), "scale": torch.zeros(3, 2)},
        "points.bias is of 6 heads, and query has 3.",
    ),
    "modes": ({"keys": torch.zeros(3, 5, 9, 2)}, "points.keys must have shape [G, N, M, 2] = "),
    "points": ({"values": torch.zeros(3, 4, 4, 2)}, "points.values must have shape [G, N, M, 2] = "),
    "scale": ({"scale": torch.zeros(3, 7)}, "points.scale must have shape [G, P] = "),
    "state": ({"initial_state": torch.zeros(1)}, "initial_state must have shape [rows, G, 2, M, R + D] = "),
    "kernels": ({"backend": "triton"}, "backend must be one of auto, recurrent, chunk, got 'triton'."),
    "chunk": ({"chunk_size": 0}, "chunk_size must be a positive integer, got 0."),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_said(what):
    changed, sentence = REFUSED[what]
    arguments = {k: v.detach() for k, v in problem_of("short").items()}
    with pytest.raises(ValueError) as raised:
        attention(**arguments | changed)
    assert str(raised.value).startswith(sentence) and "\n" not in str(raised.value)


def test_where_kernels_run_it_is_said_once_that_points_have_none(monkeypatch, caplog):
    """And models that are counted on "meta" have them."""
    monkeypatch.setattr(launch, "_WITHOUT_KERNELS", ("cpu",))
    launch._say_once.cache_clear()
    arguments = {k: v.detach().to("meta") for k, v in problem_of("short").items()}
    for _ in range(2):
        output, state = attention(**arguments, output_final_state=True)
        assert output.shape == (1, 5, 3, 5) and state.shape == arguments["initial_state"].shape
    assert [record.message for record in caplog.records] == [
        "Interdomain attention runs without its fused kernels: reading at points has none."
    ]
