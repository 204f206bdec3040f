"""What a dynamic mask costs on a CPU: whole attention layers at the head shape of the 125M model, float32, batch 1."""

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicCache
from transformers.models.doge.configuration_doge import DogeConfig
from transformers.models.doge.modeling_doge import DogeAttention

from benchmarks.harness import footnote, in_ms, largest_error, markdown, time_in_turns
from modeling_interdomain import InterdomainCache, InterdomainConfig
from modeling_interdomain.mixers.softmax.mixer import SoftmaxMixer

WIDTH, HEADS = 768, 12
WINDOW = 512
KINDS = {
    "plain": {},
    "position": {"dynamic_mask": "position"},
    "value": {"dynamic_mask": "value"},
    f"value, window {WINDOW}": {"dynamic_mask": "value", "dynamic_mask_window": WINDOW},
}
# Time with "position" over time without a mask, forward.
REQUIRED = {"position": 1.02}


def run(quick: bool = False) -> dict:
    error = _verify()
    seconds = 0.1 if quick else 8.0
    return {
        "relative_error": error,
        # Longer: 2% is to be told.
        "forward": [_forward(length, 5 * seconds) for length in ([64] if quick else [1024, 4096])],
        "forward_and_backward": [_training(length, seconds) for length in ([64] if quick else [1024])],
        "decode": [_decode(length, seconds / 2) for length in ([64] if quick else [1024, 4096])],
        "required": REQUIRED,
    }


def _layer(length: int, dtype: torch.dtype = torch.float32, **fields) -> SoftmaxMixer:
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 1, "token_mixers": "softmax"}
    config = InterdomainConfig(**shape, max_position_embeddings=2 * length, attn_implementation="sdpa", **fields)
    layer = SoftmaxMixer(config, 0).to(dtype)
    if fields:
        for name, parameter in layer.dynamic_mask.named_parameters():
            torch.nn.init.normal_(parameter, mean=float(name == "table"), std=0.3)
    return layer


def _inputs(length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, dict]:
    x = torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return x, {"position_ids": torch.arange(length)[None]}


@torch.no_grad()
def _verify() -> float:
    """Both masks in float32 against a mask `[H, T, T]` in float64; refuses above 1e-4."""
    length, errors = 100, []
    x, arguments = _inputs(length, torch.float64)
    causal = torch.ones(length, length).tril().bool()
    for kind in KINDS:
        layer = _layer(length, torch.float64, **KINDS[kind])
        query, key, value = (p(x)[0].unflatten(-1, (HEADS, -1)).transpose(0, 1) for p in _projections(layer))
        bias, factor = torch.zeros(HEADS, 1, length).double(), torch.ones(HEADS, 1, length).double()
        if kind == "position":
            factor = layer.dynamic_mask.table[:, None, :length]
        elif kind != "plain":
            bias = layer.dynamic_mask.bias(value.transpose(0, 1)[None])[0].T[:, None]
        scores = (query @ key.mT * layer.scaling + bias).masked_fill(~causal, -torch.inf)
        expected = layer.o_proj(((factor * scores.softmax(-1)) @ value).transpose(0, 1).flatten(1))
        found = layer.float()(x.float(), **arguments)[0][0]
        errors.append(largest_error([found], [expected], "The dynamic mask is wrong"))
    return max(errors)


def _projections(layer: SoftmaxMixer) -> tuple:
    return layer.q_proj, layer.k_proj, layer.value


def _forward(length: int, seconds: float) -> dict:
    """Ours, and what a mask tensor would cost: the same for all heads, or one a head."""
    x, arguments = _inputs(length)
    layers = {kind: _layer(length, **fields) for kind, fields in KINDS.items()}
    functions = {kind: lambda layer=layer: layer(x, **arguments) for kind, layer in layers.items()}
    for name, heads in (("a mask tensor", 1), ("a mask tensor a head", HEADS)):
        mask = torch.zeros(1, heads, length, length).masked_fill_(~torch.ones(length, length).tril().bool(), -torch.inf)
        functions[name] = lambda mask=mask: _with_mask(layers["plain"], x, mask)
    with torch.no_grad():
        return {"length": length, **time_in_turns(functions, seconds)}


def _with_mask(layer: SoftmaxMixer, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    query, key, value = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in _projections(layer))
    return layer.o_proj(scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2))


def _training(length: int, seconds: float) -> dict:
    x, arguments = _inputs(length)
    x.requires_grad_()

    def step(layer):
        return torch.autograd.grad(layer(x, **arguments)[0].sum(), [x, *layer.parameters()], materialize_grads=True)

    layers = {kind: _layer(length, **fields) for kind, fields in KINDS.items()}
    functions = {kind: lambda layer=layer: step(layer) for kind, layer in layers.items()}
    return {"length": length, **time_in_turns(functions, seconds)}


@torch.no_grad()
def _decode(length: int, seconds: float) -> dict:
    """One token after `length` others, which is then taken back where the cache grows."""
    x, arguments = _inputs(length)
    token, position = x[:, -1:], {"position_ids": torch.tensor([[length]])}
    functions = {}
    for kind, fields in KINDS.items():
        layer = _layer(length, **fields)
        cache = InterdomainCache(layer.config)
        layer(x, past_key_values=cache, **arguments)
        functions[kind] = lambda layer=layer, cache=cache: _step(layer, token, cache, **position)
    for name, window in (("Doge", 10**6), (f"Doge, window {WINDOW}", WINDOW)):
        shape = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
        config = DogeConfig(**shape, num_hidden_layers=1, keep_window_size=window, attn_implementation="sdpa")
        torch.manual_seed(0)
        doge, cache = DogeAttention(config, 0).eval(), DynamicCache()
        torch.nn.init.normal_(doge.A, std=0.3)
        cos, sin = torch.ones(1, 1, doge.head_dim), torch.zeros(1, 1, doge.head_dim)
        cache.update(*(torch.randn(1, HEADS, length, doge.head_dim) for _ in range(2)), 0)
        functions[name] = lambda doge=doge, cache=cache, turn=(cos, sin): _step(
            doge, token, cache, position_embeddings=turn, attention_mask=None
        )
    return {"length": length, **time_in_turns(functions, seconds)}


def _step(layer, token: torch.Tensor, cache, **arguments) -> torch.Tensor:
    output, *_ = layer(token, past_key_values=cache, **arguments)
    if isinstance(cache, DynamicCache) and cache.layers[0].is_croppable:
        cache.crop(-1)
    return output


def table(record: dict) -> str:
    rows = []
    for title, key in (
        ("forward", "forward"),
        ("forward + backward", "forward_and_backward"),
        ("one token", "decode"),
    ):
        for row in record[key]:
            plain = row["plain"]["median"]
            for kind, times in row.items():
                if kind == "length":
                    continue
                limited = (key, kind) == ("forward", "position")
                required = f"{record['required']['position']}x" if limited else ""
                rows.append(
                    [title, f"{row['length']:,}", kind, in_ms(times, 2), f"{times['median'] / plain:.2f}x", required]
                )
    speeds = ", ".join(
        f"{row['Doge']['median'] / row['value']['median']:.1f}x at {row['length']:,} tokens" for row in record["decode"]
    )
    header = ["", "tokens", "mask", "ms", "time against plain", "required"]
    return "\n\n".join(
        [
            markdown(header, rows),
            f"Medians (20th to 80th percentile). One token with a bias that is cached, against Doge's layer, which "
            f"computes it anew from all values: {speeds}. {footnote(record)}",
        ]
    )
