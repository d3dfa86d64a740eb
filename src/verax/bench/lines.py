"""Lines that the pages of all benchmarks share: sides, ratios, rounds, noise, outliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verax.bench.timing import ENOUGH_RUNS

__all__ = ["noise_line", "outliers", "rounds", "sides_lines"]


def noise_line(noise: Mapping[str, Any]) -> str:
    """Sentence on the noise, for pages and the log."""
    what = (
        f"a short loop's P10-P90 was {100 * noise['spread']:.0f}% of its median, other processes used "
        f"{100 * noise['others']:.0f}% of the processor"
    )
    return f"The machine was busy before the start: {what}." if noise["busy"] else f"Noise before the start: {what}."


def rounds(result: Mapping[str, Any]) -> str:
    """Number of rounds as text, with a warning if they are fewer than `ENOUGH_RUNS`."""
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


def sides_lines(result: Mapping[str, Any], rate: str, *, digits: int, rate_digits: int) -> list[str]:
    """Table of all sides with outliers, ratios and the work of our side below it.

    Args:
        result: with `sides`, `ratios` and perhaps `work`.
        rate: name of the last column, such as `tokens/s`.
        digits: decimals of seconds.
        rate_digits: decimals of the rate.
    """
    lines = ["", f"| side | median s | P10-P90 s | {rate} |", "|---|---|---|---|"]
    for name, side in result["sides"].items():
        low, middle, high = (f"{side[key]:.{digits}f}" for key in ("p10_s", "median_s", "p90_s"))
        lines.append(f"| {name} | {middle} | {low}-{high} | {side['rate']:.{rate_digits}f} |")
    return [*lines, *outliers(result["sides"]), *_ratio_lines(result), *_work_lines(result)]


def _ratio_lines(result: Mapping[str, Any]) -> list[str]:
    if not result["ratios"]:
        return []
    lines = ["", "Ratios are medians over the rounds of the ratio within a round.", ""]
    return [*lines, *(f"- {name}: {ratio:.2f}x" for name, ratio in result["ratios"].items())]


def _work_lines(result: Mapping[str, Any]) -> list[str]:
    """Least work of our side, against the machine's limits."""
    if "work" not in result:
        return []
    work = result["work"]
    return [
        "",
        f"verax read {work['bytes_moved'] / 1e9:.1f} GB of weights and did {work['flops'] / 1e12:.3g} TFLOP of "
        f"products with them (attention left out): {work['gb_per_s']:.1f} GB/s, {work['gflop_per_s']:.0f} GFLOP/s, "
        f"{100 * work['fraction_of_limit']:.0f}% of the measured limit.",
    ]
