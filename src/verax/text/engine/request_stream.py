"""Answers on their way from the engine thread to their callers: new parts of samples, merged until they are taken."""

from __future__ import annotations

import asyncio
from collections import abc
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from verax.text.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from verax.text.engine.sampling_params import SamplingParams
from verax.text.engine.sequence import Request
from verax.text.features.grammar import Grammar
from verax.text.features.lora.loader import LoadedAdapter
from verax.text.features.lora.request import LoRARequest

__all__ = ["ENDED", "LiveRequest", "RequestStream"]

ENDED = -1
"""Entry of `LiveRequest.shown` for a sample whose end was handed over."""


@dataclass(eq=False, slots=True)
class LiveRequest:
    """Request between its caller on the event loop and the engine thread.

    The engine thread writes `request` and `shown`. `aborted` and `closed` are set by whoever ends the request early.
    All else belongs to the event loop.
    """

    request_id: str
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    whole: bool
    """True if its caller wants the answer in one piece, when it is complete."""
    arrival_time: float
    prompt: str | None = None
    answers: abc.Sequence[abc.Sequence[int]] | None = None
    """Answer so far for each sample, which the request goes on behind."""
    grammar: Grammar | None = None
    """Grammar of the answer, compiled."""
    lora_request: LoRARequest | None = None
    adapter: LoadedAdapter | None = None
    """Adapter of the request, loaded."""
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
        """Take new parts from the engine thread, and wake the caller. Nothing comes behind an error."""
        if self._error is not None:
            return
        fresh = self._fresh
        for part in parts:
            before = fresh.get(part.index)
            fresh[part.index] = part if before is None else _joined(before, part)
        self.finished = finished
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless its end has come already."""
        if not self.finished:
            self._error = error
            self.wake()

    def wake(self) -> None:
        """Let the caller look again."""
        if self.waiter is not None and not self.waiter.done():
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
            return RequestOutput(self.request_id, self.prompt, (), None, outputs, self.finished, 0)
        if self._metrics is None or self.finished:
            self._metrics = request.metrics
        return RequestOutput(
            self.request_id,
            self.prompt,
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
        try:
            while (output := live.take()) is None:
                if live.waiter is not None:
                    raise RuntimeError("another task waits for this answer already")
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


def _joined(before: CompletionOutput, after: CompletionOutput) -> CompletionOutput:
    """Two parts of a sample that follow each other, as one."""
    return CompletionOutput(
        after.index,
        before.text + after.text,
        before.token_ids + after.token_ids,
        after.cumulative_logprob,
        None if before.logprobs is None or after.logprobs is None else before.logprobs + after.logprobs,
        after.finish_reason,
        after.stop_reason,
    )
