"""Frame of every benchmark: a check for noise before the timing, the machine's limits, peak memory."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from verax import machine
from verax.bench.lines import noise_line

if TYPE_CHECKING:
    from verax.checkpoint import Checkpoint

__all__ = ["Benchmark", "limit_seconds", "measure_noise", "product_weights"]

BUSY_SPREAD = 0.25
"""P10-P90 over the median of a short loop, above which the machine is called busy: a quiet one has a few percent."""

BUSY_SHARE = 0.15
"""The share of the processor that others use, above which the machine is called busy."""

PIECES, PIECE = 100, 1 << 17
"""Pieces of the loop, and sines in each: they stay in a cache, and take a millisecond or two on one core."""

LISTEN = 0.3
"""Seconds without work of this process, in which all use of the processor is by others."""

_log = logging.getLogger("verax.bench")


class Benchmark:
    """One benchmark from its beginning to its result: created before any work, `result` called after it.

    A machine that is busy at the beginning is reported in the log and in the result.
    """

    def __init__(self, kind: str):
        self._kind = kind
        self._noise = measure_noise()
        if self._noise["busy"]:
            _log.warning("%s", noise_line(self._noise))

    @cached_property
    def limits(self) -> dict[str, float]:
        """Limits of the machine, measured on first use."""
        return machine.measure_machine()

    @cached_property
    def read(self) -> Callable[[], object]:
        """Call that reads `machine.READ_BYTES` once: a side beside others whose limit is the memory."""
        return machine.streaming_read()

    def against_limit(
        self, seconds: float, *, bytes_moved: float, flops: float, dtype: str, bandwidth: float | None = None
    ) -> dict[str, float]:
        """Work of a run of our side, and its shortest time at the machine's limits (`limit_seconds`).

        Args:
            bandwidth: bytes per second, where it was measured in turn with the run.
        """
        limits = self.limits if bandwidth is None else self.limits | {"memory_bandwidth_gb_per_s": bandwidth / 1e9}
        limit = limit_seconds(limits, bytes_moved=bytes_moved, flops=flops, dtype=dtype)
        return {
            "bytes_moved": bytes_moved,
            "flops": flops,
            "gb_per_s": bytes_moved / seconds / 1e9,
            "gflop_per_s": flops / seconds / 1e9,
            "limit_s": limit,
            "fraction_of_limit": limit / seconds,
        }

    def result(self, settings: Mapping[str, Any], versions: Mapping[str, Any] | None = None, **rest: Any) -> Any:
        """The result as JSON holds it: `kind`, `machine`, `measured`, `noise`, `memory`, `settings`, and the rest.

        Args:
            settings: what was asked for.
            versions: of the other sides, beside the fingerprint.
            rest: what was measured.
        """
        return {
            "kind": self._kind,
            "machine": {**machine.fingerprint(), **(versions or {})},
            "measured": self.limits,
            "noise": self._noise,
            "memory": {
                "host_peak_gb": _gigabytes(machine.peak_memory()),
                "device_peak_gb": _gigabytes(machine.peak_device_memory()),
            },
            "settings": dict(settings),
            **rest,
        }


def measure_noise() -> dict[str, Any]:
    """Noise of the machine: the spread of a short loop on all cores, and the processor's use by others.

    `spread` is P90 - P10 of the loop's pieces over their median; `others` the share of all cores that was busy in a
    moment without work of ours.
    """
    before = _cpu_seconds()
    time.sleep(LISTEN)
    spent, ours = (after - earlier for after, earlier in zip(_cpu_seconds(), before, strict=True))
    cores = machine.num_cores()
    others = min(1.0, max(0.0, spent - ours) / (LISTEN * cores))

    def loop(_: int) -> list[float]:
        x, out, taken = np.linspace(0, 1, PIECE), np.empty(PIECE), []
        for _ in range(PIECES):
            begin = time.perf_counter()
            np.sin(x, out)
            taken.append(time.perf_counter() - begin)
        return taken

    with ThreadPoolExecutor(cores) as pool:
        taken = np.concatenate(list(pool.map(loop, range(cores))))
    low, middle, high = np.percentile(taken, (10, 50, 90))
    spread = float((high - low) / middle)
    return {
        "spread": round(spread, 3),
        "others": round(others, 3),
        "busy": bool(spread > BUSY_SPREAD or others > BUSY_SHARE),
    }


def limit_seconds(limits: Mapping[str, float], *, bytes_moved: float, flops: float, dtype: str) -> float:
    """Seconds that the work takes at the measured limits: its bytes at the bandwidth, or its products if longer.

    Args:
        limits: of `machine.measure_machine`.
        bytes_moved: what has to be read and written, each once.
        flops: floating-point operations of the products.
        dtype: of the products, `float32` or `bfloat16`.
    """
    return max(
        bytes_moved / (1e9 * limits["memory_bandwidth_gb_per_s"]),
        flops / (1e9 * limits[f"matmul_{dtype}_gflop_per_s"]),
    )


def product_weights(opened: Checkpoint, *, tables: str | None = None) -> int:
    """Weights of a checkpoint that multiply a token: its matrices, but the tables that are looked up.

    Args:
        opened: the checkpoint.
        tables: what the names of the tables hold and no other name; None if there are none.
    """
    shapes = (opened.shape(name) for name in opened.names() if tables is None or tables not in name)
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def _cpu_seconds() -> tuple[float, float]:
    """Processor seconds spent by all processes since the start of the system, and by this one."""
    everyone, ours = psutil.cpu_times(), psutil.Process().cpu_times()
    return sum(everyone) - everyone.idle - getattr(everyone, "iowait", 0.0), ours.user + ours.system


def _gigabytes(count: int | None) -> float | None:
    return None if count is None else count / 1e9
