"""Continuous batching of requests that come one by one, with the methods by which `transformers serve` asks for it."""

import asyncio
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from types import SimpleNamespace
from typing import Any

import torch
from transformers.utils import logging

from .batch import Batch, Request, bound_pieces, check_way, limits_of, unset_lengths, why_not_batched

logger = logging.get_logger(__name__)

_STOPPED = "The manager was stopped before this request was finished."


class RequestManager:
    """Answers requests in a thread of its own, as many at once as there are rows.

    `model.init_continuous_batching(...)` makes one. It has the methods of the library's `ContinuousBatchingManager`
    that give results, and those that the library's server and context manager use. While a prompt is read, the answers
    in flight wait.

    Args:
        model: as of a `Batch`.
        generation_config: of all requests, but for their `max_new_tokens` and `eos_token_id`. Default: the model's.
        continuous_batching_config: the library's, of which two fields matter: `max_requests_per_batch` are in flight at
            once (default: 8, or `max_batch_tokens` where that is given alone), and a forward has no more than
            `max_batch_tokens` tokens, be it one of every request or those of a prompt, which is then read in pieces.
        workload_hints: of the library's engine; not used.

    Raises:
        ValueError: when the configuration asks for more than one token a row and step, or for less than one row.

    Example:

        >>> import torch
        >>> from modeling_interdomain import InterdomainConfig, InterdomainForCausalLM
        >>> config = InterdomainConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
        >>> model = InterdomainForCausalLM(config).eval()
        >>> with model.continuous_batching_context_manager() as manager:
        ...     name = manager.add_request([5, 6, 7], max_new_tokens=4)
        ...     answer = manager.get_result(name)
        >>> len(answer.generated_tokens)
        4
    """

    warmed_up = True  # there is nothing to warm up

    def __init__(
        self, model, generation_config=None, continuous_batching_config=None, workload_hints: Any = None
    ) -> None:
        self.model = model
        self._unset = unset_lengths(model, generation_config, {})
        self.generation_config, _ = model._prepare_generation_config(generation_config)
        check_way(self.generation_config)
        rows, tokens = limits_of(continuous_batching_config)
        if tokens is not None:
            bound_pieces(self.generation_config, tokens)
        self.background_thread_status = SimpleNamespace(fatal_error=None)  # where the server looks for one
        self._batch = Batch(model, rows, self._tell, apart=True)
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: Thread | None = None
        self._stopping = False
        self._count = 0
        self._names: set[str] = set()  # of requests that are not finished
        self._changed = Condition()
        self._results: list[Any] = []
        self._handlers: dict[str, tuple[Callable, asyncio.AbstractEventLoop]] = {}

    # Orders of other threads, which ours carries out between two steps.

    def start(self) -> None:
        if not self.is_running():
            self._stopping = False
            # A daemon: a program that ends does not wait for answers.
            self._thread = Thread(target=self._run, daemon=True)
            self._thread.start()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests, and end after the last one; with `hard_stop` end at once, and let them fail.

        Args:
            block: wait until then, at most `timeout` seconds.
            keep_for_next_session: of the library's engine; nothing is lost when a new manager is made.
        """
        if self._thread is None or not self.is_running():
            return
        self._orders.put(partial(self._end, hard_stop))
        if block:
            self._thread.join(timeout)

    def destroy(self) -> None:
        self.stop()

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        eos_token_id: int | list[int] | None = None,
    ) -> str:
        """Queue a prompt, a list of token ids; returns its name.

        A `streaming` request has a result after each token, others one at the end. A bad one's result has an `error`.

        Raises:
            RuntimeError: when the manager has stopped.
            ValueError: when another request has this name, and is not finished or has results that wait; when
                `eos_token_id` is neither an id nor a list of ids.
        """
        if self.background_thread_status.fatal_error is not None or self._stopping:
            self._handlers.pop(request_id, None)
            raise RuntimeError("This manager has stopped; make another with init_continuous_batching().")
        config = deepcopy(self.generation_config)
        if max_new_tokens is not None:
            config.max_new_tokens = max_new_tokens
        if eos_token_id is not None:
            config.eos_token_id = _ids(eos_token_id)
        self.model._prepare_special_tokens(config, True, device=self.model.device)
        name = self._named(request_id)
        self._orders.put(partial(self._add, Request(name, input_ids, config, streaming)))
        return name

    def _named(self, name: str | None) -> str:
        """Take a name that is given and free, or a free one."""
        with self._changed:
            taken = self._names | {output.request_id for output in self._results}
            if name in taken:
                raise ValueError(f"There is a request {name!r} already: choose another request_id, or leave it out.")
            while name is None:
                if (free := f"req_{self._count}") not in taken:
                    name = free
                self._count += 1
            self._names.add(name)
        return name

    def add_requests(self, inputs: Sequence[Sequence[int]], **options: Any) -> list[str]:
        return [self.add_request(input_ids, **options) for input_ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """Write no more of an answer; what there is of it is its result."""
        self._orders.put(partial(self._cancel, request_id))

    # Results.

    def register_result_handler(self, request_id: str, callback: Callable) -> None:
        """Have the running event loop call `callback` with each result of a request, until it is finished.

        Raises:
            ValueError: when another is registered for this name.
        """
        with self._changed:
            if request_id in self._handlers:
                raise ValueError(f"Somebody waits for a request {request_id!r} already: choose another request_id.")
            self._handlers[request_id] = (callback, asyncio.get_running_loop())
            # The server adds a request before it registers a handler.
            early = [output for output in self._results if output.request_id == request_id]
            self._results = [output for output in self._results if output.request_id != request_id]
            for output in early:
                self._hand_on(output)

    def get_result(self, request_id: str | None = None, timeout: float | None = None):
        """The next result, of any request or of one; None when there is none within `timeout` seconds, or at all."""
        with self._changed:
            self._changed.wait_for(lambda: self._results_of(request_id) or not self.is_running(), timeout)
            found = self._results_of(request_id)
            if not found:
                return None
            self._results.remove(found[0])
            return found[0]

    def request_id_iter(self, request_id: str) -> Iterator:
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def __iter__(self) -> Iterator:
        """Results until the manager is stopped."""
        while (output := self.get_result()) is not None:
            yield output

    def _results_of(self, request_id: str | None) -> list:
        return [output for output in self._results if request_id in (None, output.request_id)]

    def _tell(self, request: Request) -> None:
        if request.streaming or request.finished:
            with self._changed:
                if request.finished:
                    self._names.discard(request.name)
                self._hand_on(request.output())
                self._changed.notify_all()

    def _hand_on(self, output) -> None:
        name = output.request_id
        handler = self._handlers.pop(name, None) if output.is_finished() else self._handlers.get(name)
        if handler is None:
            self._results.append(output)
            return
        callback, loop = handler
        with suppress(RuntimeError):  # the loop is closed, and with it whoever asked
            loop.call_soon_threadsafe(callback, output)

    # The thread.

    def _run(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
        error = _STOPPED
        try:
            while self._carry_out_orders():
                self._batch.step()
        except Exception as found:
            logger.error("Continuous batching has ended with an error.", exc_info=True)
            self.background_thread_status.fatal_error, error = found, f"Continuous batching has ended: {found}"
        self._stopping = True
        self._carry_out_orders(wait=False)
        for request in self._batch.requests:
            self._fail(request, error)
        with self._changed:
            self._changed.notify_all()

    def _carry_out_orders(self, wait: bool = True) -> bool:
        """Carry out all orders, and wait for one where there is nothing else to do; False when it is time to end."""
        while not self._orders.empty() or (wait and not self._stopping and not self._batch.requests):
            self._orders.get()()
        return bool(self._batch.requests)

    def _add(self, request: Request) -> None:
        try:
            request.prepare(self.model, f"The prompt of {request.name}", self._unset)
        except Exception as error:  # of this request alone; the others go on
            self._fail(request, str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
            return
        self._batch.waiting.append(request)

    def _cancel(self, name: str) -> None:
        for request in self._batch.requests:
            if request.name == name:
                request.cancelled = True
                self._tell(request)

    def _end(self, hard: bool) -> None:
        self._stopping = True
        if hard:
            for request in self._batch.requests:
                self._fail(request, _STOPPED)

    def _fail(self, request: Request, error: str) -> None:
        request.error = error
        self._tell(request)


def _ids(given: Any) -> int | list[int]:
    """One id or several, as whole numbers."""
    try:
        several = hasattr(given, "__len__") and len(given) > 0
        return [operator.index(x) for x in given] if several else operator.index(given)
    except TypeError:
        raise ValueError(f"eos_token_id must be the id of a token, or a list of such ids, got {given!r}.") from None


def why_not_served(model) -> str | None:
    """One sentence, why requests that come one by one cannot be answered together; None where they can."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return (
            "Requests come to one process and this model is over several: call generate_batch() with the same prompts "
            "in all of them."
        )
    try:
        check_way(model.generation_config)
    except ValueError as error:
        return str(error)
    return why_not_batched(model)
