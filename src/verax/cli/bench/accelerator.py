"""`verax bench accelerator`: everything that waits for a GPU or TPU, in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verax.cli import options
from verax.cli.bench.output import show

__all__ = ["accelerator"]


def accelerator(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of all files; finished parts in it are not repeated.")
    ] = Path("accelerator"),
    only: Annotated[str | None, typer.Option(help="Parts, separated by commas; all if left out.")] = None,
    list_parts: Annotated[bool, typer.Option("--list", help="Print the parts, and run nothing.")] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="The same parts at tiny sizes, on a machine without an accelerator.")
    ] = False,
    part_seconds: Annotated[float, typer.Option(help="Seconds after which a part is stopped.")] = 300.0,
    seconds: Annotated[float, typer.Option(help="Seconds of the whole run; run it again for what is left.")] = 600.0,
    as_json: options.Json = False,
) -> None:
    """Correctness and speed on one GPU or TPU, in parts, within ten minutes a run.

    A part that fails is a line of the table. Exit status 1 if one failed or is left for the next run.

    Examples:

        verax bench accelerator --list

        verax bench accelerator --output results

        verax bench accelerator --rehearse --only operations
    """
    from verax.bench.accelerator.parts import PARTS
    from verax.bench.accelerator.run import bench_accelerator

    if list_parts:
        width = max(map(len, PARTS))
        typer.echo("\n".join(f"{part.name:{width}}  {part.about}" for part in PARTS.values()))
        return
    result = bench_accelerator(
        output,
        only=tuple(name.strip() for name in only.split(",")) if only else tuple(PARTS),
        rehearse=rehearse,
        part_seconds=part_seconds,
        seconds=seconds,
        report=lambda line: typer.echo(line, err=True),
    )
    show(result, output, as_json)
    if not result["complete"]:
        raise typer.Exit(1)
