"""Lines of a file of work: JSON objects, rows of Parquet, or plain texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from verax._optional import require_optional
from verax.errors import InvalidParameterError
from verax.files import atomic_path

__all__ = ["PARQUET", "InputFile", "InputLine", "LineError", "ParquetLines", "bad_line", "lines_path", "write_rows"]

PARQUET = ".parquet"


ROWS = 1024
"""Rows that are held at once."""


class ParquetLines:
    """Rows of a file as lines of JSON; an empty cell is a field that is absent.

    Args:
        path: of the file.
        columns: those that are read, where they are there; all of them if None.
        json: columns whose texts are JSON, and become part of the line as they stand.

    Raises:
        InvalidParameterError: for a file that is not Parquet.
        MissingDependencyError: if pyarrow is not installed.
    """

    def __init__(self, path: Path, columns: Sequence[str] | None = None, *, json: Sequence[str] = ()):
        parquet = require_optional("pyarrow.parquet")
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise InvalidParameterError(f"input: {path}: it is no Parquet file: {error}") from error
        self._columns = columns
        self._json = json

    def __enter__(self) -> ParquetLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        there = [name for name in self._file.schema_arrow.names if self._columns is None or name in self._columns]
        for batch in self._file.iter_batches(ROWS, columns=there):
            for row in batch.to_pylist():
                yield self._line(row)

    def _line(self, row: dict[str, Any]) -> bytes:
        for name in self._json:
            if isinstance(text := row.get(name), str):
                row = {**row, name: msgspec.Raw(text.encode())}
        return msgspec.json.encode({name: value for name, value in row.items() if value is not None})


def lines_path(path: Path) -> Path:
    """File of lines that results are appended to: that of the results, or one beside a Parquet file."""
    return path.with_name(f"{path.name}.jsonl") if path.suffix == PARQUET else path


def write_rows(lines: Path, path: Path, schema: Mapping[str, Any], row: Callable[[bytes], dict[str, Any]]) -> None:
    """Write a file of lines as Parquet, whole or not at all.

    Args:
        lines: what `ResultFile` wrote.
        path: of the file.
        schema: type of each column, of pyarrow.
        row: gives the row of a line.
    """
    arrow, parquet = require_optional("pyarrow"), require_optional("pyarrow.parquet")
    columns = arrow.schema(dict(schema))
    with atomic_path(path) as partial, parquet.ParquetWriter(partial, columns) as writer, lines.open("rb") as file:
        while some := list(islice(file, ROWS)):
            writer.write_batch(arrow.RecordBatch.from_pylist([row(line) for line in some], columns))


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


JSONL = ".jsonl"


CUSTOM_ID = "custom_id"
"""Field with the user's name for a line, as in OpenAI's batch files."""


@dataclass(frozen=True)
class InputLine:
    """Work of a line.

    Attributes:
        number: of the line, from 1.
        custom_id: the user's name for it; its number as a text if it has none.
        fields: the other fields of its object.
    """

    number: int
    custom_id: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class InputFile:
    """File of work.

    Attributes:
        path: of the file. `.jsonl` has a JSON object in each line, `.parquet` a row, and any other file a text.
        field: field of the object that a plain text becomes.
        columns: columns of Parquet that are read; all of them if None.
    """

    path: Path
    field: str
    columns: tuple[str, ...] | None = None

    @property
    def size(self) -> int | None:
        """Bytes of the lines; None if they are not known, as of Parquet's rows."""
        return None if self.path.suffix == PARQUET else self.path.stat().st_size

    def lines(self) -> Iterator[bytes]:
        """The lines, read as they are needed.

        Raises:
            InvalidParameterError: for a file that is not Parquet.
            MissingDependencyError: if pyarrow is needed and not installed.
        """
        with ParquetLines(self.path, self.columns) if self.path.suffix == PARQUET else self.path.open("rb") as file:
            yield from file

    def read(self, text: bytes, number: int) -> InputLine | LineError:
        """The work of a line, or what is wrong with it: it is no UTF-8, no JSON object, or its `custom_id` is no name.

        Args:
            text: the line.
            number: of the line, from 1.
        """
        try:
            if self.path.suffix not in (JSONL, PARQUET):
                return InputLine(number, str(number), {self.field: text.decode().rstrip("\r\n")})
            fields = msgspec.json.decode(text, type=dict[str, Any])
        except UnicodeDecodeError as error:
            return bad_line("invalid_line", f"it is not UTF-8: {error.reason}", number)
        except msgspec.ValidationError:
            return bad_line("invalid_json_line", "expected a JSON object", number)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            return bad_line("invalid_json_line", f"it is not valid JSON: {error}", number)
        name = fields.pop(CUSTOM_ID, None)
        if isinstance(name, bool) or not isinstance(name, str | int | None) or name == "":
            problem = f"{CUSTOM_ID}: expected a text or a whole number, got {name!r}"
            return bad_line("invalid_request", problem, number, CUSTOM_ID)
        return InputLine(number, str(number if name is None else name), fields)
