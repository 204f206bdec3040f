"""What a configuration says of "selective_scan" layers, those of Mamba, and these of themselves."""

from dataclasses import dataclass

from ...layers.configuration import ModelFields
from ..configuration import Biases, Projection, RecurrentSpecification


@dataclass(kw_only=True, repr=False)
class SelectiveScanFields(ModelFields):
    """Fields of "selective_scan" layers.

    Args:
        scan_channels: of "selective_scan" layers: the channels E that each have a state. Default: None,
            `2 * hidden_size`.
        scan_state_size: the numbers N of the state of a channel. Default: 16.
        scan_step_rank: what the steps of all channels are computed from, the rank R of their map. Default: None,
            `hidden_size / 16`, rounded up.
        scan_bias: give the projections from and to the residual stream biases. Default: False.
        scan_conv_bias: give the convolution (of `conv_kernel` tokens) a bias. Default: True.
    """

    _positive = ["scan_state_size"]

    scan_channels: int | None = None
    scan_state_size: int = 16
    scan_step_rank: int | None = None
    scan_bias: bool = False
    scan_conv_bias: bool = True


class SelectiveScanSpecification(RecurrentSpecification):
    """A state of N numbers a channel; all channels are one head."""

    @classmethod
    def check_config(cls, config) -> None:
        for name in ("scan_channels", "scan_step_rank"):
            if getattr(config, name) is not None and getattr(config, name) < 1:
                raise ValueError(f"{name} must be a positive integer or None, got {getattr(config, name)}.")

    @classmethod
    def why_not_shardable(cls, config, processes: int) -> str | None:
        return '"selective_scan" layers have one head, whose channels choose its steps together'

    @classmethod
    def channels(cls, config) -> int:
        """E."""
        return 2 * config.hidden_size if config.scan_channels is None else config.scan_channels

    @classmethod
    def step_rank(cls, config) -> int:
        return -(-config.hidden_size // 16) if config.scan_step_rank is None else config.scan_step_rank

    @classmethod
    def output_heads(cls, config) -> int:
        return 1

    @classmethod
    def biases(cls, config) -> Biases:
        return Biases(config.scan_bias, config.scan_conv_bias)

    @classmethod
    def gated(cls, config) -> bool:
        return True

    @classmethod
    def rotated_dims(cls, config) -> set[int]:
        return set()

    @classmethod
    def projections(cls, config) -> list[Projection]:
        return [Projection("v", 1, cls.channels(config), True)]

    @classmethod
    def state_shape(cls, config) -> tuple[int, ...]:
        return config.scan_state_size, cls.channels(config)

    @classmethod
    def written_shape(cls, config) -> tuple[int, int]:
        return 1, cls.channels(config)
