"""Derivatives of kernels that have none of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

__all__ = ["differentiated_as"]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def differentiated_as(reference: Callable[..., Any], kernel: Callable[..., Any], *args: Any) -> Any:
    """`kernel(*args)`, whose derivative is that of `reference(*args)`.

    Args:
        reference: function with the kernel's results, which JAX differentiates.
        kernel: function that it does not.
        args: arguments of both.
    """
    return kernel(*args)


@differentiated_as.defjvp
def _jvp(
    reference: Callable[..., Any], kernel: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Any, Any]:
    return differentiated_as(reference, kernel, *primals), jax.jvp(reference, primals, tangents)[1]
