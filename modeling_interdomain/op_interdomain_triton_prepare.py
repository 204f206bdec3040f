"""Everything between the projections and the operator in one kernel, and its gradients in another.

    query, key   causal convolution, rotary embedding, SiLU, l2 norm (eq. 10), rotary embedding
    key, value   RMSNorm and bias (eq. 12)

A program walks a run of tokens for a few heads with the last inputs of the convolution in registers: each number is
read from memory once and written once. Backward walks the other way and keeps the last gradients instead.
"""

import torch

from .op_common_launch import namespace, on_device, power_of_two

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Tokens a program walks, and the numbers of a token it holds.
_RUN, _TILE = 64, 512


@triton.jit
def _bounds(token, row_length, documents, cu_seqlens, PACKED: tl.constexpr):
    """Which row or document a token belongs to, and where that begins and ends."""
    if PACKED:
        row = tl.load(documents + token).to(tl.int64)
        return row, tl.load(cu_seqlens + row).to(tl.int64), tl.load(cu_seqlens + row + 1).to(tl.int64)
    else:
        row = token // row_length
        return row, row * row_length, (row + 1) * row_length


@triton.jit
def _at_least(a, b, columns):
    """`a >= b` of two numbers as a row `[1, columns]`: the interpreter cannot broadcast a truth value."""
    return (columns * 0 + a >= b)[None, :]


@triton.jit
def _input(
    x, window, token, back, start, row, at, inside, columns, total, TAPS: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """What a token's convolution sees `back` tokens before it: an input, one of the window's, or zero."""
    source = token - back
    value = tl.load(x + source * total + at, mask=inside & _at_least(source, start, columns), other=0.0).to(tl.float32)
    if HAS_WINDOW:
        slot = TAPS - 1 + source - start
        before = inside & _at_least(start, source + 1, columns)
        value += tl.load(window + (row * total + at) * (TAPS - 1) + slot, mask=before, other=0.0).to(tl.float32)
    return value


@triton.jit
def _angles(cos, sin, token, period, columns, ROPE_DIM: tl.constexpr):
    """Cosines, and sines with the sign that the rotation gives them; columns beyond the rotated ones stay."""
    rotated = columns < ROPE_DIM
    at = (token % period) * ROPE_DIM + columns
    c = tl.load(cos + at, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=rotated, other=0.0).to(tl.float32)
    return c[None, :], tl.where(columns < ROPE_DIM // 2, -s, s)[None, :]


@triton.jit
def _partners(columns, ROPE_DIM: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """The column with which each one is rotated."""
    half = ROPE_DIM // 2
    partner = tl.where(columns < half, columns + half, columns - half)
    partner = tl.where(columns < ROPE_DIM, partner, columns)
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
    x, out, taps, window, new_window, cos, sin, weight, bias, first, tokens, row_length, documents, cu_seqlens, period,
    head, heads, eps, WIDTH: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, RUN: tl.constexpr,
    TAPS: tl.constexpr, ROPE: tl.constexpr, ROPE_DIM: tl.constexpr, NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, WRITE_WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """RUN tokens from `first` for BH heads from `head`. TAPS 0: neither convolution nor feature map."""
    rows = head + tl.arange(0, BH)
    columns = tl.arange(0, BW)
    inside = (rows < heads)[:, None] & (columns < WIDTH)[None, :]
    at = rows[:, None] * WIDTH + columns[None, :]
    total = heads * WIDTH
    if ROPE != "none":
        partners = _partners(columns, ROPE_DIM, BH, BW)
    if NORM:
        w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
        b = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    for token in range(first, tl.minimum(first + RUN, tokens)):
        if TAPS == 0:
            f = tl.load(x + token * total + at, mask=inside, other=0.0).to(tl.float32)
        else:
            row, start, end = _bounds(token, row_length, documents, cu_seqlens, PACKED)
            u = tl.zeros([BH, BW], tl.float32)
            for back in tl.static_range(TAPS):
                value = _input(x, window, token, back, start, row, at, inside, columns, total, TAPS, HAS_WINDOW)
                u += value * tl.load(taps + at * TAPS + TAPS - 1 - back, mask=inside, other=0.0).to(tl.float32)
                if WRITE_WINDOW and back < TAPS - 1:
                    slot = new_window + (row * total + at) * (TAPS - 1) + TAPS - 2 - back
                    tl.store(
                        slot, value.to(new_window.dtype.element_ty), mask=inside & _at_least(token + 1, end, columns)
                    )
            if ROPE == "before":
                c, s = _angles(cos, sin, token, period, columns, ROPE_DIM)
                u = _rotate(u, c, s, partners)
            f, _ = _normalise(u)
            if ROPE == "after":
                c, s = _angles(cos, sin, token, period, columns, ROPE_DIM)
                f = _rotate(f, c, s, partners)
        if NORM:
            f = w * f * tl.rsqrt(tl.sum(f * f, 1)[:, None] / WIDTH + eps) + b
        tl.store(out + token * total + at, f.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "row_length", "period"])
def prepare(
    q, k, v, query, key, value, q_taps, k_taps, q_window, k_window, new_q_window, new_k_window, cos, sin,
    k_weight, v_weight, k_bias, v_bias, tokens, row_length, documents, cu_seqlens, period, heads, groups, eps,
    R: tl.constexpr, D: tl.constexpr, BHR: tl.constexpr, BHD: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    RUN: tl.constexpr, TAPS: tl.constexpr, ROPE: tl.constexpr, ROPE_DIM: tl.constexpr, NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, WRITE_WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Grid [runs of tokens, blocks of query heads, then of keys, then of values]; tokens `[tokens, heads, width]`."""
    first = tl.program_id(0).to(tl.int64) * RUN
    block = tl.program_id(1)
    query_blocks = tl.cdiv(heads, BHR)
    key_blocks = tl.cdiv(groups, BHR)
    if block < query_blocks:
        _walk(
            q, query, q_taps, q_window, new_q_window, cos, sin, k_weight, k_bias, first, tokens, row_length, documents,
            cu_seqlens, period, block * BHR, heads, eps, R, BHR, BR, RUN, TAPS, ROPE, ROPE_DIM, False,
            HAS_WINDOW, WRITE_WINDOW, PACKED,
        )  # fmt: skip
    elif block < query_blocks + key_blocks:
        _walk(
            k, key, k_taps, k_window, new_k_window, cos, sin, k_weight, k_bias, first, tokens, row_length, documents,
            cu_seqlens, period, (block - query_blocks) * BHR, groups, eps, R, BHR, BR, RUN, TAPS, ROPE, ROPE_DIM, NORM,
            HAS_WINDOW, WRITE_WINDOW, PACKED,
        )  # fmt: skip
    else:
        _walk(
            v, value, k_taps, k_window, new_k_window, cos, sin, v_weight, v_bias, first, tokens, row_length, documents,
            cu_seqlens, period, (block - query_blocks - key_blocks) * BHD, groups, eps, D, BHD, BD, RUN, 0, "none", 0,
            NORM, False, False, PACKED,
        )  # fmt: skip


@triton.jit
def _walk_back(
    x, grad, grad_x, taps, window, cos, sin, weight, partial, first, tokens, row_length, documents, cu_seqlens, period,
    head, heads, eps, WIDTH: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, RUN: tl.constexpr,
    TAPS: tl.constexpr, ROPE: tl.constexpr, ROPE_DIM: tl.constexpr, NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The adjoint of `_walk`. partial `[TAPS + 2, heads, WIDTH]`: gradients of taps, norm weight and bias here."""
    rows = head + tl.arange(0, BH)
    columns = tl.arange(0, BW)
    inside = (rows < heads)[:, None] & (columns < WIDTH)[None, :]
    at = rows[:, None] * WIDTH + columns[None, :]
    total = heads * WIDTH
    stop = tl.minimum(first + RUN, tokens)
    if ROPE != "none":
        partners = _partners(columns, ROPE_DIM, BH, BW)
    if NORM:
        w = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)[None, :]
    zero = tl.zeros([BH, BW], tl.float32)
    d_weight = zero
    d_bias = zero
    # Gradients of the convolution's outputs one, two and three tokens later, and of its taps; unused ones stay zero.
    g_1 = zero
    g_2 = zero
    g_3 = zero
    t_0 = zero
    t_1 = zero
    t_2 = zero
    t_3 = zero
    last = tl.minimum(stop + (TAPS - 1 if TAPS > 0 else 0), tokens)
    for back_token in range(first, last):
        token = last - 1 - (back_token - first)
        mine = token < stop
        row, start, end = _bounds(token, row_length, documents, cu_seqlens, PACKED)
        d = tl.load(grad + token * total + at, mask=inside, other=0.0).to(tl.float32)
        if TAPS == 0:
            f = tl.load(x + token * total + at, mask=inside, other=0.0).to(tl.float32)
        else:
            x_0 = _input(x, window, token, 0, start, row, at, inside, columns, total, TAPS, HAS_WINDOW)
            u = x_0 * tl.load(taps + at * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
            if TAPS > 1:
                x_1 = _input(x, window, token, 1, start, row, at, inside, columns, total, TAPS, HAS_WINDOW)
                u += x_1 * tl.load(taps + at * TAPS + TAPS - 2, mask=inside, other=0.0).to(tl.float32)
            if TAPS > 2:
                x_2 = _input(x, window, token, 2, start, row, at, inside, columns, total, TAPS, HAS_WINDOW)
                u += x_2 * tl.load(taps + at * TAPS + TAPS - 3, mask=inside, other=0.0).to(tl.float32)
            if TAPS > 3:
                x_3 = _input(x, window, token, 3, start, row, at, inside, columns, total, TAPS, HAS_WINDOW)
                u += x_3 * tl.load(taps + at * TAPS, mask=inside, other=0.0).to(tl.float32)
            if ROPE != "none":
                c, s = _angles(cos, sin, token, period, columns, ROPE_DIM)
            if ROPE == "before":
                u = _rotate(u, c, s, partners)
            f, norm = _normalise(u)
            unit = f
            if ROPE == "after":
                f = _rotate(f, c, s, partners)
        if NORM:
            scale = tl.rsqrt(tl.sum(f * f, 1)[:, None] / WIDTH + eps)
            n = f * scale
            if mine:
                d_weight += d * n
                d_bias += d
            d = d * w
            d = scale * (d - n * (tl.sum(d * n, 1)[:, None] / WIDTH))
        if TAPS > 0:
            if ROPE == "after":
                d = _rotate_back(d, c, s, partners)
            d = (d - unit * tl.sum(d * unit, 1)[:, None]) / norm
            gate = tl.sigmoid(u)
            d = d * gate * (1 + u * (1 - gate))
            if ROPE == "before":
                d = _rotate_back(d, c, s, partners)
            g_0 = tl.where(inside, d, 0.0)
            d = g_0 * tl.load(taps + at * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
            # A later token of the same row or document read this one through an older tap.
            if TAPS > 1:
                tap = tl.load(
                    taps + at * TAPS + TAPS - 2, mask=inside & _at_least(end, token + 2, columns), other=0.0
                ).to(tl.float32)
                d += g_1 * tap
            if TAPS > 2:
                tap = tl.load(
                    taps + at * TAPS + TAPS - 3, mask=inside & _at_least(end, token + 3, columns), other=0.0
                ).to(tl.float32)
                d += g_2 * tap
            if TAPS > 3:
                tap = tl.load(taps + at * TAPS, mask=inside & _at_least(end, token + 4, columns), other=0.0).to(
                    tl.float32
                )
                d += g_3 * tap
            g_3 = g_2
            g_2 = g_1
            g_1 = g_0
            if mine:
                t_0 += g_0 * x_0
                if TAPS > 1:
                    t_1 += g_0 * x_1
                if TAPS > 2:
                    t_2 += g_0 * x_2
                if TAPS > 3:
                    t_3 += g_0 * x_3
        if mine:
            tl.store(grad_x + token * total + at, d.to(grad_x.dtype.element_ty), mask=inside)
    if TAPS > 0:
        tl.store(partial + (TAPS - 1) * total + at, t_0, mask=inside)
    if TAPS > 1:
        tl.store(partial + (TAPS - 2) * total + at, t_1, mask=inside)
    if TAPS > 2:
        tl.store(partial + (TAPS - 3) * total + at, t_2, mask=inside)
    if TAPS > 3:
        tl.store(partial + at, t_3, mask=inside)
    tl.store(partial + TAPS * total + at, d_weight, mask=inside)
    tl.store(partial + (TAPS + 1) * total + at, d_bias, mask=inside)


@triton.jit(do_not_specialize=["tokens", "row_length", "period"])
def prepare_backward(
    q, k, v, grad_query, grad_key, grad_value, grad_q, grad_k, grad_v, q_taps, k_taps, q_window, k_window, cos, sin,
    k_weight, v_weight, q_partial, k_partial, v_partial, tokens, row_length, documents, cu_seqlens, period,
    heads, groups, eps,
    R: tl.constexpr, D: tl.constexpr, BHR: tl.constexpr, BHD: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    RUN: tl.constexpr, TAPS: tl.constexpr, ROPE: tl.constexpr, ROPE_DIM: tl.constexpr, NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The grid of `prepare`; partial sums `[runs, TAPS + 2 (values: 2), heads, width]`."""
    run = tl.program_id(0).to(tl.int64)
    first = run * RUN
    block = tl.program_id(1)
    query_blocks = tl.cdiv(heads, BHR)
    key_blocks = tl.cdiv(groups, BHR)
    if block < query_blocks:
        _walk_back(
            q, grad_query, grad_q, q_taps, q_window, cos, sin, k_weight, q_partial + run * (TAPS + 2) * heads * R,
            first, tokens, row_length, documents, cu_seqlens, period, block * BHR, heads, eps,
            R, BHR, BR, RUN, TAPS, ROPE, ROPE_DIM, False, HAS_WINDOW, PACKED,
        )  # fmt: skip
    elif block < query_blocks + key_blocks:
        _walk_back(
            k, grad_key, grad_k, k_taps, k_window, cos, sin, k_weight, k_partial + run * (TAPS + 2) * groups * R,
            first, tokens, row_length, documents, cu_seqlens, period, (block - query_blocks) * BHR, groups, eps,
            R, BHR, BR, RUN, TAPS, ROPE, ROPE_DIM, NORM, HAS_WINDOW, PACKED,
        )  # fmt: skip
    else:
        _walk_back(
            v, grad_value, grad_v, k_taps, k_window, cos, sin, v_weight, v_partial + run * 2 * groups * D,
            first, tokens, row_length, documents, cu_seqlens, period, (block - query_blocks - key_blocks) * BHD, groups,
            eps, D, BHD, BD, RUN, 0, "none", 0, NORM, False, PACKED,
        )  # fmt: skip


_prepare, _prepare_backward = prepare, prepare_backward
_NAMESPACE = namespace(__name__)


def _launch(q, k, v, heads, groups, taps, cos, placement, k_weight, window, cu_seqlens):
    """Grid and the options that both kernels share."""
    feature_dim, value_dim = q.shape[2] // heads, v.shape[2] // groups
    blocks = power_of_two(feature_dim), power_of_two(value_dim)
    options = {
        "R": feature_dim, "D": value_dim, "BHR": max(1, _TILE // blocks[0]), "BHD": max(1, _TILE // blocks[1]),
        "BR": blocks[0], "BD": blocks[1], "RUN": _RUN if q.shape[0] * q.shape[1] > 4096 else 16, "TAPS": taps.shape[1],
        "ROPE": "none" if cos is None else placement, "ROPE_DIM": 0 if cos is None else cos.shape[-1],
        "NORM": k_weight is not None, "HAS_WINDOW": window is not None, "PACKED": cu_seqlens is not None,
    }  # fmt: skip
    tokens = q.shape[0] * q.shape[1]
    head_blocks = sum(-(-n // options[b]) for n, b in ((heads, "BHR"), (groups, "BHR"), (groups, "BHD")))
    return (-(-tokens // options["RUN"]), head_blocks), options


def _places(q, cos, documents, cu_seqlens) -> tuple:
    """Where tokens stand: tokens in all, tokens a row, their documents, and after how many tokens angles repeat."""
    period = 1 if cos is None else cos.shape[0] * cos.shape[1]
    return q.shape[0] * q.shape[1], q.shape[1], documents, cu_seqlens, period


@torch.library.custom_op(f"{_NAMESPACE}::prepare", mutates_args=())
def _operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_taps: torch.Tensor,
    k_taps: torch.Tensor,
    k_weight: torch.Tensor | None,
    v_weight: torch.Tensor | None,
    k_bias: torch.Tensor | None,
    v_bias: torch.Tensor | None,
    q_window: torch.Tensor | None,
    k_window: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    documents: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    heads: int,
    groups: int,
    placement: str,
    eps: float,
    write_windows: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs, windows = _empty(q, k, v, q_taps, cu_seqlens, heads, groups, write_windows)
    grid, options = _launch(q, k, v, heads, groups, q_taps, cos, placement, k_weight, q_window, cu_seqlens)
    with on_device(q):
        _prepare[grid](
            q, k, v, *outputs, q_taps, k_taps, q_window, k_window, *windows, cos, sin, k_weight, v_weight, k_bias,
            v_bias, *_places(q, cos, documents, cu_seqlens), heads, groups, eps, WRITE_WINDOW=write_windows, **options,
        )  # fmt: skip
    return *outputs, *windows


def _empty(q, k, v, taps, cu_seqlens, heads, groups, write_windows):
    outputs = tuple(x.new_empty((*x.shape[:2], n, x.shape[2] // n)) for x, n in ((q, heads), (k, groups), (v, groups)))
    rows = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shapes = ((rows, x.shape[2], taps.shape[1] - 1) if write_windows else (0,) for x in (q, k))
    return outputs, tuple(q.new_empty(shape) for shape in shapes)


@_operator.register_fake
def _(
    q, k, v, q_taps, k_taps, k_weight, v_weight, k_bias, v_bias, q_window, k_window, cos, sin, documents, cu_seqlens,
    heads, groups, placement, eps, write_windows,
):  # fmt: skip
    outputs, windows = _empty(q, k, v, q_taps, cu_seqlens, heads, groups, write_windows)
    return *outputs, *windows


@torch.library.custom_op(f"{_NAMESPACE}::prepare_backward", mutates_args=())
def _operator_backward(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_taps: torch.Tensor,
    k_taps: torch.Tensor,
    k_weight: torch.Tensor | None,
    v_weight: torch.Tensor | None,
    q_window: torch.Tensor | None,
    k_window: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    documents: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    heads: int,
    groups: int,
    placement: str,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    grid, options = _launch(q, k, v, heads, groups, q_taps, cos, placement, k_weight, q_window, cu_seqlens)
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    count = options["TAPS"] + 2
    partials = tuple(
        x.new_empty((grid[0], rows, x.shape[2]), dtype=torch.float32) for x, rows in ((q, count), (k, count), (v, 2))
    )
    with on_device(q):
        _prepare_backward[grid](
            q, k, v, grad_query, grad_key, grad_value, grad_q, grad_k, grad_v,
            q_taps, k_taps, q_window, k_window, cos, sin,
            k_weight, v_weight, *partials, *_places(q, cos, documents, cu_seqlens), heads, groups, eps, **options,
        )  # fmt: skip
    q_sums, k_sums, v_sums = (x.sum(0) for x in partials)
    return grad_q, grad_k, grad_v, q_sums, k_sums, v_sums


@_operator_backward.register_fake
def _(
    grad_query, grad_key, grad_value, q, k, v, q_taps, k_taps, k_weight, v_weight, q_window, k_window, cos, sin,
    documents, cu_seqlens, heads, groups, placement, eps,
):  # fmt: skip
    count = q_taps.shape[1] + 2
    partials = (x.new_empty((rows, x.shape[2]), dtype=torch.float32) for x, rows in ((q, count), (k, count), (v, 2)))
    return *(torch.empty_like(x) for x in (q, k, v)), *partials


def _keep_inputs(ctx, inputs, output):
    *tensors, heads, groups, placement, eps, _ = inputs
    q, k, v, q_taps, k_taps, k_weight, v_weight, _, _, *rest = tensors
    ctx.save_for_backward(q, k, v, q_taps, k_taps, k_weight, v_weight, *rest)
    ctx.options = heads, groups, placement, eps
    ctx.set_materialize_grads(True)


def _differentiate(ctx, grad_query, grad_key, grad_value, *_):
    saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor a single time
    _, _, _, q_taps, k_taps, k_weight, v_weight, *_ = saved
    groups = ctx.options[1]
    grads = (x.contiguous() for x in (grad_query, grad_key, grad_value))
    q, k, v, *sums = _operator_backward(*grads, *saved, *ctx.options)
    taps = tuple(s[:-2].T.to(t.dtype) for s, t in zip(sums[:2], (q_taps, k_taps), strict=True))
    norms = (None,) * 4
    if k_weight is not None:
        weights, biases = zip(*((s[-2].view(groups, -1).sum(0), s[-1].view(groups, -1)) for s in sums[1:]), strict=True)
        norms = tuple(x.to(w.dtype) for x, w in zip((*weights, *biases), (k_weight, v_weight) * 2, strict=True))
    return q, k, v, *taps, *norms, *(None,) * 11


_operator.register_autograd(_differentiate, setup_context=_keep_inputs)


def triton_prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    taps: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, ...] | None,
    windows: tuple[torch.Tensor, ...] | None,
    cos_sin: tuple[torch.Tensor, ...] | None,
    documents: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    heads: int,
    groups: int,
    placement: str | None,
    eps: float,
    write_windows: bool,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Queries, keys and values of the operator from the outputs of the projections.

    Args:
        q, k, v: `[B, T, heads R]`, `[B, T, groups R]`, `[B, T, groups D]`.
        taps: the weights of the two convolutions, `[heads R, K]` and `[groups R, K]`, K from 1 to 4.
        norms: k_norm `[R]`, v_norm `[D]`, k_bias `[groups, R]`, v_bias `[groups, D]`, or None.
        windows: the inputs before the first tokens, `[rows, heads R, K - 1]` and `[rows, groups R, K - 1]`, or None.
        cos_sin: `[1 or B, T, dim]` each, or None.
        documents, cu_seqlens: the document of each token, and the ends of the documents, where they are packed.
        placement: the rotary embedding comes "before" or "after" the feature map.

    Returns:
        query `[B, T, heads, R]`, key `[B, T, groups, R]`, value `[B, T, groups, D]` in the dtype of v; and the new
        windows, empty unless `write_windows`.
    """
    cos, sin = (None, None) if cos_sin is None else (x.contiguous() for x in cos_sin)
    q_window, k_window = (None, None) if windows is None else (x.contiguous() for x in windows)
    *outputs, new_q, new_k = _operator(
        *(x.to(v.dtype).contiguous() for x in (q, k, v)), *(x.contiguous() for x in taps),
        *((None,) * 4 if norms is None else (x.contiguous() for x in norms)), q_window, k_window, cos, sin,
        documents, cu_seqlens, heads, groups, placement or "none", eps, write_windows,
    )  # fmt: skip
    return tuple(outputs), (new_q, new_k)
