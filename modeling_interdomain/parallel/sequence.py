"""Rows in pieces over several processes: where each piece stands, and what it passes on to those after it.

All that a recurrence needs of the tokens before a piece is the state. So each process computes the state that its own
tokens leave, beginning with zeros, all gather these, and each sums up what arrives at its piece, `sum_j decay(j + 1 ..
r - 1) S_j`, from which its operator goes on as from a cache. A head passes on 2 M (R + D) numbers whatever the length,
where ring attention passes on every key and value. Convolutions get the last inputs before a piece in the same way, and
a window the last keys and values, and the first of a text.

Gradients return the same way, so all processes of a group call forward and backward alike.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from transformers.cache_utils import Cache

from ..layers.common import AuxiliaryLoss
from ..layers.convolution import last_inputs
from ..ops.common.packing import cu_seqlens_from_positions, mask_from_lengths, positions_from_cu_seqlens

# The inputs of a batch that have a number for each token, along their second axis.
_BY_TOKEN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")
# As many numbers tell the other processes what this one was given, or that it refuses it.
_TOLD = 5


class _Gathered(torch.autograd.Function):
    """`[...]` of each process to `[processes, ...]` on all; gradients are summed over who used it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        found = x.new_empty(group.size() * x.numel())
        dist.all_gather_single(found, x.contiguous().flatten(), group=group)
        return found.view(group.size(), *x.shape)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        (grad,) = grads
        found = grad.new_empty(grad[0].numel())
        dist.reduce_scatter_single(found, grad.contiguous().flatten(), group=ctx.group)
        return found.view(grad.shape[1:]), None


class _Summed(torch.autograd.Function):
    """The sum over processes on all of them; gradients are summed, too."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, total = group, x.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        return _Summed.apply(grads[0], ctx.group), None


def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
    """A tensor summed over the processes of a group.

    Every process has this sum and differentiates it, so a gradient is that of all of them: averaged over the processes,
    as engines do, it is that of one sum.
    """
    return _Summed.apply(x, group)


@dataclass(frozen=True)
class SequencePiece:
    """The piece of B rows that this process holds, T tokens of each; made by `place_piece`.

    Attributes:
        group: the processes that hold the pieces, in the order of the rows.
        offset: tokens of a row before the piece, pads included.
        tokens: `[processes, B]`, of every piece the real tokens of its last document; of all where there is one.
        forgets: `[processes, B]` bool, the pieces in which a document begins: nothing before them goes beyond.
        begins: `[B]` bool, the rows of which this piece begins with the first token of a document.
        last: `[B, T]` bool, this piece's real tokens of its last document; pads are behind the others.
        first: `[B]`, the packed document with which each row begins; None where the piece is not packed.
        documents: the number of packed documents.
    """

    group: Any
    offset: int
    tokens: torch.Tensor
    forgets: torch.Tensor
    begins: torch.Tensor
    last: torch.Tensor
    first: torch.Tensor | None = None
    documents: int = 0

    @property
    def packed(self) -> bool:
        """Whether there are several documents in any piece, so that no state is that of a row."""
        return self.first is not None or bool(self.forgets[1:].any())

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens as the layers have them, rows or one row of documents, as rows `[B, T, ...]`."""
        return x if self.first is None else x[0].unflatten(0, tuple(self.last.shape))

    def state(
        self,
        left: torch.Tensor,
        total_decay: torch.Tensor | None,
        decay_state: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """What arrives at this piece, `[B, ...]`, or a row a packed document, those within it zero.

        Args:
            left: `[B, ...]`, the state that the last document's tokens of this piece leave, begun from zero.
            total_decay: `[B, ...]`, what `decay_state` needs to know of them, None where their number does.
            decay_state: `decay_state(state, total_decay)`, a state after such tokens that write nothing. Called in
            float64.
        """
        sent = [left.flatten(1)]
        if total_decay is not None:
            sent.append(total_decay.to(left.dtype).flatten(1))
        found = _Gathered.apply(torch.cat(sent, dim=1), self.group).double()
        states = found[..., : left[0].numel()].unflatten(2, left.shape[1:])
        ages = self.tokens if total_decay is None else found[..., left[0].numel() :].unflatten(2, total_decay.shape[1:])

        def after(state: torch.Tensor, process: int) -> torch.Tensor:
            return decay_state(state, ages[process]) + states[process]

        return self._arriving(states, after).to(left.dtype)

    def conv_state(self, projections: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
        """The last `size` inputs before this piece, `[B, W, size]` or a row a document, of projections `[B, T, W]`."""
        tails = torch.cat([self._tail(self.rows(x), size) for x in projections], dim=1)
        real = torch.arange(size, 0, -1, device=tails.device) <= self.tokens[..., None]  # [processes, B, size]

        def after(window: torch.Tensor, tail: torch.Tensor, process: int) -> torch.Tensor:
            return last_inputs(window, tail.mT, real[process])

        return list(self.handed_on(tails, after).split([x.shape[-1] for x in projections], dim=1))

    def handed_on(self, own: torch.Tensor, after: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]):
        """What arrives at this piece: `after(found, part, process)` moves it over a piece whose `own` is this part."""
        parts = _Gathered.apply(own, self.group)
        return self._arriving(parts, lambda found, process: after(found, parts[process], process))

    def _tail(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """The last `size` of the last document's real tokens of rows `[B, T, W]`, `[B, W, size]`, after zeros."""
        length, count = x.shape[1], self.last.sum(1)
        end = torch.where(self.last[:, -1], length, count)[:, None]
        back = torch.arange(size, 0, -1, device=x.device)
        places = (end - back).clamp(min=0)[..., None].expand(-1, -1, x.shape[2])
        return torch.where((back <= count[:, None])[..., None], x.gather(1, places), 0).mT

    def _arriving(self, parts: torch.Tensor, after: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
        """The parts of the pieces before this one, each moved on to its beginning; a new document forgets them."""
        # Zeros that depend on the parts, so that the first process takes part in the backward pass, too.
        found = torch.where(torch.zeros_like(self.begins).view(-1, *[1] * (parts.ndim - 2)), parts[0], 0)
        for process in range(self.group.rank()):
            found = after(_forgotten(found, self.forgets[process]), process)
        found = _forgotten(found, self.begins)
        if self.first is None:
            return found
        return found.new_zeros(self.documents, *found.shape[1:]).index_copy(0, self.first, found)


def _forgotten(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.where(rows.view(-1, *[1] * (x.ndim - 1)), 0, x)


def place_piece(
    group: Any,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    separable: bool = True,
) -> tuple[SequencePiece, torch.Tensor, torch.Tensor | None]:
    """Where the piece of this process stands among those of the group.

    Args:
        group: the processes that hold the pieces, in the order of the rows.
        tokens: `[B, T, ...]` of this piece.
        attention_mask: `[B, T]` of this piece, 0 for pads.
        position_ids: `[B or 1, T]` of this piece, along the whole rows. Without a mask they separate documents where
            they do not go up, if `separable`.
        cu_seqlens: `[S + 1]`, the ends of documents along the whole row, the same on all processes; B = 1.

    Returns:
        The piece; its positions `[B or 1, T]`; and the ends of its documents along the flattened piece, or None.

    Raises:
        ValueError: on all processes alike, when the pieces do not fit together.
    """
    (batch, length), device, rank = tokens.shape[:2], tokens.device, group.rank()
    offset, whole = _extent(group, [batch, length], (attention_mask, position_ids, cu_seqlens), device)
    if cu_seqlens is not None:
        position_ids = _positions(cu_seqlens.to(device), whole)[:, offset : offset + length]
    mask = torch.ones(batch, length, dtype=torch.bool, device=device)
    if attention_mask is not None:
        mask = attention_mask.bool()
    documents = None
    if position_ids is not None and attention_mask is None and separable:
        documents = position_ids.expand(batch, -1).to(device)
    last, inner = _last_document(documents, mask)

    edges = mask.long() if documents is None else documents
    sent = mask.sum(1), last.sum(1), inner.long(), edges[:, 0], edges[:, -1]
    real, count, begun, first, end = _gathered_numbers(torch.stack(sent), group).unbind(1)
    begins = torch.zeros_like(begun, dtype=torch.bool)
    begins[0] = True
    if documents is not None:
        begins[1:] = first[1:] <= end[:-1]
    if position_ids is None:
        position_ids = (real[:rank].sum(0)[:, None] + mask.long().cumsum(1) - 1).clamp(min=0)
    piece = SequencePiece(group, offset, count, begins | begun.bool(), begins[rank], last)
    ends = None if documents is None else cu_seqlens_from_positions(documents)
    if ends is not None:
        heads = torch.searchsorted(ends, torch.arange(batch, device=device) * length)
        piece = replace(piece, first=heads, documents=ends.shape[0] - 1)
    return piece, position_ids, ends


def _extent(group: Any, shape: list[int], arguments: Sequence[Any], device: torch.device) -> tuple[int, int]:
    """The tokens of a row before this piece, and of a whole row; all processes must give the same arguments."""
    found = _all_told(group, [*shape, *(x is not None for x in arguments)], device)
    if len({(rows, *given) for rows, _, *given in found}) > 1:
        raise ValueError(
            "The processes of a sequence_group must hold the same rows and give the same arguments, got (rows, tokens, "
            f"attention_mask, position_ids, cu_seq_lens_q) = {', '.join(str(tuple(x)) for x in found)}."
        )
    ends = list(accumulate((length for _, length, *_ in found), initial=0))
    return ends[group.rank()], ends[-1]


@contextlib.contextmanager
def refused_by_all(group: Any, device: torch.device) -> Iterator[None]:
    """Let an error end the forward in all processes: the others wait for what this one was given, see `_all_told`.

    Raises:
        ValueError: when this is no process group, or a graph is compiled.
    """
    _check_group(group)
    try:
        yield
    except (ValueError, TypeError):
        _gathered_numbers(torch.full((_TOLD,), -1, device=device), group)
        raise


def _check_group(group: Any) -> None:
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise ValueError(
            f"sequence_group must be a process group of torch.distributed that this process is in, got {group!r}."
        )
    if torch.compiler.is_compiling():
        raise ValueError("A sequence_group passes states between processes, which no graph holds: do not compile.")


def check_sequence_group(
    model, mixers: list[Any], cache: Cache | None, attention_mask, arguments: dict[str, Any]
) -> None:
    """Refuse what cannot be read in pieces: the losses of experts in training, which are statistics of all tokens;
    layers without a state to pass on; a past; packed pads; maps of all tokens."""
    if model.training and any(isinstance(module, AuxiliaryLoss) for module in model.modules()):
        raise ValueError(
            "The auxiliary loss of experts is a statistic of all tokens, which a piece does not know: leave "
            "sequence_group out in training."
        )
    for i, mixer in enumerate(mixers):
        if not mixer.passes_state:
            name, rule = model.config.mixers_per_layer[i], " with the delta rule" * hasattr(mixer, "delta_proj")
            raise ValueError(f'Layer {i} is "{name}"{rule}, which passes no state on: leave sequence_group out.')
        if getattr(mixer, "sparse", None) is not None:
            raise ValueError(f"Layer {i} has a sparse branch, which reads all tokens: leave sequence_group out.")
        if getattr(mixer, "first_state", None) is not None:
            raise ValueError(
                f"Layer {i} has a learned state, which pieces do not begin with: leave sequence_group out."
            )
    if attention_mask is not None and not (isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2):
        raise ValueError(
            "With a sequence_group attention_mask must have shape [B, T], one number a token of the piece."
        )
    if cache is not None and cache.get_seq_length():
        raise ValueError("A sequence_group reads rows from their beginning: give a new past_key_values, or none.")
    if cache is not None and any(getattr(layer, "record_past", False) for layer in cache.layers):
        raise ValueError("A piece cannot be taken back: give past_key_values that record no past to a sequence_group.")
    if arguments.get("cu_seq_lens_q") is not None and (attention_mask is not None or cache is not None):
        raise ValueError(
            "With a sequence_group cu_seq_lens_q pack whole documents without pads: leave attention_mask and "
            "past_key_values out."
        )
    if arguments.get("seq_idx") is not None:
        raise ValueError("With a sequence_group packed documents are told by cu_seq_lens_q: leave seq_idx out.")
    if arguments.get("output_attentions") or model.config.output_attentions:
        raise ValueError("output_attentions maps all tokens of a row on all others: leave sequence_group out.")


def check_alike(group: Any, device: torch.device, **given: Any) -> None:
    """Raise on all processes if some of them were given an argument, and others None."""
    found = _all_told(group, [value is not None for value in given.values()], device)
    if len(set(map(tuple, found))) > 1:
        raise ValueError(
            f"The processes of a sequence_group must give the same arguments, got ({', '.join(given)}) = "
            f"{', '.join(str(tuple(x[: len(given)])) for x in found)}."
        )


def _all_told(group: Any, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """The numbers of each process; an error where one has refused its piece."""
    own = [*numbers, *[0] * (_TOLD - len(numbers))]
    found = _gathered_numbers(torch.tensor(own, device=device), group).tolist()
    for process, told in enumerate(found):
        if told[0] < 0:
            raise ValueError(f"Process {process} of the sequence_group has refused its piece; its own error says why.")
    return found


def _positions(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """`[1, length]`, of the tokens of a whole row in its documents."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != length or any(a >= b for a, b in pairwise(ends)):
        raise ValueError(
            "With a sequence_group cu_seq_lens_q are the ends along the whole row: they must increase strictly from 0 "
            f"to {length}, the tokens of all processes, got {ends}."
        )
    return positions_from_cu_seqlens(cu_seqlens, (1, length))


def _last_document(positions: torch.Tensor | None, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The real tokens of the last document, `[B, T]` with pads at the end, and whether it begins after the first."""
    if positions is None:
        return mask_from_lengths(mask.sum(1), mask), torch.zeros_like(mask[:, 0])
    starts = positions.diff(dim=1) <= 0
    behind = starts.flip(1).cumsum(1).flip(1)  # of those that begin behind each token but the last
    return torch.nn.functional.pad(behind == 0, (0, 1), value=True), starts.any(1)


def _gathered_numbers(x: torch.Tensor, group: Any) -> torch.Tensor:
    return _Gathered.apply(x.long(), group)


def shifted_labels(labels: torch.Tensor, group: Any) -> torch.Tensor:
    """`shift_labels` `[B, T]` of a piece: what each token predicts, the last one the first label of the next piece."""
    heads = _gathered_numbers(labels[:, 0], group)
    own = group.rank() + 1
    following = heads[own] if own < group.size() else torch.full_like(heads[0], -100)
    return torch.cat([labels[:, 1:], following[:, None].to(labels)], dim=1)


def sequence_piece(batch: dict[str, Any], group: Any) -> dict[str, Any]:
    """This process's piece of a batch of whole rows, with the `sequence_group` that a model is to be called with.

    Args:
        batch: the arguments of a model. Those with a number a token, `[B, T, ...]`, are cut along T into nearly equal
            pieces, in the order of the processes; others stay, `cu_seq_lens_q` with them.
        group: the process group whose processes all have these rows.

    Returns:
        A new dictionary.

    Raises:
        ValueError: when the rows have fewer tokens than there are processes.

    Example:

        >>> torch.distributed.init_process_group("gloo")  # under torchrun
        >>> group = torch.distributed.group.WORLD
        >>> model(**sequence_piece({"input_ids": ids, "labels": ids}, group)).loss.backward()
    """
    cut = {name: x for name, x in batch.items() if name in _BY_TOKEN and isinstance(x, torch.Tensor)}
    length = max((x.shape[1] for x in cut.values()), default=0)
    if length < group.size():
        raise ValueError(
            f"Rows of {length} tokens cannot be cut into {group.size()} pieces: use longer rows, or fewer processes."
        )
    pieces = {name: x.tensor_split(group.size(), dim=1)[group.rank()].contiguous() for name, x in cut.items()}
    return {**batch, **pieces, "sequence_group": group}
