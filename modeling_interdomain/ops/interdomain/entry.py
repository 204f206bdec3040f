"""Interdomain attention on tensors: the one entry to every backend."""

from collections.abc import Hashable
from typing import Any

import torch

from ..common.checks import check_documents, check_floats, check_how, check_state, check_tensors, real_tokens, shape_of
from ..common.cpu import autocasts, compute_dtype, multiplies_bf16, wants_gradient, without_autocast
from ..common.launch import check_step_backend, fused, steps_fused
from ..common.packing import mask_from_lengths, state_rows, step_rows
from ..diagonal.step import StepParameters, advance_state, read_state, step_tables
from .chunk import chunk_attention
from .readout import PRODUCTS

BACKENDS = ("auto", "recurrent", "fft", "scan", "associative_scan", "chunk", "triton")


def interdomain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None = None,
    *,
    product: str = "bilinear",
    normalize: bool = False,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
    kept: dict[Hashable, Any] | None = None,
    log_gate: torch.Tensor | None = None,
    write_gate: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    r"""Causal attention whose memory is one complex diagonal recurrence of fixed size ("Interdomain Attention: Beyond
    Token-Level Key-Value Memory", eqs. 11 and 13):

        X_t = exp(log_decay) X_{t-1} + input_matrix (x) [key_t ; value_t]
        o_t = Re( query_t^T U_t^T Gamma_t ),   (U_t, Gamma_t) = C X_t split into the key and the value part

    Args:
        query: `[B, T, H, R]`, the feature map already applied.
        key: `[B, T, G, R]`, with G a divisor of H; query head h reads group h // (H / G).
        value: `[B, T, G, D]`.
        log_decay: `[G, M, 2]`, Delta A as (real, imaginary) pairs, the imaginary part in radians per token.
        input_matrix: `[G, M, 2]`, beta as (real, imaginary) pairs.
        coefficient_matrix: C as pairs: `[G, M, M, 2]` (full), `[G, M, 2]` (diagonal) or None (identity).
        product: how U and Gamma are multiplied: "bilinear" (eq. 13), "hermitian" (Gamma conjugated) or "real" (twice
            the real part of each, the S4D convention). Default: "bilinear".
        normalize: divide by the same readout of a constant value 1 (the workshop paper, eq. 8). The state then has one
            more column, the last, which belongs to that constant. Default: False.
        initial_state: `[B, G, 2, M, R + D]`, real and imaginary part along the third axis; with `cu_seqlens`, one row a
            document. Default: None, which means zero.
        output_final_state: return the state after the last token of each row or document. Default: False.
        cu_seqlens: `[S + 1]`, integers from 0 to T, never decreasing: B is 1 and S documents lie one after the other
            along T; none sees another, and an empty one leaves its initial state. Default: None.
        lengths: `[B]`, integers, not together with `cu_seqlens`: row b holds lengths[b] tokens, and then pads, which
            are not read; their outputs and gradients are zero, and the final state is that after the last token.
            Default: None.
        chunk_size: the largest number of tokens per chunk in the chunked backends; changes speed and memory, not the
            result. Default: 64.
        backend: "recurrent" (the definition, token by token), "fft" (one convolution over all tokens), "scan" (token by
            token with one state kept every `chunk_size`, and the inverse recurrence in the backward pass),
            "associative_scan" (parallel prefix), "chunk" (batched matrix products), "triton" (fused kernels on a
            GPU) or "auto" ("triton" where it can run, otherwise "chunk"; one step when T = 1 and no gradient
            is asked for). Default: "auto".
        kept: a dictionary in which "chunk" keeps the tables that it makes of the parameters, from one call to the next.
            It belongs to parameters of these numbers: the caller gives another one when they change. For calls without
            gradients on a CPU. Default: None.
        log_gate, write_gate, delta: `[B, T, G]`, of each token: the logarithm (at most 0) of what it leaves of the
            state beside its decay, a factor of its key and value, and how much of what the state answers to its key is
            taken from its value (the delta rule, in [0, 1] as a rule). With them

                X' = exp(log_gate_t + log_decay) X_{t-1},   u_t = value_t - delta_t (answer of X' to key_t)
                X_t = X' + write_gate_t input_matrix (x) [key_t ; u_t]

            as ops/interdomain/naive.py defines; for "auto", "recurrent", "chunk" and "triton", in graphs that are
            not exported, and delta without `normalize`. Default: None, which means 0, 1 and 0.

    Returns:
        output `[B, T, H, D]` in the dtype of `value`, and the final state `[B or S, G, 2, M, R + D]` in float32
        (float64 for float64 inputs), or None. Computation is in the dtype of the state, under autocast too; "triton",
        and "chunk" for a bfloat16 `value` on a CPU that has instructions for it (without `normalize`), multiply in the
        dtype of `value` and sum in float32.

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name. Also when
            "triton" is asked for and cannot run here.

    Examples:

        >>> import torch
        >>> from modeling_interdomain import interdomain_attention
        >>> query, key, value = (torch.randn(2, 100, 4, 16) for _ in range(3))
        >>> log_decay = torch.stack([-torch.rand(4, 8), torch.randn(4, 8)], dim=-1)
        >>> input_matrix = torch.randn(4, 8, 2)
        >>> output, state = interdomain_attention(query, key, value, log_decay, input_matrix, output_final_state=True)
        >>> output.shape, state.shape
        (torch.Size([2, 100, 4, 16]), torch.Size([2, 4, 2, 8, 32]))

        Three documents of 30, 1 and 69 tokens, one after the other:

        >>> packed = [x[:1] for x in (query, key, value)]
        >>> ends = torch.tensor([0, 30, 31, 100])
        >>> output, state = interdomain_attention(
        ...     *packed, log_decay, input_matrix, cu_seqlens=ends, output_final_state=True
        ... )
        >>> state.shape
        torch.Size([3, 4, 2, 8, 32])
    """
    check_inputs((query, key, value), log_decay, input_matrix, coefficient_matrix, product)
    cu_seqlens, lengths = check_documents(cu_seqlens, lengths, query)
    if initial_state is not None:
        _check_state(initial_state, "initial_state", state_rows(query, cu_seqlens), key, value, log_decay, normalize)
    check_how(backend, BACKENDS, chunk_size)
    gates = _gates(key, log_gate, write_gate, delta, normalize, backend)

    out_dtype, value_dim = value.dtype, value.shape[-1]
    if normalize:
        value = append_one(value)
    tokens, parameters = (query, key, value), (log_decay, input_matrix, coefficient_matrix)
    needs_grad = wants_gradient(*tokens, *parameters, initial_state, *(gates or ()))
    exporting = torch.compiler.is_exporting()
    whole = cu_seqlens is None and lengths is None
    single = backend == "auto" and query.shape[1] == 1 and whole and not needs_grad and not exporting
    with without_autocast(query.device):
        found = None
        if backend in ("auto", "triton") and not (single or exporting):
            arguments = (*tokens, *parameters, product, initial_state, cu_seqlens, chunk_size, normalize)
            found = _fused(backend, gates, *arguments, lengths=lengths, output_final_state=output_final_state)
        if found is None:
            compute = compute_dtype(*tokens)
            chunks = backend in ("auto", "chunk") and not (single or exporting or normalize or gates)
            narrow = chunks and compute == torch.float32 and multiplies_bf16(value)
            operand = torch.bfloat16 if narrow else compute
            query, key, value = (x.to(operand) for x in tokens)
            log_decay, input_matrix = (x.to(compute) for x in parameters[:2])
            coefficients, state = (None if x is None else x.to(compute) for x in (coefficient_matrix, initial_state))
            problem = (query, key, value, log_decay, input_matrix, coefficients, product, state)
            if single:
                found = _single(*problem, gates)
            elif exporting:
                from ..diagonal.export import export_attention

                found = export_attention(*problem, cu_seqlens, lengths, chunk_size)
            elif backend == "recurrent":
                from .naive import recurrent_attention

                alike = (None if x is None else x.to(compute) for x in gates or ())
                found = recurrent_attention(*problem, cu_seqlens, lengths, *alike)
            elif gates:
                from .gates_chunk import gated_chunk_attention

                found = gated_chunk_attention(*problem, cu_seqlens, lengths, chunk_size, output_final_state, *gates)
            elif backend in ("fft", "associative_scan"):
                from .prefix import prefix_attention

                found = _on_documents(prefix_attention, *problem, cu_seqlens, lengths, backend)
            elif backend == "scan":
                found = _on_documents(_scan, *problem, cu_seqlens, lengths, chunk_size)
            else:
                found = chunk_attention(*problem, cu_seqlens, lengths, chunk_size, output_final_state, kept)
    output, state = found
    if normalize:
        denominator = output[..., value_dim:]
        if lengths is not None:  # zero over zero at the pads
            denominator = torch.where(mask_from_lengths(lengths, output)[..., None, None], denominator, 1)
        output = output[..., :value_dim] / denominator
    return output.to(out_dtype), state if output_final_state else None


def _on_documents(
    run, query, key, value, log_decay, input_matrix, coefficients, product, state, cu_seqlens, lengths, *options
):  # fmt: skip
    """A backend that takes the ends of documents as a list, none of them empty."""
    parameters = log_decay, input_matrix, coefficients, product
    batch, length = query.shape[:2]
    if cu_seqlens is None and lengths is None:
        return run(query, key, value, *parameters, state, [0, length], *options)
    sizes = cu_seqlens.diff() if lengths is None else lengths
    real = None
    if lengths is not None:
        real = mask_from_lengths(lengths, query).flatten().nonzero()[:, 0]
        query, key, value = (x.flatten(0, 1).index_select(0, real)[None] for x in (query, key, value))
    filled = sizes.nonzero()[:, 0]
    rest = _state_or_zeros(state, key, value, log_decay, sizes.shape[0])
    if filled.numel() == 0:
        return value.new_zeros(batch, length, query.shape[2], value.shape[3]), rest
    ends = [0, *sizes[filled].cumsum(0).tolist()]
    first = None if state is None else state.index_select(0, filled)
    output, final = run(query, key, value, *parameters, first, ends, *options)
    if filled.numel() < sizes.shape[0]:
        final = rest.index_copy(0, filled, final)
    if real is not None:
        flat = output.new_zeros(batch * length, *output.shape[2:])
        output = flat.index_copy(0, real, output[0]).unflatten(0, (batch, length))
    return output, final


def _fused(backend, gates, query, key, value, log_decay, *arguments, **options):
    def run():
        given = *(x.to(value.dtype) for x in (query, key, value)), log_decay, *arguments
        if gates is None:
            from .triton import triton_attention

            return triton_attention(*given, **options)
        if gates.delta is None:
            from .triton_gates import gated_triton_attention

            return gated_triton_attention(*given, **options, gates=gates)
        from .triton_delta import delta_triton_attention

        return delta_triton_attention(*given, **options, gates=gates)

    widths = query.shape[3], value.shape[3], log_decay.shape[1]
    kind = "attention" if gates is None else "gated attention" if gates.delta is None else "the delta rule"
    return fused(backend, (query, key, value), widths, run, kind)


def _scan(query, key, value, log_decay, *arguments):
    """The sequential scan: kernels on a GPU, PyTorch elsewhere."""

    def run():
        from .triton_scan import triton_scan_attention

        return triton_scan_attention(query, key, value, log_decay, *arguments)

    from .scan import scan_attention

    widths = query.shape[3], value.shape[3], log_decay.shape[1]
    found = fused("auto", (query, key, value), widths, run, "sequential scan")
    return scan_attention(query, key, value, log_decay, *arguments) if found is None else found


def _gates(key, log_gate, write_gate, delta, normalize, backend, rows: str = "B, T"):
    """Checked `Gates`, or None where there are none."""
    if log_gate is None and write_gate is None and delta is None:
        return None
    from .gates import checked_gates

    return checked_gates(key, (log_gate, write_gate, delta), normalize, backend, rows)


def _single(query, key, value, log_decay, input_matrix, coefficients, product, state, gates):
    """A row of one token each: the step that decoding takes, on a copy of the state."""
    state = _state_or_zeros(state, key, value, log_decay, key.shape[0])
    tokens = (x[:, 0] for x in (query, key, value))
    parameters = StepParameters(step_tables, log_decay, input_matrix, coefficients, product)
    output = _step("auto", *tokens, parameters, state, gates=gates)
    return output[:, None], state


def interdomain_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None = None,
    *,
    state: torch.Tensor,
    product: str = "bilinear",
    normalize: bool = False,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
    state_indices: torch.Tensor | None = None,
    log_gate: torch.Tensor | None = None,
    write_gate: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of `interdomain_attention` with the state updated in place; M (R + D) + M^2 operations a head.

    Args:
        query: `[B, H, R]`; key: `[B, G, R]`; value: `[B, G, D]`; the parameters as in `interdomain_attention`.
        state: `[B, G, 2, M, R + D]` (one more column with `normalize`), overwritten.
        mask: `[B]` bool or integers, zero for a pad: the row's state stays and its output is zero. Default: None.
        backend: "triton" (two fused kernels on a GPU), "recurrent" (PyTorch) or "auto" (the kernels where they can
            run). Default: "auto".
        state_indices: `[B]` int32 or int64: `state` is a pool `[N, G, 2, M, R + D]`, of which row b moves slot
            state_indices[b] in place; the other slots are neither read nor written. A row below 0 is a pad: no slot
            changes, and its output is zero. No two rows may share a slot, nor may an index be N or more: that is
            refused on a CPU alone, elsewhere it corrupts states. Slots may lie apart (`stride(0)` above their size).
            The state of a new request is written by its prefill, which begins at zero. Default: None.
        log_gate, write_gate, delta: `[B, G]` each, as in `interdomain_attention`. Default: None.

    Returns:
        `[B, H, D]` in the dtype of `value`. Not differentiable: use `interdomain_attention` for gradients.

    Raises:
        ValueError: when an argument has a wrong shape, device or value, before the state is touched.
    """
    check_inputs((query, key, value), log_decay, input_matrix, coefficient_matrix, product, rows="B")
    _check_state(state, "state", step_rows(query, state, state_indices), key, value, log_decay, normalize)
    check_step_backend(backend, state, state_indices)
    gates = _gates(key, log_gate, write_gate, delta, normalize, backend, rows="B")
    mask = real_tokens(mask, query)
    parameters = StepParameters(step_tables, log_decay, input_matrix, coefficient_matrix, product)
    how: dict[str, Any] = {"mask": mask, "backend": backend, "state_indices": state_indices, "gates": gates}
    return take_step(query, key, value, parameters, state=state, normalize=normalize, **how)


def take_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    parameters: StepParameters,
    *,
    state: torch.Tensor,
    normalize: bool,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
    state_indices: torch.Tensor | None = None,
    gates: tuple[torch.Tensor | None, ...] | None = None,
) -> torch.Tensor:
    """`interdomain_step` for a caller whose arguments fit, and who may have tables from an earlier step.

    Args:
        query, key, value: with or without an axis of the one token, `[B, 1, H, R]` or `[B, H, R]`.
        parameters: `log_decay`, `input_matrix`, `coefficient_matrix` and `product`, of which `step_tables` are made.
        gates: `log_gate`, `write_gate` and `delta`, `[B, G]` or `[B, 1, G]` each or None.
    """
    if torch.is_grad_enabled() or autocasts(query.device):
        with torch.no_grad(), without_autocast(query.device):
            how: dict[str, Any] = {"mask": mask, "backend": backend, "state_indices": state_indices, "gates": gates}
            return take_step(query, key, value, parameters, state=state, normalize=normalize, **how)
    value_dim, out_dtype = value.shape[-1], value.dtype
    if normalize:
        value = append_one(value)
    output = _step(backend, query, key, value, parameters, state, mask, normalize, state_indices, gates)
    if normalize:
        output = output[..., :value_dim] / output[..., value_dim:]
        if state_indices is not None:
            from ..common.slots import real_slots

            mask = real_slots(mask, state_indices)
        if mask is not None:  # zero over zero
            output = output.where(mask[:, None, None], 0)
    return output.to(out_dtype)


def _step(
    backend, query, key, value, parameters: StepParameters, state, mask=None, wide=False, slots=None, gates=None
):  # fmt: skip
    """`advance_state` and `read_state` by the fused kernels or by PyTorch."""
    if steps_fused(backend, state, slots):
        output = _fused_step(backend, query, key, value, parameters.parameters, state, mask, wide, slots, gates)
        if output is not None:
            return output
    if slots is not None:
        from ..common.slots import step_slots

        def step(rows, mask, query, key, value, *given):
            each = iter(given)
            own = gates and tuple(None if gate is None else next(each) for gate in gates)
            return _step("recurrent", query, key, value, parameters, rows, mask, gates=own)

        given = [gate for gate in gates or () if gate is not None]
        return step_slots(step, state, slots, mask, query, key, value, *given)
    # A state kept in a lower precision is still advanced in float32.
    working = state if state.dtype in (torch.float32, torch.float64) else state.float()
    moves = parameters.tables(working.dtype)
    if gates is None:
        advance_state(working, key, value, moves, mask)
        output = read_state(query, working, moves)
    else:
        from .gates import gated_step

        output = gated_step(working, query, key, value, moves, gates, mask)
    if working is not state:
        state.copy_(working)
    return output if mask is None else output.where(mask[:, None, None], 0)


def _fused_step(backend, query, key, value, parameters, state, mask, wide, slots, gates):
    def run():
        from .triton_step import triton_step

        tokens = (x.squeeze(1) if x.ndim == 4 else x for x in (query, key, value))
        each = (None if x is None else x.view(x.shape[0], x.shape[-1]) for x in gates or ())
        *tensors, product = parameters
        return triton_step(*tokens, *tensors, state, product, mask, wide, slots, *each)

    widths = query.shape[-1], value.shape[-1], state.shape[3]
    return fused(backend, (query, key, value, state), widths, run, "gated step" if gates else "step")


def append_one(value: torch.Tensor) -> torch.Tensor:
    """Add the constant 1 whose readout is the denominator of the normalised readout."""
    return torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)


def _state_or_zeros(initial_state, key, value, log_decay, rows: int) -> torch.Tensor:
    if initial_state is not None:
        return initial_state.clone(memory_format=torch.contiguous_format)
    width = key.shape[-1] + value.shape[-1]
    shape = (rows, key.shape[2], 2, log_decay.shape[1], width)
    return torch.zeros(shape, dtype=compute_dtype(key, value), device=key.device)


def check_inputs(tokens: tuple, log_decay, input_matrix, coefficient_matrix, product: str, rows: str = "B, T") -> None:
    """Refuse tokens with these axes in front, query and key and it may be value, and parameters that do not fit."""
    axes = ("query", f"{rows}, H, R"), ("key", f"{rows}, G, R"), ("value", f"{rows}, G, D")
    named = [(name, x, shape) for x, (name, shape) in zip(tokens, axes)]
    sizes = check_tensors(*named)
    groups, heads = sizes["G"], sizes["H"]
    if heads % groups:
        raise ValueError(f"key has G = {groups} groups, which must divide the H = {heads} heads of query.")
    pairs = ("log_decay", log_decay, "G, M, 2"), ("input_matrix", input_matrix, "G, M, 2")
    size = check_tensors(named[1], *pairs)["M"]
    if coefficient_matrix is not None:
        shape = shape_of(coefficient_matrix)
        if shape not in ([groups, size, size, 2], [groups, size, 2]):
            raise ValueError(
                f"coefficient_matrix must have shape [G, M, M, 2] = [{groups}, {size}, {size}, 2] (full) or [G, M, 2] "
                f"(diagonal), or be None (identity), got {shape}."
            )
        check_floats("coefficient_matrix", coefficient_matrix, tokens[0].device)
    if product not in PRODUCTS:
        raise ValueError(f"product must be one of {', '.join(PRODUCTS)}, got {product!r}.")


def _check_state(state, name, rows, key, value, log_decay, normalize) -> None:
    width = key.shape[-1] + value.shape[-1] + (1 if normalize else 0)
    columns = "R + D + 1 (normalize=True)" if normalize else "R + D"
    shape = (rows, key.shape[-2], 2, log_decay.shape[1], width)
    check_state(name, state, shape, f"G, 2, M, {columns}", key.device)
