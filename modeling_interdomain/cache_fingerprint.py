"""What a state depends on, as short strings that can be compared: the model, the tokenizer, the tokens."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from .module_common import PerVersion

# Fields of a configuration that say how a state is computed, or what happens after it, not what it is.
_WITHOUT_EFFECT = {
    "aux_loss_coef",
    "attention_dropout",
    "backend",
    "bos_token_id",
    "chunk_size",
    "eos_token_id",
    "initializer_range",
    "max_rollback",
    "pad_token_id",
    "tie_word_embeddings",
    "use_cache",
}
# What stands in the names of weights that an adapter library's layers (PEFT's) have wrapped.
_AROUND = ("base_layer", "original_module")
# How these layers are switched at the moment.
_SWITCHES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


def decoder_of(model: Any) -> Any:
    """The `InterdomainModel` inside a model, a model with a head, or a wrapper (PEFT, DDP, `torch.compile`).

    Raises:
        ValueError: when there is none.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = next((module for module in modules if isinstance(getattr(module, "fingerprints", None), PerVersion)), None)
    if found is None:
        raise ValueError(f"A state belongs to an Interdomain model, got {type(model).__name__}.")
    return found


def model_fingerprint(model: nn.Module) -> str:
    """A hash of what the states of a model depend on: two models with the same one read a text into the same state.

    It covers the fields of the configuration that shape the computation, the names, dtypes, shapes and bytes of all
    weights below the head, and which adapters are switched on. It does not cover the head, and neither how things are
    computed (`backend`, `chunk_size`, devices), which changes a state by rounding alone.

    The weights are read once (SHA-256, about a second per gigabyte on a CPU) and again when one of them has changed.
    What writes weights where PyTorch counts no version, through `.data`, is seen after `train()` or `eval()`.

    Raises:
        ValueError: when there is no Interdomain model, or its weights are not at hand (sharded, or on "meta").
    """
    decoder = decoder_of(model)
    parameters, buffers = dict(decoder.named_parameters()), dict(decoder.named_buffers())
    with torch.no_grad():
        name = "weights", tuple((x.data_ptr(), x._version) for x in buffers.values() if not x.is_inference())
        weights = decoder.fingerprints.get(
            name, list(parameters.values()), lambda _: _hash(parameters | buffers | _packed(decoder))
        )
    config = {
        field: getattr(decoder.config, field)
        for field in sorted(type(decoder.config).__annotations__)
        if field not in _WITHOUT_EFFECT and hasattr(decoder.config, field)
    }
    switches = [
        [name, *(getattr(module, switch, None) for switch in _SWITCHES)]
        for name, module in decoder.named_modules()
        if hasattr(module, "active_adapters")
    ]
    return _sha256(json.dumps([config, weights, switches], sort_keys=True, default=str).encode())


def base_fingerprint(model: nn.Module) -> str:
    """A hash of the weights of a model as it was before adapters and learned states were added.

    It is the same for a model in float32 and that model in bfloat16, of whose weights it sees as much.

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
    return _hash(found)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of what turns text into token ids; padding, truncation and chat templates are no part of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = [type(tokenizer).__name__, tokenizer.get_vocab()]
    else:
        rules = json.loads(backend.to_str())
        rules["padding"] = rules["truncation"] = None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _sha256(json.dumps([rules, special], sort_keys=True).encode())


def tokens_fingerprint(tokens: torch.Tensor) -> str:
    """A hash of token ids `[B, T]`."""
    digest = hashlib.sha256(json.dumps(list(tokens.shape)).encode())
    digest.update(tensor_bytes(tokens.to(torch.int64)))
    return digest.hexdigest()


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


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    for name, x in tensors.items():
        if x.is_meta or hasattr(x, "full_tensor"):
            raise ValueError(
                f"The fingerprint of a model needs all its weights in this process, and {name} is "
                f"{'not loaded' if x.is_meta else 'sharded'}; save and load states where the model is whole."
            )

    def digest(item: tuple[str, torch.Tensor]) -> str:
        name, x = item
        found = hashlib.sha256(json.dumps([name, str(x.dtype), list(x.shape)]).encode())
        found.update(tensor_bytes(x))  # other threads hash meanwhile
        return found.hexdigest()

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return _sha256("".join(pool.map(digest, sorted(tensors.items()))).encode())


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
