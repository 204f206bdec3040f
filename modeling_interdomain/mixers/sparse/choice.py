"""How a sparse branch chooses keys: a hash of random projections, and a learned score with a loss of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ...layers.common import Float32Module
from ...ops.common.packing import mask_from_lengths

# A vector as close as this to the mean of those before counts as the mean: the difference is noise of rounding.
_SAME = 1e-4
# The sum of no queries, or of pads, has no direction.
_TINY = 1e-12


class DrawnAnew(nn.Dropout):
    """In training every number of a tensor is drawn anew, from a normal distribution, with probability p.

    A subclass of Dropout, so that trainers that compare two forwards of a model in training (DPO, GRPO) turn it off:
    their `disable_dropout` sets p = 0, with which the tensor stays as it is.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        return torch.where(torch.rand_like(x) < self.p, torch.randn_like(x), x)


class SparseHash(Float32Module):
    """`argmax_j (z H)_j`, or with "sign" the bits `(z H)_j > 0`, of queries and keys minus their running means.

    H `[S, d, h]` is drawn anew in every forward of training, unless `draw.p` is 0; evaluation has one that is saved
    with the model.
    """

    H: torch.Tensor

    def __init__(self, config, heads: int):
        super().__init__()
        self.kind = config.sparse_hash
        self.register_buffer("H", torch.randn(heads, config.sparse_key_dim, config.sparse_hash_size))
        self.draw = DrawnAnew(1.0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "draw" not in self._modules:  # a pickle of version 0.1
            self.draw = DrawnAnew(1.0).train(self.training)

    def __repr__(self) -> str:
        # The fingerprint of a state covers the printed tree of modules, and files are older than `draw`.
        return "SparseHash()"

    def start_parameters(self, config) -> None:
        init.normal_(self.H)

    def forward(self, z: torch.Tensor, means: torch.Tensor | None) -> torch.Tensor:
        """`[B, T, S, n, d]` to bins `[B, T, S, n]`."""
        projection = self.draw(self.H).to(z.dtype)
        return hashed(z, None if means is None else z - means, projection, self.kind)


def hashed(z: torch.Tensor, centred: torch.Tensor | None, projection: torch.Tensor, kind: str) -> torch.Tensor:
    """`SparseHash` with a projection `[S, d, h]`, in the dtype of z; `centred`, z minus its mean, is overwritten."""
    if centred is not None:
        sizes = [torch.linalg.vector_norm(x, 2, -1, True) for x in (centred, z)]
        z = centred.masked_fill_(torch.sub(*sizes, alpha=_SAME).signbit(), 0)
    one = z.shape[0] == 1 and z.shape[1] == 1  # two comparisons: comparing the sizes with each other would fix a graph
    heads_first = z.view(z.shape[2:]) if one else z.permute(2, 0, 1, 3, 4)
    projected = torch.bmm(heads_first if one else heads_first.flatten(1, 3), projection)
    if kind == "argmax":
        bins = projected.max(-1).indices  # faster than argmax on a CPU
    else:
        bins = ((projected > 0) * 2 ** torch.arange(projected.shape[-1], device=z.device)).sum(-1)
    return bins.view(z.shape[:-1]) if one else bins.view(heads_first.shape[:-1]).permute(1, 2, 0, 3)


class KeyScorer(Float32Module):
    """How good a key is: an MLP of the key and the direction of the sum of all queries so far, the same in all heads.

    Its weights are plain parameters, not linear layers, so that quantization and adapters leave it alone; not in a
    ParameterList, because what offloads modules brings parameters back where their module is called.
    """

    NAMES = [f"{name}_{i}" for i in range(3) for name in ("weight", "bias")]

    def __init__(self, config):
        super().__init__()
        width = 2 * config.sparse_key_dim
        for weight, bias in zip(self.NAMES[::2], self.NAMES[1::2], strict=True):
            outputs = 1 if weight == self.NAMES[-2] else width
            self.register_parameter(weight, nn.Parameter(torch.empty(outputs, width)))
            self.register_parameter(bias, nn.Parameter(torch.empty(outputs)))
        self.start_parameters(config)

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        """Uniform, as in the library's linear layers: with smaller numbers the scores would be nearly equal."""
        bound = (2 * config.sparse_key_dim) ** -0.5
        for parameter in self.parameters(recurse=False):
            init.uniform_(parameter, -bound, bound)

    def forward(self, key: torch.Tensor, query_sum: torch.Tensor) -> torch.Tensor:
        """`[B, T, S, d]` each to `[B, T, S]`."""
        return scored(key, query_sum, [getattr(self, name).to(key.dtype) for name in self.NAMES])


def scored(key: torch.Tensor, query_sum: torch.Tensor, layers: Sequence[torch.Tensor]) -> torch.Tensor:
    """`KeyScorer` with the weights and biases of its layers, in the dtype of the keys."""
    size = torch.linalg.vector_norm(query_sum, 2, -1, True).clamp_min_(_TINY)
    x = torch.cat([key, query_sum / size], dim=-1).view(-1, 2 * key.shape[-1])
    x = nn.functional.linear(x, layers[0], layers[1]).relu_()
    x = nn.functional.linear(x, layers[2], layers[3]).relu_()
    return nn.functional.linear(x, layers[4], layers[5]).view(key.shape[:-1])


def ranking_loss(
    scores: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    samples: int,
    *,
    target: str = "sum",
    lengths: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    drawn: torch.Tensor | None = None,
) -> torch.Tensor:
    """A pairwise loss that lets scores rank keys as the queries after them do (the HAX paper, section 4).

    With `y_j = sum_{i >= j} sigmoid(q_i . k_j)` (`target` "mean": divided by the number of these queries), it is the
    mean over all pairs of drawn keys of the binary cross-entropy of `scores_a - scores_b` to 1, 1/2 or 0 as y_a is
    larger than, equal to or smaller than y_b. It starts near log 2.

    Args:
        scores: `[B, T, S]`, the only input that gets a gradient.
        query, key: `[B, T, S, d]`.
        samples: how many different real keys are drawn from each row, if it has as many.
        lengths: `[B]`, the real tokens of every row.
        documents: `[T]`, the packed document of every token; pairs are of one document, and so are queries and keys.
        drawn: `[B, samples]`, the keys, where they are given.

    Returns:
        A scalar, the mean over rows and heads; a row with fewer than two keys counts 0.
    """
    batch, length = scores.shape[:2]
    real = torch.ones(batch, length, dtype=torch.bool, device=scores.device)
    if lengths is not None:
        real = mask_from_lengths(lengths, scores)
    if drawn is None:
        order = torch.rand(batch, length, device=scores.device).masked_fill(~real, -1)
        drawn = order.topk(min(samples, length), dim=1).indices
    i, j = torch.arange(length, device=scores.device), drawn[..., None]
    counted = (i >= j) & real[:, None]  # [B, samples, T]
    pairs = real.gather(1, drawn)
    pairs = pairs[:, :, None] & pairs[:, None]
    if documents is not None:
        counted = counted & (documents == documents[drawn][..., None])
        pairs = pairs & (documents[drawn][:, :, None] == documents[drawn][:, None])
    with torch.no_grad():
        index = drawn[..., None, None].expand(-1, -1, *key.shape[2:])
        chosen = key.gather(1, index).transpose(1, 2)  # [B, S, samples, d]
        attended = (chosen @ query.permute(0, 2, 3, 1)).sigmoid().where(counted[:, None], 0)
        wanted = attended.sum(-1)
        if target == "mean":
            wanted = wanted / counted.sum(-1).clamp(min=1)[:, None]
        goal = (wanted[..., None] - wanted[..., None, :]).sign() / 2 + 0.5
    x = scores.gather(1, drawn[..., None].expand(-1, -1, scores.shape[2])).mT
    losses = nn.functional.binary_cross_entropy_with_logits(x[..., None] - x[..., None, :], goal, reduction="none")
    pairs = pairs & (real.sum(1) > 1)[:, None, None]
    weights = pairs / pairs.sum((1, 2), keepdim=True).clamp(min=1)
    return (losses * weights[:, None]).sum((-1, -2)).mean()
