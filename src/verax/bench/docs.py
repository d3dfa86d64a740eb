"""`docs/performance.md` out of its template and the results in `benchmarks/results`: no number in it is typed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from verax.bench.results import markdown
from verax.errors import InvalidParameterError

__all__ = ["Results", "render"]

FILE = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)-(?P<machine>.+?)-(?P<cores>\d+)c-(?P<what>.+)\.json")
"""File name of a result, as `results.write` makes it."""


class Results:
    """The results in a folder by name, such as `text-short-prompts-int8`; of several of one name, the latest."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._paths: dict[str, Path] = {}
        for path in sorted(folder.glob("*.json")):  # by date: the last one stays
            if match := FILE.fullmatch(path.name):
                self._paths[match["what"]] = path

    def names(self, beginning: str) -> list[str]:
        """Names of results that begin with this."""
        return sorted(name for name in self._paths if name.startswith(beginning))

    def result(self, name: str) -> dict[str, Any]:
        """The latest result of that name.

        Raises:
            InvalidParameterError: if there is none.
        """
        if name not in self._paths:
            raise InvalidParameterError(
                f"{self._folder}: no result of {name!r}; there are {', '.join(self.names('')) or 'none'}"
            )
        return json.loads(self._paths[name].read_text(encoding="utf-8"))

    def table(self, name: str, number: int = 0, *, only: Sequence[str] | None = None) -> str:
        """A table of a result's page.

        Args:
            name: of the result.
            number: of the table on the page, from 0.
            only: keeps the rows of which a cell is among these; all rows if None.
        """
        tables = re.findall(r"^\|.*(?:\n\|.*)*", markdown(self.result(name)), re.MULTILINE)
        head, rule, *rows = tables[number].split("\n")
        kept = [row for row in rows if only is None or {cell.strip() for cell in row.split("|")} & set(only)]
        if only is not None and len(kept) < len(only):
            raise InvalidParameterError(f"only: {name} has {len(kept)} of the {len(only)} rows")
        return "\n".join([head, rule, *kept])


def render(template: Path, results: Path) -> str:
    """The page: a Jinja template, which is given `result`, `table` and `names` of `Results`.

    Raises:
        InvalidParameterError: if there is no template, or it asks for what the results do not have.
    """
    if not template.is_file():
        raise InvalidParameterError(f"template: there is no file {template}; run this in the repository's root")
    found = Results(results)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    try:
        page = environment.from_string(template.read_text(encoding="utf-8"))
        text = page.render(result=found.result, table=found.table, names=found.names)
    except jinja2.TemplateError as error:
        raise InvalidParameterError(f"{template}: {error}") from error
    return re.sub(r"\n{3,}", "\n\n", text)  # what macros leave behind
