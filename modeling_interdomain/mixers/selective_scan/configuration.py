"""What a configuration says of "selective_scan" layers, those of Mamba."""

from dataclasses import dataclass

from ...layers.configuration import ModelFields


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

    def check_scan(self) -> None:
        """Such layers can be made."""
        for name in ("scan_channels", "scan_step_rank"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be a positive integer or None, got {getattr(self, name)}.")
