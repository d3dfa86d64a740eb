"""`verax train`: fine-tune language models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from verax.cli import options
from verax.cli.files import check_folder
from verax.cli.options import Flags
from verax.train.settings import FinetuneSettings, LoraSettings

app = typer.Typer(help="Fine-tune language models.", no_args_is_help=True)

Data = Annotated[
    Path,
    typer.Option(
        help="JSONL file with messages, with prompt and completion, or with text on each line; or JSON, or Parquet.",
        show_default=False,
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Folder for state, log, plot and the result.", show_default=False)
]
ValidationData = Annotated[Path | None, typer.Option(help="Another such file, on which the loss is measured.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the state in the output folder.", rich_help_panel="Run")
]


@app.command(cls=options.Command)
@options.with_flags
def lora(
    data: Data,
    output: Output,
    model: options.Model = None,
    validation_data: ValidationData = None,
    *,
    adapter: Annotated[dict[str, Any], Flags(LoraSettings)],
    settings: Annotated[dict[str, Any], Flags(FinetuneSettings)],
    resume: Resume = False,
    as_json: options.Json = False,
) -> None:
    """Train a LoRA adapter for a language model.

    The adapter is written as PEFT writes it. Needs the extra named train.

    \b
    Examples:
        verax train lora --data examples.jsonl -o runs/mine --learning-rate 1e-3
        verax train lora --model Qwen/Qwen3-0.6B --data train.jsonl --validation-data held_out.jsonl -o runs/sql
        verax train lora --model Qwen/Qwen3-0.6B --data train.jsonl -o runs/sql --resume
    """
    from verax.train.finetune import train_lora

    check_folder(output)
    run, size = FinetuneSettings(**settings), LoraSettings(**adapter)
    _show(train_lora(model, data, output, run, size, validation_data=validation_data, resume=resume), as_json)


@app.command(cls=options.Command)
@options.with_flags
def full(
    data: Data,
    output: Output,
    model: options.Model = None,
    validation_data: ValidationData = None,
    *,
    settings: Annotated[dict[str, Any], Flags(FinetuneSettings, defaults={"learning_rate": 2e-5})],
    resume: Resume = False,
    as_json: options.Json = False,
) -> None:
    """Train all weights of a language model.

    The result is written as a checkpoint. Needs the extra named train.

    \b
    Examples:
        verax train full --data examples.jsonl -o runs/mine --learning-rate 3e-4
        verax train full --model Qwen/Qwen3-0.6B --data train.jsonl -o runs/sql --devices 4 --batch-size 16
    """
    from verax.train.finetune import train_full

    check_folder(output)
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
