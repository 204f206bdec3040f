"""Parts of our models with vLLM's linear layers in them, each with the heads of its process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

from modeling_interdomain.parallel.tensor import HEADS

_LINEAR = {"colwise": ColumnParallelLinear, "rowwise": RowParallelLinear}


def made(make: Callable[[], nn.Module], plan: dict[str, str], vllm_config: VllmConfig, prefix: str) -> nn.Module:
    """A module of ours for the process that asks, its weights yet to be loaded.

    Args:
        make: makes the module, as it would be alone.
        plan: the plan by which Transformers divides it, styles by the name of a part or parameter, "" the module
            itself. What has no entry is whole in every process.
        vllm_config: of the engine. Where weights are quantized or adapted, all linear layers are vLLM's, not those
            alone that are divided.
        prefix: of the module's name in the model.
    """
    quant_config = vllm_config.quant_config
    processes = get_tensor_model_parallel_world_size()
    with torch.device("meta"):  # what is loaded need not start
        module = make()
    divided: set[int] = set()
    for name, style in plan.items():
        *path, last = name.split(".")
        owner = module.get_submodule(".".join(path))
        if style == HEADS:
            part = getattr(owner, last) if last else module
            held = [part] if isinstance(part, nn.Parameter) else part.parameters(recurse=False)
            divided |= {id(parameter) for parameter in held}
        elif hasattr(owner, last):
            setattr(owner, last, _linear(getattr(owner, last), _LINEAR[style], quant_config, f"{prefix}.{name}"))
    if quant_config is not None or vllm_config.lora_config is not None:
        for name, part in list(module.named_modules()):
            if isinstance(part, nn.Linear):
                module.set_submodule(name, _linear(part, ReplicatedLinear, quant_config, f"{prefix}.{name}"))
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None and parameter.is_meta:
                part._parameters[name] = _allocated(parameter, processes if id(parameter) in divided else 1)
    share_heads: Any = getattr(module, "share_heads", None)
    if processes > 1 and share_heads is not None:
        share_heads(processes)
    return module


def _linear(linear: nn.Linear, kind: type, quant_config: Any, prefix: str) -> nn.Module:
    options = {"bias": linear.bias is not None, "quant_config": quant_config, "prefix": prefix, "return_bias": False}
    part = kind(linear.in_features, linear.out_features, **options)
    if quant_config is not None:  # some kernels of quantized weights take a matrix and nothing else
        apply = part.quant_method.apply
        part.quant_method.apply = lambda part, x, *bias: apply(part, x.flatten(0, -2), *bias).unflatten(0, x.shape[:-1])
    return part


def _allocated(parameter: nn.Parameter, parts: int) -> nn.Parameter:
    """Memory for one of so many parts along the first axis, which vLLM fills with that of this process."""
    mine: Any = torch.empty(parameter.shape[0] // parts, *parameter.shape[1:], dtype=parameter.dtype)
    mine = nn.Parameter(mine, requires_grad=False)
    if parts > 1:
        mine.weight_loader = partial(_load_part, parts=parts)
    return mine


def _load_part(mine: nn.Parameter, whole: torch.Tensor, parts: int) -> None:
    mine.data.copy_(whole.chunk(parts)[get_tensor_model_parallel_rank()])
