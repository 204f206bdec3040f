"""The selective scan: chunks against the definition in float64, outputs, states and every gradient."""

import functools

import pytest
import torch
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from modeling_interdomain.ops.common import slots as op_common_slots
from modeling_interdomain.ops.selective_scan import chunk as op_selective_scan_chunk
from modeling_interdomain.ops.selective_scan.entry import scan_state_after, selective_scan, selective_scan_step
from tests import decay_checks
from tests.decay_checks import assert_close, check_documents, check_dynamic_graph, check_pads
from tests.operator_checks import SLOTS, check_bad_slots, check_step_of_slots

NAMES = ("query", "key", "value", "step", "rate", "skip", "initial_state")
SHAPES = {
    # name: (B, T, E, N)
    "one_token": (2, 1, 3, 4),
    "odd_length": (2, 63, 5, 6),
    "one_channel": (1, 130, 1, 5),
    "three_rows": (3, 130, 4, 1),
}
STEPS = {"none": 0.0, "hardly_any": 1e-9, "usual": 0.3, "gone_at_once": 1e4, "mixed": None}


def arguments(shape, steps="usual", dtype=torch.float64, rows=None, seed=0):
    batch, length, channels, size = SHAPES.get(shape, shape)
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    sizes = 10.0 ** (2 * normal(batch, length, channels)) if STEPS[steps] is None else STEPS[steps]
    tensors = (
        normal(batch, length, size),
        normal(batch, length, size),
        normal(batch, length, channels),
        sizes * torch.rand(batch, length, channels, generator=generator, dtype=torch.float64),
        -normal(size, channels).exp(),
        normal(channels),
        normal(rows or batch, size, channels),
    )
    return {name: x.to(dtype).requires_grad_() for name, x in zip(NAMES, tensors, strict=True)}


everything = functools.partial(decay_checks.everything, selective_scan)


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize(("shape", "steps"), [*((s, "usual") for s in SHAPES), *(("odd_length", d) for d in STEPS)])
def test_equals_the_definition(shape, steps, chunk_size):
    leaves = arguments(shape, steps)
    expected = everything(leaves, backend="recurrent")
    assert_close(everything(leaves, chunk_size=chunk_size), expected)
    del leaves["initial_state"], leaves["skip"]
    assert_close(everything(leaves, chunk_size=chunk_size), everything(leaves, backend="recurrent"))


@pytest.mark.parametrize("floats", [0, 1 << 18])
def test_documents_and_pads(monkeypatch, floats):
    """Packed documents, empty ones among them, and padded rows one by one and together; pads are not read."""
    monkeypatch.setitem(op_selective_scan_chunk._FLOATS, "cpu", floats)
    check_documents(selective_scan, arguments((1, 41, 3, 5), rows=6))
    check_pads(selective_scan, arguments((3, 33, 3, 5)))


def test_pieces_and_steps_are_the_whole():
    leaves = {name: x.detach() for name, x in arguments((2, 30, 3, 5)).items()}
    expected, final = selective_scan(**leaves, output_final_state=True, chunk_size=8)
    state, rate, skip = leaves.pop("initial_state"), leaves.pop("rate"), leaves.pop("skip")
    tokens = tuple(leaves.values())
    mask = torch.ones(2, 30, dtype=torch.bool)
    torch.testing.assert_close(scan_state_after(state, *tokens[1:], rate, mask), final)
    nothing = scan_state_after(state, *(x[:, :0] for x in tokens[1:]), rate, mask[:, :0])
    assert torch.equal(nothing, state) and nothing is not state
    options = {"skip": skip, "output_final_state": True}
    first, state = selective_scan(*(x[:, :11] for x in tokens), rate, initial_state=state, **options)
    second, state = selective_scan(*(x[:, 11:25] for x in tokens), rate, initial_state=state, **options)
    rest = [
        selective_scan_step(*(x[:, t] for x in tokens), rate, state=state, skip=skip)[:, None] for t in range(25, 30)
    ]
    torch.testing.assert_close(torch.cat([first, second, *rest], dim=1), expected)
    torch.testing.assert_close(state, final)
    kept = state.clone()
    output = selective_scan_step(*(x[:, 0] for x in tokens), rate, state=state, skip=skip, mask=torch.tensor([1, 0]))
    assert torch.equal(state[1], kept[1]) and not output[1].any() and not torch.equal(state[0], kept[0])


def one_token(rows, skips=True, device="cpu", dtype=torch.float64):
    """A step of so many rows, and their states."""
    leaves = {k: x.detach().to(device, dtype) for k, x in arguments((rows, 1, 3, 5)).items()}
    state, rate, skip = leaves.pop("initial_state"), leaves.pop("rate"), leaves.pop("skip") if skips else None
    tokens = [leaves[name][:, 0] for name in NAMES[:4]]
    return functools.partial(selective_scan_step, *tokens, rate, skip=skip), state


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("skips", [False, True])
def test_a_step_of_slots_is_that_of_their_rows(skips, slots, large, monkeypatch):
    monkeypatch.setattr(op_common_slots, "_LARGE", 0 if large else 1 << 16)
    step, state = one_token(4, skips)
    check_step_of_slots(step, state, SLOTS[slots], 1e-10)


def test_bad_slots_are_named():
    check_bad_slots(*one_token(1))


def test_a_state_of_lower_precision_is_advanced_in_float32():
    leaves = {name: x.detach().float() for name, x in arguments((2, 1, 3, 5)).items()}
    low = leaves.pop("initial_state").bfloat16()
    high, rate, skip = low.float(), leaves.pop("rate"), leaves.pop("skip")
    tokens = [x[:, 0] for x in leaves.values()]
    torch.testing.assert_close(*(selective_scan_step(*tokens, rate, state=state, skip=skip) for state in (low, high)))
    assert torch.equal(low, high.bfloat16())


def test_equals_the_scan_of_transformers():
    leaves = {name: x.detach().float() for name, x in arguments((2, 70, 6, 16)).items()}
    del leaves["initial_state"]
    query, key, value, step, rate, skip = leaves.values()
    theirs = mamba_selective_scan(
        *(value.mT, step.mT, rate.T, key.mT, query.mT), D=skip, return_last_state=True, use_associative_scan=False
    )
    for a, b in zip(selective_scan(**leaves, output_final_state=True), theirs, strict=True):
        assert (a - b.mT).norm() / b.norm() < 1e-5


def test_half_precision_and_autocast_are_computed_in_float32():
    leaves = arguments((2, 70, 8, 16), dtype=torch.float32)
    expected = everything(leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = everything(leaves)
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    wide = {name: leaves[name].detach() for name in ("step", "rate", "initial_state")}
    low = {name: x.detach().bfloat16() for name, x in leaves.items()} | wide
    output, state = selective_scan(**low, output_final_state=True)
    exact, final = selective_scan(
        **{k: x.double() for k, x in low.items()}, output_final_state=True, backend="recurrent"
    )
    assert output.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert (output - exact).norm() / exact.norm() < 5e-3 and (state - final).norm() / final.norm() < 2e-6


def test_what_is_kept_for_backward_are_the_states_before_chunks():
    """Beside the arguments, `T / C` states; nothing where no gradient is asked for."""
    leaves = arguments((2, 100, 3, 5))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        selective_scan(**leaves, chunk_size=16)
    assert [x.shape for x in saved if x.ndim == 4] == [(2, 7, 5, 3)]
    tensors = (leaves[name].detach() for name in NAMES[:5])
    unkept = op_selective_scan_chunk._operator(*tensors, None, None, 16, False, False)[2]
    assert unkept.numel() == 0


@pytest.mark.parametrize("kind", ["rows", "documents", "lengths"])
def test_one_dynamic_graph_serves_every_length(kind):
    check_dynamic_graph(selective_scan, lambda length: arguments((1, length, 4, 5)), kind)


def test_an_exported_graph_serves_every_batch_and_length():
    class Module(torch.nn.Module):
        def forward(self, query, key, value, step, rate, initial_state, lengths):
            return selective_scan(
                query, key, value, step, rate, initial_state=initial_state, lengths=lengths, output_final_state=True
            )

    def tokens(batch, length):
        leaves = {name: x.detach() for name, x in arguments((batch, length, 3, 5)).items() if name != "skip"}
        return (*leaves.values(), torch.arange(batch) * (length // 2) // batch)

    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=4096)
    shapes = (*[{0: batch, 1: length}] * 4, None, {0: batch}, {0: batch})
    program = torch.export.export(Module(), tokens(3, 21), dynamic_shapes=shapes).module()
    for size in ((3, 21), (1, 1), (2, 65), (1, 300)):
        for a, b in zip(program(*tokens(*size)), Module()(*tokens(*size)), strict=True):
            torch.testing.assert_close(a, b)


def test_bad_arguments_are_named():
    leaves = {name: x.detach() for name, x in arguments((1, 9, 3, 5)).items()}
    for changes, message in (
        ({"key": leaves["key"][..., :4]}, r"key must have shape \[B, T, N\] = \[1, 9, 5\], got \[1, 9, 4\]"),
        ({"value": leaves["value"][:, :8]}, r"value must have shape \[B, T, E\] = \[1, 9, E\], got \[1, 8, 3\]"),
        ({"step": leaves["step"][..., :2]}, r"step must have shape \[B, T, E\] = \[1, 9, 3\], got \[1, 9, 2\]"),
        ({"rate": leaves["rate"].T}, r"rate must have shape \[N, E\] = \[5, 3\], got \[3, 5\]"),
        ({"skip": leaves["skip"][:2]}, r"skip must have shape \[E\] = \[3\], got \[2\]"),
        ({"initial_state": leaves["initial_state"].mT}, r"initial_state must have shape \[rows, N, E\] = \[1, 5, 3\]"),
        ({name: leaves[name][:0] for name in NAMES[:4]}, "query must hold at least one row, got B = 0"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "cu_seqlens must run from 0 to T = 9, got 0 to 8"),
        ({"backend": "fft"}, "backend must be one of auto, recurrent, chunk, triton, got 'fft'"),
        ({"chunk_size": 0}, "chunk_size must be a positive integer, got 0"),
        ({"query": leaves["query"].long()}, "query must be a floating-point tensor, got torch.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            selective_scan(**leaves | changes)
    state, rate = leaves.pop("initial_state").clone(), leaves.pop("rate")
    kept, tokens = state.clone(), [leaves[name][:, 0] for name in NAMES[:4]]
    with pytest.raises(ValueError, match=r"state must have shape \[rows, N, E\] = \[1, 5, 3\]"):
        selective_scan_step(*tokens, rate, state=state[:, :2])
    with pytest.raises(ValueError, match=r"mask must have shape \[B\] = \[1\]"):
        selective_scan_step(*tokens, rate, state=state, mask=torch.ones(2))
    with pytest.raises(ValueError, match=r"value must have shape \[B, E\], got \[1, 9, 3\]"):
        selective_scan_step(*tokens[:2], leaves["value"], tokens[3], rate, state=state)
    assert torch.equal(state, kept)
