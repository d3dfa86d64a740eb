"""Devices that share one language model."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

from verax._compat import make_mesh
from verax.errors import InvalidParameterError
from verax.ops.division import TENSOR_AXIS

__all__ = ["tensor_mesh"]


def tensor_mesh(size: int) -> Mesh | None:
    """The first devices as a mesh whose axis divides a model; None if JAX has one device only.

    One of several devices is a mesh too: programs over it run the implementations for a single device.

    Raises:
        InvalidParameterError: if there are fewer devices.
    """
    devices = jax.local_devices()
    if size > len(devices):
        platform, count = devices[0].platform, len(devices)
        raise InvalidParameterError(
            f"tensor_parallel_size: {size} needs {size} devices, and JAX has {count} of platform {platform}; to try it "
            f"on virtual devices of a CPU, start with JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={size} in the environment"
        )
    return None if len(devices) == 1 else make_mesh((size,), (TENSOR_AXIS,), devices[:size])
