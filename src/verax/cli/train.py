"""`verax train`: the recipes of the built-in models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="Train the built-in models anew.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Train the built-in models anew."""


@app.command("text-builtin")
def text_builtin(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for state, log, plot and the model.")] = Path(
        "runs/text"
    ),
    steps: Annotated[int | None, typer.Option(help="Length of the schedule; the recipe's own if left out.")] = None,
    seed: Annotated[int, typer.Option(help="Of data, tokenizer and initial weights.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the state in the output folder.")] = False,
) -> None:
    """Train the built-in language model: under an hour on two CPU cores. Needs the extra named train."""
    from verax.train.text_builtin import train_builtin

    typer.echo(f"trained: {train_builtin(output, steps=steps, seed=seed, resume=resume)}")


@app.command("encoder-builtin")
def encoder_builtin(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for state, log, plot and the model.")] = Path(
        "runs/encoder"
    ),
    steps: Annotated[int | None, typer.Option(help="Length of the schedule; the recipe's own if left out.")] = None,
    seed: Annotated[int, typer.Option(help="Of data, tokenizer and initial weights.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the state in the output folder.")] = False,
) -> None:
    """Train the built-in encoder of sentences: some minutes on two CPU cores. Needs the extra named train."""
    from verax.train.encoder_builtin import train_builtin
    from verax.train.encoder_evaluation import evaluate

    folder = train_builtin(output, steps=steps, seed=seed, resume=resume)
    for name, value in evaluate(folder).items():
        typer.echo(f"{name.replace('_', ' ')}: {value:.3f}")
    typer.echo(f"trained: {folder}")
