"""Parquet files of work and of results. Until the last result has come, they are lines of JSON, to append to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from verax._optional import require_optional
from verax.errors import InvalidParameterError
from verax.files import atomic_path

__all__ = ["PARQUET", "ParquetLines", "lines_path", "write_rows"]

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
