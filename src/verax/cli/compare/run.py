"""Options that `verax compare MODEL` and `verax compare own` share, and the running, printing and writing of cases."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from verax.errors import VeraxError

if TYPE_CHECKING:
    from verax.compare import Alignment, Case, Comparison
    from verax.compare.inputs import Inputs
    from verax.compare.video_report import VideoReport

    Made = Case | Callable[..., VideoReport]
    """A comparison of layers, or of clips: a function of the dtype."""

__all__ = ["Backward", "Every", "Fused", "Inject", "InputsFile", "MaxRel", "Output", "given_inputs", "run_cases"]

PIPE_WIDTH = 160
"""Columns where there is no terminal."""

DIFFERENT = 1
"""Exit status where the two sides are not equal."""

Inject = Annotated[
    bool, typer.Option("--inject", help="Run each layer on PyTorch's activations too, to locate errors.")
]
Backward = Annotated[bool, typer.Option("--backward", help="Compare gradients of each parameter too.")]
Fused = Annotated[
    bool,
    typer.Option(
        "--fused",
        help="Also run the model as one compiled program with fused operations, as the engines do, and compare its "
        "output. A clip is always made so.",
    ),
]
MaxRel = Annotated[
    float | None,
    typer.Option(help="Bound on each layer's relative L2 error; 1e-4 in float32 if left out.", min=0.0),
]
InputsFile = Annotated[
    Path | None,
    typer.Option(
        "--inputs", help="Inputs instead of random ones: a text a line (.txt), or arrays (.npz, .safetensors)."
    ),
]
Every = Annotated[bool, typer.Option("--all", help="Print all layers, however many.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write HTML, Markdown and JSON into this folder.")]


def given_inputs(path: Path | None, prompt: str | None = None) -> Inputs:
    """Inputs from `--inputs` or `--prompt`, which exclude each other."""
    from verax.compare.inputs import Inputs, read_inputs

    if path is not None and prompt is not None:
        raise typer.BadParameter("--prompt: --inputs has the texts; give one of the two")
    if prompt is not None:
        return Inputs(texts=(prompt,))
    try:
        return Inputs() if path is None else read_inputs(path)
    except VeraxError as error:
        raise typer.BadParameter(f"--{error}") from error


def run_cases(
    made: Iterable[tuple[str, Made]],
    *,
    dtype: str,
    inject: bool,
    backward: bool,
    fused: bool,
    max_rel: float | None,
    every: bool,
    output: Path | None,
    as_json: bool,
    confirm: Callable[[Alignment], None] | None = None,
) -> None:
    """Run what is made, one after the other, print or write what comes of it, and end the command.

    Args:
        made: names of folders in `output`, and what is compared.
        dtype, inject, backward, fused, max_rel: of `compare_case`.
        every: print all rows.
        output: a folder.
        as_json: print JSON instead of tables.
        confirm: called with the alignment if shapes and order alone may match layers; without it none are matched so.

    Raises:
        typer.BadParameter: where nothing can be compared.
        typer.Exit: if the two sides are not equal.
    """
    from verax import plots
    from verax._compat import enable_compilation_cache
    from verax.compare import Case, Comparison, compare_case, show, write
    from verax.models import DTYPES

    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if output is not None and output.exists() and not output.is_dir():
        raise typer.BadParameter(f"--output: {output} is a file; a folder is written")
    guessing = {} if confirm is None else {"guess": True, "confirm": confirm}
    results: list[Comparison | VideoReport] = []
    try:
        if output is not None:
            plots.pyplot("compare")  # before the work, not after it
        enable_compilation_cache()
        for name, case in made:
            if isinstance(case, Case):
                result = compare_case(
                    case, dtype=dtype, inject=inject, backward=backward, fused=fused, max_rel=max_rel, **guessing
                )
            else:
                result = case(dtype=dtype)
            results.append(result)
            if not as_json:
                console = Console()
                console = console if console.is_terminal else Console(width=PIPE_WIDTH)
                if isinstance(result, Comparison):
                    show(result, console, every=every)
                else:
                    result.show(console, every=True)
            if output is not None:
                folder = output / name
                written = write(result, folder) if isinstance(result, Comparison) else result.write(folder)
                sys.stderr.write(f"written: {', '.join(map(str, written))}\n")
    except VeraxError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        found = [result.as_dict() for result in results]
        sys.stdout.write(json.dumps(found[0] if len(found) == 1 else found, indent=1) + "\n")
    if any(result.failures for result in results):
        raise typer.Exit(DIFFERENT)
