"""Interdomain language models: a Llama-style decoder whose token mixers are chosen layer by layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from json import JSONDecodeError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, StaticCache
from transformers.generation import StoppingCriteriaList
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .cache_interdomain import (
    InterdomainCache,
    InterdomainStaticCache,
    begins_text,
    note_reader,
    note_reading,
    ready_to_step,
)
from .cache_spans import cut_cache, join_caches
from .cache_state_tuning import add_learned_state, load_learned_state, save_learned_state
from .cache_store import StateStore, prompt_reading
from .checkpoint_folder import damaged_weights, holds_weights, replacing
from .checks_interdomain import (
    check_beside_guesses,
    check_cache,
    check_cache_layers,
    check_causal,
    check_checkpointing,
    check_class_labels,
    check_classes,
    check_cu_seqlens,
    check_dynamic_mask,
    check_early_exit,
    check_forks,
    check_labels,
    check_mask,
    check_positions,
    check_room,
    check_seq_idx,
    check_sequence_group,
    check_sequence_losses,
    check_tensors,
    check_tokens,
    check_trace,
    embedded,
)
from .checks_keywords import understood
from .configuration_interdomain import InterdomainConfig
from .feed_forward_cdmoe import ChosenExperts
from .generation_batch import ROWS, write_batch
from .generation_first_layers import early_guesses
from .generation_guesses import SparingGuesses
from .generation_lookup import likely_guesses
from .generation_serving import RequestManager, why_not_served
from .mixer_recurrent import RecurrentMixer
from .mixer_softmax import SoftmaxMixer
from .module_common import AuxiliaryLoss, InterdomainRMSNorm, PerVersion, forget_tables, project
from .module_dynamic_mask import check_position_table
from .module_layer_losses import (
    at_least_one,
    count_asked,
    share_of_step,
    together,
    trained_along,
    warn_if_left_out,
)
from .module_operators import use_kernel
from .module_rotary import InterdomainRotaryEmbedding
from .module_sequence_parallel import place_piece, shifted_labels, summed
from .module_sparse_choice import RankingLoss
from .module_versions import CACHE_NAME, CACHE_NAMES, takes_cache
from .op_common import (
    Packing,
    all_real,
    cu_seqlens_from_numbers,
    cu_seqlens_from_positions,
    document_of_tokens,
    in_graph,
    packing_from_documents,
    packing_from_mask,
    positions_from_cu_seqlens,
    values_at_hand,
)
from .registry_interdomain import FEED_FORWARDS, TOKEN_MIXERS

# The others walk documents and pads one by one, which no graph can hold.
_COMPILED_BACKENDS = ("auto", "chunk", "triton")

# What layers hand on for the loss of training, and what of the configuration it is multiplied with.
_LAYER_LOSSES = {
    "auxiliary_losses": (AuxiliaryLoss, "aux_loss_coef"),
    "ranking_losses": (RankingLoss, "ranking_loss_coef"),
}

_OWN_CACHES = (InterdomainCache, InterdomainStaticCache)

# What assisted decoding hands to itself: no other model knows it.
_OWN_SETTINGS = ("holds_whole_text", "spared_cache")

# By this name the Trainer knows that labels are to be shifted before it smooths them; registering a class does not
# tell it.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault("interdomain", "InterdomainForCausalLM")

# Where a checkpoint folder finds its classes when this package is not installed.
AUTO_MAP = {
    "AutoConfig": "configuration_interdomain.InterdomainConfig",
    "AutoModel": "modeling_interdomain.InterdomainModel",
    "AutoModelForCausalLM": "modeling_interdomain.InterdomainForCausalLM",
    "AutoModelForSequenceClassification": "modeling_interdomain.InterdomainForSequenceClassification",
    # The only Auto class through which `transformers serve` loads code from a folder; any language model can decide.
    "AutoModelForDecision": "modeling_interdomain.InterdomainForCausalLM",
}


@dataclass
class InterdomainModelOutput(BaseModelOutputWithPast):
    """With `auxiliary_losses` and `ranking_losses`, one scalar for each layer that has one, and `chosen_experts`.

    `chosen_experts` are asked for with `output_chosen_experts=True`: ids `[B, T, h, k]` for each layer with experts.
    """

    auxiliary_losses: tuple[torch.Tensor, ...] | None = None
    ranking_losses: tuple[torch.Tensor, ...] | None = None
    chosen_experts: tuple[torch.Tensor, ...] | None = None


@dataclass
class InterdomainCausalLMOutput(CausalLMOutputWithPast):
    """With `layer_loss`, in training what the layers add to the loss: `config.aux_loss_coef` times `aux_loss`, the sum
    of `auxiliary_losses`, and `config.ranking_loss_coef` times the sum of `ranking_losses`. It is part of `loss`, and a
    loss of one's own, made of the logits, adds it itself: see `add_layer_loss`."""

    layer_loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    auxiliary_losses: tuple[torch.Tensor, ...] | None = None
    ranking_losses: tuple[torch.Tensor, ...] | None = None
    chosen_experts: tuple[torch.Tensor, ...] | None = None


@dataclass
class InterdomainClassifierOutput(SequenceClassifierOutputWithPast):
    """As `InterdomainCausalLMOutput`."""

    layer_loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    auxiliary_losses: tuple[torch.Tensor, ...] | None = None
    ranking_losses: tuple[torch.Tensor, ...] | None = None
    chosen_experts: tuple[torch.Tensor, ...] | None = None


class InterdomainDecoderLayer(GradientCheckpointingLayer):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.token_mixer = TOKEN_MIXERS[config.mixers_per_layer[layer_idx]](config, layer_idx)
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
        """What a part of the layer reads, in the dtype of the model whatever that of the stream."""
        return norm(hidden_states.to(norm.weight.dtype) if self.residual_in_fp32 else hidden_states)


class InterdomainPreTrainedModel(PreTrainedModel):
    """What all Interdomain models share: initialisation, and what the library may do with them.

    FSDP2 shards parameters of one dtype together, and recurrences stay in float32 in a model of another. They are among
    the classes that `_no_split_modules` names, each to be sharded before what holds it:

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
        "attentions": [SoftmaxMixer, RecurrentMixer],
        "auxiliary_losses": OutputRecorder(AuxiliaryLoss, index=0),
        "ranking_losses": OutputRecorder(RankingLoss, index=0),
        "chosen_experts": OutputRecorder(ChosenExperts, index=0),
    }

    def __init__(self, config: InterdomainConfig, *args, **kwargs):
        # What else it may be, the library refuses. Of remote code it is of another copy of its class.
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

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in the library; weights that cannot be read are named."""
        try:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except (SafetensorError, JSONDecodeError) as error:
            files = ", ".join(damaged_weights(pretrained_model_name_or_path)) or "weights"
            raise OSError(
                f"{pretrained_model_name_or_path} has {files} that cannot be read ({error}); copy or download again, "
                "from the Hub with force_download=True."
            ) from error

    def save_pretrained(
        self, save_directory, is_main_process=True, state_dict=None, push_to_hub=False, *args, **kwargs
    ):
        """As in the library; the folder names all classes for `trust_remote_code`, not only the saved one.

        A checkpoint that is already there is replaced when the new one is complete: a full disk loses none.
        """
        self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **AUTO_MAP}
        arguments = (is_main_process, state_dict, push_to_hub, *args)
        if push_to_hub or kwargs.get("distributed_checkpoint") or not holds_weights(save_directory):
            super().save_pretrained(save_directory, *arguments, **kwargs)
            return
        with replacing(save_directory, kwargs.get("variant")) as folder:
            super().save_pretrained(folder, *arguments, **kwargs)

    def add_learned_state(self) -> list[nn.Parameter]:
        """Let every recurrent layer begin with a learned state, see `cache_state_tuning.py`."""
        return add_learned_state(self)

    def save_learned_state(self, path) -> None:
        """Save that state alone."""
        save_learned_state(self, path)

    def load_learned_state(self, path) -> list[nn.Parameter]:
        """Begin with the state of a file."""
        return load_learned_state(self, path)

    def use_kernel(self, name, revision: str | None = None, trust_remote_code: bool | list[str] = False) -> None:
        """Call the operators of a kernel, a folder or `user/name` on the Hub, see `module_operators.py`."""
        use_kernel(self, name, revision, trust_remote_code)

    def join_caches(self, first, second, lengths: torch.Tensor | None = None) -> InterdomainCache:
        """The cache of two documents, each read alone, one after the other, see `cache_spans.py`."""
        return join_caches(first, second, self, lengths)

    def cut_cache(self, cache, before, after, since: torch.Tensor | None = None) -> InterdomainCache:
        """The cache of a text without a span, see `cache_spans.py`."""
        return cut_cache(cache, before, after, self, since)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """A module that starts in a way of its own says so; the others are linear maps and embeddings."""
        std = self.config.initializer_range
        residual_std = std / (2 * self.config.num_hidden_layers) ** 0.5
        start: Any = getattr(module, "start_parameters", None)
        if start is not None:
            start(self.config)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            usual = residual_std if getattr(module, "adds_to_residual", False) else std
            init.normal_(module.weight, std=getattr(module, "start_std", usual))
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """As in the library, which takes a module without parameters of its own for one that has been loaded."""
        own = next(module.parameters(recurse=False), next(module.buffers(recurse=False), None))
        super()._initialize_weights(module, is_custom_code and own is not None)

    def _ask_for_losses(self, kwargs: dict[str, Any]) -> None:
        """In training, have the forward hand on what layers add to the loss."""
        for name, (kind, _) in _LAYER_LOSSES.items() if self.training else ():
            kwargs[f"output_{name}"] = any(isinstance(module, kind) for module in self.modules())
            if kwargs[f"output_{name}"]:
                check_checkpointing(self.modules())

    def _counts_labels(self) -> bool:
        """Whether the loss is one of the library's, which takes the number of labels, and otherwise is NaN for none."""
        return not hasattr(self, "_loss_function")

    def _layer_losses(self, outputs, names=tuple(_LAYER_LOSSES)) -> dict[str, torch.Tensor | None]:
        """`layer_loss` and `aux_loss`."""
        layer_loss, totals = None, {}
        for name in names:
            coefficient, losses = _LAYER_LOSSES[name][1], getattr(outputs, name)
            if not losses:
                continue
            totals[name] = total = sum(x.to(losses[-1].device) for x in losses)
            if self.training:
                scaled = getattr(self.config, coefficient) * total
                layer_loss = scaled if layer_loss is None else layer_loss + scaled.to(layer_loss.device)
        return {"layer_loss": layer_loss, "aux_loss": totals.get("auxiliary_losses")}

    @staticmethod
    @takes_cache
    def create_masks_for_generate(
        config, inputs_embeds, attention_mask, past_key_values, documents: torch.Tensor | None = None, **kwargs
    ) -> dict[str, Any]:
        """The masks of one forward by kind of layer: "linear_attention" `[B, T]`, "full_attention" `[B, 1, T, keys]`.

        `documents` `[B, T]` numbers the packed document of each token. `generate()` calls this, too, before a forward
        that may be compiled.
        """
        masks: dict[str, Any] = {}
        kinds = set(config.layer_types)
        windowed = config.windowed_layers
        if kinds != {"full_attention"} or any(windowed):
            length = inputs_embeds.shape[1]
            rows = attention_mask is not None and attention_mask.ndim == 2
            masks["linear_attention"] = attention_mask[:, -length:].contiguous() if rows else None
        if any(kind != "linear_attention" and not alone for kind, alone in zip(config.layer_types, windowed)):
            create_mask: Any = create_bidirectional_mask
            if not config.bidirectional:
                # A single token sees all there is, but for the room of a static cache: also of one that records, for
                # which no graph is made.
                room = isinstance(past_key_values, StaticCache) and inputs_embeds.shape[1] == 1
                create_mask = partial(create_causal_mask, allow_is_causal_skip=not room)
            masks["full_attention"] = create_mask(
                config=config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                **{CACHE_NAME: past_key_values},
                and_mask_function=None if documents is None else packed_sequence_mask_function(documents),
            )
        return masks


def _training_layers(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Of a base model: what layers add to a loss is trained along where the caller, unlike our heads, does not ask.

    Whoever asks for these losses (`output_auxiliary_losses`, `output_ranking_losses`) adds them.
    """

    @wraps(forward)
    def run(self, *args, **kwargs):
        if not (self.training and torch.is_grad_enabled()):
            return forward(self, *args, **kwargs)
        left_out = [name for name in _LAYER_LOSSES if f"output_{name}" not in kwargs]
        if not left_out:
            return forward(self, *args, **kwargs)
        self._ask_for_losses(kwargs)
        named = kwargs.pop("return_dict", self.config.return_dict)
        outputs = forward(self, *args, **kwargs, return_dict=True)
        before, found = outputs.last_hidden_state, self._layer_losses(outputs, left_out)["layer_loss"]
        last = trained_along(before, found)
        kept = {name: x for name, x in outputs.items() if name not in left_out} | {"last_hidden_state": last}
        if outputs.hidden_states:
            kept["hidden_states"] = tuple(last if x is before else x for x in outputs.hidden_states)
        outputs = InterdomainModelOutput(**kept)
        return outputs.to_tuple() if named is False else outputs

    return run


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
        self.fingerprints = PerVersion()
        self._no_split_modules = [*self._no_split_modules, *sorted(self._kept_in_float32())]
        self.post_init()

    def _kept_in_float32(self) -> set[str]:
        """The classes of what stays so whatever the model's dtype: FSDP2 shards parameters of one dtype together."""
        kept = tuple(self._keep_in_fp32_modules_strict or ())
        found = [part for name, part in self.named_modules() if name.endswith(kept)]
        return {type(part).__name__ for part in found if any(True for _ in part.parameters())}

    def train(self, mode: bool = True):
        self.fingerprints.forget()
        return super().train(mode)

    @takes_cache
    @understood
    @_training_layers
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
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Run T more tokens.

        Args:
            input_ids: `[B, T]`, or give `inputs_embeds` `[B, T, hidden_size]`.
            attention_mask: `[B, past + T]`, 0 for pads, wherever they stand, and one other number a row for what is
                real; None when there are no pads. Without a cache also `[B, 1, T, T]`, which tokens each token sees:
                for softmax layers any, for recurrent ones texts that fork, where a token sees itself and what an
                earlier one sees.
            position_ids: `[B, T]`; by default pads are not counted. Without a mask and a cache, positions that restart
                separate packed documents.
            past_key_values: an `InterdomainCache`, updated in place; `cache` and `cache_params`, as Transformers calls
                it elsewhere, are the same.
            use_cache: make a cache when none is given. Packed documents make none, and training with gradients.
            cu_seq_lens_q: `[S + 1]`, ends of packed documents, starting with 0; B = 1.
            seq_idx: instead of these, the number of each token's document, `[B, T]`: one begins where it changes.
            sequence_group: the process group over which the rows are spread, this process holding T tokens of each in
                the order of the processes; `sequence_piece` cuts them. Masks and positions are those of the piece,
                `cu_seq_lens_q` are the ends along the whole row. A new cache then holds what has been read so far.
            output_attentions: add `attentions`, `[B, H, T, T]` a layer: weights of softmax and inner-function layers
                (with the "eager" implementation), and of Interdomain, S4D and SSD layers the exact map of which value
                made which output, in O(T^2). That is known of tokens without a past. Layers without a map are left out:
                selective scan, where every channel has decays of its own, and so a map of its own; recurrent layers
                with a sparse branch, whose output adds two maps of different values; and those that begin with a
                learned state, which is no token.

        Raises:
            ValueError, TypeError: before the cache is touched, when the inputs do not fit the model or each other, or a
                keyword would have no effect; of ids outside of the vocabulary, on a CPU alone.
        """
        check_tokens(input_ids, inputs_embeds, self.config.hidden_size)
        if inputs_embeds is None:
            inputs_embeds = embedded(self.embed_tokens, input_ids)
        # A configuration of fewer layers where these guess: that of the model others may read at the same time.
        shape, config = inputs_embeds.shape[:2], kwargs.pop("first_layers", self.config)
        layers: Any = list(self.layers)[: config.num_hidden_layers]
        mixers = [layer.token_mixer for layer in layers]
        check_cache(past_key_values, config, mixers, shape[0])
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if past_key_values is not None and _is_at_hand(seen):
            check_room(past_key_values, int(seen) + shape[1])
        check_mask(attention_mask, seen, *shape)
        check_causal(config, kwargs.get("is_causal"))
        check_positions(position_ids, *shape)
        cu_seqlens, piece = kwargs.get("cu_seq_lens_q"), None
        if sequence_group is not None:
            check_sequence_losses(self)
            check_sequence_group(sequence_group, config, mixers, past_key_values, attention_mask, kwargs)
            arguments: Any = attention_mask, position_ids, cu_seqlens, past_key_values is None
            piece, position_ids, cu_seqlens = place_piece(sequence_group, inputs_embeds, *arguments)
            kwargs["piece"] = piece
        else:
            cu_seqlens = _documents(kwargs, position_ids, attention_mask, past_key_values, shape)
        if torch.jit.is_tracing():
            check_trace(config, past_key_values, shape[1], cu_seqlens is not None)

        longest = seen + shape[1] if position_ids is None and _is_at_hand(seen) else None
        if position_ids is None:
            position_ids = _default_positions(attention_mask, cu_seqlens, seen, shape, inputs_embeds.device)
        inputs_embeds = check_dynamic_mask(config, inputs_embeds, position_ids, longest)
        forks = check_forks(attention_mask, config, mixers, past_key_values, shape)
        packed = forks is not None or (cu_seqlens is not None if piece is None else piece.packed)
        cacheable = not packed and not (self.training and torch.is_grad_enabled()) and not config.bidirectional
        if use_cache and past_key_values is None and cacheable:
            past_key_values = InterdomainCache(config)
        if not torch.compiler.is_compiling():
            note_reader(past_key_values, self)
            if begins_text(past_key_values):
                forget_tables(self)
        documents = None if cu_seqlens is None else document_of_tokens(cu_seqlens, shape.numel()).view(shape)
        masks = self._masks(config, attention_mask, inputs_embeds, past_key_values, documents)
        if cu_seqlens is not None and "flash" in config._attn_implementation:
            kwargs |= _varlen_arguments(cu_seqlens, masks.get("full_attention"))
        packing = None
        if piece is not None or not self._steps(past_key_values, shape[1]):
            packing = forks or _packing(masks.get("linear_attention"), cu_seqlens, shape)
            masks["linear_attention"] = None
        elif (mask := masks.get("linear_attention")) is not None and all_real(mask):
            masks["linear_attention"] = None

        if config.output_attentions:
            kwargs.setdefault("output_attentions", True)
        rotations = {
            int(dim): rotary(inputs_embeds, position_ids, documents) for dim, rotary in self.rotary_embs.items()
        }
        hidden_states = inputs_embeds
        note_reading(past_key_values, int(seen) if _is_at_hand(seen) else -1)
        for layer in layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=layer.token_mixer.select_mask(masks),
                position_embeddings=rotations or None,
                position_ids=position_ids,
                packing=packing,
                **{CACHE_NAME: past_key_values},
                **kwargs,
            )
        last = self.norm(hidden_states)
        if config.residual_in_fp32:
            last = last.to(inputs_embeds.dtype)
        note_reading(past_key_values, None)
        return InterdomainModelOutput(last, past_key_values if use_cache else None)

    def _masks(self, config, attention_mask, inputs_embeds, past_key_values, documents) -> dict[str, Any]:
        if isinstance(attention_mask, dict):
            return dict(attention_mask)
        return self.create_masks_for_generate(
            config, inputs_embeds, attention_mask, past_key_values, documents=documents
        )

    def _steps(self, cache: Cache | None, length: int) -> bool:
        """Whether the recurrent layers take one in-place step, which heeds a mask without packing."""
        if cache is None or length != 1 or torch.is_grad_enabled() or self.config.backend not in ("auto", "triton"):
            return False
        return ready_to_step(cache)


class InterdomainForCausalLM(InterdomainPreTrainedModel, GenerationMixin):
    """The model with a language modelling head.

    Attributes:
        prompt_store: a `StateStore` from which `generate()` and continuous batching take what was read before, or None.
            To begin with, what the environment variable INTERDOMAIN_PROMPT_STORE names, "memory" or a folder: so
            `transformers serve` has one.
    """

    prompt_store: StateStore | None = None

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: InterdomainConfig):
        if config.bidirectional:
            raise ValueError("A language model must not see later tokens: set bidirectional=False.")
        super().__init__(config)
        self.model = InterdomainModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.prompt_store = StateStore.from_environment()
        self.post_init()

    @takes_cache
    @understood
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
                cross-entropy in nats: 0 where no label counts, with gradients of 0, as such a batch adds to a step of
                several (`num_items_in_batch`).
            sequence_group: as in the model. `loss` is then that of the whole rows on every process, and its gradients
                averaged over the processes, as DDP and FSDP do, are those of one process; with `num_items_in_batch`,
                as elsewhere, it is this process's share.
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
        shifted = kwargs.get("shift_labels")
        check_labels(labels, shifted, input_ids, inputs_embeds, logits_to_keep)
        if labels is not None and self._counts_labels():
            name, asked = ("labels", labels[..., 1:]) if shifted is None else ("shift_labels", shifted)
            check_classes(name, asked, self.config.vocab_size, kwargs.get("ignore_index", -100))
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
        added = self._layer_losses(outputs)
        warn_if_left_out(outputs.last_hidden_state, added["layer_loss"])
        share = share_of_step(labels, shifted, kwargs.get("num_items_in_batch"))
        return InterdomainCausalLMOutput(
            loss=together(loss, added["layer_loss"], *share),
            **added,
            auxiliary_losses=outputs.auxiliary_losses,
            ranking_losses=outputs.ranking_losses,
            chosen_experts=outputs.chosen_experts,
            logits=logits,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, sequence_group, kwargs: dict[str, Any]) -> torch.Tensor:
        if sequence_group is not None and kwargs.get("shift_labels") is None:
            kwargs = kwargs | {"shift_labels": shifted_labels(labels, sequence_group)}
        items = kwargs.get("num_items_in_batch")
        whole = sequence_group is not None and items is None
        if whole or (items is None and self._counts_labels()):
            items = count_asked(labels, kwargs.get("shift_labels"), kwargs.get("ignore_index", -100))
        if whole:
            items = summed(items, sequence_group)
        if items is not None:
            kwargs = kwargs | {"num_items_in_batch": at_least_one(items)}
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return summed(loss, sequence_group) if whole else loss

    generate = takes_cache(GenerationMixin.generate)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """Make the cache `generate()` uses; a user's own cache is left alone."""
        given = model_kwargs.get(CACHE_NAME)
        check_early_exit(self.config, generation_config.assistant_early_exit)
        rollback = _rollback(self.config, generation_config)
        if isinstance(given, Cache):
            check_cache_layers(given, self.config)
            check_room(given, max_cache_length)
        if isinstance(given, _OWN_CACHES):
            given.allow_rollback(rollback)
        if given is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        kind = generation_config.cache_implementation
        if kind in (None, "dynamic", "dynamic_full"):
            cache = InterdomainCache(self.config)
        elif kind == "static":
            # As long as the longest so far: a compiled step need not be compiled again for a shorter text.
            asked = getattr(generation_config, "max_cache_len", None) or 0
            self._longest_cache = max(max_cache_length, asked, getattr(self, "_longest_cache", 0))
            cache = InterdomainStaticCache(self.config, max_cache_len=self._longest_cache)
        else:
            raise ValueError(
                f"cache_implementation={kind!r} is not possible for an Interdomain model: its state has a fixed "
                'size and is neither quantized nor offloaded; use "dynamic" or "static".'
            )
        cache.allow_rollback(rollback)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[CACHE_NAME] = cache

    def _prepare_model_inputs(self, inputs=None, bos_token_id=None, model_kwargs=None):
        """As in the library; prompts that cannot be read are named, and masks have the numbers that it counts with."""
        mask = model_kwargs.get("attention_mask")
        check_tensors(inputs=inputs, input_ids=model_kwargs.get("input_ids"), attention_mask=mask)
        tokens, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        arguments = (tokens, None) if name == "input_ids" else (None, tokens)
        check_tokens(*arguments, self.config.hidden_size)
        if mask is not None and mask.ndim == 2:
            seen = 0 if model_kwargs.get(CACHE_NAME) is None else mask.shape[1] - tokens.shape[1]
            check_mask(mask, seen, *tokens.shape[:2])
            model_kwargs["attention_mask"] = (mask != 0).long()
        return tokens, name, model_kwargs

    @takes_cache
    def prepare_inputs_for_generation(
        self,
        input_ids,
        next_sequence_length=None,
        past_key_values=None,
        inputs_embeds=None,
        holds_whole_text=False,
        spared_cache=None,
        **kwargs,
    ):
        """Of a whole text leave out what a user's cache has already seen, where `generate()` itself does not."""
        given = next_sequence_length is not None or inputs_embeds is not None
        if holds_whole_text and not given and isinstance(past_key_values, Cache):
            seen = int(past_key_values.get_seq_length())
            if 0 < seen < input_ids.shape[1]:
                next_sequence_length = input_ids.shape[1] - seen
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            **{CACHE_NAME: past_key_values},
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        # Here, too: a compiled step on a GPU cannot say it, and a GPU does not recover from an index that is too large.
        room, positions = self.config.longest_text, inputs.get("position_ids")
        if room is not None and positions is not None:
            check_position_table(positions, room, self.config.dynamic_mask)
        return inputs

    def _get_candidate_generator(self, *, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        """As in the library; looked up is what is likely, and the first layers guess as much as pays.

        See `generation_lookup.py` and `generation_first_layers.py`.
        """
        known = {name: x for name, x in model_kwargs.items() if name not in _OWN_SETTINGS}
        found = super()._get_candidate_generator(model_kwargs=known, **kwargs)
        cache, guesses = model_kwargs.get(CACHE_NAME), getattr(found, "num_assistant_tokens", None)
        if isinstance(cache, _OWN_CACHES) and guesses:  # as many as the assistant's own settings say
            cache.allow_rollback(int(guesses))
        spared = model_kwargs.get("spared_cache")
        found = early_guesses(likely_guesses(found, self.device, spared), kwargs["input_ids"].shape[1], spared)
        room = self.config.longest_text
        if isinstance(found, SparingGuesses) and room is not None:
            # A guess is read where a text that ends by itself may never come.
            found.max_length = min(found.max_length, room + 1)
        return found

    def _assisted_decoding(self, input_ids: torch.Tensor, *, generation_config: Any, **kwargs: Any) -> Any:
        """As in the library, which leaves it to models whether ids hold what a cache has seen, or follow on it.

        As in its other modes the mask tells, which is as long as the whole text; one without a pad was put aside.
        A cache that was not asked to record its past records no more than guesses where these are made here, and stops
        recording in the end.
        """
        check_beside_guesses(generation_config)
        mask, length = kwargs.get("attention_mask"), input_ids.shape[1]
        if not length and (mask is not None or generation_config.prompt_lookup_num_tokens is None):
            raise ValueError(
                "Guesses after inputs_embeds alone are possible without pads and with prompt_lookup_num_tokens: give "
                "input_ids too, or leave the assistant and the mask out."
            )
        told = getattr(generation_config, "_mask_length", length) if mask is None else mask.shape[1]
        cache = kwargs.get(CACHE_NAME)
        settings = {"generation_config": generation_config, "holds_whole_text": told == length, **kwargs}
        if not isinstance(cache, _OWN_CACHES) or not cache.recurrent_layers() or cache.records:
            return super()._assisted_decoding(input_ids, **settings)
        try:
            return super()._assisted_decoding(input_ids, spared_cache=cache, **settings)
        finally:
            cache.stop_recording()

    def _sample(self, input_ids: torch.Tensor, *, stopping_criteria: Any, generation_config: Any, **kwargs: Any) -> Any:
        """As in the library; with a `prompt_store`, on from what is known of the prompt."""
        reading = prompt_reading(self, input_ids, generation_config, kwargs)
        criteria = stopping_criteria if reading is None else StoppingCriteriaList([*stopping_criteria, reading])
        settings = {"stopping_criteria": criteria, "generation_config": generation_config, **kwargs}
        if reading is None:
            return super()._sample(input_ids, **settings)

        def read(start: int, stop: int) -> None:
            for piece in input_ids[:, start:stop].split(generation_config.prefill_chunk_size or stop, dim=1):
                ids = piece.to(self.device)
                self(ids, past_key_values=reading.cache, use_cache=True, logits_to_keep=1)

        reading.begin(read)
        text = None
        try:
            written = super()._sample(input_ids, **settings)
            text = getattr(written, "sequences", written)
            return written
        finally:
            reading.finish(text)

    @property
    def init_continuous_batching(self):
        """As in the library: what makes a manager of requests in flight, see `generation_serving.py`."""
        # `transformers serve` looks whether there is such a method: without it, it says so and answers in turn.
        if reason := why_not_served(self):
            raise AttributeError(reason)
        return partial(RequestManager, self)

    def continuous_batching_context_manager(self, *args, **kwargs):
        """As in the library: a manager that runs, and is stopped in the end."""
        if reason := why_not_served(self):
            raise NotImplementedError(reason)
        return super().continuous_batching_context_manager(*args, **kwargs)

    def generate_batch(self, inputs, generation_config=None, *, max_batch_size: int = ROWS, **kwargs):
        """Write after many prompts with continuous batching.

        A request in flight is a row of one cache: as soon as one ends, the next prompt is read into its row. A state
        takes the same room whatever was read; keys and values, where layers keep them, that of the longest in flight.
        With a `prompt_store` a prompt costs what is new in it, also beside the other prompts of the call. The library's
        `generate(ids, cache_implementation="paged")` calls this.

        Args:
            inputs: token ids, a list for each prompt; of any lengths.
            generation_config: default: the model's own.
            max_batch_size: prompts in flight at once. Default: 8.
            kwargs: of a `GenerationConfig`, as for `generate`.

        Returns:
            `{request id: GenerationOutput}` in the order of the prompts; `generated_tokens` are what `generate` writes
            after each prompt alone, up to the rounding of floating point numbers. Samples are drawn in another order:
            for the same prompts and rows a seed repeats them.

        Raises:
            NotImplementedError: for layers of one's own that keep other things.
            ValueError: for prompts and options that cannot be, before anything is read. Also when a text comes to the
                end of the positions that `dynamic_mask` "position" or "hard" knows.
        """
        return write_batch(self, inputs, generation_config, max_batch_size, kwargs)


class PatchEmbedding(nn.Module):
    """`[B, channels, height, width]` to `[B, tokens, hidden_size]`, patches row by row; `patch_size` 1 means pixels."""

    def __init__(self, config):
        super().__init__()
        self.channels, self.patch_size = config.num_channels, config.patch_size
        self.proj = nn.Linear(self.channels * self.patch_size**2, config.hidden_size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.channels:
            raise ValueError(
                f"pixel_values must have shape [B, {self.channels}, height, width], got {list(pixel_values.shape)}."
            )
        if any(size % self.patch_size for size in pixel_values.shape[2:]):
            raise ValueError(
                f"pixel_values of {list(pixel_values.shape[2:])} pixels cannot be cut into patches of "
                f"{self.patch_size}; resize the images to a multiple of it."
            )
        patches = nn.functional.unfold(pixel_values, self.patch_size, stride=self.patch_size)
        weight: Any = self.proj.weight
        if isinstance(weight, torch.Tensor) and weight.is_floating_point():  # quantized maps choose for themselves
            patches = patches.to(weight.dtype)
        return self.proj(patches.mT)


class InterdomainForSequenceClassification(InterdomainPreTrainedModel):
    """The model with a linear head on the last real token of each row, or on a learned token after it.

    Reads token ids, embeddings, or with `config.patch_size` images. `config.use_cls_token` appends `cls_token`
    `[hidden_size]` at the end, where every layer has seen all the others.
    """

    # The loss is a mean over rows: `Trainer` divides it where it accumulates several.
    accepts_loss_kwargs = False

    def __init__(self, config: InterdomainConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = InterdomainModel(config)
        self.patches = None if config.patch_size is None else PatchEmbedding(config)
        self.cls_token = nn.Parameter(torch.zeros(config.hidden_size)) if config.use_cls_token else None
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def start_parameters(self, config) -> None:
        if self.cls_token is not None:
            init.normal_(self.cls_token, std=config.initializer_range)

    @takes_cache
    @understood
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
        pixel_values: torch.Tensor | None = None,
        **kwargs,
    ) -> InterdomainClassifierOutput:
        """As `InterdomainModel.forward`, and:

        Args:
            labels: `[B]` class indices, or what `config.problem_type` asks for. Adds `loss`; rows of class -100 do not
                count, and without others it is 0, with gradients of 0.
            pixel_values: `[B, num_channels, height, width]`, instead of ids or embeddings.

        Returns:
            logits `[B, num_labels]`, read at the learned token or at the last token that `attention_mask` marks as
            real (without a mask: the last one that is not `pad_token_id`).

        Raises:
            ValueError: when the inputs do not fit the model or each other.
        """
        if pixel_values is not None:
            inputs_embeds = self._embed_images(pixel_values, input_ids, inputs_embeds)
        if input_ids is None and inputs_embeds is None:
            raise ValueError("Give exactly one of input_ids, inputs_embeds and pixel_values.")
        check_tokens(input_ids, inputs_embeds, self.config.hidden_size)
        batch, length = (input_ids if inputs_embeds is None else inputs_embeds).shape[:2]
        check_class_labels(labels, self.config, batch)
        real = self._real_tokens(input_ids, attention_mask, inputs_embeds)
        if self.cls_token is not None:
            asked = (past_key_values, position_ids, kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx"))
            if any(x is not None for x in asked):
                raise ValueError(
                    "A classifier with use_cls_token reads whole rows: leave past_key_values, position_ids, "
                    "cu_seq_lens_q and seq_idx out."
                )
            if inputs_embeds is None:
                inputs_embeds = embedded(self.model.embed_tokens, input_ids)
            if attention_mask is not None and attention_mask.shape != (batch, length):
                raise ValueError(
                    f"attention_mask must have shape {[batch, length]}, one number a token without the learned one, "
                    f"got {list(attention_mask.shape)}."
                )
            cls_token = self.cls_token.to(inputs_embeds.dtype).expand(batch, 1, -1)
            inputs_embeds, input_ids, use_cache = torch.cat([inputs_embeds, cls_token], dim=1), None, False
            real = torch.cat([real, real.new_ones(batch, 1)], dim=1)
            attention_mask = None if not in_graph() and bool(real.all()) else real.long()
        if kwargs.get("sequence_group") is not None:
            raise ValueError("A classifier reads the last token of whole rows: leave sequence_group out.")
        self._ask_for_losses(kwargs)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        length = hidden_states.shape[1]
        last = (torch.arange(length, device=real.device) * real).argmax(dim=1).to(hidden_states.device)
        logits = self.score(hidden_states[torch.arange(len(last), device=last.device), last])
        loss = None
        if labels is not None:
            arguments: Any = {"pooled_logits": logits, "config": self.config}
            if self._counts_labels():
                arguments["num_items_in_batch"] = at_least_one((labels != -100).sum())
            loss = self.loss_function(logits=logits, labels=labels, **arguments)
        added = self._layer_losses(outputs)
        warn_if_left_out(outputs.last_hidden_state, added["layer_loss"])
        return InterdomainClassifierOutput(
            loss=together(loss, added["layer_loss"]),
            **added,
            auxiliary_losses=outputs.auxiliary_losses,
            ranking_losses=outputs.ranking_losses,
            chosen_experts=outputs.chosen_experts,
            logits=logits,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _embed_images(self, pixel_values, input_ids, inputs_embeds) -> torch.Tensor:
        if self.patches is None:
            raise ValueError("pixel_values need a model with patch_size in its configuration.")
        if input_ids is not None or inputs_embeds is not None:
            raise ValueError("Give exactly one of input_ids, inputs_embeds and pixel_values.")
        return self.patches(pixel_values)

    def _real_tokens(self, input_ids, attention_mask, inputs_embeds) -> torch.Tensor:
        """`[B, T]` bool, False for pads."""
        tokens = inputs_embeds if input_ids is None else input_ids
        batch, length = tokens.shape[:2]
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            return attention_mask[:, -length:] != 0
        if input_ids is not None and self.config.pad_token_id is not None:
            return input_ids != self.config.pad_token_id
        return torch.ones(batch, length, dtype=torch.bool, device=tokens.device)


def _rollback(config, generation_config) -> int:
    """The tokens that one round of assisted decoding may take back."""
    drafts = [generation_config.num_assistant_tokens, generation_config.prompt_lookup_num_tokens]
    if generation_config.is_assistant:
        drafts.append(generation_config.max_new_tokens)
    return max([config.max_rollback, *(n for n in drafts if n)])


def _is_at_hand(seen: int | torch.Tensor) -> bool:
    """Whether a count can be looked at without waiting for a GPU or breaking a graph."""
    if isinstance(seen, torch.Tensor):
        return values_at_hand(seen)
    return isinstance(seen, int)  # not a symbol of an exported graph


def _documents(kwargs: dict[str, Any], position_ids, attention_mask, cache, shape) -> torch.Tensor | None:
    """The ends of packed documents: as they are given, or where positions restart (without a mask and a cache)."""
    given = {name: kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")}
    if cache is not None and (told := [name for name, x in given.items() if x is not None]):
        raise ValueError(f"{told[0]} packs whole documents, so it cannot continue from past_key_values.")
    ends, keys, numbers = given.values()
    if ends is not None or keys is not None:
        check_cu_seqlens(ends, keys, *shape)
    if numbers is not None:
        check_seq_idx(numbers, ends, *shape)
    if ends is not None:
        return ends
    if numbers is not None:
        return cu_seqlens_from_numbers(numbers)
    if position_ids is None or attention_mask is not None or cache is not None:
        return None
    return cu_seqlens_from_positions(position_ids.expand(shape[0], -1))


def _default_positions(attention_mask, cu_seqlens, seen, shape, device) -> torch.Tensor:
    """Positions `[B or 1, T]` after `seen` tokens, or in each packed document; pads that a mask shows do not count."""
    if cu_seqlens is not None:
        return positions_from_cu_seqlens(cu_seqlens, tuple(shape))
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        return ((attention_mask != 0).long().cumsum(dim=1) - 1).clamp(min=0)[:, -shape[1] :].to(device)
    return torch.arange(shape[1], device=device)[None] + seen


def _packing(mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, shape) -> Packing | None:
    """What recurrent layers work on, for a `[B, T]` mask and packed documents; None when that is all rows whole."""
    if mask is not None and not in_graph() and bool(mask.all()):
        mask = None
    if cu_seqlens is not None:
        return packing_from_documents(cu_seqlens, mask, tuple(shape))
    return None if mask is None else packing_from_mask(mask)


def _varlen_arguments(cu_seqlens: torch.Tensor, mask) -> dict[str, Any]:
    """What keeps packed documents apart in FlashAttention, which takes no mask of them."""
    if mask is not None:
        raise ValueError(
            "FlashAttention cannot keep packed documents apart that hold pads: leave attention_mask out, or use "
            'attn_implementation="sdpa".'
        )
    ends, longest = cu_seqlens.int(), int(cu_seqlens.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
