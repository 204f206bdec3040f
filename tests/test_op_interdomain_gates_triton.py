"""Gates and the delta rule in fused kernels, in Triton's interpreter, against the definition in float64."""

import functools
import importlib

import pytest
import torch

from modeling_interdomain import interdomain_attention, interdomain_step
from tests.operator_checks import COEFFICIENTS, PRODUCTS, SLOTS, check_step_of_slots, relative_error
from tests.test_op_interdomain_gates import KINDS, gated

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
on_gpu = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if on_gpu else "cpu"
# As in test_op_interdomain_triton.py.
FLOAT32 = 2e-5 if on_gpu else 2e-6


def one_token(kind, coefficients="full", product="bilinear", dtype=torch.float32):
    """A step of four rows with gates, and their states."""
    arguments = gated((4, 1, 4, 2, 5, 7, 6), KINDS[kind], coefficients)
    arguments = {k: None if v is None else v.detach().to(DEVICE, dtype) for k, v in arguments.items()}
    state = arguments.pop("initial_state")
    arguments |= {name: arguments[name][:, 0] for name in ("query", "key", "value", *KINDS[kind])}
    return functools.partial(interdomain_step, **arguments, product=product), state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("product", "coefficients"), list(zip(PRODUCTS, COEFFICIENTS)))
def test_a_step_is_the_definition(kind, product, coefficients):
    """Of one token, where the state lies; a pad leaves it alone, whatever its gates are."""
    step, state = one_token(kind, coefficients, product)
    wide = {k: None if v is None else v.cpu().double() for k, v in step.keywords.items() if k != "product"}
    tokens = {k: v[:, None] for k, v in wide.items() if k in ("query", "key", "value", *KINDS[kind])}
    expected, expected_state = interdomain_attention(
        **wide | tokens, product=product, initial_state=state.cpu().double(), backend="recurrent",
        output_final_state=True,
    )  # fmt: skip
    mask = torch.tensor([1, 0, 1, 1], device=DEVICE)
    for name in KINDS[kind]:
        step.keywords[name][1] = -1e30 if name == "log_gate" else float("nan")
    expected_state[1], address = state[1], state.data_ptr()
    found = step(state=state, mask=mask, backend="triton").cpu()
    assert state.data_ptr() == address and not found[1].any() and state.cpu()[1].double().equal(expected_state[1])
    real = mask.bool().cpu()
    assert relative_error(found[real], expected[real, 0]) < FLOAT32
    assert relative_error(state.cpu(), expected_state) < FLOAT32


@pytest.mark.parametrize("slots", ["apart", "pads"])
@pytest.mark.parametrize("kind", ["gates", "all"])
def test_a_step_of_slots_is_that_of_their_rows(kind, slots):
    step, state = one_token(kind)
    check_step_of_slots(step, state, SLOTS[slots], FLOAT32, backend="triton")


def test_a_step_that_forgets_everything():
    step, state = one_token("all")
    step.keywords["log_gate"].fill_(-torch.inf)
    other = torch.zeros_like(state)
    found, expected = (step(state=x, backend="triton") for x in (state, other))
    assert torch.equal(found, expected) and torch.equal(state, other)


def test_a_narrow_state_and_narrow_tokens():
    """A state kept in bfloat16 is stepped in float32, as PyTorch does it; gates may be in any dtype."""
    step, state = one_token("all")
    step.keywords.update({k: step.keywords[k].bfloat16() for k in ("query", "key", "value", "write_gate")})
    state = state.bfloat16()
    other = state.clone()
    found, expected = step(state=state, backend="triton"), step(state=other, backend="recurrent")
    assert found.dtype == state.dtype == torch.bfloat16
    assert relative_error(found, expected) < 1e-2 and relative_error(state, other) < 1e-2


def test_the_step_is_sound():
    """What torch.library checks: schema, fake implementation, autograd registration."""
    step = importlib.import_module("modeling_interdomain.ops.interdomain.triton_step")
    arguments = {k: v.detach().float().to(DEVICE) for k, v in gated((2, 1, 2, 1, 4, 4, 3), KINDS["all"]).items()}
    state = arguments.pop("initial_state")
    tokens, gates = ([arguments.pop(name)[:, 0] for name in x] for x in (("query", "key", "value"), KINDS["all"]))
    tests = {"test_utils": ("test_schema", "test_faketensor", "test_autograd_registration")}
    given = *tokens, *arguments.values(), state, "bilinear", None, False, None, *gates
    torch.library.opcheck(step.triton_step, given, **tests)
