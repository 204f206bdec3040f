"""Heads over several processes: what the library's tensor parallelism needs to know of layers that keep a state.

Projections are divided by its own styles ("colwise", "rowwise"). All else that a token mixer learns has heads, groups
or their channels along its first axis, whatever axes follow, or is a norm that all heads share: for these is `HEADS`, a
style registered here. A head reads and writes its own state alone, so each process holds the states of its heads, and
processes meet where those of any attention layer do: in the sum over the heads that `o_proj` makes, and in gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..layers.common import InterdomainRMSNorm
from ..layers.configuration import HEADS, LAYERS


class _SharedByHeads(torch.autograd.Function):
    """A parameter that every process uses: its gradient is summed over the processes."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


if dist.is_available():
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

    class HeadParallel(TensorParallelLayer):
        """Divides a parameter along its first axis; a module then computes with its part of such parameters."""

        def validate_param(self, module, param, mesh, parameter_name=None):
            shape, processes = list(module._parameters[param].shape), mesh.size()
            if shape[0] % processes:
                raise ValueError(
                    f"tp_size = {processes} does not divide the heads of {parameter_name or param}, which has shape "
                    f"{shape}: choose one that divides the groups of heads."
                )

        def shard_param(self, module, param, mesh):
            full = module._parameters[param]
            mine = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[param] = nn.Parameter(mine, requires_grad=full.requires_grad)

        def install_forward(self, module, mesh):
            if hasattr(module, "share_heads"):
                module.share_heads(mesh.size())
            return super().install_forward(module, mesh)

        def context_around_forward(self, module, mesh):
            return _of_this_process(module, mesh.get_group())

    class LayerParallel(TensorParallelLayer):
        """Corrects the widths that the adapters in a decoder layer note.

        PEFT (0.21.2) notes the width of this process's part in a divided linear map, also where its weight is a part of
        the whole; the library's styles take what is noted for the width of the whole.
        """

        def context_around_forward(self, module, mesh):
            for part in module.modules():
                if isinstance(part, nn.Linear) and isinstance(part.weight, DTensor):
                    part.out_features, part.in_features = part.weight.shape
            return nullcontext()

    ALL_PARALLEL_STYLES.register(HEADS, HeadParallel())
    ALL_PARALLEL_STYLES.register(LAYERS, LayerParallel())


@contextmanager
def _of_this_process(module: nn.Module, group: Any) -> Iterator[None]:
    """Replace parameters by plain tensors for a while: divided ones by this process's part, shared norms by the whole.

    Also in submodules, whose weights a fused kernel reads without calling them; linear maps have styles of their own.
    """
    taken = []
    try:
        for part in module.modules():
            if isinstance(part, nn.Linear):
                continue
            for name, parameter in part._parameters.items():
                mine = _local(parameter, isinstance(part, InterdomainRMSNorm), group)
                if mine is not parameter:
                    taken.append((part._parameters, name, parameter, mine))
                    part._parameters[name] = mine
        yield
    finally:
        for parameters, name, parameter, mine in taken:
            if parameters[name] is mine:  # FSDP puts its own parameter there, and takes it away again
                parameters[name] = parameter


def _local(parameter: Any, is_norm: bool, group: Any) -> Any:
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    if is_norm and torch.is_grad_enabled() and parameter.requires_grad:
        return _SharedByHeads.apply(parameter, group)
    return parameter
