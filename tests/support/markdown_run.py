"""Runs the code blocks of a Markdown page, and checks the commands that they name without running them."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import typer

from tests.support.markdown import Block, MarkdownError
from verax import cli

ROOT = Path(__file__).parents[2]

COMMAND_LIMIT = 180
"""Seconds for a command of a block that is not verax's."""

_UsageError: Any = cli.UsageError


def run_block(block: Block, namespace: dict[str, Any], verax: Callable[[list[str]], tuple[int, str]]) -> None:
    """Run a block in the working directory.

    Args:
        block: of Python, which runs in `namespace`, or of shell commands.
        namespace: names of the page's earlier Python blocks.
        verax: runs a `verax` command in this process and gives its exit status and standard output.

    Raises:
        MarkdownError: if a command ends with another status than 0.
        Exception: whatever a Python block raises.
    """
    if block.language == "python":
        # Empty lines in front give tracebacks the lines of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        exec(code, namespace)
        return
    for command in commands(block.text):
        _run_command(block, command, verax)


def commands(text: str) -> list[str]:
    """The commands of a shell block: continued lines are joined, comments and empty lines are left out."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line for line in lines if shlex.split(line, comments=True)]


def _run_command(block: Block, command: str, verax: Callable[[list[str]], tuple[int, str]]) -> None:
    output = None
    if command.startswith("verax "):
        own, _, command = command.partition(" | ")
        status, output = verax(shlex.split(own, comments=True)[1:])
        if status != 0:
            raise MarkdownError(f"{block.place}: `{own}` ended with status {status}")
        if not command:
            return
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        **{"input": output, "env": environment, "timeout": COMMAND_LIMIT},
        **{"capture_output": True, "text": True, "check": False},
    )
    if done.returncode != 0:
        raise MarkdownError(f"{block.place}: `{command}` ended with status {done.returncode}: {done.stderr}")


def check_command(command: str, *, whole: bool = True) -> None:
    """Check that the command exists, without running it: verax's options, make's verbs, pip's extras, scripts' paths.

    Args:
        command: one line of a shell, as `commands` gives it. Commands of other programs are not checked.
        whole: False for a command in prose, which may leave required arguments out.

    Raises:
        MarkdownError: saying what does not exist.
    """
    words = shlex.split(command.removeprefix("$ ").partition(" | ")[0].partition(" > ")[0], comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # VARIABLE=value in front of a command
        del words[0]
    program = Path(words[0]).name
    if program == "verax":
        _parse(words[1:], whole)
    elif program == "make":
        verbs = re.findall(r"(?m)^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"))
        _known("make verb", [word for word in words[1:] if "=" not in word], verbs)
    elif program.startswith("pip"):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for extras in re.findall(r"\[([a-z,-]+)\]", command):
            _known("extra", extras.split(","), list(project["optional-dependencies"]))
    elif program.startswith("python") and len(words) > 1 and words[1].endswith(".py"):
        _known("script", [words[1]], [str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.py")])


def _known(kind: str, names: list[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise MarkdownError(f"no {kind} {name!r}; there are {', '.join(known)}")


@cache
def _command() -> Any:
    return typer.main.get_command(cli.app)


def _parse(words: list[str], whole: bool) -> None:
    """Parse a command line of verax as its entry point does, and stop before the command."""
    words = [word for word in words if word != "--debug"]
    command = _command()
    context, name = None, "verax"
    try:
        with redirect_stdout(io.StringIO()):  # --help
            while True:
                context = command.make_context(name, list(words), parent=context)
                rest = [*context._protected_args, *context.args]
                if not hasattr(command, "resolve_command") or not rest:
                    return
                name, command, words = command.resolve_command(context, rest)
    except typer.Exit:
        return
    except _UsageError as error:
        incomplete = type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError")
        absent_file = "does not exist" in error.format_message()
        if not absent_file and (whole or not incomplete):
            raise MarkdownError(f"verax {' '.join(words)}: {error.format_message()}") from error
