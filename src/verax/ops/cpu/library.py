"""The native library: found, loaded, its handlers registered with JAX; or the reason why there is none."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from verax.errors import InvalidParameterError, MissingDependencyError

__all__ = ["HANDLERS", "available", "call", "level", "levels", "problem", "update", "use_level"]

HANDLERS = (
    "verax_attention",
    "verax_conv",
    "verax_linear",
    "verax_linear_quantized",
    "verax_paged_attention",
    "verax_paged_attention_quantized",
    "verax_rms_norm",
    "verax_sample",
    "verax_write_pages",
    "verax_write_pages_quantized",
)
"""FFI handlers that the library exports."""

REMEDY = "install a C++ compiler (Debian, Ubuntu: apt install g++), then run: python -m verax.ops.cpu.build"

_log = logging.getLogger("verax.ops")


@dataclass(frozen=True)
class _Loaded:
    library: ctypes.CDLL | None
    problem: str = ""


def available() -> bool:
    """Whether the native library can be used. The first refusal is logged: what runs instead is slower."""
    return _load().library is not None


def problem() -> str:
    """Why there is no native library, and what to do about it; empty if there is one."""
    return _load().problem


def levels() -> list[str]:
    """Instruction-set levels that this machine runs, best first; none without the library."""
    library = _load().library
    return [] if library is None else _levels_of(library)


def level() -> str | None:
    """The level in force; None without the library."""
    library = _load().library
    return None if library is None else library.verax_level().decode()


@contextlib.contextmanager
def use_level(name: str) -> Iterator[None]:
    """Run kernels at another level. It holds for the whole process, and for programs that are compiled already.

    Raises:
        InvalidParameterError: for a level that this machine cannot run.
    """
    before = level()
    _set_level(name)
    try:
        yield
    finally:
        if before is not None:
            _set_level(before)


def call(handler: str, shape: Sequence[int], *arrays: jax.Array, **attributes: Any) -> jax.Array:
    """Call a handler with one float32 result. Under `vmap`: once by element.

    Raises:
        MissingDependencyError: if there is no library, as when a native form is forced by name.
    """
    return _call(handler, jax.ShapeDtypeStruct(tuple(shape), "float32"), None)(*arrays, **attributes)


def update(handler: str, changed: Sequence[jax.Array], *arrays: jax.Array, **attributes: Any) -> Sequence[jax.Array]:
    """Call a handler that changes its first arrays in place; they come back. As `call` otherwise."""
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in changed]
    return _call(handler, results, {i: i for i in range(len(changed))})(*changed, *arrays, **attributes)


def _call(handler: str, results: Any, aliases: dict[int, int] | None) -> Any:
    if not available():
        raise MissingDependencyError(problem())
    return jax.ffi.ffi_call(handler, results, vmap_method="sequential", input_output_aliases=aliases)


@functools.cache
def _load() -> _Loaded:
    """Load and register, once. `VERAX_CPU_LIBRARY` names another file (`make test-native` does), or `off`."""
    from verax.ops.cpu.build import (
        library_name,  # here, so that `python -m verax.ops.cpu.build` is the first to import it
    )

    path = os.environ.get("VERAX_CPU_LIBRARY") or Path(__file__).with_name(library_name())
    if path == "off":
        return _Loaded(None, "CPU kernels are switched off by VERAX_CPU_LIBRARY=off")
    try:
        library = ctypes.CDLL(os.fspath(path))
        library.verax_level_name.restype = library.verax_level.restype = ctypes.c_char_p
        for handler in HANDLERS:
            jax.ffi.register_ffi_target(handler, jax.ffi.pycapsule(getattr(library, handler)), platform="cpu")
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        reason = "it was not built" if not Path(path).exists() else f"{path}: {' '.join(str(error).split())}"
        loaded = _Loaded(None, f"no CPU kernels, so XLA's slower ones run: {reason}; {REMEDY}")
        _log.warning("%s", loaded.problem)
        return loaded
    if wanted := os.environ.get("VERAX_CPU_LEVEL"):
        _set_level_of(library, wanted)
    return _Loaded(library)


def _set_level(name: str) -> None:
    library = _load().library
    if library is None:
        raise MissingDependencyError(problem())
    _set_level_of(library, name)


def _set_level_of(library: ctypes.CDLL, name: str) -> None:
    if not library.verax_set_level(name.encode()):
        here = ", ".join(_levels_of(library))
        raise InvalidParameterError(f"VERAX_CPU_LEVEL: this machine runs {here}, got {name!r}")


def _levels_of(library: ctypes.CDLL) -> list[str]:
    return [name.decode() for name in iter(map(library.verax_level_name, itertools.count()).__next__, None)]
