"""`verax train`: fine-tune language models."""

from __future__ import annotations

import typer

from verax.cli import finetune

__all__ = ["app"]

app = typer.Typer(help="Fine-tune language models.", no_args_is_help=True)
app.command("lora")(finetune.lora)
app.command("full")(finetune.full)
