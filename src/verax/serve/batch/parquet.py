"""Parquet files of requests and of answers.

Columns of requests are the fields of a line: `custom_id`, `method`, `url` and `body`, which is a struct or JSON text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from verax._optional import require_optional
from verax.batch.parquet import ParquetLines, write_rows
from verax.serve.batch.lines import AnswerLine

__all__ = ["request_lines", "write_answers"]


def request_lines(path: Path) -> ParquetLines:
    """Rows of a file of requests as lines.

    Raises:
        InvalidParameterError: for a file that is not Parquet.
        MissingDependencyError: if pyarrow is not installed.
    """
    return ParquetLines(path, ("custom_id", "method", "url", "body"), json=("body",))


def write_answers(lines: Path, path: Path) -> None:
    """Write the answers of a file of lines as Parquet, whole or not at all.

    Columns are `id`, `custom_id`, `status_code`, `request_id`, `body` and `error`; the last two are JSON text.

    Args:
        lines: what `ResultFile` wrote.
        path: of the file.
    """
    arrow = require_optional("pyarrow")
    names = ("id", "custom_id", "status_code", "request_id", "body", "error")
    write_rows(lines, path, {**dict.fromkeys(names, arrow.string()), "status_code": arrow.int32()}, _row)


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
