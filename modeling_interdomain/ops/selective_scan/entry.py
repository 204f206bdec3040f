"""Mamba's selective scan on tensors: a state for each channel, with step, input and readout chosen by the tokens."""

import torch

from ..common.checks import check_documents, check_how, check_state, check_tensors, real_tokens
from ..common.cpu import autocasts, compute_dtype, without_autocast
from ..common.launch import check_step_backend, fused, steps_fused
from ..common.packing import state_rows, step_rows, zero_pads
from .chunk import chunk_scan
from .naive import export_scan, recurrent_scan

SCAN_BACKENDS = ("auto", "recurrent", "chunk", "triton")


def selective_scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    *,
    skip: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The core of Mamba (arXiv 2312.00752, algorithm 2), for each of E channels with N state numbers:

        h_t = exp(step_t rate) h_{t-1} + step_t value_t key_t,    y_t = query_t . h_t + skip value_t

    Args:
        query: `[B, T, N]`, C of the paper.
        key: `[B, T, N]`, B of the paper.
        value: `[B, T, E]`, x of the paper.
        step: `[B, T, E]`, Delta of the paper after its softplus; at least 0.
        rate: `[N, E]`, A of the paper, transposed; at most 0.
        skip: `[E]`, D of the paper. Default: None, which means zero.
        initial_state: `[B, N, E]`; with `cu_seqlens`, one row a document. Default: None, which means zero.
        output_final_state, cu_seqlens, lengths, chunk_size: as in `interdomain_attention`.
        backend: "recurrent" (the definition, token by token), "chunk" (states are kept at the ends of chunks alone, and
            made anew in backward), "triton" (fused kernels on a GPU, in chunks of 32) or "auto" ("triton" where it can
            run, otherwise "chunk"). Default: "auto".

    Returns:
        output `[B, T, E]` in the dtype of `value`, and the final state `[B or S, N, E]` in float32 (float64 for float64
        inputs), or None. Everything is computed in the dtype of the state, under autocast too.

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name. Also when
            "triton" is asked for and cannot run here.

    Example:

        >>> import torch
        >>> from modeling_interdomain import selective_scan
        >>> query, key, value = torch.randn(2, 100, 16), torch.randn(2, 100, 16), torch.randn(2, 100, 32)
        >>> step, rate = torch.rand(2, 100, 32), -torch.rand(16, 32)
        >>> output, state = selective_scan(query, key, value, step, rate, output_final_state=True)
        >>> output.shape, state.shape
        (torch.Size([2, 100, 32]), torch.Size([2, 16, 32]))
    """
    _check_inputs(query, key, value, step, rate, skip)
    cu_seqlens, lengths = check_documents(cu_seqlens, lengths, query)
    if initial_state is not None:
        _check_state(initial_state, "initial_state", state_rows(query, cu_seqlens), value, rate)
    check_how(backend, SCAN_BACKENDS, chunk_size)

    compute = compute_dtype(query, key, value)
    out_dtype, exporting = value.dtype, torch.compiler.is_exporting()
    with without_autocast(query.device):
        if backend in ("auto", "triton") and not exporting:
            extent = initial_state, cu_seqlens, lengths, output_final_state
            found = _fused(backend, query, key, value, step, rate, *extent)
            if found is not None:
                output, final = found
                output = _skipped(output, value, skip, lengths)
                return output.to(out_dtype), final if output_final_state else None
        tokens = [x.to(compute) for x in (query, key, value, step)]
        if lengths is not None:
            tokens = zero_pads(lengths, *tokens)
        state = None if initial_state is None else initial_state.to(compute)
        query, key, value, step = tokens
        arguments = query, key, value, step, rate.to(compute), state, cu_seqlens
        if exporting:
            output, final = export_scan(*arguments)
        elif backend == "recurrent":
            output, final = recurrent_scan(*arguments)
        else:
            output, final = chunk_scan(*arguments, chunk_size, output_final_state)
        output = _skipped(output, value, skip)
    return output.to(out_dtype), final if output_final_state else None


def _skipped(output, value, skip, lengths=None) -> torch.Tensor:
    """`output + skip value`, at real tokens alone."""
    if skip is None:
        return output
    value = value.to(output.dtype)
    return torch.addcmul(output, value if lengths is None else zero_pads(lengths, value)[0], skip.to(output.dtype))


def _fused(backend, query, key, value, step, rate, *arguments):
    def run():
        from .triton import triton_scan

        return triton_scan(query, key, value, step, rate, *arguments)

    return fused(backend, (query, key, value, step), rate.shape[0], run, "selective scan")


def selective_scan_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    *,
    state: torch.Tensor,
    skip: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
    state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of `selective_scan` with the state updated in place.

    Args:
        query, key: `[B, N]`; value, step: `[B, E]`; rate: `[N, E]`; skip: `[E]`, or None for zero.
        state: `[B, N, E]`, overwritten.
        mask, backend, state_indices: as in `interdomain_step`.

    Returns:
        `[B, E]` in the dtype of `value`. Not differentiable: use `selective_scan` for gradients.

    Raises:
        ValueError: when an argument has a wrong shape, device or value, before the state is touched.
    """
    _check_inputs(query, key, value, step, rate, skip, rows="B")
    _check_state(state, "state", step_rows(query, state, state_indices), value, rate)
    check_step_backend(backend, state, state_indices)
    mask = real_tokens(mask, query)
    return take_scan_step(query, key, value, step, rate, state, skip, mask, backend, state_indices)


def take_scan_step(
    query, key, value, step, rate, state, skip=None, mask=None, backend: str = "auto", state_indices=None
) -> torch.Tensor:
    """`selective_scan_step` for a caller whose arguments fit; `mask` `[B]` is bool."""
    if torch.is_grad_enabled() or autocasts(query.device):
        with torch.no_grad(), without_autocast(query.device):
            return take_scan_step(query, key, value, step, rate, state, skip, mask, backend, state_indices)
    if steps_fused(backend, state, state_indices):
        output = _fused_step(backend, query, key, value, step, rate, state, skip, mask, state_indices)
        if output is not None:
            return output
    if state_indices is not None:
        from ..common.slots import step_slots

        def take(rows, mask, *tokens):
            return take_scan_step(*tokens, rate, rows, skip, mask, "recurrent")

        return step_slots(take, state, state_indices, mask, query, key, value, step)
    out_dtype = value.dtype
    # A state kept in a lower precision is still advanced in float32.
    working = state.to(torch.promote_types(state.dtype, torch.float32)).contiguous()
    query, key, value, step, rate = (x.to(working.dtype) for x in (query, key, value, step, rate))
    if mask is not None:  # a pad decays by 1 and puts in 0
        query, key, value, step = (x.where(mask[:, None], 0) for x in (query, key, value, step))
    working.mul_((step[:, None] * rate).exp_())
    working.addcmul_(key[..., None], (step * value)[:, None])
    output = torch.bmm(query[:, None], working)[:, 0]
    if skip is not None:
        output.addcmul_(value, skip.to(output.dtype))
    if working is not state:
        state.copy_(working)
    return output.to(out_dtype)


def _fused_step(backend, query, key, value, step, rate, state, skip, mask, state_indices):
    def run():
        from .triton_step import triton_scan_step

        return triton_scan_step(query, key, value, step, rate, state, skip, mask, state_indices)

    tensors = query, key, value, step, state
    return fused(backend, tensors, rate.shape[0], run, "a step of the selective scan")


def scan_state_after(
    state: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """The state after some tokens, without outputs: for rolling a cache back, and for handing a state on.

    Args:
        state: `[B, N, E]`, left untouched.
        key: `[B, T, N]`; value, step: `[B, T, E]`; rate: `[N, E]`; T may be 0.
        mask: `[B, T]` bool, False for pads.

    Returns:
        A new tensor like `state`, at least float32; differentiable.
    """
    state = state.to(torch.promote_types(state.dtype, torch.float32), copy=True)
    if not mask.shape[1]:
        return state
    with without_autocast(state.device):
        key, value, step = (torch.where(mask[..., None], x, 0).to(state.dtype) for x in (key, value, step))
        return chunk_scan(
            torch.zeros_like(key), key, value, step, rate.to(state.dtype), state, None, 64, output_final_state=True
        )[1]


def _check_inputs(query, key, value, step, rate, skip, rows: str = "B, T") -> None:
    """Shapes, dtypes and devices of tokens with these axes in front, and of the parameters."""
    check_tensors(
        ("query", query, f"{rows}, N"),
        ("key", key, f"{rows}, N"),
        ("value", value, f"{rows}, E"),
        ("step", step, f"{rows}, E"),
        ("rate", rate, "N, E"),
        *([] if skip is None else [("skip", skip, "E")]),
    )


def _check_state(state, name, rows, value, rate) -> None:
    check_state(name, state, (rows, *rate.shape), "N, E", value.device)
