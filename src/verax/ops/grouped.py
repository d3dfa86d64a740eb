"""`y = x W[g]^T`: each row by the matrix of its group, as a mixture of experts multiplies tokens."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from verax.errors import InvalidParameterError
from verax.ops._dispatch import Example, bfloat16, check_integers, float32, int32, operation
from verax.ops.linear import linear
from verax.ops.quantized import QuantizedWeight

Stack = Float[Array, "E F D"] | QuantizedWeight


def _check(x: Any, weights: Any, groups: Any) -> None:
    stack, inputs = getattr(weights, "shape", ()), getattr(x, "shape", ())
    if len(stack) != 3 or stack[0] == 0 or inputs[-1:] != stack[2:]:
        raise InvalidParameterError(
            f"weights: expected [E, F, D] for x [..., D], got {list(stack)} for {list(np.shape(x))}"
        )
    check_integers(groups=groups)
    try:
        np.broadcast_shapes(inputs[:-1], groups.shape)
    except ValueError:
        raise InvalidParameterError(
            f"groups: expected a shape that fits the rows {list(inputs[:-1])} of x, got {list(groups.shape)}"
        ) from None


@operation(check=_check)
def grouped_linear(x: Float[Array, "*#B D"], weights: Stack, groups: Int[Array, "*#B"]) -> Float[Array, "*B F"]:
    """`linear(x[i], weights[groups[i]])` for each row i, float32.

    Leading axes of `x` and `groups` are broadcast against each other: a token's k experts are
    `grouped_linear(x[:, None], weights, experts)` with `x [T, D]` and `experts [T, k]`. Inputs are rounded as by
    `ops.linear` for few rows, however many there are: an answer should not depend on its batch.

    Args:
        x: the rows.
        weights: E matrices `[F, D]`, as an array or quantised.
        groups: 0 to E - 1, of each row. A row of any other group gives zeros.

    Raises:
        InvalidParameterError: for arrays that do not fit each other, or groups that are not integers.
    """

    def add_group(y: Float[Array, "*B F"], group: tuple[Int[Array, ""], Any]) -> tuple[Float[Array, "*B F"], None]:
        index, weight = group
        return jnp.where((groups == index)[..., None], linear.reference(x, weight), y), None

    E, F, _ = weights.shape
    zeros = jnp.zeros((*jnp.broadcast_shapes(x.shape[:-1], groups.shape), F), jnp.float32)
    return jax.lax.scan(add_group, zeros, (jnp.arange(E), weights))[0]


grouped_linear.examples = [
    Example((float32(tokens, 1, 2048), bfloat16(128, 1536, 2048), int32(tokens, 8)), label=label)
    for tokens, label in ((1, "1 token"), (512, "512 tokens"))
]


def flat_rows(x: Float[Array, "*#B D"], groups: Int[Array, "*#B"]) -> tuple[Float[Array, "R D"], Int[Array, "R"]]:
    """Rows and their groups, one after the other."""
    leading = jnp.broadcast_shapes(x.shape[:-1], groups.shape)
    rows = jnp.broadcast_to(x, (*leading, x.shape[-1]))
    return rows.reshape(math.prod(leading), x.shape[-1]), jnp.broadcast_to(groups, leading).reshape(-1)


def _is_array(x: Any, weights: Any, groups: Any) -> bool:
    return not isinstance(weights, QuantizedWeight)


@grouped_linear.implementation("ragged_dot", platforms=("gpu", "tpu"), single_device=True, accepts=_is_array)
def _grouped_linear_ragged_dot(
    x: Float[Array, "*#B D"], weights: Float[Array, "E F D"], groups: Int[Array, "*#B"]
) -> Float[Array, "*B F"]:
    # Not on a CPU, where JAX multiplies every row by every matrix.
    rows, of = flat_rows(x, groups)
    known = (of >= 0) & (of < weights.shape[0])
    of = jnp.where(known, of, weights.shape[0])  # after all groups
    order = jnp.argsort(of)
    y = jax.lax.ragged_dot(
        rows[order].astype(weights.dtype),
        weights.swapaxes(1, 2),
        jnp.bincount(of, length=weights.shape[0] + 1)[:-1].astype(jnp.int32),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    y = jnp.where(known[:, None], y[jnp.argsort(order)], 0.0)
    return y.reshape(*jnp.broadcast_shapes(x.shape[:-1], groups.shape), weights.shape[1])


def _are_few(x: Any, weights: Any, groups: Any) -> bool:
    # A copy of a matrix costs as much as its product, so that half as many rows as groups are the break-even point.
    return 2 * math.prod(jnp.broadcast_shapes(x.shape[:-1], groups.shape)) <= weights.shape[0]


@grouped_linear.implementation("gathered", single_device=True, faster=_are_few)
def _grouped_linear_gathered(
    x: Float[Array, "*#B D"], weights: Stack, groups: Int[Array, "*#B"]
) -> Float[Array, "*B F"]:
    # Few rows: only the matrices of their groups are read.
    rows, of = flat_rows(x, groups)
    y = jax.vmap(linear.reference)(rows, jax.tree.map(lambda part: jnp.asarray(part).at[of].get(mode="clip"), weights))
    y = jnp.where(((of >= 0) & (of < weights.shape[0]))[:, None], y, 0.0)
    return y.reshape(*jnp.broadcast_shapes(x.shape[:-1], groups.shape), weights.shape[1])
