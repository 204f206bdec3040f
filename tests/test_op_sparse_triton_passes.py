"""The fused passes of sparse attention in Triton's interpreter against the definition in float64."""

import importlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from modeling_interdomain.ops.sparse.entry import sparse_attention
from modeling_interdomain.ops.sparse.stream import Bins, stream_of
from tests.operator_checks import relative_error
from tests.test_op_sparse import _arguments, _part

triton = pytest.importorskip("triton", reason="Triton is not installed on this machine.")
operator, passes, tiles = (
    importlib.import_module(f"modeling_interdomain.{name}")
    for name in ("ops.sparse.triton", "ops.sparse.triton_passes", "ops.common.tiles")
)
pytestmark = pytest.mark.usefixtures("kernels")
on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
# On a GPU the matrix units round float32 to three tf32 numbers, in the interpreter not at all. Weights and their
# gradients are rounded to bfloat16 before they are multiplied.
BOUNDS = {torch.float32: 2e-5 if on_gpu else 1e-6, torch.float16: 5e-3, torch.bfloat16: 1e-2}


def placed(options):
    """Of a call, on the device of the kernels, floating-point numbers in float32."""

    def there(x):
        return x.to(DEVICE, torch.float32 if x.is_floating_point() else None) if isinstance(x, torch.Tensor) else x

    bins = [Bins(*(there(x) for x in part)) for part in options["bins"]]
    return {name: there(x) for name, x in options.items()} | {"bins": bins}


def everything(tokens, backend, **options):
    """The output and the gradients of the tokens."""
    output, _ = sparse_attention(*tokens, **options, backend=backend)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output, *torch.autograd.grad(output, tokens, weights.to(output))]


def check(tokens, options, dtype=torch.float32, bound=None):
    """Compared with the definition on the same, already rounded, tokens; returns what the kernels gave."""
    low = [x.detach().to(DEVICE, dtype).requires_grad_() for x in tokens]
    expected = everything([x.detach().cpu().double().requires_grad_() for x in low], "dense", **options)
    found = everything(low, "triton", **placed(options))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype and relative_error(a.cpu(), b) < (bound or BOUNDS[dtype])
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in ("selected", "bins", "three-parts", "budget-beyond-all")]
    + [("three-parts", torch.bfloat16), ("bins", torch.float16)],
)
def test_fused_is_the_definition(name, dtype):
    check(*_arguments(name), dtype)


def test_one_token_sees_itself():
    """Its weight is 1, whatever its logit: no gradient passes through that."""
    tokens, options = _arguments("one-token")
    tokens = [x.float().to(DEVICE).requires_grad_() for x in tokens]
    output, of_query, of_key, of_value = everything(tokens, "triton", **placed(options))
    torch.testing.assert_close(output, tokens[2])
    assert of_query.abs().amax() < 1e-6 and of_key.abs().amax() < 1e-6 and of_value.ne(0).all()


def test_documents():
    tokens, options = _arguments("three-parts")
    check(tokens, options | {"cu_seqlens": torch.tensor([0, 7, 7, 8, 30, 90])})


def test_large_logits_and_rows_without_a_key():
    """Powers that would overflow; a weight is as wrong as its logit, whose last digit is above 1e-5."""
    (query, key, value), options = _arguments("bins")
    part = options["bins"][0]
    late = part._replace(key=torch.where((torch.arange(70) < 20)[:, None], -1, part.key))
    assert (query * key).sum(-1).amax() * 64 > 128
    found = check([query * 8, key * 8, value], options | {"bins": [late]}, bound=100 * BOUNDS[torch.float32])
    assert all(x[:, :20].eq(0).all() for x in found)


def test_nan_in_pads_and_in_empty_slots_is_not_read():
    """A text in two pieces, the second with pads; gradients reach the keys that are remembered of the first."""
    tokens, options = _arguments("hax")
    options["bins"] = [part._replace(query=part.query.clamp(min=0)) for part in options["bins"]]
    tokens, lengths = [x.float().requires_grad_() for x in tokens], torch.tensor([43, 30])
    pads = (torch.arange(43) >= lengths[:, None])[..., None, None]

    def in_pieces(backend, place, prepared):
        (first, of_first), (rest, of_rest) = (_part(tokens, options, part) for part in (slice(0, 2), slice(2, 45)))
        first, rest = ([place(x) for x in piece] for piece in (first, [x.masked_fill(pads, torch.nan) for x in rest]))
        how = {"output_final_state": True, "backend": backend}
        _, memory = sparse_attention(*first, **prepared(of_first), **how)
        ring = _poisoned(memory.rings[0])
        memory = _poisoned(memory)._replace(rings=(ring,)) if backend == "triton" else memory
        output, after = sparse_attention(
            *rest, **prepared(of_rest), initial_state=memory, lengths=place(lengths).long(), **how
        )
        given = output, after.entries, after.rings[0].entries
        grads = torch.autograd.grad(sum(x.square().sum() for x in given), tokens)
        return [x.detach().cpu() for x in (*given, *grads)]

    expected = in_pieces("dense", lambda x: x.double(), lambda x: x)
    found = in_pieces("triton", lambda x: x.to(DEVICE), placed)
    assert all(relative_error(a, b) < BOUNDS[torch.float32] for a, b in zip(found, expected, strict=True))
    assert found[0].masked_select(pads).eq(0).all()


def _poisoned(kept):
    """A memory, or a ring of one, whose empty slots hold NaN."""
    nothing = kept.places == 0
    assert nothing.any()
    return kept._replace(entries=kept.entries.masked_fill(nothing[..., None], torch.nan))


def test_gradients_are_the_same_twice():
    tokens, options = _arguments("three-parts")
    tokens = [x.float().to(DEVICE).requires_grad_() for x in tokens]
    once, again = (everything(tokens, "triton", **placed(options)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_the_operator_is_sound(monkeypatch):
    """What torch.library checks: schema, fake implementation, autograd registration."""
    tokens, options = _part(*_arguments("hax"), slice(0, 20))
    tokens, options, calls = [x.float().to(DEVICE) for x in tokens], placed(options), []
    stream = stream_of(*tokens, options["scores"], options["selected_keys"], options["bins"], None, None, None)
    original = operator._operator
    monkeypatch.setattr(operator, "_operator", lambda *arguments: calls.append(arguments) or original(*arguments))
    operator.triton_sparse(stream)
    *tokens, tables, selects, past, chunk = calls[0]
    arguments = *(x.detach().requires_grad_() for x in tokens), tables, selects, past, chunk
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(original.registered, arguments, test_utils=tests)


def test_one_graph_for_two_lengths():
    def attention(query, key, value, scores, of_query, of_key):
        bins = [Bins(of_query, of_key, 4, 3)]
        return sparse_attention(query, key, value, scores=scores, selected_keys=3, bins=bins, backend="triton")[0]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, backend=counter, fullgraph=True, dynamic=True)
    for length in (37, 41):
        tokens, options = _part(*_arguments("hax"), slice(0, length))
        tokens, options = [x.float().to(DEVICE).requires_grad_() for x in tokens], placed(options)
        arguments = *tokens, options["scores"], *options["bins"][0][:2]
        results = [function(*arguments) for function in (compiled, attention)]
        found, expected = ((x, *torch.autograd.grad(x.square().sum(), tokens)) for x in results)
        torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1
    torch.compiler.reset()


def far_away(rows: int, width: int, few: torch.Tensor | None = None, dtype=torch.bfloat16) -> torch.Tensor:
    """So many numbers that their offsets need 64 bits, of which the last rows alone are ever touched."""
    x = torch.empty(rows, width, dtype=dtype)
    assert x.numel() > 1 << 31
    if few is not None:
        x[-len(few) :] = few
    return x


@pytest.mark.skipif(on_gpu, reason="Memory that is never touched is free on the host alone.")
def test_offsets_beyond_32_bits():
    """The last of many tokens; two sets, the second without a slot."""
    total, width, few = (1 << 23) + 37, 256, 20
    small = [torch.randn(few, width).bfloat16() / 4 for _ in range(4)]
    *tokens, grad = (far_away(total, width, x) for x in small)
    numbers, places = torch.arange(total - few, total, dtype=torch.int32), torch.arange(few, dtype=torch.int32)
    of = passes.Slots(numbers, numbers, places, torch.full_like(places, few), places[:1], torch.tensor([few]))
    nothing, tokens = of._replace(count=torch.tensor([0])), passes.Tokens(*tokens)
    sums = passes.Sums(torch.empty(total), torch.empty(total), far_away(total, width, dtype=torch.float32))
    output, of_query, of_key, of_value = (far_away(total, width) for _ in range(4))
    ahead = passes.Ahead(output, grad, torch.empty(total), torch.empty(total))
    last = 1, few, passes.Sizes(1, total, total, 0)
    options = {
        "EXTENT": passes.Extent(32, 32, 64, width, width, width, width),
        "MATH": tiles.arithmetic(torch.bfloat16),
    }
    passes.attend[1,](tokens, of, (), None, sums, None, None, *last, **options)
    passes.attend[1,](tokens, nothing, (), sums, None, output, ahead.level, *last, **options)
    passes.of_queries[1,](tokens, ahead, of, (), None, of_query, *last, **options)
    passes.of_slots[1,](tokens, ahead, of, (), None, (of_key, of_value), *last[1:], SEVERAL=False, **options)
    leaves = [x[None, :, None].double().requires_grad_() for x in small[:3]]
    one = torch.zeros(1, few, 1, dtype=torch.long)
    expected, _ = sparse_attention(*leaves, bins=[Bins(one, one, 1, few)], backend="dense")
    expected = [expected, *torch.autograd.grad(expected, leaves, small[3][None, :, None].double())]
    for found, right in zip((output, of_query, of_key, of_value), expected, strict=True):
        assert relative_error(found[-few:], right[0, :, 0]) < BOUNDS[torch.bfloat16]


@pytest.mark.skipif(on_gpu, reason="Memory that is never touched is free on the host alone.")
def test_offsets_of_slots_beyond_32_bits():
    """Sixteen keys of the first of many heads, each with two of the last of many slots."""
    heads, width, keys = 600_000, 256, 16
    small = [torch.randn(2 * keys, width) for _ in range(2)]
    of_slot = [far_away((1 << 23) + 37, width, x, torch.float32) for x in small]
    order = len(of_slot[0]) - 2 * keys + torch.arange(2 * keys)
    after = [far_away(keys * heads, width) for _ in range(2)]
    options = {
        "EXTENT": passes.Extent(32, 32, 64, width, width, width, width),
        "MATH": tiles.arithmetic(torch.bfloat16),
    }
    starts, sizes = torch.arange(0, 2 * keys + 1, 2), passes.Sizes(heads, keys, keys, 0)
    passes.of_keys[1,](tuple(of_slot), order, starts, tuple(after), keys, sizes, BLOCK=keys, **options)
    for found, x in zip(after, small, strict=True):
        assert torch.equal(found[::heads], x.view(keys, 2, width).sum(1).bfloat16())


def test_where_the_kernels_cannot_run():
    tokens, options = _arguments("hax")
    with pytest.raises(ValueError, match=r"backend 'triton' cannot run: .*float64"):
        sparse_attention(*(x.to(DEVICE) for x in tokens), **placed(options), backend="triton")
