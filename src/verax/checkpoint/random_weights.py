"""Random weights for a module of shapes, for comparisons and measurements without a checkpoint."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

__all__ = ["random_weight", "random_weights"]

DRAWN = 1_000_003
"""Most numbers that are drawn for an array. A larger array repeats them; the count is prime, so that rows differ."""

SPREAD = 0.3
"""Standard deviation of norms (around 1) and biases (around 0): one that is swapped or left out changes results."""


def random_weight(name: str, shape: Sequence[int], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """One weight, which depends on its name, its shape and the seed only.

    Matrices and kernels have the standard deviation `fan_in ** -0.5`, which keeps the scale of their inputs.

    Args:
        name: key of the weight. Vectors whose names end with `bias` are around 0, all others around 1.
        shape: `[out, in, ...]`; `[E, out, in]` of a stack of experts.
        dtype: dtype of the result.
        seed: seed of the random numbers.
    """
    count, summed = math.prod(shape), math.prod(shape[2:] if ".experts." in name else shape[1:])
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(min(count, DRAWN), np.float32)
    if summed > 1:
        values = noise * np.float32(summed**-0.5)
    else:
        values = np.float32(SPREAD) * noise + np.float32(not name.endswith("bias"))
    return np.resize(values.astype(dtype), shape)


def random_weights(abstract: nnx.Module, dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by name for a module of shapes; see `random_weight`."""
    leaves = nnx.to_flat_state(nnx.state(abstract))
    named = ((".".join(map(str, path)), leaf.shape) for path, leaf in leaves)
    return {name: random_weight(name, shape, dtype, seed) for name, shape in named}
