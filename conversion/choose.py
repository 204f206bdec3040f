"""Which layers to keep: what the conversion of each costs, when it alone is converted."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from tqdm import tqdm

from conversion.carry import convert
from modeling_interdomain import InterdomainConfig

TOKENS = 4096  # that are measured on, about


def measured_rows(tokens: torch.Tensor, window: int, sequence_length: int) -> torch.Tensor:
    """Rows `[N, T]` of the text: `sequence_length` or, to show what a window cannot see, four windows long."""
    length = min(max(sequence_length, 4 * window), len(tokens))
    count = max(1, min(TOKENS, len(tokens)) // length)
    return tokens[: count * length].view(count, length)


@torch.no_grad()
def conversion_costs(config: InterdomainConfig, carried: dict[str, torch.Tensor], rows: torch.Tensor) -> list[float]:
    """For each layer the divergence of the predictions, in nats a token, once it alone is converted and untaught.

    Args:
        config: that of the model with all layers converted.
        carried: the source's weights under our names.
        rows: `[N, T]`, what is read.
    """
    model, windows = (_model(config, carried, name) for name in ("softmax", "window"))
    expected, layers, costs = list(_predictions(model, rows)), model.model.layers, []
    for layer in tqdm(range(len(layers)), desc="Measuring layers", unit="layer", dynamic_ncols=True):
        kept, layers[layer] = layers[layer], windows.model.layers[layer]
        divergence = sum(
            F.kl_div(ours, theirs, log_target=True, reduction="sum").item()
            for ours, theirs in zip(_predictions(model, rows), expected)
        )
        layers[layer] = kept
        costs.append(divergence / rows.numel())
    return costs


def costliest(costs: list[float], number: int) -> list[int]:
    """The layers that cost most, in their order."""
    ranked = sorted(range(len(costs)), key=lambda layer: -costs[layer])
    return sorted(ranked[:number])


def _model(config: InterdomainConfig, carried: dict[str, torch.Tensor], mixer: str):
    """With one mixer in all layers."""
    alike = InterdomainConfig(**config.to_dict() | {"token_mixers": [mixer] * config.num_hidden_layers})
    return convert(alike, carried, torch.float32).to("cuda" if torch.cuda.is_available() else "cpu")


def _predictions(model, rows: torch.Tensor):
    """Log-probabilities of one row after the other, `[T, vocab_size]`."""
    for row in rows.to(model.device):
        yield model(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(dim=-1)
