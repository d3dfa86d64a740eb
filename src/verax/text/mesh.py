"""Devices that share one language model."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from verax._compat import make_mesh
from verax.errors import InvalidParameterError
from verax.ops.division import TENSOR_AXIS

__all__ = ["tensor_mesh"]


def tensor_mesh(size: int, hosts: int = 1) -> Mesh | None:
    """The first devices of each host as a mesh whose axis divides a model; None if JAX has one device only.

    One of several devices is a mesh too: programs over it run the implementations for a single device.

    Args:
        size: number of devices.
        hosts: number of hosts, each of which has as many of them.

    Raises:
        InvalidParameterError: if there are fewer devices.
    """
    devices, each = jax.local_devices(), size // hosts
    if each > len(devices):
        platform, count = devices[0].platform, len(devices)
        wanted = f"{each} devices on each of {hosts} hosts" if hosts > 1 else f"{size} devices"
        raise InvalidParameterError(
            f"tensor_parallel_size: {size} needs {wanted}, and JAX has {count} of platform {platform}; to try it "
            f"on virtual devices of a CPU, start with JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={each} in the environment"
        )
    if hosts > 1:
        devices = [device for rank in range(hosts) for device in jax.local_devices(process_index=rank)[:each]]
    return None if len(devices) == 1 else make_mesh((size,), (TENSOR_AXIS,), devices[:size])
