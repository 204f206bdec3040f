"""Does decoding cost the same wherever it happens? Time and cache bytes at two positions of one long text."""

import torch

from benchmarks.harness import footnote, in_ms, markdown, time_in_turns, verify_model
from benchmarks.model_cpu import interdomain
from modeling_interdomain import InterdomainCache


def run(quick: bool = False) -> dict:
    positions = [64, 128] if quick else [512, 65536]
    model = interdomain(quick)
    config = model.config
    error = verify_model(model)
    ids = torch.randint(config.vocab_size, (1, max(positions)), generator=torch.Generator().manual_seed(1))
    caches = {position: _cache_after(model, ids[:, :position]) for position in positions}
    with torch.no_grad():
        functions = {
            str(position): lambda cache=cache: model(ids[:, :1], past_key_values=cache)
            for position, cache in caches.items()
        }
        times = time_in_turns(functions, 0.3 if quick else 20.0)
    # Keys and values of every token, in the dtype of this run: what a softmax model of this shape would hold.
    softmax_bytes = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * 4
    return {
        "relative_error": error,
        "positions": [
            {
                "position": position,
                **times[str(position)],
                "bytes": cache.state_bytes(),
                "softmax_bytes": softmax_bytes * position,
            }
            for position, cache in caches.items()
        ],
        "time_ratio": times[str(positions[1])]["median"] / times[str(positions[0])]["median"],
    }


@torch.no_grad()
def _cache_after(model, ids: torch.Tensor) -> InterdomainCache:
    """Read all tokens, in pieces of bounded memory."""
    cache = InterdomainCache(model.config)
    for piece in ids.split(4096, dim=1):
        model(piece, past_key_values=cache, logits_to_keep=1)
    return cache


def table(record: dict) -> str:
    rows = [
        [
            f"{row['position']:,}",
            in_ms(row),
            f"{row['bytes']:,}",
            f"{row['softmax_bytes']:,}",
        ]
        for row in record["positions"]
    ]
    header = ["position", "ms a token", "bytes of the cache", "bytes of keys and values (computed)"]
    about = f"The 125M model, batch 1, float32; later over earlier: {record['time_ratio']:.3f}."
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])
