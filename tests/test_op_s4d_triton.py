"""The fused kernels of the S4D control in Triton's interpreter against its definition in float64."""

import importlib

import pytest
import torch

from modeling_interdomain.ops.s4d.entry import s4d_attention, s4d_step
from tests.operator_checks import EXTREMES, SLOTS, cast, check_step_of_slots, relative_error
from tests.test_op_s4d import arguments, definition, one_token, with_gradients

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
pytestmark = pytest.mark.usefixtures("kernels")
on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
# On a GPU the matrix units round float32 to three tf32 numbers, in the interpreter not at all.
FLOAT32 = 2e-5 if on_gpu else 2e-6


def check(leaves, boundaries, bound=FLOAT32, dtype=torch.float32, **options):
    """Output, state and every gradient, compared with the definition on the same, already rounded, inputs."""
    low = cast(leaves, torch.float32) | cast({name: leaves[name] for name in ("key", "value")}, dtype)
    wide = cast(low, torch.float64)
    expected = with_gradients(definition(**wide, boundaries=boundaries), wide)
    low = {name: x.detach().to(DEVICE).requires_grad_() for name, x in low.items()}
    options = {name: x.to(DEVICE) for name, x in options.items()}
    found = s4d_attention(**low, output_final_state=True, chunk_size=16, backend="triton", **options)
    found = with_gradients(found, low)
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    for name, a, b in zip(("output", "state", *low), found, expected, strict=True):
        # The gradient of a mode that is gone at once is zero but for rounding: those are compared in absolute terms.
        error = (a.cpu().double() - b).norm() / b.norm().clamp(min=1e-3)
        assert error < bound, (name, error)
    return found


@pytest.mark.parametrize(
    ("shape", "extreme"),
    [((2, 1, 2, 2, 4, 4, 3), None), ((1, 37, 4, 2, 5, 30, 6), None), ((1, 32, 3, 1, 8, 4, 17), "fast_phases"),
     ((1, 20, 2, 1, 4, 4, 5), "gone_at_once"), ((1, 20, 2, 1, 4, 4, 5), "never_there")],
)  # fmt: skip
def test_fused_is_the_definition(shape, extreme):
    check(arguments(shape, **EXTREMES.get(extreme, {})), [0, shape[1]])


def test_documents_and_pads():
    """A row that ends earlier is a document; what stands at its pads is not read, and has no gradient."""
    boundaries = [0, 0, 5, 5, 21, 38, 40]
    leaves = arguments((1, 40, 2, 1, 3, 5, 6), rows=6)
    check(leaves, boundaries, cu_seqlens=torch.tensor(boundaries))

    lengths = torch.tensor([33, 0, 16])
    leaves = {name: x.detach().float() for name, x in arguments((3, 33, 2, 1, 3, 5, 6)).items()}
    pads = torch.arange(33) >= lengths[:, None]
    packed = {name: x[~pads][None] if name in ("key", "value") else x for name, x in leaves.items()}
    packed = cast(packed, torch.float64)
    expected = with_gradients(definition(**packed, boundaries=[0, 33, 33, 49]), packed)
    leaves["key"][pads] = leaves["value"][pads] = float("nan")
    leaves = {name: x.to(DEVICE).requires_grad_() for name, x in leaves.items()}
    output, state = s4d_attention(
        **leaves, output_final_state=True, lengths=lengths.to(DEVICE), chunk_size=16, backend="triton"
    )
    real = (~pads).to(DEVICE)
    found = [x.cpu() for x in with_gradients((output[real][None], state), leaves)]
    assert not any(x[pads].any() for x in (output.cpu(), *found[2:4]))
    found[2:4] = (x[~pads][None] for x in found[2:4])
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a, b) < FLOAT32


def test_without_a_state_of_its_own():
    leaves = {name: x.detach().float().to(DEVICE) for name, x in arguments((1, 35, 2, 1, 3, 5, 6)).items()}
    wide = {name: x.double().cpu() for name, x in leaves.items()}
    wide["initial_state"] = torch.zeros_like(wide["initial_state"])
    del leaves["initial_state"]
    expected = definition(**wide, boundaries=[0, 35])[0]
    found, state = s4d_attention(**leaves, chunk_size=16, backend="triton")
    assert state is None and relative_error(found.cpu(), expected) < FLOAT32


def test_low_precision_leaves_the_state_precise():
    leaves = arguments((1, 40, 2, 1, 8, 8, 16), decay=0.05)
    found = check(leaves, [0, 40], 1e-2, torch.bfloat16)
    wide = {name: x.detach() for name, x in leaves.items()}
    wide |= {name: wide[name].bfloat16().double() for name in ("key", "value")}
    assert relative_error(found[1].cpu(), definition(**wide, boundaries=[0, 40])[1]) < 1e-5


def test_gradients_are_the_same_twice(monkeypatch):
    """Bit for bit, in rows cut into segments too."""
    module = importlib.import_module("modeling_interdomain.ops.interdomain.triton")
    leaves = {name: x.detach().float().to(DEVICE) for name, x in arguments((1, 50, 1, 1, 4, 4, 4)).items()}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}

    def run():
        return with_gradients(
            s4d_attention(**leaves, output_final_state=True, chunk_size=16, backend="triton"), leaves
        )  # fmt: skip

    once, again = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    monkeypatch.setattr(module, "_segments", lambda *_: 3)
    for a, b in zip(run(), once, strict=True):
        assert relative_error(a, b) < FLOAT32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_the_definition(dtype):
    leaves = {name: x.detach().float() for name, x in arguments((3, 1, 4, 2, 5, 18, 6)).items()}
    state, mask = leaves.pop("initial_state").to(dtype), torch.tensor([1, 0, 7])
    token = {name: leaves.pop(name)[:, 0].to(dtype) for name in ("key", "value")}
    expected_state = state.double()
    wide = {name: x.double() for name, x in (token | leaves).items()}
    expected = s4d_step(**wide, state=expected_state, mask=mask, backend="recurrent")
    state = state.to(DEVICE)
    before, address = state.clone(), state.data_ptr()
    there = {name: x.to(DEVICE) for name, x in (token | leaves).items()}
    found = s4d_step(**there, state=state, mask=mask.to(DEVICE), backend="triton")
    assert state.data_ptr() == address and found.dtype == dtype and torch.equal(state[1], before[1])
    bound = FLOAT32 if dtype == torch.float32 else 5e-3
    assert relative_error(found.cpu(), expected) < bound and relative_error(state.cpu(), expected_state) < bound


@pytest.mark.parametrize("slots", ["apart", "pads"])
def test_a_step_of_slots_is_that_of_their_rows(slots):
    step, state = one_token(4, device=DEVICE, dtype=torch.float32)
    check_step_of_slots(step, state, SLOTS[slots], FLOAT32, backend="triton")


def test_the_operators_are_sound():
    """What torch.library checks: schema, fake implementation, autograd registration."""
    attention, step = (importlib.import_module(f"modeling_interdomain.ops.s4d.triton{x}") for x in ("", "_step"))
    leaves = {name: x.detach().float().to(DEVICE) for name, x in arguments((1, 18, 2, 1, 3, 4, 5)).items()}
    inputs = torch.cat([leaves["key"], leaves["value"]], dim=-1).requires_grad_()
    parameters = leaves["log_decay"], leaves["input_matrix"]
    responses = attention._responses(*parameters, leaves["readout"], 16)
    tests = {"test_utils": ("test_schema", "test_faketensor", "test_autograd_registration")}
    given = inputs, *parameters, *responses, leaves["initial_state"], None, None, True
    torch.library.opcheck(attention._operator.registered, given, **tests)
    tables = (torch.rand(1, 5, 1), torch.rand(1, 5, 1), torch.rand(1, 2, 5, 1), torch.rand(1, 2, 10))
    given = inputs.detach()[:, 0], *(x.to(DEVICE) for x in tables), leaves["initial_state"], None
    torch.library.opcheck(step.triton_s4d_step, given, **tests)


def test_where_the_kernels_cannot_run():
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .*float64"):
        s4d_attention(**{k: v.to(DEVICE) for k, v in arguments((1, 2, 2, 1, 3, 4, 5)).items()}, backend="triton")
    with pytest.raises(ValueError, match="backend must be one of auto, chunk, triton, got 'fft'"):
        s4d_attention(**arguments((1, 2, 2, 1, 3, 4, 5)), backend="fft")
