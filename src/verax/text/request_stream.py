"""Answers on their way from the engine thread to their callers: new parts of samples, merged until they are taken."""

from __future__ import annotations

import asyncio
from collections import abc
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from verax.text.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from verax.text.sampling_params import SamplingParams
from verax.text.sequence import Request

__all__ = ["LiveRequest", "RequestStream", "SampleDelta"]


@dataclass(slots=True)
class SampleDelta:
    """New part of one sample."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    def extend(self, later: SampleDelta) -> None:
        """Add the part that follows."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason

    def output(self) -> CompletionOutput:
        """The part as callers read it."""
        return CompletionOutput(
            self.index,
            self.text,
            tuple(self.token_ids),
            self.cumulative_logprob,
            self.logprobs,
            self.finish_reason,
            self.stop_reason,
        )


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
    request: Request | None = None
    shown: list[int] = field(default_factory=list)
    """Tokens of each sample that were handed over, prompt included; -1 once its end was."""
    aborted: bool = False
    """True if it shall end, and its caller be given that end."""
    closed: bool = False
    """True if its caller has gone, or has got everything."""
    _fresh: dict[int, SampleDelta] = field(default_factory=dict)
    _finished: bool = False
    _error: BaseException | None = None
    _waiter: asyncio.Future[None] | None = None

    def receive(self, deltas: list[SampleDelta], finished: bool) -> None:
        """Take new parts from the engine thread, and wake the caller."""
        for delta in deltas:
            if (before := self._fresh.get(delta.index)) is None:
                self._fresh[delta.index] = delta
            else:
                before.extend(delta)
        self._finished = finished
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End the request with an error, unless its end has come already."""
        if not self._finished:
            self._error = error
            self.wake()

    def wake(self) -> None:
        """Let the caller look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next_output(self) -> RequestOutput:
        """What is new, as soon as there is something.

        Raises:
            StopAsyncIteration: if the request was closed.
        """
        while not (self._fresh or self._error or self.closed):
            if self._waiter is not None:
                raise RuntimeError("another task waits for this answer already")
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self.closed:
            raise StopAsyncIteration
        if self._error is not None and not self._fresh:
            raise self._error
        return self._take()

    def _take(self) -> RequestOutput:
        outputs = [delta.output() for delta in self._fresh.values()]
        self._fresh = {}
        self.closed = self._finished
        request = self.request
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=() if request is None else request.prompt_token_ids,
            prompt_logprobs=None if request is None else request.prompt_logprobs,
            outputs=outputs,
            finished=self._finished,
            num_cached_tokens=0 if request is None else request.num_cached_tokens or 0,
            metrics=None if request is None else request.metrics,
        )


class RequestStream(AsyncGenerator[RequestOutput, None]):
    """New parts of a request's answers, as an async generator. Closing or dropping it aborts the request."""

    def __init__(self, live: LiveRequest, abort: Callable[[LiveRequest], None]):
        self._live = live
        self._abort = abort
        """Function that is called once if the request is closed before its end."""

    async def __anext__(self) -> RequestOutput:
        try:
            return await self._live.next_output()
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
