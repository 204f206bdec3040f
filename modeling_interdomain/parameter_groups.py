"""Which parameters an optimiser may pull towards zero, and which learn slowly.

The library's Trainer leaves norms and biases alone and lets all else decay, by their names. Of a state space model that
would change what its numbers stand for: a logarithm of a step that goes to zero is a step that goes to one, with which
a state forgets at once.
"""

from typing import Any

import torch

# What sets the time scales and the mixing of the state: a step too large makes it forget or explode.
RECURRENCE_PARAMETERS = ("log_dt", "log_a_real", "a_imag", "B", "C", "readout", "point_keys", "point_values")
# Of the Fourier features: a spectral density is not pulled towards zero. Nor is what multiplies a value (the table of a
# dynamic mask, inner values, the gates of a window) or scores, nor the keys by which one is chosen, nor the rates of a
# selective scan, nor the state that a layer begins with.
_UNDECAYED = {"frequencies", "phases", "weights", "cls_token", "table", "keys", "values", "A_log", "state"}
_UNDECAYED |= {"memory_gate", "write_gate"}
# An expert that few tokens choose would have faded when one does.
_UNDECAYED |= {"expert_keys", "expert_down", "expert_up"}


def parameter_groups(
    model: torch.nn.Module,
    learning_rate: float,
    weight_decay: float = 0.1,
    recurrence_learning_rate: float = 1e-3,
) -> list[dict[str, Any]]:
    """Groups for AdamW: "weights" decay; "vectors" (norms, biases, all that is one-dimensional, experts) do not.

    Those of the S4D recurrence ("recurrence") do not decay either, and learn no faster than `recurrence_learning_rate`.

    Args:
        model: any; parameters that need no gradient are in no group. A model that a library has wrapped too.
        learning_rate: of all groups but "recurrence".
        weight_decay: of "weights". Default: 0.1.
        recurrence_learning_rate: the highest of "recurrence". Default: 1e-3.

    Returns:
        A list of groups, without empty ones: `name`, `params`, `lr` and `weight_decay`.

    Example:

        >>> import torch
        >>> from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, parameter_groups
        >>> config = InterdomainConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        >>> groups = parameter_groups(InterdomainForCausalLM(config), learning_rate=3e-3)
        >>> optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups]
        [('weights', 0.003, 0.1), ('vectors', 0.003, 0.0), ('recurrence', 0.001, 0.0)]
    """
    groups: dict[str, list[torch.nn.Parameter]] = {"weights": [], "vectors": [], "recurrence": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[_group_of(name, parameter)].append(parameter)
    rates = {"recurrence": min(learning_rate, recurrence_learning_rate)}
    return [
        {
            "name": name,
            "params": parameters,
            "lr": rates.get(name, learning_rate),
            "weight_decay": weight_decay if name == "weights" else 0.0,
        }
        for name, parameters in groups.items()
        if parameters
    ]


def _group_of(name: str, parameter: torch.nn.Parameter) -> str:
    leaf = name.rpartition(".")[2]
    if leaf in RECURRENCE_PARAMETERS:
        return "recurrence"
    gate = name.endswith("sparse.gate.weight")  # multiplies what a branch adds
    if parameter.ndim < 2 or gate or leaf.endswith(("bias", "log_scale")) or leaf in _UNDECAYED:
        return "vectors"
    return "weights"
