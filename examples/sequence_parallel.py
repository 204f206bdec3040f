"""Sequence parallelism for the Trainer: the processes of a group read the same rows, each a piece of every row.

Accelerate's own parallelism configuration says who reads what: the axis "cp" of its mesh is that of the pieces, and its
data loaders give all processes along it the same rows. Its context parallelism itself, which sends keys and values
round a ring, is not used: the layers of these models pass their states on (`sequence_group`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from accelerate import ParallelismConfig
from transformers import Trainer

from modeling_interdomain import sequence_piece


class SequenceParallelism(ParallelismConfig):
    """Accelerate's mesh with an axis "cp", without what accelerate does to attention and refuses where that is on."""

    @classmethod
    def over(cls, processes: int, pieces: int) -> SequenceParallelism:
        """Rows cut into so many pieces, and as many groups of processes as that leaves."""
        return cls(cp_size=pieces, dp_shard_size=processes // pieces)

    @property
    def cp_enabled(self) -> bool:
        return False

    @property
    def non_dp_dim_names(self) -> list[str]:
        return [*super().non_dp_dim_names, "cp"]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Gradients are averaged, and with FSDP parameters sharded, over pieces as over rows."""
        return [*super().dp_shard_cp_dim_names, "cp"]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return [*super().dp_cp_dim_names, "cp"]

    def _validate_accelerator(self, accelerator) -> None:
        """On CPUs accelerate knows no parallelism, and needs none: DDP averages over all processes."""
        if accelerator.device.type != "cpu":
            super()._validate_accelerator(accelerator)


class SequenceParallelTrainer(Trainer):
    """The Trainer, each process with its piece of the rows where `args.parallelism_config` has an axis "cp"."""

    def _pieces(self) -> int:
        return self.get_cp_size()

    def _prepare_context_parallel_inputs(self, model, inputs: dict[str, Any]):
        """After the predicted tokens of whole rows were counted, in training and in evaluation."""
        if self._pieces() > 1:
            inputs = sequence_piece(inputs, self.accelerator.torch_device_mesh["cp"].get_group())
        return contextlib.nullcontext, inputs

    def evaluation_loop(self, *arguments, **options):
        if self._pieces() > 1:
            self.gather_function = self._gather_losses
        return super().evaluation_loop(*arguments, **options)

    def _gather_losses(self, losses: torch.Tensor) -> torch.Tensor:
        """Of all rows once: the processes of a group have the same ones."""
        found = self.accelerator.gather(losses)
        found = found.view(-1, self._pieces(), losses.shape[0]).mean(1).flatten()
        state = self.accelerator.gradient_state
        return found[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else found
