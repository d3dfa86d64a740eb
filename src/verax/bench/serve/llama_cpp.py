"""llama.cpp's own server as a baseline: the program `llama-server`, which verax does not install."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from verax.errors import MissingDependencyError
from verax.machine import num_cores

__all__ = ["llama_cpp_command"]


def llama_cpp_command(program: str, gguf: Path, *, slots: int, length: int) -> Callable[[int], Sequence[str]]:
    """Command line of a server for a GGUF file, given a port.

    Args:
        program: name or path of `llama-server`.
        gguf: weights and vocabulary.
        slots: requests at once.
        length: tokens of the longest prompt with its answer.

    Raises:
        MissingDependencyError: if there is no such program.
    """
    found = shutil.which(program)
    if found is None:
        raise MissingDependencyError(
            f"against: llama.cpp needs its server, and there is no program {program!r}; build the target llama-server "
            "of https://github.com/ggml-org/llama.cpp and give its path with --llama-server. The Python package "
            "llama-cpp-python does not contain it"
        )
    threads = str(num_cores())
    options = {
        "--model": str(gguf),
        "--parallel": str(slots),
        "--ctx-size": str(slots * length),
        "--threads": threads,
        "--threads-batch": threads,
        "--n-gpu-layers": "0",
        "--host": "127.0.0.1",
    }
    words = [found, *(word for pair in options.items() for word in pair), "--metrics", "--no-webui"]
    return lambda port: [*words, "--port", str(port)]
