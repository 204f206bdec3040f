"""The operator against softmax attention on a CPU, at the head shape of the 125M model, float32."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.harness import footnote, markdown, matmul_rate, time_in_turns, verify_operator
from modeling_interdomain import interdomain_attention

HEADS, DIM, STATE, CHUNK = 12, 64, 64, 64
# Softmax over ours, forward without gradients: what the operator must reach at each length.
REQUIRED = {1024: 0.7, 4096: 2.0, 16384: 8.0}
FLAT_FROM, FLAT_WITHIN = 4096, 0.2


def operations_per_token() -> int:
    """Multiplications and additions of all heads at chunk length C: 8CM + 2C(R+D) + 8M(R+D) + 8M^2 each."""
    width = 2 * DIM
    return HEADS * (8 * CHUNK * STATE + 2 * CHUNK * width + 8 * STATE * width + 8 * STATE**2)


def run(quick: bool = False) -> dict:
    error = verify_operator()
    lengths = [128, 256] if quick else [1024, 4096, 16384, 65536]
    seconds = 0.1 if quick else 6.0
    forward = [_forward(length, seconds, peer=length < 65536) for length in lengths]
    training = [_training(length, seconds) for length in ([64] if quick else [1024, 4096])]
    return {
        "relative_error": error,
        "matmul_operations_per_second": matmul_rate(),
        "operations_per_token": operations_per_token(),
        "forward": forward,
        "forward_and_backward": training,
        "required": {str(length): ratio for length, ratio in REQUIRED.items()},
        "spread_of_time_per_token": _spread(forward),
    }


def _inputs(length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(1, length, HEADS, DIM, generator=generator) for _ in range(3)]
    decay = -0.05 * torch.rand(HEADS, STATE, generator=generator)
    phase = 3 * torch.randn(HEADS, STATE, generator=generator)
    return tokens, [
        torch.stack([decay, phase], dim=-1),
        torch.randn(HEADS, STATE, 2, generator=generator),
        torch.randn(HEADS, STATE, STATE, 2, generator=generator) / STATE**0.5,
    ]


def _softmax(tokens: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = (x.transpose(1, 2) for x in tokens)
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def _row(length: int, times: dict) -> dict:
    row = {"length": length, **times}
    if "softmax" in times:
        row["ratio"] = times["softmax"]["median"] / times["interdomain"]["median"]
    return row


def _forward(length: int, seconds: float, peer: bool) -> dict:
    tokens, parameters = _inputs(length)
    functions = {"interdomain": lambda: interdomain_attention(*tokens, *parameters, backend="chunk", chunk_size=CHUNK)}
    if peer:
        functions["softmax"] = lambda: _softmax(tokens)
    with torch.no_grad():
        return _row(length, time_in_turns(functions, seconds))


def _training(length: int, seconds: float) -> dict:
    tokens, parameters = _inputs(length)
    for x in (*tokens, *parameters):
        x.requires_grad_()

    def interdomain():
        output, _ = interdomain_attention(*tokens, *parameters, backend="chunk", chunk_size=CHUNK)
        return torch.autograd.grad(output.sum(), [*tokens, *parameters])

    def softmax():
        return torch.autograd.grad(_softmax(tokens).sum(), tokens)

    return _row(length, time_in_turns({"interdomain": interdomain, "softmax": softmax}, seconds))


def _spread(forward: list[dict]) -> float:
    """By how much the time per token varies from FLAT_FROM on: (largest - smallest) / smallest."""
    times = [row["interdomain"]["median"] / row["length"] for row in forward if row["length"] >= FLAT_FROM]
    return max(times) / min(times) - 1 if times else 0.0


def table(record: dict) -> str:
    floor = record["operations_per_token"] / record["matmul_operations_per_second"]
    rows = []
    for title, key in (("forward", "forward"), ("forward + backward", "forward_and_backward")):
        for row in record[key]:
            ours, peer = row["interdomain"], row.get("softmax")
            required = record["required"].get(str(row["length"])) if key == "forward" else None
            rows.append(
                [
                    title,
                    f"{row['length']:,}",
                    _ms(ours),
                    _ms(peer) if peer else "",
                    f"{row['ratio']:.2f}x" if peer else "",
                    f"{required}x" if required else "",
                    f"{ours['median'] / row['length'] * 1e6:.1f}",
                    f"{floor * 1e6:.1f}" if key == "forward" else "",
                ]
            )
    header = ["", "tokens", "ours, ms", "softmax, ms", "speed against softmax", "required", "us a token", "floor, us"]
    flat = record["spread_of_time_per_token"]
    return "\n\n".join(
        [
            markdown(header, rows),
            f"Medians (20th to 80th percentile). The floor is {record['operations_per_token']:,} operations a token at "
            f"the machine's {record['matmul_operations_per_second'] / 1e9:.0f} GFLOP/s. Time per token varies by "
            f"{flat:.0%} from {FLAT_FROM:,} tokens on (allowed: {FLAT_WITHIN:.0%}). {footnote(record)}",
        ]
    )


def _ms(times: dict) -> str:
    return f"{times['median'] * 1e3:.1f} ({times['p20'] * 1e3:.1f} to {times['p80'] * 1e3:.1f})"


def plot(record: dict, path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, label in (("interdomain", "Interdomain, chunked"), ("softmax", "softmax, SDPA")):
        points = [(row["length"], row[name]["median"] * 1e3) for row in record["forward"] if name in row]
        axes.plot(*zip(*points), marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="forward, ms", title="One layer of attention, CPU")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
