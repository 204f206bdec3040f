"""Interdomain language models: a Llama-style decoder whose token mixers are chosen layer by layer."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_interdomain import InterdomainConfig
from .generation.mixin import InterdomainGenerationMixin, store_of_environment
from .inputs.checks import check_classes, check_labels, check_tokens, embed_ids
from .inputs.keywords import takes_known_keywords
from .inputs.layout import lay_out, masks_by_kind, refused_together
from .layers.common import (
    AuxiliaryLoss,
    ChosenExperts,
    InterdomainRMSNorm,
    ParameterCache,
    RankingLoss,
    check_whole,
    home_of,
    project,
)
from .layers.rotary import InterdomainRotaryEmbedding
from .layers.versions import CACHE_NAME, CACHE_NAMES, takes_cache
from .mixers.base import TokenMixer, mixers_of
from .model_cache.cache import mark_reading
from .model_cache.methods import StateMethods
from .outputs.layer_losses import (
    InterdomainCausalLMOutput,
    InterdomainModelOutput,
    LayerLosses,
    at_least_one,
    count_labels,
    share_of_step,
    trains_layers,
)
from .parallel.tensor import HEADS  # noqa: F401  the library learns our styles
from .registry import FEED_FORWARDS, token_mixer_class
from .saving.checkpoint_folder import CheckpointFolders

# The other backends loop over documents and pads, of which a graph cannot hold a varying number.
_COMPILED_BACKENDS = ("auto", "chunk", "triton")

# The Trainer looks here whether it must shift labels before it smooths them; `AutoModel.register` enters nothing here.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("interdomain", "InterdomainForCausalLM")


class InterdomainDecoderLayer(GradientCheckpointingLayer):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.token_mixer = token_mixer_class(config, layer_idx)(config, layer_idx)
        feed_forward = FEED_FORWARDS[config.feed_forwards_per_layer[layer_idx]]
        self.mlp = None if feed_forward is None else feed_forward(config, layer_idx)
        self.input_layernorm = InterdomainRMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.mlp is not None:
            self.post_attention_layernorm = InterdomainRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.residual_in_fp32 = config.residual_in_fp32

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, **kwargs) -> torch.Tensor:
        if self.residual_in_fp32:
            hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        mixed, _ = self.token_mixer(
            self._normed(self.input_layernorm, hidden_states), attention_mask=attention_mask, **kwargs
        )
        hidden_states = hidden_states + mixed
        if self.mlp is None:
            return hidden_states
        return hidden_states + self.mlp(self._normed(self.post_attention_layernorm, hidden_states))

    def _normed(self, norm: InterdomainRMSNorm, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the mixer or the MLP reads: in the model's dtype, also where the residual stream is in float32."""
        return norm(hidden_states.to(norm.weight.dtype) if self.residual_in_fp32 else hidden_states)


class InterdomainPreTrainedModel(CheckpointFolders, StateMethods, LayerLosses, PreTrainedModel):
    """What all Interdomain models share: initialisation, and what the library may do with them.

    FSDP2 wants parameters of one dtype in what it shards together, and recurrences stay in float32 whatever the model's
    dtype. So `_no_split_modules` names their classes too; shard each module before the one that holds it:

        >>> named = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        >>> for module in (*reversed(named), model):
        ...     fully_shard(module)
    """

    config_class = InterdomainConfig
    config: InterdomainConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["InterdomainDecoderLayer"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    _keep_in_fp32_modules_strict = ["token_mixer.recurrence"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # The state can be taken back by a bounded number of tokens, so assisted decoding works.
    _is_stateful = False
    _can_record_outputs = {
        "hidden_states": InterdomainDecoderLayer,
        "attentions": OutputRecorder(TokenMixer, index=1),
        "auxiliary_losses": OutputRecorder(AuxiliaryLoss, index=0),
        "ranking_losses": OutputRecorder(RankingLoss, index=0),
        "chosen_experts": OutputRecorder(ChosenExperts, index=0),
    }

    def __init__(self, config: InterdomainConfig, *args, **kwargs):
        # Test for the method, not the class: remote code may load the configuration's class a second time. What is no
        # configuration at all the library refuses.
        if hasattr(config, "check_model"):
            config.check_model()
        super().__init__(config, *args, **kwargs)
        if set(config.layer_types) == {"full_attention"}:
            self._keep_in_fp32_modules_strict = None
        elif config.backend not in _COMPILED_BACKENDS:
            self._can_compile_fullgraph = False
        if config.learned_state and self._keep_in_fp32_modules_strict:
            self._keep_in_fp32_modules_strict = [*self._keep_in_fp32_modules_strict, "token_mixer.first_state"]
        if any(config.sparse_per_layer):
            self._keep_in_fp32_modules_strict = [*self._keep_in_fp32_modules_strict, "sparse.hash", "sparse.scorer"]

    @property
    def device(self) -> torch.device:
        """Where the tokens are read, also where Accelerate has offloaded all weights."""
        return home_of(self.get_input_embeddings())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Start a module by its own `start_parameters`, or as a linear map or an embedding."""
        std = self.config.initializer_range
        residual_std = std / (2 * self.config.num_hidden_layers) ** 0.5
        start: Any = getattr(module, "start_parameters", None)
        if start is not None:
            try:
                start(self.config)
            except RuntimeError as error:
                check_whole(module, error)
                raise
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            usual = residual_std if getattr(module, "adds_to_residual", False) else std
            init.normal_(module.weight, std=getattr(module, "start_std", usual))
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """As in the library, which in remote code takes a module without parameters for a loaded one."""
        own = next(module.parameters(recurse=False), next(module.buffers(recurse=False), None))
        super()._initialize_weights(module, is_custom_code and own is not None)

    @staticmethod
    @takes_cache
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, past_key_values, documents: torch.Tensor | None = None, **kwargs
    ) -> dict[str, Any]:
        """The masks of one forward by kind of layer: "linear_attention" `[B, T]`, "full_attention" `[B, 1, T, keys]`.

        `documents` `[B, T]` numbers the packed document of each token. `generate()` calls this, too, before a forward
        that may be compiled.
        """
        return masks_by_kind(config.mask_kinds, config, inputs_embeds, attention_mask, past_key_values, documents)


class InterdomainModel(InterdomainPreTrainedModel):
    """Token embeddings, decoder layers and the last norm."""

    def __init__(self, config: InterdomainConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([InterdomainDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = InterdomainRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_embs = nn.ModuleDict(
            {str(dim): InterdomainRotaryEmbedding(config, dim) for dim in config.rotated_dims}
        )
        self.gradient_checkpointing = False
        self.fingerprints = ParameterCache()
        self.mask_kinds = config.mask_kinds
        self._no_split_modules = [*self._no_split_modules, *sorted(self._kept_in_float32())]
        self.post_init()

    def _kept_in_float32(self) -> set[str]:
        """The names of the classes whose parameters stay in float32 whatever the model's dtype."""
        kept = tuple(self._keep_in_fp32_modules_strict or ())
        found = [part for name, part in self.named_modules() if name.endswith(kept)]
        return {type(part).__name__ for part in found if any(True for _ in part.parameters())}

    def __setstate__(self, state) -> None:
        """A model that was pickled before there was `mask_kinds` gets it."""
        super().__setstate__({"mask_kinds": state["config"].mask_kinds} | state)

    def train(self, mode: bool = True):
        self.fingerprints.forget()
        return super().train(mode)

    @takes_known_keywords
    @trains_layers
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        sequence_group: Any = None,
        logits_to_keep: Any = None,  # of a head: trainers that multiply with it themselves give it here
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Read T more tokens.

        Args:
            input_ids: `[B, T]`, or give `inputs_embeds` `[B, T, hidden_size]`.
            attention_mask: `[B, past + T]`, 0 for pads, wherever they stand, and one other number a row for what is
                real, the past as it was read; None when there are no pads. Without a cache also `[B, 1, T, T]`, which
                tokens each token sees: any for softmax layers; for recurrent ones a tree of texts, where a token sees
                itself and all that one earlier token sees.
            position_ids: `[B, T]`; by default pads are not counted. Without a mask and a cache, positions that restart
                separate packed documents.
            past_key_values: an `InterdomainCache`, updated in place; `cache` and `cache_params`, as Transformers calls
                it elsewhere, are the same.
            use_cache: make a cache when none is given. Packed documents make none, nor does training with gradients or
                with gradient checkpointing.
            cu_seq_lens_q: `[S + 1]`, ends of packed documents, starting with 0; B = 1.
            seq_idx: instead of these, the number of each token's document, `[B, T]`: one begins where it changes.
            sequence_group: the process group over which the rows are spread, this process holding T tokens of each in
                the order of the processes; `sequence_piece` cuts them. Masks and positions are those of the piece,
                `cu_seq_lens_q` are the ends along the whole row. A new cache then holds what has been read so far.
            output_attentions: add `attentions`, `[B, H, T, T]` a layer: weights of softmax and inner-function layers
                (with the "eager" implementation), and of Interdomain, S4D and SSD layers, and of windows without a
                memory, the exact map of which value made which output, in O(T^2). Only tokens without a past have one.
                Layers without a map are left out: selective scan and windows with a memory, where every channel has
                decays, or a gate, of its own, and so a map of its own; recurrent layers with a sparse branch, whose
                output adds two maps of different values; and those that begin with a learned state, which is no token.

        Raises:
            ValueError, TypeError: before the cache is touched, when the inputs do not fit the model or each other, or a
                keyword would have no effect; of ids outside of the vocabulary, on a CPU alone.
        """
        with refused_together(sequence_group, self):
            check_tokens(input_ids, inputs_embeds, self.config.hidden_size)
            if inputs_embeds is None:
                inputs_embeds = embed_ids(self.embed_tokens, input_ids)
        # With `assistant_early_exit` the library lowers the number: the first layers draft.
        layers: Any = list(self.layers)[: self.config.num_hidden_layers]
        mixers = mixers_of(layers)
        given = attention_mask, position_ids, past_key_values, use_cache, sequence_group, kwargs
        layout = lay_out(self, mixers, inputs_embeds, *given)
        rotations = {
            int(dim): rotary(layout.inputs_embeds, layout.position_ids, layout.documents)
            for dim, rotary in self.rotary_embs.items()
        }
        hidden_states = layout.inputs_embeds
        if layout.cache is not None:
            mark_reading(layout.cache, layout.seen)
        for layer, mixer in zip(layers, mixers):
            hidden_states = layer(
                hidden_states,
                attention_mask=mixer.select_mask(layout.masks),
                position_embeddings=rotations or None,
                position_ids=layout.position_ids,
                packing=layout.packing,
                **{CACHE_NAME: layout.cache},
                **layout.arguments,
            )
        last = self.norm(hidden_states)
        if self.config.residual_in_fp32:
            last = last.to(inputs_embeds.dtype)
        if layout.cache is not None:
            mark_reading(layout.cache, None)
        return InterdomainModelOutput(last, layout.cache if use_cache else None)


class InterdomainForCausalLM(InterdomainPreTrainedModel, InterdomainGenerationMixin):
    """The model with a language modelling head; `generate()` and what goes with it: `generation/mixin.py`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: InterdomainConfig):
        if config.bidirectional:
            raise ValueError("A language model must not see later tokens: set bidirectional=False.")
        super().__init__(config)
        self.model = InterdomainModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.prompt_store = store_of_environment()
        self.post_init()

    @takes_known_keywords
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        sequence_group: Any = None,
        **kwargs,
    ) -> InterdomainCausalLMOutput:
        """As `InterdomainModel.forward`, and:

        Args:
            labels: `[B, T]`, the input ids themselves (the shift happens here); -100 is ignored. Adds `loss`, the mean
                cross-entropy in nats: 0 where no label counts, with gradients of 0, so that such a batch can be one of
                several in a step (`num_items_in_batch`).
            sequence_group: as in the model. `loss` is then that of the whole rows on every process, and its gradients
                averaged over the processes, as DDP and FSDP do, are those of one process; with `num_items_in_batch` it
                is this process's share.
            logits_to_keep: compute logits for the last so many tokens alone, or for these indices; 0 means all.

        Returns:
            logits `[B, T, vocab_size]`, the cache, and what else was asked for.

        Example:

            >>> from transformers import AutoModelForCausalLM, AutoTokenizer
            >>> import modeling_interdomain
            >>> model = AutoModelForCausalLM.from_pretrained("runs/quickstart")
            >>> tokenizer = AutoTokenizer.from_pretrained("runs/quickstart")
            >>> ids = model.generate(**tokenizer("def main", return_tensors="pt"), max_new_tokens=20)
        """
        shifted, items = kwargs.get("shift_labels"), kwargs.get("num_items_in_batch")
        with refused_together(sequence_group, self):
            check_labels(labels, shifted, input_ids, inputs_embeds, logits_to_keep)
            if labels is not None and self._counts_labels():
                name, asked = ("labels", labels[..., 1:]) if shifted is None else ("shift_labels", shifted)
                check_classes(name, asked, self.config.vocab_size, kwargs.get("ignore_index", -100))
        if sequence_group is not None:
            from .parallel.sequence import check_alike

            check_alike(sequence_group, self.device, labels=labels, shift_labels=shifted, num_items_in_batch=items)
        self._ask_for_losses(kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            sequence_group=sequence_group,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = project(self.lm_head, outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, sequence_group, kwargs)
        share = share_of_step(labels, shifted, items, kwargs.get("ignore_index", -100))
        return InterdomainCausalLMOutput(logits=logits, **self._with_layer_losses(outputs, loss, *share))

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, group: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """The loss of these tokens; with a `group`, and no number of items for the step, that of the whole rows."""
        items = kwargs.get("num_items_in_batch")
        whole = group is not None and items is None
        if group is not None:
            from .parallel.sequence import shifted_labels, summed

            if kwargs.get("shift_labels") is None:
                kwargs = kwargs | {"shift_labels": shifted_labels(labels, group)}
        if items is None and (whole or self._counts_labels()):
            items = count_labels(labels, kwargs.get("shift_labels"), kwargs.get("ignore_index", -100))
            items = summed(items, group) if whole else items
        if items is not None:
            kwargs = kwargs | {"num_items_in_batch": at_least_one(items)}
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return summed(loss, group) if whole else loss
