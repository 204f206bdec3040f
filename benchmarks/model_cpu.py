"""Whole models of 125M parameters on a CPU, float32: prefill and decode beside Llama of the same shape."""

import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from benchmarks.harness import footnote, largest_error, markdown, time_in_turns, verify_model
from modeling_interdomain import InterdomainCache, InterdomainConfig

STATIC = "llama, static cache"


def run(quick: bool = False) -> dict:
    models = {"interdomain": interdomain(quick), "llama": llama(quick)}
    errors = {name: verify_model(model) for name, model in models.items()}
    seconds = 0.2 if quick else 12.0
    lengths = [64] if quick else [512, 2048, 8192]
    positions = [32] if quick else [512, 8192]
    return {
        "relative_error": errors,
        "parameters": {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
        # Before the long prefills and again after them: what they leave in memory might matter to either model.
        "decode": [decode(models, position, seconds) for position in positions],
        "prefill": [prefill(models, length, seconds) for length in lengths],
        "decode_later": [decode(models, position, seconds) for position in positions[:1]],
        "calls": {name: calls_a_layer(make) for name, make in _makers(quick).items()},
    }


def interdomain(quick: bool, **changes):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(_shape(quick), **changes)
    return AutoModelForCausalLM.from_config(config).eval()


def llama(quick: bool, **changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = AutoConfig.from_pretrained(_shape(quick), **changes)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = LlamaConfig(**{name: getattr(shape, name) for name in names}, max_position_embeddings=1 << 17)
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def _shape(quick: bool) -> str:
    return "configuration/interdomain-" + ("tiny" if quick else "125m")


def _makers(quick: bool) -> dict[str, Callable]:
    """By name, what makes a model of a number of layers."""
    mixers = {
        name: lambda layers, name=name: interdomain(quick, num_hidden_layers=layers, token_mixers=name)
        for name in ("interdomain", "s4d", "softmax")
    }
    return {**mixers, "llama": lambda layers: llama(quick, num_hidden_layers=layers)}


def calls_a_layer(make: Callable[[int], torch.nn.Module], tokens: int = 1, **inputs: torch.Tensor) -> int:
    """The operations of ATen that PyTorch is asked for when tokens after a text go through one more layer."""
    shallow, deep = (_calls(make(layers), tokens, **inputs) for layers in (1, 2))
    return deep - shallow


@torch.no_grad()
def _calls(model: torch.nn.Module, tokens: int, **inputs: torch.Tensor) -> int:
    cache = _cache_after(model, torch.arange(8)[None])
    ids = torch.zeros(1, tokens, dtype=torch.long)
    model(ids, past_key_values=cache)  # what is made once
    with _Counter() as counter:
        model(ids, past_key_values=cache, **inputs)
    return counter.calls


class _Counter(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def _ids(models: dict, length: int) -> torch.Tensor:
    vocabulary = models["llama"].config.vocab_size
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def prefill(models: dict, length: int, seconds: float) -> dict:
    ids = _ids(models, length)
    functions = {name: lambda model=model: model(ids, logits_to_keep=1) for name, model in models.items()}
    return {"length": length, **_per_second(time_in_turns(functions, seconds, at_least=3), length)}


@torch.no_grad()
def decode(models: dict, position: int, seconds: float, bound: float = 1e-4) -> dict:
    """Tokens a second from `position` on, one token at a time; caches that grow go back there after some.

    Llama's default cache copies itself for every token, so it is measured with the one that keeps room as well, whose
    logits may differ by `bound`.
    """
    ids, token, most = _ids(models, position), _ids(models, 1), 32
    caches = {name: _cache_after(model, ids) for name, model in models.items()}
    caches[STATIC] = _cache_after(models["llama"], ids, StaticCache(models["llama"].config, position + 2 * most))

    def step(name: str):
        cache = caches[name]
        if not isinstance(cache, InterdomainCache) and cache.get_seq_length() > position + most:
            _go_back(cache, position)
        return models["llama" if name == STATIC else name](token, past_key_values=cache)

    functions = {name: functools.partial(step, name) for name in caches}
    largest_error([step(STATIC).logits], [step("llama").logits.double()], "A static cache is wrong", bound)
    return {"position": position, **_per_second(time_in_turns(functions, seconds), 1)}


def _go_back(cache: DynamicCache | StaticCache, position: int) -> None:
    if isinstance(cache, StaticCache):  # it cannot be cropped; what is behind its length is written over
        for layer in cache.layers:
            layer.cumulative_length.fill_(position)
    else:
        cache.crop(position - cache.get_seq_length())


def _cache_after(model, ids: torch.Tensor, cache: StaticCache | None = None):
    if cache is None:
        fits = isinstance(model.config, InterdomainConfig)
        cache = InterdomainCache(model.config) if fits else DynamicCache(config=model.config)
    for piece in ids.split(2048, dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    return cache


def _per_second(times: dict, tokens: int) -> dict:
    rows = {name: {**taken, "tokens_per_second": tokens / taken["median"]} for name, taken in times.items()}
    ours = rows["interdomain"]["tokens_per_second"]
    ratios = {"ratio": "llama", "static_ratio": STATIC}
    return rows | {key: ours / rows[name]["tokens_per_second"] for key, name in ratios.items() if name in rows}


def table(record: dict) -> str:
    names = ("interdomain", "llama", STATIC)
    kinds = {"prefill": "prefill", "decode": "decode", "decode_later": "decode, after the prefills"}
    rows = [
        [
            title,
            f"{row.get('length', row.get('position')):,}",
            *(f"{row[name]['tokens_per_second']:,.1f}" if name in row else "" for name in names),
            *(f"{row[key]:.2f}x" if key in row else "" for key in ("ratio", "static_ratio")),
        ]
        for kind, title in kinds.items()
        for row in record.get(kind, [])
    ]
    header = [
        "",
        "tokens before",
        "Interdomain, tokens/s",
        "Llama, tokens/s",
        "with a static cache",
        "ratio",
        "ratio to that",
    ]
    calls = ", ".join(f"{name} {count}" for name, count in record.get("calls", {}).items())
    sizes = ", ".join(f"{name} {count:,}" for name, count in record["parameters"].items())
    about = f"Batch 1, float32. Parameters: {sizes}. " + (f"ATen calls a token and layer: {calls}. " if calls else "")
    return "\n\n".join([markdown(header, rows), about + footnote(record)])
