"""Results as files that can be compared later (JSON) and read now (Markdown)."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, cast

from verax.bench.lines import noise_line
from verax.errors import InvalidParameterError
from verax.files import write_text

__all__ = ["markdown", "model_name", "write", "write_whole"]

PAGES = (
    "verax.bench.accelerator.page",
    "verax.bench.delta.page",
    "verax.bench.embed.page",
    "verax.bench.ops.page",
    "verax.bench.serve.page",
    "verax.bench.text.page",
    "verax.bench.text.quality_page",
    "verax.bench.video.page",
    "verax.bench.video.teacache_page",
)
"""Modules of all benchmarks' pages (see `Page`). A new benchmark adds its own here, and nothing else."""

PEAKS = {"host": "host_peak_gb", "device": "device_peak_gb"}

MACHINE_FACTS = (
    "cpu",
    "cores",
    "memory_gib",
    "platform",
    "devices",
    "python",
    "jax",
    "jaxlib",
    "torch",
    "diffusers",
    "transformers",
    "openvino",
    "nncf",
    "onnxruntime",
    "llama_cpp_python",
    "llama_server",
)
"""Facts of the machine that a page repeats."""


class Page(Protocol):
    """Module that renders one kind of result."""

    KIND: str
    """`kind` of its results."""

    def render(self, result: Mapping[str, Any]) -> list[str]:
        """Lines of Markdown."""
        ...

    def slug(self, result: Mapping[str, Any]) -> list[str]:
        """Parts of the file name that tell results of this kind apart."""
        ...


def _page(kind: str) -> Page:
    pages = {page.KIND: page for page in (cast("Page", importlib.import_module(name)) for name in PAGES)}
    if kind not in pages:
        raise InvalidParameterError(f"kind: expected one of {', '.join(sorted(pages))}, got {kind!r}")
    return pages[kind]


def markdown(result: Mapping[str, Any]) -> str:
    """Page of a benchmark's result.

    Raises:
        InvalidParameterError: if no module in `PAGES` renders this kind.
    """
    return "\n".join([*_page(result["kind"]).render(result), "", _about(result), ""])


def _about(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    limits = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.get("measured", {}).items())
    about = ", ".join(f"{name} {machine[name]}" for name in MACHINE_FACTS if name in machine)
    memory = result.get("memory", {})
    peaks = [f"{where} {memory[key]:.2f} GB" for where, key in PEAKS.items() if memory.get(key) is not None]
    parts = (
        f"Machine: {about}.",
        f"Measured: {limits}." if limits else "",
        f"Peak memory of the process: {', '.join(peaks)}." if peaks else "",
        noise_line(result["noise"]) if "noise" in result else "",
        result.get("date", ""),
    )
    return " ".join(part for part in parts if part)


def model_name(model: str) -> str:
    """The name of a checkpoint for a result: of a local one without its folders, of one on the hub its id."""
    return Path(model).resolve().name if Path(model).exists() else model


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write `NAME.json` and `NAME.md` into a folder, named by date, machine and workload; the JSON's path."""
    now = datetime.now(UTC)
    result = {**result, "date": now.strftime("%Y-%m-%d %H:%M UTC")}
    machine, kind = result["machine"], result["kind"]
    device = str(machine["cpu"] if machine["platform"] == "cpu" else machine["devices"][0])
    parts = [re.sub("[^a-z0-9]+", "-", part) for part in _page(kind).slug(result)]
    device = re.sub("[^a-z0-9]+", "-", device.lower()).strip("-")
    name = "-".join([f"{now:%Y-%m-%d}", device, f"{machine['cores']}c", kind, *parts])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_whole(path.with_suffix(".md"), markdown(result))
    return write_whole(path, json.dumps(result, indent=2) + "\n")


def write_whole(path: Path, text: str) -> Path:
    """Write a text file whole or not at all; its path."""
    write_text(path, text)
    return path
