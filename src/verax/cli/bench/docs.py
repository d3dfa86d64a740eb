"""`verax bench docs`: the page of measurements, made of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["docs"]


def docs(
    results: Annotated[Path, typer.Option(help="Folder of results, as --output writes them.")] = Path(
        "benchmarks/results"
    ),
    template: Annotated[Path, typer.Option(help="The page without its numbers.")] = Path(
        "benchmarks/performance.template.md"
    ),
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("docs/performance.md"),
) -> None:
    """Write docs/performance.md anew from the results in the repository; of several of one kind, the latest.

    Examples:

        verax bench text --against transformers --output benchmarks/results && verax bench docs
    """
    from verax.bench.docs import render
    from verax.bench.results import write_whole

    typer.echo(f"written: {write_whole(output, render(template, results))}", err=True)
