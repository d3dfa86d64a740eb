"""Lines of a file of work: JSON objects, rows of Parquet, or plain texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verax.batch.parquet import PARQUET, ParquetLines
from verax.batch.results import LineError, bad_line

__all__ = ["InputFile", "InputLine"]

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
