"""`verax bench compare`: changes of speed between two results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from verax.cli import options

__all__ = ["compare"]


def compare(
    old: Annotated[Path, typer.Argument(help="A JSON that verax bench --output wrote.", exists=True, dir_okay=False)],
    new: Annotated[Path, typer.Argument(help="A later one, of the same benchmark.", exists=True, dir_okay=False)],
    threshold: Annotated[float, typer.Option(help="Change of time that matters, in percent.")] = 5.0,
    confidence: Annotated[float, typer.Option(help="Of the intervals, in percent.")] = 95.0,
    as_json: options.Json = False,
) -> None:
    """Changes of speed between two results, with confidence; exit status 1 if a side of verax is slower.

    Prints Markdown, for a terminal or a pull request. A side counts as slower only if the whole interval of the ratio
    of the medians is beyond the threshold; baselines are shown, and do not count.

    Examples:

        verax bench compare before.json after.json

        verax bench compare before.json after.json --threshold 10 >> "$GITHUB_STEP_SUMMARY"
    """
    from verax.bench.compare import compare_results, read_result, render

    comparison = compare_results(
        read_result(old), read_result(new), threshold=threshold / 100, confidence=confidence / 100
    )
    sys.stdout.write(json.dumps(comparison, indent=2) + "\n" if as_json else render(comparison))
    if comparison["regressions"]:
        raise typer.Exit(1)
