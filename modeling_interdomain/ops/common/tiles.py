"""What the fused kernels of all operators share: where the tokens of a chunk lie, and how tiles are multiplied."""

from typing import Any, NamedTuple

import torch

from .launch import interpreted, tl, triton


class Documents(NamedTuple):
    """Where documents, or the real tokens of padded rows, lie among the flattened tokens; integer tensors.

    All are None where every row is full. Documents do not overlap and may be empty.

    Attributes:
        starts, ends: `[S]`, tokens.
        first_chunks: `[S + 1]`, the number of chunks of all documents before.
        first_slots: `[S]`, where the state before a document is kept. The slots of its later chunks are numbered by the
            whole chunks of tokens before them, so that many short documents need no more room than one long one.
    """

    starts: Any = None
    ends: Any = None
    first_chunks: Any = None
    first_slots: Any = None


class Layout(NamedTuple):
    """How many chunks the tokens of one call make, and where they lie.

    Attributes:
        rows: of the batch, or documents.
        chunks: an upper bound where there are documents.
        slots: for the states before the chunks.
    """

    rows: int
    chunks: int
    slots: int
    documents: Documents


def layout_of(
    batch: int,
    length: int,
    chunk: int,
    has_initial: bool,
    cu_seqlens: torch.Tensor | None,
    lengths: torch.Tensor | None,
) -> Layout:
    """The chunks of batch rows, packed documents or the real tokens of padded rows; no value is read by the host."""
    if cu_seqlens is not None:
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
        rows = cu_seqlens.numel() - 1
        chunks = length // chunk + min(rows, length)
    else:
        rows, chunks = batch, batch * -(-length // chunk)
        if lengths is None:
            return Layout(rows, chunks, chunks, Documents())
        starts = torch.arange(0, batch * length, length, dtype=torch.int32, device=lengths.device)
        ends = starts + lengths
    counts = (ends - starts + chunk - 1) // chunk
    first_chunks = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    # Without initial states the first chunks of all documents begin with zeros and share one slot.
    first_slots = torch.full_like(starts, batch * length // chunk)
    if has_initial:
        first_slots += torch.arange(starts.shape[0], dtype=torch.int32, device=starts.device)
    slots = batch * length // chunk + (rows if has_initial else 1)
    return Layout(rows, chunks, slots, Documents(starts, ends, first_chunks, first_slots))


def chunk_tokens(largest: int, length: int) -> int:
    """Tokens of a chunk, a power of two from 16; `length` is only compared, so that a graph serves all above 32."""
    chunk = 1 << (max(16, largest).bit_length() - 1)
    while chunk > 16 and chunk // 2 >= length:
        chunk //= 2
    return chunk


class Arithmetic(NamedTuple):
    """DTYPE of the operands of matrix products, "bfloat16" or "float32", and PRECISION as `tl.dot` takes it, or
    "interpreted" for bfloat16 where the interpreter runs. Text, because Triton writes some of a kernel's constants as
    JSON, for its hooks and when it keeps what it has timed.
    """

    DTYPE: str
    PRECISION: str

    @property
    def storage(self) -> torch.dtype:
        """The dtype of states between kernels, and of the operands of matrix products."""
        return torch.bfloat16 if self.DTYPE == "bfloat16" else torch.float32

    @property
    def terms(self) -> int:
        """The size of an operand of a matrix product in units of 16 bits, by which tiles are chosen."""
        return self.storage.itemsize // 2


def arithmetic(dtype: torch.dtype) -> Arithmetic:
    """Operands of the matrix units, and how float32 is multiplied.

    float16 would overflow where a state or a readout passes 65,504; tf32 has its precision and the range of float32.
    """
    if dtype == torch.bfloat16:
        return Arithmetic("bfloat16", "interpreted" if interpreted() else "tf32")
    if torch.version.hip is not None or interpreted():
        return Arithmetic("float32", "ieee")
    fast = dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest"
    return Arithmetic("float32", "tf32" if fast else "tf32x3")


@triton.jit
def narrow(x, dtype: tl.constexpr, MATH: tl.constexpr):
    """`x.to(dtype)`, to the nearest in the interpreter too, which would cut bfloat16 off."""
    if MATH.PRECISION == "interpreted" and tl.bfloat16 == dtype:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def as_operand(x, MATH: tl.constexpr):
    """x in MATH.DTYPE."""
    if MATH.DTYPE == "bfloat16":
        return narrow(x, tl.bfloat16, MATH)
    else:
        return narrow(x, tl.float32, MATH)


@triton.jit
def dot(a, b, acc, MATH: tl.constexpr):
    """A matrix product with operands in MATH.DTYPE, accumulated in float32."""
    a = as_operand(a, MATH)
    b = as_operand(b, MATH)
    if MATH.PRECISION == "interpreted":  # the interpreter would multiply the bit patterns of bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=MATH.PRECISION)


@triton.jit
def left_over(x, MATH: tl.constexpr):
    """What rounding a float32 x to MATH.DTYPE takes away: the second of two terms that add up to x."""
    return x - as_operand(x, MATH).to(tl.float32)


@triton.jit
def load_tokens(x, start, length, first, stride, width, C: tl.constexpr, BLOCK: tl.constexpr):
    """`[C, BLOCK]`: tokens from `start`, columns from `first`; zero past the chunk's length or the head's width."""
    rows = tl.arange(0, C)
    columns = first + tl.arange(0, BLOCK)
    at = (start + rows)[:, None].to(tl.int64) * stride + columns[None, :]
    return tl.load(x + at, mask=(rows < length)[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def store_tokens(
    x, tile, start, length, first, stride, width, C: tl.constexpr, BLOCK: tl.constexpr, MATH: tl.constexpr
):
    rows = tl.arange(0, C)
    columns = first + tl.arange(0, BLOCK)
    at = (start + rows)[:, None].to(tl.int64) * stride + columns[None, :]
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    tl.store(x + at, narrow(tile, x.dtype.element_ty, MATH), mask=inside)


@triton.jit
def locate_between(chunk, documents, count, per_row, row_length, C: tl.constexpr, PACKED: tl.constexpr):
    """The first token of a chunk, how many it has (0 for a chunk that no document uses), the slot of the state before
    it, and that of the state before the next one; the last chunk has the slot of the first as its next.

    PACKED: there are `count` documents. Otherwise every row has `per_row` chunks of `row_length` tokens.
    """
    if PACKED:
        # Few documents against many chunks: a binary search without a table of all chunks.
        used = chunk < tl.load(documents.first_chunks + count)
        low = 0
        high = tl.where(used, count, 0)
        while low < high:
            middle = (low + high) // 2
            if tl.load(documents.first_chunks + middle + 1) <= chunk:
                low = middle + 1
            else:
                high = middle
        begin = tl.load(documents.starts + low).to(tl.int64)
        inside = (chunk - tl.load(documents.first_chunks + low)).to(tl.int64)
        start = begin + inside * C
        left = tl.load(documents.ends + low) - start
        length = tl.where(used, tl.minimum(left, C), 0).to(tl.int32)
        first = tl.load(documents.first_slots + low).to(tl.int64)
        slot = tl.where(inside == 0, first, begin // C + inside - 1)
        following = tl.where(left <= C, first, begin // C + inside)
    else:
        number = chunk % per_row
        start = (chunk // per_row).to(tl.int64) * row_length + number * C
        length = tl.minimum(row_length - number * C, C)
        slot = tl.cast(chunk, tl.int64)
        following = tl.where(number + 1 == per_row, slot - number, slot + 1)
    return start, length, slot, following


@triton.jit
def locate(chunk, documents, count, per_row, row_length, C: tl.constexpr, PACKED: tl.constexpr):
    """As `locate_between`, without the slot of the next chunk."""
    start, length, slot, _ = locate_between(chunk, documents, count, per_row, row_length, C, PACKED)
    return start, length, slot


@triton.jit
def segment_of(segment, documents, per_row, row_length, C: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr):
    """First token and number of tokens of one of the SEGMENTS of a row or document, some of them empty; the slot of
    the state before its first chunk and of that before its second (those that follow lie behind).
    """
    row = segment // SEGMENTS
    if PACKED:
        start = tl.load(documents.starts + row).to(tl.int64)
        length = (tl.load(documents.ends + row) - start).to(tl.int32)
    else:
        start = row.to(tl.int64) * row_length
        length = row_length
    chunks = tl.cdiv(length, C)
    each = tl.cdiv(chunks, SEGMENTS)
    skipped = tl.minimum((segment % SEGMENTS) * each, chunks)
    length = tl.minimum(length - skipped * C, each * C)
    if PACKED:
        second = start // C + skipped
        first = tl.where(skipped == 0, tl.load(documents.first_slots + row).to(tl.int64), second - 1)
    else:
        first = row.to(tl.int64) * per_row + skipped
        second = first + 1
    return start + skipped * C, tl.maximum(length, 0), first, second


@triton.jit
def causal(scores, C: tl.constexpr):
    rows = tl.arange(0, C)
    return tl.where(rows[:, None] >= rows[None, :], scores, tl.zeros_like(scores))


def slots_of(pool: torch.Tensor, state_indices: torch.Tensor | None) -> dict[str, Any]:
    """The arguments of a kernel by which `state_of` finds the slots of a pool; none without a pool."""
    return {} if state_indices is None else {"slots": state_indices.contiguous(), "slot_size": pool.stride(0)}


@triton.jit
def state_of(state, group, groups, size, mask, slots, slot_size):
    """Where the state of a program's row and group begins, `size` elements, and whether the row's token is no pad: pads
    leave the state alone, and their output is zero.

    mask `[batch]`, zero for a pad, or None. With slots `[batch]` the states lie in those of a pool, slot_size elements
    from one to the next; a row below 0 has none and is a pad, which reads the first one.
    """
    real_token = tl.load(mask + tl.program_id(0)).to(tl.int32) if mask is not None else 1
    if slots is None:
        here = state + (tl.program_id(0).to(tl.int64) * groups + group) * size
    else:
        slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
        real_token = tl.where(slot < 0, 0, real_token)
        here = state + tl.maximum(slot, 0) * slot_size + group * size
    return here, real_token
