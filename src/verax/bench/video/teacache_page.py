"""Page of `verax bench teacache`: what each threshold costs and saves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

__all__ = ["KIND", "render", "slug"]

KIND = "teacache"


def render(result: Mapping[str, Any]) -> list[str]:
    """Markdown: what TeaCache costs, a row for each threshold."""
    settings = result["settings"]
    count, height, width = settings["frames"]
    lines = [
        f"# TeaCache: {Path(settings['model']).name}, {settings['dtype']}",
        "",
        f"{len(settings['prompts'])} clips of {count} frames of {height} x {width}, each made without TeaCache and "
        "then with each threshold from the same noise; PSNR in dB of the second beside the first. Seconds: median of "
        f"the loop over {settings['steps']} steps.",
        "",
        "| threshold | steps computed | s | times as fast | PSNR, mean | PSNR, worst clip |",
        "|---|---|---|---|---|---|",
        f"| none | {settings['steps']} | {result['seconds']:.3g} | 1 | | |",
    ]
    for row in result["thresholds"]:
        found = [psnr for psnr in row["psnr"] if psnr is not None]
        cells = [f"{row['threshold']:g}", f"{row['computed']} of {settings['steps']}", f"{row['seconds']:.3g}"]
        cells += [f"{result['seconds'] / row['seconds']:.2f}"]
        cells += [f"{fmean(found):.1f}", f"{min(found):.1f}"] if found else ["no difference", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def slug(result: Mapping[str, Any]) -> list[str]:
    """Part of the file name: the model."""
    return [Path(result["settings"]["model"]).name.lower()]
