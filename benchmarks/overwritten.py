"""What a state answers to a key that was written twice, by the share of the delta rule, before anything is learned.

Keys are directions at random, values normal, and both values of a key stand at any places among those of the others.
Every key is asked after all of them. The operator and its parameters are those of a layer that starts to remember.
"""

import statistics

import torch

from benchmarks import core_conditions
from benchmarks.harness import footnote, markdown
from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, interdomain_attention
from modeling_interdomain.mixers.interdomain.gates import what_keys_find

SHAPE = {"vocab_size": 4, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "state_size": 64}
KEYS, SHARES = (4, 8, 16, 32), (0.0, 0.5, 1.0)
TEXTS, SEED = 200, 0


def run(quick: bool = False) -> dict:
    texts = 4 if quick else TEXTS
    layer = untrained(SHAPE)
    return {"texts": texts, "rows": [_row(keys, share, texts, *layer) for keys in KEYS for share in SHARES]}


def _row(keys: int, share: float, texts: int, config: InterdomainConfig, parameters: list[torch.Tensor]) -> dict:
    """Cosines of what is answered with the last and the first value of a key, and how often the last is nearer."""
    generator = torch.Generator().manual_seed(SEED)
    key, value, asked, places = written_twice(keys, texts, config, generator)
    silent = torch.zeros_like(asked), value.new_zeros(*asked.shape[:3], value.shape[-1])
    query, key, given = (torch.cat(x, dim=1) for x in ((key, asked), (key, silent[0]), (value, silent[1])))
    delta = (share / what_keys_find(*parameters)[0]).expand(key.shape[:3])
    options = {"product": config.product, "delta": delta, "backend": "recurrent"}
    found = interdomain_attention(query, key, given, *parameters, **options)[0][:, -keys:]
    rows = torch.arange(texts)[:, None]
    first, last = (torch.cosine_similarity(found, value[rows, place], dim=-1) for place in places.unbind(1))
    nearer = (last > first).double()
    return {"keys": keys, "share": share} | {
        name: _spread(x) for name, x in (("last", last), ("first", first), ("nearer", nearer))
    }


def untrained(shape: dict, dtype: torch.dtype = torch.float64) -> tuple[InterdomainConfig, list[torch.Tensor]]:
    """A configuration, and log_decay, beta and C of its layer, which starts to remember."""
    config = InterdomainConfig(**shape, **core_conditions.PLAIN)
    torch.manual_seed(SEED)
    recurrence = InterdomainForCausalLM(config).model.layers[0].token_mixer.recurrence
    return config, [x.to(dtype).detach() for x in recurrence.parameters_of_operator() if x is not None]


def written_twice(
    keys: int, texts: int, config: InterdomainConfig, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is written, `[B, 2 N, G, R]` and `[B, 2 N, G, D]`, the keys `[B, N, G, R]`, and places `[B, 2, N]` of each.

    The earlier place of a key comes first.
    """
    groups, options = config.num_key_value_heads, {"dtype": torch.float64, "generator": generator}
    asked = torch.randn(texts, keys, groups, config.feature_dim, **options)
    asked /= asked.norm(dim=-1, keepdim=True)
    order = torch.rand(texts, 2 * keys, **options).argsort(dim=1)
    key = asked[torch.arange(texts)[:, None], order % keys]
    value = torch.randn(texts, 2 * keys, groups, config.head_dim, **options)
    return key, value, asked, order.argsort(dim=1).view(texts, 2, keys).sort(dim=1).values


def _spread(x: torch.Tensor) -> list[float]:
    """The mean over texts, and their standard deviation."""
    means = x.flatten(1).mean(1).tolist()
    return [statistics.mean(means), statistics.stdev(means)]


def table(record: dict) -> str:
    rows = []
    for keys in KEYS:
        found = {row["share"]: row for row in record["rows"] if row["keys"] == keys}
        cells = [
            "{:.2f} / {:.2f} ({:.0%})".format(*(found[d][n][0] for n in ("last", "first", "nearer"))) for d in SHARES
        ]
        rows.append([str(keys), *cells])
    widest = max(row[name][1] for row in record["rows"] for name in ("last", "first"))
    heads, width, modes = (SHAPE[name] for name in ("num_attention_heads", "hidden_size", "state_size"))
    about = (
        f"Cosine with the last value / with the first (how often the last is nearer); {heads} heads of "
        f"{width // heads}, M = {modes}, {record['texts']} texts, whose standard deviation is {widest:.2f} at most; "
        "float64."
    )
    return "\n\n".join([markdown(["keys", *(f"d = {d:g}" for d in SHARES)], rows), f"{about} {footnote(record)}"])
