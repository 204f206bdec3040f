"""Interdomain Attention for Hugging Face Transformers. Importing this registers the models with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .cache_interdomain import InterdomainCache, InterdomainStaticCache
from .cache_spans import cut_cache, join_caches
from .cache_state_tuning import add_learned_state, load_learned_state, save_learned_state
from .cache_store import StateStore
from .configuration_interdomain import InterdomainConfig
from .feed_forward_cdmoe import ChosenExperts
from .mixer_common import TokenMixer
from .modeling_interdomain import (
    InterdomainForCausalLM,
    InterdomainForSequenceClassification,
    InterdomainModel,
    InterdomainPreTrainedModel,
)
from .module_common import AuxiliaryLoss
from .module_layer_losses import add_layer_loss
from .module_sequence_parallel import sequence_piece
from .op_common_spans import join_states, mask_span, remove_span
from .op_interdomain import interdomain_attention, interdomain_step
from .op_interdomain_map import interdomain_attention_map
from .op_selective_scan import selective_scan, selective_scan_step
from .op_ssd import ssd_attention, ssd_step
from .registry_interdomain import register_feed_forward, register_token_mixer

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

# Saved checkpoints carry this code, so that they load where the package is not installed.
InterdomainConfig.register_for_auto_class()
InterdomainModel.register_for_auto_class("AutoModel")
InterdomainForCausalLM.register_for_auto_class("AutoModelForCausalLM")
InterdomainForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
