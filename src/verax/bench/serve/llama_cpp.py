"""llama.cpp's own server as a baseline: the program `llama-server`, which `make llama-server` builds."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verax.checkpoint import Checkpoint
from verax.errors import MissingDependencyError
from verax.machine import num_cores

__all__ = ["BUILT", "VARIABLE", "LlamaServer", "llama_cpp_server"]

PROGRAM = "llama-server"

VARIABLE = "VERAX_LLAMA_SERVER"
"""Environment variable with the program's path."""

BUILT = Path("build/llama.cpp/bin") / PROGRAM
"""Path of the program that `make llama-server` builds, from the repository's root."""


@dataclass
class LlamaServer:
    """The program, and the GGUF file that it serves."""

    program: str
    path: Path = Path()

    @property
    def version(self) -> str:
        """Version that the program prints, with its commit."""
        printed = subprocess.run([self.program, "--version"], capture_output=True, text=True, check=False)
        found = re.search(r"version: (.+)", printed.stdout + printed.stderr)
        return found[1] if found else "unknown"

    def write(self, checkpoint: Path, precision: str, stack: contextlib.AsyncExitStack) -> str:
        """Take a GGUF file, or make one of a checkpoint's weights and vocabulary; the type of its matrices.

        Args:
            checkpoint: folder or GGUF file.
            precision: quantisation or dtype of our engine.
            stack: removes the file at its end.
        """
        from verax.bench.text.llama_cpp import GGUF_TYPES, write_gguf

        kind, opened = GGUF_TYPES[precision], Checkpoint.open(checkpoint)
        self.path = checkpoint
        if not opened.metadata:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verax-bench-")))
            self.path = write_gguf(opened, scratch / f"{kind}.gguf", kind, vocabulary=checkpoint / "tokenizer.json")
        return kind

    def arguments(self, *, slots: int, length: int) -> Callable[[int], Sequence[str]]:
        """Command line, given a port: all cores, flash attention, and a slot for each request.

        Args:
            slots: requests at once.
            length: tokens of the longest prompt with its answer.
        """
        threads = str(num_cores())
        words = [self.program, "--model", str(self.path), "--parallel", str(slots), "--ctx-size", str(slots * length)]
        words += ["--threads", threads, "--threads-batch", threads, "--flash-attn", "on", "--cache-ram", "0"]
        words += ["--n-gpu-layers", "0", "--host", "127.0.0.1"]
        words += ["--cont-batching", "--cache-prompt", "--metrics", "--no-webui"]
        return lambda port: [*words, "--port", str(port)]


def llama_cpp_server(given: str | None = None) -> LlamaServer:
    """The given program, the one that `VARIABLE` names, the one on PATH, or the one that make built.

    Raises:
        MissingDependencyError: if there is no such program.
    """
    named = given or os.environ.get(VARIABLE)
    program = shutil.which(named) if named else shutil.which(PROGRAM) or shutil.which(str(BUILT.absolute()))
    if program is None:
        raise MissingDependencyError(
            f"against: llama.cpp needs its server, and there is no program {named or PROGRAM!r}; build it with make "
            f"llama-server, or give its path with --llama-server or {VARIABLE}"
        )
    return LlamaServer(program)
