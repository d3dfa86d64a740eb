"""Table of devices: memory, bandwidth and rates of products by the makers' sheets; and least times on them.

Sheets count in powers of ten, and so does this table: a device has a little more memory than that, never less. Rates
are for dense products with sums in float32, at the highest clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verax.errors import InvalidParameterError
from verax.options import is_real

GB, T = 10**9, 10**12


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        kind: JAX's name of the device, by which implementations are chosen.
        memory: bytes.
        bandwidth: bytes per second between memory and chip.
        flops: operations per second of dense products, by dtype of their operands.
    """

    name: str
    kind: str
    platform: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    source: str

    def rate(self, dtype: str) -> float:
        """Operations per second of products of a dtype; bfloat16's where the sheet has no number of its own."""
        return self.flops.get(dtype, self.flops["bfloat16"])


def _device(
    platform: str, name: str, kind: str, memory: float, bandwidth: float, flops: tuple[float, ...], source: str
) -> Device:
    names = ("bfloat16", "int8", "float8_e4m3fn", "float32")
    rates = {dtype: rate * T for dtype, rate in zip(names, flops, strict=False) if rate}
    return Device(name, kind, platform, round(memory * GB), bandwidth * GB, rates, source)


_ADA = "NVIDIA Ada GPU architecture whitepaper 2.1, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper 1.1, appendix A"

# GB; GB/s; TFLOP/s in bfloat16, int8, float8 and float32 (0: none). Sheets of data-centre GPUs print rates with
# sparsity, which are twice these.
_ALL = (
    _device("gpu", "l4", "NVIDIA L4", 24, 300, (121, 242, 242, 30.3), "NVIDIA L4 data sheet"),
    _device("gpu", "l40s", "NVIDIA L40S", 48, 864, (362, 733, 733, 91.6), "NVIDIA L40S data sheet"),
    _device("gpu", "a100", "NVIDIA A100-SXM4-80GB", 80, 2039, (312, 624, 0, 19.5), "NVIDIA A100 data sheet, SXM 80 GB"),
    _device("gpu", "h100", "NVIDIA H100 80GB HBM3", 80, 3350, (989.5, 1979, 1979, 67), "NVIDIA H100 data sheet, SXM"),
    _device("gpu", "h200", "NVIDIA H200", 141, 4800, (989.5, 1979, 1979, 67), "NVIDIA H200 data sheet, SXM"),
    _device("gpu", "b200", "NVIDIA B200", 180, 8000, (2250, 4500, 4500, 80), "NVIDIA HGX and DGX B200 data sheets"),
    _device("gpu", "rtx4090", "NVIDIA GeForce RTX 4090", 24, 1008, (165.2, 660.6, 330.3, 82.6), _ADA),
    _device("gpu", "rtx5090", "NVIDIA GeForce RTX 5090", 32, 1792, (209.5, 838, 419, 104.8), _BLACKWELL),
    _device("tpu", "v4", "TPU v4", 32, 1228, (275, 275), "cloud.google.com/tpu/docs/v4"),
    _device("tpu", "v5e", "TPU v5 lite", 16, 819, (197, 393), "cloud.google.com/tpu/docs/v5e"),
    _device("tpu", "v5p", "TPU v5", 95, 2765, (459, 918), "cloud.google.com/tpu/docs/v5p"),
    _device("tpu", "v6e", "TPU v6 lite", 32, 1640, (918, 1836), "cloud.google.com/tpu/docs/v6e"),
)

DEVICES: Mapping[str, Device] = {device.name: device for device in _ALL}

_ALIASES = {"trillium": "v6e", "v5lite": "v5e", "v6lite": "v6e", "4090": "rtx4090", "5090": "rtx5090"}


def find_device(
    name: str, *, memory: float | None = None, bandwidth: float | None = None, flops: float | None = None
) -> Device:
    """A device of the table, or of this machine (`"cpu"`), with some numbers replaced. Others are described by them.

    The numbers of `"cpu"` that are not given are measured, which takes some seconds.

    `name`: a name in the table, an alias such as `"TPU v6 lite"`, `"cpu"`, or a name for a device that is described.
    `flops`: operations per second of dense bfloat16 products. Operations in other dtypes keep their proportion.
    """
    given = {"memory": memory, "bandwidth": bandwidth, "flops": flops}
    for what, value in given.items():
        if value is not None and not (is_real(value) and value > 0):
            raise InvalidParameterError(f"{what}: expected more than 0 and a finite number, got {value}")
    key = re.sub(r"nvidia|geforce|tpu|[^a-z0-9]", "", name.lower())
    known = DEVICES.get(_ALIASES.get(key, key))
    if key == "cpu":
        return _this_machine(memory, bandwidth, flops)
    if known is None:
        missing = [f"--{what}" for what, value in given.items() if value is None]
        if memory is None or bandwidth is None or flops is None:
            raise InvalidParameterError(
                f"device: {name!r} is not in the table, which has {', '.join(DEVICES)} and cpu; describe it with "
                f"{', '.join(missing)} as well"
            )
        return Device(name, "", "gpu", round(memory), bandwidth, {"bfloat16": flops}, "the command line")
    if not any(given.values()):
        return known
    scale = 1.0 if flops is None else flops / known.flops["bfloat16"]
    return replace(
        known,
        memory=round(memory or known.memory),
        bandwidth=bandwidth or known.bandwidth,
        flops={dtype: rate * scale for dtype, rate in known.flops.items()},
        source=f"{known.source}, changed on the command line",
    )


def _this_machine(memory: float | None, bandwidth: float | None, flops: float | None) -> Device:
    from verax import machine
    from verax.ops._target import host_memory

    rates, source = {"bfloat16": flops or 0.0}, "the command line"
    if bandwidth is None or flops is None:
        measured, source = machine.measure_machine(), "measured on this machine"
        bandwidth = bandwidth or measured["memory_bandwidth_gb_per_s"] * GB
        if flops is None:
            names = ("bfloat16", "float32")
            rates = {name: measured[f"matmul_{name}_gflop_per_s"] * GB for name in names}
    total = round(memory or host_memory().total)
    return Device("cpu", "cpu", "cpu", total, bandwidth, rates, source)


def program_row(
    name: str, device: Device, *, flops: Mapping[str, float], nbytes: float, devices: int = 1, times: int = 1
) -> dict[str, Any]:
    """Work and least time of a program, for JSON: its products at their full rate, or its bytes at full bandwidth.

    Args:
        flops: operations of its products on all devices together, by the dtype of their operands: two for each
            multiplication and addition.
        nbytes: bytes that cross the memory of one device.
        devices: number of devices, which divide the products evenly.
    """
    compute = sum(count / device.rate(dtype) for dtype, count in flops.items())
    parts = {"compute": compute / devices, "memory": nbytes / device.bandwidth}
    limit = max(parts, key=lambda part: parts[part])
    return {
        "name": name,
        "times": times,
        "flops": round(sum(flops.values())),
        "bytes_per_device": round(nbytes),
        "at_least_s": parts[limit],
        "limit": limit,
        "parts_s": parts,
    }
