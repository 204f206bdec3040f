"""The selective scan token by token, the definition; and in chunks of plain operations, for exported graphs."""

from itertools import pairwise

import torch

from ..common.packing import export_slots

_EXPORT_CHUNK = 16
_DOUBLINGS = 17  # 2^17 chunks: 2 million tokens


def recurrent_scan(query, key, value, step, rate, initial_state, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    """`h_t = exp(dt_t A) h_{t-1} + B_t (x) dt_t x_t`, `y_t = C_t . h_t`; as `selective_scan`, in one dtype."""
    ends = [0, value.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    batch = value.shape[0]
    outputs, finals = [value[:, :0]], []
    for document, (start, end) in enumerate(pairwise(ends)):
        state = value.new_zeros(batch, *rate.shape)
        if initial_state is not None:
            state = initial_state[document : document + batch]
        for t in range(start, end):
            inputs = step[:, t] * value[:, t]
            state = (step[:, t, None] * rate).exp() * state + key[:, t, :, None] * inputs[:, None]
            outputs.append(query[:, t, None] @ state)
        finals.append(state)
    return torch.cat(outputs, dim=1), torch.cat(finals)


def export_scan(query, key, value, step, rate, initial_state, cu_seqlens) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for any batch and length: all chunks side by side, and their ends by parallel prefix."""
    size, length = _EXPORT_CHUNK, value.shape[1]
    slots = export_slots(value, size, cu_seqlens)
    real, places = slots < length, slots.clamp(max=length - 1)  # [n, C]
    query, key, value = (x[:, places] for x in (query, key, value))  # [B, n, C, W]
    step = torch.where(real[..., None], step[:, places], 0)  # of 0: the state stays, and nothing comes in
    decays = (step[..., None, :] * rate).exp()
    inputs = key[..., None] * (step * value)[..., None, :]
    within, since = [inputs[:, :, 0]], [decays[:, :, 0]]
    for j in range(1, size):
        within.append(decays[:, :, j] * within[-1] + inputs[:, :, j])
        since.append(decays[:, :, j] * since[-1])
    states, powers = torch.stack(within, dim=2), torch.stack(since, dim=2)

    first = torch.zeros_like(states[:, :1, 0]) if initial_state is None else initial_state[:, None]
    ends = _running(torch.cat([first, states[:, :, -1]], 1), torch.cat([torch.ones_like(first), powers[:, :, -1]], 1))
    states = states + powers * ends[:, :-1, None]
    output = (query[..., None] * states).sum(3)
    tokens = torch.arange(length, device=value.device)
    return output[:, tokens // size, tokens % size], ends[:, -1]


def _running(states: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """`s_k <- p_k s_{k-1} + s_k` along the second axis of `[B, n, N, E]`."""
    places = torch.cumsum(torch.ones_like(states[0, :, 0, 0]), 0).long() - 1
    for doubling in range(_DOUBLINGS):
        sources = places - (1 << doubling)
        reached, sources = (sources >= 0)[:, None, None], sources.clamp(min=0)
        states = states + powers * torch.where(reached, states[:, sources], 0)
        powers = torch.where(reached, powers * powers[:, sources], 0)
    return states
