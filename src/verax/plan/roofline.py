"""Least time of a program on devices: its products at their full rate, or its bytes at the full bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from verax.plan.devices import Device
from verax.plan.work import Work

__all__ = ["Bound", "bound", "described"]


class Bound(NamedTuple):
    """Least seconds of a program, by what limits it. All of it may overlap, so that the largest counts.

    Attributes:
        compute: seconds of the products.
        memory: seconds of the bytes that cross the memory of a device.
        links: seconds of the bytes between devices.
    """

    compute: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        """Least seconds."""
        return max(self)

    @property
    def limit(self) -> str:
        """Name of the part that takes longest."""
        return max(zip(self, self._fields, strict=True))[1]


def bound(
    work: Work, device: Device, devices: int = 1, *, shares: Sequence[float] | None = None, linked: float = 0.0
) -> Bound:
    """Least time of a program.

    Args:
        work: its work, on all devices together.
        device: kind of device.
        devices: number of devices, among which products are divided evenly.
        shares: share of each array of the arguments that one device holds; None for whole arrays.
        linked: bytes that each device sends to others.
    """
    compute = sum(flops / device.rate(dtype) for dtype, flops in work.flops.items()) / devices
    memory = work.bytes_moved(shares) / device.bandwidth
    return Bound(compute, memory, linked / device.links if device.links else 0.0)


def described(
    name: str, work: Work, least: Bound, shares: Sequence[float] | None = None, *, times: int = 1
) -> dict[str, Any]:
    """A program's work and least time, for JSON.

    Args:
        name: what the program does.
        work: work of one call.
        least: least time of one call.
        shares: as in `bound`.
        times: number of calls.
    """
    return {
        "name": name,
        "times": times,
        "flops": work.total_flops,
        "flops_by_dtype": dict(work.flops),
        "bytes_per_device": work.bytes_moved(shares),
        "at_least_s": least.seconds,
        "limit": least.limit,
        "parts_s": least._asdict(),
        "uncounted": list(work.uncounted),
    }
