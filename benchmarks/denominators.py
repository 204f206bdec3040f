"""Do the denominators of a normalised layer cross zero? At the start, by features, product, modes and C.

A normalised layer divides what it reads by the same reading of values that are all 1, which is a sum of similarities
weighted by ages. Where it crosses zero the output has a pole.
"""

import statistics
from functools import partial
from unittest import mock

import torch

from benchmarks.harness import footnote, markdown
from benchmarks.recall_study import EVEN, HERMITIAN, POSTERIOR, UNIFORM
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, interdomain_attention

SHAPE = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "state_size": 32}
STARTS = {
    "bilinear, C random": {},
    "hermitian, C random": HERMITIAN,
    "hermitian, posterior": POSTERIOR,
    "hermitian, posterior, uniform modes, even steps": POSTERIOR | UNIFORM | EVEN,
}
FEATURES = ("silu_l2", "fourier", "fourier_shifted")
SEEDS, ROWS, TOKENS, SMALL = 5, 8, 128, 0.1  # small: of the median


def run(quick: bool = False) -> dict:
    found = []
    for features in FEATURES:
        for start, fields in STARTS.items():
            seeds = [denominators(features, fields, seed) for seed in range(2 if quick else SEEDS)]
            shares = [((x < 0).double().mean().item(), _small(x)) for x in seeds]
            negative, small = map(statistics.mean, zip(*shares))
            found.append({"features": features, "start": start, "negative": negative, "small": small})
    return {"rows": found}


@torch.no_grad()
def denominators(features: str, fields: dict, seed: int) -> torch.Tensor:
    """`[B, T, H]` in float64 of a fresh layer with random tokens."""
    torch.manual_seed(seed)
    config = InterdomainConfig(**SHAPE, start="random", feature_map=features, normalize=True, **fields)
    model = InterdomainForCausalLM(config)
    recurrence = model.model.layers[0].token_mixer.recurrence
    with mock.patch.object(recurrence, "forward", wraps=recurrence.forward) as called:
        model(input_ids=torch.randint(config.vocab_size, (ROWS, TOKENS)))
    query, key, value, *_ = (x.double() for x in called.call_args.args)
    parameters = (x if x is None else x.double() for x in recurrence.parameters_of_operator())
    attention = partial(interdomain_attention, product=config.product, backend="recurrent")
    return attention(query, key, torch.ones_like(value[..., :1]), *parameters)[0][..., 0]


def _small(denominators: torch.Tensor) -> float:
    sizes = denominators.abs()
    return (sizes < SMALL * sizes.median()).double().mean().item()


def table(record: dict) -> str:
    rows = [[row["features"], row["start"], f"{row['negative']:.1%}", f"{row['small']:.1%}"] for row in record["rows"]]
    about = f"{ROWS} rows of {TOKENS} random tokens, {SEEDS} seeds, M = {SHAPE['state_size']}; in float64."
    header = ["features", "start", "negative", f"below {SMALL:g} of the median size"]
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])
