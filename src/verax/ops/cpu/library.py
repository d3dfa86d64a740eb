"""The native library: found, loaded, its handlers registered with JAX; or the reason why it is missing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from verax.errors import InvalidParameterError, MissingDependencyError
from verax.ops._dispatch import vary_alike

HANDLERS = (
    "verax_attention",
    "verax_conv",
    "verax_delta",
    "verax_gelu",
    "verax_gemm",
    "verax_gemm_int8",
    "verax_gemm_panels",
    "verax_grouped_linear",
    "verax_grouped_linear_quantized",
    "verax_hierarchical",
    "verax_hierarchical_local",
    "verax_layer_norm",
    "verax_linear",
    "verax_linear_blocks",
    "verax_linear_quantized",
    "verax_mlp_panels",
    "verax_paged_attention",
    "verax_paged_attention_quantized",
    "verax_rms_norm",
    "verax_norm_rotary",
    "verax_sample",
    "verax_swiglu_panels",
    "verax_token_logprobs",
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
    """True if the native library can be used. The first failure is logged, because XLA's programs are slower."""
    return _load().library is not None


def problem() -> str:
    """Reason why the native library is missing, with the remedy; empty if it is loaded."""
    return _load().problem


def levels() -> list[str]:
    """Instruction-set levels that this machine runs, best first; none without the library."""
    library = _load().library
    return [] if library is None else _levels_of(library)


def level() -> str | None:
    """Level in force; None without the library."""
    library = _load().library
    return None if library is None else library.verax_level().decode()


def has(capability: str) -> bool:
    """True if the level in force has a capability such as `"bf16_dot"` (native/levels.h); False without the library."""
    library = _load().library
    return library is not None and bool(library.verax_level_has(capability.encode()))


@contextlib.contextmanager
def use_level(name: str) -> Iterator[None]:
    """Run kernels at another level. It holds for the whole process, and for programs that are compiled already.

    Arrays that are still being computed are waited for on both ends: a program runs at the level that it was called at.

    Raises:
        InvalidParameterError: for a level that this machine cannot run.
    """
    before = level()
    jax.block_until_ready(jax.live_arrays())
    _set_level(_load().library, name)
    try:
        yield
    finally:
        jax.block_until_ready(jax.live_arrays())
        if before is not None:
            _set_level(_load().library, before)


def optional(array: jax.Array | None) -> jax.Array:
    """Float32 array as the handlers take one that may be missing: an empty array for None."""
    return jnp.zeros(0, jnp.float32) if array is None else array.astype(jnp.float32)


def call(
    handler: str, shape: Sequence[int], *arrays: jax.Array | np.ndarray, dtype: DTypeLike = "float32", **attributes: Any
) -> jax.Array:
    """Call a handler with one result. Under `vmap`: once by element.

    Raises:
        MissingDependencyError: if the library is missing, as when a native implementation is forced by name.
    """
    return call_many(handler, [jax.ShapeDtypeStruct(tuple(shape), dtype)], *arrays, **attributes)[0]


def call_many(
    handler: str,
    results: Sequence[jax.ShapeDtypeStruct | jax.Array],
    *arrays: jax.Array | np.ndarray,
    changed: int = 0,
    **attributes: Any,
) -> Sequence[jax.Array]:
    """`call` for several results of the given shapes and dtypes; the first `changed` are the first arrays, in place."""
    if not available():
        raise MissingDependencyError(problem())
    shapes = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    aliases = {i: i for i in range(changed)}
    run = jax.ffi.ffi_call(handler, shapes, vmap_method="sequential", input_output_aliases=aliases)
    return vary_alike((run(*vary_alike(arrays), **attributes), arrays))[0]


class _Requirements(TypedDict):
    platforms: tuple[str, ...]
    single_device: bool
    available: Callable[[], bool]


REQUIREMENTS: _Requirements = {"platforms": ("cpu",), "single_device": True, "available": available}
"""Arguments of `Operation.implementation` that all C++ kernels share: a CPU, one device's arrays, and the library."""


@functools.cache
def _load() -> _Loaded:
    """Load and register, once. `VERAX_CPU_LIBRARY` names another file, or `off`."""
    from verax.ops.cpu.build import (
        library_name,  # here, so that `python -m verax.ops.cpu.build` is the first to import it
    )

    path = os.environ.get("VERAX_CPU_LIBRARY") or Path(__file__).with_name(library_name())
    if path == "off":
        return _Loaded(None, "CPU kernels are switched off by VERAX_CPU_LIBRARY=off")
    try:
        library = ctypes.CDLL(os.fspath(path))
        library.verax_level_name.restype = library.verax_level.restype = ctypes.c_char_p
        library.verax_level_has.argtypes = (ctypes.c_char_p,)
        if not _levels_of(library):
            raise RuntimeError("it was compiled for another processor")
        for handler in HANDLERS:
            jax.ffi.register_ffi_target(handler, jax.ffi.pycapsule(getattr(library, handler)), platform="cpu")
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        reason = "it was not built" if not Path(path).exists() else f"{path}: {' '.join(str(error).split())}"
        loaded = _Loaded(None, f"no CPU kernels, so XLA's slower ones run: {reason}; {REMEDY}")
        _log.warning("%s", loaded.problem)
        return loaded
    if wanted := os.environ.get("VERAX_CPU_LEVEL"):
        _set_level(library, wanted)
    return _Loaded(library)


def _set_level(library: ctypes.CDLL | None, name: str) -> None:
    if library is None:
        raise MissingDependencyError(problem())
    if not library.verax_set_level(name.encode()):
        here = ", ".join(_levels_of(library))
        more = "python -m verax.ops.cpu.build --levels compiles others"
        raise InvalidParameterError(f"VERAX_CPU_LEVEL: this machine runs {here} of the library, got {name!r} ({more})")


def _levels_of(library: ctypes.CDLL) -> list[str]:
    return [name.decode() for name in iter(map(library.verax_level_name, itertools.count()).__next__, None)]
