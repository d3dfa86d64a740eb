"""Compilation of a model's programs for devices that are not attached, as a part of its plan."""

from __future__ import annotations

from typing import Any

import jax

from verax import ops, progress
from verax.plan.compiled.compiler import Compiled, compile_lowered
from verax.plan.compiled.programs import programs_of
from verax.plan.compiled.topology import compiler_of, topology_mesh
from verax.plan.devices import Device
from verax.plan.model import Described

__all__ = ["compile_model"]


def compile_model(
    model: Described, device: Device, *, devices: int = 1, depth: int | None = None, **options: Any
) -> dict[str, Any]:
    """Compilation of a model's programs, as JSON holds it. Weights need not be there; it takes minutes.

    Args:
        model: the model.
        device: kind of device.
        devices: number of devices.
        depth: layers to compile; all if None.
        options: those of `programs.programs_of`.

    Raises:
        InvalidParameterError: for a device without a compiler, or an option out of range.
        MissingDependencyError: if the compiler of the device is not installed.
    """
    compiler = compiler_of(device)
    mesh = topology_mesh(device, devices)
    if model.kind == "text":
        options["devices"] = devices
    compiled: list[Compiled] = []
    with ops.use_target(device.platform, device.kind, device.memory, devices):
        programs = programs_of(model, device, mesh, depth=depth, **options)
        with progress.bar(f"compiling for {device.name}") as report:
            for i, program in enumerate(programs):
                report(i, len(programs), note=program.name)
                compiled.append(compile_lowered(program.name, program.lower(), compiler, f"{devices} x {device.name}"))
    return {
        "jax": jax.__version__,
        "compiler": compiler.version,
        "devices": devices,
        "depth": depth,
        "programs": [one.as_dict() for one in compiled],
        "fits": all(_fits(one, device) for one in compiled),
    }


def _fits(program: Compiled, device: Device) -> bool:
    """True if a program fits. XLA refuses one that does not fit on a TPU, and compiles it for a GPU."""
    return program.refused is None and (device.platform == "tpu" or program.needed <= device.memory)
