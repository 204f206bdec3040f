"""Sparse attention, which first chooses its keys, against full softmax attention on a CPU, and a decode step after
short and long texts; float32.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import footnote, largest_error, markdown, time_in_turns
from modeling_interdomain import InterdomainConfig
from modeling_interdomain.mixers.sparse.branch import SparseBranch
from modeling_interdomain.mixers.sparse.choice import ranking_loss
from modeling_interdomain.ops.sparse.entry import sparse_attention
from modeling_interdomain.ops.sparse.stream import Bins

# The branch of the 125M model: S heads, queries and keys of d, values of D numbers, half of the keys for each part.
HEADS, DIM, WIDTH, BINS, KEYS = 12, 16, 64, 64, 32
# Full attention over ours at each length.
REQUIRED = {"forward": {4096: 2.0, 16384: 8.0}, "forward_and_backward": {4096: 4.0}}
FLAT_WITHIN = 0.2
STEP_MS, STEP_FLAT_WITHIN = 0.4, 0.02


def run(quick: bool = False) -> dict:
    error = _verify()
    seconds = 0.1 if quick else 6.0
    lengths = [128, 256] if quick else [4096, 16384, 65536]
    forward = [_row(length, seconds, peer=length < 65536, backward=False) for length in lengths]
    return {
        "relative_error": error,
        "forward": forward,
        "forward_and_backward": [_row(lengths[0], seconds, peer=True, backward=True)],
        "spread_of_time_per_token": _spread([row["sparse"]["median"] / row["length"] for row in forward]),
        "steps": _steps([64, 512] if quick else [512, 65536], seconds),
        # What `torch.compile` of a forward makes of the same step; it takes a minute.
        "compiled_steps": [] if quick else _steps([512, 65536], seconds, compiled=True),
    }


def _inputs(length: int, dtype: torch.dtype = torch.float32):
    """Random tokens, hashed as the branch hashes them; every key is as likely to be good as every other."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, length, HEADS, DIM, generator=generator) for _ in range(2))
    value = torch.randn(1, length, HEADS, WIDTH, generator=generator)
    projection = torch.randn(HEADS, DIM, BINS, generator=generator)
    bins = [torch.einsum("btsd,sdh->btsh", x, projection).argmax(-1) for x in (query, key)]
    scores = torch.randn(1, length, HEADS, generator=generator)
    tokens = [(x * scale).to(dtype) for x, scale in ((query, 1), (key, DIM**-0.5), (value, 1))]
    return tokens, {"scores": scores, "selected_keys": KEYS, "bins": [Bins(*bins, BINS, KEYS, complete=True)]}


def _verify() -> float:
    """The largest relative error of blocks and their gradients against the definition in float64."""
    found, expected = (
        _with_gradients(*_inputs(300, dtype), backend)
        for dtype, backend in ((torch.float32, "blocks"), (torch.float64, "dense"))
    )
    return largest_error(found, expected, "The operator is wrong")


def _with_gradients(tokens, options, backend: str = "blocks") -> list[torch.Tensor]:
    tokens = [x.requires_grad_() for x in tokens]
    output, _ = sparse_attention(*tokens, **options, backend=backend)
    return [output.detach(), *torch.autograd.grad(output.sum(), tokens)]


def _branch() -> SparseBranch:
    torch.manual_seed(0)
    return SparseBranch(InterdomainConfig(num_hidden_layers=1, sparse_attention="hax"), "hax", HEADS, WIDTH).eval()


def _row(length: int, seconds: float, peer: bool, backward: bool) -> dict:
    """Given queries, keys and values; ours hashes and scores the former two, and in training the scorer learns."""
    (*both, own_value), _ = _inputs(length)
    query, key, value = (torch.randn(1, HEADS, length, WIDTH, requires_grad=backward) for _ in range(3))
    tokens = [x.requires_grad_(backward) for x in (*both, own_value)]
    branch = _branch().train(backward)

    def softmax():
        output = scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(output.sum(), (query, key, value)) if backward else output

    def sparse():
        scores, bins, _ = branch._choose(torch.stack(both, dim=3).detach(), None, None, backward)
        chosen = {"scores": scores, "bins": bins, "selected_keys": branch.selected_keys, "backend": "blocks"}
        output, _ = sparse_attention(*tokens, **chosen)
        if not backward:
            return output
        loss = ranking_loss(scores, *(x.detach() for x in both), branch.selected_keys)
        return torch.autograd.grad(output.sum() + loss, (*tokens, *branch.scorer.parameters()))

    functions = {"sparse": sparse, "softmax": softmax} if peer else {"sparse": sparse}
    with torch.set_grad_enabled(backward):
        row = {"length": length, **time_in_turns(functions, seconds)}
    return row | ({"ratio": row["softmax"]["median"] / row["sparse"]["median"]} if peer else {})


def _steps(lengths: list[int], seconds: float, compiled: bool = False) -> list[dict]:
    """A token in the branch of one layer, all of it: projections, convolutions, hash, score, memory, attention."""
    branch = _branch()
    config = branch.config
    token, value = torch.randn(1, 1, config.hidden_size), torch.randn(1, 1, HEADS, WIDTH)

    def step(windows, states):
        return branch.step(branch.prepare(token, value, windows, states, None), states, None)

    if compiled:
        step = torch.compile(step, fullgraph=True, dynamic=False)

    def after(length: int):
        states = windows = None
        for start in range(0, length, 4096):
            tokens = min(4096, length - start)
            hidden = torch.randn(1, tokens, config.hidden_size)
            inputs = branch.prepare(hidden, torch.randn(1, tokens, HEADS, WIDTH), windows, states, None)
            _, states = branch.attend(inputs, states, None, keep=True)
            windows = [x.clone() for x in inputs.conv_state]  # in the order in memory that a cache keeps
        return lambda: step(windows, states)

    with torch.no_grad():
        times = time_in_turns({str(length): after(length) for length in lengths}, seconds, at_least=20)
    return [{"length": int(length), **row} for length, row in times.items()]


def _spread(times: list[float]) -> float:
    """(largest - smallest) / smallest."""
    return max(times) / min(times) - 1


def table(record: dict) -> str:
    rows = []
    for title, key in (("forward", "forward"), ("forward + backward", "forward_and_backward")):
        for row in record[key]:
            ours, peer = row["sparse"], row.get("softmax")
            required = REQUIRED[key].get(row["length"])
            speed = f"{row['ratio']:.2f}x" if peer else ""
            per_token = f"{ours['median'] / row['length'] * 1e6:.1f}"
            cells = [_ms(ours), _ms(peer) if peer else "", speed, f"{required}x" if required else "", per_token]
            rows.append([title, f"{row['length']:,}", *cells])
    for title, key, required in (("", "steps", f"{STEP_MS} ms"), (", compiled", "compiled_steps", "")):
        for row in record.get(key, []):
            per_token = f"{row['median'] * 1e6:.0f}"
            length = f"after {row['length']:,}"
            rows.append([f"a decode step{title}", length, _ms(row, 3), "", "", required, per_token])
    header = ["", "tokens", "sparse, ms", "softmax, ms", "speed against softmax", "required", "us a token"]
    steps = _spread([row["median"] for row in record["steps"]])
    return "\n\n".join(
        [
            markdown(header, rows),
            f"Medians (20th to 80th percentile). Time per token of the forward varies by "
            f"{record['spread_of_time_per_token']:.0%} (allowed: {FLAT_WITHIN:.0%}), that of the decode steps by "
            f"{steps:.1%} (allowed: {STEP_FLAT_WITHIN:.0%}). {footnote(record)}",
        ]
    )


def _ms(times: dict, digits: int = 1) -> str:
    return f"{times['median'] * 1e3:.{digits}f} ({times['p20'] * 1e3:.{digits}f} to {times['p80'] * 1e3:.{digits}f})"
