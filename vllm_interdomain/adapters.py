"""LoRA on a CPU as it is elsewhere: a token without an adapter gets none."""

from typing import Any

import torch


def spare_tokens_without_adapter() -> None:
    """Let vLLM's LoRA for CPUs add nothing where no adapter is asked for; a second call changes nothing.

    It picks the adapter of such a token by the index -1, and that is the last one (vLLM 0.32, mended in its pull
    request 48421): a request without an adapter beside one with it would be answered by both.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    shrink = PunicaWrapperCPU._apply_shrink
    if getattr(shrink, "spares", False):
        return

    def apply_shrink(self: Any, y: torch.Tensor, x: torch.Tensor, *arguments: Any) -> None:
        shrink(self, y, x, *arguments)
        y.view(-1, y.shape[-1]).masked_fill_((self.token_lora_indices < 0)[:, None], 0)

    apply_shrink.spares = True  # type: ignore[attr-defined]
    PunicaWrapperCPU._apply_shrink = apply_shrink
