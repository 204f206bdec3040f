"""What every module uses: the norm, parameters that stay in float32, projections into the residual stream, losses of
layers, and values that are kept until parameters change."""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from transformers import initialization as init
from transformers.activations import ACT2FN

from ..ops.common.cpu import multiplies_in_tiles

# In these dtypes a shorter way of fewer calls rounds no more than the longer one.
FULL_PRECISION = (torch.float32, torch.float64)
# Parameters that are tensors of their own, neither sharded nor quantized.
_PLAIN = (torch.Tensor, nn.Parameter)


def is_plain(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether x is a plain CPU tensor in eager mode without gradients, where mostly calls are what a token costs.

    Inside transforms (`torch.func.vmap`) a tensor may stand for many; these and tangents know no operations in place.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return forward_ad._current_level < 0 and type(x) is torch.Tensor and x.device.type == "cpu" and x.dtype == dtype


def at_least_float32() -> torch.dtype:
    """The dtype of parameters that set time scales: float32, or float64 where that is the default, as in a model that
    is loaded in it."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def activation(name: str) -> nn.Module:
    """One of Transformers' by its name."""
    if name not in ACT2FN:
        raise ValueError(f"hidden_act must be an activation of Transformers, such as silu or gelu, got {name!r}.")
    return ACT2FN[name]


def plain_rms_norm(x: torch.Tensor, eps: float, into: torch.Tensor | None = None) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps)` over the last axis of a plain tensor, in fewer calls than PyTorch's."""
    # The hypotenuse over the norm of x and a constant.
    size = torch.linalg.vector_norm(x, 2, -1, True).hypot_(_scalar((x.shape[-1] * eps) ** 0.5))
    return torch.div(x, size.mul_(_scalar(x.shape[-1] ** -0.5)), out=into)


# Numbers that a chain of element-wise steps works on at a time: in float32 a few such pieces fit into a CPU's cache.
_PIECE = 1 << 17


def tokens_at_once(x: torch.Tensor) -> int:
    """So many of the tokens `[B, T, ...]` have as many numbers as a piece, at least one."""
    return max(1, _PIECE * x.shape[1] // max(1, x.numel()))


def by_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function(x)` of tokens `[B, T, W]` in the dtype of x, a few tokens at a time, so that intermediate results stay
    in the CPU's cache; without gradients."""
    size = tokens_at_once(x)
    if x.shape[1] <= size:
        return function(x).to(x.dtype)
    joined = torch.empty_like(x)
    for piece, into in zip(x.split(size, dim=1), joined.split(size, dim=1), strict=True):
        into.copy_(function(piece))
    return joined


@lru_cache(maxsize=64)
def _scalar(value: float) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device="cpu")


class InterdomainRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def start_parameters(self, config) -> None:
        init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if is_plain(x) and weight.dtype in (torch.float32, torch.bfloat16):
            return plain_rms_norm(x, self.eps).mul_(weight)
        if x.dtype == weight.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        if x.dtype == weight.dtype == torch.bfloat16 and is_plain(x, x.dtype):
            # PyTorch's norm rounds in between, and goes to the memory and back for each of its steps.
            return by_pieces(self._widened, x)
        # The weight may be wider than x, and then so is the result.
        return weight * F.rms_norm(x, weight.shape, eps=self.eps)

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return plain_rms_norm(x, self.eps, into=x).mul_(self.weight)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def backend_of(config, backends: tuple[str, ...] | None = None) -> str:
    """`config.backend` as it is now; for an operator that has other `backends`, "auto".

    Without the library's attribute lookup, which is slow: every layer asks at every token.
    """
    backend = config.backend if torch.compiler.is_compiling() else object.__getattribute__(config, "backend")
    return backend if backends is None or backend in backends else "auto"


def begun_with(initial_state: Any, *transition: torch.Tensor) -> torch.Tensor | None:
    """An initial state as it is given, or made by a function of what moves the state on."""
    return initial_state(*transition) if callable(initial_state) else initial_state


class Float32Module(nn.Module):
    """`.to(torch.bfloat16)` and `.half()` move parameters and buffers of this module without rounding them."""

    def _apply(self, fn, recurse=True):
        def move(x: torch.Tensor) -> torch.Tensor:
            moved = fn(x)
            return x.to(moved.device) if moved.dtype in (torch.bfloat16, torch.float16) else moved

        return super()._apply(move, recurse)


def check_whole(module: nn.Module, error: RuntimeError) -> None:
    """Say why parameters could not be started where FSDP2 has sharded them: some are made of all numbers of others."""
    if any(hasattr(x, "full_tensor") for x in module.parameters()):
        raise NotImplementedError(
            f"The parameters of {type(module).__name__} are sharded and cannot be started so: call init_weights before "
            "fully_shard, or load a state dict into the shards."
        ) from error


def residual_projection(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    """A linear layer that starts with a smaller standard deviation: the outputs of 2 N of them add up.

    It is marked by an attribute, not by a class, because quantizers and adapters may look for `nn.Linear` exactly.
    """
    linear: Any = nn.Linear(in_features, out_features, bias)
    linear.adds_to_residual = True
    return linear


def home_of(module: nn.Module) -> torch.device:
    """The device on which a layer computes, that of its weights, or where Accelerate brings those that are offloaded.

    Of a quantized linear map they may be buffers, or packed (by PyTorch, on a CPU alone).
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        weight = next((x for tensors in (module.parameters(), module.buffers()) for x in tensors), None)
    if weight is None:
        return torch.device("cpu")
    if weight.is_meta:
        hook = vars(module).get("_hf_hook")
        places = (getattr(each, "execution_device", None) for each in getattr(hook, "hooks", [hook]))
        return next((torch.device(place) for place in places if place is not None), weight.device)
    return weight.device


def is_untouched(module: nn.Module, kind: type[nn.Module], device: torch.device) -> bool:
    """Whether calling a module does nothing but what its class says, so that a kernel may read its weights instead.

    Hooks (pruning, offloading, an observer of all modules), another class (an adapter, a parametrization), a replaced
    `forward`, and weights that are elsewhere, plain attributes (views of FSDP) or no plain tensors (sharded, quantized)
    all mean no.
    """
    return are_untouched([module], [kind], device)


def are_untouched(modules: Iterable[nn.Module], kinds: Iterable[type[nn.Module]], device: torch.device) -> bool:
    for module, kind in zip(modules, kinds, strict=True):
        own = module.__dict__
        if type(module) is not kind or "forward" in own or own["_forward_hooks"] or own["_forward_pre_hooks"]:
            return False
        if own["_backward_hooks"] or own["_backward_pre_hooks"] or "weight" in own:
            return False
        for p in own["_parameters"].values():
            if p is not None and (type(p) not in _PLAIN or p.device != device):
                return False
    return not _has_any_global_hook()


def project(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`linear(x)`; a row in bfloat16 as matrix times vector where a CPU would fill tiles with it: a third faster."""
    if x.dtype == torch.bfloat16 and x.numel() == x.shape[-1] and multiplies_in_tiles(x) and is_plain(x, x.dtype):
        own = vars(linear).get("_parameters", {})
        weight = own.get("weight")
        if is_untouched(linear, nn.Linear, x.device) and own["bias"] is None and weight.dtype == x.dtype:
            return torch.mv(weight, x.reshape(-1)).view(*x.shape[:-1], -1)
    return linear(x)


def project_all(linears: Sequence[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    if x.dtype == torch.bfloat16:
        return [project(linear, x) for linear in linears]
    return [linear(x) for linear in linears]


class ParameterCache:
    """Values that depend on parameters alone, kept until one of the parameters changes; copies and pickles are empty.

    Nothing is kept where something else may change a value: under compilation, with gradients, and of parameters that
    are sharded, adapted, swapped, or made in inference mode, where PyTorch counts no versions. Nor in a process group:
    what gathers parameters there writes them without counting a version.

    Args:
        compares: after a `doubt`, compare parameters on a CPU with copies, which is one pass over them, and keep the
            values if they are equal. Default: False, a doubt forgets the values.
    """

    def __init__(self, compares: bool = False) -> None:
        self._compares = compares
        self.forget()

    def __reduce__(self):
        return type(self), (self._compares,)

    def forget(self) -> None:
        self._kept: tuple[list[tuple], dict[Hashable, Any]] = [], {}
        self._copies: list[torch.Tensor] = []
        self._doubted = False

    def doubt(self) -> None:
        """Parameters may have been written without counting a version: through `.data`, or by a kernel."""
        if self._copies:
            self._doubted = True
        else:
            self.forget()

    def of(self, parameters: Sequence[torch.Tensor]) -> dict[Hashable, Any] | None:
        """The values by name of the parameters as they are, a dictionary to put more in; None where none is kept."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.jit.is_tracing():
            return None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None
        # A captured graph computes what it uses: what is kept here may be gone when it is replayed.
        if parameters[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        known, values = self._kept
        if len(known) == len(parameters):
            for (reference, version, address), p in zip(known, parameters):
                if reference() is not p or p._version != version or p.data_ptr() != address:
                    break
            else:
                if not self._doubted or all(map(torch.equal, self._copies, parameters)):
                    self._doubted = False
                    return values
        if not all(type(p) is nn.Parameter and not p.is_inference() and not p.is_meta for p in parameters):
            return None
        self.forget()
        if self._compares and all(p.device.type == "cpu" for p in parameters):
            self._copies = [p.detach().clone() for p in parameters]
        self._kept = [(weakref.ref(p), p._version, p.data_ptr()) for p in parameters], {}
        return self._kept[1]

    def get(self, name: Hashable, parameters: Sequence[torch.Tensor], compute: Callable[[bool], Any]) -> Any:
        """The value of a name; `compute` is told whether what it gives will be kept."""
        values = self.of(parameters)
        if values is None:
            return compute(False)
        if name not in values:
            values[name] = compute(True)
        return values[name]


class DecodeTables(nn.Module):
    """A module that keeps tables made of its own parameters.

    It notices when parameters are moved, loaded, or changed by PyTorch's optimisers. Writes of which PyTorch counts no
    version (`fused=True`, too) it notices when the next text begins, or goes on with more tokens than a draft has
    (`doubt_tables`); whoever cannot wait calls `forget_tables`.
    """

    compares: ClassVar[bool] = False  # as of `ParameterCache`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tables = ParameterCache(self.compares)

    def forget_tables(self) -> None:
        if not torch.compiler.is_compiling():
            self._tables.forget()

    def doubt_tables(self) -> None:
        if not torch.compiler.is_compiling():
            self._tables.doubt()

    def train(self, mode: bool = True):
        self.forget_tables()
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self.forget_tables()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args):
        self.forget_tables()  # PyTorch can swap parameters for others, but none to which there is a weak reference
        super()._load_from_state_dict(*args)


def doubt_tables(module: nn.Module) -> None:
    """Let all parts of a module look at their parameters again: a text begins."""
    for part in module.modules():
        if isinstance(part, DecodeTables):
            part.doubt_tables()


class _Recorded(nn.Module):
    """Hands a value of a layer to the model, which records outputs by the class of their module; returns its input."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


class AuxiliaryLoss(_Recorded):
    """Hands on what a layer adds to the training loss; the model finds it by this module's class.

    A layer calls it with a scalar in every forward; in training, `config.aux_loss_coef` times the sum over all layers
    joins the loss of the model.
    """


class RankingLoss(_Recorded):
    """Hands on the ranking loss of a sparse branch; in training, `config.ranking_loss_coef` times the sum joins."""


class ChosenExperts(_Recorded):
    """Hands on which experts were chosen, `[B, T, h, k]`: a forward hook here sees a retrieval that collapses.

    A forward with `output_chosen_experts=True` returns them, one tensor for each layer that has experts.
    """
