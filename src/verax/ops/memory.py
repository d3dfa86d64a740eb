"""Operations that change no value but a program's memory: layers applied to blocks of tokens in turn, and arrays that a
compiler has to keep, where it would rather compute them again from their parts. And `HostMemory`, for arrays of CPU
devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Shaped

from verax.ops._dispatch import Example, float32, operation


@operation(fused=True)
def update_rows(function: Callable[..., Any], x: Shaped[Array, "B T *D"], *others: Shaped[Array, "_ T *_"]) -> Any:
    """`function(x, *others)`, an array or a tuple of arrays `[B, T, ...]`.

    If the first result has the shape and dtype of `x`, it may take the memory of `x`, which is copied if the program
    uses it later.

    Args:
        function: computes the results of each token from the inputs of this token alone.
        x: tokens.
        others: further inputs of each token, `[B, T, ...]`, or `[1, T, ...]` for all rows of the batch.
    """
    return function(x, *others)


update_rows.examples = [Example((jnp.tanh, float32(1, 4096, 1536)))]


ROWS = 1024
"""Most rows of a block. A product packs its weight again for each. Layers of Wan 1.3B take no longer in blocks of 765
or 1,020 rows than in one (Zen 4)."""


def _num_blocks(B: int, T: int) -> int:
    """Number of blocks of at most `ROWS` rows: one that divides T, if there is one up to a third above the least."""
    least = min(-(-B * T // ROWS), T)
    return next((n for n in range(least, least + least // 3 + 1) if T % n == 0), least)


def _has_several_blocks(function: object, x: Any, *others: Any) -> bool:
    return x.size > 0 and _num_blocks(*x.shape[:2]) > 1


@update_rows.implementation("blocks", platforms=("cpu",), single_device=True, faster=_has_several_blocks)
def _update_blocks(function: Callable[..., Any], x: Shaped[Array, "B T *D"], *others: Shaped[Array, "_ T *_"]) -> Any:
    T = x.shape[1]
    rows = -(-T // _num_blocks(*x.shape[:2]))
    shapes, structure = jax.tree.flatten(jax.eval_shape(function, x, *others))
    in_place = (shapes[0].shape, shapes[0].dtype) == (x.shape, x.dtype)

    def update(begin: Any, count: int, results: list[Array]) -> list[Array]:
        arrays = results[0] if in_place else x, *others
        block_results = function(*(lax.dynamic_slice_in_dim(array, begin, count, 1) for array in arrays))
        pairs = zip(results, jax.tree.leaves(block_results), strict=True)
        return [lax.dynamic_update_slice_in_dim(result, leaf, begin, 1) for result, leaf in pairs]

    # Other results begin with a number of x everywhere: XLA allocates those that begin with zeros before the first
    # layer of a model, for all layers.
    any_number = x[(0,) * x.ndim]
    fresh = [jnp.full(one.shape, any_number.astype(one.dtype)) for one in shapes[in_place:]]
    results = [x, *fresh] if in_place else fresh
    results = lax.fori_loop(0, T // rows, lambda i, results: update(i * rows, rows, results), results)
    if rest := T % rows:
        results = update(T - rest, rest, results)
    return jax.tree.unflatten(structure, results)


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


materialize.examples = [Example((float32(4, 1024),))]


ALIGNMENT = 64
"""Alignment in bytes. XLA copies an array on the host that is aligned to less."""

LARGE_PAGE = 1 << 21
"""Size of a large page in bytes, on x86-64 and on most ARM systems with Linux."""

CHUNK = 32 * LARGE_PAGE
"""Smallest size of a chunk in bytes."""

SMALL = 1 << 16
"""Bytes below which an array is allocated by itself. The large arrays of a chunk are freed together once their weights
are packed, and a norm next to them would keep all of it."""


class HostMemory:
    """Allocator of arrays, of which all but small ones lie side by side in chunks of large pages.

    The speed of a product is limited by the reading of its weight, and small pages slow that reading down. An array
    that is allocated by itself lies in large pages only in part, or not at all. The memory of a chunk is freed with
    the last of its arrays.
    """

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An uninitialised array."""
        size = math.prod(shape) * dtype.itemsize
        if size < SMALL:
            return np.empty(shape, dtype)
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _large_pages(max(size, CHUNK)), 0
        at = self._used
        self._used = -(-(at + size) // ALIGNMENT) * ALIGNMENT
        return self._chunk[at : at + size].view(dtype).reshape(shape)

    def copy(self, array: Any, dtype: np.dtype[Any]) -> np.ndarray:
        """A copy of `array` with the dtype `dtype`."""
        copy = self.empty(array.shape, dtype)
        copy[...] = array
        return copy

    def moved(self, array: jax.Array) -> jax.Array:
        """An array on the default device, a CPU, moved out of XLA's memory, which has small pages; others unchanged."""
        # An array that is put on a device by name is committed to it, for which programs would be compiled again.
        if isinstance(array, Tracer) or array.committed or next(iter(array.devices())).platform != "cpu":
            return array
        return jax.device_put(self.copy(np.asarray(array), array.dtype))


def _large_pages(size: int) -> np.ndarray:
    """Uninitialised uint8 array of `size` bytes that begins at the boundary of a large page.

    NumPy requests large pages of Linux for an allocation of this size. A page takes memory from its first write on.
    """
    memory = np.empty(size + LARGE_PAGE, np.uint8)
    begin = -memory.ctypes.data % LARGE_PAGE
    return memory[begin : begin + size]
