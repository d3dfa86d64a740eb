"""Page of `verax bench ops`: a row for each case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verax.bench.lines import outliers, rounds

__all__ = ["KIND", "render", "slug"]

KIND = "ops"


def render(result: Mapping[str, Any]) -> list[str]:
    """Markdown lines: a row for each case, with its chosen implementation beside the others."""
    settings, cases = result["settings"], result["cases"]
    columns = ["operation", "case", "runs", "median ms", "P10-P90 ms", "GB/s", "memory GB/s", "GFLOP/s", "of the limit"]
    others = sorted({name for case in cases for name in case["ratios"]})
    lines = [
        "# Operations",
        "",
        f"The weight of linear is {settings['size_out']} x {settings['size_in']}. CPU kernels: "
        f"{settings['cpu_level'] or 'none'}. {rounds(result)}; the implementations take turns "
        "in a round, each called again and again for 20 ms, the first call not counted, weights of linear never from "
        "a cache. GB/s counts what has to be moved once, as it is stored; memory GB/s is a read of 512 MiB that takes "
        "its turn with the implementations. The limit is that, or the products at the measured rate. The last columns: "
        "how many times faster than that implementation.",
        "",
        "| " + " | ".join([*columns, *others]) + " |",
        "|" + "---|" * (len(columns) + len(others)),
    ]
    for case in cases:
        side = case["sides"][case["runs"]]
        cells = [
            *(case[name] for name in ("operation", "case", "runs")),
            f"{1e3 * side['median_s']:.2f}",
            f"{1e3 * side['p10_s']:.2f}-{1e3 * side['p90_s']:.2f}",
            f"{case['gb_per_s']:.1f}",
            f"{case['bandwidth_gb_per_s']:.1f}",
            f"{case['gflop_per_s']:.0f}",
            f"{100 * case['fraction_of_limit']:.0f}%",
            *(f"{case['ratios'][name]:.2f}x" if name in case["ratios"] else "" for name in others),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines + [
        line
        for case in cases
        for line in outliers(
            {f"{case['operation']}, {case['case']}, {case['runs']}": case["sides"][case["runs"]]}, unit=1e3, name="ms"
        )
    ]


def slug(result: Mapping[str, Any]) -> list[str]:
    """Parts of the file name: the groups of operations."""
    return result["settings"]["operations"]
