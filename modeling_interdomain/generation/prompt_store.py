"""States of the beginnings of prompts, in memory and then on a disk, so that `generate()` reads only what is new."""

import contextlib
import hashlib
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from transformers.generation import StoppingCriteria
from transformers.utils import logging

from ..layers.versions import CACHE_NAME
from ..model_cache.file import SAVING, NewerStateFileError, StateFileError, read_state_file, write_state_file
from ..model_cache.fingerprint import reading_fingerprint, tensor_bytes

logger = logging.get_logger(__name__)

# Arguments of a decoding method that do not change which state the tokens make.
_HARMLESS = {
    "attention_mask",
    CACHE_NAME,
    "logits_processor",
    "logits_to_keep",
    "position_ids",
    "streamer",
    "synced_gpus",
    "tokenizer",
    "use_cache",
}
_SUFFIX = ".safetensors"
_REMEMBERED = 1 << 17  # beginnings of earlier prompts, 16 bytes each
_ABANDONED = 3600.0  # seconds, after which an incomplete file counts as left behind by its process


class Beginning(NamedTuple):
    """The first `tokens` tokens of a text; `digest` is a hash of them."""

    tokens: int
    digest: str


class StateStore:
    """Keeps the most recently used states of texts, by the model and the tokens.

    As `model.prompt_store` it makes `generate()` go on from the longest beginning of a prompt that is known, and keep
    the states after the prompt and after the answer: the next turn of a conversation costs its new tokens only. Where
    prompts share a beginning that no prompt ended with (a system prompt), the second one keeps the state there, at a
    multiple of `block` tokens.

    Generation with a store writes what it writes without, up to rounding: the text is read in other pieces. A store
    takes part in greedy decoding and sampling of one row without pads, and in continuous batching: the server's, and
    that of `generate_batch()`, whose prompts also share with each other. All else reads the whole prompt: padded
    batches, beams, assisted decoding, embeddings as inputs, hidden states of the prompt as outputs, training, process
    groups.

    A state is found by all that made it, as far as that can be seen: the tokens, the configuration, the weights and
    buffers as they are (also where they were written through `.data`), adapters, the classes of modules and which of
    them train, autocast, the precision of products and the attention implementation. While a module has a hook or a
    replaced `forward`, nothing is taken or kept, and nothing is kept of a text if any of this changed while it was
    read. Looking takes about as long as decoding a token, once before a text and once after it.

    Not seen are: numbers that are attributes of modules (`norm.eps = 1`), functions that modules call and that somebody
    has replaced, an attention function registered anew under its old name, modes of PyTorch, and what is changed and
    changed back while a text is read. Use another store then, or none.

    Several threads may use one store, and several processes one folder: files appear whole, and a state whose file is
    damaged, or was removed by another process, is not known. A state tells much of what was read: keep the folder as
    private as the prompts.

    Args:
        folder: where states are kept that outlast the process or the memory's budget; made when it is missing.
            Default: None, memory alone.
        memory_bytes: of states in memory, which is the computer's, not a GPU's. Default: 512 MiB.
        disk_bytes: of files in the folder, which it may exceed by what other processes are writing. Default: 8 GiB.
        block: tokens, see above. Default: 64.

    Raises:
        ValueError: when a budget is negative, or `block` is not positive.

    Example:

        >>> import torch
        >>> from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM, StateStore
        >>> config = InterdomainConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        >>> model = InterdomainForCausalLM(config).eval()
        >>> model.prompt_store = StateStore("states")
        >>> first = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4)
        >>> second = model.generate(torch.cat([first, torch.tensor([[8, 9]])], dim=1), max_new_tokens=4)
        >>> model.prompt_store.tokens_reused  # all but the last token of the first answer, which was not read yet
        6
    """

    def __init__(
        self,
        folder: str | os.PathLike | None = None,
        memory_bytes: int = 512 << 20,
        disk_bytes: int = 8 << 30,
        block: int = 64,
    ):
        for name, number, least in (
            ("memory_bytes", memory_bytes, 0), ("disk_bytes", disk_bytes, 0), ("block", block, 1)
        ):  # fmt: skip
            if number < least:
                raise ValueError(f"{name} of a StateStore must be at least {least}, got {number}.")
        self.folder = None if folder is None else Path(folder)
        self.memory_bytes, self.disk_bytes, self.block = memory_bytes, disk_bytes, block
        self.tokens_reused = 0
        self.tokens_read = 0
        self._lock = Lock()
        self._states: OrderedDict[tuple[str, Beginning], dict[str, torch.Tensor]] = OrderedDict()
        self._seen: OrderedDict[tuple[str, Beginning], None] = OrderedDict()

    def __reduce__(self):
        return type(self), (self.folder, self.memory_bytes, self.disk_bytes, self.block)  # copies begin empty

    # What a generation asks for.

    def longest(self, model: str, ids: list[int]) -> tuple[int, dict[str, torch.Tensor]] | None:
        """How long a beginning of a prompt is known, and its state; at least one token is left to read.

        Args:
            model: its fingerprint.
            ids: of the prompt.
        """
        with self._lock:
            known = {beginning for name, beginning in self._states if name == model}
        known |= set(self._files(model))
        lengths = {beginning.tokens for beginning in known}
        for beginning in reversed(_beginnings(ids, sorted(length for length in lengths if length < len(ids)))):
            tensors = self._find(model, beginning) if beginning in known else None
            if tensors is not None:
                return beginning.tokens, tensors
        return None

    def shared(self, model: str, ids: list[int], more_than: int) -> int | None:
        """How many of the first tokens, in whole blocks, an earlier prompt had too, if a block `more_than` are."""
        for beginning in reversed(self._blocks(ids[:-1])):
            if beginning.tokens < more_than + self.block:
                return None
            if (model, beginning) in self._seen:
                return beginning.tokens
        return None

    def put(self, model: str, ids: list[int], tensors: dict[str, torch.Tensor]) -> None:
        """Keep the state after these tokens; nobody else may change the tensors."""
        (beginning,) = _beginnings(ids, [len(ids)])
        self._keep(model, beginning, tensors)
        self._remember(model, self._blocks(ids))
        size, on_disk = _bytes(tensors), 0 if self.folder is None else self.disk_bytes
        if size > max(self.memory_bytes, on_disk):
            disk = "no folder" if self.folder is None else f"disk_bytes = {on_disk:,}"
            logger.warning_once(
                f"The prompt store does not keep a state larger than memory_bytes = {self.memory_bytes:,} and {disk}: "
                "its text will be read again."
            )
        if size <= on_disk:
            try:
                self._write(self._path(model, beginning), model, tensors)
            except OSError as error:
                logger.warning_once(f"The prompt store cannot write, and goes on in memory: {error}")

    def announce(self, model: str, prompts: Iterable[list[int]]) -> None:
        """Note, before any of these prompts is read, the beginnings that several of them share."""
        found = Counter(block for ids in prompts for block in self._blocks(ids[:-1]))
        self._remember(model, [block for block, prompts in found.items() if prompts > 1])

    def _remember(self, model: str, blocks: list[Beginning]) -> None:
        with self._lock:
            for block in blocks:
                self._seen[model, block] = None
                self._seen.move_to_end((model, block))
            while len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)

    def _blocks(self, ids: list[int]) -> list[Beginning]:
        return _beginnings(ids, range(self.block, len(ids) + 1, self.block))

    # In memory.

    def _find(self, model: str, beginning: Beginning) -> dict[str, torch.Tensor] | None:
        with self._lock:
            tensors = self._states.get((model, beginning))
            if tensors is not None:
                self._states.move_to_end((model, beginning))
        if self.folder is None:
            return tensors
        path = self._path(model, beginning)
        try:
            if tensors is None:
                tensors, _ = read_state_file(path)
                self._keep(model, beginning, tensors)
            os.utime(path)
        except StateFileError as error:
            # A newer version's, or one that cannot be read just now, may be good.
            if not isinstance(error, NewerStateFileError) and not isinstance(error.__cause__, OSError):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        except OSError:
            pass  # another process has removed it
        return tensors

    def _keep(self, model: str, beginning: Beginning, tensors: dict[str, torch.Tensor]) -> None:
        if _bytes(tensors) > self.memory_bytes:
            return
        with self._lock:
            self._states[model, beginning] = tensors
            self._states.move_to_end((model, beginning))
            total = sum(_bytes(x) for x in self._states.values())
            while total > self.memory_bytes:
                _, oldest = self._states.popitem(last=False)
                total -= _bytes(oldest)

    # On the disk.

    def _path(self, model: str, beginning: Beginning) -> Path:
        return self.folder / model[:32] / f"{beginning.tokens}-{beginning.digest}{_SUFFIX}"

    def _files(self, model: str) -> Iterator[Beginning]:
        """The states of a model that are on the disk now."""
        if self.folder is None:
            return
        for path in _listed(self.folder / model[:32]):
            tokens, _, digest = path.name.removesuffix(_SUFFIX).partition("-")
            if path.name.endswith(_SUFFIX) and tokens.isdigit():
                yield Beginning(int(tokens), digest)

    def _write(self, path: Path, model: str, tensors: dict[str, torch.Tensor]) -> None:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # A torn file would be noticed when it is read: nobody waits for the disk.
            about = {"model": model, "rows": "1", "tokens": path.name.partition("-")[0]}
            write_state_file(path, tensors, about, durable=False)
        self._remove_the_oldest()

    def _remove_the_oldest(self) -> None:
        """Files beyond the budget, and what processes that ended while they were writing left behind."""
        found = []
        for path in [path for folder in _listed(self.folder) for path in _listed(folder)]:
            try:
                status = path.stat()
            except OSError:
                continue  # it is gone
            if path.name.endswith(_SUFFIX):
                found.append((status.st_mtime, status.st_size, path))
            elif path.name.endswith(SAVING) and time.time() - status.st_mtime > _ABANDONED:
                path.unlink(missing_ok=True)
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.disk_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


class PromptReading(StoppingCriteria):
    """One generation with a store: it goes on from the state that is known, and keeps new ones.

    A stopping criterion that stops nothing: so it is called when the cache has read the prompt, with the first token.
    """

    def __init__(self, found: tuple[StateStore, str], model: Any, cache: Any, ids: torch.Tensor, piece: int | None):
        self.found, self.model, self.cache, self.ids, self.piece = found, model, cache, ids, piece
        self.store, self.fingerprint = found
        self.prompt: list[int] = ids[0].tolist()
        self.kept: list[tuple[int, dict[str, torch.Tensor]]] = []

    def begin(self) -> None:
        """Fill the cache with what is known, and read on to where another prompt may begin."""
        start, found = 0, self.store.longest(self.fingerprint, self.prompt)
        if found is not None:
            start, tensors = found
            self.cache.restore(tensors, start, self.model)
        self.store.tokens_reused += start
        self.store.tokens_read += len(self.prompt) - start
        shared = self.store.shared(self.fingerprint, self.prompt, start)
        if shared is not None:
            read_on(self.model, self.ids[:, start:shared], self.cache, self.piece)
            self._keep()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs) -> torch.Tensor:
        if input_ids.shape[1] == len(self.prompt) + 1:
            self._keep()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def finish(self, ids: torch.Tensor | None) -> None:
        """Keep the states so far: `ids` are prompt and answer, None when the generation was broken off."""
        text = self.prompt
        if ids is not None and int(self.cache.get_seq_length()) <= ids.shape[1]:
            text = ids[0].tolist()
            self._keep()
        put_after(self.model, self.found, [(text[:tokens], tensors) for tokens, tensors in self.kept])

    def _keep(self) -> None:
        tokens = int(self.cache.get_seq_length())
        if tokens not in [kept for kept, _ in self.kept]:
            self.kept.append((tokens, on_cpu(self.cache.named_tensors())))


def prompt_reading(model: Any, ids: torch.Tensor, generation_config: Any, arguments: dict) -> PromptReading | None:
    """How the store of a model takes part in a generation with these arguments; None where it cannot."""
    cache = arguments.get(CACHE_NAME)
    if not hasattr(cache, "restore") or ids.shape[0] != 1:
        return None
    config, mask, positions = generation_config, arguments.get("attention_mask"), arguments.get("position_ids")
    expected = torch.arange(ids.shape[1], device="cpu")
    complete = config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions)
    if (
        any(arguments[name] is not None for name in arguments.keys() - _HARMLESS)
        or arguments.get("use_cache") is False
        or config.is_assistant
        or complete  # of the prompt, too
        or int(cache.get_seq_length())
        or (mask is not None and not (mask.shape == ids.shape and bool((mask == 1).all())))
        or (positions is not None and not positions.cpu().equal(expected.expand_as(positions)))
    ):
        return None
    return begin_reading(model, cache, ids, config.prefill_chunk_size)


def begin_reading(model: Any, cache: Any, ids: torch.Tensor, piece: int | None) -> PromptReading | None:
    """How the store of a model takes part in reading a prompt `[1, T]` into an empty cache; None where it cannot."""
    found = store_of(model) if ids.shape[1] > 1 else None
    return None if found is None else PromptReading(found, model, cache, ids, piece)


def read_on(model: Any, ids: torch.Tensor, cache: Any, piece: int | None) -> torch.Tensor:
    """Read `[1, T]` more tokens, at most `piece` in a forward; the logits `[1, vocab_size]` after the last."""
    for some in ids.split(piece or ids.shape[1], dim=1):
        logits = model(some.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1]


def put_after(
    model: Any, found: tuple[StateStore, str], states: Sequence[tuple[list[int], dict[str, torch.Tensor]]]
) -> None:
    """Keep these states, each after its tokens, unless the model has changed since `store_of` found this."""
    if states and store_of(model) == found:
        for ids, tensors in states:
            found[0].put(found[1], ids, tensors)


def store_of(model: Any) -> tuple[StateStore, str] | None:
    """The store of a model and the fingerprint of the model, where its states depend on nothing else but the tokens."""
    store = getattr(model, "prompt_store", None)
    if store is None or model.training or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if isinstance(store, str | os.PathLike):
        raise ValueError(
            f"prompt_store must be a StateStore, got {store!r}: set it to StateStore() or StateStore(folder)."
        )
    try:
        return store, reading_fingerprint(model)
    except ValueError as error:  # hooks, or offloaded weights, whose fingerprint nobody can take
        logger.warning_once(f"The prompt store is not used: {error}")
        return None


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU, which nobody else will change."""
    return {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}


def _beginnings(ids: list[int], lengths) -> list[Beginning]:
    """The beginnings of these lengths, in ascending order, by one pass over the tokens."""
    numbers, digest, start, found = tensor_bytes(torch.tensor(ids, device="cpu")).data, hashlib.sha256(), 0, []
    for length in lengths:
        digest.update(numbers[8 * start : 8 * length])
        found.append(Beginning(length, digest.hexdigest()[:32]))
        start = length
    return found


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())


def _listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing where there is none."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []
