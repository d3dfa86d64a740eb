"""The file of results: one line after the other, and what it holds already when a run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar, Generic, Protocol, Self, TypeVar, cast

import msgspec

from verax.errors import InvalidParameterError
from verax.files import atomic_path

try:
    import fcntl
except ImportError:  # it does not exist for Windows
    fcntl = None

__all__ = ["LineError", "NamedLine", "ResultFile", "ResultLine", "bad_line"]


class LineError(msgspec.Struct, frozen=True):
    """Reason why a line has no result.

    Attributes:
        code: the kind of error, for programs.
        message: text for people.
        param: field of the line that was wrong.
        line: number of a line that could not be read as work, from 1; None for work that could not be done.
    """

    code: str
    message: str
    param: str | None
    line: int | None


def bad_line(code: str, problem: str, number: int, param: str | None = None) -> LineError:
    """Error of a line that could not be read as work."""
    return LineError(code, f"line {number}: {problem}", param, number)


class NamedLine(Protocol):
    """Line of the input."""

    @property
    def number(self) -> int:
        """Number of the line, from 1."""
        ...

    @property
    def custom_id(self) -> str:
        """The user's name for it."""
        ...


class ResultLine(Protocol):
    """Line of the output, a `msgspec.Struct`.

    Attributes:
        BEGIN: first bytes of every such line, by which one that was cut off is known as ours.
    """

    BEGIN: ClassVar[bytes]

    @property
    def custom_id(self) -> str | None:
        """The user's name for the line of the input, if it could be read."""
        ...

    @property
    def error(self) -> LineError | None:
        """Reason why it has no result."""
        ...

    @property
    def failed(self) -> bool:
        """True if it has no result."""
        ...

    @classmethod
    def failure(cls, error: LineError, custom_id: str | None = None) -> Self:
        """Line of an error."""
        ...


R = TypeVar("R", bound=ResultLine)
N = TypeVar("N", bound=NamedLine)


@dataclass
class ResultFile(Generic[R]):
    """Results of the lines of a file, appended as they come.

    Attributes:
        file: where they are written; without a buffer, so that a line is there once it is written.
        kind: of the lines.
        answered: custom ids that have a result from an earlier run.
        bad_lines: numbers of the input's lines whose error was written by an earlier run.
        num_failed: results of an earlier run that are errors.
    """

    file: BinaryIO
    kind: type[R]
    answered: set[str] = field(default_factory=set)
    bad_lines: set[int] = field(default_factory=set)
    num_failed: int = 0
    _seen: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, path: Path, kind: type[R], *, retry_errors: bool = False) -> ResultFile[R]:
        """The results in a file, which is made if it does not exist. A last line that was cut off is removed.

        Args:
            path: of the file.
            kind: of its lines.
            retry_errors: rewrite the file without its errors, whole or not at all, so that they run again.

        Raises:
            InvalidParameterError: for a file that has no such lines, or that another process writes to.
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
        while rest:
            rest = rest[self.file.write(rest) :]
        self.file.flush()

    def unanswered(self, line: N | R) -> N | R | None:
        """A line of the input, or its error; None if an earlier run has written its result.

        Errors are known by the number of their line, since they may have no id, or that of another line.

        Args:
            line: the work of a line, or the error of one that is none.
        """
        failure = line if isinstance(line, self.kind) else self._duplicate(cast("N", line))
        if failure is None:
            return None if line.custom_id in self.answered else line
        assert failure.error is not None
        return None if failure.error.line in self.bad_lines else failure

    def _duplicate(self, line: NamedLine) -> R | None:
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


def _not_ours(path: Path, where: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"output: {path}: {where} is no result of this command; give a new file, or one that it wrote"
    )
