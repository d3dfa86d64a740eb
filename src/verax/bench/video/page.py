"""Page of `verax bench video`: times and memory of each stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["KIND", "render", "slug"]

KIND = "video"

COLUMNS = (
    "stage",
    "frames",
    "side",
    "median s",
    "P10-P90 s",
    "GFLOP/s",
    "of the limit",
    "compile s",
    "from cache s",
    "verax is",
    "first call s",
    "pays",
    "apart",
)
TITLES = {"transformer": "transformer, a forward pass", "vae": "VAE, decoding", "text": "text encoder, 512 tokens"}


def render(result: Mapping[str, Any]) -> list[str]:
    """Markdown: what was done, a table of times, a table of memory."""
    settings = result["settings"]
    layers = f", {settings['layers']} layers" if settings["layers"] else ""
    what = "text and image to video" if settings["size"] == "5b" else "image to video"
    lines = [
        f"# Video: {settings['size']} {what}{layers}, {settings['height']} x {settings['width']}, {settings['dtype']}",
    ]
    if result["cases"]:
        lines += [
            "",
            f"Random weights, the same on all sides. {settings['runs']} rounds after {settings['warmup']} warm-up; "
            f"the sides take turns in a round. Attention: {settings['attention']}. CPU kernels: "
            f"{settings['cpu_level'] or 'none'}. A step with guidance is two forward passes. Compiling includes "
            "tracing. The limit is the measured rate of matmuls. In the rows of other sides: how many times faster "
            "verax is, their first call, the calls after which ours, compiling included, took less time, and the root "
            "mean square of the difference over that of their result.",
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|" + "---|" * len(COLUMNS),
        ]
        lines += [_row(case, name) for case in result["cases"] for name in case["sides"]]
    if result["attention_memory"]:
        lines += [
            "",
            "Memory of a forward pass by `memory_analysis()` of the compiled program, weights included:",
            "",
            "| frames | attention | GB | weights | temporary |",
            "|---|---|---|---|---|",
        ]
        for row in result["attention_memory"]:
            start = f"| {row['frames']} | {row['attention']} |"
            if "left_out" in row:
                lines.append(f"{start} left out: {row['left_out']} | | |")
                continue
            lines.append(f"{start} {row['peak_gb']:.1f} | {row['weights_gb']:.1f} | {row['temporary_gb']:.1f} |")
    return lines


def slug(result: Mapping[str, Any]) -> list[str]:
    """Parts of the file name: model, layers where they are not all, stages, dtype, and size of the clip."""
    settings = result["settings"]
    frames = "-".join(map(str, settings["frames"]))
    layers = [f"{settings['layers']}-layers"] if settings["layers"] else []
    stages = settings["stages"] if result["cases"] else ["memory"]
    clip = f"{frames}x{settings['height']}x{settings['width']}"
    return [settings["size"], *layers, *stages, settings["dtype"], clip]


def _row(case: dict[str, Any], name: str) -> str:
    side = case["sides"][name]
    cells = [TITLES[case["stage"]], str(case["frames"]), name, f"{side['median_s']:.2f}"]
    cells += [f"{side['p10_s']:.2f}-{side['p90_s']:.2f}", f"{side['rate'] / 1e9:.0f}"]
    if name == "verax":
        cells += [f"{100 * case['fraction_of_limit']:.0f}%"]
        cells += [f"{case['compile_s']:.1f}", f"{case['compile_cached_s']:.1f}"]
        cells += [""] * 4
    else:
        cells += [""] * 3
        cells += _beside(case["beside"][name]) if name in case["beside"] else [""] * 4
    return "| " + " | ".join(cells) + " |"


def _beside(found: Mapping[str, Any]) -> list[str]:
    calls = "never" if found["break_even"] is None else f"after {found['break_even']}"
    return [f"{found['ratio']:.2f}x", f"{found['first_s']:.1f}", calls, f"{found['difference']:.1e}"]
