"""What a configuration says of "ssd" layers, state space duality, and these of themselves."""

from dataclasses import dataclass

from ...layers.configuration import HEADS, ModelFields
from ..configuration import Biases, Projection, RecurrentSpecification


@dataclass(kw_only=True, repr=False)
class SSDFields(ModelFields):
    """Fields of "ssd" layers.

    Args:
        ssd_state_size: of "ssd" layers: the numbers N that a state has for each of the P of a head; rotary embeddings
            (`rope_placement`, "before" or "after" alike) turn these. Default: 128.
        ssd_groups: what B and C of the heads are shared in, a divisor of the heads. Default: 1.
        ssd_heads: heads of "ssd" layers. Default: None, `num_attention_heads`.
        ssd_head_dim: value dimension of their heads, P. Default: None, `head_dim`.
        ssd_conv_kernel: width of the causal convolution of x, B and C, in tokens; 1 is none, 4 that of Mamba-2 and of
            the Conv1d control of Cheems. Default: 1.
        ssd_conv_bias: give these convolutions a bias. Default: False.
        ssd_activation: of x, B and C after it, "silu" in Mamba-2. Default: None.
        ssd_skip: add the input of each head times a learned number, D. Default: True.
        ssd_dt_bias: start of the bias of the time step dt before its softplus: "zero", "time_step" (that of Mamba-2:
            dt is drawn between `time_step_min` and `time_step_max`, uniformly in the logarithm), or None, no bias.
            Default: "zero".
        ssd_dt_limit: least and largest dt after the softplus. Default: None, no limit.
        ssd_norm: RMSNorm over the heads of a group "before_gate" or "after_gate" (`use_output_gate`; Mamba-2 has the
            latter). Default: None.
        ssd_bias: give the projections of these layers biases. Default: False.
    """

    _positive = ["ssd_state_size", "ssd_groups", "ssd_conv_kernel"]
    _choices = {
        "ssd_dt_bias": (None, "zero", "time_step"),
        "ssd_norm": (None, "before_gate", "after_gate"),
    }

    ssd_state_size: int = 128
    ssd_groups: int = 1
    ssd_heads: int | None = None
    ssd_head_dim: int | None = None
    ssd_conv_kernel: int = 1
    ssd_conv_bias: bool = False
    ssd_activation: str | None = None
    ssd_skip: bool = True
    ssd_dt_bias: str | None = "zero"
    ssd_dt_limit: list[float] | None = None
    ssd_norm: str | None = None
    ssd_bias: bool = False


class SSDSpecification(RecurrentSpecification):
    """A state of P x N numbers a head, whose groups share B and C."""

    @classmethod
    def check_config(cls, config) -> None:
        for name in ("ssd_heads", "ssd_head_dim"):
            if getattr(config, name) is not None and getattr(config, name) < 1:
                raise ValueError(f"{name} must be a positive integer or None, got {getattr(config, name)}.")
        heads = cls.output_heads(config)
        if heads % config.ssd_groups:
            raise ValueError(f'ssd_groups = {config.ssd_groups} must divide the {heads} heads of "ssd" layers.')
        if config.ssd_activation is not None:
            from transformers.activations import ACT2FN  # which imports Triton, where it is

            if config.ssd_activation not in ACT2FN:
                raise ValueError(
                    f"ssd_activation must be None or an activation of Transformers, got {config.ssd_activation!r}."
                )
        limit = config.ssd_dt_limit
        if limit is not None and not (len(limit) == 2 and 0 <= limit[0] <= limit[1]):
            raise ValueError(f"ssd_dt_limit must be None or [least, largest] with 0 <= least <= largest, got {limit}.")
        if config.rope_placement is not None and config.ssd_state_size % 2:
            raise ValueError(
                f"Rotary embeddings turn pairs: with rope_placement ssd_state_size must be even, got "
                f"{config.ssd_state_size}."
            )

    @classmethod
    def output_heads(cls, config) -> int:
        return config.num_attention_heads if config.ssd_heads is None else config.ssd_heads

    @classmethod
    def head_width(cls, config) -> int:
        """P, the numbers a head."""
        return config.head_dim if config.ssd_head_dim is None else config.ssd_head_dim

    @classmethod
    def kernel_size(cls, config) -> int:
        return config.ssd_conv_kernel

    @classmethod
    def biases(cls, config) -> Biases:
        return Biases(config.ssd_bias, config.ssd_conv_bias)

    @classmethod
    def rotated(cls, config) -> int:
        return config.ssd_state_size

    @classmethod
    def projections(cls, config) -> list[Projection]:
        convolved, size = config.ssd_conv_kernel > 1, config.ssd_state_size
        return [
            Projection("q", config.ssd_groups, size, convolved),
            Projection("k", config.ssd_groups, size, convolved),
            Projection("v", cls.output_heads(config), cls.head_width(config), convolved),
            Projection("dt", cls.output_heads(config), 1, False),
        ]

    @classmethod
    def state_shape(cls, config) -> tuple[int, ...]:
        return cls.output_heads(config), cls.head_width(config), config.ssd_state_size

    @classmethod
    def why_not_shardable(cls, config, processes: int) -> str | None:
        groups = config.ssd_groups
        return f"it does not divide ssd_groups = {groups}, what heads share B and C in" if groups % processes else None

    @classmethod
    def head_plan(cls, config) -> dict[str, str]:
        return super().head_plan(config) | ({} if config.ssd_norm is None else {"norm.weight": HEADS})

    @classmethod
    def written_shape(cls, config) -> tuple[int, int]:
        return cls.output_heads(config), cls.head_width(config)
