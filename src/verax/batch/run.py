"""The run of a file of work: some lines at a time, whose results are written in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from verax.batch.lines import InputFile, InputLine
from verax.batch.results import LineError, R, ResultFile

__all__ = ["LineCounts", "LineRun"]

SHORT = 1.0
"""Seconds of a call below which the next one gets twice as many lines. What is lost with a process stays small, and a
call is long enough that its beginning and end, where the device waits, do not count."""


@dataclass
class LineCounts:
    """Counts of the lines so far.

    Attributes:
        done: lines with a result of this run that is no error.
        failed: lines with an error of this run.
        skipped: lines whose result an earlier run has written.
        bytes: bytes of all these lines.
        seconds: time of the run.
    """

    done: int = 0
    failed: int = 0
    skipped: int = 0
    bytes: int = 0
    seconds: float = 0.0


class LineRun(Generic[R]):
    """Run of the lines of a file through a model.

    Args:
        file: the work.
        results: where the results go.
        work: gives the results of some lines, in their order.
        least: lines of the first call of `work`.
        most: most lines of a call.
        report: called with the counts after each call.
    """

    def __init__(
        self,
        file: InputFile,
        results: ResultFile[R],
        work: Callable[[Sequence[InputLine]], Sequence[R]],
        *,
        least: int = 1,
        most: int = 1,
        report: Callable[[LineCounts], None] = lambda counts: None,
    ):
        self.counts = LineCounts()
        self.complete = False
        """True once every line has its result."""
        self._file = file
        self._results = results
        self._work = work
        self._size = least
        self._most = most
        self._report = report

    def run(self) -> LineCounts:
        """Write the result of every line that has none yet. Lines of a call that is interrupted have none.

        Raises:
            InvalidParameterError: for a file that cannot be read.
            OSError: if the file cannot be read, or the results not be written.
        """
        begin = time.perf_counter()
        try:
            for lines in self._chunks():
                self._answer(lines)
                self._report(self.counts)
            self.complete = True
        finally:
            self.counts.seconds = time.perf_counter() - begin
        return self.counts

    def _answer(self, lines: Sequence[InputLine | R]) -> None:
        begin = time.perf_counter()
        work = [line for line in lines if isinstance(line, InputLine)]
        results = iter(self._work(work) if work else ())
        for line in lines:
            result = next(results) if isinstance(line, InputLine) else line
            self._results.write(result)
            if result.failed:
                self.counts.failed += 1
            else:
                self.counts.done += 1
        if work and time.perf_counter() - begin < SHORT:
            self._size = min(2 * self._size, self._most)

    def _chunks(self) -> Iterator[list[InputLine | R]]:
        """Lines and errors that are not written yet, as many as a call takes."""
        chunk: list[InputLine | R] = []
        for number, text in enumerate(self._file.lines(), start=1):
            self.counts.bytes += len(text)
            if not text.strip():
                continue
            read = self._file.read(text, number)
            line = self._results.unanswered(self._results.kind.failure(read) if isinstance(read, LineError) else read)
            if line is None:
                self.counts.skipped += 1
                continue
            chunk.append(line)
            if len(chunk) >= self._size:
                yield chunk
                chunk = []
        if chunk:
            yield chunk
