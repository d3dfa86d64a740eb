"""Batches of Ray Data as rows, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Batch", "columns", "rows_of"]

Batch = dict[str, Any]
"""Columns of a batch by name: arrays of one length."""


def rows_of(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a batch, with Python's own values in place of numpy's scalars."""
    names = list(batch)
    for values in zip(*batch.values(), strict=True):
        yield {name: _plain(value) for name, value in zip(names, values, strict=True)}


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Columns of rows that have the same names. Columns of texts can have None."""
    names = rows[0] if rows else {}
    return {name: _column([row[name] for row in rows]) for name in names}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _column(values: list[Any]) -> np.ndarray:
    if all(isinstance(value, int | float) for value in values):
        return np.array(values)
    column = np.empty(len(values), object)
    column[:] = values
    return column
