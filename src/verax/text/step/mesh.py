"""Devices of language models: a group for each replica."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from verax._compat import make_mesh
from verax.errors import InvalidParameterError
from verax.ops.division import TENSOR_AXIS

__all__ = ["placement_mesh", "tensor_meshes"]


def tensor_meshes(size: int, replicas: int = 1, hosts: int = 1) -> list[Mesh | None]:
    """The first devices in groups, each a mesh whose axis divides a model; None if JAX has one device only.

    One of several devices is a mesh too: programs over it run the implementations for a single device.

    Args:
        size: devices of a group.
        replicas: number of groups; 1 if there are several hosts.
        hosts: number of hosts, each of which has as many of the devices.

    Raises:
        InvalidParameterError: if there are fewer devices.
    """
    devices, each = jax.local_devices(), size // hosts
    needed = each * replicas
    if needed > len(devices):
        platform, count = devices[0].platform, len(devices)
        wanted = f"tensor_parallel_size: {size} needs {needed} devices"
        if hosts > 1:
            wanted += f" on each of {hosts} hosts"
        if replicas > 1:
            wanted = f"data_parallel_size: {replicas} replicas of tensor_parallel_size {size} need {needed} devices"
        raise InvalidParameterError(
            f"{wanted}, and JAX has {count} of platform {platform}; to try it on virtual devices of a CPU, start with "
            f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={needed} in the environment"
        )
    if hosts > 1:
        devices = [device for rank in range(hosts) for device in jax.local_devices(process_index=rank)[:each]]
        return [make_mesh((size,), (TENSOR_AXIS,), devices)]
    if len(devices) == 1:
        return [None]
    return [make_mesh((size,), (TENSOR_AXIS,), devices[i : i + size]) for i in range(0, needed, size)]


def placement_mesh(mesh: Mesh | None) -> Mesh | None:
    """The mesh that weights are placed on; None for JAX's default device alone, which needs none."""
    alone = mesh is not None and mesh.size == 1 and mesh.devices.flat[0] == jax.local_devices()[0]
    return None if alone else mesh
