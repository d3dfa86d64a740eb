"""`ops.linear` with few rows and a weight in 8 or 4 bits by kernels for NVIDIA GPUs, `linear_kernel.py`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from verax.ops._target import ADA, AMPERE, has_compute_capability
from verax.ops.linear import linear
from verax.ops.quantized import QuantizedWeight

__all__: list[str] = []

MAX_ROWS = 64
"""Most rows of x. With more of them, writing the weight out in bfloat16 costs less than its product."""


def _accepts(x: Any, weight: Any, bias: Any = None) -> bool:
    if not isinstance(weight, QuantizedWeight) or len(weight.shape) != 2:
        return False
    rows = math.prod(x.shape[:-1])
    sizes = 0 < rows <= MAX_ROWS and weight.size_in % 32 == 0
    known = has_compute_capability(*ADA) if weight.is_float else has_compute_capability(AMPERE)
    return weight.order is None and not weight.rounds_inputs and sizes and known


@jax.custom_jvp
def _product(x: Float[Array, "M D"], weight: QuantizedWeight) -> Float[Array, "M F"]:
    from verax.ops.gpu.linear_kernel import product  # Pallas takes half a second to import

    return product(x, weight)


@_product.defjvp
def _product_jvp(primals: tuple[Array, Any], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    return _product(*primals), jax.jvp(linear.reference, primals, tangents)[1]


@linear.implementation("triton", platforms=("gpu",), single_device=True, accepts=_accepts, experimental=True)
def _linear_triton(
    x: Float[Array, "*B D"], weight: QuantizedWeight, bias: Float[Array, "F"] | None = None
) -> Float[Array, "*B F"]:
    y = _product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], weight.size_out)
    return y if bias is None else y + bias.astype(jnp.float32)
