"""Whether Triton can run here, and how its kernels are launched."""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

try:
    import triton
except ImportError:
    triton = None

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Why a launch failed, once one has: from then on no other is tried.
_failure: list[str] = []

# Warps and pipeline stages to choose from where a kernel is timed once for each kind of problem (never for each
# length).
_CONFIGURATIONS = ((4, 1), (4, 2), (8, 1))


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (`TRITON_INTERPRET=1`)."""
    return triton is not None and triton.knobs.runtime.interpret


@torch.compiler.assume_constant_result
def why_not(device: torch.device) -> str | None:
    """Why the kernels cannot run on tensors of a device; None when they can."""
    if _failure:
        return _failure[0]
    if triton is None:
        return "Triton is not installed (pip install triton)"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"its kernels need tensors on a GPU, these are on {device}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"its kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    return None


def fused(
    backend: str, tensors: Sequence[torch.Tensor | None], widest: int, run: Callable[[], Result]
) -> Result | None:
    """What the kernels give, or None where "auto" has to take another way; which way runs is said once.

    Args:
        backend: "triton" or "auto".
        tensors: those that the kernels would work on, the first on their device.
        widest: the largest of R, D and M.
        run: launches the kernels, and imports them: they are imported when they are first used.

    Raises:
        ValueError: when "triton" is asked for and the kernels cannot run.
    """
    device = tensors[0].device
    if backend == "auto" and device.type == "cpu":
        return None
    reason = why_not(device)
    if reason is None and any(x is not None and x.dtype == torch.float64 for x in tensors):
        reason = "its kernels compute in float32, and these tensors are float64"
    if reason is None and widest > 256:
        reason = f"its kernels hold up to 256 features, values and modes a head, here one of these is {widest}"
    if reason is None:
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if backend == "triton":
                raise
            reason = f"launching one failed with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            _failure.append(reason)
    if backend == "triton":
        raise ValueError(f"backend 'triton' cannot run: {reason}. backend='auto' would take another.")
    _say_once(f"Interdomain attention runs without its fused kernels: {reason}.")
    return None


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def on_device(x: torch.Tensor):
    """Launches go to the current device, which need not be the one the tensors are on."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def tuned(kernel, key: tuple[str, ...], configurations=_CONFIGURATIONS, **options):
    """Time a few numbers of warps and stages the first time a kernel meets a kind of problem, and keep the fastest.

    Args:
        key: the names of the arguments that make a problem another kind; never a length.
    """
    if interpreted():
        return kernel
    configs = [triton.Config({}, num_warps=warps, num_stages=stages) for warps, stages in configurations]
    return triton.autotune(configs, key=list(key), prune_configs_by={"early_config_prune": _that_fit}, **options)(
        kernel
    )


def _that_fit(configs, named_args, **kwargs):
    """Where shared memory is small (under 100 KiB a block), a second stage would not fit: do not try it."""
    if shared_memory(torch.cuda.current_device()) >= 100 * 1024:
        return configs
    return [config for config in configs if config.num_stages == 1]


def namespace(module: str) -> str:
    """Where the operators of a module are registered: a checkpoint's own copy of the file is another module."""
    return "".join(c if c.isalnum() else "_" for c in module)


@functools.cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory a block may use."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def power_of_two(n: int, least: int = 16) -> int:
    """The block that holds n numbers; matrix units want at least 16."""
    return max(least, 1 << (n - 1).bit_length())
