"""The run of a batch: bounded requests in flight, answers written as they come, and its end."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import msgspec

from verax.batch.lines import ParquetLines, bad_line, line_error, without_mark
from verax.batch.requests import (
    VIDEOS,
    Answer,
    AnswerLine,
    BatchServer,
    BodyFacts,
    LineResponse,
    RequestLine,
    read_request,
)
from verax.batch.results import LineCounts, ResultFile
from verax.errors import EngineDeadError
from verax.serve.http.errors import RETRY_AFTER
from verax.serve.http.settings import ServerSettings

AHEAD = 64
"""Lines that are read before they are needed: enough that answers never wait for the disk."""


async def read_lines(file: BinaryIO | ParquetLines) -> AsyncGenerator[bytes, None]:
    """Lines of a file with their ends; the file is then closed. At most `AHEAD` lines are held, whatever its size.

    The thread is a daemon of its own: a pipe that nobody writes to holds up neither the event loop nor the end of the
    process.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | Exception] = asyncio.Queue()
    room = threading.Semaphore(AHEAD)
    over = threading.Event()

    def items() -> Iterator[bytes | Exception]:
        try:
            yield from file
        except Exception as error:  # of the disk, or a damaged Parquet file
            yield error
        yield b""

    def work() -> None:
        with suppress(RuntimeError), file:  # RuntimeError: the event loop is closed
            for item in items():
                room.acquire()
                if over.is_set():
                    return
                loop.call_soon_threadsafe(queue.put_nowait, item)

    threading.Thread(target=work, name="verax-batch-reader", daemon=True).start()
    try:
        while line := await queue.get():
            if isinstance(line, Exception):
                raise line
            room.release()
            yield line
    finally:
        over.set()
        room.release()


QUEUE_FULL = 429
"""Status of an answer that says to try again."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class BatchRun:
    """Run of the lines of a file through a server's models.

    `clips`: folder for clips; lines that ask for one are errors if None. `shutdown_timeout`: seconds that running
    requests have after a signal.
    """

    def __init__(
        self,
        server: BatchServer,
        file: BinaryIO | ParquetLines,
        output: ResultFile[AnswerLine],
        *,
        max_in_flight: int,
        clips: Path | None = None,
        shutdown_timeout: float = ServerSettings.shutdown_timeout,
        report: Callable[[LineCounts], None] = lambda counts: None,
    ):
        self.counts = output.counts
        self.stopped_by: signal.Signals | None = None
        self.complete = False
        self._server = server
        self._shutdown_timeout = shutdown_timeout
        self._file = file
        self._output = output
        self._clips = clips
        self._report = report
        self._places = asyncio.Semaphore(max_in_flight)
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0
        self._abandoned = False
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()

    def run(self) -> LineCounts:
        """Answer every line that has no answer yet.

        SIGTERM and SIGINT end the reading, and let running requests finish for `shutdown_timeout` seconds; a
        second one abandons them at once. What is abandoned has no line in the output, so that it runs again.

        Raises:
            EngineDeadError: if the text engine fails. The lines that it did not answer have no line in the output.
            OSError: if the input cannot be read, or the output or a clip not be written.
        """
        begin = time.perf_counter()
        try:
            asyncio.run(self._run())
        except BaseExceptionGroup as group:  # of the task that failed; the others were cancelled
            raise group.exceptions[0] from None
        finally:
            self.counts.seconds = time.perf_counter() - begin
        return self.counts

    async def _run(self) -> None:
        async with self._server.running(), asyncio.TaskGroup() as group:
            reading = group.create_task(self._read(group))
            with self._signals(reading):
                await asyncio.wait([reading])
                while self._tasks:
                    await asyncio.wait(self._tasks)
            self.complete = not (reading.cancelled() or self._abandoned)

    @contextmanager
    def _signals(self, reading: asyncio.Task[None]) -> Iterator[None]:
        """Context in which signals end the run."""
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            if self.stopped_by is None:
                self.stopped_by = signal.Signals(number)
                reading.cancel()
                loop.call_later(self._shutdown_timeout, self._abandon)
            else:
                self._abandon()

        def handle(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(stop, number)

        before = {number: signal.signal(number, handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _abandon(self) -> None:
        self._abandoned |= bool(self._tasks)
        for task in self._tasks:
            task.cancel()

    async def _read(self, group: asyncio.TaskGroup) -> None:
        number = 0
        async for text in read_lines(self._file):
            number += 1
            size, text = len(text), without_mark(text, number)
            if not text.strip():
                self._count(size)
                continue
            request = self._output.unanswered(read_request(text, number))
            if request is None:
                self._count(size)
            elif isinstance(request, AnswerLine):
                self._write(request, size)
            else:
                await self._places.acquire()
                task = group.create_task(self._serve(request, size))
                self._tasks.add(task)
                task.add_done_callback(self._leave)

    def _leave(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._places.release()

    async def _serve(self, request: RequestLine, size: int) -> None:
        if request.url == VIDEOS and self._clips is None:
            problem = "url: a clip is written next to the output; give the output a file"
            error = bad_line("invalid_request", problem, request.number, "url")
            self._write(AnswerLine.failure(error, request.custom_id), size)
            return
        try:
            answer = await self._send(request)
            if answer.status == QUEUE_FULL:
                answer = await self._send_again(request, answer)
        except (EngineDeadError, OSError):  # OSError: no clip can be written
            raise
        except Exception as error:  # of this line alone
            self._write(AnswerLine.failure(line_error(error), request.custom_id), size)
            return
        if answer.status < 400 and (usage := msgspec.json.decode(answer.body, type=BodyFacts).usage) is not None:
            # Chats and responses have other names of the same counts.
            self.counts.prompt_tokens += usage.get("prompt_tokens", 0) + usage.get("input_tokens", 0)
            self.counts.output_tokens += usage.get("completion_tokens", 0) + usage.get("output_tokens", 0)
        response = LineResponse(answer.status, answer.headers["x-request-id"], msgspec.Raw(answer.body))
        self._write(AnswerLine.of(request.custom_id, response), size)

    async def _send(self, request: RequestLine) -> Answer:
        self._running += 1
        try:
            return await self._server.answer(request, self._clips)
        finally:
            self._running -= 1
            self._ended.set()

    async def _send_again(self, request: RequestLine, answer: Answer) -> Answer:
        """Answer to a request that found a queue full: it is sent again whenever another one has ended.

        One such request at a time is sent again, the oldest first. A request that is refused where nothing else runs is
        too large for the queue, which is then its answer.
        """
        pauses = [0, RETRY_AFTER]  # the engine may still hold parts of requests that were refused
        async with self._turn:
            while answer.status == QUEUE_FULL and (self._running or pauses):
                if self._running:
                    self._ended.clear()
                    await self._ended.wait()
                else:
                    await asyncio.sleep(pauses.pop(0))
                answer = await self._send(request)
        return answer

    def _write(self, answer: AnswerLine, size: int) -> None:
        self._output.write(answer)
        self._count(size)

    def _count(self, size: int) -> None:
        self.counts.bytes += size
        self._report(self.counts)
