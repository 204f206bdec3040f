"""The norm is its formula, in the numbers of its input and of its weight."""

import pytest
import torch

from modeling_interdomain.layers.common import InterdomainRMSNorm

DTYPES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_its_formula(dtype, weight):
    norm, x = InterdomainRMSNorm(24, eps=1e-3).to(weight), 3 * torch.randn(2, 5, 24).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(24))
    wide = x.double()
    expected = norm.weight.double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-3)
    found = norm(x)
    assert found.dtype == torch.promote_types(dtype, weight)
    torch.testing.assert_close(found.double(), expected, rtol=2 * max(DTYPES[dtype], DTYPES[found.dtype]), atol=0)


def test_half_numbers_whose_squares_are_too_large():
    assert InterdomainRMSNorm(8).half()(torch.full((8,), 1000.0, dtype=torch.float16)).tolist() == [1.0] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_round_the_norm(dtype):
    norm, x = InterdomainRMSNorm(24), torch.randn(5, 24).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = norm(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, norm(x))
