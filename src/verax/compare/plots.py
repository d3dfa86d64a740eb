"""Plots of a comparison as SVG text, to be embedded in a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from verax.compare.comparison import Comparison, Row
from verax.plots import svg_style, svg_text

__all__ = ["error_plots"]

FLOOR = 1e-9
"""Position of zero errors on the logarithmic axis; smaller errors are drawn there too."""

SIDE, OTHER, BOUND, MARK = "#1f77b4", "#ff7f0e", "#888888", "#d62728"


def error_plots(result: Comparison) -> dict[str, str]:
    """SVG text by caption: errors by layer, and errors of gradients if the comparison has them.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    plots = {"Errors by layer, in the order of the run": _by_layer(result)}
    if result.gradients:
        series = [("relative L2 error", SIDE, "o", [row.errors.l2 for row in result.gradients])]
        plots["Errors of gradients by parameter"] = _draw(result.gradients, series, result.bound)
    return plots


def _by_layer(result: Comparison) -> str:
    rows = result.rows
    series = [("relative L2 error", SIDE, "o", [row.errors.l2 for row in rows])]
    if any(row.against_truth for row in rows):
        pairs = [row.against_truth or (math.nan, math.nan) for row in rows]
        series = [
            ("ours against float32", SIDE, "o", [ours for ours, _ in pairs]),
            ("the reference against float32", OTHER, "s", [theirs for _, theirs in pairs]),
        ]
    if any(row.own for row in rows):
        own = [row.own.l2 if row.own else math.nan for row in rows]
        series.append(("the layer's own, on the reference's activations", OTHER, "v", own))
    marked = [row for row in (result.first, *result.faults) if row is not None]
    return _draw(rows, series, result.bound, [rows.index(row) for row in marked])


def _draw(
    rows: Sequence[Row],
    series: Sequence[tuple[str, str, str, list[float]]],
    bound: float | None,
    marked: Sequence[int] = (),
) -> str:
    with svg_style("compare") as plt:
        figure, axes = plt.subplots(figsize=(11, 4.2), layout="constrained")
        size = 5 if len(rows) <= 60 else 3
        for label, color, marker, values in series:
            at = [(i, max(v, FLOOR)) for i, v in enumerate(values) if math.isfinite(v)]
            line = 0.8 if marker == "o" else 0  # a layer's own errors have nothing to do with its neighbours'
            axes.plot([i for i, _ in at], [v for _, v in at], color=color, marker=marker, ms=size, lw=line, label=label)
        for i in sorted(set(marked)):
            axes.axvline(i, color=MARK, lw=1, ls=":")
        if marked:
            more = f" and {len(set(marked)) - 1} more" if len(set(marked)) > 1 else ""
            where = {"xycoords": ("data", "axes fraction"), "ha": "left" if marked[0] < len(rows) / 2 else "right"}
            axes.annotate(rows[marked[0]].name + more, (marked[0], 1.02), color=MARK, va="bottom", **where)
        if bound is not None:
            axes.axhline(bound, color=BOUND, lw=1, ls="--", label=f"bound {bound:.0e}")
        axes.set_yscale("log")
        axes.set_ylabel(f"relative error (0 at {FLOOR:.0e})")
        axes.grid(axis="y", alpha=0.3)
        axes.set_xlim(-0.5, len(rows) - 0.5)
        step = max(1, math.ceil(len(rows) / 60))
        shown = range(0, len(rows), step)
        # Anchored at their ends: a browser's letters are not as wide as those that the plot is laid out for.
        anchored = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
        axes.set_xticks(list(shown), [rows[i].name for i in shown], fontsize=6 if step == 1 else 5, **anchored)
        figure.legend(loc="outside upper center", ncols=4, fontsize=8)
        return svg_text(figure)
