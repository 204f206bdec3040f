"""State tuning: an adapter that is nothing but the state with which every recurrent layer begins.

Training touches no weight of the model, and what is saved is as large as one state. It is to recurrent layers what
prompt and prefix tuning are to attention, but no prompt is read again, and no cache grows. `save_pretrained` saves a
model together with its learned state; these functions save and load the state alone.
"""

import os
from typing import Any

import torch
from torch import nn

from ..layers.learned_state import FirstState
from ..mixers.base import mixers_of
from ..mixers.recurrent import RecurrentMixer
from .file import StateFileError, read_state_file, write_state_file
from .fingerprint import base_fingerprint, decoder_of

KIND = "learned state"


def add_learned_state(model: nn.Module) -> list[nn.Parameter]:
    """Let every recurrent layer begin with a learned state; it starts as zeros, which change nothing.

    A window reads a state of zeros only after a token has left it: at first texts longer than `attention_window` and
    `attention_sinks` together train it, shorter ones give it no gradient.

    Args:
        model: an Interdomain model, or one that a library has wrapped (PEFT: LoRA and a learned state go together).

    Returns:
        The parameters, one a layer, of the shape of its state. To train them alone freeze the others before:
        `model.requires_grad_(False)`.

    Raises:
        ValueError: when the model has no recurrent layer, or several processes hold parts of it (tensor parallelism).

    Example:

        >>> from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, add_learned_state
        >>> config = InterdomainConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        >>> model = InterdomainForCausalLM(config).requires_grad_(False)
        >>> sum(x.numel() for x in add_learned_state(model))
        32768
    """
    decoder = decoder_of(model)
    mixers = _recurrent_mixers(decoder).values()
    if not mixers:
        raise ValueError("A learned state needs recurrent layers, and this model has none: use prompt tuning.")
    for mixer in mixers:
        if mixer.first_state is None:
            first = next(mixer.recurrence.parameters())
            if hasattr(first, "full_tensor"):
                raise ValueError(
                    "The heads of this model are in several processes: add the learned state to the whole model, save "
                    "it with save_pretrained, and load that for tensor parallelism."
                )
            mixer.first_state = FirstState(tuple(mixer.state_shape(mixer.config))).to(first.device, first.dtype)
    decoder.config.learned_state = True
    return list(_states(decoder).values())


def save_learned_state(model: nn.Module, path: str | os.PathLike) -> None:
    """Save the learned state of a model as one safetensors file, whole or not at all.

    Raises:
        ValueError: when the model has none.
        OSError: when the file cannot be written; one that was there is as it was.
    """
    states = _states(decoder_of(model))
    if not states:
        raise ValueError("This model has no learned state that could be saved: call add_learned_state(model) first.")
    tensors: dict[str, torch.Tensor] = {f"layers.{i}.first_state": x for i, x in states.items()}
    write_state_file(path, tensors, {"kind": KIND, "base": base_fingerprint(model)})


def load_learned_state(model: nn.Module, path: str | os.PathLike) -> list[nn.Parameter]:
    """Let a model begin with the state of a file; returns the parameters as `add_learned_state` does.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file is torn, altered, no learned state, or that of another model; the model is as it was.
    """
    tensors, about = read_state_file(path)
    if about.get("kind") != KIND:
        raise StateFileError(f"{path} holds no learned state: a cache is loaded with InterdomainCache.load.")
    decoder = decoder_of(model)
    wanted = {
        f"layers.{i}.first_state": tuple(mixer.state_shape(mixer.config))
        for i, mixer in _recurrent_mixers(decoder).items()
    }
    if {name: tuple(x.shape) for name, x in tensors.items()} != wanted:
        raise StateFileError(
            f"{path} is the learned state of a model of another shape: it has {_described(tensors)}, and this model "
            f"needs {_described(wanted)}."
        )
    own = base_fingerprint(model)
    if about["base"] != own:
        raise StateFileError(
            f"{path} is the learned state of a model with other weights (fingerprint {about['base'][:12]}, not "
            f"{own[:12]}): load it into the model it was trained with, before adapters are merged."
        )
    parameters = add_learned_state(model)
    with torch.no_grad():
        for parameter, name in zip(parameters, wanted, strict=True):
            parameter.copy_(tensors[name])
    return parameters


def _recurrent_mixers(decoder: Any) -> dict[int, Any]:
    mixers = dict(enumerate(mixers_of(decoder.layers)))
    recurrent = {i: mixer for i, mixer in mixers.items() if isinstance(mixer, RecurrentMixer)}
    return {i: mixer for i, mixer in recurrent.items() if torch.Size(mixer.state_shape(mixer.config)).numel()}


def _states(decoder: Any) -> dict[int, nn.Parameter]:
    """The learned states by layer; where PEFT has copied one to train it, the copy in use."""
    mixers = _recurrent_mixers(decoder).items()
    return {i: mixer.first_state.state for i, mixer in mixers if mixer.first_state is not None}


def _described(states: dict[str, Any]) -> str:
    shapes = sorted({str(list(getattr(x, "shape", x))) for x in states.values()})
    return f"{len(states)} layers of {' and '.join(shapes)}"
