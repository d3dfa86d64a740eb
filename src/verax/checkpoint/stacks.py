"""Stacks: weights `[E, F, D]`, such as a layer's experts, that many checkpoints have as single matrices.

A model's class declares `stacked_weights`: pairs of a pattern of a stack's key, and the replacements that turn it into
the keys of the matrices whose rows make up each of the E, with `{}` for the number of the expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from verax.checkpoint.checkpoint import Checkpoint
from verax.errors import CheckpointError
from verax.ops.quantized import INT4_ROWS, QuantizedWeight

__all__ = ["Patterns", "Stack", "StackedKeys", "split_quantized", "stacked_keys"]

Patterns = Iterable[tuple[str, tuple[str, ...]]]
"""A model's `stacked_weights`."""

StackedKeys = Sequence[tuple[str, ...]]
"""Keys of a stack's matrices: for each of the E, those that are stacked by rows."""


def stacked_keys(name: str, shape: tuple[int, ...], patterns: Patterns) -> StackedKeys | None:
    """Keys of the matrices of a stack of this shape; None for a weight whose name no pattern is found in."""
    for pattern, replacements in patterns:
        if re.search(pattern, name):
            keys = [re.sub(pattern, replacement, name) for replacement in replacements]
            return [tuple(key.format(i) for key in keys) for i in range(shape[0])]
    return None


class Stack:
    """A stack in a checkpoint: one array, or single matrices.

    Attributes:
        shape: `(E, F, D)`; `(E, ...)` of blocks, whose weights need not be matrices.
    """

    def __init__(self, checkpoint: Checkpoint, shape: tuple[int, ...], keys: str | StackedKeys):
        self.shape = shape
        self._checkpoint = checkpoint
        self._keys = keys

    def read(self, i: int) -> np.ndarray | QuantizedWeight:
        """Matrix `[F, D]` of expert i: a view of the file if it lies there in one piece, else a copy.

        Raises:
            CheckpointError: if its parts are quantised differently, with their keys.
        """
        if isinstance(self._keys, str):
            return jax.tree.map(lambda array: array[i], self._checkpoint.read(self._keys))
        parts = [self._checkpoint.read(key) for key in self._keys[i]]
        floats = [part for part in parts if isinstance(part, np.ndarray)]
        quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
        if len(floats) == len(parts):
            return floats[0] if len(floats) == 1 else np.concatenate(floats)
        if len(quantized) < len(parts) or len({self._checkpoint.kind(key) for key in self._keys[i]}) > 1:
            kinds = ", ".join(f"{key}: {self._checkpoint.kind(key)}" for key in self._keys[i])
            raise CheckpointError(f"{self._checkpoint.folder}: one expert in two precisions ({kinds})")
        return quantized[0] if len(quantized) == 1 else _concatenate(quantized)

    def release(self, i: int) -> None:
        """Give the memory of a matrix's pages back; of one array, after its last matrix."""
        if isinstance(self._keys, str):
            if i == self.shape[0] - 1:
                self._checkpoint.release(self._keys)
        else:
            for key in self._keys[i]:
                self._checkpoint.release(key)


def _concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    first, orders = parts[0], [part.order for part in parts]
    if any((order is None) != (first.order is None) for order in orders) or not all(
        first.order is None or np.array_equal(first.order, np.asarray(order)) for order in orders
    ):
        raise CheckpointError("the matrices of one expert take their inputs in several orders")
    zeros = None
    if any(part.zeros is not None for part in parts):
        points = [part.row_zeros() for part in parts]
        none = [jnp.zeros(part.row_scales().shape, jnp.int8) for part in parts]
        zeros = jnp.concatenate([each if each is not None else no for each, no in zip(points, none, strict=True)])
    if first.bits == 4 and (zeros is not None or any(part.size_out % INT4_ROWS for part in parts[:-1])):
        integers = jnp.concatenate([part.integers() for part in parts])
        scales = jnp.concatenate([part.row_scales() for part in parts])
        return QuantizedWeight.from_integers(integers, scales, first.bits, first.group_size, zeros, first.order)
    values, scales = map(jnp.concatenate, zip(*((part.values, part.scales) for part in parts), strict=True))
    rows = sum(part.size_out for part in parts)
    return QuantizedWeight(
        values, scales, rows, first.size_in, first.group_size, first.bits, zeros=zeros, order=first.order
    )


def split_quantized(stack: QuantizedWeight, parts: int) -> Iterator[list[QuantizedWeight]]:
    """Matrices of a quantised stack, each cut into `parts` of equal rows."""
    for i in range(stack.shape[0]):
        matrix: QuantizedWeight = jax.tree.map(lambda array, i=i: array[i], stack)
        pairs = zip(jnp.split(matrix.integers(), parts), jnp.split(matrix.row_scales(), parts), strict=True)
        yield [QuantizedWeight.from_integers(*pair, matrix.bits, matrix.group_size) for pair in pairs]
