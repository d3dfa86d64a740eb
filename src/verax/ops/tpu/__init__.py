"""Implementations for TPUs: JAX's own and kernels in Pallas, chosen by name until a device has run them.

Modules of Pallas are imported when a kernel is traced: they take half a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from verax._optional import Deferred

pl: Any = Deferred("jax.experimental.pallas")
pltpu: Any = Deferred("jax.experimental.pallas.tpu")

KERNEL: Mapping[str, Any] = {"platforms": ("tpu",), "single_device": True, "experimental": True}
"""Properties of the implementations in Pallas: one device's arrays, and never chosen but by name."""


def product(x: Array, y: Array, axes: tuple[int, int] = (1, 0)) -> Array:
    """Product of two matrices over one axis of each, in float32; of float32 numbers exact but for its sums."""
    return lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
