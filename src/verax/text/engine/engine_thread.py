"""Thread that owns an engine. Messages go in through one queue; what a step gave goes to the outbox at once."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

from verax.text.engine.engine import Engine
from verax.text.engine.outbox import Outbox
from verax.text.engine.outputs import CompletionOutput
from verax.text.engine.request_stream import ENDED, LiveRequest
from verax.text.engine.routing import work
from verax.text.engine.sequence import Request, Sequence
from verax.text.engine.stats import EngineStats, StepStats

__all__ = ["EngineThread"]

_log = logging.getLogger("verax.text")


class EngineThread:
    """Engine, the thread that runs it, and the requests that it serves. Without requests the thread sleeps.

    Args:
        engine: the engine, which nobody else uses until the thread has ended.
        outbox: what answers go to.
        number: of the replica.
        check_room: function that raises if so many more prompt tokens may not wait.
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
        self._outbox = outbox
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._served: dict[str, LiveRequest] = {}
        """Requests in the engine, by id."""
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
        return replace(self.engine.stats(), num_requests_waiting=self.num_waiting)

    def add(self, live: LiveRequest, tokens: abc.Sequence[int]) -> None:
        """Send a request to the engine. One thread at a time may."""
        self._num_sent += live.params.n
        self._tokens_sent += len(tokens) * live.params.n
        live.replica = self.number
        self._inbox.put(partial(self._add, live, tokens))

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
        self._report(engine.advance())
        if self._outbox.observers:
            stats = StepStats(
                num_tokens=engine.num_computed_tokens - computed,
                num_generated=engine.num_generated_tokens - generated,
                num_running=len(engine.scheduler.running),
                num_waiting=self.num_waiting,
                kv_cache_usage=engine.scheduler.blocks.usage,
            )
            self._outbox.post(partial(self._outbox.observe, self.number, stats))

    def _add(self, live: LiveRequest, tokens: abc.Sequence[int]) -> None:
        num_tokens = len(tokens) * live.params.n
        self._num_arrived += live.params.n
        self._tokens_arrived += num_tokens
        if live.closed:
            return
        if live.aborted:
            parts = [CompletionOutput(i, "", (), None, None, "abort") for i in range(live.params.n)]
            self._outbox.post(partial(self._outbox.receive, [(live, parts, True)]))
            return
        try:
            self._check_room(num_tokens)
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
            self._outbox.post(partial(self._outbox.fail, live, error))
            return
        request = self.engine.request(live.request_id)
        request.prompt, request.arrival_time = live.prompt, live.arrival_time
        live.request, live.shown = request, [len(sequence.tokens) for sequence in request.sequences]
        self._served[live.request_id] = live
        if live.answers is not None:  # one that was given may be complete
            self._report([request])

    def _abort(self, live: LiveRequest) -> None:
        if self._served.get(live.request_id) is live:
            request = self.engine.request(live.request_id)
            self.engine.finish(request)
            self._report([request])
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
            live, finished = self._served[request.request_id], request.finished
            if not live.closed and request.error is None and (finished or not live.whole):
                parts = [part for sequence in request.sequences if (part := self._part(live, sequence)) is not None]
                if parts:
                    news.append((live, parts, finished))
            if request.error is not None:
                self._outbox.post(partial(self._outbox.fail, live, request.error))
            if finished:
                del self._served[request.request_id]
                self.engine.remove(request)
                if self._outbox.observers:
                    output = self.engine.outputs.of(request)
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
        """Wake the event loop; if it is closed, nobody waits for what is served here."""
        if not self._outbox.notify():
            for live in list(self._served.values()):
                live.closed = True
                self._abort(live)
