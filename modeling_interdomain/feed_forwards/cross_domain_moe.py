"""The cross-domain mixture of experts: an MLP that all tokens share, and thousands of one-neuron experts."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from ..layers.common import ChosenExperts, DecodeTables, activation, backend_of, is_untouched, residual_projection
from ..layers.operators import Operators
from ..ops.common.cpu import without_autocast
from ..ops.experts.entry import (
    EXPERT_BACKENDS,
    best_experts,
    find_experts,
    keys_of_inputs,
    read_rows,
    sum_rows,
)
from .configuration import ExpertSpecification, factor_pair


class CrossDomainMoE(ExpertSpecification, DecodeTables):
    """`phi + sum over h heads and k experts of act((z . down) s) up`, with the shared MLP `phi = down(act(up(x)))`.

    z, which also queries the product keys, is phi ("cross_domain": the experts continue where the MLP ends) or x
    ("hidden"). The score s stands inside the activation ("raw") or, as a softmax over the k experts of a head or a
    sigmoid, outside. Source: "Wonderful Matrices" (arXiv 2407.16958), the cross-domain mixture of experts.

    Attributes:
        expert_keys: `[h, n1 + n2, r / 2]`, n1 n2 = num_experts.
        expert_down, expert_up: `[num_experts, hidden_size]`, what an expert reads and what it writes.
    """

    operators = Operators.of(read_rows, sum_rows, find_experts, best_experts, keys_of_inputs)

    def __init__(self, config, layer_idx: int):
        super().__init__()
        width, heads, key_dim = config.hidden_size, config.expert_heads, config.expert_key_dim
        self.config = config
        self.heads, self.count, self.score = heads, config.experts_per_head, config.expert_score
        self.crosses = config.expert_input == "cross_domain"
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = residual_projection(config.intermediate_size, width)
        self.act_fn = activation(config.hidden_act)
        self.query_proj = nn.Linear(width, heads * key_dim, bias=False)
        self.rows, columns = factor_pair(config.num_experts)
        self.expert_keys = nn.Parameter(torch.empty(heads, self.rows + columns, key_dim // 2))
        self.expert_down = nn.Parameter(torch.empty(config.num_experts, width))
        self.expert_up = nn.Parameter(torch.empty(config.num_experts, width))
        self.chosen = ChosenExperts()
        self.start_parameters(config)

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        """Keys far enough apart that tokens choose differently; with zeros all would choose the same experts."""
        init.normal_(self.expert_keys, std=(2 / config.expert_key_dim) ** 0.5)
        init.normal_(self.expert_down, std=config.initializer_range)
        init.normal_(self.expert_up, std=config.initializer_range / (2 * config.num_hidden_layers) ** 0.5)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shared = self.down_proj(self.act_fn(self.up_proj(hidden_states)))
        # Rounded scores would choose other experts.
        with without_autocast(hidden_states.device):
            return shared + self._experts(shared if self.crosses else hidden_states).to(shared.dtype)

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, hidden_size]`, in the dtype that x and the tables have in common."""
        scores, ids = self._find(x)
        ids = self.chosen(ids).flatten(-2)
        backend = backend_of(self.config, EXPERT_BACKENDS)
        products = self.operators.read_rows(x, self.expert_down, ids, backend).view(scores.shape)
        weights = self._weigh(products, scores).to(products.dtype)
        return self.operators.sum_rows(weights.flatten(-2), self.expert_up, ids, backend)

    def _find(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, in at least float32, and ids, `[B, T, h, k]`."""
        keys = self.expert_keys
        met = self._keys_of(x)
        if met is not None:
            scores = F.linear(x, met.flatten(0, 1)).unflatten(-1, met.shape[:2])
            return self.operators.best_experts(scores[..., : self.rows], scores[..., self.rows :], self.count)
        wide = torch.promote_types(keys.dtype, torch.float32)
        query = self.query_proj(x.to(keys.dtype)).view(*x.shape[:2], 2, self.heads, -1)
        return self.operators.find_experts(query.to(wide), keys.to(wide), self.rows, self.count)

    def _keys_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """`keys_of_inputs` where that is the shorter way to the same scores; for single tokens they are kept."""
        keys, plain = self.expert_keys, x.dtype in (torch.float32, torch.float64)
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or not (plain and x.dtype == keys.dtype):
            return None
        (batch, length), number, size = x.shape[:2], keys.shape[1], 2 * keys.shape[2]
        if number >= size or not is_untouched(self.query_proj, nn.Linear, x.device):
            return None
        many = batch * length * (size - number) > size * number

        def compute(kept: bool) -> torch.Tensor | None:
            if not kept and not many:
                return None
            return self.operators.keys_of_inputs(self.query_proj.weight, keys, self.rows)

        if length == 1:
            return self._tables.get("keys", [self.query_proj.weight, keys], compute)
        self.doubt_tables()
        return compute(False)

    def _weigh(self, products: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.score == "raw":
            return self.act_fn(products * scores)
        return self.act_fn(products) * (scores.softmax(-1) if self.score == "softmax" else scores.sigmoid())
