"""Gates and the delta rule in fused kernels, in Triton's interpreter, against the definition in float64."""

import functools
import importlib

import pytest
import torch

from modeling_interdomain import interdomain_attention, interdomain_step
from tests.operator_checks import (
    COEFFICIENTS,
    PRODUCTS,
    SLOTS,
    assert_close,
    cast,
    check_step_of_slots,
    everything,
    relative_error,
)
from tests.test_op_interdomain_gates import KINDS, gated, one_by_one

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
tl = pytest.importorskip("triton.language")

from modeling_interdomain.ops.interdomain import triton_delta  # noqa: E402

on_gpu = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if on_gpu else "cpu"
# As in test_op_interdomain_triton.py.
FLOAT32 = 2e-5 if on_gpu else 2e-6
READOUTS = [("real", "full"), ("bilinear", "diagonal"), ("real", "identity")]


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


@triton.jit
def invert(x, delta, out, length, C: tl.constexpr, PRECISION: tl.constexpr):
    """One matrix a program."""
    start, rows = tl.program_id(0) * C, tl.arange(0, C)
    d = tl.load(delta + start + rows, mask=rows < length, other=0.0)
    found = triton_delta.unit_inverse(x, d, start, length, C, C, PRECISION)
    tl.store(out + (start + rows)[:, None] * C + rows[None, :], found)


def triton_module():
    return importlib.import_module("modeling_interdomain.ops.interdomain.triton")


def check(arguments, dtype=torch.float32, bound=FLOAT32, places=None, **options):
    """Against the definition in float64 on the same, already rounded, inputs; with `places` on these documents alone.

    Gradients of what decays and of delta are sums of what cancels: in bfloat16 their bound is that of test_bfloat16.py.
    """
    tokens = ("query", "key", "value")
    low = cast(arguments, torch.float32) | cast({k: arguments[k] for k in tokens}, dtype)
    expected = everything(
        cast(low, torch.float64),
        *([] if places is None else [functools.partial(one_by_one, interdomain_attention, places)]),
        **({"backend": "recurrent"} | options if places is None else {}),
    )
    low = {k: None if v is None else v.detach().to(DEVICE).requires_grad_() for k, v in low.items()}
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    found = {k: v.cpu() for k, v in everything(low, **options, backend="triton").items()}
    assert all(found[f"grad of {name}"].dtype == dtype for name in tokens)
    assert found["state"].dtype == torch.float32 and found["output"].dtype == dtype
    low_precision = {"grad of log_decay", "grad of log_gate", "grad of delta"} & set(expected)
    cancels = low_precision if dtype == torch.bfloat16 else set()
    assert_close(found, {name: x for name, x in expected.items() if name not in cancels}, bound)
    assert_close(found, {name: expected[name] for name in cancels}, 4 * 2**-8)
    return found


# (B, T, H, G, R, D, M); chunks of 16 tokens.
SHAPES = {"one_token": (2, 1, 2, 2, 4, 4, 3), "odd_sizes": (2, 21, 4, 2, 5, 7, 6), "one_group": (1, 33, 3, 1, 3, 10, 7)}


@pytest.mark.parametrize("kind", ["gates", "all"])
@pytest.mark.parametrize("shape", [pytest.param(x, marks=[pytest.mark.slow] * (x == "odd_sizes")) for x in SHAPES])
def test_fused_is_the_definition(shape, kind):
    check(gated(SHAPES[shape], KINDS[kind]), chunk_size=16)


@pytest.mark.parametrize("kind", ["forget", "delta"])
@pytest.mark.parametrize(
    ("product", "coefficients"), [("hermitian", "full"), *(pytest.param(*x, marks=pytest.mark.slow) for x in READOUTS)]
)
def test_every_readout_is_the_definition(product, coefficients, kind):
    """In one group the way of slow decays, in the other that of fast ones."""
    arguments = gated((1, 20, 2, 2, 3, 10, 7), KINDS[kind], coefficients)
    with torch.no_grad():
        arguments["log_decay"][0, 0, 0] = -5.0
    check(arguments, product=product, chunk_size=16)


PLACES = {
    # name: (B, T, what the operator is given, the row, start and end of every document)
    "documents": (
        1, 40, {"cu_seqlens": [0, 0, 19, 20, 36, 40]}, [(0, 0, 0), (0, 0, 19), (0, 19, 20), (0, 20, 36), (0, 36, 40)]
    ),
    "lengths": (3, 20, {"lengths": [17, 0, 20]}, [(0, 0, 17), (1, 0, 0), (2, 0, 20)]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "segments"), [("gates", 1), pytest.param("gates", 3, marks=pytest.mark.slow), ("all", 3)]
)
@pytest.mark.parametrize("name", PLACES)
def test_documents_and_rows_are_as_if_alone(name, kind, segments, monkeypatch):
    """Outputs and gradients at pads are zero, whatever stands there; what has no token keeps its initial state."""
    monkeypatch.setattr(triton_module(), "_segments", lambda *_: segments)
    batch, length, options, places = PLACES[name]
    arguments = gated((batch, length, 2, 1, 3, 6, 5), KINDS[kind], rows=len(places))  # two heads: see one_by_one
    pads = torch.ones(batch, length, dtype=torch.bool)
    for row, start, end in places:
        pads[row, start:end] = False
    tokens = ("query", "key", "value", *KINDS[kind])
    with torch.no_grad():
        for x in tokens:
            arguments[x][pads] = -1e30 if x == "log_gate" else 1e30
    options = {k: torch.tensor(v) for k, v in options.items()}
    found = check(arguments, places=places, chunk_size=16, **options)
    assert not any(found[x][pads].any() for x in ("output", *(f"grad of {name}" for name in tokens)))


@pytest.mark.parametrize("segments", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_rows_cut_into_segments(segments, monkeypatch):
    """What a GPU with more room than rows and groups does: states are carried from one segment to the next."""
    monkeypatch.setattr(triton_module(), "_segments", lambda *_: segments)
    arguments = gated((2, 40, 1, 1, 4, 4, 4), KINDS["forget"], strength=0.02, decay=0.02)
    with torch.no_grad():
        arguments["log_gate"][1, 20:] *= 1000
    check(arguments, chunk_size=16)


@pytest.mark.parametrize("kind", ["gates", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_strong_and_zero_gates(dtype, kind):
    """States are forgotten in the middle of chunks and at their edges; what went before gets no gradient."""
    arguments = gated((2, 36, 1, 1, 4, 3, 3), KINDS[kind])
    strong = torch.tensor([-30.0, -1e4, -torch.inf])
    with torch.no_grad():
        arguments["log_gate"][0, [0, 5, 15, 16, 20, 21, 35], 0] = strong.repeat(3)[:7].double()
        arguments["log_gate"][1] = -torch.inf
        arguments["write_gate"][:, 3] = 0
    found = check(arguments, dtype, FLOAT32 if dtype == torch.float32 else 1e-2, chunk_size=16)
    assert all(x.isfinite().all() for x in found.values())
    assert not found["grad of log_gate"][1].any() and not found["grad of initial_state"][1].any()


@pytest.mark.parametrize("delta", [*(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 1.0)), None], ids=str)
def test_no_correction_and_all_of_it(delta):
    """And both in turn."""
    arguments = gated((1, 36, 2, 1, 4, 3, 3), KINDS["all"])
    with torch.no_grad():
        arguments["delta"].copy_(torch.arange(36)[:, None] % 2 if delta is None else torch.tensor(delta))
    found = check(arguments, chunk_size=32)
    assert found["grad of delta"].any()


def test_the_inverse_is_exact():
    """In float32 against float64, where powers of the matrix would take all digits: its entries are near 1."""
    generator = torch.Generator().manual_seed(0)
    for size in (16, 64):
        x = 0.9 + 0.2 * torch.rand(2, size, size, generator=generator)
        delta = torch.rand(2, size, generator=generator).sqrt()
        delta[:, -3:] = 0  # pads
        on_device, found = [y.to(DEVICE) for y in (x, delta)], torch.empty_like(x, device=DEVICE)
        invert[(2,)](*on_device, found, size - 3, C=size, PRECISION=triton_delta._precision(), num_warps=8)
        system = torch.eye(size) + (delta[..., None] * x).double().tril(-1)
        assert relative_error(found.cpu(), system.inverse()) < FLOAT32


@pytest.mark.parametrize(
    ("kind", "coefficients"),
    [("gates", "full"), ("forget", "full"), ("forget", "diagonal"), ("all", "full"), ("delta", "diagonal")],
)
@pytest.mark.slow
def test_bfloat16(kind, coefficients):
    check(gated((1, 70, 1, 1, 16, 16, 16), KINDS[kind], coefficients, decay=0.05), torch.bfloat16, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gates", "all"])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_documents_and_both_kinds_of_groups(product, dtype, kind):
    arguments = gated((1, 53, 4, 2, 5, 10, 7), KINDS[kind], decay=0.1, rows=3)
    with torch.no_grad():
        arguments["log_decay"][0, 0, 0] = -5.0
    bound = FLOAT32 if dtype == torch.float32 else 1e-2
    check(arguments, dtype, bound, product=product, chunk_size=16, cu_seqlens=torch.tensor([0, 19, 20, 53]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gates", "all"])
@pytest.mark.parametrize(
    "shape", [(1, 20, 2, 2, 64, 64, 64), (1, 20, 2, 1, 60, 100, 48), (1, 20, 2, 1, 8, 8, 70)], ids=str
)
def test_larger_heads(shape, kind):
    check(gated(shape, KINDS[kind], decay=0.05))


@pytest.mark.slow
@pytest.mark.parametrize("worker", range(4))
@pytest.mark.parametrize("kind", ["plain", "gates", "all"])
def test_the_heads_of_the_large_models_in_bfloat16(kind, worker):
    """On a GPU each worker of pytest compiles another configuration of a kernel, see conftest.py."""
    if worker and not on_gpu:
        pytest.skip("The interpreter has one configuration.")
    names = KINDS.get(kind, ())
    arguments = gated((1, 150, 2, 1, 64, 64, 64), names, decay=0.05)
    low = {
        k: x.detach().to(torch.bfloat16 if k in ("query", "key", "value") else torch.float32)
        for k, x in arguments.items()
    }
    expected = everything(cast(low, torch.float64), product="hermitian", backend="recurrent")
    low = {k: x.to(DEVICE).requires_grad_() for k, x in low.items()}
    found = {k: x.cpu() for k, x in everything(low, product="hermitian", backend="triton").items()}
    of_sums = {name for name in expected if name.endswith(("log_decay", "log_gate", "delta"))}
    assert_close(found, {name: x for name, x in expected.items() if name not in of_sums}, 2e-2)
    assert_close(found, {name: expected[name] for name in of_sums}, 4e-2)


@pytest.mark.slow
def test_gates_go_with_the_normalised_readout():
    # With this seed no denominator is below a thirtieth of the median: where one comes near zero the quotient is steep.
    arguments = gated((1, 20, 4, 2, 5, 7, 6), KINDS["gates"], normalize=True, seed=1)
    check(arguments, bound=1e-4, normalize=True, chunk_size=16)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gates", "all"])
def test_a_thousand_tokens(kind):
    """Gates as they start, that leave a third after 150 tokens: errors of their gradients do not add up."""
    check(gated((1, 1000, 1, 1, 4, 3, 4), KINDS[kind], strength=0.014, decay=0.02))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gates", "all"])
def test_only_what_is_asked_for(kind):
    """Without a final state, an initial state, or gradients of most arguments; the same twice, bit for bit."""
    arguments = {k: v.detach().float().to(DEVICE) for k, v in gated((1, 18, 2, 1, 4, 4, 4), KINDS[kind]).items()}
    arguments["initial_state"] = None
    wide = {k: v if v is None else v.cpu().double() for k, v in arguments.items()}
    grads = []
    for tensors, backend in ((wide, "recurrent"), (arguments, "triton"), (arguments, "triton")):
        leaf = tensors["log_gate"].clone().requires_grad_()
        output, state = interdomain_attention(**(tensors | {"log_gate": leaf}), backend=backend)
        assert state is None
        grads.append(torch.autograd.grad(output.square().sum(), leaf)[0].cpu())
    assert relative_error(grads[1], grads[0]) < 10 * FLOAT32 and torch.equal(grads[1], grads[2])


@pytest.mark.parametrize("delta", [False, True])
def test_the_operator_is_sound(delta):
    part = "delta" if delta else "gated"
    module = importlib.import_module(f"modeling_interdomain.ops.interdomain.triton_{'delta' if delta else 'gates'}")
    arguments = {k: v.detach().float().to(DEVICE) for k, v in gated((1, 20, 2, 1, 4, 4, 4), KINDS["all"]).items()}
    names = ("query", "key", "value", "log_decay", "input_matrix", "coefficient_matrix", "initial_state", "log_gate")
    tensors = [arguments[name].requires_grad_(name == "log_gate") for name in names]
    more = [arguments["write_gate"], arguments["delta"]] if delta else [None]
    torch.library.opcheck(
        getattr(module, f"{part}_operator").registered, (*tensors, *more, None, None, "bilinear", 16, False, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["write", pytest.param("gates", marks=pytest.mark.slow)])
def test_gates_are_not_rounded(kind):
    """Tokens in bfloat16 are multiplied with gates in float32: the state is precise."""
    arguments = gated((1, 20, 2, 1, 4, 4, 4), KINDS[kind])
    found = check(arguments, torch.bfloat16, 1e-2)
    low = cast(arguments, torch.float32) | cast({k: arguments[k] for k in ("query", "key", "value")}, torch.bfloat16)
    wide = {k: v.detach().double() for k, v in low.items()}
    _, state = interdomain_attention(**wide, backend="recurrent", output_final_state=True)
    assert relative_error(found["state"], state) < 1e-5


DELTA = {"gates": "forget", "delta_rule": True, "product": "hermitian"}


@pytest.mark.slow
@pytest.mark.parametrize("gates", [{"gates": "forget"}, DELTA], ids=["forget", "delta"])
def test_a_model_with_gates_on_fused_kernels(make_model, random_ids, gates):
    """Logits, gradients, a prefill in pieces and decoding, against the same model in float64 without kernels."""
    reference = make_model("interdomain", num_hidden_layers=1, token_mixers="interdomain", **gates)
    model = make_model(
        "interdomain", num_hidden_layers=1, token_mixers="interdomain", dtype=torch.float32, backend="triton",
        state_dtype="float32", chunk_size=16, **gates,
    ).to(DEVICE)  # fmt: skip
    ids = random_ids(1, 9)
    expected = reference(ids, labels=ids)
    found = model(ids.to(DEVICE), labels=ids.to(DEVICE))
    assert relative_error(found.logits.cpu(), expected.logits) < 1e-4
    expected.loss.backward()
    found.loss.backward()
    for (parameter_name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative_error(a.grad.cpu(), b.grad) < 2e-3, parameter_name
    cache, pieces = None, []
    with torch.no_grad():
        for piece in ids.to(DEVICE).split([6, 2, 1], dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            pieces.append(output.logits)
    assert relative_error(torch.cat(pieces, dim=1).cpu(), expected.logits) < 1e-4
