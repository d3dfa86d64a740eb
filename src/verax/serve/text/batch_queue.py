"""Queue of texts and the thread that computes them: whatever waits when the thread becomes free is one batch."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Float32

from verax.errors import EngineDeadError, QueueFullError
from verax.serve.http.server import Server

__all__ = ["BatchQueue", "LazyQueue"]

T = TypeVar("T")

Compute = Callable[[Sequence[T]], Float32[np.ndarray, "n ..."]]
"""Function from inputs to a result for each."""


@dataclass(eq=False)
class _Request:
    """Inputs that came together, and the future of their results."""

    results: list[Any]
    left: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


@dataclass(frozen=True)
class _Row(Generic[T]):
    """One input of a request."""

    request: _Request
    index: int
    value: T


class BatchQueue(Generic[T]):
    """Bounded queue in front of a model, whose programs only the queue's thread calls.

    Args:
        compute: function that calls the model.
        name: of the thread.
        batch_size: inputs that are computed together.
        max_inputs: inputs that may wait and run at once.
    """

    def __init__(self, compute: Compute[T], *, name: str, batch_size: int, max_inputs: int):
        self._compute = compute
        self._batch_size = batch_size
        self._max_inputs = max_inputs
        self._inputs = 0
        self._rows: deque[_Row[T]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @contextmanager
    def slots(self, count: int) -> Iterator[None]:
        """Context that holds places for `count` inputs, to be taken before they are tokenised.

        Raises:
            QueueFullError: if there are not so many.
        """
        with self._changed:
            if self._inputs + count > self._max_inputs:
                raise QueueFullError(f"{self._inputs} inputs wait or run, and {self._max_inputs} may; try again later")
            self._inputs += count
        try:
            yield
        finally:
            with self._changed:
                self._inputs -= count

    async def run(self, inputs: Sequence[T], lengths: Sequence[int]) -> Float32[np.ndarray, "n ..."]:
        """Results of inputs, in their order. Cancelling the task leaves out those that still wait.

        Args:
            inputs: what the model takes, one or more.
            lengths: tokens of each: inputs of like length are computed together, which pads little.

        Raises:
            EngineDeadError: if the queue is closed.
        """
        loop = asyncio.get_running_loop()
        request = _Request([None] * len(inputs), len(inputs), loop, loop.create_future())
        order = sorted(range(len(inputs)), key=lambda i: -lengths[i])
        with self._changed:
            if self._closed:
                raise EngineDeadError("the model was shut down")
            self._rows.extend(_Row(request, i, inputs[i]) for i in order)
            self._changed.notify()
        await request.future
        return np.stack(request.results)

    def close(self) -> None:
        """End the thread after its batch. Requests that wait raise EngineDeadError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        for request in {row.request for row in self._rows}:
            _finish(request, EngineDeadError("the model was shut down"))
        self._rows.clear()

    def _work(self) -> None:
        while (rows := self._next_batch()) is not None:
            if not rows:
                continue
            try:
                results = self._compute([row.value for row in rows])
            except Exception as error:  # the requests fail, not the thread
                for request in {row.request for row in rows}:
                    _finish(request, error)
                continue
            for row, result in zip(rows, results, strict=True):
                row.request.results[row.index] = result
                row.request.left -= 1
                if row.request.left == 0:
                    _finish(row.request)

    def _next_batch(self) -> list[_Row[T]] | None:
        """Next inputs, without those whose request has ended; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._closed)
            if self._closed:
                return None
            taken: list[_Row[T]] = []
            while self._rows and len(taken) < self._batch_size:
                row = self._rows.popleft()
                if not row.request.future.done():
                    taken.append(row)
            return taken


class LazyQueue(Generic[T]):
    """Queue that is made when its model is first needed, and ends with the server.

    Args:
        server: the server, with the limits of its encoder and its reranker.
        name: of the queue's thread.
    """

    def __init__(self, server: Server, name: str):
        self._settings = server.settings
        self._name = name
        self._queue: BatchQueue[T] | None = None
        server.contexts.append(self._running)

    def get(self, compute: Compute[T]) -> BatchQueue[T]:
        """The queue; `compute` is that of the first call."""
        if self._queue is None:
            self._queue = BatchQueue(
                compute,
                name=self._name,
                batch_size=self._settings.embedding_batch_size,
                max_inputs=self._settings.max_queued_embedding_inputs,
            )
        return self._queue

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        yield
        if self._queue is not None:
            await asyncio.to_thread(self._queue.close)
            self._queue = None


def _finish(request: _Request, error: Exception | None = None) -> None:
    """Give a request its result, on its own event loop."""

    def finish() -> None:
        if request.future.done():
            return
        if error is None:
            request.future.set_result(None)
        else:
            request.future.set_exception(error)

    if not request.loop.is_closed():
        request.loop.call_soon_threadsafe(finish)
