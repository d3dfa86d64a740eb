"""Page of `verax bench embed`: times of all sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verax.bench.lines import rounds, sides_lines

__all__ = ["KIND", "render", "slug"]

KIND = "embed"


def render(result: Mapping[str, Any]) -> list[str]:
    """Markdown lines: settings and times of all sides."""
    settings = result["settings"]
    latency = settings.get("latency", False)
    lines = [
        f"# Embeddings: {settings['model']}, {_precision(settings)}",
        "",
        f"{settings['sentences']} sentences of {settings['shortest']} to {settings['longest']} tokens "
        f"({settings['tokens']} in all), "
        f"{'each in a call of its own' if latency else str(settings['batch_size']) + ' at once'}; {rounds(result)}, "
        f"tokenizer included. The first run, which compiled, took {result['first_s']:.1f} s; "
        f"{result['compiled_during_runs']} programs compiled afterwards.",
        *sides_lines(result, "sentences/s", digits=3, rate_digits=0),
    ]
    if latency:
        means = (f"{name} {1e3 / side['rate']:.2f} ms" for name, side in result["sides"].items())
        lines += ["", f"A sentence: {', '.join(means)}."]
    return [*lines, *_chosen_lines(result.get("chosen", {})), *_accuracy_lines(result.get("accuracy", {}))]


def slug(result: Mapping[str, Any]) -> list[str]:
    """Parts of the file name: shapes that are not the usual ones, the dtype, and what was measured but throughput."""
    settings = result["settings"]
    shapes = [settings["shapes"]] if settings.get("shapes") not in (None, "minilm") else []
    return [*shapes, _precision(settings), *(["latency"] if settings.get("latency") else [])]


def _chosen_lines(chosen: Mapping[str, Any]) -> list[str]:
    """Settings of the sides that have several ways to run, and the rates of all ways in a trial."""
    lines = []
    for name, side in chosen.items():
        rates = (f"{rate:.0f} with {way}" for way, rate in side["trials"].items())
        tried = f"; sentences/s in a trial: {', '.join(rates)}" if side["trials"] else ""
        wrong = "".join(f"; left out as wrong by {distance:.2g}: {way}" for way, distance in side["wrong"].items())
        lines.append(f"- {name}: {side['way']}{tried}{wrong}")
    return ["", "Settings, the fastest of those that were tried:", "", *lines] if lines else []


def _accuracy_lines(accuracy: Mapping[str, Any]) -> list[str]:
    if not accuracy:
        return []
    ranked = all("rank_correlation" in distances for distances in accuracy.values())
    ranks = (
        "; the share of sentences whose nearest other one is the same, and Spearman's correlation of all pairs' cosines"
    )
    return [
        "",
        f"Vectors beside those of verax in float32, the largest distance of any sentence{ranks if ranked else ''}:",
        "",
        f"| side | difference of a number | 1 - cosine |{' same nearest | rank correlation |' if ranked else ''}",
        f"|---|---|---|{'---|---|' if ranked else ''}",
        *(_accuracy_row(name, distances) for name, distances in accuracy.items()),
    ]


def _accuracy_row(name: str, distances: Mapping[str, Any]) -> str:
    row = [name, f"{distances['largest_difference']:.1e}", f"{distances['cosine_distance']:.1e}"]
    # Older results have no ranks.
    for field, form in (("same_nearest", ".1%"), ("rank_correlation", ".5f")):
        if field in distances:
            row.append("-" if distances[field] is None else format(distances[field], form))
    return f"| {' | '.join(row)} |"


def _precision(settings: Mapping[str, Any]) -> str:
    """Quantisation of our side, or the dtype."""
    return settings.get("quantization") or settings["dtype"]
