"""Peak memory of reading a prompt of the 1.3B shape, whole and in chunks, beside Llama."""

import torch
from transformers import DynamicCache

from benchmarks import gpu
from benchmarks.decode_gpu import model
from benchmarks.harness import footnote, markdown
from modeling_interdomain import InterdomainCache

SIZE, LENGTHS, CHUNK = "1.3b", (4096, 16384, 65536), 4096


def run(quick: bool = False, choice: gpu.Choice = gpu.EVERYTHING) -> dict:
    where = gpu.device(quick)
    size, lengths, chunk = ("tiny", (32, 64), 16) if quick else (SIZE, LENGTHS, CHUNK)
    record = {"relative_error": gpu.verify(where), "size": size, "chunk": chunk}
    models: dict[str, torch.nn.Module] = {}
    cases = {
        f"{name}, {length}, {'chunked' if chunked else 'whole'}": lambda name=name, length=length, chunked=chunked: (
            _case(models, where, name, size, length, chunk if chunked else length)
        )
        for name in ("interdomain", "llama")
        for length in lengths
        for chunked in (False, True)
    }
    return gpu.run_cases("prefill_memory_gpu", cases, record, choice, keep=not quick)


def _case(models, where, name: str, size: str, length: int, chunk: int) -> dict:
    if name not in models:
        models.clear()
        models[name] = model(name, size, where)
    module = models[name]
    ids = torch.randint(module.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1)).to(where)

    @torch.no_grad()
    def prefill():
        cache = InterdomainCache(module.config) if name == "interdomain" else DynamicCache(config=module.config)
        for piece in ids.split(chunk, dim=1):
            output = module(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits

    taken = gpu.measure({"prefill": prefill}, where, 0.0)["prefill"]
    return {"model": name, "length": length, "chunk": chunk, "peak_bytes": gpu.peak_bytes(prefill, where), **taken}


def table(record: dict) -> str:
    rows = []
    for row in record["rows"].values():
        if "median" in row:
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"
            rows.append([row["model"], f"{row['length']:,}", f"{row['chunk']:,}", peak, f"{row['median'] * 1e3:.1f}"])
    header = ["model", "tokens", "tokens at a time", "peak above the weights, MiB", "ms"]
    return markdown(header, rows) + f"\n\nBatch 1, bfloat16, {record['size']}. {footnote(record)}"
