"""Settings that no layer of a configuration reads: whoever gives one means something by it, and is told.

Sizes are not looked at, which comparisons give to all kinds of layers alike, nor is how layers start.
"""

from collections.abc import Iterator
from dataclasses import fields
from inspect import get_annotations

from transformers.utils import logging

from ..feed_forwards.configuration import FEED_FORWARDS, ExpertFields
from .inner_function.configuration import InnerFunctionFields
from .selective_scan.configuration import SelectiveScanFields
from .sparse.configuration import SparseFields
from .specifications import TOKEN_MIXERS
from .ssd.configuration import SSDFields
from .window.configuration import WindowFields

logger = logging.get_logger(__name__)

_ATTENTION = ("softmax", "inner_function", "window")
_READOUT = ("interdomain", "s4d")
_MEMORY = "window with window_memory"
# Layers, or another field, without which fields have no effect: those of a family, and single ones.
_FAMILIES = {
    InnerFunctionFields: ("inner_function",),
    SelectiveScanFields: ("selective_scan",),
    SSDFields: ("ssd",),
    WindowFields: ("window",),
    ExpertFields: ("cdmoe",),
    SparseFields: ("sparse_attention",),
}
# Filled in whatever the layers are, or read by feed-forward layers that a user has registered.
_OTHERS = {"sparse_attention", "sparse_gate_init", "sparse_query_init", "aux_loss_coef"}
_READERS = {name: readers for kind, readers in _FAMILIES.items() for name in set(get_annotations(kind)) - _OTHERS} | {
    "attention_bias": _ATTENTION,
    "attention_dropout": _ATTENTION,
    "rope_parameters": (*_ATTENTION, "rope_placement"),
    "learned_state": (*_READOUT, "ssd", "selective_scan", _MEMORY),
    "use_output_gate": (*_READOUT, "ssd"),
    "use_output_norm": (*_READOUT, "ssd", "selective_scan"),
    "feature_map": _READOUT,
    "normalize": _READOUT,
    "input_norm": _READOUT,
    "state_input": _READOUT,
    "coefficient_matrix": (*_READOUT, _MEMORY),
    **dict.fromkeys(("window_share", "window_write_gate", "window_points"), (_MEMORY,)),
}
_OWN = {*TOKEN_MIXERS, *FEED_FORWARDS}  # those that users register later may read anything


def name_unread_fields(config) -> None:
    """Say once which fields differ from their defaults, and have no effect with the layers of a configuration."""
    if names := list(_unread(config)):
        logger.warning_once(
            f"No layer of this InterdomainConfig reads {', '.join(names)}: leave it out, or choose layers that do."
        )


def _unread(config) -> Iterator[str]:
    """Each with what would read it."""
    present = {*config.mixers_per_layer, *config.feed_forwards_per_layer}
    if not present <= _OWN:
        return
    present |= {"sparse_attention"} if any(config.sparse_per_layer) else set()
    present |= {_MEMORY} if "window" in present and config.window_memory else set()
    present |= {"rope_placement"} if config.rope_placement is not None else set()
    for field in fields(config):
        readers = _READERS.get(field.name)
        if readers is not None and getattr(config, field.name) != field.default and present.isdisjoint(readers):
            yield f"{field.name} ({', '.join(readers)} would)"
