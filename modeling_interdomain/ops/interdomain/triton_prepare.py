"""Everything between the projections and the operator in one kernel, and its gradients in another.

    query, key   causal convolution, rotary embedding, SiLU, l2 norm (eq. 10), rotary embedding
    key, value   RMSNorm and bias (eq. 12)

A program walks a run of tokens for a few heads with the last inputs of the convolution in registers: each number is
read from memory once and written once. Backward walks the other way and keeps the last gradients instead. Pads are not
read; at them outputs and gradients are zero.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..common.custom_op import differentiable
from ..common.launch import contiguous, on_device, power_of_two, tl, triton
from ..common.packing import state_rows

# Tokens that a program walks, and numbers of a token that it holds.
_RUN, _TILE = 64, 512


class Projection(NamedTuple):
    """One of query, key and value: `[tokens, heads, width]` in and out, with its convolution and its norm.

    Values have neither conv_weight (`[heads, width, KERNEL]`) nor conv state (`[rows, heads, width, KERNEL - 1]`, read
    from `window`, written to `new_window`). Conv state, weight and bias of the norm may also be None elsewhere.
    """

    x: Any
    out: Any
    conv_weight: Any = None
    window: Any = None
    new_window: Any = None
    weight: Any = None
    bias: Any = None


class ProjectionBackward(NamedTuple):
    """The backward pass of a `Projection`: reads `grad_out`; writes `grad_x` and, for each run of tokens, a row of
    `partial` with its sums for the gradients of conv_weight `[heads, width, KERNEL]`, weight and bias `[heads, width]`.
    The rows of the three projections lie side by side.
    """

    x: Any
    grad_out: Any
    grad_x: Any
    partial: Any
    conv_weight: Any = None
    window: Any = None
    weight: Any = None


class Rotation(NamedTuple):
    """Cosines and sines `[1 or B, T, dim]`, or None; they repeat after `period` tokens."""

    cos: Any
    sin: Any


class Rows(NamedTuple):
    """The document of each token (`ids`), and where documents start and end. Padded rows have only `ends`, full ones
    nothing.
    """

    ids: Any = None
    starts: Any = None
    ends: Any = None


class Block(NamedTuple):
    """The width of a head, and how many heads and columns a program holds."""

    WIDTH: int
    BH: int
    BW: int


class Rope(NamedTuple):
    """Where the rotation is applied ("before" or "after" the feature map, or "none") and to how many columns."""

    WHERE: str
    DIM: int


@triton.jit
def _bounds(token, row_length, rows):
    """The row or document of a token, its start and its end; pads lie behind the end."""
    if rows.ids is not None:
        row = tl.load(rows.ids + token).to(tl.int64)
        start = tl.load(rows.starts + row).to(tl.int64)
        end = tl.load(rows.ends + row).to(tl.int64)
    else:
        row = token // row_length
        start = row * row_length
        end = tl.load(rows.ends + row).to(tl.int64) if rows.ends is not None else start + row_length
    return row, start, end


@triton.jit
def _at_least(a, b, columns):
    """`a >= b` of two numbers as a row `[1, columns]`: the interpreter cannot broadcast a boolean."""
    return (columns * 0 + a >= b)[None, :]


@triton.jit
def _input(projection, token, back, start, row, at, inside, columns, total, KERNEL: tl.constexpr):
    """The input of a token's convolution `back` tokens before it: a token, one of the conv state, or zero."""
    source = token - back
    read = inside & _at_least(source, start, columns)
    value = tl.load(projection.x + source * total + at, mask=read, other=0.0).to(tl.float32)
    if projection.window is not None:
        slot = projection.window + (row * total + at) * (KERNEL - 1) + (KERNEL - 1 + source - start)
        value += tl.load(slot, mask=inside & _at_least(start, source + 1, columns), other=0.0).to(tl.float32)
    return value


@triton.jit
def _tap(projection, at, mask, back, KERNEL: tl.constexpr):
    """The weight for the input `back` tokens before."""
    return tl.load(projection.conv_weight + at * KERNEL + KERNEL - 1 - back, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _angles(rotation, token, period, columns, DIM: tl.constexpr):
    """Cosines, and sines with the sign that the rotation gives them; columns beyond the rotated ones stay."""
    rotated = columns < DIM
    at = (token % period) * DIM + columns
    c = tl.load(rotation.cos + at, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(rotation.sin + at, mask=rotated, other=0.0).to(tl.float32)
    return c[None, :], tl.where(columns < DIM // 2, -s, s)[None, :]


@triton.jit
def _partners(columns, DIM: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """The column with which each one is rotated."""
    half = DIM // 2
    partner = tl.where(columns < half, columns + half, columns - half)
    partner = tl.where(columns < DIM, partner, columns)
    return tl.broadcast_to(partner[None, :], [BH, BW])


@triton.jit
def _rotate(x, c, s, partners):
    return x * c + tl.gather(x, partners, 1) * s


@triton.jit
def _rotate_back(x, c, s, partners):
    return x * c + tl.gather(x * s, partners, 1)


@triton.jit
def _normalise(u):
    """SiLU(u) over its l2 norm; the norm too."""
    s = u * tl.sigmoid(u)
    norm = tl.maximum(tl.sqrt(tl.sum(s * s, 1)), 1e-12)[:, None]
    return s / norm, norm


@triton.jit
def _walk(
    projection, rotation, rows, first, tokens, row_length, period, head, heads, eps,
    BLOCK: tl.constexpr, RUN: tl.constexpr, KERNEL: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """RUN tokens from `first` for BLOCK.BH heads from `head`. KERNEL 0: neither convolution nor feature map."""
    WIDTH: tl.constexpr = BLOCK.WIDTH
    BH: tl.constexpr = BLOCK.BH
    BW: tl.constexpr = BLOCK.BW
    numbers = head + tl.arange(0, BH)
    columns = tl.arange(0, BW)
    inside = (numbers < heads)[:, None] & (columns < WIDTH)[None, :]
    at = numbers[:, None] * WIDTH + columns[None, :]
    total = heads * WIDTH
    if KERNEL > 0 and ROPE.WHERE != "none":
        partners = _partners(columns, ROPE.DIM, BH, BW)
    if projection.weight is not None:
        w = tl.load(projection.weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
        b = tl.load(projection.bias + at, mask=inside, other=0.0).to(tl.float32)
    for done in range(0, tl.minimum(RUN, tokens - first)):
        token = first + done  # in 64 bits
        row, start, end = _bounds(token, row_length, rows)
        here = inside
        if rows.ends is not None:
            here = inside & _at_least(end, token + 1, columns)
        if KERNEL == 0:
            f = tl.load(projection.x + token * total + at, mask=here, other=0.0).to(tl.float32)
        else:
            u = tl.zeros([BH, BW], tl.float32)
            for back in tl.static_range(KERNEL):
                value = _input(projection, token, back, start, row, at, here, columns, total, KERNEL)
                u += value * _tap(projection, at, inside, back, KERNEL)
                if projection.new_window is not None and back < KERNEL - 1:
                    slot = projection.new_window + (row * total + at) * (KERNEL - 1) + KERNEL - 2 - back
                    value = value.to(projection.new_window.dtype.element_ty)
                    tl.store(slot, value, mask=here & _at_least(token + 1, end, columns))
            if ROPE.WHERE == "before":
                c, s = _angles(rotation, token, period, columns, ROPE.DIM)
                u = _rotate(u, c, s, partners)
            f, _ = _normalise(u)
            if ROPE.WHERE == "after":
                c, s = _angles(rotation, token, period, columns, ROPE.DIM)
                f = _rotate(f, c, s, partners)
        if projection.weight is not None:
            f = w * f * tl.rsqrt(tl.sum(f * f, 1)[:, None] / WIDTH + eps) + b
            f = tl.where(here, f, 0.0)
        tl.store(projection.out + token * total + at, f.to(projection.out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "row_length", "period"])
def prepare(
    query, key, value, rotation, rows, tokens, row_length, period, heads, groups, eps,
    KEYS: tl.constexpr, VALUES: tl.constexpr, RUN: tl.constexpr, KERNEL: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Grid [runs of tokens, blocks of query heads, then of keys, then of values].

    query, key, value: `Projection`; KEYS: the `Block` of queries and keys, VALUES: that of values.
    """
    first = tl.program_id(0).to(tl.int64) * RUN
    block = tl.program_id(1)
    query_blocks = tl.cdiv(heads, KEYS.BH)
    key_blocks = tl.cdiv(groups, KEYS.BH)
    if block < query_blocks:
        head = block * KEYS.BH
        _walk(query, rotation, rows, first, tokens, row_length, period, head, heads, eps, KEYS, RUN, KERNEL, ROPE)
    elif block < query_blocks + key_blocks:
        head = (block - query_blocks) * KEYS.BH
        _walk(key, rotation, rows, first, tokens, row_length, period, head, groups, eps, KEYS, RUN, KERNEL, ROPE)
    else:
        head = (block - query_blocks - key_blocks) * VALUES.BH
        _walk(value, rotation, rows, first, tokens, row_length, period, head, groups, eps, VALUES, RUN, 0, ROPE)


@triton.jit
def _walk_back(
    projection, rotation, rows, run, tokens, row_length, period, head, heads, eps, sums,
    BLOCK: tl.constexpr, RUN: tl.constexpr, KERNEL: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """The adjoint of `_walk` for the tokens of a run."""
    WIDTH: tl.constexpr = BLOCK.WIDTH
    BH: tl.constexpr = BLOCK.BH
    BW: tl.constexpr = BLOCK.BW
    numbers = head + tl.arange(0, BH)
    columns = tl.arange(0, BW)
    inside = (numbers < heads)[:, None] & (columns < WIDTH)[None, :]
    at = numbers[:, None] * WIDTH + columns[None, :]
    total = heads * WIDTH
    partial = projection.partial + run * sums
    first = run * RUN
    stop = tl.minimum(first + RUN, tokens)
    if KERNEL > 0 and ROPE.WHERE != "none":
        partners = _partners(columns, ROPE.DIM, BH, BW)
    if projection.weight is not None:
        w = tl.load(projection.weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    zero = tl.zeros([BH, BW], tl.float32)
    d_weight = zero
    d_bias = zero
    # Gradients of the convolution's outputs one, two and three tokens later, and of its weights; unused ones stay zero.
    # Those that move on to the next name need a beginning of their own: of names for one value Triton takes `g_3 = g_2`
    # for no change, and the loop would not carry it.
    g_1 = tl.zeros([BH, BW], tl.float32)
    g_2 = tl.zeros([BH, BW], tl.float32)
    g_3 = tl.zeros([BH, BW], tl.float32)
    t_0 = zero
    t_1 = zero
    t_2 = zero
    t_3 = zero
    last = tl.minimum(stop + (KERNEL - 1 if KERNEL > 0 else 0), tokens)
    for back_token in range(first, last):
        token = last - 1 - (back_token - first)
        mine = token < stop
        row, start, end = _bounds(token, row_length, rows)
        here = inside
        if rows.ends is not None:
            here = inside & _at_least(end, token + 1, columns)
        d = tl.load(projection.grad_out + token * total + at, mask=here, other=0.0).to(tl.float32)
        if KERNEL == 0:
            f = tl.load(projection.x + token * total + at, mask=here, other=0.0).to(tl.float32)
        else:
            x_0 = _input(projection, token, 0, start, row, at, here, columns, total, KERNEL)
            u = x_0 * _tap(projection, at, inside, 0, KERNEL)
            if KERNEL > 1:
                x_1 = _input(projection, token, 1, start, row, at, here, columns, total, KERNEL)
                u += x_1 * _tap(projection, at, inside, 1, KERNEL)
            if KERNEL > 2:
                x_2 = _input(projection, token, 2, start, row, at, here, columns, total, KERNEL)
                u += x_2 * _tap(projection, at, inside, 2, KERNEL)
            if KERNEL > 3:
                x_3 = _input(projection, token, 3, start, row, at, here, columns, total, KERNEL)
                u += x_3 * _tap(projection, at, inside, 3, KERNEL)
            if ROPE.WHERE != "none":
                c, s = _angles(rotation, token, period, columns, ROPE.DIM)
            if ROPE.WHERE == "before":
                u = _rotate(u, c, s, partners)
            f, norm = _normalise(u)
            unit = f
            if ROPE.WHERE == "after":
                f = _rotate(f, c, s, partners)
        if projection.weight is not None:
            scale = tl.rsqrt(tl.sum(f * f, 1)[:, None] / WIDTH + eps)
            n = f * scale
            if mine:
                d_weight += d * n
                d_bias += d
            d = d * w
            d = scale * (d - n * (tl.sum(d * n, 1)[:, None] / WIDTH))
        if KERNEL > 0:
            if ROPE.WHERE == "after":
                d = _rotate_back(d, c, s, partners)
            d = (d - unit * tl.sum(d * unit, 1)[:, None]) / norm
            gate = tl.sigmoid(u)
            d = d * gate * (1 + u * (1 - gate))
            if ROPE.WHERE == "before":
                d = _rotate_back(d, c, s, partners)
            g_0 = tl.where(inside, d, 0.0)
            d = g_0 * _tap(projection, at, inside, 0, KERNEL)
            # A later token of the same row or document read this one through an older tap.
            if KERNEL > 1:
                d += g_1 * _tap(projection, at, inside & _at_least(end, token + 2, columns), 1, KERNEL)
            if KERNEL > 2:
                d += g_2 * _tap(projection, at, inside & _at_least(end, token + 3, columns), 2, KERNEL)
            if KERNEL > 3:
                d += g_3 * _tap(projection, at, inside & _at_least(end, token + 4, columns), 3, KERNEL)
            g_3 = g_2
            g_2 = g_1
            g_1 = g_0
            if mine:
                t_0 += g_0 * x_0
                if KERNEL > 1:
                    t_1 += g_0 * x_1
                if KERNEL > 2:
                    t_2 += g_0 * x_2
                if KERNEL > 3:
                    t_3 += g_0 * x_3
        if mine:
            tl.store(projection.grad_x + token * total + at, d.to(projection.grad_x.dtype.element_ty), mask=inside)
    if KERNEL > 0:
        tl.store(partial + at * KERNEL + KERNEL - 1, t_0, mask=inside)
    if KERNEL > 1:
        tl.store(partial + at * KERNEL + KERNEL - 2, t_1, mask=inside)
    if KERNEL > 2:
        tl.store(partial + at * KERNEL + KERNEL - 3, t_2, mask=inside)
    if KERNEL > 3:
        tl.store(partial + at * KERNEL, t_3, mask=inside)
    tl.store(partial + KERNEL * total + at, d_weight, mask=inside)
    tl.store(partial + (KERNEL + 1) * total + at, d_bias, mask=inside)


@triton.jit(do_not_specialize=["tokens", "row_length", "period"])
def prepare_backward(
    query, key, value, rotation, rows, tokens, row_length, period, heads, groups, eps, sums,
    KEYS: tl.constexpr, VALUES: tl.constexpr, RUN: tl.constexpr, KERNEL: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """The grid of `prepare`; query, key, value: `ProjectionBackward`; sums: numbers in a row of their `partial`."""
    run = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks = tl.cdiv(heads, KEYS.BH)
    key_blocks = tl.cdiv(groups, KEYS.BH)
    if block < query_blocks:
        _walk_back(
            query, rotation, rows, run, tokens, row_length, period, block * KEYS.BH, heads, eps, sums,
            KEYS, RUN, KERNEL, ROPE,
        )  # fmt: skip
    elif block < query_blocks + key_blocks:
        _walk_back(
            key, rotation, rows, run, tokens, row_length, period, (block - query_blocks) * KEYS.BH,
            groups, eps, sums, KEYS, RUN, KERNEL, ROPE,
        )  # fmt: skip
    else:
        _walk_back(
            value, rotation, rows, run, tokens, row_length, period,
            (block - query_blocks - key_blocks) * VALUES.BH, groups, eps, sums, VALUES, RUN, 0, ROPE,
        )  # fmt: skip


class Section(NamedTuple):
    """The gradient of a parameter, `out`, as elements `first` to `end` of all parameters side by side. Each is a sum
    over the rows of sums, and in each row over `heads` numbers, from `column` on and `stride` apart.
    """

    out: Any
    first: int
    end: int
    column: int
    heads: int
    stride: int


@triton.jit(do_not_specialize=["runs"])
def sum_runs(partial, sections, runs, sums, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The gradients of all parameters from `partial` `[runs, sums]`, in a fixed order; grid [blocks]."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = number * 0
    heads = number * 0
    stride = number * 0
    for i in tl.static_range(len(sections)):
        here = (number >= sections[i].first) & (number < sections[i].end)
        column = tl.where(here, sections[i].column + number - sections[i].first, column)
        heads = tl.where(here, sections[i].heads, heads)
        stride = tl.where(here, sections[i].stride, stride)
    found = tl.zeros([BLOCK], tl.float32)
    for head in range(0, tl.max(heads, 0)):
        for run in range(0, runs, ROWS):
            row = (run + tl.arange(0, ROWS)).to(tl.int64)
            used = (row < runs)[:, None] & (head < heads)[None, :]
            at = row[:, None] * sums + (column + head * stride)[None, :]
            found += tl.sum(tl.load(partial + at, mask=used, other=0.0), 0)
    for i in tl.static_range(len(sections)):
        out = sections[i].out
        here = (number >= sections[i].first) & (number < sections[i].end)
        tl.store(out + number - sections[i].first, found.to(out.dtype.element_ty), mask=here)


_prepare, _prepare_backward, _sum_runs = prepare, prepare_backward, sum_runs


def _launch(q, v, conv_weight, cos, sin, documents, cu_seqlens, lengths, heads, groups, placement, eps):
    """Grid, shared arguments (from `rotation` to `eps`) and options of both kernels."""
    batch, length = q.shape[:2]
    tokens, run = batch * length, _RUN if batch * length > 4096 else 16
    feature_dim, value_dim = q.shape[2] // heads, v.shape[2] // groups
    keys, values = (Block(n, max(1, _TILE // power_of_two(n)), power_of_two(n)) for n in (feature_dim, value_dim))
    rows = Rows()
    if cu_seqlens is not None:
        rows = Rows(documents, cu_seqlens[:-1], cu_seqlens[1:])
    elif lengths is not None:
        starts = torch.arange(0, tokens, length, dtype=torch.int32, device=lengths.device)
        rows = Rows(ends=starts + lengths)
    period, rope = (1, Rope("none", 0)) if cos is None else (cos.shape[0] * cos.shape[1], Rope(placement, cos.shape[2]))
    options = {"KEYS": keys, "VALUES": values, "RUN": run, "KERNEL": conv_weight.shape[1], "ROPE": rope}
    blocks = -(-heads // keys.BH) - (-groups // keys.BH) - (-groups // values.BH)
    return (-(-tokens // run), blocks), (Rotation(cos, sin), rows, tokens, length, period, heads, groups, eps), options


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_conv_weight: torch.Tensor, k_conv_weight: torch.Tensor,
    k_weight: torch.Tensor | None, v_weight: torch.Tensor | None, k_bias: torch.Tensor | None,
    v_bias: torch.Tensor | None, q_window: torch.Tensor | None, k_window: torch.Tensor | None, cos: torch.Tensor | None,
    sin: torch.Tensor | None, documents: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None, heads: int, groups: int, placement: str, eps: float, write_conv_state: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    outputs = _empty(q, k, v, q_conv_weight, cu_seqlens, heads, groups, write_conv_state)
    query, key, value, *conv_state = outputs
    if write_conv_state and (cu_seqlens is not None or lengths is not None):
        # Kernels write where there is a token; rows without tokens keep their conv state.
        for old, new in zip((q_window, k_window), conv_state, strict=True):
            new.zero_() if old is None else new.copy_(old)
    grid, shared, options = _launch(
        q, v, q_conv_weight, cos, sin, documents, cu_seqlens, lengths, heads, groups, placement, eps
    )
    written = conv_state if write_conv_state else (None, None)
    with on_device(q):
        _prepare[grid](
            Projection(q, query, q_conv_weight, q_window, written[0]),
            Projection(k, key, k_conv_weight, k_window, written[1], k_weight, k_bias),
            Projection(v, value, weight=v_weight, bias=v_bias),
            *shared, **options,
        )  # fmt: skip
    return outputs


def _empty(q, k, v, conv_weight, cu_seqlens, heads, groups, write_conv_state) -> Any:
    """Query, key, value and the new conv states."""
    outputs = (x.new_empty((*x.shape[:2], n, x.shape[2] // n)) for x, n in ((q, heads), (k, groups), (v, groups)))
    shapes = ((state_rows(q, cu_seqlens), x.shape[2], conv_weight.shape[1] - 1) for x in (q, k))
    return *outputs, *(q.new_empty(shape if write_conv_state else 0) for shape in shapes)


def _outputs(q, k, v, q_conv_weight, *rest):
    cu_seqlens, _, heads, groups, _, _, write_conv_state = rest[-7:]
    return _empty(q, k, v, q_conv_weight, cu_seqlens, heads, groups, write_conv_state)


def _backward(inputs, grads, needs):
    q, k, v, q_conv_weight, k_conv_weight, k_weight, v_weight, _, _, q_window, k_window, *others, _ = inputs
    grad_query, grad_key, grad_value = (
        v.new_zeros(like.shape) if x is None else x for x, like in zip(grads, _outputs(*inputs)[:3])
    )
    grid, shared, options = _launch(q, v, q_conv_weight, *others)
    tokens = grad_q, grad_k, grad_v = [torch.empty_like(x) for x in (q, k, v)]
    sizes = _sizes_of_sums(q, k, v, q_conv_weight)
    partial = q.new_empty((grid[0], sum(sizes)), dtype=torch.float32)
    partials = partial.split(sizes, dim=1)
    parameters = [None if x is None else torch.empty_like(x) for x in inputs[3:9]]
    with on_device(q):
        _prepare_backward[grid](
            ProjectionBackward(q, grad_query, grad_q, partials[0], q_conv_weight, q_window),
            ProjectionBackward(k, grad_key, grad_k, partials[1], k_conv_weight, k_window, k_weight),
            ProjectionBackward(v, grad_value, grad_v, partials[2], weight=v_weight),
            *shared, sum(sizes), **options,
        )  # fmt: skip
        sections = _sections(q, k, v, parameters)
        _sum_runs[(-(-sections[-1].end // 32),)](
            partial, sections, len(partial), sum(sizes), ROWS=64, BLOCK=32, num_warps=4
        )
    return *tokens, *parameters


def _sections(q, k, v, parameters: Sequence[torch.Tensor | None]) -> tuple[Section, ...]:
    """Of the convolutions of query and key; then of weight and bias of key and value, where they have such."""
    q_conv, k_conv, k_weight, v_weight, k_bias, v_bias = parameters
    q_sums, k_sums, _ = _sizes_of_sums(q, k, v, q_conv)
    parts = [(q_conv, 0, 1, 0), (k_conv, q_sums, 1, 0)]
    for weight, bias, column in ((k_weight, k_bias, q_sums + k_conv.numel()), (v_weight, v_bias, q_sums + k_sums)):
        if weight is not None:
            parts += [(weight, column, bias.shape[0], bias.shape[1]), (bias, column + bias.numel(), 1, 0)]
    ends = itertools.accumulate(part[0].numel() for part in parts)
    return tuple(Section(out, end - out.numel(), end, *part) for end, (out, *part) in zip(ends, parts))


def _sizes_of_sums(q, k, v, conv_weight) -> list[int]:
    """Of the gradients of conv_weight, weight and bias of each projection; the values have no convolution."""
    return [(count + 2) * x.shape[2] for x, count in ((q, conv_weight.shape[1]), (k, conv_weight.shape[1]), (v, 0))]


_operator = differentiable(__name__, "prepare", _forward, _outputs, _backward, count=9)


def triton_prepare(
    q, k, v, conv_weight: tuple[torch.Tensor, torch.Tensor], norms: tuple[torch.Tensor, ...] | None,
    conv_state: tuple[torch.Tensor, ...] | None, cos_sin: tuple[torch.Tensor, ...] | None, documents, cu_seqlens,
    heads: int, groups: int, placement: str | None, eps: float, write_conv_state: bool, lengths=None,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:  # fmt: skip
    """Queries, keys and values of the operator from the outputs of the projections.

    Args:
        q, k, v: `[B, T, heads R]`, `[B, T, groups R]`, `[B, T, groups D]`.
        conv_weight: the weights of the two convolutions, `[heads R, K]` and `[groups R, K]`, K from 1 to 4.
        norms: k_norm `[R]`, v_norm `[D]`, k_bias `[groups, R]`, v_bias `[groups, D]`, or None.
        conv_state: the inputs before the first tokens, `[rows, heads R, K - 1]` and `[rows, groups R, K - 1]`, or None.
        cos_sin: `[1 or B, T, dim]` each, or None.
        documents, cu_seqlens: the document of each token `[T]` and the ends of the documents `[S + 1]`, some of which
            may be empty, where documents are packed; int32.
        placement: the rotary embedding comes "before" or "after" the feature map.
        lengths: `[B]`, the real tokens of a row, in front of its pads, for which outputs and gradients are zero.

    Returns:
        query `[B, T, heads, R]`, key `[B, T, groups, R]`, value `[B, T, groups, D]` in the dtype of v; and the new
        conv state, empty unless `write_conv_state`: the last K - 1 inputs of each row or document, old ones where it
        has fewer.
    """
    if lengths is not None:
        lengths = lengths.to(torch.int32)
    *outputs, new_q, new_k = _operator(
        *contiguous(q, k, v, dtype=v.dtype), *contiguous(*conv_weight, *(norms or [None] * 4)),
        *contiguous(*(conv_state or [None] * 2), *(cos_sin or [None] * 2)), documents, cu_seqlens, lengths, heads,
        groups, placement or "none", eps, write_conv_state,
    )  # fmt: skip
    return tuple(outputs), (new_q, new_k)
