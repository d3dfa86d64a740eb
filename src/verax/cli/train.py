"""`verax train`: fine-tune language models, and train the built-in models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from verax.cli import options
from verax.cli.options import Flags
from verax.options import option

__all__ = ["app"]

app = typer.Typer(help="Fine-tune language models, and train the built-in models.", no_args_is_help=True)

_OPTIMISER = "Optimiser"
_RUN = "Run"


@dataclass(frozen=True)
class TrainOptions:
    """Settings of a fine-tuning run: arguments of `FinetuneSettings`."""

    max_length: int | None = option(
        None, "Tokens that are kept of an example.", low=2, shown="1024, or what the model reads if that is less"
    )
    epochs: float = option(3.0, "Times that the run goes through the examples.", low=0, above=True, panel=_OPTIMISER)
    steps: int | None = option(None, "Steps, in place of --epochs.", low=1, panel=_OPTIMISER)
    batch_size: int = option(8, "Examples that are computed at once, on all devices together.", low=1, panel=_OPTIMISER)
    gradient_accumulation: int = option(1, "Batches that make a step.", low=1, panel=_OPTIMISER)
    learning_rate: float = option(
        2e-4, "Peak of the learning rate, which falls by a cosine.", low=0, above=True, panel=_OPTIMISER
    )
    warmup_steps: int | None = option(
        None, "Steps in which the learning rate rises.", low=0, panel=_OPTIMISER, shown="a twentieth of all"
    )
    weight_decay: float = option(0.0, "Weight decay of AdamW, for matrices only.", low=0, panel=_OPTIMISER)
    dtype: str = option("bfloat16", "bfloat16 or float32.")
    dequantize: bool = option(False, "Train on the floats of a quantised checkpoint.", panel=_RUN)
    gradient_checkpointing: bool = option(
        False, "Compute each layer again in the backward pass, for less memory.", panel=_RUN
    )
    devices: int = option(1, "Devices that divide batches, weights and optimiser.", low=1, panel=_RUN)
    seed: int = option(0, "Seed of the order of examples, and of a new adapter.", panel=_RUN)
    save_every: int = option(100, "Steps between states, each with the loss on the validation data.", low=1, panel=_RUN)


Data = Annotated[
    Path,
    typer.Option(
        help="JSONL file with messages, with prompt and completion, or with text on each line.", show_default=False
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Folder for state, log, plot and the result.", show_default=False)
]
ValidationData = Annotated[Path | None, typer.Option(help="Another such file, on which the loss is measured.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the state in the output folder.", rich_help_panel=_RUN)
]


@app.command()
@options.with_flags
def lora(
    data: Data,
    output: Output,
    model: options.Model = None,
    validation_data: ValidationData = None,
    rank: Annotated[int, typer.Option(help="Rank of the adapter's matrices.")] = 16,
    alpha: Annotated[float, typer.Option(help="Their product is multiplied by alpha / rank.")] = 32.0,
    target_modules: Annotated[
        str, typer.Option(help="Layers to adapt: all-linear, or names such as q_proj,v_proj.")
    ] = "all-linear",
    *,
    settings: Annotated[dict[str, Any], Flags(TrainOptions)],
    resume: Resume = False,
    as_json: options.Json = False,
) -> None:
    """Train a LoRA adapter for a language model, and write it as PEFT does. Needs the extra named train.

    Examples:

        verax train lora --data examples.jsonl -o runs/mine --learning-rate 1e-3

        verax train lora --model Qwen/Qwen3-0.6B --data train.jsonl --validation-data held_out.jsonl -o runs/sql

        verax train lora --model Qwen/Qwen3-0.6B --data train.jsonl -o runs/sql --resume
    """
    from verax.train.finetune import FinetuneSettings, LoraSettings, train_lora

    run, adapter = FinetuneSettings(**settings), LoraSettings(rank, alpha, target_modules)
    _show(train_lora(model, data, output, run, adapter, validation_data=validation_data, resume=resume), as_json)


@app.command()
@options.with_flags
def full(
    data: Data,
    output: Output,
    model: options.Model = None,
    validation_data: ValidationData = None,
    *,
    settings: Annotated[dict[str, Any], Flags(TrainOptions, defaults={"learning_rate": 2e-5})],
    resume: Resume = False,
    as_json: options.Json = False,
) -> None:
    """Train all weights of a language model, and write it as a checkpoint. Needs the extra named train.

    Examples:

        verax train full --data examples.jsonl -o runs/mine --learning-rate 3e-4

        verax train full --model Qwen/Qwen3-0.6B --data train.jsonl -o runs/sql --devices 4 --batch-size 16
    """
    from verax.train.finetune import FinetuneSettings, train_full

    run = FinetuneSettings(**settings)
    _show(train_full(model, data, output, run, validation_data=validation_data, resume=resume), as_json)


def _show(report: dict[str, Any], as_json: bool) -> None:
    """Write the figures of a run: a line of JSON, or lines for people."""
    if as_json:
        typer.echo(json.dumps(report))
        return
    for count, what in ((report["cut"], "lost their ends"), (report["left_out"], "were left out")):
        if count:
            typer.echo(f"{count} examples are longer than --max-length and {what}", err=True)
    typer.echo(f"{report['examples']} examples, {report['steps']} steps, {report['parameters']:,} trained parameters")
    if report["loss"] is not None:
        typer.echo(f"loss of the last batch: {report['loss']:.3f}")
    if "validation_loss" in report:
        before, after = report["validation_loss_before"], report["validation_loss"]
        typer.echo(f"validation loss: {before:.3f} before, {after:.3f} now")
    typer.echo(f"trained: {report['folder']}")


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
