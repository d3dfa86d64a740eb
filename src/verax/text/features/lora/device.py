"""Adapters on the device: arrays of a fixed size, of which each slot is filled when a sequence needs its adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from verax import ops
from verax._compat import compiler_options
from verax.text.features.lora.layers import AdaptedLayers, write_adapter
from verax.text.features.lora.loader import LoadedAdapter
from verax.text.hosts.dispatch import Dispatch
from verax.text.hosts.group import Group

__all__ = ["DeviceAdapters"]


class DeviceAdapters:
    """Matrices of the adapters in use, and the program that replaces those of one slot.

    Args:
        layers: the layers.
        mesh: devices that the model is divided over; None for JAX's default device.
        group: hosts that share the model; None for one host. Rank 0 sends what it writes.
    """

    def __init__(self, layers: AdaptedLayers, mesh: Mesh | None = None, group: Group | None = None):
        self.layers = layers
        self._group = group
        shardings = None if mesh is None else tuple(NamedSharding(mesh, spec) for spec in layers.partitions)
        self.arrays = layers.new_arrays() if mesh is None else jax.jit(layers.new_arrays, out_shardings=shardings)()
        """Matrices of all slots, which a step takes behind the model's weights."""
        self._numbers: list[int | None] = [None] * layers.max_loras
        """Number of the adapter in each slot."""
        options = compiler_options(ops.target().platform)
        self._write: Any = jax.jit(write_adapter, donate_argnums=0, compiler_options=options, out_shardings=shardings)

    def place(self, adapter: LoadedAdapter, slot: int) -> None:
        """Write an adapter into a slot, unless it is there. Steps that were dispatched before see what was there."""
        if self._numbers[slot] != adapter.id:
            self._fill(adapter.matrices, slot)
            self._numbers[slot] = adapter.id

    def warm_up(self) -> None:
        """Compile the program, and run it with zeros."""
        self._fill({}, 0)

    def num_compiled(self) -> int:
        """Programs compiled so far; constant after `warm_up`."""
        return self._write._cache_size()

    def repeat(self, slot: np.ndarray, packed: np.ndarray) -> None:
        """Write what rank 0 has written into a slot, as its dispatch has it."""
        rows: list[np.ndarray] = []
        data, dtype, at = packed.view(np.uint8), np.dtype(self.layers.dtype), 0
        for shape in self._row_shapes():
            end = at + math.prod(shape) * dtype.itemsize
            rows.append(data[at:end].view(dtype).reshape(shape))
            at = end
        self.arrays = self._write(self.arrays, tuple(rows), slot[0])

    def _fill(self, matrices: Mapping[str, tuple[np.ndarray, np.ndarray]], slot: int) -> None:
        """Write matrices by layer, with zeros where there are none, and behind those of a smaller rank."""
        rows = [np.zeros(shape, self.layers.dtype) for shape in self._row_shapes()]
        for path, down, up in zip(self.layers.shapes, rows[::2], rows[1::2], strict=True):
            if path in matrices:
                a, b = matrices[path]
                down[: len(a)], up[:, : len(a)] = a, b
        if self._group is not None and self._group.leads:
            self._group.send(Dispatch.of("adapt", np.asarray([slot], np.int32), _packed(rows)))
        self.arrays = self._write(self.arrays, tuple(rows), np.int32(slot))

    def _row_shapes(self) -> Iterator[tuple[int, int]]:
        """Shapes of what is written into a slot: for each layer the matrix down to the rank and the one up from it."""
        for size_out, size_in in self.layers.shapes.values():
            yield self.layers.max_rank, size_in
            yield size_out, self.layers.max_rank


def _packed(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Bytes of arrays as int32, with zeros behind them up to a whole number."""
    data = np.concatenate([row.reshape(-1).view(np.uint8) for row in rows])
    return np.pad(data, (0, -len(data) % 4)).view(np.int32)
