"""The delta rules of peers, as Transformers defines them, in fewer and larger products of matrices.

Of whole rows from an empty state alone, as the studies train and measure. Triangular systems are solved by products of
matrices, where a batched solver takes most of a step on a GPU, and only the state goes from chunk to chunk.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import l2norm

from modeling_interdomain.ops.interdomain.unit_triangular import inverses

_BLOCK = 8  # tokens between which every pair has a decay of each number of a key


class UnitSolve(torch.autograd.Function):
    """`(I + system)^-1 right` for the strictly lower part of system `[N, C, C]` and right `[N, C, W]`, float32."""

    @staticmethod
    def forward(ctx, system, right):
        inverse = inverses(system)
        found = torch.bmm(inverse, right)
        ctx.save_for_backward(inverse, found)
        return found

    @staticmethod
    def backward(ctx, of_found):
        inverse, found = ctx.saved_tensors
        of_right = torch.bmm(inverse.mT, of_found)
        return -torch.bmm(of_right, found.mT).tril(-1), of_right


def gated_delta_rule(query, key, value, g, beta, chunk_size: int = 64, **options):
    """That of Gated DeltaNet (arXiv 2412.06464): a decay a token and head, g `[B, T, H]`.

    Shapes and names are those of Transformers; the last state is not returned.
    """
    return _delta_rule(query, key, value, g[..., None], beta, chunk_size, _decayed_products, **options)


def kimi_delta_rule(query, key, value, g, beta, chunk_size: int = 32, **options):
    """That of Kimi Delta Attention (arXiv 2510.26692): a decay of each number of a key, g `[B, T, H, K]`."""
    if chunk_size % _BLOCK:
        raise ValueError(f"chunk_size must be a multiple of {_BLOCK}, the tokens of a block; got {chunk_size}.")
    return _delta_rule(query, key, value, g, beta, chunk_size, _products_by_number, **options)


def _delta_rule(query, key, value, g, beta, chunk_size: int, products: Callable, **options):
    if options.get("initial_state") is not None or options.get("output_final_state"):
        raise ValueError("Whole rows from an empty state alone are computed here: pass no state and ask for none.")
    if key.shape[2] != value.shape[2] or not options.get("use_qk_l2norm_in_kernel"):
        raise ValueError("Keys of length 1, a head of them for each head of values, are computed here: pass such.")
    dtype, (batch, length, heads, width) = query.dtype, value.shape
    query, key = (l2norm(x.float(), dim=-1, eps=1e-6) for x in (query, key))
    tokens = [query * query.shape[-1] ** -0.5, key, value.float(), g.float(), beta.float()[..., None]]
    tokens = [F.pad(x, (0, 0, 0, 0, 0, -length % chunk_size)).transpose(1, 2) for x in tokens]
    query, key, value, g, beta = (x.reshape(batch * heads, -1, chunk_size, x.shape[-1]) for x in tokens)
    log_decay = g.cumsum(2)
    system, inside = products(beta * key, query, key, log_decay)
    with torch.autocast(g.device.type, enabled=False):
        right = torch.cat([beta * value, beta * log_decay.exp() * key], -1)
        solved = UnitSolve.apply(system.float().flatten(0, 1), right.flatten(0, 1)).view_as(right)
    written, reads = solved.split([width, key.shape[-1]], -1)
    left = (log_decay[:, :, -1:] - log_decay).exp() * key
    after = log_decay[:, :, -1:].exp().mT
    state = key.new_zeros(batch * heads, key.shape[-1], width)
    states, updates = [], []
    for new, read, late, decay in zip(written.unbind(1), reads.unbind(1), left.mT.unbind(1), after.unbind(1)):
        states.append(state)
        updates.append(new - read @ state)
        state = decay * state + late @ updates[-1]
    output = inside @ torch.stack(updates, 1) + (query * log_decay.exp()) @ torch.stack(states, 1)
    return output.view(batch, heads, -1, width)[:, :, :length].transpose(1, 2).to(dtype), None


def _later(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def _decayed_products(written, query, key, log_decay):
    """`sum_k written[i, k] key[j, k] exp(log_decay[i] - log_decay[j])` for j up to i, `[..., C, C]`, and of queries."""
    between = (log_decay - log_decay.mT).masked_fill(_later(key.shape[-2], key.device), -torch.inf).exp()
    return written @ key.mT * between, query @ key.mT * between


def _products_by_number(written, query, key, log_decay):
    """As `_decayed_products`, with a `log_decay` of each number, `[..., C, K]`.

    In a block every pair of tokens has its decay. Between blocks it is that since the last token before the block of i
    times that from j to there: no factor is above 1, whatever the decays. In float32, as Transformers adds them up.
    """
    with torch.autocast(key.device.type, enabled=False):
        return _block_products(torch.stack([written, query]), key, log_decay).unbind()


def _block_products(left, key, log_decay):
    """`[2, ..., C, C]` of `left` `[2, ..., C, K]`."""
    count = key.shape[-2] // _BLOCK
    rows_of, k, g = (x.unflatten(-2, (count, _BLOCK)) for x in (left, key, log_decay))
    decay = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(_later(_BLOCK, key.device)[..., None], -torch.inf).exp()
    inside = ((decay * k.unsqueeze(-3)) @ rows_of.movedim(0, -1)).movedim(-1, 0)
    rows = []
    for n in range(count):
        first = n * _BLOCK
        parts = [inside[..., n, :, :]]
        if n:
            edge = log_decay[..., first - 1 : first, :]
            since = (g[..., n, :, :] - edge).exp() * rows_of[..., n, :, :]
            parts = [since @ ((edge - log_decay[..., :first, :]).exp() * key[..., :first, :]).mT, *parts]
        rows.append(F.pad(torch.cat(parts, -1), (0, key.shape[-2] - first - _BLOCK)))
    return torch.cat(rows, -2)
