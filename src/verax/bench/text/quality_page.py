"""Page of `verax bench quality`: what each precision costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["KIND", "render", "slug"]

KIND = "quality"


def render(result: Mapping[str, Any]) -> list[str]:
    """Markdown lines: a row for each precision."""
    settings = result["settings"]
    lines = [
        f"# Quality: {settings['model']}",
        "",
        f"{settings['scored_tokens']:,} tokens of text ({settings['text']}; contexts of up to {settings['window']}) "
        f"and {settings['additions']} held-out additions. KL divergence and the share of equal best tokens are against "
        "float32. The number after int4: inputs that share a scale; int8 weights have one a row, an int8 or fp8 cache "
        "one a token and head.",
        "",
        "| precision | perplexity | KL, nats | same best token | additions | weights, MB | cache, bytes a token |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in result["variants"].items():
        if "left_out" in row:
            lines.append(f"| {name} | left out: {row['left_out']} | | | | | |")
            continue
        exact, is_ours = row.get("additions_exact"), "kl_divergence" in row
        cells = [
            f"{row['perplexity']:.4f}",
            f"{row['kl_divergence']:.2g}" if is_ours else "",
            f"{100 * row['top1_agreement']:.2f}%" if is_ours else "",
            "" if exact is None else f"{100 * exact:.1f}%",
            f"{row['weights_mb']:.1f}",
            str(row["cache_bytes_per_token"]) if is_ours else "",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def slug(result: Mapping[str, Any]) -> list[str]:
    """Part of the file name: the model."""
    return [Path(result["settings"]["model"]).name.lower()]
