"""The fused kernels of the selective scan in Triton's interpreter against the definition in float64."""

import importlib

import pytest
import torch

from modeling_interdomain.ops.selective_scan.entry import selective_scan, selective_scan_step
from tests.operator_checks import SLOTS, check_step_of_slots, relative_error
from tests.test_op_selective_scan import NAMES, arguments, assert_close, everything, one_token

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
pytestmark = pytest.mark.usefixtures("kernels")
on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
FLOAT32 = 1e-5 if on_gpu else 1e-6  # its exp is an approximation


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """The interpreter goes through a prefix number by number."""
    module = importlib.import_module("modeling_interdomain.ops.selective_scan.triton")
    monkeypatch.setattr(module, "_CHUNK", 4)
    monkeypatch.setattr(module, "_TILE", 32)


def check(leaves, bound=FLOAT32, dtype=torch.float32, **options):
    """Everything that a call gives, compared with the definition in float64 on the same, already rounded, inputs."""
    low = {name: x.detach().to(dtype if name in NAMES[:3] else torch.float32) for name, x in leaves.items()}
    expected = everything({k: x.double().requires_grad_() for k, x in low.items()}, **options, backend="recurrent")
    low = {name: x.to(DEVICE).requires_grad_() for name, x in low.items()}
    there = {k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    found = {k: x.cpu() for k, x in everything(low, **there, backend="triton").items()}
    assert found["output"].dtype == dtype and found["state"].dtype == torch.float32
    assert all(found[name].dtype == low[name].dtype for name in low)
    assert_close(found, expected, bound)
    return found


@pytest.mark.parametrize(
    ("shape", "steps"),
    [((2, 1, 3, 4), "usual"), ((1, 9, 5, 3), "usual"), ((1, 8, 1, 1), "hardly_any"), ((1, 6, 2, 3), "mixed")],
)
def test_fused_is_the_definition(shape, steps):
    check(arguments(shape, steps))


def test_steps_that_leave_nothing():
    """The gradient of a decay that is gone at once is zero but for rounding: it is compared in absolute terms."""
    leaves = {name: x.detach().float().to(DEVICE).requires_grad_() for name, x in arguments((1, 6, 2, 3)).items()}
    with torch.no_grad():
        leaves["step"] *= 1e4
    found = everything(leaves, backend="triton")
    wide = {name: x.detach().cpu().double().requires_grad_() for name, x in leaves.items()}
    expected = everything(wide, backend="recurrent")
    for name, x in expected.items():
        scale = torch.maximum(x.norm(), expected["state"].norm())
        assert (found[name].cpu() - x).norm() / scale < FLOAT32, name


def test_documents_and_pads_without_a_state():
    leaves = arguments((1, 11, 2, 2), rows=5)
    ends = torch.tensor([0, 0, 5, 6, 11, 11])
    check(leaves, cu_seqlens=ends)
    del leaves["initial_state"], leaves["skip"]
    check(leaves, cu_seqlens=ends)

    lengths = torch.tensor([7, 0, 4])
    leaves = arguments((3, 7, 2, 3))
    pads = torch.arange(7) >= lengths[:, None]
    with torch.no_grad():
        for name in NAMES[:4]:
            leaves[name][pads] = float("nan")
    found = check(leaves, lengths=lengths)
    assert not any(found[name][pads].any() for name in ("output", *NAMES[:4]))


def test_low_precision_leaves_the_state_precise():
    leaves = arguments((1, 9, 3, 2))
    found = check(leaves, 5e-3, torch.bfloat16)
    low = {k: x.detach().bfloat16().double() if k in NAMES[:3] else x.detach() for k, x in leaves.items()}
    _, expected = selective_scan(**low, output_final_state=True, backend="recurrent")
    assert relative_error(found["state"], expected) < FLOAT32


def test_gradients_are_the_same_twice():
    leaves = {name: x.detach().float().to(DEVICE).requires_grad_() for name, x in arguments((2, 5, 3, 2)).items()}
    once, again = (everything(leaves, backend="triton") for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_the_definition(dtype):
    leaves = {name: x.detach().float() for name, x in arguments((3, 1, 40, 5)).items()}
    state, mask = leaves.pop("initial_state").to(dtype), torch.tensor([1, 0, 7])
    rest = {name: leaves[name] for name in ("rate", "skip")}
    token = {name: leaves[name][:, 0].to(dtype if name != "step" else torch.float32) for name in NAMES[:4]}
    expected_state = state.double()
    wide = {name: x.double() for name, x in (token | rest).items()}
    expected = selective_scan_step(**wide, state=expected_state, mask=mask, backend="recurrent")
    state = state.to(DEVICE)
    before, address = state.clone(), state.data_ptr()
    there = {name: x.to(DEVICE) for name, x in (token | rest).items()}
    found = selective_scan_step(**there, state=state, mask=mask.to(DEVICE), backend="triton")
    assert state.data_ptr() == address and found.dtype == dtype and torch.equal(state[1], before[1])
    bound = FLOAT32 if dtype == torch.float32 else 5e-3
    # A pad skips nothing either.
    assert not found[1].any() and relative_error(found[::2].cpu(), expected[::2]) < bound
    assert relative_error(state.cpu(), expected_state) < bound


@pytest.mark.parametrize("slots", ["apart", "pads"])
def test_a_step_of_slots_is_that_of_their_rows(slots):
    step, state = one_token(4, device=DEVICE, dtype=torch.float32)
    check_step_of_slots(step, state, SLOTS[slots], FLOAT32, backend="triton")


def test_the_operators_are_sound():
    """What torch.library checks: schema, fake implementation, autograd registration."""
    scan, step = (importlib.import_module(f"modeling_interdomain.ops.selective_scan.triton{x}") for x in ("", "_step"))
    leaves = {name: x.detach().float().to(DEVICE) for name, x in arguments((1, 5, 2, 3)).items()}
    *tokens, rate, skip, state = leaves.values()
    tests = {"test_utils": ("test_schema", "test_faketensor", "test_autograd_registration")}
    inputs = [x.requires_grad_() for x in (*tokens, rate, state)]
    torch.library.opcheck(scan._operator.registered, (*inputs, None, None, True), **tests)
    token = [x.detach()[:, 0] for x in tokens]
    torch.library.opcheck(step.triton_scan_step, (*token, rate.detach(), state.detach(), skip, None), **tests)


def test_where_the_kernels_cannot_run():
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .*float64"):
        selective_scan(**{k: v.to(DEVICE) for k, v in arguments((1, 2, 2, 3)).items()}, backend="triton")
