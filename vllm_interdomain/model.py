"""Interdomain language models as vLLM runs them."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsLoRA, SupportsMambaPrefixCaching
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.platforms import current_platform

from modeling_interdomain.feed_forwards.configuration import DIVIDED_FEED_FORWARD
from modeling_interdomain.feed_forwards.mlp import NUMBERS_AT_ONCE, InterdomainMLP
from modeling_interdomain.layers.common import DecodeTables, ParameterCache
from modeling_interdomain.layers.rotary import InterdomainRotaryEmbedding
from modeling_interdomain.modeling_interdomain import InterdomainDecoderLayer
from modeling_interdomain.registry import FEED_FORWARDS, token_mixer_class

from .adapters import spare_tokens_without_adapter
from .memory import keep_freed_memory
from .mixers import MIXERS, Paged, batch_of, largest_page
from .pages import copied_page, page_dtypes
from .parallel import made


class LoadedTables(ParameterCache):
    """Tables of parameters that only a loader writes: kept until it does, in the process group in which vLLM runs."""

    def doubt(self) -> None:
        """Not at all: a new text changes no parameter here."""

    def of(self, parameters: Sequence[torch.Tensor]) -> dict[Hashable, Any] | None:
        return self._kept[1]


class ServedMLP(InterdomainMLP):
    """Of a CPU a long batch some tokens at a time, between whose projections the same memory is used again: fresh one
    costs as much as an activation."""

    at_once: int | None = None  # tokens; None, all

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.at_once is None or hidden_states.shape[1] <= self.at_once:
            return super().forward(hidden_states)
        return torch.cat([super(ServedMLP, self).forward(x) for x in hidden_states.split(self.at_once, dim=1)], dim=1)


class ServedLayer(InterdomainDecoderLayer):
    """Our layer, of parts that vLLM's linear layers, norms and pages are in."""

    def __init__(self, config, layer_idx: int, vllm_config: VllmConfig, prefix: str):
        nn.Module.__init__(self)
        own = f"{prefix}.token_mixer"
        kind = MIXERS[token_mixer_class(config, layer_idx)]
        mixer: Any = made(partial(kind, config, layer_idx), kind.head_plan(config), vllm_config, own)
        mixer.attach(vllm_config, own)
        self.token_mixer = mixer
        feed_forward, self.mlp = FEED_FORWARDS[config.feed_forwards_per_layer[layer_idx]], None
        if feed_forward is InterdomainMLP:
            feed_forward = ServedMLP
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if feed_forward is not None:
            self.mlp = made(
                partial(feed_forward, config, layer_idx), DIVIDED_FEED_FORWARD, vllm_config, f"{prefix}.mlp"
            )
            self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            # What LoRA adds is that of a whole batch.
            if isinstance(self.mlp, ServedMLP) and current_platform.is_cpu() and vllm_config.lora_config is None:
                self.mlp.at_once = max(1, NUMBERS_AT_ONCE // config.intermediate_size)
        self.residual_in_fp32 = config.residual_in_fp32


class ServedModel(nn.Module):
    """Embeddings, layers and the last norm, under the names that a checkpoint has for them."""

    def __init__(self, config, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            ServedLayer(config, i, vllm_config, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_embs = nn.ModuleDict(
            {str(dim): InterdomainRotaryEmbedding(config, dim) for dim in config.rotated_dims}
        )
        mixers = [layer.token_mixer for layer in self.layers]
        self.first_paged = next((mixer.prefix for mixer in mixers if isinstance(mixer, Paged)), None)

    def forward(self, inputs_embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens `[N, hidden_size]` at positions `[N]`."""
        hidden_states, batch = inputs_embeds[None], None
        if self.first_paged is not None:  # the tokens are the same in all layers, the pages are not
            metadata = (get_forward_context().attn_metadata or {}).get(self.first_paged)
            batch = batch_of(metadata, positions)
        rotations = {int(dim): rotary(hidden_states, positions[None]) for dim, rotary in self.rotary_embs.items()}
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=rotations or None, batch=batch)
        return self.norm(hidden_states.to(inputs_embeds.dtype))[0]


class InterdomainForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsLoRA, SupportsMambaPrefixCaching):
    """What vLLM makes of a checkpoint of this architecture."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        if current_platform.is_cpu():
            keep_freed_memory()
            if vllm_config.lora_config is not None:
                spare_tokens_without_adapter()
        self.model = ServedModel(config, vllm_config, maybe_prefix(prefix, "model"))
        quant, name = vllm_config.quant_config, maybe_prefix(prefix, "lm_head")
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=quant, prefix=name)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids, positions: torch.Tensor, intermediate_tensors=None, inputs_embeds=None, **kwargs
    ) -> torch.Tensor:
        return self.model(self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds, positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = AutoWeightsLoader(self).load_weights(weights)
        for part in self.modules():
            if isinstance(part, DecodeTables):
                part._tables = LoadedTables()
        return loaded

    # What vLLM asks of the class, to lay out its cache before a model is made.

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        config, processes = vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size
        return largest_page(config, processes, vllm_config.model_config.dtype)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return page_dtypes(cls.get_mamba_state_shape_from_config(vllm_config), vllm_config.model_config.dtype)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Callable, ...]:
        return (copied_page,)
