"""The state after recorded inputs is that of the recurrence, token by token in float64."""

import pytest
import torch

from modeling_interdomain import interdomain_attention
from modeling_interdomain.ops.interdomain.replay import replay_tables, state_after

ROWS, GROUPS, SIZE, WIDTH = 2, 2, 3, 4


def problem(length: int):
    generator = torch.Generator().manual_seed(length)
    state, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in [(ROWS, GROUPS, 2, SIZE, 2 * WIDTH), *[(ROWS, length, GROUPS, WIDTH)] * 2]
    )
    rates = torch.rand(GROUPS, SIZE, 2, generator=generator, dtype=torch.float64)
    log_decay = rates * torch.tensor([-0.02, 40.0])  # 1,000 tokens later something is left, after many turns
    return state, key, value, log_decay, torch.randn(GROUPS, SIZE, 2, generator=generator, dtype=torch.float64)


def expected_of(state, key, value, mask, log_decay, input_matrix):
    """Row by row, without the pads."""
    rows = []
    for row, real in enumerate(mask):
        k, v = (x[row : row + 1, real] for x in (key, value))
        start = state[row : row + 1].double()
        if real.any():
            arguments = {"initial_state": start, "output_final_state": True, "backend": "recurrent"}
            start = interdomain_attention(k, k, v, log_decay, input_matrix, **arguments)[1]
        rows.append(start)
    return torch.cat(rows)


@pytest.mark.parametrize("most", [None, 7], ids=["no-tables", "tables"])
@pytest.mark.parametrize("pads", [False, True], ids=["all-real", "pads"])
@pytest.mark.parametrize("length", [0, 1, 7, 1030])  # the last crosses a block
def test_it_is_the_recurrence(length, pads, most, assert_same):
    state, key, value, log_decay, input_matrix = problem(length)
    mask = torch.ones(ROWS, length, dtype=torch.bool)
    if pads:
        mask[0] = False
        mask[1, ::3] = False
    before = state.clone()
    tables = () if most is None else replay_tables(log_decay, input_matrix, most)
    found = state_after(state, key, value, mask, log_decay, input_matrix, *tables)
    assert_same(found, expected_of(state, key, value, mask, log_decay, input_matrix))
    assert state.equal(before)


def test_a_narrow_state_is_advanced_in_float32():
    state, *others = (x.float() for x in problem(40))
    mask, narrow = torch.ones(ROWS, 40, dtype=torch.bool), state.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = state_after(narrow, *others[:2], mask, *others[2:])
    assert found.dtype == torch.float32
    key, value, *parameters = (x.double() for x in others)
    torch.testing.assert_close(found.double(), expected_of(narrow, key, value, mask, *parameters), rtol=1e-5, atol=1e-5)
