"""Whether Triton can run here, and how its kernels are launched."""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.autograd import forward_ad

# The one place that imports Triton: files of kernels take both names from here.
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Kinds of launches that have run in this process, and those whose first launch failed, with the reason.
_succeeded: set[tuple] = set()
_failed: dict[tuple, str] = {}

STEP_BACKENDS = ("auto", "recurrent", "triton")

# The largest R, D or M of a head.
_WIDEST = 256

# Warps and pipeline stages to choose from where a kernel is timed once for each kind of problem (never for each
# length).
CONFIGURATIONS = ((4, 1), (4, 2), (8, 1))

# CUDA 12.8 takes arguments of a kernel for addresses in shared memory, in some matrix products of compute capability 9.
_SOUND_ASSEMBLER = (12, 9)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU (`TRITON_INTERPRET=1`)."""
    return triton is not None and triton.knobs.runtime.interpret


# Devices on which "auto" tries no kernels; on "meta" models run to be counted.
_WITHOUT_KERNELS = ("cpu", "meta")


class NoDerivative(NotImplementedError):
    """An operator was asked for what it has not, such as forward mode: no fault of a kernel."""


class StateTouched(RuntimeError):
    """A kernel failed after another had already changed the state, so that no other backend can go on from it."""


@torch.compiler.assume_constant_result
def why_not(device: torch.device) -> str | None:
    """Why no kernel can run on tensors of a device; None when they can."""
    if triton is None:
        return "Triton is not installed (pip install triton)"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"its kernels need tensors on a GPU, these are on {device}"
    if torch.version.hip is not None:
        return None
    major, _ = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"its kernels need compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    return _no_sound_assembler() if major == 9 else None


@functools.cache
def _no_sound_assembler() -> str | None:
    """Have Triton take the newer of its two assemblers where the one it takes is not sound; why there is none."""
    tools = triton.knobs.nvidia
    if _is_sound(tools.ptxas):
        return None
    newer = getattr(tools, "ptxas_blackwell", None)
    if newer is None or not _is_sound(newer):
        return (
            f"CUDA's assembler, ptxas {tools.ptxas.version}, gives matrix products on this GPU wrong addresses "
            "(set TRITON_PTXAS_PATH to the ptxas of CUDA 12.9 or later)"
        )
    tools.ptxas = newer.path
    return None


def _is_sound(assembler) -> bool:
    return tuple(int(number) for number in assembler.version.split(".")[:2]) >= _SOUND_ASSEMBLER


def fused(
    backend: str,
    tensors: Sequence[torch.Tensor | None],
    widths: int | Sequence[int],
    run: Callable[[], Result],
    entry: str = "attention",
) -> Result | None:
    """What the kernels return, or None where "auto" has to take another backend.

    With "auto" the first launch of a kind may fail: that is logged once, and launches of that kind take the other
    backend from then on. A kind that has run before raises when it fails, so that no training run changes its backend
    on the way.

    Args:
        backend: "triton" (always tries, and raises what went wrong) or "auto".
        tensors: those that the kernels would work on; the first says on which device.
        widths: R, D and M, or the largest of them.
        run: imports and launches the kernels.
        entry: which kernels; with the device, the dtypes and the widths, but never a length, the kind of a launch.

    Raises:
        ValueError: when "triton" is asked for and the kernels cannot run.
        RuntimeError: when "auto" would have to take another backend while other ranks may not.
    """
    device = tensors[0].device
    if backend == "auto" and device.type in _WITHOUT_KERNELS:
        return None
    dtypes = tuple([x.dtype for x in tensors if x is not None])
    kind = (entry, device, dtypes, widths if isinstance(widths, int) else tuple(widths))
    compiling = torch.compiler.is_compiling()  # nothing is launched while a graph is made
    if kind in _succeeded and not compiling and forward_ad._current_level < 0:
        return run()
    reason = _why_not_these(device, dtypes, widths if isinstance(widths, int) else max(widths))
    if reason is not None:
        if backend == "triton":
            raise ValueError(f"backend 'triton' cannot run: {reason}. backend='auto' would take another.")
        _say_once(f"Interdomain attention runs without its fused kernels: {reason}.")
        return None
    if compiling:
        return run() if backend == "triton" or not _has_failed(kind) else None
    if backend == "triton" or kind not in _failed:
        try:
            result = run()
        except (torch.OutOfMemoryError, StateTouched, NoDerivative):
            raise
        except Exception as error:
            if backend == "triton":
                raise
            _failed[kind] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            _say_once(
                f"Interdomain attention runs without its fused kernels for {entry} in {dtypes[0]} on {device} with "
                f"widths {widths}: the first launch failed with {_failed[kind]}."
            )
        else:
            _succeeded.add(kind)
            return result
    if _one_of_several_ranks():
        raise RuntimeError(
            f"The fused kernels for {entry} failed on this rank with {_failed[kind]}, and other ranks may go on with "
            "them: set backend='chunk' on all ranks, or repair Triton here."
        )
    return None


def say_without_kernels(device: torch.device, reason: str) -> None:
    """Log once why "auto" does not try kernels on a device that could have them."""
    if device.type not in _WITHOUT_KERNELS and not torch.compiler.is_compiling():
        _say_once(f"Interdomain attention runs without its fused kernels: {reason}.")


def overwritable(state: torch.Tensor, state_indices: torch.Tensor | None = None) -> bool:
    """Whether kernels can update a state in place: it is contiguous or, with indices, each slot of the pool is."""
    if state_indices is None:
        return state.is_contiguous()
    return state[0].is_contiguous() and state.stride(0) >= state[0].numel()


def steps_fused(backend: str, state: torch.Tensor, state_indices: torch.Tensor | None = None) -> bool:
    """Whether a step is to try kernels."""
    tries = backend == "auto" and state.device.type != "cpu"
    return backend == "triton" or (tries and overwritable(state, state_indices))


def check_step_backend(backend: str, state: torch.Tensor, state_indices: torch.Tensor | None = None) -> None:
    """Refuse a backend that no step has, or a state that the kernels cannot update in place."""
    if backend not in STEP_BACKENDS:
        raise ValueError(f"backend of a step must be one of {', '.join(STEP_BACKENDS)}, got {backend!r}.")
    if backend == "triton" and not overwritable(state, state_indices):
        what = "state" if state_indices is None else "each slot of state"
        raise ValueError(f"{what} must be contiguous for backend 'triton', which overwrites it; use 'auto' or a copy.")


def _why_not_these(device: torch.device, dtypes: tuple[torch.dtype, ...], widest: int) -> str | None:
    reason = why_not(device)
    if reason is None and torch.float64 in dtypes:
        reason = "its kernels compute in float32, and these tensors are float64"
    if reason is None and widest > _WIDEST:
        reason = f"its kernels hold up to {_WIDEST} features, values and modes a head, here one of these is {widest}"
    if reason is None and forward_ad._current_level >= 0:
        reason = "its kernels have no derivative in forward mode (jvp)"
    return reason


@torch.compiler.assume_constant_result
def _has_failed(kind: tuple) -> bool:
    return kind in _failed


def _one_of_several_ranks() -> bool:
    """Whether other processes must take the same backend."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def on_device(x: torch.Tensor):
    """Make the device of x the current one, to which Triton launches."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def contiguous(*tensors: torch.Tensor | None, dtype: torch.dtype | None = None) -> list[torch.Tensor | None]:
    """Tensors as kernels address them, in `dtype` where one is given; None stays None."""
    return [None if x is None else x.to(dtype or x.dtype).contiguous() for x in tensors]


def tuned(kernel, key: tuple[str, ...], configurations: Sequence[tuple] = CONFIGURATIONS, **options):
    """Time a few numbers of warps and stages the first time a kernel meets a kind of problem, and keep the fastest.

    Args:
        key: the names of the arguments that say of what kind a problem is; never a length.
        configurations: warps, stages and, for other tiles than those of its defaults, a dictionary of arguments.
    """
    if interpreted():
        return kernel
    configs = [
        triton.Config(tiles[0] if tiles else {}, num_warps=warps, num_stages=stages)
        for warps, stages, *tiles in configurations
    ]
    tune = triton.autotune(configs, key=list(key), prune_configs_by={"early_config_prune": _that_fit}, **options)
    return tune(kernel)


def _that_fit(configs, named_args, **kwargs):
    """Without those of two stages where a block has less than 100 KiB of shared memory, in which they do not fit."""
    if shared_memory(torch.cuda.current_device()) >= 100 * 1024:
        return configs
    return [config for config in configs if config.num_stages == 1]


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
