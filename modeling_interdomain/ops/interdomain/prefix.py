"""Two backends that form the states of all tokens, a few modes at a time: FFT convolution and parallel prefix scan.

Both are in the paper's appendix A.1. They differ in how `X_t = sum_i lambda^(t-i) beta u_i` is computed for all t at
once; the readout is `ops/interdomain/readout.py`. Memory is T x block x (R + D) complex numbers.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch.utils.checkpoint import checkpoint

from ..common.decay import as_complex, decay_powers
from ..diagonal.step import grouped_coefficients
from .readout import pull_back

# Complex numbers of states that are held at once.
_NUMBERS = 1 << 22


def _fft_states(inputs: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """`sum_{i<=t} lambda^(t-i) beta u_i` by multiplying spectra.

    Args:
        inputs: real `[B, G, W, T]`.
        log_decay: `[G, m, 2]`; beta: complex `[G, m]`.

    Returns:
        Complex `[B, G, m, W, T]`.
    """
    length = inputs.shape[-1]
    size = 1 << (2 * length - 1).bit_length()  # room for the convolution not to wrap around
    steps = torch.arange(length, device=inputs.device)
    response = (decay_powers(log_decay, steps).mT * beta[..., None]).to(beta.dtype)
    spectrum = torch.fft.fft(response, n=size)
    return torch.fft.ifft(spectrum[:, :, None] * torch.fft.fft(inputs, n=size)[:, :, None])[..., :length]


def _doubling_states(inputs: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The same by parallel prefix: after step j a token has collected the 2^j tokens up to itself."""
    states = inputs[:, :, None] * beta[..., None, None]
    shift = 1
    while shift < inputs.shape[-1]:
        decay = decay_powers(log_decay, torch.tensor([shift], device=inputs.device))[:, 0]
        carried = decay.to(beta.dtype)[..., None, None] * states[..., :-shift]
        states = states + torch.nn.functional.pad(carried, (shift, 0))
        shift *= 2
    return states


STATES = {"fft": _fft_states, "associative_scan": _doubling_states}


def prefix_attention(
    query, key, value, log_decay, input_matrix, coefficient_matrix, product: str, initial_state, boundaries: list[int],
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `recurrent_attention`, with one of `STATES`.

    `boundaries` are the ends of the documents along T, starting with 0; several documents mean B = 1.
    """
    batch, groups = query.shape[0], key.shape[2]
    coefficients = grouped_coefficients(coefficient_matrix, query.dtype)
    outputs, finals = [], []
    for document, (start, end) in enumerate(pairwise(boundaries)):
        first = None if initial_state is None else as_complex(initial_state[document : document + batch].movedim(2, -1))
        tokens = query[:, start:end].unflatten(2, (groups, -1)).permute(2, 0, 3, 1, 4)  # [G, B, P, T, R]
        keys, values = (x[:, start:end].permute(0, 2, 3, 1) for x in (key, value))  # [B, G, W, T]
        width = keys.shape[2]
        read = _Blocks(STATES[backend], log_decay, as_complex(input_matrix))
        y, key_end = read.pull(tokens, keys, None if first is None else first[..., :width])
        p = pull_back(coefficients, y, product)
        output, value_end = read.push(p, values, None if first is None else first[..., width:])
        outputs.append(output.permute(1, 3, 0, 2, 4).flatten(2, 3))
        final = torch.cat([key_end, value_end], dim=-1)
        finals.append(torch.stack([final.real, final.imag], dim=2))
    return torch.cat(outputs, dim=1), torch.cat(finals)


class _Blocks:
    """Walks the modes in blocks; with gradients each block is computed again in the backward pass.

    The last states are copied out: a view would keep those of all tokens.
    """

    def __init__(self, states: Callable, log_decay: torch.Tensor, beta: torch.Tensor):
        self.states, self.log_decay, self.beta = states, log_decay, beta

    def pull(self, tokens, inputs, first):
        """`y[n] = a . X[n]` for tokens `[G, B, P, T, R]`: complex `[G, B, P, T, M]`; the last state `[B, G, M, R]`."""
        pieces = [self._run(self._pull_block, tokens, inputs, first, block) for block in self._split(inputs)]
        y, ends = zip(*pieces, strict=True)
        return torch.cat(y, dim=-1), torch.cat(ends, dim=2)

    def push(self, p, inputs, first):
        """`Re sum_n conj(p[n]) X[n]`: `[G, B, P, T, D]`; and the last state `[B, G, M, D]`."""
        total, ends = 0, []
        for block in self._split(inputs):
            output, end = self._run(self._push_block, p[..., block], inputs, first, block)
            total = total + output
            ends.append(end)
        return total, torch.cat(ends, dim=2)

    def _split(self, inputs) -> list[slice]:
        size = max(1, _NUMBERS // inputs.numel())
        return [slice(m, m + size) for m in range(0, self.beta.shape[1], size)]

    def _run(self, function, *arguments):
        if torch.is_grad_enabled():
            return checkpoint(function, *arguments, use_reentrant=False)
        return function(*arguments)

    def _all_states(self, inputs, first, block):
        log_decay, beta = self.log_decay[:, block], self.beta[:, block]
        states = self.states(inputs, log_decay, beta)
        if first is not None:
            steps = torch.arange(1, inputs.shape[-1] + 1, device=inputs.device)
            decay = decay_powers(log_decay, steps).mT.to(beta.dtype)
            states = states + decay[:, :, None] * first[:, :, block, :, None]
        return states

    def _pull_block(self, tokens, inputs, first, block):
        states = self._all_states(inputs, first, block)
        return torch.einsum("gbptr,bgmrt->gbptm", tokens.to(states.dtype), states), states[..., -1].clone()

    def _push_block(self, p, inputs, first, block):
        states = self._all_states(inputs, first, block)
        return torch.einsum("gbptm,bgmdt->gbptd", p.conj(), states).real, states[..., -1].clone()
