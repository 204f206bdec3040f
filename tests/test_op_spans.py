"""Joining states, taking spans out of them, and which token answered: exact, in float64."""

import pytest
import torch

from examples.joined_states import join_layer
from modeling_interdomain import (
    InterdomainCache,
    interdomain_attention,
    interdomain_attention_map,
    join_states,
    mask_span,
    remove_span,
)
from modeling_interdomain.ops.s4d.entry import s4d_attention

B, T, H, G, R, D, M = 2, 13, 4, 2, 5, 3, 6


@pytest.fixture
def problem():
    """Tokens and parameters in float64; phases of many radians a token."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    log_decay = torch.stack([-0.3 * normal(G, M).abs(), 60 * normal(G, M)], dim=-1)
    tokens = normal(B, T, H, R), normal(B, T, G, R), normal(B, T, G, D)
    return tokens, log_decay, normal(G, M, 2), normal(G, M, M, 2)


def state_of(problem, *pieces: slice, silent: slice | None = None) -> torch.Tensor:
    """The state after some pieces of the text, with the tokens of another at zero."""
    tokens, *parameters = problem
    if silent is not None:
        tokens = [x.clone() for x in tokens]
        for x in tokens:
            x[:, silent] = 0
    tokens = [torch.cat([x[:, piece] for piece in pieces], dim=1) for x in tokens]
    return interdomain_attention(*tokens, *parameters, output_final_state=True, backend="recurrent")[1]


def test_states_of_two_documents(problem):
    first, second, log_decay = state_of(problem, slice(0, 8)), state_of(problem, slice(8, T)), problem[1]
    for length in (T - 8, torch.tensor([T - 8] * B)):
        torch.testing.assert_close(
            join_states(first, second, length, log_decay), state_of(problem, slice(0, T)), rtol=1e-10, atol=1e-10
        )
    torch.testing.assert_close(join_states(first, torch.zeros_like(first), 0, log_decay), first)
    lengths = torch.tensor([3, 0])
    rows = [join_states(first[i : i + 1], second[i : i + 1], int(n), log_decay) for i, n in enumerate(lengths)]
    torch.testing.assert_close(join_states(first, second, lengths, log_decay), torch.cat(rows))


@pytest.mark.parametrize("rate", [-torch.inf, -744.4, -744.4 / (T - 8)])  # lambda or a power: zero, denormal
def test_a_mode_that_forgets(problem, rate):
    problem[1][:, :5] = torch.tensor([rate, 0.3])
    log_decay = problem[1].requires_grad_()
    first, second = state_of(problem, slice(0, 8)), state_of(problem, slice(8, T))
    for found, expected in (
        (join_states(first.detach(), second.detach(), length, log_decay), wanted)
        for length, wanted in ((T - 8, state_of(problem, slice(0, T))), (0, (first + second).detach()), (1, None))
    ):
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert torch.autograd.grad(found.sum(), log_decay)[0].isfinite().all()


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (5, 9), (9, T), (0, T)])
def test_a_text_without_a_span(problem, start, stop):
    whole, span, log_decay = state_of(problem, slice(0, T)), slice(start, stop), problem[1]
    before = state_of(problem, slice(0, start)) if start else torch.zeros_like(whole)
    after = state_of(problem, slice(0, stop))
    found = remove_span(whole, before, after, T - stop, log_decay)
    rest = state_of(problem, slice(0, start), slice(stop, T)) if stop - start < T else torch.zeros_like(whole)
    torch.testing.assert_close(found, rest, rtol=1e-9, atol=1e-9)
    found = mask_span(whole, state_of(problem, span), T - stop, log_decay)
    torch.testing.assert_close(found, state_of(problem, slice(0, T), silent=span), rtol=1e-9, atol=1e-9)


def test_s4d_states_join_alike(problem):
    (_, key, value), log_decay, input_matrix, _ = problem
    row = torch.randn(H, M, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def state(piece: slice) -> torch.Tensor:
        arguments = (key[:, piece], value[:, piece], log_decay, input_matrix, row)
        return s4d_attention(*arguments, output_final_state=True)[1]

    joined = join_states(state(slice(0, 8)), state(slice(8, T)), T - 8, log_decay)
    torch.testing.assert_close(joined, state(slice(0, T)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mixer", ["interdomain", "s4d"])
def test_joined_documents_of_a_model(mixer, make_model, random_ids, assert_same):
    """Exact in the first layer without convolutions, approximate in the second."""
    model = make_model("no-convolution", token_mixers=mixer)
    ids = random_ids(2, 12)

    def states(piece: slice) -> list[torch.Tensor]:
        cache = InterdomainCache(model.config)
        with torch.no_grad():
            model(ids[:, piece], past_key_values=cache)
        return [layer.state for layer in cache.layers]

    parts = zip(model.model.layers, states(slice(0, 7)), states(slice(7, 12)), strict=True)
    first, second = [join_layer(layer.token_mixer, a, b, 5) for layer, a, b in parts]
    expected = states(slice(0, 12))
    assert_same(first.detach(), expected[0])
    assert 0.001 < ((second - expected[1]).norm() / expected[1].norm()).item() < 1


def test_states_that_do_not_fit_are_refused(problem):
    state, log_decay = state_of(problem, slice(0, T)), problem[1]
    with pytest.raises(ValueError, match=r"second must have shape \[B, G, 2, M, R \+ D\] = \[2, 2, 2, 6, "):
        join_states(state, state[:1], 3, log_decay)
    with pytest.raises(ValueError, match=r"state must have shape \[B, G, 2, M, R \+ D\] = \[2, 1, 2, 6, "):
        mask_span(state, state, 3, log_decay[:1])
    for tokens in (-1, True, torch.tensor([1, 2, 3]), torch.tensor([1, -1]), torch.tensor([True, False])):
        with pytest.raises(ValueError, match=r"at least 0, one for all or \[B\] = \[2\], got"):
            remove_span(state, state, state, tokens, log_decay)


@pytest.mark.parametrize("product", ["bilinear", "hermitian", "real"])
@pytest.mark.parametrize("kind", ["full", "diagonal", "identity"])
def test_the_map_times_the_values_is_the_output(problem, product, kind):
    (query, key, value), log_decay, input_matrix, full = problem
    coefficients = {"full": full, "diagonal": full[:, 0], "identity": None}[kind]
    for normalize in (False, True):
        arguments = {"product": product, "normalize": normalize}
        found = interdomain_attention_map(query, key, log_decay, input_matrix, coefficients, **arguments)
        assert found.shape == (B, H, T, T) and found.triu(1).eq(0).all()
        output = torch.einsum("bhtj,bjhd->bthd", found, value.repeat_interleave(H // G, dim=2))
        expected, _ = interdomain_attention(
            query, key, value, log_decay, input_matrix, coefficients, backend="recurrent", **arguments
        )
        torch.testing.assert_close(output, expected, rtol=1e-8, atol=1e-8)


def test_arguments_of_the_map_are_checked(problem):
    (query, key, _), log_decay, input_matrix, _ = problem
    with pytest.raises(ValueError, match="product must be one of"):
        interdomain_attention_map(query, key, log_decay, input_matrix, product="cosine")
    with pytest.raises(ValueError, match=r"key must have shape \[B, T, G, R\] = \[2, 13, G, 5\]"):
        interdomain_attention_map(query, key[:, 1:], log_decay, input_matrix)


def test_states_keep_their_dtype():
    states, log_decay = torch.randn(2, 1, 2, 2, 3, 4, dtype=torch.bfloat16), torch.randn(2, 3, 2)
    assert join_states(*states, 3, -log_decay.abs()).dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [None, torch.tensor(1 + 0j), torch.tensor([[1], [2]])], ids=str)
def test_numbers_of_tokens_that_cannot_be(tokens):
    state, log_decay = torch.zeros(2, 1, 2, 3, 4), torch.zeros(1, 3, 2)
    with pytest.raises(
        ValueError, match=r"A number of tokens must be whole and at least 0, one for all or \[B\] = \[2\]"
    ):
        join_states(state, state, tokens, log_decay)
