"""Replicas of a model: the choice of the one that serves a request, and their engines on threads of their own.

A replica is an engine on devices of its own. `ReplicaRouter` chooses the one with the least work, less what it has read
of the prompt already.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, abc
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from verax.errors import InvalidParameterError, QueueFullError
from verax.text.engine.engine import Engine
from verax.text.engine.engine_thread import EngineThread, LiveRequest, Outbox
from verax.text.engine.outputs import EngineStats
from verax.text.engine.request import Request

MOST_PREFIXES = 1 << 16
"""Blocks of prompts that a router remembers: a million tokens of text in blocks of 16, some 15 MB."""


R = TypeVar("R", Engine, EngineThread)


class ReplicaRouter(Generic[R]):
    """Choice among replicas. Any thread may call it.

    A prompt goes where its last token is likely to be read first: to the replica with the least work, less the tokens
    of the prompt's beginning that this replica has read for an earlier one. So prompts that begin alike stay together,
    until their replica has more work than the others by what they would have to read again. What a replica's cache has
    forgotten since is not known here.

    `block_size`: tokens of a block; a cache shares whole blocks. None to choose by work alone.
    """

    def __init__(self, replicas: abc.Iterable[R], *, block_size: int | None):
        self._block_size = block_size
        self._bits = {replica: 1 << i for i, replica in enumerate(replicas)}
        """Each replica with its bit in `_readers`."""
        self._readers: OrderedDict[int, int] = OrderedDict()
        """Replicas that read the beginning of a prompt, by its hash in whole blocks; least recently used first."""
        self._lock = threading.Lock()

    def choose(self, prompt: abc.Sequence[int], adapter: int | None = None) -> R:
        """The replica of a prompt, which counts as read there from now on.

        `adapter`: number of its adapter; prompts of different adapters share nothing.
        """
        with self._lock:
            if len(self._bits) == 1:
                return next(iter(self._bits))
            keys = self._keys(prompt, adapter)
            cached = self._cached_tokens(keys)
            chosen = min(self._bits, key=lambda replica: replica.load - cached[replica])
            self._record(keys, self._bits[chosen])
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
        cached = dict.fromkeys(self._bits, 0)
        readers = sum(self._bits.values())
        for i, key in enumerate(keys, start=1):
            readers &= self._readers.get(key, 0)
            if not readers:
                break
            for replica, bit in self._bits.items():
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


class Replicas:
    """Engines, each on a thread of its own. If one of them fails, all end: what serves is whole, or is replaced whole.

    `max_queued_requests`: most samples that wait beyond those that find a free slot at once. `max_queued_tokens`: most
    prompt tokens of samples that wait; None for no bound.
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
        """Give a request a place in the queue. It runs on the event loop; `send` or `drop` must follow."""
        if (other := self.outbox.live.get(live.request_id)) is not None and not other.closed:
            raise InvalidParameterError(f"request_id: {live.request_id!r} is in use by an unfinished request")
        schedulers = [thread.engine.scheduler for thread in self.threads]
        free = sum(scheduler.max_num_seqs - len(scheduler.running) for scheduler in schedulers)
        waiting, n = self.num_waiting, live.inputs.params.n
        # The tokenizer has yet to count a text or a conversation.
        num_tokens = 0 if live.inputs.is_text or live.inputs.is_chat else len(live.inputs.prompt)
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
        """Refuse more prompt tokens than may wait. Any thread may."""
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

    def drop(self, live: LiveRequest, error: BaseException | None = None) -> None:
        """End a request in the queue with an error, or without one because it was aborted or closed. Any thread may."""
        with self._lock:
            self._num_preparing -= live.inputs.params.n
        outbox = self.outbox
        outbox.send(partial(outbox.cancel, live) if error is None else partial(outbox.fail, live, error))

    def abort(self, live: LiveRequest) -> None:
        """End a request early, after it was marked as aborted or closed. Any thread may."""
        if live.replica is not None:
            self.threads[live.replica].abort(live)
        elif live.closed:  # what it is sent to finds it closed
            self.outbox.send(partial(self.outbox.end, live))

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
