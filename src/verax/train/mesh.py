"""Training on several devices: batches divided over all of them, weights and optimiser whole on each or in parts.

Axes are called as usual: over `data` weights are repeated, over `fsdp` each device keeps a part of every weight and of
what the optimiser knows of it (Zhao et al., 2023, arXiv:2304.11277). XLA adds the communication.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from verax._compat import make_mesh
from verax.errors import InvalidParameterError

__all__ = ["AXES", "batch_sharding", "parse_mesh", "state_sharding"]

AXES = ("data", "fsdp")


def parse_mesh(text: str | None) -> Mesh | None:
    """A mesh of what a user writes: `data=4,fsdp=2`; None for None, one device.

    Raises:
        InvalidParameterError: for another axis, sizes that are no numbers, or more devices than there are.
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


def state_sharding(mesh: Mesh, state: Any) -> Any:
    """Where each leaf lies: divided over `fsdp` along its first axis that can be, whole otherwise."""
    parts = mesh.shape["fsdp"]

    def place(leaf: Any) -> NamedSharding:
        shape = jax.numpy.shape(leaf)
        axis = next((i for i, size in enumerate(shape) if size % parts == 0), None) if parts > 1 else None
        return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "fsdp"))

    return jax.tree.map(place, state)


def batch_sharding(mesh: Mesh, batch: Any) -> Any:
    """The first axis over all devices; what that does not divide (a seed, one long clip) is whole on each."""
    every = mesh.size

    def place(leaf: Any) -> NamedSharding:
        shape = jax.numpy.shape(leaf)
        divides = bool(shape) and shape[0] % every == 0
        return NamedSharding(mesh, PartitionSpec(AXES) if divides else PartitionSpec())

    return jax.tree.map(place, batch)
