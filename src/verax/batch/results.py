"""The file of results, its contents when a run continues, and the run that writes results in the order of the lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar, Generic, Self, TypeVar

import msgspec

from verax.batch.lines import InputFile, InputLine, Line, LineError, bad_line, line_error, without_mark
from verax.errors import InvalidParameterError
from verax.files import atomic_path

try:
    import fcntl
except ImportError:  # it does not exist for Windows
    fcntl = None

SHORT = 1.0
"""Seconds of a call below which the next one gets twice as many lines. What is lost with a process stays small, and a
call is long enough that its beginning and end, where the device waits, do not count."""


class ResultLine:
    """Part of a line of the output that every kind of line has; the lines are `msgspec.Struct`s.

    `BEGIN`: first bytes of every such line, by which one that was cut off is known as ours. `custom_id`: the user's
    name for the line of the input; None for a line that could not be read.
    """

    __slots__ = ()
    BEGIN: ClassVar[bytes] = b'{"custom_id":'
    custom_id: str | None
    error: LineError | None

    @property
    def failed(self) -> bool:
        """True if it has no result."""
        return self.error is not None

    @classmethod
    def failure(cls, error: LineError, custom_id: str | None = None) -> Self:
        """Line of an error."""
        return cls(custom_id=custom_id, error=error)  # pyright: ignore[reportCallIssue]


R = TypeVar("R", bound=ResultLine)
L = TypeVar("L", bound=Line)


@dataclass
class LineCounts:
    """Counts of the lines so far. `done`: lines with a result of this run that is not an error."""

    done: int = 0
    failed: int = 0
    skipped: int = 0
    bytes: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass
class ResultFile(Generic[R]):
    """Results of the lines of a file, appended as they come.

    `file`: where they are written; without a buffer, so that a line is there once it is written. `bad_lines`: numbers
    of the input's lines whose error was written by an earlier run.
    """

    file: BinaryIO
    kind: type[R]
    counts: LineCounts = field(default_factory=LineCounts)
    answered: set[str] = field(default_factory=set)
    bad_lines: set[int] = field(default_factory=set)
    num_failed: int = 0
    _seen: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, path: Path, kind: type[R], *, retry_errors: bool = False) -> ResultFile[R]:
        """The results in a file, which is created if it does not exist. A last line that was cut off is removed.

        `retry_errors`: rewrite the file without its errors, whole or not at all, so that they run again.
        """
        results = cls(_locked(path), kind)
        try:
            end = results._read(path)
            if retry_errors and results.num_failed:
                results._drop_errors(path)
            else:
                results.file.truncate(end)
        except BaseException:
            results.file.close()
            raise
        return results

    def write(self, line: R) -> None:
        """Append a line, with one write unless the system takes only a part of it."""
        rest = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
            self.file.flush()
        except OSError:
            self.file.close()  # a line after one that was cut off would make the file unreadable
            raise
        if line.failed:
            self.counts.failed += 1
        else:
            self.counts.done += 1

    def unanswered(self, line: L | R) -> L | R | None:
        """The work of a line, or its error; None if an earlier run has written its result.

        Errors are known by the number of their line, since they may have no id, or the id of another line.

        `line`: the work, or the error of a line that is not work.
        """
        failure = self._duplicate(line) if isinstance(line, Line) else line
        if failure is None:
            missing = None if line.custom_id in self.answered else line
        else:
            assert failure.error is not None
            missing = None if failure.error.line in self.bad_lines else failure
        self.counts.skipped += missing is None
        return missing

    def _duplicate(self, line: Line) -> R | None:
        """The error of a line whose name an earlier one has."""
        name = line.custom_id
        if name not in self._seen:
            self._seen.add(name)
            return None
        problem = f"custom_id: {name[:100]!r} was the id of an earlier line"
        return self.kind.failure(bad_line("duplicate_custom_id", problem, line.number, "custom_id"), name)

    def _read(self, path: Path) -> int:
        """Note what the file holds; the size of its whole lines in bytes."""
        end = 0
        for number, text in enumerate(_whole_lines(path), start=1):
            line = self._decoded(text, path, number)
            end += len(text)
            self.num_failed += line.failed
            if line.error is not None and line.error.line is not None:
                self.bad_lines.add(line.error.line)
            elif line.custom_id is not None:
                self.answered.add(line.custom_id)
        begin = self.kind.BEGIN
        with path.open("rb") as file:
            file.seek(end)
            rest = file.read(len(begin))
        if not begin.startswith(rest):
            raise _not_ours(path, "its last line")
        return end

    def _drop_errors(self, path: Path) -> None:
        self.answered.clear()
        self.bad_lines.clear()
        self.num_failed = 0
        with atomic_path(path) as partial, partial.open("wb") as kept:
            for number, text in enumerate(_whole_lines(path), start=1):
                line = self._decoded(text, path, number)
                if not line.failed and line.custom_id is not None:
                    kept.write(text)
                    self.answered.add(line.custom_id)
        self.file.close()
        self.file = _locked(path)

    def _decoded(self, text: bytes, path: Path, number: int) -> R:
        try:
            return msgspec.json.decode(text, type=self.kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _not_ours(path, f"line {number}") from error


def _locked(path: Path) -> BinaryIO:
    """A file to append to, which no other run has open: two would do every line twice."""
    if path.exists() and not path.is_file():
        raise InvalidParameterError(f"output: {path}: expected a file")
    file = path.open("ab", buffering=0)
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise InvalidParameterError(f"output: {path}: another process is writing to it") from error
    return file


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for text in file:
            if text.endswith(b"\n"):
                yield text


def _not_ours(path: Path, place: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"output: {path}: {place} is not a result of this command; give a new file, or one that it wrote"
    )


class LineRun(Generic[R]):
    """Run of the lines of a file through a model, some lines at a time. What fails for one line is its error alone.

    `work`: gives the results of some lines, in their order. `least`: lines of the first call of `work`.
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
        self.counts = results.counts
        self.complete = False
        self._file = file
        self._results = results
        self._work = work
        self._size = least
        self._most = most
        self._report = report

    def run(self) -> LineCounts:
        """Write the result of every line that has none yet. Lines of a call that is interrupted have none."""
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
        results = iter(self._try(work) if work else ())
        for line in lines:
            self._results.write(next(results) if isinstance(line, InputLine) else line)
        if work and time.perf_counter() - begin < SHORT:
            self._size = min(2 * self._size, self._most)

    def _try(self, lines: Sequence[InputLine]) -> Sequence[R]:
        """Results of lines. A call that fails is tried again in halves, so that only the lines to blame have errors."""
        try:
            results = self._work(lines)
            if len(results) != len(lines):
                raise RuntimeError(f"{len(results)} results of {len(lines)} lines")
        except Exception as error:
            if len(lines) == 1:
                return [self._results.kind.failure(line_error(error), lines[0].custom_id)]
            half = len(lines) // 2
            return [*self._try(lines[:half]), *self._try(lines[half:])]
        return results

    def _chunks(self) -> Iterator[list[InputLine | R]]:
        """Lines and errors that are not written yet, as many as a call takes."""
        chunk: list[InputLine | R] = []
        for number, text in enumerate(self._file.lines(), start=1):
            self.counts.bytes += len(text)
            text = without_mark(text, number)
            if not text.strip():
                continue
            work = self._file.read(text, number)
            line = self._results.unanswered(self._results.kind.failure(work) if isinstance(work, LineError) else work)
            if line is not None:
                chunk.append(line)
            if len(chunk) >= self._size:
                yield chunk
                chunk = []
        if chunk:
            yield chunk
