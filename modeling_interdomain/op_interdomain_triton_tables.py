"""What the fused kernels read of the parameters: powers of the decay and the pull-back, made differentiably."""

from typing import NamedTuple

import torch

from .op_common import as_complex, decay_powers
from .op_interdomain_mixing import mixing_matrix
from .op_interdomain_readout import pull_back
from .op_interdomain_step import grouped_coefficients

# The largest decay in a chunk, as an exponent of e, that is split into a growing and a decaying factor. float32 and
# bfloat16 hold e^88; what remains is room for sums of many large products.
_LARGEST_EXPONENT = 60.0


class KernelTables(NamedTuple):
    """Float32; complex numbers by planes, `[..., 2, M]`.

    Attributes:
        skewed: `[G]` int32, 1 where a mode decays (or grows) too fast in a chunk for `intra` to hold growing powers.
        powers: `[G, C, 2, M]`, lambda^(t+1); no gradient (the kernels give that of log(lambda) itself).
        inputs: `[G, C, 2, M]`, lambda^d beta, by which tokens enter the state d tokens later.
        intra: `[G, C, 2, M]`, how tokens enter the readout of their own chunk: lambda^(-i-1) beta, or the same as
            `inputs` where `skewed`.
        mixing: `[G, 2, 2, M, M]` or `[G, 2, 2, M]`: the pull-back, `p_j = sum_i y_i mixing[i, j]`.
    """

    skewed: torch.Tensor
    powers: torch.Tensor
    inputs: torch.Tensor
    intra: torch.Tensor
    mixing: torch.Tensor


def make_tables(
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None,
    product: str,
    chunk: int,
) -> KernelTables:
    """Arguments as in `interdomain_attention`."""
    rate = log_decay[..., 0].detach().double()
    skewed = rate.abs().amax(dim=1) * chunk > _LARGEST_EXPONENT
    steps = torch.arange(chunk, device=log_decay.device)
    beta = as_complex(input_matrix.double())[:, None]
    powers = decay_powers(log_decay.detach(), steps + 1)
    inputs = decay_powers(log_decay, steps) * beta
    # Where `skewed`, growing powers would overflow and their gradients be NaN: take those of a decay of one instead.
    factored = decay_powers(torch.where(skewed[:, None, None], torch.zeros_like(log_decay), log_decay), -steps - 1)
    intra = torch.where(skewed[:, None, None], inputs, factored * beta)
    mixing = _mixing(coefficient_matrix, product, log_decay)
    return KernelTables(skewed.int(), _planes(powers), _planes(inputs), _planes(intra), mixing)


def _planes(x: torch.Tensor) -> torch.Tensor:
    """Complex `[G, C, M]` to `[G, C, 2, M]`."""
    return torch.view_as_real(x).movedim(-1, 2).float().contiguous()


def _mixing(coefficient_matrix: torch.Tensor | None, product: str, like: torch.Tensor) -> torch.Tensor:
    groups, size, _ = like.shape
    coefficients = grouped_coefficients(coefficient_matrix, torch.float32)
    if coefficients is not None and coefficient_matrix.ndim == 4:
        matrix = mixing_matrix(coefficient_matrix.float(), product, groups, size, like.float())
        return matrix.view(groups, size, 2, size, 2).permute(0, 2, 4, 1, 3).contiguous()
    basis = torch.tensor([1.0, 1.0j], device=like.device)[:, None].expand(groups, 2, size)
    return torch.view_as_real(pull_back(coefficients, basis, product).resolve_conj()).movedim(-1, 2).contiguous()
