"""Traces and gradients of Flax NNX modules and of plain JAX functions."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from verax.compare.torch_side import to_numpy
from verax.compare.trace import OUTPUT, Recorder, Trace, leaves, recording
from verax.errors import InvalidParameterError

SCOPE = "module:"

_PATH = "_verax_path"
"""Attribute with a module's path while it runs: the copies that `nnx.jit` and `nnx.scan` make of a module have it."""

Replace = Callable[[str, tuple[int, ...]], np.ndarray | None]
"""Replacement of a recorded value, by its name and shape; None leaves the value."""


def trace_jax(
    side: Side, *, folder: str | Path | None = None, jit: bool = False, replace: Replace | None = None
) -> Trace:
    """Run a side's model and keep the result of each of its modules.

    Of a tuple or another structure, each leaf is recorded. Modules may stand in lists and run several times; loops
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
        replaced: dict[int, jax.Array] = {}
        for path, leaf in recorder.leaves(name, x):
            if not isinstance(leaf, jax.Array | np.ndarray):
                trace.add(path, leaf)
                continue
            kept = leaf if axes is None else jnp.transpose(leaf, axes)
            if isinstance(leaf, Tracer):
                report: Any = partial(_add, trace, path)
                jax.debug.callback(report, kept)
                continue
            entry = _add(trace, path, kept)
            other = None if replace is None else replace(entry, kept.shape)
            if other is not None:
                given = jnp.asarray(other).astype(leaf.dtype)
                replaced[id(leaf)] = given if axes is None else jnp.transpose(given, np.argsort(axes).tolist())
        return _with_replaced(x, replaced) if replaced else x

    recorder = Recorder(trace, record, inputs=side.inputs, without=side.without)
    args, kwargs = jax.tree.map(_to_jax, (side.args, dict(side.kwargs)))
    function = partial(side.run, side.model)
    # Unfused, so that each layer's result is there to be recorded.
    unfused = ops.use_unfused()
    with recording(recorder, side.watch), _patched(side.model, recorder), _unchanged(side.model), unfused:
        if jit:
            result = jax.jit(function)(args, kwargs)
            jax.effects_barrier()
        else:
            with jax.disable_jit():
                result = function(args, kwargs)
                jax.effects_barrier()
        record(OUTPUT, result, None)
    return trace


def run_compiled(side: Side, *, folder: str | Path | None = None) -> Trace:
    """Run a side's model as engines run it: as one compiled program, with the implementations that dispatch chooses.

    Operations may be fused, which a trace of each module excludes. The trace that is returned has the outputs only.

    Args:
        side: a Flax NNX module, or a function, and its call.
        folder: folder to write the outputs to; None keeps them in memory.
    """
    program, state, arrays = as_program(side)
    result = jax.jit(program, compiler_options=compiler_options(ops.target().platform))(state, arrays)
    trace = Trace(folder)
    for name, output in result.items():
        _add(trace, name, output)
    return trace


def as_program(
    side: Side, *, names: bool = False
) -> tuple[Callable[..., dict[str, jax.Array]], Any, dict[int, jax.Array]]:
    """A function of a module's state and the call's arrays to the outputs by their names, and both of its arguments.

    With `names`, operations have the paths of their modules as JAX's name scopes, each path after `SCOPE`.
    """
    leaf_list, treedef = jax.tree.flatten(jax.tree.map(_to_jax, (side.args, dict(side.kwargs))))
    arrays = {i: leaf for i, leaf in enumerate(leaf_list) if isinstance(leaf, jax.Array)}
    graph, state = nnx.split(side.model) if isinstance(side.model, nnx.Module) else (None, None)

    def program(state: Any, arrays: dict[int, jax.Array]) -> dict[str, jax.Array]:
        module = side.model if graph is None else nnx.merge(graph, state)
        recorder = Recorder(Trace(), lambda name, x, axes: x)
        with _patched(module, recorder) if names else contextlib.nullcontext():
            result = side.run(module, *treedef.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaf_list)]))
        arrays_only = (jax.Array, np.ndarray, int, float, complex)
        return {name: jnp.asarray(x) for name, x in leaves(result, OUTPUT) if isinstance(x, arrays_only)}

    return program, state, arrays


def gradients_jax(side: Side, cotangents: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients of the sum of `output * cotangent` by each float parameter, under the parameter's name.

    Args:
        cotangents: weights of each output of floats, by its name in the trace.
    """
    is_float = lambda path, x: isinstance(x, nnx.Param) and jnp.issubdtype(x.dtype, jnp.floating)
    graph, params, rest = nnx.split(side.model, is_float, ...)
    args, kwargs = jax.tree.map(_to_jax, (side.args, dict(side.kwargs)))

    def loss(params: Any) -> jax.Array:
        model = nnx.merge(graph, params, rest, copy=True)  # of which a run may change the rest
        outputs = dict(leaves(side.run(model, args, kwargs), OUTPUT))
        weighted = (jnp.vdot(outputs[name].astype(jnp.float32), weight) for name, weight in cotangents.items())
        return sum(weighted, jnp.float32(0))

    gradients = jax.jit(jax.grad(loss))(params)
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradients)}


def _add(trace: Trace, name: str, value: Any) -> str:
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return trace.add(name, np.asarray(jax.random.key_data(value) if is_key else value))


def _to_jax(x: Any) -> Any:
    """An array of JAX of NumPy's or PyTorch's; anything else unchanged."""
    if not isinstance(x, np.ndarray):
        if not hasattr(x, "detach"):
            return x
        x = to_numpy(x)
    array = jnp.asarray(x)
    if x.dtype.kind in "iu" and not np.array_equal(array, x):  # which JAX would take modulo 2**32
        raise InvalidParameterError(
            f"args: integers of {x.dtype} from {x.min()} to {x.max()} do not fit into JAX's {array.dtype}; take "
            "smaller ones, or set jax_enable_x64"
        )
    return array


def _with_replaced(x: Any, replaced: Mapping[int, Any]) -> Any:
    """A structure in which some leaves, by their ids, are others. Dataclasses need not be known to JAX."""

    def replace(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return replaced.get(id(leaf), leaf)
        other = copy.copy(leaf)
        for member in dataclasses.fields(leaf):
            object.__setattr__(other, member.name, _with_replaced(getattr(leaf, member.name), replaced))
        return other

    return jax.tree.map(replace, x)


@contextlib.contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Context after which a module has the state from before, such as means of batches, but for random streams."""
    is_module = isinstance(model, nnx.Module)
    # Mapped, since the state has the model's own variables.
    state = jax.tree.map(lambda x: x, nnx.state(model, nnx.Not(nnx.RngState))) if is_module else None
    try:
        yield
    finally:
        if state is not None:
            nnx.update(model, state)


@contextlib.contextmanager
def _patched(model: Any, recorder: Recorder) -> Iterator[None]:
    """Context in which the calls of the model's modules report to the recorder."""
    modules: dict[int, tuple[Any, str]] = {}
    if isinstance(model, nnx.Module):
        for path, node in nnx.iter_graph(model):
            if path and isinstance(node, nnx.Pytree) and callable(node):
                modules.setdefault(id(node), (node, ".".join(map(str, path))))
    running: list[int] = []

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = vars(self).get(_PATH)
            # A class that calls its parent's method is one module all the same.
            if path is None or (running and running[-1] == id(self)):
                return original(self, *args, **kwargs)
            running.append(id(self))
            try:
                with recorder.module(path), jax.named_scope(SCOPE + path):
                    if recorder.wants_input() and args:
                        args = (recorder.value("input", args[0]), *args[1:])
                    elif recorder.wants_input() and kwargs:
                        first = next(iter(kwargs))
                        kwargs[first] = recorder.value("input", kwargs[first])
                    result = original(self, *args, **kwargs)
                    return recorder.value("", result)
            finally:
                running.pop()

        return call

    with contextlib.ExitStack() as stack:
        for node, path in modules.values():
            vars(node)[_PATH] = path
            stack.callback(vars(node).pop, _PATH)
        for kind in dict.fromkeys(type(node) for node, _ in modules.values()):
            own = "__call__" in vars(kind)
            original = kind.__call__
            kind.__call__ = wrapped(original)
            if own:
                stack.callback(setattr, kind, "__call__", original)
            else:
                stack.callback(delattr, kind, "__call__")
        yield
