"""The S4D control: the recurrence of Interdomain attention read by a learned vector instead of by a query.

With a readout that does not depend on the token, the output is a causal convolution whose kernel is

    K[d] = 2 Re sum_n readout[n] lambda_n^d beta_n

for each head. Inside a chunk of C tokens that is one lower triangular Toeplitz matrix a head, and what came before
arrives through the state at the start of the chunk.
"""

from collections.abc import Callable
from functools import partial

import torch

from .op_common import as_complex, check_documents, check_how, check_state, check_tensors, without_autocast
from .op_common_chunks import Segment, chunks_of
from .op_common_launch import check_step_backend, fused, namespace
from .op_common_states import DecayTables, Repeated, StateGradients, States, Workspace, pairs
from .op_interdomain_export import export_s4d
from .op_interdomain_step import StepTables, advance_state, real_tokens, transition_tables

S4D_BACKENDS = ("auto", "chunk", "triton")

# Floats of one output of a segment: on a CPU what is worked on should stay in the second-level cache.
_SEGMENT_FLOATS = {"cpu": 1 << 18, "other": 1 << 24}


def s4d_attention(
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    readout: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`o_t = 2 Re sum_n readout[n] X_t[n]` of the state of `interdomain_attention` (the S4D-only control of the paper).

    Args:
        key, value: `[B, T, G, R]` and `[B, T, G, D]`, the two inputs of the state.
        log_decay, input_matrix: `[G, M, 2]`.
        readout: `[H, M, 2]`, G a divisor of H; head h reads group h // (H / G).
        initial_state, output_final_state, cu_seqlens, lengths, chunk_size: as in `interdomain_attention`.
        backend: "chunk" (matrix products), "triton" (fused kernels on a GPU) or "auto" ("triton" where it can run,
            otherwise "chunk"). Default: "auto".

    Returns:
        output `[B, T, H, R + D]` in the dtype of `value`, and the final state `[B or S, G, 2, M, R + D]` or None.

    Raises:
        ValueError: when an argument has a wrong shape, device or value; the message begins with its name. Also when
            "triton" is asked for and cannot run here.
    """
    _check_inputs(key, value, log_decay, input_matrix, readout)
    cu_seqlens, lengths = check_documents(cu_seqlens, lengths, key)
    if initial_state is not None:
        documents = key.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        _check_state("initial_state", initial_state, documents, key, value, log_decay)
    check_how(backend, S4D_BACKENDS, chunk_size)
    exporting = torch.compiler.is_exporting()
    compute = torch.float64 if torch.float64 in (key.dtype, value.dtype) else torch.float32
    with without_autocast(key.device):
        if backend in ("auto", "triton") and not exporting:
            parameters, extent = (log_decay, input_matrix, readout), (initial_state, cu_seqlens, lengths)
            found = _fused(backend, key, value, *parameters, *extent, chunk_size, output_final_state)
            if found is not None:
                return found
        inputs = torch.cat([key.to(compute), value.to(compute)], dim=-1)
        decay, beta, rows = (x.to(compute) for x in (log_decay, input_matrix, readout))
        state = None if initial_state is None else initial_state.to(compute)
        arguments = inputs, decay, beta, rows, state, cu_seqlens, lengths, chunk_size
        if exporting:
            output, final = export_s4d(*arguments)
        else:
            output, final = _operator(*arguments, output_final_state)
    return output.to(value.dtype), final if output_final_state else None


def _fused(backend, key, value, log_decay, *arguments):
    def run():
        from .op_s4d_triton import triton_s4d

        return triton_s4d(torch.cat([key.to(value.dtype), value], dim=-1), log_decay, *arguments)

    return fused(backend, (key, value), (key.shape[3], value.shape[3], log_decay.shape[1]), run, "S4D")


def s4d_step(
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    readout: torch.Tensor,
    *,
    state: torch.Tensor,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """One token of `s4d_attention` with the state updated in place; key `[B, G, R]`, value `[B, G, D]`.

    Args:
        state: `[B, G, 2, M, R + D]`, overwritten.
        mask: `[B]` bool or integers, zero for a pad: the row's state stays and its output is zero.
        backend: "triton" (one kernel on a GPU), "recurrent" (PyTorch) or "auto" (the kernel where it can run). Default:
            "auto".

    Returns:
        `[B, H, R + D]` in the dtype of `value`.

    Raises:
        ValueError: when an argument has a wrong shape, device or value, before the state is touched.
    """
    _check_inputs(key, value, log_decay, input_matrix, readout, rows="B")
    _check_state("state", state, key.shape[0], key, value, log_decay)
    check_step_backend(backend, state)
    tables = partial(s4d_tables, log_decay, input_matrix, readout)
    return take_s4d_step(key, value, tables=tables, state=state, mask=real_tokens(mask, key), backend=backend)


def take_s4d_step(
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    tables: Callable[[torch.dtype], StepTables],
    state: torch.Tensor,
    mask: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`s4d_step` for a caller who may have tables from an earlier step: `tables` gives `s4d_tables` in a dtype.

    Key and value may have an axis of the one token, `[B, 1, G, R]`.
    """
    with torch.no_grad(), without_autocast(key.device):
        if backend == "triton" or (backend == "auto" and key.device.type != "cpu" and state.is_contiguous()):
            output = _fused_step(backend, key, value, tables, state, mask)
            if output is not None:
                return output
        # A state kept in a lower precision is still advanced in float32.
        working = state if state.dtype in (torch.float32, torch.float64) else state.float()
        moves = tables(working.dtype)
        advance_state(working, key, value, moves, mask)
        if working is not state:
            state.copy_(working)
        (rows,) = moves.matrices
        output = (rows @ working.flatten(2, 3)).flatten(1, 2)
        if mask is not None:
            output = output.where(mask[:, None, None], 0)
    return output.to(value.dtype)


def _fused_step(backend, key, value, tables, state, mask):
    def run():
        from .op_s4d_triton_step import triton_s4d_step

        inputs = torch.cat([x.squeeze(1) if x.ndim == 4 else x for x in (key.to(value.dtype), value)], dim=-1)
        moves = tables(torch.float32)
        return triton_s4d_step(inputs, moves.decay, moves.turn, moves.beta, *moves.matrices, state, mask)

    return fused(backend, (key, value, state), (key.shape[-1], value.shape[-1], state.shape[3]), run, "a step of S4D")


def s4d_tables(
    log_decay: torch.Tensor, input_matrix: torch.Tensor, readout: torch.Tensor, dtype: torch.dtype
) -> StepTables:
    """What `s4d_step` needs of the parameters: its only matrix holds the real rows `[G, H / G, 2M]` of the readout."""
    real, imag = (2 * readout.to(dtype)).unbind(-1)
    rows = torch.cat([real, -imag], dim=-1).unflatten(0, (log_decay.shape[0], -1))
    return transition_tables(log_decay, input_matrix, dtype)._replace(matrices=(rows,))


def _check_inputs(key, value, log_decay, input_matrix, readout, rows: str = "B, T") -> None:
    """Shapes, dtypes and devices of tokens with these axes in front, and of the parameters."""
    tokens = ("key", key, f"{rows}, G, R"), ("value", value, f"{rows}, G, D")
    check_parameters(log_decay, input_matrix, readout, *tokens)


def check_parameters(log_decay, input_matrix, readout, *tokens: tuple) -> None:
    """The same of the parameters, beside tokens or alone."""
    pairs = ("log_decay", log_decay, "G, M, 2"), ("input_matrix", input_matrix, "G, M, 2")
    sizes = check_tensors(*tokens, *pairs, ("readout", readout, "H, M, 2"))
    heads, groups = sizes["H"], sizes["G"]
    if heads % groups:
        raise ValueError(f"readout has H = {heads} heads, which is not a multiple of the G = {groups} groups of key.")


def _check_state(name: str, state, rows: int, key, value, log_decay) -> None:
    shape = (rows, key.shape[-2], 2, log_decay.shape[1], key.shape[-1] + value.shape[-1])
    check_state(name, state, shape, "G, 2, M, R + D", key.device, beside="key")


class _S4DCall:
    """One call: its tables, how its tokens lie among the chunks, and the memory that its segments share."""

    def __init__(self, inputs, log_decay, input_matrix, readout, initial, cu_seqlens, lengths, chunk_size, ends):
        batch, length, self.groups, width = inputs.shape
        self.heads = readout.shape[0] // self.groups
        floats = _SEGMENT_FLOATS["cpu" if inputs.device.type == "cpu" else "other"]
        tokens = floats // (readout.shape[0] * width)
        self.chunks = chunks_of((batch, length), cu_seqlens, lengths, chunk_size, tokens, inputs.device)
        self.size = self.chunks.size
        self.tables = DecayTables(log_decay, input_matrix, self.size, inputs.dtype)
        self.wide_rows = 2 * as_complex(readout.double()).unflatten(0, (self.groups, -1))  # [G, P, M]
        powers = self.tables.wide_powers
        self.wide_response = powers[:, :-1] * self.tables.wide_inputs  # lambda^d beta
        kernel = (self.wide_rows @ self.wide_response.mT).real  # [G, P, C]
        self.toeplitz = Repeated(_toeplitz(kernel).to(inputs.dtype).flatten(1, 2))  # [G, P C, C]
        reads = (self.wide_rows[:, :, None] * powers[:, None, 1:]).conj().resolve_conj()
        self.reads = Repeated(torch.view_as_real(reads).flatten(3).flatten(1, 2).to(inputs.dtype))  # [G, P C, 2M]
        self.workspace = Workspace()
        self.states = States("input", inputs, self.chunks, self.tables, initial, self.workspace, ends)

    def walk(self, segment: Segment, entry):
        """The inputs of a segment `[G, N, C, W]` and the states before its chunks `[G, N, W, 2M]`, None for zeros."""
        inputs = self.states.inputs(segment)
        return inputs, self.states.forward(segment, inputs, entry)

    def forward(self, final: torch.Tensor | None) -> torch.Tensor:
        """The output; the final states are written over `final`."""
        x = self.states.x
        output = self.chunks.empty(x, self.groups * self.heads, x.shape[3])
        for segment in self.chunks.segments:
            inputs, before = self.walk(segment, self.states.entry(segment))
            rows = self.workspace.product("output", self.toeplitz(segment.chunks), inputs.flatten(0, 1))
            if before is not None:
                rows.baddbmm_(self.reads(segment.chunks), before.flatten(0, 1).mT)
            self.chunks.write(rows.view(*inputs.shape[:2], self.heads, self.size, -1), segment, output)
        if final is not None:
            self.states.final(final)
        return self.chunks.finish(output)

    def backward(self, grad_output: torch.Tensor, final: torch.Tensor | None):
        """The gradients of inputs, `log_decay`, `input_matrix`, readout and initial states."""
        stream = StateGradients(self.states, final)
        of_toeplitz, of_reads = torch.zeros_like(self.toeplitz.table), torch.zeros_like(self.reads.table)
        for segment, start in zip(reversed(self.chunks.segments), reversed(stream.starts), strict=True):
            inputs, before = self.walk(segment._replace(following=0), start)
            shape = (*inputs.shape[:2], self.heads, *inputs.shape[2:])
            grad = self.workspace.tensor("grad output", shape, inputs)
            self.chunks.read(grad_output, segment, grad)
            grad, flat = grad.flatten(2, 3).flatten(0, 1), inputs.flatten(0, 1)  # [G N, P C, W], [G N, C, W]
            of_before = None
            of_toeplitz += self._over_chunks("of toeplitz", grad, flat.mT)
            if before is not None:
                of_reads += self._over_chunks("of reads", grad, before.flatten(0, 1))
                of_before = stream.before(segment)
                torch.bmm(grad.mT, self.reads(segment.chunks), out=of_before.flatten(0, 1))
            after = stream.backward(segment, inputs, before, of_before)
            of_inputs = self.workspace.product("grad inputs", self.toeplitz(segment.chunks).mT, grad)
            if after is not None:
                of_inputs.baddbmm_(self.tables.repeated(segment.chunks), after.flatten(0, 1).mT)
            self.chunks.write(of_inputs.view(inputs.shape)[:, :, None], segment, stream.x)
        decay, beta, readout = self._parameters(stream, of_toeplitz, of_reads)
        return stream.finish(), decay, beta, readout, stream.initial_states(final)

    def _over_chunks(self, name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The products of a segment, summed over its chunks: `[G, 1, ...]`."""
        found = self.workspace.product(name, a, b)
        return found.unflatten(0, (self.groups, -1)).sum(1, keepdim=True)

    def _parameters(self, stream: StateGradients, of_toeplitz: torch.Tensor, of_reads: torch.Tensor):
        """The gradients of decay, inputs and readout from those of the tables, in float64."""
        shape = (self.groups, self.heads, self.size, -1)
        of_kernel = _sum_of_diagonals(of_toeplitz.double().view(shape)).to(torch.complex128)  # [G, P, C]
        of_reads = pairs(of_reads.double().view(shape)).conj()  # of rows lambda^(t+1), [G, P, C, M]
        rows_back = self.wide_rows.conj()
        of_rows = of_kernel @ self.wide_response.conj()
        of_rows += (of_reads * self.tables.wide_powers[:, None, 1:].conj()).sum(2)
        of_response = (of_kernel.mT @ rows_back).flip(1)
        of_table = stream.of_table.double() + torch.view_as_real(of_response).flatten(2)
        of_powers = stream.of_powers.to(torch.complex128)
        of_powers[:, 1:] += (of_reads * rows_back[:, :, None]).sum(1)
        readout = torch.view_as_real(2 * of_rows.flatten(0, 1))
        dtype = self.states.x.dtype
        return *(x.to(dtype) for x in self.tables.gradients(of_table, of_powers)), readout.to(dtype)


def _toeplitz(kernel: torch.Tensor) -> torch.Tensor:
    """`[..., C]` to the causal matrices `[..., C, C]` with `kernel[t - j]` at (t, j)."""
    distance = _distances(kernel)
    return torch.where(distance >= 0, kernel[..., distance.clamp(min=0)], 0)


def _sum_of_diagonals(x: torch.Tensor) -> torch.Tensor:
    """The adjoint of `_toeplitz`."""
    distance = _distances(x).flatten()
    causal = (distance >= 0).nonzero()[:, 0]
    return x.new_zeros(x.shape[:-1]).index_add_(-1, distance[causal], x.flatten(-2)[..., causal])


def _distances(x: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(x.shape[-1], device=x.device)
    return steps[:, None] - steps


_NAMESPACE = namespace(__name__)


@torch.library.custom_op(f"{_NAMESPACE}::attention", mutates_args=())
def _operator(
    inputs: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    readout: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    chunk_size: int,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    with without_autocast(inputs.device):
        call = _S4DCall(
            inputs, log_decay, input_matrix, readout, initial_state, cu_seqlens, lengths, chunk_size, output_final_state
        )
        if not output_final_state:
            return call.forward(None), inputs.new_empty(0)
        final = inputs.new_zeros(_state_shape(inputs, log_decay, cu_seqlens))
        if initial_state is not None:
            final.copy_(initial_state)
        return call.forward(final), final


@_operator.register_fake
def _(
    inputs, log_decay, input_matrix, readout, initial_state, cu_seqlens, lengths, chunk_size, output_final_state
):  # fmt: skip
    output = inputs.new_empty((*inputs.shape[:2], readout.shape[0], inputs.shape[3]))
    return output, inputs.new_empty(_state_shape(inputs, log_decay, cu_seqlens) if output_final_state else (0,))


def _state_shape(inputs, log_decay, cu_seqlens) -> tuple[int, ...]:
    rows = inputs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return rows, inputs.shape[2], 2, log_decay.shape[1], inputs.shape[3]


@torch.library.custom_op(f"{_NAMESPACE}::attention_backward", mutates_args=())
def _operator_backward(
    inputs: torch.Tensor,
    log_decay: torch.Tensor,
    input_matrix: torch.Tensor,
    readout: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
    chunk_size: int,
    grad_output: torch.Tensor,
    grad_final: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    with without_autocast(inputs.device):
        call = _S4DCall(
            inputs, log_decay, input_matrix, readout, initial_state, cu_seqlens, lengths, chunk_size,
            grad_final is not None,
        )  # fmt: skip
        *grads, initial = call.backward(grad_output, grad_final)
        return *grads, inputs.new_empty(0) if initial is None else initial


@_operator_backward.register_fake
def _(
    inputs, log_decay, input_matrix, readout, initial_state, cu_seqlens, lengths, chunk_size, grad_output, grad_final
):  # fmt: skip
    tensors = inputs, log_decay, input_matrix, readout, initial_state
    return tuple(inputs.new_empty(0 if x is None else x.shape) for x in tensors)


def _keep_inputs(ctx, inputs, output):
    *tensors, ctx.chunk_size, ctx.output_final_state = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_output, grad_final):
    saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor a single time
    inputs, _, _, readout, initial, *_ = saved
    if grad_output is None:
        grad_output = inputs.new_zeros((*inputs.shape[:2], readout.shape[0], inputs.shape[3]))
    if not ctx.output_final_state:
        grad_final = None
    *grads, of_initial = _operator_backward(*saved, ctx.chunk_size, grad_output, grad_final)
    return *grads, None if initial is None else of_initial, None, None, None, None


_operator.register_autograd(_differentiate, setup_context=_keep_inputs)
