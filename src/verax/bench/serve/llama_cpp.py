"""llama.cpp's own server as a baseline: the program `llama-server`, which `make llama-server` builds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from verax.errors import MissingDependencyError
from verax.machine import num_cores

__all__ = ["BUILT", "VARIABLE", "find_llama_server", "llama_cpp_command", "llama_server_version"]

PROGRAM = "llama-server"

VARIABLE = "VERAX_LLAMA_SERVER"
"""Environment variable with the program's path."""

BUILT = Path("build/llama.cpp/bin") / PROGRAM
"""Path of the program that `make llama-server` builds, from the repository's root."""


def find_llama_server(given: str | None = None) -> str:
    """Path of the program: the given one, that of `VARIABLE`, the one on PATH, or the one that make built.

    Args:
        given: name or path of the program.

    Raises:
        MissingDependencyError: if there is no such program.
    """
    named = given or os.environ.get(VARIABLE)
    found = shutil.which(named) if named else shutil.which(PROGRAM) or shutil.which(str(BUILT.absolute()))
    if found is None:
        raise MissingDependencyError(
            f"against: llama.cpp needs its server, and there is no program {named or PROGRAM!r}; build it with make "
            f"llama-server, or give its path with --llama-server or {VARIABLE}"
        )
    return found


def llama_server_version(program: str) -> str:
    """Version that a `llama-server` prints, with its commit."""
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version: (.+)", printed.stdout + printed.stderr)
    return found[1] if found else "unknown"


def llama_cpp_command(program: str, gguf: Path, *, slots: int, length: int) -> Callable[[int], Sequence[str]]:
    """Command line of a server for a GGUF file, given a port: all cores, flash attention, and a slot for each request.

    Args:
        program: path of `llama-server`.
        gguf: weights and vocabulary.
        slots: requests at once.
        length: tokens of the longest prompt with its answer.
    """
    threads = str(num_cores())
    options = {
        "--model": str(gguf),
        "--parallel": str(slots),
        "--ctx-size": str(slots * length),
        "--threads": threads,
        "--threads-batch": threads,
        "--flash-attn": "on",
        "--cache-ram": "0",
        "--n-gpu-layers": "0",
        "--host": "127.0.0.1",
    }
    words = [program, *(word for pair in options.items() for word in pair)]
    words += ["--cont-batching", "--cache-prompt", "--metrics", "--no-webui"]
    return lambda port: [*words, "--port", str(port)]
