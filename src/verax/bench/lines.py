"""Lines that the pages of all benchmarks have: how often, how noisy, which runs were far from the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verax.bench.timing import ENOUGH_RUNS

__all__ = ["noise_line", "outliers", "rounds"]


def noise_line(noise: Mapping[str, Any]) -> str:
    """A sentence for pages and for the log."""
    what = (
        f"a short loop's P10-P90 was {100 * noise['spread']:.0f}% of its median, other processes used "
        f"{100 * noise['others']:.0f}% of the processor"
    )
    return f"The machine was busy before the start: {what}." if noise["busy"] else f"Noise before the start: {what}."


def rounds(result: Mapping[str, Any]) -> str:
    """How often a result's sides ran; fewer rounds than `ENOUGH_RUNS` are said to be few."""
    runs, warmup = result["settings"]["runs"], result["settings"]["warmup"]
    few = f" (fewer than {ENOUGH_RUNS}: look at the spread)" if runs < ENOUGH_RUNS else ""
    return f"{runs} rounds{few} after {warmup} or more of warm-up, until no side got faster"


def outliers(sides: Mapping[str, Any], *, unit: float = 1.0, name: str = "s") -> list[str]:
    """A line that shows the runs beyond Tukey's fences, if a side has some; they count like the others."""
    shown = [
        f"{side} " + ", ".join(f"{seconds * unit:.2f} {name}" for seconds in numbers["outliers"])
        for side, numbers in sides.items()
        if numbers.get("outliers")
    ]
    return ["", f"Outliers, which count like every run: {'; '.join(shown)}."] if shown else []
