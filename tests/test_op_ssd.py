"""State space duality: chunks against the definition in float64, outputs, states and every gradient."""

import functools
from itertools import product

import pytest
import torch
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from modeling_interdomain.ops.common import slots as op_common_slots
from modeling_interdomain.ops.ssd import chunk as op_ssd_chunk
from modeling_interdomain.ops.ssd import entry as op_ssd
from modeling_interdomain.ops.ssd.entry import ssd_attention, ssd_state_after, ssd_step
from modeling_interdomain.ops.ssd.map import ssd_attention_map
from modeling_interdomain.ops.ssd.naive import export_ssd
from tests import decay_checks
from tests.decay_checks import assert_close, check_documents, check_dynamic_graph, check_pads
from tests.operator_checks import SLOTS, check_bad_slots, check_step_of_slots

NAMES = ("query", "key", "value", "log_decay", "initial_state")
SHAPES = {
    # name: (B, T, H, G, P, N)
    "one_token": (2, 1, 2, 1, 3, 4),
    "odd_length": (2, 63, 4, 2, 5, 6),
    "a_group_a_head": (1, 130, 4, 4, 3, 5),
    "one_group": (3, 130, 4, 1, 4, 5),
}
DECAYS = {"none": 0.0, "hardly_any": 1e-9, "usual": 0.3, "nearly_gone": 40.0, "gone_at_once": 1e4, "mixed": None}
DECAYS["never_there"] = float("inf")


def arguments(shape, decay="usual", dtype=torch.float64, rows=None, seed=0):
    batch, length, heads, groups, width, size = SHAPES.get(shape, shape)
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    rate = DECAYS[decay]
    sizes = 10.0 ** (2 * normal(batch, length, heads)) if rate is None else rate
    tensors = (
        normal(batch, length, groups, size),
        normal(batch, length, groups, size),
        normal(batch, length, heads, width),
        -sizes * torch.rand(batch, length, heads, generator=generator, dtype=torch.float64),
        normal(rows or batch, heads, width, size),
    )
    return {name: x.to(dtype).requires_grad_() for name, x in zip(NAMES, tensors, strict=True)}


everything = functools.partial(decay_checks.everything, ssd_attention)


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("shape", "decay"), [*((s, "usual") for s in SHAPES), *product(("a_group_a_head", "odd_length"), DECAYS)]
)
def test_equals_the_definition(shape, decay, chunk_size):
    leaves = arguments(shape, decay)
    expected = everything(leaves, backend="recurrent")
    assert_close(everything(leaves, chunk_size=chunk_size), expected)
    del leaves["initial_state"]
    found, expected = everything(leaves, chunk_size=chunk_size), everything(leaves, backend="recurrent")
    assert_close(found, expected)


@pytest.mark.parametrize("decay", DECAYS)
def test_float32_forgets_as_float64_does(decay):
    """Every gradient too, whatever a decay is: none makes an infinity out of what it forgets."""
    leaves = arguments("odd_length", decay)
    expected = everything(leaves, backend="recurrent")
    narrow = {name: x.detach().float().requires_grad_() for name, x in leaves.items()}
    found = everything(narrow, chunk_size=16)
    assert_close(found, expected, bound=1e-5)
    assert_decays_close(found, leaves, bound=1e-5)


def assert_decays_close(found, leaves, bound, **options):
    """Of every token for itself: the error follows the sizes of what crosses it, which is next to nothing where it
    forgets nearly all, and not those of its neighbours. Weights below 1e-30 count as zero.
    """
    definition = {"backend": "recurrent", **options}
    sizes = {name: x.detach().abs().requires_grad_() for name, x in leaves.items()}
    with torch.no_grad():
        sizes["log_decay"].neg_()
    outputs = ssd_attention(**sizes, output_final_state=True, **definition)
    weights = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=weights, dtype=x.dtype).abs()).sum() for x in outputs)
    (size,) = torch.autograd.grad(loss, sizes["log_decay"])
    error = (found["log_decay"] - everything(leaves, **definition)["log_decay"]).abs()
    assert (error <= bound * size + 1e-25).all(), (error / size.clamp(min=1e-30)).max()


@pytest.mark.parametrize("decay", DECAYS)
def test_documents_of_every_decay(decay):
    leaves = arguments((1, 41, 4, 2, 3, 5), decay, rows=4)
    ends = torch.tensor([0, 5, 6, 22, 41])
    expected = everything(leaves, cu_seqlens=ends, backend="recurrent")
    assert_close(everything(leaves, cu_seqlens=ends, chunk_size=4), expected)


@pytest.mark.parametrize("floats", [0, 200, 1 << 18])
def test_documents_and_pads(monkeypatch, floats):
    """Packed documents, empty ones among them, in segments of one chunk and more; what stands at pads is not read."""
    monkeypatch.setitem(op_ssd_chunk._SEGMENT_FLOATS, "cpu", floats)
    check_documents(ssd_attention, arguments((1, 41, 4, 2, 3, 5), rows=6))
    check_pads(ssd_attention, arguments((3, 33, 4, 2, 3, 5)))


def test_pieces_and_steps_are_the_whole():
    leaves = {name: x.detach() for name, x in arguments((2, 30, 4, 2, 3, 5)).items()}
    expected, final = ssd_attention(**leaves, output_final_state=True, chunk_size=8)
    state, tokens = leaves.pop("initial_state"), tuple(leaves.values())
    replayed = ssd_state_after(state, *tokens[1:], torch.ones(2, 30, dtype=torch.bool))
    torch.testing.assert_close(replayed, final)
    first, state = ssd_attention(*(x[:, :11] for x in tokens), initial_state=state, output_final_state=True)
    second, state = ssd_attention(*(x[:, 11:25] for x in tokens), initial_state=state, output_final_state=True)
    rest = [ssd_step(*(x[:, t] for x in tokens), state=state)[:, None] for t in range(25, 30)]
    torch.testing.assert_close(torch.cat([first, second, *rest], dim=1), expected)
    torch.testing.assert_close(state, final)
    kept = state.clone()
    output = ssd_step(*(x[:, 0] for x in tokens), state=state, mask=torch.tensor([1, 0]))
    assert torch.equal(state[1], kept[1]) and not output[1].any() and not torch.equal(state[0], kept[0])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("heads", [4, 3])  # three heads are not shared out
def test_a_large_state_is_read_by_the_threads_that_wrote_it(heads, threads):
    leaves = {name: x.detach() for name, x in arguments((1, 3, heads, 1, 64, 256)).items()}
    assert leaves["initial_state"].numel() > op_ssd._GRAIN
    expected, final = ssd_attention(**leaves, output_final_state=True, backend="recurrent")
    state, before = leaves.pop("initial_state").clone(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert op_ssd._parts(state) == (threads if heads % 2 == 0 else 1)
        found = [ssd_step(*(x[:, t] for x in leaves.values()), state=state) for t in range(3)]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(torch.stack(found, 1), expected)
    torch.testing.assert_close(state, final)


def one_token(rows, groups=2, device="cpu", dtype=torch.float64):
    """A step of so many rows, and their states."""
    leaves = {k: x.detach().to(device, dtype) for k, x in arguments((rows, 1, 4, groups, 3, 5)).items()}
    state = leaves.pop("initial_state")
    return functools.partial(ssd_step, *(x[:, 0] for x in leaves.values())), state


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_of_slots_is_that_of_their_rows(groups, slots, large, monkeypatch):
    monkeypatch.setattr(op_common_slots, "_LARGE", 0 if large else 1 << 16)
    step, state = one_token(4, groups)
    check_step_of_slots(step, state, SLOTS[slots], 1e-10)


def test_bad_slots_are_named():
    check_bad_slots(*one_token(1))


def test_a_state_of_lower_precision_is_advanced_in_float32():
    leaves = {name: x.detach().float() for name, x in arguments((2, 1, 4, 2, 3, 5)).items()}
    low = leaves.pop("initial_state").bfloat16()
    high = low.float()
    outputs = [ssd_step(*(x[:, 0] for x in leaves.values()), state=state) for state in (low, high)]
    torch.testing.assert_close(*outputs)
    assert torch.equal(low, high.bfloat16())


@pytest.mark.parametrize("groups", [1, 2])
def test_equals_the_scan_of_transformers(groups):
    leaves = {name: x.detach().float() for name, x in arguments((2, 130, 4, groups, 8, 16)).items()}
    step, rate = torch.rand(2, 130, 4), -torch.arange(1.0, 5.0)
    x = leaves["value"]
    expected = mamba2_chunk_scan(
        x,
        step,
        rate,
        leaves["key"],
        leaves["query"],
        32,
        initial_states=leaves["initial_state"],
        return_final_states=True,
    )
    leaves |= {"value": x * step[..., None], "log_decay": step * rate}
    found = ssd_attention(**leaves, output_final_state=True)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() / b.norm() < 1e-5
    # To where each of the two stands after a decay that float32 sums do not survive.
    leaves["log_decay"] = leaves["log_decay"].clone()
    leaves["log_decay"][:, 3] = -1e4
    exact = ssd_attention(**{name: x.double() for name, x in leaves.items()}, backend="recurrent")[0]
    assert (ssd_attention(**leaves)[0] - exact).norm() / exact.norm() < 1e-6


def test_half_precision_and_autocast_are_computed_in_float32():
    leaves = arguments((2, 70, 4, 2, 8, 16), dtype=torch.float32)
    expected = everything(leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = everything(leaves)
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    low = {name: x.detach().bfloat16() for name, x in leaves.items()} | {"log_decay": leaves["log_decay"].detach()}
    output, state = ssd_attention(**low, output_final_state=True)
    exact, final = ssd_attention(
        **{k: x.double() for k, x in low.items()}, output_final_state=True, backend="recurrent"
    )
    assert output.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert (output - exact).norm() / exact.norm() < 5e-3 and (state - final).norm() / final.norm() < 2e-6


@pytest.mark.parametrize("kind", ["rows", "documents", "lengths"])
def test_one_dynamic_graph_serves_every_length(kind):
    check_dynamic_graph(ssd_attention, lambda length: arguments((1, length, 4, 2, 4, 5)), kind)


def test_an_exported_graph_serves_every_batch_and_length():
    class Module(torch.nn.Module):
        def forward(self, query, key, value, log_decay, initial_state, lengths):
            return ssd_attention(
                query, key, value, log_decay, initial_state=initial_state, lengths=lengths, output_final_state=True,
                chunk_size=8,
            )  # fmt: skip

    def tokens(batch, length):
        leaves = {name: x.detach() for name, x in arguments((batch, length, 4, 2, 3, 5)).items()}
        return (*leaves.values(), torch.arange(batch) * (length // 2) // batch)

    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=4096)
    shapes = (*[{0: batch, 1: length}] * 4, {0: batch}, {0: batch})
    program = torch.export.export(Module(), tokens(3, 21), dynamic_shapes=shapes).module()
    for size in ((3, 21), (1, 1), (2, 65)):
        for a, b in zip(program(*tokens(*size)), Module()(*tokens(*size)), strict=True):
            torch.testing.assert_close(a, b)


def test_bad_arguments_are_named():
    leaves = {name: x.detach() for name, x in arguments((1, 9, 4, 2, 3, 5)).items()}
    for changes, message in (
        ({"key": leaves["key"][..., :4]}, r"key must have shape \[B, T, G, N\] = \[1, 9, 2, 5\], got \[1, 9, 2, 4\]"),
        ({n: leaves[n][:, :, :3] for n in ("value", "log_decay")}, "key has G = 2 groups, which must divide the H = 3"),
        ({"log_decay": leaves["log_decay"][..., :2]}, r"log_decay must have shape \[B, T, H\] = \[1, 9, 4\], got \["),
        ({"initial_state": leaves["initial_state"][:, :, :2]}, r"initial_state must have shape \[rows, H, P, N\]"),
        ({name: x[:0] for name, x in leaves.items()}, "query must hold at least one row, got B = 0"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "cu_seqlens must run from 0 to T = 9, got 0 to 8"),
        ({"backend": "fft"}, "backend must be one of auto, recurrent, chunk, triton, got 'fft'"),
        ({"chunk_size": 0}, "chunk_size must be a positive integer, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ssd_attention(**leaves | changes)
    state = leaves.pop("initial_state").clone()
    kept, tokens = state.clone(), [x[:, 0] for x in leaves.values()]
    with pytest.raises(ValueError, match=r"state must have shape \[rows, H, P, N\] = \[1, 4, 3, 5\]"):
        ssd_step(*tokens, state=state[:, :2])
    with pytest.raises(ValueError, match=r"mask must have shape \[B\] = \[1\]"):
        ssd_step(*tokens, state=state, mask=torch.ones(2))
    with pytest.raises(ValueError, match=r"value must have shape \[B, H, P\], got \[1, 9, 4, 3\]"):
        ssd_step(*tokens[:2], leaves["value"], tokens[3], state=state)
    assert torch.equal(state, kept)


def test_a_token_that_forgets_all():
    """A log decay of minus infinity here and there, wherever decays are summed."""
    leaves = {name: x.detach() for name, x in arguments((2, 30, 4, 2, 3, 5)).items()}
    leaves["log_decay"][:, ::4] = -torch.inf
    expected, final = ssd_attention(**leaves, output_final_state=True, backend="recurrent")
    for found in (
        ssd_attention(**leaves, output_final_state=True, chunk_size=8),
        export_ssd(*leaves.values(), None, None, 8),
    ):
        torch.testing.assert_close(found, (expected, final))
    state, (query, key, value, log_decay) = leaves.pop("initial_state"), leaves.values()
    after = ssd_state_after(state, key, value, log_decay, torch.ones(2, 30, dtype=torch.bool))
    torch.testing.assert_close(after, final)
    weights = ssd_attention_map(query, key, log_decay)
    expected, _ = ssd_attention(**leaves, backend="recurrent")
    torch.testing.assert_close(torch.einsum("bhtj,bjhp->bthp", weights, value), expected)
