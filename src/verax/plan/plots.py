"""Pictures of a plan as SVG text: memory by part as a bar, and the roofline of the device with the plan's programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verax.page import svg_style, svg_text
from verax.video.memory import format_bytes

__all__ = ["memory_bar", "roofline"]

EXTRA = "compare"
"""Extra that installs matplotlib."""

LIMIT = "#000000"


def memory_bar(plan: Mapping[str, Any]) -> str:
    """Bar of the memory of one device: weights by part, then the rest, and a line at the memory that there is."""
    parts = [(row["part"], row["precision"], row["per_device"]) for row in plan["weights"]]
    if plan["kind"] == "video":  # not all models are there at once
        parts = [(row["part"], row["precision"], plan["memory"].get(row["part"], 0)) for row in plan["weights"]]
    listed = {"weights", *(row["part"] for row in plan["weights"])}
    parts += [(name, "", size) for name, size in plan["memory"].items() if name not in listed]
    with svg_style(EXTRA) as plt:
        drawn, axes = plt.subplots(figsize=(11, 2.4), layout="constrained")
        at = 0.0
        for i, (name, precision, size) in enumerate(part for part in parts if part[2]):
            label = f"{' '.join(filter(None, (name, precision)))}, {format_bytes(size)}"
            axes.barh(0, size / 1e9, left=at, color=f"C{i}", edgecolor="white", label=label)
            at += size / 1e9
        memory = plan["device"]["memory"]
        axes.axvline(memory / 1e9, color=LIMIT, lw=1.5, label=f"memory, {format_bytes(memory)}")
        axes.set_yticks([])
        axes.set_xlim(0, 1.05 * max(at, memory / 1e9))
        axes.set_xlabel("GB")
        drawn.legend(loc="outside upper center", ncols=4, fontsize=8)
        return svg_text(drawn)


def roofline(plan: Mapping[str, Any]) -> str:
    """Rates of products over operations per byte: the device's limits, and each program on the limit that it meets."""
    device, devices = plan["device"], plan["settings"].get("devices", 1)
    programs = [
        (row, row["flops"] / row.get("devices", devices))
        for row in plan["programs"]
        if row["flops"] and row["bytes_per_device"]
    ]
    points = [(row["name"], flops / row["bytes_per_device"], flops / row["at_least_s"]) for row, flops in programs]
    ridges = [rate / device["bandwidth"] for rate in device["flops"].values()]
    low = min([at for _, at, _ in points] + ridges) / 4
    high = max([at for _, at, _ in points] + ridges) * 4
    with svg_style(EXTRA) as plt:
        drawn, axes = plt.subplots(figsize=(11, 4.6), layout="constrained")
        for rate in sorted(set(device["flops"].values())):
            dtypes = [dtype for dtype, one in device["flops"].items() if one == rate]
            ridge = rate / device["bandwidth"]
            xs = [low, ridge, high]
            ys = [min(rate, at * device["bandwidth"]) / 1e12 for at in xs]
            axes.plot(xs, ys, lw=1.5, color="#222" if "bfloat16" in dtypes else "#bbb", zorder=1)
            label = f"{', '.join(dtypes)}: {rate / 1e12:,.0f} TFLOP/s"
            axes.annotate(label, (high, rate / 1e12), ha="right", va="bottom", fontsize=8)
        for i, (name, at, rate) in enumerate(points):
            axes.plot([at], [rate / 1e12], "o", color=f"C{i}", label=name, zorder=2)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_xlabel(f"operations per byte of memory (bandwidth {device['bandwidth'] / 1e9:,.0f} GB/s)")
        axes.set_ylabel("TFLOP/s of a device, at most")
        axes.grid(alpha=0.3)
        drawn.legend(loc="outside upper center", ncols=2, fontsize=8)
        return svg_text(drawn)
