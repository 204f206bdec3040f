"""S4D in matrix products over chunks, as one opaque operator of `torch.library`.

With a readout that does not depend on the token, the output is a causal convolution whose kernel is

    K[d] = 2 Re sum_n readout[n] lambda_n^d beta_n

for each head. Inside a chunk of C tokens that is one lower triangular Toeplitz matrix a head, and what came before
arrives through the state at the start of the chunk.
"""

import torch

from ..common.chunks import Segment, chunks_of
from ..common.custom_op import differentiable
from ..common.decay import as_complex, by_age
from ..common.packing import state_rows
from ..common.states import DecayTables, Repeated, StateGradients, States, Workspace, final_states, pairs

# Numbers of the output of a segment, which on a CPU should stay in the second-level cache.
_SEGMENT_FLOATS = {"cpu": 1 << 18, "other": 1 << 24}


class _S4DCall:
    """One call: its tables, the layout of its chunks, and the memory that its segments share."""

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
        self.toeplitz = Repeated(causal(kernel).to(inputs.dtype).flatten(1, 2))  # [G, P C, C]
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
        """Products of a segment, summed over its chunks: `[G, 1, ...]`."""
        found = self.workspace.product(name, a, b)
        return found.unflatten(0, (self.groups, -1)).sum(1, keepdim=True)

    def _parameters(self, stream: StateGradients, of_toeplitz: torch.Tensor, of_reads: torch.Tensor):
        """The gradients of decay, inputs and readout from those of the tables, in float64."""
        shape = (self.groups, self.heads, self.size, -1)
        of_kernel = by_age(of_toeplitz.double().view(shape)).sum(2).to(torch.complex128)  # [G, P, C]
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


def causal(kernel: torch.Tensor) -> torch.Tensor:
    """`[..., C]` to the matrices `[..., C, C]` with `kernel[t - j]` at (t, j), zero above the diagonal."""
    return by_age(kernel[..., None, :].expand(*kernel.shape, -1))


def _forward(
    inputs: torch.Tensor, log_decay: torch.Tensor, input_matrix: torch.Tensor, readout: torch.Tensor,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, lengths: torch.Tensor | None, chunk_size: int,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    arguments = inputs, log_decay, input_matrix, readout, initial_state, cu_seqlens, lengths, chunk_size
    call = _S4DCall(*arguments, output_final_state)
    final = final_states(inputs, _state_shape(inputs, log_decay, cu_seqlens), output_final_state, initial_state)
    return call.forward(final if output_final_state else None), final


def _outputs(inputs, log_decay, input_matrix, readout, initial_state, cu_seqlens, lengths, chunk_size, want_final):
    output = inputs.new_empty((*inputs.shape[:2], readout.shape[0], inputs.shape[3]))
    return output, inputs.new_empty(_state_shape(inputs, log_decay, cu_seqlens) if want_final else (0,))


def _state_shape(inputs, log_decay, cu_seqlens) -> tuple[int, ...]:
    return state_rows(inputs, cu_seqlens), inputs.shape[2], 2, log_decay.shape[1], inputs.shape[3]


def _backward(inputs, grads, needs):
    return _S4DCall(*inputs[:-1], grads[1] is not None).backward(*grads)


chunk_s4d = differentiable(__name__, "attention", _forward, _outputs, _backward, count=5)
