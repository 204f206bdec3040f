"""The short causal convolutions of projections, and their conv state: the last inputs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..ops.common.cpu import all_real, in_graph, multiplies_bf16, without_autocast
from ..ops.common.packing import Packing
from .common import is_plain, is_untouched, tokens_at_once

# How the weights of keys start: the token before, and a little of the own one. Otherwise the key of the first token,
# which has none before it, would be zero, and a key without a direction gets no gradient.
TOKEN_BEFORE = (1.0, 0.1)


class CausalConv1d(nn.Conv1d):
    """Depthwise convolution over the last `kernel_size` tokens.

    It takes the arguments of `nn.Conv1d`, and with other groups is one: adapters make modules of the class they adapt.
    """

    @torch.no_grad()
    def start_parameters(self, config) -> None:
        """Uniform, as in the library's convolutions; a kernel of one token is no convolution at all."""
        if self.kernel_size[0] == 1:
            init.ones_(self.weight)
        else:
            bound = self.kernel_size[0] ** -0.5
            init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.zeros_(self.bias)

    @torch.no_grad()
    def start_weight(self, *last: float) -> None:
        """Start all channels with these as their last weights, in the order of the tokens, and zeros before them."""
        conv_weight = torch.zeros_like(self.weight)
        conv_weight[..., -len(last) :] = conv_weight.new_tensor(last)
        init.copy_(self.weight, conv_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, W, L + kernel_size - 1]` to `[B, W, L]`."""
        if not self.groups == self.in_channels == self.out_channels:
            return super().forward(x)
        # A few shifted products keep the memory layout of the tokens; the library's convolution would transpose it.
        length = x.shape[-1] - self.kernel_size[0] + 1
        if length > 1 and multiplies_bf16(x) and not torch.compiler.is_compiling():
            return self._as_image(x)
        if length == 1:
            y = (x * self.weight[:, 0]).sum(-1, keepdim=True)
            return y if self.bias is None else y + self.bias[:, None]
        # Token by token: Inductor, which lays out what it keeps as it is written, would otherwise vectorise a loop over
        # tokens around a buffer for one of them (PyTorch 2.13 on a CPU, its issue 185702), and gradients were wrong.
        tokens = x.mT
        first, *later = self.weight[:, 0].unbind(-1)
        if is_plain(x, self.weight.dtype) and not in_graph():
            return self._by_pieces(tokens, length).mT
        y = tokens[..., :length, :] * first
        for shift, tap in enumerate(later, start=1):
            y = torch.addcmul(y, tokens[..., shift : shift + length, :], tap)
        return (y if self.bias is None else y + self.bias).mT

    def _by_pieces(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        """The same products of tokens `[B, L, W]`, a few at a time, so that sums stay in a CPU's cache."""
        y = tokens.new_empty(tokens.shape[0], length, tokens.shape[2])
        first, *later = self.weight[:, 0].T.contiguous()  # a tap whose numbers lie apart takes three times as long
        size = tokens_at_once(y)
        for start, into in zip(range(0, length, size), y.split(size, dim=1)):
            torch.mul(tokens[:, start : start + into.shape[1]], first, out=into)
            for shift, tap in enumerate(later, start=start + 1):
                into.addcmul_(tokens[:, shift : shift + into.shape[1]], tap)
            if self.bias is not None:
                into.add_(self.bias)
        return y

    def _as_image(self, x: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """In two dimensions the library's convolution reads tokens in the layout that they have."""
        with without_autocast(x.device):
            weight = self.weight.squeeze(1)[:, None, None]  # so that its gradient has its strides, see DDP
            x = x.to(weight.dtype).unsqueeze(2)
            return torch.conv2d(x, weight, self.bias, padding=(0, padding), groups=weight.shape[0]).squeeze(2)

    def from_zeros(self, x: torch.Tensor) -> torch.Tensor | None:
        """`[B, T, W]` in bfloat16 to the same, with no token before; None where `forward` must compute it.

        Padding on both sides, of which what comes after the last token is cut off, saves a copy of the tokens.
        """
        if not (is_plain(x, torch.bfloat16) and multiplies_bf16(x) and is_untouched(self, CausalConv1d, x.device)):
            return None
        return self._as_image(x.mT, self.kernel_size[0] - 1).mT[:, : x.shape[1]]


def causal_conv(
    conv: nn.Module, x: torch.Tensor, conv_state: torch.Tensor | None, kernel: int, packing: Packing | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve each row on from the inputs before it, or each packed document.

    Args:
        conv: maps `[B, W, L + kernel - 1]` to `[B, W, L]`.
        x: `[B, T, W]`, packed already.
        conv_state: `[B, W, kernel - 1]`, the inputs before the first token, a row a document where there are such; None
            means zeros.

    Returns:
        `[B, T, W]` and the new conv state; None for packed documents, which nothing continues.
    """
    before, lengths = kernel - 1, None
    if packing is not None:
        lengths = packing.lengths
        if packing.documents is not None:
            return _conv_documents(conv, x, conv_state, before, packing), None
    # A graph serves every length, so none may be compared.
    if not torch.compiler.is_compiling() and conv_state is None and lengths is None and isinstance(conv, CausalConv1d):
        found = conv.from_zeros(x) if x.shape[1] >= kernel else None
        if found is not None:
            return found, x[:, x.shape[1] - before :].mT
    if conv_state is None:
        conv_state = x.new_zeros(x.shape[0], x.shape[2], before)
    extended = torch.cat([conv_state.to(x.dtype).mT, x], dim=1).mT
    if lengths is None:
        after = extended[..., extended.shape[-1] - before :]
    else:
        last = lengths[:, None] + torch.arange(before, device=x.device)
        after = extended.gather(2, last[:, None].expand(-1, extended.shape[1], -1))
    return conv(extended).mT, after


def convolve_all(
    convs: Sequence, inputs: Sequence, conv_state: Sequence | None, kernel: int, packing: Packing | None
) -> tuple[list[torch.Tensor], list]:
    """`causal_conv` of each input that has a convolution, and the new conv state; the other inputs as they are."""
    before = iter(conv_state or [None] * len(inputs))
    outputs, after = [], []
    for x, conv in zip(inputs, convs, strict=True):
        if conv is not None:
            x, state = causal_conv(conv, x, next(before), kernel, packing)
            after.append(state)
        outputs.append(x)
    return outputs, after


def convolve_few(
    inputs: Sequence[torch.Tensor], conv_state: Sequence[torch.Tensor], conv_weight: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Several `causal_conv` of a few tokens as one: a call would cost more than what it computes.

    Args:
        inputs: `[B, T, W]` each.
        conv_state: `[B, W, kernel - 1]` each, the inputs before the first token.
        conv_weight: `[kernel, sum of all W]`, side by side; all but the conv state is computed in its dtype.

    Returns:
        `[B, T, sum of all W]` and the new conv state.
    """
    one = len(inputs) == 1
    tokens = inputs[0] if one else torch.cat(list(inputs), dim=-1)
    # Token by token, the memory layout of a `RecurrentLayer`.
    before = conv_state[0].mT if one else torch.cat([w.mT for w in conv_state], dim=-1)
    if before.dtype != tokens.dtype:
        before = before.to(tokens.dtype)
    extended = torch.cat([before, tokens], dim=1)
    count = tokens.shape[1]
    last = extended.narrow(1, count, before.shape[1]).mT
    after = [last] if one else list(last.split_with_sizes([w.shape[1] for w in conv_state], dim=1))
    if count == 1:
        return (extended * conv_weight).sum(1, keepdim=True), after
    return (extended.unfold(1, conv_weight.shape[0], 1) * conv_weight.mT).sum(-1), after


def joined_weights(*weights: torch.Tensor) -> torch.Tensor:
    """The `conv_weight` of `convolve_few` from weights of `CausalConv1d`, `[W, 1, kernel]` each."""
    return torch.cat(weights).squeeze(1).mT.contiguous()


def _conv_documents(conv: nn.Module, x, conv_state, before: int, packing: Packing) -> torch.Tensor:
    """Convolve with the conv state, or zeros, put before every document, whose outputs there are cut out again."""
    documents: Any = packing.documents
    number = packing.cu_seqlens.shape[0] - 1
    tokens = torch.arange(x.shape[1], device=x.device)
    slots = tokens + before * (documents + 1)
    spread = x.new_zeros(x.shape[1] + before * number, x.shape[2]).index_copy(0, slots, x[0])
    if conv_state is not None:
        numbers = torch.arange(number, device=x.device)
        begins = torch.searchsorted(documents, numbers) + before * numbers
        margins = (begins[:, None] + torch.arange(before, device=x.device)).flatten()
        spread = spread.index_copy(0, margins, conv_state.to(x.dtype).mT.flatten(0, 1))
    return conv(spread.T[None]).mT.index_select(1, slots - before)


def last_inputs(conv_state: torch.Tensor, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The conv state `[B, W, kernel - 1]` after the real ones (mask `[B, T]`) of `inputs` `[B, T, W]`."""
    size, whole = conv_state.shape[-1], all_real(mask)
    if whole and inputs.shape[1] >= size:
        return inputs[:, inputs.shape[1] - size :].mT
    together = torch.cat([conv_state.to(inputs.dtype).mT, inputs], dim=1)
    if whole:
        return together[:, together.shape[1] - size :].mT
    real = torch.cat([mask.new_ones(mask.shape[0], size), mask], dim=1)
    # A stable sort brings the real inputs to the end in their order.
    order = real.long().sort(dim=1, stable=True).indices[:, real.shape[1] - size :]
    return together.gather(1, order[..., None].expand(-1, -1, together.shape[2])).mT
