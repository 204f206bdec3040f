"""A mixer of layer type "hybrid": a decaying sum and a bounded window of keys, all in one recurrent layer."""

import copy
import pickle

import pytest
import torch
from torch import nn

from modeling_interdomain import InterdomainCache, TokenMixer
from modeling_interdomain.registry import TOKEN_MIXERS

WINDOW = 3


class LocalMixer(TokenMixer):
    """Attends to the last WINDOW tokens and to a decaying sum of all; a slot of the window is real where `filled`."""

    layer_type = "hybrid"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.v_proj, self.o_proj = (nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(2))

    def cache_shapes(self, batch: int) -> list[list[int]]:
        width = self.config.hidden_size
        return [[batch, width], [batch, WINDOW, width], [batch, WINDOW]]

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, packing=None, **kwargs):
        assert set(attention_mask) == {"linear_attention", "full_attention"}
        x, shape = self.v_proj(hidden_states), hidden_states.shape[:2]
        mask = packing.mask if packing is not None else attention_mask["linear_attention"]
        mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask.bool()
        layer = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        states = None if layer is None else layer.states
        if states is None:
            empty = x.new_zeros(shape[0], WINDOW, x.shape[-1])
            states = {"sum": empty[:, 0], "last": empty, "filled": torch.zeros(shape[0], WINDOW, dtype=torch.long)}
        if layer is not None and layer.record_past:
            layer.record((x, mask), (), self.replay)
        outputs = []
        for token, real in zip(x.unbind(1), mask.unbind(1)):
            states = self.move(states, token, real)
            weights = (states["last"] @ token[..., None])[..., 0].exp() * states["filled"]
            local = (weights[..., None] * states["last"]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1e-9)
            outputs.append(torch.where(real[:, None], local + states["sum"], 0))
        if layer is not None:
            layer.write([], states, shape[1])
        return self.o_proj(torch.stack(outputs, dim=1)), None

    @staticmethod
    def move(states, token, real):
        new = {
            "sum": 0.5 * states["sum"] + token,
            "last": torch.cat([states["last"][:, 1:], token[:, None]], dim=1),
            "filled": torch.cat([states["filled"][:, 1:], torch.ones_like(states["filled"][:, :1])], dim=1),
        }
        return {name: torch.where(real.view(-1, *[1] * (x.ndim - 1)), x, states[name]) for name, x in new.items()}

    @classmethod
    def replay(cls, windows, states, inputs, constants):
        for token, real in zip(*(x.unbind(1) for x in inputs), strict=True):
            states = cls.move(states, token, real)
        return windows, states


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(TOKEN_MIXERS, "local", LocalMixer)


@pytest.fixture(params=[("local", "local"), ("softmax", "local"), ("interdomain", "local")], ids="-".join)
def model(request, make_model):
    return make_model(token_mixers=list(request.param))


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generate(model, mode, left_padded):
    inputs = left_padded([2, 6])
    settings = {"max_new_tokens": 8, "do_sample": False}
    beams = {"num_beams": mode.get("num_beams", 1)}
    expected = model.generate(**inputs, **settings, **beams, use_cache=False)
    assert model.generate(**inputs, **settings, **mode).equal(expected)


def test_prompt_lookup(model, random_ids, guess_ahead):
    ids = random_ids(1, 5).repeat(1, 4)
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)
    guess_ahead(expected)
    assert model.generate(ids, max_new_tokens=9, do_sample=False, prompt_lookup_num_tokens=4).equal(expected)


def test_pads_and_pieces(model, make_cache, random_ids, advance, assert_same):
    ids, mask, cache = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long), make_cache(model.config)
    mask[0, :5] = mask[1, 6] = 0
    ends = [4, 5, 6, 7, 9]
    pieces = [
        advance(model, cache, ids[:, start:end], attention_mask=mask[:, :end]) for start, end in zip([0, *ends], ends)
    ]
    for row, real in enumerate(mask.bool()):
        assert_same(torch.cat(pieces, dim=1)[row, real], advance(model, None, ids[row : row + 1, real])[0])


def test_rollback_after_rows_changed(model, random_ids, advance, assert_same):
    ids, mask = random_ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    cache, rows = InterdomainCache(model.config), [1, 1, 0, 0]
    cache.activate_past_recording()
    advance(model, cache, ids[:, :4], attention_mask=mask[:, :4])
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    advance(model, cache, ids[rows, 4:], attention_mask=mask[rows])
    cache.crop(-3)
    expected = advance(model, None, ids[rows, :6], attention_mask=mask[rows, :6])[:, -1:]
    assert_same(advance(model, cache, ids[rows, 5:6], attention_mask=mask[rows, :6]), expected)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


@pytest.mark.parametrize("how", COPIES)
def test_copies(model, make_cache, how, random_ids, advance, contents, assert_same):
    cache = make_cache(model.config)
    cache.activate_past_recording()
    advance(model, cache, random_ids(2, 5))
    before = contents(cache)
    again = COPIES[how](cache)
    logits = advance(model, again, random_ids(2, 1, seed=1))
    assert_same(contents(cache), before)
    assert_same(advance(model, cache, random_ids(2, 1, seed=1)), logits)
