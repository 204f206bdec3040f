"""Experts in bags against gathered rows, Doge's experts and dense layers of the same active size, on a CPU, float32."""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DogeConfig
from transformers.models.doge.modeling_doge import DogeCDMoE

from benchmarks.harness import footnote, in_ms, largest_error, markdown, time_in_turns
from modeling_interdomain import InterdomainConfig
from modeling_interdomain.feed_forwards.cross_domain_moe import CrossDomainMoE
from modeling_interdomain.ops.experts.entry import read_experts, sum_experts

# Width, shared MLP and tokens of the 320M shape (18 of 3072 experts a token) and of the 1.3B one (128 of 8192).
SHAPES = {"320M": (768, 3072, 1024), "1.3B": (2048, 8192, 256)}
QUICK = {"320M": (256, 64, 16), "1.3B": (512, 64, 8)}
# Their time over ours.
REQUIRED = {
    ("320M", "bags", "forward + backward"): 4.0,
    ("320M", "doge", "forward + backward"): 3.0,
    ("320M", "layer", "forward + backward"): 0.85,
    ("320M", "layer", "one token"): 0.75,
    ("1.3B", "bags", "forward + backward"): 4.0,
    ("1.3B", "layer", "forward + backward"): 0.7,
    ("1.3B", "layer", "one token"): 0.75,
}
NAMES = {
    "bags": ("the experts of each token", "gather + einsum"),
    "doge": ("retrieval and experts", "Doge's"),
    "layer": ("the whole layer", "a dense MLP"),
}


def run(quick: bool = False) -> dict:
    seconds = 0.05 if quick else 4.0
    rows = []
    for name, (width, hidden, tokens) in (QUICK if quick else SHAPES).items():
        torch.manual_seed(0)
        config = _config(width, hidden)
        error = verify(config)
        for kind, pair, length, title, timed in CASES:
            ours, theirs, tensors = pair(config, length or tokens)
            times = time_in_turns({"ours": timed(ours, tensors), "theirs": timed(theirs, tensors)}, seconds)
            row = {"shape": name, "kind": kind, "pass": title, "relative_error": error, **times}
            row["ratio"] = times["theirs"]["median"] / times["ours"]["median"]
            rows.append(row | {"required": REQUIRED.get((name, kind, title))})
    return {"rows": rows, "shapes": {name: list(shape) for name, shape in SHAPES.items()}}


def _config(width: int, hidden: int) -> InterdomainConfig:
    """The paper's form, with its numbers of heads and experts at this width."""
    shape = {"hidden_size": width, "intermediate_size": hidden, "num_attention_heads": width // 64}
    return InterdomainConfig(**shape, feed_forwards="cdmoe")


def verify(config: InterdomainConfig) -> float:
    """The largest relative error of the layer's output and gradients against all experts in float64; below 1e-4."""
    layer, x = CrossDomainMoE(config, 0), torch.randn(1, 256, config.hidden_size)
    chosen: list[torch.Tensor] = []
    hook = layer.chosen.register_forward_hook(lambda module, inputs, ids: chosen.append(ids))
    found = _with_gradients(layer, x)
    hook.remove()
    expected = _with_gradients(_Dense(layer.double(), chosen[0]), x.double())
    return largest_error(found, expected, "The experts are wrong")


class _Dense(nn.Module):
    """A layer that computes all its experts, and adds those that were chosen."""

    def __init__(self, layer: CrossDomainMoE, ids: torch.Tensor):
        super().__init__()
        self.layer, self.ids = layer, ids

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        z = layer.down_proj(layer.act_fn(layer.up_proj(x)))
        first, second = layer.query_proj(z).unflatten(-1, (2, layer.heads, -1)).unbind(2)
        first = torch.einsum("bthr,hnr->bthn", first, layer.expert_keys[:, : layer.rows])
        second = torch.einsum("bthr,hnr->bthn", second, layer.expert_keys[:, layer.rows :])
        scores = (first[..., :, None] + second[..., None, :]).flatten(-2)
        weights = layer.act_fn((z @ layer.expert_down.mT)[:, :, None] * scores)
        chosen = torch.zeros_like(weights).scatter(-1, self.ids, 1)
        return z + ((weights * chosen) @ layer.expert_up).sum(2)


def _with_gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x.requires_grad_()
    output = layer(x)
    gradients = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
    return [output.detach(), *gradients]


def _bags(config: InterdomainConfig, tokens: int):
    """The same experts, products and sums, once in bags and once of gathered rows `[T, k, d]`."""
    count = config.expert_heads * config.experts_per_head
    x, scores = torch.randn(1, tokens, config.hidden_size), torch.randn(1, tokens, count)
    down, up = (torch.randn(config.num_experts, config.hidden_size) for _ in range(2))
    ids = torch.randint(config.num_experts, (1, tokens, count))

    def ours():
        return sum_experts(F.silu(read_experts(x, down, ids) * scores), up, ids)

    def theirs():
        products = torch.einsum("btd,btkd->btk", x, F.embedding(ids, down))
        return torch.einsum("btk,btkd->btd", F.silu(products * scores), F.embedding(ids, up))

    return ours, theirs, [x, scores, down, up]


def _doge(config: InterdomainConfig, tokens: int):
    """Both with a shared MLP of one neuron and as many experts a token; Doge's has one head."""
    one_neuron = {"intermediate_size": 1, "expert_input": "hidden"}  # of its output, a line, few experts are chosen
    ours = CrossDomainMoE(InterdomainConfig(**config.to_dict() | one_neuron), 0)
    theirs = DogeCDMoE(
        DogeConfig(
            hidden_size=config.hidden_size,
            intermediate_size=1,
            num_experts=config.num_experts,
            num_experts_per_tok=config.expert_heads * config.experts_per_head,
        )
    )
    x = torch.randn(1, tokens, config.hidden_size)
    return lambda: ours(x), lambda: theirs(x)[0], [x, *ours.parameters(), *theirs.parameters()]


def _layer(config: InterdomainConfig, tokens: int):
    """A layer and an MLP with as many parameters as one token uses of it."""
    ours, width = CrossDomainMoE(config, 0), config.hidden_size
    hidden = round(active_parameters(config) / (2 * width))
    theirs = nn.Sequential(nn.Linear(width, hidden, bias=False), nn.SiLU(), nn.Linear(hidden, width, bias=False))
    x = torch.randn(1, tokens, width)
    return lambda: ours(x), lambda: theirs(x), [x, *ours.parameters(), *theirs.parameters()]


def active_parameters(config: InterdomainConfig) -> int:
    """What one token uses of a layer: its MLP, its router and the rows of its experts."""
    with torch.device("meta"):
        layer = CrossDomainMoE(config, 0)
    unused = config.num_experts - config.expert_heads * config.experts_per_head
    return sum(p.numel() for p in layer.parameters()) - 2 * unused * config.hidden_size


def _forward(function: Callable, tensors: Sequence[torch.Tensor]) -> Callable:
    return torch.no_grad()(function)


def _both(function: Callable, tensors: Sequence[torch.Tensor]) -> Callable:
    for x in tensors:
        x.requires_grad_()
    return lambda: torch.autograd.grad(function().sum(), tensors, allow_unused=True)


# What is compared, of how many tokens (None: those of the shape), and how it is run.
CASES = [
    (kind, pair, None, title, timed)
    for kind, pair in (("bags", _bags), ("doge", _doge), ("layer", _layer))
    for title, timed in (("forward", _forward), ("forward + backward", _both))
]
CASES.append(("layer", _layer, 1, "one token", _forward))


def table(record: dict) -> str:
    rows = []
    for row in record["rows"]:
        name, beside = NAMES[row["kind"]]
        required = f"{row['required']}x" if row["required"] else ""
        ours, theirs = (in_ms(row[side], 2) for side in ("ours", "theirs"))
        rows.append([row["shape"], name, row["pass"], ours, beside, theirs, f"{row['ratio']:.2f}x", required])
    shapes = "; ".join(
        f"{name}: width {width:,}, shared MLP {hidden:,}, {tokens:,} tokens"
        for name, (width, hidden, tokens) in record["shapes"].items()
    )
    header = ["shape", "", "", "ours, ms", "beside it", "ms", "speed", "required"]
    return "\n\n".join(
        [
            markdown(header, rows),
            f"Medians (20th to 80th percentile), batch 1. {shapes}. Beside Doge's, both have a shared MLP of one "
            f"neuron. {footnote(record)}",
        ]
    )
