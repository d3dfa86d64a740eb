"""`verax train`: fine-tune language models, and train the built-in models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verax.cli import finetune

__all__ = ["app"]

app = typer.Typer(help="Fine-tune language models, and train the built-in models.", no_args_is_help=True)
app.command("lora")(finetune.lora)
app.command("full")(finetune.full)


@app.command("text-builtin")
def text_builtin(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for state, log, plot and the model.")] = Path(
        "runs/text"
    ),
    steps: Annotated[int | None, typer.Option(help="Length of the schedule; the recipe's own if left out.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of data, tokenizer and initial weights.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the state in the output folder.")] = False,
) -> None:
    """Train the built-in language model: under an hour on two CPU cores. Needs the extra named train."""
    from verax.train.text.recipe import train_builtin

    typer.echo(f"trained: {train_builtin(output, steps=steps, seed=seed, resume=resume)}")


@app.command("encoder-builtin")
def encoder_builtin(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for state, log, plot and the model.")] = Path(
        "runs/encoder"
    ),
    steps: Annotated[int | None, typer.Option(help="Length of the schedule; the recipe's own if left out.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of data, tokenizer and initial weights.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the state in the output folder.")] = False,
) -> None:
    """Train the built-in encoder of sentences: some minutes on two CPU cores. Needs the extra named train."""
    from verax.train.encoder.evaluation import evaluate
    from verax.train.encoder.recipe import train_builtin

    folder = train_builtin(output, steps=steps, seed=seed, resume=resume)
    for name, value in evaluate(folder).items():
        typer.echo(f"{name.replace('_', ' ')}: {value:.3f}")
    typer.echo(f"trained: {folder}")


@app.command("video-builtin")
def video_builtin(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for states, logs, plots and the model.")
    ] = Path("runs/video"),
    steps: Annotated[int | None, typer.Option(help="Length of all schedules; the recipe's own if left out.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of data, noise and initial weights.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the states in the output folder.")] = False,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate", help="Train nothing: measure the output folder's model, or the built-in one."),
    ] = False,
    mesh: Annotated[
        str | None,
        typer.Option(help="Devices: data=4 divides batches, data=2,fsdp=4 weights too.", show_default="(one)"),
    ] = None,
) -> None:
    """Train the built-in video model, about two hours on two CPU cores, and measure it. Needs extras train, video."""
    from verax import builtin
    from verax.train.mesh import parse_mesh
    from verax.train.video import evaluation as video_evaluation
    from verax.train.video.recipe import train_builtin

    made = output / "model"
    if not evaluate:
        train_builtin(output, steps=steps, seed=seed, resume=resume, mesh=parse_mesh(mesh))
    folder = made if made.is_dir() else builtin.video_model()
    for name, value in video_evaluation.evaluate(folder).items():
        typer.echo(f"{name.replace('_', ' ')}: {value:.3f}")
    typer.echo(f"{'measured' if evaluate else 'trained'}: {folder}")
