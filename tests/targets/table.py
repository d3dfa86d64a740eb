"""The table of `docs/accelerators.md`, out of the compilations of `cases.py`: `python -m tests.targets.table`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.targets.cases import CASES, Case, compiled
from verax.files import write_text

__all__ = ["render", "replaced"]

PAGE = Path(__file__).parents[2] / "docs" / "accelerators.md"
BEGIN, END = "<!-- written by make test-targets -->", "<!-- end of what make test-targets writes -->"

COLUMNS = (
    "model, layers",
    "program",
    "device",
    "compiler",
    "arguments",
    "temporaries",
    "code",
    "collectives",
    "compiled in",
)


def render(results: dict[Case, dict[str, Any]]) -> str:
    """A Markdown table of compilations."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row for case, result in results.items() for row in _rows(case, result))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rows(case: Case, result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    model = f"{case.model}, {result['depth'] or 'all'}"
    device = f"{case.devices} x {case.device}"
    for row in result["programs"]:
        head = (model, row["name"], device, f"{result['compiler']}, JAX {result['jax']}")
        if row["refused"]:
            yield (*head, "refused", f"needs {_gib(row['needed'])}", "", "", f"{row['seconds']:.0f} s")
            continue
        kinds = row["findings"]["collectives"].items()
        collectives = ", ".join(f"{count} {kind}" for kind, count in kinds) or "none"
        sizes = (_gib(row[name]) for name in ("arguments", "temporaries", "code"))
        yield (*head, *sizes, collectives, f"{row['seconds']:.0f} s")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def replaced(page: str, table: str) -> str:
    """A page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


if __name__ == "__main__":
    found = {case: compiled(case) for case in CASES}
    write_text(PAGE, replaced(PAGE.read_text(encoding="utf-8"), render(found)))
