"""`verax bench reports`: the tables of the earlier ports, measured again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from verax.cli import options

__all__ = ["reports"]


def reports(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller and fewer cases: minutes on two cores.")] = False,
    only: Annotated[str | None, typer.Option(help="Names of reports, with commas; all of them if left out.")] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Write a page and a JSON for each into this folder.")
    ] = Path("docs/reports"),
    as_json: options.Json = False,
) -> None:
    """Every table of the earlier ports, measured again on this machine.

    A table that cannot be made here states the reason.

    Examples:

        verax bench reports --quick

        verax bench reports --only text,delta-rule --output reports
    """
    from verax.bench.reports.run import REPORTS, bench_reports, write_reports

    results = bench_reports(
        quick=quick,
        only=[name.strip() for name in only.split(",")] if only else tuple(REPORTS),
        report=lambda note: typer.echo(f"measuring {note}", err=True),
    )
    paths = write_reports(results, output)
    if as_json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    for path in paths:
        typer.echo(f"written: {path}", err=True)
