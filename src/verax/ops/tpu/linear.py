"""`ops.linear` with few rows and 8-bit integers in groups of inputs by a Pallas kernel for TPUs, `linear_kernel.py`."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from verax.ops._dispatch import differentiated_as
from verax.ops.linear import linear
from verax.ops.quantized import QuantizedWeight

__all__: list[str] = []

MAX_ROWS = 64
"""Most rows of x."""

MAX_SIZE_IN = 1 << 14
"""Most inputs, for which there is vector memory: 64 rows of them are 8 MiB in groups of 32, and a tile of the weight,
which is there twice, 2 MiB."""


def _accepts(x: Any, weight: Any, bias: Any = None) -> bool:
    if not isinstance(weight, QuantizedWeight) or len(weight.shape) != 2:
        return False
    grouped = weight.bits == 8 and weight.group_size is not None and not weight.is_float
    plain = weight.order is None and not weight.rounds_inputs
    return grouped and plain and 0 < math.prod(x.shape[:-1]) <= MAX_ROWS and weight.size_in <= MAX_SIZE_IN


@linear.implementation("pallas", platforms=("tpu",), single_device=True, accepts=_accepts, experimental=True)
def _linear_pallas(
    x: Float[Array, "*B D"], weight: QuantizedWeight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    from verax.ops.tpu.linear_kernel import grouped_product  # Pallas takes half a second to import

    y = differentiated_as(linear.reference, grouped_product, x.reshape(-1, x.shape[-1]), weight)
    y = y.reshape(*x.shape[:-1], weight.size_out)
    return y if bias is None else y + bias.astype(jnp.float32)
