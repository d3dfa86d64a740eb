"""`verax compare own`: two models of one's own, out of a Python file."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verax.cli import options
from verax.cli.compare.run import Backward, Every, Fused, Inject, InputsFile, MaxRel, Output, given_inputs, run_cases

if TYPE_CHECKING:
    from verax.compare import Alignment, Case
    from verax.compare.inputs import Inputs

__all__ = ["own"]


def own(
    file: Annotated[
        Path, typer.Argument(help="Python that defines `reference` and `ours`, and `inputs` and `names` if you like.")
    ],
    inputs: InputsFile = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Take layers as the same that only shape and order match, unasked.")
    ] = False,
    dtype: options.Dtype = "float32",
    inject: Inject = False,
    backward: Backward = False,
    fused: Fused = False,
    max_rel: MaxRel = None,
    every: Every = False,
    output: Output = None,
    as_json: options.Json = False,
) -> None:
    """Compare a PyTorch model of your own with its port, layer by layer.

    The file defines `reference` (a torch module, a function with taps, or a `verax.compare.Side`), `ours` (a Flax NNX
    module, a function or a `Side`), `inputs` (a tuple of NumPy arrays, or a dict by argument name) and `names` (a dict
    from beginnings of our names to the reference's). Or it defines `case`, a `verax.compare.Case`, which --dtype
    bfloat16 needs. Layers that no name matches are matched by shape and order, shown, and taken if you say so.

    Examples:

        verax compare own examples/compare_own_pair.py --inject

        verax compare own pair.py --inputs batch.npz --yes --output report
    """
    run_cases(
        [("", _case(file, given_inputs(inputs), dtype))],
        dtype=dtype,
        inject=inject,
        backward=backward,
        fused=fused,
        max_rel=max_rel,
        every=every,
        output=output,
        as_json=as_json,
        confirm=partial(_confirm, yes=yes),
    )


def _case(file: Path, inputs: Inputs, dtype: str) -> Case:
    """The case that the file defines, on the inputs given."""
    from verax.compare import Case
    from verax.compare.case import pair_case

    if not file.is_file():
        raise typer.BadParameter(f"{file}: there is no such file")
    sys.path.insert(0, str(file.resolve().parent))  # as Python does for a script
    found = runpy.run_path(str(file), run_name="verax_compare")
    if inputs.texts:
        raise typer.BadParameter("--inputs: models of your own take arrays, .npz or .safetensors")
    case = found.get("case")
    if isinstance(case, Case):
        if inputs.arrays:
            raise typer.BadParameter(f"--inputs: the case of {file} has inputs of its own")
        return case
    if missing := [name for name in ("reference", "ours") if name not in found]:
        raise typer.BadParameter(f"{file}: it defines no {' and no '.join(missing)}; see verax compare own --help")
    if dtype != "float32":
        raise typer.BadParameter(f"--dtype: {file} defines no `case`, which makes both sides in a dtype")
    given = inputs.arrays or found.get("inputs", ())
    args, kwargs = ((), given) if isinstance(given, Mapping) else (tuple(given), {})
    return pair_case(found["reference"], found["ours"], *args, names=found.get("names"), title=file.stem, **kwargs)


def _confirm(alignment: Alignment, *, yes: bool) -> None:
    """Show the pairs that only shape and order match, and wait for a confirmation.

    Raises:
        typer.BadParameter: if the answer is no, or there is no terminal.
    """
    if not alignment.guessed:
        return
    typer.echo("matched by shape and order only, ours = the reference's:", err=True)
    for pair in alignment.guessed:
        typer.echo(f"  {pair}", err=True)
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise typer.BadParameter(
            "layers are matched by shape and order only, and there is no terminal to confirm them on: look at them, "
            "then give --yes, or a table `names`"
        )
    if not typer.confirm("Are these the same layers?", err=True):
        raise typer.BadParameter("layers that are not the same cannot be compared: give a table `names`")
