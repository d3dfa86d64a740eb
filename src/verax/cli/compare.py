"""`verax compare`: proof that verax gives what PyTorch gives, layer by layer."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from verax.cli import options
from verax.cli.compare_videos import videos
from verax.errors import InvalidParameterError

if TYPE_CHECKING:
    from verax.compare import Case

__all__ = ["app"]

PIPE_WIDTH = 160
"""Columns where there is no terminal."""

DIFFERENT = 1
"""Exit status where the two sides are not equal."""


class _Group(TyperGroup):
    """`verax compare MODEL` beside `verax compare videos`: what is no command is a model's name, or its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["model", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(help="Compare with PyTorch, layer by layer.", no_args_is_help=True, cls=_Group)


@app.callback()
def _group() -> None:
    """Compare with PyTorch, layer by layer: verax compare text|video|embed|MODEL."""


app.command()(videos)


@app.command("model")
def model(
    what: Annotated[
        str,
        typer.Argument(metavar="text|video|embed|MODEL", help="Built-in models, or a checkpoint's folder or hub id."),
    ],
    against: Annotated[
        str | None, typer.Option(help="transformers or diffusers; what fits the model if left out.")
    ] = None,
    dtype: options.Dtype = "float32",
    random: Annotated[
        bool, typer.Option("--random", help="Small random weights instead of the built-in model.")
    ] = False,
    inject: Annotated[
        bool, typer.Option("--inject", help="Run each layer on PyTorch's activations too, to locate errors.")
    ] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Compare gradients of each parameter too.")] = False,
    prompt: Annotated[str | None, typer.Option(help="text, embed: a text instead of random tokens.")] = None,
    tokens: Annotated[int | None, typer.Option(help="text, embed: random tokens of a row.", min=1)] = None,
    max_rel: Annotated[
        float | None,
        typer.Option(help="Bound on each layer's relative L2 error; 1e-4 in float32 if left out.", min=0.0),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print all layers, however many.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write HTML, Markdown and JSON into this folder.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Run a model in PyTorch and in verax on the same inputs, and compare what each layer gives.

    Exit status 0 if the two are equal, 1 if not: in float32 every layer within --max-rel; in bfloat16 the output's
    error against float32 at most 1.1 times PyTorch's own.

    Examples:

        verax compare text

        verax compare text --dtype bfloat16 --output report

        verax compare embed --random --inject --backward
    """
    from verax._compat import enable_compilation_cache
    from verax.compare.report import show, write
    from verax.compare.run import compare_case
    from verax.models import DTYPES

    if dtype not in DTYPES:
        raise InvalidParameterError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    enable_compilation_cache()
    with tempfile.TemporaryDirectory() as scratch:
        case = _case(what, Path(scratch), against=against, random=random, prompt=prompt, tokens=tokens)
        result = compare_case(case, dtype=dtype, inject=inject, backward=backward, max_rel=max_rel)
    if as_json:
        sys.stdout.write(json.dumps(result.as_dict(), indent=1) + "\n")
    else:
        from rich.console import Console

        console = Console()
        show(result, console if console.is_terminal else Console(width=PIPE_WIDTH), every=every)
    if output is not None:
        for path in write(result, output):
            sys.stderr.write(f"{path}\n")
    if not result.passed:
        raise typer.Exit(DIFFERENT)


def _case(
    what: str, scratch: Path, *, against: str | None, random: bool, prompt: str | None, tokens: int | None
) -> Case:
    """The case that the arguments ask for."""
    from verax.compare import cases

    kind = what if what in ("text", "embed") else _kind(what)
    if against not in (None, "transformers"):
        raise InvalidParameterError(f"against: the reference of {what} is transformers, not {against!r}")
    if random and what != kind:
        raise InvalidParameterError("random: it makes small weights for text and embed, not for a given model")
    make = cases.text_case if kind == "text" else cases.embed_case
    return make("random" if random else None if what == kind else what, scratch, prompt=prompt, tokens=tokens)


def _kind(model: str) -> str:
    """What a checkpoint is."""
    from verax.checkpoint import Checkpoint
    from verax.errors import UnsupportedModelError
    from verax.models import causal_lm, encoder

    config = Checkpoint.open(model).config
    try:
        encoder(config)
    except UnsupportedModelError:
        causal_lm(config)
        return "text"
    return "embed"
