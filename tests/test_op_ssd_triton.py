"""The fused kernels of state space duality in Triton's interpreter against the definition in float64."""

import importlib

import pytest
import torch

from modeling_interdomain.ops.ssd.entry import ssd_attention, ssd_step
from tests.operator_checks import SLOTS, check_step_of_slots
from tests.test_op_ssd import NAMES, arguments, assert_close, assert_decays_close, everything, one_token

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
pytestmark = pytest.mark.usefixtures("kernels")
on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
# On a GPU the matrix units round float32 to three tf32 numbers, in the interpreter not at all.
FLOAT32 = 2e-5 if on_gpu else 1e-6
KERNELS = ("ops.ssd.triton_chunks", "ops.common.tiles")


def check(leaves, bound=FLOAT32, dtype=torch.float32, **options):
    """Everything that a call gives, compared with the definition in float64 on the same, already rounded, inputs."""
    low = {name: x.detach().to(dtype if name in NAMES[:3] else torch.float32) for name, x in leaves.items()}
    wide = {name: x.double().requires_grad_() for name, x in low.items()}
    expected = everything(wide, **options, backend="recurrent")
    low = {name: x.to(DEVICE).requires_grad_() for name, x in low.items()}
    there = {k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    found = {k: x.cpu() for k, x in everything(low, **there, chunk_size=16, backend="triton").items()}
    assert found["output"].dtype == dtype and found["state"].dtype == torch.float32
    assert all(found[name].dtype == low[name].dtype for name in low)
    assert_close(found, expected, bound)
    assert_decays_close(found, wide, bound, **options)
    return found


@pytest.mark.parametrize(
    ("shape", "decay"),
    [((2, 1, 2, 1, 3, 4), "usual"), ((1, 37, 4, 2, 5, 17), "usual"), ((1, 32, 2, 1, 20, 4), "none"),
     ((1, 20, 2, 2, 3, 5), "gone_at_once"), ((1, 40, 2, 1, 3, 5), "nearly_gone"), ((1, 40, 2, 1, 3, 5), "mixed")],
)  # fmt: skip
def test_fused_is_the_definition(shape, decay):
    check(arguments(shape, decay))


def test_without_an_initial_state():
    leaves = arguments((2, 20, 2, 1, 3, 4))
    del leaves["initial_state"]
    check(leaves)


@pytest.mark.parametrize("initial", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_documents(initial):
    leaves = arguments((1, 40, 2, 1, 3, 5), rows=6)
    if not initial:
        del leaves["initial_state"]
    check(leaves, cu_seqlens=torch.tensor([0, 0, 5, 5, 21, 38, 40]))


def test_pads_are_not_read():
    lengths = torch.tensor([33, 0, 16])
    leaves = arguments((3, 33, 2, 1, 3, 5))
    pads = torch.arange(33) >= lengths[:, None]
    with torch.no_grad():
        for name in NAMES[:4]:
            leaves[name][pads] = float("nan")
    found = check(leaves, lengths=lengths)
    assert not any(found[name][pads].any() for name in ("output", *NAMES[:4]))


def test_low_precision():
    """Products in bfloat16; the state keeps the accuracy of float32, and values may be wider than keys."""
    leaves = arguments((1, 40, 2, 1, 16, 20), "usual")
    found = check(leaves, 5e-3, torch.bfloat16)
    wide = {k: x.detach().bfloat16().double() if k in NAMES[:3] else x.detach() for k, x in leaves.items()}
    _, expected = ssd_attention(**wide, output_final_state=True, backend="recurrent")
    assert (found["state"] - expected).norm() / expected.norm() < 1e-5
    mixed = {name: x.detach().float().to(DEVICE) for name, x in leaves.items()}
    mixed |= {name: mixed[name].bfloat16() for name in ("query", "key")}
    output, _ = ssd_attention(**mixed, backend="triton")
    expected, _ = ssd_attention(**{k: x.double().cpu() for k, x in mixed.items()}, backend="recurrent")
    assert output.dtype == torch.float32 and (output.cpu() - expected).norm() / expected.norm() < 5e-3


def test_gradients_are_the_same_twice(monkeypatch):
    """Bit for bit; heads in one block and as many blocks as heads give the same but for rounding."""
    module = importlib.import_module("modeling_interdomain.ops.ssd.triton")
    leaves = arguments((1, 50, 2, 1, 4, 5), dtype=torch.float32)
    leaves = {name: x.detach().to(DEVICE).requires_grad_() for name, x in leaves.items()}
    found = []
    for processors in (1, 1, 1000):
        monkeypatch.setattr(module, "multiprocessors", lambda device, count=processors: count)
        found.append(everything(leaves, chunk_size=16, backend="triton"))
    once, again, apart = found
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert_close(apart, once, FLOAT32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_the_definition(dtype):
    leaves = {name: x.detach().float() for name, x in arguments((3, 1, 4, 2, 18, 5)).items()}
    state, mask = leaves.pop("initial_state").to(dtype), torch.tensor([1, 0, 7])
    tokens = [x[:, 0].to(dtype) if name != "log_decay" else x[:, 0] for name, x in leaves.items()]
    expected_state = state.double()
    expected = ssd_step(*(x.double() for x in tokens), state=expected_state, mask=mask, backend="recurrent")
    state = state.to(DEVICE)
    before, address = state.clone(), state.data_ptr()
    found = ssd_step(*(x.to(DEVICE) for x in tokens), state=state, mask=mask.to(DEVICE), backend="triton")
    assert state.data_ptr() == address and found.dtype == dtype and torch.equal(state[1], before[1])
    bound = FLOAT32 if dtype == torch.float32 else 5e-3
    for a, b in ((found, expected), (state, expected_state)):
        assert (a.cpu() - b).norm() / b.norm() < bound


@pytest.mark.parametrize("slots", ["apart", "pads"])
def test_a_step_of_slots_is_that_of_their_rows(slots):
    step, state = one_token(4, device=DEVICE, dtype=torch.float32)
    check_step_of_slots(step, state, SLOTS[slots], FLOAT32, backend="triton")


def test_the_operators_are_sound():
    """What torch.library checks: schema, fake implementation, autograd registration."""
    attention, step = (importlib.import_module(f"modeling_interdomain.ops.ssd.triton{x}") for x in ("", "_step"))
    leaves = arguments((1, 18, 2, 1, 3, 4), dtype=torch.float32)
    *tokens, state = (x.detach().to(DEVICE).requires_grad_() for x in leaves.values())
    tests = {"test_utils": ("test_schema", "test_faketensor", "test_autograd_registration")}
    torch.library.opcheck(attention._operator.registered, (*tokens, state, None, None, 16, True), **tests)
    token = [x.detach()[:, 0] for x in tokens]
    torch.library.opcheck(step.triton_ssd_step, (*token, state.detach(), None), **tests)


@pytest.mark.parametrize("kind", ["cu_seqlens", pytest.param("lengths", marks=pytest.mark.slow)])
def test_one_graph_for_two_lengths(kind):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ssd_attention, backend=counter, fullgraph=True, dynamic=True)
    for length in (18, 21):
        leaves = {k: x.detach().float().to(DEVICE) for k, x in arguments((1, length, 2, 1, 3, 4), rows=1).items()}
        ends = torch.tensor([0, length] if kind == "cu_seqlens" else [length - 1], device=DEVICE)
        options = {kind: ends, "chunk_size": 16, "backend": "triton"}
        torch.testing.assert_close(compiled(**leaves, **options)[0], ssd_attention(**leaves, **options)[0])
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.skipif(on_gpu, reason="Memory that is never touched is free on the host alone.")
def test_offsets_beyond_32_bits():
    """The last 20 of so many tokens that keys and states pass 2^31 elements: what lies before is never touched."""
    chunks, tiles = (importlib.import_module(f"modeling_interdomain.{x}") for x in KERNELS)
    length, width, size = (1 << 23) + 37, 16, 256
    tokens = [torch.empty(1, length, 1, n, dtype=torch.bfloat16) for n in (size, width)] + [torch.empty(1, length, 1)]
    for x, small in zip(tokens, list(arguments((1, 20, 1, 1, width, size)).values())[1:], strict=False):
        x[:, -20:] = small.detach()
    keys, values, decays = tokens
    states = torch.empty(length // 16 + 1, 1, width, size, dtype=torch.bfloat16)
    out = torch.empty(length, 1, width, dtype=torch.bfloat16)
    assert keys.numel() > 1 << 31 and states.numel() > 1 << 31
    ends = torch.tensor([length - 20, length, length // 16], dtype=torch.int32)
    documents = tiles.Documents(ends[:1], ends[1:2], torch.tensor([0, 2]), ends[2:])
    operands, options = chunks.Operands(keys, keys, values, None, decays), {"REVERSE": False, "PACKED": True}
    options |= {"EXTENT": chunks.Extent(16, width, size, width, size, 16, 64), "MATH": tiles.arithmetic(torch.bfloat16)}
    heads = chunks.Heads(1, 1, 1, 1)
    chunks.walk[1, 1, 4](operands, None, states, None, documents, 0, 0, heads, TWO_TERMS=False, **options)
    chunks.attend[2, 1, 1](operands, states, out, documents, 1, 0, 0, heads, **options)
    alone = keys[:, -20:], keys[:, -20:], values[:, -20:], decays[:, -20:]
    expected, _ = ssd_attention(*(x.double() for x in alone), backend="recurrent")
    assert (out[-20:] - expected[0]).norm() / expected.norm() < 5e-3


def test_where_the_kernels_cannot_run():
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .*float64"):
        ssd_attention(**{k: v.to(DEVICE) for k, v in arguments((1, 2, 2, 1, 3, 4)).items()}, backend="triton")
    leaves = {name: x.detach().float() for name, x in arguments((1, 1, 2, 1, 3, 4)).items()}
    state = leaves.pop("initial_state").mT.contiguous().mT
    kept, token = state.clone(), [x[:, 0] for x in leaves.values()]
    with pytest.raises(ValueError, match="state must be contiguous for backend 'triton'"):
        ssd_step(*token, state=state, backend="triton")
    with pytest.raises(ValueError, match="backend of a step must be one of auto, recurrent, triton, got 'chunk'"):
        ssd_step(*token, state=state, backend="chunk")
    assert torch.equal(state, kept)
