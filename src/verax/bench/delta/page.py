"""The comparison of `verax bench delta` for readers: tables, and a plot of the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verax._optional import load_pyplot
from verax.bench.delta.sizes import CONFIGURATIONS
from verax.bench.lines import outliers, rounds

__all__ = ["KIND", "plot", "render", "slug"]

KIND = "delta"

TITLES = {
    "rule": "LAM's published rule by itself",
    "layer": "LAM's layer",
    "gated": "The exact gated delta rule",
    "gradient": "The exact gated delta rule, forward and backward",
    "decode": "A decode step of the gated rule",
    "encoder": "LAM's sentence encoder",
}

COLUMNS = (
    "case",
    "side",
    "median ms",
    "P10-P90 ms",
    "verax is",
    "compile s",
    "peak MB",
    "GFLOP",
    "GFLOP/s",
    "GB/s",
    "of the limit",
    "error",
)

COLOURS = {"verax": "C0", "torch": "C1", "transformers": "C2", "fla": "C3"}
"""Colours by the first word of a side's name."""


def render(result: Mapping[str, Any]) -> list[str]:
    """Markdown: how to read the numbers, then a table a section."""
    settings = result["settings"]
    where = result["cases"][0]["sides"] if result["cases"] else {}
    platform = next((side["platform"] for side in where.values()), result["machine"]["platform"])
    lines = [
        f"# The delta rule beside PyTorch, on {platform}",
        "",
        f"{rounds(result)}; the sides take turns in a round"
        f"{', and begin each turn with a call that does not count' if settings.get('untimed') else ''}. CPU kernels: "
        f"{settings['cpu_level'] or 'none'}. Every side's outputs were on that device, in the same shapes. Error is "
        "the root mean square of the difference from float64 over that of the result. GFLOP are products by formula, "
        "of the implementation that runs. The limit is those at the measured rate, or what has to be moved at the "
        "measured bandwidth if that is longer. Peak is memory beyond the arguments. 'verax is' so many times faster: "
        "the median over the rounds of the ratio within a round.",
    ]
    for section in settings["operations"]:
        cases = [case for case in result["cases"] if case["section"] == section]
        lines += ["", f"## {TITLES[section]}", *_sizes(cases), "", "| " + " | ".join(COLUMNS) + " |"]
        lines += ["|" + "---|" * len(COLUMNS)]
        for case in cases:
            lines += [_row(case, name, side) for name, side in case["sides"].items()]
        for case in cases:
            sides = {f"{case['case']}, {name}": side for name, side in case["sides"].items()}
            lines += outliers(sides, unit=1e3, name="ms")
        reasons = {f"{name}: {why}" for case in cases for name, why in case["skipped"].items()}
        lines += ["", *(f"Left out: {reason}" for reason in sorted(reasons))] if reasons else []
    lines += [""] if result["skipped"] or result["cython_s"] else []
    lines += [f"Left out: {name} ({why})." for name, why in result["skipped"].items()]
    if result["cython_s"]:
        lines += [f"Cython and the C++ compiler took {result['cython_s']:.1f} s, once for all."]
    return lines


def slug(result: Mapping[str, Any]) -> list[str]:
    """Parts of the file name: the sections, and the configurations where they are not all of them."""
    settings = result["settings"]
    chosen = settings["configurations"]
    return [*settings["operations"], *(name.lower() for name in chosen if len(chosen) < len(CONFIGURATIONS))]


def _sizes(cases: list[dict[str, Any]]) -> list[str]:
    listed = (f"{case['case']}: " + ", ".join(f"{k} {n}" for k, n in case["sizes"].items()) for case in cases)
    return ["", "; ".join(listed) + "."] if cases else []


def _row(case: dict[str, Any], name: str, side: dict[str, Any]) -> str:
    peak, compiled, ratio = side["peak_bytes"], side["compile_s"], case["ratios"].get(name)
    cells = (
        case["case"],
        f"**{name}**" if name == case["runs"] else name,
        _number(1e3 * side["median_s"]),
        f"{_number(1e3 * side['p10_s'])}-{_number(1e3 * side['p90_s'])}",
        "" if ratio is None else f"{ratio:.2f}x",
        "" if compiled is None else f"{compiled:.1f}",
        "" if peak is None else f"{peak / 1e6:.0f}",
        _number(side["flops"] / 1e9),
        f"{side['rate'] / 1e9:.0f}",
        f"{side['gb_per_s']:.1f}",
        f"{100 * side['fraction_of_limit']:.0f}%",
        f"{side['error']:.0e}",
    )
    return "| " + " | ".join(cells) + " |"


def _number(x: float) -> str:
    """Three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def plot(result: dict[str, Any], path: Path) -> Path:
    """Draw the times of every side, a panel a section, into an image file.

    Raises:
        MissingDependencyError: without matplotlib.
    """
    pyplot = load_pyplot()
    sections = [name for name in result["settings"]["operations"] if any(c["section"] == name for c in result["cases"])]
    bars = {name: [case for case in result["cases"] if case["section"] == name] for name in sections}
    heights = [sum(len(case["sides"]) + 1 for case in cases) for cases in bars.values()]
    figure, panels = pyplot.subplots(
        len(sections),
        1,
        figsize=(9, 1 + 0.24 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for axes, (section, cases) in zip(panels[:, 0], bars.items(), strict=True):
        places, labels = [], []
        for case in cases:
            for name, side in case["sides"].items():
                places.append(
                    (places[-1] if places else 0) + (1 if labels and labels[-1].startswith(case["case"]) else 2)
                )
                labels.append(f"{case['case']}, {name}")
                low, middle, high = (1e3 * side[key] for key in ("p10_s", "median_s", "p90_s"))
                error = [[max(middle - low, 0)], [max(high - middle, 0)]]
                colour = COLOURS.get(name.partition(" ")[0].partition(",")[0].partition(".")[0], "0.5")
                axes.barh(places[-1], middle, xerr=error, color=colour, error_kw={"linewidth": 0.8})
                axes.annotate(f" {_number(middle)}", (high, places[-1]), va="center", fontsize=7)
        axes.set(xscale="log", yticks=places, xlabel="ms", title=TITLES[section])
        axes.set_yticklabels(labels, fontsize=7)
        axes.margins(x=0.1)
        axes.invert_yaxis()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
