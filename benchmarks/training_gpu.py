"""Training tokens a second of whole models at 4,096 tokens beside Llama with FlashAttention, in bfloat16.

A step is forward, backward and AdamW.
"""

import torch

from benchmarks import gpu
from benchmarks.decode_gpu import model
from benchmarks.harness import footnote, markdown

SIZES, LENGTH = {"125m": 16, "1.3b": 4, "350m": 8, "760m": 4}, 4096  # size: batch
KINDS = ("interdomain", "llama", "gates", "delta")
REQUIRED = {"1.3b": 1.0}


def run(quick: bool = False, choice: gpu.Choice = gpu.EVERYTHING) -> dict:
    where = gpu.device(quick)
    sizes, length = ({"tiny": 1}, 32) if quick else (SIZES, LENGTH)
    record = {"relative_error": gpu.verify(where), "ceilings": gpu.ceilings(where), "required": REQUIRED}

    def case(name: str, size: str, batch: int, compiled: bool) -> dict:
        return _case(where, name, size, batch, length, compiled, 0.1 if quick else 8.0, record["ceilings"])

    cases = {
        f"{size}, {mode}, {name}": lambda size=size, mode=mode, name=name: gpu.largest_that_fits(
            lambda batch: case(name, size, batch, mode == "compiled"), sizes[size]
        )
        for size in sizes
        for mode in (("eager",) if quick else ("compiled", "eager"))
        for name in KINDS
    }
    return gpu.run_cases("training_gpu", cases, record, choice, keep=not quick)


def _case(where, name, size, batch, length, compiled, seconds, ceiling) -> dict:
    module = model(name, size, where).train()
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=where.type == "cuda")
    ids = torch.randint(module.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1)).to(where)
    forward = torch.compile(module) if compiled else module

    def step():
        loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return loss

    taken = gpu.measure({"step": step}, where, seconds)["step"]
    parameters = sum(p.numel() for p in module.parameters())
    weights = parameters - module.get_input_embeddings().weight.numel()
    return {
        "size": size, "model": name, "compiled": compiled, "batch": batch, "length": length, "parameters": parameters,
        "tokens_per_second": batch * length / taken["median"], "peak_bytes": gpu.peak_bytes(step, where), **taken,
        "floor": gpu.floor(0, 6 * weights * batch * length, ceiling),
    }  # fmt: skip


def table(record: dict) -> str:
    grouped: dict[tuple, dict] = {}
    for row in record["rows"].values():
        if "median" in row:
            grouped.setdefault((row["size"], row["compiled"]), {})[row["model"]] = row
    rows = []
    for (size, compiled), models in grouped.items():
        ours, peer = models.get("interdomain"), models.get("llama")
        rate = [f"{models[name]['tokens_per_second']:,.0f}" if name in models else "" for name in KINDS]
        ratio = f"{ours['tokens_per_second'] / peer['tokens_per_second']:.2f}x" if ours and peer else ""
        required = record["required"].get(size)
        share = f"{ours['floor'] / ours['median']:.0%}" if ours else ""
        rows.append(
            [size, "compiled" if compiled else "eager", *rate, ratio, f"{required}x" if required else "", share]
        )
    header = ["model", "", *(f"{name}, tokens/s" for name in KINDS)]
    header += ["Interdomain over Llama", "required", "of the floor reached"]
    note = "The floor: 6 operations a weight and token at the measured rate of matrix products, without mixing tokens."
    return markdown(header, rows) + f"\n\n{note} {footnote(record)}"
