"""Where version 0.1 had the classes that pickles name (`torch.save` of a model or a cache); gone with version 0.3."""

import sys
from importlib import import_module
from typing import Any

RENAMED = {
    "cache_interdomain": "model_cache.cache",
    "cache_recurrent": "cache.recurrent",
    "cache_window": "cache.window",
    "feed_forward_cdmoe": "feed_forwards.cross_domain_moe",
    "feed_forward_mlp": "feed_forwards.mlp",
    "mixer_common": "mixers.base",
    "mixer_inner_function": "mixers.inner_function.mixer",
    "mixer_interdomain": "mixers.interdomain.mixer",
    "mixer_recurrent": "mixers.recurrent",
    "mixer_s4d": "mixers.s4d.mixer",
    "mixer_selective_scan": "mixers.selective_scan.mixer",
    "mixer_softmax": "mixers.softmax.mixer",
    "mixer_ssd": "mixers.ssd.mixer",
    "module_common": "layers.common",
    "module_convolution": "layers.convolution",
    "module_dynamic_mask": "mixers.softmax.dynamic_mask",
    "module_feature_maps": "layers.feature_maps",
    "module_first_state": "layers.learned_state",
    "module_recurrence": "mixers.interdomain.recurrence",
    "module_rotary": "layers.rotary",
    "module_selective_scan": "mixers.selective_scan.recurrence",
    "module_sparse": "mixers.sparse.branch",
    "module_sparse_choice": "mixers.sparse.choice",
    "module_sparse_parts": "mixers.sparse.parts",
    "module_ssd": "mixers.ssd.recurrence",
    "op_common": "ops.common.cpu",
    "op_sparse_stream": "ops.sparse.stream",
}
# Classes that have another module or another name since.
MOVED = {
    "feed_forwards.cross_domain_moe.ChosenExperts": "layers.common.ChosenExperts",
    "layers.common.PerVersion": "layers.common.ParameterCache",
    "mixers.sparse.choice.RankingLoss": "layers.common.RankingLoss",
    "modeling_interdomain.InterdomainForSequenceClassification": (
        "classifier_interdomain.InterdomainForSequenceClassification"
    ),
    "modeling_interdomain.PatchEmbedding": "classifier_interdomain.PatchEmbedding",
    "ops.common.cpu.Kept": "layers.common.ParameterCache",
    "ops.common.cpu.OperatorCache": "layers.common.ParameterCache",
}
# Attributes that have another name since, by class.
ATTRIBUTES = {
    "cache.recurrent.RecurrentLayer": {"_windows": "_conv_states", "_states": "_recurrent_states"},
    "mixers.recurrent.RecurrentMixer": {"stream_names": "projection_names", "own_windows": "own_conv_state"},
    "mixers.sparse.branch.SparseBranch": {"window_shapes": "conv_state_shapes"},
}


def let_old_pickles_load(package: str) -> None:
    """Let the old names stand for the modules and attributes as they are now."""
    for old, new in RENAMED.items():
        sys.modules[f"{package}.{old}"] = import_module(f"{package}.{new}")
    for places in MOVED.items():
        (old, name), (new, now) = (place.rsplit(".", 1) for place in places)
        setattr(import_module(f"{package}.{old}"), name, getattr(import_module(f"{package}.{new}"), now))
    for place, attributes in ATTRIBUTES.items():
        module, name = place.rsplit(".", 1)
        _rename_attributes(getattr(import_module(f"{package}.{module}"), name), attributes)


def _rename_attributes(cls: Any, attributes: dict[str, str]) -> None:
    """Let pickles of a class bring these attributes under their names of now."""
    restore = getattr(cls, "__setstate__", lambda self, state: self.__dict__.update(state))
    cls.__setstate__ = lambda self, state: restore(self, {attributes.get(k, k): x for k, x in state.items()})
