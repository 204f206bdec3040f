"""Small modules that every floor uses: the norm, numbers that stay in float32, projections into the residual stream,
what is added to the training loss."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init


class InterdomainRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def start_parameters(self, config) -> None:
        init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class Float32Module(nn.Module):
    """`.to(torch.bfloat16)` and `.half()` move parameters and buffers of this module without rounding them."""

    def _apply(self, fn, recurse=True):
        def move(x: torch.Tensor) -> torch.Tensor:
            moved = fn(x)
            return x.to(moved.device) if moved.dtype in (torch.bfloat16, torch.float16) else moved

        return super()._apply(move, recurse)


def residual_projection(in_features: int, out_features: int) -> nn.Linear:
    """A linear layer that starts with a smaller standard deviation: there are 2 N of them, and they add up.

    It is marked rather than of a class of its own, because quantizers and adapters may look for `nn.Linear` exactly.
    """
    linear: Any = nn.Linear(in_features, out_features, bias=False)
    linear.adds_to_residual = True
    return linear


class AuxiliaryLoss(nn.Module):
    """Hands on what a layer wants added to the training loss: the model finds it by this module.

    A layer calls it with a scalar, in training only; the model adds `config.aux_loss_coef` times the sum over layers.
    """

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def is_untouched(module: nn.Module, kind: type[nn.Module], device: torch.device) -> bool:
    """Whether calling a module does nothing but what its class says, so that a kernel may read its weights instead.

    Hooks (pruning, offloading, an observer), another class (an adapter, a parametrization), a replaced `forward` and
    weights that are elsewhere all mean no.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    here = all(p.device == device for p in module.parameters())
    return type(module) is kind and not hooks and "forward" not in vars(module) and here
