"""Tables of the earlier ports as Markdown: measured numbers, or the reason that there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["Table", "deviation", "milliseconds", "not_run", "times"]


@dataclass(frozen=True)
class Table:
    """One table of a report.

    Attributes:
        title: subject of the table.
        columns, rows: formatted cells.
        note: a sentence or two on the method of measurement.
        why_not: the reason that the measurement was not run here; there are no rows then.
    """

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    note: str = ""
    why_not: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Fields of the table, ready for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Markdown lines of the table, its heading included."""
        lines = [f"## {self.title}", ""]
        if self.why_not is not None:
            return [*lines, f"**Not run**: {self.why_not}", ""]
        lines += [self.note, ""] if self.note else []
        lines += ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        return [*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""]


def not_run(title: str, why: str) -> Table:
    """A table without rows, with the reason that it could not be measured here."""
    return Table(title, why_not=why if why.endswith(".") else f"{why}.")


def milliseconds(seconds: float) -> str:
    """Milliseconds as text, to about three significant digits, without the unit."""
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def times(factor: float) -> str:
    """A ratio of times as text: `2.14x`."""
    return f"{factor:.2f}x"


def deviation(side: Mapping[str, Any]) -> float:
    """The standard deviation of a side's runs, in seconds; 0 for a single run."""
    runs = side["seconds"]
    return float(np.std(runs, ddof=1)) if len(runs) > 1 else 0.0
