"""`verax info`: what is installed, what the machine can do, and which form of each operation runs on it."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from verax.cli import options

__all__ = ["info"]


def info(
    measure: Annotated[bool, typer.Option(help="Measure memory bandwidth and matmul rate (some seconds).")] = True,
    as_json: options.Json = False,
) -> None:
    """Versions, devices, memory, measured bandwidth and matmul rate, and the form of each operation that runs here.

    Examples:

        verax info

        verax info --json --no-measure
    """
    from rich.console import Console
    from rich.table import Table

    from verax._compat import enable_compilation_cache
    from verax.bench.forms import forms_here
    from verax.bench.machine import fingerprint, measure_machine
    from verax.ops.cpu import library

    enable_compilation_cache()  # as every model does: so that the folder is known
    facts = {
        "machine": fingerprint(),
        "measured": measure_machine() if measure else None,
        "operations": forms_here(),
        "cpu_kernels": {"level": library.level(), "levels": library.levels(), "problem": library.problem()},
    }
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return
    console = Console()
    for title in ("machine", "measured"):
        if facts[title]:
            table = Table(title=title, show_header=False, title_justify="left")
            for name, value in facts[title].items():
                table.add_row(name.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value))
            console.print(table)
    table = Table("operation", "runs here", "other forms", title="operations", title_justify="left")
    for name, row in facts["operations"].items():
        table.add_row(name, row["runs"], ", ".join(row["others"]))
    console.print(table)
    kernels = facts["cpu_kernels"]
    others = ", ".join(name for name in kernels["levels"] if name != kernels["level"])
    console.print(
        f"CPU kernels: {kernels['level']} (this machine also runs {others}; choose with VERAX_CPU_LEVEL)"
        if kernels["level"]
        else kernels["problem"],
        soft_wrap=True,
    )
