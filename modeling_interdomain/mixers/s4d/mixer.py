"""The S4D-only control: the state of Interdomain attention without a query."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ...layers.common import at_least_float32, backend_of
from ...layers.operators import Operators
from ...ops.common.launch import STEP_BACKENDS
from ...ops.diagonal.step import StepParameters
from ...ops.s4d.entry import S4D_BACKENDS, s4d_attention, s4d_tables, take_s4d_step
from ...ops.s4d.map import s4d_attention_map
from ..interdomain.configuration import S4DSpecification
from ..interdomain.initialization import real_gramian
from ..interdomain.mixer import KeyValueMixer
from ..interdomain.recurrence import InterdomainRecurrence


class S4DRecurrence(InterdomainRecurrence):
    """Adds `readout` `[H, M]`, the learned real contraction of `C X` over the M coefficients.

    It starts as small as any linear map: with numbers of unit size, outputs are large and the layer hardly learns
    (benchmarks/start_study.py).
    """

    degree = 1
    operators = Operators.of(
        s4d_attention, s4d_attention_map, s4d_tables, take_s4d_step, beside=InterdomainRecurrence.operators
    )

    tabled = (*InterdomainRecurrence.tabled, "readout")

    def __init__(self, config):
        super().__init__(config)
        self.readout = nn.Parameter(
            torch.empty(config.num_attention_heads, config.state_size, dtype=at_least_float32())
        )

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        super().start_parameters(config)
        init.normal_(self.readout, std=config.initializer_range)

    def _output_rms(self, config, coefficients: torch.Tensor) -> torch.Tensor:
        """For `2 Re` of a random real contraction of C X."""
        gram = real_gramian(*self._transition_and_beta())
        rows = torch.view_as_real(coefficients.conj().resolve_conj()).flatten(2)
        return 2 * config.initializer_range * (rows * (rows @ gram)).sum((-2, -1)).sqrt()

    def _operate(self, *inputs: Any, **arguments: Any):
        key, value, log_decay, input_matrix, coefficients = inputs
        arguments |= {"chunk_size": self.config.chunk_size, "backend": backend_of(self.config, S4D_BACKENDS)}
        rows = self.head_rows(coefficients)
        return self.operators.s4d_attention(key, value, log_decay, input_matrix, rows, **arguments)

    def _step(self, *tokens: Any, **arguments: Any) -> torch.Tensor:
        parameters = self._per_version("step", self._step_parameters)
        arguments["backend"] = backend_of(self.config, STEP_BACKENDS)
        return self.operators.take_s4d_step(*tokens, parameters, **arguments)

    def _map(self, *tokens: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """`s4d_attention_map` of as many tokens: the kernel of the layer, the same for all texts."""
        log_decay, input_matrix, coefficients = self.parameters_of_operator()
        (batch, length), rows = tokens[0].shape[:2], self.head_rows(coefficients)
        found = self.operators.s4d_attention_map(log_decay, input_matrix, rows, length, cu_seqlens=cu_seqlens)
        return found.expand(batch, -1, -1, -1)

    def _step_parameters(self, kept: bool) -> StepParameters:
        log_decay, input_matrix, coefficients = self.parameters_of_operator()
        make = self.operators.s4d_tables
        return self.operators.StepParameters(make, log_decay, input_matrix, self.head_rows(coefficients))

    def head_rows(self, coefficients: torch.Tensor | None) -> torch.Tensor:
        """`readout^T C`, the row `[H, M, 2]` that reads the state."""
        wide = torch.promote_types(self.readout.dtype, torch.float32)
        rows = self.readout.to(wide).unflatten(0, (self.log_dt.shape[0], -1))  # [G, H / G, M]
        if coefficients is None:
            rows = torch.stack([rows, torch.zeros_like(rows)], dim=-1)
        elif coefficients.ndim == 3:
            rows = rows[..., None] * coefficients[:, None]
        else:
            rows = (rows @ coefficients.flatten(2)).unflatten(-1, (-1, 2))
        return rows.flatten(0, 1)


class S4DMixer(S4DSpecification, KeyValueMixer):
    """Two linear maps of the token, each after a convolution, drive the state; a learned vector reads it.

    The output has R + D numbers a head, all of which `o_proj` reads. `k_proj` and `v_proj` make the two inputs, a and b
    of the paper. With `state_input="key_value"` the first passes through the feature map and the second is not
    convolved, as in Interdomain layers: the ablation with a linear readout.
    """

    recurrence_class = S4DRecurrence

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx, config.feature_dim + config.head_dim, weighted=False)

    def _written(self, tokens):
        return torch.cat(tokens, dim=-1)
