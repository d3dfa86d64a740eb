"""Registers, memory and spills of a compiled kernel, as its compiler tells them."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Resources", "longest_stretch", "of_gpu", "of_tpu"]

Compile = Callable[[Mapping[str, str]], Any]
"""Compilation of a program that calls one kernel, with further XLA options."""

LIBTPU = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
"""Options of libtpu, which it reads when it is loaded: its instructions after each pass go into a folder."""


class Resources(NamedTuple):
    """Resources of a kernel.

    Attributes:
        registers: registers of a thread; None on a TPU.
        memory: bytes of a block's shared memory, or of a TPU's vector memory.
        spills: bytes that a thread of a GPU moves out of its registers, or registers that a TPU does.
        cycles: bundles of instructions in the longest stretch without a jump, one a cycle; None on a GPU.
    """

    registers: int | None
    memory: int
    spills: int
    cycles: int | None = None


def of_gpu(name: str, compile_with: Compile) -> Resources:
    """Resources of the kernel `name`, which Triton compiles to PTX and ptxas to instructions.

    Args:
        name: name of the kernel in the compiled program.
        compile_with: compilation of the program.
    """
    with tempfile.TemporaryDirectory() as folder:
        compile_with({"xla_dump_to": folder})
        (program,) = (path for path in Path(folder).glob("*.ptx") if f".entry {name}(" in path.read_text())
        (thunks,) = Path(folder).glob("*.thunk_sequence.txt")
        memory = _number(rf" {name} grid: .*shared_memory: (\d+) bytes", thunks.read_text())
        # PTX for one architecture alone (sm_90a, sm_100a) cannot be compiled for those like it (sm_90, sm_100).
        (arch,) = re.findall(r"^\.target (\w+)", program.read_text(), re.MULTILINE)
        command = [str(_ptxas()), "-v", f"-arch={arch}", str(program), "-o", f"{folder}/out"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = (_number(words, said) for words in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return Resources(registers, memory, spills)


def _ptxas() -> Path:
    """The assembler of the package nvidia-cuda-nvcc."""
    found = find_spec("nvidia")
    places = [] if found is None else list(found.submodule_search_locations or ())
    return next(path for place in places for path in Path(place).glob("*/bin/ptxas"))


def of_tpu(name: str, command: Sequence[str]) -> Resources:
    """Resources of the kernel `name`: the vector memory that XLA sets aside for it, and libtpu's schedule of it.

    Args:
        name: name of the kernel in the compiled program.
        command: command that compiles the program and prints it.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "LIBTPU_INIT_ARGS": LIBTPU.format(folder=folder)}
        text = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
        (schedule,) = Path(folder).glob(f"*-{name}.*-final_bundles.txt")
        bundles = schedule.read_text().splitlines()
    (call,) = (line for line in text.splitlines() if "tpu_custom_call" in line)
    memory = _number(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', call)
    spills = sum("_spill]" in line and " vst " in line for line in bundles)
    return Resources(None, memory, spills, longest_stretch(bundles))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} in {text[:2000]}"
    return int(found[1])


def longest_stretch(bundles: Sequence[str]) -> int:
    """Bundles between two jumps, or places that are jumped to, that lie farthest apart."""
    marks = [0, *_marks(bundles)]
    return max((after - before for before, after in itertools.pairwise(marks)), default=0)


def _marks(bundles: Sequence[str]) -> Iterator[int]:
    """Addresses of jumps and of places that are jumped to."""
    for line in bundles:
        # `0x103 LB: >>> { ... }`: address, kind of region (loop body, fallthrough, ...), depth, instructions.
        bundle = re.match(r"\s*(0x[0-9a-f]+) ?( LB| PB| PF| LH| LE)?", line)
        if bundle and (bundle[2] or "sbr.rel" in line):
            yield int(bundle[1], 16)
