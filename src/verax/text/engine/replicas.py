"""Replicas of a model: the choice of the one that serves a request, and their engines for one caller or for many.

A replica is an engine on devices of its own. `ReplicaRouter` chooses the one with the least work, less what it has read
of the prompt already. `EngineGroup` calls the engines from one thread; `Replicas` runs each on a thread of its own.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, abc
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from verax.errors import InvalidParameterError, QueueFullError
from verax.text.engine.engine import Engine
from verax.text.engine.engine_thread import EngineThread, LiveRequest, Outbox
from verax.text.engine.outputs import EngineStats, RequestOutput
from verax.text.engine.request import Request, RequestInput

__all__ = ["EngineGroup", "ReplicaRouter", "Replicas", "RoutedReplica"]

MOST_PREFIXES = 1 << 16
"""Blocks of prompts that a router remembers: a million tokens of text in blocks of 16, some 15 MB."""


class RoutedReplica(Protocol):
    """Replica as a router sees it."""

    @property
    def load(self) -> int:
        """Work that it has, in tokens, as `work` counts them."""
        ...


R = TypeVar("R", bound=RoutedReplica)


class ReplicaRouter(Generic[R]):
    """Choice among the replicas that serve. Any thread may call it.

    A prompt goes where its last token is likely to be read first: to the replica with the least work, less the tokens
    of the prompt's beginning that this replica has read for an earlier one. So prompts that begin alike stay together,
    until their replica has more work than the others by what they would have to read again. What a replica's cache has
    forgotten since is not known here.

    Args:
        replicas: the replicas.
        block_size: tokens of a block; a cache shares whole blocks. None to choose by work alone.
    """

    def __init__(self, replicas: abc.Iterable[R], *, block_size: int | None):
        self._block_size = block_size
        self._serving: dict[R, int] = {}
        """Each replica with its bit in `_readers`."""
        self._readers: OrderedDict[int, int] = OrderedDict()
        """Replicas that read the beginning of a prompt, by its hash in whole blocks; least recently used first."""
        self._lock = threading.Lock()
        for replica in replicas:
            self.add(replica)

    @property
    def serving(self) -> list[R]:
        """The replicas to choose from."""
        return list(self._serving)

    def add(self, replica: R) -> None:
        """Choose among one more replica, which has read nothing."""
        taken = set(self._serving.values())
        self._serving[replica] = next(bit for i in range(len(taken) + 1) if (bit := 1 << i) not in taken)

    def remove(self, replica: R) -> None:
        """Choose a replica no more, and forget what it has read."""
        with self._lock:
            others = ~self._serving.pop(replica)
            for key in self._readers:
                self._readers[key] &= others

    def choose(self, prompt: abc.Sequence[int], adapter: int | None = None) -> R:
        """The replica of a prompt, which counts as read there from now on. Some replica must serve.

        Args:
            prompt: its token ids.
            adapter: number of its adapter; prompts of different adapters share nothing.
        """
        with self._lock:
            if len(self._serving) == 1:
                return next(iter(self._serving))
            keys = self._keys(prompt, adapter)
            cached = self._cached_tokens(keys)
            chosen = min(self._serving, key=lambda replica: replica.load - cached[replica])
            self._record(keys, self._serving[chosen])
            return chosen

    def _keys(self, prompt: abc.Sequence[int], adapter: int | None) -> list[int]:
        """Hash of the prompt's first block, of its first two, and so on. A collision only misleads the choice."""
        size = self._block_size
        if size is None:
            return []
        keys, key = [], hash(adapter)
        for end in range(size, len(prompt) + 1, size):
            key = hash((key, *prompt[end - size : end]))
            keys.append(key)
        return keys

    def _cached_tokens(self, keys: list[int]) -> dict[R, int]:
        """Tokens of the prompt's beginning that each replica has read."""
        cached = dict.fromkeys(self._serving, 0)
        readers = sum(self._serving.values())
        for i, key in enumerate(keys, start=1):
            readers &= self._readers.get(key, 0)
            if not readers:
                break
            for replica, bit in self._serving.items():
                if readers & bit:
                    cached[replica] = i * (self._block_size or 0)
        return cached

    def _record(self, keys: list[int], bit: int) -> None:
        for key in keys:
            self._readers[key] = self._readers.get(key, 0) | bit
        # The end of a prompt is forgotten before its beginning.
        for key in reversed(keys):
            self._readers.move_to_end(key)
        while len(self._readers) > MOST_PREFIXES:
            self._readers.popitem(last=False)


class EngineGroup:
    """Engines with the methods of one. Their devices work at the same time: a step is dispatched before it is read.

    Not thread-safe, as an engine.
    """

    def __init__(self, engines: abc.Sequence[Engine]):
        self.engines = tuple(engines)
        self._router = ReplicaRouter(engines, block_size=engines[0].prefix_block_size)
        self._names = itertools.count()

    @property
    def has_unfinished_requests(self) -> bool:
        """True if `advance` has anything to do."""
        return any(engine.has_unfinished_requests for engine in self.engines)

    def prepare(self, inputs: RequestInput) -> Request:
        """Make a request, with an id that no unfinished one has, as `Engine.prepare` does.

        Raises:
            VeraxError: as there, or if the id is in use.
        """
        request_id = inputs.request_id
        if request_id is None:
            request_id = next(name for i in self._names if self._engine(name := f"request-{i}") is None)
        elif self._engine(request_id) is not None:
            raise InvalidParameterError(f"request_id: {request_id!r} is in use by an unfinished request")
        return self.engines[0].prepare(inputs, request_id)

    def add(self, request: Request) -> None:
        """Queue a prepared request at one of the engines, as `Engine.add` does.

        Raises:
            InvalidParameterError: as there.
        """
        self._router.choose(request.prompt_token_ids, request.adapter_id).add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request at once; its output so far, or None if there is no such unfinished request."""
        engine = self._engine(request_id)
        return None if engine is None else engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """One step of each engine with requests: an output for each request that got a token, or ended."""
        return [output for engine in self._busy() for output in engine.step()]

    def advance(self) -> list[Request]:
        """`step` without building outputs: the requests that got tokens. Finished ones stay until `pop_output`."""
        return [request for engine in self._busy() for request in engine.advance()]

    def pop_output(self, request: Request) -> RequestOutput:
        """Remove a finished request from its engine; its output."""
        engine = self._engine(request.request_id)
        assert engine is not None
        return engine.pop_output(request)

    def _busy(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.has_unfinished_requests]

    def _engine(self, request_id: str) -> Engine | None:
        return next((engine for engine in self.engines if request_id in engine), None)


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
        self._router = ReplicaRouter(self.threads, block_size=engines[0].prefix_block_size)

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

    def join(self, live: LiveRequest) -> None:
        """Give a request a place in the queue. It runs on the event loop; `send` or `refuse` must follow.

        Raises:
            InvalidParameterError: if its id is in use.
            QueueFullError: if the queue is full.
        """
        if (other := self.outbox.live.get(live.request_id)) is not None and not other.closed:
            raise InvalidParameterError(f"request_id: {live.request_id!r} is in use by an unfinished request")
        schedulers = [thread.engine.scheduler for thread in self.threads]
        free = sum(scheduler.max_num_seqs - len(scheduler.running) for scheduler in schedulers)
        waiting, n, num_tokens = self.num_waiting, live.inputs.params.n, live.inputs.num_known_tokens
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
            QueueFullError: if these and the tokens that wait already are too many.
        """
        limit, waiting = self.max_queued_tokens, self.num_waiting_tokens
        if limit is not None and waiting and waiting + num_tokens > limit:
            raise QueueFullError(
                f"max_queued_tokens: {waiting} prompt tokens wait and {num_tokens} more exceed {limit}; try again later"
            )

    def send(self, live: LiveRequest, request: Request) -> None:
        """Choose the replica of a prepared request in the queue, and send it there. Any thread may."""
        with self._lock:
            thread = self._router.choose(request.prompt_token_ids, request.adapter_id)
            self._num_preparing -= request.params.n
            thread.add(live, request)

    def refuse(self, live: LiveRequest, error: BaseException) -> None:
        """End a request in the queue with an error. Any thread may."""
        with self._lock:
            self._num_preparing -= live.inputs.params.n
        self.outbox.post(partial(self.outbox.fail, live, error))
        self.outbox.notify()

    def cancel(self, live: LiveRequest) -> None:
        """End a request in the queue that was aborted or closed before it was prepared. Any thread may."""
        with self._lock:
            self._num_preparing -= live.inputs.params.n
        self.outbox.post(partial(self.outbox.cancel, live))
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
