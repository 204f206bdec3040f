"""Thousands of experts of one neuron each: found by product keys, their neurons and their outputs summed in bags.

Expert e is a row of two tables: it reads `x . down[e]` and adds a multiple of `up[e]`. With the experts ids[t, j] of
token t, both are sides of one trilinear form

    sum_tj weights[t, j] (x[t] . table[ids[t, j]])

whose three derivatives (by the weights, by x, by the table) are the three operators below. Each is therefore the other
two's gradient, none ever gathers the rows `[T, k, d]`, and all sum in a fixed order. Such experts: "Wonderful Matrices"
(arXiv 2407.16958); product keys: "Large Memory Layers with Product Keys" (arXiv 1907.05242).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ..common.checks import check_range, check_tensors, signed
from ..common.cpu import namespace
from ..common.custom_op import with_transforms
from ..common.launch import fused

# PyTorch's embedding bags, or fused kernels on a GPU, where they can run.
EXPERT_BACKENDS = ("auto", "bags", "triton")


def find_experts(query: torch.Tensor, keys: torch.Tensor, rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts whose product keys have the largest scores for a query, exact among all n1 n2 of them.

    Only the k best keys of each half matter, and of these, sorted, a pair (a, b) only if (a + 1)(b + 1) <= k, since as
    many pairs are at least as good. Experts of equal score are in no particular order.

    Args:
        query: `[B, T, 2, h, r / 2]`, two halves for each of h heads.
        keys: `[h, n1 + n2, r / 2]`; expert i n2 + j has key i of the first n1 and key j of the others.
        rows: n1.
        count: k, at most n1 and n2.

    Returns:
        scores and ids, `[B, T, h, k]`, best first. Only the scores have a gradient, which a GPU sums in a fixed order
        only under `torch.use_deterministic_algorithms`.

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name.
    """
    check_tensors(("query", query, "B, T, 2, h, r / 2"), ("keys", keys, "h, n1 + n2, r / 2"))
    _check_number("rows", rows, keys.shape[1] - 1)
    _check_number("count", count, min(rows, keys.shape[1] - rows))
    first, second = (half.transpose(1, 2) for half in query.unbind(2))  # [B, h, T, r / 2]
    first, second = first @ keys[:, :rows].mT, second @ keys[:, rows:].mT
    return best_experts(first.transpose(1, 2), second.transpose(1, 2), count)


def keys_of_inputs(projection: torch.Tensor, keys: torch.Tensor, rows: int) -> torch.Tensor:
    """The product keys multiplied by the projection of the query: `x . found[h, i] = query(x)[h] . keys[h, i]`.

    With n1 + n2 < r these score an input faster than its query would; making them pays for more than about
    `r (n1 + n2) / 2 / (r - n1 - n2)` inputs.

    Args:
        projection: `[h r, d]`, which makes the query `[2, h, r / 2]` of x.
        keys: `[h, n1 + n2, r / 2]`, of which the first `rows` = n1 belong to the first half.

    Returns:
        `[h, n1 + n2, d]`.

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name.
    """
    check_tensors(("keys", keys, "h, n1 + n2, r / 2"), ("projection", projection, "h r, d"))
    _check_number("rows", rows, keys.shape[1] - 1)
    if projection.shape[0] != 2 * keys.shape[0] * keys.shape[2]:
        raise ValueError(
            f"projection must have h r = {2 * keys.shape[0] * keys.shape[2]} rows to match keys, got "
            f"{list(projection.shape)}."
        )
    first, second = projection.view(2, keys.shape[0], keys.shape[2], -1)
    return torch.cat([keys[:, :rows] @ first, keys[:, rows:] @ second], dim=1)


def best_experts(first: torch.Tensor, second: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `find_experts`, from the scores of both halves of the product keys, `[B, T, h, n1]` and `[B, T, h, n2]`, for a
    caller whose arguments fit.
    """
    with torch.no_grad():
        sums, i, j = _best_pairs(first, second, count)
        ids = i * second.shape[-1] + j
    if not torch.is_grad_enabled():
        return sums, ids
    return first.gather(-1, i) + second.gather(-1, j), ids


def _best_pairs(first: torch.Tensor, second: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """The `count` largest sums `[..., k]`, and their places in both halves."""
    (best_first, i), (best_second, j) = first.topk(count), second.topk(count)
    if first.shape[1] == 1:  # all pairs of one token are fewer calls
        sums, chosen = (best_first[..., :, None] + best_second[..., None, :]).flatten(-2).topk(count)
        return sums, i.gather(-1, chosen // count), j.gather(-1, chosen % count)
    pairs = [(a, b) for a in range(count) for b in range(count) if (a + 1) * (b + 1) <= count]
    a, b = torch.tensor(pairs, device=first.device).unbind(-1)
    sums, chosen = (best_first[..., a] + best_second[..., b]).topk(count)
    return sums, i.gather(-1, a[chosen]), j.gather(-1, b[chosen])


def read_experts(x: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """`x[t] . table[ids[t, j]]`.

    Args:
        x: `[B, T, d]`.
        table: `[experts, d]`.
        ids: `[B, T, k]`.
        backend: "bags" (what PyTorch has for embedding bags), "triton" (fused kernels on a GPU) or "auto" ("triton"
            where it can run, otherwise "bags"). Default: "auto".

    Returns:
        `[B, T, k]`, in the wider dtype of the two.

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name. On a GPU
            the values of ids are not checked. Also when "triton" is asked for and cannot run here.
    """
    return read_rows(x, table, _checked_ids("x", x, "B, T, d", table, ids, backend), backend)


def read_rows(x: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """`read_experts` for a caller whose arguments fit."""
    dtype = torch.promote_types(x.dtype, table.dtype)
    if _is_short(ids, backend):
        return (_gathered(table, ids).to(dtype) @ x.to(dtype)[..., None])[..., 0]
    working = _working_dtype(dtype, x.device)
    found = _products(x.flatten(0, 1).to(working), table.to(working), ids.flatten(0, 1), backend)
    return found.view(ids.shape).to(dtype)


def sum_experts(weights: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """`sum_j weights[t, j] table[ids[t, j]]`.

    Args:
        weights, ids: `[B, T, k]`.
        table: `[experts, d]`.
        backend: as for `read_experts`.

    Returns:
        `[B, T, d]`, in the wider dtype of weights and table.

    Raises:
        ValueError: as `read_experts`.
    """
    return sum_rows(weights, table, _checked_ids("weights", weights, "B, T, k", table, ids, backend), backend)


def sum_rows(weights: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """`sum_experts` for a caller whose arguments fit."""
    dtype = torch.promote_types(weights.dtype, table.dtype)
    if _is_short(ids, backend):
        return (weights.to(dtype)[..., None, :] @ _gathered(table, ids).to(dtype))[..., 0, :]
    working = _working_dtype(dtype, table.device)
    found = _bags(weights.flatten(0, 1).to(working), table.to(working), ids.flatten(0, 1), backend)
    return found.unflatten(0, ids.shape[:2]).to(dtype)


def _check_number(name: str, number: int, most: int) -> None:
    if not isinstance(number, int) or not 1 <= number <= most:
        raise ValueError(f"{name} must be an integer from 1 to {most} for these keys, got {number!r}.")


def _checked_ids(name: str, x: torch.Tensor, axes: str, table: torch.Tensor, ids: torch.Tensor, backend: str):
    """Check all arguments but the values of the ids, which the operators below check; the ids."""
    if backend not in EXPERT_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(EXPERT_BACKENDS)}, got {backend!r}.")
    check_tensors((name, x, axes), ("table", table, "experts, d"), ("ids", ids, "B, T, k"), integers=("ids",))
    return signed(ids)


def _gathered(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows of a few ids; gathering them raises where one is out of range."""
    try:
        return F.embedding(ids, table)
    except IndexError:
        check_range("ids", ids, 0, len(table) - 1)
        raise


def _is_short(ids: torch.Tensor, backend: str) -> bool:
    """Whether to gather the rows: for one token they are few, and exported graphs have no operators of ours."""
    kernels = backend == "triton" or (backend == "auto" and ids.device.type != "cpu")
    return (ids.shape[1] == 1 and not kernels) or torch.compiler.is_exporting()


def _working_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """At least float32 on a CPU, where sums in a lower precision would be rounded at every term."""
    return torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype


_NAMESPACE = namespace(__name__)


@torch.library.custom_op(f"{_NAMESPACE}::products", mutates_args=())
def _products(x: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, backend: str) -> torch.Tensor:
    """By the weights: `x[t] . table[ids[t, j]]`, `[T, k]`."""
    check_range("ids", ids, 0, len(table) - 1)

    def run():
        from .triton import triton_products

        return triton_products(x, table, ids)

    found = fused(backend, (x, table), 1, run, "products with experts")
    if found is not None:
        return found
    tokens, count = ids.shape
    owners = torch.arange(tokens, device=ids.device).repeat_interleave(count)
    starts = torch.arange(0, ids.numel(), count, device=ids.device)
    # The gradient of the weights of bags is these products.
    found = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        x.contiguous(), table.contiguous(), ids.flatten(), starts, owners, 0
    )
    return found.view(tokens, count)


@torch.library.custom_op(f"{_NAMESPACE}::bags", mutates_args=())
def _bags(weights: torch.Tensor, table: torch.Tensor, ids: torch.Tensor, backend: str) -> torch.Tensor:
    """By x: `sum_j weights[t, j] table[ids[t, j]]`, `[T, d]`."""
    check_range("ids", ids, 0, len(table) - 1)
    found = _fused_bags(backend, weights, table, ids)
    if found is not None:
        return found
    return _sums(ids.contiguous(), table, weights.contiguous())


def _sums(ids: torch.Tensor, table: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor | None = None):
    """PyTorch's bags; detached, because for a table with a gradient they prepare one, which is not needed here."""
    return F.embedding_bag(ids, table.detach(), starts, mode="sum", per_sample_weights=weights)


def _fused_bags(backend: str, weights: torch.Tensor, table: torch.Tensor, *entries: torch.Tensor):
    def run():
        from .triton import triton_bags

        return triton_bags(weights, table, *entries)

    return fused(backend, (weights, table), 1, run, "sums of experts")


@torch.library.custom_op(f"{_NAMESPACE}::transposed_bags", mutates_args=())
def _transposed_bags(
    weights: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, experts: int, backend: str
) -> torch.Tensor:
    """By the table: of every expert the sum of `weights[t, j] x[t]` over its tokens, in their order, `[experts, d]`."""
    flat = ids.flatten()
    chosen, order = flat.sort(stable=True)
    starts = torch.searchsorted(chosen, torch.arange(experts + 1, device=flat.device))
    owners, weights = order // ids.shape[1], weights.flatten()[order]
    found = _fused_bags(backend, weights, x, owners, starts)
    if found is not None:
        return found
    return _sums(owners, x.contiguous(), weights, starts[:-1])


@_products.register_fake
def _(x, table, ids, backend):
    return x.new_empty(ids.shape)


@_bags.register_fake
def _(weights, table, ids, backend):
    return table.new_empty(ids.shape[0], table.shape[1])


@_transposed_bags.register_fake
def _(weights, x, ids, experts, backend):
    return x.new_empty(experts, x.shape[1])


def _differentiable(operator, of_first: Callable, of_second: Callable) -> Any:
    """The operator with the gradients of two inputs: functions of the output's, the three tensors and the backend."""

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3])
        ctx.backend = inputs[-1]

    def differentiate(ctx, grad):
        first, second, *others = ctx.needs_input_grad
        given = grad, *ctx.saved_tensors, ctx.backend
        found = of_first(*given) if first else None, of_second(*given) if second else None
        return *found, *[None] * len(others)

    return with_transforms(operator, differentiate, keep)


_products = _differentiable(
    _products,
    lambda grad, x, table, ids, backend: _bags(grad, table, ids, backend),
    lambda grad, x, table, ids, backend: _transposed_bags(grad, x, ids, table.shape[0], backend),
)
_bags = _differentiable(
    _bags,
    lambda grad, weights, table, ids, backend: _products(grad, table, ids, backend),
    lambda grad, weights, table, ids, backend: _transposed_bags(weights, grad, ids, table.shape[0], backend),
)
_transposed_bags = _differentiable(
    _transposed_bags,
    lambda grad, weights, x, ids, backend: _products(x, grad, ids, backend),
    lambda grad, weights, x, ids, backend: _bags(weights, grad, ids, backend),
)
