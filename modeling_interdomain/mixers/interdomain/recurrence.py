"""The learned recurrence of one layer: its parameters, all in float32, and the operator called with them."""

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.utils import logging

from ...layers.common import DecodeTables, Float32Module, at_least_float32, backend_of, begun_with, is_plain
from ...layers.operators import Operators
from ...ops.common.cpu import autocast_operands
from ...ops.common.decay import as_complex
from ...ops.common.launch import STEP_BACKENDS
from ...ops.diagonal.step import StepParameters, step_tables
from ...ops.interdomain.entry import interdomain_attention, take_step
from ...ops.interdomain.few import MAX_DRAFT, MAX_PENDING, FewTables, few_tables, take_few
from ...ops.interdomain.map import interdomain_attention_map
from ...ops.interdomain.replay import replay_tables
from .initialization import (
    even_log_steps,
    frequencies,
    gramian,
    output_rms,
    posterior_coefficients,
    posterior_diagonal,
    real_gramian,
)

logger = logging.get_logger(__name__)


class InterdomainRecurrence(Float32Module, DecodeTables):
    """`log_dt` `[G]`; `log_a_real`, `a_imag` `[G, M]`; `B` `[G, M, 2]`; `C` `[G, M, M, 2]`, `[G, M, 2]` or None.

    A module of its own, because it stays in float32 whatever the model's dtype: a rounded `log_dt` or `a_imag` would
    turn every phase of a long sequence, and sharding (FSDP2) wants one dtype a module.
    """

    compares = True
    degree = 2
    """The power of C that the output has."""

    operators = Operators.of(
        interdomain_attention,
        interdomain_attention_map,
        take_step,
        take_few,
        few_tables,
        replay_tables,
        step_tables,
        StepParameters,
    )

    C: nn.Parameter | None
    # The parameters that tables of a step are made of.
    tabled: tuple[str, ...] = ("log_dt", "log_a_real", "a_imag", "B", "C")

    def __init__(self, config):
        super().__init__()
        self.config = config
        # Asked for at every token: a configuration is slow to look up.
        self.product, self.normalize = config.product, config.normalize
        groups, size = config.num_key_value_heads, config.state_size
        self.log_dt = nn.Parameter(torch.empty(groups, dtype=at_least_float32()))
        self.log_a_real = nn.Parameter(torch.empty(groups, size, dtype=at_least_float32()))
        self.a_imag = nn.Parameter(torch.empty(groups, size, dtype=at_least_float32()))
        self.B = nn.Parameter(torch.empty(groups, size, 2, dtype=at_least_float32()))
        shape = {"full": (groups, size, size, 2), "diagonal": (groups, size, 2)}.get(config.coefficient_matrix)
        self.C = None if shape is None else nn.Parameter(torch.empty(shape, dtype=at_least_float32()))
        if self.C is None:
            self.tabled = tuple(name for name in self.tabled if name != "C")

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        """Steps, modes, beta and C as the configuration says, each from those before it."""
        groups, size = self.a_imag.shape
        low, high = config.time_step_min, config.time_step_max
        if config.time_step_spacing == "even":
            init.copy_(self.log_dt, even_log_steps(groups, low, high, self.log_dt.device))
        else:
            init.uniform_(self.log_dt, math.log(low), math.log(high))
        init.constant_(self.log_a_real, math.log(0.5))
        init.copy_(self.a_imag, frequencies(config.modes, size, self.log_dt))
        init.copy_(self.B, self._initial_input_matrix(config.input_matrix_init))
        if self.C is not None and not getattr(self.C, "_is_hf_initialized", False):
            self._start_coefficients(config, self.C)

    def _start_coefficients(self, config, C: torch.Tensor) -> None:
        """C as `coefficient_init` names it, then scaled to the wanted size of the output."""
        size, full = self.a_imag.shape[1], C.ndim == 4
        if config.coefficient_init == "normal":
            variance = config.coefficient_init_scale**2 / (size if full else 1)
            init.normal_(C, std=math.sqrt(variance / 2))
        elif config.coefficient_init == "identity":
            ones = torch.ones(C.shape[:2], dtype=torch.complex64, device=C.device)
            init.copy_(C, torch.view_as_real(torch.diag_embed(ones) if full else ones))
        else:
            posterior = posterior_coefficients if full else posterior_diagonal
            found = posterior(gramian(*self._transition_and_beta()), config.coefficient_init_noise)
            init.copy_(C, torch.view_as_real(found.resolve_conj()))
        if config.output_init_rms is not None:
            coefficients = as_complex(C.double())
            rms = self._output_rms(config, coefficients if full else torch.diag_embed(coefficients))
            scale = (config.output_init_rms / rms) ** (1 / self.degree)
            C.mul_(scale.to(C.dtype).view(-1, *[1] * (C.ndim - 1)))

    def _output_rms(self, config, coefficients: torch.Tensor) -> torch.Tensor:
        """Root mean square of the output at the start, `[G]`, of C complex `[G, M, M]`."""
        return output_rms(coefficients, config.product, real_gramian(*self._transition_and_beta()))

    def _rates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and lambda, complex `[G, M]`, in float64."""
        rate = torch.complex(-self.log_a_real.double().exp(), self.a_imag.double())
        return rate, torch.exp(self.log_dt.double().exp()[:, None] * rate)

    def _transition_and_beta(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rates()[1], as_complex(self.B.double())

    def _initial_input_matrix(self, start: str) -> torch.Tensor:
        rate, decay = self._rates()
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
        if wide != self.log_dt.dtype and not torch.compiler.is_compiling():
            logger.warning_once(
                f"The recurrences compute with parameters that were rounded to {self.log_dt.dtype}, as FSDP with mixed "
                "precision makes them, and are far less exact than in autocast: give FSDP no param_dtype and use "
                "autocast alone (see examples/training.md)."
            )
        rates = self.log_dt, self.log_a_real, self.a_imag
        log_decay = self._per_version("log_decay", lambda _: log_decays(*rates, wide))
        return log_decay, self.B.to(wide), None if self.C is None else self.C.to(wide)

    def forward(
        self,
        *tokens: torch.Tensor,
        transition: bool = False,
        step: bool = False,
        few: bool = False,
        mapped: bool = False,
        **arguments: Any,
    ):
        """The operator applied to the tokens, or with `transition=True` what `state_after` moves a state on with.

        `initial_state` may be a function of `log_decay` and `input_matrix`. With `step=True` it is one token, `[B, 1,
        heads, ...]`, that moves `state` in place; with `few=True` a few, see `take_few`; with `mapped=True` it is the
        map of which token answered. All of it happens inside, because for the length of this call alone sharded
        parameters are gathered, and those that PEFT targets (`target_parameters`) are adapted.
        """
        if step:
            return self._step(*tokens, **arguments)
        if few:
            parameters = self._per_version("step", self._step_parameters)
            return self.operators.take_few(*tokens, tables=parameters.tables, few=self._few_tables, **arguments)
        if mapped:
            return self._map(*tokens, **arguments)
        if transition:
            if not torch.compiler.is_compiling() and tokens[0].shape[1] > MAX_DRAFT:
                self.doubt_tables()  # as the operator will, but before a record has them
            return self._per_version("transition", self._transition)
        self.doubt_tables()
        parameters = self.parameters_of_operator()
        arguments["initial_state"] = begun_with(arguments.get("initial_state"), *parameters[:2])
        return self._operate(*tokens, *parameters, **arguments)

    def _operate(self, *inputs: Any, **arguments: Any):
        """`interdomain_attention` of query, key, value and parameters."""
        config = self.config
        inputs = (*autocast_operands(*inputs[:3]), *inputs[3:])
        arguments |= {"product": self.product, "normalize": self.normalize}
        if is_plain(inputs[0], inputs[0].dtype) and not torch.jit.is_tracing():
            arguments["kept"] = self._per_version("prompt", lambda _: {})
        arguments |= {"chunk_size": config.chunk_size, "backend": config.backend}
        return self.operators.interdomain_attention(*inputs, **arguments)

    def _map(self, *tokens: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """`interdomain_attention_map` of query and key."""
        query, key, _ = tokens
        shape: Any = {"product": self.product, "normalize": self.normalize}
        return self.operators.interdomain_attention_map(
            query, key, *self.parameters_of_operator(), **shape, cu_seqlens=cu_seqlens
        )

    def _step(self, *tokens: Any, **arguments: Any) -> torch.Tensor:
        """`interdomain_step` of query, key and value; `arguments` are the state, and it may be a mask and slots."""
        parameters = self._per_version("step", self._step_parameters)
        arguments |= {"normalize": self.normalize, "backend": backend_of(self.config, STEP_BACKENDS)}
        return self.operators.take_step(*tokens, parameters, **arguments)

    def _step_parameters(self, kept: bool) -> StepParameters:
        make = partial(self.operators.step_tables, reused=kept)
        return self.operators.StepParameters(make, *self.parameters_of_operator(), self.product)

    def _few_tables(self, dtype: torch.dtype, count: int) -> FewTables:
        make, parameters = self.operators.few_tables, self.parameters_of_operator
        return self._per_version((dtype, count), lambda _: make(*parameters()[:2], dtype, count))

    def _transition(self, kept: bool) -> tuple[torch.Tensor, ...]:
        """What `state_after` needs: on a CPU, where a replay costs mostly calls, with its tables if they are kept."""
        log_decay, input_matrix, _ = self.parameters_of_operator()
        input_matrix = input_matrix.clone()  # what shards this module frees its parameters after the call
        tables = ()
        if kept and log_decay.device.type == "cpu":
            tables = self.operators.replay_tables(log_decay, input_matrix, MAX_PENDING)
        return log_decay, input_matrix, *tables

    def _per_version(self, name: Any, compute: Any) -> Any:
        """A value that `compute` makes of the parameters as they are; it is told whether the value will be kept."""
        own = self._parameters
        try:
            kept = self._tables.of([own[name] for name in self.tabled])
        except KeyError:  # adapted or replicated: these tensors are others each time
            kept = None
        if kept is None:
            return compute(False)
        if name not in kept:
            kept[name] = compute(True)
        return kept[name]


def log_decays(
    log_dt: torch.Tensor, log_a_real: torch.Tensor, a_imag: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`log(lambda) = exp(log_dt) (-exp(log_a_real) + i a_imag)` as real pairs `[G, M, 2]` in `dtype`.

    Args:
        log_dt: `[G]`.
        log_a_real, a_imag: `[G, M]`.
    """
    step = log_dt.to(dtype).exp()[:, None]
    return torch.stack([-step * log_a_real.to(dtype).exp(), step * a_imag.to(dtype)], dim=-1)
