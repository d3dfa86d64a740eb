"""NVIDIA GPUs as XLA's compiler sees them: limits of a multiprocessor, in the text of its GpuTargetConfig message.

Limits are those of the compute capability (CUDA C++ Programming Guide, table of technical specifications), numbers of
multiprocessors and of the cache those of the whitepaper of its architecture. Those of B200 are from XLA's own
description, those of RTX 5090 from a review (Linux Format, May 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from verax.plan.devices import Device

__all__ = ["GPU_SPECS", "GpuSpec", "target_config"]

KIB = 1 << 10


class GpuSpec(NamedTuple):
    """One GPU.

    Attributes:
        capability: compute capability, major and minor.
        multiprocessors: number of streaming multiprocessors.
        threads: resident threads of a multiprocessor at most.
        shared: bytes of shared memory of a multiprocessor; a block can have all but one KiB.
        cache: bytes of the L2 cache.
        clock: highest clock, GHz.
    """

    capability: tuple[int, int]
    multiprocessors: int
    threads: int
    shared: int
    cache: int
    clock: float


CUDA = "13.0.0"
"""Version of the driver and of the toolkit. XLA puts no kernel into a command buffer where it is not given."""

GPU_SPECS: Mapping[str, GpuSpec] = MappingProxyType(
    {
        "a100": GpuSpec((8, 0), 108, 2048, 164 * KIB, 40 * KIB**2, 1.41),
        "h100": GpuSpec((9, 0), 132, 2048, 228 * KIB, 50 * KIB**2, 1.98),
        "h200": GpuSpec((9, 0), 132, 2048, 228 * KIB, 50 * KIB**2, 1.98),
        "b200": GpuSpec((10, 0), 148, 2048, 228 * KIB, 132644864, 1.965),
        "l4": GpuSpec((8, 9), 58, 1536, 100 * KIB, 48 * KIB**2, 2.04),
        "rtx4090": GpuSpec((8, 9), 128, 1536, 100 * KIB, 72 * KIB**2, 2.52),
        "rtx5090": GpuSpec((12, 0), 170, 1536, 100 * KIB, 96 * KIB**2, 2.407),
    }
)
"""GPUs by their names in `plan.devices`."""


def target_config(device: Device) -> str:
    """The GpuTargetConfig of a GPU of `GPU_SPECS`, as text."""
    spec = GPU_SPECS[device.name]
    major, minor = spec.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {spec.shared}
  shared_memory_per_block_optin: {spec.shared - KIB}
  threads_per_core_limit: {spec.threads}
  core_count: {spec.multiprocessors}
  fpus_per_core: {64 if spec.capability == (8, 0) else 128}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {round(device.bandwidth)}
  l2_cache_size: {spec.cache}
  clock_rate_ghz: {spec.clock}
  device_memory_size: {device.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  driver_version: "{CUDA}"
  runtime_version: "{CUDA}"
  compile_time_toolkit_version: "{CUDA}"
}}
platform_name: "CUDA"
device_description_str: "{device.kind}"
"""
