"""Rows that begin and end at different times: each is, in logits and in what it holds, what it would be alone."""

import pytest
import torch

from modeling_interdomain import InterdomainCache
from modeling_interdomain.generation.slots import Slots

# Which rows stay, and how long the prompts are that come: rows that grow, shrink, change places and end.
EVENTS = [([], [5, 2]), ([0, 1], [9]), ([1, 0, 2], []), ([2, 0], []), ([1], [1, 3]), ([0, 1, 2], [])]
MODELS = ["softmax-interdomain", "softmax", "windowed", "hax", "value-mask", "mamba2", "window"]


class Alone:
    """One row with a cache of its own."""

    def __init__(self, model, ids: torch.Tensor):
        self.model, self.cache = model, InterdomainCache(model.config)
        self.read(ids)

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, past_key_values=self.cache).logits[:, -1]


@pytest.mark.parametrize("name", MODELS)
def test_each_row_is_as_alone(name, make_model, random_ids, assert_same):
    model, rows = make_model(name), []
    slots = Slots(model)
    for number, (kept, lengths) in enumerate(EVENTS):
        new = [Alone(model, random_ids(1, length, seed=10 * number + length)) for length in lengths]
        rows = [rows[row] for row in kept] + new
        with torch.no_grad():
            slots.change(kept, [copied(model, row) for row in new])
            for step in range(2):
                tokens = random_ids(len(rows), 1, seed=100 + 10 * number + step)
                logits = slots.step(tokens[:, 0].tolist())
                expected = [row.read(token) for row, token in zip(rows, tokens[:, None])]
                assert_same(logits, torch.cat(expected))
        assert slots.lengths == [int(row.cache.get_seq_length()) for row in rows]
        for number_of_row, row in enumerate(rows):
            again = InterdomainCache(model.config)
            again.restore(slots.take(number_of_row), slots.lengths[number_of_row], model)
            assert_same(read_on(model, again, random_ids(1, 3)), read_on(model, copied(model, row), random_ids(1, 3)))
    slots.change([], [])
    assert slots.lengths == [] and not slots.cache.layers[0].is_initialized


def copied(model, row: Alone) -> InterdomainCache:
    """A cache that has read the same and is nobody else's."""
    cache = InterdomainCache(model.config)
    tensors = {name: x.clone() for name, x in row.cache.named_tensors().items()}
    cache.restore(tensors, int(row.cache.get_seq_length()), model)
    return cache


@torch.no_grad()
def read_on(model, cache, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, past_key_values=cache).logits


def test_keys_take_the_room_of_the_longest_in_flight(make_model, random_ids):
    model = make_model("softmax-interdomain")
    slots = Slots(model)
    with torch.no_grad():
        slots.change([], [Alone(model, random_ids(1, length)).cache for length in (4, 30)])
        assert slots.cache.layers[0].keys.shape[2] == 30
        slots.change([0], [])
    assert slots.cache.layers[0].keys.shape[2] == 4
    assert slots.cache.layers[1].get_seq_length() == 4


@pytest.mark.parametrize("name", ["interdomain", "s4d", "mamba2", "cheems", "selective-scan"])
def test_a_recurrence_steps_in_slots_of_a_pool(name, make_model, random_ids, assert_same):
    """As servers keep states: what a layer gives and leaves is the same, and a row without a slot gives zeros."""
    model, steps = make_model(name), []

    def before(recurrence, tokens, arguments):
        if arguments.get("step"):
            steps.append([recurrence, tokens, arguments["state"].clone()])

    def after(recurrence, tokens, arguments, output):
        if arguments.get("step"):
            steps[-1] += [output, arguments["state"].clone()]

    for layer in model.model.layers:
        if (recurrence := getattr(layer.token_mixer, "recurrence", None)) is not None:
            recurrence.register_forward_pre_hook(before, with_kwargs=True)
            recurrence.register_forward_hook(after, with_kwargs=True)
    cache, ids = InterdomainCache(model.config), random_ids(2, 6)
    with torch.no_grad():
        model(ids[:, :5], past_key_values=cache)
        model(ids[:, 5:], past_key_values=cache)
    recorded = list(steps)
    assert recorded
    for recurrence, tokens, state, expected, moved in recorded:
        for slots in ([3, 1], [3, -1]):
            pool = torch.randn(5, *state.shape[1:], dtype=state.dtype)
            used = [slot for slot in slots if slot >= 0]
            pool[used] = state[: len(used)]
            expected_pool = pool.clone()
            expected_pool[used] = moved[: len(used)]
            with torch.no_grad():
                found = recurrence(*tokens, step=True, state=pool, state_indices=torch.tensor(slots))
            assert_same(found[: len(used)], expected[: len(used)])
            assert_same(pool, expected_pool)
            assert not found[len(used) :].any()
