"""One lowered program compiled for a device that is not attached, with the results kept by a hash of the program."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from verax._compat import no_compilation_cache
from verax.errors import VeraxError
from verax.files import cache_folder, write_json
from verax.plan.compiled.hlo import Findings, read_module
from verax.plan.compiled.topology import Compiler

__all__ = ["Compiled", "compile_lowered"]

READER = 2
"""Version of what is read out of a compiled program: results of other versions are not taken from the cache."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_NEEDED = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMGT]?)")


class Compiled(NamedTuple):
    """A compiled program, or the compiler's refusal of it. Bytes are those of one device.

    Attributes:
        name: what the program does.
        seconds: time that the compilation took, when it was done.
        arguments: bytes of the arguments; 0 if the program was refused, as in the following.
        results: bytes of the results, those that take the memory of arguments included.
        aliased: bytes of results that take the memory of arguments.
        temporaries: bytes of the buffers in between.
        code: bytes of the program itself.
        needed: bytes that have to fit; of a refused program as the compiler says it, 0 if it does not.
        refused: the compiler's message that the program does not fit; None if it does.
        findings: what the program's text says; None if it was refused.
    """

    name: str
    seconds: float
    arguments: int = 0
    results: int = 0
    aliased: int = 0
    temporaries: int = 0
    code: int = 0
    needed: int = 0
    refused: str | None = None
    findings: Findings | None = None

    def as_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        return {**self._asdict(), "findings": None if self.findings is None else self.findings._asdict()}


def compile_lowered(name: str, lowered: jax.stages.Lowered, compiler: Compiler, device: str) -> Compiled:
    """Compile a program, or read what an earlier compilation of the same program by the same compiler found.

    Results are in `compiled/` in verax's folder of caches, see `files.cache_folder`.

    Args:
        name: what the program does.
        lowered: the program, on a mesh of `topology.topology_mesh`.
        compiler: compiler of the device.
        device: name of the device, and how many there are.

    Raises:
        VeraxError: if the compiler fails, with the first line of its message.
    """
    # The text has the rest: shapes, shardings, donated arguments, the number of devices.
    by = (compiler.version, compiler.options, compiler.description)
    key = json.dumps([READER, jax.__version__, *by, device, lowered.as_text()])
    folder = cache_folder()
    stored = None if folder is None else folder / "compiled" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if stored is not None and (known := _read(stored)) is not None:
        return known._replace(name=name)
    result = _compile(name, lowered, compiler)
    if stored is not None:
        _write(stored, result)
    return result


def _compile(name: str, lowered: jax.stages.Lowered, compiler: Compiler) -> Compiled:
    begin = time.perf_counter()
    try:
        with no_compilation_cache():
            compiled = lowered.compile(compiler_options=dict(compiler.options))
    except jax.errors.JaxRuntimeError as error:
        message = str(error).partition("\n")[0]
        if not message.startswith("RESOURCE_EXHAUSTED"):
            raise VeraxError(f"{name}: {compiler.version} fails to compile it: {message}") from error
        said = _NEEDED.search(message)
        needed = round(float(said[1]) * _UNITS[said[2]]) if said else 0
        return Compiled(name, time.perf_counter() - begin, needed=needed, refused=message)
    seconds = time.perf_counter() - begin
    memory: Any = compiled.memory_analysis()
    arguments, results, aliased, temporaries, code = (
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
    )
    return Compiled(
        name,
        seconds,
        arguments,
        results,
        aliased,
        temporaries,
        code,
        needed=arguments + results - aliased + temporaries + code,
        findings=read_module(compiled.as_text() or ""),
    )


def _read(path: Path) -> Compiled | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        findings = fields.pop("findings")
        return Compiled(**fields, findings=None if findings is None else Findings(**findings))
    except (OSError, ValueError, TypeError, KeyError):  # not there, or of no use: it is compiled again
        return None


def _write(path: Path, result: Compiled) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result.as_dict())
    except OSError:  # a read-only home is no reason to refuse work
        return
