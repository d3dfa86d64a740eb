"""One function per operation, several implementations behind it: chosen by platform, shape and dtype while tracing.

The reference is short jnp code, runs everywhere, and is the oracle that tests hold every other implementation against.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from verax.errors import InvalidParameterError

__all__ = ["Implementation", "Operation", "operation", "operations", "use_implementations"]

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("verax.ops")
_REGISTRY: dict[str, Operation[Any, Any]] = {}
# Implementations forced by `use_implementations`, by operation name; the environment variable is the outermost choice.
_forced: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "verax_implementations", default=None
)


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


@dataclass(frozen=True)
class Implementation(Generic[P, R]):
    """One implementation of an operation.

    `platforms` is where it may run (empty: everywhere); `accepts` looks at shapes and dtypes of the call; `slow_on`
    maps a platform to the reason why being chosen there deserves a warning.
    """

    name: str
    function: Callable[P, R]
    platforms: tuple[str, ...] = ()
    accepts: Callable[..., bool] = _always
    slow_on: Mapping[str, str] = field(default_factory=dict)

    def runs_on(self, platform: str) -> bool:
        """Whether this implementation exists for `platform` (`"cpu"`, `"gpu"`, `"tpu"`)."""
        return not self.platforms or platform in self.platforms


class Operation(Generic[P, R]):
    """A callable operation. Implementations that are registered later are preferred over earlier ones."""

    def __init__(self, reference: Callable[P, R], slow_on: Mapping[str, str]):
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.__wrapped__ = reference
        self.implementations: dict[str, Implementation[P, R]] = {
            "reference": Implementation("reference", reference, slow_on=slow_on)
        }
        self._warned: set[tuple[str, str]] = set()
        _REGISTRY[self.name] = self

    def implementation(
        self,
        name: str,
        *,
        platforms: tuple[str, ...] = (),
        accepts: Callable[..., bool] | None = _always,
        slow_on: Mapping[str, str] | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register an implementation under `name`; a decorator. With `accepts=None` only its name selects it."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self.implementations[name] = Implementation(name, function, platforms, accepts or _never, slow_on or {})
            return function

        return register

    def select(self, *args: P.args, **kwargs: P.kwargs) -> Implementation[P, R]:
        """The implementation that a call with these arguments runs, on JAX's default platform."""
        platform = jax.default_backend()
        forced = _forced_implementation(self.name)
        if forced is not None:
            if forced not in self.implementations:
                raise InvalidParameterError(
                    f"{self.name} has no implementation {forced!r}; it has {', '.join(self.implementations)}"
                )
            return self.implementations[forced]
        chosen = next(
            f for f in reversed(self.implementations.values()) if f.runs_on(platform) and f.accepts(*args, **kwargs)
        )
        if platform in chosen.slow_on and (chosen.name, platform) not in self._warned:
            self._warned.add((chosen.name, platform))
            _log.warning(
                "%s runs its %s implementation on %s: %s", self.name, chosen.name, platform, chosen.slow_on[platform]
            )
        return chosen

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.select(*args, **kwargs).function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operation {self.name}: {', '.join(self.implementations)}>"


def operation(reference: Callable[P, R] | None = None, *, slow_on: Mapping[str, str] | None = None) -> Any:
    """Make an `Operation` of its reference; a decorator, with or without arguments."""
    if reference is not None:
        return Operation(reference, slow_on or {})
    return lambda function: Operation(function, slow_on or {})


def operations() -> Mapping[str, Operation[Any, Any]]:
    """Every operation by name."""
    return dict(sorted(_REGISTRY.items()))


def _forced_implementation(name: str) -> str | None:
    choices = _forced.get()
    if choices is None:
        choices = _parse_choices(os.environ.get("VERAX_IMPLEMENTATIONS", ""))
    return choices.get(name)


def _parse_choices(text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",") if item]
    for name, equals, _ in pairs:
        if not equals or name.strip() not in _REGISTRY:
            raise InvalidParameterError(
                f"VERAX_IMPLEMENTATIONS={text!r}: expected operation=implementation pairs such as "
                f"linear=reference; operations are {', '.join(sorted(_REGISTRY))}"
            )
    return {name.strip(): implementation.strip() for name, _, implementation in pairs}


@contextlib.contextmanager
def use_implementations(**choices: str) -> Iterator[None]:
    """Select implementations by name: `with use_implementations(linear="reference"): ...`. It acts while tracing.

    Raises:
        InvalidParameterError: for an operation or an implementation that does not exist.
    """
    for name, implementation in choices.items():
        if name not in _REGISTRY:
            raise InvalidParameterError(f"{name!r} is no operation; there are {', '.join(sorted(_REGISTRY))}")
        if implementation not in _REGISTRY[name].implementations:
            raise InvalidParameterError(
                f"{name} has no implementation {implementation!r}; it has {', '.join(_REGISTRY[name].implementations)}"
            )
    outer = _forced.get()
    if outer is None:
        outer = _parse_choices(os.environ.get("VERAX_IMPLEMENTATIONS", ""))
    token = _forced.set({**outer, **choices})
    try:
        yield
    finally:
        _forced.reset(token)
