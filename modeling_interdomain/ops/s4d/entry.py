"""The S4D control: the recurrence of Interdomain attention read by a learned vector instead of by a query."""

import torch

from ..common.checks import check_documents, check_how, check_state, check_tensors, real_tokens
from ..common.cpu import compute_dtype, without_autocast
from ..common.launch import check_step_backend, fused, steps_fused
from ..common.packing import state_rows, step_rows
from ..diagonal.step import StepParameters, StepTables, advance_state, transition_tables
from .chunk import chunk_s4d

S4D_BACKENDS = ("auto", "chunk", "triton")


def s4d_attention(
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    readout: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`o_t = 2 Re sum_n readout[n] X_t[n]` of the state of `interdomain_attention` (the S4D-only control of the paper).

    Args:
        key, value: `[B, T, G, R]` and `[B, T, G, D]`, the two inputs of the state.
        log_decay, input_matrix: `[G, M, 2]`.
        readout: `[H, M, 2]`, G a divisor of H; head h reads group h // (H / G).
        initial_state, output_final_state, cu_seqlens, lengths, chunk_size: as in `interdomain_attention`.
        backend: "chunk" (matrix products), "triton" (fused kernels on a GPU) or "auto" ("triton" where it can run,
            otherwise "chunk"). Default: "auto".

    Returns:
        output `[B, T, H, R + D]` in the dtype of `value`, and the final state `[B or S, G, 2, M, R + D]` or None.

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name. Also when
            "triton" is asked for and cannot run here.
    """
    _check_inputs(key, value, log_decay, input_matrix, readout)
    cu_seqlens, lengths = check_documents(cu_seqlens, lengths, key)
    if initial_state is not None:
        _check_state("initial_state", initial_state, state_rows(key, cu_seqlens), key, value, log_decay)
    check_how(backend, S4D_BACKENDS, chunk_size)
    exporting, found = torch.compiler.is_exporting(), None
    compute = compute_dtype(key, value)
    with without_autocast(key.device):
        if backend in ("auto", "triton") and not exporting:
            parameters, extent = (log_decay, input_matrix, readout), (initial_state, cu_seqlens, lengths)
            found = _fused(backend, key, value, *parameters, *extent, chunk_size, output_final_state)
        if found is None:
            inputs = torch.cat([key.to(compute), value.to(compute)], dim=-1)
            decay, beta, rows = (x.to(compute) for x in (log_decay, input_matrix, readout))
            state = None if initial_state is None else initial_state.to(compute)
            arguments = inputs, decay, beta, rows, state, cu_seqlens, lengths, chunk_size
            if exporting:
                from ..diagonal.export import export_s4d

                found = export_s4d(*arguments)
            else:
                found = chunk_s4d(*arguments, output_final_state)
    output, final = found
    return output.to(value.dtype), final if output_final_state else None


def _fused(backend, key, value, log_decay, *arguments):
    def run():
        from .triton import triton_s4d

        return triton_s4d(torch.cat([key.to(value.dtype), value], dim=-1), log_decay, *arguments)

    return fused(backend, (key, value), (key.shape[3], value.shape[3], log_decay.shape[1]), run, "S4D")


def s4d_step(
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    readout: torch.Tensor,
    *,
    state: torch.Tensor,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
    state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of `s4d_attention` with the state updated in place; key `[B, G, R]`, value `[B, G, D]`.

    Args:
        state: `[B, G, 2, M, R + D]`, overwritten.
        mask, backend, state_indices: as in `interdomain_step`.

    Returns:
        `[B, H, R + D]` in the dtype of `value`.

    Raises:
        ValueError: when an argument has a wrong shape, device or value, before the state is touched.
    """
    _check_inputs(key, value, log_decay, input_matrix, readout, rows="B")
    _check_state("state", state, step_rows(key, state, state_indices), key, value, log_decay)
    check_step_backend(backend, state, state_indices)
    parameters, mask = StepParameters(s4d_tables, log_decay, input_matrix, readout), real_tokens(mask, key)
    return take_s4d_step(key, value, parameters, state=state, mask=mask, backend=backend, state_indices=state_indices)


def take_s4d_step(
    key, value, parameters: StepParameters, *, state, mask=None, backend: str = "auto", state_indices=None
) -> torch.Tensor:
    """`s4d_step` for a caller who may have tables from an earlier step: `s4d_tables` of the `parameters`.

    Key and value may have an axis of the one token, `[B, 1, G, R]`.
    """
    with torch.no_grad(), without_autocast(key.device):
        if steps_fused(backend, state, state_indices):
            output = _fused_step(backend, key, value, parameters, state, mask, state_indices)
            if output is not None:
                return output
        if state_indices is not None:
            from ..common.slots import step_slots

            def step(rows, mask, *tokens):
                return take_s4d_step(*tokens, parameters, state=rows, mask=mask, backend="recurrent")

            return step_slots(step, state, state_indices, mask, key, value)
        # A state kept in a lower precision is still advanced in float32.
        working = state if state.dtype in (torch.float32, torch.float64) else state.float()
        moves = parameters.tables(working.dtype)
        advance_state(working, key, value, moves, mask)
        if working is not state:
            state.copy_(working)
        (rows,) = moves.matrices
        output = (rows @ working.flatten(2, 3)).flatten(1, 2)
        if mask is not None:
            output = output.where(mask[:, None, None], 0)
    return output.to(value.dtype)


def _fused_step(backend, key, value, parameters, state, mask, state_indices):
    def run():
        from .triton_step import triton_s4d_step

        inputs = torch.cat([x.squeeze(1) if x.ndim == 4 else x for x in (key.to(value.dtype), value)], dim=-1)
        moves = parameters.tables(torch.float32)
        return triton_s4d_step(inputs, moves.decay, moves.turn, moves.beta, *moves.matrices, state, mask, state_indices)

    return fused(backend, (key, value, state), (key.shape[-1], value.shape[-1], state.shape[3]), run, "a step of S4D")


def s4d_tables(
    log_decay: torch.Tensor, input_matrix: torch.Tensor, readout: torch.Tensor, dtype: torch.dtype
) -> StepTables:
    """What `s4d_step` needs of the parameters: its only matrix holds the real rows `[G, H / G, 2M]` of the readout."""
    real, imag = (2 * readout.to(dtype)).unbind(-1)
    rows = torch.cat([real, -imag], dim=-1).unflatten(0, (log_decay.shape[0], -1))
    return transition_tables(log_decay, input_matrix, dtype)._replace(matrices=(rows,))


def _check_inputs(key, value, log_decay, input_matrix, readout, rows: str = "B, T") -> None:
    """Shapes, dtypes and devices of tokens with these axes in front, and of the parameters."""
    tokens = ("key", key, f"{rows}, G, R"), ("value", value, f"{rows}, G, D")
    check_parameters(log_decay, input_matrix, readout, *tokens)


def check_parameters(log_decay, input_matrix, readout, *tokens: tuple) -> None:
    """The same of the parameters, beside tokens or alone."""
    pairs = ("log_decay", log_decay, "G, M, 2"), ("input_matrix", input_matrix, "G, M, 2")
    sizes = check_tensors(*tokens, *pairs, ("readout", readout, "H, M, 2"))
    heads, groups = sizes["H"], sizes["G"]
    if heads % groups:
        raise ValueError(f"readout has H = {heads} heads, which is not a multiple of the G = {groups} groups of key.")


def _check_state(name: str, state, rows: int, key, value, log_decay) -> None:
    shape = (rows, key.shape[-2], 2, log_decay.shape[1], key.shape[-1] + value.shape[-1])
    check_state(name, state, shape, "G, 2, M, R + D", key.device, beside="key")
