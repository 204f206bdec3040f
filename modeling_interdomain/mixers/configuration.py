"""What a token mixer says of itself to a configuration, before any layer is made: facts of the class, no PyTorch.

Each family has such a class beside its fields, and its token mixer inherits it. `specifications.py` names them.
"""

import math
from typing import ClassVar, NamedTuple

from ..layers.configuration import HEADS


class MixerSpecification:
    """What a configuration asks of every token mixer, the defaults those of a mixer with one recurrent state.

    Attributes:
        layer_type: what Transformers calls such a layer: "linear_attention" (it keeps a state in `layers[layer_idx]` of
            the cache, and gets pads and packed documents as a `Packing`, in a decode step as a mask), "full_attention"
            (it updates keys and values there, and gets a mask), or "hybrid" (both). Its `forward` may call the cache
            `past_key_values`, `cache` or `cache_params`.
        takes_dynamic_mask: whether it heeds `dynamic_mask` of the configuration.
        can_branch: a sparse branch can stand beside it; its class then has `written_shape(config)`.
        can_start_to_recall: `start="recall"` of the configuration has something to start in it.
        shared_groups: the field whose number of groups processes share out, with their states or keys and values.
    """

    layer_type: ClassVar[str] = "linear_attention"
    takes_dynamic_mask: ClassVar[bool] = False
    can_branch: ClassVar[bool] = False
    can_start_to_recall: ClassVar[bool] = False
    shared_groups: ClassVar[str | None] = None

    @classmethod
    def check_config(cls, config) -> None:
        """Raise a ValueError, one sentence, where such a layer cannot be made from a configuration."""

    @classmethod
    def why_not_shardable(cls, config, processes: int) -> str | None:
        """Why the heads cannot be shared out over so many processes of tensor parallelism; None where they can."""
        if cls.shared_groups is None:
            return f"{cls.__name__} layers do not say how to share theirs"
        groups = getattr(config, cls.shared_groups)
        return f"it does not divide {cls.shared_groups} = {groups}" if groups % processes else None

    @classmethod
    def head_plan(cls, config) -> dict[str, str]:
        """Where they can: styles of the library's tensor parallelism by module or parameter, "" the mixer itself."""
        raise NotImplementedError(f"{cls.__name__} does not say how its heads are divided: write head_plan.")

    @classmethod
    def written_shape(cls, config) -> tuple[int, int]:
        """Groups and numbers a group of what a recurrence writes, which a sparse branch reads a second time."""
        raise NotImplementedError(f"{cls.__name__} does not say what it writes: write written_shape.")

    @classmethod
    def rotated_dims(cls, config) -> set[int]:
        """The head sizes for which it reads `position_embeddings`."""
        return set()

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        """The numbers that it keeps of one sequence, as `InterdomainConfig.state_sizes` sums them up."""
        raise ValueError(
            f"state_sizes does not know {cls.__name__} layers; state_bytes() of a cache counts what is kept."
        )


class Biases(NamedTuple):
    """Which maps of a mixer have one."""

    projections: bool = False
    convolutions: bool = False


class Projection(NamedTuple):
    """One projection of the tokens: `name` + "_proj" makes `heads` x `width` numbers, `name` + "_conv" mixes them."""

    name: str
    heads: int
    width: int
    convolved: bool
    bias: bool = False  # beside those that `Biases` gives to all


class RecurrentSpecification(MixerSpecification):
    """A family names its projections and its state, and the rest follows."""

    can_branch = True

    @classmethod
    def projections(cls, config) -> list[Projection]:
        """The projections, in the order in which `_tokens` takes them."""
        raise NotImplementedError

    @classmethod
    def state_shape(cls, config) -> tuple[int, ...]:
        """Of one sequence."""
        raise NotImplementedError

    # What a family may say otherwise.

    @classmethod
    def starts_with_induction(cls, config) -> bool:
        """Whether its own queries start so that they find what came after earlier occurrences of the token."""
        return False

    @classmethod
    def output_heads(cls, config) -> int:
        """Those of the output."""
        return config.num_attention_heads

    @classmethod
    def kernel_size(cls, config) -> int:
        """Of the convolutions, in tokens."""
        return config.conv_kernel

    @classmethod
    def biases(cls, config) -> Biases:
        return Biases()

    @classmethod
    def gated(cls, config) -> bool:
        """Whether the output is multiplied by SiLU of a linear map of the input."""
        return config.use_output_gate

    @classmethod
    def rotated(cls, config) -> int:
        """The numbers a head that rotary embeddings turn."""
        return config.feature_dim

    @classmethod
    def written_shape(cls, config) -> tuple[int, int]:
        """The recurrence's output has as many numbers a head."""
        return config.num_key_value_heads, config.head_dim

    # What follows from it.

    @classmethod
    def rotated_dims(cls, config) -> set[int]:
        return set() if config.rope_placement is None else {cls.rotated(config)}

    @classmethod
    def state_sizes(cls, config, context_length: int) -> dict[str, int]:
        conv_state = sum(heads * width for _, heads, width, convolved, _ in cls.projections(config) if convolved)
        state = math.prod(cls.state_shape(config))
        return {"recurrent": state, "convolution": conv_state * (cls.kernel_size(config) - 1)}

    @classmethod
    def head_plan(cls, config) -> dict[str, str]:
        projections, biases = cls.projections(config), cls.biases(config)
        plan = {"": HEADS, "recurrence": HEADS} | {f"{projection.name}_proj": "colwise" for projection in projections}
        for projection in projections:
            if projection.convolved:
                plan[f"{projection.name}_conv.weight"] = HEADS
                if biases.convolutions:
                    plan[f"{projection.name}_conv.bias"] = HEADS
        if cls.gated(config):
            plan["g_proj"] = "colwise"
        if config.learned_state:
            plan["first_state"] = HEADS
        return plan | {"o_proj": "rowwise"}
