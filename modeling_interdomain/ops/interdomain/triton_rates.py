"""`log(lambda)` and its gradients in one launch each: PyTorch needs sixteen for these few numbers."""

import torch

from ..common.launch import namespace, on_device, power_of_two

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


@triton.jit
def rates(log_dt, log_a_real, a_imag, out, size, M: tl.constexpr):
    """`out` `[groups, size, 2]`; grid [groups]."""
    group = tl.program_id(0)
    modes = tl.arange(0, M)
    inside = modes < size
    at = group * size + modes
    step = tl.exp(tl.load(log_dt + group))
    tl.store(out + 2 * at, -step * tl.exp(tl.load(log_a_real + at, mask=inside, other=0.0)), mask=inside)
    tl.store(out + 2 * at + 1, step * tl.load(a_imag + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def rates_backward(log_dt, out, grad, of_log_dt, of_log_a_real, of_a_imag, size, M: tl.constexpr):
    """The gradients of what `rates` reads, from `out` and its gradient; grid [groups]."""
    group = tl.program_id(0)
    modes = tl.arange(0, M)
    inside = modes < size
    at = group * size + modes
    of_real = tl.load(grad + 2 * at, mask=inside, other=0.0) * tl.load(out + 2 * at, mask=inside, other=0.0)
    of_phase = tl.load(grad + 2 * at + 1, mask=inside, other=0.0)
    tl.store(of_log_a_real + at, of_real, mask=inside)
    tl.store(of_a_imag + at, of_phase * tl.exp(tl.load(log_dt + group)), mask=inside)
    of_phase *= tl.load(out + 2 * at + 1, mask=inside, other=0.0)
    tl.store(of_log_dt + group, tl.sum(of_real + of_phase, 0))


_rates, _rates_backward = rates, rates_backward

_NAMESPACE = namespace(__name__)


@torch.library.custom_op(f"{_NAMESPACE}::rates", mutates_args=())
def _operator(log_dt: torch.Tensor, log_a_real: torch.Tensor, a_imag: torch.Tensor) -> torch.Tensor:
    groups, size = a_imag.shape
    out = a_imag.new_empty(groups, size, 2)
    with on_device(a_imag):
        _rates[(groups,)](log_dt, log_a_real, a_imag, out, size, M=power_of_two(size))
    return out


@_operator.register_fake
def _(log_dt, log_a_real, a_imag):
    return a_imag.new_empty(*a_imag.shape, 2)


@torch.library.custom_op(f"{_NAMESPACE}::rates_backward", mutates_args=())
def _operator_backward(
    log_dt: torch.Tensor, out: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups, size, _ = out.shape
    found = torch.empty_like(log_dt), out.new_empty(groups, size), out.new_empty(groups, size)
    with on_device(out):
        _rates_backward[(groups,)](log_dt, out, grad, *found, size, M=power_of_two(size))
    return found


@_operator_backward.register_fake
def _(log_dt, out, grad):
    return torch.empty_like(log_dt), *(out.new_empty(out.shape[:2]) for _ in range(2))


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


def _differentiate(ctx, grad):
    return _operator_backward(*ctx.saved_tensors, grad.contiguous())


_operator.register_autograd(_differentiate, setup_context=_keep)


def triton_log_decays(log_dt: torch.Tensor, log_a_real: torch.Tensor, a_imag: torch.Tensor) -> torch.Tensor:
    """As `log_decays`, in float32."""
    return _operator(log_dt.contiguous(), log_a_real.contiguous(), a_imag.contiguous())
