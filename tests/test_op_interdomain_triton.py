"""The fused kernels in Triton's interpreter against the float64 recurrence, and what happens where they cannot run."""

import functools
import importlib
import logging
import math
import os
import statistics
import subprocess
import sys
import textwrap
from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from modeling_interdomain import interdomain_attention, interdomain_step
from modeling_interdomain.ops.common import launch as op_common_launch
from modeling_interdomain.ops.common.packing import document_of_tokens
from tests.operator_checks import (
    COEFFICIENTS,
    EXTREMES,
    PRODUCTS,
    SHAPES,
    SLOTS,
    assert_close,
    cast,
    check_step_of_slots,
    everything,
    inputs,
    parameters_of_the_default_start,
    relative_error,
)
from tests.test_op_interdomain import one_token

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
on_gpu = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if on_gpu else "cpu"
# On a GPU the matrix units round float32 to three tf32 numbers, in the interpreter not at all.
FLOAT32 = 2e-5 if on_gpu else 2e-6

FUSED_SHAPES = {
    # name: (B, T, H, G, R, D, M); chunks of 16 tokens
    "one_token": (2, 1, 2, 2, 4, 4, 3),
    "one_chunk_exactly": (2, 16, 2, 2, 4, 6, 4),
    "odd_sizes": (2, 37, 4, 2, 5, 7, 6),
    "one_group": (1, 33, 3, 1, 3, 10, 7),
    "one_mode": (1, 20, 2, 1, 4, 4, 1),
}
WIDE_SHAPES = {
    "64_64_64": (1, 20, 2, 2, 64, 64, 64),
    "60_100_48": (1, 20, 2, 1, 60, 100, 48),
    "16_256_16": (1, 20, 1, 1, 16, 256, 16),
    "256_16_128": (1, 17, 1, 1, 256, 16, 128),
    "16_16_256": (1, 17, 1, 1, 16, 16, 256),
}


def check(arguments, dtype, bound, **options):
    """Compare with the recurrence in float64 on the same, already rounded, inputs."""
    tokens = ("query", "key", "value")
    low = cast(arguments, torch.float32) | cast({k: arguments[k] for k in tokens}, dtype)
    expected = everything(cast(low, torch.float64), **(options | {"backend": "recurrent"}))
    low = {k: None if v is None else v.detach().to(DEVICE).requires_grad_() for k, v in low.items()}
    if "cu_seqlens" in options:
        options["cu_seqlens"] = options["cu_seqlens"].to(DEVICE)
    found = {k: v.cpu() for k, v in everything(low, **options, backend="triton").items()}
    assert all(found[f"grad of {name}"].dtype == dtype for name in tokens)
    assert found["state"].dtype == torch.float32 and found["output"].dtype == dtype
    assert_close(found, expected, bound)


def check_output(arguments, dtype, bound, cu_seqlens, **options):
    """Of `check`, the output alone."""
    low = {k: v.detach().to(dtype if k in ("query", "key", "value") else torch.float32) for k, v in arguments.items()}
    wide = {k: v.double() for k, v in low.items()}
    expected, _ = interdomain_attention(**wide, cu_seqlens=cu_seqlens, **options, backend="recurrent")
    low = {k: v.to(DEVICE) for k, v in low.items()}
    found, _ = interdomain_attention(**low, cu_seqlens=cu_seqlens.to(DEVICE), **options, backend="triton")
    assert relative_error(found.cpu(), expected) < bound


@pytest.mark.parametrize("shape", FUSED_SHAPES.values(), ids=FUSED_SHAPES.keys())
def test_fused_is_the_recurrence(shape):
    check(inputs(shape), torch.float32, FLOAT32, chunk_size=16)


@pytest.mark.parametrize(
    ("product", "coefficients"),
    [("hermitian", "full"), ("real", "full"), ("bilinear", "diagonal"), ("real", "identity")],
)
def test_every_readout_is_the_recurrence(product, coefficients):
    check(inputs((1, 20, 4, 2, 3, 10, 7), coefficients), torch.float32, FLOAT32, product=product, chunk_size=16)


@pytest.mark.parametrize("coefficients", ["diagonal", pytest.param("identity", marks=pytest.mark.slow)])
def test_more_modes_than_a_program_holds_at_once(coefficients):
    """From 65 modes on these matrices go the way of a full one; gradients come back in the shape they have."""
    check(inputs((1, 20, 2, 1, 8, 8, 70), coefficients, decay=0.05), torch.float32, FLOAT32)


# The widest keep an interpreter busy for minutes.
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * x.endswith(("128", "_256"))) for x in WIDE_SHAPES]
)
def test_sizes_up_to_256(name):
    check(inputs(WIDE_SHAPES[name], decay=0.05), torch.float32, FLOAT32)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, FLOAT32), pytest.param(torch.bfloat16, 1e-2, marks=pytest.mark.slow)],
    ids=str,
)
def test_every_product_with_a_full_matrix(product, dtype, bound):
    """Packed documents of odd lengths, in one group the way of fast decays, in the other that of slow ones."""
    arguments = inputs((1, 37, 4, 2, 5, 10, 7), decay=0.1, rows=3)
    with torch.no_grad():
        arguments["log_decay"][0, 0, 0] = -5.0
    check(arguments, dtype, bound, product=product, chunk_size=16, cu_seqlens=torch.tensor([0, 3, 4, 37]))


MIXED = [("hermitian", "full", 4), ("bilinear", "full", 2), ("real", "full", 2), ("real", "diagonal", 2)]


def more_modes_than_fill_the_tiles(product, coefficients, heads):
    """Two documents, and both kinds of groups: arguments and options."""
    arguments = inputs((1, 21, heads, 2, 5, 40, 40), coefficients, decay=0.1, rows=2)
    with torch.no_grad():
        arguments["log_decay"][0, 0, 0] = -5.0
    return arguments, {"product": product, "chunk_size": 16, "cu_seqlens": torch.tensor([0, 19, 21])}


@pytest.mark.parametrize(
    ("product", "coefficients", "heads"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] == "hermitian")) for case in MIXED],
)
def test_the_mixing_matrix_in_small_and_large_tiles(product, coefficients, heads, monkeypatch):
    """What a GPU may choose for the output."""
    kernel = triton_module("_attend").attend

    def choose(edge):
        in_tiles = type("InTiles", (), {"__getitem__": lambda _, grid: functools.partial(kernel[grid], EDGE=edge)})()
        for name in ("_attend_few", "_attend_skewed"):
            monkeypatch.setattr(triton_module(), name, in_tiles)

    arguments, options = more_modes_than_fill_the_tiles(product, coefficients, heads)
    for edge in (32, 16):
        choose(edge)
        check_output(arguments, torch.bfloat16, 1e-2, **options)


@pytest.mark.parametrize(
    ("product", "coefficients", "heads"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] != "bilinear")) for case in MIXED],
)
def test_gradients_of_more_modes_than_fill_the_tiles(product, coefficients, heads):
    arguments, options = more_modes_than_fill_the_tiles(product, coefficients, heads)
    check(arguments, torch.bfloat16, 1e-2, **options)


@pytest.mark.parametrize("chunk_size", [1, 40, 1000])
def test_any_chunk_size_is_taken(chunk_size):
    check(inputs((1, 70, 2, 1, 8, 4, 5), decay=0.05), torch.float32, FLOAT32, chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("dtype", "bound", "coefficients"),
    [(torch.bfloat16, 1e-2, "full"), (torch.bfloat16, 1e-2, "diagonal"), (torch.float16, 1e-3, "full")],
    ids=str,
)
def test_low_precision(dtype, bound, coefficients):
    check(inputs((1, 70, 2, 2, 16, 16, 16), coefficients, decay=0.05), dtype, bound)


@pytest.mark.parametrize("modes", [None, pytest.param("s4d_inv", marks=pytest.mark.slow)])
def test_bfloat16_with_the_default_start(modes):
    """Keys that have much in common pull back what C, the inverse of a Gramian, takes away again: with a rounded mixing
    matrix output and gradients were wrong by a third and more. The bound is that of test_bfloat16.py; the parameters'
    gradients are sums over tokens of what cancels.
    """
    arguments = inputs((1, 70, 2, 2, 16, 16, 64))
    low = {name: arguments[name].detach().bfloat16() for name in ("query", "key", "value")}
    low["key"] = low["key"] + 2
    low |= parameters_of_the_default_start(64, modes)
    exact = {name: x.double().requires_grad_() for name, x in low.items()}
    expected = everything(exact, product="hermitian", backend="recurrent")
    low = {name: x.detach().to(DEVICE).requires_grad_() for name, x in low.items()}
    found = everything(low, product="hermitian", backend="triton")
    errors = {name: relative_error(found[name].cpu(), expected[name]) for name in expected}
    of_parameters = {name: error for name, error in errors.items() if name.endswith(("decay", "matrix"))}
    assert all(errors[name] < 4 * 2**-8 for name in set(errors) - set(of_parameters)), errors
    assert len(of_parameters) == 3 and max(of_parameters.values()) < 0.1, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_the_same_twice(dtype):
    """Bit for bit, with several programs that share the chunks of a head."""
    arguments = inputs((1, 40, 2, 1, 8, 8, 8), decay=0.05)
    low = cast(arguments, torch.float32) | cast({k: arguments[k] for k in ("query", "key", "value")}, dtype)
    low = {k: v.detach().to(DEVICE).requires_grad_() for k, v in low.items()}
    once, again = (everything(low, chunk_size=16, backend="triton") for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_tables_and_their_gradients_are_those_of_the_formulas():
    """Powers against float64, one group on either side of where the way changes; gradients of C against PyTorch's."""
    torch.manual_seed(0)  # of some numbers the second term rounds up to half a step of the first
    tables, mixing = (
        importlib.import_module(f"modeling_interdomain.ops.diagonal.{x}") for x in ("triton_tables", "mixing")
    )
    math = importlib.import_module("modeling_interdomain.ops.common.tiles").Arithmetic("float32", "ieee")
    rate = torch.tensor([[-0.9, -0.1, -1e-6], [-1.0, -40.0, 0.0]], device=DEVICE)
    log_decay = torch.stack([rate, 128 * torch.randn(2, 3, device=DEVICE)], dim=-1)
    beta, coefficients = torch.randn(2, 3, 2, device=DEVICE), torch.randn(2, 3, 3, 2, device=DEVICE)
    parameters = tables.Parameters(log_decay, beta, coefficients)
    made = tables.make_tables(parameters, "real", 64, torch.float32, math)
    assert made.skewed.tolist() == [0, 1]
    steps = torch.arange(64, device=DEVICE, dtype=torch.float64)[None, :, None]
    exact, wide = (torch.view_as_complex(x.double())[:, None] for x in (log_decay, beta))
    units = torch.stack([(exact[0] * (-steps[0] - 1)).exp(), (exact[1] * steps[0]).exp()])
    expected = {"powers": (exact * (steps + 1)).exp(), "units": units, "inputs": (exact * steps).exp() * wide}
    for name, value in (expected | {"intra": units * wide}).items():
        found = getattr(made, name)
        for part, wanted in ((0, value.real), (1, value.imag)):
            assert relative_error(found[:, :, part, :3], wanted) < 1e-6, name
        assert not found[..., 3:].any()
    grad = torch.zeros(2, 2, 2, *made.mixing.shape[2:], device=DEVICE)
    grad[..., :3, :3] = torch.randn(2, 2, 2, 3, 3, device=DEVICE)
    rows = torch.zeros(1, 2, 3, 2, made.powers.shape[-1], device=DEVICE)
    partial = tables.Partial(torch.zeros(1, 2, 2, *rows.shape[2:], device=DEVICE), rows, grad)
    found = tables.table_gradients(parameters, partial, "real", heads=2)
    grad = grad[..., :3, :3].permute(0, 3, 1, 4, 2).reshape(2, 6, 6).double()
    wanted = mixing.mixing_gradient(coefficients.double(), "real", grad)
    assert relative_error(found.coefficients, wanted) < 1e-6
    assert not found.log_decay.any() and not found.input_matrix.any()


@pytest.mark.parametrize("operand", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_the_mixing_matrix_is_written_down_in_blocks_or_as_a_complex_one(product, operand):
    torch.manual_seed(0)  # of some numbers the second term rounds up to half a step of the first
    tables, mixing = (
        importlib.import_module(f"modeling_interdomain.ops.diagonal.{x}") for x in ("triton_tables", "mixing")
    )
    math = importlib.import_module("modeling_interdomain.ops.common.tiles").arithmetic(operand)
    parameters = tables.Parameters(*(torch.randn(2, *shape, 2, device=DEVICE) for shape in ((3,), (3,), (3, 3))))
    planes = tables.make_tables(parameters, product, 16, operand, math).mixing
    written = tables.mixing_of(product, True, math)
    assert planes.dtype == operand and planes.shape[1] == written.TERMS * written.PLANES
    assert not planes[..., 3:, :].any() and not planes[..., 3:].any()
    terms = planes[..., :3, :3].double().unflatten(1, (written.TERMS, written.PLANES))
    planes, sign = terms.sum(1), written.SIGN
    assert torch.equal(terms[:, 0], planes.to(operand).double())  # the second is what rounding takes away
    if sign:
        less, more, b = planes.unbind(1)
        a = less + b
        assert relative_error(more, sign * (a + b)) < 2**-17
        planes = torch.stack([a, b, -sign * b, sign * a], dim=1)
    found = planes.unflatten(1, (2, 2)).permute(0, 3, 1, 4, 2).reshape(2, 6, 6)
    wanted = mixing.mixing_matrix(parameters.coefficients.double(), product, 2, 3, planes.double())
    assert (sign != 0) is (operand == torch.bfloat16 and product != "real")
    assert (2 if operand == torch.bfloat16 else 1) == written.TERMS
    assert relative_error(found, wanted) < (2**-17 if operand == torch.bfloat16 else 1e-6)


def test_low_precision_leaves_the_state_precise():
    arguments = {k: v.detach() for k, v in inputs((1, 300, 1, 1, 16, 16, 16), decay=0.01).items()}
    low = {k: v.bfloat16() if k in ("query", "key", "value") else v.float() for k, v in arguments.items()}
    _, expected = interdomain_attention(
        **{k: v.double() for k, v in low.items()}, output_final_state=True, backend="recurrent"
    )
    low = {k: v.to(DEVICE) for k, v in low.items()}
    _, state = interdomain_attention(**low, output_final_state=True, backend="triton")
    assert relative_error(state.cpu(), expected) < 1e-5


@pytest.mark.each_value
@pytest.mark.parametrize("extreme", [*EXTREMES.values(), {"decay": 0.9}, {"decay": 1.0}], ids=[*EXTREMES, "0.9", "1.0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_decay_is_right(extreme, dtype):
    """0.9 a token over 64 tokens is just short of e^60, 1.0 beyond: one group on each side of where the way changes."""
    draws = [inputs((1, 70, 2, 2, 4, 4, 5), **extreme, seed=seed) for seed in range(1 if dtype == torch.float32 else 2)]
    for arguments in draws if extreme.get("decay") in (0.9, 1.0) else ():
        with torch.no_grad():
            arguments["log_decay"][0, 0, 0] = -extreme["decay"]
            arguments["log_decay"][1, :, 0] *= 0.1
    check_absolute(draws, dtype, FLOAT32 if dtype == torch.float32 else 2e-2)


def check_absolute(draws, dtype, bound):
    """The gradient of a mode that is gone at once is zero but for rounding: those are compared in absolute terms.

    Of several draws the root mean square: what little is left of a sum that cancels has an error by chance.
    """
    squares = defaultdict(list)
    for arguments in draws:
        low = cast(arguments, torch.float32) | cast({k: arguments[k] for k in ("query", "key", "value")}, dtype)
        expected = everything(cast(low, torch.float64), backend="recurrent")
        low = {k: v.detach().to(DEVICE).requires_grad_() for k, v in low.items()}
        for name, value in everything(low, backend="triton").items():
            error = (value.cpu().double() - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)
            squares[name].append(error.item() ** 2)
    errors = {name: math.sqrt(statistics.mean(values)) for name, values in squares.items()}
    assert all(error < bound for error in errors.values()), errors


POSITIONAL = ("query", "key", "value", "log_decay", "input_matrix", "coefficient_matrix")


def fused_results(arguments, options, weights):
    """Output, final state and gradients of the kernels, for a loss on output and final state."""
    leaves = {k: v.detach().float().to(DEVICE).requires_grad_() for k, v in arguments.items() if v is not None}
    initial = leaves.get("initial_state")
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    positional = (*(leaves[name] for name in POSITIONAL), "bilinear", initial, options.pop("cu_seqlens", None), 16)
    output, state = triton_module().triton_attention(*positional, **options)
    return graded(leaves, output, state, weights)


def alone(arguments, places, weights):
    """The same from the recurrence in float64 on the tokens of each place (row, start, end) alone."""
    leaves = {k: v.detach().requires_grad_() for k, v in arguments.items() if v is not None}
    initial = leaves.get("initial_state")
    output, states = leaves["value"].new_zeros(*weights[0].shape), []
    for document, (row, start, end) in enumerate(places):
        state = None if initial is None else initial[document, None]
        if end > start:
            tokens = {name: leaves[name][row, None, start:end] for name in ("query", "key", "value")}
            parameters = {k: leaves.get(k) for k in ("log_decay", "input_matrix", "coefficient_matrix")}
            output[row, None, start:end], state = interdomain_attention(
                **tokens, **parameters, initial_state=state, output_final_state=True, backend="recurrent"
            )
        states.append(torch.zeros_like(weights[1][document, None]) if state is None else state)
    return graded(leaves, output, torch.cat(states), weights)


def graded(leaves, output, state, weights):
    loss = (output * weights[0].to(output)).sum()
    if state is not None:
        loss = loss + (state * weights[1].to(state)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"output": output, "state": state, **{f"grad of {k}": g for k, g in zip(leaves, grads)}}
    return {k: v.detach().cpu() for k, v in found.items() if v is not None}


def triton_module(part=""):
    return importlib.import_module(f"modeling_interdomain.ops.interdomain.triton{part}")


PLACES = {
    # name: (B, T, what the operator is given, the row, start and end of every document)
    "documents": (1, 33, {"cu_seqlens": [0, 1, 2, 18, 33]}, [(0, 0, 1), (0, 1, 2), (0, 2, 18), (0, 18, 33)]),
    "whole_chunks": (1, 33, {"cu_seqlens": [0, 16, 32, 33]}, [(0, 0, 16), (0, 16, 32), (0, 32, 33)]),
    "empty_documents": (
        1, 40, {"cu_seqlens": [0, 0, 3, 3, 3, 38, 40, 40]},
        [(0, 0, 0), (0, 0, 3), (0, 3, 3), (0, 3, 3), (0, 3, 38), (0, 38, 40), (0, 40, 40)],
    ),
    "lengths": (4, 20, {"lengths": [17, 0, 20, 1]}, [(0, 0, 17), (1, 0, 0), (2, 0, 20), (3, 0, 1)]),
}  # fmt: skip


def case_of(places, decay=0.2, initial=True):
    """Arguments with NaN at pads, options, places and the weights of the loss."""
    batch, length, options, places = PLACES[places]
    arguments = inputs((batch, length, 2, 1, 3, 10, 7), decay=decay, rows=len(places))
    generator = torch.Generator().manual_seed(1)
    shapes = (batch, length, 2, 10), arguments["initial_state"].shape
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    real = torch.zeros(batch, length, dtype=torch.bool)
    for row, start, end in places:
        real[row, start:end] = True
    with torch.no_grad():
        for name in ("query", "key", "value"):
            arguments[name][~real] = float("nan")
        weights[0][~real] = 0
    arguments["initial_state"] = arguments["initial_state"] if initial else None
    return arguments, {k: torch.tensor(v) for k, v in options.items()}, places, weights


@pytest.mark.parametrize(
    ("places", "initial"), [*((name, True) for name in PLACES), ("empty_documents", False), ("lengths", False)]
)
def test_documents_and_rows_are_as_if_alone(places, initial):
    """Outputs and gradients at pads are zero, whatever stands there; what has no token keeps its initial state."""
    arguments, options, places, weights = case_of(places, initial=initial)
    assert_close(fused_results(arguments, options, weights), alone(arguments, places, weights), FLOAT32)


def test_unused_ends_of_documents_change_nothing(monkeypatch):
    """A compiled graph gives as many ends as there are tokens; lanes then walk many documents, most of them empty."""
    monkeypatch.setattr(triton_module(), "_walkers", lambda *_: 3)
    arguments, options, places, weights = case_of("documents", initial=False)
    many = torch.nn.functional.pad(options["cu_seqlens"], (0, 29), value=33)
    found = fused_results(arguments, {"cu_seqlens": many, "output_final_state": False}, weights)
    weights[1].zero_()
    expected = alone(arguments, places, weights)
    del expected["state"]
    assert_close(found, expected, FLOAT32)


@pytest.mark.parametrize(("segments", "places"), [(2, "lengths"), (3, "empty_documents"), (3, None), (7, None)])
def test_rows_cut_into_segments(segments, places, monkeypatch):
    """What a GPU with more room than rows and groups does; where chunks are fewer, some segments are empty."""
    monkeypatch.setattr(triton_module(), "_segments", lambda *_: segments)
    if places is None:
        check(inputs((1, 70, 2, 1, 4, 4, 4), decay=0.02), torch.float32, FLOAT32, chunk_size=16)
        return
    arguments, options, places, weights = case_of(places, decay=0.02)
    assert_close(fused_results(arguments, options, weights), alone(arguments, places, weights), FLOAT32)


class NoNumbers(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses what would make the host wait for a number of the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "unique", "masked_select")), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("places", ["empty_documents", "lengths"])
def test_no_length_is_read_by_the_host(places, monkeypatch):
    arguments, options, _, _ = case_of(places)
    module, prepare = triton_module(), triton_module("_prepare")
    made = importlib.import_module("modeling_interdomain.ops.diagonal.triton_tables")
    silent = defaultdict(lambda: lambda *args, **kwargs: None)
    for owner in (module, prepare, made):
        for name, kernel in list(vars(owner).items()):
            if name.startswith("_") and isinstance(kernel, triton.runtime.KernelInterface):
                monkeypatch.setattr(owner, name, silent)
    arguments = {k: v.detach().float() for k, v in arguments.items()}
    initial, tokens = arguments.pop("initial_state"), [arguments.pop(name) for name in ("query", "key", "value")]
    parameters = made.Parameters(*arguments.values())
    documents = options.get("cu_seqlens"), options.get("lengths")
    taps = torch.ones(6, 4), torch.ones(3, 4)
    ids = None if documents[0] is None else document_of_tokens(documents[0], tokens[0].shape[1])
    with NoNumbers():
        shared = *tokens, *parameters, initial, *documents, "bilinear", 16, False, True
        module._backward(shared, module._forward(*shared), [True] * 7)
        prepare._operator.registered._init_fn(
            *(x.flatten(2) for x in tokens), *taps, *(None,) * 8, ids, *documents, 2, 1, "none", 1e-6, True
        )
    with pytest.raises(AssertionError), NoNumbers():
        int(options.popitem()[1].max())


@pytest.mark.parametrize(
    ("lanes", "chunks", "processors", "expected"),
    [(256, 64, 132, 1), (12, 1024, 132, 1), (2, 1024, 132, 16), (1, 9, 132, 1)],
)
def test_rows_are_cut_where_the_device_would_idle(lanes, chunks, processors, expected, monkeypatch):
    module = triton_module()
    monkeypatch.setattr(module, "multiprocessors", lambda device: processors)
    assert module._segments(lanes, chunks, torch.device("cpu")) == expected


def test_normalised_readout():
    arguments = inputs((1, 20, 4, 2, 5, 7, 6), normalize=True, seed=3)
    # Where a denominator comes near zero the quotient is steep: 1e-3 is what float32 leaves of it.
    check(arguments, torch.float32, 1e-3, normalize=True, chunk_size=16)


def test_without_a_state_or_a_gradient():
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs(FUSED_SHAPES["odd_sizes"]).items()}
    del arguments["initial_state"]
    output, state = interdomain_attention(**arguments, backend="triton")
    expected, _ = interdomain_attention(**{k: v.cpu().double() for k, v in arguments.items()}, backend="recurrent")
    assert state is None and relative_error(output.cpu(), expected) < FLOAT32


def test_gradients_of_some_inputs_alone():
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs((1, 18, 2, 1, 4, 4, 4)).items()}
    wide = {k: v.cpu().double() for k, v in arguments.items()}
    for name in arguments:
        grads = []
        for tensors, backend in ((wide, "recurrent"), (arguments, "triton")):
            leaf = tensors[name].clone().requires_grad_()
            output, _ = interdomain_attention(**(tensors | {name: leaf}), backend=backend)
            grads.append(torch.autograd.grad(output.square().sum(), leaf)[0].cpu())
        assert relative_error(grads[1], grads[0]) < 10 * FLOAT32, name


def test_strided_inputs():
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs(FUSED_SHAPES["one_chunk_exactly"]).items()}
    expected, _ = interdomain_attention(**arguments, backend="triton")
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    found, _ = interdomain_attention(**arguments, backend="triton")
    assert torch.equal(found, expected)


def test_the_operator_is_sound():
    """What torch.library checks: schema, fake implementation, autograd registration."""
    module = triton_module()
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs((1, 20, 2, 1, 4, 4, 4)).items()}
    tokens = [arguments[name].requires_grad_() for name in ("query", "key", "value")]
    rest = [arguments[name] for name in (*POSITIONAL[3:], "initial_state")]
    torch.library.opcheck(
        module._operator.registered,
        (*tokens, *rest, None, None, "bilinear", 16, False, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


@pytest.mark.parametrize("places", ["empty_documents", pytest.param("lengths", marks=pytest.mark.slow)])
def test_one_graph_for_three_lengths(places):
    """Forward and backward of rows with pads or documents whose ends the graph does not know."""
    counter = CompileCounterWithBackend("aot_eager")
    batch, _, options, documents = PLACES[places]
    ((name, ends),) = options.items()
    attention = triton_module().triton_attention

    def run(arguments, ends):
        tokens, initial = list(arguments.values())[:6], arguments["initial_state"]
        packed, padded = (ends, None) if name == "cu_seqlens" else (None, ends)
        output, state = attention(*tokens, "bilinear", initial, packed, 16, lengths=padded)
        return output.sum() + state.square().sum()

    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    for length in (18, 19, 21):
        arguments = inputs((batch, length, 2, 1, 4, 4, 4), rows=len(documents))
        arguments = {k: v.detach().float().to(DEVICE).requires_grad_() for k, v in arguments.items()}
        here = torch.tensor([min(end, length) for end in ends], device=DEVICE)
        found = torch.autograd.grad(compiled(arguments, here), list(arguments.values()))
    expected = torch.autograd.grad(run(arguments, here), list(arguments.values()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("shape", ["odd_length", "odd_sizes", "one_mode"])
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_step_is_the_recurrence(shape, coefficients, product):
    arguments = inputs(SHAPES[shape], coefficients)
    arguments = {k: None if v is None else v.detach().float() for k, v in arguments.items()}
    state = arguments.pop("initial_state")
    token = {name: arguments.pop(name)[:, 0] for name in ("query", "key", "value")}
    mask = torch.arange(state.shape[0]) > 0 if state.shape[0] > 1 else None
    wide = {k: None if v is None else v.double() for k, v in (token | arguments).items()}
    expected_state = state.double()
    expected = interdomain_step(**wide, state=expected_state, product=product, mask=mask)
    state = state.to(DEVICE)
    address = state.data_ptr()
    low = {k: None if v is None else v.to(DEVICE) for k, v in (token | arguments).items()}
    mask = None if mask is None else mask.to(DEVICE)
    found = interdomain_step(**low, state=state, product=product, mask=mask, backend="triton")
    assert state.data_ptr() == address
    assert relative_error(found.cpu(), expected) < FLOAT32
    assert relative_error(state.cpu(), expected_state) < FLOAT32


def test_a_step_with_a_normalised_readout_and_a_bfloat16_state():
    arguments = {k: v.detach().float() for k, v in inputs(SHAPES["odd_length"], normalize=True).items()}
    state = arguments.pop("initial_state").bfloat16()
    token = {name: arguments.pop(name)[:, 0].bfloat16() for name in ("query", "key", "value")}
    expected_state = state.clone().float()
    expected = interdomain_step(**token, **arguments, state=expected_state, normalize=True)
    found = interdomain_step(
        **{k: v.to(DEVICE) for k, v in (token | arguments).items()},
        state=(state := state.to(DEVICE)), normalize=True, backend="triton",
    )  # fmt: skip
    assert found.dtype == state.dtype == torch.bfloat16
    assert relative_error(found.cpu(), expected) < 1e-2 and relative_error(state.cpu(), expected_state) < 1e-2


@pytest.mark.parametrize("mask", [torch.tensor([1, 0, 256, 0]), torch.tensor([True, False, False, True] * 2)[::2]])
def test_a_step_reads_any_mask_and_writes_any_state(mask):
    arguments = {k: v.detach().float() for k, v in inputs((4, 1, 2, 1, 4, 4, 3)).items()}
    state = arguments.pop("initial_state")
    token = [arguments.pop(name)[:, 0] for name in ("query", "key", "value")]
    expected_state = state.double()
    wide = [x.double() for x in (*token, *arguments.values())]
    expected = interdomain_step(*wide, state=expected_state, mask=mask.bool().contiguous())
    strided = state.to(DEVICE).transpose(3, 4).contiguous().transpose(3, 4)
    low = [x.to(DEVICE) for x in (*token, *arguments.values())]
    found = triton_module("_step").triton_step(*low, strided, "bilinear", mask.to(DEVICE), False)
    assert relative_error(found.cpu(), expected) < FLOAT32 and relative_error(strided.cpu(), expected_state) < FLOAT32


@pytest.mark.parametrize("slots", ["apart", "pads"])
@pytest.mark.parametrize(
    ("product", "coefficients", "normalize"),
    [("bilinear", "full", False), ("hermitian", "diagonal", True), ("real", "identity", False)],
)
def test_a_step_of_slots_is_that_of_their_rows(product, coefficients, normalize, slots):
    step, state = one_token(4, coefficients, product, normalize, DEVICE, torch.float32)
    check_step_of_slots(step, state, SLOTS[slots], FLOAT32, backend="triton")


def test_the_step_of_slots_is_sound():
    """What torch.library checks: schema, fake implementation, autograd registration; with slots that lie apart."""
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs((2, 1, 2, 1, 4, 4, 3)).items()}
    state = arguments.pop("initial_state")
    token = [arguments.pop(name)[:, 0] for name in ("query", "key", "value")]
    pool = torch.zeros(2, state[0].numel() + 5, device=DEVICE)[:, :-5].unflatten(1, state.shape[1:])
    slots = torch.tensor([1, -1], device=DEVICE)
    tests = {"test_utils": ("test_schema", "test_faketensor", "test_autograd_registration")}
    given = *token, *arguments.values(), pool, "bilinear", None, False, slots
    torch.library.opcheck(triton_module("_step").triton_step, given, **tests)


PREPARATIONS = {
    # name: (B, T, H, G, R, D, K, rope placement, rotated dimensions, norm, window, cu_seqlens or lengths)
    "plain": (2, 20, 2, 2, 8, 8, 4, None, None, True, False, {}),
    "one_token": (2, 1, 2, 2, 8, 8, 4, None, None, True, True, {}),
    "rope_before": (2, 7, 4, 2, 6, 10, 4, "before", 6, True, True, {}),
    "rope_after": (2, 20, 2, 1, 6, 10, 4, "after", 4, True, False, {}),
    "packed": (1, 33, 3, 3, 6, 5, 4, "after", 4, True, True, {"cu_seqlens": [0, 1, 3, 18, 33]}),
    "no_norm": (1, 33, 3, 1, 6, 5, 3, None, None, False, False, {"cu_seqlens": [0, 2, 17, 33]}),
    "empty_documents": (1, 20, 2, 1, 6, 5, 4, "after", 4, True, True, {"cu_seqlens": [0, 0, 1, 1, 18, 18, 20, 20]}),
    "empty_without_windows": (1, 5, 2, 1, 6, 5, 3, None, None, True, False, {"cu_seqlens": [0, 0, 1, 5, 5]}),
    "padded": (4, 7, 2, 1, 6, 5, 4, "before", 6, True, True, {"lengths": [7, 0, 2, 6]}),
    "padded_without_windows": (3, 6, 2, 1, 6, 5, 4, "after", 4, False, False, {"lengths": [2, 0, 5]}),
    "two_taps": (1, 18, 40, 1, 16, 5, 2, None, None, True, True, {}),
    "no_convolution": (2, 5, 2, 2, 8, 8, 1, None, None, True, False, {"lengths": [3, 5]}),
}


def convolve(x, taps, window):
    """Outputs and the new window of one row `[T, W]` after `[W, K - 1]` older inputs."""
    seen = torch.cat([window.T, x])
    kernel = taps.shape[1]
    return sum(seen[k : k + len(x)] * taps[:, k] for k in range(kernel)), seen[len(seen) - kernel + 1 :].T


def rotated(x, cos, sin):
    """The first columns of `[T, heads, width]` rotated by the angles of `[T, dim]`."""
    dim = cos.shape[-1]
    first, second = x[..., : dim // 2], x[..., dim // 2 : dim]
    turned = x[..., :dim] * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return torch.cat([turned, x[..., dim:]], dim=-1)


@pytest.mark.parametrize("case", PREPARATIONS.values(), ids=PREPARATIONS.keys())
def test_the_preparation_of_inputs(case):
    """Every row or document alone, in float64; pads hold NaN."""
    from modeling_interdomain.ops.interdomain.triton_prepare import triton_prepare

    batch, length, heads, groups, feature_dim, value_dim, kernel, placement, dim, norm, window, where = case
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    ends, lengths = where.get("cu_seqlens"), where.get("lengths", [length] * batch)
    places = [(row, 0, n) for row, n in enumerate(lengths)]
    if ends is not None:
        places = [(0, start, end) for start, end in pairwise(ends)]
    real = torch.zeros(batch, length, dtype=torch.bool)
    for row, start, end in places:
        real[row, start:end] = True
    widths = heads * feature_dim, groups * feature_dim
    leaves = [normal(batch, length, w) for w in (*widths, groups * value_dim)]
    for x in leaves:
        x[~real] = float("nan")
    leaves += [normal(w, kernel) for w in widths]
    if norm:
        leaves += [normal(feature_dim), normal(value_dim), normal(groups, feature_dim), normal(groups, value_dim)]
    windows = [normal(len(places), w, kernel - 1) for w in widths] if window else None
    angles = None if placement is None else normal(batch, length, dim // 2).repeat(1, 1, 2)
    cos_sin = None if placement is None else (angles.cos(), angles.sin())

    def reference(q, k, v, q_taps, k_taps, *norms):
        shapes = (heads, feature_dim), (groups, feature_dim), (groups, value_dim)
        outputs = [q.new_zeros(batch, length, *shape) for shape in shapes]
        new_windows = [[], []]
        for document, (row, start, end) in enumerate(places):
            for side, (x, taps) in enumerate(((q, q_taps), (k, k_taps))):
                before = windows[side][document] if windows else x.new_zeros(x.shape[2], kernel - 1)
                found, after = convolve(x[row, start:end], taps, before)
                new_windows[side].append(after)
                found = found.unflatten(-1, (-1, feature_dim))
                here = None if placement is None else tuple(x[row, start:end] for x in cos_sin)
                found = rotated(found, *here) if placement == "before" else found
                found = torch.nn.functional.normalize(torch.nn.functional.silu(found), dim=-1)
                outputs[side][row, start:end] = rotated(found, *here) if placement == "after" else found
            outputs[2][row, start:end] = v[row, start:end].unflatten(-1, (groups, value_dim))
            for side, (weight, bias) in enumerate(zip(norms[:2], norms[2:]), start=1):
                x = outputs[side][row, start:end].clone()
                outputs[side][row, start:end] = torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6) + bias
        return outputs, [torch.stack(x) for x in new_windows]

    wide = [x.clone().requires_grad_() for x in leaves]
    expected, expected_windows = reference(*wide)
    weights = [normal(*x.shape) * real[..., None, None] for x in expected]
    expected_grads = torch.autograd.grad(sum((x * w).sum() for x, w in zip(expected, weights)), wide)

    def low(tensors):
        return None if tensors is None else tuple(x.float().to(DEVICE) for x in tensors)

    narrow = [x.float().to(DEVICE).requires_grad_() for x in leaves]
    packed = (None, None)
    if ends is not None:
        packed = (x.int().to(DEVICE) for x in (document_of_tokens(torch.tensor(ends), length), torch.tensor(ends)))
    found, found_windows = triton_prepare(
        *narrow[:3], tuple(narrow[3:5]), tuple(narrow[5:]) or None, low(windows), low(cos_sin), *packed,
        heads, groups, placement, 1e-6, True,
        lengths=torch.tensor(lengths, device=DEVICE) if "lengths" in where else None,
    )  # fmt: skip
    loss = sum((x * w.float().to(DEVICE)).sum() for x, w in zip(found, weights))
    grads = torch.autograd.grad(loss, narrow)
    for a, b in zip((*found, *found_windows, *grads), (*expected, *expected_windows, *expected_grads), strict=True):
        assert b.numel() == 0 or relative_error(a.cpu(), b) < 2e-6


@pytest.mark.parametrize("name", ["interdomain", "grouped", "rope-before", "rope-after", "normalized", "gated"])
def test_a_model_on_fused_kernels(make_model, random_ids, name):
    """Logits, gradients, a prefill in pieces and decoding, against the same model in float64 without kernels."""
    reference = make_model(name, num_hidden_layers=1, token_mixers="interdomain")
    model = make_model(
        name, num_hidden_layers=1, token_mixers="interdomain", dtype=torch.float32, backend="triton",
        state_dtype="float32", chunk_size=16,
    ).to(DEVICE)  # fmt: skip
    ids = random_ids(1, 9)
    expected = reference(ids, labels=ids)
    found = model(ids.to(DEVICE), labels=ids.to(DEVICE))
    bound = 1e-3 if name == "normalized" else 1e-4
    assert relative_error(found.logits.cpu(), expected.logits) < bound
    expected.loss.backward()
    found.loss.backward()
    for (parameter_name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative_error(a.grad.cpu(), b.grad) < 20 * bound, parameter_name
    cache, pieces = None, []
    with torch.no_grad():
        for piece in ids.to(DEVICE).split([6, 2, 1], dim=1):
            output = model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            pieces.append(output.logits)
    assert relative_error(torch.cat(pieces, dim=1).cpu(), expected.logits) < bound


def test_gradient_checkpointing_changes_nothing(make_model, random_ids):
    options = {"dtype": torch.float32, "backend": "triton", "state_dtype": "float32"}
    model = make_model("interdomain", num_hidden_layers=1, **options).to(DEVICE).train()
    ids = random_ids(1, 5).to(DEVICE)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_padded_batch_on_fused_kernels(make_model, left_padded):
    reference = make_model("interdomain", num_hidden_layers=1)
    options = {"dtype": torch.float32, "backend": "triton", "state_dtype": "float32", "chunk_size": 16}
    model = make_model("interdomain", num_hidden_layers=1, **options).to(DEVICE)
    batch = left_padded([3, 17, 9])
    mask = batch["attention_mask"].bool()
    expected = reference(**batch).logits[mask]
    found = model(**{k: v.to(DEVICE) for k, v in batch.items()}).logits.cpu()[mask]
    assert relative_error(found, expected) < 1e-4


def test_a_wrapped_convolution_is_not_bypassed(make_model, random_ids):
    """A hook, an adapter or a quantised layer in place of our module must be called."""
    options = {"dtype": torch.float32, "backend": "triton", "state_dtype": "float32"}
    model = make_model("interdomain", num_hidden_layers=1, **options).to(DEVICE)
    ids = random_ids(1, 6).to(DEVICE)
    before = model(ids).logits
    model.model.layers[0].token_mixer.q_conv.register_forward_hook(lambda module, args, output: 0 * output + 1)
    assert not torch.allclose(model(ids).logits, before)


def test_triton_in_float64_is_refused():
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .*float64"):
        interdomain_attention(**{k: v.to(DEVICE) for k, v in inputs(SHAPES["short"]).items()}, backend="triton")


def test_heads_too_wide_are_refused():
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs((1, 2, 1, 1, 4, 300, 4)).items()}
    with pytest.raises(ValueError, match=r"up to 256 .* one of these is 300"):
        interdomain_attention(**arguments, backend="triton")


@pytest.fixture
def no_kernels(monkeypatch):
    """As if this machine had no GPU and no interpreter, and nothing had run."""
    monkeypatch.setattr(op_common_launch, "interpreted", lambda: False)
    monkeypatch.setattr(op_common_launch, "_succeeded", set())


@pytest.mark.skipif(on_gpu, reason="On a GPU the kernels do run.")
def test_triton_without_a_gpu_is_refused(no_kernels):
    arguments = cast(inputs(SHAPES["short"]), torch.float32)
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: its kernels need tensors on a GPU"):
        interdomain_attention(**arguments, backend="triton")


@pytest.fixture
def no_launch_yet(monkeypatch):
    """As if this process had launched nothing, with kernels that may run on any device but the CPU."""
    monkeypatch.setattr(op_common_launch, "interpreted", lambda: True)
    monkeypatch.setattr(op_common_launch, "_WITHOUT_KERNELS", ("cpu",))
    monkeypatch.setattr(op_common_launch, "_succeeded", set())
    monkeypatch.setattr(op_common_launch, "_failed", {})
    op_common_launch._say_once.cache_clear()


class Launches:
    """Stands for the launch of a kernel; fails where it is told to, and counts."""

    def __init__(self, error=None):
        self.error, self.count = error, 0

    def __call__(self):
        self.count += 1
        if self.error is not None:
            raise self.error
        return self.count


def somewhere(*shape, dtype=torch.float32):
    return [torch.empty(*shape, dtype=dtype, device="meta")]


def test_a_failing_kernel_is_said_once_and_another_way_runs(no_launch_yet, caplog):
    run = Launches(RuntimeError("no C compiler"))
    with caplog.at_level(logging.WARNING):
        for length in (5, 7):  # a length makes no other kind
            assert op_common_launch.fused("auto", somewhere(1, length, 2, 4), 4, run) is None
    assert run.count == 1 and caplog.text.count("without its fused kernels") == 1 and "no C compiler" in caplog.text


@pytest.mark.parametrize(
    "other",
    [
        {"entry": "step"},
        {"widths": (64, 64, 128)},
        {"tensors": somewhere(1, 5, 2, 4, dtype=torch.bfloat16)},
    ],
    ids=["entry", "modes", "dtype"],
)
def test_a_failed_launch_counts_for_its_own_kind(no_launch_yet, other, caplog):
    problem = {"tensors": somewhere(1, 5, 2, 4), "widths": (64, 64, 64), "entry": "attention"}
    assert op_common_launch.fused("auto", **problem, run=Launches(RuntimeError("out of registers"))) is None
    works = Launches()
    assert op_common_launch.fused("auto", **problem, run=works) is None and works.count == 0
    assert op_common_launch.fused("auto", **(problem | other), run=works) == 1


def test_asking_for_triton_tries_again_and_raises_its_own_error(no_launch_yet):
    problem = {"tensors": somewhere(1, 5, 2, 4), "widths": 4}
    assert op_common_launch.fused("auto", **problem, run=Launches(RuntimeError("the first"))) is None
    with pytest.raises(KeyError, match="the second"):
        op_common_launch.fused("triton", **problem, run=Launches(KeyError("the second")))
    assert op_common_launch.fused("triton", **problem, run=Launches()) == 1


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_after_a_success_an_error_is_an_error(no_launch_yet, backend):
    problem = {"tensors": somewhere(1, 5, 2, 4), "widths": 4}
    assert op_common_launch.fused(backend, **problem, run=Launches()) == 1
    with pytest.raises(RuntimeError, match="illegal memory access"):
        op_common_launch.fused("auto", **problem, run=Launches(RuntimeError("illegal memory access")))
    assert op_common_launch.fused("auto", **problem, run=Launches()) == 1


def test_ranks_do_not_part_in_silence(no_launch_yet):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    problem = {"tensors": somewhere(1, 5, 2, 4), "widths": 4}
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for _ in range(2):  # a failure that is known already too
            with pytest.raises(RuntimeError, match=r"on this rank .*no C compiler.* backend='chunk' on all ranks"):
                op_common_launch.fused("auto", **problem, run=Launches(RuntimeError("no C compiler")))
    finally:
        torch.distributed.destroy_process_group()


def test_a_known_failure_is_known_to_a_compiled_graph(no_launch_yet):
    problem = {"tensors": somewhere(1, 5, 2, 4), "widths": (4, 4, 4)}

    def run():
        return torch.ones(3)

    def graph(x):
        found = op_common_launch.fused("auto", **problem, run=run)
        return x if found is None else x + found

    compiled = torch.compile(graph, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.zeros(3)), torch.ones(3))
    torch._dynamo.reset()
    op_common_launch.fused("auto", **problem, run=Launches(RuntimeError("no C compiler")))
    assert torch.equal(compiled(torch.zeros(3)), torch.zeros(3))


def test_a_half_written_state_is_never_gone_on_from(no_launch_yet, monkeypatch):
    """The second kernel of a step fails for the first time: the state holds the token's key already."""
    step = triton_module("_step")
    arguments = {k: v.detach().float().to(DEVICE) for k, v in inputs(SHAPES["short"]).items()}
    state = arguments.pop("initial_state")
    token = [arguments.pop(name)[:, 0] for name in ("query", "key", "value")]

    def run():
        return step.triton_step(*token, *arguments.values(), state, "bilinear", None, False)

    monkeypatch.setattr(step, "_step_values", defaultdict(lambda: lambda *_, **__: Launches(RuntimeError("too big"))()))
    with pytest.raises(op_common_launch.StateTouched, match="too big"):
        op_common_launch.fused("auto", somewhere(1, 2, 4), 4, run, entry="step")


def test_everything_else_works_without_triton():
    """A clean process in which `import triton` fails."""
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, interdomain_attention
        sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        model = InterdomainForCausalLM(InterdomainConfig(**sizes, state_size=4))
        model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
        x = torch.randn(1, 3, 2, 4)
        try:
            interdomain_attention(x, x, x, torch.zeros(2, 4, 2), torch.zeros(2, 4, 2), backend="triton")
        except ValueError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed (pip install triton)" in done.stdout


@pytest.mark.each_value
@pytest.mark.parametrize("boundaries", [None, [0, 5, 5, 6, 19, 19]])
@pytest.mark.parametrize(
    ("extreme", "coefficients"),
    [(None, "diagonal"), (None, "identity"), *((x, "full") for x in (None, *list(EXTREMES)[:3]))],
)
def test_the_sequential_scan_equals_the_definition(extreme, coefficients, boundaries):
    """Segments of 8 tokens: with decays that the inverse recurrence survives, and with some that it does not."""
    attention = triton_module("_scan").triton_scan_attention
    places = [(0, *ends) for ends in pairwise(boundaries)] if boundaries else [(0, 0, 19), (1, 0, 19)]
    shape = (1 if boundaries else 2, 19, 4, 2, 5, 10, 7)
    arguments = inputs(shape, coefficients, rows=len(places), **EXTREMES.get(extreme, {}))
    generator = torch.Generator().manual_seed(1)
    shapes = (*shape[:3], shape[5]), arguments["initial_state"].shape
    weights = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    expected = alone(arguments, places, weights)
    leaves = {k: v.detach().float().to(DEVICE).requires_grad_() for k, v in arguments.items() if v is not None}
    positional = (*(leaves.get(name) for name in POSITIONAL), "bilinear", leaves["initial_state"])
    found = graded(leaves, *attention(*positional, boundaries or [0, 19], 8), weights)
    for name, value in expected.items():
        error = (found[name].double() - value).norm() / value.norm().clamp(min=1e-12)
        assert error < 2e-5, (name, error)
