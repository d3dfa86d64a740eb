"""Command line. Commands import what they need when they run, so that `verax --help` is quick."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import traceback
from types import FrameType
from typing import Annotated, Any

import typer

import verax
from verax.cli import (
    batch,
    bench,
    chat,
    compare,
    compile,
    convert,
    demo,
    embed,
    generate,
    info,
    options,
    plan,
    serve,
    train,
    video,
)
from verax.errors import VeraxError

__all__ = ["app", "main"]

UsageError: Any = typer.BadParameter.__base__
"""Exception for wrong options and arguments. Typer exports only a subclass of it, and click may be a part of Typer."""

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended: 128 + SIGINT."""

_ENDS = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP
"""Signals that end a command: of supervisors, `timeout` and job schedulers, and of a terminal that is closed."""

app = typer.Typer(
    name="verax",
    help="Generative models in JAX, from the checkpoints that PyTorch users publish.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    generate.generate,
    chat.chat,
    serve.serve,
    batch.batch,
    video.video,
    embed.embed,
    embed.rerank,
    info.info,
    plan.plan,
    compile.compile,
    demo.demo,
    convert.quantize,
    convert.convert,
):
    app.command(cls=options.Command)(command)
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")
app.add_typer(compare.app, name="compare")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"verax {verax.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, and JAX's own messages.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    if not debug:
        # XLA logs each program that it loads from the disk cache, at a level that looks like an error.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        logging.getLogger("jax").setLevel(logging.ERROR)


def main() -> None:
    """Run a command: exit status 0, 1 for an error that verax explains, 2 for wrong usage, 130 when interrupted.

    SIGTERM and SIGHUP end it with 143 and 129, after files that are half written were removed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as a shell's `>&-` does
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (as long as the process)
    if isinstance(sys.stdin, io.TextIOWrapper):  # commands refuse a text that is not UTF-8 by name
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):  # where a terminal or pipe is not UTF-8, better a "?" than no answer
        sys.stdout.reconfigure(errors="replace")
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    if debug:  # wherever it stands: people add it to the end of the line that failed
        arguments = ["--debug", *(argument for argument in arguments if argument != "--debug")]
    hook, sys.unraisablehook = sys.unraisablehook, _repeat_interrupt
    # Handlers that nohup or the caller has set stay.
    before = {end: signal.signal(end, _end) for end in _ENDS if signal.getsignal(end) is signal.SIG_DFL}
    try:
        status = app(arguments, standalone_mode=False) or 0
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "verax"
        problem = error.format_message()
        if problem.startswith("Usage: "):  # a group without a command: its help
            typer.echo(problem)
            status = 2
        else:
            status = _explain(f"{problem.removeprefix('Invalid value: ').rstrip('.')}; see {command} --help", 2)
    except BrokenPipeError:  # `verax ... | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except (VeraxError, OSError) as error:
        if debug:
            traceback.print_exc()
        status = _explain(str(error), 1)
    except Exception:
        problem = _device_problem()
        if debug or problem is None:
            raise
        status = _explain(problem, 1)
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
    if status == INTERRUPTED:
        sys.stderr.write("interrupted\n")
    sys.exit(status)


def _end(number: int, frame: FrameType | None) -> None:
    """End the command as Python ends at an error, by which temporary files and folders are removed."""
    signal.signal(number, signal.SIG_DFL)  # a second one does not wait for that
    raise SystemExit(128 + number)


def _repeat_interrupt(dropped: sys.UnraisableHookArgs) -> None:
    """Send a signal again if Python drops its exception: JAX's callback of the garbage collector gets many of them."""
    if issubclass(dropped.exc_type, KeyboardInterrupt | SystemExit):
        # Later, as in this function it would be dropped too; and by a signal, which also ends a read that waits.
        main = threading.main_thread().ident
        number = signal.SIGINT if issubclass(dropped.exc_type, KeyboardInterrupt) else signal.SIGTERM
        try:
            threading.Timer(0.01, lambda: signal.pthread_kill(main or 0, number)).start()
        except KeyboardInterrupt:  # on a busy machine the timer may be over before `start` returns
            _repeat_interrupt(dropped)
    else:
        sys.__unraisablehook__(dropped)


def _device_problem() -> str | None:
    """Fault of JAX's devices, whichever call of JAX met it first; None if they are there."""
    import jax

    try:
        jax.local_devices()
    except Exception as error:  # an assertion without a text where CUDA is asked for and there is no GPU
        wanted = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        reason = str(error).rstrip(".") or "there is no such device, or no driver for it"
        hint = "pip install 'verax[cuda]' adds NVIDIA GPUs, JAX_PLATFORMS=cpu is always there"
        return f"{wanted}: JAX cannot use its devices: {reason}; {hint}"
    return None


def _explain(message: str, status: int) -> int:
    """Print an error message as one line, and return the exit status."""
    sys.stderr.write(f"verax: error: {' '.join(message.split())}\n")
    return status
