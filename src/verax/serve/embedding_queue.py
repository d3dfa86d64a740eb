"""Queue of sentences and the thread that encodes them: whatever waits when the thread becomes free is one batch."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from verax.embed.encoder import Encoder
from verax.errors import EngineDeadError, QueueFullError

__all__ = ["EmbeddingQueue"]


@dataclass(eq=False)
class _Request:
    """Sentences that came together, and the future of their vectors."""

    vectors: Float32[np.ndarray, "n D"]
    left: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


@dataclass(frozen=True)
class _Row:
    """One sentence of a request."""

    request: _Request
    index: int
    token_ids: Sequence[int]


class EmbeddingQueue:
    """Bounded queue in front of an encoder, whose programs only the queue's thread calls.

    Args:
        encoder: the model.
        batch_size: sentences that are encoded together.
        max_inputs: sentences that may wait and run at once.
    """

    def __init__(self, encoder: Encoder, *, batch_size: int, max_inputs: int):
        self.encoder = encoder
        self._batch_size = batch_size
        self._max_inputs = max_inputs
        self._inputs = 0
        self._rows: deque[_Row] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="verax-embeddings", daemon=True)
        self._thread.start()

    @contextmanager
    def slots(self, count: int) -> Iterator[None]:
        """Context that holds places for `count` sentences, to be taken before they are tokenised.

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

    async def embed(self, token_ids: Sequence[Sequence[int]]) -> Float32[np.ndarray, "n D"]:
        """Normalised vectors of sentences, in their order. Cancelling the task leaves out those that still wait.

        Args:
            token_ids: tokens of each sentence that passed `Encoder.check_tokens`.

        Raises:
            EngineDeadError: if the queue is closed.
        """
        loop = asyncio.get_running_loop()
        vectors = np.empty((len(token_ids), self.encoder.dimension), np.float32)
        request = _Request(vectors, len(token_ids), loop, loop.create_future())
        # Sentences of like length are padded little.
        order = sorted(range(len(token_ids)), key=lambda i: -len(token_ids[i]))
        with self._changed:
            if self._closed:
                raise EngineDeadError("the encoder was shut down")
            self._rows.extend(_Row(request, i, token_ids[i]) for i in order)
            self._changed.notify()
        await request.future
        return vectors

    def close(self) -> None:
        """End the thread after its batch. Requests that wait raise EngineDeadError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        for request in {row.request for row in self._rows}:
            _finish(request, EngineDeadError("the encoder was shut down"))
        self._rows.clear()

    def _work(self) -> None:
        while (rows := self._next_batch()) is not None:
            if not rows:
                continue
            try:
                vectors = self.encoder.encode_tokens([row.token_ids for row in rows], batch_size=self._batch_size)
            except Exception as error:  # the requests fail, not the thread
                for request in {row.request for row in rows}:
                    _finish(request, error)
                continue
            for row, vector in zip(rows, vectors, strict=True):
                row.request.vectors[row.index] = vector
                row.request.left -= 1
                if row.request.left == 0:
                    _finish(row.request)

    def _next_batch(self) -> list[_Row] | None:
        """Next sentences, without those whose request has ended; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._closed)
            if self._closed:
                return None
            taken: list[_Row] = []
            while self._rows and len(taken) < self._batch_size:
                row = self._rows.popleft()
                if not row.request.future.done():
                    taken.append(row)
            return taken


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
