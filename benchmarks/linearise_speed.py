"""A Llama of SmolLM2's shape, and windows with a memory in its place: time and bytes of a token after ever more text.

On a GPU in bfloat16, on a CPU in float32.
"""

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from benchmarks.harness import SMOLLM2_SHAPE, footnote, markdown, time_in_turns, verify_model
from conversion.carry import Window, interdomain_config
from examples.quickstart_llama import cache_after, cache_bytes
from modeling_interdomain import InterdomainCache

SHAPE = SMOLLM2_SHAPE | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "max_position_embeddings": 8192,
}
TINY = {"vocab_size": 100, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 3}
WINDOW, SINKS, MODES = 64, 4, 64
POSITIONS = (512, 4096, 8192, 65536)


def run(quick: bool = False) -> dict:
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = {name: model.to(where) for name, model in make_models(quick).items()}
    errors = {name: verify_model(model.cpu()) for name, model in models.items()}
    if where.type == "cuda":
        models = {name: model.to(where, torch.bfloat16) for name, model in models.items()}
    positions = (32, 160) if quick else POSITIONS
    caches = {(name, n): _cache(model, n) for name, model in models.items() for n in positions}
    sizes = {key: cache_bytes(cache) for key, cache in caches.items()}
    functions = {f"{name} {n}": _step(models[name], cache) for (name, n), cache in caches.items()}
    times = time_in_turns(functions, 0.3 if quick else 20.0 if where.type == "cuda" else 120.0)
    rows = [{"model": name, "position": n, "bytes": sizes[name, n], **times[f"{name} {n}"]} for name, n in caches]
    return {"relative_error": errors, "dtype": str(models["llama"].dtype).removeprefix("torch."), "rows": rows}


def make_models(quick: bool) -> dict[str, PreTrainedModel]:
    """Random numbers: how fast a step is does not hang on them."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE | (TINY if quick else {}))
    layers = list(range(config.num_hidden_layers))
    windows = interdomain_config(config, layers, MODES, Window(WINDOW, SINKS))
    return {
        name: AutoModelForCausalLM.from_config(each, dtype=torch.float32).eval()
        for name, each in (("llama", config), ("windows", windows))
    }


@torch.no_grad()
def _cache(model: PreTrainedModel, length: int) -> DynamicCache | InterdomainCache:
    """After so many tokens; the keys and values of a Llama are made up, for reading takes the square of the time."""
    if model.config.model_type == "llama":
        return cache_after(model, length)
    cache, generator = InterdomainCache(model.config), torch.Generator().manual_seed(1)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator).to(model.device)
    for piece in ids.split(2048, dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    return cache


def _step(model: PreTrainedModel, cache: DynamicCache | InterdomainCache):
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    @torch.no_grad()
    def step() -> torch.Tensor:
        logits = model(token, past_key_values=cache, use_cache=True).logits
        if token.is_cuda:
            torch.cuda.synchronize()
        return logits

    return step


def ratio(record: dict, model: str = "windows") -> float:
    """Of the time of a token after the longest text to that after the shortest."""
    rows = sorted((row["position"], row["median"]) for row in record["rows"] if row["model"] == model)
    return rows[-1][1] / rows[0][1]


def table(record: dict) -> str:
    by_position: dict[int, dict] = {}
    for row in record["rows"]:
        by_position.setdefault(row["position"], {})[row["model"]] = row
    rows = [
        [
            f"{position:,}",
            *(f"{1 / found[name]['median']:.1f}" for name in ("windows", "llama")),
            f"{found['llama']['median'] / found['windows']['median']:.2f}x",
            *(f"{found[name]['bytes'] / 1e6:,.1f}" for name in ("windows", "llama")),
        ]
        for position, found in sorted(by_position.items())
    ]
    header = ["tokens before", "windows, tokens/s", "Llama, tokens/s", "ratio", "windows, MB", "Llama, MB"]
    about = f"Batch 1, {record['dtype']}, random weights; windows, last over first: {ratio(record):.3f}."
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])
