"""Page of `verax bench accelerator`: one row for each measurement, beside its target and the device's limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verax.bench.accelerator.row import device_of, share_of_limit

__all__ = ["KIND", "render", "slug"]

KIND = "accelerator"

COLUMNS = ("part", "case", "measured", "target", "TFLOP/s", "GB/s", "of the limit", "verax is", "notes")

FAILED = "**failed**"

MOST = 160
"""Characters of an error in the table. The log of the part has all of it."""


def render(result: Mapping[str, Any]) -> list[str]:
    """Markdown: the device's limits, then a row for each measurement."""
    kind = result["machine"]["device_kind"]
    device = device_of(kind)
    limits = "It is not in the table of devices, so no limits are shown."
    if device is not None:
        limits = (
            f"Its limits by {device.source}: {device.rate('bfloat16') / 1e12:,.1f} TFLOP/s of dense bfloat16 products, "
            f"{device.bandwidth / 1e9:,.0f} GB/s."
        )
    rehearsal = result["settings"]["rehearse"]
    lines = [
        f"# Accelerator: {kind}" + (" (a rehearsal at tiny sizes: its numbers say nothing)" if rehearsal else ""),
        "",
        f"{limits} TFLOP/s count products, GB/s weights and cache, each by formula. Targets are those of one H200. "
        "'verax is' so many times faster than a baseline in the same run.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for part, record in result["parts"].items():
        lines += [_line(part, row, device) for row in record["rows"]]
        if record["error"]:
            lines.append(f"| {part} | | {FAILED} | | | | | | {_short(record['error'])} |")
    return lines


def slug(result: Mapping[str, Any]) -> list[str]:
    """Parts of the file name: whether it is a rehearsal."""
    return ["rehearsal"] if result["settings"]["rehearse"] else []


def _line(part: str, row: Mapping[str, Any], device: Any) -> str:
    seconds, share = row["seconds"], share_of_limit(row, device)
    cells = (
        part,
        row["case"],
        FAILED if row["error"] else _number(row["value"], row["unit"]),
        _number(row["target"], row["unit"]),
        f"{row['flops'] / seconds / 1e12:,.1f}" if seconds and row["flops"] else "",
        f"{row['bytes_moved'] / seconds / 1e9:,.0f}" if seconds and row["bytes_moved"] else "",
        "" if share is None else f"{share:.0%}",
        ", ".join(f"{ratio:.2f}x {name}" for name, ratio in row["beside"].items()),
        _short(row["error"] or row["note"]),
    )
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "error":
        return f"{value:.1e}"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _short(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= MOST else line[: MOST - 3] + "..."
