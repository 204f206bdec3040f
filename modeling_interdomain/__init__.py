"""Interdomain Attention for Hugging Face Transformers. Importing this registers the models with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .classifier_interdomain import InterdomainForSequenceClassification
from .configuration_interdomain import InterdomainConfig
from .generation.prompt_store import StateStore
from .layers.common import AuxiliaryLoss, ChosenExperts
from .mixers.base import TokenMixer
from .mixers.unread import name_unread_fields
from .model_cache.cache import InterdomainCache, InterdomainStaticCache
from .model_cache.methods import cut_cache, join_caches
from .model_cache.state_tuning import add_learned_state, load_learned_state, save_learned_state
from .modeling_interdomain import (
    InterdomainForCausalLM,
    InterdomainModel,
    InterdomainPreTrainedModel,
)
from .ops.common.spans import join_states, mask_span, remove_span
from .ops.interdomain.entry import interdomain_attention, interdomain_step
from .ops.interdomain.map import interdomain_attention_map
from .ops.selective_scan.entry import selective_scan, selective_scan_step
from .ops.ssd.entry import ssd_attention, ssd_step
from .outputs.trainer_loss import add_layer_loss
from .parallel.sequence import sequence_piece
from .parameter_groups import parameter_groups
from .registry import register_feed_forward, register_token_mixer
from .saving.code import write_code
from .saving.renamed import let_old_pickles_load

__all__ = [
    "AuxiliaryLoss",
    "ChosenExperts",
    "InterdomainCache",
    "InterdomainConfig",
    "InterdomainForCausalLM",
    "InterdomainForSequenceClassification",
    "InterdomainModel",
    "InterdomainPreTrainedModel",
    "InterdomainStaticCache",
    "StateStore",
    "TokenMixer",
    "add_layer_loss",
    "add_learned_state",
    "cut_cache",
    "interdomain_attention",
    "interdomain_attention_map",
    "interdomain_step",
    "join_caches",
    "join_states",
    "load_learned_state",
    "mask_span",
    "parameter_groups",
    "register_feed_forward",
    "register_token_mixer",
    "remove_span",
    "save_learned_state",
    "selective_scan",
    "selective_scan_step",
    "sequence_piece",
    "ssd_attention",
    "ssd_step",
]

AutoConfig.register("interdomain", InterdomainConfig, exist_ok=True)
AutoModel.register(InterdomainConfig, InterdomainModel, exist_ok=True)
AutoModelForCausalLM.register(InterdomainConfig, InterdomainForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(InterdomainConfig, InterdomainForSequenceClassification, exist_ok=True)

# Saved checkpoints carry the code that they need, so that they load where the package is not installed.
InterdomainConfig.write_code = staticmethod(write_code)
# Whoever makes a configuration has the package; what loads from a folder without it was made before.
InterdomainConfig.name_unread_fields = staticmethod(name_unread_fields)

let_old_pickles_load(__name__)
