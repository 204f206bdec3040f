"""State space duality (Mamba-2) on tensors: linear attention with a decay of its own for each token and head."""

import torch

from ..common.checks import check_documents, check_how, check_state, check_tensors, real_tokens
from ..common.cpu import autocasts, compute_dtype, without_autocast
from ..common.decay import finite
from ..common.launch import STEP_BACKENDS, check_step_backend, fused, steps_fused
from ..common.packing import state_rows, step_rows
from .chunk import chunk_ssd
from .naive import export_ssd, recurrent_ssd

SSD_BACKENDS = ("auto", "recurrent", "chunk", "triton")
_GRAIN = 32768  # PyTorch takes one CPU thread more for as many elements


def ssd_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The core of Mamba-2 ("Transformers are SSMs", arXiv 2405.21060) and of the SSD layers of Cheems (2407.16958):

        S_t = exp(log_decay_t) S_{t-1} + value_t key_t^T,    o_t = S_t query_t

    Args:
        query: `[B, T, G, N]`, C of the papers.
        key: `[B, T, G, N]`, B of the papers.
        value: `[B, T, H, P]`, the input times its step dt, with H a multiple of G; head h reads group h // (H / G).
        log_decay: `[B, T, H]`, dt times the (negative) rate of the head; at most 0.
        initial_state: `[B, H, P, N]`; with `cu_seqlens`, one row a document. Default: None, which means zero.
        output_final_state, cu_seqlens, lengths, chunk_size: as in `interdomain_attention`.
        backend: "recurrent" (the definition, token by token), "chunk" (matrix products), "triton" (fused kernels on a
            GPU) or "auto" ("triton" where it can run, otherwise "chunk"). Default: "auto".

    Returns:
        output `[B, T, H, P]` in the dtype of `value`, and the final state `[B or S, H, P, N]` in float32 (float64 for
        float64 inputs), or None. Everything is computed in the dtype of the state, under autocast too, and decays are
        summed in float64; "triton" multiplies in the dtype of `query` and `key` and sums in float32.

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name. Also when
            "triton" is asked for and cannot run here.

    Example:

        >>> import torch
        >>> from modeling_interdomain import ssd_attention
        >>> query, key = torch.randn(2, 100, 1, 16), torch.randn(2, 100, 1, 16)
        >>> value, log_decay = torch.randn(2, 100, 4, 8), -torch.rand(2, 100, 4)
        >>> output, state = ssd_attention(query, key, value, log_decay, output_final_state=True)
        >>> output.shape, state.shape
        (torch.Size([2, 100, 4, 8]), torch.Size([2, 4, 8, 16]))
    """
    check_inputs((query, key, value), log_decay)
    cu_seqlens, lengths = check_documents(cu_seqlens, lengths, query)
    if initial_state is not None:
        _check_state(initial_state, "initial_state", state_rows(query, cu_seqlens), key, value)
    check_how(backend, SSD_BACKENDS, chunk_size)

    compute = compute_dtype(query, key, value)
    out_dtype, exporting, found = value.dtype, torch.compiler.is_exporting(), None
    with without_autocast(query.device):
        if backend in ("auto", "triton") and not exporting:
            arguments = query, key, value, log_decay, initial_state, cu_seqlens, lengths
            found = _fused(backend, *arguments, chunk_size, output_final_state)
        if found is None:
            query, key, value = (x.to(compute) for x in (query, key, value))
            log_decay = log_decay.to(torch.promote_types(log_decay.dtype, torch.float32))
            state = None if initial_state is None else initial_state.to(compute)
            arguments = query, key, value, log_decay, state, cu_seqlens, lengths
            if exporting:
                found = export_ssd(*arguments, chunk_size)
            elif backend == "recurrent":
                found = recurrent_ssd(*arguments)
            else:
                found = chunk_ssd(*arguments, chunk_size, output_final_state)
    output, final = found
    return output.to(out_dtype), final if output_final_state else None


def _fused(backend, query, key, value, log_decay, *arguments):
    def run():
        from .triton import triton_ssd

        dtype = torch.promote_types(query.dtype, key.dtype)
        return triton_ssd(query.to(dtype), key.to(dtype), value, log_decay, *arguments)

    return fused(backend, (query, key, value), (key.shape[3], value.shape[3]), run, "state space duality")


def ssd_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    *,
    state: torch.Tensor,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
    state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of `ssd_attention` with the state updated in place.

    Args:
        query, key: `[B, G, N]`; value: `[B, H, P]`; log_decay: `[B, H]`.
        state: `[B, H, P, N]`, overwritten.
        mask, backend, state_indices: as in `interdomain_step`.

    Returns:
        `[B, H, P]` in the dtype of `value`. Not differentiable: use `ssd_attention` for gradients.

    Raises:
        ValueError: when an argument has a wrong shape, device or value, before the state is touched.
    """
    plain = mask is None and state_indices is None and backend != "triton"
    if plain and _is_plain_step(query, key, value, log_decay, state, backend):
        return _advance_and_read(query, key, value, log_decay, state)
    check_inputs((query, key, value), log_decay, rows="B")
    _check_state(state, "state", step_rows(query, state, state_indices), key, value)
    check_step_backend(backend, state, state_indices)
    return take_ssd_step(query, key, value, log_decay, state, real_tokens(mask, query), backend, state_indices)


def _is_plain_step(query, key, value, log_decay, state, backend: str) -> bool:
    """Whether a CPU step is right and needs no conversion: in half the time of the checks that say what is wrong."""
    if torch.is_grad_enabled() or backend not in STEP_BACKENDS:
        return False
    for x in (state, query, key, value, log_decay):
        if type(x) is not torch.Tensor or not x.is_cpu or x.dtype is not state.dtype:
            return False
    shape, heads, groups = state.shape, log_decay.shape, query.shape
    if len(groups) != 3 or key.shape != groups or len(shape) != 4 or value.shape != shape[:3] or heads != shape[:2]:
        return False
    if groups[0] != shape[0] or groups[2] != shape[3] or groups[1] == 0 or shape[1] % groups[1]:
        return False
    plain = state.dtype in (torch.float32, torch.float64) and state.is_contiguous()
    return plain and not torch.is_autocast_enabled("cpu")


def take_ssd_step(
    query, key, value, log_decay, state, mask=None, backend: str = "auto", state_indices=None
) -> torch.Tensor:
    """`ssd_step` for a caller whose arguments fit; `mask` `[B]` is bool."""
    if torch.is_grad_enabled() or autocasts(query.device):
        with torch.no_grad(), without_autocast(query.device):
            return take_ssd_step(query, key, value, log_decay, state, mask, backend, state_indices)
    if steps_fused(backend, state, state_indices):
        output = _fused_step(backend, query, key, value, log_decay, state, mask, state_indices)
        if output is not None:
            return output
    if state_indices is not None:
        from ..common.slots import step_slots

        def step(rows, mask, *tokens):
            return take_ssd_step(*tokens, rows, mask, "recurrent")

        return step_slots(step, state, state_indices, mask, query, key, value, log_decay)
    if mask is not None:  # a pad decays by 1 and puts in 0
        log_decay = log_decay.where(mask[:, None], 0)
        key, value = (x.where(mask[:, None, None], 0) for x in (key, value))
    dtype = value.dtype
    if dtype in (torch.float32, torch.float64) and dtype == state.dtype == key.dtype == query.dtype == log_decay.dtype:
        working = state.contiguous()
    else:  # A state kept in a lower precision is still advanced in float32.
        working = state.to(torch.promote_types(state.dtype, torch.float32)).contiguous()
        query, key, value, log_decay = (x.to(working.dtype) for x in (query, key, value, log_decay))
    output = _advance_and_read(query, key, value, log_decay, working)
    if mask is not None:
        output = output.where(mask[:, None, None], 0)
    if working is not state:
        state.copy_(working)
    return output if output.dtype == dtype else output.to(dtype)


def _advance_and_read(query, key, value, log_decay, state) -> torch.Tensor:
    """The step itself, of tensors in one dtype and a contiguous state, in few calls: each costs as much as its work."""
    batch, groups, size = key.shape
    products = batch * groups  # one for all heads of a group
    state.mul_(log_decay.exp().view(batch, -1, 1, 1))
    if groups == 1:
        state.addcmul_(value.unsqueeze(3), key.unsqueeze(2))
        if batch == 1 and (products := _parts(state)) > 1:
            query = query.expand(products, 1, size)
    else:
        key, query = (x.reshape(products, 1, size) for x in (key, query))
        state.view(products, -1, size).baddbmm_(value.reshape(products, -1, 1), key)
    return torch.bmm(state.view(products, -1, size), query.mT).view(value.shape)


def _parts(state: torch.Tensor) -> int:
    """The number of products that read the heads of a single group: as many as the threads that wrote the state.

    So each thread reads from its own cache what it wrote. A single product is made by one thread, or is shared out in
    another way, and fetching the state from other caches takes longer than all the rest.
    """
    if state.numel() <= _GRAIN or not state.is_cpu or torch.compiler.is_compiling():
        return 1
    threads = min(torch.get_num_threads(), -(-state.numel() // _GRAIN))
    return threads if state.shape[1] % threads == 0 else 1


def _fused_step(backend, query, key, value, log_decay, state, mask, state_indices):
    def run():
        from .triton_step import triton_ssd_step

        return triton_ssd_step(query, key, value, log_decay, state, mask, state_indices)

    tensors = query, key, value, log_decay, state
    return fused(backend, tensors, (key.shape[2], value.shape[2]), run, "a step of state space duality")


def ssd_state_after(
    state: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The state after some tokens, without outputs: for rolling a cache back, and for handing a state on.

    Args:
        state: `[B, H, P, N]`, left untouched.
        key: `[B, T, G, N]`; value: `[B, T, H, P]`; log_decay: `[B, T, H]`; T may be 0.
        mask: `[B, T]` bool, False for pads.

    Returns:
        A new tensor like `state`, at least float32; differentiable.
    """
    state = state.to(torch.promote_types(state.dtype, torch.float32))
    with without_autocast(state.device):
        decays = torch.where(mask[..., None], finite(log_decay), 0)
        after = decays.flip(1).cumsum(1).flip(1) - decays  # of the tokens behind each
        value = torch.where(mask[..., None, None], value, 0) * after.exp()[..., None]
        key = torch.where(mask[..., None, None], key, 0).to(state.dtype)
        rows = value.to(state.dtype).unflatten(2, (key.shape[2], -1)).flatten(3)  # [B, T, G, (H / G) P]
        added = torch.einsum("btgp,btgn->bgpn", rows, key).reshape(state.shape)
        return decays.sum(1).exp().to(state.dtype)[..., None, None] * state + added


def check_inputs(tokens: tuple, log_decay, rows: str = "B, T") -> None:
    """Refuse tokens with these axes in front, query and key and it may be value, that do not fit their decays."""
    axes = ("query", f"{rows}, G, N"), ("key", f"{rows}, G, N"), ("value", f"{rows}, H, P")
    named = [(name, x, shape) for x, (name, shape) in zip(tokens, axes)]
    sizes = check_tensors(*named, ("log_decay", log_decay, f"{rows}, H"))
    if sizes["H"] % sizes["G"]:
        raise ValueError(f"key has G = {sizes['G']} groups, which must divide the H = {sizes['H']} heads of log_decay.")


def _check_state(state, name, rows, key, value) -> None:
    check_state(name, state, (rows, *value.shape[-2:], key.shape[-1]), "H, P, N", value.device)
