"""Hand-over from engine threads to the event loop: requests whose answers it waits for, and calls on their way."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from verax.errors import EngineDeadError
from verax.text.engine.outputs import CompletionOutput, RequestOutput
from verax.text.engine.request_stream import LiveRequest
from verax.text.engine.stats import StepStats

__all__ = ["Observer", "Outbox", "dead"]

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
