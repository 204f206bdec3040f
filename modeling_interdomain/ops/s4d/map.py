"""The attention map of an S4D layer, whose weights depend on the age of a token alone."""

import torch

from ..common.checks import check_ends
from ..common.cpu import compute_dtype
from ..common.decay import as_complex, decay_powers
from ..common.packing import within_documents
from .chunk import causal
from .entry import check_parameters


def s4d_attention_map(
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    readout: torch.Tensor,
    length: int,
    *,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The exact matrix A with `o_t = sum_{j <= t} A_tj [key_j ; value_j]`, for `s4d_attention` without a past.

        A_tj = 2 Re sum_n readout[n] lambda_n^(t - j) beta_n

    Args:
        log_decay, input_matrix: `[G, M, 2]`, readout: `[H, M, 2]`, cu_seqlens: as in `s4d_attention`.
        length: T.

    Returns:
        `[H, T, T]`, the same for every row, zero above the diagonal and between documents, in float32 (float64 for
        float64 parameters).

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name.
    """
    check_parameters(log_decay, input_matrix, readout)
    if not isinstance(length, int | torch.SymInt) or length < 1:
        raise ValueError(f"length must be a positive integer, got {length!r}.")
    cu_seqlens = check_ends(cu_seqlens, length)
    compute = compute_dtype(readout)
    tokens = torch.arange(length, device=readout.device)
    powers = decay_powers(log_decay, tokens) * as_complex(input_matrix.to(torch.float64))[:, None]  # [G, T, M], by age
    rows = as_complex(readout.to(torch.float64)).unflatten(0, (len(log_decay), -1))
    kernel = 2 * torch.einsum("gpm,gtm->gpt", rows, powers).real.flatten(0, 1).to(compute)  # [H, T]
    return within_documents(causal(kernel), cu_seqlens)
