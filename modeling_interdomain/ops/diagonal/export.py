"""The chunked operators for graphs that leave PyTorch (`torch.export`, ONNX): real arithmetic and plain tensor
operations alone, whatever the batch and the length.

The mathematics is that of `ops/interdomain/chunk_call.py` and `ops/s4d/chunk.py`. Lengths are handled with indices, and
the states before the chunks come without a loop over them: one after the other within blocks of a few chunks, in all
blocks at once, and across blocks by parallel prefix, with one block more than needed, as there is one chunk more
(`export_slots`). Complex numbers are interleaved pairs, 2M real ones.
"""

import math
from collections.abc import Callable, Sequence

import torch

from ..common.decay import by_age, finite
from ..common.packing import export_slots
from .mixing import mixing_matrix

_BLOCK = 8  # chunks
_DOUBLINGS = 14  # 2^14 blocks: 8 million tokens in chunks of 64


def export_attention(
    query, key, value, log_decay, input_matrix, coefficient_matrix, product: str, initial_state, cu_seqlens, lengths,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `chunk_attention`, with the final states."""
    mixing = mixing_matrix(coefficient_matrix, product, key.shape[2], log_decay.shape[1], key)[:, None, None, None]
    parameters, extent = (log_decay, input_matrix), (initial_state, cu_seqlens, lengths, chunk_size)
    output, final = export_passes(lambda y: [y @ mixing], query, key, value, *parameters, *extent)
    return output, final


def export_passes(
    between: Callable[[torch.Tensor], Sequence[torch.Tensor]], query, key, value, log_decay, input_matrix,
    initial_state, cu_seqlens, lengths, chunk_size: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The two passes of the readout `o = Re(sum_m conj(p_m) X^v_m)`, p made of the y = X^k q `between` them.

    `between` is called with `[G, P, B, N, C, 2M]` and gives p of the same shape, and what else is to be returned of
    every token, between output and final states, `[G, P, B, N, C, W]`.
    """
    groups, width = key.shape[2], key.shape[3]
    inputs = torch.cat([key, value], dim=-1)
    states = _ChunkStates(inputs, log_decay, input_matrix, initial_state, cu_seqlens, lengths, chunk_size)
    keys, values = states.inputs[:, None, ..., :width], states.inputs[:, None, ..., width:]
    key_states, value_states = states.before[:, None, ..., :width, :], states.before[:, None, ..., width:, :]
    rows = states.cut(query).unflatten(3, (groups, -1)).permute(3, 4, 0, 1, 2, 5)  # [G, P, B, N, C, R]
    by_token = _powers(log_decay, torch.arange(1, chunk_size + 1, device=key.device), key.dtype)
    table, by_token = (x[:, None, None, None] for x in (states.table, by_token))

    y = _times(rows @ key_states, by_token) + _skew(rows @ keys.mT) @ table
    p, *more = between(y)
    reader = _times(p, by_token * by_token.new_tensor([1.0, -1.0]))
    output = reader @ value_states.mT + _unskew(p @ table.mT) @ values
    return *(states.join(x) for x in (output, *more)), states.final()


def export_s4d(
    inputs, log_decay, input_matrix, readout, initial_state, cu_seqlens, lengths, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `chunk_s4d`, with the final states."""
    states = _ChunkStates(inputs, log_decay, input_matrix, initial_state, cu_seqlens, lengths, chunk_size)
    steps = torch.arange(chunk_size, device=inputs.device)
    rows = 2 * readout.unflatten(0, (inputs.shape[2], -1))  # [G, P, M, 2]
    conjugate = rows * rows.new_tensor([1.0, -1.0])
    kernel = conjugate.flatten(2) @ states.table.flip(1).mT  # [G, P, C]
    toeplitz = by_age(kernel[:, :, None].expand(-1, -1, chunk_size, -1))
    by_token = _powers(log_decay, steps + 1, inputs.dtype)[:, None]  # [G, 1, C, M, 2]
    reads = _times(rows[:, :, None].flatten(3), by_token) * inputs.new_tensor([1.0, -1.0]).repeat(rows.shape[2])
    toeplitz, reads = toeplitz[:, :, None, None], reads[:, :, None, None]
    output = toeplitz @ states.inputs[:, None] + reads @ states.before[:, None].mT
    return states.join(output), states.final()


class _ChunkStates:
    """Tokens in chunks and the states around them.

    Attributes:
        inputs: `[G, B, N, C, W]`, zeros at the pads.
        table: `[G, C, 2M]`, lambda^(C-1-j) beta at row j.
        before: `[G, B, N, W, 2M]`, the states before the chunks.
    """

    def __init__(self, inputs, log_decay, input_matrix, initial_state, cu_seqlens, lengths, chunk_size):
        self.length, self.size, self.tokens, self.log_decay = inputs.shape[1], chunk_size, inputs, log_decay
        device = inputs.device
        self.slots = export_slots(inputs, chunk_size, cu_seqlens)  # [N, C]
        self.chunks = self.slots.shape[0]
        if lengths is None:
            lengths = torch.zeros_like(inputs[:, 0, 0, 0], dtype=torch.long) + self.length
        self.lengths = lengths.long()
        real = self.slots < self.lengths[:, None, None]
        self.inputs = torch.where(real[..., None, None], self.cut(inputs), 0).permute(3, 0, 1, 2, 4)
        powers = _powers(log_decay, torch.arange(chunk_size, device=device).flip(0), inputs.dtype)
        self.table = _times(input_matrix[:, None].flatten(2), powers)
        if initial_state is None:
            initial_state = inputs.new_zeros(inputs.shape[0], inputs.shape[2], 2, log_decay.shape[1], inputs.shape[3])
        self.before = self._before(initial_state.permute(1, 0, 4, 3, 2).flatten(3))

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, A, W]` as `[B, N, C, A, W]`, filled up with the last token."""
        return x[:, self.slots.clamp(max=self.length - 1)]

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """`[G, P, B, N, C, W]` as `[B, T, G P, W]`, zeros at the pads."""
        tokens = torch.arange(self.length, device=x.device)
        x = x.permute(2, 3, 4, 0, 1, 5)[:, tokens // self.size, tokens % self.size].flatten(2, 3)
        return torch.where((tokens < self.lengths[:, None])[..., None, None], x, 0)

    def _across(self, chunks: list[int]) -> tuple[torch.Tensor, ...]:
        """lambda^C to some powers, `[G, 1, 1, 1, M, 2]` each."""
        exponents = torch.tensor(chunks, device=self.tokens.device) * self.size
        powers = _powers(self.log_decay, exponents, self.tokens.dtype)
        return powers[:, :, None, None, None].unbind(1)

    def _before(self, initial: torch.Tensor) -> torch.Tensor:
        """The states before the chunks, from the initial ones `[G, B, W, 2M]`."""
        added = self.inputs.mT @ self.table[:, None, None]  # [G, B, N, W, 2M]
        blocks = (self.chunks + _BLOCK - 1) // _BLOCK + 1
        chunks = torch.arange(blocks, device=initial.device)[:, None] * _BLOCK
        chunks = chunks + torch.arange(_BLOCK, device=initial.device)
        added = added[:, :, chunks.clamp(max=self.chunks - 1)]  # [G, B, blocks, _BLOCK, W, 2M]
        across = self._across(list(range(_BLOCK)))
        within = [torch.zeros_like(added[:, :, :, 0])]
        for x in added.unbind(3):
            within.append(x + _times(within[-1], across[1]))
        starts = self._doubled(torch.cat([initial[:, :, None], within.pop()], dim=2), blocks)
        before = [_times(starts, decay) + x for decay, x in zip(across, within, strict=True)]
        chunks = torch.arange(self.chunks, device=initial.device)
        return torch.stack(before, dim=3)[:, :, chunks // _BLOCK, chunks % _BLOCK]

    def _doubled(self, states: torch.Tensor, blocks: int) -> torch.Tensor:
        """The states before the blocks, from the initial states and, behind them, what each block adds on its own."""
        numbers = torch.arange(blocks, device=states.device)
        states = states[:, :, numbers]
        reaches = [2**doubling for doubling in range(_DOUBLINGS)]
        for reach, decay in zip(reaches, self._across([reach * _BLOCK for reach in reaches]), strict=True):
            source = numbers - reach
            earlier = torch.where((source >= 0)[:, None, None], states[:, :, source.clamp(min=0)], 0)
            states = states + _times(earlier, decay)
        return states

    def final(self) -> torch.Tensor:
        """The states after the last tokens, `[B, G, 2, M, W]`."""
        rows = torch.arange(self.tokens.shape[0], device=self.tokens.device)
        last = (self.lengths - 1).clamp(min=0) // self.size
        tail = self.lengths - last * self.size
        # The last tokens moved to the right end of a chunk, where the table has what they need.
        slots = torch.arange(self.size, device=rows.device) - self.size
        inputs = self.tokens[rows[:, None], (self.lengths[:, None] + slots).clamp(min=0)]  # [B, C, G, W]
        inputs = torch.where((slots >= -tail[:, None])[..., None, None], inputs, 0)
        decay = _powers(self.log_decay, tail, inputs.dtype)[:, :, None]  # [G, B, 1, M, 2]
        state = _times(self.before[:, rows, last], decay) + inputs.permute(2, 0, 3, 1) @ self.table[:, None]
        return state.unflatten(-1, (-1, 2)).permute(1, 0, 4, 3, 2)


def _powers(log_decay: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`lambda ** exponents` as pairs `[G, E, M, 2]`; angles are reduced to one turn in float64."""
    exponents = exponents.to(torch.float64)[:, None]
    rate, phase = log_decay[:, None].unbind(-1)
    turns = phase.to(torch.float64) * exponents * (0.5 / math.pi)
    angle = (2 * math.pi * (turns - torch.round(turns))).to(dtype)
    size = torch.exp((finite(rate) * exponents).to(dtype))
    return torch.stack([size * torch.cos(angle), size * torch.sin(angle)], dim=-1)


def _times(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Interleaved pairs `[..., 2M]` times complex factors `[..., M, 2]`."""
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    other_real, other_imaginary = factors.unbind(-1)
    return torch.stack(
        [real * other_real - imaginary * other_imaginary, real * other_imaginary + imaginary * other_real], dim=-1
    ).flatten(-2)


def _skew(x: torch.Tensor) -> torch.Tensor:
    """`out[..., t, C-1-d] = x[..., t, t-d]`, see `ops/interdomain/chunk_call.py`."""
    size = x.shape[-1]
    rows = torch.nn.functional.pad(x, (size, 0)).flatten(-2)
    return torch.nn.functional.pad(rows[..., 1:], (0, size + 1)).unflatten(-1, (size, -1))[..., :size]


def _unskew(x: torch.Tensor) -> torch.Tensor:
    """`out[..., t, i] = x[..., t, C-1-(t-i)]` for i <= t, zero above the diagonal."""
    size = x.shape[-1]
    rows = torch.nn.functional.pad(x, (0, size + 1)).flatten(-2)[..., : 2 * size * size - 1]
    return torch.nn.functional.pad(rows, (1, 0)).unflatten(-1, (size, -1))[..., size:]
