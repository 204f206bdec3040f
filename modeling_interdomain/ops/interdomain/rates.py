"""What the learned numbers of a recurrence say of one step: `log(lambda) = Delta A`."""

import torch

from ..common.launch import fused, why_not


def log_decays(
    log_dt: torch.Tensor, log_a_real: torch.Tensor, a_imag: torch.Tensor, dtype: torch.dtype, backend: str = "auto"
) -> torch.Tensor:
    """`exp(log_dt) (-exp(log_a_real) + i a_imag)` as real pairs `[G, M, 2]` in `dtype`.

    Args:
        log_dt: `[G]`.
        log_a_real, a_imag: `[G, M]`.
        backend: "triton" and "auto" take one kernel where it can run; all others are PyTorch.
    """
    parameters = log_dt, log_a_real, a_imag
    kernels = backend in ("auto", "triton") and dtype == torch.float32 and not torch.compiler.is_exporting()
    if kernels and why_not(log_dt.device) is None:

        def run():
            from .triton_rates import triton_log_decays

            return triton_log_decays(*(x.float() for x in parameters))

        found = fused(backend, parameters, a_imag.shape[1], run, "rates")
        if found is not None:
            return found
    step = log_dt.to(dtype).exp()[:, None]
    return torch.stack([-step * log_a_real.to(dtype).exp(), step * a_imag.to(dtype)], dim=-1)
