"""Parquet files of requests and of answers. Until the last one has come, answers are lines of JSON, to append to.

Columns of requests are the fields of a line: `custom_id`, `method`, `url` and `body`, which is a struct or JSON text.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from verax._optional import require_optional
from verax.errors import InvalidParameterError
from verax.files import atomic_path
from verax.serve.batch.lines import AnswerLine

__all__ = ["ParquetLines", "write_answers"]

ROWS = 1024
"""Rows that are held at once."""

_COLUMNS = ("custom_id", "method", "url", "body")


class ParquetLines:
    """Rows of a file of requests as lines of JSON; an empty cell is a field that is absent.

    Args:
        path: of the file.

    Raises:
        InvalidParameterError: for a file that is not Parquet.
        MissingDependencyError: if pyarrow is not installed.
    """

    def __init__(self, path: Path):
        parquet = require_optional("pyarrow.parquet")
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise InvalidParameterError(f"input: {path}: it is no Parquet file: {error}") from error

    def __enter__(self) -> ParquetLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        there = [name for name in _COLUMNS if name in self._file.schema_arrow.names]
        for batch in self._file.iter_batches(ROWS, columns=there):
            for row in batch.to_pylist():
                yield _line(row)


def write_answers(lines: Path, path: Path) -> None:
    """Write the answers of a file of lines as Parquet, whole or not at all.

    Columns are `id`, `custom_id`, `status_code`, `request_id`, `body` and `error`; the last two are JSON text.

    Args:
        lines: what `BatchOutput` wrote.
        path: of the file.
    """
    arrow, parquet = require_optional("pyarrow"), require_optional("pyarrow.parquet")
    text = arrow.string()
    schema = arrow.schema(
        {
            "id": text,
            "custom_id": text,
            "status_code": arrow.int32(),
            "request_id": text,
            "body": text,
            "error": text,
        }
    )
    with atomic_path(path) as partial, parquet.ParquetWriter(partial, schema) as writer, lines.open("rb") as file:
        while some := list(islice(file, ROWS)):
            writer.write_batch(arrow.RecordBatch.from_pylist([_row(line) for line in some], schema))


def _line(row: dict[str, Any]) -> bytes:
    body = row.get("body")
    if isinstance(body, str):
        row = {**row, "body": msgspec.Raw(body.encode())}
    return msgspec.json.encode({name: value for name, value in row.items() if value is not None})


def _row(line: bytes) -> dict[str, Any]:
    answer = msgspec.json.decode(line, type=AnswerLine)
    response, error = answer.response, answer.error
    return {
        "id": answer.id,
        "custom_id": answer.custom_id,
        "status_code": None if response is None else response.status_code,
        "request_id": None if response is None else response.request_id,
        "body": None if response is None else bytes(response.body).decode(),
        "error": None if error is None else msgspec.json.encode(error).decode(),
    }
