"""The S4D control: the recurrence of Interdomain attention read by a learned vector instead of by a query.

With a readout that does not depend on the token, the output is a causal convolution whose kernel is

    K[d] = 2 Re sum_n readout[n] lambda_n^d beta_n

for each head. Inside a chunk of C tokens that is one lower triangular Toeplitz matrix a head, and what came before
arrives through the state at the start of the chunk.
"""

from itertools import pairwise

import torch

from .op_common import as_complex, decay_powers, document_boundaries
from .op_interdomain_chunk import Document, documents_on_chunks
from .op_interdomain_step import advance_state


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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`o_t = 2 Re sum_n readout[n] X_t[n]` of the state of `interdomain_attention` (the S4D-only control of the paper).

    Args:
        key, value: `[B, T, G, R]` and `[B, T, G, D]`, the two inputs of the state.
        log_decay, input_matrix: `[G, M, 2]`.
        readout: `[H, M, 2]`, G a divisor of H; head h reads group h // (H / G).
        initial_state, output_final_state, cu_seqlens, chunk_size: as in `interdomain_attention`.

    Returns:
        output `[B, T, H, R + D]` in the dtype of `value`, and the final state `[B or S, G, 2, M, R + D]` or None.

    Raises:
        ValueError: when `cu_seqlens` does not fit, or the heads are no multiple of the groups.
    """
    if lengths is not None:
        from .op_common import rows_as_documents

        return rows_as_documents(
            lambda a, b, **kw: s4d_attention(a, b, log_decay, input_matrix, readout, chunk_size=chunk_size, **kw),
            (key, value),
            lengths,
            initial_state,
            output_final_state,
            log_decay.shape[1],
            key.shape[-1] + value.shape[-1],
        )
    groups, heads = key.shape[2], readout.shape[0]
    if heads % groups:
        raise ValueError(f"readout has H = {heads} heads, which is not a multiple of the G = {groups} groups of key.")
    boundaries = document_boundaries(cu_seqlens, key)
    chunk_size = min(chunk_size, max(end - start for start, end in pairwise(boundaries)))
    documents, slots = documents_on_chunks(boundaries, chunk_size)
    compute = torch.float64 if torch.float64 in (key.dtype, value.dtype) else torch.float32
    with torch.autocast(key.device.type, enabled=False):
        inputs = torch.cat([key.to(compute), value.to(compute)], dim=-1)
        chunks, index = _chunked(inputs, documents, slots, chunk_size)
        decay, beta, rows = (x.to(compute) for x in (log_decay, input_matrix, readout))
        state = None if initial_state is None else initial_state.to(compute)
        output, final = _convolve(chunks, decay, beta, rows, state, documents, output_final_state)
    output = output[:, : inputs.shape[1]] if index is None else output.index_select(1, index)
    return output.to(value.dtype), final


def s4d_step(
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    readout: torch.Tensor,
    *,
    state: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of `s4d_attention` with the state updated in place; key `[B, G, R]`, value `[B, G, D]`.

    Args:
        state: `[B, G, 2, M, R + D]`, overwritten.
        mask: `[B]` bool, False for a pad: the row's state stays and its output is zero.

    Returns:
        `[B, H, R + D]` in the dtype of `value`.
    """
    with torch.no_grad(), torch.autocast(key.device.type, enabled=False):
        # A state kept in a lower precision is still advanced in float32.
        working = state if state.dtype in (torch.float32, torch.float64) else state.float()
        advance_state(working, key, value, log_decay, input_matrix, mask)
        if working is not state:
            state.copy_(working)
        batch, groups, _, size, width = working.shape
        rows = _real_rows(2 * as_complex(readout.to(working.dtype)))  # [H, 2M]
        rows = rows.unflatten(0, (groups, -1))
        output = (rows @ working.view(batch, groups, 2 * size, width)).flatten(1, 2)
        if mask is not None:
            output = torch.where(mask[:, None, None], output, 0)
    return output.to(value.dtype)


def _chunked(inputs, documents: tuple[Document, ...], slots: list[int], chunk_size: int):
    """`[B, T, G, W]` as whole chunks `[B, N, C, G, W]`, zeros after every document; and the slots, if they matter."""
    length = (documents[-1].last + 1) * chunk_size
    if len(documents) == 1:
        index = None
        inputs = torch.nn.functional.pad(inputs, (0, 0, 0, 0, 0, length - inputs.shape[1]))
    else:
        index = torch.tensor(slots, device=inputs.device)
        inputs = inputs.new_zeros(1, length, *inputs.shape[2:]).index_copy(1, index, inputs)
    return inputs.unflatten(1, (-1, chunk_size)), index


def _convolve(chunks, log_decay, input_matrix, readout, initial_state, documents, output_final_state):
    batch, number, size, groups, width = chunks.shape
    powers = decay_powers(log_decay, torch.arange(size + 1, device=chunks.device))  # [G, C + 1, M]
    powers = powers.to(torch.complex128 if chunks.dtype == torch.float64 else torch.complex64)
    beta = as_complex(input_matrix)[:, None]
    rows = 2 * as_complex(readout).unflatten(0, (groups, -1))  # [G, P, M]

    tokens = chunks.permute(3, 2, 0, 1, 4).reshape(groups, size, -1)  # [G, C, B N W]
    toeplitz = _toeplitz((rows @ (powers[:, :-1] * beta).mT).real)  # [G, P, C, C]
    collect = _as_real_columns(powers[:, :-1].flip(1) * beta)  # [G, 2M, C]: lambda^(C-1-j) beta
    mixed = torch.cat([toeplitz.flatten(1, 2), collect], dim=1) @ tokens
    inside, collected = mixed.split([toeplitz.shape[1] * size, collect.shape[1]], dim=1)

    collected = collected.view(groups, 2, -1, batch, number, width)
    collected = torch.complex(collected[:, 0], collected[:, 1])  # [G, M, B, N, W]
    before = _propagate(collected, powers[:, -1, :, None, None], initial_state, documents)
    pairs = torch.cat([before.real, before.imag], dim=1).flatten(2)  # [G, 2M, B N W]
    reads = _real_rows(rows[:, :, None] * powers[:, None, 1:])  # [G, P, C, 2M]: readout lambda^(t+1)
    output = inside + reads.flatten(1, 2) @ pairs
    output = output.view(groups, -1, size, batch, number, width).permute(3, 4, 2, 0, 1, 5)
    output = output.reshape(batch, number * size, -1, width)
    final = _final_states(chunks, before, powers, beta, documents) if output_final_state else None
    return output, final


def _toeplitz(kernel: torch.Tensor) -> torch.Tensor:
    """`[..., C]` to the causal matrices `[..., C, C]` with `kernel[t - j]` at (t, j)."""
    steps = torch.arange(kernel.shape[-1], device=kernel.device)
    distance = steps[:, None] - steps
    return torch.where(distance >= 0, kernel[..., distance.clamp(min=0)], 0)


def _real_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows `[..., 2M]` whose product with `[Re X; Im X]` is `Re(x . X)`."""
    return torch.cat([x.real, -x.imag], dim=-1)


def _as_real_columns(x: torch.Tensor) -> torch.Tensor:
    """`[G, C, M]` to `[G, 2M, C]`, the real parts first."""
    return torch.cat([x.real, x.imag], dim=-1).mT


def _propagate(collected, decay, initial_state, documents: tuple[Document, ...]) -> torch.Tensor:
    """The state before every chunk, `[G, M, B, N, W]`; a document starts from its own."""
    states = []
    for number, document in enumerate(documents):
        if initial_state is None:
            state = torch.zeros_like(collected[..., 0, :])
        else:
            first = initial_state[number : number + collected.shape[2]]
            state = torch.complex(first[:, :, 0], first[:, :, 1]).permute(1, 2, 0, 3)
        for added in collected[..., document.first : document.last + 1, :].unbind(3):
            states.append(state)
            state = decay * state + added
    return torch.stack(states, dim=3)


def _final_states(chunks, before, powers, beta, documents: tuple[Document, ...]) -> torch.Tensor:
    """The state after the last token of every document, `[B or S, G, 2, M, W]`."""
    device = chunks.device
    last = torch.tensor([document.last for document in documents], device=device)
    tail = torch.tensor([document.tail for document in documents], device=device)
    exponents = tail[:, None] - 1 - torch.arange(chunks.shape[2], device=device)  # [S, C]
    weights = torch.where(exponents[..., None] >= 0, (powers * beta)[:, exponents.clamp(min=0)], 0)  # [G, S, C, M]
    inputs = chunks[:, last].permute(0, 1, 3, 2, 4)  # [B, S, G, C, W]
    added = (weights.movedim(0, 1).mT @ inputs.to(weights.dtype)).flatten(0, 1)  # [B S, G, M, W]
    start = before[..., last, :].permute(2, 3, 0, 1, 4).flatten(0, 1)
    decay = powers[:, tail].movedim(1, 0)[..., None]  # [S, G, M, 1]
    final = decay * start + added
    return torch.stack([final.real, final.imag], dim=2)
