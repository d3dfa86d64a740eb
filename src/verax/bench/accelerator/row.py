"""Rows of the summary: what was measured, its work, and its share of the device's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from verax.plan.devices import DEVICES, Device

__all__ = ["Measured", "Row", "device_of", "share_of_limit"]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        case: what was measured.
        value: number in `unit`; None if it failed.
        unit: such as `"tokens/s"`.
        target: number that the project wants to reach on one H200, in `unit`; None without one.
        seconds: time of the work below.
        flops: floating-point operations of the products.
        bytes_moved: bytes that have to cross the memory; None if they are not counted.
        beside: factor by which verax is faster than each baseline.
        note: what a reader has to know.
        error: reason that there is no value, or that it is wrong.
    """

    case: str
    value: float | None = None
    unit: str = ""
    target: float | None = None
    seconds: float | None = None
    flops: float | None = None
    bytes_moved: float | None = None
    beside: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The row for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """Rows, and the whole result that they were taken from, as its own benchmark writes it."""

    rows: Sequence[Row]
    result: dict[str, Any] | None = None


def device_of(kind: str) -> Device | None:
    """Device of the table by JAX's name of it; None if the table has no such device."""
    return next((device for device in DEVICES.values() if device.kind == kind), None)


def share_of_limit(row: Mapping[str, Any], device: Device | None) -> float | None:
    """Least time of a row's work by the sheet of the device, over its time; None where one of them is not known."""
    if device is None or not row["seconds"] or not row["flops"]:
        return None
    least = max(row["flops"] / device.rate("bfloat16"), (row["bytes_moved"] or 0) / device.bandwidth)
    return least / row["seconds"]
