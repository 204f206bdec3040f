"""State space duality token by token, the definition; and in chunks of plain operations, for exported graphs."""

from itertools import pairwise

import torch

from ..common.decay import finite
from ..common.packing import export_slots, zero_pads


def recurrent_ssd(
    query, key, value, log_decay, initial_state, cu_seqlens, lengths
) -> tuple[torch.Tensor, torch.Tensor]:
    """`S_t = exp(log_decay_t) S_{t-1} + value_t key_t^T`, `o_t = S_t query_t`; as `ssd_attention`, in one dtype."""
    if lengths is not None:  # a log decay of 0 keeps the state
        query, key, value, log_decay = zero_pads(lengths, query, key, value, log_decay)
    ends = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    batch, heads, groups = query.shape[0], value.shape[2], key.shape[2]
    query, key = (x.repeat_interleave(heads // groups, dim=2) for x in (query, key))
    outputs, finals = [value[:, :0]], []
    for document, (start, end) in enumerate(pairwise(ends)):
        if initial_state is None:
            state = value.new_zeros(batch, heads, value.shape[3], key.shape[3])
        else:
            state = initial_state[document : document + batch]
        for t in range(start, end):
            decay = log_decay[:, t, :, None, None].exp().to(state.dtype)
            state = decay * state + value[:, t, :, :, None] * key[:, t, :, None]
            outputs.append((state @ query[:, t, ..., None]).squeeze(-1)[:, None])
        finals.append(state)
    return torch.cat(outputs, dim=1), torch.cat(finals)


def export_ssd(
    query, key, value, log_decay, initial_state, cu_seqlens, lengths, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ssd_attention`, for any batch and length; one product over all pairs of chunks gives the states."""
    slots = export_slots(query, chunk_size, cu_seqlens)
    if lengths is not None:
        query, key, value, log_decay = zero_pads(lengths, query, key, value, log_decay)
    length, groups = query.shape[1], key.shape[2]
    real, places = slots < length, slots.clamp(max=length - 1)  # [n, C]
    query, key = (x[:, places].permute(3, 0, 1, 2, 4) for x in (query, key))  # [G, B, n, C, N]
    value = torch.where(real[..., None, None], value[:, places], 0)
    value = value.unflatten(3, (groups, -1)).permute(3, 4, 0, 1, 2, 5)  # [G, P, B, n, C, W]
    decays = torch.where(real[..., None], finite(log_decay)[:, places], 0)
    sums = decays.unflatten(3, (groups, -1)).permute(3, 4, 0, 1, 2).cumsum(-1)  # [G, P, B, n, C]

    weights = (query @ key.mT)[:, None] * _pairs(sums, value.dtype)
    until = (sums[..., -1:] - sums).exp().to(value.dtype)
    added = (value * until[..., None]).mT @ key[:, None]  # [G, P, B, n, W, N]
    if initial_state is None:
        initial_state = value.new_zeros(value.shape[2], value.shape[1] * groups, value.shape[5], key.shape[4])
    first = initial_state.unflatten(1, (groups, -1)).permute(1, 2, 0, 3, 4)[:, :, :, None]
    states = torch.cat([first, added], dim=3)
    whole = torch.cat([torch.zeros_like(sums[..., :1, 0]), sums[..., -1]], dim=-1).cumsum(-1)
    states = (_pairs(whole, value.dtype) @ states.flatten(4)).unflatten(4, (value.shape[5], -1))
    # The initial states, and those after each chunk.
    output = weights @ value + sums.exp().to(value.dtype)[..., None] * (query[:, None] @ states[:, :, :, :-1].mT)
    tokens = torch.arange(length, device=query.device)
    output = output.permute(2, 3, 4, 0, 1, 5)[:, tokens // chunk_size, tokens % chunk_size].flatten(2, 3)
    if lengths is not None:
        (output,) = zero_pads(lengths, output)
    return output, states[:, :, :, -1].permute(2, 0, 1, 3, 4).flatten(1, 2)


def _pairs(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`exp(s_i - s_j)` for j <= i, zero above, of sums `[..., C]`."""
    places = torch.cumsum(torch.ones_like(sums[(0,) * (sums.ndim - 1)]), 0)
    difference = sums[..., :, None] - sums[..., None, :]
    return torch.where(places[:, None] >= places, difference.clamp(max=0).exp().to(dtype), 0)
