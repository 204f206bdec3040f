"""The learned recurrence of one layer: its parameters, all in float32, and the operator called with them."""

import math
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .module_common import Float32Module
from .op_interdomain import interdomain_attention, interdomain_step


class InterdomainRecurrence(Float32Module):
    """`log_dt` `[G]`; `log_a_real`, `a_imag` `[G, M]`; `B` `[G, M, 2]`; `C` `[G, M, M, 2]`, `[G, M, 2]` or None.

    A module of its own, because it stays in float32 whatever the model's dtype: a rounded `log_dt` or `a_imag` would
    turn every phase of a long sequence, and sharding (FSDP2) wants one dtype a module.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        groups, size = config.num_key_value_heads, config.state_size
        self.log_dt = nn.Parameter(torch.empty(groups, dtype=torch.float32))
        self.log_a_real = nn.Parameter(torch.empty(groups, size, dtype=torch.float32))
        self.a_imag = nn.Parameter(torch.empty(groups, size, dtype=torch.float32))
        self.B = nn.Parameter(torch.empty(groups, size, 2, dtype=torch.float32))
        shape = {"full": (groups, size, size, 2), "diagonal": (groups, size, 2)}.get(config.coefficient_matrix)
        self.C = None if shape is None else nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.start_parameters(config)

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        """S4D-Inv modes, log-uniform steps, and beta and C as the configuration says."""
        groups, size = self.a_imag.shape
        modes = torch.arange(size, dtype=torch.float32, device=self.a_imag.device)
        init.constant_(self.log_a_real, math.log(0.5))
        init.copy_(self.a_imag, (size / math.pi * (size / (2 * modes + 1) - 1)).expand(groups, -1))
        init.uniform_(self.log_dt, math.log(config.time_step_min), math.log(config.time_step_max))
        init.copy_(self.B, self._initial_input_matrix())
        if self.C is not None:
            variance = config.coefficient_init_scale**2 / (size if self.C.ndim == 4 else 1)
            init.normal_(self.C, std=math.sqrt(variance / 2))

    def _initial_input_matrix(self) -> torch.Tensor:
        rate = torch.complex(-self.log_a_real.double().exp(), self.a_imag.double())
        decay = torch.exp(self.log_dt.double().exp()[:, None] * rate)
        start = self.config.input_matrix_init
        if start == "zero_order_hold":
            beta = (decay - 1) / rate
        elif start == "unit_variance":
            beta = torch.sqrt(1 - decay.abs().square()).to(rate.dtype)
        else:
            beta = torch.ones_like(rate)
        return torch.view_as_real(beta).float()

    def parameters_of_operator(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`log_decay` and `input_matrix`, `[G, M, 2]` each, and the coefficient matrix, in at least float32."""
        wide = torch.promote_types(self.log_dt.dtype, torch.float32)
        step = self.log_dt.to(wide).exp()[:, None]
        log_decay = torch.stack([-step * self.log_a_real.to(wide).exp(), step * self.a_imag.to(wide)], dim=-1)
        return log_decay, self.B.to(wide), None if self.C is None else self.C.to(wide)

    def forward(self, *tokens: torch.Tensor, transition: bool = False, **arguments: Any):
        """The operator applied to the tokens, or with `transition=True` `log_decay` and `input_matrix` alone.

        All of it happens inside, because for the length of this call alone sharded parameters are gathered, and those
        that PEFT targets (`target_parameters`) are adapted.
        """
        parameters = self.parameters_of_operator()
        return parameters[:2] if transition else self._operate(*tokens, *parameters, **arguments)

    def _operate(self, *inputs: Any, step: bool = False, **arguments: Any):
        """`interdomain_attention` of query, key and value, or with `step=True` `interdomain_step`."""
        config = self.config
        arguments |= {"product": config.product, "normalize": config.normalize}
        if step:
            return interdomain_step(*inputs, **arguments, backend="triton" if config.backend == "triton" else "auto")
        return interdomain_attention(*inputs, **arguments, chunk_size=config.chunk_size, backend=config.backend)
