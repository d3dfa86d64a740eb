"""Lines of a file of work: JSON objects, rows of Parquet, or plain texts; and Parquet files of results."""

from __future__ import annotations

import codecs
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from verax._optional import require_optional
from verax.errors import InvalidParameterError, RequestRefusedError
from verax.files import atomic_path

JSON_LINES = (".jsonl", ".ndjson")
NO_TEXTS = (".json", ".csv", ".tsv", ".gz", ".zst", ".zip")
"""Ends of names of files whose lines are not texts."""

PARQUET = ".parquet"

CUSTOM_ID = "custom_id"
"""Field with the user's name for a line, as in OpenAI's batch files."""

ROWS = 1024
"""Rows of Parquet that are held at once."""

_log = logging.getLogger("verax.batch")


def is_parquet(path: Path) -> bool:
    """True for the name of a Parquet file."""
    return path.suffix.lower() == PARQUET


class LineError(msgspec.Struct, frozen=True):
    """Reason why a line has no result.

    `code`: the kind of error, for programs. `line`: number of a line that could not be read as work, from 1; None for
    work that could not be done.
    """

    code: str
    message: str
    param: str | None
    line: int | None


def bad_line(code: str, problem: str, number: int, param: str | None = None) -> LineError:
    """Error of a line that could not be read as work."""
    return LineError(code, f"line {number}: {problem}", param, number)


def line_error(error: Exception) -> LineError:
    """Error of work that failed: what is wrong with the request, or an unexpected exception, which is logged."""
    if isinstance(error, (InvalidParameterError, RequestRefusedError)):
        param = str(error).partition(":")[0] if isinstance(error, InvalidParameterError) else None
        return LineError("invalid_request", str(error), param, None)
    _log.error("the work of a line failed", exc_info=error)
    return LineError("server_error", f"{type(error).__name__}: {error}", None, None)


def without_mark(text: bytes, number: int) -> bytes:
    """A line without the byte order mark that editors and spreadsheets put before the first one."""
    return text.removeprefix(codecs.BOM_UTF8) if number == 1 else text


@dataclass(frozen=True)
class Line:
    """Work of a line: its number, from 1, and the user's name for it."""

    number: int
    custom_id: str


@dataclass(frozen=True)
class InputLine(Line):
    """Work of a line of any object.

    `number`: of the line, from 1. `custom_id`: the user's name for it; its number as a text if it has none.
    """

    fields: dict[str, Any]


class ParquetLines(contextlib.AbstractContextManager["ParquetLines"]):
    """Rows of a file as lines of JSON; an empty cell is a field that is absent.

    `columns`: columns that are read, where the file has them; all of them if None. `json`: columns whose texts are
    JSON, and become part of the line unchanged.
    """

    def __init__(self, path: Path, columns: Sequence[str] | None = None, *, json: Sequence[str] = ()):
        parquet = require_optional("pyarrow.parquet")
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise InvalidParameterError(f"input: {path}: it is not a Parquet file: {error}") from error
        self._columns = columns
        self._json = json

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        names = [name for name in self._file.schema_arrow.names if self._columns is None or name in self._columns]
        for batch in self._file.iter_batches(ROWS, columns=names):
            for row in batch.to_pylist():
                for name in self._json:
                    if isinstance(text := row.get(name), str):
                        row[name] = msgspec.Raw(text.encode())
                yield msgspec.json.encode({name: value for name, value in row.items() if value is not None})


@dataclass(frozen=True)
class InputFile:
    """File of work.

    `path`: of the file. `.jsonl` and `.ndjson` have a JSON object in each line, `.parquet` a row, and any other file a
    text. `columns`: columns of Parquet that are read; all of them if None.
    """

    path: Path
    field: str
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if (end := self.path.suffix.lower()) in NO_TEXTS:
            expected = "a JSON object on each line (.jsonl), rows (.parquet) or a text on each line (.txt)"
            raise InvalidParameterError(f"input: {self.path}: {end} is not read; expected {expected}")

    @property
    def size(self) -> int | None:
        """Bytes of the lines; None if they are not known, as for Parquet's rows."""
        return None if is_parquet(self.path) else self.path.stat().st_size

    def lines(self) -> Iterator[bytes]:
        """The lines, each read when it is needed."""
        with ParquetLines(self.path, self.columns) if is_parquet(self.path) else self.path.open("rb") as file:
            yield from file

    def read(self, text: bytes, number: int) -> InputLine | LineError:
        """The work of a line, or what is wrong with it: not UTF-8, not a JSON object, or a `custom_id` of another type.

        `number`: of the line, from 1.
        """
        try:
            plain = text.decode()  # msgspec tells of UTF-8 in another error since 0.23
            if self.path.suffix.lower() not in (*JSON_LINES, PARQUET):
                return InputLine(number, str(number), {self.field: plain.rstrip("\r\n")})
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


def lines_path(path: Path) -> Path:
    """File of lines that results are appended to: the file of results itself, or one next to a Parquet file."""
    return path.with_name(f"{path.name}.jsonl") if is_parquet(path) else path


def write_rows(lines: Path, path: Path, schema: Mapping[str, Any], row: Callable[[bytes], dict[str, Any]]) -> None:
    """Write a file of result lines as Parquet, whole or not at all.

    `lines`: the file that `ResultFile` wrote. `schema`: type of each column, of pyarrow.
    """
    arrow, parquet = require_optional("pyarrow"), require_optional("pyarrow.parquet")
    columns = arrow.schema(dict(schema))
    with atomic_path(path) as partial, parquet.ParquetWriter(partial, columns) as writer, lines.open("rb") as file:
        while chunk := list(islice(file, ROWS)):
            writer.write_batch(arrow.RecordBatch.from_pylist([row(line) for line in chunk], columns))
