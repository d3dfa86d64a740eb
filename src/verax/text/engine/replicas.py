"""Engine threads of equal models behind one bounded queue: each request is routed once its prompt is tokenised."""

from __future__ import annotations

import threading
from collections import abc
from dataclasses import replace
from functools import partial

from verax.errors import InvalidParameterError, QueueFullError
from verax.text.engine.engine import Engine
from verax.text.engine.engine_thread import EngineThread
from verax.text.engine.outbox import Outbox
from verax.text.engine.request_stream import LiveRequest
from verax.text.engine.routing import Router
from verax.text.engine.stats import EngineStats

__all__ = ["Replicas"]


class Replicas:
    """Engines, each on a thread of its own. If one of them fails, all end: what serves is whole, or is replaced whole.

    Args:
        engines: engines of equal models.
        max_queued_requests: most samples that wait beyond those that find a free slot at once.
        max_queued_tokens: most prompt tokens of samples that wait; None for no bound.
    """

    def __init__(self, engines: abc.Sequence[Engine], *, max_queued_requests: int, max_queued_tokens: int | None):
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self.outbox = Outbox()
        self._num_preparing = 0
        """Samples of requests in the queue whose replica is not chosen yet."""
        self._lock = threading.Lock()
        self.threads = [
            EngineThread(engine, self.outbox, number=i, check_room=self.check_room, on_failure=self._fail)
            for i, engine in enumerate(engines)
        ]
        self._router = Router(self.threads, block_size=engines[0].prefix_block_size)

    @property
    def is_running(self) -> bool:
        """True if requests are served."""
        return all(thread.is_running for thread in self.threads)

    @property
    def error(self) -> BaseException | None:
        """The error that an engine failed with."""
        return next((thread.error for thread in self.threads if thread.error is not None), None)

    @property
    def num_waiting(self) -> int:
        """Samples without a slot, those on their way to an engine included."""
        return self._num_preparing + sum(thread.num_waiting for thread in self.threads)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of samples that wait at an engine."""
        return sum(thread.engine.scheduler.num_waiting_tokens for thread in self.threads)

    def stats(self) -> list[EngineStats]:
        """State and totals of each replica. Samples whose replica is not chosen yet wait for the first."""
        first, *others = (thread.stats() for thread in self.threads)
        return [replace(first, num_requests_waiting=first.num_requests_waiting + self._num_preparing), *others]

    def join(self, live: LiveRequest, num_tokens: int) -> None:
        """Give a request a place in the queue. It runs on the event loop; `send` or `refuse` must follow.

        Args:
            live: the request.
            num_tokens: its prompt's tokens, 0 if they are not known yet.

        Raises:
            InvalidParameterError: if its id is in use.
            QueueFullError: if the queue is full.
        """
        if (other := self.outbox.live.get(live.request_id)) is not None and not other.closed:
            raise InvalidParameterError(f"request_id: {live.request_id!r} is in use by an unfinished request")
        schedulers = [thread.engine.scheduler for thread in self.threads]
        free = sum(scheduler.max_num_seqs - len(scheduler.running) for scheduler in schedulers)
        waiting, n = self.num_waiting, live.params.n
        # A sample that finds a free slot does not wait.
        if waiting + n - free > self.max_queued_requests:
            raise QueueFullError(
                f"max_queued_requests: {waiting} requests wait, and {n} more exceed {self.max_queued_requests}; "
                "try again later"
            )
        if waiting + n > free:
            self.check_room(num_tokens * n)
        with self._lock:
            self._num_preparing += n
        self.outbox.live[live.request_id] = live

    def check_room(self, num_tokens: int) -> None:
        """Refuse more prompt tokens than may wait. Any thread may.

        Raises:
            QueueFullError: if these are too many beside those that wait already.
        """
        limit, waiting = self.max_queued_tokens, self.num_waiting_tokens
        if limit is not None and waiting and waiting + num_tokens > limit:
            raise QueueFullError(
                f"max_queued_tokens: {waiting} prompt tokens wait and {num_tokens} more exceed {limit}; try again later"
            )

    def send(self, live: LiveRequest, tokens: abc.Sequence[int]) -> None:
        """Choose the replica of a request in the queue, and send it there. Any thread may."""
        adapter = None if live.adapter is None else live.adapter.id
        with self._lock:
            thread = self._router.choose(tokens, adapter)
            self._num_preparing -= live.params.n
            thread.add(live, tokens)

    def refuse(self, live: LiveRequest, error: BaseException) -> None:
        """End a request in the queue with an error. Any thread may."""
        with self._lock:
            self._num_preparing -= live.params.n
        self.outbox.post(partial(self.outbox.fail, live, error))
        self.outbox.notify()

    def abort(self, live: LiveRequest) -> None:
        """End a request early, after it was marked as aborted or closed. Any thread may."""
        if live.replica is not None:
            self.threads[live.replica].abort(live)
        elif live.closed:  # what it is sent to finds it closed
            self.outbox.post(partial(self.outbox.end, live))
            self.outbox.notify()

    def stop(self) -> None:
        """Abort what is left, end the threads, and wait for that. Any thread may."""
        for thread in self.threads:
            thread.request_stop()
        for thread in self.threads:
            thread.stop()

    def _fail(self, error: BaseException) -> None:
        """End all requests, and the other engines. It runs on the thread of the engine that failed."""
        self.outbox.post(partial(self.outbox.fail_all, error, "the engine has failed"))
        for thread in self.threads:
            thread.request_stop()
