"""The one format of results, and its one page: JSON that can be compared later, Markdown that is read now.

A result is a dictionary that JSON holds. Its keys:

- `subject` (`"text"`, `"serve"`, ...) and `name`, which separates the subject's results: `"short-prompts-int8"`;
- `title` and `intro` of its page, `tables` (see `table`) and `notes` below them;
- `settings`, `machine` (the fingerprint with the versions of all baselines), `measured` (the machine's limits),
  `noise`, `memory` (peaks), and `date` once it is written;
- `cases`: a list of `case`, `sides` (each with `median_s`, `p10_s`, `p90_s`, `rate`, `seconds`, ...), `chosen` (our
  side) and `ratios` (how many times faster it is than each other side);
- further numbers of the subject.

A file holds the latest result of each name, of one subject on one processor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from verax.errors import InvalidParameterError
from verax.files import write_text

__all__ = [
    "faster_by",
    "markdown",
    "noise_line",
    "number",
    "outliers",
    "read_results",
    "render",
    "rounds",
    "side_rows",
    "side_table",
    "slug",
    "spread",
    "table",
    "table_lines",
    "write",
]

Item = TypeVar("Item")

ENOUGH_RUNS = 10
"""Counted rounds of a result to be relied upon; where one round is long there are fewer, and pages say so."""

MACHINE_FACTS = (
    *("cpu", "cores", "memory_gib", "platform", "devices", "python", "jax", "jaxlib", "torch", "diffusers"),
    *("transformers", "openvino", "nncf", "onnxruntime", "llama_cpp_python", "llama_server"),
)
"""Facts of the machine that a page repeats."""


def table(
    rows: Iterable[Item], columns: Mapping[str, Callable[[Item], object]], *, title: str = "", note: str = ""
) -> dict[str, Any]:
    """Table of a page, with formatted cells.

    Args:
        rows: what the functions of `columns` take.
        columns: function that makes a cell of a row, by the column's heading.
        title: heading above the table.
        note: sentences between heading and table.
    """
    cells = [[str(cell(row)) for cell in columns.values()] for row in rows]
    return {"title": title, "note": note, "columns": list(columns), "rows": cells}


def side_rows(cases: Iterable[Mapping[str, Any]]) -> list[tuple[Any, str, Any]]:
    """Rows of a table: each case with the name and the numbers of each of its sides."""
    return [(case, name, side) for case in cases for name, side in case["sides"].items()]


def faster_by(row: tuple[Any, str, Any]) -> str:
    """Factor by which the chosen side of a row's case is faster than the row's side; empty for the chosen side."""
    case, name, _ = row
    return f"{case['ratios'][name]:.2f}x" if name in case["ratios"] else ""


def side_table(case: Mapping[str, Any], rate: str, *, digits: int, rate_digits: int) -> dict[str, Any]:
    """Table of a case's sides.

    Args:
        case: one of a result's `cases`.
        rate: heading of the column of rates, such as `tokens/s`.
        digits: decimals of seconds.
        rate_digits: decimals of the rate.
    """
    columns: dict[str, Callable[[Any], object]] = {
        "side": lambda row: row[1],
        "median s": lambda row: f"{row[2]['median_s']:.{digits}f}",
        "P10-P90 s": lambda row: f"{row[2]['p10_s']:.{digits}f}-{row[2]['p90_s']:.{digits}f}",
        rate: lambda row: f"{row[2]['rate']:.{rate_digits}f}",
    }
    return table(side_rows([case]), columns | ({"verax is faster by": faster_by} if case["ratios"] else {}))


def number(value: float) -> str:
    """A positive number to about three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(side: Mapping[str, Any]) -> str:
    """P10 and P90 of a side, in milliseconds."""
    return f"{number(1e3 * side['p10_s'])}-{number(1e3 * side['p90_s'])}"


def rounds(settings: Mapping[str, Any]) -> str:
    """Number of rounds as text, with a warning if they are fewer than `ENOUGH_RUNS`."""
    few = f" (fewer than {ENOUGH_RUNS}: look at the spread)" if settings["runs"] < ENOUGH_RUNS else ""
    return f"{settings['runs']} rounds{few} after at least {settings['warmup']} of warm-up, until no side got faster"


def outliers(sides: Mapping[str, Any]) -> list[str]:
    """A note that shows the runs beyond Tukey's fences, if a side has some."""
    shown = [
        f"{name} " + ", ".join(f"{number(1e3 * seconds)} ms" for seconds in side["outliers"])
        for name, side in sides.items()
        if side.get("outliers")
    ]
    return [f"Outliers, which count like every run: {'; '.join(shown)}."] if shown else []


def noise_line(noise: Mapping[str, Any]) -> str:
    """Sentence on the noise, for pages and the log."""
    what = (
        f"a short loop's P10-P90 was {100 * noise['spread']:.0f}% of its median, other processes used "
        f"{100 * noise['others']:.0f}% of the processor"
    )
    return f"The machine was busy before the start: {what}." if noise["busy"] else f"Noise before the start: {what}."


def markdown(result: Mapping[str, Any]) -> str:
    """Page of a result: title, intro, tables, notes, and a line on the machine."""
    lines = [f"# {result['title']}", "", result["intro"], ""]
    for one in result["tables"]:
        lines += table_lines(one)
    for note in result["notes"]:
        lines += [note] if note.startswith("- ") else ["", note, ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, "", _about(result)])).rstrip() + "\n"


def table_lines(one: Mapping[str, Any]) -> list[str]:
    """Markdown lines of a table, its heading and note included."""
    lines = [f"## {one['title']}", ""] if one.get("title") else []
    if one.get("why_not"):
        return [*lines, f"**Not run**: {one['why_not']}", ""]
    lines += [one["note"], ""] if one.get("note") else []
    head, *rows = ("| " + " | ".join(row) + " |" for row in (one["columns"], *one["rows"]))
    return [*lines, head, "|" + "---|" * len(one["columns"]), *rows, ""]


def _about(result: Mapping[str, Any]) -> str:
    if "machine" not in result:
        return ""
    machine, memory = result["machine"], result.get("memory", {})
    limits = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.get("measured", {}).items())
    facts = ", ".join(f"{name} {machine[name]}" for name in MACHINE_FACTS if name in machine)
    peaks = [f"{name} {memory[key]:.2f} GB" for name in ("host", "device") if memory.get(key := f"{name}_peak_gb")]
    parts = (
        f"Machine: {facts}.",
        f"Measured: {limits}." if limits else "",
        f"Peak memory of the process: {', '.join(peaks)}." if peaks else "",
        noise_line(result["noise"]) if "noise" in result else "",
        result.get("date", ""),
    )
    return " ".join(part for part in parts if part)


def slug(*parts: str) -> str:
    """Name of a result or file: lower-case words of letters and digits with hyphens between them."""
    return "-".join(word for part in parts if (word := re.sub("[^a-z0-9]+", "-", part.lower()).strip("-")))


def write(result: Mapping[str, Any], folder: Path, *, now: datetime | None = None) -> Path:
    """Write a result into its subject's and processor's file in a folder, in place of an earlier one of its name.

    Returns:
        The file: `SUBJECT-PROCESSOR-CORESc.json`.
    """
    machine, subject = result["machine"], result["subject"]
    device = str(machine["cpu"] if machine["platform"] == "cpu" else machine["devices"][0])
    path = folder / f"{subject}-{slug(device)}-{machine['cores']}c.json"
    results = read_results(path) if path.exists() else {}
    results[result["name"]] = {**result, "date": f"{now or datetime.now(UTC):%Y-%m-%d %H:%M UTC}"}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"subject": subject, "results": results}, indent=1)
    # A list of numbers or cells, of which a result is full, takes one line.
    write_text(path, re.sub(r"\[[^][{}]*\]", lambda numbers: re.sub(r"\n\s*", " ", numbers[0]), text) + "\n")
    return path


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Results in a file by name; also of a single result, as `--json` prints it.

    Raises:
        InvalidParameterError: if the file is not a result of verax bench.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidParameterError(f"{path}: not JSON: {error}") from error
    if not isinstance(read, dict) or "subject" not in read:
        raise InvalidParameterError(f"{path}: not a result of verax bench; expected the JSON that --output wrote")
    return read["results"] if "results" in read else {read["name"]: read}


def render(template: Path, folder: Path) -> str:
    """Page of a Jinja template with the results in a folder: no number in it is typed.

    The template is given `result(NAME)`, `names(BEGINNING)` and `table(NAME, NUMBER, only=CELLS)`. A name is the
    results' file and name, such as `text-amd-epyc-2c/short-prompts-int8`; `table` keeps the rows of which a cell is
    among `only`, and has no heading.

    Raises:
        InvalidParameterError: if there is no template, or it asks for what the results do not have.
    """
    if not template.is_file():
        raise InvalidParameterError(f"template: there is no file {template}; run this in the repository's root")
    paths = sorted(folder.glob("*.json"))
    results = {f"{path.stem}/{name}": one for path in paths for name, one in read_results(path).items()}

    def result(name: str) -> dict[str, Any]:
        if name not in results:
            raise InvalidParameterError(f"{folder}: no result of {name!r}; there are {', '.join(results) or 'none'}")
        return results[name]

    def rows_of(name: str, number: int = 0, *, only: Sequence[str] | None = None) -> str:
        one = result(name)["tables"][number]
        rows = [row for row in one["rows"] if only is None or set(row) & set(only)]
        if only is not None and len(rows) < len(only):
            raise InvalidParameterError(f"only: {name} has {len(rows)} of the {len(only)} rows")
        return "\n".join(table_lines({"columns": one["columns"], "rows": rows})[:-1])

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    names = lambda beginning: sorted(name for name in results if name.startswith(beginning))
    try:
        page = environment.from_string(template.read_text(encoding="utf-8"))
        text = page.render(result=result, table=rows_of, names=names)
    except jinja2.TemplateError as error:
        raise InvalidParameterError(f"{template}: {error}") from error
    return re.sub(r"\n{3,}", "\n\n", text)  # what macros leave
