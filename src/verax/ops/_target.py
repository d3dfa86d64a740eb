"""The device that programs are traced for: the local one, or one that is not attached to this machine."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import psutil

from verax.errors import InvalidParameterError

__all__ = ["PLATFORMS", "Target", "target", "use_target"]

PLATFORMS = ("cpu", "gpu", "tpu")
"""Names of platforms, as `jax.default_backend()` gives them."""

_chosen: contextvars.ContextVar[Target | None] = contextvars.ContextVar("verax_target", default=None)


@dataclass(frozen=True)
class Target:
    """A kind of device, as far as the choice of implementations and of sizes depends on it.

    Attributes:
        platform: one of `PLATFORMS`.
        device_kind: JAX's name of the device, such as `"NVIDIA H100 80GB HBM3"` or `"TPU v5 lite"`.
        memory: free bytes of one device; None if unknown.
        num_devices: devices that a program may span.
    """

    platform: str
    device_kind: str
    memory: int | None = None
    num_devices: int = 1


def target() -> Target:
    """The target of `use_target`, or else JAX's default device as it is now."""
    return _chosen.get() or _local_target()


@contextlib.contextmanager
def use_target(platform: str, device_kind: str = "", memory: int | None = None, num_devices: int = 1) -> Iterator[None]:
    """Trace programs for another device: `with use_target("tpu", "TPU v5 lite", 16 << 30): ...`.

    Args:
        platform: `"cpu"`, `"gpu"` or `"tpu"`.
        device_kind: JAX's name of the device.
        memory: free bytes of one device.
        num_devices: devices that a program may span.

    Raises:
        InvalidParameterError: for a platform that JAX does not have.
    """
    if platform not in PLATFORMS:
        raise InvalidParameterError(f"platform: expected one of {', '.join(PLATFORMS)}, got {platform!r}")
    token = _chosen.set(Target(platform, device_kind, memory, num_devices))
    try:
        yield
    finally:
        _chosen.reset(token)


def _local_target() -> Target:
    device, platform = jax.local_devices()[0], jax.default_backend()
    if platform == "cpu":
        memory = psutil.virtual_memory().available
    else:
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        memory = None if limit is None else limit - stats.get("bytes_in_use", 0)
    return Target(platform, device.device_kind, memory, jax.device_count())
