"""Functions that JAX traces and lowers once for all equal calls of a program, as those of a model's layers are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer

__all__ = ["trace_once"]

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = (bool, int, float, complex, str, bytes, np.dtype, np.generic, type)
"""Types of arguments that are no arrays and whose equal values have equal programs."""


class _Array:
    """Mark in the place of an argument that is an array."""


def trace_once(function: Callable[P, R], context: Hashable, /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Result of a call, which while tracing becomes a function of the program, shared by all equal calls.

    Calls are equal if their arrays have equal shapes and dtypes, and their other arguments and contexts are equal. XLA
    inlines such functions. Calls without an array that is traced, and those with arguments of other types than arrays
    and plain values, are not shared.

    Args:
        function: a function of its arguments and of `context` alone.
        context: everything else that its program depends on.
        args: its arguments.
        kwargs: its arguments by name.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    others = tuple(_Array if isinstance(leaf, jax.Array) else leaf for leaf in leaves)
    if not any(isinstance(one, Tracer) for one in arrays) or not all(isinstance(x, _PLAIN) for x in others):
        return function(*args, **kwargs)
    # Equal values of different types, such as 1 and 1.0, have programs of their own.
    types = tuple(type(other) for other in others)
    return _shared(function)(structure, others, types, context, *arrays)


@functools.cache
def _shared(function: Callable[..., R]) -> Callable[..., R]:
    """The function of arrays, under `jax.jit`; its name is what profiles show."""

    def run(structure: Any, others: tuple[Any, ...], types: Any, context: Any, *arrays: jax.Array) -> R:
        given = iter(arrays)
        args, kwargs = jax.tree.unflatten(structure, [next(given) if x is _Array else x for x in others])
        return function(*args, **kwargs)

    run.__name__ = run.__qualname__ = getattr(function, "__name__", "implementation").strip("_")
    return jax.jit(run, static_argnums=(0, 1, 2, 3))
