"""Search for the operation in which the first NaN or infinity of a run arises, in JAX and in PyTorch.

Both sides run once more, one operation at a time. An operation is the origin if its inputs are finite and its result is
not, or if its result has a NaN and its inputs have none. One with a constant that is not finite, such as the -inf of a
mask, is taken only if there is no other. Of several, the first within the layer counts whose recorded output is not
finite.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import eval_jaxpr

from verax import ops
from verax.compare.case import Side
from verax.compare.comparison import Origin, kind_of, not_finite
from verax.compare.jax_side import SCOPE, as_program
from verax.compare.torch_side import hook_modules, to_numpy, to_torch, torch
from verax.compare.trace import OUTPUT, Trace, split_call, split_leaf

CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat")
"""Operations of JAX that only call a function, whose own operations are looked at."""

UNINITIALISED = ("empty", "new_empty")
"""Beginnings of names of PyTorch's functions whose results are whatever lies in memory."""

Candidate = tuple[str, str, bool]
"""Path of a module, an operation that made something not finite there, and whether a constant was not finite before."""

State = tuple[bool, bool]
"""True if an array has NaN, and True if it has infinities."""


def origin_jax(side: Side, trace: Trace) -> Origin | None:
    """Origin of the first NaN or infinity of our side; None if all of the trace is finite."""
    program, state, arrays = as_program(side, names=True)
    with ops.use_unfused(), jax.disable_jit():
        jaxpr = jax.make_jaxpr(program)(state, arrays)
    weights = [] if state is None else [(".".join(map(str, p)), v[...]) for p, v in nnx.to_flat_state(state)]
    candidates = _evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves((state, arrays)))
    return _origin(trace, candidates, weights, arrays.values())


def origin_torch(side: Side, trace: Trace) -> Origin | None:
    """Origin of the first NaN or infinity of the reference; None if all of the trace is finite."""
    lib = torch()
    found: list[Candidate] = []
    running = [""]

    def leave(*_: Any) -> None:
        running.pop()

    class Watching(lib.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            inputs = list(_numbers((args, kwargs)))
            tensors = [_state(x) for x in inputs if isinstance(x, lib.Tensor)]  # before the call, which may change them
            constants = [_state(x) for x in inputs if not isinstance(x, lib.Tensor)]
            result = function(*args, **(kwargs or {}))
            name = getattr(function, "__name__", str(function))
            if tensors and not name.startswith(UNINITIALISED):
                found.extend(_arose(running[-1], name, tensors, constants, map(_state, _numbers(result))))
            return result

    args, kwargs = to_torch(side.args), to_torch(side.kwargs)
    with ExitStack() as stack, lib.no_grad(), Watching():
        hook_modules(side.model, stack, lambda path, *_: running.append(path), leave)
        side.run(side.model, args, kwargs)
    weights = side.model.state_dict().items() if isinstance(side.model, lib.nn.Module) else ()
    return _origin(trace, found, weights, _numbers((args, kwargs)))


def _origin(
    trace: Trace, candidates: Iterable[Candidate], weights: Iterable[tuple[str, Any]], inputs: Iterable[Any]
) -> Origin | None:
    layer = next((name for name in trace if not_finite(trace[name])), None)
    if layer is None:
        return None
    path = split_leaf(split_call(layer)[0])[0]
    within = lambda outer, name: not outer or f"{name}.".startswith(f"{outer}.")
    given = [(name, f"the weight {name}") for name, x in weights if any(_state(x))]
    given += [("", "the inputs of the call") for x in inputs if any(_state(x))]
    made = [
        (
            module,
            f"the operation {operation}"
            + (f" in {module}" if module else "")
            + (" with a constant that is not finite" if of_constant else ""),
        )
        for module, operation, of_constant in sorted(candidates, key=lambda one: one[2])
    ]
    # What the layer itself did comes first, then what it has, and then what the modules around it did before.
    inside = [text for module, text in made if module and within(path, module)]
    own = [text for name, text in given if name and within(path, name)]
    around = [text for module, text in made if within(module, path) or path == OUTPUT]
    known = (*inside, *own, *around, *(text for _, text in (*given, *made)))
    return Origin(layer, next(iter(known), "an operation that could not be seen"))


def _arose(
    path: str, operation: str, arrays: Iterable[State], constants: Iterable[State], results: Iterable[State]
) -> Iterator[Candidate]:
    """The operation, if it made a NaN of arrays that have none, or an infinity of finite ones."""
    given, fixed, made = (tuple(map(any, zip(*states, strict=True))) for states in (arrays, constants, results))
    if given and made and not given[0] and (made[0] or (made[1] and not given[1])):
        yield path, operation, any(fixed)


def _state(x: Any) -> State:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return False, False
    array = to_numpy(x) if hasattr(x, "detach") else np.asarray(x)
    if kind_of(array.dtype.name) not in ("float", "complex"):
        return False, False
    return bool(np.isnan(array).any()), bool(np.isinf(array).any())


def _numbers(x: Any) -> Iterator[Any]:
    """Tensors and floats of nested arguments or results of PyTorch."""
    if isinstance(x, Mapping):
        x = tuple(x.values())
    if isinstance(x, tuple | list):
        for member in x:
            yield from _numbers(member)
    elif isinstance(x, float | complex | torch().Tensor):
        yield x


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], path: str = ""
) -> Generator[Candidate, None, Any]:
    """Run a jaxpr, operation by operation, and give those that made something not finite. Returns its results."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
    is_literal = lambda var: hasattr(var, "val")
    last = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.invars if not is_literal(var)}
    read = lambda var: var.val if is_literal(var) else values[var]
    for i, eqn in enumerate(jaxpr.eqns):
        inputs, name = [read(var) for var in eqn.invars], eqn.primitive.name
        modules = [scope for scope in str(eqn.source_info.name_stack).split("/") if scope.startswith(SCOPE)]
        here = modules[-1].removeprefix(SCOPE) if modules else path
        inner = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)
        if name in CALLS and inner is not None:
            closed = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            results = yield from _evaluate(*closed, inputs, here)
        else:
            given = dict.fromkeys(var for var in eqn.invars if not is_literal(var))
            alone = jaxpr.replace(constvars=[], invars=list(given), outvars=eqn.outvars, eqns=[eqn])
            results = eval_jaxpr(alone, [], *map(read, given))
            operation = " ".join(filter(None, (name, eqn.params.get("target_name"))))
            fixed = [_state(var.val) for var in eqn.invars if is_literal(var)]
            yield from _arose(here, operation, [_state(values[var]) for var in given], fixed, map(_state, results))
        values |= dict(zip(eqn.outvars, results, strict=True))
        for var in eqn.invars:
            if not is_literal(var) and last[var] == i and var not in jaxpr.outvars:
                values.pop(var, None)
    return [read(var) for var in jaxpr.outvars]
