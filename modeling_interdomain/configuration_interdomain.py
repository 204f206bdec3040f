"""The configuration of an Interdomain model: the fields of all families joined, and what they ask of each other."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging

from .feed_forwards.configuration import DIVIDED_FEED_FORWARD, FEED_FORWARDS, ExpertFields
from .layers.configuration import LAYERS, LENGTH_DEPENDENT, ModelFields
from .layers.versions import CACHE_NAME
from .mixers.inner_function.configuration import InnerFunctionFields
from .mixers.interdomain.configuration import InterdomainFields
from .mixers.selective_scan.configuration import SelectiveScanFields
from .mixers.softmax.configuration import DynamicMaskFields
from .mixers.sparse.configuration import SparseFields
from .mixers.specifications import TOKEN_MIXERS
from .mixers.ssd.configuration import SSDFields
from .mixers.window.configuration import WindowFields

logger = logging.get_logger(__name__)

# Where a checkpoint folder finds its classes when this package is not installed. All models but one are asked of one
# module: the library gives each module that it is asked for a copy of everything that this imports.
AUTO_MAP = {
    "AutoConfig": "configuration_interdomain.InterdomainConfig",
    "AutoModel": "modeling_interdomain.InterdomainModel",
    "AutoModelForCausalLM": "modeling_interdomain.InterdomainForCausalLM",
    "AutoModelForSequenceClassification": "classifier_interdomain.InterdomainForSequenceClassification",
    # The only Auto class through which `transformers serve` loads code from a folder; any language model can decide.
    "AutoModelForDecision": "modeling_interdomain.InterdomainForCausalLM",
}

# Tensor parallelism of token mixers whose heads are not shared out.
_GATHERED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise_gather_output")


@strict
class InterdomainConfig(
    WindowFields,
    SparseFields,
    DynamicMaskFields,
    InnerFunctionFields,
    SelectiveScanFields,
    SSDFields,
    InterdomainFields,
    ExpertFields,
    PreTrainedConfig,
):
    r"""Configuration of an Interdomain language model; the defaults are the 125M shape of the paper.

    Its bases declare and describe the fields, each those of a family of layers; `help(InterdomainConfig)` shows all.

    Raises:
        ValueError: when a field has an unknown value or two fields contradict each other.

    Example:

        >>> from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
        >>> config = InterdomainConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        >>> model = InterdomainForCausalLM(config)
    """

    # The package sets both. What writes the code of a model into a folder: code from a folder is copied as it is.
    write_code: ClassVar[Callable[..., Any] | None] = None
    name_unread_fields: ClassVar[Callable[..., None]] = staticmethod(lambda config: None)
    model_type = "interdomain"
    keys_to_ignore_at_inference = [CACHE_NAME]

    def __post_init__(self, **kwargs):
        kwargs.pop("layer_types", None)  # derived from token_mixers
        self._check_names()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                    f"{self.num_attention_heads}; change one of them or give head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.feature_dim is None:
            self.feature_dim = self.head_dim
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // (3 * 128)) * 128
        given_start = self.start
        self.complete_start(TOKEN_MIXERS)
        self.complete_sparse(given_start, self.output_init_rms)
        self._ask_parts("complete_config")
        super().__post_init__(**kwargs)
        self._name_unknown_fields(kwargs)
        self.name_unread_fields(self)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in the library; what was written before there was a `start` means "random"."""
        found = super().from_dict({"start": "random"} | config_dict, **kwargs)
        cls.name_unread_fields(found[0] if isinstance(found, tuple) else found)  # those among the keywords, too
        return found

    def save_pretrained(self, save_directory, push_to_hub: bool = False, **kwargs):
        """As in the library, with the code of the model beside it; every save of a model comes here."""
        super().save_pretrained(save_directory)
        if self.write_code is not None:
            self.write_code(self, save_directory)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def to_json_file(self, json_file_path, use_diff: bool = True):
        """As in the library; the file names all classes for `trust_remote_code`, not only the saved one."""
        self.auto_map = {**(getattr(self, "auto_map", None) or {}), **AUTO_MAP}
        super().to_json_file(json_file_path, use_diff)

    def to_dict(self):
        """As in the library; PEFT asks for it just before it looks up what to adapt, whenever PEFT was imported."""
        _register_with_peft()
        return super().to_dict()

    def convert_rope_params_to_dict(self, **kwargs):
        """Leave `rope_parameters=None` alone: here it means no rotary embeddings, not the default ones."""
        if self.rope_parameters is None and kwargs.get("rope_scaling") is None and "rope_theta" not in kwargs:
            kwargs.pop("rope_scaling", None)
            return kwargs
        return super().convert_rope_params_to_dict(**kwargs)

    def validate_architecture(self):
        """Checked whenever a configuration is made, and again when it is saved or loaded."""
        self.check_model()
        for field in ("token_mixers", "feed_forwards", "sparse_attention"):
            self.check_count(field, most=self.num_hidden_layers)
        self.check_start()
        self.check_sparse_start()

    def check_model(self) -> None:
        """Raise a ValueError where no model can be made, or would compute something else than the fields say.

        A model asks for this too: fields can be assigned after a configuration is made, and overrides of
        `from_pretrained` are. Whether fields of the start go together is not looked at, since a loaded model does not
        start, nor are the names of layers that a smaller number cuts off.
        """
        self.check_values()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads = {self.num_key_value_heads} must divide num_attention_heads = "
                f"{self.num_attention_heads}."
            )
        self._check_names()
        if self.rope_placement is not None and self.rope_parameters is None:
            raise ValueError(
                f"rope_placement = {self.rope_placement!r} needs rope_parameters, for example "
                '{"rope_type": "default", "rope_theta": 10000.0}.'
            )
        if self.rope_parameters is not None and (self.feature_dim % 2 or self.head_dim % 2):
            raise ValueError(
                f"rope_parameters needs an even head_dim and feature_dim, got {self.head_dim} and {self.feature_dim}."
            )
        rope = self.rope_parameters or {}
        kind, factor = rope.get("rope_type"), rope.get("factor")
        numbers = {"rope_theta": rope.get("rope_theta", 1.0), "factor": 1.0 if factor is None else factor}
        for name, number in numbers.items() if self.rotated_dims else ():
            if not (isinstance(number, int | float) and 0 < number < float("inf")):
                raise ValueError(f"{name} must be a positive and finite number, got {number!r}.")
        if kind in LENGTH_DEPENDENT and self.rotated_dims and set(self.layer_types) != {"full_attention"}:
            raise ValueError(
                f'rope_type "{kind}" changes its angles with the length, and the state of recurrent layers cannot be '
                'rotated again: choose another, such as "default", or attention in all layers.'
            )
        if self.feature_map != "silu_l2" and self.rope_placement is not None:
            raise ValueError(f"feature_map = {self.feature_map!r} knows no rotations: set rope_placement=None.")
        if self.feature_map == "fourier" and self.feature_dim % 2:
            raise ValueError(f'feature_map = "fourier" needs an even feature_dim, got {self.feature_dim}.')
        if self.bidirectional and set(self.layer_types) != {"full_attention"}:
            raise ValueError("bidirectional needs softmax in all layers: a recurrent layer sees earlier tokens only.")
        if self.patch_size is not None and (self.patch_size < 1 or self.num_channels < 1):
            raise ValueError(
                f"patch_size and num_channels must be positive, got {self.patch_size} and {self.num_channels}."
            )
        if self.normalize and "s4d" in self.mixers_per_layer:
            raise ValueError(
                'normalize divides by a readout of the query, and "s4d" layers have none; set it to False.'
            )
        self.check_start_values()
        self.check_gates()
        self._ask_parts("check_config")
        self.check_sparse(TOKEN_MIXERS)
        if self.max_rollback < 0:
            raise ValueError(f"max_rollback must not be negative, got {self.max_rollback}.")
        self.check_dynamic_mask(TOKEN_MIXERS)

    def _ask_parts(self, hook: str) -> None:
        """Let the classes that layers are made of fill in or check what is theirs, where they have something to say."""
        tables = (TOKEN_MIXERS, self.mixers_per_layer), (FEED_FORWARDS, self.feed_forwards_per_layer)
        for kind in (table[name] for table, names in tables for name in dict.fromkeys(names)):
            if (call := getattr(kind, hook, None)) is not None:
                call(self)

    def _name_unknown_fields(self, fields: dict) -> None:
        """Fields beyond ours and the library's are kept, but a misspelt one, or a newer version's, has no effect."""
        known = ("auto_map", "model_type", "quantization_config")
        if unknown := sorted(name for name in fields if name in vars(self) and name not in known and name[0] != "_"):
            logger.warning_once(
                f"InterdomainConfig does not know, and ignores, {', '.join(unknown)}: correct the name, or update "
                "modeling_interdomain if a newer version has saved it."
            )

    def _check_names(self) -> None:
        """The names of the layers' parts are known, and there is one a layer."""
        for field, table in (("token_mixers", TOKEN_MIXERS), ("feed_forwards", FEED_FORWARDS)):
            given = getattr(self, field)
            names = [given] if isinstance(given, str) else given
            if unknown := sorted(set(names) - set(table)):
                raise ValueError(
                    f"{field} must be made of {', '.join(table)} or what register_{field[:-1]} has added; got "
                    f"{', '.join(unknown)}."
                )
            self.check_count(field)

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """The library's tensor parallel plan: each process holds its part of the heads, with their states.

        Where a layer's heads cannot be shared out, all processes hold them all, and the projections alone are divided:
        a plan has one entry for the modules of a name in all layers, so it is so in all.
        """
        # `from_pretrained` puts it here before it makes a model.
        processes = getattr(getattr(self, "distributed_config", None), "tp_size", 1)
        reason = self.why_not_shardable(processes)
        if reason is not None and processes > 1:
            logger.warning_once(
                f"All heads and their states are in every process of tp_size = {processes}, because {reason}; leave "
                "q_proj, k_proj and v_proj out of target_modules of a PEFT adapter, which would not fit them."
            )
        parts = _GATHERED if reason is not None else self._head_plan()
        plan = {f"layers.*.token_mixer.{name}".rstrip("."): style for name, style in parts.items()}
        feed_forward = {f"layers.*.mlp.{name}": style for name, style in DIVIDED_FEED_FORWARD.items()}
        return plan | {"layers.*": LAYERS} | feed_forward

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, value):
        """Transformers before 5.20, which vLLM takes, writes tied embeddings into it."""

    def why_not_shardable(self, processes: int) -> str | None:
        """Why so many processes cannot share out the heads of all layers, or None."""
        if any(self.sparse_per_layer):
            return "a sparse branch reads what all of them write"
        reasons = (TOKEN_MIXERS[name].why_not_shardable(self, processes) for name in self.mixers_per_layer)
        return next((reason for reason in reasons if reason is not None), None)

    def _head_plan(self) -> dict[str, str]:
        plans = [TOKEN_MIXERS[name].head_plan(self) for name in dict.fromkeys(self.mixers_per_layer)]
        return {name: style for plan in plans for name, style in plan.items()}

    @property
    def rotated_dims(self) -> list[int]:
        """The head sizes for which layers need cosines and sines."""
        if self.rope_parameters is None:
            return []
        return sorted(set().union(*(TOKEN_MIXERS[name].rotated_dims(self) for name in self.mixers_per_layer)))

    def state_sizes(self, context_length: int) -> dict[str, int]:
        """The numbers that a decoder keeps of one sequence, over all layers (the paper's table 5).

        Args:
            context_length: tokens read so far; only keys and values depend on it.

        Returns:
            "recurrent" (real numbers: 2 M (R + D) a group, one more column with `normalize`), "convolution" (the last
            inputs of the convolutions) and "keys_values"; with sparse branches also "sparse", their memory.

        Raises:
            ValueError: when a layer is a registered mixer that does not say its sizes.
        """
        sizes = {"recurrent": 0, "convolution": 0, "keys_values": 0}
        for name in self.mixers_per_layer:
            for kind, number in TOKEN_MIXERS[name].state_sizes(self, context_length).items():
                sizes[kind] += number
        for name, branch in zip(self.mixers_per_layer, self.sparse_per_layer):
            if branch is not None:
                from .mixers.sparse.parts import numbers_kept

                window, memory = numbers_kept(self, branch, *TOKEN_MIXERS[name].written_shape(self))
                sizes["convolution"] += window
                sizes["sparse"] = sizes.get("sparse", 0) + memory
        return sizes

    @property
    def windowed_layers(self) -> list[bool]:
        """Which layers keep the keys of the largest bias only."""
        window = self.dynamic_mask_window is not None
        return [window and TOKEN_MIXERS[name].takes_dynamic_mask for name in self.mixers_per_layer]

    @property
    def mask_kinds(self) -> set[str]:
        """Of which kinds the masks are that layers take: "linear_attention" marks pads, "full_attention" pairs."""
        layers = list(zip(self.layer_types, self.windowed_layers))
        pads = {"linear_attention" for kind, windowed in layers if windowed or kind != "full_attention"}
        return pads | {"full_attention" for kind, windowed in layers if kind != "linear_attention" and not windowed}

    @property
    def layer_types(self) -> list[str]:
        """What Transformers calls the layers; derived from `token_mixers`, so assignments have no effect."""
        return [TOKEN_MIXERS[name].layer_type for name in self.mixers_per_layer]

    @layer_types.setter
    def layer_types(self, value):
        pass


def _describe_fields(config_class: type) -> None:
    """Gather what the bases say of their fields in the docstring of the class, where `help` and editors look."""
    families = [kind for kind in reversed(config_class.__mro__[1:]) if issubclass(kind, ModelFields)]
    fields = "\n".join(inspect.getdoc(kind).partition("Args:\n")[2] for kind in families)
    config_class.__doc__ = inspect.getdoc(config_class).replace("Raises:", f"Args:\n{fields}\n\nRaises:", 1)


_describe_fields(InterdomainConfig)


# What PEFT adapts in our models when it is not told: modules with the names that they have in Llama.
_TOKEN_MIXER = ["q_proj", "k_proj", "v_proj", "o_proj"]


def _register_with_peft() -> None:
    """Enter the model type into PEFT's tables of default modules; without effect until PEFT has been imported."""
    constants = sys.modules.get("peft.utils.constants")
    for name, table in list(vars(constants).items()) if constants else ():
        if name.endswith("_MODULES_MAPPING") and "llama" in table:
            # Query and value alone would leave an S4D layer, which has no query, with one: as PEFT does for RWKV, all.
            modules = _TOKEN_MIXER if table["llama"] == ["q_proj", "v_proj"] else table["llama"]
            table.setdefault("interdomain", list(modules))
