"""Output of `verax bench`: a result on standard output, and as files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["Output", "show"]

Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON and Markdown into this folder.")]


def show(result: dict[str, Any], output: Path | None, as_json: bool) -> Path | None:
    """Print a result; the path of its JSON, if it is written too."""
    from verax.bench.results import markdown, write

    sys.stdout.write(json.dumps(result, indent=2) + "\n" if as_json else markdown(result))
    if output is None:
        return None
    path = write(result, output)
    typer.echo(f"written: {path}", err=True)
    return path
