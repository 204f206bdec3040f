"""Whole models of 125M parameters on a CPU, bfloat16: prefill and decode beside Llama of the same shape."""

import torch

from benchmarks.harness import footnote, machine, markdown, read, time_in_turns, verify_model
from benchmarks.model_cpu import decode, interdomain, llama, prefill
from modeling_interdomain.ops.common.cpu import multiplies_bf16

# What the ratio to Llama has to be, by kind and tokens before.
REQUIRED = {"prefill": {"2048": 1.1, "8192": 1.7}, "decode": {"512": 1.0}}

# Of logits token by token and of a whole prompt: each of some hundred results on the way is rounded to 2^-8.
LARGEST_ERROR = 0.05


def run(quick: bool = False) -> dict:
    models = {"interdomain": interdomain(quick), "llama": llama(quick)}
    for model in models.values():
        model.to(torch.bfloat16)
    errors = {name: verify_model(model, LARGEST_ERROR) for name, model in models.items()}
    seconds = 0.2 if quick else 20.0
    return {
        "relative_error": errors,
        "required": REQUIRED,
        "instructions": multiplies_bf16(torch.empty(0, dtype=torch.bfloat16)),
        "prefill": [prefill(models, length, seconds) for length in ([64] if quick else [512, 2048, 8192])],
        "decode": [_decode(models, 32 if quick else 512, seconds)],
        "floor": _floor(models["interdomain"].config, 64 if quick else 2048, seconds / 8),
        "elsewhere": _elsewhere(),
    }


def _decode(models: dict, position: int, seconds: float) -> dict:
    """The median of three, with all ratios: what is where in memory makes some percent, and differs each time."""
    rows = sorted((decode(models, position, seconds, LARGEST_ERROR) for _ in range(3)), key=lambda row: row["ratio"])
    return {**rows[1], "ratios": [row["ratio"] for row in rows]}


def _elsewhere() -> list[dict]:
    """What was measured on other CPUs: which model is ahead depends on their instructions."""
    newest = read("bf16_cpu")
    records = [newest, *newest.pop("elsewhere", [])]
    return [record for record in records if record["machine"]["cpu"] != machine()["cpu"]]


@torch.no_grad()
def _floor(config, length: int, seconds: float) -> dict:
    """Seconds of the matrix products alone of a prompt of whole chunks, with their operands at hand."""
    size, heads, modes, chunk = config.hidden_size, config.num_attention_heads, 2 * config.state_size, config.chunk_size
    key, value, chunks = config.feature_dim, config.head_dim, length // config.chunk_size

    def product(batch, rows, inner, columns, dtype=torch.bfloat16):
        operands = torch.randn(batch, rows, inner, dtype=dtype), torch.randn(batch, inner, columns, dtype=dtype)
        return lambda: torch.bmm(*operands)

    each = {
        "projections": [product(1, length, size, size)] * 4
        + [product(1, length, size, config.intermediate_size)] * 2
        + [product(1, length, config.intermediate_size, size)],
        "operator": [
            product(heads * chunks, chunk, key, chunk + modes),  # scores, query times state
            product(heads, length, chunk + modes, chunk + 2 * modes),  # the joint matrix and its rest
            product(heads * chunks, chunk, chunk + modes, value),  # values, reader times state
        ],
        "states": [product(heads * chunks, key + value, chunk, modes, torch.float32)],
    }
    functions = {name: lambda calls=calls: [call() for call in calls] for name, calls in each.items()}
    times = time_in_turns(functions, seconds)
    layers = config.num_hidden_layers
    return {"length": length, **{name: layers * row["median"] for name, row in times.items()}}


def table(record: dict) -> str:
    rows = []
    for kind, bounds in record["required"].items():
        for row in record[kind]:
            tokens = row.get("length", row.get("position"))
            bound = bounds.get(str(tokens))
            speeds = [f"{row[name]['tokens_per_second']:,.1f}" for name in ("interdomain", "llama")]
            required = "" if bound is None else f"{bound:.1f}x, {'met' if row['ratio'] >= bound else 'missed'}"
            ratios = row.get("ratios", [])
            spread = f" ({ratios[0]:.2f}x to {ratios[-1]:.2f}x)" if ratios else ""
            rows.append([kind, f"{tokens:,}", *speeds, f"{row['ratio']:.2f}x{spread}", required])
    header = ["", "tokens before", "Interdomain, tokens/s", "Llama, tokens/s", "ratio", "required"]
    floor = dict(record["floor"])
    length = floor.pop("length")
    parts = ", ".join(f"{name} {1e3 * taken:,.0f} ms" for name, taken in floor.items())
    about = f"Batch 1, bfloat16, the recurrent state in float32. Matrix products of {length:,} tokens alone: {parts}. "
    others = [_in_short(other) for other in record["elsewhere"]]
    return "\n\n".join([markdown(header, rows), about + footnote(record), *others])


def _in_short(record: dict) -> str:
    ratios = ", ".join(
        f"{kind} {row['ratio']:.2f}x at {row.get('length', row.get('position')):,}"
        for kind in record["required"]
        for row in record[kind]
    )
    return f"Elsewhere: {ratios}. {footnote(record)}"
