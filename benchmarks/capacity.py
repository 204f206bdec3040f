"""How many pairs of a key and a value a state holds before anything is learned, by how it is laid out.

Tokens are random directions; each head has maps of its own from them to keys and values, as a layer has. Pairs are
written some tokens apart, and then each key is asked, all at the same time. An answer is right if the values of all
heads together are nearer to those of its pair than to any other pair's. Operator and parameters are those of a layer
that starts to remember; beside it stands a state of keys times values that forgets nothing, as Gated DeltaNet's with
its gates open.
"""

import functools
import math

import torch
from torch.nn import functional as F

from benchmarks import overwritten
from benchmarks.harness import footnote, markdown
from modeling_interdomain import interdomain_attention
from modeling_interdomain.mixers.interdomain.gates import what_keys_find

# Heads, numbers of a key and of a value, and modes; None: as many numbers of a key times those of a value.
LAYOUTS = {
    "4 heads of 32, M = 32": (4, 32, 32),
    "8 heads of 16, M = 32": (8, 16, 32),
    "16 heads of 16, M = 16": (16, 16, 16),
    "4 heads of 16, M = 64": (4, 16, 64),
    "4 heads of 64 x 64, no modes": (4, 64, None),
}
SETTINGS = ((16, 1), (32, 1), (64, 1), (128, 1), (16, 4), (32, 4), (64, 4))  # pairs, and tokens a pair
SHARES = (0.0, 1.0)
TOKEN, TEXTS, SEED = 128, 32, 0


def run(quick: bool = False) -> dict:
    """Right answers in all, and of the pairs among the last 2 M tokens and before them."""
    texts = 2 if quick else TEXTS
    return {
        "texts": texts,
        "rows": [
            {"layout": name, "share": share, "pairs": pairs, "apart": apart}
            | right_answers(*layout, share, pairs, apart, texts)
            for name, layout in LAYOUTS.items()
            for share in SHARES
            for pairs, apart in SETTINGS
        ],
    }


@torch.no_grad()
def right_answers(
    heads: int, width: int, modes: int | None, share: float, pairs: int, apart: int, texts: int
) -> dict[str, float | int | None]:
    """The numbers of the state, and the share of the pairs whose value is found: of all, the latest and the others."""
    key, value = drawn(heads, width, pairs, texts)
    if modes is None:
        found, numbers = answers_of_outer_products(key, value, share), heads * width * width
    else:
        found, numbers = answers_of_modes(key, value, modes, share, apart), heads * 4 * modes * width
    likeness = F.normalize(found.flatten(2), dim=-1) @ F.normalize(value.flatten(2), dim=-1).transpose(1, 2)
    right = (likeness.argmax(-1) == torch.arange(pairs)).double().mean(0)
    age = apart * torch.arange(pairs, 0, -1)
    late = age <= (math.inf if modes is None else 2 * modes)
    parts = {"all": right, "latest": right[late], "earlier": right[~late]}
    return {"numbers": numbers} | {name: x.mean().item() if len(x) else None for name, x in parts.items()}


def drawn(heads: int, width: int, pairs: int, texts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of length 1 and values, both `[B, N, H, D]`."""
    generator = torch.Generator().manual_seed(SEED)

    def of_tokens() -> torch.Tensor:
        tokens = torch.randn(texts, pairs, TOKEN, generator=generator)
        return torch.einsum("bnw,hwd->bnhd", tokens, torch.randn(heads, TOKEN, width, generator=generator))

    return F.normalize(of_tokens(), dim=-1), of_tokens() / TOKEN**0.5


def answers_of_modes(key: torch.Tensor, value: torch.Tensor, modes: int, share: float, apart: int) -> torch.Tensor:
    """What a layer answers to each key after the last token, `[B, N, H, D]`."""
    (texts, pairs, heads, width), nothing = key.shape, torch.zeros_like(key)
    shape = overwritten.SHAPE | {"num_attention_heads": heads, "head_dim": width, "state_size": modes}
    config, parameters = overwritten.untrained(shape, torch.float32)

    def spread(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, *[nothing] * (apart - 1)), dim=2).flatten(1, 2)

    written = spread(key), spread(value)
    delta = (share / what_keys_find(*parameters)[0]).expand(written[0].shape[:3])
    layer = functools.partial(interdomain_attention, product=config.product, backend="chunk")
    state = layer(written[0], *written, *parameters, delta=delta, output_final_state=True)[1]
    asked, silent = key.reshape(-1, 1, heads, width), nothing.view(-1, 1, heads, width)
    found = layer(asked, silent, silent, *parameters, initial_state=state.repeat_interleave(pairs, dim=0))[0]
    return found.view(texts, pairs, heads, width)


def answers_of_outer_products(key: torch.Tensor, value: torch.Tensor, share: float) -> torch.Tensor:
    """What a sum of keys times values answers, `[B, N, H, D]`, if `share` of its answer is taken from each value."""
    state = key.new_zeros(*key.shape[::2], key.shape[-1], value.shape[-1])
    for k, v in zip(key.unbind(1), value.unbind(1), strict=True):
        new = v - share * torch.einsum("bhk,bhkv->bhv", k, state)
        state = state + k[..., None] * new[..., None, :]
    return torch.einsum("bnhk,bhkv->bnhv", key, state)


def table(record: dict) -> str:
    rows = []
    for name in LAYOUTS:
        for share in SHARES:
            own = [row for row in record["rows"] if (row["layout"], row["share"]) == (name, share)]
            rows.append([name, f"{share:g}", *(f"{row['all']:.0%}" for row in own), _by_age(own)])
    settings = (f"{pairs} pairs" if apart == 1 else f"{pairs}, every {apart} tokens" for pairs, apart in SETTINGS)
    header = ["state", "d", *settings, "of 128, the last 2 M tokens / before them"]
    (numbers,) = {row["numbers"] for row in record["rows"]}
    about = f"Right answers; each state has {numbers:,} numbers; {record['texts']} texts of random tokens; float32."
    return "\n\n".join([markdown(header, rows), f"{about} {footnote(record)}"])


def _by_age(rows: list[dict]) -> str:
    (row,) = (row for row in rows if (row["pairs"], row["apart"]) == (128, 1))
    return "-" if row["earlier"] is None else f"{row['latest']:.0%} / {row['earlier']:.0%}"
