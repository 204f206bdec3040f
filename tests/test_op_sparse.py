"""Sparse attention against sets of keys written out one by one, in float64."""

import pytest
import torch

from modeling_interdomain import op_sparse_blocks, op_sparse_passes
from modeling_interdomain.op_sparse import BACKENDS, sparse_attention
from modeling_interdomain.op_sparse_step import sparse_step
from modeling_interdomain.op_sparse_stream import Bins, Ring, empty_memory
from tests.operator_checks import ring_by_place

CASES = {
    # name: (B, T, S, selected keys, (number of bins, keys) of every part)
    "selected": (1, 100, 2, 5, []),
    "bins": (2, 70, 1, 0, [(3, 4)]),
    "hax": (2, 70, 2, 3, [(4, 3)]),
    "three-parts": (1, 90, 1, 33, [(2, 40), (1, 3), (7, 2)]),
    "budget-beyond-all": (1, 33, 1, 50, [(2, 40)]),
    "one-token": (2, 1, 1, 2, [(2, 2)]),
    "whole-blocks": (1, 64, 1, 32, [(5, 32)]),
}
DIM, WIDTH = 4, 3
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def _arguments(name: str, seed: int = 0):
    """Random tokens with many equal scores, and tokens of no bin."""
    batch, length, heads, selected, parts = CASES[name]
    generator = torch.Generator().manual_seed(seed)
    shape = batch, length, heads

    def normal(width):
        return torch.randn(*shape, width, generator=generator, dtype=torch.float64)

    tokens = [normal(DIM), normal(DIM), normal(WIDTH)]
    scores = torch.randint(0, 5, shape, generator=generator).double() if selected else None

    def bins(number):
        return torch.randint(-1, number, shape, generator=generator)

    return tokens, {
        "scores": scores,
        "selected_keys": selected,
        "bins": [Bins(bins(number), bins(number), number, keys) for number, keys in parts],
    }


def _part(tokens, options, part: slice):
    scores = options["scores"]
    return [x[:, part] for x in tokens], options | {
        "scores": None if scores is None else scores[:, part],
        "bins": [b._replace(query=b.query[:, part], key=b.key[:, part]) for b in options["bins"]],
    }


def _oracle(tokens, options, documents=None) -> torch.Tensor:
    """Every set by its description: sort, and take the first."""
    query, key, value = tokens
    batch, length, heads = key.shape[:3]
    rows = []
    for b, i, s in torch.cartesian_prod(*(torch.arange(n) for n in (batch, length, heads))).tolist():
        before = [j for j in range(i + 1) if documents is None or documents[j] == documents[i]]
        seen = set()
        if options["scores"] is not None:
            ranked = sorted(before, key=lambda j: (-options["scores"][b, j, s].item(), j))
            seen |= set(ranked[: options["selected_keys"]])
        for part in options["bins"]:
            own = part.query[b, i, s].item()
            if own >= 0:
                seen |= set([j for j in before if part.key[b, j, s].item() == own][-part.keys :])
        index = sorted(seen)
        weights = (key[b, index, s] @ query[b, i, s]).softmax(0)
        rows.append(weights @ value[b, index, s])
    return torch.stack(rows).view(batch, length, heads, WIDTH)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients(name, backend):
    tokens, options = _arguments(name)
    tokens = [x.requires_grad_() for x in tokens]
    expected = _oracle(tokens, options)
    found, memory = sparse_attention(*tokens, **options, backend=backend)
    assert memory is None
    torch.testing.assert_close(found, expected, **EXACT)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((x * weights).sum(), tokens) for x in (found, expected)]
    torch.testing.assert_close(*gradients, **EXACT)


@pytest.mark.parametrize("name", ["hax", "three-parts", "budget-beyond-all", "whole-blocks"])
def test_sizes_that_do_not_depend_on_values(name, monkeypatch):
    """As on a device: tiles instead of windows, and weights relative to the largest logit."""
    tokens, options = _arguments(name)
    tokens = [x.requires_grad_() for x in tokens]
    found, expected = [], []
    for outputs in (expected, found):
        output, _ = sparse_attention(*tokens, **options, backend="blocks")
        outputs += [output, *torch.autograd.grad(output.square().sum(), tokens)]
        for module in (op_sparse_blocks, op_sparse_passes):
            monkeypatch.setattr(module, "values_at_hand", lambda x: False)
    torch.testing.assert_close(found, expected, **EXACT)


def test_heads_one_after_the_other(monkeypatch):
    tokens, options = _arguments("hax")
    expected = sparse_attention(*tokens, **options, backend="blocks")[0]
    monkeypatch.setattr(op_sparse_passes, "_TOKENS", 150)  # two of the four heads of 70 tokens, then the others
    found = sparse_attention(*tokens, **options, backend="blocks")[0]
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits(backend):
    """Powers that would overflow, were they not relative to the largest; even so most weights vanish."""
    (query, key, value), options = _arguments("three-parts")
    tokens = [(x * scale).requires_grad_() for x, scale in ((query, 40), (key, 40), (value, 1))]
    expected, found = _oracle(tokens, options), sparse_attention(*tokens, **options, backend=backend)[0]
    assert expected.isfinite().all() and (tokens[0] * tokens[1]).sum(-1).abs().amax() > 1e3
    gradients = [torch.autograd.grad(x.square().sum(), tokens) for x in (found, expected)]
    torch.testing.assert_close((found, *gradients[0]), (expected, *gradients[1]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["hax", "three-parts"])
def test_whole_is_pieces_is_steps_is_padded(name, backend):
    tokens, options = _arguments(name)
    options["bins"] = [b._replace(query=b.query.clamp(min=0)) for b in options["bins"]]
    batch, length, heads, selected, parts = CASES[name]
    whole, memory = sparse_attention(*tokens, **options, backend=backend, output_final_state=True)
    state, outputs = None, []
    for start, stop in ((0, 1), (1, 30), (30, 31), (31, length)):
        piece, of_piece = _part(tokens, options, slice(start, stop))
        output, state = sparse_attention(
            *piece, **of_piece, initial_state=state, output_final_state=True, backend=backend
        )
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, **EXACT)
    torch.testing.assert_close(state, memory, **EXACT)

    stepped, outputs = empty_memory(batch, heads, DIM, WIDTH, selected, parts, whole), []
    pad = torch.zeros(batch, dtype=torch.bool)
    for t in range(length):
        piece, of_piece = _part(tokens, options, slice(t, t + 1))
        query, key, value = (x[:, 0] for x in piece)
        extra = {
            "memory": stepped,
            "scores": of_piece["scores"][:, 0],
            "bins": [b._replace(query=b.query[:, 0], key=b.key[:, 0]) for b in of_piece["bins"]],
        }
        assert sparse_step(query, key, value, **extra, mask=pad).eq(0).all()
        outputs.append(sparse_step(query, key, value, **extra, mask=~pad if t % 2 else None))
    torch.testing.assert_close(torch.stack(outputs, 1), whole, **EXACT)
    ordered = stepped._replace(rings=tuple(Ring(*ring_by_place(*ring)) for ring in stepped.rings))
    torch.testing.assert_close(ordered, memory, **EXACT)

    lengths = torch.full((batch,), length)
    lengths[0] = length - 7
    poisoned = [x.clone() for x in tokens]
    for x in poisoned:
        x[0, length - 7 :] = torch.nan
    padded, _ = sparse_attention(*poisoned, **options, lengths=lengths, backend=backend)
    torch.testing.assert_close(padded[0, : length - 7], whole[0, : length - 7], **EXACT)
    assert padded[0, length - 7 :].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents(backend):
    tokens, options = _arguments("three-parts")
    ends = torch.tensor([0, 7, 7, 8, 30, 90])
    documents = torch.bucketize(torch.arange(90), ends[1:-1], right=True)
    found, _ = sparse_attention(*tokens, **options, cu_seqlens=ends, backend=backend)
    torch.testing.assert_close(found, _oracle(tokens, options, documents.tolist()), **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_later_tokens_never_change_earlier_outputs(backend):
    tokens, options = _arguments("hax")
    other, others = _arguments("hax", seed=1)
    mixed = [torch.cat([a[:, :41], b[:, 41:]], 1) for a, b in zip(tokens, other)]
    scores = torch.cat([options["scores"][:, :41], others["scores"][:, 41:] + 10], 1)
    found = sparse_attention(*mixed, **options | {"scores": scores}, backend=backend)[0]
    expected = sparse_attention(*tokens, **options, backend=backend)[0]
    torch.testing.assert_close(found[:, :41], expected[:, :41], **EXACT)
    assert (found[:, 41:] - expected[:, 41:]).abs().amax() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_budgets_that_cover_everything_are_softmax_attention(backend):
    tokens, _ = _arguments("selected")
    one = torch.zeros(tokens[0].shape[:3], dtype=torch.long)
    query, key, value = (x.transpose(1, 2) for x in tokens)
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(query, key, value, is_causal=True, scale=1.0).transpose(1, 2)
    for options in ({"scores": torch.randn(one.shape), "selected_keys": 100}, {"bins": [Bins(one, one, 1, 100)]}):
        torch.testing.assert_close(sparse_attention(*tokens, **options, backend=backend)[0], expected, **EXACT)
    # One bin is a window.
    i = torch.arange(100)
    window = (i[:, None] >= i) & (i[:, None] - i < 8)
    expected = attention(query, key, value, attn_mask=window, scale=1.0).transpose(1, 2)
    found = sparse_attention(*tokens, bins=[Bins(one, one, 1, 8)], backend=backend)[0]
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_key_are_zero(backend):
    tokens, _ = _arguments("bins")
    tokens = [x.requires_grad_() for x in tokens]
    query_bins = torch.zeros(tokens[0].shape[:3], dtype=torch.long)
    bins = [Bins(query_bins, query_bins + (torch.arange(70) < 50)[:, None], 2, 4)]  # the keys of bin 0 come late
    output, _ = sparse_attention(*tokens, bins=bins, backend=backend)
    assert output[:, :50].eq(0).all() and output[:, 50:].ne(0).all()
    for gradient in torch.autograd.grad(output.square().sum(), tokens):
        assert gradient.isfinite().all() and gradient[:, :50].eq(0).all()


def test_empty_slots_are_not_read():
    tokens, options = _arguments("hax")
    options["bins"] = [b._replace(query=b.query.clamp(min=0)) for b in options["bins"]]
    first, of_first = _part(tokens, options, slice(0, 2))
    _, memory = sparse_attention(*first, **of_first, output_final_state=True)
    poisoned = memory._replace(
        entries=memory.entries.masked_fill((memory.places == 0)[..., None], 1e3),
        scores=memory.scores.masked_fill(memory.places == 0, 1e3),
        rings=tuple(r._replace(entries=r.entries.masked_fill((r.places == 0)[..., None], 1e3)) for r in memory.rings),
    )
    rest, of_rest = _part(tokens, options, slice(2, 30))
    expected, _ = sparse_attention(*rest, **of_rest, initial_state=memory)
    torch.testing.assert_close(sparse_attention(*rest, **of_rest, initial_state=poisoned)[0], expected, **EXACT)
    query, key, value = (x[:, 0] for x in rest)
    bins = [b._replace(query=b.query[:, 0], key=b.key[:, 0]) for b in of_rest["bins"]]
    found = sparse_step(query, key, value, memory=poisoned, scores=of_rest["scores"][:, 0], bins=bins)
    torch.testing.assert_close(found, expected[:, 0], **EXACT)


def test_gradients_reach_what_is_remembered():
    tokens, options = _arguments("hax")
    tokens = [x.requires_grad_() for x in tokens]
    expected = torch.autograd.grad(sparse_attention(*tokens, **options)[0][:, 40:].square().sum(), tokens[1:])
    first, of_first = _part(tokens, options, slice(0, 40))
    _, memory = sparse_attention(*first, **of_first, output_final_state=True)
    rest, of_rest = _part(tokens, options, slice(40, None))
    output, _ = sparse_attention(*rest, **of_rest, initial_state=memory)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), tokens[1:]), expected, **EXACT)


def test_autocast_reaches_neither_pass():
    (query, key, value), options = _arguments("hax")
    tokens = [x.float().requires_grad_() for x in (query, key, value)]
    options = options | {"scores": options["scores"].float()}
    expected = torch.autograd.grad(sparse_attention(*tokens, **options)[0].square().sum(), tokens)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = sparse_attention(*tokens, **options)
        found = torch.autograd.grad(output.square().sum(), tokens)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_compiled_with_gradients():
    tokens, options = _arguments("hax")
    tokens = [x.requires_grad_() for x in tokens]
    expected = torch.autograd.grad(sparse_attention(*tokens, **options)[0].square().sum(), tokens)
    compiled = torch.compile(sparse_attention, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*tokens, **options)[0].square().sum(), tokens)
    torch.testing.assert_close(found, expected, **EXACT)


def test_mistakes():
    (query, key, value), options = _arguments("hax")
    one = torch.zeros(query.shape[:3], dtype=torch.long)
    no_row, no_token = ({"query": q, "key": q, "value": q} for q in (query[:0], query[:, :0]))
    _, memory = sparse_attention(query, key, value, **options, output_final_state=True)
    for message, changes in {
        "backend must be one of auto, dense, blocks, triton; got 'fast'": {"backend": "fast"},
        r"key must have shape \[B, T, S, d\]": {"query": query[..., :2]},
        "query must hold at least one row, got B = 0": no_row,
        "query must hold at least one token, got T = 0": no_token,
        "scores and a positive selected_keys go together": {"selected_keys": 0},
        "Nothing says which keys are seen": {"selected_keys": 0, "scores": None, "bins": []},
        r"scores must have shape \[B, T, S\]": {"scores": options["scores"][:, :3]},
        r"bins.key must have shape \[B, T, S\]": {"bins": [Bins(one, one[:1], 1, 1)]},
        "bins need a positive number and keys": {"bins": [Bins(one, one, 1, 0)]},
        "it belongs to another layer or batch": {"initial_state": memory, "selected_keys": 4},
        "lengths must lie between": {"lengths": torch.tensor([70, 71])},
    }.items():
        with pytest.raises(ValueError, match=message):
            sparse_attention(**{"query": query, "key": key, "value": value} | options | changes)
    with pytest.raises(ValueError, match="Packed documents begin and end within T"):
        row, of_row = _arguments("selected")
        sparse_attention(*row, **of_row, cu_seqlens=torch.tensor([0, 100]), output_final_state=True)
