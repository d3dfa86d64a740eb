"""Thread that owns an engine, and the way of its answers to callers on an event loop.

Messages go in through one queue. What a step gave goes to the `Outbox` at once, which wakes the event loop; there the
new parts of each sample are merged until the caller of a `RequestStream` takes them.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from verax.errors import EngineDeadError, VeraxError
from verax.text.engine.engine import Engine
from verax.text.engine.outputs import CompletionOutput, EngineStats, RequestMetrics, RequestOutput, StepStats, joined
from verax.text.engine.request import Request, RequestInput, Sequence
from verax.text.engine.scheduler import work

ENDED = -1
"""Entry of `LiveRequest.shown` for a sample whose end was handed over."""


@dataclass(eq=False, slots=True)
class LiveRequest:
    """Request between its caller on the event loop and the engine thread.

    The engine thread writes `request` and `shown`. `aborted` and `closed` are set by whoever ends the request early.
    All else belongs to the event loop.
    """

    request_id: str
    inputs: RequestInput
    loop: asyncio.AbstractEventLoop
    whole: bool
    """True if its caller wants the answer in one piece, when it is complete."""
    replica: int | None = None
    """Number of the replica that serves it; None until one is chosen."""
    request: Request | None = None
    shown: list[int] = field(default_factory=list)
    """Tokens of each sample that were handed over, prompt included; or `ENDED`."""
    aborted: bool = False
    """True if it shall end, and its caller be given that end."""
    closed: bool = False
    """True if its caller has gone, or has got everything."""
    finished: bool = False
    """True if its last part has come."""
    waiter: asyncio.Future[None] | None = None
    """Set when something has come, by a caller that waits for that."""
    _fresh: dict[int, CompletionOutput] = field(default_factory=dict)
    """New part of each sample, by index."""
    _metrics: RequestMetrics | None = None
    _error: BaseException | None = None

    def receive(self, parts: list[CompletionOutput], finished: bool) -> None:
        """Take new parts from the engine thread, and wake the caller. Nothing comes after an error."""
        if self._error is not None:
            return
        fresh = self._fresh
        for part in parts:
            before = fresh.get(part.index)
            fresh[part.index] = part if before is None else joined(before, part)
        self.finished = finished
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless its end has come already."""
        if not self.finished:
            self._error = error
            self.wake()

    def wake(self) -> None:
        """Let the caller look again, unless its event loop was closed while it waited."""
        if self.waiter is not None and not self.waiter.done() and not self.loop.is_closed():
            self.waiter.set_result(None)

    def take(self) -> RequestOutput | None:
        """Output of what is new, if there is something.

        Raises:
            StopAsyncIteration: if the request was closed.
            VeraxError: the error that has ended the request.
        """
        if self.closed:
            raise StopAsyncIteration
        if not self._fresh:
            if self._error is not None:
                raise self._error
            return None
        outputs = list(self._fresh.values())
        self._fresh = {}
        self.closed = self.finished
        request = self.request
        if request is None:  # it was aborted on its way to the engine
            prompt = self.inputs.prompt if isinstance(self.inputs.prompt, str) else None
            return RequestOutput(self.request_id, prompt, (), None, outputs, self.finished, 0)
        if self._metrics is None or self.finished:
            self._metrics = request.metrics
        return RequestOutput(
            self.request_id,
            request.prompt,
            request.prompt_token_ids,
            request.prompt_logprobs,
            outputs,
            self.finished,
            request.num_cached_tokens or 0,
            self._metrics,
        )


class RequestStream(AsyncGenerator[RequestOutput, None]):
    """New parts of a request's answers, as an async generator. Closing or dropping it aborts the request."""

    def __init__(self, live: LiveRequest, abort: Callable[[LiveRequest], None]):
        self._live = live
        self._abort = abort
        """Function that is called once if the request is closed before its end."""

    async def __anext__(self) -> RequestOutput:
        live = self._live
        if live.waiter is not None:
            raise RuntimeError("another task waits for this answer already")
        try:
            while (output := live.take()) is None:
                live.waiter = live.loop.create_future()
                try:
                    await live.waiter
                finally:
                    live.waiter = None
            return output
        except BaseException:
            self._close()
            raise

    async def asend(self, value: None, /) -> RequestOutput:
        """The next output, as `anext`."""
        return await self.__anext__()

    async def athrow(self, typ: Any, val: Any = None, tb: Any = None, /) -> RequestOutput:
        """Abort the request, and raise the error."""
        self._close()
        error = typ() if isinstance(typ, type) else typ
        raise (error if val is None else val).with_traceback(tb)

    async def aclose(self) -> None:
        """Abort the request, if it has not ended."""
        self._close()
        self._live.wake()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._live.closed:
            self._live.closed = True
            self._abort(self._live)


Observer = Callable[[int, StepStats | RequestOutput], None]
"""Function that is called with the number of a replica, and the figures of each of its steps, or the whole output of
each of its requests that has ended."""

_log = logging.getLogger("verax.text")


class Outbox:
    """Live requests of an event loop, and calls on their way to it. Any thread may post; the rest is the loop's."""

    def __init__(self) -> None:
        self.live: dict[str, LiveRequest] = {}
        """Requests whose end was not handed over, by id."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the live requests. It is set there, before the first of them is submitted."""
        self.observers: list[Observer] = []
        self.all_ended: asyncio.Event | None = None
        """Set when no request is live any more."""
        self._calls: deque[Callable[[], None]] = deque()
        self._notified = False

    def post(self, call: Callable[[], None]) -> None:
        """Let the event loop call a function at its next wake-up."""
        self._calls.append(call)

    def send(self, call: Callable[[], None]) -> None:
        """Let the event loop call a function, and wake it."""
        self.post(call)
        self.notify()

    def notify(self) -> bool:
        """Wake the event loop, unless it has been woken and has not looked yet. False if it is closed."""
        if not self._calls or self._notified or self.loop is None:
            return True
        self._notified = True
        try:
            self.loop.call_soon_threadsafe(self.deliver)
        except RuntimeError:  # the loop is closed, and nobody waits any more
            self._notified = False
            self._calls.clear()
            return False
        return True

    # On the event loop.

    def deliver(self) -> None:
        """Call everything that was posted."""
        self._notified = False
        while self._calls:
            self._calls.popleft()()

    def receive(self, news: list[tuple[LiveRequest, list[CompletionOutput], bool]]) -> None:
        """Hand new parts to requests; True stands for those that have ended."""
        for live, parts, finished in news:
            if finished:
                self.end(live)
            live.receive(parts, finished)

    def cancel(self, live: LiveRequest) -> None:
        """End a request that was aborted or closed on its way to the engine."""
        parts = [CompletionOutput(i, "", (), None, None, "abort") for i in range(live.inputs.params.n)]
        self.receive([(live, parts, True)])

    def fail(self, live: LiveRequest, error: BaseException) -> None:
        """End a request with an error."""
        self.end(live)
        live.fail(error)

    def fail_all(self, error: BaseException | None, message: str) -> None:
        """End every live request with `EngineDeadError`."""
        for live in list(self.live.values()):
            self.fail(live, dead(message, error))

    def end(self, live: LiveRequest) -> None:
        """Forget a request."""
        if self.live.get(live.request_id) is live:
            del self.live[live.request_id]
        if not self.live and self.all_ended is not None:
            self.all_ended.set()

    def observe(self, replica: int, event: StepStats | RequestOutput) -> None:
        """Call the observers; an error of one is logged."""
        for observer in self.observers:
            try:
                observer(replica, event)
            except Exception:
                _log.exception("an observer of the engine failed")


def dead(message: str, cause: BaseException | None) -> EngineDeadError:
    """The error of a request that no engine serves."""
    error = EngineDeadError(message if cause is None else f"{message}: {cause!r}")
    error.__cause__ = cause
    return error


class EngineThread:
    """Engine, the thread that runs it, and the requests that it serves. Without requests the thread sleeps.

    Args:
        engine: the engine, which nobody else uses until the thread has ended.
        check_room: function that raises if the given number of prompt tokens may not wait as well.
        on_failure: function that is called with the error that the engine has failed with.
    """

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        *,
        number: int,
        check_room: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
    ):
        self.engine = engine
        self.number = number
        self.error: BaseException | None = None
        self.stopped = False
        self._check_room, self._on_failure = check_room, on_failure
        self._num_sent = self._num_arrived = 0
        """Samples of all requests that were sent here, and that have reached the engine thread."""
        self._tokens_sent = self._tokens_arrived = 0
        """Their prompt tokens."""
        self._step_begin: float | None = None
        """Time at which the step that runs began; None between steps."""
        self._outbox = outbox
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._served: dict[str, LiveRequest] = {}
        self._thread = threading.Thread(target=self._run, name=f"verax-engine-{number}", daemon=True)
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
        return self._num_sent - self._num_arrived + len(self.engine.scheduler.waiting)

    @property
    def load(self) -> int:
        """Work in tokens, that on its way to the engine included."""
        tokens, samples = self._tokens_sent - self._tokens_arrived, self._num_sent - self._num_arrived
        return self.engine.load + work(tokens, samples)

    def stats(self) -> EngineStats:
        """State and totals. Any thread may read them."""
        begin = self._step_begin
        seconds = 0.0 if begin is None else time.monotonic() - begin
        return replace(self.engine.stats(), num_requests_waiting=self.num_waiting, step_seconds=seconds)

    def add(self, live: LiveRequest, request: Request) -> None:
        """Send a prepared request to the engine. One thread at a time may."""
        self._num_sent += request.params.n
        self._tokens_sent += len(request.prompt_token_ids) * request.params.n
        live.replica = self.number
        self._inbox.put(partial(self._add, live, request))

    def abort(self, live: LiveRequest) -> None:
        """End a request early, after it was marked as aborted or closed. Any thread may."""
        # A stream may be dropped at the end of the program, when the thread has ended and modules are torn down.
        if not self.stopped:
            self._inbox.put(partial(self._abort, live))

    def request_stop(self) -> None:
        """Let the thread abort what is left and end. Any thread may."""
        atexit.unregister(self.stop)
        self._inbox.put(self._stop)

    def stop(self) -> None:
        """Abort what is left, end the thread, and wait for that. Any thread may."""
        self.request_stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

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
            self._on_failure(error)
            self._notify()

    def _step(self) -> None:
        engine = self.engine
        computed, generated = engine.num_computed_tokens, engine.num_generated_tokens
        self._step_begin = time.monotonic()
        moved = engine.advance()
        self._step_begin = None
        self._report(moved)
        if self._outbox.observers:
            stats = StepStats(
                num_tokens=engine.num_computed_tokens - computed,
                num_generated=engine.num_generated_tokens - generated,
                num_running=len(engine.scheduler.running),
                num_waiting=self.num_waiting,
                kv_cache_usage=engine.scheduler.blocks.usage,
            )
            self._outbox.post(partial(self._outbox.observe, self.number, stats))

    def _add(self, live: LiveRequest, request: Request) -> None:
        n, scheduler = request.params.n, self.engine.scheduler
        num_tokens = len(request.prompt_token_ids) * n
        self._num_arrived += n
        self._tokens_arrived += num_tokens
        if live.closed or live.aborted:
            self._outbox.post(partial(self._outbox.cancel, live))
            return
        try:
            if len(scheduler.running) + len(scheduler.waiting) + n > scheduler.max_num_seqs:
                self._check_room(num_tokens)
            self.engine.add(request)
        except BaseException as error:  # a panic of the grammar's library is not an Exception
            own = error if isinstance(error, Exception) else VeraxError(f"the request cannot begin: {error!r}")
            self._outbox.post(partial(self._outbox.fail, live, own))
            return
        live.request, live.shown = request, [len(sequence.tokens) for sequence in request.sequences]
        self._served[live.request_id] = live
        if request.output_token_ids:  # one that was given may be complete
            self._report([request])

    def _abort(self, live: LiveRequest) -> None:
        if live.request is not None and self._served.get(live.request_id) is live:
            self.engine.finish(live.request)
            self._report([live.request])
        if live.closed:
            self._outbox.post(partial(self._outbox.end, live))

    def _stop(self) -> None:
        for live in list(self._served.values()):
            live.aborted = True
            self._abort(live)
        self.stopped = True

    def _report(self, moved: Iterable[Request]) -> None:
        """Send the new parts of requests, and forget those that have ended."""
        news: list[tuple[LiveRequest, list[CompletionOutput], bool]] = []
        for request in moved:
            live, parts, output = self._served[request.request_id], list[CompletionOutput](), None
            try:
                if not live.closed and request.error is None and (request.finished or not live.whole):
                    parts = [part for sequence in request.sequences if (part := self._part(live, sequence)) is not None]
                if request.finished and request.error is None and self._outbox.observers:
                    output = self.engine.output(request)
            except BaseException as error:  # of this request's text: no other is to notice
                self.engine.fail(request, error)
                parts = []
            if parts:
                news.append((live, parts, request.finished))
            if request.error is not None:
                self._outbox.post(partial(self._outbox.fail, live, request.error))
            if request.finished:
                del self._served[request.request_id]
                self.engine.remove(request)
                if output is not None:
                    self._outbox.post(partial(self._outbox.observe, self.number, output))
        if news:
            self._outbox.post(partial(self._outbox.receive, news))

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
            text = self.engine.text(sequence) if detokenizer is None else detokenizer.finish()
        wants_logprobs = sequence.request.params.logprobs is not None
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
        """Wake the event loop; if it is closed, nobody waits for what is served here."""
        if not self._outbox.notify():
            for live in list(self._served.values()):
                live.closed = True
                self._abort(live)
