"""What vLLM's cache keeps of a sequence in a recurrent layer: a page with its state, and the inputs of convolutions."""

from collections.abc import Sequence
from math import prod

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaCopySpec
from vllm.utils.torch_utils import get_dtype_size

Shapes = tuple[tuple[int, ...], ...]


def shapes_of(state: tuple[int, ...], inputs: Sequence[tuple[int, ...]]) -> Shapes:
    """A page with a state `[G, ...]`, and then inputs `[tokens, width]` each; given as a mixer keeps them, transposed.

    The state stands first: in float32 whatever the others are, it must lie at a multiple of four bytes. What has no
    numbers is left out.
    """
    return tuple(shape for shape in (state, *(shape[::-1] for shape in inputs)) if prod(shape))


def page_dtypes(shapes: Shapes, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """In a model of a dtype."""
    return torch.float32, *(dtype for _ in shapes[1:])


def page_size(shapes: Shapes, dtype: torch.dtype) -> int:
    """In bytes, which the next page begins a multiple of four after."""
    size = sum(prod(shape) * get_dtype_size(x) for shape, x in zip(shapes, page_dtypes(shapes, dtype), strict=True))
    return -(-size // 4) * 4


def copied_page(state: torch.Tensor, block_ids: list[int], block: int, accepted: int) -> MambaCopySpec:
    """What vLLM copies where a sequence goes on from a page that others may read: all of it, from the state on.

    Args:
        state: `[pages, ...]`, the first tensor of each page.
        block_ids: the pages of the sequence, of which `block + accepted - 1` is copied.
    """
    return MambaCopySpec(state[block_ids[block + accepted - 1]].data_ptr(), state.stride(0))


def inputs_after(x: torch.Tensor, before: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The last inputs `[S, tokens, width]` of a convolution after packed sequences.

    Args:
        x: `[T, width]`, the sequences one after the other.
        before: `[S, tokens, width]`, the inputs that went before each.
        cu_seqlens: `[S + 1]`, their ends, starting with 0.
    """
    size = before.shape[1]
    # Places in what went before and the sequence behind it.
    places = cu_seqlens.diff()[:, None] + torch.arange(size, device=x.device)
    new = x[(cu_seqlens[:-1, None] + places - size).clamp(min=0)]
    old = before.gather(1, places.clamp(max=size - 1)[..., None].expand_as(before))
    return torch.where((places >= size)[..., None], new, old)
