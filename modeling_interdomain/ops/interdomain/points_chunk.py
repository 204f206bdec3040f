"""`ops/interdomain/points.py` over chunks of C tokens, with its gradients written out: that of `chunk_call.py`, with a
softmax between the two passes in the place of C.

    s = y K^T,   w = softmax(scale s + bias),   p = w V

of rows y of 2M real numbers, K and V the weights of the points as `[N, 2M]`. Behind the D numbers of an output stands
the logarithm of what the softmax sums up. Nothing is kept for the backward pass but the inputs.
"""

from collections.abc import Hashable
from typing import Any

import torch

from ..common.chunks import Segment
from ..common.custom_op import differentiable
from ..common.states import final_states
from .chunk import state_shape
from .chunk_call import AttentionCall, Gradients, Walked


class PointCall(AttentionCall):
    """One call in one real dtype.

    Attributes:
        of_keys, of_values: K and V, `[G, N, 2M]`.
        bias, scale: `[G, 1, P, 1, N]` and `[G, 1, P, 1, 1]`.
        log_total: of the rows of the last segment, `[G, N, P, C, 1]`, N its chunks.
    """

    more_outputs = 1

    def __init__(self, query, key, value, log_decay, input_matrix, keys, values, bias, scale, *others: Any):
        initial, cu_seqlens, lengths, chunk_size, ends, *kept = others
        extent = initial, cu_seqlens, lengths, "hermitian", chunk_size, ends, *kept
        self.of_keys, self.of_values = keys.flatten(2), values.flatten(2)
        count, width = self.of_keys.shape[1:]
        self.more_rows = query.shape[2] * max(0, count - width) // width  # of as many numbers as y, for scores
        super().__init__(query, key, value, log_decay, input_matrix, None, *extent)
        self.bias, self.scale = bias[:, None, :, None], scale[:, None, :, None, None]

    def by_head(self, x: torch.Tensor) -> torch.Tensor:
        """Rows `[G, N P C, W]` as `[G, N, P, C, W]`."""
        return x.view(self.groups, -1, self.heads, self.size, x.shape[-1])

    def mixed(self, y: torch.Tensor) -> torch.Tensor:
        product = self.workspace.product
        found = self.by_head(product("found", y, self.of_keys.mT))
        weights = self.workspace.tensor("point weights", tuple(found.shape), found)
        torch.addcmul(self.bias, found, self.scale, out=weights)
        self.log_total = weights.logsumexp(-1, keepdim=True)
        weights.sub_(self.log_total).exp_()
        return product("p", weights.view(self.groups, -1, weights.shape[-1]), self.of_values)

    def attend(self, rows: torch.Tensor, keys: Walked, values: Walked) -> torch.Tensor:
        output = super().attend(rows, keys, values)
        return torch.cat([output, self.log_total.view(*output.shape[:2], 1)], dim=-1)

    def gradients(self, *arguments) -> Gradients:
        return PointGradients(self, *arguments)


class PointGradients(Gradients):
    """The backward pass of a `PointCall`."""

    call: PointCall

    def __init__(self, call: PointCall, *arguments: Any):
        super().__init__(call, *arguments)
        self.of_keys, self.of_values = torch.zeros_like(call.of_keys), torch.zeros_like(call.of_values)
        self.of_bias, self.of_scale = torch.zeros_like(call.bias), torch.zeros_like(call.scale)

    def others(self) -> tuple[torch.Tensor, ...]:
        tables = (x.unflatten(-1, (-1, 2)) for x in (self.of_keys, self.of_values))
        return *tables, self.of_bias[:, 0, :, 0], self.of_scale[:, 0, :, 0, 0]

    def _through(self, segment: Segment, rows, keys: Walked, values: Walked, grad) -> None:
        call, product = self.call, self.workspace.product
        pulled, raw, y, p = call.pull(rows, *keys, keep=True)
        groups, size = call.groups, call.of_keys.shape[1]
        found = call.by_head(self.workspace.tensor("found", (groups, y.shape[1], size), y))
        weights = call.by_head(self.workspace.tensor("point weights", (groups, y.shape[1], size), y))
        of_output, of_log_total = grad.split([grad.shape[-1] - 1, 1], dim=-1)
        of_p = self._second_pass(segment, of_output.contiguous(), *values, p)
        flat = weights.view(groups, -1, size)
        self.of_values.baddbmm_(flat.mT, of_p)
        of_weights = call.by_head(product("grad weights", of_p, call.of_values.mT))
        # w (g - <w, g>) of the softmax, and w times the gradient of the logarithm of the sum.
        less = torch.linalg.vecdot(weights, of_weights)[..., None] - of_log_total.reshape(*weights.shape[:-1], 1)
        of_scores = of_weights.sub_(less).mul_(weights)
        self.of_bias += of_scores.sum((1, 3), keepdim=True)
        self.of_scale += torch.linalg.vecdot(of_scores, found).sum((1, 3))[:, None, :, None, None]
        of_found = of_scores.mul_(call.scale).view(groups, -1, size)
        self.of_keys.baddbmm_(of_found.mT, y)
        self._first_pass(segment, rows, *keys, pulled, raw, product("grad y", of_found, call.of_keys))


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, input_matrix: torch.Tensor,
    keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, scale: torch.Tensor,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None, chunk_size: int,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    tables = log_decay, input_matrix, keys, values, bias, scale
    extent = initial_state, cu_seqlens, lengths, chunk_size, output_final_state
    return _computed(None, query, key, value, *tables, *extent)


def _computed(kept: dict[Hashable, Any] | None, query, key, value, log_decay, *others):
    initial_state, cu_seqlens, *_, output_final_state = others[5:]
    shape = state_shape(query, key, value, log_decay, cu_seqlens)
    final = final_states(log_decay, shape, output_final_state, initial_state)
    call = PointCall(query, key, value, log_decay, *others, kept)
    return call.forward(final if output_final_state else None), final


def _outputs(query, key, value, log_decay, *others):
    shape = state_shape(query, key, value, log_decay, others[6]) if others[-1] else (0,)
    return query.new_empty((*query.shape[:3], value.shape[3] + 1)), log_decay.new_empty(shape)


def _backward(inputs, grads, needs):
    call = PointCall(*inputs[:-1], grads[1] is not None)
    *found, _, initial, keys, values, bias, scale = call.backward(*grads, False)
    return *found, keys, values, bias, scale, initial


point_operator = differentiable(__name__, "point_attention", _forward, _outputs, _backward, count=10)


def chunked_points(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As `point_attention`, with tensors of one real dtype; the final states are empty where they are not wanted.

    The last of the inputs are tables of earlier calls, not used where something may be differentiated or is compiled.
    """
    *given, kept = inputs
    if kept is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return point_operator(*given)
    return _computed(kept, *given)
