"""One layer's operator on a GPU at the 1.3B head shape, bfloat16: plain, with gates of time and of the write, and with
the delta rule besides; tokens are held constant while the length grows. What is most worth knowing comes first.

Beside it FlashAttention through SDPA, and from flash-linear-attention GLA, GSA, retention, Mamba-2 (its operator is the
gated linear attention with one decay a head) and Gated DeltaNet, where that package can be imported.
"""

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, normalize, scaled_dot_product_attention

from benchmarks import gpu
from benchmarks.harness import footnote, gates_at_start, markdown
from modeling_interdomain import interdomain_attention
from modeling_interdomain.ops.interdomain.gates import Gates

HEADS, DIM, STATE, CHUNK = 32, 64, 64, 64
TOKENS, LENGTHS = 65536, (4096, 32768, 1024, 16384, 65536)
# Forward and backward, FlashAttention over ours, on an H200.
REQUIRED = {4096: 1.0, 32768: 3.0}
GATES = {"interdomain": (), "gates": Gates._fields[:2], "delta": Gates._fields}
OURS = tuple(GATES)
PEERS = ("flash", "gla", "gsa", "retention", "mamba2", "gated_deltanet")


def run(quick: bool = False, choice: gpu.Choice = gpu.EVERYTHING) -> dict:
    where = gpu.device(quick)
    tokens, lengths = (64, (32, 64)) if quick else (TOKENS, LENGTHS)
    record = {
        "relative_error": gpu.verify(where),
        "ceilings": gpu.ceilings(where),
        "heads": 2 if quick else HEADS,
        "tokens": tokens,
        "required": {str(length): ratio for length, ratio in REQUIRED.items()},
    }

    def case(length: int, batch: int, training: bool) -> dict:
        seconds = 0.05 if quick else 1.0
        return _case(where, length, batch, record["heads"], training, record["ceilings"], seconds)

    cases = {
        f"{length} {'training' if training else 'forward'}": lambda length=length, training=training: (
            gpu.largest_that_fits(lambda batch: case(length, batch, training), tokens // length)
        )
        for length in lengths
        for training in (True, False)
    }
    return gpu.run_cases("operator_gpu", cases, record, choice, keep=not quick)


def _case(where, length: int, batch: int, heads: int, training: bool, ceiling: dict, seconds: float) -> dict:
    generator = torch.Generator(where).manual_seed(0)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator, device=where).to(dtype).requires_grad_(training)

    query, key, value = (normal(batch, length, heads, DIM) for _ in range(3))
    weights = torch.randn(batch, length, heads, DIM, generator=generator, device=where).bfloat16()
    row: dict = {"length": length, "batch": batch, "training": training, "missing_peers": {}}
    functions: dict[str, Callable] = {}
    for name in (*OURS, *PEERS):
        try:
            attention, inputs = _attention(name, query, key, value, normal)
            function = _training(attention, inputs, weights) if training else attention
            function()
        except Exception as error:  # a peer's own: it is missing, or its kernels do not compile here
            if name in OURS[:2] or (name in PEERS and isinstance(error, torch.OutOfMemoryError)):
                raise
            row["missing_peers"][name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            continue
        functions[name] = function
    with torch.set_grad_enabled(training):
        row["times"] = gpu.measure(functions, where, seconds * len(functions))
        row["peak_bytes"] = {name: gpu.peak_bytes(function, where) for name, function in functions.items()}
    size = query.numel()
    row["floor"] = gpu.floor((11 if training else 4) * size * 2, (3 if training else 1) * _operations(query), ceiling)
    if "flash" in functions:
        row["ratio"] = row["times"]["flash"]["median"] / row["times"]["interdomain"]["median"]
    return row


def _operations(query: torch.Tensor) -> float:
    """8CM + 2C(R+D) + 8M(R+D) + 8M^2 a head and token, forward; each gradient of a product costs two more."""
    per_head = 8 * CHUNK * STATE + 2 * CHUNK * 2 * DIM + 8 * STATE * 2 * DIM + 8 * STATE**2
    return per_head * query.numel() / DIM


def _training(attention: Callable, inputs: list[torch.Tensor], weights: torch.Tensor) -> Callable:
    return lambda: torch.autograd.grad(attention(), inputs, weights)


def _attention(name: str, query, key, value, normal) -> tuple[Callable, list[torch.Tensor]]:
    """The operator as a function without arguments, and what its gradient is taken of."""
    heads = query.shape[2]
    tokens = [query, key, value]
    if name in OURS:
        with torch.no_grad():
            decay = torch.stack([-0.05 * torch.rand(heads, STATE), 3 * torch.randn(heads, STATE)], dim=-1)
            decay = decay.to(query.device)
        decay.requires_grad_(query.requires_grad)
        parameters = [decay, normal(heads, STATE, 2, dtype=torch.float32)]
        parameters.append(normal(heads, STATE, STATE, 2, dtype=torch.float32))
        every = gates_at_start(key, *parameters)
        gates = {x: every[x].requires_grad_(query.requires_grad) for x in GATES[name]}
        options = {"chunk_size": CHUNK, "backend": gpu.backend(query.device)}
        inputs = [*tokens, *parameters, *gates.values()]
        return lambda: interdomain_attention(*tokens, *parameters, **options, **gates)[0], inputs
    if name == "flash":
        kernel = SDPBackend.FLASH_ATTENTION if query.is_cuda else SDPBackend.MATH

        def flash():
            with sdpa_kernel(kernel):
                heads_first = (x.transpose(1, 2) for x in tokens)
                return scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

        return flash, tokens
    return _linear(name, tokens, normal)


def _linear(name: str, tokens, normal):
    """The operators of flash-linear-attention, with gates drawn as its own tests draw them."""
    query, key, value = tokens
    batch, length, heads, _ = query.shape
    if name == "gla":
        from fla.ops.gla import chunk_gla

        gate = normal(batch, length, heads, DIM)
        return lambda: chunk_gla(query, key, value, logsigmoid(gate))[0], [*tokens, gate]
    if name == "gsa":
        from fla.ops.gsa import chunk_gsa

        slots, gate = normal(batch, length, heads, STATE), normal(batch, length, heads, STATE)
        return lambda: chunk_gsa(query, key, value, slots, logsigmoid(gate))[0], [*tokens, slots, gate]
    if name == "retention":
        from fla.ops.retention import chunk_retention

        return lambda: chunk_retention(query, key, value)[0], tokens
    gate = normal(batch, length, heads, dtype=torch.float32)
    if name == "mamba2":
        from fla.ops.simple_gla import chunk_simple_gla

        return lambda: chunk_simple_gla(query, key, value, logsigmoid(gate))[0], [*tokens, gate]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    beta = normal(batch, length, heads)

    def gated_deltanet():
        unit = normalize(query, dim=-1), normalize(key, dim=-1)
        return chunk_gated_delta_rule(*unit, value, logsigmoid(gate), beta.sigmoid())[0]

    return gated_deltanet, [*tokens, gate, beta]


def _measured(record: dict) -> list[dict]:
    return [row for row in record["rows"].values() if "times" in row]


def table(record: dict) -> str:
    rows = []
    for row in sorted(_measured(record), key=lambda row: (row["training"], row["length"])):
        times, required = row["times"], record["required"].get(str(row["length"])) if row["training"] else None
        others = [f"{times[name]['median'] * 1e3:.2f}" if name in times else "" for name in (*OURS[1:], *PEERS)]
        rows.append(
            [
                "forward + backward" if row["training"] else "forward", f"{row['length']:,}", str(row["batch"]),
                f"{times['interdomain']['median'] * 1e3:.2f}", *others,
                f"{row['ratio']:.2f}x" if "ratio" in row else "", f"{required}x" if required else "",
                f"{row['floor'] * 1e3:.3f}",
            ]
        )  # fmt: skip
    header = [
        "",
        "tokens",
        "batch",
        "ours, ms",
        "with gates, ms",
        "with the delta rule, ms",
        *(f"{name}, ms" for name in PEERS),
        "against flash",
        "required",
    ]
    ceiling = record["ceilings"]
    missing = {name: why for row in _measured(record) for name, why in row["missing_peers"].items()}
    notes = [
        f"Floor: bytes at {ceiling['bytes_per_second'] / 1e12:.2f} TB/s (copy), operations at "
        f"{ceiling['operations_per_second'] / 1e12:.0f} TFLOP/s (bfloat16 matrix product), both measured."
    ]
    notes += [f"Not measured: {name} ({why})." for name, why in sorted(missing.items())]
    return "\n\n".join([markdown([*header, "floor, ms"], rows), " ".join(notes) + " " + footnote(record)])


def plot(record: dict, path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for axis, training in zip(axes, (False, True)):
        rows = sorted((x for x in _measured(record) if x["training"] == training), key=lambda row: row["length"])
        for name in (*OURS, *PEERS):
            points = [(row["length"], row["times"][name]["median"] * 1e3) for row in rows if name in row["times"]]
            if points:
                axis.plot(*zip(*points), marker="o", label=name)
        title = "forward + backward" if training else "forward"
        axis.set(
            xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=f"{title}, {record['tokens']:,} tokens"
        )
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
