"""bfloat16 on a CPU: the chunk operator with narrow operands, and the element-wise steps in pieces.

u = 2^-8 is the largest relative error of one rounding to bfloat16; over many numbers its root mean square is at most
u / sqrt(3). Roundings of different numbers are independent, so that the squares of their errors add up. On its longest
way an output is rounded 8 times (the state, the query times it, that times the decay, the joint matrix, p, p times the
decay, and twice the sum over values), a gradient of a token or of a parameter at most twice as often: sqrt(8 / 3) u and
sqrt(16 / 3) u of the norm where nothing cancels. Random parameters cancel a little: the bounds are 2 u and 4 u.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modeling_interdomain import interdomain_attention
from modeling_interdomain.layers import common as module_common
from modeling_interdomain.layers.common import project
from modeling_interdomain.layers.convolution import CausalConv1d, causal_conv
from modeling_interdomain.mixers.interdomain.initialization import gramian, posterior_coefficients
from modeling_interdomain.ops.common import cpu as op_common_cpu
from modeling_interdomain.ops.interdomain import chunk as op_interdomain_chunk
from tests.operator_checks import SHAPES, cast, everything, inputs, relative_error

U = 2**-8
TOKENS = ("query", "key", "value")
ENDS, LENGTHS = torch.tensor([0, 30, 31, 31, 100]), torch.tensor([100, 3, 50])
CASES = {
    "one chunk": (SHAPES["odd_length"], "bilinear", "full", {}),
    "one mode": (SHAPES["one_mode"], "bilinear", "full", {"chunk_size": 8}),
    "shared keys": (SHAPES["one_group"], "hermitian", "diagonal", {}),
    "several segments": ((2, 300, 4, 2, 16, 12, 16), "bilinear", "full", {"chunk_size": 16}),
    "no mixing": (SHAPES["odd_sizes"], "real", "identity", {}),
    "packed documents": ((1, 100, 4, 2, 16, 16, 16), "real", "full", {"cu_seqlens": ENDS, "chunk_size": 16}),
    "pads": ((3, 100, 4, 2, 16, 16, 16), "hermitian", "full", {"lengths": LENGTHS, "chunk_size": 16}),
}


@pytest.fixture(autouse=True)
def has_instructions(monkeypatch):
    """Where they are missing the same is only slower."""
    monkeypatch.setattr(op_common_cpu, "_has_bfloat16_instructions", lambda: True)


def bf16_inputs(shape, coefficients, rows=None):
    arguments = inputs(shape, coefficients, rows=rows)
    return cast(arguments, torch.float32) | cast({name: arguments[name] for name in TOKENS}, torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_as_exact_as_their_roundings(case):
    shape, product, coefficients, options = CASES[case]
    low = bf16_inputs(shape, coefficients, rows=4 if "cu_seqlens" in options else None)
    expected = everything(cast(low, torch.float64), backend="recurrent", product=product, **options)
    found = everything(low, backend="chunk", product=product, **options)
    for name, x in found.items():
        of_tokens = name == "output" or name.split()[-1] in TOKENS
        assert x.dtype == (torch.bfloat16 if of_tokens else torch.float32), name
        bound = {"output": 2 * U, "state": 1e-6}.get(name, 4 * U)
        assert relative_error(x, expected[name]) < bound, (name, relative_error(x, expected[name]) / U)


@torch.no_grad()
def test_the_error_is_of_the_size_of_what_is_known():
    """At most three times that of computing in float32 and rounding the output, and of the library's attention."""
    low = bf16_inputs((1, 300, 4, 4, 16, 16, 16), "full")
    expected, _ = interdomain_attention(**cast(low, torch.float64), backend="recurrent")
    error = relative_error(interdomain_attention(**low)[0], expected)
    widened, _ = interdomain_attention(**cast(low, torch.float32))
    rounded = relative_error(widened.bfloat16(), expected)
    heads = [low[name].transpose(1, 2) for name in TOKENS]
    softmax = F.scaled_dot_product_attention(*(x.double() for x in heads), is_causal=True)
    library = relative_error(F.scaled_dot_product_attention(*heads, is_causal=True), softmax)
    assert rounded < error < 3 * rounded and error < 3 * library, (rounded, library, error)


@torch.no_grad()
def test_an_inverse_in_the_coefficients_does_not_blow_the_roundings_up():
    """The posterior start, whose matrix has a condition number of 10^4: all eight roundings twice as large, 4 u."""
    low = bf16_inputs((1, 200, 2, 2, 16, 16, 32), "full") | {"initial_state": None}
    size = torch.arange(32, dtype=torch.float64)
    rate = torch.complex(torch.full((2, 32), -0.5, dtype=torch.float64), (torch.pi * (size - 16)).expand(2, -1))
    step = torch.tensor([[0.01], [0.03]], dtype=torch.float64)
    beta = (torch.exp(step * rate) - 1) / rate
    coefficients = posterior_coefficients(gramian(torch.exp(step * rate), beta), 0.001)
    made = {"log_decay": step * rate, "input_matrix": beta, "coefficient_matrix": coefficients.resolve_conj()}
    low |= {name: torch.view_as_real(x).float() for name, x in made.items()}
    expected, _ = interdomain_attention(**cast(low, torch.float64), backend="recurrent", product="hermitian")
    found, _ = interdomain_attention(**low, product="hermitian")
    assert relative_error(found, expected) < 4 * U


def test_without_instructions_and_for_other_numbers_nothing_changes(monkeypatch):
    def never(*arguments):
        raise AssertionError("narrow operands")

    monkeypatch.setattr(op_interdomain_chunk, "Bf16Call", never)
    low = {name: None if x is None else x.detach() for name, x in bf16_inputs(SHAPES["odd_length"], "full").items()}
    wide = cast(low, torch.float32)
    expected, _ = interdomain_attention(**wide)
    half = interdomain_attention(**low | {name: low[name].half() for name in TOKENS})[0]
    assert half.dtype == torch.float16
    monkeypatch.setattr(op_common_cpu, "_has_bfloat16_instructions", lambda: False)
    assert torch.equal(interdomain_attention(**low)[0], expected.bfloat16())


@pytest.mark.parametrize("how", ["plain", "autocast"])
def test_the_convolution_rounds_once(how):
    conv, x = CausalConv1d(24, 24, 4, groups=24), torch.randn(2, 13, 24).bfloat16().requires_grad_()
    conv = conv.bfloat16() if how == "plain" else conv
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        found = conv(F.pad(x, (0, 0, 3, 0)).mT)
    wide = x.detach().double().requires_grad_()
    taps, bias = conv.weight.detach().double()[:, 0], conv.bias.detach().double()
    padded = F.pad(wide, (0, 0, 3, 0))
    expected = (sum(padded[:, i : i + 13] * taps[:, i] for i in range(4)) + bias).mT
    assert found.dtype == conv.weight.dtype
    assert relative_error(found, expected) < (U if how == "plain" else 1e-6)
    weights = torch.randn_like(expected).bfloat16()
    grads = [torch.autograd.grad((y * weights).sum(), z)[0] for y, z in ((found, x), (expected, wide))]
    assert relative_error(*grads) < 2 * U
    conv(F.pad(x, (0, 0, 3, 0)).mT).sum().backward()
    assert conv.weight.grad.stride() == conv.weight.stride(), "or DDP copies it, and warns"


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_convolution_some_tokens_at_a_time(bias, monkeypatch):
    conv, x = CausalConv1d(8, 8, 4, groups=8, bias=bias), torch.randn(2, 8, 24)
    monkeypatch.setattr(module_common, "_PIECE", 64)
    torch.testing.assert_close(conv(x), F.conv1d(x, conv.weight, conv.bias, groups=8))


@torch.no_grad()
@pytest.mark.parametrize("length", [3, 4, 50])
def test_a_convolution_from_zeros_is_that_with_zeros_before(length):
    conv, x = CausalConv1d(24, 24, 4, groups=24).bfloat16(), torch.randn(2, length, 24).bfloat16()
    given = x.clone()
    found = causal_conv(conv, x, None, 4)
    for y, expected in zip(found, causal_conv(conv, x, x.new_zeros(2, 24, 3), 4), strict=True):
        assert torch.equal(y, expected)
    assert torch.equal(x, given)
    seen = []
    conv.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert torch.equal(causal_conv(conv, x, None, 4)[0], found[0]) and seen == [(2, 24, length)]


def test_pieces_are_the_whole(make_model, random_ids, monkeypatch):
    model, ids = make_model("rope-after", dtype=torch.bfloat16).eval(), random_ids(2, 40)
    expected, seen = model(ids).logits, []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, inputs, y: seen.append((y, y.clone())))
    monkeypatch.setattr(module_common, "_PIECE", 64)
    assert torch.equal(model(ids).logits, expected)
    (kept, copy), *_ = seen
    assert torch.equal(kept, copy), "what a hook was given is not overwritten"


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_a_single_row_is_projected_as_the_module_would(bias):
    linear, x = nn.Linear(96, 40, bias).bfloat16(), torch.randn(1, 1, 96).bfloat16()
    expected = F.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    found = project(linear, x)
    assert found.shape == expected.shape and found.dtype == x.dtype
    assert relative_error(found, expected) < U
    linear.register_forward_hook(lambda module, inputs, y: y + 1)
    assert torch.equal(project(linear, x), linear(x)), "what hangs on the module is heard"


def test_a_residual_stream_in_float32_is_no_narrower_than_the_model(make_model, random_ids):
    ids = random_ids(2, 6)
    torch.testing.assert_close(
        make_model(residual_in_fp32=True)(ids).logits, make_model()(ids).logits, rtol=0, atol=1e-12
    )
