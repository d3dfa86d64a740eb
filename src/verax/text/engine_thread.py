"""Thread that owns an engine. Messages go in through one queue; what a step gave goes out in one hand-over."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections import abc, deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue

from verax.errors import EngineDeadError, QueueFullError
from verax.text.engine import Engine
from verax.text.outputs import CompletionOutput, RequestOutput
from verax.text.request_stream import ENDED, LiveRequest
from verax.text.sequence import Request, Sequence
from verax.text.stats import EngineStats, StepStats

__all__ = ["EngineThread", "Observer"]

Observer = Callable[[StepStats | RequestOutput], None]
"""Function that is called with the figures of each step, and the whole output of each request that has ended."""

_log = logging.getLogger("verax.text")


class EngineThread:
    """Engine, the thread that runs it, and the requests that it serves. Without requests the thread sleeps."""

    def __init__(self, engine: Engine, *, max_queued_tokens: int | None):
        self.engine = engine
        self.live: dict[str, LiveRequest] = {}
        """Requests whose end was not handed over, by id. It belongs to the event loop."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the live requests. It is set there, before the first of them is submitted."""
        self.observers: list[Observer] = []
        self.error: BaseException | None = None
        self.stopped = False
        self.num_taken = 0
        """Samples of all requests that were submitted. The event loop counts."""
        self.num_waiting_tokens = 0
        """Prompt tokens of samples that wait for a slot; counted if they are bounded."""
        self.all_ended: asyncio.Event | None = None
        """Set on the event loop when no request is live any more."""
        self._num_arrived = 0
        """Samples of all requests that have reached the engine thread."""
        self._max_queued_tokens = max_queued_tokens
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._outbox: deque[Callable[[], None]] = deque()
        self._notified = False
        self._served: dict[str, LiveRequest] = {}
        """Requests in the engine, by id."""
        self._thread = threading.Thread(target=self._run, name="verax-engine", daemon=True)
        # A daemon thread must not run compiled programs while the interpreter is taken down.
        atexit.register(self.stop)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True if requests are served."""
        return not self.stopped and self.error is None

    @property
    def num_waiting(self) -> int:
        """Samples without a slot, those on their way to the engine included."""
        return self.num_taken - self._num_arrived + len(self.engine.scheduler.waiting)

    def stats(self) -> EngineStats:
        """State and totals. Any thread may read them."""
        engine, blocks = self.engine, self.engine.scheduler.blocks
        return EngineStats(
            num_requests_running=len(engine.scheduler.running),
            num_requests_waiting=self.num_waiting,
            kv_cache_usage=blocks.usage,
            prefix_cache_queries=blocks.num_queries,
            prefix_cache_hits=blocks.num_hits,
            num_preemptions=engine.scheduler.num_preemptions,
            prompt_tokens=engine.num_prompt_tokens,
            generation_tokens=engine.num_generated_tokens,
            spec_decode=None if engine.speculator is None else engine.speculator.totals,
        )

    def add(self, live: LiveRequest, tokens: abc.Sequence[int] | BaseException) -> None:
        """Send a request to the engine, or the error that tokenising it gave. Any thread may."""
        self._inbox.put(partial(self._add, live, tokens))

    def abort(self, live: LiveRequest) -> None:
        """End a request early, after it was marked as aborted or closed. Any thread may."""
        # A stream may be dropped at the end of the program, when the thread has ended and modules are torn down.
        if not self.stopped:
            self._inbox.put(partial(self._abort, live))

    def stop(self) -> None:
        """Abort what is left, end the thread, and wait for that. Any thread may."""
        atexit.unregister(self.stop)
        self._inbox.put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def check_room(self, num_tokens: int) -> None:
        """Refuse more prompt tokens than may wait. Any thread may.

        Raises:
            QueueFullError: if these are too many beside those that wait already.
        """
        limit, waiting = self._max_queued_tokens, self.num_waiting_tokens
        if limit is not None and waiting and waiting + num_tokens > limit:
            raise QueueFullError(
                f"max_queued_tokens: {waiting} prompt tokens wait and {num_tokens} more exceed {limit}; try again later"
            )

    def deliver(self) -> None:
        """Hand everything that the engine thread has sent to its receivers. It runs on the event loop."""
        self._notified = False
        while self._outbox:
            self._outbox.popleft()()

    def fail_all(self, error: BaseException | None, message: str) -> None:
        """End every live request with `EngineDeadError`. It runs on the event loop."""
        for live in list(self.live.values()):
            self._fail(live, dead(message, error))

    # On the engine thread.

    def _run(self) -> None:
        try:
            while not self.stopped:
                if self._inbox.empty() and self.engine.has_unfinished_requests:
                    self._step()
                else:
                    self._inbox.get()()
                self._notify()
        except BaseException as error:
            _log.critical("the engine thread failed", exc_info=error)
            self.error = error
            self._outbox.append(partial(self.fail_all, error, "the engine has failed"))
            self._notify()

    def _step(self) -> None:
        engine = self.engine
        computed, generated = engine.num_computed_tokens, engine.num_generated_tokens
        self._report(engine.advance())
        if self._max_queued_tokens is not None:
            self._count_waiting_tokens()
        if self.observers:
            stats = StepStats(
                num_tokens=engine.num_computed_tokens - computed,
                num_generated=engine.num_generated_tokens - generated,
                num_running=len(engine.scheduler.running),
                num_waiting=self.num_waiting,
                kv_cache_usage=engine.scheduler.blocks.usage,
            )
            self._outbox.append(partial(self._observe, stats))

    def _add(self, live: LiveRequest, tokens: abc.Sequence[int] | BaseException) -> None:
        self._num_arrived += live.params.n
        if live.closed:
            return
        if live.aborted:
            parts = [CompletionOutput(i, "", (), None, None, "abort") for i in range(live.params.n)]
            self._outbox.append(partial(self._receive, [(live, parts, True)]))
            return
        try:
            if isinstance(tokens, BaseException):
                raise tokens
            self.check_room(len(tokens) * live.params.n)
            self.engine.add_request(
                tokens,
                live.params,
                request_id=live.request_id,
                stream=self.engine.tokenizer is not None and (not live.whole or live.answers is not None),
                grammar=live.grammar,
                adapter=live.adapter,
                output_token_ids=live.answers,
            )
        except Exception as error:
            self._outbox.append(partial(self._fail, live, error))
            return
        request = self.engine.request(live.request_id)
        request.prompt, request.arrival_time = live.prompt, live.arrival_time
        live.request, live.shown = request, [len(sequence.tokens) for sequence in request.sequences]
        self._served[live.request_id] = live
        if live.answers is not None:  # one that was given may be complete
            self._report([request])
        self._count_waiting_tokens()

    def _count_waiting_tokens(self) -> None:
        if self._max_queued_tokens is not None:
            self.num_waiting_tokens = sum(sequence.num_prompt for sequence in self.engine.scheduler.waiting)

    def _abort(self, live: LiveRequest) -> None:
        if self._served.get(live.request_id) is live:
            request = self.engine.request(live.request_id)
            self.engine.finish(request)
            self._report([request])
        if live.closed:
            self._outbox.append(partial(self._end, live))

    def _stop(self) -> None:
        for live in list(self._served.values()):
            live.aborted = True
            self._abort(live)
        self.stopped = True

    def _report(self, moved: Iterable[Request]) -> None:
        """Send the new parts of requests, and forget those that have ended."""
        news: list[tuple[LiveRequest, list[CompletionOutput], bool]] = []
        for request in moved:
            live, finished = self._served[request.request_id], request.finished
            if not live.closed and request.error is None and (finished or not live.whole):
                parts = [part for sequence in request.sequences if (part := self._part(live, sequence)) is not None]
                if parts:
                    news.append((live, parts, finished))
            if request.error is not None:
                self._outbox.append(partial(self._fail, live, request.error))
            if finished:
                del self._served[request.request_id]
                self.engine.remove(request)
                if self.observers:
                    self._outbox.append(partial(self._observe, self.engine.outputs.of(request)))
        if news:
            self._outbox.append(partial(self._receive, news))

    def _part(self, live: LiveRequest, sequence: Sequence) -> CompletionOutput | None:
        """New part of a sample, if there is one; what it has is handed over with it."""
        shown, length, finish_reason = live.shown[sequence.index], len(sequence.tokens), sequence.finish_reason
        if shown == (length if finish_reason is None else ENDED):
            return None
        detokenizer = sequence.detokenizer
        if finish_reason is None:
            live.shown[sequence.index] = length
            text = "" if detokenizer is None else detokenizer.delta()
        else:
            live.shown[sequence.index] = ENDED
            text = self.engine.outputs.text(sequence) if detokenizer is None else detokenizer.finish()
        wants_logprobs = live.params.logprobs is not None
        return CompletionOutput(
            sequence.index,
            text,
            tuple(sequence.tokens[shown:]),
            sequence.cumulative_logprob if wants_logprobs else None,
            sequence.logprobs[len(sequence.logprobs) - (length - shown) :] if wants_logprobs else None,
            finish_reason,
            sequence.stop_reason,
        )

    def _notify(self) -> None:
        """Wake the event loop, unless it has been woken and has not looked yet."""
        if not self._outbox or self._notified or self.loop is None:
            return
        self._notified = True
        try:
            self.loop.call_soon_threadsafe(self.deliver)
        except RuntimeError:  # the loop is closed, and nobody waits any more
            self._notified = False
            self._outbox.clear()
            for live in list(self._served.values()):
                live.closed = True
                self._abort(live)

    # On the event loop.

    def _receive(self, news: list[tuple[LiveRequest, list[CompletionOutput], bool]]) -> None:
        for live, parts, finished in news:
            if finished:
                self._end(live)
            live.receive(parts, finished)

    def _fail(self, live: LiveRequest, error: BaseException) -> None:
        self._end(live)
        live.fail(error)

    def _end(self, live: LiveRequest) -> None:
        if self.live.get(live.request_id) is live:
            del self.live[live.request_id]
        if not self.live and self.all_ended is not None:
            self.all_ended.set()

    def _observe(self, event: StepStats | RequestOutput) -> None:
        for observer in self.observers:
            try:
                observer(event)
            except Exception:
                _log.exception("an observer of the engine failed")


def dead(message: str, cause: BaseException | None) -> EngineDeadError:
    """The error of a request that no engine serves."""
    error = EngineDeadError(message if cause is None else f"{message}: {cause!r}")
    error.__cause__ = cause
    return error
