"""This machine: its versions and devices, and its measured limits of memory bandwidth and matmul rate."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import psutil

from verax._compat import JAXLIB, compilation_cache

READ_BYTES = 1 << 29
"""Read once a repetition: far more than any cache holds."""

ROW = 8192
"""Numbers that an accelerator adds up at a time while it reads."""

MATMUL_SIZE, DEVICE_MATMUL_SIZE = 2048, 8192
"""Rows and columns of the products whose rate is measured: on a CPU, and on a device, which needs more to be filled."""

THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "XLA_FLAGS", "VERAX_CPU_LIBRARY")
"""Environment variables that decide on threads and code, recorded where they are set."""

GPU_FACTS = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fingerprint() -> dict[str, Any]:
    """Versions, processor, clocks, threads, memory and devices, for a reader who compares results."""
    platform_name = jax.default_backend()
    facts = {
        "verax": version("verax"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": JAXLIB,
        "flax": flax.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": num_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "memory_available_gib": round(psutil.virtual_memory().available / 2**30, 1),
        "platform": platform_name,
        "devices": [f"{device.device_kind} ({device})" for device in jax.devices()],
        "compilation_cache": _from_home(compilation_cache() or "off until a model is loaded"),
        "environment": {name: os.environ[name] for name in THREAD_SETTINGS if name in os.environ},
    }
    if clocks := _cpu_clocks():
        facts["cpu_mhz"] = clocks
    if platform_name == "gpu" and (gpus := _gpu_facts()):
        facts["gpus"] = gpus
    return facts


def _from_home(path: str) -> str:
    """Path with `~` for the user's home, which need not be in results."""
    try:
        return f"~/{Path(path).relative_to(Path.home())}"
    except (ValueError, RuntimeError):  # it lies elsewhere, or the user has no home
        return path


def _cpu_clocks() -> dict[str, int]:
    """MHz of the cores now, and at most; empty where the system does not report them."""
    try:
        clocks = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        clocks = None
    megahertz = {} if clocks is None else {"now": round(clocks.current), "most": round(clocks.max)}
    return {name: value for name, value in megahertz.items() if value}


def _gpu_facts() -> list[dict[str, str]]:
    """Fields of each NVIDIA GPU, as nvidia-smi prints them; empty where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        command = [program, f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(GPU_FACTS, map(str.strip, line.split(",")), strict=False)) for line in lines]


def measure_machine() -> dict[str, float]:
    """The limits that results are set against."""
    return {
        "memory_bandwidth_gb_per_s": round(measure_bandwidth() / 1e9, 1),
        "matmul_float32_gflop_per_s": round(_matmul_rate(jnp.float32) / 1e9),
        "matmul_bfloat16_gflop_per_s": round(_matmul_rate(jnp.bfloat16) / 1e9),
    }


def measure_bandwidth(repetitions: int = 8) -> float:
    """Bytes per second of a `streaming_read`: the best of `repetitions`."""
    return READ_BYTES / _best(streaming_read(), repetitions)


def streaming_read() -> Callable[[], object]:
    """A call that reads `READ_BYTES` of the device's memory once.

    On a CPU with one NumPy reduction a core (a maximum or a dot product, which is faster here); elsewhere with a
    compiled sum.
    """
    if jax.default_backend() != "cpu":
        # By rows: for a single sum, XLA:GPU reads at a third of the bandwidth.
        data = jnp.ones((READ_BYTES // 4 // ROW, ROW), jnp.float32)
        total = jax.jit(partial(jnp.sum, axis=1))
        return lambda: total(data).block_until_ready()
    parts = np.array_split(np.ones(READ_BYTES // 4, np.float32), num_cores())
    pool = ThreadPoolExecutor(num_cores())
    ways = [lambda way=way: list(pool.map(way, parts)) for way in (np.max, lambda part: np.dot(part, part))]
    return min(ways, key=lambda way: _best(way, 3))


def _matmul_rate(dtype: Any) -> float:
    """Operations per second of a square product with float32 accumulation."""
    size = MATMUL_SIZE if jax.default_backend() == "cpu" else DEVICE_MATMUL_SIZE
    # Random: a GPU multiplies ones or zeros at a higher clock.
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
    product = jax.jit(lambda x, y: jnp.einsum("ij,kj->ik", x, y, preferred_element_type=jnp.float32))
    return 2 * size**3 / _best(lambda: product(a, a).block_until_ready(), 5)


def _best(run: Any, repetitions: int) -> float:
    run()  # compiles, touches the pages
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def peak_memory() -> int | None:
    """Most bytes of host memory that this process has held; None where the system does not report it."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def return_freed_memory() -> None:
    """Give freed memory back to the system: glibc keeps what loading and compiling freed, some hundred megabytes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def peak_device_memory() -> int | None:
    """Most bytes that this process has held on the first JAX device; None on a CPU, or if the device reports none."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


@contextlib.contextmanager
def peak_growth() -> Iterator[Callable[[], int | None]]:
    """Peak of this process's memory while the block runs, in bytes beyond what it held before; None unless on Linux.

    The context's value is a function that returns the number, to be called after the block. The kernel keeps the peak
    (`VmHWM`), so it does not depend on when this process gets to run. Pages of mapped files that the kernel takes back
    meanwhile, as it does when memory is short, count as not held before. Memory that other threads free meanwhile does
    lower the number: a process has one peak.
    """
    grown: list[int] = []
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is held now (man 5 proc)
        before = _memory_status()
    except OSError:
        before = None
    yield lambda: grown[0] if grown else None
    if before is not None:
        after = _memory_status()
        taken_back = max(0, before["RssFile"] - after["RssFile"])
        grown.append(after["VmHWM"] - (before["VmHWM"] - taken_back))


def _memory_status() -> dict[str, int]:
    """Peak (`VmHWM`) and pages of mapped files (`RssFile`) of this process, in bytes."""
    fields = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in fields if name in ("VmHWM", "RssFile")}


def cpu_name() -> str:
    """Name of the processor; `"unknown"` where the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
