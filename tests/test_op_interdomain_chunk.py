"""The parts of the chunked backend that have a meaning of their own."""

import pytest
import torch

from modeling_interdomain.ops.common.chunks import chunks_of
from modeling_interdomain.ops.common.decay import decay_powers
from modeling_interdomain.ops.common.states import Workspace
from modeling_interdomain.ops.diagonal.mixing import mixing_factors, mixing_matrix
from modeling_interdomain.ops.interdomain.chunk_call import skew, unskew
from modeling_interdomain.ops.interdomain.readout import apply_coefficients, combine, pull_back

PRODUCTS = ["bilinear", "hermitian", "real"]


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_skew_moves_distances_into_columns(size):
    x = torch.randn(3, size, size, dtype=torch.float64)
    moved = skew(x, Workspace(), "skew")
    for t in range(size):
        for distance in range(size):
            expected = x[:, t, t - distance] if distance <= t else torch.zeros(3, dtype=torch.float64)
            assert torch.equal(moved[:, t, size - 1 - distance], expected)
    assert torch.equal(unskew(moved, Workspace(), "unskew"), x.tril())
    other = torch.randn_like(x)
    torch.testing.assert_close((moved * other).sum(), (x * unskew(other, Workspace(), "unskew")).sum())


def tokens_of(chunks):
    """The places of the tokens, segment by segment and step by step."""
    for segment in chunks.segments:
        for start, lanes, following in segment.moves():
            first = segment.first + start
            yield segment, lanes, following, chunks.tokens[first : first + lanes]


@pytest.mark.parametrize("sizes", [[5, 0, 40, 16, 33, 1, 0], [16] * 40, [0, 0]], ids=["mixed", "alike", "empty"])
def test_every_token_has_one_slot_and_documents_go_on_first(sizes):
    chunks = chunks_of((len(sizes), 40), None, torch.tensor(sizes), 16, 64, torch.device("cpu"))
    found, running = [], {}
    for segment, lanes, following, places in tokens_of(chunks):
        assert following <= lanes and segment.chunks <= 64 // chunks.size
        rows = (places[:, 0] // 40).tolist()
        if segment.block in running:
            assert rows == running[segment.block]
        running[segment.block] = rows[:following]
        found += places[places < len(sizes) * 40].tolist()
    assert sorted(found) == [40 * row + t for row, size in enumerate(sizes) for t in range(size)]
    assert not any(running.values())


def test_packed_work_is_linear_in_the_tokens():
    """Documents of 16 tokens make chunks of 16, and as many segments and steps a token however many they are."""
    work = []
    for length in (1024, 2048, 4096):
        ends = torch.arange(0, length + 1, 16)
        chunks = chunks_of((1, length), ends, None, 64, 1024, torch.device("cpu"))
        assert chunks.tokens.numel() == length and chunks.size == 16
        work.append((len(chunks.segments), sum(len(s.lanes) for s in chunks.segments)))
    assert work == [(1, 1), (2, 2), (4, 4)]


def test_documents_that_end_before_the_row_cost_nothing():
    """A compiled model passes an end for every token it might have; the last ones are all T."""
    ends = torch.full((1025,), 1024)
    ends[:3] = torch.tensor([0, 100, 300])
    chunks = chunks_of((1, 1024), ends, None, 64, 1024, torch.device("cpu"))
    assert chunks.documents == 3 and chunks.tokens.shape == (2 + 4 + 12, 64)


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
    pairs = {"full": 4, "diagonal": 3}.get(kind)
    given = None if pairs is None else torch.view_as_real(coefficients).reshape(groups, *[size] * (pairs - 2), 2)
    mixing = mixing_matrix(given, product, groups, size, torch.empty(0, dtype=torch.float64))
    rows = torch.view_as_real(y).flatten(1)[:, None] @ mixing
    torch.testing.assert_close(torch.view_as_complex(rows.view(groups, size, 2)), p.resolve_conj())
    if kind == "full":
        left, right = mixing_factors(torch.view_as_real(coefficients), product)
        rows = torch.cat([y.real, y.imag], dim=-1)[:, None] @ left @ right
        torch.testing.assert_close(torch.complex(*rows[:, 0].chunk(2, dim=-1)), p.resolve_conj())
