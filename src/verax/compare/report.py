"""A comparison for people and for scripts: terminal table, Markdown, one HTML page, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from verax.compare.comparison import MAX_RATIO, Comparison, Row
from verax.files import write_text
from verax.page import escaped, figure, page, table

__all__ = ["as_html", "as_markdown", "show", "write"]

ROWS = 40
"""In the terminal: of a larger model, the blocks and what stands out."""

_WORDS = ("layer", "parameter", "run", "dtype")
"""Columns that are no numbers."""

Column = tuple[str, Callable[[Row], str]]


def show(result: Comparison, console: Console, *, every: bool = False) -> None:
    """Print the tables and the verdict.

    Args:
        result: the comparison.
        console: where to.
        every: all rows, however many.
    """
    rows = result.rows if every else _chosen(result)
    _table(console, f"{result.title}, {result.dtype}", rows, _columns(result), result)
    if result.gradients:
        gradients = result.gradients if every else _worst(result.gradients)
        _table(console, "gradients by parameter", gradients, _columns(result, gradients=True), result)
    if result.fused is not None:
        _table(console, _OUTPUT_TITLE, _outputs(result), _output_columns(result), result)
    left = len(result.rows) - len(rows)
    if left:
        console.print(f"{left} rows more within the blocks: --all shows them, --output DIR writes them.")
    for line in _findings(result):
        console.print(line, highlight=False)
    console.print("[bold green]equal[/]" if result.passed else "[bold red]different[/]", highlight=False)


def as_markdown(result: Comparison) -> str:
    """The comparison as a page, with all rows."""
    lines = [f"# {result.title}, {result.dtype}", "", "**equal**" if result.passed else "**different**", ""]
    lines += [f"- {line}" for line in _findings(result)]
    for title, rows, columns in _sections(result):
        lines += ["", f"## {title}", "", "| " + " | ".join(name for name, _ in columns) + " |"]
        lines.append("|" + "---|" * len(columns))
        lines += ["| " + " | ".join(cell(row).replace("|", "\\|") for _, cell in columns) + " |" for row in rows]
    return "\n".join([*lines, "", _definitions(result), ""])


def as_html(result: Comparison, plots: dict[str, str]) -> str:
    """One page that needs no network: verdict, plots, all rows.

    Args:
        result: the comparison.
        plots: SVG by caption.
    """
    verdict, kind = ("equal", "good") if result.passed else ("different", "bad")
    body = [f"<h1>{escaped(result.title)}, {result.dtype}</h1>", f'<p class="{kind}">{verdict}</p>', "<ul>"]
    body += [f"<li>{escaped(line)}</li>" for line in _findings(result)] + ["</ul>"]
    body += [figure(caption, svg) for caption, svg in plots.items()]
    marked = {id(row) for row in (result.first, *result.faults) if row is not None}
    for title, rows, columns in _sections(result):
        cells = ([cell(row) for _, cell in columns] for row in rows)
        body += table(
            title, [name for name, _ in columns], cells, [i for i, row in enumerate(rows) if id(row) in marked]
        )
    body.append(f"<p>{escaped(_definitions(result))}</p>")
    return page(f"{result.title}: {verdict}", body)


def write(result: Comparison, folder: str | Path) -> list[Path]:
    """Write `compare.json`, `compare.md` and `compare.html` into a folder, which is made; their paths.

    Raises:
        MissingDependencyError: without matplotlib, which draws the page's plots.
    """
    from verax.compare.plots import error_plots

    folder = Path(folder)
    pages = {
        "compare.json": json.dumps(result.as_dict(), indent=1) + "\n",
        "compare.md": as_markdown(result),
        "compare.html": as_html(result, error_plots(result)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        write_text(folder / name, text)
    return [folder / name for name in pages]


def _sections(result: Comparison) -> list[tuple[str, Sequence[Row], list[Column]]]:
    found: list[tuple[str, Sequence[Row], list[Column]]] = [
        ("Layers", result.rows, [*_columns(result), ("reference", lambda row: row.reference), _ARRANGED])
    ]
    if result.fused is not None:
        found.insert(0, (_OUTPUT_TITLE, _outputs(result), _output_columns(result)))
    if result.gradients:
        found.append(("Gradients", result.gradients, [*_columns(result, gradients=True), _ARRANGED]))
    return found


_OUTPUT_TITLE = "output, layer by layer and as one compiled program"


def _outputs(result: Comparison) -> list[Row]:
    """The outputs of both runs of our model, named by the run."""
    runs = (result.output, "layer by layer"), (result.fused, "one compiled program")
    return [replace(row, name=name) for row, name in runs if row is not None]


def _output_columns(result: Comparison) -> list[Column]:
    return [("run", lambda row: row.name), *_columns(result)[1:]]


_ARRANGED: Column = ("arranged", lambda row: row.layout)


def _columns(result: Comparison, *, gradients: bool = False) -> list[Column]:
    columns: list[Column] = [
        ("parameter" if gradients else "layer", lambda row: row.name),
        ("max abs", lambda row: f"{row.errors.max_abs:.1e}"),
        ("max / mean", lambda row: f"{row.errors.max_rel:.1e}"),
        ("rel. L2", lambda row: f"{row.errors.l2:.1e}"),
        ("1 - cosine", lambda row: f"{1 - row.errors.cosine:.0e}"),
        (
            "dtype",
            lambda row: row.dtype if row.dtype == row.reference_dtype else f"{row.dtype} / {row.reference_dtype}",
        ),
    ]
    if not gradients and any(row.own for row in result.rows):
        columns.insert(4, ("own rel. L2", lambda row: f"{row.own.l2:.1e}" if row.own else ""))
    if not gradients and any(row.against_truth for row in result.rows):
        columns.insert(4, ("ours : f32", lambda row: f"{row.against_truth[0]:.1e}" if row.against_truth else ""))
        columns.insert(5, ("ref. : f32", lambda row: f"{row.against_truth[1]:.1e}" if row.against_truth else ""))
        columns.insert(6, ("ratio", lambda row: "" if row.ratio is None else f"{row.ratio:.2f}"))
    return columns


def _findings(result: Comparison) -> list[str]:
    lines = [", ".join(f"{name} {value}" for name, value in result.about.items())] if result.about else []
    output = result.output
    if output is not None:
        lines.append(
            f"output: max / mean {output.errors.max_rel:.1e}, relative L2 {output.errors.l2:.1e}"
            + (f", error ratio against float32 {output.ratio:.2f}" if output.ratio is not None else "")
        )
    if result.fused is not None:
        lines.append(
            f"output as one compiled program: max / mean {result.fused.errors.max_rel:.1e}, relative L2 "
            f"{result.fused.errors.l2:.1e}"
            + (f", error ratio against float32 {result.fused.ratio:.2f}" if result.fused.ratio is not None else "")
        )
    if result.judged is not None:
        lines += result.judged.lines()
    kinds = [
        f"{n} of {ours}" + (f" (reference {theirs})" * (ours != theirs)) for (ours, theirs), n in result.dtypes.items()
    ]
    lines.append(f"{len(result.rows)} layers compared: {', '.join(kinds)}")
    if (first := result.first) is not None:
        lines.append(f"first error beyond the trend: {first.name} ({first.errors.l2:.1e})")
    if any(row.own for row in result.rows):
        faults = ", ".join(f"{row.name} ({row.own.l2:.1e})" for row in result.faults if row.own)
        lines.append(f"errors of their own, on the reference's activations: {faults or 'none stands out'}")
    if result.guessed:
        lines.append("matched by shape and order only, to be confirmed: " + "; ".join(map(str, result.guessed)))
    for what, names in (("ours", result.alignment.ours_only), ("the reference", result.alignment.reference_only)):
        if names:
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            lines.append(f"in {what} only: {', '.join(names[:6])}{more}")
    if result.peak_memory is not None:
        lines.append(f"memory: the process held {result.peak_memory / 1e9:.2f} GB at most")
    return lines + list(result.failures)


def _definitions(result: Comparison) -> str:
    text = (
        "max abs: the largest absolute difference; max / mean: that, over the mean absolute value of the reference's "
        "activations; rel. L2: the norm of the difference over the norm of the reference."
    )
    if any(row.own for row in result.rows):
        text += " own: with each layer's inputs, and what stands before it, taken from the reference."
    if result.fused is not None:
        text += (
            " one compiled program: as the engines run the model, with fused operations, whose layers have no results "
            "of their own."
        )
    if any(row.against_truth for row in result.rows):
        text += (
            f" f32: the reference in float32 with the same rounded weights; a ratio up to {MAX_RATIO} counts as equal."
        )
    if result.bound is not None:
        text += f" Equal means a relative L2 error of at most {result.bound:.0e} in every row."
    return text


def _chosen(result: Comparison) -> list[Row]:
    """Rows for a terminal: the outermost modules, what stands out, and the largest errors."""
    if len(result.rows) <= ROWS:
        return result.rows
    depths = sorted({row.name.count(".") for row in result.rows})
    wanted: set[int] = set()
    for depth in depths:
        level = {i for i, row in enumerate(result.rows) if row.name.count(".") == depth}
        if len(wanted | level) > ROWS:
            break
        wanted |= level
    for row in (result.first, *result.faults[:8], result.output):
        if row is not None:
            wanted.add(next(i for i, other in enumerate(result.rows) if other is row))
    return [result.rows[i] for i in sorted(wanted)]


def _worst(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -row.errors.l2)[:8]


def _table(console: Console, title: str, rows: Sequence[Row], columns: list[Column], result: Comparison) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name, cell in columns:
        # On a narrow terminal the layers' names are what gives way.
        width = None if name in ("layer", "parameter") else max(map(len, (name, *map(cell, rows))))
        table.add_column(name, no_wrap=True, justify="left" if name in _WORDS else "right", min_width=width)
    marked = {id(row) for row in (result.first, *result.faults) if row is not None}
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns), style="red" if id(row) in marked else None)
    console.print(table)
