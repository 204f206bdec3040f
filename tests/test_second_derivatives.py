"""A second derivative is right or refused.

`loss.backward()` visits every node and so meets the error of an operator that has none; `torch.autograd.grad` with
inputs takes only the ways that lead to them, and must find the error there.
"""

import pytest
import torch

from modeling_interdomain import interdomain_attention
from modeling_interdomain.ops.sparse.entry import sparse_attention
from modeling_interdomain.ops.sparse.stream import Bins
from tests.conftest import EACH_MIXER
from tests.operator_checks import SHAPES, inputs

NONE = "has no gradient of its own .a second derivative.: take"
NAMES = ["query", "key", "value", "log_decay", "input_matrix", "coefficient_matrix", "initial_state"]
WITH_ONE = ("recurrent", "fft", "associative_scan", "dense")


def check_second(function, x, step=1e-5):
    """The gradient of `<direction, df/dx>` by `autograd.grad` of x alone is that of differences of first gradients."""
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=x.dtype)

    def first(at, again=False):
        at = at.detach().requires_grad_()
        return torch.autograd.grad(function(at), at, create_graph=again)[0], at

    found, at = first(x, again=True)
    (found,) = torch.autograd.grad((found * direction).sum(), at)
    (above, _), (below, _) = first(x + step * direction), first(x - step * direction)
    expected = (above - below) / (2 * step)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def check_backend(backend, function, x):
    if backend in WITH_ONE:
        check_second(function, x)
    else:
        with pytest.raises(RuntimeError, match=NONE):
            check_second(function, x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["recurrent", "fft", "associative_scan", "scan", "chunk"])
def test_of_the_operator(backend, name):
    arguments = {key: x.detach() for key, x in inputs(SHAPES["one_group"]).items()}

    def loss(x):
        return interdomain_attention(**arguments | {name: x}, backend=backend, chunk_size=16)[0].square().sum()

    check_backend(backend, loss, arguments[name])


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("backend", ["dense", "blocks"])
def test_of_sparse_attention(backend, index):
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randn(2, 20, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    of_query, of_key = (torch.randint(-1, 3, (2, 20, 2), generator=generator) for _ in range(2))

    def loss(x):
        found = [x if i == index else token for i, token in enumerate(tokens)]
        return sparse_attention(*found, bins=[Bins(of_query, of_key, 3, 4)], backend=backend)[0].square().sum()

    check_backend(backend, loss, tokens[index])


@pytest.mark.parametrize("name", EACH_MIXER)
def test_of_a_model(name, copy_model):
    """Through layers, where an operator is one of several ways from the loss to the embeddings."""
    model = copy_model(name)
    embeds = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with pytest.raises(RuntimeError, match=f"{NONE}|flash_attention_for_cpu_backward is not implemented"):
        check_second(lambda x: model(inputs_embeds=x).logits.logsumexp(-1).sum(), embeds)


def test_first_derivatives_stay_in_a_graph_of_others():
    """`create_graph=True` for the sake of other ways: what does not need a second derivative has none to refuse."""
    arguments = {key: x.detach() for key, x in inputs(SHAPES["one_group"]).items()}
    query, scale = arguments["query"].requires_grad_(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for backend in ("scan", "chunk"):
        output = interdomain_attention(**arguments, backend=backend, chunk_size=16)[0]
        (first,) = torch.autograd.grad((scale * output).sum(), query, create_graph=True)
        (alone,) = torch.autograd.grad(output.sum(), query)
        torch.testing.assert_close(first, 2 * alone)
