"""The S4D control against its definition, token by token in float64: outputs, states and every gradient."""

import functools
from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from modeling_interdomain.ops.common import slots as op_common_slots
from modeling_interdomain.ops.s4d.entry import s4d_attention, s4d_step
from tests.operator_checks import (
    EXTREMES,
    SHAPES,
    SLOTS,
    at_an_odd_offset,
    check_bad_slots,
    check_step_of_slots,
    inputs,
)

NAMES = ("key", "value", "log_decay", "input_matrix", "readout", "initial_state")


def arguments(shape, dtype=torch.float64, rows=None, **options):
    """Those of `inputs`, with a readout for every head instead of a query and a coefficient matrix."""
    found = inputs(shape, dtype=dtype, rows=rows, **options)
    generator = torch.Generator().manual_seed(7)
    readout = torch.randn(shape[2], shape[6], 2, generator=generator, dtype=torch.float64).to(dtype)
    return {name: found.get(name, readout).detach().requires_grad_() for name in NAMES}


def definition(key, value, log_decay, input_matrix, readout, initial_state, boundaries):
    decay, beta, rows = (torch.view_as_complex(x) for x in (log_decay, input_matrix, readout))
    rows = rows.unflatten(0, (key.shape[2], -1))
    tokens, batch = torch.cat([key, value], dim=-1), key.shape[0]
    outputs, finals = [], []
    for document, (start, end) in enumerate(pairwise(boundaries)):
        state = torch.view_as_complex(initial_state[document : document + batch].movedim(2, -1).contiguous())
        for t in range(start, end):
            state = decay.exp()[..., None] * state + beta[..., None] * tokens[:, t, :, None]
            outputs.append(2 * torch.einsum("gpm,bgmw->bgpw", rows, state).real.flatten(1, 2))
        finals.append(torch.stack([state.real, state.imag], dim=2))
    return torch.stack(outputs, dim=1), torch.cat(finals)


def with_gradients(found, leaves):
    weights = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=weights, dtype=torch.float64).to(x)).sum() for x in found)
    return [*found, *torch.autograd.grad(loss, list(leaves.values()))]


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * float(b.detach().abs().max()))


@functools.cache
def problem(shape, extreme):
    """Arguments, and what the definition makes of them."""
    leaves = arguments(SHAPES[shape], **EXTREMES.get(extreme, {}))
    return leaves, with_gradients(definition(**leaves, boundaries=[0, SHAPES[shape][1]]), leaves)


@pytest.mark.parametrize("shape", ["one_mode", "odd_sizes"])
def test_arguments_in_a_flat_buffer(shape):
    leaves, expected = problem(shape, None)
    flat = {name: at_an_odd_offset(x) for name, x in leaves.items()}
    assert_close(with_gradients(s4d_attention(**flat, output_final_state=True, chunk_size=8), flat), expected)


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("shape", "extreme"), [*((shape, None) for shape in SHAPES), *(("one_group", extreme) for extreme in EXTREMES)]
)
def test_equals_the_definition(shape, extreme, chunk_size):
    leaves, expected = problem(shape, extreme)
    found = with_gradients(s4d_attention(**leaves, output_final_state=True, chunk_size=chunk_size), leaves)
    assert_close(found, expected)


@pytest.mark.parametrize("chunk_size", [4, 16])
def test_packed_documents_do_not_see_each_other(chunk_size):
    boundaries = [0, 5, 5, 6, 22, 41, 41]
    leaves = arguments((1, 41, 4, 2, 3, 5, 6), rows=6)
    ends = torch.tensor(boundaries)
    expected = with_gradients(definition(**leaves, boundaries=boundaries), leaves)
    found = s4d_attention(**leaves, output_final_state=True, cu_seqlens=ends, chunk_size=chunk_size)
    assert_close(with_gradients(found, leaves), expected)


def test_what_stands_at_the_pads_is_not_read():
    """Rows that end earlier are documents one after the other."""
    lengths = torch.tensor([33, 0, 20])
    leaves = arguments((3, 33, 4, 2, 3, 5, 6))
    pads = torch.arange(33) >= lengths[:, None]
    with torch.no_grad():
        leaves["key"][pads] = leaves["value"][pads] = 1e30
    output, state = s4d_attention(**leaves, output_final_state=True, lengths=lengths, chunk_size=16)
    found = with_gradients((output[~pads], state), leaves)
    assert not any(x[pads].any() for x in (output, *found[2:4]))
    packed = {name: x[~pads][None] if name in ("key", "value") else x for name, x in leaves.items()}
    output, state = definition(**packed, boundaries=[0, 33, 33, 53])
    assert_close(found, with_gradients((output[0], state), leaves))


@pytest.mark.parametrize("kind", ["rows", "documents"])
def test_one_dynamic_graph_serves_every_length(kind):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(s4d_attention, backend=counter, fullgraph=True)
    for length in (130, 140, 77, 200):
        leaves = arguments((1, length, 4, 2, 4, 4, 5))
        if kind == "documents":
            leaves.pop("initial_state")
            leaves_and_ends = leaves | {"cu_seqlens": torch.tensor([0, 50, 50, 64, length])}
        else:
            leaves_and_ends = leaves
        found = with_gradients(compiled(**leaves_and_ends, output_final_state=True), leaves)
        assert_close(found, with_gradients(s4d_attention(**leaves_and_ends, output_final_state=True), leaves))
    assert counter.frame_count == 2
    torch.compiler.reset()


def test_autocast_reaches_neither_pass():
    leaves = arguments((2, 70, 4, 2, 3, 5, 6), dtype=torch.float32)
    expected = with_gradients(s4d_attention(**leaves, output_final_state=True), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(s4d_attention(**leaves, output_final_state=True), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_computed_in_float32(dtype):
    low = {name: x.detach().to(dtype if name in ("key", "value") else torch.float32)
           for name, x in arguments((2, 130, 4, 2, 8, 8, 16)).items()}  # fmt: skip
    output, state = s4d_attention(**low, output_final_state=True)
    expected, expected_state = definition(**{k: x.double() for k, x in low.items()}, boundaries=[0, 130])
    assert output.dtype == dtype and state.dtype == torch.float32
    error = (output - expected).norm() / expected.norm()
    assert error < (5e-3 if dtype == torch.bfloat16 else 2e-6)
    assert (state - expected_state).norm() / expected_state.norm() < 2e-6


def test_steps_leave_what_a_whole_sequence_leaves_and_pads_leave_nothing():
    leaves = {name: x.detach() for name, x in arguments((2, 9, 4, 2, 3, 5, 6)).items()}
    expected, final = s4d_attention(**leaves, output_final_state=True)
    state = leaves.pop("initial_state").clone()
    tokens = leaves.pop("key"), leaves.pop("value")
    for t in range(9):
        output = s4d_step(*(x[:, t] for x in tokens), **leaves, state=state)
        torch.testing.assert_close(output, expected[:, t], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, final, rtol=1e-9, atol=1e-10)
    kept = state.clone()
    output = s4d_step(*(x[:, 0] for x in tokens), **leaves, state=state, mask=torch.tensor([True, False]))
    assert torch.equal(state[1], kept[1]) and not output[1].any() and not torch.equal(state[0], kept[0])


def one_token(rows, device="cpu", dtype=torch.float64):
    """A step of so many rows, and their states."""
    leaves = {k: x.detach().to(device, dtype) for k, x in arguments((rows, 1, 4, 2, 3, 5, 6)).items()}
    state = leaves.pop("initial_state")
    return functools.partial(s4d_step, leaves.pop("key")[:, 0], leaves.pop("value")[:, 0], **leaves), state


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("slots", SLOTS)
def test_a_step_of_slots_is_that_of_their_rows(slots, large, monkeypatch):
    monkeypatch.setattr(op_common_slots, "_LARGE", 0 if large else 1 << 16)
    step, state = one_token(4)
    check_step_of_slots(step, state, SLOTS[slots], 1e-10)


def test_bad_slots_are_named():
    check_bad_slots(*one_token(1))


def test_a_state_of_lower_precision_is_advanced_in_float32():
    leaves = {name: x.detach().float() for name, x in arguments((2, 1, 4, 2, 3, 5, 6)).items()}
    wide = leaves.pop("initial_state").bfloat16()
    low, high = wide.clone(), wide.float()
    tokens = leaves.pop("key")[:, 0], leaves.pop("value")[:, 0]
    outputs = [s4d_step(*tokens, **leaves, state=state) for state in (low, high)]
    torch.testing.assert_close(*outputs)
    assert torch.equal(low, high.bfloat16())


def test_bad_arguments_are_named():
    leaves = arguments((1, 9, 4, 2, 3, 5, 6))
    with pytest.raises(ValueError, match="readout has H = 3 heads, which is not a multiple of the G = 2 groups"):
        s4d_attention(**leaves | {"readout": leaves["readout"][:3]})
    for what, taken in (("row, got B = 0", (slice(0), slice(None))), ("token, got T = 0", (slice(None), slice(0)))):
        with pytest.raises(ValueError, match=f"key must hold at least one {what}"):
            s4d_attention(**leaves | {name: leaves[name][taken] for name in ("key", "value")})
    with pytest.raises(ValueError, match="cu_seqlens must run from 0 to T = 9, got 0 to 8"):
        s4d_attention(**leaves, cu_seqlens=torch.tensor([0, 8]))
