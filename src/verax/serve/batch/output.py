"""The file of answers: one line after the other, and what it holds already when a batch goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from verax.errors import InvalidParameterError
from verax.files import atomic_path
from verax.serve.batch.lines import ID_PREFIX, AnswerLine

try:
    import fcntl
except ImportError:  # it does not exist for Windows
    fcntl = None

__all__ = ["BatchOutput"]

_BEGIN = b'{"id":"%b' % ID_PREFIX.encode()
"""First bytes of every line, by which a line that was cut off is known as ours."""


@dataclass
class BatchOutput:
    """Answers of a batch, appended as they come.

    Attributes:
        file: where they are written; without a buffer, so that a line is there once it is written.
        answered: custom ids that have an answer from an earlier run.
        bad_lines: numbers of the input's lines whose error was written by an earlier run.
        num_failed: answers of an earlier run that are errors.
    """

    file: BinaryIO
    answered: set[str] = field(default_factory=set)
    bad_lines: set[int] = field(default_factory=set)
    num_failed: int = 0

    @classmethod
    def open(cls, path: Path, *, retry_errors: bool = False) -> BatchOutput:
        """The answers in a file, which is made if it does not exist. A last line that was cut off is removed.

        Args:
            path: of the file.
            retry_errors: rewrite the file without its errors, whole or not at all, so that they run again.

        Raises:
            InvalidParameterError: for a file that is no output of a batch, or that another process writes to.
        """
        output = cls(_locked(path))
        try:
            end = output._read(path)
            if retry_errors and output.num_failed:
                output._drop_errors(path)
            else:
                output.file.truncate(end)
        except BaseException:
            output.file.close()
            raise
        return output

    def write(self, answer: AnswerLine) -> None:
        """Append a line, with one write unless the system takes only a part of it."""
        rest = memoryview(msgspec.json.encode(answer) + b"\n")
        while rest:
            rest = rest[self.file.write(rest) :]
        self.file.flush()

    def _read(self, path: Path) -> int:
        """Note what the file holds; the size of its whole lines in bytes."""
        end = 0
        for number, text in enumerate(_whole_lines(path), start=1):
            answer = _decoded(text, path, number)
            end += len(text)
            self.num_failed += answer.failed
            if answer.error is not None:
                self.bad_lines.add(answer.error.line)
            elif answer.custom_id is not None:
                self.answered.add(answer.custom_id)
        with path.open("rb") as file:
            file.seek(end)
            rest = file.read(len(_BEGIN))
        if not _BEGIN.startswith(rest):
            raise _not_ours(path, "its last line")
        return end

    def _drop_errors(self, path: Path) -> None:
        self.answered.clear()
        self.bad_lines.clear()
        self.num_failed = 0
        with atomic_path(path) as partial, partial.open("wb") as kept:
            for number, text in enumerate(_whole_lines(path), start=1):
                answer = _decoded(text, path, number)
                if not answer.failed and answer.custom_id is not None:
                    kept.write(text)
                    self.answered.add(answer.custom_id)
        self.file.close()
        self.file = _locked(path)


def _locked(path: Path) -> BinaryIO:
    """A file to append to, which no other batch has open: two would do every line twice."""
    if path.exists() and not path.is_file():
        raise InvalidParameterError(f"output: {path}: expected a file")
    file = path.open("ab", buffering=0)
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise InvalidParameterError(f"output: {path}: another verax batch is writing to it") from error
    return file


def _whole_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for text in file:
            if text.endswith(b"\n"):
                yield text


def _decoded(text: bytes, path: Path, number: int) -> AnswerLine:
    try:
        return msgspec.json.decode(text, type=AnswerLine)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_ours(path, f"line {number}") from error


def _not_ours(path: Path, where: str) -> InvalidParameterError:
    return InvalidParameterError(
        f"output: {path}: {where} is no answer of a batch; give a new file, or one that verax batch wrote"
    )
