"""C++ kernel of `ops.gelu`: vectors as wide as the processor has, where XLA takes half of AVX-512's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from verax.ops.activations import gelu
from verax.ops.cpu import library

__all__: list[str] = []


def _accepts(x: Any) -> bool:
    return x.dtype == jnp.float32


@jax.custom_jvp
def _gelu(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    return library.call("verax_gelu", x.shape, x)


@_gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _gelu(*primals), jax.jvp(gelu.reference, primals, tangents)[1]


@gelu.implementation("native", **library.REQUIREMENTS, accepts=_accepts)
def _gelu_native(x: Float[Array, "*N"]) -> Float[Array, "*N"]:
    return _gelu(x)
