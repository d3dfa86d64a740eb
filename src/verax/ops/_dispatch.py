"""One function per operation, several implementations under it, chosen by target, shape and dtype while tracing.

The reference is short jnp code, runs everywhere, and is the oracle that tests hold every other implementation against.
An implementation becomes a function of the program, which equal calls share, such as the calls of a model's layers.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import logging
import math
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, Generic, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from verax.errors import InvalidParameterError
from verax.ops._target import Target, check_platform, target, target_key


@dataclass(frozen=True)
class Example:
    """Arguments of a call, arrays as `jax.ShapeDtypeStruct`.

    Attributes:
        args, kwargs: the call's.
        label: what distinguishes it from the operation's other examples, such as `"1 row"`.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""


def _array(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


float32, bfloat16, int32, boolean = (partial(_array, x) for x in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_))
"""Functions from sizes to an array's shape and dtype, for examples."""

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = (bool, int, float, complex, str, bytes, np.dtype, np.generic, type)
"""Types of arguments that are not arrays and whose equal values have equal programs."""


MAX_SHARED = 512
"""Functions and contexts whose traces are kept: eight contexts of all implementations that exist. JAX drops the traces
of a function that is dropped here."""


class _Array:
    """Mark in the place of an argument that is an array."""


def trace_once(function: Callable[P, R], context: Hashable, /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Result of a call, which while tracing becomes a function of the program, shared by all equal calls.

    Calls are equal if their arrays have equal shapes and dtypes, and their other arguments and contexts are equal. XLA
    inlines such functions. Calls without an array that is traced, and those with arguments of other types than arrays
    and plain values, are not shared.

    `function`: a function of its arguments and of `context` alone. `context`: everything else that its program depends
    on.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    others = tuple(_Array if isinstance(leaf, jax.Array) else leaf for leaf in leaves)
    if not any(isinstance(one, Tracer) for one in arrays) or not all(isinstance(x, _PLAIN) for x in others):
        return function(*args, **kwargs)
    # Equal values of different types, such as 1 and 1.0, have programs of their own.
    types = tuple(type(other) for other in others)
    padding = _padding.get()
    if padding is None:
        return _shared(function, context)(structure, others, types, *arrays)
    return _shared(function, context, padding.rows)(structure, others, types, padding.used, *arrays)


def drop_traces() -> None:
    """Drop all traces of implementations. Compiled programs stay; the next one is traced in full."""
    _shared.cache_clear()


@functools.lru_cache(maxsize=MAX_SHARED)
def _shared(function: Callable[..., R], context: Hashable, rows: tuple[int, ...] | None = None) -> Callable[..., R]:
    """Function of arrays in one context, under `jax.jit`; its name is what profiles show.

    `rows`: of `skip_padding`, if it is in force; the first array is then its `used`.
    """

    def run(structure: Any, others: tuple[Any, ...], types: Any, *arrays: jax.Array) -> R:
        given = iter(arrays)
        with contextlib.nullcontext() if rows is None else skip_padding(rows, next(given)):
            args, kwargs = jax.tree.unflatten(structure, [next(given) if x is _Array else x for x in others])
            return function(*args, **kwargs)

    run.__name__ = run.__qualname__ = getattr(function, "__name__", "implementation").strip("_")
    return jax.jit(run, static_argnums=(0, 1, 2))


class _Padding(NamedTuple):
    rows: tuple[int, ...]
    used: jax.Array


_padding: contextvars.ContextVar[_Padding | None] = contextvars.ContextVar("verax_padding", default=None)
_padding_key = jax.make_user_context()


@contextlib.contextmanager
def skip_padding(rows: tuple[int, ...], used: jax.Array) -> Iterator[None]:
    """Let products leave out rows of padding, which come after all others. It acts while tracing.

    On one CPU, C++ kernels leave them out: these rows of their results are zeros.

    Args:
        rows: axes of the inputs that have padding but for the last, such as `(1, T)`. Other inputs have none.
        used: int32 `[]`, number of rows that are not padding.
    """
    if target().platform != "cpu" or target().num_devices > 1 or math.prod(rows) == 1:
        yield
        return
    token = _padding.set(_Padding(rows, used))
    try:
        # JAX must not take what it has traced with another `used`.
        with _padding_key(object()):
            yield
    finally:
        _padding.reset(token)


def used_rows(rows: tuple[int, ...]) -> jax.Array | np.ndarray:
    """Number of rows that are not padding, int32 `[1]`, for kernels that leave out the others; `[0]` if all count."""
    padding = _padding.get()
    if padding is None or padding.rows != rows:
        return np.zeros(0, np.int32)  # not traced: kernels that are differentiated may close over it
    return padding.used.reshape(1)


Choice = str | Callable[..., Any]
"""An implementation's name, or a function in the place of one."""

REFERENCE = "reference"

_log = logging.getLogger("verax.ops")
_REGISTRY: dict[str, Operation[Any, Any]] = {}
# Implementations forced by `use_implementations`, by operation name; the environment variable is the outermost choice.
_forced: contextvars.ContextVar[Mapping[str, Choice] | None] = contextvars.ContextVar(
    "verax_implementations", default=None
)
# JAX keeps what it has traced by function: the choices must be part of its key.
_choices_key = jax.make_user_context()


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _has_arrays_of_one_device() -> bool:
    """True inside `jax.shard_map` over all axes of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and len(mesh.manual_axes) == len(mesh.axis_names)


@dataclass(frozen=True)
class Implementation(Generic[P, R]):
    """Implementation of an operation.

    Attributes:
        name: its name within the operation.
        function: the implementation, with the operation's signature.
        platforms: where it runs; empty: everywhere.
        single_device: True if it takes arrays of one device only: on a target of one device, or inside `jax.shard_map`
            over all axes of a mesh. XLA's partitioner divides products over devices, but not a kernel that it cannot
            look into.
        available: condition on the installation, such as a library that loads; checked after `accepts`.
        accepts: condition on shapes and dtypes of a call without which it fails or gives another result.
        faster: condition on shapes under which it is preferred. A choice by name does not ask for it.
        traits: properties that `Operation.restricted` selects by, see `Operation.implementation`.
        slow_on: by platform, the reason why being chosen there deserves a warning.
        experimental: True if it was compiled for its devices, but none of them has shown it to be faster: it is chosen
            only where `use_implementations` names it, and another one takes the calls that it does not support.
        is_pure: True if equal calls have equal programs, so that JAX traces and lowers one of them for all: what the
            program depends on in addition to the arguments is the target, the choices in force and what is registered.
    """

    name: str
    function: Callable[P, R]
    platforms: tuple[str, ...] = ()
    single_device: bool = False
    available: Callable[[], bool] = _always
    accepts: Callable[..., bool] = _always
    faster: Callable[..., bool] = _always
    traits: Set[str] = frozenset()
    slow_on: Mapping[str, str] = field(default_factory=dict)
    experimental: bool = False
    is_pure: bool = True

    @property
    def is_reference(self) -> bool:
        """True for the operation's reference."""
        return self.name == REFERENCE

    def runs_on(self, target: Target) -> bool:
        """True if this implementation exists for `target`."""
        return (not self.platforms or target.platform in self.platforms) and (
            not self.single_device or target.num_devices == 1 or _has_arrays_of_one_device()
        )

    def supports(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """True if this implementation can run a call with these arguments on the current target."""
        if not (self.runs_on(target()) and self.accepts(*args, **kwargs)):
            return False
        return self.faster(*args, **kwargs) and self.available()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.is_pure:
            return self.function(*args, **kwargs)
        return trace_once(self.function, tracing_context(), *args, **kwargs)


class Operation(Generic[P, R]):
    """Callable operation. Implementations that are registered later are preferred over earlier ones.

    Attributes:
        name: the reference's name.
        reference: the reference, a function.
        implementations: all of them by name, the reference first.
        fused: True if the operation does the work of several layers at once, see `use_unfused`.
        check: function of a call's arguments that raises for those that no implementation takes, before one is chosen.
        examples: typical calls, which `verax info` shows the choice for.
    """

    num_registered: ClassVar[int] = 0
    """Implementations of all operations that were registered so far, those that were replaced since included."""

    def __init__(
        self,
        reference: Callable[P, R],
        *,
        slow_on: Mapping[str, str] | None = None,
        fused: bool = False,
        check: Callable[..., None] | None = None,
    ):
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.reference = self.__wrapped__ = reference
        self.fused = fused
        self.check = check
        self.implementations: dict[str, Implementation[P, R]] = {}
        self.examples: Sequence[Example] = ()
        self._warned: set[tuple[str, str]] = set()
        self._trait: str | None = None
        self._is_restricted = False
        self.implementation(REFERENCE, slow_on=slow_on or {})(reference)
        _REGISTRY[self.name] = self

    def implementation(self, name: str, **properties: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register an implementation under `name`; a decorator. The properties are `Implementation`'s.

        The trait in use is `"flash"`, of attention: scores are never written to memory.

        Raises:
            InvalidParameterError: for a platform that JAX does not have.
        """

        def register(function: Callable[P, R]) -> Callable[P, R]:
            implementation = Implementation(name, function, **properties)
            for platform in (*implementation.platforms, *implementation.slow_on):
                check_platform(f"{self.name}, implementation {name!r}, platforms", platform)
            self.implementations[name] = implementation
            Operation.num_registered += 1
            return function

        return register

    def select(self, *args: P.args, **kwargs: P.kwargs) -> Implementation[P, R]:
        """Implementation that a call with these arguments runs on the current target.

        That is the one that `use_implementations` names if it accepts the call, and otherwise the preferred one of
        those that support it and are not experimental. An experimental one has to support the call as well.

        Raises:
            InvalidParameterError: if there is none among those that the operation is restricted to.
        """
        forced = None if self._is_restricted else _choices_in_force().get(self.name)
        if callable(forced):
            return Implementation(getattr(forced, "__name__", "given"), forced, is_pure=False)
        chosen = None if forced is None else self.implementations[forced]
        if chosen is not None and (chosen.supports if chosen.experimental else chosen.accepts)(*args, **kwargs):
            return chosen
        for impl in reversed(self.implementations.values()):
            fits = self._trait is None or self._trait in impl.traits
            if fits and not impl.experimental and impl.supports(*args, **kwargs):
                self._warn_if_slow(impl)
                return impl
        arrays: list[Any] = [x for x in args if hasattr(x, "shape") and hasattr(x, "dtype")]
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)
        raise InvalidParameterError(
            f"{self.name} has no implementation ({self._trait}) on {target().platform} for {shapes}; "
            f"it has {', '.join(self.implementations)}"
        )

    def restricted(self, trait: str | None = None) -> Operation[P, R]:
        """Operation restricted to the implementations of a trait, or, of None, to those that are not experimental.

        Choices by name (`use_implementations`) do not reach it.
        """
        operation = copy.copy(self)
        operation._trait, operation._is_restricted = trait, True
        return operation

    def supporting(self, *args: P.args, **kwargs: P.kwargs) -> list[Implementation[P, R]]:
        """Implementations that can run a call with these arguments on the current target, the preferred one first."""
        return [impl for impl in reversed(self.implementations.values()) if impl.supports(*args, **kwargs)]

    def _warn_if_slow(self, chosen: Implementation[P, R]) -> None:
        platform = target().platform
        if platform in chosen.slow_on and (chosen.name, platform) not in self._warned:
            self._warned.add((chosen.name, platform))
            _log.warning(
                "%s runs its %s implementation on %s: %s", self.name, chosen.name, platform, chosen.slow_on[platform]
            )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.check is not None:
            self.check(*args, **kwargs)
        return self.select(*args, **kwargs)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operation {self.name}: {', '.join(self.implementations)}>"


def operation(
    reference: Callable[P, R] | None = None,
    *,
    slow_on: Mapping[str, str] | None = None,
    fused: bool = False,
    check: Callable[..., None] | None = None,
) -> Any:
    """Make an `Operation` of its reference; a decorator, with or without arguments.

    Args:
        slow_on: by platform, the reason why running the reference there deserves a warning.
        fused: True if the operation does the work of several layers at once.
        check: function of a call's arguments that raises for those that no implementation takes.
    """
    make = partial(Operation, slow_on=slow_on, fused=fused, check=check)
    return make if reference is None else make(reference)


def operations() -> Mapping[str, Operation[Any, Any]]:
    """Every operation by name."""
    return dict(sorted(_REGISTRY.items()))


def chosen_implementations() -> dict[str, dict[str, Any]]:
    """Implementation that each operation runs for its examples (`"-"` without any), and the others that exist."""
    result: dict[str, dict[str, Any]] = {}
    for name, op in operations().items():
        chosen = [(example.label, op.select(*example.args, **example.kwargs).name) for example in op.examples]
        shown = ", ".join(f"{impl} ({label})" if label else impl for label, impl in chosen)
        used = {impl for _, impl in chosen}
        result[name] = {"runs": shown or "-", "others": [impl for impl in op.implementations if impl not in used]}
    return result


def tracing_context() -> Hashable:
    """Everything in addition to a call's arguments that the choice of implementations depends on.

    Programs that were traced within equal contexts are equal.
    """
    return target(), frozenset(_choices_in_force().items()), Operation.num_registered


def _choices_in_force() -> Mapping[str, Choice]:
    choices = _forced.get()
    return _parse_choices(os.environ.get("VERAX_IMPLEMENTATIONS", "")) if choices is None else choices


def _parse_choices(text: str) -> dict[str, Choice]:
    choices: dict[str, Choice] = {}
    for item in filter(str.strip, text.split(",")):
        name, equals, implementation = (part.strip() for part in item.partition("="))
        if not equals:
            raise InvalidParameterError(
                f"VERAX_IMPLEMENTATIONS={text!r}: expected operation=implementation pairs such as linear=reference"
            )
        _check_choice(f"VERAX_IMPLEMENTATIONS={text!r}: ", name, implementation)
        choices[name] = implementation
    return choices


def _check_choice(where: str, name: str, implementation: str) -> None:
    if name not in _REGISTRY:
        known = ", ".join(sorted(_REGISTRY))
        raise InvalidParameterError(f"{where}{name!r} is not an operation; the operations are {known}")
    if implementation not in _REGISTRY[name].implementations:
        raise InvalidParameterError(
            f"{where}{name} has no implementation {implementation!r}; "
            f"it has {', '.join(_REGISTRY[name].implementations)}"
        )


@contextlib.contextmanager
def use_implementations(**choices: Choice) -> Iterator[None]:
    """Select implementations: `with use_implementations(linear="reference"): ...`. It acts while tracing.

    A function under `jax.jit` is traced again where it was traced with other choices.

    Args:
        choices: by operation, the name of an implementation, which runs the calls that it accepts, faster there or
            not; or a function with the operation's signature, which then runs in the operation's place. No registry
            keeps it.

    Raises:
        InvalidParameterError: for an operation or an implementation that does not exist.
    """
    for name, choice in choices.items():
        _check_choice("", name, REFERENCE if callable(choice) else choice)
    in_force = {**_choices_in_force(), **choices}
    token = _forced.set(in_force)
    try:
        with _choices_key(frozenset(in_force.items())):
            yield
    finally:
        _forced.reset(token)


@contextlib.contextmanager
def use_earlier_programs() -> Iterator[None]:
    """Call programs that were traced outside of the choices and the target in force, without tracing them again."""
    with _choices_key(None), target_key(None):
        yield


def use_unfused() -> AbstractContextManager[None]:
    """Run the work of several layers layer by layer, for those who look at each layer's result. It acts while tracing.

    The references of all operations that are registered with `fused=True` are selected.
    """
    return use_implementations(**{name: REFERENCE for name, op in _REGISTRY.items() if op.fused})


def check_axes(**given: jax.Array) -> None:
    """Raise `InvalidParameterError` for the first array that is not `[B, T, heads, size]`."""
    for name, array in given.items():
        if getattr(array, "ndim", None) != 4:
            raise InvalidParameterError(f"{name}: expected shape [B, T, heads, size], got {_shape_of(array)}")


def check_shapes(**given: tuple[Any, Sequence[int]]) -> None:
    """Raise `InvalidParameterError` for the first argument of another shape than expected; None is never wrong."""
    for name, (array, expected) in given.items():
        shape = getattr(array, "shape", None)
        if array is not None and (shape is None or tuple(shape) != tuple(expected)):
            raise InvalidParameterError(f"{name}: expected shape {list(expected)}, got {_shape_of(array)}")


def check_integers(**given: Any) -> None:
    """Raise `InvalidParameterError` for the first argument that is not an array of integers; None is never wrong."""
    for name, array in given.items():
        dtype = getattr(array, "dtype", None)
        if array is not None and (dtype is None or not jnp.issubdtype(dtype, jnp.integer)):
            raise InvalidParameterError(f"{name}: expected an array of integers, got {dtype or type(array).__name__}")


def check_count(**given: Any) -> None:
    """Raise `InvalidParameterError` for the first argument that is not a whole number of at least 1."""
    for name, value in given.items():
        if not isinstance(value, Integral) or value < 1:
            raise InvalidParameterError(f"{name}: expected at least 1, a whole number, got {value!r}")


def _shape_of(array: Any) -> str:
    return str(list(array.shape)) if hasattr(array, "shape") else f"a {type(array).__name__}, which is not an array"


# A kernel has no derivative. The rules below stand in for it, and take every array as an argument: a function must not
# close over an array that JAX differentiates.
@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def differentiated_as(reference: Callable[..., Any], kernel: Callable[..., Any], *args: Any) -> Any:
    """`kernel(*args)`, differentiated as `reference(*args)`.

    `reference`: function with the kernel's results, which JAX differentiates. `kernel`: function that it does not.
    `args`: arguments of both.
    """
    return kernel(*args)


@differentiated_as.defjvp
def _jvp(
    reference: Callable[..., Any], kernel: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, Any]:
    return differentiated_as(reference, kernel, *primals), jax.jvp(reference, primals, tangents)[1]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def replaced_by(reference: Callable[..., Any], kernel: Callable[..., Any], *args: Any) -> Any:
    """`kernel(*args)`; where a derivative is taken, value and derivative of `reference(*args)`.

    This is `differentiated_as` for functions whose derivative needs what the value is made of, such as a softmax.
    """
    return kernel(*args)


@replaced_by.defjvp
def _replaced_jvp(
    reference: Callable[..., Any], kernel: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, Any]:
    return jax.jvp(reference, primals, tangents)


def vary_alike(arrays: R) -> R:
    """Pytree of arrays that all differ between the devices between which one of them does.

    `jax.shard_map` follows by types which arrays differ (`check_vma=True`, its default). It refuses loops whose carry
    begins alike on all devices and then differs, and takes results of kernels for alike.
    """
    axes = frozenset[str]().union(*(jax.typeof(array).mat.varying for array in jax.tree.leaves(arrays)))
    if not axes:
        return arrays

    def vary(array: jax.Array) -> jax.Array:
        missing = axes - jax.typeof(array).mat.varying
        return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array

    return jax.tree.map(vary, arrays)
