"""One function per operation, several forms behind it: chosen by platform, shape and dtype while tracing.

The plain form is short jnp code, runs everywhere, and is the oracle that tests hold every other form against.
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

__all__ = ["Form", "Operation", "operation", "operations", "use_forms"]

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("verax.ops")
_REGISTRY: dict[str, Operation[Any, Any]] = {}
# Forms forced by `use_forms`, by operation name. The environment variable gives the outermost choice.
_forced: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar("verax_forms", default=None)


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


@dataclass(frozen=True)
class Form(Generic[P, R]):
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
        """Whether this form exists for `platform` (`"cpu"`, `"gpu"`, `"tpu"`)."""
        return not self.platforms or platform in self.platforms


class Operation(Generic[P, R]):
    """A callable operation. Forms that are registered later are preferred over earlier ones."""

    def __init__(self, plain: Callable[P, R], slow_on: Mapping[str, str]):
        self.name = plain.__name__
        self.__doc__ = plain.__doc__
        self.__wrapped__ = plain
        self.forms: dict[str, Form[P, R]] = {"plain": Form("plain", plain, slow_on=slow_on)}
        self._warned: set[tuple[str, str]] = set()
        _REGISTRY[self.name] = self

    def form(
        self,
        name: str,
        *,
        platforms: tuple[str, ...] = (),
        accepts: Callable[..., bool] | None = _always,
        slow_on: Mapping[str, str] | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register a form under `name`; a decorator. With `accepts=None` only `use_forms` takes it."""

        def register(function: Callable[P, R]) -> Callable[P, R]:
            self.forms[name] = Form(name, function, platforms, accepts or _never, slow_on or {})
            return function

        return register

    def select(self, *args: P.args, **kwargs: P.kwargs) -> Form[P, R]:
        """The form that a call with these arguments runs, on JAX's default platform."""
        platform = jax.default_backend()
        forced = _forced_form(self.name)
        if forced is not None:
            if forced not in self.forms:
                raise InvalidParameterError(f"{self.name} has no form {forced!r}; it has {', '.join(self.forms)}")
            return self.forms[forced]
        chosen = next(f for f in reversed(self.forms.values()) if f.runs_on(platform) and f.accepts(*args, **kwargs))
        if platform in chosen.slow_on and (chosen.name, platform) not in self._warned:
            self._warned.add((chosen.name, platform))
            _log.warning("%s runs its %s form on %s: %s", self.name, chosen.name, platform, chosen.slow_on[platform])
        return chosen

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.select(*args, **kwargs).function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<operation {self.name}: {', '.join(self.forms)}>"


def operation(plain: Callable[P, R] | None = None, *, slow_on: Mapping[str, str] | None = None) -> Any:
    """Make an `Operation` of its plain form; a decorator, with or without arguments."""
    if plain is not None:
        return Operation(plain, slow_on or {})
    return lambda function: Operation(function, slow_on or {})


def operations() -> Mapping[str, Operation[Any, Any]]:
    """Every operation by name."""
    return dict(sorted(_REGISTRY.items()))


def _forced_form(name: str) -> str | None:
    choices = _forced.get()
    if choices is None:
        choices = _parse_choices(os.environ.get("VERAX_FORMS", ""))
    return choices.get(name)


def _parse_choices(text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",") if item]
    for name, equals, _ in pairs:
        if not equals or name.strip() not in _REGISTRY:
            raise InvalidParameterError(
                f"VERAX_FORMS={text!r}: expected operation=form pairs such as linear=plain; operations are "
                f"{', '.join(sorted(_REGISTRY))}"
            )
    return {name.strip(): form.strip() for name, _, form in pairs}


@contextlib.contextmanager
def use_forms(**choices: str) -> Iterator[None]:
    """Run operations in named forms: `with use_forms(linear="plain"): ...`. The choice is made while tracing.

    Raises:
        InvalidParameterError: for an operation or a form that does not exist.
    """
    for name, form in choices.items():
        if name not in _REGISTRY:
            raise InvalidParameterError(f"{name!r} is no operation; there are {', '.join(sorted(_REGISTRY))}")
        if form not in _REGISTRY[name].forms:
            raise InvalidParameterError(f"{name} has no form {form!r}; it has {', '.join(_REGISTRY[name].forms)}")
    outer = _forced.get()
    if outer is None:
        outer = _parse_choices(os.environ.get("VERAX_FORMS", ""))
    token = _forced.set({**outer, **choices})
    try:
        yield
    finally:
        _forced.reset(token)
