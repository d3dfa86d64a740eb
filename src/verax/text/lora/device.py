"""Adapters on the device: arrays of a fixed size, of which each slot is filled when a sequence needs its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from verax import ops
from verax._compat import compiler_options
from verax.text.lora.layers import AdaptedLayers, write_adapter
from verax.text.lora.loader import LoadedAdapter

__all__ = ["DeviceAdapters"]


class DeviceAdapters:
    """Matrices of the adapters in use, and the program that replaces those of one slot.

    Args:
        layers: the layers.
        mesh: devices that the model is divided over; None for JAX's default device.
    """

    def __init__(self, layers: AdaptedLayers, mesh: Mesh | None = None):
        self.layers = layers
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

    def _fill(self, matrices: Mapping[str, tuple[np.ndarray, np.ndarray]], slot: int) -> None:
        """Write matrices by layer, with zeros where there are none, and behind those of a smaller rank."""
        rank, dtype = self.layers.max_rank, self.layers.dtype
        rows: list[np.ndarray] = []
        for path, (size_out, size_in) in self.layers.shapes.items():
            down, up = np.zeros((rank, size_in), dtype), np.zeros((size_out, rank), dtype)
            if path in matrices:
                a, b = matrices[path]
                down[: len(a)], up[:, : len(a)] = a, b
            rows += [down, up]
        self.arrays = self._write(self.arrays, tuple(rows), np.int32(slot))
