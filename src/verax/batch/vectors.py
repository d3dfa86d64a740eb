"""Vectors of the texts of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
from jaxtyping import Float32

from verax._optional import require_optional
from verax.batch.lines import InputLine
from verax.batch.parquet import write_rows
from verax.batch.results import LineError
from verax.embed.encoder import Encoder

__all__ = ["LEAST", "MOST", "VectorLine", "Vectors", "numbers", "write_vectors"]

LEAST, MOST = 64, 4096
"""Texts of the first call of the encoder, and most of a call."""


class VectorLine(msgspec.Struct, frozen=True):
    """Vector of a text, or the reason why there is none.

    Attributes:
        custom_id: name of the line; None for a line that could not be read.
        embedding: list of numbers, as JSON; `null` if there is an error.
        error: None if there is a vector.
    """

    BEGIN: ClassVar[bytes] = b'{"custom_id":'

    custom_id: str | None
    embedding: msgspec.Raw
    error: LineError | None

    @property
    def failed(self) -> bool:
        """True if there is no vector."""
        return self.error is not None

    @classmethod
    def failure(cls, error: LineError, custom_id: str | None = None) -> VectorLine:
        """Line of an error."""
        return cls(custom_id, msgspec.Raw(b"null"), error)


class Vectors:
    """Callable that gives the vectors of lines.

    Args:
        encoder: the model.
        field: field of a line that has its text.
        options: further arguments of `Encoder.encode`.
    """

    def __init__(self, encoder: Encoder, field: str, **options: Any):
        self.truncated = 0
        """Texts so far that were longer than the model reads, and lost their end."""
        self._encoder = encoder
        self._field = field
        self._options = options

    def __call__(self, lines: Sequence[InputLine]) -> list[VectorLine]:
        """The results of some lines."""
        texts = [line.fields.get(self._field) for line in lines]
        found = [text for text in texts if isinstance(text, str)]
        vectors = iter(self._encoder.encode(found, show_progress=False, **self._options) if found else ())
        self.truncated += self._encoder.truncated if found else 0
        return [
            VectorLine(line.custom_id, msgspec.Raw(msgspec.json.encode(numbers(next(vectors)))), None)
            if isinstance(text, str)
            else VectorLine.failure(self._no_text(line), line.custom_id)
            for line, text in zip(lines, texts, strict=True)
        ]

    def _no_text(self, line: InputLine) -> LineError:
        has = ", ".join(map(repr, line.fields)) or "none"
        return LineError(
            "invalid_request", f"expected a text in the field {self._field!r}; it has {has}", self._field, None
        )


def numbers(vector: Float32[np.ndarray, "D"]) -> list[float]:
    """Numbers of a vector as JSON has them: nine digits, which distinguish all float32 numbers."""
    return [float(f"{x:.9g}") for x in vector.tolist()]


def write_vectors(lines: Path, path: Path, dimension: int) -> None:
    """Write the vectors of a file of lines as Parquet, whole or not at all.

    Columns are `custom_id`, `embedding`, a list of float32 `[D]`, and `error`, which is JSON text.

    Args:
        lines: what `ResultFile` wrote.
        path: of the file.
        dimension: numbers in a vector.
    """
    arrow = require_optional("pyarrow")
    text = arrow.string()
    schema = {"custom_id": text, "embedding": arrow.list_(arrow.float32(), dimension), "error": text}
    write_rows(lines, path, schema, _row)


def _row(line: bytes) -> dict[str, Any]:
    found = msgspec.json.decode(line, type=VectorLine)
    return {
        "custom_id": found.custom_id,
        "embedding": msgspec.json.decode(found.embedding),
        "error": None if found.error is None else msgspec.json.encode(found.error).decode(),
    }
