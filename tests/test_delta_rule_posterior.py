"""docs/delta-rule.md in numbers: what of the posterior mean of a Gaussian process the delta rule is, and what not."""

import pytest
import torch

from modeling_interdomain import interdomain_attention
from tests.operator_checks import relative_error

TOKENS, KEY, VALUE, MODES = 12, 16, 3, 96


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def answers(queries, keys, values, delta=1.0, write=1.0, decay=0.0):
    """`[T, N, D]`: what a state says to N queries after each token, of modes a turn apart: K(a, b) = 1[a = b] e^..."""
    turns = 2 * torch.pi * torch.arange(MODES, dtype=torch.float64) / MODES
    parameters = torch.stack([torch.full_like(turns, -decay), turns], dim=-1)[None]
    beta = torch.stack([torch.full_like(turns, MODES**-0.5), torch.zeros_like(turns)], dim=-1)[None]
    length = keys.shape[0]
    number = torch.ones(1, length, 1, dtype=torch.float64)
    found, _ = interdomain_attention(
        queries[None, None].expand(-1, length, -1, -1), keys[None, :, None], values[None, :, None], parameters, beta,
        product="hermitian", delta=delta * number, write_gate=write * number,
    )  # fmt: skip
    return found[0]


@pytest.fixture
def text():
    """Keys of unit length at no right angles, values, and queries."""
    return unit(draw(TOKENS, KEY)), draw(TOKENS, VALUE, seed=1), draw(5, KEY, seed=2)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_each_token_is_one_step_of_the_posterior_mean(text, noise):
    """Of one observation, with what was answered before as the prior mean and the kernel as the prior covariance."""
    keys, values, queries = text
    found = answers(torch.cat([queries, keys]), keys, values, write=(1 + noise) ** -0.5)
    before = torch.zeros_like(found[0])
    for t in range(TOKENS):
        gain = torch.cat([queries, keys]) @ keys[t] / (1 + noise)
        expected = before + gain[:, None] * (values[t] - before[len(queries) + t])
        assert relative_error(found[t], expected) < 1e-10
        before = found[t]


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_all_tokens_are_one_sweep_of_gauss_and_seidel(text, noise):
    """The sum takes the diagonal of the kernel matrix, the delta rule its lower triangle, the posterior all of it."""
    keys, values, queries = text
    kernel, write = keys @ keys.mT, (1 + noise) ** -0.5
    noisy = kernel + noise * torch.eye(TOKENS, dtype=torch.float64)
    read = queries @ keys.mT
    found = {delta: answers(queries, keys, values, delta=delta, write=write)[-1] for delta in (0.0, 1.0)}
    posterior = read @ torch.linalg.solve(noisy, values)
    assert relative_error(found[0.0], read @ (values / noisy.diagonal()[:, None])) < 1e-10
    assert relative_error(found[1.0], read @ torch.linalg.solve_triangular(noisy.tril(), values, upper=False)) < 1e-10
    errors = [relative_error(found[delta], posterior) for delta in (0.0, 1.0)]
    assert errors[0] > errors[1] > 0.1, errors


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_keys_at_right_angles_make_it_the_posterior_mean(text, noise):
    _, values, queries = text
    keys = torch.linalg.qr(draw(KEY, KEY)).Q[:TOKENS]
    expected = queries @ keys.mT @ values / (1 + noise)
    assert relative_error(answers(queries, keys, values, write=(1 + noise) ** -0.5)[-1], expected) < 1e-10


def test_a_text_that_is_read_again_comes_nearer(text):
    """Values that a function of the prior has: every token takes away from what is wrong, and never adds."""
    keys, _, _ = text
    function = draw(KEY, VALUE, seed=3)
    found = answers(torch.eye(KEY, dtype=torch.float64), keys.repeat(8, 1), (keys @ function).repeat(8, 1))
    before = function.square().sum()
    for state, key in zip(found, keys.repeat(8, 1)):
        now = (function - state).square().sum()
        assert now <= before + 1e-12
        before = now
        assert relative_error(key @ state, key @ function) < 1e-9  # the newest is known exactly
    posterior = torch.linalg.pinv(keys) @ (keys @ function)
    wrong = [relative_error(found[(n + 1) * TOKENS - 1], posterior) for n in range(8)]
    assert all(b < a for a, b in zip(wrong, wrong[1:])) and wrong[-1] < 0.3 * wrong[0], wrong


def test_of_two_values_the_last_is_kept_and_the_posterior_has_their_mean():
    key, values, noise = unit(draw(1, KEY)), draw(2, VALUE), 1e-6
    found = answers(key, key.expand(2, -1), values)[-1]
    kernel = torch.ones(1, 2, dtype=torch.float64)
    posterior = kernel @ torch.linalg.solve(kernel.mT @ kernel + noise * torch.eye(2, dtype=torch.float64), values)
    assert relative_error(found, values[1:]) < 1e-10
    assert relative_error(posterior, values.mean(0, keepdim=True)) < 1e-5


def test_decay_is_a_function_that_drifts(text):
    """What is known of it fades by e^(-2 decay) a token: the prior mean that a Kalman filter predicts."""
    keys, values, queries = text
    found = answers(torch.cat([queries, keys]), keys, values, decay=0.1)
    before = torch.zeros_like(found[0])
    for t in range(TOKENS):
        before = before * torch.tensor(-0.2, dtype=torch.float64).exp()
        expected = before + (torch.cat([queries, keys]) @ keys[t])[:, None] * (values[t] - before[len(queries) + t])
        assert relative_error(found[t], expected) < 1e-10
        before = found[t]


def test_modes_that_cannot_tell_ages_apart_have_no_kernel_of_keys_alone(text):
    """With a K(a, b) that is no identity the weights of earlier values are a product of two matrices, not symmetric."""
    keys, values, _ = text
    log_decay = torch.stack([-draw(1, 4).abs() / 10, draw(1, 4, seed=4)], dim=-1)
    beta = draw(1, 4, 2, seed=5)
    ages = torch.arange(TOKENS - 1, -1, -1, dtype=torch.float64)
    phi = torch.view_as_complex(beta)[0] * torch.exp(torch.view_as_complex(log_decay)[0] * ages[:, None])
    product = keys @ keys.mT @ (phi.conj() @ phi.mT).real
    arguments = keys[None, -1:, None].expand(-1, TOKENS, -1, -1), keys[None, :, None], values[None, :, None]
    found, _ = interdomain_attention(*arguments, log_decay, beta, product="hermitian")
    assert relative_error(found[0, -1, 0], product[-1] @ values) < 1e-10
    assert (product - product.mT).norm() > 0.1 * product.norm()
