"""Milliseconds a generated token against the length before it, through `generate()`: eager and captured, beside Llama.

Captured is what `generate()` does with a static cache: it compiles the decode step and keeps it in a CUDA graph.
"""

import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LogitsProcessor

from benchmarks import gpu
from benchmarks.harness import footnote, markdown

SIZES, BATCHES = ("125m", "1.3b", "350m", "760m"), (1, 32, 8, 64, 16)
PREFIXES, STEPS = (1024, 16384, 512, 4096), 48
KINDS = {  # name: model, cache of generate()
    "interdomain captured": ("interdomain", "static"),
    "gates captured": ("gates", "static"),
    "delta captured": ("delta", "static"),
    "llama captured": ("llama", "static"),
    "interdomain eager": ("interdomain", None),
    "llama dynamic": ("llama", None),
}
GATES = {"gates": {"gates": "forget"}, "delta": {"gates": "forget", "delta_rule": True}}


def run(quick: bool = False, choice: gpu.Choice = gpu.EVERYTHING) -> dict:
    where = gpu.device(quick)
    sizes, batches, prefixes = (("tiny",), (2,), (16, 32)) if quick else (SIZES, BATCHES, PREFIXES)
    record = {"relative_error": gpu.verify(where), "ceilings": gpu.ceilings(where)}
    models: dict[str, torch.nn.Module] = {}
    cases = {
        f"{size}, {kind}, batch {batch}, prefix {prefix}": lambda size=size, kind=kind, batch=batch, prefix=prefix: (
            _case(models, where, size, kind, batch, prefix, 4 if quick else STEPS, record["ceilings"])
        )
        for size in sizes
        for kind in KINDS
        for batch in batches
        for prefix in prefixes
    }
    return gpu.run_cases("decode_gpu", cases, record, choice, keep=not quick)


class _Clock(LogitsProcessor):
    """Marks when each step's logits are ready."""

    def __init__(self, where: torch.device):
        self.where, self.marks = where, []

    def __call__(self, input_ids, scores):
        if self.where.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())
        return scores


def model(name: str, size: str, where: torch.device) -> torch.nn.Module:
    """Random weights in bfloat16, of the shape of `configuration/interdomain-SIZE`; some with `GATES`."""
    torch.manual_seed(0)
    shape = AutoConfig.from_pretrained(f"configuration/interdomain-{size}", **GATES.get(name, {}))
    shape.dtype = torch.bfloat16
    if name != "llama":
        with where:
            return AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = LlamaConfig(**{n: getattr(shape, n) for n in names}, max_position_embeddings=1 << 17)
    with where:
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval()


def _case(models, where, size, kind, batch, prefix, steps, ceiling) -> dict:
    name, cache = KINDS[kind]
    key = f"{name}-{size}"
    if key not in models:
        models.clear()  # one at a time
        models[key] = model(name, size, where)
    module = models[key]
    torch.compiler.reset()  # a graph that has met caches of several lengths is one for any length, and slower
    ids = torch.randint(module.config.vocab_size, (batch, prefix), generator=torch.Generator().manual_seed(1)).to(where)
    clock = _Clock(where)
    options = {"cache_implementation": cache} if cache and where.type == "cuda" else {}
    if prefix > 4096:
        options["prefill_chunk_size"] = 4096
    for _ in range(2 if cache else 1):  # compiles
        _generate(module, ids, steps, options, _Clock(where))
    _generate(module, ids, steps, options, clock)
    row = gpu.median_of_gaps(clock.marks[2:] if len(clock.marks) > 4 else clock.marks)
    weights = sum(p.nbytes for n, p in module.named_parameters() if "embed_tokens" not in n)
    return {"size": size, "kind": kind, "batch": batch, "prefix": prefix, **row} | {
        "read_weights_once": weights / ceiling["bytes_per_second"]
    }


def _generate(module, ids, steps, options, clock):
    module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
        pad_token_id=0, logits_processor=[clock], **options,
    )  # fmt: skip


def table(record: dict) -> str:
    grouped: dict[tuple, dict] = {}
    for row in record["rows"].values():
        if "median" in row:
            grouped.setdefault((row["size"], row["batch"], row["prefix"]), {})[row["kind"]] = row
    rows = []
    for (size, batch, prefix), kinds in grouped.items():
        ours, peer = kinds.get("interdomain captured"), kinds.get("llama captured")
        rows.append(
            [
                size, str(batch), f"{prefix:,}",
                *(f"{kinds[kind]['median'] * 1e3:.2f}" if kind in kinds else "" for kind in KINDS),
                f"{peer['median'] / ours['median']:.2f}x" if ours and peer else "",
                f"{ours['median'] / ours['read_weights_once']:.2f}x" if ours else "",
            ]
        )  # fmt: skip
    header = ["model", "batch", "tokens before", *(f"{kind}, ms" for kind in KINDS)]
    header += ["Llama captured over ours", "ours over reading the weights once"]
    return markdown(header, rows) + f"\n\nMedians of the time between tokens, bfloat16. {footnote(record)}"


def plot(record: dict, path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in record["rows"].values() if "median" in row]
    batches = sorted({row["batch"] for row in rows})
    size = rows[-1]["size"]
    figure, axes = pyplot.subplots(1, len(batches), figsize=(4 * len(batches), 3.5), squeeze=False)
    for axis, batch in zip(axes[0], batches):
        for kind in KINDS:
            points = [
                (row["prefix"], row["median"] * 1e3)
                for row in rows
                if (row["size"], row["batch"], row["kind"]) == (size, batch, kind)
            ]
            if points:
                axis.plot(*zip(*points), marker="o", label=kind)
        axis.set(
            xscale="log", yscale="log", xlabel="tokens before", ylabel="ms a token", title=f"{size}, batch {batch}"
        )
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
