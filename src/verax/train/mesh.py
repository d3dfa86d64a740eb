"""Training on several devices: batches are divided over all of them, weights and optimiser replicated or sharded.

Along the axis `data` weights are replicated. Along `fsdp` each device keeps a shard of every weight and of its
optimiser state (Zhao et al., 2023, arXiv:2304.11277). XLA adds the communication.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from verax._compat import make_mesh
from verax.errors import InvalidParameterError

__all__ = ["AXES", "batch_sharding", "fully_sharded", "parse_mesh", "state_sharding"]

AXES = ("data", "fsdp")


def parse_mesh(text: str | None) -> Mesh | None:
    """Mesh from a user's text, such as `data=4,fsdp=2`; None (one device) for None.

    Raises:
        InvalidParameterError: for an unknown axis, sizes that are not numbers, or too many devices.
    """
    if text is None:
        return None
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise InvalidParameterError(f"mesh={text!r}: expected sizes of axes such as data=4 or data=2,fsdp=4")
        sizes[name] = int(size)
    if (asked := math.prod(sizes.values())) > jax.device_count():
        raise InvalidParameterError(f"mesh={text!r} asks for {asked} devices; there are {jax.device_count()}")
    return make_mesh([sizes.get(name, 1) for name in AXES], AXES)


def fully_sharded(devices: int) -> Mesh | None:
    """Mesh of the given number of devices, which divide batches, weights and optimiser; None for one.

    Raises:
        InvalidParameterError: if fewer devices exist.
    """
    if devices > jax.device_count():
        raise InvalidParameterError(
            f"devices: {devices} are asked for, and there are {jax.device_count()}; JAX_NUM_CPU_DEVICES={devices} with "
            "JAX_PLATFORMS=cpu makes virtual ones, to try this out"
        )
    return None if devices == 1 else make_mesh([1, devices], AXES, jax.devices()[:devices])


def state_sharding(mesh: Mesh, state: Any) -> Any:
    """Sharding of each leaf: divided over `fsdp` along its first divisible axis, replicated if no axis is divisible."""
    parts = mesh.shape["fsdp"]

    def place(leaf: Any) -> NamedSharding:
        shape = jax.numpy.shape(leaf)
        axis = next((i for i, size in enumerate(shape) if size % parts == 0), None) if parts > 1 else None
        return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "fsdp"))

    return jax.tree.map(place, state)


def batch_sharding(mesh: Mesh, batch: Any, axis: int = 0) -> Any:
    """Sharding of a batch: this axis over all devices. Leaves that they do not divide are replicated."""
    every = mesh.size

    def place(leaf: Any) -> NamedSharding:
        shape = jax.numpy.shape(leaf)
        divides = len(shape) > axis and shape[axis] % every == 0
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, AXES) if divides else PartitionSpec())

    return jax.tree.map(place, batch)
