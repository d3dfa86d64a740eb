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
    lines = [
        f"# Embeddings: {settings['model']}, {settings['dtype']}",
        "",
        f"{settings['sentences']} sentences of {settings['shortest']} to {settings['longest']} tokens "
        f"({settings['tokens']} in all), {settings['batch_size']} at once; {rounds(result)}, tokenizer included. The "
        f"first run, which compiled, took {result['first_s']:.1f} s; {result['compiled_during_runs']} programs "
        "compiled afterwards.",
        *sides_lines(result, "sentences/s", digits=3, rate_digits=0),
    ]
    if result["ratios"]:
        lines += ["", f"Largest difference of two vectors' numbers: {result['largest_difference']:.1e}."]
    return lines


def slug(result: Mapping[str, Any]) -> list[str]:
    """Parts of the file name: shapes that are not the usual ones, and the dtype."""
    settings = result["settings"]
    shapes = [settings["shapes"]] if settings.get("shapes") not in (None, "minilm") else []
    return [*shapes, settings["dtype"]]
