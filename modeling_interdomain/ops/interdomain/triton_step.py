"""One decoding token in two launches: the key half of the state and the pulled query, then the value half and the
output.

Both halves are split over blocks (modes, columns), because at batch 1 one block a head would leave most of a GPU idle.
Nothing is read back by the host, so that a CUDA graph can hold the step.
"""

from typing import Any, NamedTuple

import torch

from ..common.cpu import namespace
from ..common.launch import StateTouched, multiprocessors, on_device, power_of_two, tl, triton
from ..common.tiles import slots_of, state_of
from ..diagonal.triton_tiles import times


class StepGates(NamedTuple):
    """`[batch, groups]` each, as `ops/interdomain/naive.py` defines them, or None."""

    log_gate: Any
    write_gate: Any
    delta: Any


@triton.jit
def _decay(log_decay, modes, used):
    """lambda = exp(log_decay) for some modes of a group, log_decay `[M, 2]`."""
    magnitude = tl.exp(tl.load(log_decay + 2 * modes, mask=used, other=0.0).to(tl.float32))
    phase = tl.load(log_decay + 2 * modes + 1, mask=used, other=0.0).to(tl.float32)
    return magnitude * tl.cos(phase), magnitude * tl.sin(phase)


@triton.jit
def _decayed(state, log_decay, gates, row, modes, columns, first, size, width, state_width):
    """`f lambda S` for a tile of the state of one row and group."""
    mode = modes < size
    inside = mode[:, None] & (columns < width)[None, :]
    at = modes[:, None] * state_width + (first + columns)[None, :]
    s_re = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
    s_im = tl.load(state + size * state_width + at, mask=inside, other=0.0).to(tl.float32)
    d_re, d_im = _decay(log_decay, modes, mode)
    if gates.log_gate is not None:
        left = tl.exp(tl.load(gates.log_gate + row).to(tl.float32))
        d_re *= left
        d_im *= left
    return times(d_re[:, None], d_im[:, None], s_re, s_im)


@triton.jit
def _written(state, s_re, s_im, token, beta, gates, row, modes, columns, first, size, width, state_width, real_token):
    """`S + w beta x` for the same tile, stored unless the token is a pad."""
    mode = modes < size
    inside = mode[:, None] & (columns < width)[None, :]
    at = modes[:, None] * state_width + (first + columns)[None, :]
    b_re = tl.load(beta + 2 * modes, mask=mode, other=0.0).to(tl.float32)[:, None]
    b_im = tl.load(beta + 2 * modes + 1, mask=mode, other=0.0).to(tl.float32)[:, None]
    if gates.write_gate is not None:
        token *= tl.load(gates.write_gate + row).to(tl.float32)
    s_re += b_re * token[None, :]
    s_im += b_im * token[None, :]
    if real_token > 0:
        tl.store(state + at, s_re.to(state.dtype.element_ty), mask=inside)
        tl.store(state + size * state_width + at, s_im.to(state.dtype.element_ty), mask=inside)
    return s_re, s_im


@triton.jit
def step_keys(
    query, key, log_decay, beta, gates, state, mask, pulled, groups, per_group, size, feature_dim, state_width,
    BM: tl.constexpr, BR: tl.constexpr, slots=None, slot_size=0,
):  # fmt: skip
    """Advance the key half and pull the queries through it; grid [batch, groups, mode blocks].

    query `[batch, groups, per_group, feature_dim]`, key `[batch, groups, feature_dim]`, gates `StepGates`, state
    `[batch, groups, 2, size, state_width]`, mask `[batch]` or None, pulled `[batch, groups, per_group, 2, size]` in
    float32, with the delta rule one row more for the key before its token is written. With slots `[batch]` the states
    lie in those of a pool, slot_size elements from one to the next.
    """
    row = tl.program_id(0).to(tl.int64) * groups + tl.program_id(1)
    modes = tl.program_id(2) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BR)
    here, real_token = state_of(state, tl.program_id(1), groups, 2 * size * state_width, mask, slots, slot_size)
    group = tl.program_id(1) * size * 2
    used = columns < feature_dim
    s_re, s_im = _decayed(here, log_decay + group, gates, row, modes, columns, 0, size, feature_dim, state_width)
    token = tl.load(key + row * feature_dim + columns, mask=used, other=0.0).to(tl.float32)
    asked = per_group
    if gates.delta is not None:
        asked += 1
        at = pulled + (row * asked + per_group) * 2 * size + modes
        tl.store(at, tl.sum(s_re * token[None, :], 1), mask=modes < size)
        tl.store(at + size, tl.sum(s_im * token[None, :], 1), mask=modes < size)
    s_re, s_im = _written(
        here, s_re, s_im, token, beta + group, gates, row, modes, columns, 0, size, feature_dim, state_width, real_token
    )
    for head in range(per_group):
        q = tl.load(query + (row * per_group + head) * feature_dim + columns, mask=used, other=0.0)
        q = q.to(tl.float32)[None, :]
        at = pulled + (row * asked + head) * 2 * size + modes
        tl.store(at, tl.sum(s_re * q, 1), mask=modes < size)
        tl.store(at + size, tl.sum(s_im * q, 1), mask=modes < size)


@triton.jit
def _coefficients(coefficients, rows, modes, size):
    """A tile of C `[size, size, 2]` as its real and imaginary part."""
    pair = tl.arange(0, 2)
    at = rows[:, None, None] * 2 * size + modes[None, :, None] * 2 + pair[None, None, :]
    inside = (rows < size)[:, None, None] & (modes < size)[None, :, None] & (pair < 2)[None, None, :]
    return tl.split(tl.load(coefficients + at, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def _between(u_re, u_im, PRODUCT: tl.constexpr):
    """What the transposed C is applied to, see `ops.interdomain.readout.pull_back`."""
    if PRODUCT == "bilinear":
        return u_re, u_im
    elif PRODUCT == "hermitian":
        return u_re, -u_im
    else:
        return 4 * u_re, 0 * u_im


@triton.jit
def pull_back(
    y_re, y_im, coefficients, size, M: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PRODUCT: tl.constexpr
):
    """p `[M]` from y `[M]`; C is "full", "diagonal" or "identity"."""
    modes = tl.arange(0, M)
    if C == "full":
        p_re = tl.zeros([M], tl.float32)
        p_im = tl.zeros([M], tl.float32)
        for k in range(0, size, BK):
            c_re, c_im = _coefficients(coefficients, k + tl.arange(0, BK), modes, size)
            u_re, u_im = times(c_re, c_im, y_re[None, :], y_im[None, :])
            u_re, u_im = _between(tl.sum(u_re, 1), tl.sum(u_im, 1), PRODUCT)
            v_re, v_im = times(c_re, c_im, u_re[:, None], u_im[:, None])
            p_re += tl.sum(v_re, 0)
            p_im += tl.sum(v_im, 0)
    elif C == "diagonal":
        c_re = tl.load(coefficients + 2 * modes, mask=modes < size, other=0.0).to(tl.float32)
        c_im = tl.load(coefficients + 2 * modes + 1, mask=modes < size, other=0.0).to(tl.float32)
        u_re, u_im = times(c_re, c_im, y_re, y_im)
        u_re, u_im = _between(u_re, u_im, PRODUCT)
        p_re, p_im = times(c_re, c_im, u_re, u_im)
    else:
        p_re, p_im = _between(y_re, y_im, PRODUCT)
    return p_re, -p_im


@triton.jit
def _pulled(at, modes, size):
    return tl.load(at, mask=modes < size, other=0.0), tl.load(at + size, mask=modes < size, other=0.0)


@triton.jit
def step_values(
    value, log_decay, beta, coefficients, gates, state, mask, pulled, output,
    groups, per_group, size, value_dim, state_width, first,
    M: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PRODUCT: tl.constexpr,
    slots=None, slot_size=0,
):  # fmt: skip
    """Advance the value half and read it; grid [batch, groups, column blocks].

    With the delta rule what the state answers to the key is taken from the value first, gates.delta times.
    value `[batch, groups, value_dim]`; coefficients `[groups, size, size, 2]`, `[groups, size, 2]` or None, as C says;
    the value half of the state begins at column `first`; output `[batch, groups, per_group, value_dim]`, zero where the
    token is a pad.
    """
    row = tl.program_id(0).to(tl.int64) * groups + tl.program_id(1)
    modes = tl.arange(0, M)
    columns = tl.program_id(2) * BD + tl.arange(0, BD)
    here, real_token = state_of(state, tl.program_id(1), groups, 2 * size * state_width, mask, slots, slot_size)
    group = tl.program_id(1) * size * 2
    s_re, s_im = _decayed(here, log_decay + group, gates, row, modes, columns, first, size, value_dim, state_width)
    token = tl.load(value + row * value_dim + columns, mask=columns < value_dim, other=0.0).to(tl.float32)
    matrix = coefficients
    if C == "full":
        matrix += tl.program_id(1).to(tl.int64) * size * size * 2
    elif C == "diagonal":
        matrix += group
    asked = per_group
    if gates.delta is not None:
        asked += 1
        y_re, y_im = _pulled(pulled + (row * asked + per_group) * 2 * size + modes, modes, size)
        p_re, p_im = pull_back(y_re, y_im, matrix, size, M, BK, C, PRODUCT)
        answer = tl.sum(p_re[:, None] * s_re + p_im[:, None] * s_im, 0)
        token -= tl.load(gates.delta + row).to(tl.float32) * answer
    s_re, s_im = _written(
        here, s_re, s_im, token, beta + group, gates, row, modes, columns, first, size, value_dim, state_width,
        real_token,
    )  # fmt: skip
    for head in range(per_group):
        y_re, y_im = _pulled(pulled + (row * asked + head) * 2 * size + modes, modes, size)
        p_re, p_im = pull_back(y_re, y_im, matrix, size, M, BK, C, PRODUCT)
        read = tl.sum(p_re[:, None] * s_re + p_im[:, None] * s_im, 0)
        if real_token == 0:
            read = tl.zeros_like(read)
        out = output + (row * per_group + head) * value_dim + columns
        tl.store(out, read.to(output.dtype.element_ty), mask=columns < value_dim)


_step_keys, _step_values = step_keys, step_values


@torch.library.custom_op(f"{namespace(__name__)}::step", mutates_args=("state",))
def triton_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    coefficient_matrix: torch.Tensor | None,
    state: torch.Tensor,
    product: str,
    mask: torch.Tensor | None,
    wide: bool,
    slots: torch.Tensor | None = None,
    log_gate: torch.Tensor | None = None,
    write_gate: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """`advance_state` and `read_state` together; the state may be in any floating-point dtype.

    Args:
        mask: `[B]`, zero for a pad.
        wide: give the output in float32 instead of the dtype of `value`.
        slots: `[B]`: the state is a pool, each slot contiguous, see `interdomain_step`.
        log_gate, write_gate, delta: `[B, G]` each.

    Raises:
        StateTouched: when the second launch fails after the first has changed the state.
    """
    batch, heads, feature_dim = query.shape
    groups, value_dim = value.shape[1:]
    size, state_width = state.shape[3], state.shape[4]
    gates = StepGates(*(None if x is None else x.contiguous() for x in (log_gate, write_gate, delta)))
    asked = heads if delta is None else heads + groups
    pulled = query.new_empty((batch, asked, 2, size), dtype=torch.float32)
    output = value.new_empty((batch, heads, value_dim), dtype=torch.float32 if wide else value.dtype)
    kind = {None: "identity", 3: "diagonal", 4: "full"}[None if coefficient_matrix is None else coefficient_matrix.ndim]
    # One block a head where heads alone fill the device: then the pull-back is computed once, not for each block.
    many = batch * groups >= 2 * multiprocessors(query.device)
    modes, rows = power_of_two(size), 16
    columns = min(power_of_two(value_dim), 64 if many and modes <= 64 else 16)
    features = power_of_two(feature_dim)
    query, key, value, log_decay, beta = (x.contiguous() for x in (query, key, value, log_decay, input_matrix))
    coefficients = None if coefficient_matrix is None else coefficient_matrix.contiguous()
    mask = None if mask is None else mask.bool().contiguous().view(torch.uint8)
    working = state.contiguous() if slots is None else state
    pool, per_group = slots_of(state, slots), heads // groups
    with on_device(query):
        _step_keys[(batch, groups, triton.cdiv(size, rows))](
            query, key, log_decay, beta, gates, working, mask, pulled, groups, per_group, size, feature_dim,
            state_width, BM=rows, BR=features, **pool,
            num_warps=2 if features <= 64 else 4,  # with fewer its registers do not suffice
        )  # fmt: skip
        try:
            _step_values[(batch, groups, triton.cdiv(value_dim, columns))](
                value, log_decay, beta, coefficients, gates, working, mask, pulled, output, groups, per_group, size,
                value_dim, state_width, feature_dim, M=modes, BK=max(4, 1024 // modes), BD=columns, C=kind,
                PRODUCT=product, **pool, num_warps=4,
            )  # fmt: skip
        except Exception as error:
            raise StateTouched(f"the value half of a step failed after the key half was written: {error}") from error
    if working is not state:
        state.copy_(working)
    return output


@triton_step.register_fake
def _(query, key, value, log_decay, input_matrix, coefficient_matrix, state, product, mask, wide, *slots_and_gates):
    return value.new_empty(
        (query.shape[0], query.shape[1], value.shape[2]), dtype=torch.float32 if wide else value.dtype
    )
