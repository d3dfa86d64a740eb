"""Traces and gradients of Flax NNX modules and of plain JAX functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from verax import ops
from verax._compat import compiler_options
from verax.compare.case import Side
from verax.compare.trace import OUTPUT, Recorder, Trace, recording
from verax.errors import InvalidParameterError

__all__ = ["gradients_jax", "run_compiled", "trace_jax"]

Replace = Callable[[str, tuple[int, ...]], np.ndarray | None]
"""Replacement of a recorded value, by its name and shape; None leaves the value."""


def trace_jax(
    side: Side, *, folder: str | Path | None = None, jit: bool = False, replace: Replace | None = None
) -> Trace:
    """Run a side's model and keep the result of each of its modules.

    Of a tuple or another structure, the first array counts. Modules may stand in lists and run several times; loops
    (`lax.scan`, `lax.map`) run step by step, so that modules inside them are recorded once a step. Inside `vmap` and
    `jit` values are recorded by a host callback.

    Args:
        side: a Flax NNX module, or a function with taps, and its call.
        folder: folder to stream the arrays to; None keeps them in memory.
        jit: compile the run as one program, as users run it, instead of operation by operation.
        replace: function that gives what modules hand on in place of their own results. Not with `jit`.
    """
    if jit and replace is not None:
        raise InvalidParameterError("jit: values can be replaced only in a run that is not compiled")
    trace = Trace(folder)

    def record(name: str, x: Any, axes: Sequence[int] | None) -> Any:
        leaves, treedef = jax.tree.flatten(x)
        first = next((i for i, leaf in enumerate(leaves) if _is_floats(leaf)), None)
        if first is None:
            return x
        array = leaves[first]
        kept = array if axes is None else jnp.transpose(array, axes)
        if isinstance(array, Tracer):
            jax.debug.callback(partial(_add, trace, name), kept)
            return x
        name = trace.add(name, np.asarray(kept))
        other = None if replace is None else replace(name, kept.shape)
        if other is None:
            return x
        given = jnp.asarray(other).astype(array.dtype)
        leaves[first] = given if axes is None else jnp.transpose(given, np.argsort(axes).tolist())
        return jax.tree.unflatten(treedef, leaves)

    recorder = Recorder(trace, record, side.inputs)
    args, kwargs = jax.tree.map(_to_jax, (side.args, dict(side.kwargs)))
    function = partial(side.run, side.model)
    # Unfused, so that each layer's result is there to be recorded.
    with recording(recorder, side.watch), _patched(side.model, recorder), ops.use_unfused():
        if jit:
            result = jax.jit(function)(args, kwargs)
            jax.effects_barrier()
        else:
            with jax.disable_jit():
                result = function(args, kwargs)
                jax.effects_barrier()
        record(OUTPUT, result, None)
    trace.save()
    return trace


def run_compiled(side: Side, *, folder: str | Path | None = None) -> Trace:
    """Run a side's model as engines run it: as one compiled program, with the implementations that dispatch chooses.

    Operations may be fused, which a trace of each module excludes. The trace that is returned has the output only.

    Args:
        side: a Flax NNX module, or a function, and its call.
        folder: folder to write the output to; None keeps it in memory.
    """
    leaves, treedef = jax.tree.flatten(jax.tree.map(_to_jax, (side.args, dict(side.kwargs))))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
    graph, state = nnx.split(side.model) if isinstance(side.model, nnx.Module) else (None, None)

    def program(state: Any, arrays: dict[int, jax.Array]) -> Any:
        module = side.model if graph is None else nnx.merge(graph, state)
        return side.run(module, *treedef.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)]))

    result = jax.jit(program, compiler_options=compiler_options(ops.target().platform))(state, arrays)
    trace = Trace(folder)
    trace.add(OUTPUT, np.asarray(next(leaf for leaf in jax.tree.leaves(result) if _is_floats(leaf))))
    trace.save()
    return trace


def gradients_jax(side: Side, cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """Gradients of `sum(output * cotangent)` by each float parameter, under the parameter's name.

    Args:
        side: a Flax NNX module and its call.
        cotangent: as many numbers as the output's first array has, in its order.
    """
    graph, params, rest = nnx.split(side.model, nnx.Param, ...)
    args, kwargs = jax.tree.map(_to_jax, (side.args, dict(side.kwargs)))

    def loss(params: Any) -> jax.Array:
        result = side.run(nnx.merge(graph, params, rest), args, kwargs)
        output = next(leaf for leaf in jax.tree.leaves(result) if _is_floats(leaf))
        return jnp.sum(output.astype(jnp.float32) * jnp.asarray(cotangent, jnp.float32).reshape(output.shape))

    gradients = jax.jit(jax.grad(loss))(params)
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradients)}


def _add(trace: Trace, name: str, value: Any) -> None:
    trace.add(name, np.asarray(value))


def _is_floats(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


def _to_jax(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


@contextlib.contextmanager
def _patched(model: Any, recorder: Recorder) -> Iterator[None]:
    """Context in which the calls of the model's modules report to the recorder."""
    paths: dict[int, str] = {}
    classes: list[type] = []
    if isinstance(model, nnx.Module):
        for path, node in nnx.iter_graph(model):
            kind = type(node)
            if path and isinstance(node, nnx.Pytree) and callable(node) and id(node) not in paths:
                paths[id(node)] = ".".join(map(str, path))
                classes.append(kind)
    running: list[int] = []

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(self))
            # A class that calls its parent's method is one module all the same.
            if path is None or (running and running[-1] == id(self)):
                return original(self, *args, **kwargs)
            running.append(id(self))
            try:
                with recorder.module(path):
                    if args and recorder.wants_input():
                        args = (recorder.value("input", args[0]), *args[1:])
                    result = original(self, *args, **kwargs)
                    return recorder.value("", result)
            finally:
                running.pop()

        return call

    with contextlib.ExitStack() as stack:
        for kind in dict.fromkeys(classes):
            own = "__call__" in vars(kind)
            original = kind.__call__
            kind.__call__ = wrapped(original)
            if own:
                stack.callback(setattr, kind, "__call__", original)
            else:
                stack.callback(delattr, kind, "__call__")
        yield
