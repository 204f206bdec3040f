"""A few tokens at once, as checking guesses reads them, against the recurrence token by token."""

from functools import partial

import pytest
import torch

from modeling_interdomain.ops.diagonal.step import step_tables
from modeling_interdomain.ops.interdomain.entry import interdomain_attention
from modeling_interdomain.ops.interdomain.few import MAX_DRAFT, MAX_PENDING, few_tables, take_few

COEFFICIENTS = {"full": (5, 5, 2), "diagonal": (5, 2), "identity": None}


def draw(batch, groups, heads, count, coefficients, dtype=torch.float64):
    """Tokens, parameters of 5 modes, and a state that is not zero."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=dtype)
    tokens = normal(batch, count, heads, 3), normal(batch, count, groups, 3), normal(batch, count, groups, 4)
    log_decay = torch.stack([-normal(groups, 5).abs(), 3 * normal(groups, 5)], dim=-1)
    shape = COEFFICIENTS[coefficients]
    parameters = log_decay, normal(groups, 5, 2), None if shape is None else normal(groups, *shape)
    return tokens, parameters, normal(batch, groups, 2, 5, 7)


def take(tokens, parameters, state, product, move=True):
    tables = partial(step_tables, *parameters, product)
    return take_few(*tokens, tables=tables, few=partial(few_tables, *parameters[:2]), state=state, move=move)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("product", ["bilinear", "hermitian", "real"])
@pytest.mark.parametrize(("batch", "groups", "heads", "count"), [(1, 2, 2, 2), (3, 2, 4, 7), (2, 1, 3, MAX_DRAFT)])
def test_outputs_and_state_are_those_of_the_recurrence(batch, groups, heads, count, product, coefficients):
    tokens, parameters, state = draw(batch, groups, heads, count, coefficients)
    options = {"product": product, "initial_state": state, "output_final_state": True, "backend": "recurrent"}
    wanted, last = interdomain_attention(*tokens, *parameters, **options)
    found = take(tokens, parameters, state, product)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize(
    ("batch", "pending", "count"), [(1, 1, 2), (3, 4, 5), (2, MAX_PENDING - 3, 3), (1, 0, MAX_DRAFT)]
)
def test_inputs_that_wait_are_read_with_a_state_at_rest(batch, pending, count, coefficients):
    tokens, parameters, state = draw(batch, 2, 4, pending + count, coefficients)
    options = {"product": "hermitian", "initial_state": state, "backend": "recurrent"}
    wanted, _ = interdomain_attention(*tokens, *parameters, **options)
    before, (query, key, value) = state.clone(), tokens
    found = take((query[:, pending:], key, value), parameters, state, "hermitian", move=False)
    torch.testing.assert_close(found, wanted[:, pending:], rtol=1e-10, atol=1e-10)
    assert torch.equal(state, before)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_state_of_fewer_bits_is_moved_in_float32(kept):
    tokens, parameters, state = draw(2, 2, 4, 6, "full", torch.float32)
    short = state.to(kept)
    state = short.double()
    wanted = take([x.double() for x in tokens], [x.double() for x in parameters], state, "hermitian")
    found = take(tokens, parameters, short, "hermitian")
    assert found.dtype == torch.float32 and short.dtype == kept
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(short.double(), state, rtol=torch.finfo(kept).eps * 8, atol=1e-4)


def test_no_guess_moves_an_earlier_answer():
    tokens, parameters, state = draw(1, 2, 2, 6, "full")
    first = take(tokens, parameters, state.clone(), "hermitian")
    for x in tokens:
        x[:, 4:] += 1
    assert torch.equal(take(tokens, parameters, state, "hermitian")[:, :4], first[:, :4])
