"""Devices that are not attached: TPUs as libtpu describes them, NVIDIA GPUs as JAX's CUDA plugin does from their data.

JAX's other work stays on the CPU: only the compilers of the plugins are used, and a driver is not needed.

Limits of GPUs belong to the compute capability (CUDA C++ Programming Guide, table of technical specifications). Numbers
of multiprocessors and sizes of the cache are from the whitepaper of the architecture. B200's are from XLA's own
description, RTX 5090's from a review (Linux Format, May 2025).

`python -m tests.targets.topology` prints the compilers in the versions that match the installed JAX, one requirement a
line. `make test-targets` installs them outside of the environment, where JAX would look for their devices in each
process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.metadata import requires, version
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from verax import ops
from verax._compat import compiler_options
from verax._optional import require_optional
from verax.plan.devices import Device

jax.config.update("jax_platforms", "cpu")  # the plugins are compilers here; JAX must not look for their devices

KIB = 1 << 10


class GpuSpec(NamedTuple):
    """One GPU.

    Attributes:
        threads: resident threads of a multiprocessor at most.
        shared: bytes of shared memory of a multiprocessor; a block can have all but one KiB.
        cache: bytes of the L2 cache.
        clock: highest clock, GHz.
    """

    multiprocessors: int
    threads: int
    shared: int
    cache: int
    clock: float


CUDA = "13.0.0"
"""Version of the driver and of the toolkit. XLA puts no kernel into a command buffer where it is not given."""

GPU_SPECS: Mapping[str, GpuSpec] = MappingProxyType(
    {
        "a100": GpuSpec(108, 2048, 164 * KIB, 40 * KIB**2, 1.41),
        "h100": GpuSpec(132, 2048, 228 * KIB, 50 * KIB**2, 1.98),
        "h200": GpuSpec(132, 2048, 228 * KIB, 50 * KIB**2, 1.98),
        "b200": GpuSpec(148, 2048, 228 * KIB, 132644864, 1.965),
        "l4": GpuSpec(58, 1536, 100 * KIB, 48 * KIB**2, 2.04),
        "rtx4090": GpuSpec(128, 1536, 100 * KIB, 72 * KIB**2, 2.52),
        "rtx5090": GpuSpec(170, 1536, 100 * KIB, 96 * KIB**2, 2.407),
    }
)
"""GPUs by their names in `plan.devices`."""


def target_config(device: Device) -> str:
    """The GpuTargetConfig of a GPU of `GPU_SPECS`, as text."""
    spec = GPU_SPECS[device.name]
    with ops.use_target(device.platform, device.kind):
        major, minor = ops.target().compute_capability.split(".")
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {spec.shared}
  shared_memory_per_block_optin: {spec.shared - KIB}
  threads_per_core_limit: {spec.threads}
  core_count: {spec.multiprocessors}
  fpus_per_core: {64 if (major, minor) == ("8", "0") else 128}
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


_TWO_DIMENSIONS = ((1, "1x1"), (4, "2x2"), (8, "2x4"), (16, "4x4"))
_THREE_DIMENSIONS = ((1, "1x1x1"), (4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4"))

TPUS = {"v4": _THREE_DIMENSIONS, "v5e": _TWO_DIMENSIONS, "v5p": _THREE_DIMENSIONS, "v6e": _TWO_DIMENSIONS}
"""Topologies by TPU, the smallest first: chips, and libtpu's name of their arrangement."""

# Otherwise libtpu looks for the metadata of a Google Cloud machine, and refuses to load into a second process.
_LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Compiler(NamedTuple):
    """Compiler of a platform, in a plugin.

    Attributes:
        module: module of the plugin that holds it; `package` is its distribution.
        options: XLA options of each compilation.
        description: the device in the compiler's words, where it is not the compiler's own.
    """

    module: str
    package: str
    options: dict[str, str | bool]
    description: str = ""


_COMPILERS = {
    "tpu": Compiler("libtpu", "libtpu", {}),
    # CUB's kernels for sorting, and the tiles of Triton's products, are chosen by trying them on a device. Without one,
    # XLA sorts by itself, and products are calls of cuBLAS: with untried tiles, jaxlib 0.10 fails to compile Wan.
    "gpu": Compiler(
        "jax_plugins.xla_cuda13",
        "jax-cuda13-plugin",
        {"xla_gpu_deviceless_cub_mode": "DEVICELESS_CUB_DISABLED", "xla_gpu_enable_triton_gemm": False},
    ),
}


def compiler_of(device: Device) -> Compiler:
    """Compiler of the programs of a device of `TPUS` or `GPU_SPECS`.

    Raises:
        MissingDependencyError: if the plugin is not installed.
    """
    compiler = _COMPILERS[device.platform]
    require_optional(compiler.module)
    options = {**compiler_options(device.platform), **compiler.options}
    return compiler._replace(options=options, description=target_config(device) if device.platform == "gpu" else "")


def topology_mesh(device: Device, count: int) -> Mesh:
    """Mesh of devices that are not attached, with an axis `tensor`, in the smallest topology that has enough."""
    if device.platform == "tpu":
        for name, value in _LIBTPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        chips, shape = next(pair for pair in TPUS[device.name] if pair[0] >= count)
        # libtpu takes hosts to have four chips otherwise.
        bounds: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if chips == 1 else {}
        name = f"{device.name}:{shape}"
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds)
    else:
        config = compiler_of(device).description
        options = {"topology": f"1x1x{count}", "target_config": config}
        topology = topologies.get_topology_desc(platform="cuda", topology_name="", **options)
    return Mesh(np.array(topology.devices[:count]), ("tensor",), axis_types=(AxisType.Auto,))


def requirements() -> list[str]:
    """Requirements of the extras `plan-tpu` and `plan-cuda`, without their own requirements."""
    of_tpu = (re.match(r'(libtpu[^;\s]*).*extra == "tpu"', line) for line in requires("jax") or [])
    cuda = (f"{name}=={version('jax')}" for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt"))
    return [*(match[1] for match in of_tpu if match), *cuda, "nvidia-cuda-nvcc>=13"]


if __name__ == "__main__":
    print("\n".join(requirements()))
