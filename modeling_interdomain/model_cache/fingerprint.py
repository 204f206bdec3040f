"""Hashes of what a state depends on: the model, the tokenizer, the tokens."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, get_origin

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from ..layers.common import ParameterCache

# Fields of a configuration on which a state does not depend, except by rounding.
_WITHOUT_EFFECT = {"aux_loss_coef", "attention_dropout", "backend", "bos_token_id", "chunk_size", "eos_token_id"}
_WITHOUT_EFFECT |= {"initializer_range", "max_rollback", "pad_token_id", "tie_word_embeddings", "use_cache"}
# Fields that are younger than some state files: they count where they do not have their default.
_NEW = {f"window_{name}" for name in ("memory", "share", "write_gate", "points")}
_NEW |= {"attention_window", "attention_sinks", "attention_bias", "gates", "delta_rule"}
# What PEFT adds to the names of weights that it wraps.
_AROUND = ("base_layer", "original_module")
# Attributes that say which of its adapters act, and how much.
_SWITCHES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
# Libraries whose hooks change no number, and the one whose hooks move tensors between devices.
_OBSERVERS = ("transformers.utils.output_capturing", "transformers.modeling_utils")
_MOVERS = "accelerate.hooks"
_ROW, _SPREAD = 128, -7046029254386353131  # words; an odd number with irregular bits, for `_checksum`


def decoder_of(model: Any) -> Any:
    """The `InterdomainModel` inside a model, a model with a head, or a wrapper (PEFT, DDP, `torch.compile`).

    Raises:
        ValueError: when there is none.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = next(
        (module for module in modules if isinstance(getattr(module, "fingerprints", None), ParameterCache)), None
    )
    if found is None:
        raise ValueError(f"A state belongs to an Interdomain model, got {type(model).__name__}.")
    return found


def model_fingerprint(model: nn.Module) -> str:
    """A hash of what the states of a model depend on: two models with the same one read a text into the same state.

    It covers the fields of the configuration that shape the computation, the names, dtypes, shapes and bytes of all
    weights below the head, and which adapters are switched on. It leaves out the head, how things are computed
    (`backend`, `chunk_size`, devices), which changes a state by rounding alone, and what is done to a model from
    outside (hooks, a replaced `forward`, autocast), for which see `reading_fingerprint`.

    The weights are hashed once (SHA-256, about a second per gigabyte on a CPU) and again when one of them has changed.
    A checksum, which takes about as long as decoding a token, also sees changes of which PyTorch counts no version
    (through `.data`).

    Raises:
        ValueError: when there is no Interdomain model, or its weights are not at hand (sharded, or on "meta").
    """
    decoder = decoder_of(model)
    parameters, buffers = dict(decoder.named_parameters()), dict(decoder.named_buffers())
    with torch.no_grad():
        everything = parameters | buffers | _packed(decoder)
        # Version 0.1 hashed them twice; its state files must keep their fingerprints.
        twice = {name: x for name, x in buffers.items() if name.endswith(".inv_freq")}
        everything |= {name.replace(".inv_freq", ".original_inv_freq"): x for name, x in twice.items()}
        everything = _plain(everything)
        versions = tuple((x.data_ptr(), x._version) for x in buffers.values() if not x.is_inference())
        name = "weights", versions, _checksum(list(everything.values()))
        weights = decoder.fingerprints.get(name, list(parameters.values()), lambda _: _hash(everything))
    config = {
        field: getattr(decoder.config, field)
        for field in sorted(_fields_of(type(decoder.config)))
        if field not in _WITHOUT_EFFECT and hasattr(decoder.config, field)
        if field not in _NEW or getattr(decoder.config, field) != getattr(type(decoder.config), field)
    }
    return _sha256([config, weights, _switches(decoder)])


def _switches(decoder: nn.Module) -> list[list]:
    """Which adapters of each module act, and how much."""
    # `active_adapters` of the decoder itself is a method of the library, whose text is the tree of modules.
    return [
        [name, *(getattr(module, switch, None) for switch in _SWITCHES)]
        for name, module in decoder.named_modules()
        if hasattr(module, "active_adapters")
    ]


def weights_as_they_are(decoder: nn.Module) -> tuple:
    """What tells whether parameters have been written or exchanged since, as far as PyTorch counts it, and which
    adapters act: in a fraction of the time of `model_fingerprint`."""
    weights = [(id(x), x._version) for x in decoder.parameters() if not x.is_inference()]
    return weights, json.dumps(_switches(decoder), default=str)


def _fields_of(config_class: type) -> set[str]:
    """The names of our own fields, also those of our base classes, without the library's."""
    ours = (each for each in config_class.__mro__ if not each.__module__.startswith(("transformers.", "builtins")))
    annotated = (item for each in ours for item in vars(each).get("__annotations__", {}).items())
    return {name for name, kind in annotated if get_origin(kind) is not ClassVar}


def reading_fingerprint(model: nn.Module) -> str:
    """A hash of everything that decides which state this model makes of tokens, as it is set up now.

    That is `model_fingerprint`, the classes of the modules, which of them train and from which kernel they take their
    operators, autocast, the precision of products and the attention implementation.

    Raises:
        ValueError: when there is a hook or a replaced `forward`, which may do anything; and as `model_fingerprint`.
    """
    decoder = decoder_of(model)
    modules = {"": model} | {f"model.{name}".rstrip("."): module for name, module in decoder.named_modules()}
    altered = [name for name, module in modules.items() if _is_altered(module)]
    if altered or _has_any_global_hook():
        where = f"{altered[0] or 'the model'} has" if altered else "there is"
        raise ValueError(f"{where} a hook or a replaced forward, which may make other states than the model's own.")
    devices = sorted({"cpu", *(x.device.type for x in decoder.parameters() if not x.is_meta)})
    around = [
        {name: (_kind(module), module.training, _operators_of(module)) for name, module in modules.items()},
        [(device, str(torch.get_autocast_dtype(device))) for device in devices if torch.is_autocast_enabled(device)],
        torch.get_float32_matmul_precision(),
        decoder.config._attn_implementation,
    ]
    return _sha256([model_fingerprint(model), around])


def _operators_of(module: nn.Module) -> list[str]:
    """The modules of the operators that `use_kernel` gave to a layer; none where it calls the package's."""
    own = vars(module).get("operators")
    return [] if own is None else sorted({operator.__module__ for operator in vars(own).values()})


def _is_altered(module: nn.Module) -> bool:
    """Whether calling a module may do something else than its class says. What libraries do without changing a number
    does not count."""
    own, kind = vars(module), type(module)
    hooks = [*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values()]
    if any(getattr(hook, "__module__", None) not in _OBSERVERS for hook in hooks):
        return True
    forward = own.get("forward")
    if forward is not None:  # Accelerate's, which moves tensors between devices
        moved = getattr(getattr(forward, "func", None), "__module__", None) == _MOVERS
        movers = getattr(own.get("_hf_hook"), "hooks", [own.get("_hf_hook")])
        inner = getattr(own.get("_old_forward"), "__func__", None)
        if not moved or inner is not kind.forward or any(type(mover).__module__ != _MOVERS for mover in movers):
            return True
    home = next(base for base in kind.__mro__ if "forward" in vars(base))
    written = vars(home)["forward"]
    named = getattr(written, "__module__", None), getattr(written, "__qualname__", None)
    return home is not nn.Module and named != (home.__module__, f"{home.__qualname__}.forward")


def _kind(module: nn.Module) -> str:
    """The class of a module, by the same name where its code was loaded with a checkpoint."""
    return f"{type(module).__module__.rpartition('.')[2]}.{type(module).__qualname__}"


def base_fingerprint(model: nn.Module) -> str:
    """A hash of the weights of a model as it was before adapters and learned states were added.

    It is the same for a model in float32 and in bfloat16: it looks at the weights rounded to bfloat16.

    Raises:
        ValueError: when there is no Interdomain model, or its weights are not at hand.
    """
    decoder = decoder_of(model)
    with torch.device("meta"):
        own = {name for name, _ in type(decoder)(decoder.config).named_parameters() if "first_state" not in name}
    found = {}
    for name, x in decoder.named_parameters():
        plain = ".".join(part for part in name.split(".") if part not in _AROUND)
        if plain in own:
            found[plain] = x.detach() if x.is_meta or hasattr(x, "full_tensor") else x.detach().to(torch.bfloat16)
    return _hash(_plain(found))


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of what turns text into token ids; padding, truncation and chat templates are no part of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = [type(tokenizer).__name__, tokenizer.get_vocab()]
    else:
        rules = json.loads(backend.to_str())
        rules["padding"] = rules["truncation"] = None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _sha256([rules, special])


def tokens_fingerprint(tokens: torch.Tensor) -> str:
    return _sha256(list(tokens.shape), tokens.to(torch.int64))


def tensor_bytes(x: torch.Tensor):
    """The numbers of a tensor as a buffer."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _packed(decoder: nn.Module) -> dict[str, torch.Tensor]:
    """What linear maps that PyTorch has quantized hold, which are neither parameters nor buffers."""
    found: dict[str, Any] = {}
    for name, module in decoder.named_modules():
        if callable(getattr(module, "weight", None)):
            found |= {f"{name}.{part}": getattr(module, part)() for part in ("weight", "bias")}
    return {name: x.dequantize() for name, x in found.items() if x is not None}


def _plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the parts of tensors of other classes (whose weights are quantized, by torchao for one) in their places."""
    found: dict[str, torch.Tensor] = {}
    for name, x in tensors.items():
        if hasattr(x, "__tensor_flatten__") and not hasattr(x, "full_tensor"):
            parts = {f"{name}.{type(x).__name__}.{part}": getattr(x, part) for part in x.__tensor_flatten__()[0]}
            found |= _plain(parts)
        else:
            found[name] = x
    return found


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    for name, x in tensors.items():
        if x.is_meta or hasattr(x, "full_tensor"):
            raise ValueError(
                f"The fingerprint of a model needs all its weights in this process, and {name} is "
                f"{'not loaded' if x.is_meta else 'sharded'}; save and load states where the model is whole."
            )

    def digest(item: tuple[str, torch.Tensor]) -> str:
        name, x = item
        return _sha256([name, str(x.dtype), list(x.shape)], x)

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return hashlib.sha256("".join(pool.map(digest, sorted(tensors.items()))).encode()).hexdigest()


def _checksum(tensors: list[torch.Tensor]) -> int:
    """A number that all but certainly changes with the bytes of plain tensors, in one pass over the memory.

    It is a sum over words of 64 bits, each with a factor of its own; of large tensors, in rows of `_ROW`, these are the
    sums of rows and of columns.
    """
    words: dict[torch.device, list[torch.Tensor]] = {}
    for x in tensors:
        if type(x) not in (torch.Tensor, nn.Parameter) or x.is_meta:
            continue
        found = x.detach().reshape(-1).view(torch.uint8)
        if len(found) % 8 or found.storage_offset() % 8:
            found = F.pad(found, (0, -len(found) % 8))
        found = found.view(torch.int64)
        whole = len(found) // _ROW * _ROW if len(found) > _ROW**2 else 0
        table = found[:whole].view(-1, _ROW)
        words.setdefault(x.device, []).extend((table.sum(1), table.sum(0), found[whole:]))
    sums = []
    for found in map(torch.cat, words.values()):
        factors = torch.arange(len(found), device=found.device).mul_(_SPREAD).bitwise_or_(1)
        sums.append(int((found * factors).sum()))
    return hash(tuple(sums))


def _sha256(value: Any, x: torch.Tensor | None = None) -> str:
    """The hash of a value as JSON, and of the numbers of a tensor; other threads run while those are hashed."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode())
    if x is not None:
        digest.update(tensor_bytes(x))
    return digest.hexdigest()
