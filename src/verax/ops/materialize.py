"""Arrays that a compiler has to keep in memory, where it would rather compute them again from their parts."""

from __future__ import annotations

from jax import lax
from jaxtyping import Array, Float

from verax.ops._dispatch import operation
from verax.ops._example import Example, float32

__all__ = ["materialize"]


@operation
def materialize(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """`x` itself, to be called on the residual stream between the blocks of a deep model."""
    return x


# XLA:TPU fuses the sum `x + branch(x)` into each of its readers, the sum of the next block among them. So every term
# of the residual stream stays in memory until the last block, where one fusion adds all of them up: two float32 arrays
# of its size a block, 11 GiB for Wan 1.3B with 81 frames of 480 x 832. XLA:CPU and XLA:GPU keep the sum.
@materialize.implementation("barrier", platforms=("tpu",))
def _barrier(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    return lax.optimization_barrier(x)


@materialize.example
def _examples() -> list[Example]:
    return [Example((float32(4, 1024),))]
