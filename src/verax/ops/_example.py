"""Typical calls of operations: shapes and dtypes, which the choice of an implementation depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["Example", "bfloat16", "boolean", "float32", "int32"]


@dataclass(frozen=True)
class Example:
    """Arguments of a call, arrays as `jax.ShapeDtypeStruct`.

    Attributes:
        args, kwargs: the call's.
        label: what distinguishes it from the operation's other examples, such as `"1 row"`.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    label: str = ""


def float32(*shape: int) -> Any:
    """An array's shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bfloat16(*shape: int) -> Any:
    """An array's shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def int32(*shape: int) -> Any:
    """An array's shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def boolean(*shape: int) -> Any:
    """An array's shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.bool_)
