"""Placement of a weight: copied to one device, or each part of it to a device of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from verax.checkpoint.host_memory import HostMemory
from verax.checkpoint.stacks import Stack
from verax.ops.division import Division, check_division, partition, repeated

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """Devices of a weight.

    Attributes:
        mesh: devices that it lies on; the default device if None.
        division: its division over them; None for a weight that is whole on each.
        times: times that each unit is there, for devices that share a unit.
    """

    mesh: Mesh | None = None
    division: Division | None = None
    times: int = 1

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in the file of a weight that has this shape on the mesh."""
        return (shape[0] // self.times, *shape[1:])

    def place_view(self, name: str, view: np.ndarray, dtype: np.dtype[Any], memory: HostMemory) -> jax.Array:
        """Copy a mapped array to its device, or each device's part to that device.

        A copy is needed: a CPU device uses an aligned array of the host as its own memory, in spite of
        `device_put(may_alias=False)` (jaxlib 0.10.2), and a view of the file changes with the file.
        """
        if self.mesh is None:
            array = jax.device_put(memory.copy(view, dtype))
        else:
            array = self._divided(name, view, dtype)
        # One transfer at a time: this bounds the memory in use, not only that which is kept.
        return jax.block_until_ready(array)

    def place(self, name: str, weight: Any) -> Any:
        """The arrays of a weight, none of which changes afterwards, on their device or devices."""
        if self.mesh is None:
            return jax.block_until_ready(jax.tree.map(jax.device_put, weight))
        return jax.block_until_ready(self._divided(name, weight))

    def place_stack(self, stack: Stack, dtype: np.dtype[Any]) -> jax.Array:
        """A stack of floats on the devices of the mesh, each of which reads its own part, matrix by matrix."""
        assert self.mesh is not None
        sharding = NamedSharding(self.mesh, partition(None, self.division))

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            experts, *part = index or (slice(None),)
            parts = []
            for i in range(*experts.indices(stack.shape[0])):
                parts.append(np.asarray(stack.read(i))[tuple(part)].astype(dtype))
                stack.release(i)
            return np.stack(parts)

        return jax.block_until_ready(jax.make_array_from_callback(stack.shape, sharding, read))

    def _divided(self, name: str, weight: Any, dtype: np.dtype[Any] | None = None) -> Any:
        assert self.mesh is not None
        mesh = self.mesh
        if self.division is not None:
            weight = repeated(name, weight, self.division, self.times)
            check_division(name, weight, self.division, mesh.size)

        def put(array: Any, spec: Any) -> jax.Array:
            host = np.asarray(array)
            divided = None if self.division is None or spec != self.division.spec else self.division
            order = None if divided is None else divided.order(len(host), mesh.size)

            def part(index: Any) -> np.ndarray:
                return np.array(host[index] if order is None else host[order[index[0]]], dtype or host.dtype)

            return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), part)

        return jax.tree.map(put, weight, partition(weight, self.division))
