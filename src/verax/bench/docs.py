"""`docs/performance.md` from its template and the results in `benchmarks/results`: no number in it is typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from verax.bench.results import read_results, table_lines
from verax.errors import InvalidParameterError

__all__ = ["Results", "render"]


class Results:
    """Results in a folder by file and name, such as `text-amd-epyc-2c/short-prompts-int8`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._results = {
            f"{path.stem}/{name}": result
            for path in sorted(folder.glob("*.json"))
            for name, result in read_results(path).items()
        }

    def names(self, beginning: str) -> list[str]:
        """Names of results that begin with this text."""
        return sorted(name for name in self._results if name.startswith(beginning))

    def result(self, name: str) -> dict[str, Any]:
        """Result of that name.

        Raises:
            InvalidParameterError: if there is none.
        """
        if name not in self._results:
            raise InvalidParameterError(
                f"{self._folder}: no result of {name!r}; there are {', '.join(self._results) or 'none'}"
            )
        return self._results[name]

    def table(self, name: str, number: int = 0, *, only: Sequence[str] | None = None) -> str:
        """Table of a result's page, without its heading.

        Args:
            name: of the result.
            number: of the table on the page, from 0.
            only: keeps the rows of which a cell is among these; all rows if None.

        Raises:
            InvalidParameterError: if there is no such result, or a row is missing.
        """
        one = self.result(name)["tables"][number]
        rows = [row for row in one["rows"] if only is None or set(row) & set(only)]
        if only is not None and len(rows) < len(only):
            raise InvalidParameterError(f"only: {name} has {len(rows)} of the {len(only)} rows")
        return "\n".join(table_lines({"columns": one["columns"], "rows": rows})[:-1])


def render(template: Path, folder: Path) -> str:
    """Page of a Jinja template, which is given `result`, `table` and `names` of `Results`.

    Raises:
        InvalidParameterError: if there is no template, or it asks for what the results do not have.
    """
    if not template.is_file():
        raise InvalidParameterError(f"template: there is no file {template}; run this in the repository's root")
    results = Results(folder)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    try:
        page = environment.from_string(template.read_text(encoding="utf-8"))
        text = page.render(result=results.result, table=results.table, names=results.names)
    except jinja2.TemplateError as error:
        raise InvalidParameterError(f"{template}: {error}") from error
    while "\n\n\n" in text:  # what macros leave
        text = text.replace("\n\n\n", "\n\n")
    return text
