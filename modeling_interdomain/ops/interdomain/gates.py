"""Gates of time and of the write, and the delta rule: checks, steps, and what passes a gated state on.

The definition is in `ops/interdomain/naive.py`. Since the readout is linear in the query, a write gate is only a factor
of the token's key and value, `w u = w v - delta (answer to w k)`: what remains are gates of time and the delta rule.
"""

from typing import Any, NamedTuple

import torch

from ..common.checks import check_tensors
from ..common.cpu import values_at_hand
from ..common.decay import finite
from ..diagonal.step import StepTables, mix_rows, read_state, turn_state

GATED_BACKENDS = ("auto", "recurrent", "chunk", "triton")


class Gates(NamedTuple):
    """`[B, T, G]` each, or `[B, G]` in a step; None is neutral.

    Attributes:
        log_gate: at most 0, the logarithm of what is left of the state before the token, beside its own decay.
        write_gate: the factor of the token's key and value.
        delta: how much of what the state answers to the key is taken from the value, as a rule in [0, 1].
    """

    log_gate: torch.Tensor | None
    write_gate: torch.Tensor | None
    delta: torch.Tensor | None


def checked_gates(
    key: torch.Tensor, gates: tuple[Any, Any, Any], normalize: bool, backend: str, rows: str = "B, T"
) -> Gates:
    """Refuse gates that do not fit keys with these axes in front, and where there are none.

    Args:
        backend: of the operator; a step has gates in all of its own.
    """
    named = [(name, x, f"{rows}, G") for name, x in zip(Gates._fields, gates) if x is not None]
    check_tensors(("key", key, f"{rows}, G, R"), *named)
    found = Gates(*gates)
    if found.log_gate is not None and values_at_hand(found.log_gate) and bool((found.log_gate > 0).any()):
        raise ValueError(
            "log_gate must be at most 0, the logarithm of a factor up to 1, got "
            f"{found.log_gate[found.log_gate > 0].max().item():g}."
        )
    if found.delta is not None and normalize:
        raise ValueError("delta needs the plain readout: use normalize=False, or leave delta away.")
    if rows != "B" and backend not in GATED_BACKENDS:
        raise ValueError(
            f"backend {backend!r} has no gates and no delta rule: with log_gate, write_gate or delta it must be one of "
            f"{', '.join(GATED_BACKENDS)}."
        )
    if torch.compiler.is_exporting():
        raise ValueError("Exported graphs have no gates and no delta rule: export a model without them.")
    return found


def gated_step(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: StepTables,
    gates: tuple[torch.Tensor | None, ...],
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`advance_state`, then `read_state`, with `Gates` `[B, G]`, or with an axis of the one token."""
    batch, groups, *_, width = state.shape
    log_gate, write_gate, delta = gates
    decay, turn, beta = tables[:3]
    if log_gate is not None:
        gate = _in(log_gate, state.dtype).exp().view(batch, groups, 1, 1)
        decay, turn = decay * gate, turn * gate  # [B, G, M, 1]
    inputs = _in(torch.cat([key, value], dim=-1), state.dtype).view(batch, groups, 1, 1, width)
    if write_gate is not None:
        inputs.mul_(_in(write_gate, state.dtype).view(batch, groups, 1, 1, 1))
    if delta is not None:
        delta = _in(delta, state.dtype).reshape(batch, groups, 1, 1)
    if mask is not None:  # a pad decays by 1 and puts in 0
        here = mask[:, None, None, None]
        decay, turn, inputs = decay.where(here, 1), turn.where(here, 0), inputs.where(here[..., None], 0)
        delta = None if delta is None else delta.where(here, 0)
    if delta is None:
        turn_state(state, decay, turn, beta, inputs)
        return read_state(query, state, tables)
    turn_state(state, decay, turn)
    output = _read_and_correct(state, query, inputs, delta, tables)
    state.addcmul_(beta, inputs)
    return output


def _read_and_correct(state, query, inputs: torch.Tensor, delta, tables: StepTables) -> torch.Tensor:
    """Take from the values of inputs `[B, G, 1, 1, R + D]` what the state answers, and say what queries will read.

    Key and queries read the state in one product, before the token is there: it adds (query . key) beta to what the
    keys say to a query, and p beta times what it writes to the output.
    """
    (batch, groups, _, size, width), feature_dim = state.shape, query.shape[-1]
    widths = [feature_dim, width - feature_dim]
    keys, values = state.reshape(-1, 2 * size, width).split_with_sizes(widths, dim=-1)
    key, value = inputs.view(-1, 1, width).split_with_sizes(widths, dim=-1)
    query = _in(query, state.dtype).reshape(batch * groups, -1, feature_dim)
    beta = tables.beta.view(groups, 1, 2 * size)
    if batch > 1:
        beta = beta.repeat(batch, 1, 1)
    y = torch.bmm(torch.cat([key, query], dim=1), keys.mT)
    y[:, 1:].addcmul_(torch.bmm(query, key.mT), beta)
    p = mix_rows(y, batch, tables)
    found = torch.bmm(p, values)
    value.addcmul_(found[:, :1], delta.reshape(-1, 1, 1), value=-1)
    output = found.addcmul_(torch.bmm(p, beta.mT), value)  # that of the key is of no use
    return output[:, 1:].reshape(batch, -1, widths[1])


def _in(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x.to(dtype)`, without a call where there is nothing to do: in a step of one row calls are what counts."""
    return x if x.dtype == dtype else x.to(dtype)


def gated_state_after(
    state: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    *tables: torch.Tensor,
    log_gate: torch.Tensor | None = None,
    write_gate: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    coefficient_matrix: torch.Tensor | None = None,
    product: str = "bilinear",
) -> torch.Tensor:
    """`state_after` of tokens with gates.

    With `delta` what a token has written hangs on the state that it found, so the tokens are taken one after the other,
    with `coefficient_matrix` and `product` of `interdomain_attention`.

    Args:
        state, key, value, mask, log_decay, input_matrix, tables: as in `state_after`.
        log_gate, write_gate, delta: `[B, T, G]` each or None.
    """
    from .replay import state_after

    wide = torch.promote_types(state.dtype, torch.float32)
    if delta is not None:
        return _replayed(
            state.to(wide), key, value, mask, log_decay, input_matrix, coefficient_matrix, product,
            Gates(log_gate, write_gate, delta),
        )  # fmt: skip
    weight, total = write_gate, None
    if log_gate is not None:
        log_gate = torch.where(mask[..., None], finite(log_gate), 0)  # [B, T, G]
        after = log_gate.flip(1).cumsum(1).flip(1) - log_gate
        weight = after.exp() if weight is None else after.exp() * weight
        total = log_gate.sum(1)
    if weight is not None:
        key, value = (x.to(wide) * weight.to(wide)[..., None] for x in (key, value))
    if total is not None:
        state = state.to(wide) * total.exp().to(wide)[:, :, None, None, None]
    return state_after(state, key, value, mask, log_decay, input_matrix, *tables)


def _replayed(state, key, value, mask, log_decay, input_matrix, coefficient_matrix, product, gates):
    """Pads, wherever they stand, leave the state alone: log_decay and writes are of real tokens."""
    from .naive import recurrent_attention

    dtype = state.dtype
    parameters = (None if x is None else x.to(dtype) for x in (log_decay, input_matrix, coefficient_matrix))
    order = (~mask).to(torch.int8).argsort(dim=1, stable=True)  # real tokens first
    key, value, *gates = (
        None if x is None else x.to(dtype).gather(1, order.view(*order.shape, *[1] * (x.ndim - 2)).expand_as(x))
        for x in (key, value, *gates)
    )
    return recurrent_attention(key, key, value, *parameters, product, state, None, mask.sum(1), *gates)[1]


def total_gated_decay(mask: torch.Tensor, log_gate: torch.Tensor) -> torch.Tensor:
    """What `decay_gated_state` needs to know of tokens, a sum over those of the mask, so that two of them add up.

    Args:
        mask: `[B, T]` bool.
        log_gate: `[B, T, G]`.

    Returns:
        `[B, 1 + G]`: their number, and for each group the sum of its `log_gate`; in at least float32.
    """
    gates = torch.where(mask[..., None], finite(log_gate), 0).sum(1)
    both = torch.cat([mask.sum(1, keepdim=True).to(gates.dtype), gates], dim=1)
    return both.to(torch.promote_types(log_gate.dtype, torch.float32))


def decay_gated_state(state: torch.Tensor, total: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """A state `[B, G, 2, M, W]` after tokens that write nothing, of which `total_gated_decay` tells.

    For states without the delta rule: what a token writes with it hangs on the state before, so that states of pieces
    are no sums.
    """
    from ..common.spans import decay_state

    gate = total[:, 1:].exp().to(state.dtype)
    return decay_state(state, total[:, 0].detach(), log_decay) * gate[:, :, None, None, None]
