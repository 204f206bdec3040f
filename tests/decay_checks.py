"""What operators and layers are asked whose tokens bring decays of their own."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from modeling_interdomain import InterdomainCache


def everything(operator, leaves, **options):
    """Output, final state and the gradient of every argument for a loss on both."""
    found = operator(**leaves, output_final_state=True, **options)
    return dict(zip(("output", "state", *leaves), [*found, *gradients(found, leaves)], strict=True))


def gradients(found, leaves):
    weights = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=weights, dtype=torch.float64).to(x)).sum() for x in found)
    return torch.autograd.grad(loss, list(leaves.values()))


def assert_close(found, expected, bound=1e-10):
    for name, x in expected.items():
        error = ((found[name] - x).norm() / x.norm().clamp(min=1e-30)).item()
        assert error < bound, (name, error)


def check_documents(operator, leaves):
    """Packed documents in 41 tokens, empty ones among the six: each alone, and all as the definition has them."""
    ends = torch.tensor([0, 5, 5, 6, 22, 41, 41])
    found = everything(operator, leaves, cu_seqlens=ends, chunk_size=4)
    assert_close(found, everything(operator, leaves, cu_seqlens=ends, backend="recurrent"))
    for document, (start, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        if start == end:
            continue
        alone = {name: x[:, start:end] if x.shape[:2] == (1, 41) else x for name, x in leaves.items()}
        alone["initial_state"] = leaves["initial_state"][document : document + 1]
        together = operator(**leaves, cu_seqlens=ends, chunk_size=4)[0][:, start:end]
        torch.testing.assert_close(together, operator(**alone, backend="recurrent")[0])


def check_pads(operator, leaves):
    """What stands at the pads of three rows of 33 tokens is not read; the first four arguments are tokens."""
    lengths, tokens = torch.tensor([33, 0, 20]), list(leaves)[:4]
    pads = torch.arange(33) >= lengths[:, None]
    with torch.no_grad():
        for name in tokens:
            leaves[name][pads] = float("nan")
    found = everything(operator, leaves, lengths=lengths, chunk_size=8)
    assert_close(found, everything(operator, leaves, lengths=lengths, backend="recurrent"))
    assert not any(found[name][pads].any() for name in ("output", *tokens))
    assert torch.equal(found["state"][1], leaves["initial_state"][1])


def check_dynamic_graph(operator, make, kind):
    """One graph serves every length; `make` gives the arguments of a row of so many tokens."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(operator, backend=counter, fullgraph=True)
    for length in (130, 140, 77):
        leaves, extent = make(length), {}
        if kind == "documents":
            leaves.pop("initial_state")
            extent = {"cu_seqlens": torch.tensor([0, 50, 50, 64, length])}
        elif kind == "lengths":
            extent = {"lengths": torch.tensor([length - 9])}
        found, expected = (each(**leaves, **extent, output_final_state=True) for each in (compiled, operator))
        for a, b in zip([*found, *gradients(found, leaves)], [*expected, *gradients(expected, leaves)], strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 2
    torch.compiler.reset()


@torch.no_grad()
def check_control(model, definition, ids, assert_same):
    """A model of other layers decodes, takes tokens back, reads no pads and is as its definition, in rows of 20."""
    cache = InterdomainCache(model.config)
    cache.activate_past_recording()
    whole = model(ids, use_cache=False).logits
    pieces = [*ids[:, :12].split([5, 7], dim=1), *ids[:, 12:].split(1, dim=1)]
    assert_same(torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1), whole)
    cache.crop(-9)
    assert_same(model(ids[:, 11:], past_key_values=cache).logits, whole[:, 11:])
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :4] = mask[1, 15:] = 0
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    assert_same(logits[0, 4:], model(ids[:1, 4:]).logits[0])
    assert_same(logits[1, :15], model(ids[1:, :15]).logits[0])
    assert_same(definition(ids, use_cache=False).logits, whole)
