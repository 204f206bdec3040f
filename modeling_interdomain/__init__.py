"""Interdomain Attention for Hugging Face Transformers. Importing this registers the models with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .cache_interdomain import InterdomainCache, InterdomainStaticCache
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
from .op_interdomain import interdomain_attention, interdomain_step
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
    "TokenMixer",
    "interdomain_attention",
    "interdomain_step",
    "register_feed_forward",
    "register_token_mixer",
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
