"""The names of feed-forward layers in a configuration, and what it says of those with experts, "cdmoe"."""

import math
from dataclasses import dataclass
from typing import Any

from ..layers.configuration import ModelFields

# Tensor parallelism of feed-forward layers, whichever of these maps they have.
DIVIDED_FEED_FORWARD = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def factor_pair(count: int) -> tuple[int, int]:
    """The factors `n1 <= n2` of a number that are nearest to its root."""
    rows = next(n for n in range(math.isqrt(count), 0, -1) if count % n == 0)
    return rows, count // rows


@dataclass(kw_only=True, repr=False)
class ExpertFields(ModelFields):
    """Fields of "cdmoe" layers, and of the losses that feed-forward layers add.

    Args:
        num_experts: experts of a "cdmoe" layer; their product keys are a grid of the two factors nearest the root.
            Default: None, 4 d.
        expert_heads: retrieval heads, each with keys of its own. Default: None, `hidden_size / 256`, at least 1.
        experts_per_head: experts that a head finds for a token. Default: None, `2 * expert_heads`.
        expert_key_dim: width, even, of a query; each half is compared with one of two product keys. Default: 256.
        expert_input: what the experts read: "cross_domain" (the output of the shared MLP) or "hidden" (its input).
            Default: "cross_domain".
        expert_score: how much of an expert is used: "raw" (the score, inside the activation), or outside of it
            "softmax" (over the experts of a head) or "sigmoid". Default: "raw".
        aux_loss_coef: what the sum of the auxiliary losses of all layers is multiplied with before it joins the
            training loss; only registered feed-forward layers have any. Default: 0.001.
    """

    _most = {"aux_loss_coef": float("inf")}
    _choices = {
        "expert_input": ("cross_domain", "hidden"),
        "expert_score": ("raw", "softmax", "sigmoid"),
    }

    num_experts: int | None = None
    expert_heads: int | None = None
    experts_per_head: int | None = None
    expert_key_dim: int = 256
    expert_input: str = "cross_domain"
    expert_score: str = "raw"
    aux_loss_coef: float = 0.001


class ExpertSpecification:
    """What "cdmoe" layers have a configuration complete and check."""

    @staticmethod
    def complete_config(config) -> None:
        """Fill in the sizes of the paper's models."""
        if config.num_experts is None:
            config.num_experts = 4 * config.hidden_size
        if config.expert_heads is None:
            config.expert_heads = max(1, config.hidden_size // 256)
        if config.experts_per_head is None:
            config.experts_per_head = 2 * config.expert_heads

    @staticmethod
    def check_config(config) -> None:
        """A head can find as many experts as it shall."""
        for name in ("num_experts", "expert_heads", "experts_per_head", "expert_key_dim"):
            value = getattr(config, name)
            if value is None or value < 1:
                raise ValueError(f'{name} must be a positive integer for "cdmoe" layers, got {value}.')
        if config.expert_key_dim % 2:
            raise ValueError(
                f"expert_key_dim must be even, one half for each product key; got {config.expert_key_dim}."
            )
        rows, columns = factor_pair(config.num_experts)
        if rows < config.experts_per_head:
            raise ValueError(
                f"num_experts = {config.num_experts} makes a grid of {rows} x {columns} product keys, of which a head "
                f"cannot find experts_per_head = {config.experts_per_head}: choose a num_experts with two factors of "
                "at least as many, such as a square."
            )


# `registry.py` puts the classes themselves in their places. None: the layer ends with its token mixer.
FEED_FORWARDS: dict[str, Any] = {
    "mlp": object,  # which has nothing to say
    "cdmoe": ExpertSpecification,
    "none": None,
}
