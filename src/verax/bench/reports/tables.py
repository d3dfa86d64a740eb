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
        title: what it shows.
        columns, rows: text, as it is to be read.
        note: how it was made, in a sentence or two.
        why_not: why it was not run here; there are no rows then.
    """

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    note: str = ""
    why_not: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    def lines(self) -> list[str]:
        """As Markdown."""
        lines = [f"## {self.title}", ""]
        if self.why_not is not None:
            return [*lines, f"**Not run**: {self.why_not}", ""]
        lines += [self.note, ""] if self.note else []
        lines += ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        return [*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""]


def not_run(title: str, why: str) -> Table:
    """A table that could not be made here."""
    return Table(title, why_not=why if why.endswith(".") else f"{why}.")


def milliseconds(seconds: float) -> str:
    """Three digits."""
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def times(factor: float) -> str:
    """A ratio of times: `2.14x`."""
    return f"{factor:.2f}x"


def deviation(side: Mapping[str, Any]) -> float:
    """The standard deviation of a side's runs, in seconds; 0 of a single run."""
    runs = side["seconds"]
    return float(np.std(runs, ddof=1)) if len(runs) > 1 else 0.0
