"""The device that programs are traced for: the local one, or one that is not attached to this machine."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil

from verax.errors import InvalidParameterError

PLATFORMS = ("cpu", "gpu", "tpu")
"""Names of platforms, as `jax.default_backend()` gives them."""

_OTHER_NAMES = {"cuda": "gpu", "rocm": "gpu", "nvidia": "gpu", "amd": "gpu", "x86": "cpu", "arm": "cpu"}

_COMPUTE_CAPABILITIES = {
    "6.0": ("P100",),
    "7.0": ("V100",),
    "7.5": ("T4",),
    "8.0": ("A100",),
    "8.6": ("A10", "A10G", "A40", "RTX 3090"),
    "8.9": ("L4", "L40", "L40S", "RTX 4090"),
    "9.0": ("H100", "H200", "H20", "GH200"),
    "10.0": ("B200", "GB200"),
    "12.0": ("RTX 5090",),
}
"""Models in JAX's names of NVIDIA GPUs, by compute capability (developer.nvidia.com/cuda-gpus)."""

AMPERE = 8
"""Major compute capability from which cuDNN's attention and products of bfloat16 run."""

ADA = 8, 9
"""Compute capability from which Triton converts 8-bit floats."""

_chosen: contextvars.ContextVar[Target | None] = contextvars.ContextVar("verax_target", default=None)

target_key = jax.make_user_context()
"""Context whose value, the chosen target, is part of the key by which JAX keeps what it has traced."""


class DeviceMemory(NamedTuple):
    """Bytes of one device. `free`: bytes that nothing holds. `total`: bytes that JAX may use, those in use included."""

    free: int
    total: int


def _unknown(num_devices: int) -> DeviceMemory | None:
    return None


@dataclass(frozen=True)
class Target:
    """Kind of device, as far as the choice of implementations and of sizes depends on it.

    Attributes:
        platform: one of `PLATFORMS`.
        device_kind: JAX's name of the device, such as `"NVIDIA H100 80GB HBM3"` or `"TPU v5 lite"`.
        num_devices: devices that a program may span.
        compute_capability: an NVIDIA GPU's, such as `"9.0"`; empty if unknown, and for other devices.
        attached: True for this machine's own device.
        read_memory: function that returns `least_memory`.
    """

    platform: str
    device_kind: str
    num_devices: int = 1
    compute_capability: str = ""
    attached: bool = False
    read_memory: Callable[[int], DeviceMemory | None] = field(default=_unknown, repr=False, compare=False)

    @property
    def memory(self) -> DeviceMemory | None:
        """Bytes of one device, read again at each access; None if unknown."""
        return self.least_memory(1)

    def least_memory(self, num_devices: int) -> DeviceMemory | None:
        """Bytes of that one of the first devices which has the least free memory; None if one of them is unknown."""
        return self.read_memory(num_devices)


def target() -> Target:
    """Target of `use_target`, or else JAX's default device."""
    return _chosen.get() or _local_target()


def has_compute_capability(major: int, minor: int = 0) -> bool:
    """True if the target is an NVIDIA GPU of at least this compute capability; AMD's read `gfx...`."""
    version = target().compute_capability.split(".")
    return all(part.isdigit() for part in version) and tuple(map(int, version)) >= (major, minor)


@contextlib.contextmanager
def use_target(
    platform: str,
    device_kind: str = "",
    memory: int | DeviceMemory | None = None,
    num_devices: int = 1,
    compute_capability: str | None = None,
) -> Iterator[None]:
    """Trace programs for another device: `with use_target("tpu", "TPU v5 lite", 16 << 30): ...`.

    Args:
        platform: `"cpu"`, `"gpu"` or `"tpu"`.
        device_kind: JAX's name of the device.
        memory: bytes of one device, all of them free; or a `DeviceMemory`.
        num_devices: devices that a program may span.
        compute_capability: of an NVIDIA GPU; found by `device_kind` if None.

    Raises:
        InvalidParameterError: for a platform that JAX does not have.
    """
    check_platform("platform", platform)
    if compute_capability is None:
        compute_capability = _compute_capability(device_kind) if platform == "gpu" else ""
    known = DeviceMemory(free=memory, total=memory) if isinstance(memory, int) else memory
    chosen = Target(platform, device_kind, num_devices, compute_capability, read_memory=lambda num_devices: known)
    token = _chosen.set(chosen)
    try:
        with target_key(chosen):
            yield
    finally:
        _chosen.reset(token)


def check_platform(what: str, platform: str) -> None:
    """Raise for a platform that JAX does not have. `what`: the beginning of the message: where the name was given."""
    if platform not in PLATFORMS:
        hint = f"; {other!r} covers it" if (other := _OTHER_NAMES.get(platform.lower())) else ""
        raise InvalidParameterError(f"{what}: expected one of {', '.join(PLATFORMS)}, got {platform!r}{hint}")


def _compute_capability(device_kind: str) -> str:
    for capability, models in _COMPUTE_CAPABILITIES.items():
        if re.search(rf"\b({'|'.join(models)})\b", device_kind):
            return capability
    return ""


@functools.cache  # dispatch reads it for every operation that is traced; JAX's devices stay for the process's life
def _local_target() -> Target:
    device = jax.local_devices()[0]
    return Target(
        jax.default_backend(),
        device.device_kind,
        jax.device_count(),
        str(getattr(device, "compute_capability", "")),
        attached=True,
        read_memory=_least_memory,
    )


def _least_memory(num_devices: int) -> DeviceMemory | None:
    memories = [_device_memory(device) for device in jax.local_devices()[:num_devices]]
    known = [memory for memory in memories if memory is not None]
    return min(known) if len(known) == len(memories) else None


def _device_memory(device: Any) -> DeviceMemory | None:
    if device.platform == "cpu":
        return host_memory()
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else DeviceMemory(free=limit - stats.get("bytes_in_use", 0), total=limit)


_GROUPS_OF_PROCESS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Control groups that this process is in, and all of them (man 7 cgroups): containers and services limit memory so."""


def host_memory() -> DeviceMemory:
    """Bytes of this machine, or of the control group with the least memory that this process is in."""
    machine = psutil.virtual_memory()
    memories = DeviceMemory(machine.available, machine.total), *_group_memories()
    return DeviceMemory(*map(min, zip(*memories, strict=True)))


def _group_memories() -> Iterator[DeviceMemory]:
    """Bytes of each control group that has a limit, by either version of the interface, and of the groups around it."""
    try:
        lines = _GROUPS_OF_PROCESS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers:
            root, names = _GROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = _GROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.strip("/")
        for folder in (group, *group.parents[: len(group.relative_to(root).parts)]):
            try:
                limit, used = (int((folder / name).read_text()) for name in names)
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # a container sees its own group as the root; "max" is no limit
                continue
            # Pages of files, which count as used, are given up when memory is short. Totals are of version 1.
            cached = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in ("active_file", "inactive_file"))
            yield DeviceMemory(max(0, limit - used + cached), limit)
