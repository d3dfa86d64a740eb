"""The command line. Commands import what they need when they run, so that `verax --help` is quick."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Annotated

import typer

import verax
from verax.cli import bench, chat, demo, generate, info, train
from verax.errors import VeraxError

__all__ = ["app", "main"]

app = typer.Typer(
    name="verax",
    help="Generative models in JAX, from the checkpoints that PyTorch users publish.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate.generate, chat.chat, info.info, demo.demo):
    app.command()(command)
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"verax {verax.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and JAX's own messages.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if not debug:
        # XLA logs each program that it takes from the disk cache, at a level that looks like an error.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        logging.getLogger("jax").setLevel(logging.ERROR)


def main() -> None:
    """Run a command: exit status 0, 1 for an error that verax explains, 2 for wrong usage, 130 when interrupted."""
    try:
        app()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except BrokenPipeError:  # `verax ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (VeraxError, OSError) as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        else:
            sys.stderr.write(f"verax: error: {error}\n")
        sys.exit(1)
