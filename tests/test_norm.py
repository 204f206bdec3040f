"""The norm is its formula, in the numbers of its input and of its weight."""

import pytest
import torch
from torch import nn

from modeling_interdomain.layers.common import InterdomainRMSNorm, is_plain, plain_rms_norm

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


def test_epsilon_counts_where_numbers_are_small():
    x = 1e-3 * torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(plain_rms_norm(x, 1e-6), nn.functional.rms_norm(x, (16,), eps=1e-6))


def test_pieces_of_a_norm_are_those_of_their_tokens():
    norm = InterdomainRMSNorm(64).bfloat16()
    x = torch.randn(2, 3000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(norm(x), torch.cat([norm(part) for part in x.split(500, dim=1)], dim=1))


def test_a_plain_tensor_has_the_dtype_asked_for():
    with torch.no_grad():
        assert is_plain(torch.zeros(2)) and not is_plain(torch.zeros(2).double())
        assert is_plain(torch.zeros(2).bfloat16(), torch.bfloat16) and not is_plain(torch.zeros(2), torch.bfloat16)
