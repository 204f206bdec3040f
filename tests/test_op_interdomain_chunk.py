"""The parts of the chunked backend that have a meaning of their own."""

import pytest
import torch

from modeling_interdomain.op_common import decay_powers
from modeling_interdomain.op_interdomain_chunk import skew, unskew
from modeling_interdomain.op_interdomain_readout import apply_coefficients, combine, pull_back, pull_back_matrix

PRODUCTS = ["bilinear", "hermitian", "real"]


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_skew_moves_distances_into_columns(size):
    x = torch.randn(3, size, size, dtype=torch.float64)
    moved = skew(x)
    for t in range(size):
        for distance in range(size):
            expected = x[:, t, t - distance] if distance <= t else torch.zeros(3, dtype=torch.float64)
            assert torch.equal(moved[:, t, size - 1 - distance], expected)
    assert torch.equal(unskew(moved), x.tril())


@pytest.mark.parametrize("function", [skew, unskew], ids=["skew", "unskew"])
def test_skew_gradients(function):
    assert torch.autograd.gradcheck(function, torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True))


def test_decay_powers_reduce_large_phases_exactly():
    # A power of two of a turn: after 64 tokens the phase is a whole number of turns, whatever the size of the step.
    turn = 2 * torch.pi
    log_decay = torch.tensor([[[-0.0, 20 * turn + turn / 64], [-1.0, 0.0]]], dtype=torch.float64)
    powers = decay_powers(log_decay, torch.tensor([0, 1, 64]))
    torch.testing.assert_close(powers[0, 2, 0], torch.tensor(1 + 0j, dtype=torch.complex128), atol=1e-11, rtol=0)
    torch.testing.assert_close(powers[0, :, 1].real, torch.tensor([0.0, -1.0, -64.0], dtype=torch.float64).exp())


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", ["full", "diagonal", "identity"])
def test_pull_back_reads_what_the_product_reads(product, kind):
    groups, size, feature_dim, value_dim = 2, 5, 3, 4
    coefficients = {
        "full": torch.randn(groups, size, size, dtype=torch.complex128),
        "diagonal": torch.randn(groups, 1, size, dtype=torch.complex128),
        "identity": None,
    }[kind]
    query = torch.randn(groups, feature_dim, dtype=torch.float64)
    key_state, value_state = (torch.randn(groups, size, n, dtype=torch.complex128) for n in (feature_dim, value_dim))
    u, gamma = (apply_coefficients(coefficients, x.mT).mT for x in (key_state, value_state))
    expected = (query[:, None] @ combine(u, gamma, product))[:, 0]
    y = (key_state @ query[..., None].to(key_state.dtype))[..., 0]
    p = pull_back(coefficients, y[:, None], product)[:, 0]
    torch.testing.assert_close((p.conj()[:, None] @ value_state)[:, 0].real, expected)
    if kind == "full":
        rows = torch.view_as_real(y).flatten(1)[:, None] @ pull_back_matrix(coefficients, product)
        torch.testing.assert_close(torch.view_as_complex(rows.view(groups, size, 2)), p.resolve_conj())
