"""The memory of a window that its queries read by softmax, at points of the past."""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ...layers.common import backend_of, is_plain
from ...layers.operators import Operators
from ...ops.diagonal.step import StepParameters
from ...ops.interdomain.points import POINT_BACKENDS, Points, point_attention, point_tables, take_point_step
from ..interdomain.initialization import real_gramian
from .recurrence import WindowRecurrence

_NOISE = 1e-3  # of the Gramian, relative to the mean of its diagonal


class PointRecurrence(WindowRecurrence):
    """Reads its state at N points: `point_keys` and `point_values` `[G, N, M, 2]` in the place of C; `point_bias` `[G,
    H / G, N]`; and `point_log_scale` `[G, H / G]`, the logarithm of what scores are multiplied by beside 1 / sqrt(R).

    The points start evenly over the past that a group sees, 2 / Delta tokens, and as the posterior mean of keys and
    values there given the state: the point of age a weighs the modes by `(P + noise)^-1 phi(a)`, P the Gramian of the
    2M real functions phi (`initialization.py`).
    """

    operators = Operators.of(point_attention, point_tables, take_point_step, beside=WindowRecurrence.operators)
    tabled = ("log_dt", "log_a_real", "a_imag", "B", "point_keys", "point_values", "point_bias", "point_log_scale")

    def __init__(self, config):
        super().__init__(config)
        groups, size = self.a_imag.shape
        count, heads = config.window_points, config.num_attention_heads // groups
        self.C = None
        self.point_keys = nn.Parameter(torch.empty(groups, count, size, 2))
        self.point_values = nn.Parameter(torch.empty(groups, count, size, 2))
        self.point_bias = nn.Parameter(torch.empty(groups, heads, count))
        self.point_log_scale = nn.Parameter(torch.empty(groups, heads))

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        super().start_parameters(config)
        init.zeros_(self.point_bias)
        init.zeros_(self.point_log_scale)
        weights = self._posterior()
        init.copy_(self.point_keys, weights)
        init.copy_(self.point_values, weights)

    def _posterior(self) -> torch.Tensor:
        """`[G, N, M, 2]`: the weights with which a state says what was at points evenly over the past."""
        decay, beta = self._transition_and_beta()
        count, size = self.point_keys.shape[1:3]
        ages = torch.arange(count, dtype=torch.float64, device=decay.device) * (2 / count)
        ages = ages / self.log_dt.double().exp()[:, None]
        functions = torch.view_as_real(beta[:, None] * (decay.log()[:, None] * ages[..., None]).exp()).flatten(2)
        gram = real_gramian(decay, beta)
        noise = _NOISE * gram.diagonal(dim1=1, dim2=2).mean(-1)
        gram = gram + noise[:, None, None] * torch.eye(2 * size, dtype=gram.dtype, device=gram.device)
        # Unchecked, because where starting is switched off (a checkpoint follows) the parameters are anything.
        factor = torch.linalg.cholesky_ex(gram)[0]
        return torch.cholesky_solve(functions.mT, factor).mT.unflatten(-1, (size, 2)).float()

    def _points(self) -> Points:
        wide = torch.promote_types(self.point_keys.dtype, torch.float32)
        keys, values, bias = (x.to(wide) for x in (self.point_keys, self.point_values, self.point_bias))
        return Points(keys, values, bias, self.point_log_scale.to(wide).exp() / math.sqrt(self.config.feature_dim))

    def _operate(self, *inputs: Any, **arguments: Any):
        """`[B, T, H, D + 1]`, the last number the logarithm of the sum of the softmax, and the final states."""
        query, key, value, log_decay, input_matrix, _ = inputs
        if is_plain(query, query.dtype) and not torch.jit.is_tracing():
            arguments["kept"] = self._per_version("prompt", lambda _: {})
        backend = backend_of(self.config, POINT_BACKENDS)
        arguments |= {"chunk_size": self.config.chunk_size, "backend": backend}
        parameters = log_decay, input_matrix, self._points()
        return self.operators.point_attention(query, key, value, *parameters, **arguments)

    def _step(self, *tokens: Any, **arguments: Any) -> torch.Tensor:
        parameters: StepParameters = self._per_version("step", self._step_parameters)
        query, key, value = tokens
        return self.operators.take_point_step(query, key, value, parameters, **arguments)

    def _step_parameters(self, kept: bool) -> StepParameters:
        make = self.operators.point_tables
        return self.operators.StepParameters(make, *self.parameters_of_operator()[:2], self._points())
