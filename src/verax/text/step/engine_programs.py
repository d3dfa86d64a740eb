"""The programs of an engine: compiled when they are first called and shared by engines of equal models, or loaded."""

from __future__ import annotations

import contextvars
import functools
from collections import abc
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from verax import ops
from verax._compat import compiler_options
from verax.text.step.compiled_programs import CompiledPrograms
from verax.text.step.program import AbstractModel, sampling_name, sampling_program, step_name, step_program
from verax.text.step.sizes import RunnerConfig
from verax.text.step.slots import admit
from verax.text.step.step import StepShape

__all__ = [
    "ADMIT",
    "JittedCall",
    "Programs",
    "compile_all",
    "compile_program",
    "jitted_programs",
    "loaded_programs",
    "new_programs",
]

ADMIT = "admit"
"""Name of the program that fills slots."""

JittedCall = tuple[Any, tuple[Any, ...]]
"""A program as `jax.jit` gives it, and its arguments, arrays or their shapes."""


class Programs(NamedTuple):
    """Programs of an engine, as `jax.jit` gives them or loaded."""

    admit: Any
    steps: dict[StepShape, Any]
    samplers: dict[int, Any]


def jitted_programs(model: AbstractModel, sizes: RunnerConfig, mesh: Mesh | None) -> Programs:
    """The programs of a model at these sizes, which engines of equal models share: the second one compiles nothing."""
    try:
        hash(model)
    except TypeError:  # a configuration from outside the package need not be hashable
        return new_programs(model, sizes, mesh)
    return _shared_programs(model, sizes, mesh, ops.tracing_context())


# Programs hold no weights. Those of the last few engines are kept.
@functools.lru_cache(maxsize=4)
def _shared_programs(model: AbstractModel, sizes: RunnerConfig, mesh: Mesh | None, context: Hashable) -> Programs:
    return new_programs(model, sizes, mesh)


def new_programs(model: AbstractModel, sizes: RunnerConfig, mesh: Mesh | None) -> Programs:
    """Programs of a model at these sizes that nothing else shares. Each compiles when it is first called."""
    steps = {shape: step_program(model, sizes, shape, mesh) for shape in sizes.shapes}
    _, on_slots, _, _ = steps[sizes.shapes[0]].shardings or (None,) * 4
    options = compiler_options(ops.target().platform)
    return Programs(
        # A function of its own: JAX shares what it has compiled among all that `jax.jit` makes of one function.
        admit=jax.jit(functools.partial(admit), donate_argnums=0, compiler_options=options, out_shardings=on_slots),
        steps={shape: step.jit() for shape, step in steps.items()},
        samplers={rows: sampling_program(model, sizes, rows, mesh).jit() for rows in sizes.sampling_rows},
    )


def loaded_programs(compiled: CompiledPrograms, sizes: RunnerConfig) -> Programs:
    """The programs of a folder.

    Raises:
        InvalidParameterError: if a file is missing or damaged.
    """
    return Programs(
        admit=compiled.load(ADMIT),
        steps={shape: compiled.load(step_name(shape)) for shape in sizes.shapes},
        samplers={rows: compiled.load(sampling_name(rows)) for rows in sizes.sampling_rows},
    )


def compile_program(jitted: Any, arguments: tuple[Any, ...]) -> jax.stages.Compiled:
    """Lower and compile a program for arguments, arrays or their shapes."""
    return jitted.lower(*arguments).compile()


def compile_all(programs: abc.Sequence[JittedCall], progress: Callable[[int, int], None]) -> None:
    """Compile programs, so that calls with such arguments compile nothing.

    Args:
        programs: the programs.
        progress: called with the number of compiled programs and of all, at first with 0.
    """
    progress(0, len(programs))
    # XLA compiles outside of Python's lock, and one step uses one core to compile: two at a time fill two. Each is
    # traced in a copy of this context, which has the choices of `use_implementations` and `use_target`.
    with ThreadPoolExecutor(2) as pool:
        compiled = [pool.submit(contextvars.copy_context().run, compile_program, *each) for each in programs]
        for done, result in enumerate(compiled, start=1):
            result.result()
            progress(done, len(programs))
